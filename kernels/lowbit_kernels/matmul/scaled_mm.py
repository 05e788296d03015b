"""Products of two quantized matrices, scaled back.

    out[m, n] = (sum_k a[m, k] * b[n, k]) * a_scale[m] * b_scale[n] + bias[n]

    a         int8 or float8 [M, K], K a multiple of 16
    b         int8 or float8 [N, K]
    a_scale   float32 [M], or [1] for all rows
    b_scale   float32 [N], or [1] for all columns, or None for 1
    bias      float32, bfloat16 or float16 [N], or None
    out       out_dtype, one of these three [M, N], contiguous

int8 by int8: the sum is exact in int32. Then it is converted to float32, multiplied by the row's scale, by the
column's, and the bias is added, each step in float32; the result is rounded once to the output dtype. Every
implementation does these steps in this order. Only the addition of the bias may be fused with the product before it,
which then is not rounded. int32 holds sums of up to `MOST_TERMS` products. A longer K is cut into parts of that length,
whose scaled sums are added in float32.

float8: e4m3 by e4m3, e5m2 by e4m3, or e4m3 by e5m2 (`torch.float8_e4m3fn`, `torch.float8_e5m2`).

The dtype of the operands and the device choose the implementation:

    int8    CUDA, compute capability 9.0    scaled_mm_sm90.cu, compiled at first use: TMA, wgmma, tiles of 128 x 256.
                                            Narrower tiles, or K in slices, where there are fewer tiles than
                                            multiprocessors. A slice takes 4·M·N bytes for its sums
            other CUDA devices              Triton (int8_mm_triton)
            CPU                             PyTorch
    float8  CUDA, compute capability 9.0    scaled_mm_sm90.cu for sums of `LONG` products or more, and where N is not a
                                            multiple of 16; else as below
            CUDA, from capability 8.9 on    cuBLAS. On Hopper float8 sums keep about 14 bits, here and in our kernel
            elsewhere                       the float32 product of the decoded operands
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels.matmul import int8_mm_triton, scaled_mm_sm90
from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer, CublasProduct, LaunchPlan, TensorPart
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.library import contiguous_strides
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on
from lowbit_kernels.weight_only.weight_operands import TensorLayout, described

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LONG = 12288
"""K from which on our float8 kernel is faster than cuBLAS on an H200: by 2 to 3% of a large product and by 23% of a
small one with long sums. It is slower by 1 to 3% at 8192, 3 to 5% at 4096, and 7 to 11% at 2048."""
MOST_TERMS = 2**17 - 16
"""Number of products of two int8 codes whose sum always fits into an int32, a multiple of 16: (-128)² is 2**14."""
OPERANDS = {(torch.int8, torch.int8), (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)}
WRONG_PAIR = (
    "both operands must be torch.int8, or both float8 (torch.float8_e4m3fn, one of them possibly torch.float8_e5m2), "
    "got {a.dtype} and {b.dtype}"
)
"""The message for operands of other dtypes."""


@op(
    "empty(out_dtype, M, N)",
    planned=True,
    flops="2 * M * N * K",
    a="codes [M, K]; flatten leading dimensions first",
    b="codes [N, K]; pass it transposed",
    a_scale="float32 [M] or [1]",
    b_scale="float32 [N] or [1]",
    bias="float [N]",
    out_dtype="float",
    rules={"K % 16 == 0": "K must be a multiple of 16, got {K}; pad both operands with zeros"},
    types={"(a.dtype, b.dtype) in OPERANDS": WRONG_PAIR},
)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor | None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a @ b.T of int8 or float8, scaled; see the module's docstring."""
    # float64 holds the sum of int8 products exactly
    return _scaled((a.double() @ b.double().T).to(torch.float32), a_scale, b_scale, bias, out_dtype)


reference = scaled_mm.reference


def _scaled(sums: Tensor, a_scale, b_scale, bias, out_dtype) -> Tensor:
    out = sums * a_scale[:, None]
    out = out if b_scale is None else out * b_scale[None, :]
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


@scaled_mm.kernel
def _launch(a, b, a_scale, b_scale, bias, out_dtype) -> Tensor:
    if a.dtype == torch.int8 and a.shape[1] > MOST_TERMS:
        return _in_parts(a, b, a_scale, b_scale, bias, out_dtype)
    name, multiply = _implementation(a, b)
    ran("scaled_mm", name)
    if name not in ("int8 sm90", "float8 sm90", "float8 cublas"):
        launcher.learn("scaled_mm", None)
        b_scale = a_scale.new_ones(1) if b_scale is None else b_scale
    return multiply(a, b, a_scale, b_scale, bias, out_dtype)


