"""Fake quantization of plain tensors by the fused kernel of `lowbit_kernels.elementwise.fake_quantize`, where it runs.

Elsewhere `lowbit.schemes.scheme` and `lowbit.numerics.learned_scales` compute the same by PyTorch's operations. Values
and masks are equal to the bit. The kernel runs on CUDA devices, for blocks that are parts of a row, float32, bfloat16
and float16. It rounds to integers, float8 and E2M1, and chooses plain scales, powers of two (MXFP4, MXFP8) and those of
NVFP4, whose global scale takes a pass of its own.

Eager PyTorch takes about ten passes over a tensor and several float32 temporaries, the kernel one pass and none.
Inductor fuses the operations into a pass or two, and with those before and after them. So in graphs of torch.compile
the kernel runs only where it saves memory (`IN_GRAPHS`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.numerics import learned_scales
from lowbit.numerics.blocks import crop
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.learned_scales import (
    RATE,
    as_parameters,
    codes_and_residual,
    gradients,
    parts_of,
    qparams,
    rate_of,
)
from lowbit.numerics.lookup_table import E2M1, LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.numerics.straight_through import StraightThrough, where_set
from lowbit_kernels.runtime.library import FLOATS

Qparams = tuple[Tensor, Tensor | None]
"""A scale and a zero point."""
IN_GRAPHS: Literal["nowhere", "backward", "everywhere"] = "backward"
"""Where graphs of torch.compile call the kernel. The one switch for measurements.

"backward": only to round weights again for the backward pass. By PyTorch's operations, torch.compile would find that
forward has computed them already, and keep the rounded weights of all layers until backward.
"""


def runs(spec: Spec, x: Tensor, in_backward: bool = False, given: bool = False) -> bool:
    """True if the kernel rounds this tensor now. `in_backward`: for the backward pass of a product. `given`: by scales
    that are given."""
    if torch.compiler.is_compiling():
        accepted = ("backward", "everywhere") if in_backward else ("everywhere",)
        # NVFP4 in graphs: a test of it failed on a GPU, for a reason that was not found
        found = IN_GRAPHS in accepted and in_graphs(x) and not _has_global(spec)
    else:
        found = kernels.fake_quantize.runs_on(x.device)
    return (
        found
        and type(spec) is Spec  # a subclass may observe what it rounds
        and not spec.static
        and (not isinstance(spec.format, LookupTable) or spec.format == E2M1)
        and (given or spec.scale_format in _SCALES)
        and x.dtype in FLOATS
        and all(size == 1 for size in spec.block_size(x.shape)[:-1])
    )


def in_graphs(x: Tensor) -> bool:
    """True if compiled graphs on the device of x may call the kernel."""
    return x.is_cuda


_SCALES = {"float": "float", "e8m0": "e8m0", "e4m3": "e4m3", "e4m3_inverse": "e4m3"}
"""How the kernel chooses scales, by their format."""


def _has_global(spec: Spec) -> bool:
    """True if all scales of a matrix share a global scale."""
    return spec.scales is not None and spec.scales.joint is not None


def _grid_name(spec: Spec) -> str:
    fmt = spec.format
    names: dict[Any, str] = {t: name for name, t in kernels.fake_quantize.FORMATS.items()}
    names[E2M1] = "e2m1"
    ends = float(fmt.quant_min), float(fmt.quant_max)
    scales = _SCALES.get(spec.scale_format, "float")
    return kernels.fake_quantize.Grid(spec.mapping, names[fmt.dtype], *ends, scales).name


def _flat(x: Tensor) -> Tensor:
    """The rows of x, dense: the kernel's results are contiguous then."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _in_blocks(found: Qparams) -> tuple[Tensor | None, Tensor | None]:
    scale, zero_point = found
    return _flat(scale), None if zero_point is None else _flat(zero_point)


# ---- without gradient ------------------------------------------------------------------------------------------------


