"""Products of two quantized matrices, scaled back.

    out[m, n] = (sum_k a[m, k] * b[n, k]) * a_scale[m] * b_scale[n] + bias[n]

    a          int8 or float8 [M, K], K a multiple of 16
    b          the same [N, K]: both operands have K contiguous, the product is a @ b.T
    a_scale    float32 [M], or [1] for all rows
    b_scale    float32 [N], or [1] for all columns
    bias       float32, bfloat16 or float16 [N], or None
    out        float32, bfloat16 or float16 [M, N], contiguous

``int8_scaled_mm``: the sum is exact in int32 (it wraps beyond 2**31, which takes more than 133,000 products of 127 by
127 in one row), then converted to float32, multiplied by the row's scale, by the column's, and the bias added, each in
float32, and rounded once to the output's dtype. Every path below does these steps in this order; only the bias may be
added without a rounding before it.

``float8_scaled_mm``: e4m3 by e4m3, e5m2 by e4m3 or e4m3 by e5m2 (`torch.float8_e4m3fn`, `torch.float8_e5m2`). On GPUs
with float8 units (compute capability 8.9 on) it is cuBLAS, whose sums on Hopper have about 14 bits in a row of 32
products or more; elsewhere the product of the decoded operands in float32.

`calls` counts the calls of each op, by name, where it is computed: also inside of compiled code, which can't see
through an op.

Where each runs:

    CUDA, compute capability 9.0    scaled_mm.cu, compiled at first use: TMA, wgmma, tiles of 128 x 256; where these are
                                    fewer than multiprocessors, narrower ones, or K in slices, whose int32 sums take
                                    4·M·N bytes each while it runs (17 MB for the four of a gradient of 512 x 2048 over
                                    16384 rows)
    other CUDA devices              Triton (int8_mm_triton)
    CPU                             PyTorch
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels import int8_mm_hopper, int8_mm_triton
from lowbit_kernels.library import LIBRARY, check_one_device
from lowbit_kernels.triton_runtime import runs_on

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

calls: collections.Counter[str] = collections.Counter()


def int8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a @ b.T of int8, scaled; shapes, dtypes and the formula are in the module's docstring.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other, K not a multiple of 16, or tensors on several devices.
    """
    return torch.ops.lowbit.int8_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)


def float8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a @ b.T of float8, scaled; arguments and errors as of `int8_scaled_mm`."""
    return torch.ops.lowbit.float8_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype)


def reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The formula in PyTorch ops, on any device; the sum in float64, which is exact for int8."""
    _check(a, b, a_scale, b_scale, bias, out_dtype)
    return _scaled((a.double() @ b.double().T).to(torch.float32), a_scale, b_scale, bias, out_dtype)


