"""Scale formats: how the scales of a `LookupTable` or of float8 are stored, where a plain floating dtype is not enough.

| name     | scale of a block                            | stored, beside G scales of each of N rows          |
|----------|---------------------------------------------|----------------------------------------------------|
| "float"  | s = max(abs(x)) / largest                   | `scale` float32                                    |
| "e8m0"   | 2^(scale − 127)                             | `scale` uint8                                      |
| "e4m3"   | scale / global_scale                        | `scale` float8_e4m3fn, `global_scale` float32      |
| "e4m3_inverse" | as "e4m3"                            | as "e4m3"; 1 / global_scale is exact both ways     |
| "double" | DYNAMIC8[scale] · scale_absmax + scale_offset | `scale` uint8, `scale_absmax` and `scale_offset` float32 |

`scale` has the shape [..., N, G], `scale_absmax` [..., N, A], and `global_scale` and `scale_offset` [..., 1, 1].
largest is the largest magnitude of the codes, x a block, and X the matrix [N, K]: each expert of a stack has its own
global scale and offset. All arithmetic is float32. Float8 takes "float" and "e8m0".

- "e8m0" (OCP Microscaling Formats v1.0, section 6.3): exponent = floor(log2 max|x|) − floor(log2 largest). This is the
  mapping "symmetric". A value of up to 8 · 2^e then clips to 6 · 2^e. "symmetric_no_clipping_err" takes the next
  exponent where the value lies half a step or more beyond the last one (7 for E2M1), as compressed-tensors writes it.
  For float8 it takes the next exponent where the value is larger than the last one (448 for e4m3), so nothing clips:
  exponent = ceil(log2(max|x| / largest)), which torchao and cuBLAS call RCEIL ("symmetric" is their FLOOR).
  The smallest exponent is −126, so that 1/scale and every product are normal numbers. Byte 255 is NaN.
- "e4m3" (NVFP4; Alvarez et al., "Introducing NVFP4", NVIDIA 2025): global_scale = 448 · largest / max|X|. It divides,
  as compressed-tensors stores it. The scale of a block is at least 2^-9, the smallest e4m3 number: none is zero.
  Siblings that a server merges (`lowbit.convert.siblings`) share it: then max|X| is that of all of them.
- "e4m3_inverse": programs such as ModelOpt store m = 1 / global_scale, which multiplies. Only 83% of float32 numbers
  are the rounded reciprocal of one. A new global scale is 1 / (1 / g), which is: 1 / (1 / (1 / m)) = 1 / m for all m.
- "double" (QLoRA, arXiv 2305.14314): offset = mean of all s. Each 256 consecutive s − offset of the matrix share an
  absmax, and each is the nearest value of `DYNAMIC8`. bitsandbytes stores these absmax values in one list. In lowbit
  each row has its own copies, A = G / gcd(G, 256) of them, so that rows can be sliced. The values are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.float32 import divide, round_to_dtype
from lowbit.numerics.lookup_table import DYNAMIC8, LookupTable
from lowbit.numerics.number_format import Float8

ScaleParts = Mapping[str, Tensor]
PartShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ScaleFormat:
    """A row of the module's table, except "float"."""

    shared: ClassVar[tuple[str, ...]] = ()
    """The parts that a whole matrix shares, of shape [..., 1, 1]."""

    joint: ClassVar[str | None] = None
    """The part of `shared` that siblings must agree in, because a server has it once for the layers that it merges."""
    is_byte: ClassVar[bool] = False
    """True if a byte, together with what its matrix shares, is a scale."""

    def shapes(self, blocks: tuple[int, ...]) -> PartShapes:
        """Shape and dtype of each part, for scales of shape `blocks`, [..., N, G]."""
        raise NotImplementedError

    def joint_part(self, largest: Tensor, table: LookupTable) -> Tensor:
        """`joint` of matrices whose largest magnitude is `largest`, float32 [..., 1, 1]."""
        raise NotImplementedError

    def encode(
        self, absmax: Tensor, table: Any, mapping: str, kept: ScaleParts | None = None
    ) -> dict[str, Tensor]:
        """The parts for blocks with the largest magnitudes `absmax`, float32 [..., N, G], of codes in `table`, a
        LookupTable or, for "e8m0", also a Float8.
        `mapping`: that of the `Spec`. `kept`: parts from which comes what several blocks share; None: from `absmax`."""
        raise NotImplementedError

    def decode(self, parts: ScaleParts) -> Tensor:
        """The scales, float32 [..., N, G]."""
        raise NotImplementedError

    def of_byte(self, parts: ScaleParts) -> Tensor:
        """The scale that each byte stands for in one matrix with these parts, float32 [256], where `is_byte`."""
        every = torch.arange(256, dtype=torch.uint8, device=parts["scale"].device)
        stored = every.view(parts["scale"].dtype).view(1, 256)
        return self.decode({**parts, "scale": stored}).view(256)

    def encode_given(self, scale: Tensor, kept: ScaleParts | None = None) -> dict[str, Tensor]:
        """The parts of these scales. Raises ValueError where the format does not hold them.

        `kept`: the part that a matrix shares, where there is one."""
        raise ValueError(
            "these scales are chosen from the weight: give no qparams, or scale_format='float'"
        )

    def neighbours(self, parts: ScaleParts) -> Iterator[dict[str, Tensor]]:
        """Other parts, with which each block may lose less than with these, for a search."""
        raise NotImplementedError

    def of_full_gain(self, joint: Tensor) -> Tensor:
        """The part `joint` for searched scales, larger by 1 / gain (`lowbit.numerics.gain`)."""
        raise NotImplementedError

    def nearest(self, scale: Tensor, kept: ScaleParts | None = None) -> Tensor:
        """The scales that the format holds, nearest to these positive ones, where `is_byte`. `kept`: as `encode`."""
        raise NotImplementedError


