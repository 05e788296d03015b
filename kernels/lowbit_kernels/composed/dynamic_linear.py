"""Products of activations that are quantized on the fly and weights in 8 bits of the same format, or in 4 bits.

    q[m, k], t[m] = quantize_rowcol(x)
    out[m, n]     = (sum_k q[m, k] * codes[n, k]) * t[m] * scale[n]  +  bias[n] + residual[m, n]

    x          bfloat16, float16 or float32 [..., K]
    codes      int8 or float8_e4m3fn [N, K]
    scale      float32, bfloat16 or float16 [N] or [N, 1]; for float8 also [1], for all rows
    bias       [N], residual [..., N]: x's dtype, or None; "scaled_mm" and "int8_int4" add the residual after rounding
    out        x's dtype [..., N], contiguous

Codes of 4 bits are multiplied by int8 codes of x. They have groups and zero points as in `weight_linear`:

    out[m, n]  = t[m] * sum_g scale[n, g] * (sum_{k in g} q[m, k] * (code[n, k] - zero_point[n, g]))  +  ...

    codes      uint8 [N, ceil(Kp / 2)], two codes in a byte
    scale      [N, Kp / group_size], zero_point int8 of this shape or None

Codes of E2M1 are multiplied by float8 codes of x. Their scales are bytes:

    scale      uint8 [N, Kp / group_size], e8m0 (MXFP4), or float8_e4m3fn, divided by `global_scale` (NVFP4)

Codes and scales of x are bit for bit those of ``lowbit``'s dynamic schemes (`quantize_rowcol`), computed in one kernel.
int8 sums are exact in int32, which 131,071 products can't exceed; a longer K raises an error.

Implementations, as `launches` reports them:

    decode         weight_mm_decode_sm90, up to 16 tokens. It rounds x itself, and multiplies int8 in the units for int8
    large_batch    weight_mm_large_batch_sm90, up to `MOST_NUMBERS` tokens
    int8_int4      w4a8_mm_sm90, 4 bits, from `LEAST_TOKENS` tokens on, in groups of 64 or a multiple of 128
    e4m3_mxfp4     the same kernel on the units for float8, for MXFP4. Products of NVFP4 are not exact in float8
    scaled_mm      `scaled_mm`, 8 bits, for more tokens and on other devices
    weight_linear  `weight_linear` of x rounded to its codes, 4 bits, on other devices

A product of 8 bits by 8 bits has tiles of 128 tokens and takes as long for fewer. The first two kernels are faster for
small batches, since they are bound by the weight's bytes. "large_batch" takes the codes of x as floating-point numbers,
which hold them exactly: int8 codes in x's dtype, float8 codes in float16, or in bfloat16 for E2M1. Its float32 sums of
int8 are exact below 2**24. Larger sums (K over 1,040 at the earliest) round at 2**-23.

``tensorwise`` (float8) gives all tokens one scale. If the weight has one scale too, `scaled_mm` runs every batch size.
`scaled_mm` needs K as a multiple of 16; other weights are padded, in a copy, at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.matmul import scaled_mm, w4a8_mm_sm90
from lowbit_kernels.quantize import quantize_rowcol, quantize_rows_sm90
from lowbit_kernels.quantize.quantize_rowcol import codes_of
from lowbit_kernels.runtime import launcher
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Composition, LaunchPlan
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import KeptKernel, jit, runs_on, tl, triton
from lowbit_kernels.weight_only import (
    weight_linear,
    weight_mm_decode_sm90,
    weight_mm_large_batch_sm90,
)
from lowbit_kernels.weight_only.codes_format import E2M1, dequantized, format_of
from lowbit_kernels.weight_only.one_launch import OneLaunch
from lowbit_kernels.weight_only.weight_operands import (
    ADDEND_TYPES,
    E4M3,
    FORMAT_OPERANDS,
    HALVES,
    Description,
    Product,
    TensorLayout,
    WeightOperands,
    all_described,
    all_layouts,
)

INT4 = torch.uint8
DTYPES = {"int8": torch.int8, "e4m3": E4M3}
MOST_NUMBERS = {torch.int8: 64, E4M3: 64}  # tokens whose codes are multiplied as floating point
MOST_K = (2**31 - 1) // 2**14  # int8 products that int32 sums hold
FORMATS = {torch.int8: "int8", E4M3: "e4m3", INT4: "int8"}
"""The format of x for codes of these dtypes, as `quantize_rowcol` names it. Those of E2M1 take "e4m3"."""


def format_of_tokens(codes: torch.dtype, scale: torch.dtype) -> str:
    """The format of x for codes and scales of these dtypes, "int8" or "e4m3"."""
    return "e4m3" if scale.itemsize == 1 else FORMATS[codes]


def _table(scale: torch.dtype) -> tuple[float, ...]:
    """The numbers of the codes: scales of a byte belong to E2M1."""
    return E2M1 if scale.itemsize == 1 else ()


def groups_of(k: int, group_size: int) -> int:
    """Groups of a row; 1 for a group size of 0."""
    return 1 if group_size < 1 else -(-k // group_size)


WIDENED = 1024
"""Scales that a program writes in float32."""
X, CODES, SCALE, BIAS, RESIDUAL, ZERO_POINT, GLOBAL_SCALE, OUT = range(8)
"""Numbers of tensors in a launch plan: the operands of the op, then the result."""


@op(
    "empty(x.dtype, *x.shape[:-1], N)",
    by_layout=True,
    planned=True,
    flops="2 * x.numel() * N",
    x="float [..., K]",
    codes="int8|float8_e4m3fn|uint8 [N, W]; uint8 holds two codes of 4 bits in a byte",
    scale="float|uint8|float8_e4m3fn [N] or [N, 1] or [1] or [N, groups_of(K, group_size)]; bytes are for E2M1",
    bias="float [N]",
    residual="float [..., N]",
    zero_point="int8 [N, groups_of(K, group_size)]; it lies on the codes' grid",
    global_scale=FORMAT_OPERANDS["global_scale"],
    rules={
        "codes.dtype == INT4 or W == K": (
            "codes [N, K], here ({N}, {K}), got {tuple(codes.shape)}"
        ),
        "codes.dtype == INT4 or (zero_point is None and group_size == 0)": (
            "zero points and group_size are for uint8 codes, got {codes.dtype}"
        ),
        "codes.dtype != INT4 or (group_size > 0 and W == -(-groups_of(K, group_size) * group_size // 2))": (
            "uint8 codes take a group_size of 1 or more and {max(group_size, 1)} * groups / 2 bytes a row, got "
            "{group_size} and {W}"
        ),
        "codes.dtype != INT4 or tuple(scale.shape) == (N, groups_of(K, group_size))": (
            "uint8 codes take a scale of shape {(N, groups_of(K, group_size))}, got {tuple(scale.shape)}"
        ),
        "codes.dtype != torch.int8 or scale.shape[0] == N": (
            "int8 codes take a scale for each row, ({N},) or ({N}, 1), got {tuple(scale.shape)}"
        ),
        "codes.dtype == INT4 or scale.dtype.itemsize > 1": (
            "{codes.dtype} codes take a scale in floats, got {scale.dtype}"
        ),
        "zero_point is None or scale.dtype.itemsize > 1": "codes of E2M1 take no zero_point",
        "global_scale is None or scale.dtype == E4M3": (
            "global_scale goes with a scale of torch.float8_e4m3fn; got one of {scale.dtype}"
        ),
        "codes.dtype == E4M3 or not tensorwise": (
            "int8 codes have a scale for each token; tensorwise takes float8 codes"
        ),
        "codes.dtype == E4M3 or scale.dtype.itemsize == 1 or K <= MOST_K": (
            "int8 sums of more than {MOST_K} products may exceed int32, got K = {K}; split K"
        ),
    },
    types=ADDEND_TYPES,
)
def dynamic_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    tensorwise: bool = False,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    global_scale: Tensor | None = None,
) -> Tensor:
    """int8 by int8 or int4, or float8 by float8 or E2M1; see the module's docstring."""
    k = x.shape[-1]
    rows = x.reshape(prod(x.shape[:-1]), k)
    format = format_of_tokens(codes.dtype, scale.dtype)
    q, t, _, _ = quantize_rowcol.reference(rows, format, True, False, tensorwise)
    if codes.dtype == INT4:
        parts = (codes, scale, zero_point, group_size, k, torch.float64)
        weight = dequantized(*parts, global_scale, 4, _table(scale.dtype))
    else:
        weight = codes.double() * scale.double().reshape(-1, 1)
    out = (q[:, :k].double() @ weight.T) * t.double().reshape(-1, 1)
    out = out.view(*x.shape[:-1], codes.shape[0])
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out.to(x.dtype)


