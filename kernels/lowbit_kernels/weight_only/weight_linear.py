"""Products of activations and a weight of 1 to 8 bits.

    out[m, n] = sum_k x[m, k] * weight[n, k]  +  bias[n] + residual[m, n]

    x               bfloat16, float16 or float32 [..., K]
    bias            [N], residual [..., N]: x's dtype, or None
    out             x's dtype [..., N], contiguous

`codes_format` has the formula of the weight, and its tensors codes, scale, zero_point and global_scale: integers of 1
to 8 bits, float8, and tables (NF4, MXFP4, NVFP4), of `group_size`, `bits` and `table`. A group size of K or more means
one scale a row. The values in the padding don't count. Rows of the weight may be strided, offsets are 64-bit, NaN and
infinities pass.

Sums are float32, and a group's sum is scaled in float32, so the weight is not rounded (`weight_mm_decode_sm90` and
`weight_mm_large_batch_sm90` state exceptions). "dequantize" rounds the weight to x's dtype first. There, and on CPUs,
bias and residual may be added with a rounding each.

Implementations, as `launches` reports them:

    decode       weight_mm_decode_sm90: CUDA C++ for compute capability 9.0, up to 16 tokens, bound by memory
    large_batch  weight_mm_large_batch_sm90: CUDA C++ for compute capability 9.0, with wgmma
    triton       weight_mm_triton: int4 and int8 on other GPUs, and in layouts that the CUDA kernels don't take, up to
                 64 tokens
    dequantize   weight_mm_dequantized: cuBLAS, or PyTorch on CPUs, on a chunk of the dequantized weight at a time
    cpu          weight_mm_cpu: C++ compiled at first use, for int4 and int8 on a CPU
    empty        no product: M, N or K is 0

`linear_table` chooses among those for GPUs. A call looks up its plan by the layouts of its operands; only new layouts
are checked and planned. The op has no gradient: callers compute that of x with the dequantized weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lowbit_kernels.runtime import launcher
from lowbit_kernels.runtime.launch_plan import Buffer, Composition, LaunchPlan
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.weight_only import (
    linear_table,
    weight_mm_cpu,
    weight_mm_decode_sm90,
    weight_mm_dequantized,
    weight_mm_large_batch_sm90,
    weight_mm_triton,
)
from lowbit_kernels.weight_only.codes_format import dequantized, format_of
from lowbit_kernels.weight_only.one_launch import OneLaunch
from lowbit_kernels.weight_only.weight_operands import (
    ADDEND_TYPES,
    FORMAT_OPERANDS,
    FORMAT_RULES,
    HALVES,
    K_RULE,
    Description,
    Product,
    Tensors,
    WeightOperands,
    all_described,
    all_layouts,
)

IMPLEMENTATIONS = {
    "decode": weight_mm_decode_sm90,
    "large_batch": weight_mm_large_batch_sm90,
    "triton": weight_mm_triton,
    "cpu": weight_mm_cpu,
    "dequantize": weight_mm_dequantized,
}
ON_CUDA = ("decode", "large_batch", "triton", "dequantize")
ON_CPU = ("triton", "cpu", "dequantize")  # Triton only under its interpreter


@op(
    "empty(x.dtype, *x.shape[:-1], N)",
    by_layout=True,
    planned=True,
    flops="2 * x.numel() * N",
    x="float [..., K]",
    **FORMAT_OPERANDS,
    bias="float [N]",
    residual="float [..., N]",
    rules={**FORMAT_RULES, **K_RULE},
    types=ADDEND_TYPES,
)
def weight_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group_size: int,
    global_scale: Tensor | None = None,
    bits: int = 0,
    table: Sequence[float] = (),
) -> Tensor:
    """x times a weight in few bits; see the module's docstring."""
    parts = (codes, scale, zero_point, group_size, x.shape[-1], torch.float64)
    out = x.double() @ dequantized(*parts, global_scale, bits, table).T
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out.to(x.dtype)


reference, check = weight_linear.reference, weight_linear.check


@dataclass
class WeightLinearPlan:
    """How calls with operands of the same layouts run."""

    implementation: str
    product: Product
    shape: tuple[int, ...]  # of the result
    is_direct: bool  # the product takes the operands as they are
    copies_x: bool
    copies: bool = False  # x or an addend

    @functools.cached_property
    def launches(self) -> LaunchPlan | None:
        """The launch plan for the operands, on the current device; None where there is none, or it copies one."""
        product = self.product
        if self.copies or not isinstance(product, OneLaunch) or product.copies:
            return None
        whole = Composition(7, (Buffer(self.shape, product.dtype),))
        *first, global_scale, out = range(8)
        whole.add(product.launches, (*first, None, global_scale), (out,))
        return whole.plan()


