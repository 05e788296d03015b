"""Weights of 1 to 8 bits to floating point, by the formula of `codes_format`.

It explains codes, scale, zero_point, global_scale, group_size, size, bits and table. The value is rounded once to
float32, and that once to `dtype`: float32, bfloat16 or float16 [N, K], contiguous, K <= Kp. All implementations below
give the same bits. Rows may be strided (a slice of a larger weight); offsets are 64-bit. Callers flatten leading
dimensions, such as experts.

On GPUs the kernel of `dequantize_triton` runs. On a CPU that of `dequantize_cpu` takes contiguous weights with floating
scales, and the reference serves others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on, stored_dtype
from lowbit_kernels.weight_only.codes_cpu import Parts
from lowbit_kernels.weight_only.codes_format import CodesFormat, dequantized, format_of
from lowbit_kernels.weight_only.dequantize_cpu import dequantizer
from lowbit_kernels.weight_only.dequantize_triton import fill
from lowbit_kernels.weight_only.weight_operands import FORMAT_OPERANDS, FORMAT_RULES, SIZE_RULE


@op(
    "empty(dtype, N, size)",
    planned=True,
    **FORMAT_OPERANDS,
    rules={**FORMAT_RULES, **SIZE_RULE},
    dtype="float",
)
def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    size: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """The values of a weight in few bits; see the module's docstring."""
    parts = (codes, scale, zero_point, group_size, size, torch.float32)
    return dequantized(*parts, global_scale, bits, table).to(dtype)


reference = dequantize.reference


# ---- CPU -----------------------------------------------------------------------------------------------------------


def values_on_cpu(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
    format: CodesFormat,
    global_scale: Tensor | None = None,
) -> Tensor:
    """The op's result, of weights on a CPU or where no kernel runs.

    Args:
        codes, scale, zero_point, group_size, size, dtype, global_scale: as the op takes them.
        format: of the codes and scales.
    """
    rows, groups = scale.shape
    if codes.device.type == "cpu" and scale.numel() > 0 and not format.scale_bytes:
        zeros = zero_point
        if zeros is not None and zeros.is_floating_point():
            zeros = zeros.float()
        parts = Parts(codes, scale.float(), zeros)
        kernel = _kernel(format, rows, groups * group_size, group_size)
        if kernel is not None and kernel.fits(parts):
            out = codes.new_empty((rows, size), dtype=dtype)
            for tile, values in kernel.tiles(parts):
                out[tile] = values[:, :size]
            return out
    own = (codes, scale, zero_point, group_size, size, dtype)
    return reference(*own, global_scale, format.bits, format.table)


_kernel = functools.lru_cache(maxsize=4096)(dequantizer)


# ---- the op --------------------------------------------------------------------------------------------------------


@dequantize.kernel
def _launch(
    codes, scale, zero_point, group_size, size, dtype, global_scale=None, bits=0, table=()
) -> Tensor | None:
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, tuple(table))
    if runs_on(codes.device):
        report(format)
        out = codes.new_empty((codes.shape[0], size), dtype=stored_dtype(dtype, codes.device))
        fill(out, codes, scale, zero_point, group_size, format, global_scale, op="dequantize")
        return out.to(dtype)
    ran("dequantize", f"{_name(format)} torch")
    own = (codes, scale, zero_point, group_size, size, dtype)
    return values_on_cpu(*own, format, global_scale)


def dequantize_into(out: Tensor, codes: Tensor, scale: Tensor, group_size: int) -> None:
    """Write the op's result for signed integers into `out` [N, K], contiguous, on a GPU.

    For eager code: torch.compile does not see it, and the arguments are not checked. `codes`: int8 [N, K] or packed
    int4; `scale`: float32 [N, groups].
    """
    format = format_of(codes.dtype, scale.dtype, None, 0, ())
    report(format)
    fill(out, codes, scale, None, group_size, format)


def report(format: CodesFormat) -> None:
    """Tell listeners that the kernel of GPUs runs, for the op or for a caller of `fill`."""
    ran("dequantize", f"{_name(format)} triton")


def _name(format: CodesFormat) -> str:
    kind = "table" if format.table else "float" if format.exponent else "int"
    return f"{kind}{format.bits}"
