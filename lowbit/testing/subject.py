"""`Subject`: how the test class that inherits a contract makes its tensor, and what the tensor can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.testing.comparison import values


class Subject:
    """The base of every contract. Override `encode`, and the attributes that differ.

    A contract that starts processes pickles the test object, so what a test stores on itself must be picklable.
    """

    trainable: bool = False
    """Gradients reach the weight. If False, the weight must get none."""
    row_step: int = 1
    """Dimension 0 may be cut at multiples of this number, a divisor of 8."""
    column_step: int = 1
    """The last dimension may be cut at multiples of this number; 0: not at all."""
    casts_values: bool = True
    """`to(dtype)` changes the dtype of the values, but not a stored bit."""
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    """Dtypes of values that the tensor takes and keeps as its own."""
    shapes: ClassVar[Sequence[tuple[int, int]]] = (
        *((24, 96), (24, 100), (7, 101)),
        *((1, 33), (1, 1), (0, 96)),
    )
    """Shapes [N, K] of weights: even, to be padded, odd and prime, one row, one element, no rows."""
    fsdp_rows: ClassVar[Sequence[int]] = (64, 33, 1)
    """Rows that FSDP2 shards over two processes: even, uneven, one process without any."""
    tolerance: float = 2e-6
    """Largest relative error of a product in float32, against float64."""
    gradient_tolerance: float = 2e-6
    """Largest relative error of gradients. Products that quantize the gradient need more."""
    parallel_tolerance: float = 1e-5
    """Largest relative error of a tensor-parallel block against one process. An activation whose parts have scales of
    their own needs more."""

    def encode(self, weight: Tensor) -> Any:
        """The tensor under test, made from high-precision values [N, K]."""
        raise NotImplementedError(f"{type(self).__name__} must override encode(weight)")

    def make(self, shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        return self.encode(values(shape, seed, dtype))

    def values_of(self, t: Any) -> Tensor:
        """The values with which slicing commutes: `dequantize()`, or the high-precision weight that `t` keeps."""
        return t.dequantize()

    def rounded_input(self, x: Tensor) -> Tensor:
        """x as the product rounds it: override this method if the product quantizes its input."""
        return x

    def passes(self, weight: Any) -> Tensor:
        """True for each element of a trainable weight to which the gradient passes straight through."""
        return torch.ones(weight.shape, dtype=torch.bool)

    def check(self, t: Any) -> None:
        """Raise AssertionError if the parts of `t` do not fit together. Contracts check every piece of a tensor."""
