"""Products of activations, quantized as they come, and weights in the same 8-bit format.

    q[m, k], t[m] = quantize_tokens(x)
    out[m, n]     = (sum_k q[m, k] * codes[n, k]) * t[m] * scale[n]  +  bias[n] + residual[m, n]

    x          bfloat16, float16 or float32 [..., K]
    codes      int8_dynamic_linear: int8 [N, K];  float8_linear: float8_e4m3fn [N, K]
    scale      float32, bfloat16 or float16 [N] or [N, 1]; float8_linear also [1], for all rows
    bias       [N], residual [..., N]: x's dtype, or None; the residual is added with a rounding of its own
    out        x's dtype [..., N], contiguous

Codes and scales of x are those of ``lowbit``'s dynamic schemes to the bit (`quantize_tokens`), in one kernel; the
product is that of `scaled_mm`: int8 sums are exact in int32, which 131,071 products can't pass (a longer K raises).

At most `MOST_NUMBERS` tokens: products of 8 bits by 8 have tiles of 128 tokens, and steps that take as long for fewer;
the kernels for weights that are unpacked (``weight_mm_few`` or ``weight_mm_many``, as ``linear_table`` has it for int8
weights) are bound by the weight's bytes. They get the codes as numbers, which are exact: int8's of x's dtype, float8's
of float16; and sum in float32. int8: exactly while a sum's parts stay below 2**24, beyond which (K over 1,040 at the
earliest, when all codes are extreme) they round at 2**-23, far below the result's own rounding.

float8: ``tensorwise`` gives all tokens one scale. With one of the weight, too, few tokens go to `scaled_mm` as well:
for that, it was no slower than the kernels above, which want scales by row. `scaled_mm` gets K padded to a multiple of
16 where it isn't one, by a copy of the weight at every call.

`calls` counts "int8_dynamic_linear" and "float8_linear", and with " few" or " many" behind it what went to these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels import weight_mm_few, weight_mm_many
from lowbit_kernels.library import LIBRARY, check_one_device
from lowbit_kernels.linear_table import Regime, choose
from lowbit_kernels.quantize_tokens import codes_of
from lowbit_kernels.quantize_tokens import reference as quantized
from lowbit_kernels.scaled_mm import scaled_mm
from lowbit_kernels.weight_linear import FLOATS, HALVES, calls
from lowbit_kernels.weight_mm_few import E4M3

MOST_NUMBERS = {torch.int8: 32, E4M3: 64}  # tokens
MOST_K = (2**31 - 1) // 2**14  # of int8


def int8_dynamic_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """int8 by int8; shapes, dtypes and the formula are in the module's docstring.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other.
    """
    return torch.ops.lowbit.int8_dynamic_linear(x, codes, scale, bias, residual)


def float8_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    tensorwise: bool = False,
) -> Tensor:
    """float8 by float8; arguments and errors as of `int8_dynamic_linear`. ``tensorwise``: one scale for all of x."""
    return torch.ops.lowbit.float8_linear(x, codes, scale, bias, residual, tensorwise)


def reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tensorwise: bool = False,
) -> Tensor:
    """The formula in float64, on any device, for either op."""
    _check(x, codes, scale, bias, residual)
    k = x.shape[-1]
    q, t = quantized(x.reshape(prod(x.shape[:-1]), k), _format(codes), tensorwise)
    sums = q[:, :k].double() @ codes.double().T
    out = sums * t.double().reshape(-1, 1) * scale.double().reshape(1, -1)
    out = out.view(*x.shape[:-1], codes.shape[0])
    for part in (bias, residual):
        out = out if part is None else out + part.double()
    return out.to(x.dtype)


def _format(codes: Tensor) -> str:
    return "int8" if codes.dtype == torch.int8 else "e4m3"


def _numbers(x: Tensor, codes: Tensor) -> torch.dtype:
    """The dtype of x's codes as numbers, which the codes of the weight become."""
    return x.dtype if codes.dtype == torch.int8 else torch.float16


