"""`linear` and `grouped_linear` of a graph of torch.compile, which takes them whole.

A weight that is made inside the graph (`lowbit.layers.frozen`) has no attributes while torch.compile traces Python.
These functions run later, when the operations of the graph are traced, and decide then. Traced code imports this module
itself, since the import brings the compiler along.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from lowbit.linear.frozen.experts import grouped_product
from lowbit.linear.frozen.frozen_linear import any_linear


@torch.compiler.allow_in_graph
def linear(x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return any_linear(x, weight, bias, residual)


@torch.compiler.allow_in_graph
def grouped_linear(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    return grouped_product(x, weight, offsets)


for _function in (linear, grouped_linear):
    # torch keeps no graph on disk that calls a function which it does not know. The digest of the sources is in the key
    # of the weight.
    _name = f"{_function.__module__}.{_function.__name__}"
    torch._inductor.config.unsafe_marked_cacheable_functions[_name] = "1"