def _over_matrix(blocks: tuple[int, ...]) -> tuple[int, ...]:
    return (*blocks[:-2], *(1 for _ in blocks[-2:]))


class E8M0(ScaleFormat):
    is_byte = True

    def shapes(self, blocks: tuple[int, ...]) -> PartShapes:
        return {"scale": (blocks, torch.uint8)}

    def encode(
        self,
        absmax: Tensor,
        table: LookupTable | Float8,
        mapping: str,
        kept: ScaleParts | None = None,
    ) -> dict[str, Tensor]:
        emax = math.floor(math.log2(table.largest))
        bits = absmax.view(torch.int32)
        byte = (bits >> 23) - emax
        if mapping == "symmetric_no_clipping_err":
            mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32) * 2.0**emax
            byte = byte + _needs_next(mantissa, table)
        byte = torch.where(absmax.isfinite(), byte.clamp(1, 254), 255)
        return {"scale": byte.to(torch.uint8)}

    def decode(self, parts: ScaleParts) -> Tensor:
        byte = parts["scale"].to(torch.int32)
        bits = torch.where(byte == 0, 0x400000, byte << 23)  # 2^-127 is a subnormal number
        return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)

    def neighbours(self, parts: ScaleParts) -> Iterator[dict[str, Tensor]]:
        """The exponents beside those of the largest values."""
        byte = parts["scale"].to(torch.int16)
        for step in (-1, 1):
            moved = torch.where(byte == 255, byte, (byte + step).clamp(1, 254))
            yield {"scale": moved.to(torch.uint8)}

    def nearest(self, scale: Tensor, kept: ScaleParts | None = None) -> Tensor:
        return scale.log2().round().clamp(-126, 127).exp2()

    def encode_given(self, scale: Tensor, kept: ScaleParts | None = None) -> dict[str, Tensor]:
        bad = ~is_power_of_two(scale.float())
        if not scale.is_meta and bool(bad.any()):
            raise ValueError(
                f"e8m0 stores powers of two, without a sign, got a scale of {scale[bad][0].item()}; accepted: 2^-126 "
                "to 2^127, as `choose_qparams` gives them, or scale_format='float'"
            )
        return {"scale": self.bytes_of(scale)}

    @staticmethod
    def bytes_of(scale: Tensor) -> Tensor:
        """uint8 of scales that `decode` gave, the inverse of it."""
        return (scale.float().contiguous().view(torch.int32) >> 23).to(torch.uint8)


def is_power_of_two(x: Tensor) -> Tensor:
    """The mask of the elements of a float32 tensor that are 2^-126 to 2^127."""
    bits = x.contiguous().view(torch.int32)
    return (bits & 0x7FFFFF == 0) & (bits > 0) & (bits >> 23 != 255)