def _of_numbers(x: Tensor, codes: Tensor, scale: Tensor) -> Regime | None:
    """Which product of codes as numbers takes few tokens, "few" or "many"; scale is [N, 1]."""
    m, k = x.shape
    if not x.is_cuda or x.dtype not in HALVES or m > MOST_NUMBERS[codes.dtype]:
        return None
    x = x.view(_numbers(x, codes))  # as its codes will be
    kernel = choose(m, len(codes), k, 8, k)
    product = weight_mm_few if kernel == "few" else weight_mm_many
    return kernel if product.is_available(x, codes, scale, bits=8, group_size=k) else None


def _linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tensorwise: bool = False,
) -> Tensor:
    _check(x, codes, scale, bias, residual)
    op = "int8_dynamic_linear" if codes.dtype == torch.int8 else "float8_linear"
    calls[op] += 1
    k, n = x.shape[-1], codes.shape[0]
    shape, x = (*x.shape[:-1], n), x.reshape(prod(x.shape[:-1]), k)
    x = x if x.stride(1) == 1 else x.contiguous()  # as the kernels read it
    bias = None if bias is None else bias.contiguous()
    if x.numel() and n and not (tensorwise and scale.numel() == 1):
        by_row = scale.reshape(-1, 1).expand(n, 1)
        if kernel := _of_numbers(x, codes, by_row):
            calls[f"{op} {kernel}"] += 1
            q, t = codes_of(x, _format(codes), _numbers(x, codes), tensorwise)
            residual = None if residual is None else residual.reshape(-1, n).contiguous()
            few = weight_mm_few.few_tokens_mm
            product = few if kernel == "few" else weight_mm_many.many_tokens_mm
            ends = (None, bias, residual, t.expand(len(x)))
            out = product(*(q[:, :k], codes, by_row, *ends), bits=8, group_size=k, dtype=x.dtype)
            return out.view(shape)
    if extra := -k % 16:  # as the codes of x are
        codes = F.pad(codes.view(torch.int8), (0, extra)).view(codes.dtype)
    q, t = codes_of(x, _format(codes), codes.dtype, tensorwise)
    by_column = scale.reshape(-1).float()
    out = scaled_mm(q, codes, t, by_column, bias=bias, out_dtype=x.dtype).view(shape)
    return out if residual is None else out.add_(residual)


