"""Cases of `lowbit_kernels.decoding.quantized_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.quantize_to_cache import Case as Cache
from lowbit_kernels.decoding.quantize_to_cache import quantize_to_cache


@dataclass(frozen=True)
class Case:
    """One call, with random queries over random keys and values that the op of the cache has quantized."""

    name: str
    tokens: int  # that the cache has seen
    slots: int = 64
    window: int = 0  # 0: all slots
    width: int = 64
    batch: int = 2
    heads: int = 2  # of keys
    group: int = 4
    keys: str = "int8"
    values: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    ring: bool = False
    masked: bool = False
    padded: bool = False
    has_sinks: bool = False
    softcap: float = 0.0
    large: bool = False

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """Those of the op, in the order of its schema."""
        window = self.window or self.slots
        shape = (window, self.width, self.batch, self.heads, self.keys, self.values, self.ring)
        cache = Cache("", max(self.tokens, 1), 0, self.slots, *shape, dtype=self.dtype)
        key, value = (x.nan_to_num(1.0, 1.0) for x in cache.states(device))
        key_codes, key_scale, value_codes, value_scale, zero = cache.cache(device)
        codes = (key_codes, key_scale, value_codes, value_scale)
        start = torch.zeros(1, dtype=torch.int64, device=device)
        length = quantize_to_cache(key, value, *codes, start, zero, window=window, ring=self.ring)
        length = length.clamp(max=self.tokens)
        heads = self.heads * self.group
        query = torch.randn(self.batch, heads, 1, self.width, device=device).to(self.dtype)
        mask = torch.rand(self.batch, window, device=device) < 0.7 if self.masked else None
        first = torch.arange(self.batch, device=device) * 5 if self.padded else None
        sinks = torch.randn(heads, device=device) if self.has_sinks else None
        scale = self.width**-0.5
        more = (scale, window, self.softcap, self.ring)
        return (query, *codes, length, zero, mask, first, sinks, *more)


CASES = [
    Case("typical", 50),
    Case("full", 64, width=128, values="int4"),
    Case("float8", 50, keys="float8", values="float8", width=128, masked=True),
    Case("float16", 33, dtype=torch.float16, width=96, values="int4", softcap=20.0),
    Case("ring", 177, slots=96, window=70, width=80, group=3, ring=True, masked=True, padded=True),
    Case("ring-not-full", 30, slots=96, window=70, width=32, ring=True, padded=True),
    Case("wide", 90, slots=96, width=256, group=2, heads=1),
    Case("many-queries", 60, group=20, heads=1, has_sinks=True, padded=True),
    Case("float32", 50, dtype=torch.float32),
    Case("narrow", 40, width=20, group=1, has_sinks=True),
    Case("odd-width", 40, width=37, values="int4"),
    Case("odd-slots", 40, slots=47),
    Case("no-tokens", 0),
    Case("no-sequences", 3, batch=0),
    Case("llama-8b", 8192, 8192, width=128, batch=16, heads=8, large=True),
    Case("llama-8b-4-bit", 8192, 8192, width=128, batch=16, heads=8, values="int4", large=True),
    Case(
        "llama-8b-float8",
        8000,
        8192,
        width=128,
        heads=8,
        keys="float8",
        values="float8",
        masked=True,
        large=True,
    ),
    Case("gpt-oss", 9000, 4096, 4096, heads=8, group=8, ring=True, has_sinks=True, large=True),
    Case("gemma", 3000, 4096, 4096, width=256, heads=4, group=2, softcap=50.0, large=True),
]
