"""Calls of `int4_to_int8`: groups within and across words, rows that end in a group, strided and long rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with random arguments: rows of zeros, rows with NaN and groups of zeros among them."""

    name: str
    rows: int
    size: int
    group_size: int
    strided: bool = False
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """codes, scale, group_size, size."""
        groups = -(-self.size // self.group_size)
        width = groups * self.group_size // 2
        nibbles = torch.randint(1, 16, (2, self.rows, width * (1 + self.strided)), device=device)
        codes = (nibbles[0] | nibbles[1] << 4).to(torch.uint8)
        codes = codes[:, self.strided * width :]
        scale = torch.rand(self.rows, groups, device=device) + 1e-3
        if groups and self.rows > 2:
            codes[0] = 0x88
            codes[1, : self.group_size // 2] = 0x88
            scale[1, 0] = 1e3  # of a group of zeros
            scale[2, groups // 2] = torch.nan
        return codes, scale, self.group_size, self.size


CASES = [
    Case("typical", 37, 256, 64),
    Case("rows-end-in-a-group", 5, 100, 32),
    Case("groups-of-24", 4, 120, 24),
    Case("groups-of-2-in-bytes", 5, 34, 2),
    Case("groups-of-6-in-bytes", 9, 101, 6),
    Case("strided", 6, 96, 32, strided=True),
    Case("long-rows", 3, 8200, 40),
    Case("one-element", 1, 1, 2),
    Case("no-rows", 0, 64, 32),
    Case("no-columns", 4, 0, 32),
    Case("llama-8b-up", 14336, 4096, 64, large=True),
    Case("llama-8b-down", 4096, 14336, 64, large=True),
]