def _in_parts(a, b, a_scale, b_scale, bias, out_dtype) -> Tensor:
    """Sums of int8 that int32 may not hold, by parts of K."""
    launcher.learn("scaled_mm", None)
    parts = zip(a.split(MOST_TERMS, 1), b.split(MOST_TERMS, 1), strict=True)
    sums = [
        scaled_mm(p.contiguous(), q.contiguous(), a_scale, b_scale, out_dtype=torch.float32)
        for p, q in parts
    ]
    y = torch.stack(sums).sum(0)
    return (y if bias is None else y + bias).to(out_dtype)


def _implementation(
    a: Tensor | TensorLayout, b: Tensor | TensorLayout
) -> tuple[str, Callable[..., Tensor]]:
    """The name and the function of the implementation for checked operands."""
    is_int8, device = a.dtype == torch.int8, a.device
    if 0 in (*a.shape, b.shape[0]):
        return "int8 empty" if is_int8 else "float8 empty", _empty_sum
    needs_copy = b.shape[0] % 16 > 0  # cuBLAS takes multiples of 16 columns, so b would be copied
    if nvrtc.runs_on_hopper(device) and (is_int8 or needs_copy or a.shape[1] >= LONG):
        return ("int8 sm90" if is_int8 else "float8 sm90"), scaled_mm_sm90.multiply
    if is_int8:
        if runs_on(device):
            return "int8 triton", int8_mm_triton.int8_mm
        return "int8 torch", _by_torch
    if device.type == "cuda" and nvrtc.capability(device) >= (8, 9):
        return "float8 cublas", _float8_by_cublas
    return "float8 torch", _by_torch


class Planned(NamedTuple):
    """A plan, and the names of the implementations of its products."""

    plan: LaunchPlan
    products: tuple[str, ...]


def planned(
    a: TensorLayout,
    b: TensorLayout,
    a_scales: int,
    b_scales: int | None,
    out_dtype: torch.dtype,
    bias: torch.dtype | None = None,
) -> Planned | None:
    """The plan of a product; None unless our kernel or cuBLAS takes these operands as they are, and writes [M, N]
    without gaps.

    Args:
        a, b: layouts of codes [M, K] and [N, K].
        a_scales, b_scales: how many scales they have; None: b has none.
        out_dtype: of the result.
        bias: its dtype; None: there is none.
    """
    name, _ = _implementation(a, b)
    if name in ("int8 sm90", "float8 sm90"):
        if not (scaled_mm_sm90.is_readable(a) and scaled_mm_sm90.is_readable(b)):
            return None
        several = a_scales > 1, b_scales is not None and b_scales > 1
        found = scaled_mm_sm90.planned(a, b, *several, bias, out_dtype)
        return Planned(found, (name,)) if found.results[0].shape[1] == b.shape[0] else None
    if name != "float8 cublas":
        return None
    own = _planned_for_cublas(a, b, a_scales, b_scales, out_dtype, bias)
    return own and Planned(own, (name,))


def _planned_for_cublas(
    a: TensorLayout,
    b: TensorLayout,
    a_scales: int,
    b_scales: int | None,
    out_dtype: torch.dtype,
    bias: torch.dtype | None,
) -> LaunchPlan | None:
    """`planned` where cuBLAS multiplies."""
    m, n = a.shape[0], b.shape[0]
    by_row = a_scales > 1 or (b_scales is not None and b_scales > 1)
    wanted = (m, n) if by_row else (1, 1)
    one_each = a_scales == wanted[0] and b_scales in (None, wanted[1])
    # also where a dimension has size 1: cuBLAS needs the stride of a full row
    contiguous = all(tuple(x.strides) == contiguous_strides(x.shape) for x in (a, b))
    fused_bias = bias is None or bias == out_dtype != torch.float32
    if n % 16 or not (one_each and contiguous and fused_bias):
        return None
    if not _cublas_scales(by_row, out_dtype, a.device):
        return None
    return _cublas_plan(m, n, a.shape[1], by_row, b_scales is None, bias is not None, out_dtype)