@functools.lru_cache(maxsize=8192)
def planned(
    tensors: tuple[Description | None, ...],
    group_size: int,
    bits: int = 0,
    table: tuple[float, ...] = (),
    implementation: str | None = None,
) -> WeightLinearPlan:
    """The plan for x, codes, scale, zero_point, bias, residual and global_scale that are `described` so.

    Args:
        implementation: one of IMPLEMENTATIONS, for tests and benchmarks. ValueError where it doesn't take the operands.

    Raises: as `weight_linear`.
    """
    *layouts, global_scale = all_layouts(tensors)
    check(*layouts, group_size, global_scale, bits, table)
    x, codes, scale, zero_point, bias, residual = layouts
    n = codes.shape[0]
    m, shape = prod(x.shape[:-1]), (*x.shape[:-1], n)
    if 0 in (*x.shape, n):
        return WeightLinearPlan("empty", functools.partial(_empty, shape), shape, True, False)
    rows = x.rows()
    flat = rows or x.copied((m, x.shape[-1]))
    ends = bias and bias.contiguous((n,)), residual and residual.contiguous((m, n))
    zeros = None if zero_point is None else zero_point.dtype
    format = format_of(codes.dtype, scale.dtype, zeros, bits, table)
    parts = (flat, codes, scale, zero_point, *ends, None, group_size, x.dtype)
    operands = WeightOperands(*parts, format, global_scale)
    name, product = _chosen(operands, implementation)
    is_direct = rows is not None and flat.shape == x.shape and ends == (bias, residual)
    copies = rows is None or not all(t is None or t.is_contiguous for t in (bias, residual))
    return WeightLinearPlan(name, product, shape, is_direct, rows is None, copies)


def _chosen(operands: WeightOperands, implementation: str | None) -> tuple[str, Product]:
    """The first implementation in the order of preference that takes the operands; or the given one."""
    names = _preferred(operands) if implementation is None else (implementation,)
    for name in names:
        product = IMPLEMENTATIONS[name].product(operands)
        if product is not None:
            return name, product
    raise ValueError(f"{implementation} does not take {operands}; see its product()")


def _preferred(operands: WeightOperands) -> tuple[str, ...]:
    x = operands.x
    if x.device.type != "cuda":
        return ON_CPU
    if x.dtype not in HALVES:
        return ("dequantize",)
    if operands.m <= weight_mm_decode_sm90.MAX_TOKENS and not operands.format.is_int4_or_int8:
        return ON_CUDA  # measured: faster than any other kernel for these formats
    format = operands.format
    is_mxfp8 = format.exponent > 0 and format.scale_bytes
    shape = operands.m, operands.n, operands.k
    fastest = linear_table.choose(*shape, operands.bits, operands.group_size, is_mxfp8)
    return ON_CUDA[ON_CUDA.index(fastest) :]


def _empty(shape: tuple[int, ...], tensors: Tensors) -> Tensor:
    """The result where there is nothing to multiply: bias and residual alone."""
    x, _, _, _, bias, residual, *_ = tensors
    out = x.new_zeros(shape)
    for part in (bias, residual):
        out = out if part is None else out + part
    return out


@weight_linear.kernel
def run(
    x,
    codes,
    scale,
    zero_point,
    bias,
    residual,
    group_size,
    global_scale=None,
    bits=0,
    table=(),
    implementation=None,
) -> Tensor:
    """The op's kernel on every device, by the implementation that `planned` chooses or is given."""
    layouts = all_described(x, codes, scale, zero_point, bias, residual, global_scale)
    plan = planned(layouts, group_size, bits, tuple(table), implementation)
    ran("weight_linear", plan.implementation)
    if x.is_cuda:
        with torch.cuda.device_of(x):
            found = plan.launches
        operands = x, codes, scale, zero_point, bias, residual, global_scale
        if found is not None:
            return launcher.carried_out("weight_linear", found, operands)[0]
        launcher.learn("weight_linear", None)
    if plan.is_direct:
        return plan.product((x, codes, scale, zero_point, bias, residual, None, global_scale))
    n, k = plan.shape[-1], x.shape[-1]
    if plan.copies_x:
        x = x.clone(memory_format=torch.contiguous_format)
    x = x.view(-1, k)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.reshape(-1, n).contiguous()
    parts = (x, codes, scale, zero_point, bias, residual, None, global_scale)
    return plan.product(parts).view(plan.shape)
