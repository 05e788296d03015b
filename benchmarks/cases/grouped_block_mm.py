"""Calls of `grouped_block_mm`: distributions of tokens over experts, and the three products of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.operands import offsets_of
from lowbit_kernels.quantize.quantize_blocks import quantize_blocks


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    tokens: tuple[int, ...]  # of each expert
    n: int
    k: int
    beyond: int = 0  # tokens that belong to no expert
    out_dtype: torch.dtype = torch.bfloat16
    power_of_two: bool = False
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu", product: str = "output") -> tuple:
        """a, b, a_scale, b_scale, offsets, out_dtype of a product, quantized from normal numbers. Blocks have unlike
        sizes, so that a scale of another one is seen."""
        generator = torch.Generator().manual_seed(len(self.tokens) * self.n + self.k)
        m, experts = sum(self.tokens) + self.beyond, len(self.tokens)

        def normals(*shape: int) -> torch.Tensor:
            found = torch.randn(shape, generator=generator)
            sizes = torch.rand([-(-size // 64) for size in shape], generator=generator) * 4 - 2
            for dim, size in enumerate(shape):
                sizes = sizes.repeat_interleave(64, dim).narrow(dim, 0, size)
            return (found * torch.exp2(sizes)).to(device)

        offsets = offsets_of(self.tokens, device)
        round_up = self.power_of_two
        x, weight, grad = normals(m, self.k), normals(experts, self.n, self.k), normals(m, self.n)
        rows = (
            quantize_blocks(t, tiles=False, offsets=offsets, power_of_two=round_up)
            for t in (x, grad)
        )
        (x, x_scale, x_t, x_scale_t), (g, g_scale, g_t, g_scale_t) = rows
        w, w_scale, w_t, w_scale_t = quantize_blocks(weight, tiles=True, power_of_two=round_up)
        operands = {
            "output": (x, w, x_scale, w_scale),
            "grad_input": (g, w_t, g_scale, w_scale_t),
            "grad_weight": (g_t, x_t, g_scale_t, x_scale_t),
        }
        return *operands[product], offsets, self.out_dtype


CASES = [
    Case("typical", (5, 17, 1, 9), 48, 64),
    Case("blocks", (128, 256), 256, 384),
    Case("empty-experts", (0, 131, 0, 0, 20, 0), 33, 160, out_dtype=torch.float16),
    Case("one-has-all", (0, 0, 300), 200, 144, power_of_two=True),
    Case("beyond", (2, 130), 130, 260, beyond=40, out_dtype=torch.float32),
    Case("nothing-but-beyond", (0, 0), 16, 32, beyond=3),
    Case("wide", (70, 3, 5), 600, 144, out_dtype=torch.float32),
    Case("no-tokens", (0, 0), 8, 64),
    Case("no-columns", (2, 3), 0, 64),
]