def _needs_next(largest: Tensor, codes: LookupTable | Float8) -> Tensor:
    """Where a block with this largest value, in units of its scale, takes the next power of two instead."""
    if isinstance(codes, Float8):
        return largest > codes.quant_max
    magnitudes = sorted(set(map(abs, codes.values)))
    return largest >= magnitudes[-1] + (magnitudes[-1] - magnitudes[-2]) / 2


class E4M3(ScaleFormat):
    is_byte = True
    shared = ("global_scale",)
    joint = "global_scale"
    largest: ClassVar[float] = 448.0
    smallest: ClassVar[float] = 2.0**-9
    steps: ClassVar[tuple[int, ...]] = (*range(-5, 0), *range(1, 7))
    """Scales that a search tries, as steps between e4m3 numbers: 0.61 to 1.75 times the scale of the largest value."""
    gain: ClassVar[float] = 0.993
    """That of scales with the least squared error: 0.9928 to 0.9935 of random weights, normal or Student's t."""
    most_global: ClassVar[float] = 2.0**116
    """So that every scale / global_scale is a normal number."""

    def shapes(self, blocks: tuple[int, ...]) -> PartShapes:
        return {
            "scale": (blocks, torch.float8_e4m3fn),
            "global_scale": (_over_matrix(blocks), torch.float32),
        }

    def encode(
        self, absmax: Tensor, table: LookupTable, mapping: str, kept: ScaleParts | None = None
    ) -> dict[str, Tensor]:
        if kept is not None:
            whole = kept["global_scale"]
        elif absmax.numel() == 0:
            whole = absmax.new_ones(_over_matrix(tuple(absmax.shape)))
        else:
            whole = self.joint_part(absmax.amax((-2, -1), keepdim=True), table)
        scale = (divide(absmax, table.largest) * whole).clamp(self.smallest, self.largest)
        return {"scale": round_to_dtype(scale, torch.float8_e4m3fn), "global_scale": whole}

    def joint_part(self, largest: Tensor, table: LookupTable) -> Tensor:
        whole = divide(torch.full_like(largest, self.largest * table.largest), largest)
        return torch.where(largest == 0, 1.0, whole.clamp(max=self.most_global))

    def decode(self, parts: ScaleParts) -> Tensor:
        return divide(parts["scale"].float(), parts["global_scale"])

    def neighbours(self, parts: ScaleParts) -> Iterator[dict[str, Tensor]]:
        """The e4m3 numbers around the scales of the largest values, 1.5 times those among them, which puts the largest
        on 4 in place of 6."""
        byte = parts["scale"].view(torch.uint8).to(torch.int16)
        for step in self.steps:
            moved = (byte + step).clamp_(1, 126).to(torch.uint8)  # 2^-9 to 448
            yield {**parts, "scale": moved.view(torch.float8_e4m3fn)}

    def of_full_gain(self, joint: Tensor) -> Tensor:
        return joint * self.gain

    def nearest(self, scale: Tensor, kept: ScaleParts | None = None) -> Tensor:
        assert kept is not None
        whole = kept["global_scale"].float()
        stored = (scale * whole).clamp(self.smallest, self.largest)
        return self.decode({**kept, "scale": round_to_dtype(stored, torch.float8_e4m3fn)})

    def encode_given(self, scale: Tensor, kept: ScaleParts | None = None) -> dict[str, Tensor]:
        if kept is None:
            return super().encode_given(scale)
        whole = kept["global_scale"].float()
        stored = round_to_dtype(scale.float() * whole, torch.float8_e4m3fn)
        parts = {"scale": stored, "global_scale": whole}
        bad = (self.decode(parts) != scale) & scale.isfinite()
        if not scale.is_meta and bool(bad.any()):
            raise ValueError(
                f"NVFP4 stores scales that are e4m3 numbers over the global scale, got a scale of "
                f"{scale[bad][0].item()}; accepted: those of `search_qparams` with the same joint part"
            )
        return parts


class InverseE4M3(E4M3):
    def joint_part(self, largest: Tensor, table: LookupTable) -> Tensor:
        return self._twice_inverted(super().joint_part(largest, table))

    def of_full_gain(self, joint: Tensor) -> Tensor:
        return self._twice_inverted(super().of_full_gain(joint))

    @staticmethod
    def _twice_inverted(whole: Tensor) -> Tensor:
        one = torch.ones_like(whole)
        return divide(one, divide(one, whole))


