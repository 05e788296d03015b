"""int8 weights back to floating point.

    x[n, k] = (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]

The difference is exact, the product is rounded once to float32, and that once to the output dtype. Every
path below gives the same bits.

    codes       int8 [N, Kp]
    scale       float32, bfloat16 or float16 [N, Kp / G]
    zero_point  int8 [N, Kp / G], or None for 0
    result      float32, bfloat16 or float16 [N, K], contiguous, K <= Kp

G (``group_size``) is any positive number, Kp for one scale a row; Kp is K padded to a multiple of G, what lies in the
padding is not read into the result. Rows may be strided; offsets are 64-bit. Leading dimensions are the caller's to
flatten. The kernel reads 16 codes a lane and writes their results side by side: it is bound by the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_kernels.dequantize_int4 import FLOATS, apply_groups, fill_by_rows
from lowbit_kernels.library import LIBRARY, check_one_device
from lowbit_kernels.triton_runtime import jit, runs_on, stored_dtype, tl, triton


def dequantize_int8(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize int8 weights; shapes, dtypes and the formula are in the module's docstring.

    Args:
        codes, scale, zero_point: as above, on one device.
        group_size: G, elements of a row that share a scale.
        size: K, elements of a row without padding.
        dtype: of the result.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other.
    """
    return torch.ops.lowbit.dequantize_int8(codes, scale, zero_point, group_size, size, dtype)


