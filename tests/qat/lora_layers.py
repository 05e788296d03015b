"""LoRA layers with the interface of PEFT's, for tests without PEFT; tests/integrations has PEFT's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLayer(nn.Module):
    """A layer around `base` with adapters by name: {"default": (rank, factor)}."""

    def __init__(
        self, base: nn.Module, adapters: dict[str, tuple[int, float]] | None = None
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.lora_dropout = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.use_dora: dict[str, bool] = {}
        self.lora_bias: dict[str, bool] = {}
        self.lora_variant: dict[str, Any] = {}
        self.merged_adapters: list[str] = []
        self.disable_adapters = False
        self.fan_in_fan_out = False
        base.requires_grad_(False)
        adapters = adapters or {"default": (4, 0.5)}
        for name, (rank, factor) in adapters.items():
            self._add(name, rank)
            self.scaling[name] = factor
            self.lora_dropout[name] = nn.Identity()
        self.active_adapters = list(adapters)

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    def _add(self, name: str, rank: int) -> None:
        base: Any = self.base_layer
        n, k = base.weight.shape
        self.lora_A[name] = nn.Linear(k, rank, bias=False)
        self.lora_B[name] = nn.Linear(rank, n, bias=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return y
        for name in self.active_adapters:
            y = y + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return y


class LoraEmbedding(LoraLayer):
    def _add(self, name: str, rank: int) -> None:
        base: Any = self.base_layer
        n, k = base.weight.shape
        self.lora_embedding_A[name] = nn.Parameter(torch.randn(rank, n) * 0.1)
        self.lora_embedding_B[name] = nn.Parameter(torch.randn(k, rank) * 0.1)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.base_layer(x)
        for name in self.active_adapters:
            a, b = self.lora_embedding_A[name], self.lora_embedding_B[name]
            y = y + F.embedding(x, a.t()) @ b.t() * self.scaling[name]
        return y


class Net(nn.Module):
    """Two LoRA layers and a plain one. float32 adapters over a base of `dtype`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = LoraLayer(nn.Linear(64, 96, dtype=dtype))
        self.down = LoraLayer(
            nn.Linear(96, 64, bias=False, dtype=dtype), {"one": (3, 2.0), "two": (5, 0.25)}
        )
        self.head = nn.Linear(64, 32, dtype=dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x + self.down(F.silu(self.up(x))))
        return y
