"""Products of the rows of experts in int8 or float8, scaled back: all experts in one launch.

The rows (tokens) are sorted by expert. `offsets` (int32 [E]) holds the end of each expert's rows, as in
``torch._grouped_mm``; only the device reads it. There are two products, told apart by the dimensions of b:

    b [E, N, K]    out[m, n]    = (sum_k a[m, k] * b[e, n, k]) * a_scale[m] * b_scale[e, n]
                                  for the expert e of row m, offsets[e - 1] <= m < offsets[e]
    b [K, P]       out[e, n, k] = (sum_p a[n, p] * b[k, p]) * a_scale[e, n] * b_scale[e, k]
                                  over the columns p of expert e

The first is the output of experts, or the gradient of their inputs; the second is the gradient of their weights, whose
operands are transposed copies with the columns of `grouped_columns`, as `quantize_grouped` writes them. b_scale [1] is
for all. K and P are multiples of 16. out is contiguous, in `out_dtype`: float32, bfloat16 or float16.

Rows that no expert has, and weights of experts without rows, are 0. Offsets are ascending, 0 to M. The op does not
check them, because reading them waits for the GPU: those that fall or exceed M count as the nearest ones that do not.

Formats and arithmetic are those of `scaled_mm`: int8 sums are exact in int32 and wrap beyond 2**31, which takes more
than 133,000 products of 127 by 127. float8 sums have about 14 bits on Hopper.

Implementations, as `launches` reports them, after "int8" or "float8":

    sm90     compute capability 9.0: grouped_mm_sm90.cu, compiled at first use
    triton   other GPUs; float8 from capability 8.9 on, with both operands in one format
    torch    elsewhere: expert by expert. On a GPU the host waits for the offsets
    empty    a size is 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul import grouped_columns, grouped_mm_sm90, grouped_mm_triton, scaled_mm
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on


@op(
    "empty(out_dtype, *_shape(a, b, offsets))",
    planned=True,
    flops="2 * M * b.shape[-2] * (K if b.dim() == 3 else grouped_columns.tokens(K, E))",
    a="codes [M, K]; flatten leading dimensions first",
    b="codes [...]",
    a_scale="float32 [...]",
    b_scale="float32 [...]",
    offsets="int32 [E]",
    out_dtype="float",
    rules={
        "b.dim() in (2, 3) and b.shape[-1] == K": (
            "a [M, K] and b [E, N, K], or a [N, P] and b [K, P] are multiplied, got {tuple(a.shape)} and "
            "{tuple(b.shape)}; pass b transposed"
        ),
        "K % 16 == 0": (
            "both operands must have a multiple of 16 columns, got {K}; pad them with zeros"
        ),
        "b.dim() == 2 or b.shape[0] == E": (
            "offsets must have the shape ({b.shape[0]},), got {tuple(offsets.shape)}"
        ),
        "a_scale.shape == ((E, M) if b.dim() == 2 else (M,))": (
            "a_scale must have the shape {(E, M) if b.dim() == 2 else (M,)}, got {tuple(a_scale.shape)}"
        ),
        "b_scale.shape in ((E, b.shape[-2]), (1,))": (
            "b_scale must have the shape {(E, b.shape[-2])} or (1,), got {tuple(b_scale.shape)}"
        ),
    },
    types={"(a.dtype, b.dtype) in scaled_mm.OPERANDS": scaled_mm.WRONG_PAIR},
)
def grouped_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The scaled products of all experts; see the module's docstring."""

    def exact(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double().T).to(torch.float32)

    return _by_expert(exact, a, b, a_scale, b_scale, offsets, out_dtype)


reference = grouped_scaled_mm.reference


def _by_expert(multiply, a, b, a_scale, b_scale, offsets, out_dtype) -> Tensor:
    """Expert by expert; `multiply` gives a @ b.T in float32."""
    ragged = b.dim() == 2
    tokens = grouped_columns.counts(offsets, a.shape[1] if ragged else a.shape[0])
    first = grouped_columns.starts(tokens) if ragged else tokens.cumsum(0) - tokens
    out = a.new_zeros(_shape(a, b, offsets), dtype=out_dtype)
    for e, (start, count) in enumerate(zip(first.tolist(), tokens.tolist(), strict=True)):
        if count == 0 or 0 in (a.shape[0], b.shape[-2]):
            continue
        of_columns = b_scale if b_scale.dim() == 1 else b_scale[e]
        if ragged:
            sums = multiply(a[:, start : start + count], b[:, start : start + count])
            of_rows, to = a_scale[e], out[e]
        else:
            rows = slice(start, start + count)
            sums, of_rows, to = multiply(a[rows], b[e]), a_scale[rows], out[rows]
        to.copy_(sums * of_rows[:, None] * of_columns[None, :])
    return out


@grouped_scaled_mm.kernel
def _launch(a, b, a_scale, b_scale, offsets, out_dtype) -> Tensor:
    is_int8, device = a.dtype == torch.int8, a.device
    name = "int8" if is_int8 else "float8"
    operands = (a, b, a_scale, b_scale, offsets, out_dtype)
    if 0 in (*a.shape, *b.shape, offsets.shape[0]):
        ran("grouped_scaled_mm", f"{name} empty")
        return a.new_zeros(_shape(a, b, offsets), dtype=out_dtype)
    if nvrtc.runs_on_hopper(device):
        ran("grouped_scaled_mm", f"{name} sm90")
        return grouped_mm_sm90.grouped_mm(*operands)
    if runs_on(device) and grouped_mm_triton.takes(a.dtype, b.dtype, device):
        ran("grouped_scaled_mm", f"{name} triton")
        return grouped_mm_triton.grouped_mm(*operands)
    ran("grouped_scaled_mm", f"{name} torch")
    return _by_expert(scaled_mm.float_sums, *operands)


def _shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    return (offsets.shape[0], a.shape[0], b.shape[0]) if b.dim() == 2 else (a.shape[0], b.shape[1])