class Inside:
    """Where the gradient of a tensor passes its rounding: a mask, the kernel's bits, or everywhere. `turned`: the bits
    are those of the transposed tensor."""

    def __init__(self, mask: Tensor | None, group_size: int = 0, turned: bool = False) -> None:
        self.mask = mask
        self.rule: Any = where_set
        if mask is not None and group_size:
            self.rule = partial(_where_kernel_bits, group_size=group_size, turned=turned)
        self.passed = partial(self.rule, mask=mask)
        """A gradient where it passes, else 0."""


def _where_kernel_bits(grad: Tensor, mask: Tensor, group_size: int, turned: bool = False) -> Tensor:
    if turned:
        return _where_kernel_bits(grad.mT, mask, group_size).mT
    flat = grad.reshape(*mask.shape[:-2], grad.shape[-1])
    if torch.is_grad_enabled():  # differentiable
        kept = kernels.fake_quantize.unpack_inside(mask, group_size, flat.shape[-1])
        return torch.where(kept, flat, 0.0).view(grad.shape)
    return kernels.fake_quantize.zero_outside(flat, mask, group_size).view(grad.shape)


def rounded(
    x: Tensor,
    spec: Spec,
    scale_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    after: Tensor | None = None,
    masked: bool = True,
    joint: Tensor | None = None,
) -> tuple[Tensor, Inside]:
    """x [..., K] rounded by its own scales, and where the gradient passes.

    Args:
        x: float32, bfloat16 or float16.
        spec: how it is rounded.
        scale_dtype: of scales, where the spec names none.
        dtype: of the result; None: that of x.
        after: the gradient of a product, where the rounding belongs to its backward pass.
        masked: False where no caller needs to know where the gradient passes.
        joint: as for `Spec.choose_qparams`.
    """
    x, scale_dtype = x.detach(), spec.scale_dtype or scale_dtype
    turned = _turned(spec, x)
    by, own = (spec, x) if turned is None else (turned, x.mT)
    clips = masked and spec.may_clip(scale_dtype)
    runs_here = _takes(joint, spec) and x.numel() > 0 and runs(by, own, after is not None)
    if not runs_here or spec.rounds_minimum:
        values, mask = _in_parts(x, spec, scale_dtype, clips, joint)
        return values if dtype is None else values.to(dtype), Inside(mask)
    group_size = by.block_size(own.shape)[-1]
    # Values of float32 are rounded to `dtype` by the kernel. Others are first rounded to their own dtype.
    direct = dtype if x.dtype is torch.float32 and dtype in FLOATS else x.dtype
    values, bits = kernels.fake_quantize.fake_quantize(
        _flat(x) if turned is None else own,
        grid_name=_grid_name(by),
        group_size=group_size,
        scale_dtype=scale_dtype,
        dtype=direct,
        inside=clips,
        after=after,
        global_scale=_global_scale(x, spec, joint),
    )
    # contiguous, as modules may choose a product by the strides of a weight
    values = values.view(x.shape) if turned is None else values.mT.contiguous()
    inside = Inside(bits if clips else None, group_size, turned is not None)
    return values if dtype is None else values.to(dtype), inside


def _turned(spec: Spec, x: Tensor) -> Spec | None:
    """The spec of the transposed x, where groups run along the last dimension but one, as in experts [E, K, N]."""
    runs_along_last = isinstance(spec.granularity, PerGroup)
    if runs_along_last or x.ndim < 2 or x.numel() == 0 or torch.compiler.is_compiling():
        return None
    block = spec.block_size(x.shape)
    if block[-1] != 1 or block[-2] == 1 or any(b != 1 for b in block[:-2]):
        return None
    return _in_groups(spec, block[-2])


@functools.lru_cache(maxsize=64)
def _in_groups(spec: Spec, size: int) -> Spec:
    return replace(spec, granularity=PerGroup(size))


def _takes(joint: Tensor | None, spec: Spec) -> bool:
    """True if the kernel can be given what siblings share."""
    return joint is None or _has_global(spec)


def _global_scale(x: Tensor, spec: Spec, joint: Tensor | None) -> Tensor | None:
    """The global scales of x [..., N, K], float32, one a matrix; None for a format without them."""
    if not _has_global(spec):
        return None
    if joint is None:
        joint = spec.joint_part([x], torch.float32)
    return joint.float().expand(*x.shape[:-2], 1, 1).reshape(-1)


