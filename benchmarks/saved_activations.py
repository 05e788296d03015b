"""What `lowbit.train.save_in_int8` keeps of a block of a Llama, and how far it moves gradients of attention; on a CPU.

`saved_activations` counts the bytes that a compiled block saves for backward, weights left out. `saved_attention`
compares gradients with those of exact activations, for scores of several standard deviations. In one row queries and
keys are rounded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.registry import Problem, Result, Row, Table, benchmark
from lowbit import Int8MixedPrecision, LowbitTensor, train
from recipes.llama import Block, LlamaConfig, rotary_angles

CONFIG = LlamaConfig(256, dim=2048, layers=1, heads=32, kv_heads=8, hidden=8192, context=64)
"""A block of the 1.2B Llama of `train_llama`, for few tokens."""


@dataclass(frozen=True)
class SavingCandidate:
    """A block, compiled until Inductor would write kernels."""

    name: str
    scheme: Any = None
    saves: bool = False
    recompute: bool = False
    config: LlamaConfig = CONFIG


def saved_bytes(candidate: SavingCandidate, repeats: int = 1) -> int:
    """Bytes a token, in bfloat16."""
    config = candidate.config
    torch.compiler.reset()
    torch.manual_seed(0)
    block = Block(config).bfloat16()
    block.recompute = candidate.recompute
    if candidate.scheme is not None:
        train.prepare_(block, candidate.scheme)
    block.compile(backend="aot_eager_decomp_partition", dynamic=False)
    x = torch.randn(1, config.context, config.dim, dtype=torch.bfloat16).requires_grad_()
    angles = rotary_angles(config)
    seen: dict[int, int] = {}
    own = {t.untyped_storage().data_ptr() for t in _plain(block, angles)}
    with train.save_in_int8(block, min_numel=1024) if candidate.saves else nullcontext():
        y = block(x, *angles, None, 0)
    for t in y.grad_fn.saved_tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values()) // config.context


def _plain(block: nn.Module, angles: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    yield from angles
    for param in block.parameters():
        inner = param.inner_tensors().values() if isinstance(param, LowbitTensor) else [param]
        yield from (t for t in inner if t is not None)


@benchmark(
    "saved_activations",
    "bytes a token that a block of a 1.2B Llama saves",
    table=Table(
        columns=("bytes a token",),
        measure=saved_bytes,
        cells=lambda row, result, bandwidth: [f"{row.measured:,}"],
        legend="What the compiled block saves for the backward pass in bfloat16, without weights.",
    ),
    device="cpu",
)
def saved_activations() -> Iterator[Problem]:
    for name, scheme in (("bf16", None), ("int8 products", Int8MixedPrecision(always=True))):
        yield Problem(
            name,
            [
                SavingCandidate(
                    f"{label}{'saved in int8' if saves else 'as it is'}", scheme, saves, recompute
                )
                for recompute, label in ((False, ""), (True, "keep_products, "))
                for saves in (True, False)
            ],
        )


@dataclass(frozen=True)
class AttentionCandidate:
    name: str
    deviation: float
    rounds_all: bool


def attention_errors(candidate: AttentionCandidate, repeats: int = 1) -> tuple[float, ...]:
    """Relative errors of the gradients of query, key and value: causal, 256 tokens, heads of 64, float32."""

    def gradients(saving: AbstractContextManager[Any], plain: AbstractContextManager[Any]) -> Any:
        torch.manual_seed(0)
        leaves = [torch.randn(2, 4, 256, 64).requires_grad_() for _ in range(3)]
        factor = candidate.deviation**0.5
        q, k, v = leaves[0] * factor, leaves[1] * factor, leaves[2] * 1
        with saving, plain:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad((y * torch.randn(y.shape)).sum(), leaves)

    # Below torch functions the context does not see whose tensors are saved.
    plain = torch._C.DisableTorchFunction() if candidate.rounds_all else nullcontext()
    rounded = gradients(train.save_in_int8(nn.Module(), min_numel=1), plain)
    exact = gradients(nullcontext(), nullcontext())
    return tuple(float((a - b).norm() / b.norm()) for a, b in zip(rounded, exact, strict=True))


def attention_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    return [f"{100 * error:.2f}" for error in row.measured]


@benchmark(
    "saved_attention",
    "gradients of attention whose saved tensors are in int8",
    table=Table(
        columns=("query %", "key %", "value %"),
        measure=attention_errors,
        cells=attention_cells,
        legend="Relative errors of gradients. Scores have the standard deviation of the problem.",
    ),
    device="cpu",
)
def saved_attention() -> Iterator[Problem]:
    for deviation in (1.0, 2.0, 4.0, 8.0, 16.0):
        rows = (("query and key exact", False), ("all rounded", True))
        yield Problem(
            f"deviation {deviation:.0f}", [AttentionCandidate(n, deviation, a) for n, a in rows]
        )
