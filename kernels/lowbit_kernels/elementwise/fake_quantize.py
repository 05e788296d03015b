"""Fake quantization in one pass: round to a grid and back, with the gradients of values, scales and zero points.

Each row of x [R, C] is cut into blocks of G elements, the last one shorter. A block has a scale s and, for most
mappings, a zero point. Either both are given, or they are computed from the block's range, stretched to include zero,
by the formulas of ``lowbit.numerics.affine.choose_qparams_affine``. With mid = (low + high + 1) // 2:

    zero point   code                                          value
    none, code   round(x * (1/s)) + zero_point                 (code - zero_point) * s
    value        round((x - m) * (1/s)) + low,                 (code - mid) * s + zero_point
                 m = zero_point - (mid - low) * s
    float        x * (1/s), which the conversion rounds        code * s

"float" are float8 and e2m1, the FP4 of MXFP4 and NVFP4. A code is clamped to low .. high before it gives the value.
`inside` says where it did not need to be. Zero points are codes for "asymmetric" and for unsigned symmetric formats
(there mid), values for "float_zero_point" and "half_integer".

Scales of float formats that are computed may be those that microscaling formats store (`Grid.scales`), by the formulas
of ``lowbit.numerics.scale_format``. With e = floor(log2 high), and g the global scale of a matrix:

    e8m0   2^(floor(log2 max|x|) - e), within 2^-126 .. 2^127; under "symmetric_no_clipping_err" the next power of two
           where max|x| would be half a step or more (float8: at all) beyond high
    e4m3   e4m3(max|x| / high * g within 2^-9 .. 448) / g

    x            float32, bfloat16 or float16 [R, C]; rows may be strided. `fake_quantize` takes stacks [..., R, C] too
    scale        given: float32, bfloat16 or float16 [R, ceil(C / G)]; it may be negative
    zero_point   given: int8 or uint8, or the dtype of the scale, of the same shape; None where it is always 0
    global_scale g, with e4m3 scales: float32 [M], one for each R / M rows
    values       [R, C], contiguous, in a dtype of those of x; rounded once, from float32. Where x lies transposed in
                 memory, as experts [E, K, N] that are rounded along K do, and G is at most 256, so do the values
    inside       uint8 [R, ceil(C / G), ceil(G / 8)]: bit e % 8 of byte e // 8 belongs to element e of the block. Bits
                 beyond a row or a block mean nothing

Every float32 operation is rounded once, and sums of products run in float64, where the product is exact. So values and
`inside` equal those of ``Spec.fake_quantize`` to the bit. On GPUs a clamp stands between each product and a sum of
float32, since compilers fuse a product and a sum that follow each other directly.

`fake_quantize_codes` gives the codes before the clamp, with the scales and zero points, of integer grids. A code beyond
the range is one step beyond it, whatever its distance.

The gradients for given parameters are those of ``lowbit.numerics.learned_scales``, with g the gradient of the values:

    grad_x     = g where inside, else 0
    grad_scale = sum over the block of g * ((value - x)/s where inside, else code - c)
    grad_zero  = sum over the block of g where not inside

c is the code of z, the value that the zero point stands for: 0 for floats and "asymmetric", mid - 1/2 for
"half_integer", otherwise mid. The sums are float32 and deterministic.

`fake_quantize_descent` is a step of sign descent on x, on the parameter p of the scale, and on the parameter q of the
value that the zero point stands for (`lowbit.numerics.learned_scales`):

    s = p * scale_rate, at least the smallest scale; the zero point from q * zero_rate and s
    p ← p - rate * unit * sign(grad_scale)            q ← q - rate * unit * scale_rate / zero_rate * sign(grad_zero)
    x ← x - rate * |s| * sign(grad_x)                 values = x rounded by the new s and zero point

On GPUs a Triton kernel runs: a program computes several short blocks, or one of up to 16,384 elements, and reads each
element once. It reads longer blocks twice. Another kernel takes x that lies transposed in memory, with G up to 256.
On a CPU, PyTorch's operations run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.elementwise import (
    fake_quantize_descent_triton,
    fake_quantize_triton,
    fake_quantize_turned_triton,
)
from lowbit_kernels.elementwise.grid import (
    CODE,
    E4M3,
    E8M0,
    FORMATS,
    NO_ZERO,
    VALUE,
    Grid,
)
from lowbit_kernels.quantize.quantize_rowcol_triton import takes
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on

MOST_BLOCKS = 2**31 - 2**16


# ---- the formulas in PyTorch ---------------------------------------------------------------------------------------


_X = "float [R, C]; flatten leading dimensions first"
_SCALE = "float [R, -(-C // max(group_size, 1))]"
_ZERO_POINT = "int8|uint8|float [R, -(-C // max(group_size, 1))]"


@op(
    "_results(x, group_size, dtype, inside)",
    planned=True,
    x="float [..., R, C]; a row is x.unsqueeze(0)",
    scale="float [..., R, -(-C // max(group_size, 1))]",
    zero_point="int8|uint8|float [..., R, -(-C // max(group_size, 1))]",
    global_scale="float32 [M]",
    rules={
        "Grid.named(grid_name).check(scale, zero_point, group_size)": "",
        "Grid.named(grid_name).check_global_scale(scale, global_scale, x.shape[:-1].numel())": "",
    },
    scale_dtype="float",
    dtype="float",
)
def fake_quantize(
    x: Tensor,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    *,
    group_size: int,
    grid_name: str,
    scale_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype,
    inside: bool = False,
    after: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """values and inside; shapes, dtypes and the formula are in the module's docstring.

    Args:
        x: [R, C].
        scale, zero_point: given parameters; None to compute them from x.
        group_size: G.
        grid_name: `Grid.name` of the grid.
        scale_dtype: the dtype that computed scales, and zero points that are values, are rounded to.
        dtype: of the values.
        inside: whether to write `inside`; otherwise it is empty.
        after: not read. Given the gradient, it makes torch.compile compute the values again in the backward pass. The
            values of the forward pass are then not kept until there.
        global_scale: [M], for a grid of e4m3 scales that are computed.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: an unknown mapping, format or kind of scales, or shapes that do not fit each other.
    """
    # Divisions through float64 give the quotients of float32.
    grid = Grid.named(grid_name)
    blocks = _blocks(x.flatten(0, -2), group_size)
    if scale is None:
        scale, zero_point = _parameters(blocks, grid, scale_dtype, global_scale)
    else:
        scale = scale.flatten(0, -2)
        zero_point = None if zero_point is None else zero_point.flatten(0, -2)
    _, kept, values = _rounded_blocks(blocks, scale, zero_point, grid)
    out, bits = _results(x, group_size, dtype, inside)
    out.copy_(values.flatten(1)[:, : x.shape[-1]].reshape(x.shape))
    return out, bits.copy_(_packed(kept).view(bits.shape)) if inside else bits


reference = fake_quantize.reference


@op(
    "_results_of_codes(x, group_size, scale_dtype, code_dtype, _zero_dtype(Grid.named(grid_name), scale_dtype))",
    planned=True,
    x=_X,
    rules={
        "Grid.named(grid_name).check(None, None, group_size)": "",
        "Grid.named(grid_name).check_codes(code_dtype, clips)": "",
    },
    scale_dtype="float",
)
def fake_quantize_codes(
    x: Tensor,
    *,
    group_size: int,
    grid_name: str,
    scale_dtype: torch.dtype = torch.float32,
    code_dtype: torch.dtype,
    clips: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes before the clamp [R, C], scale [R, ceil(C / G)], and zero points of that shape, or [0] where they are
    always 0. One kernel where PyTorch needs about 28 operations, for tensors whose codes are sent elsewhere.

    Args:
        x, scale_dtype: as of `fake_quantize`; scales are computed from x.
        group_size: G.
        grid_name: `Grid.name` of a grid of integers.
        code_dtype: int8, uint8 or int16, which holds the range of codes, and with `clips` one step beyond either end.
        clips: whether codes may lie beyond the range; otherwise they are clamped to it.

    Raises:
        TypeError: another dtype of x, scales or codes.
        ValueError: a grid of float8 or an unknown one, codes that `code_dtype` does not hold, or shapes that do not
            fit.
    """
    grid = Grid.named(grid_name)
    blocks = _blocks(x, group_size)
    scale, zero_point = _parameters(blocks, grid, scale_dtype)
    found, _, _ = _rounded_blocks(blocks, scale, zero_point, grid)
    codes = found.flatten(1)[:, : x.shape[1]].clamp(grid.low - clips, grid.high + clips)
    codes = codes.to(code_dtype).contiguous()
    return codes, scale, _no_zero(x) if zero_point is None else zero_point


