"""Calls of `quantize_experts`: both layouts, with scales given or not, and odd shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    shape: tuple[int, int, int]
    format: str = "int8"
    transposed: bool = False
    given: bool = False  # the scales
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """weight, format, transposed, scale."""
        weight = torch.randn(self.shape, device=device).to(torch.bfloat16)
        scale = weight.float().abs().amax(2) / 100 if weight.numel() else torch.ones(self.shape[:2])
        return weight, self.format, self.transposed, scale if self.given else None


CASES = [
    Case(f"{format}-{layout}-{'x'.join(map(str, shape))}", shape, format, **options)
    for format in ("int8", "e4m3")
    for layout, options in (
        ("rows", {}),
        ("transposed", {"transposed": True}),
        ("given", {"transposed": True, "given": True}),
    )
    for shape in ((3, 40, 33), (2, 130, 272), (2, 0, 16))
]
