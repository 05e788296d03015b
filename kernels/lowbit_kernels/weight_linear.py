"""Products of activations and a weight of 4 or 8 bits.

    out[m, n] = sum_k x[m, k] * (code[n, k] - zero_point[n, k // G]) * scale[n, k // G]  +  bias[n] + residual[m, n]

    x           bfloat16, float16 or float32 [..., K]
    packed      int4_linear: uint8 [N, ceil(Kp / 2)], even k in the low nibble, nibble = code + 8, code in -8 .. 7
    codes       int8_linear: int8 [N, Kp]
    scale       float32, bfloat16 or float16 [N, Kp / G]
    zero_point  int8 [N, Kp / G], on the grid of the codes, or None for 0
    bias        [N], residual [..., N]: x's dtype, or None
    out         x's dtype [..., N], contiguous

G (``group_size``) is any positive number, K or more for one scale a row; Kp is K padded to a multiple of G, and what
lies in the padding doesn't count. Rows of the weight may be strided; offsets are 64-bit; NaN and infinities pass.

Sums are float32's, and scales are applied in float32 to a group's sum ("few", "many", "triton", "cpu"): the weight
is never rounded (but where `weight_mm_many` says so), and the error is that of rounding the result, 1.7e-3 for
bfloat16. Where the weight is dequantized (``weight_mm_dequantized``), it is rounded to x's dtype first. There, and on
CPUs, bias and residual may be added with a rounding each.

Where each runs (`calls` counts them, as "int4_linear" and "int4_linear few"):

    few         weight_mm_few, CUDA C++ for compute capability 9.0: bound by the memory
    many        weight_mm_many, the same with wgmma
    triton      weight_mm_triton: other GPUs, and layouts that the above don't take, up to 64 tokens
    dequantize  weight_mm_dequantized and cuBLAS, in chunks; on CPUs in chunks as well
    cpu         weight_mm_cpu, C++ compiled at first use: few tokens in 16 bits on a CPU

Which of the first four, `linear_table` knows. The ops have no gradient of their own: that to x is a product with the
dequantized weight, `lowbit.products` has it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels import (
    linear_table,
    weight_mm_cpu,
    weight_mm_dequantized,
    weight_mm_few,
    weight_mm_many,
    weight_mm_triton,
)
from lowbit_kernels.library import LIBRARY, check_one_device
from lowbit_kernels.triton_runtime import runs_on

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)

calls: collections.Counter[str] = collections.Counter()


def int4_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """x times an int4 weight; shapes, dtypes and the formula are in the module's docstring.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other.
    """
    return torch.ops.lowbit.int4_linear(x, packed, scale, zero_point, bias, residual, group_size)


def int8_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group_size: int,
) -> Tensor:
    """x times an int8 weight; arguments and errors as of `int4_linear`."""
    return torch.ops.lowbit.int8_linear(x, codes, scale, zero_point, bias, residual, group_size)


def reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group_size: int = 128,
) -> Tensor:
    """The formula in float64, on any device, for either op: packed codes are uint8."""
    bits = 4 if codes.dtype == torch.uint8 else 8
    check(x, codes, scale, zero_point, bias, residual, group_size, bits)
    k = x.shape[-1]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
    weight = codes[:, :k].double()
    group = torch.arange(k, device=x.device) // group_size
    if zero_point is not None:
        weight = weight - zero_point.double()[:, group]
    out = x.double() @ (weight * scale.double()[:, group]).T
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out.to(x.dtype)


def regime_of(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int
) -> str:
    """Which of the module's docstring serves x [M, K]; M, N, K > 0."""
    (m, k), n = x.shape, scale.shape[0]
    can_triton = (
        runs_on(x.device)
        and m <= weight_mm_triton.MOST_TOKENS
        and weight_mm_triton.block_of_k(group_size, scale.shape[1]) > 0
    )
    if not x.is_cuda:
        if can_triton:
            return "triton"
        operands = (x, codes, scale, zero_point)
        taken = weight_mm_cpu.takes(*operands, bits=bits, group_size=group_size)
        return "cpu" if taken else "dequantize"
    if x.dtype not in HALVES:
        return "dequantize"
    wanted = linear_table.choose(m, n, k, bits, group_size)
    fit = {"bits": bits, "group_size": group_size}
    if wanted == "few" and weight_mm_few.is_available(x, codes, scale, **fit):
        return "few"
    if wanted in ("few", "many") and weight_mm_many.is_available(x, codes, scale, **fit):
        return "many"
    return "triton" if wanted != "dequantize" and can_triton else "dequantize"