reference, check = dynamic_linear.reference, dynamic_linear.check


@jit
def _to_float32(scale, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(scale + at, mask=at < n).to(tl.float32), mask=at < n)


@dataclass
class DynamicLinearPlan:
    """How calls with operands of the same layouts run."""

    implementation: str
    product: Product | None  # None for "scaled_mm" and "weight_linear"
    numbers: torch.dtype | None  # of x's codes; None: the product rounds x
    rows: tuple[int, int]  # x's shape as a matrix
    shape: tuple[int, ...]  # of the result
    operands: tuple[TensorLayout | None, ...]  # as `planned` gets them
    tensorwise: bool
    padding: int = 0  # of K, for "scaled_mm"

    @functools.cached_property
    def _widen(self) -> KeptKernel:
        return KeptKernel(_to_float32, {"BLOCK": WIDENED})

    def widened(self, scale: Tensor) -> Tensor:
        """The scale in float32, flat."""
        if scale.dtype == torch.float32 or not (scale.is_contiguous() and runs_on(scale.device)):
            return scale.reshape(-1).float()
        out = scale.new_empty(scale.numel(), dtype=torch.float32)
        with torch.cuda.device_of(scale):
            self._widen((triton.cdiv(len(out), WIDENED), 1), scale, out, len(out))
        return out

    @functools.cached_property
    def launches(self) -> LaunchPlan | None:
        """The launch plan on the current device, after a first call, which compiles what widens the scale; None where
        there is none, or it copies an operand."""
        x, codes, scale, bias, residual, *_ = self.operands
        rows = x and x.rows()
        as_they_are = (t is None or t.is_contiguous for t in (scale, bias, residual))
        if rows is None or codes is None or scale is None or not all(as_they_are):
            return None
        whole = Composition(7, (Buffer(self.shape, rows.dtype),))
        if isinstance(self.product, OneLaunch):
            return self._of_one_launch(whole, self.product, rows)
        others = self.tensorwise or self.padding or residual
        if self.implementation != "scaled_mm" or others or not quantize_rows_sm90.takes(rows):
            return None
        scales, widen = (self.rows[0], prod(scale.shape)), None
        if scale.dtype != torch.float32:
            programs = -(-scales[1] // WIDENED)
            widen = self._widen.planned(programs, Address(0), Address(1), scales[1])
            if widen is None:
                return None
        format = format_of_tokens(codes.dtype, scale.dtype)
        own = quantize_rows_sm90.planned(rows, format, codes.dtype)
        q = own.results[0].layout(rows.device)
        found = scaled_mm.planned(q, codes, *scales, rows.dtype, bias and bias.dtype)
        if found is None:
            return None
        made = whole.scratch(own.results)
        whole.add(own, (X,), made)
        scale_at = SCALE
        if widen is not None:
            (scale_at,) = whole.scratch((Buffer((scales[1],), torch.float32),))
            whole.launch((widen,), (SCALE, scale_at))
        bias_at = None if bias is None else BIAS
        whole.add(found.plan, (made[0], CODES, made[1], scale_at, bias_at), (OUT,))
        return whole.plan()

    def _of_one_launch(
        self, whole: Composition, product: OneLaunch, rows: TensorLayout
    ) -> LaunchPlan | None:
        codes, scale = self.operands[1:3]
        assert codes is not None and scale is not None
        of_tokens: tuple[int | None, ...] = X, None
        if product.copies:
            return None
        if self.numbers is not None:
            if self.tensorwise or not quantize_rows_sm90.takes(rows):
                return None
            format = format_of_tokens(codes.dtype, scale.dtype)
            own = quantize_rows_sm90.planned(rows, format, self.numbers)
            of_tokens = tuple(whole.scratch(own.results))
            whole.add(own, (X,), of_tokens)
        q, t = of_tokens
        operands = q, CODES, SCALE, ZERO_POINT, BIAS, RESIDUAL, t, GLOBAL_SCALE
        whole.add(product.launches, operands, (OUT,))
        return whole.plan()


@functools.lru_cache(maxsize=8192)
def planned(
    tensors: tuple[Description | None, ...], tensorwise: bool = False, group_size: int = 0
) -> DynamicLinearPlan:
    """The plan for x, codes, scale, bias, residual, zero_point and global_scale that are `described` so; errors as of
    `dynamic_linear`."""
    *layouts, zero_point, global_scale = all_layouts(tensors)
    check(*layouts, tensorwise, zero_point, group_size, global_scale)
    x, codes, scale, bias, residual = layouts
    own = (*layouts, zero_point, global_scale)
    (n, _), k, m = codes.shape, x.shape[-1], prod(x.shape[:-1])
    shape, has_one_scale = (*x.shape[:-1], n), prod(scale.shape) == 1
    if m * n * k and not (tensorwise and has_one_scale):
        if codes.dtype == INT4:
            by_row = scale
        else:
            step = 0 if has_one_scale and n > 1 else scale.strides[0]
            by_row = scale._replace(shape=(n, 1), strides=(step, 1))
        ends = bias and bias.contiguous((n,)), residual and residual.contiguous((m, n))
        rows = x.rows() or x.copied((m, k))
        zeros, table = zero_point and zero_point.dtype, _table(scale.dtype)
        format = format_of(codes.dtype, scale.dtype, zeros, table=table)
        last = zero_point, *ends, None, group_size or k, x.dtype, format, global_scale
        operands = WeightOperands(rows, codes, by_row, *last)
        if found := of_kernel(operands, tensorwise):
            return DynamicLinearPlan(*found, (m, k), shape, own, tensorwise)
    name = "weight_linear" if codes.dtype == INT4 else "scaled_mm"
    numbers = DTYPES[format_of_tokens(codes.dtype, scale.dtype)]
    return DynamicLinearPlan(name, None, numbers, (m, k), shape, own, tensorwise, -k % 16)


Kernel = tuple[str, Product, torch.dtype | None]
"""The first three fields of a `DynamicLinearPlan`."""


def of_kernel(operands: WeightOperands, tensorwise: bool) -> Kernel | None:
    """The kernel for operands with x before rounding; None where there is none, or `scaled_mm` is faster."""
    x, codes, m = operands.x, operands.codes.dtype, operands.m
    if x.device.type != "cuda" or operands.out not in HALVES:
        return None
    is_e2m1 = bool(operands.format.table)
    rounds = E4M3 if is_e2m1 or codes == E4M3 else torch.int8
    found: Product | None = None
    if m <= weight_mm_decode_sm90.MAX_TOKENS and not tensorwise:
        found = weight_mm_decode_sm90.product(operands._replace(rounds=rounds))
        if found is not None:
            return "decode", found, None
    # the launch that rounds x also reads the exponents of E2M1
    is_readable = quantize_rows_sm90.takes(x) and (operands.scale.is_aligned or not is_e2m1)
    if codes == INT4 and m >= w4a8_mm_sm90.LEAST_TOKENS and is_readable:
        found = w4a8_mm_sm90.product(_with_codes(operands, rounds))
        if found is not None:
            return "e4m3_mxfp4" if is_e2m1 else "int8_int4", found, rounds
    if m > MOST_NUMBERS.get(codes, m):
        return None
    numbers = torch.bfloat16 if is_e2m1 else torch.float16 if codes == E4M3 else x.dtype
    found = weight_mm_large_batch_sm90.product(_with_codes(operands, numbers))
    return None if found is None else ("large_batch", found, numbers)


def _with_codes(operands: WeightOperands, numbers: torch.dtype) -> WeightOperands:
    """The operands with x's codes in place of x, as `codes_of` makes them."""
    m, k = operands.x.shape
    q = TensorLayout((m, k), (k + -k % 16, 1), numbers, operands.x.device, 0)
    scales = TensorLayout((m,), (1,), torch.float32, operands.x.device, 0)
    return operands._replace(x=q, token_scale=scales)


@dynamic_linear.kernel
def _run(
    x, codes, scale, bias, residual, tensorwise, zero_point, group_size, global_scale
) -> Tensor:
    described = all_described(x, codes, scale, bias, residual, zero_point, global_scale)
    plan = planned(described, tensorwise, group_size)
    ran("dynamic_linear", plan.implementation)
    operands = x, codes, scale, bias, residual, zero_point, global_scale
    out = result_of(plan, operands, x.dtype, tensorwise, group_size)
    if x.is_cuda:
        with torch.cuda.device_of(x):
            launcher.learn("dynamic_linear", plan.launches)
    return out


def result_of(
    plan: DynamicLinearPlan,
    operands: Sequence[Any],
    dtype: torch.dtype,
    tensorwise: bool = False,
    group_size: int = 0,
) -> Tensor:
    """The result of a plan for these operands, in the order of `DynamicLinearPlan.operands`. `dtype`: of the result of
    "scaled_mm"; that of other results is x's."""
    x, codes, scale, bias, residual, zero_point, global_scale = operands
    (m, k), n = plan.rows, codes.shape[0]
    rows = x.reshape(m, k)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    t: Tensor | None
    if plan.implementation == "e4m3_mxfp4":
        q, t, zero_point = quantize_rows_sm90.turned_codes(rows, (codes, scale))
    else:
        q, t = _codes(rows, plan, format_of_tokens(codes.dtype, scale.dtype), tensorwise)
    if plan.product is not None:
        by_row = scale if codes.dtype == INT4 else scale.reshape(-1, 1).expand(n, 1)
        residual = None if residual is None else residual.reshape(m, n).contiguous()
        tensors = (q, codes, by_row, zero_point, bias, residual, t, global_scale)
        return plan.product(tensors).view(plan.shape)
    assert t is not None
    if plan.implementation == "weight_linear":
        rounded = (q[:, :k].float() * t[:, None]).to(x.dtype).view(x.shape)
        parts = (rounded, codes, scale, zero_point, bias, residual, group_size, global_scale)
        return weight_linear.run(*parts, 4, _table(scale.dtype))
    if plan.padding:
        codes = F.pad(codes.view(torch.int8), (0, plan.padding)).view(codes.dtype)
    by_column = plan.widened(scale)
    out = scaled_mm.scaled_mm(q, codes, t, by_column, bias=bias, out_dtype=dtype).view(plan.shape)
    return out if residual is None else out.add_(residual)


def _codes(
    rows: Tensor, plan: DynamicLinearPlan, format: str, tensorwise: bool
) -> tuple[Tensor, Tensor | None]:
    """x [M, K] as the plan multiplies it, and the scale of each token where the product does not find it itself."""
    m, k = plan.rows
    if plan.numbers is None:
        return rows, None
    if plan.implementation == "int8_int4":
        return quantize_rows_sm90.turned_codes(rows)[:2]
    q, t = codes_of(rows, format, plan.numbers, tensorwise)
    return (q, t) if plan.product is None else (q[:, :k], t.expand(m).contiguous())