@op(
    "empty(grad.dtype, R, C), *(x.new_empty(scale.shape, dtype=torch.float32) for _ in range(2))",
    planned=True,
    grad="float [R, C]",
    x=_X,
    scale=_SCALE,
    zero_point=_ZERO_POINT,
    rules={"Grid.named(grid_name).check(scale, zero_point, group_size)": ""},
)
def fake_quantize_gradients(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    group_size: int,
    grid_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x in the dtype of `grad`, and grad_scale and grad_zero, float32 [R, ceil(C / G)]; see the module.

    Args:
        grad: gradient of the values, float32, bfloat16 or float16 [R, C].
        x, scale, zero_point, group_size, grid_name: as given to `fake_quantize`.

    Raises:
        TypeError, ValueError: as `fake_quantize`.
    """
    grid = Grid.named(grid_name)
    blocks, wide = _blocks(x, group_size), _blocks(grad, group_size)
    codes, inside, values = _rounded_blocks(blocks, scale, zero_point, grid)
    factor = (values - blocks) / scale.float().unsqueeze(-1)
    factor = torch.where(inside, factor, codes.clamp(grid.low, grid.high) - grid.code_of_z)
    columns = grad.shape[1]
    return (
        torch.where(inside.flatten(1)[:, :columns], grad, 0.0),
        (wide * factor).sum(-1),
        torch.where(inside, 0.0, wide).sum(-1),
    )


_PARAMETER = "float32 [R, -(-C // max(group_size, 1))]; contiguous"


@op(
    "empty(dtype, R, C)",
    grad="float [R, C]",
    x="float32 [R, C]; contiguous",
    scale=_PARAMETER,
    zero=_PARAMETER,
    unit=_PARAMETER,
    rules={
        "Grid.named(grid_name).check_learned(scale, zero, group_size)": "",
        "all(t is None or t.is_contiguous() for t in (x, scale, zero, unit))": "x, scale, zero and unit are contiguous",
    },
    scale_dtype="float",
    dtype="float",
    writes=("x", "scale", "zero"),
)
def fake_quantize_descent(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    unit: Tensor,
    *,
    rate: float,
    group_size: int,
    grid_name: str,
    scale_rate: float,
    zero_rate: float,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """One step of sign descent, as the module describes it: changes x, scale and zero, and gives the values [R, C].

    Args:
        grad: gradient of the values that `x`, `scale` and `zero` give, float32, bfloat16 or float16 [R, C].
        x: float32 [R, C].
        scale, zero: p and q, float32 [R, ceil(C / G)]; zero is None unless the mapping chooses zero points.
        unit: how far p moves at a rate of 1, float32 [R, ceil(C / G)].
        rate: of the step, in steps of the grid.
        group_size: G.
        grid_name: `Grid.name` of a grid of integers.
        scale_rate, zero_rate: powers of two.
        scale_dtype: the dtype that scales, and zero points that are values, are rounded to.
        dtype: of the values.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: a grid of float8 or an unknown one, shapes that do not fit each other, or strided parameters.
    """
    grid = Grid.named(grid_name)
    rates = scale_rate, zero_rate
    found = _of_parameters(scale, zero, grid, rates, scale_dtype)
    grads = fake_quantize_gradients.reference(grad, x, *found, group_size, grid_name)
    of_x, of_scale, of_zero = (g.float().sign() for g in grads)
    scale.sub_(of_scale * (unit * rate))
    if zero is not None:
        zero.sub_(of_zero * (unit * (rate * scale_rate / zero_rate)))
    steps = (found[0].float().abs() * rate).repeat_interleave(group_size, 1)[:, : x.shape[1]]
    x.sub_(of_x * steps)
    found = _of_parameters(scale, zero, grid, rates, scale_dtype)
    blocks = _rounded_blocks(_blocks(x, group_size), *found, grid)[2]
    return blocks.flatten(1)[:, : x.shape[1]].to(dtype).contiguous()


def _of_parameters(
    scale: Tensor,
    zero: Tensor | None,
    grid: Grid,
    rates: tuple[float, float],
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of their parameters."""
    s, least = scale.to(scale_dtype) * rates[0], _smallest(scale_dtype)
    s = s.abs().clamp(min=least).copysign(s)
    if grid.mapping == "half_integer":
        half = (s.float() * 0.5).to(scale_dtype)
        half = torch.where(half == 0, torch.full_like(half, least).copysign(s), half)
        return half * 2, half
    if zero is None:
        middle = torch.full_like(s, grid.mid, dtype=FORMATS[grid.format])
        return s, middle if grid.zero == CODE else None
    value = zero.to(scale_dtype) * rates[1]
    if grid.mapping == "float_zero_point":
        return s, value
    steps = (-value.double() / s.double()).float().round().nan_to_num(0.0, torch.inf, -torch.inf)
    return s, steps.clamp(grid.low, grid.high).to(FORMATS[grid.format])


def _no_zero(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.int8)


def _blocks(x: Tensor, group_size: int) -> Tensor:
    """x as float32 [R, blocks of a row, G], padded with zeros."""
    rows, columns = x.shape
    groups = -(-columns // group_size)
    return F.pad(x.float(), (0, groups * group_size - columns)).view(rows, groups, group_size)


def _divided(x: Tensor, divisor: float | Tensor) -> Tensor:
    other = divisor.double() if isinstance(divisor, Tensor) else divisor
    return (x.double() / other).float()


def _parameters(
    blocks: Tensor, grid: Grid, scale_dtype: torch.dtype, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    low, high, mid = grid.low, grid.high, grid.mid
    least, most = blocks.amin(-1).clamp(max=0.0), blocks.amax(-1).clamp(min=0.0)
    if grid.scales == E8M0:
        return _power_of_two(torch.maximum(-least, most), grid), None
    if grid.scales == E4M3:
        assert global_scale is not None
        of_row = global_scale.repeat_interleave(
            blocks.shape[0] // max(len(global_scale), 1)
        ).unsqueeze(-1)
        wanted = (_divided(torch.maximum(-least, most), high) * of_row).clamp(2.0**-9, 448.0)
        return _divided(wanted.to(torch.float8_e4m3fn).float(), of_row), None
    if grid.mapping in ("symmetric", "half_integer"):
        scale = _divided(torch.maximum(-least, most), (high - low) / 2)
    elif grid.mapping == "symmetric_no_clipping_err":
        scale = torch.maximum(_divided(least, low - mid), _divided(most, high - mid))
    else:
        span, levels = most - least, high - low
        apart = _divided(most, levels) - _divided(least, levels)
        scale = torch.where(span.isinf(), apart, _divided(span, levels))
    scale = scale.clamp(min=_smallest(scale_dtype)).to(scale_dtype)
    if grid.mapping == "half_integer":
        return scale, (scale.float() * 0.5).to(scale_dtype)
    if grid.mapping == "float_zero_point":
        return scale, (scale.double() * (mid - low) + least.double()).float().to(scale_dtype)
    if grid.mapping == "asymmetric":
        steps = _divided(least, scale).round().nan_to_num(0.0)
        return scale, (low - steps).clamp(low, high).to(FORMATS[grid.format])
    if grid.zero == CODE:
        return scale, torch.full_like(scale, mid, dtype=FORMATS[grid.format])
    return scale, None


def _power_of_two(largest: Tensor, grid: Grid) -> Tensor:
    bits, mantissa_bits = largest.view(torch.int32), 0x7FFFFF
    exponent = (bits >> 23) - (math.frexp(grid.high)[1] - 1)
    if grid.mapping == "symmetric_no_clipping_err":
        end = 0x600000  # the mantissa of 7, of 448 and of 57,344
        mantissa = bits & mantissa_bits
        exponent = exponent + (mantissa >= end if grid.float_bits == 4 else mantissa > end)
    found = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), found, torch.nan)


def _nearest_e2m1(x: Tensor) -> Tensor:
    """Steps are 1/2 up to 2, 1 up to 4, and 2 up to 6; NaN stays."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / step).round() * step).copysign(x)


def _rounded_blocks(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes before the clamp, where they are inside, and values: float32, as `x` is."""
    low, high, mid = grid.low, grid.high, grid.mid
    s = scale.float().unsqueeze(-1)
    z = None if zero_point is None else zero_point.unsqueeze(-1)
    inverse = _divided(torch.ones_like(s), s)
    if grid.float_bits:
        codes = x * inverse
        own = codes.clamp(low, high)
        own = _nearest_e2m1(own) if grid.format == "e2m1" else own.to(FORMATS[grid.format]).float()
    elif grid.zero == VALUE:
        assert z is not None
        start = (s.double() * (low - mid) + z.double()).float()
        codes = ((x - start) * inverse).round().nan_to_num(mid - low, torch.inf, -torch.inf) + low
        own = codes.clamp(low, high)
    else:
        codes = (x * inverse).round().nan_to_num(0.0, torch.inf, -torch.inf)
        codes = codes if z is None else codes + z
        own = codes.clamp(low, high) + 0.0  # no negative zero, as of an integer
    if grid.zero == VALUE:
        assert z is not None
        values = (s.double() * (own - mid).double() + z.double()).float()
    else:
        values = (own if z is None else own - z) * s
    least, most = grid.limits
    return codes, (codes >= least) & (codes <= most), values


def _packed(inside: Tensor) -> Tensor:
    bits = F.pad(inside.to(torch.int32), (0, -inside.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.int32, device=bits.device)).sum(-1).to(torch.uint8)


def _smallest(scale_dtype: torch.dtype) -> float:
    return 2.0**-24 if scale_dtype == torch.float16 else 2.0**-126


def unpack_inside(inside: Tensor, group_size: int, columns: int) -> Tensor:
    """`inside` as bool [..., R, C], by PyTorch operations, which torch.compile fuses with those that follow."""
    shifts = torch.arange(8, dtype=torch.uint8, device=inside.device)
    bits = (inside.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :group_size].flatten(-2)[..., :columns] != 0


def zero_outside(grad: Tensor, inside: Tensor, group_size: int) -> Tensor:
    """`grad` [..., R, C] where `inside`, elsewhere 0: the gradient of x. In a graph of torch.compile, other operations
    fuse with it. While autograd traces such a graph's backward pass, only the class of `grad` tells."""
    traced = torch.compiler.is_compiling() or type(grad) is not Tensor
    if traced or not (grad.numel() and runs_on(grad.device)):
        return torch.where(unpack_inside(inside, group_size, grad.shape[-1]), grad, 0.0)
    if not inside.is_contiguous():
        return fake_quantize_turned_triton.zero_outside(grad, inside, group_size)
    flat = grad.reshape(-1, grad.shape[-1])
    return fake_quantize_triton.zero_outside(flat, inside, group_size).view(grad.shape)


# ---- the ops -------------------------------------------------------------------------------------------------------


def _runs_triton(x: Tensor, grid: Grid, group_size: int) -> bool:
    if not (x.numel() and runs_on(x.device)):
        return False
    total = x.shape[:-1].numel() * -(-x.shape[-1] // group_size)
    return total < MOST_BLOCKS and (grid.float_bits != 8 or takes(grid.format, x.device))


@fake_quantize.kernel
def _launch(
    x, scale, zero_point, group_size, grid_name, scale_dtype, dtype, inside, after, global_scale
) -> tuple[Tensor, Tensor] | None:
    grid = Grid.named(grid_name)
    if _runs_triton(x, grid, group_size):
        ran("fake_quantize", "triton")
        arguments = (scale_dtype, dtype, inside, global_scale)
        turned = fake_quantize_turned_triton.takes(x, group_size)
        launch = fake_quantize_turned_triton if turned else fake_quantize_triton
        return launch.quantize(x, scale, zero_point, group_size, grid, *arguments)
    if x.numel():
        return None
    ran("fake_quantize", "torch")
    return _results(x, group_size, dtype, inside)


def _results(x: Tensor, group_size: int, dtype: torch.dtype, inside: bool) -> tuple[Tensor, Tensor]:
    if fake_quantize_turned_triton.takes(x, group_size):
        return fake_quantize_turned_triton.results(x, group_size, dtype, inside)
    blocks = (*x.shape[:-1], -(-x.shape[-1] // group_size), -(-group_size // 8))
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(
        blocks if inside else 0, dtype=torch.uint8
    )


@fake_quantize_gradients.kernel
def _launch_gradients(
    grad, x, scale, zero_point, group_size, grid_name, in_place=False
) -> tuple[Tensor, Tensor, Tensor] | None:
    grid = Grid.named(grid_name)
    if not _runs_triton(x, grid, group_size):
        return None
    ran("fake_quantize_gradients", "triton")
    return fake_quantize_triton.gradients(grad, x, scale, zero_point, group_size, grid, in_place)


def gradients_in_place(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    group_size: int,
    grid_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fake_quantize_gradients`, whose grad_x takes the memory of `grad` where that is contiguous. For eager code:
    torch.compile does not see it, and the arguments, which are those of the op, are not checked."""
    found = _launch_gradients(grad, x, scale, zero_point, group_size, grid_name, in_place=True)
    if found is not None:
        return found
    return fake_quantize_gradients(
        grad, x, scale, zero_point, group_size=group_size, grid_name=grid_name
    )


@fake_quantize_descent.kernel
def _launch_descent(
    grad,
    x,
    scale,
    zero,
    unit,
    rate,
    group_size,
    grid_name,
    scale_rate,
    zero_rate,
    scale_dtype,
    dtype,
) -> Tensor | None:
    grid = Grid.named(grid_name)
    if not _runs_triton(x, grid, group_size):
        return None
    ran("fake_quantize_descent", "triton")
    return fake_quantize_descent_triton.descend(
        *(grad, x, scale, zero, unit, rate, rate * scale_rate / zero_rate),
        *(group_size, grid, (scale_rate, zero_rate), scale_dtype, dtype, _smallest(scale_dtype)),
    )


@fake_quantize_codes.kernel
def _launch_codes(
    x, group_size, grid_name, scale_dtype, code_dtype, clips
) -> tuple[Tensor, Tensor, Tensor] | None:
    grid = Grid.named(grid_name)
    dtypes = scale_dtype, code_dtype, _zero_dtype(grid, scale_dtype)
    if _runs_triton(x, grid, group_size):
        ran("fake_quantize_codes", "triton")
        return fake_quantize_triton.codes(x, group_size, grid, *dtypes, int(clips))
    if x.numel():
        return None
    ran("fake_quantize_codes", "torch")
    return _results_of_codes(x, group_size, *dtypes)


def _results_of_codes(
    x: Tensor,
    group_size: int,
    scale_dtype: torch.dtype,
    code_dtype: torch.dtype,
    zero_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[0], -(-x.shape[1] // group_size)
    zero = _no_zero(x) if zero_dtype is None else x.new_empty(shape, dtype=zero_dtype)
    codes = x.new_empty(x.shape, dtype=code_dtype)
    return codes, x.new_empty(shape, dtype=scale_dtype), zero


def _zero_dtype(grid: Grid, scale_dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the grid's zero points; None where it has none."""
    return {NO_ZERO: None, CODE: FORMATS[grid.format], VALUE: scale_dtype}[grid.zero]
