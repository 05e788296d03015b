"""The usual schemes by name: functions that return a `Scheme`.

A preset takes the symmetric mapping with the smaller squared error over trained and random weights
(`python -m benchmarks.mapping_error`; the table is in `benchmarks/LOG.md`). "symmetric" has the finer step, but clips
the largest positive value of a block; "symmetric_no_clipping_err" puts the largest value on a code. That value matters
more with more bits and smaller groups. A checkpoint carries its own mapping.
"""

from __future__ import annotations

import torch

from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import Granularity, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from lowbit.numerics.lookup_table import E2M1, NF4
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.settings import check_flag
from lowbit.numerics.spec import ScaleFormatName, Spec
from lowbit.schemes.scheme import Scheme

_LARGEST_GROUP_WITHOUT_CLIPPING = {2: 0, 3: 0, 4: 64, 5: 128}
"""For each number of bits, the largest group in which "symmetric_no_clipping_err" has the smaller error. With 6 or more
bits it always has."""


def _better_mapping(bits: int, group_size: int | None) -> MappingName:
    if bits == 1:  # symmetric codes would all be zero
        return "asymmetric"
    largest = _LARGEST_GROUP_WITHOUT_CLIPPING.get(bits)
    if largest is None or (group_size is not None and group_size <= largest):
        return "symmetric_no_clipping_err"
    return "symmetric"


def IntxWeightOnly(
    bits: int,
    group_size: int | None = None,
    mapping: MappingName | None = None,
    *,
    scale_dtype: torch.dtype | None = None,
) -> Scheme:
    """Weights of 1 to 8 bits. Activations stay as they are.

    Args:
        bits: 1 to 8.
        group_size: number of inputs that share a scale; None: all of a row.
        mapping: one of `lowbit.choose_qparams_affine`. None: the symmetric one with the smaller error,
            "symmetric_no_clipping_err" for 6 to 8 bits, for 5 bits in groups of up to 128 and for 4 bits in groups of
            up to 64, "symmetric" otherwise; "asymmetric" for one bit.
        scale_dtype: the dtype of scales, as in `Spec`; None: that of the weight.
    """
    fmt = Int(bits)
    granularity = PerRow() if group_size is None else PerGroup(group_size)
    mapping = _better_mapping(bits, group_size) if mapping is None else mapping
    return Scheme(Spec(fmt, granularity, mapping, scale_dtype=scale_dtype))


def Int4WeightOnly(
    group_size: int = 128,
    mapping: MappingName | None = None,
    *,
    scale_dtype: torch.dtype | None = None,
) -> Scheme:
    """4-bit weights with one scale a group of `group_size` inputs: 0.5 byte a weight plus scales.

    `mapping` defaults to that of `IntxWeightOnly`. `scale_dtype` is that of `Spec`.
    """
    return IntxWeightOnly(4, group_size, mapping, scale_dtype=scale_dtype)


def Int2WeightOnly(group_size: int | None = 32, mapping: MappingName = "half_integer") -> Scheme:
    """2-bit weights {−1.5, −.5, .5, 1.5} · scale, with one scale a group of `group_size` inputs, or a row (None).

    `mapping` is one of `lowbit.choose_qparams_affine`. The default grid is symmetric and has no zero, which suits
    training: QAT to 2 bits wins back more of the loss on it than on {−2, −1, 0, 1} · scale (ParetoQ, arXiv 2502.02631).
    """
    return IntxWeightOnly(2, group_size, mapping)


def Int1WeightOnly(group_size: int | None = 32, mapping: MappingName = "half_integer") -> Scheme:
    """1-bit weights {−.5, .5} · scale, with one scale a group of `group_size` inputs, or a row (None).

    `mapping` is one of `lowbit.choose_qparams_affine`.
    """
    return IntxWeightOnly(1, group_size, mapping)


def Int8WeightOnly(
    group_size: int | None = None, *, scale_dtype: torch.dtype | None = None
) -> Scheme:
    """8-bit weights with one scale a row, or a group of `group_size` inputs. `scale_dtype` is that of `Spec`."""
    return IntxWeightOnly(8, group_size, scale_dtype=scale_dtype)


_DYNAMIC_INT8 = Spec(Int(8), PerToken(), "symmetric_no_clipping_err")


def Int8DynamicActivationInt8Weight() -> Scheme:
    """int8 × int8 products: one scale a row of the weight, and one a token of the activation, computed at each call."""
    return Scheme(weight=Int8WeightOnly().weight, activation=_DYNAMIC_INT8)


def Int8StaticActivationInt8Weight() -> Scheme:
    """int8 × int8 products: one scale a row of the weight, and one for all inputs, which `lowbit.calibrate` finds."""
    activation = Spec(Int(8), PerTensor(), "symmetric_no_clipping_err", static=True)
    return Scheme(weight=Int8WeightOnly().weight, activation=activation)


def Int8DynamicActivationInt4Weight(
    group_size: int = 32, mapping: MappingName | None = None
) -> Scheme:
    """4-bit weights in groups of `group_size`, activations in 8 bits with one scale a token.

    Groups of 32 are what torchao and ExecuTorch take by default. On a GPU many tokens are faster in groups of 128,
    since groups of 32 do not run on the units for int8. `mapping` of the weights defaults to that of `IntxWeightOnly`.
    """
    return Scheme(weight=Int4WeightOnly(group_size, mapping).weight, activation=_DYNAMIC_INT8)


