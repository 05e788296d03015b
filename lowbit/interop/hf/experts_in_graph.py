"""`lowbit.interop.hf.frozen_experts.product` for graphs of torch.compile, which take it whole. The import brings the
compiler along, so only traced code imports this module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.interop.hf import frozen_experts
from lowbit.linear.frozen.whole import taken_whole


@taken_whole
def product(x: Tensor, weight: Any, offs: Tensor) -> Tensor:
    return frozen_experts.product(x, weight, offs)
