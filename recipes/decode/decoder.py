"""Greedy decoding with a `recipes.llama.Llama` over a static cache: prefill, one token at a time, CUDA graph.

The weights of the blocks' norms are folded into the linears that read them:

    (factor · x ∘ w) Aᵀ = factor · x (A ∘ w)ᵀ     factor = 1 / sqrt(mean(x²) + eps), w of each column

A norm without a weight multiplies a token by one factor, which can also be applied after the linears. The outputs of
the linears then grow with x. bfloat16 and float32 have the range for that; float16 may not.

Shapes in names as in recipes/llama.py; P the positions of the new tokens, S those that the cache has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit import LowbitTensor
from lowbit.convert.side_by_side import joint_weight
from lowbit.inference import linear
from lowbit_kernels.composed.gated_linear import gated_linear
from lowbit_kernels.decoding.argmax_rows import next_token
from lowbit_kernels.decoding.decode_attention import decode_attention
from lowbit_kernels.decoding.gated_activation import gated_activation
from lowbit_kernels.decoding.rms_norm import rms_norm
from lowbit_kernels.decoding.token_input import token_input
from lowbit_kernels.weight_only import constant_weights
from recipes.llama import Block, Llama, rotate


@torch.no_grad()
def fold_norms_(model: Llama) -> None:
    """Multiply the columns of query, key, value, gate and up by the weight of the norm before them, and remove it.

    In place, before quantizing. The model computes the same up to rounding. Norms without a weight stay.

    Raises:
        ValueError: a linear is quantized, or in float16. The model is then unchanged.
    """
    readers = [reader for block in model.blocks for reader in _norms_and_readers(block)]
    readers = [(norm, linears) for norm, linears in readers if norm.weight is not None]
    for _, linears in readers:
        for module in linears:
            _check_foldable(module)
    for norm, linears in readers:
        for module in linears:
            module.weight.mul_(norm.weight)
        norm.elementwise_affine = False
        norm.register_parameter("weight", None)


def _norms_and_readers(block: nn.Module) -> list[tuple[nn.RMSNorm, tuple[nn.Linear, ...]]]:
    """The norms of a block, each with the linears that read it."""
    assert isinstance(block, Block)
    attention, mlp = block.attention, block.mlp
    return [
        (block.attention_norm, (attention.query, attention.key, attention.value)),
        (block.mlp_norm, (mlp.gate, mlp.up)),
    ]


def _check_foldable(module: nn.Module) -> None:
    weight = module.weight
    if type(module) is not nn.Linear or type(weight.data) is not torch.Tensor:
        kind = f"a {type(module).__name__} of {type(weight.data).__name__}"
        raise ValueError(
            f"norms are folded into plain linears, got {kind}; fold first, then quantize"
        )
    if weight.dtype == torch.float16:
        raise ValueError(
            "the outputs of the linears may overflow float16; take the model in bfloat16 or float32"
        )


def are_folded(model: Llama) -> bool:
    """True if the norms of all blocks have no weight."""
    norms = (norm for block in model.blocks for norm, _ in _norms_and_readers(block))
    return all(norm.weight is None for norm in norms)


def project(module: nn.Module, x_BTD: Tensor, residual_BTD: Tensor) -> Tensor:
    """module(x) + residual, in one kernel where the weight has one."""
    if isinstance(module, nn.Linear):
        return linear(x_BTD, module.weight, module.bias, residual_BTD)
    return module(x_BTD) + residual_BTD


def gate_and_up(block: nn.Module) -> dict[str, Any] | None:
    """The weights of gate and up as operands of `gated_linear`; None where they do not lie side by side."""
    assert isinstance(block, Block)
    weight: Any = joint_weight([block.mlp.gate, block.mlp.up])
    return None if weight is None or weight.activation is not None else weight.op_arguments()


def block_step(
    block: Block,
    x_BTD: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_T: Tensor,
    keys_BKSE: Tensor,
    values_BKSE: Tensor,
    joint: dict[str, Any] | None = None,
) -> Tensor:
    """One block over T new positions, which it writes to the cache: the first ones, or a single one after others.

    For a single one, the operations after the linears apply the norms.

    Args:
        block: the block.
        x_BTD: its input.
        cos: cosines of the new positions' rotary angles, as `embed` gives them.
        sin: sines of the same angles.
        position_T: the T new positions, int64.
        keys_BKSE: the block's cache of keys, which the call writes.
        values_BKSE: the block's cache of values, which the call writes.
        joint: its `gate_and_up`, for a single position.
    """
    attention, mlp, eps = block.attention, block.mlp, block.attention.config.norm_eps
    batch, new, _ = x_BTD.shape
    split = (batch, new, -1, attention.config.head_dim)
    h_BTD = x_BTD if new == 1 else block.attention_norm(x_BTD)
    query = attention.query(h_BTD).view(split).transpose(1, 2)
    key = attention.key(h_BTD).view(split).transpose(1, 2)
    value = attention.value(h_BTD).view(split).transpose(1, 2)
    if new == 1:
        cache = (keys_BKSE, values_BKSE, position_T)
        mixed = decode_attention(
            *(query, key, value, *cache, None, cos, sin, None, x_BTD),
            scale=attention.config.head_dim**-0.5,
            eps=eps,
        )
    else:
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        keys_BKSE.index_copy_(2, position_T, key)
        values_BKSE.index_copy_(2, position_T, value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x_BTD = project(attention.out, mixed.transpose(1, 2).reshape(batch, new, -1), x_BTD)
    h_BTD = x_BTD if new == 1 else block.mlp_norm(x_BTD)
    if new == 1 and joint is not None:
        h_BTF = gated_linear(x_BTD, **joint, normed=True, eps=eps)
        return project(mlp.down, h_BTF, x_BTD)
    gate, up = mlp.gate(h_BTD), mlp.up(h_BTD)
    h_BTF = gated_activation(gate, up, x_BTD, eps=eps) if new == 1 else F.silu(gate) * up
    return project(mlp.down, h_BTF, x_BTD)


def embed(model: Llama, tokens_BT: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The input of the first block, [B, T, D], and the cosines and sines of the positions' rotary angles: [T, P], or
    for one position [1, 1, 2 P], as `decode_attention` takes them."""
    if position_T.shape[0] > 1:
        return model.embedding(tokens_BT), model.cos[position_T], model.sin[position_T]
    if not isinstance(model.embedding.weight, LowbitTensor):
        return token_input(tokens_BT, position_T, model.embedding.weight, model.cos, model.sin)
    x_BTD = model.embedding(tokens_BT)
    cos, sin = (t[position_T].repeat(1, 2).to(x_BTD.dtype)[None] for t in (model.cos, model.sin))
    return x_BTD, cos, sin