_ROW = PerRow()


def Float8WeightOnly(granularity: Granularity = _ROW) -> Scheme:
    """float8 (e4m3) weights with one scale a row, or as `granularity` says."""
    return Scheme(weight=Spec(Float8(), granularity))


def Float8DynamicActivationFloat8Weight(granularity: PerRow | PerBlock = _ROW) -> Scheme:
    """float8 × float8 products (e4m3): one scale a row of the weight, and one a token of the activation.

    With `granularity=PerBlock(128, 128)`, as DeepSeek-V3 publishes its weights: one scale for each 128 x 128 of the
    weight, and one for each 128 inputs of a token.

    Raises ValueError for another granularity.
    """
    activation: Granularity = PerToken()
    if isinstance(granularity, PerBlock) and len(granularity.shape) == 2:
        activation = PerGroup(granularity.shape[1])
    elif not isinstance(granularity, PerRow):
        raise ValueError(f"granularity must be PerRow() or PerBlock(n, k), got {granularity!r}")
    return Scheme(weight=Spec(Float8(), granularity), activation=Spec(Float8(), activation))


def Float8StaticActivationFloat8Weight() -> Scheme:
    """float8 × float8 products (e4m3): one scale a row of the weight, and one for all inputs, which `lowbit.calibrate`
    finds."""
    activation = Spec(Float8(), PerTensor(), static=True)
    return Scheme(weight=Float8WeightOnly().weight, activation=activation)


def NF4WeightOnly(group_size: int = 64, double_quantization: bool = False) -> Scheme:
    """4-bit NormalFloat weights (QLoRA, arXiv 2305.14314): one float32 scale a group of `group_size` inputs.

    `double_quantization` stores each scale in 8 bits, and one float32 for up to 256 scales: 4.13 to 4.25 bits a weight
    instead of 4.5, in groups of 64. The values are those of bitsandbytes' nf4 where `group_size` divides in_features.
    """
    check_flag("double_quantization", double_quantization)
    scales: ScaleFormatName = "double" if double_quantization else "float"
    return Scheme(Spec(NF4, PerGroup(group_size), scale_format=scales))


def MXFP4WeightOnly(mapping: MappingName = "symmetric_no_clipping_err") -> Scheme:
    """FP4 (E2M1) weights whose scale is a power of two for each 32 inputs, in 8 bits: 4.25 bits a weight.

    `mapping` chooses the power of two; both are stored alike (`lowbit.numerics.scale_format`): "symmetric" by the rule
    of OCP Microscaling Formats v1.0; "symmetric_no_clipping_err" by that of compressed-tensors, whose error is smaller.
    """
    return Scheme(Spec(E2M1, PerGroup(32), mapping, scale_format="e8m0"))


def _mxfp8(mapping: MappingName) -> Spec:
    return Spec(Float8(), PerGroup(32), mapping, scale_format="e8m0")


def MXFP8WeightOnly(mapping: MappingName = "symmetric_no_clipping_err") -> Scheme:
    """float8 (e4m3) weights whose scale is a power of two for each 32 inputs, in 8 bits: 8.25 bits a weight.

    `mapping` chooses the power of two; both are stored alike (`lowbit.numerics.scale_format`): "symmetric" by the rule
    of OCP Microscaling Formats v1.0, which clips values beyond 448 scales; "symmetric_no_clipping_err" by that of
    NVIDIA's recipe (arXiv 2506.08027), which rounds the scale up. torchao names them FLOOR and RCEIL.
    """
    return Scheme(_mxfp8(mapping))


def MXFP8DynamicActivationMXFP8Weight(mapping: MappingName = "symmetric_no_clipping_err") -> Scheme:
    """The weights of `MXFP8WeightOnly`, of this `mapping`, and activations rounded in the same way, in groups of 32
    inputs of a token.

    bfloat16 holds the rounded values exactly, so that plain products of them stand for those of the matrix units that
    GPUs of compute capability 10.0 have for this format.
    """
    return Scheme(_mxfp8(mapping), _mxfp8(mapping))


def NVFP4WeightOnly() -> Scheme:
    """FP4 (E2M1) weights with an e4m3 scale for each 16 inputs, and one float32 scale for all: 4.5 bits a weight."""
    return Scheme(Spec(E2M1, PerGroup(16), scale_format="e4m3"))


_DYNAMIC_FLOAT8 = Spec(Float8(), PerToken())


def Float8DynamicActivationMXFP4Weight(
    mapping: MappingName = "symmetric_no_clipping_err",
) -> Scheme:
    """The weights of `MXFP4WeightOnly`, of this `mapping`, and activations in float8 (e4m3) with one scale a token.

    On a GPU of compute capability 9.0 products of many tokens run on the units for float8, which hold the weights
    exactly.
    """
    return Scheme(MXFP4WeightOnly(mapping).weight, _DYNAMIC_FLOAT8)


def Float8DynamicActivationNVFP4Weight() -> Scheme:
    """The weights of `NVFP4WeightOnly`, activations in float8 (e4m3) with one scale a token.

    float8 does not hold these weights exactly, so the kernels of `NVFP4WeightOnly` multiply them.
    """
    return Scheme(NVFP4WeightOnly().weight, _DYNAMIC_FLOAT8)
