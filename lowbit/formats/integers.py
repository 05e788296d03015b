"""A weight as plain integers with scales, as formats of other programs store it.

    value[n, k] = (codes[n, k] − zero_point[n, k // g]) · scale[n, k // g]

`layout_of` checks that a weight is such a matrix, `integers_of` gives the parts, `from_integers` makes a weight of
them. "half_integer" weights of b bits are integers of b + 1 bits: (c + ½)·s = (2c + 1)·(s/2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.formats.base import FormatError, ScalesError, check_matrix
from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import Granularity, PerGroup, PerRow, PerTensor
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import packed_size
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor


@dataclass(frozen=True)
class IntegerLayout:
    """Integers of `bits` bits, −2^(b−1) … 2^(b−1)−1, with a scale for each `group_size` inputs of a row; None: for a
    row."""

    bits: int
    group_size: int | None
    has_zero_point: bool

    @property
    def spec(self) -> Spec:
        granularity: Granularity = PerGroup(self.group_size) if self.group_size else PerRow()
        mapping: MappingName = "asymmetric" if self.has_zero_point else "symmetric"
        return Spec(Int(self.bits), granularity, mapping)

    @property
    def middle(self) -> int:
        """Unsigned code minus signed code: 2^(b−1)."""
        return 2 ** (self.bits - 1)


def layout_of(weight: LowbitTensor, format: str, ragged: bool = False) -> IntegerLayout:
    """The layout of a weight, which may be on meta. `ragged`: the last group of a row may have fewer inputs. Raises
    FormatError, in the name of `format`, for other weights."""
    if type(weight) is not AffineTensor:
        raise FormatError(f"{format} holds integers, got a {type(weight).__name__}")
    check_matrix(weight, format)
    spec, bits = weight.spec, weight.spec.format.bits
    if spec.mapping == "half_integer":
        bits += 1
    elif spec.zero_point_is_value:
        raise FormatError(f"its zero points are values ({spec.mapping}); {format} holds integers")
    if bits > 8:
        raise FormatError(f"{spec.mapping} of 8 bits takes 9 bits in {format}")
    group = None
    if isinstance(spec.granularity, PerGroup):
        group = spec.granularity.group_size
        if weight.shape[1] % group and not ragged:
            raise FormatError(
                f"its {weight.shape[1]} inputs are not a multiple of the group size {group}"
            )
    elif not isinstance(spec.granularity, PerRow | PerTensor):
        raise FormatError(
            f"{format} holds scales of rows or groups of inputs, got {spec.granularity}"
        )
    return IntegerLayout(bits, group, spec.has_zero_point and spec.mapping != "half_integer")


def codes_of(weight: AffineTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Signed codes int8 [N, K], and scale and zero point int8 as the weight stores them, of any granularity.

    Raises FormatError for half-integers that training moved.
    """
    spec, columns = weight.spec, weight.shape[1]
    assert isinstance(spec.format, Int)
    middle = 0 if spec.format.signed else 2 ** (spec.format.bits - 1)
    padded = spec.padded_shape(weight.shape)[1]
    codes = (weight._load(padded)[:, :columns].short() - middle).to(torch.int8).contiguous()
    scale, zero_point = weight.scale, weight.zero_point
    if spec.mapping == "half_integer":
        assert zero_point is not None
        if not torch.equal(zero_point * 2, scale):
            raise FormatError("its zero points are not half of its scales, as training moved them")
        return 2 * codes + 1, zero_point, None
    if zero_point is not None:
        zero_point = (zero_point.short() - middle).to(torch.int8)
    return codes, scale, zero_point


