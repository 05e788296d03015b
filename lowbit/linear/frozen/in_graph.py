"""`linear`, `grouped_linear` and `chosen_product` of a graph of torch.compile, which takes them whole.

A weight that is made inside the graph (`lowbit.layers.frozen`) has no attributes while torch.compile traces Python.
These functions run later, when the operations of the graph are traced, and decide then. Traced code imports this module
itself, since the import brings the compiler along. The digest of the sources is in the key of the weight.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.linear.frozen import experts
from lowbit.linear.frozen.frozen_linear import any_linear
from lowbit.linear.frozen.whole import taken_whole


@taken_whole
def linear(x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return any_linear(x, weight, bias, residual)


@taken_whole
def grouped_linear(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    return experts.grouped_product(x, weight, offsets)


@taken_whole
def chosen_product(x: Tensor, weight: Any, ids: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return experts.chosen_product(x, weight, ids, bias, gated)
