"""Cases of `lowbit_kernels.decoding.decode_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One call, with random arguments; the new query, key and value are slices of one tensor."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    width: int
    slots: int
    position: int
    has_start: bool = False
    is_rotated: bool = True
    has_sinks: bool = False
    norm_width: int = 0
    window: int = 0
    softcap: float = 0.0
    large: bool = False  # the shape of a real layer, for GPUs and benchmarks

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> tuple:
        """All arguments, by position."""
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes = [n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)]
        joint = torch.randn(self.batch, 1, sum(sizes), **like)
        new = [
            t.view(self.batch, 1, size // self.width, self.width).transpose(1, 2)
            for t, size in zip(joint.split(sizes, -1), sizes, strict=True)
        ]
        shape = (self.batch, self.kv_heads, self.slots, self.width)
        caches = [torch.randn(shape, **like) for _ in range(2)]
        position = torch.tensor([self.position], device=device)
        start = torch.randint(0, self.position + 1, (self.batch,), device=device)
        angle = torch.rand(self.batch, 1, (self.width + 1) // 2, device=device).repeat(1, 1, 2) * 6
        angles = [t[..., : self.width].to(dtype).contiguous() for t in (angle.cos(), angle.sin())]
        return (
            *(*new, *caches, position, start if self.has_start else None),
            *(angles if self.is_rotated else [None, None]),
            torch.randn(self.heads, **like) if self.has_sinks else None,
            torch.randn(self.batch, 1, self.norm_width, **like) if self.norm_width else None,
            *(self.width**-0.5, self.window, self.softcap, 1e-5),
        )


CASES = [
    Case("the-first-token", 1, 4, 2, 16, 48, 0),
    Case("one-block", 2, 6, 2, 32, 64, 63),
    Case("a-full-cache-of-an-odd-length", 1, 8, 8, 16, 131, 130),
    Case("several-blocks-a-range", 33, 2, 2, 16, 260, 250),
    Case("padding", 3, 4, 2, 16, 300, 257, has_start=True),
    Case("a-window", 2, 4, 2, 16, 512, 400, has_start=True, window=70),
    Case("a-window-of-one", 1, 2, 2, 16, 200, 130, window=1),
    Case("a-soft-cap-and-no-angles", 2, 8, 2, 16, 128, 100, is_rotated=False, softcap=20.0),
    Case("sinks", 2, 8, 4, 16, 200, 140, has_sinks=True, has_start=True),
    Case("a-norm-afterwards", 2, 4, 2, 32, 90, 77, norm_width=131),
    Case("a-width-between-powers-of-two", 2, 6, 2, 24, 128, 99, has_start=True),
    Case("a-width-of-six", 1, 3, 1, 6, 64, 40),
    Case("an-odd-width", 2, 5, 1, 7, 64, 33, is_rotated=False, window=20),
    Case("a-group-of-five", 2, 10, 2, 16, 1000, 1, has_sinks=True, has_start=True, window=4),
    Case("no-sequences", 0, 4, 2, 16, 64, 3),
    Case("llama-8b", 1, 32, 8, 128, 1024, 600, large=True),
    Case("llama-8b, 16 sequences", 16, 32, 8, 128, 4096, 3500, has_start=True, large=True),
    Case("gemma2-9b", 1, 16, 8, 256, 8192, 6000, window=4096, softcap=50.0, large=True),
    Case("phi3-mini", 2, 32, 32, 96, 2048, 2047, large=True),
]