def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tensorwise: bool = False,
    *,
    of: torch.dtype,
) -> Tensor:
    _check(_checked(x, codes, of), codes, scale, bias, residual)
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _check(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    check_one_device(x=x, codes=codes, scale=scale, bias=bias, residual=residual)
    if codes.dtype not in (torch.int8, E4M3):
        raise TypeError(f"codes must be torch.int8 or {E4M3}, got {codes.dtype}")
    for name, dtype in (("x", x.dtype), ("scale", scale.dtype)):
        if dtype not in FLOATS:
            raise TypeError(f"{name} must be one of {', '.join(map(str, FLOATS))}; got {dtype}")
    if x.dim() < 1 or codes.dim() != 2 or x.shape[-1] != codes.shape[1]:
        raise ValueError(
            f"a linear takes x [..., K] and codes [N, K], got {tuple(x.shape)} and {tuple(codes.shape)}"
        )
    if codes.dtype == torch.int8 and codes.shape[1] > MOST_K:
        raise ValueError(
            f"int8 sums of more than {MOST_K} products may pass int32, got K = {codes.shape[1]}; split K"
        )
    n = codes.shape[0]
    shapes = [(n,), (n, 1)] + [(1,)] * (codes.dtype == E4M3)
    if tuple(scale.shape) not in shapes:
        raise ValueError(
            f"scale must have the shape {' or '.join(map(str, shapes))}, got {tuple(scale.shape)}"
        )
    for name, part, shape in (("bias", bias, (n,)), ("residual", residual, (*x.shape[:-1], n))):
        if part is not None and tuple(part.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(part.shape)}")
        if part is not None and part.dtype != x.dtype:
            raise TypeError(f"{name} must be of x's dtype, {x.dtype}; got {part.dtype}")


def _int8(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    return _linear(_checked(x, codes, torch.int8), codes, scale, bias, residual)


def _float8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tensorwise: bool,
) -> Tensor:
    return _linear(_checked(x, codes, E4M3), codes, scale, bias, residual, tensorwise)


def _checked(x: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    if codes.dtype != dtype:
        raise TypeError(f"codes must be {dtype}, got {codes.dtype}")
    return x


ARGUMENTS = "Tensor x, Tensor codes, Tensor scale, Tensor? bias, Tensor? residual"
LIBRARY.define(f"int8_dynamic_linear({ARGUMENTS}) -> Tensor")
LIBRARY.define(f"float8_linear({ARGUMENTS}, bool tensorwise) -> Tensor")
for _name, _impl, _of in (
    ("int8_dynamic_linear", _int8, torch.int8),
    ("float8_linear", _float8, E4M3),
):
    LIBRARY.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", partial(_fake, of=_of), lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    n: int
    k: int
    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    bias: bool = False
    residual: bool = False
    tensorwise: bool = False  # of x
    one_scale: bool = False  # for the weight
    leading: tuple[int, ...] = ()  # dimensions before M
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, bias, residual; for float8 also tensorwise."""

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        codes = torch.randn(self.n, self.k, device=device) * (32 if self.format == "int8" else 112)
        codes = (
            codes.round().clamp(-128, 127).to(torch.int8)
            if self.format == "int8"
            else codes.clamp(-448, 448).to(E4M3)
        )
        rows = 1 if self.one_scale else self.n
        ends = (
            floats(*self.leading, self.m, self.k),
            codes,
            (torch.rand(rows, device=device) * 0.01 + 1e-4).to(self.scale_dtype),
            floats(self.n) if self.bias else None,
            floats(*self.leading, self.m, self.n) if self.residual else None,
        )
        return ends if self.format == "int8" else (*ends, self.tensorwise)


SHAPES: list[tuple[str, int, int, int, dict]] = [
    ("typical", 40, 64, 128, {"bias": True}),
    ("one-token", 1, 48, 256, {"residual": True}),
    ("few-tokens", 9, 33, 96, {"bias": True, "residual": True}),
    ("fp32", 17, 24, 64, {"dtype": torch.float32, "bias": True}),
    ("fp16", 17, 24, 64, {"dtype": torch.float16}),
    ("bf16-scales", 20, 24, 64, {"scale_dtype": torch.bfloat16}),
    ("prime-everything", 31, 37, 101, {"bias": True}),
    ("one-element", 1, 1, 1, {}),
    ("leading", 3, 24, 64, {"leading": (2, 2), "residual": True}),
    ("no-tokens", 0, 32, 64, {"bias": True}),
    ("no-rows", 4, 0, 64, {}),
    ("no-k", 4, 6, 0, {"bias": True}),
]
TENSORWISE: list[tuple[str, int, int, int, dict]] = [
    ("tensorwise", 40, 64, 128, {"one_scale": True, "bias": True}),
    ("tensorwise-activation", 9, 33, 101, {}),
    ("tensorwise-no-tokens", 0, 32, 64, {"one_scale": True}),
]
CASES = [
    *(Case(name, m, n, k, **options) for name, m, n, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, n, k, "e4m3", **options) for name, m, n, k, options in SHAPES),
    *(Case(f"e4m3-{c}", m, n, k, "e4m3", tensorwise=True, **o) for c, m, n, k, o in TENSORWISE),
    Case("e4m3-one-scale", 9, 33, 96, "e4m3", one_scale=True),
    Case("8192-cubed", 8192, 8192, 8192, large=True),
    Case("llama-8b-up", 8192, 14336, 4096, large=True),
    Case("llama-8b-up-one-token", 1, 14336, 4096, large=True),
    Case("e4m3-8192-cubed", 8192, 8192, 8192, "e4m3", large=True),
]
