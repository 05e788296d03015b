"""What a `Spec` refuses: fields that do not fit together, and scales beyond its dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.numerics.affine import MAPPINGS
from lowbit.numerics.granularity import Granularity, PerBlock, PerGroup, PerTensor
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8, Int, NumberFormat
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.scale_format import SCALE_FORMATS
from lowbit.numerics.super_blocks import LARGEST, TABLE, SuperBlocks

if TYPE_CHECKING:
    from lowbit.numerics.spec import Spec

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""What `Spec.scale_dtype` takes, by the name in files and on the command line."""


def check_fields(spec: Spec) -> None:
    """Raise ValueError or TypeError for fields that no tensor can be quantized by; see `Spec`."""
    if not isinstance(spec.format, NumberFormat):
        raise TypeError(
            f"format must be Int(bits) or Float8(), or a LookupTable, got {spec.format!r}"
        )
    if not isinstance(spec.granularity, Granularity):
        raise TypeError(
            f"granularity must be PerTensor(), PerRow(), PerGroup(g), PerToken(), PerBlock(...) or another "
            f"lowbit.numerics.granularity.Granularity, got {spec.granularity!r}"
        )
    if spec.mapping not in MAPPINGS:
        raise ValueError(f"unknown mapping {spec.mapping!r}; accepted: {', '.join(MAPPINGS)}")
    _check_scale_format(spec)
    _check_scale_dtype(spec)
    one_bit = isinstance(spec.format, Int) and spec.format.bits == 1
    if one_bit and spec.mapping.startswith("symmetric"):
        raise ValueError(
            f"one bit with mapping {spec.mapping!r} rounds every value to zero; use 'asymmetric' or "
            "'half_integer'"
        )
    if not isinstance(spec.static, bool):
        raise TypeError(f"static must be True or False, got {spec.static!r}")
    if spec.static and not isinstance(spec.granularity, PerTensor):
        raise ValueError(
            f"static=True gives all inputs one scale: the granularity must be PerTensor(), got {spec.granularity!r}"
        )
    if spec.static:
        spec.check_free_scales("static=True", "take static=False")


def _check_scale_format(spec: Spec) -> None:
    if spec.scale_format not in SCALE_FORMATS:
        raise ValueError(
            f"unknown scale_format {spec.scale_format!r}; accepted: {', '.join(SCALE_FORMATS)}"
        )
    if spec.scale_format == "super_block":
        if spec.scale_dtype is not None or super_blocks_of(spec) is None:
            rows = ", ".join(f"{row.bits} bits, {row.group}, {row.mapping!r}" for row in TABLE)
            raise ValueError(
                f"scale_format='super_block' is for integers of these bits, groups and mappings: {rows}, "
                f"without a scale_dtype, got {spec.format}, {spec.granularity}, {spec.mapping!r}, "
                f"{spec.scale_dtype}"
            )
        return
    is_float8 = isinstance(spec.format, Float8)
    if not isinstance(spec.format, LookupTable):
        takes = "'float' or 'e8m0'" if is_float8 else "'float'"
        if spec.scale_format not in (("float", "e8m0") if is_float8 else ("float",)):
            raise ValueError(
                f"scale_format={spec.scale_format!r} is for a LookupTable, such as NF4 and E2M1; {spec.format} "
                f"takes {takes}"
            )
        if not is_float8:
            return
    accepted = ["symmetric"]
    if spec.scale_format == "e8m0":
        accepted.append("symmetric_no_clipping_err")
    if spec.mapping not in accepted:
        what = "float8" if is_float8 else "a LookupTable"
        raise ValueError(
            f"{what} with scale_format={spec.scale_format!r} has no zero point: mapping must be "
            f"{' or '.join(map(repr, accepted))}, got {spec.mapping!r}"
        )


def _check_scale_dtype(spec: Spec) -> None:
    dtype = spec.scale_dtype
    if dtype is None:
        return
    if dtype not in SCALE_DTYPES.values():
        accepted = ", ".join(map(str, SCALE_DTYPES.values()))
        raise ValueError(f"scale_dtype must be {accepted} or None, got {dtype!r}")
    if isinstance(spec.format, LookupTable) or spec.scale_format == "e8m0":
        raise ValueError(
            f"scale_dtype={dtype} is for Int and Float8; the scales of a LookupTable, and of e8m0, are stored as "
            f"scale_format says, got {spec.scale_format!r}"
        )
    is_float8 = isinstance(spec.format, Float8)
    if is_float8 and isinstance(spec.granularity, PerBlock) and dtype is not torch.float32:
        raise ValueError(
            f"float8 in blocks has scales of torch.float32, got scale_dtype={dtype}; leave it None"
        )


def super_blocks_of(spec: Spec) -> SuperBlocks | None:
    """The row of `lowbit.numerics.super_blocks` for these bits, groups and mapping."""
    own = (spec.format, spec.granularity, spec.mapping)
    rows = ((Int(row.bits), PerGroup(row.group), row.mapping) for row in TABLE)
    return next((row for row, key in zip(TABLE, rows, strict=True) if key == own), None)


def check_reach(spec: Spec, tensors: dict[str, Tensor | None]) -> None:
    """Raise ValueError where new scales, or smallest values beside them, are too large for float16: the `scale_dtype`,
    the dtype of the weight, or that of the numbers of a super-block."""
    scale = tensors.get("scale")
    if spec.super_blocks is not None and scale is not None:
        _check_super_blocks(spec.super_blocks, scale, tensors["zero_point"])
        return
    own = spec.scale_dtype or (None if scale is None else scale.dtype)
    if own is not torch.float16 or torch.compiler.is_compiling():
        return
    kinds = {
        "scale": "scales",
        **({"zero_point": "smallest values"} if spec.rounds_minimum else {}),
    }
    for name, what in kinds.items():
        t = tensors[name]
        if t is not None and not t.is_meta and (bad := count_nonfinite(t)):
            raise ValueError(
                f"{bad} of {t.numel()} {what} are beyond 65504, the largest of torch.float16; take torch.bfloat16 or "
                "torch.float32 as scale_dtype"
            )


def _check_super_blocks(kind: SuperBlocks, scale: Tensor, zero_point: Tensor | None) -> None:
    """Raise ValueError where d or dmin is the largest number of float16, at which the choice of both ends."""
    if scale.is_meta or torch.compiler.is_compiling() or not bool((scale.abs() >= LARGEST).any()):
        return
    fields = kind.fields(scale, zero_point)
    if fields is None:
        return
    at_end = fields.d.abs() >= LARGEST
    if fields.dmin is not None:
        at_end |= fields.dmin.abs() >= LARGEST
    if bool(at_end.any()):
        raise ValueError(
            f"{int(at_end.sum())} of {at_end.numel()} super-blocks need a float16 scale of {LARGEST:g} or more, the "
            "largest number of torch.float16; take a scheme with scales of torch.float32, such as IntxWeightOnly"
        )
