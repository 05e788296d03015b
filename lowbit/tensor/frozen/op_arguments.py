"""Read the codes of a low-bit weight by the ops `dequantize` and `weight_linear` of `lowbit_kernels`.

Eager code calls the kernel of `dequantize` itself. It reads the scales of double quantization as they are stored, where
the op takes them decoded, and a training step does not wait for the host.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.linear.frozen.row import READ_BY_OPS
from lowbit.numerics.blocks import crop, for_elements
from lowbit.numerics.lookup_table import DYNAMIC8, LookupTable
from lowbit.numerics.scale_format import E4M3, Double
from lowbit.numerics.spec import Spec

# Names of this module, because looking up an attribute takes as long as some of these calls.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced = torch._C._is_tracing
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


class _Layout(NamedTuple):
    """What the spec of a weight of one shape says of these arguments."""

    group_size: int
    bits: int
    table: tuple[float, ...]
    blocks: tuple[int, ...] | None
    """The elements along each dimension but the last that share a scale; None where each row has its own."""


@functools.lru_cache(maxsize=4096)
def _layout(spec: Spec, shape: tuple[int, ...]) -> _Layout:
    fmt, block = spec.format, spec.block_size(shape)
    table = fmt.values if isinstance(fmt, LookupTable) else ()
    rows = block[:-1] if any(size > 1 for size in block[:-1]) else None
    return _Layout(block[-1], fmt.bits, table, rows)


class ReadByOps:
    """The part of an AffineTensor that lets ops read its codes."""

    def op_arguments(self: Any) -> dict[str, Any] | None:
        """The tensors codes, scale, zero_point and global_scale, with leading dimensions flattened, and group_size,
        bits and table. None where no op reads the layout.

        Rows are those of the codes, which may be padded.
        """
        if self.stored_as not in READ_BY_OPS or self.transposed or self.flat_from is not None:
            return None
        if 0 in self.shape:
            return None
        return self._arguments(*_scales(self))

    def expert_arguments(self: Any) -> dict[str, Any]:
        """`op_arguments` of weights [E, N, K], or [E, K, N] that hold these transposed, with their dimensions."""
        return self._arguments(*_scales(self), is_flat=False)

    def _arguments(
        self: Any, scale: Tensor, global_scale: Tensor | None, is_flat: bool = True
    ) -> dict[str, Any]:
        shape = tuple(self.shape_of_codes(self.shape))
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        found = _layout(self.spec, shape)
        codes, zero_point = self.codes, self.zero_point
        if found.blocks is not None:
            rows = self.spec.padded_shape(shape)  # those of the codes
            scale = for_elements(scale, found.blocks, rows)
            zero_point = (
                None if zero_point is None else for_elements(zero_point, found.blocks, rows)
            )
        if is_flat and codes.ndim > 2:
            codes, scale = codes.flatten(0, -2), scale.flatten(0, -2)
            zero_point = None if zero_point is None else zero_point.flatten(0, -2)
        return {
            "codes": codes,
            "scale": scale,
            "zero_point": zero_point,
            "global_scale": global_scale,
            "group_size": max(found.group_size, 1),
            "bits": found.bits if codes.dtype is torch.uint8 else 0,
            "table": found.table,
        }

    def _dequantize_on_gpu(self: Any) -> Tensor | None:
        """`dequantize()` of a tensor that is neither transposed nor flat nor empty; None where no op reads it."""
        with _PlainAttributes():
            if self.stored_as not in READ_BY_OPS:
                return None
            if _is_compiling() or _dispatch_modes() or _is_traced() or self.codes.ndim != 2:
                return values_by_op(self, self._arguments(*_scales(self)))
            return _values_by_kernel(self)


def _values_by_kernel(weight: Any) -> Tensor:
    """`dequantize()` of a matrix."""
    from lowbit_kernels.runtime.triton_runtime import runs_on
    from lowbit_kernels.weight_only import dequantize_triton as kernel
    from lowbit_kernels.weight_only.codes_format import format_of
    from lowbit_kernels.weight_only.dequantize import report

    two_steps, codes = None, weight.codes
    if not runs_on(codes.device):
        return values_by_op(weight, weight._arguments(*_scales(weight)))
    shape = tuple(weight.shape_of_codes(weight.shape))
    if weight.spec.scale_format == "double" and _layout(weight.spec, shape).blocks is None:
        found = weight._arguments(weight.scale, None)
        values = kernel.on_device(DYNAMIC8.values, codes.device)
        two_steps = kernel.TwoSteps(values, weight.scale_absmax, weight.scale_offset)
    else:
        found = weight._arguments(*_scales(weight))
    scale, zero_point, bits, table = (found[n] for n in ("scale", "zero_point", "bits", "table"))
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, table)
    wide = weight.dtype is torch.float64
    dtype = torch.float32 if wide else weight.dtype
    out = codes.new_empty((len(codes), shape[-1]), dtype=dtype)
    report(format)
    kernel.fill(
        *(out, codes, scale, zero_point, found["group_size"], format),
        *(found["global_scale"], two_steps),
    )
    return _cropped(weight, out.to(weight.dtype) if wide else out)


def values_by_op(weight: Any, arguments: dict[str, Any]) -> Tensor:
    """`dequantize()` of a weight with these `op_arguments`, to the bit."""
    from lowbit_kernels.weight_only.dequantize import dequantize

    wide, size = weight.dtype is torch.float64, weight.shape_of_codes(weight.shape)[-1]
    dtype = torch.float32 if wide else weight.dtype
    values = dequantize(**arguments, size=size, dtype=dtype)
    return _cropped(weight, values.to(weight.dtype) if wide else values)


def _cropped(weight: Any, values: Tensor) -> Tensor:
    """Values [rows, K] in the shape of the weight, without the rows that blocks pad."""
    shape = tuple(weight.shape_of_codes(weight.shape))
    if len(values) != math.prod(shape[:-1]):
        rows = weight.spec.padded_shape(shape)[:-1]
        values = crop(values.view(*rows, shape[-1]), shape)
    return values if values.shape == weight.shape else values.view(weight.shape)


def _scales(weight: Any) -> tuple[Tensor, Tensor | None]:
    """The scales as the ops take them, and the global scale. Experts, which have a global scale each, have their scales
    decoded before, and so have scales in two steps."""
    spec = weight.spec
    if isinstance(spec.scales, E4M3) and weight.scale.ndim == 2:
        return weight.scale, weight.global_scale
    if isinstance(spec.scales, E4M3 | Double):
        return weight.scale_values(), None
    scale: Tensor = weight.scale
    return scale.float() if scale.dtype is torch.float64 else scale, None