def integers_of(
    weight: AffineTensor, layout: IntegerLayout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes int8 [N, K], scale [N, G] and zero point int8 [N, G] in a layout that `layout_of` gave. Raises FormatError
    as `codes_of` does."""
    codes, scale, zero_point = codes_of(weight)
    rows, columns = codes.shape
    groups = 1 if layout.group_size is None else -(-columns // layout.group_size)
    if zero_point is not None:
        zero_point = zero_point.expand(rows, groups)
    return codes, scale.expand(rows, groups), zero_point


def from_integers(
    layout: IntegerLayout,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    activation: Spec | None = None,
) -> AffineTensor:
    """The weight of these integers. The last group of a row may have fewer inputs.

    Args:
        layout, codes, scale, zero_point: as `integers_of` takes and gives them; checked.
        dtype: of the weight, and of the scales if it represents them exactly.
        activation: how inputs are rounded.

    Raises FormatError for parts that do not fit each other.
    """
    spec = layout.spec
    if not scale.is_floating_point():
        raise FormatError(f"its scales are {scale.dtype}; accepted: floating-point numbers")
    narrow = scale.to(dtype)
    if torch.equal(narrow.float(), scale.float()):
        scale = narrow
    if codes.ndim != 2:
        raise FormatError(f"its codes have the shape {tuple(codes.shape)}; accepted: [N, K]")
    blocks = spec.blocks(codes.shape)
    for name, part in (("scales", scale), ("zero points", zero_point)):
        if part is not None and tuple(part.shape) != blocks:
            raise FormatError(
                f"its {name} {tuple(part.shape)} do not fit codes {tuple(codes.shape)}: {spec.granularity} takes "
                f"the shape {blocks}"
            )
    zero_point = None if zero_point is None else zero_point.contiguous()
    padded = F.pad(codes, (0, -codes.shape[1] % (layout.group_size or 1)))
    if zero_point is not None:  # the padding is zero, as in a weight that lowbit quantized
        padded[:, codes.shape[1] :] = zero_point[:, -1:]
    stored = AffineTensor._store(padded.contiguous(), spec)
    try:
        scale = scale.contiguous()
        return AffineTensor(stored, scale, zero_point, spec, codes.shape, dtype, activation)
    except ValueError as error:
        raise FormatError(str(error)) from error


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """int8 codes with 2^(b−1) added, uint8."""
    return (codes.short() + 2 ** (bits - 1)).to(torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unsigned`."""
    return (codes.short() - 2 ** (bits - 1)).to(torch.int8)


def in_range(codes: Tensor, bits: int, what: str) -> Tensor:
    """Integers as int8. Raises FormatError, in the name of `what`, unless all are −2^(b−1) … 2^(b−1)−1."""
    if codes.is_floating_point() or codes.is_complex():
        raise FormatError(f"{what} are {codes.dtype}; accepted: integers")
    low, high = (int(t) for t in codes.aminmax()) if codes.numel() else (0, 0)
    if low < -(2 ** (bits - 1)) or high >= 2 ** (bits - 1):
        raise FormatError(
            f"{what} are {low} to {high}; accepted with {bits} bits: {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}"
        )
    return codes.to(torch.int8)


def words_of(packed: Tensor) -> Tensor:
    """uint8 [..., B] as little-endian int32 [..., ⌈B/4⌉]."""
    padded = F.pad(packed, (0, -packed.shape[-1] % 4))
    # Flat: a dimension of size 1 may have a stride that a view as int32 refuses.
    words = padded.reshape(-1).view(torch.int32)
    return words.view(*padded.shape[:-1], padded.shape[-1] // 4)


def bytes_of(words: Tensor, size: int, bits: int) -> Tensor:
    """The packed bytes of `size` codes, without the padding of `words_of`. Raises FormatError for another number of
    words."""
    if words.dtype is not torch.int32 or words.shape[-1] != -(-size * bits // 32):
        raise FormatError(
            f"{size} codes of {bits} bits take {-(-size * bits // 32)} words of int32, got {words.dtype} "
            f"{tuple(words.shape)}"
        )
    stream = words.reshape(-1).contiguous().view(torch.uint8)
    stream = stream.view(*words.shape[:-1], 4 * words.shape[-1])
    return stream[..., : packed_size(size, bits)].contiguous()


# ---- scales in another dtype -----------------------------------------------------------------------------------------


def exact_scales(scale: Tensor, dtype: torch.dtype, format: str) -> Tensor:
    """The scales in `dtype`. Raises FormatError if that would change a scale."""
    own = scale.to(dtype)
    if changed := int((own.float() != scale.float()).sum()):
        name = str(dtype).removeprefix("torch.")
        raise ScalesError(
            f"{format} has scales of {name}, which cannot represent {changed} of {scale.numel()} scales"
        )
    return own


def whole_groups(weight: LowbitTensor) -> PerGroup | PerRow:
    """The groups of a weight if they divide its inputs; otherwise rows."""
    granularity = getattr(getattr(weight, "spec", None), "granularity", None)
    if not isinstance(granularity, PerGroup) or weight.shape[-1] % granularity.group_size:
        return PerRow()
    return granularity