def _linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    bits: int,
    regime: str | None = None,
) -> Tensor:
    """The op; a test may force the regime."""
    check(x, codes, scale, zero_point, bias, residual, group_size, bits)
    calls[f"int{bits}_linear"] += 1
    k, n = x.shape[-1], scale.shape[0]
    shape = (*x.shape[:-1], n)
    if 0 in shape or k == 0:
        out = x.new_zeros(shape)
        for part in (bias, residual):
            out = out if part is None else out + part
        return out
    x = x.reshape(-1, k)
    x = x if x.stride(1) == 1 else x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    if residual is not None:
        residual = residual.reshape(-1, n).contiguous()
    regime = regime or regime_of(x, codes, scale, zero_point, bits, group_size)
    calls[f"int{bits}_linear {regime}"] += 1
    width: dict[str, Any] = {"bits": bits, "group_size": group_size}
    operands = (x, codes, scale, zero_point, bias, residual)
    if regime == "cpu":
        return weight_mm_cpu.weight_mm(*operands, **width).view(shape)
    if regime == "dequantize":
        return weight_mm_dequantized.weight_mm(*operands, **width).view(shape)
    in_registers: dict[str, Callable[..., Tensor]] = {
        "few": weight_mm_few.few_tokens_mm,
        "many": weight_mm_many.many_tokens_mm,
        "triton": weight_mm_triton.weight_mm,
    }
    return in_registers[regime](*operands, None, **width).view(shape)


def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    bits: int,
) -> Tensor:
    check(x, codes, scale, zero_point, bias, residual, group_size, bits)
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def check(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    group_size: int,
    bits: int,
) -> None:
    op, of = f"int{bits}_linear", torch.uint8 if bits == 4 else torch.int8
    check_one_device(
        x=x, codes=codes, scale=scale, zero_point=zero_point, bias=bias, residual=residual
    )
    if codes.dtype != of:
        raise TypeError(f"{op} takes codes as {of}, got {codes.dtype}")
    for name, dtype in (("x", x.dtype), ("scale", scale.dtype)):
        if dtype not in FLOATS:
            raise TypeError(f"{op} takes {name} of {', '.join(map(str, FLOATS))}; got {dtype}")
    if zero_point is not None and zero_point.dtype != torch.int8:
        raise TypeError(
            f"{op} takes zero_point as torch.int8 or None, got {zero_point.dtype}; it lies on the codes' grid"
        )
    if group_size < 1:
        raise ValueError(f"group_size must be 1 or more elements, got {group_size}")
    if x.dim() < 1 or codes.dim() != 2 or scale.dim() != 2:
        raise ValueError(
            f"{op} takes x [..., K], codes [N, .] and scale [N, Kp/G], got {tuple(x.shape)}, {tuple(codes.shape)} "
            f"and {tuple(scale.shape)}"
        )
    n, groups = scale.shape
    padded = groups * group_size
    width = (padded + 1) // 2 if bits == 4 else padded
    if tuple(codes.shape) != (n, width):
        raise ValueError(
            f"a scale of shape {(n, groups)} with group_size {group_size} takes codes of shape {(n, width)}, got "
            f"{tuple(codes.shape)}"
        )
    if not padded - group_size < x.shape[-1] <= padded and (x.shape[-1] or groups):
        raise ValueError(
            f"x has K = {x.shape[-1]}, but {groups} groups of {group_size} hold a K of "
            f"{max(padded - group_size + 1, 0)} to {padded}"
        )
    out = (*x.shape[:-1], n)
    for name, part, shape in (
        ("zero_point", zero_point, (n, groups)),
        ("bias", bias, (n,)),
        ("residual", residual, out),
    ):
        if part is not None and tuple(part.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(part.shape)}")
        if part is not None and name != "zero_point" and part.dtype != x.dtype:
            raise TypeError(f"{name} must be of x's dtype, {x.dtype}; got {part.dtype}")