class Double(ScaleFormat):
    shared = ("scale_offset",)
    block: ClassVar[int] = 256
    smallest: ClassVar[float] = 2.0**-126

    def shapes(self, blocks: tuple[int, ...]) -> PartShapes:
        *rows, groups = blocks
        copies = groups // math.gcd(groups, self.block) if groups else 0
        return {
            "scale": (blocks, torch.uint8),
            "scale_absmax": ((*rows, copies), torch.float32),
            "scale_offset": (_over_matrix(blocks), torch.float32),
        }

    def encode(
        self, absmax: Tensor, table: LookupTable, mapping: str, kept: ScaleParts | None = None
    ) -> dict[str, Tensor]:
        scale = divide(absmax, table.largest)
        if kept is not None:
            offset, of_block = kept["scale_offset"], kept["scale_absmax"]
            return self._encoded(scale, of_block, offset)
        if scale.numel() == 0:
            shapes = self.shapes(tuple(scale.shape)).items()
            return {name: scale.new_zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes}
        groups = scale.shape[-1]
        # in float64 the order of summation changes no bit
        offset = scale.double().mean((-2, -1), keepdim=True).float()
        centred = (scale - offset).flatten(-2)
        whole = F.pad(centred, (0, -centred.shape[-1] % self.block))
        of_block = whole.unflatten(-1, (-1, self.block)).abs().amax(-1)
        return self._encoded(scale, absmax_of_rows(of_block, scale.shape[-2], groups), offset)

    def _encoded(self, scale: Tensor, of_block: Tensor, offset: Tensor) -> dict[str, Tensor]:
        ratio = divide(scale - offset, _spread(of_block, scale).clamp(min=self.smallest))
        codes = DYNAMIC8.codes(DYNAMIC8.nearest(ratio))
        return {"scale": codes, "scale_absmax": of_block, "scale_offset": offset}

    def decode(self, parts: ScaleParts) -> Tensor:
        values = DYNAMIC8.look_up(parts["scale"], parts["scale"].shape[-1])
        of_block, offset = parts["scale_absmax"], parts["scale_offset"]
        copies = of_block.shape[-1]
        if copies in (0, values.shape[-1]):
            return values * of_block + offset
        spread = values.unflatten(-1, (copies, -1)) * of_block.unsqueeze(-1)
        return spread.flatten(-2) + offset

    @staticmethod
    def widest_steps(parts: ScaleParts) -> Tensor:
        """For each scale the largest distance of two neighbours among the numbers that its block offers."""
        values = sorted(DYNAMIC8.values)
        widest = max(b - a for a, b in itertools.pairwise(values))
        return _spread(parts["scale_absmax"], parts["scale"]) * widest


def absmax_of_rows(flat: Tensor, rows: int, groups: int) -> Tensor:
    """`scale_absmax` [..., N, A] of N rows with G groups each, from one absmax for each 256 scales of the matrix
    [..., ⌈N · G / 256⌉], as bitsandbytes stores them."""
    step = math.gcd(groups, Double.block)
    first = torch.arange(0, rows * groups, step, device=flat.device) // Double.block
    return flat[..., first].unflatten(-1, (rows, groups // step))


def flat_absmax(scale_absmax: Tensor, groups: int) -> Tensor:
    """The inverse of `absmax_of_rows`.

    Raises ValueError where the copies of one absmax differ, as in a slice of rows.
    """
    each = _spread(scale_absmax, scale_absmax.new_empty((1, groups), device="meta")).flatten(-2)
    index = torch.arange(each.shape[-1], device=each.device)
    flat, block = each[..., index[:: Double.block]], index // Double.block
    if not torch.equal(flat[..., block], each):
        raise ValueError(
            f"scale_absmax {tuple(scale_absmax.shape)} differs within {Double.block} scales of the matrix, as in a "
            "slice or a concatenation; quantize the whole weight anew"
        )
    return flat


def _spread(of_block: Tensor, scale: Tensor) -> Tensor:
    """One absmax for each scale."""
    times = scale.shape[-1] // max(of_block.shape[-1], 1)
    return of_block.repeat_interleave(times, -1) if times > 1 else of_block


SCALE_FORMATS: dict[str, Any] = {
    "float": None,
    "e8m0": E8M0(),
    "e4m3": E4M3(),
    "e4m3_inverse": InverseE4M3(),
    "double": Double(),
    "super_block": None,  # float32 numbers, of which lowbit.numerics.super_blocks chooses some
}