def _scaled(
    sums: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    out = sums * a_scale[:, None] * b_scale[None, :]
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


def _int8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    _check(a, b, a_scale, b_scale, bias, out_dtype)
    _check_operands(a, b, (torch.int8,))
    calls["int8_scaled_mm"] += 1
    if 0 in (*a.shape, b.shape[0]):
        return _empty_sum(a, b, bias, out_dtype)
    arguments = (a, b, a_scale, b_scale, bias, out_dtype)
    if int8_mm_hopper.is_available(a.device):
        return int8_mm_hopper.int8_mm(*arguments)
    if runs_on(a.device):
        return int8_mm_triton.int8_mm(*arguments)
    return _scaled(int8_sums(a, b).to(torch.float32), *arguments[2:])


def int8_sums(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K].T of int8, in int32 [M, N]; none of the sizes 0.

    On CPUs torch._int_mm takes the stride of a dimension of size 1 for the distance of its rows, whatever it is (0 from
    Inductor, 1 of a column turned into a row), and reads other memory (pytorch issue 195066). So here there is none.
    """
    (m, k), n = a.shape, b.shape[0]
    if a.device.type == "cpu":
        if k == 1:
            a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
        a, b = (torch.cat([x, x]) if x.shape[0] == 1 else x for x in (a, b))
    return torch._int_mm(a, b.T)[:m, :n]


def _float8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    _check(a, b, a_scale, b_scale, bias, out_dtype)
    _check_operands(a, b, FLOAT8)
    calls["float8_scaled_mm"] += 1
    if 0 in (*a.shape, b.shape[0]):
        return _empty_sum(a, b, bias, out_dtype)
    if a.device.type == "cuda" and torch.cuda.get_device_capability(a.device) >= (8, 9):
        return _float8_cublas(a, b, a_scale, b_scale, bias, out_dtype)
    with torch.autocast(a.device.type, enabled=False):  # in float16 the codes' products overflow
        sums = a.float() @ b.float().T
    return _scaled(sums, a_scale, b_scale, bias, out_dtype)


def _float8_cublas(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    # a single row counts as contiguous whatever its stride is, and cuBLAS wants that of a row
    a, b = (x.contiguous().view(-1).view(x.shape) for x in (a, b))
    n = b.shape[0]
    if extra := -n % 16:  # cuBLAS takes multiples of 16 columns
        b = F.pad(b.view(torch.uint8), (0, 0, 0, extra)).view(b.dtype)
    fused_bias = bias is None or (bias.dtype == out_dtype != torch.float32 and not extra)
    by_row = a_scale.numel() > 1 or b_scale.numel() > 1
    any_dtype = not by_row or out_dtype == torch.bfloat16 or _takes_rows_in_any_dtype(a.device)
    if fused_bias and not extra and any_dtype:
        if by_row:
            a_scale = a_scale.expand(a.shape[0])[:, None].contiguous()
            b_scale = b_scale.expand(n)[None, :].contiguous()
        return torch._scaled_mm(
            a,
            b.t(),
            a_scale if by_row else a_scale.reshape(()),
            b_scale if by_row else b_scale.reshape(()),
            bias=bias,
            out_dtype=out_dtype,
            use_fast_accum=True,
        )
    # cuBLAS has no such epilogue: the plain sums in float32, and the scales in a second pass.
    one = a_scale.new_ones(())
    sums = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
    return _scaled(sums[:, :n], a_scale, b_scale, bias, out_dtype)


def _takes_rows_in_any_dtype(device: torch.device) -> bool:
    """Whether scales of rows may come with another output than bfloat16: in cuBLAS 12.9 and later, on Hopper."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def _empty_sum(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    out = a.new_zeros((a.shape[0], b.shape[0]), dtype=out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    _check(a, b, a_scale, b_scale, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check_operands(a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    names = " or ".join(map(str, dtypes))
    if a.dtype not in dtypes or b.dtype not in dtypes:
        raise TypeError(f"both operands must be {names}, got {a.dtype} and {b.dtype}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError(
            "one operand must be torch.float8_e4m3fn, got two of torch.float8_e5m2, whose product no GPU has"
        )


def _check(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a scaled product takes a [M, K] and b [N, K], got {tuple(a.shape)} and {tuple(b.shape)}; flatten leading "
            "dimensions first, and pass b transposed"
        )
    if a.shape[1] % 16:
        raise ValueError(
            f"K must be a multiple of 16, got {a.shape[1]}; pad both operands with zeros"
        )
    for name, scale, size in (("a_scale", a_scale, a.shape[0]), ("b_scale", b_scale, b.shape[0])):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {scale.dtype}")
        if scale.dim() != 1 or (scale.shape[0] != 1 and scale.shape[0] != size):
            raise ValueError(
                f"{name} must have the shape ({size},) or (1,), got {tuple(scale.shape)}"
            )
    check_one_device(a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias)
    if bias is not None and bias.shape != (b.shape[0],):
        raise ValueError(f"bias must have the shape ({b.shape[0]},), got {tuple(bias.shape)}")
    for name, got in (
        ("out_dtype", out_dtype),
        ("bias", out_dtype if bias is None else bias.dtype),
    ):
        if got not in FLOATS:
            raise TypeError(f"{name} must be one of {', '.join(map(str, FLOATS))}, got {got}")


for _name, _launch in (("int8_scaled_mm", _int8), ("float8_scaled_mm", _float8)):
    LIBRARY.define(
        f"{_name}(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias=None, "
        "ScalarType out_dtype=bfloat16) -> Tensor"
    )
    LIBRARY.impl(_name, _launch, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", _fake, lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    n: int
    k: int
    a_dtype: torch.dtype = torch.int8
    b_dtype: torch.dtype | None = None  # a's
    rowwise: bool = True  # a scale for each row of both operands, or one for each operand
    bias: torch.dtype | None = None
    out_dtype: torch.dtype = torch.bfloat16
    row_step: int = 1  # every n-th row of larger operands
    turned: bool = False  # transposes of columns that lie end to end: a single row has stride 1
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """a, b, a_scale, b_scale, bias, out_dtype."""

        def operand(rows: int, dtype: torch.dtype) -> Tensor:
            size = (rows * self.row_step, self.k)
            if dtype == torch.int8:
                codes = torch.randint(-127, 128, size, dtype=dtype, device=device)
            else:
                codes = (torch.randn(size, device=device) * 16).to(dtype)
            if self.turned:
                codes = codes.new_empty((self.k, rows)).copy_(codes.T).T.contiguous()
            return codes[:: self.row_step]

        def scale(rows: int) -> Tensor:
            return torch.rand(rows if self.rowwise else 1, device=device) * 0.01 + 1e-4

        bias = None
        if self.bias is not None:
            bias = torch.randn(self.n, device=device).to(self.bias)
        return (
            operand(self.m, self.a_dtype),
            operand(self.n, self.b_dtype or self.a_dtype),
            scale(self.m),
            scale(self.n),
            bias,
            self.out_dtype,
        )


E4M3, E5M2 = FLOAT8
SHAPES: list[tuple[str, int, int, int, dict]] = [
    ("typical", 128, 256, 128, {}),
    ("one-scale", 64, 96, 64, {"rowwise": False}),
    ("bias", 65, 72, 80, {"bias": torch.bfloat16}),
    ("fp16", 40, 24, 48, {"out_dtype": torch.float16, "bias": torch.float16}),
    ("fp32", 33, 48, 64, {"out_dtype": torch.float32, "bias": torch.float32}),
    ("bias-of-another-dtype", 31, 48, 64, {"bias": torch.float32}),
    ("prime-everything", 131, 127, 16, {}),
    ("odd-columns-fp32", 17, 19, 32, {"out_dtype": torch.float32}),
    ("one-row", 1, 64, 256, {}),
    ("one-column", 70, 1, 144, {}),
    ("one-element", 1, 1, 16, {}),
    ("one-row-turned", 1, 64, 16, {"turned": True}),
    ("one-column-turned", 16, 1, 144, {"turned": True}),
    ("one-element-turned", 1, 1, 64, {"turned": True}),
    ("several-tiles", 300, 520, 272, {}),
    ("several-tiles-and-an-odd-one", 257, 514, 400, {"bias": torch.bfloat16}),
    ("long-sums", 8, 16, 20_000, {"out_dtype": torch.float32}),
    ("no-rows", 0, 32, 64, {}),
    ("no-columns", 16, 0, 64, {"bias": torch.bfloat16}),
    ("no-k", 5, 7, 0, {"bias": torch.float32}),
    ("strided-rows", 50, 60, 64, {"row_step": 3}),
]
LARGE = [
    ("8192-cubed", 8192, 8192, 8192),
    ("llama-8b-attention", 8192, 4096, 4096),
    ("llama-8b-up", 8192, 14336, 4096),
    ("llama-8b-down", 8192, 4096, 14336),
    ("llama-1b-key-gradient", 512, 2048, 16384),
]
CASES = [
    *(Case(name, m, n, k, **options) for name, m, n, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, n, k, E4M3, **options) for name, m, n, k, options in SHAPES),
    Case("e5m2-e4m3", 48, 64, 96, E5M2, E4M3),
    Case("e4m3-e5m2", 48, 64, 96, E4M3, E5M2, bias=torch.bfloat16),
    Case("e5m2-e4m3-one-scale", 30, 34, 96, E5M2, E4M3, rowwise=False),
    *(Case(name, m, n, k, large=True) for name, m, n, k in LARGE),
    *(Case(f"e4m3-{name}", m, n, k, E4M3, large=True) for name, m, n, k in LARGE),
]