def _empty_sum(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    *_, bias, out_dtype = others
    out = a.new_zeros((a.shape[0], b.shape[0]), dtype=out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def _by_torch(a: Tensor, b: Tensor, *scales_bias_and_dtype) -> Tensor:
    return _scaled(float_sums(a, b), *scales_bias_and_dtype)


def float_sums(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K].T by PyTorch, float32; no size is 0."""
    if a.dtype == torch.int8:
        return int8_sums(a, b).to(torch.float32)
    with torch.autocast(a.device.type, enabled=False):  # products of codes overflow float16
        return a.float() @ b.float().T


def int8_sums(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K].T of int8, in int32 [M, N]; no size is 0.

    On CPUs, torch._int_mm uses the stride of a dimension of size 1 as a row distance. That stride may be anything (0
    from Inductor, 1 for a column transposed into a row), and the op then reads out of bounds (pytorch issue 195066).
    So this function pads dimensions of size 1.
    """
    (m, k), n = a.shape, b.shape[0]
    if a.device.type == "cpu":
        if k == 1:
            a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
        a, b = (torch.cat([x, x]) if x.shape[0] == 1 else x for x in (a, b))
    return torch._int_mm(a, b.T)[:m, :n]


def _float8_by_cublas(a, b, a_scale, b_scale, bias, out_dtype) -> Tensor:
    given = a, b, a_scale, b_scale, bias
    # A single row is contiguous with any stride, but cuBLAS needs the stride of a full row.
    a, b = (
        x.contiguous().view(-1).view(x.shape) if len(x) == 1 else x.contiguous() for x in (a, b)
    )
    m, n = a.shape[0], b.shape[0]
    if extra := -n % 16:  # cuBLAS takes multiples of 16 columns
        b = F.pad(b.view(torch.uint8), (0, 0, 0, extra)).view(b.dtype)
    by_row = a_scale.numel() > 1 or (b_scale is not None and b_scale.numel() > 1)
    scales = (
        _one_each(a_scale, m if by_row else 1),
        None if b_scale is None else _one_each(b_scale, n if by_row else 1),
    )
    operands = a, b, *scales, None if bias is None else bias.contiguous()
    counts = scales[0].numel(), None if scales[1] is None else scales[1].numel()
    layouts = TensorLayout(*described(a)), TensorLayout(*described(b))
    own_bias = None if bias is None else bias.dtype
    found = None if extra else _planned_for_cublas(*layouts, *counts, out_dtype, own_bias)
    if found is not None:
        as_given = all(x is y for x, y in zip(given, operands, strict=True))
        if not as_given:
            launcher.learn("scaled_mm", None)
        return launcher.carried_out("scaled_mm", found, operands, as_given)[0]
    launcher.learn("scaled_mm", None)
    # cuBLAS has no such epilogue: compute plain sums in float32, and scale them in a second pass.
    one = a_scale.new_ones(())
    sums = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
    return _scaled(sums[:, :n], a_scale, b_scale, bias, out_dtype)


def _one_each(scale: Tensor, count: int) -> Tensor:
    """A scale as a contiguous vector of `count`; itself where it is one."""
    return (scale if scale.numel() == count else scale.expand(count)).contiguous()


@functools.lru_cache(maxsize=4096)
def _cublas_plan(
    m: int, n: int, k: int, by_row: bool, no_b_scale: bool, has_bias: bool, out_dtype: torch.dtype
) -> LaunchPlan:
    """Operands: a, b, a_scale, b_scale and bias. Without b's scales, those are ones."""
    ones = (Buffer((n if by_row else 1,), torch.float32, fill=1),) if no_b_scale else ()
    made = 6  # the number of `ones`
    product = CublasProduct(
        TensorPart(0, (m, k)),
        TensorPart(1, (n, k)),
        TensorPart(2, (m, 1) if by_row else ()),
        TensorPart(made if no_b_scale else 3, (1, n) if by_row else ()),
        TensorPart(4, (n,)) if has_bias else None,
        TensorPart(5, (m, n)),
    )
    return LaunchPlan((Buffer((m, n), out_dtype),), ones, (product,))


def _cublas_scales(by_row: bool, out_dtype: torch.dtype, device: torch.device) -> bool:
    """True if cuBLAS has such an epilogue. Scales of rows with an output other than bfloat16 need 12.9 and Hopper."""
    if not by_row or out_dtype == torch.bfloat16:
        return True
    return nvrtc.cuda_version() >= (12, 9) and nvrtc.capability(device) == (9, 0)
