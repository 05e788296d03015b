"""The formats of weights that `weight_linear` and `dequantize` take, and random weights in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.numerics.lookup_table import E2M1, NF4

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Format:
    """A format, and the group size in which models have it (0: one scale a row).

    Args:
        bits, table: as the ops take them; 0 bits for `codes` of 8 bits.
        codes: the dtype of codes; uint8 holds a bit stream.
        zero_point: the dtype of zero points, or None.
        scale: the dtype of scales; uint8 is e8m0, and float8_e4m3fn comes with a global scale.
    """

    name: str
    group_size: int
    bits: int = 0
    table: tuple[float, ...] = ()
    codes: torch.dtype = torch.uint8
    zero_point: torch.dtype | None = None
    scale: torch.dtype = torch.bfloat16

    @property
    def axes(self) -> tuple[object, ...]:
        """What kernels of this format distinguish, each by code of its own."""
        kinds = (self.codes, self.zero_point, self.scale)
        return (self.bits, len(self.table) > 0, *kinds, self.group_size == 0)

    def weight(
        self, n: int, k: int, group_size: int | None = None, device: torch.device | str = "cpu"
    ) -> dict:
        """Random arguments of the ops: codes, scale, zero_point, global_scale, group_size, bits and table."""
        group = (self.group_size if group_size is None else group_size) or max(k, 1)
        groups = -(-k // group)
        shape = (n, groups)
        width = -(-groups * group * (self.bits or 8) // 8)
        stored = torch.randint(0, 256, (n, width), dtype=torch.uint8, device=device)
        if self.codes in FLOAT8:  # without NaN and infinities
            largest = 0x7E if self.codes == torch.float8_e4m3fn else 0x7B
            stored = (stored & 0x7F).clamp(max=largest) | (stored & 0x80)
        return {
            "codes": stored.view(self.codes),
            "scale": self._scales(shape, device),
            "zero_point": self._zero_points(shape, device),
            "global_scale": self._global_scale(device),
            "group_size": group,
            "bits": self.bits,
            "table": self.table,
        }

    def _scales(self, shape: tuple[int, int], device: torch.device | str) -> Tensor:
        if self.scale == torch.uint8:
            return torch.randint(112, 124, shape, dtype=torch.uint8, device=device)
        values = torch.rand(shape, device=device) + 0.05
        if self.scale in FLOAT8:
            return (values * 400).to(self.scale)  # 448 is the largest
        values.flatten()[1::3] *= -1  # scales may be negative
        return (values * 0.02).to(self.scale)

    def _zero_points(self, shape: tuple[int, int], device: torch.device | str) -> Tensor | None:
        if self.zero_point is None:
            return None
        if self.zero_point.is_floating_point:
            return (torch.randn(shape, device=device) * 0.02).to(self.zero_point)
        low = -(2 ** ((self.bits or 8) - 1)) if self.zero_point == torch.int8 else 0
        high = low + 2 ** (self.bits or 8)
        return torch.randint(low, high, shape, dtype=self.zero_point, device=device)

    def _global_scale(self, device: torch.device | str) -> Tensor | None:
        return torch.tensor([[21504.0]], device=device) if self.scale in FLOAT8 else None


def _integers() -> list[Format]:
    int8, uint8, bf16 = torch.int8, torch.uint8, torch.bfloat16
    made = [Format(f"int{bits}", 128, bits) for bits in range(1, 8)]
    made += [Format(f"int{bits}-zero", 128, bits, zero_point=int8) for bits in (2, 3, 4, 6)]
    made += [Format(f"uint{bits}", 128, bits, zero_point=uint8) for bits in (2, 3, 4, 5, 8)]
    made += [Format(f"int{bits}-value", 32, bits, zero_point=bf16) for bits in (1, 2, 3, 4)]
    made.append(Format("int8", 0, codes=int8))
    made.append(Format("int8-zero", 64, codes=int8, zero_point=int8))
    return made


FORMATS = [
    *_integers(),
    Format("float8_e4m3fn", 0, codes=torch.float8_e4m3fn),
    Format("float8_e5m2", 0, codes=torch.float8_e5m2),
    Format("nf4", 64, 4, NF4.values, scale=torch.float32),
    Format("mxfp4", 32, 4, E2M1.values, scale=torch.uint8),
    Format("mxfp8", 32, codes=torch.float8_e4m3fn, scale=torch.uint8),
    Format("nvfp4", 16, 4, E2M1.values, scale=torch.float8_e4m3fn),
    Format("table3", 64, 3, (-4.0, -2.5, -1.0, -0.25, 0.0, 0.5, 1.5, 3.0)),
]
