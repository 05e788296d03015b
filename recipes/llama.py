"""A small, plain Llama that every recipe shares.

One block is

    x = x + Attention(RMSNorm(x))        grouped-query attention with rotary positions
    x = x + SwiGLU(RMSNorm(x))           down(silu(gate(x)) * up(x))

and the model is an embedding, `layers` such blocks, a last RMSNorm and a head, which shares the embedding's weight when
`tied`. There are no biases. Every matrix is an `nn.Linear`, so that `lowbit.quantize_` and `lowbit.qat.prepare_` find
it.

Shapes in names: B sequences, T new positions, S positions seen so far (cache included), D model width,
H query heads, K key/value heads, E width of one head, V vocabulary.

Sources: Llama (arXiv 2302.13971), rotary embedding (2104.09864, in the form that pairs channel i with
channel i + E/2), grouped-query attention (2305.13245), SwiGLU (2002.05202), RMSNorm (1910.07467).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowbit.train import keep_products


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model. `heads` must be a multiple of `kv_heads`, `dim` a multiple of `2 * heads`."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    """The longest sequence, in tokens."""
    tied: bool = True
    dropout: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    recompute: bool = False
    """True if blocks keep only the results of products for the backward pass, and compute the rest again."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden", "context"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"LlamaConfig.{name} is {getattr(self, name)}; it must be at least 1"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"LlamaConfig: dim={self.dim} is not a multiple of 2 * heads={2 * self.heads}; "
                "rotary embedding needs heads of an even width"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"LlamaConfig.dropout is {self.dropout}; it must be in [0, 1)")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class KVCache:
    """Keys and values of the positions seen so far: for each layer a pair [B, K, S, E].

    The first use of a layer allocates all `positions` (by default the context), in the dtype and on the device of its
    keys.
    """

    def __init__(self, config: LlamaConfig, batch: int, positions: int | None = None) -> None:
        self.capacity = positions if positions is not None else config.context
        self.length = 0
        self._shape = (batch, config.kv_heads, self.capacity, config.head_dim)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, key_BKTE: Tensor, value_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions, and return all positions of this layer: keys and values [B, K, S, E]."""
        if layer not in self._layers:
            made = key_BKTE.new_zeros(self._shape), value_BKTE.new_zeros(self._shape)
            self._layers[layer] = made
        keys_BKSE, values_BKSE = self._layers[layer]
        end = self.length + key_BKTE.shape[2]
        keys_BKSE[:, :, self.length : end] = key_BKTE
        values_BKSE[:, :, self.length : end] = value_BKTE
        return keys_BKSE[:, :, :end], values_BKSE[:, :, :end]


def rotary_angles(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [context, E/2]: the angle of pair i at position p is p · θ^(-2i/E)."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.context, dtype=torch.float64)
    angle = torch.outer(positions, config.rope_theta**-exponent)
    return angle.cos().float(), angle.sin().float()


def rotate(x_BHTE: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate each pair (channel i, channel i + E/2) by the angle of its position. Keeps shape and dtype."""
    cos, sin = cos_TP.to(x_BHTE.dtype), sin_TP.to(x_BHTE.dtype)
    first, second = x_BHTE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share K key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, cache: KVCache | None, layer: int
    ) -> Tensor:
        batch, new, _ = x_BTD.shape
        split = (batch, new, -1, self.config.head_dim)
        query_BHTE = rotate(self.query(x_BTD).view(split).transpose(1, 2), cos_TP, sin_TP)
        key_BKSE = rotate(self.key(x_BTD).view(split).transpose(1, 2), cos_TP, sin_TP)
        value_BKSE = self.value(x_BTD).view(split).transpose(1, 2)
        mask, causal = None, new > 1
        if cache is not None:
            seen = cache.length
            key_BKSE, value_BKSE = cache.append(layer, key_BKSE, value_BKSE)
            if seen and new > 1:  # `is_causal` aligns its mask to the top left
                mask = x_BTD.new_ones(new, seen + new, dtype=torch.bool).tril(seen)
                causal = False
        out_BHTE = F.scaled_dot_product_attention(
            query_BHTE,
            key_BKSE,
            value_BKSE,
            attn_mask=mask,
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=self.config.heads != self.config.kv_heads,
        )
        return self.out(out_BHTE.transpose(1, 2).reshape(batch, new, -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), `hidden` wide in the middle."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention, then SwiGLU, each behind its own RMSNorm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute = config.recompute

    def forward(
        self, x_BTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, cache: KVCache | None, layer: int
    ) -> Tensor:
        arguments = (x_BTD, cos_TP, sin_TP, cache, layer)
        if not (self.recompute and self.training and cache is None):
            return self._forward(*arguments)
        return checkpoint(self._forward, *arguments, use_reentrant=False, context_fn=keep_products)

    def _forward(
        self, x_BTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, cache: KVCache | None, layer: int
    ) -> Tensor:
        attended = self.attention(self.attention_norm(x_BTD), cos_TP, sin_TP, cache, layer)
        x_BTD = x_BTD + self.dropout(attended)
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Llama(nn.Module):
    """Tokens in, next-token logits out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset_parameters()
        if config.tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Normal(0, 0.02), times 1/√(2·layers) for the two matrices of a block that write to the residual stream."""
        self.cos, self.sin = rotary_angles(self.config)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
                continue
            writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            depth = math.sqrt(2 * self.config.layers) if writes_residual else 1.0
            nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] of the token that follows each position.

        With a `cache` the T tokens follow the `cache.length` tokens in it, and are added to it.
        ValueError when the positions exceed the context or the cache.
        """
        start = cache.length if cache is not None else 0
        end = start + tokens_BT.shape[1]
        limit = min(self.config.context, cache.capacity if cache is not None else end)
        if end > limit:
            raise ValueError(
                f"position {end} is past the {limit} that the context and the cache hold; "
                "pass fewer tokens or build the model with a longer context"
            )
        cos_TP, sin_TP = self.cos[start:end], self.sin[start:end]
        x_BTD = self.embedding(tokens_BT)
        for layer, block in enumerate(self.blocks):
            # without a cache, equal arguments for all blocks let torch.compile compile them once
            x_BTD = block(x_BTD, cos_TP, sin_TP, cache, layer if cache is not None else 0)
        if cache is not None:
            cache.length = end
        return self.head(self.norm(x_BTD))

    @torch.no_grad()
    def generate(
        self,
        prompt_BT: Tensor,
        new_tokens: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Append `new_tokens` sampled tokens to the prompt: int64 [B, T + new_tokens].

        The prompt runs once, then one token at a time over a key/value cache.

        Args:
            prompt_BT: int64 token ids.
            new_tokens: number of tokens to append.
            temperature: 0 takes the most likely token.
            top_k: number of the likeliest tokens to draw from; None draws from all.
            generator: draws on the CPU, so a seeded one gives the same draws on every device.
        """
        batch, length = prompt_BT.shape
        if length < 1 or new_tokens < 0 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"generate takes a prompt of at least one token (got {length}), new_tokens >= 0 (got "
                f"{new_tokens}), temperature >= 0 (got {temperature}), top_k >= 1 or None (got {top_k})"
            )
        cache = KVCache(self.config, batch, length + new_tokens)
        was_training = self.training
        self.eval()
        tokens_BT, new_BT = prompt_BT, prompt_BT
        for _ in range(new_tokens):
            logits_BV = self(new_BT, cache)[:, -1].float()
            if temperature == 0:
                new_BT = logits_BV.argmax(-1, keepdim=True)
            else:
                if top_k is not None and top_k < logits_BV.shape[-1]:
                    floor_B1 = logits_BV.topk(top_k).values[:, -1:]
                    logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
                chances_BV = (logits_BV / temperature).softmax(-1).cpu()
                drawn = torch.multinomial(chances_BV, 1, generator=generator)
                new_BT = drawn.to(prompt_BT.device)
            tokens_BT = torch.cat((tokens_BT, new_BT), dim=1)
        self.train(was_training)
        return tokens_BT
