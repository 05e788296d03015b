"""The gain of a rounded weight, and scales for which it is 1.

Scales with the least Σ h (x − x̂)² make x̂ too small. With them Σ h x x̂ = Σ h x̂², which is less than Σ h x² by the whole
error: of random numbers in groups of 32 by 11% in 2 bits, 2.7% in 3 and 0.7% in 4. The other errors of a layer differ
from channel to channel, and partly cancel. This one is the same everywhere: each layer adds less, and attention and
logits are flatter. So, with the codes kept, scales become larger by

    1 / gain = Σ h x² / Σ h x x̂

With these the projection of x̂ on x is x. A relative error D becomes D / (1 − D).

Siblings share the global scale of NVFP4, and e4m3 numbers are 6 to 12% apart. So there the global scale takes a factor
that is the same for all weights (`E4M3.gain`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.numerics.affine import half_step
from lowbit.numerics.blocks import block_sums
from lowbit.numerics.float32 import round_to_dtype
from lowbit.numerics.spec import Spec

QParams = tuple[Tensor, Tensor | None]

LARGEST = 4 / 3
"""The most by which scales grow. Those with less gain stay: 1 bit, and what is far from its values in other ways."""


def takes_any_scale(spec: Spec) -> bool:
    """True if each block may have any scale that its dtype holds."""
    return spec.scales is None and spec.super_blocks is None and not spec.rounds_minimum


def can_grow(spec: Spec, joint: Tensor | None) -> bool:
    """True if `of_full_gain` changes searched scales with this joint part. Whole scales that siblings share stay."""
    if joint is None:
        return takes_any_scale(spec)
    return spec.scales is not None and spec.scales.joint is not None


@torch.no_grad()
def of_full_gain(
    spec: Spec,
    x: Tensor,
    qparams: QParams,
    importance: Tensor | None = None,
    joint: Tensor | None = None,
) -> tuple[Tensor, QParams, Tensor | None]:
    """The codes that these scales give x, by scales times 1 / gain of each block.

    Args:
        spec, joint: for which `can_grow`.
        x: real floating [..., N, K], not padded.
        qparams: scale and zero point [blocks along each dimension], as `Spec.search_qparams` gives them.
        importance: h, broadcastable to x; None for 1.

    Returns:
        float32 values of the shape of x, the scale and zero point that code them exactly, and their joint part.
    """
    codes, scale, zero = spec.quantize(x, qparams=qparams)
    if joint is not None:
        assert spec.scales is not None and spec.scales.joint is not None
        parts = spec.scales.encode_given(scale, spec.kept_parts(joint))
        joint = spec.scales.of_full_gain(joint)
        scale = spec.scales.decode({**parts, spec.scales.joint: joint})
        return spec.dequantize(codes, scale, None, x.shape, torch.float32), (scale, None), joint
    values = spec.dequantize(codes, scale, zero, x.shape, torch.float32)
    if not x.numel():
        return values, qparams, joint
    # By a power of two, which rounds nothing, so that no square leaves float32.
    own, values = (t.float().ldexp(-x.abs().amax().float().frexp().exponent) for t in (x, values))
    weighed = own if importance is None else own * importance
    block = spec.block_size(codes.shape)
    both, single = (block_sums(spec.pad(weighed * t), block, torch.float64) for t in (own, values))
    factor = (both / single).float()
    return *with_scales_times(spec, codes, (scale, zero), factor, tuple(x.shape)), joint


def with_scales_times(
    spec: Spec, codes: Tensor, qparams: QParams, factor: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, QParams]:
    """The same codes by other scales, in their dtype. Factors that are not in (0, `LARGEST`] count as 1.

    Args:
        spec: for which `takes_any_scale`.
        codes: those of `Spec.quantize`, for these `qparams`: scale and zero point [blocks along each dimension].
        factor: float32, broadcastable to the scale.
        shape: of the values, [..., N, K].

    Returns:
        float32 values, and the scale and zero point that code them exactly.
    """
    scale, zero = qparams
    factor = torch.where((factor > 0) & (factor <= LARGEST), factor, 1.0)
    larger = round_to_dtype(scale.float() * factor, scale.dtype).to(scale.dtype)
    larger = torch.where(larger.isfinite() & (larger != 0), larger, scale)
    if zero is not None and spec.mapping == "half_integer":
        zero = half_step(larger, zero.dtype)
    elif zero is not None and spec.zero_point_is_value:
        zero = round_to_dtype(zero.float() * factor, zero.dtype).to(zero.dtype)
    return spec.dequantize(codes, larger, zero, shape, torch.float32), (larger, zero)
