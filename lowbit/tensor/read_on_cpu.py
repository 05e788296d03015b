"""How an AffineTensor gives its values for products and lookups on a CPU, and the shortest way there.

Through one kernel (`lowbit.tensor.cpu_values`), where PyTorch took 25 operations a weight. A linear of a model of 128
columns takes 6 us in float32, of which Python may add half of one before decoding in low bits is slower by a tenth. So
a weight remembers the shape of the activation that `plain_linear` was chosen for last. Where the next product is alike,
and nothing is on that has to see it (autograd, autocast, a compiler, or a tracer), its values are dequantized
and multiplied right away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from lowbit import products, tracer
from lowbit.scheme import crop
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.cpu_values import layout_of

if TYPE_CHECKING:
    from lowbit_kernels.dequantize_cpu import Dequantizer


class ReadOnCpu:
    """What an AffineTensor has of this module."""

    caches: ClassVar[tuple[str, ...]] = ("_expected", "_looked_up")

    _expected: ExpectedProduct | None = None
    _looked_up: Dequantizer | None = None

    def _dequantize_on_cpu(self) -> Tensor | None:
        """`dequantize()` of a tensor that isn't transposed or flat; None where the kernel doesn't serve."""
        weight = cast(Any, self)
        layout = layout_of(weight)
        if layout is None:
            return None
        values = layout.dequantize(weight.codes, weight.scale, weight.zero_point)
        return _cropped(values.to(weight.dtype), weight)

    def _operand(self, x: Tensor) -> Tensor:
        """In memory that this thread's next product writes to, unless autograd may keep it."""
        weight = cast(Any, self)
        special = weight.transposed or weight.flat_from or x.requires_grad
        if x.dtype is weight.dtype is torch.float32 and not special:
            layout = layout_of(weight)
            if layout is not None:
                values = layout.kept(weight.codes, weight.scale, weight.zero_point)
                return _cropped(values, weight)
        return LowbitTensor._operand(weight, x)

    def _expect(self, shape: torch.Size, version: int) -> None:
        if torch.compiler.is_compiling():
            return
        if self._expected is None or self._expected.is_outdated(shape, version):
            layout = None if cast(Any, self).activation is not None else _layout_of_plain(self)
            self._expected = None if layout is None else ExpectedProduct(layout, shape, version)


class ExpectedProduct:
    """A product of activations of `shape` with a weight laid out as `layout`, chosen at a `products.version`."""

    __slots__ = ("layout", "shape", "version")

    def __init__(self, layout: Dequantizer, shape: torch.Size, version: int) -> None:
        self.layout = layout
        self.shape = shape
        self.version = version

    def is_outdated(self, shape: torch.Size, version: int) -> bool:
        return self.shape != shape or self.version != version

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a weight finds its own."""


def _cropped(values: Tensor, weight: Any) -> Tensor:
    """Rows [N, Kp] of the kernel in the weight's shape, without the padding."""
    shape = weight.shape
    if values.shape == shape:
        return values
    return crop(values.view(weight.spec.padded_shape(shape)), shape)


def _layout_of_plain(weight: Any) -> Dequantizer | None:
    """The kernel for a float32 weight without padding, stored as it is; None for others."""
    if weight.transposed or weight.flat_from or weight.dtype is not torch.float32:
        return None
    layout = layout_of(weight)
    return None if layout is None or layout.shape != weight.shape else layout


# names of this module: reading an attribute takes as long as some of these calls
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_FLOAT32, _INT64 = torch.float32, torch.int64


def expected_product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear(x, weight, bias)` if it is what the weight expects, else None."""
    if _is_compiling() or bias is not None or type(x) is not Tensor:
        return None
    expected = weight._expected
    if (
        expected is None
        or x.shape != expected.shape
        or x.dtype is not _FLOAT32
        or expected.version != products.version
        or tracer.active is not None
        or not x.is_cpu
        or _is_grad_enabled()
        or _is_autocast_enabled("cpu")
        or _transforms()
        or _modes()
        or _tracing_state() is not None
    ):
        return None
    values_t = expected.layout.kept_transposed(weight.codes, weight.scale, weight.zero_point)
    return None if values_t is None else x @ values_t


def expected_rows(
    index: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    """`F.embedding(...)` of a float32 weight by one kernel; None where it doesn't serve, or refuses an index."""
    if _is_compiling() or max_norm is not None or type(index) is not Tensor:
        return None
    layout = weight._looked_up
    if layout is None:
        with torch._C.DisableTorchFunctionSubclass():
            layout = weight._looked_up = _layout_of_plain(weight)
    if (
        layout is None
        or index.dtype is not _INT64
        or not index.is_contiguous()
        or not index.is_cpu
        or (padding_idx is not None and not -layout.shape[0] <= padding_idx < layout.shape[0])
        or _transforms()
        or _modes()
        or _tracing_state() is not None
        or not layout.fits(weight.codes, weight.scale, weight.zero_point)
    ):
        return None
    return layout.look_up(weight.codes, weight.scale, weight.zero_point, index)
