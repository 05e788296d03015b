"""A row of the list of products, and what its functions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Weight = Any
"""A LowbitTensor [N, K] with the attributes of an AffineTensor. Both import this package, so it does not name them."""
Condition = Callable[[Tensor, Weight, Tensor | None], bool]
Implementation = Callable[..., Tensor]
"""(x, weight, bias) -> product, or (x, weight, bias, residual) -> product + residual."""


class Row(NamedTuple):
    """One row of the list."""

    name: str
    """The name in reports."""
    condition: Condition
    implementation: Implementation
    takes_residual: bool = False
    source: str = ""
    """Names the code of a registration for the caches of compiled graphs; empty for built-in rows."""