for _bits, _codes in ((4, "packed"), (8, "codes")):
    _name = f"int{_bits}_linear"
    LIBRARY.define(
        f"{_name}(Tensor x, Tensor {_codes}, Tensor scale, Tensor? zero_point, Tensor? bias, Tensor? residual, "
        "int group_size) -> Tensor"
    )
    LIBRARY.impl(_name, partial(_linear, bits=_bits), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", partial(_fake, bits=_bits), lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    n: int
    k: int
    group_size: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.bfloat16
    zero_point: bool = False
    bias: bool = False
    residual: bool = False
    leading: tuple[int, ...] = ()  # dimensions before M
    row_step: int = 1  # every n-th row of a larger weight
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, zero_point, bias, residual, group_size."""
        groups, rows, step = -(-self.k // self.group_size), self.n * self.row_step, self.row_step
        padded = groups * self.group_size
        low, high, width, of = -128, 128, padded, torch.int8
        if self.bits == 4:
            low, high, width, of = 0, 256, (padded + 1) // 2, torch.uint8
        codes = torch.randint(low, high, (rows, width), dtype=of, device=device)
        scale = (torch.rand(rows, groups, device=device) * 0.02 + 1e-3).to(self.scale_dtype)
        zero_point = torch.randint(-8, 8, (rows, groups), dtype=torch.int8, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        return (
            floats(*self.leading, self.m, self.k),
            codes[::step],
            scale[::step],
            zero_point[::step] if self.zero_point else None,
            floats(self.n) if self.bias else None,
            floats(*self.leading, self.m, self.n) if self.residual else None,
            self.group_size,
        )


SHAPES: list[tuple[str, int, int, int, int, dict]] = [
    ("one-token", 1, 64, 256, 128, {}),
    ("typical", 8, 96, 512, 128, {"bias": True}),
    ("group-32", 3, 64, 160, 32, {"residual": True}),
    ("group-64-zero-point", 16, 48, 320, 64, {"zero_point": True}),
    ("group-256", 5, 32, 512, 256, {"dtype": torch.float16, "scale_dtype": torch.float16}),
    ("per-row", 7, 48, 384, 384, {"bias": True, "residual": True}),
    ("per-row-odd", 7, 17, 331, 331, {"zero_point": True}),
    ("fp32", 9, 33, 200, 64, {"dtype": torch.float32, "scale_dtype": torch.float32, "bias": True}),
    ("fp32-scales", 17, 40, 256, 64, {"scale_dtype": torch.float32, "zero_point": True}),
    ("padded", 2, 19, 250, 128, {"zero_point": True, "bias": True}),
    ("odd-group", 4, 13, 45, 9, {}),
    ("prime-everything", 13, 31, 101, 7, {"zero_point": True}),
    ("one-element", 1, 1, 1, 1, {}),
    ("leading", 3, 24, 128, 32, {"leading": (2, 2), "residual": True}),
    ("no-tokens", 0, 32, 64, 32, {"bias": True}),
    ("no-rows", 4, 0, 64, 32, {}),
    ("no-k", 4, 6, 0, 32, {"bias": True}),
    ("strided-rows", 6, 32, 256, 64, {"row_step": 3, "zero_point": True}),
    ("some-tokens", 50, 64, 256, 64, {"bias": True, "residual": True}),
    ("many-tokens", 70, 65, 256, 128, {"zero_point": True}),
]
LARGE = [
    ("llama-8b-attention", 4096, 4096),
    ("llama-8b-up", 14336, 4096),
    ("llama-8b-down", 4096, 14336),
    ("llama-70b-up", 28672, 8192),
]
CASES = [
    *(Case(name, m, n, k, group, **options) for name, m, n, k, group, options in SHAPES),
    *(
        Case(f"int8-{name}", m, n, k, group, 8, **options)
        for name, m, n, k, group, options in SHAPES
    ),
    *(Case(name, 1, n, k, 128, large=True) for name, n, k in LARGE),
    *(Case(f"int8-{name}", 1, n, k, k, 8, large=True) for name, n, k in LARGE),
]
