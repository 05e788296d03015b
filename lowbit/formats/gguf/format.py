"""GGUF, "gguf", as llama.cpp reads it: what a tensor of such a file holds.

A GGUF checkpoint is one file, not a folder: `lowbit.formats.gguf.file` writes and reads it, and
`lowbit.formats.gguf.blocks` the bytes of its tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from lowbit.formats.base import Format, FormatError, Parts
from lowbit.formats.gguf import blocks as gguf_blocks
from lowbit.formats.gguf.llama import in_gguf
from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.numerics.super_blocks import TABLE
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor

_SMALL_TYPES: tuple[tuple[int, int, MappingName], ...] = (
    (4, 0, "symmetric"),
    (5, 0, "symmetric"),
    (8, 0, "symmetric_no_clipping_err"),
    (4, 1, "float_zero_point"),
    (5, 1, "float_zero_point"),
)


class Gguf(Format):
    """How a GGUF file stores one weight: as one tensor, whose part has the name of its GGUF type, such as "Q4_0"."""

    name = "gguf"
    holds_embeddings = True
    holds_custom = True
    scale_dtype = torch.float16

    def reads(self, config: Mapping[str, Any]) -> bool:
        return False

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(gguf_blocks.TYPES)

    def stored_name(self, weight: str, part: str) -> str:
        in_gguf(weight)
        return f"{weight}.{part}"

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        ((kind, rows),) = parts.items()
        made = gguf_blocks.decode(kind, rows, dtype or torch.float16)
        if not isinstance(made, LowbitTensor):
            raise FormatError(f"no low-bit weight has the values of its {kind} blocks")
        return made

    def encode(self, weight: LowbitTensor) -> Parts:
        return dict([gguf_blocks.encode(weight)])

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        return {}

    def grid(self, scheme: Scheme) -> Scheme:
        """Zero points of 4 and 5 bits become the smallest values of Q4_1 and Q5_1, in float16."""
        spec = scheme.weight
        if spec.format in (Int(4), Int(5)) and spec.mapping == "asymmetric":
            scheme = replace(scheme, weight=replace(spec, mapping="float_zero_point"))
        return super().grid(scheme)

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        """Groups of 32 in 4 bits, or in 8 if the weight has more than 4."""
        spec = getattr(weight, "spec", None)
        if weight.ndim != 2 or weight.shape[1] % gguf_blocks.SMALL or not isinstance(spec, Spec):
            return None
        bits = 4 if spec.format.bits <= 4 else 8
        return Scheme(Spec(Int(bits), PerGroup(gguf_blocks.SMALL)))


SCHEMES: dict[str, Scheme] = {
    **{
        f"Q{row.bits}_K": Scheme(
            Spec(Int(row.bits), PerGroup(row.group), row.mapping, scale_format="super_block")
        )
        for row in TABLE
    },
    **{
        f"Q{bits}_{minimum}": Scheme(
            Spec(Int(bits), PerGroup(gguf_blocks.SMALL), mapping, scale_dtype=torch.float16)
        )
        for bits, minimum, mapping in _SMALL_TYPES
    },
    "MXFP4": Scheme(gguf_blocks.MXFP4),
}
"""The scheme of each type of a tensor that lowbit writes."""


def gguf_scheme(kind: str) -> Scheme:
    """The scheme whose weights a GGUF file holds as tensors of the type `kind`, such as "Q4_K". Raises FormatError for
    one that lowbit does not write."""
    if kind not in SCHEMES:
        raise FormatError(
            f"unknown type {kind!r}; lowbit writes {', '.join(sorted(SCHEMES))}. Mixes of types, such as Q4_K_M, are "
            "those of gguf_mix(name, model)"
        )
    return SCHEMES[kind]