def _in_parts(
    x: Tensor, spec: Spec, scale_dtype: torch.dtype, clips: bool, joint: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`spec.rounded`, a few experts at a time: its temporaries take many times the memory of a stack."""
    is_whole = x.ndim < 3 or joint is not None or _has_global(spec)
    if is_whole or len(parts := parts_of(x, spec)) == 1:
        return spec.rounded(x, scale_dtype, clips, joint)
    values = torch.empty_like(x, memory_format=torch.contiguous_format)
    mask = torch.empty_like(values, dtype=torch.bool) if clips else None
    for part in parts:
        values[part], own = spec.rounded(x[part], scale_dtype, clips)
        if mask is not None:
            mask[part] = True if own is None else own
    return values, mask


def _codes_run(spec: Spec, x: Tensor) -> bool:
    """True if one launch gives the codes, scales and zero points of x."""
    fits = isinstance(spec.format, Int) and not spec.rounds_minimum and runs(spec, x)
    return fits and x.numel() > 0 and spec.padded_shape(x.shape) == tuple(x.shape)


def unclamped_codes(
    x: Tensor, spec: Spec, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`spec.unclamped_codes(x, scale_dtype)` of x [..., K]."""
    if not _codes_run(spec, x):
        return spec.unclamped_codes(x, scale_dtype)
    scale_dtype = spec.scale_dtype or scale_dtype
    clips = spec.may_clip(scale_dtype)
    codes, scale, zero_point = kernels.fake_quantize.fake_quantize_codes(
        _flat(x),
        grid_name=_grid_name(spec),
        group_size=spec.block_size(x.shape)[-1],
        code_dtype=spec.unclamped_dtype(clips),
        scale_dtype=scale_dtype,
        clips=clips,
    )
    blocks = spec.blocks(x.shape)
    zeros = zero_point.view(blocks) if spec.has_zero_point else None
    return codes.view(x.shape), scale.view(blocks), zeros


def present_parameters(x: Tensor, spec: Spec, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The parameters of the scales and zero points that the spec chooses for x [..., K]
    (`lowbit.numerics.learned_scales.as_parameters`). `dtype`: of scales, where the spec names none."""
    x = x.detach()
    if _codes_run(spec, x):
        _, scale, zero_point = unclamped_codes(x, spec, dtype)
        return as_parameters(spec, scale, zero_point)
    return as_parameters(spec, *spec.choose_qparams(spec.pad(x), dtype))


def rounded_by(
    x: Tensor, spec: Spec, found: Qparams, dtype: torch.dtype, after: Tensor | None = None
) -> Tensor:
    """x [..., K] rounded by a scale and a zero point that are given, in `dtype`."""
    x = x.detach()
    if not runs(spec, x, after is not None, given=True):
        return crop(spec.codes_and_values(x, *found)[1], x.shape).to(x.dtype).to(dtype)
    scale, zero_point = _in_blocks(found)
    direct = dtype if x.dtype is torch.float32 and dtype in FLOATS else x.dtype
    values, _ = kernels.fake_quantize.fake_quantize(
        _flat(x),
        scale,
        zero_point,
        grid_name=_grid_name(spec),
        group_size=spec.block_size(x.shape)[-1],
        dtype=direct,
        after=after,
    )
    return values.view(x.shape).to(dtype)


def learned_gradients(
    grad: Tensor,
    x: Tensor,
    spec: Spec,
    parameters: Qparams,
    found: Qparams | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x [..., K] and of the parameters of its scales and zero points, from that of its rounded values.

    Args:
        grad: of the rounded x.
        x: what was rounded.
        spec: how.
        parameters: of scales and zero points, as `lowbit.numerics.learned_scales` has them.
        found: the scale and zero point of `parameters`, where they were computed before.
        in_place: True if the gradient of x may take the memory of `grad`, in eager code.
    """
    scale_parameter, zero_parameter = parameters
    scale, zero_point = found or qparams(spec, scale_parameter, zero_parameter)
    if not runs(spec, x, in_backward=True, given=True):
        codes, residual = codes_and_residual(x, spec, scale, zero_point)
        return gradients(grad, codes, residual, spec, scale_parameter, zero_parameter)
    blocks, zeros = _in_blocks((scale, zero_point))
    assert blocks is not None
    op = kernels.fake_quantize
    found_by = op.gradients_in_place if in_place else op.fake_quantize_gradients
    grad_x, of_scale, of_zero = found_by(
        _flat(grad),
        _flat(x),
        blocks,
        zeros,
        grid_name=_grid_name(spec),
        group_size=spec.block_size(x.shape)[-1],
    )
    grad_scale = (of_scale.view(scale.shape) * rate_of(spec)).to(scale_parameter.dtype)
    grad_zero = None
    if zero_parameter is not None:
        grad_zero = (of_zero.view(scale.shape) * RATE).to(zero_parameter.dtype)
    return grad_x.view(grad.shape), grad_scale, grad_zero


def descended(
    grad: Tensor,
    x: Tensor,
    spec: Spec,
    parameters: Qparams,
    unit: Tensor,
    rate: float,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensor | None:
    """A step of sign descent by one kernel: changes x [..., K] and the parameters of its scales and zero points, and
    gives x rounded by the new ones. None where no kernel takes it; nothing is changed then.

    Args:
        grad: of the rounded x.
        x, parameters, unit: float32, contiguous; `unit`: how far a scale's parameter moves at a rate of 1.
        spec: of integers.
        rate: of the step, in steps of the grid.
        scale_dtype: of scales, where the spec names none.
        dtype: of the result.
    """
    scale_dtype = spec.scale_dtype or scale_dtype
    fits = isinstance(spec.format, Int) and not spec.rounds_minimum and runs(spec, x, given=True)
    if not fits or x.numel() == 0 or scale_dtype not in FLOATS or not x.is_contiguous():
        return None
    scale, zero = _in_blocks(parameters)
    assert scale is not None
    values = kernels.fake_quantize.fake_quantize_descent(
        *(_flat(grad), _flat(x), scale, zero, _flat(unit)),
        rate=rate,
        group_size=spec.block_size(x.shape)[-1],
        grid_name=_grid_name(spec),
        scale_rate=rate_of(spec),
        zero_rate=RATE,
        scale_dtype=scale_dtype,
        dtype=dtype,
    )
    return values.view(x.shape)


# ---- differentiable --------------------------------------------------------------------------------------------------


class _LearnedByKernel(torch.autograd.Function):
    """Keeps its arguments alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor | None, spec: Spec) -> Tensor:
        ctx.save_for_backward(x, scale, zero)
        ctx.spec = spec
        return rounded_by(x, spec, qparams(spec, scale, zero), x.dtype).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, *parameters = ctx.saved_tensors
        return *learned_gradients(grads[0], x, ctx.spec, tuple(parameters)), None


def fake_quantize(
    x: Tensor, spec: Spec, scale_dtype: torch.dtype = torch.float32, joint: Tensor | None = None
) -> Tensor:
    """`spec.fake_quantize(x, scale_dtype, joint)`: the same values and gradients to the bit."""
    is_stack = x.ndim == 3 and not torch.compiler.is_compiling()
    if x.numel() == 0 or not (_takes(joint, spec) and (is_stack or runs(spec, x))):
        return spec.fake_quantize(x, scale_dtype, joint)
    values, inside = rounded(x, spec, scale_dtype, joint=joint)
    return StraightThrough.apply(x, values, inside.mask, inside.rule)


def learned_fake_quantize(x: Tensor, scale: Tensor, zero: Tensor | None, spec: Spec) -> Tensor:
    """`lowbit.numerics.learned_scales.learned_fake_quantize`: the same values to the bit, and gradients of scales up to
    the order of their sums."""
    if not runs(spec, x, given=True) or x.numel() == 0:
        return learned_scales.learned_fake_quantize(x, scale, zero, spec)
    return _LearnedByKernel.apply(x, scale, zero, spec)
