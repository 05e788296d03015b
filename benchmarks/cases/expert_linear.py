"""Calls of `expert_linear`: formats, distributions of ids, and the experts of published mixtures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.cases.formats import FORMATS

BY_NAME = {one.name: one for one in FORMATS}


@dataclass(frozen=True)
class Case:
    """One call, with random arguments.

    Args:
        tokens, top: rows of x, and ids of each.
        per_pair: x has a row for each id.
        beyond: every fifth id is one that no expert has.
        same: the one expert of all tokens; None draws them.
    """

    name: str
    experts: int
    n: int
    k: int
    tokens: int
    top: int
    format: str = "int4"
    group_size: int | None = None
    dtype: torch.dtype = torch.bfloat16
    gated: bool = False
    bias: bool = False
    per_pair: bool = False
    beyond: bool = False
    same: int | None = None
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, zero_point, ids, bias, group_size, gated, global_scale, bits, table."""
        made = BY_NAME[self.format].weight(self.experts * self.n, self.k, self.group_size, device)
        codes, scale, zero = (
            None if t is None else t.view(self.experts, self.n, -1)
            for t in (made["codes"], made["scale"], made["zero_point"])
        )
        scores = torch.rand(self.tokens, self.experts, device=device)
        ids = scores.topk(self.top, 1).indices.flatten()
        if self.same is not None:
            ids = torch.full_like(ids, self.same)
        if self.beyond:
            ids[::5] = self.experts + 2
            ids[5::10] = -1
        rows = self.tokens * self.top if self.per_pair else self.tokens
        x = torch.randn(rows, self.k, device=device).to(self.dtype)
        bias = torch.randn(self.experts, self.n, device=device).to(self.dtype)
        last = made["global_scale"], made["bits"], made["table"]
        kept = bias if self.bias else None
        return x, codes, scale, zero, ids, kept, made["group_size"], self.gated, *last


CASES = [
    Case("typical", 4, 48, 256, 3, 2),
    Case("zero-bias", 4, 48, 256, 3, 2, "int4-zero", bias=True),
    Case("groups-of-32", 16, 40, 288, 2, 3, "int4-zero", 32, bias=True, beyond=True),
    Case("groups-of-64", 4, 64, 256, 3, 2, group_size=64, gated=True),
    Case("per-row", 3, 17, 160, 20, 2, group_size=0, beyond=True),
    Case("odd-k", 3, 18, 129, 20, 2, dtype=torch.float16, gated=True),
    Case("one-expert", 3, 32, 128, 11, 1, same=2, per_pair=True),
    Case("int8", 4, 48, 128, 1, 4, "int8"),
    Case("int8-groups", 4, 48, 128, 1, 4, "int8-zero", 32, torch.float16),
    Case("int8-many", 4, 48, 256, 9, 4, "int8", bias=True),
    Case("float8", 4, 48, 128, 1, 4, "float8_e4m3fn", gated=True),
    Case("mxfp4", 4, 64, 128, 1, 4, "mxfp4", bias=True, gated=True),
    Case("mxfp8", 3, 72, 192, 40, 2, "mxfp8", bias=True, gated=True),
    Case("mxfp4-half", 4, 64, 96, 3, 2, "mxfp4", dtype=torch.float16, per_pair=True),
    Case("fp32", 3, 17, 96, 3, 2, group_size=32, dtype=torch.float32),
    Case("nf4", 3, 18, 128, 3, 2, "nf4"),
    Case("int3", 3, 18, 128, 3, 2, "int3", gated=True),
    Case("nvfp4", 3, 18, 64, 3, 2, "nvfp4"),
    Case("odd-group", 3, 9, 45, 3, 2, group_size=9),
    Case("unsigned", 3, 18, 256, 3, 2, "uint4", bias=True, gated=True),
    Case("int2", 3, 18, 256, 3, 2, "int2-zero"),
    Case("int6", 3, 18, 256, 3, 2, "int6-zero", dtype=torch.float16),
    Case("table3", 3, 18, 256, 9, 2, "table3", beyond=True),
    Case("mxfp4-up", 3, 72, 192, 40, 2, "mxfp4", bias=True, gated=True, beyond=True),
    Case("many", 5, 176, 384, 70, 2, "int4-zero", bias=True, gated=True, beyond=True),
    Case("many-down", 5, 300, 256, 70, 2, "int4", bias=True, per_pair=True, beyond=True),
    Case("no-tokens", 3, 8, 64, 0, 2, group_size=32),
    Case("nothing-but-beyond", 2, 16, 64, 1, 1, group_size=32, beyond=True),
    Case("qwen3-moe-up", 128, 1536, 2048, 16, 8, gated=True, large=True),
    Case("qwen3-moe-down", 128, 2048, 768, 16, 8, per_pair=True, large=True),
    Case("qwen3-moe-prefill", 128, 1536, 2048, 2048, 8, gated=True, large=True),
    Case("mixtral-up", 8, 28672, 4096, 1, 2, gated=True, large=True),
    Case("gpt-oss-up", 32, 5760, 2880, 2, 4, "mxfp4", bias=True, large=True),
]
