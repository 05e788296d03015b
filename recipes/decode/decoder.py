"""A `recipes.llama.Llama` over a static cache: a prefill, and one token at a time.

Shapes in names as in recipes/llama.py; P the positions of the new tokens, S those that the cache has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.inference import linear
from recipes.decode.fold_norms import are_folded
from recipes.decode.next_position import attend_next, choose_next, gate_next, norm_next
from recipes.llama import Block, Llama, rotate


def project(module: nn.Module, x_BTD: Tensor, residual_BTD: Tensor) -> Tensor:
    """module(x) + residual, in one kernel where the weight has one."""
    if isinstance(module, nn.Linear):
        return linear(x_BTD, module.weight, module.bias, residual_BTD)
    return module(x_BTD) + residual_BTD


def block_step(
    block: Block,
    x_BTD: Tensor,
    cos_SP: Tensor,
    sin_SP: Tensor,
    position_T: Tensor,
    keys_BKSE: Tensor,
    values_BKSE: Tensor,
) -> Tensor:
    """One block over T new positions, which are written to the cache: the first ones, or a single one after others.

    For that one the norms, which have no weights, are left to what follows the linears.
    """
    attention, mlp, eps = block.attention, block.mlp, block.attention.config.norm_eps
    batch, new, _ = x_BTD.shape
    split = (batch, new, -1, attention.config.head_dim)
    h_BTD = x_BTD if new == 1 else block.attention_norm(x_BTD)
    query = attention.query(h_BTD).view(split).transpose(1, 2)
    key = attention.key(h_BTD).view(split).transpose(1, 2)
    value = attention.value(h_BTD).view(split).transpose(1, 2)
    if new == 1:
        new_position = (query, key, value, x_BTD, eps, cos_SP, sin_SP, position_T)
        mixed = attend_next(*new_position, keys_BKSE, values_BKSE)
    else:
        angles = cos_SP[position_T], sin_SP[position_T]
        query, key = rotate(query, *angles), rotate(key, *angles)
        keys_BKSE.index_copy_(2, position_T, key)
        values_BKSE.index_copy_(2, position_T, value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x_BTD = project(attention.out, mixed.transpose(1, 2).reshape(batch, new, -1), x_BTD)
    h_BTD = x_BTD if new == 1 else block.mlp_norm(x_BTD)
    gate, up = mlp.gate(h_BTD), mlp.up(h_BTD)
    h_BTF = gate_next(gate, up, x_BTD, eps) if new == 1 else F.silu(gate) * up
    return project(mlp.down, h_BTF, x_BTD)


def embed(model: Llama, tokens_BT: Tensor) -> Tensor:
    """What the first block gets: [B, T, D]."""
    return model.embedding(tokens_BT)


def choose(model: Llama, x_BTD: Tensor, token_B1: Tensor, position: Tensor) -> None:
    """The most likely token after the last position, into `token_B1`; `position` goes on by one."""
    last_B1D = norm_next(x_BTD[:, -1:], model.norm.weight, model.norm.eps)
    choose_next(model.head(last_B1D), token_B1, position)


class Decoder:
    """Greedy decoding of `batch` sequences over a cache of `positions`.

    Args:
        model: without weights in its blocks' norms: `fold_norms_`.
        backend: of torch.compile, for each block (one compilation, as they are alike), what comes before and what
            after them; None: uncompiled.
    """

    def __init__(
        self, model: Llama, batch: int, positions: int, backend: str | None = None
    ) -> None:
        self.model, config = model, model.config
        if not are_folded(model):
            raise ValueError("the blocks' norms have weights; fold_norms_(model) first")
        if not (batch > 0 and 0 < positions <= config.context):
            raise ValueError(
                f"batch must be 1 or more and positions 1 to {config.context}, the model's context; "
                f"got {batch} and {positions}"
            )
        weight = model.embedding.weight
        shape = (batch, config.kv_heads, positions, config.head_dim)
        self.keys = [weight.new_zeros(shape) for _ in range(config.layers)]
        self.values = [weight.new_zeros(shape) for _ in range(config.layers)]
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._block: Callable[..., Tensor] = block_step
        self._choose: Callable[..., None] = choose
        self._embed: Callable[..., Tensor] = embed
        if backend is not None:
            options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
            self._block = torch.compile(block_step, **options)
            self._choose = torch.compile(choose, **options)
            self._embed = torch.compile(embed, **options)

    def _run(self, tokens_BT: Tensor, position_T: Tensor) -> None:
        """The token after these to `token_B1`; they are the first positions, or a single one after others."""
        model = self.model
        x_BTD, angles = self._embed(model, tokens_BT), (model.cos, model.sin)
        for block, *cache in zip(model.blocks, self.keys, self.values, strict=True):
            x_BTD = self._block(block, x_BTD, *angles, position_T, *cache)
        self._choose(model, x_BTD, self.token_B1, self.position)

    def _check(self, prompt_BT: Tensor, new_tokens: int) -> None:
        batch, positions = self.keys[0].shape[0], self.keys[0].shape[2]
        if prompt_BT.dim() != 2 or prompt_BT.shape[0] != batch or prompt_BT.shape[1] == 0:
            raise ValueError(f"prompts are [{batch}, 1 or more], got {list(prompt_BT.shape)}")
        room = positions - prompt_BT.shape[1] + 1  # the last token needs none
        if not 1 <= new_tokens <= room:
            raise ValueError(
                f"after {prompt_BT.shape[1]} of {positions} positions there is room for 1 to {room} new tokens, "
                f"got {new_tokens}"
            )

    def prefill(self, prompt_BT: Tensor) -> None:
        """Begin with a prompt: [B, T]. The next token is then in `token_B1`, its position in `position`."""
        self._check(prompt_BT, 1)
        self._run(prompt_BT, torch.arange(prompt_BT.shape[1], device=prompt_BT.device))
        self.position.fill_(prompt_BT.shape[1])

    def step(self) -> None:
        """Decode the token after `token_B1`, which takes its place. No host is needed, so a CUDA graph can hold it."""
        self._run(self.token_B1, self.position)

    def generate(self, prompt_BT: Tensor, new_tokens: int) -> Tensor:
        """The prompt and `new_tokens`, at least 1, after it: int64 [B, T + new_tokens]."""
        self._check(prompt_BT, new_tokens)
        self.prefill(prompt_BT)
        found = [prompt_BT, self.token_B1.clone()]
        for _ in range(new_tokens - 1):
            self.step()
            found.append(self.token_B1.clone())
        return torch.cat(found, dim=1)
