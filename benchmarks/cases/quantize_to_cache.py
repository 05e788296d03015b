"""Cases of `lowbit_kernels.decoding.quantize_to_cache`, and the caches of `quantized_attention`'s cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORMATS = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "int4": torch.uint8}


@dataclass(frozen=True)
class Case:
    """One call with random tokens: one key of zeros, one with a NaN, and one value with an infinity."""

    name: str
    tokens: int = 1
    before: int = 0
    slots: int = 32
    window: int = 32
    width: int = 32
    batch: int = 2
    heads: int = 2
    keys: str = "int8"
    values: str = "int8"
    ring: bool = False
    dtype: torch.dtype = torch.bfloat16
    own_lengths: bool = False
    strided: bool = False
    large: bool = False

    def cache(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """key_codes, key_scale, value_codes, value_scale, value_zero (None in 8 bits) of an empty cache."""
        whole = (self.batch, self.heads, self.slots)
        is_4bit = self.values == "int4"
        step = 32 if is_4bit else 16
        width = -(-self.width // step) * step

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((*whole, *shape), dtype=dtype, device=device)

        scales: Any = [zeros(dtype=torch.bfloat16) for _ in range(3)]
        codes = zeros(width // (1 + is_4bit), dtype=FORMATS[self.values])
        scales[2] = scales[2] if is_4bit else None
        return zeros(width, dtype=FORMATS[self.keys]), scales[0], codes, scales[1], scales[2]

    def states(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Keys with one large channel, and values of several sizes."""
        shape = (self.batch, self.heads, self.tokens, self.width)
        key, value = (torch.randn(shape, device=device) for _ in range(2))
        value *= torch.rand(*shape[:-1], 1, device=device) * 3
        if self.tokens > 3:
            key[0, 0, 0] = 0.0
            key[0, 0, 1, 3] = torch.nan
            value[0, 0, 2, 3] = torch.inf
        if self.width:
            key[..., 0] *= 10
        key, value = key.to(self.dtype), value.to(self.dtype)
        if self.strided:
            key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
        return key, value

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """Those of the op, in the order of its schema."""
        lengths = (
            torch.arange(self.batch) if self.own_lengths else torch.zeros(1, dtype=torch.int64)
        )
        key_codes, key_scale, value_codes, value_scale, zero = self.cache(device)
        cache = (key_codes, key_scale, value_codes, value_scale)
        lengths = lengths.to(device) + self.before
        return (*self.states(device), *cache, lengths, zero, self.window, self.ring)


CASES = [
    Case("one-token"),
    Case("prompt", tokens=11, strided=True, dtype=torch.float16),
    Case("float32", tokens=5, before=3, dtype=torch.float32, own_lengths=True),
    Case("float8", tokens=5, keys="float8", values="float8", width=80),
    Case("4-bit-values", tokens=7, values="int4", width=80),
    Case("odd-width", tokens=5, values="int4", width=37, window=17),
    Case("ring", tokens=5, before=15, window=17, ring=True, own_lengths=True),
    Case("ring-overfilled", tokens=40, before=3, window=17, ring=True),
    Case("beyond-the-window", tokens=9, before=12, window=17, values="int4"),
    Case("no-tokens", tokens=0),
    Case("no-sequences", batch=0),
    Case("llama-8b-token", batch=16, heads=8, width=128, slots=4096, window=4096, large=True),
    Case("llama-8b-prompt", tokens=4096, heads=8, width=128, slots=4096, window=4096, large=True),
]