def reference(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The formula in PyTorch ops, on any device."""
    _check(codes, scale, zero_point, group_size, size, dtype)
    group = torch.arange(size, device=codes.device) // group_size
    x = codes[:, :size].to(torch.float32)
    if zero_point is not None:
        x = x - zero_point.to(torch.float32)[:, group]
    return (x * scale.to(torch.float32)[:, group]).to(dtype)


@jit
def _kernel(
    codes,
    scale,
    zero_point,  # unused unless HAS_ZERO_POINT
    out,
    size,  # elements of a row of the result
    chunks,  # programs of a row
    codes_stride,  # of a row
    scale_stride,
    zero_point_stride,
    GROUP_SIZE: tl.constexpr,  # 0: the whole row is one
    BLOCK: tl.constexpr,  # elements of a program
    HAS_ZERO_POINT: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * BLOCK
    element = tl.arange(0, BLOCK)
    inside = element < size - start
    x = tl.load(codes + row * codes_stride + start + element, mask=inside, other=0)
    if GROUP_SIZE == 0:
        group = element * 0
    else:
        # Only the start needs 64 bits: within a chunk, groups are counted from the one it starts in.
        group = ((start % GROUP_SIZE).to(tl.int32) + element) // GROUP_SIZE
        scale += start // GROUP_SIZE
        zero_point += start // GROUP_SIZE
    s = tl.load(scale + row * scale_stride + group, mask=inside, other=0).to(tl.float32)
    value = x.to(tl.float32)
    if HAS_ZERO_POINT:
        zero = tl.load(zero_point + row * zero_point_stride + group, mask=inside, other=0)
        value -= zero.to(tl.float32)
    tl.store(out + row * size + start + element, (value * s).to(out.dtype.element_ty), mask=inside)


def _launch(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The Triton kernel where it runs; on a CPU `fill_on_cpu`, a cache's worth of rows at a time."""
    _check(codes, scale, zero_point, group_size, size, dtype)
    if runs_on(codes.device):
        out = codes.new_empty((codes.shape[0], size), dtype=stored_dtype(dtype, codes.device))
        fill(out, codes, scale, zero_point, group_size)
        return out.to(dtype)
    if codes.device.type == "cpu" and codes.numel():
        out = codes.new_empty(codes.shape, dtype=dtype)
        fill_by_rows(fill_on_cpu, out, codes, scale, zero_point, group_size)
        return out if out.shape[1] == size else out[:, :size].contiguous()
    return reference(codes, scale, zero_point, group_size, size, dtype)


def fill_on_cpu(
    out: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """The op's result into `out` [N, Kp], contiguous, by PyTorch ops."""
    apply_groups(out.copy_(codes), scale, zero_point, group_size)


def fill(
    out: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int
) -> None:
    """The op's result into `out` [N, K], contiguous, by the Triton kernel; the rest checked."""
    rows, size = out.shape
    if out.numel() == 0:
        return
    codes, scale = (x if x.stride(1) == 1 else x.contiguous() for x in (codes, scale))
    has_zero_point = zero_point is not None
    zeros = scale if zero_point is None else zero_point
    zeros = zeros if zeros.stride(1) == 1 else zeros.contiguous()
    block = min(4096, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, block)
    with torch.cuda.device_of(codes):
        _kernel[(rows * chunks,)](
            codes,
            scale,
            zeros,
            out,
            size,
            chunks,
            codes.stride(0),
            scale.stride(0),
            zeros.stride(0),
            GROUP_SIZE=0 if scale.shape[1] == 1 else group_size,
            BLOCK=block,
            HAS_ZERO_POINT=has_zero_point,
            num_warps=4 if block < 4096 else 8,
        )


def _fake(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    _check(codes, scale, zero_point, group_size, size, dtype)
    return codes.new_empty((codes.shape[0], size), dtype=dtype)


def _check(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    check_one_device(codes=codes, scale=scale, zero_point=zero_point)
    if codes.dtype != torch.int8:
        raise TypeError(f"dequantize_int8 takes codes as torch.int8, got {codes.dtype}")
    for name, got in (("a scale", scale.dtype), ("a result", dtype)):
        if got not in FLOATS:
            raise TypeError(
                f"dequantize_int8 takes {name} of {', '.join(map(str, FLOATS))}; got {got}"
            )
    if zero_point is not None and zero_point.dtype != torch.int8:
        raise TypeError(
            f"dequantize_int8 takes zero_point as torch.int8 or None, got {zero_point.dtype}"
        )
    if group_size < 1:
        raise ValueError(f"group_size must be 1 or more elements, got {group_size}")
    if codes.dim() != 2 or scale.dim() != 2:
        raise ValueError(
            f"dequantize_int8 takes codes [N, Kp] and scale [N, Kp/G], got {tuple(codes.shape)} and "
            f"{tuple(scale.shape)}; flatten leading dimensions first"
        )
    expected = (scale.shape[0], scale.shape[1] * group_size)
    if tuple(codes.shape) != expected:
        raise ValueError(
            f"a scale of shape {tuple(scale.shape)} with group_size {group_size} takes codes of shape {expected}, "
            f"got {tuple(codes.shape)}"
        )
    if not 0 <= size <= expected[1]:
        raise ValueError(f"size must be 0..{expected[1]}, the codes of a row; got {size}")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"zero_point must have the shape of scale, {tuple(scale.shape)}; got {tuple(zero_point.shape)}"
        )


LIBRARY.define(
    "dequantize_int8(Tensor codes, Tensor scale, Tensor? zero_point, int group_size, SymInt size, "
    "ScalarType dtype) -> Tensor"
)
LIBRARY.impl("dequantize_int8", _launch, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::dequantize_int8", _fake, lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    rows: int
    size: int
    group_size: int
    scale_dtype: torch.dtype = torch.float32
    has_zero_point: bool = False
    dtype: torch.dtype = torch.bfloat16
    row_step: int = 1  # every n-th row of a larger weight
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """codes, scale, zero_point, group_size, size, dtype."""
        groups = -(-self.size // self.group_size)
        rows = self.rows * self.row_step

        def codes(columns: int) -> Tensor:
            return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)

        scale = (torch.rand(rows, groups, device=device) * 0.02 - 0.001).to(self.scale_dtype)
        return (
            codes(groups * self.group_size)[:: self.row_step],
            scale[:: self.row_step],
            codes(groups)[:: self.row_step] if self.has_zero_point else None,
            self.group_size,
            self.size,
            self.dtype,
        )


CASES = [
    Case("typical", 64, 256, 256),
    Case("groups", 64, 256, 64, torch.bfloat16),
    Case("zero-point", 64, 256, 32, torch.bfloat16, True),
    Case("fp16", 16, 256, 64, torch.float16, dtype=torch.float16),
    Case("fp32", 16, 256, 256, has_zero_point=True, dtype=torch.float32),
    Case("fp32-of-bf16-scales", 16, 250, 128, torch.bfloat16, True, torch.float32),
    Case("padded", 17, 250, 128, has_zero_point=True),
    Case("several-chunks", 3, 17_000, 17_000),
    Case("several-chunks-of-padded-groups", 3, 17_001, 8, torch.bfloat16),
    Case("prime-everything", 31, 101, 7, has_zero_point=True, dtype=torch.float32),
    Case("one-element", 1, 1, 1),
    Case("no-rows", 0, 128, 128),
    Case("no-columns", 5, 0, 32),
    Case("strided-rows", 19, 256, 64, has_zero_point=True, row_step=3),
    Case("llama-8b-attention", 4096, 4096, 4096, torch.bfloat16, large=True),
    Case("llama-8b-up", 14336, 4096, 4096, torch.bfloat16, large=True),
    Case("llama-8b-up-group-128", 14336, 4096, 128, torch.bfloat16, large=True),
]
