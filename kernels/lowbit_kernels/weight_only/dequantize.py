"""Weights of 1 to 8 bits to floating point, by the formula of `codes_format`.

It explains codes, scale, zero_point, global_scale, group_size, size, bits and table. The value is rounded once to
float32, and that once to `dtype`: float32, bfloat16 or float16 [N, K], contiguous, K <= Kp. All implementations below
give the same bits. Rows may be strided (a slice of a larger weight); offsets are 64-bit. Callers flatten leading
dimensions, such as experts.

On GPUs the kernel of `dequantize_triton` runs. On a CPU, PyTorch's integer operations dequantize signed integers of 4
and 8 bits, a block of rows that fits the L2 cache at a time. The reference serves other formats there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on, stored_dtype
from lowbit_kernels.weight_only.codes_format import CodesFormat, dequantized, format_of
from lowbit_kernels.weight_only.dequantize_triton import fill
from lowbit_kernels.weight_only.weight_operands import FORMAT_OPERANDS, FORMAT_RULES, group_rules

CPU_CACHE_BYTES = 2**21
"""Bytes of the result that a CPU computes at a time: its L2 cache."""
NIBBLES_TO_FLOATS = {
    torch.float32: (torch.int64, torch.int32, 28, 2.0**23),
    torch.bfloat16: (torch.int32, torch.int16, 12, 128.0),
    torch.float16: (torch.int32, torch.int16, 12, 1024.0),
}
"""For each result dtype: an integer as wide as two results, one as wide as one, the bits by which the second nibble of
a byte moves within the wide integer, and the float that each nibble is added to (its unit in the last place is 1)."""


@op(
    "empty(dtype, N, size)",
    planned=True,
    codes=FORMAT_OPERANDS["codes"],
    scale=FORMAT_OPERANDS["scale"],
    zero_point=FORMAT_OPERANDS["zero_point"],
    global_scale=FORMAT_OPERANDS["global_scale"],
    rules={
        **FORMAT_RULES,
        **group_rules("bits"),
        "0 <= size <= groups * group_size": "size must be 0..{groups * group_size}, the codes of a row; got {size}",
    },
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
    """The op's result, of weights on a CPU or where no kernel runs."""
    (rows, groups), width = scale.shape, codes.shape[1] * 8 // format.bits
    is_simple = format.is_int4_or_int8 and codes.device.type == "cpu"
    if not is_simple or not width == groups * group_size > 0:
        parts = (codes, scale, zero_point, group_size, size, dtype)
        return reference(*parts, global_scale, format.bits, format.table)
    out = codes.new_empty((rows, width), dtype=dtype)
    step = max(1, CPU_CACHE_BYTES // (width * out.itemsize))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        zeros = None if zero_point is None else zero_point[part]
        _fill_on_cpu(out[part], codes[part], scale[part], zeros, group_size)
    return out if width == size else out[:, :size].contiguous()


def _fill_on_cpu(
    out: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """Write the op's result into `out` [N, Kp], contiguous, by PyTorch ops; Kp of int4 codes is even."""
    if codes.dtype == torch.uint8:
        _write_nibbles(out, codes)
    else:
        out.copy_(codes)
    groups = out.view(len(out), scale.shape[1], group_size)
    if zero_point is not None:
        groups.sub_(zero_point.unsqueeze(-1))
    if out.dtype in (scale.dtype, torch.float32):
        groups.mul_(scale.unsqueeze(-1))
    else:
        groups.copy_(groups.float() * scale.float().unsqueeze(-1))


def _write_nibbles(out: Tensor, packed: Tensor) -> None:
    """Write the codes of packed int4 as numbers, without unpacking them to bytes first.

    Both nibbles of a byte are moved, by one product and one mask, to where their results belong. There each is ORed
    into the mantissa of 2**23 (bfloat16: 128, float16: 1024), whose unit in the last place is 1.
    """
    wide, narrow, distance, unit = NIBBLES_TO_FLOATS[out.dtype]
    step = out.itemsize * 8
    words = out.view(wide)
    words.copy_(packed).mul_(1 + (1 << distance)).bitwise_and_(15 << step | 15)
    exponent = int(torch.tensor(unit, dtype=out.dtype).view(narrow))
    words.bitwise_or_(exponent << step | exponent)
    out.sub_(unit + 8)


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
    if not format.is_int4_or_int8:
        return None
    ran("dequantize", f"{_name(format)} torch")
    return values_on_cpu(codes, scale, zero_point, group_size, size, dtype, format)


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
