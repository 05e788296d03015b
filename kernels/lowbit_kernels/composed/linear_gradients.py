"""The gradients of a linear y = x wᵀ as products in low bits: one op for the quantization of the output's gradient and
both products.

    grad_x      = (dy · s)^ · w^        dy [M, N] times the weight's scales s [N], rounded along its rows
    grad_weight = dŷᵀ · x^              dy rounded along its columns

    dy           float32, bfloat16 or float16 [M, N]
    w^           int8 or float8, transposed: [K, N rounded up to a multiple of 16]; s float32 [N], or [1]. Or the weight
                 [N, K] in high precision, which is then rounded along its rows, to e4m3 where the gradient is float8
    x^           like w^, transposed: [K, M rounded up to a multiple of 16]; its scales float32 [K], or [1]
    grad_x       [M, K] in dy's dtype
    grad_weight  [N, K]

The values are those of `quantize_rowcol` and `scaled_mm`, called one after the other. One weight scale is applied after
the product, and dy alone is rounded. A gradient that is not wanted comes back as [0, 0].

With a `seed` dy is rounded stochastically, by a seed that `seeds.seed_of` makes of dy's bits and this number.

On GPUs of compute capability 9.0 one launch plan holds all of it. In int8 a call takes the host the time of its
launches and of three allocations; in float8, each dtype that cuBLAS reads is one more. A graph of torch.compile holds
one op, instead of three and those of the seed. Codes share memory where one copy is read before the next is written.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.matmul import scaled_mm
from lowbit_kernels.matmul.scaled_mm import Planned
from lowbit_kernels.quantize import quantize_rowcol as rowcol
from lowbit_kernels.quantize import quantize_rowcol_sm90
from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer, Composition
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.seeds import seed_of
from lowbit_kernels.weight_only.weight_operands import TensorLayout, layout

GRAD, WEIGHT, WEIGHT_SCALE, X, X_SCALE, GRAD_X, GRAD_WEIGHT = range(7)
"""The numbers of the tensors of a plan; scratch memory follows."""
APART = 2**29
"""Elements of a gradient from which on its two copies of codes are made one after the other, in the same memory. The
gradient is then read once more: at 4 TB/s and 1.2e15 operations a second that is 7% of the products' time for K = 2048,
and 4% for 4096."""
MOST_ROWS = 2**31 - 1
"""The most rows of a gradient that the plan rounds stochastically: its kernels count rows in 32 bits for the seed."""


def _weight_format(format: str) -> str:
    """The format of a weight that is multiplied by a gradient in `format`."""
    return "int8" if format == "int8" else "e4m3"


@op(
    "[empty(d, *s) for d, s in zip((grad.dtype, dtype), _shapes(grad, weight, weight_scale, x))]",
    planned=True,
    flops="2 * M * N * sum(s[1] for s in _shapes(grad, weight, weight_scale, x))",
    grad="float [M, N]; flatten leading dimensions first",
    weight="codes|float [...]",
    weight_scale="float32 [N] or [1]",
    x="codes [K_X, M + -M % 16]; pass them transposed",
    x_scale="float32 [...]",
    dtype="float",
    rules={
        "rowcol.check_format(format, tensorwise)": "",
        "weight is not None or x is not None": (
            "codes of the weight, of the input, or both are needed; got neither"
        ),
        "weight is not None or weight_scale is None": (
            "scales of weight came without its codes; pass both, or neither"
        ),
        "(x is None) == (x_scale is None)": (
            "x and x_scale are codes and their scales; pass both, or neither"
        ),
        "x is None or x_scale.shape in ((K_X,), (1,))": (
            "scales of x are [{K_X}] or [1], got {tuple(x_scale.shape)}"
        ),
        "weight is None or _fits(weight, weight_scale, N)": (
            "a weight is codes [K, {N + -N % 16}] with weight_scale, or [{N}, K] in high precision without; got "
            "{weight.dtype} {tuple(weight.shape)}, {'without' if weight_scale is None else 'with'} weight_scale"
        ),
    },
    types={
        "weight is None or (weight.dtype.itemsize > 1) == (weight_scale is None)": (
            "a weight is codes with weight_scale, or float32, bfloat16 or float16 without; got "
            "{weight.dtype} {'without' if weight_scale is None else 'with'} weight_scale"
        ),
        "weight_scale is None or (rowcol.FORMATS[format][0], weight.dtype) in scaled_mm.OPERANDS": (
            "a gradient in {format} can't be multiplied by {weight.dtype} of weight"
        ),
        "x is None or (rowcol.FORMATS[format][0], x.dtype) in scaled_mm.OPERANDS": (
            "a gradient in {format} can't be multiplied by {x.dtype} of x"
        ),
    },
)
def linear_gradients(
    grad: Tensor,
    format: str,
    weight: Tensor | None,
    weight_scale: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    *,
    stochastic: bool = False,
    seed: int = 0,
    tensorwise: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """grad_x and grad_weight; shapes, dtypes and the formula are in the module's docstring.

    Args:
        grad: dy [M, N].
        format: that of dy's codes, as of `quantize_rowcol`.
        weight, weight_scale: codes and scales of the weight, or the weight in high precision and None. Without either,
            grad_x is not wanted.
        x, x_scale: codes and scales of the input. Without them, grad_weight is not wanted.
        stochastic: round dy stochastically.
        seed: of the stochastic rounding, a signed 64-bit integer.
        tensorwise: dy, and a weight in high precision, have one scale (float8 only). Not where the weight has several
            scales, since dy times these is rounded.
        dtype: of grad_weight.

    Raises:
        TypeError, ValueError: as `quantize_rowcol` and `scaled_mm` do, or neither gradient is wanted.
    """
    factor = None
    if weight is not None and weight_scale is None:
        _, _, weight, weight_scale = rowcol.quantize_rowcol(
            weight, _weight_format(format), rows=False, tensorwise=tensorwise, row_scales=True
        )
    if weight_scale is not None and weight_scale.numel() != 1:
        factor, weight_scale, tensorwise = weight_scale, None, False
    codes, scale, codes_t, scale_t = rowcol.quantize_rowcol(
        grad,
        format,
        rows=weight is not None,
        columns=x is not None,
        tensorwise=tensorwise,
        seed=seed_of(grad, seed) if stochastic else None,
        row_factor=factor,
    )
    grad_x, grad_weight = grad.new_empty((0, 0)), grad.new_empty((0, 0), dtype=dtype)
    if weight is not None:
        grad_x = scaled_mm.scaled_mm(codes, weight, scale, weight_scale, out_dtype=grad.dtype)
    if x is not None:
        assert x_scale is not None
        grad_weight = scaled_mm.scaled_mm(codes_t, x, scale_t, x_scale, out_dtype=dtype)
    return grad_x, grad_weight


reference = linear_gradients.reference


@linear_gradients.kernel
def _launch(
    grad, format, weight, weight_scale, x, x_scale, stochastic, seed, tensorwise, dtype
) -> tuple[Tensor, Tensor]:
    operands = grad, weight, weight_scale, x, x_scale
    options = stochastic, seed, tensorwise, dtype
    found = None
    if nvrtc.runs_on_hopper(grad.device):
        found = planned(*map(layout, operands), format, *options)
    if found is None:
        launcher.learn("linear_gradients", None)
        return reference(grad, format, weight, weight_scale, x, x_scale, *options)
    rounds = weight is not None and weight_scale is None
    for _ in range(1 + rounds):
        ran("quantize_rowcol", "sm90")
    for name in found.products:
        ran("scaled_mm", name)
    grad_x, grad_weight = launcher.carried_out("linear_gradients", found.plan, operands)
    return grad_x, grad_weight


@functools.lru_cache(maxsize=4096)
def planned(
    grad: TensorLayout,
    weight: TensorLayout | None,
    weight_scale: TensorLayout | None,
    x: TensorLayout | None,
    x_scale: TensorLayout | None,
    format: str,
    stochastic: bool,
    seed: int,
    tensorwise: bool,
    dtype: torch.dtype,
) -> Planned | None:
    """The plan for operands of these layouts; None where the parts have to copy one of them, read the gradient only
    once, split a sum that may overflow, or number more rows than `MOST_ROWS`.

    Args:
        grad, weight, weight_scale, x, x_scale: of the op's operands. None without the gradient that needs them.
        format, stochastic, seed, tensorwise: as the op takes them.
        dtype: of the weight's gradient.
    """
    if not _as_they_are(grad, (weight, weight_scale), (x, x_scale), format, stochastic):
        return None
    (m, n), device = grad.shape, grad.device
    shapes = (
        (m, _columns(weight, weight_scale)) if weight else (0, 0),
        (n, x.shape[0]) if x else (0, 0),
    )
    whole = Composition(5, tuple(map(Buffer, shapes, (grad.dtype, dtype))))
    weight_at, scale_at = WEIGHT, WEIGHT_SCALE
    if weight is not None and weight_scale is None:
        weight, weight_scale, (weight_at, scale_at) = _rounded(whole, weight, format, tensorwise)
    factor = weight_scale is not None and weight_scale.shape[0] != 1
    tensorwise = tensorwise and not factor
    if x is None and not factor and not tensorwise:
        return None  # the gradient is read only once
    wanted = weight is not None, x is not None, tensorwise
    made = rowcol.results_of(m, n, format, *wanted, False)
    own_seed = seed if stochastic else None
    apart = weight is not None and x is not None and m * n >= APART
    quantized = quantize_rowcol_sm90.planned(
        tuple(grad), format, *wanted, stochastic, factor, False, made, own_seed, apart
    )
    codes = whole.scratch(made)
    last = quantized.launches[-1:] if apart else ()
    first = quantized._replace(launches=quantized.launches[:-1] if apart else quantized.launches)
    numbers = whole.add(first, (GRAD, None, scale_at if factor else None), codes)
    names: list[str] = []
    products = (
        (weight, None if factor else weight_scale, weight_at, scale_at, GRAD_X, grad.dtype),
        (x, x_scale, X, X_SCALE, GRAD_WEIGHT, dtype),
    )
    for i, (other, scale, at, own_scale_at, to, out) in enumerate(products):
        if other is None:
            continue
        if to == GRAD_WEIGHT:
            whole.launch(last, numbers)
        own, own_scale = made[i * 2 : i * 2 + 2]
        scales = own_scale.shape[0], None if scale is None else scale.shape[0]
        product = scaled_mm.planned(own.layout(device), other, *scales, out)
        if product is None:
            return None
        operands = codes[i * 2], at, codes[i * 2 + 1], None if scale is None else own_scale_at, None
        whole.add(product.plan, operands, (to,))
        names += product.products
    return Planned(whole.plan(), tuple(names))


def _as_they_are(
    grad: TensorLayout,
    weight: tuple[TensorLayout | None, TensorLayout | None],
    x: tuple[TensorLayout | None, TensorLayout | None],
    format: str,
    stochastic: bool,
) -> bool:
    """True if the parts take these operands without a copy, and count and sum up their rows in 32 bits."""
    m, n = grad.shape
    in_high_precision = weight[0] if weight[1] is None else None
    others = *(() if in_high_precision else weight), *x
    rows = [one for one in (grad, in_high_precision) if one is not None]
    too_long = (stochastic and m > MOST_ROWS) or (
        format == "int8" and max(m, n) > scaled_mm.MOST_TERMS
    )
    return (
        all(one is None or (one.is_contiguous and 0 not in one.shape) for one in others)
        and all(0 not in one.shape and one.strides[1] == 1 for one in rows)
        and not too_long
    )


def _rounded(
    whole: Composition, weight: TensorLayout, format: str, tensorwise: bool
) -> tuple[TensorLayout, TensorLayout, range]:
    """Let the plan round a weight in high precision. Returns the layouts of its transposed codes and its scales, and
    the numbers of these."""
    n, k = weight.shape
    fmt = _weight_format(format)
    made = rowcol.results_of(n, k, fmt, False, True, tensorwise, True)
    how = False, True, tensorwise, False, False, True, made
    numbers = whole.scratch(made[2:])
    plan = quantize_rowcol_sm90.planned(tuple(weight), fmt, *how)
    whole.add(plan, (WEIGHT, None, None), (None, None, *numbers))
    codes, scale = (one.layout(weight.device) for one in made[2:])
    return codes, scale, numbers


def _columns(weight: Tensor | TensorLayout, scale: Tensor | TensorLayout | None) -> int:
    """K, of transposed codes or of a weight in high precision."""
    return weight.shape[1 if scale is None else 0]


def _shapes(
    grad: Tensor, weight: Tensor | None, weight_scale: Tensor | None, x: Tensor | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of grad_x and grad_weight."""
    m, n = grad.shape
    return (
        (0, 0) if weight is None else (m, _columns(weight, weight_scale)),
        (0, 0) if x is None else (n, x.shape[0]),
    )


def _fits(weight: Tensor, scale: Tensor | None, n: int) -> bool:
    """True if the weight has the shape of transposed codes, or that of a weight in high precision."""
    if weight.dim() != 2:
        return False
    return weight.shape[0] == n if scale is None else weight.shape[1] == n + -n % 16