def choose(model: Llama, x_BTD: Tensor, token_B1: Tensor, position: Tensor) -> None:
    """Write the most likely token after the last position to `token_B1`, and increment `position`.

    Args:
        model: the model, whose norm and head are used.
        x_BTD: output of the last block.
        token_B1: receives the tokens, int64.
        position: the position to increment, int64.
    """
    assert model.norm.weight is not None and model.norm.eps is not None
    last_B1D = rms_norm(x_BTD[:, -1:], model.norm.weight, eps=model.norm.eps)
    next_token(model.head(last_B1D)[:, 0], token_B1, position)


class Decoder:
    """Greedy decoding of `batch` sequences over a cache of `positions`.

    Args:
        model: with folded norms: `fold_norms_`.
        backend: of torch.compile, for the embedding, the blocks (one compilation serves all), and the head; None:
            uncompiled.
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
        self.joint = [gate_and_up(block) for block in model.blocks]
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._block: Callable[..., Tensor] = block_step
        self._choose: Callable[..., None] = choose
        self._embed: Callable[..., Any] = embed
        if backend is not None:
            options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
            self._block = torch.compile(block_step, **options)
            self._choose = torch.compile(choose, **options)
            self._embed = torch.compile(embed, **options)

    def _run(self, tokens_BT: Tensor, position_T: Tensor) -> None:
        """Write the token after these to `token_B1`. They are the first positions, or a single one after others."""
        model = self.model
        x_BTD, *angles = self._embed(model, tokens_BT, position_T)
        each = zip(model.blocks, self.keys, self.values, self.joint, strict=True)
        for block, *own in each:
            x_BTD = self._block(block, x_BTD, *angles, position_T, *own)
        self._choose(model, x_BTD, self.token_B1, self.position)

    def _check(self, prompt_BT: Tensor, new_tokens: int) -> None:
        batch, positions = self.keys[0].shape[0], self.keys[0].shape[2]
        if prompt_BT.dim() != 2 or prompt_BT.shape[0] != batch or prompt_BT.shape[1] == 0:
            raise ValueError(f"prompts are [{batch}, 1 or more], got {list(prompt_BT.shape)}")
        room = positions - prompt_BT.shape[1] + 1  # the last token is not cached
        if not 1 <= new_tokens <= room:
            raise ValueError(
                f"after {prompt_BT.shape[1]} of {positions} positions there is room for 1 to {room} new tokens, "
                f"got {new_tokens}"
            )

    def prefill(self, prompt_BT: Tensor) -> None:
        """Start with a prompt: [B, T]. The next token is then in `token_B1`, its position in `position`."""
        self._check(prompt_BT, 1)
        self._run(prompt_BT, torch.arange(prompt_BT.shape[1], device=prompt_BT.device))
        self.position.fill_(prompt_BT.shape[1])

    def step(self) -> None:
        """Replace `token_B1` by the token after it. The host takes no part, so a CUDA graph can hold a step."""
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


WARM_UP = 3


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`run` as the replay of a CUDA graph, after `WARM_UP` calls of it; on a CPU `run` itself, after as many calls.

    `run` must not write a weight of its products: see `constant_weights.captured`.

    torch.compile's own CUDA graphs (mode="reduce-overhead") leave out functions that write to a cache in place.
    """
    if device.type != "cuda":
        for _ in range(WARM_UP):
            run()
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    return constant_weights.captured(run)[0].replay
