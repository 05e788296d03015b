"""A whole training step of a 1.2B Llama in bfloat16: its time, and its memory at the peak.

`train_memory` compares optimizers, alone and with `CPUOffloadOptimizer`, which keeps the states in host memory. In its
last problem the process has limited memory: the states of torch's optimizer do not fit beside the model, and its row
says so. `train_llama` compares low-bit products and weights with plain bfloat16. They take part in the seven linears of
each block, and in the head, which is tied to the embedding, except for linears too small to gain, as `prepare_`
reports; int8 weights take part only in the blocks. Rows marked "recomputed" keep only the results of products for the
backward pass (`lowbit.train.keep_products`).

Blocks and loss are compiled anew for each row: past its limit of recompilations torch.compile runs them uncompiled.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.optimizers import (
    REFERENCE,
    OptimizerChoice,
    from_module,
    lowbit_choice,
    step_seconds,
    torch_fused,
)
from benchmarks.peak_memory import PeakBytes, peak_by_kind
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from benchmarks.train_peers import PEERS
from lowbit import (
    Float8BlockMixedPrecision,
    Float8MixedPrecision,
    Int8MixedPrecision,
    Int8Weight,
    train,
)
from recipes.llama import Llama, LlamaConfig

LLAMA_1B_CONFIG = LlamaConfig(
    vocab_size=128_256, dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, context=4096
)
SCHEMES: dict[str, Any] = {
    "int8": Int8MixedPrecision(),
    "float8 rowwise": Float8MixedPrecision(),
    "float8 tensorwise": Float8MixedPrecision(tensorwise=True, backward="e5m2"),
    "float8 blocks": Float8BlockMixedPrecision(),
}
KINDS = tuple(field.name for field in fields(PeakBytes))
WARM_UP = 2
CAPPED_GIB = 9.0
"""Weights and gradients take 4.6 GiB, the states of torch's AdamW 4.6 GiB more, activations and logits about 2 GiB."""


@dataclass(frozen=True)
class TrainingCandidate:
    """Training with one optimizer.

    Attributes:
        batch: sequences, and tokens in each.
        limit: GiB that the process may take; None sets no limit.
        most_repeats: the most steps to time, for steps that take seconds.
        products: a name for the products of the linear layers, where they are not plain.
        scheme: the scheme of those products for `lowbit.train.prepare_`, or a peer's function that converts the model.
        saved_in_int8: whether autograd keeps activations in int8 (`lowbit.train.save_in_int8`).
    """

    choice: OptimizerChoice
    batch: tuple[int, int]
    limit: float | None = None
    config: LlamaConfig = LLAMA_1B_CONFIG
    device: str = "cuda"
    compile: bool = True
    most_repeats: int = 100
    products: str = ""
    scheme: Any = None
    saved_in_int8: bool = False

    @property
    def name(self) -> str:
        return f"{self.products}, {self.choice.name}" if self.products else self.choice.name


@dataclass(frozen=True)
class TrainingCost:
    """Seconds of one training step, GiB at its peak and between steps, and the kinds of tensors at the peak; memory is
    None on a CPU."""

    seconds: float
    tokens: int
    peak: float | None
    held: float | None
    kinds: PeakBytes | None = None


@dataclass(frozen=True)
class Training:
    """A model with its optimizer on one batch of random tokens. A call takes one step and returns its loss."""

    model: Llama
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[Tensor, Tensor], Tensor]
    tokens: Tensor
    saved_in_int8: bool = False

    def forward(self) -> Tensor:
        """The loss, with its graph."""
        with train.save_in_int8(self.model) if self.saved_in_int8 else nullcontext():
            logits = self.model(self.tokens[:, :-1])
        return self.loss_of(logits, self.tokens[:, 1:])

    def __call__(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_training(candidate: TrainingCandidate, repeats: int) -> TrainingCost:
    """Time ``repeats`` steps after two others. RuntimeError when the loss is not finite."""
    on_gpu = candidate.device == "cuda"
    repeats = min(repeats, candidate.most_repeats)
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with memory_limit(candidate.limit):
        step = training_step(candidate)
        for _ in range(WARM_UP):
            loss = step()
        if not loss.isfinite():
            raise RuntimeError(f"{candidate.name}: the loss is {loss.item()}")
        tokens = candidate.batch[0] * candidate.batch[1]
        peak = held = kinds = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(step_seconds(step, repeats, on_gpu))
        if on_gpu:
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            held = (torch.cuda.memory_allocated() - before) / 2**30
            kinds = peak_by_kind(step.model, step.optimizer, step.forward, before)
        return TrainingCost(seconds, tokens, peak, held, kinds)


@contextmanager
def memory_limit(gib: float | None) -> Iterator[None]:
    """Limit this process to ``gib`` GiB of GPU memory; beyond that torch.OutOfMemoryError is raised."""
    if gib is None:
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def training_step(
    candidate: TrainingCandidate, shard: Callable[[Llama], None] | None = None
) -> Training:
    """A model to train on random tokens.

    ``shard`` gets the model, prepared and compiled, before its optimizer is made and its tokens are drawn.
    """
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(candidate.choice.dtype)
    try:
        with torch.device(candidate.device):
            model = Llama(candidate.config)
    finally:
        torch.set_default_dtype(before)
    if callable(candidate.scheme):
        candidate.scheme(model)
    elif candidate.scheme is not None:
        train.prepare_(model, candidate.scheme)
    loss_of = next_token_loss
    if candidate.compile:
        torch.compiler.reset()
        loss_of = torch.compile(next_token_loss, dynamic=False)
        for block in model.blocks:
            block.compile(dynamic=False)
    if shard is not None:
        shard(model)
    optimizer = candidate.choice.make(model.parameters())
    rows, length = candidate.batch
    tokens = torch.randint(candidate.config.vocab_size, (rows, length + 1), device=candidate.device)
    return Training(model, optimizer, loss_of, tokens, candidate.saved_in_int8)


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def training_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost: TrainingCost = row.measured
    reference = result.reference.measured
    compared = reference is not None and cost.peak is not None and row is not result.reference
    return [
        f"{cost.seconds * 1e3:.1f}",
        ratio(cost.seconds, reference and reference.seconds),
        f"{cost.tokens / cost.seconds / 1e3:.1f}",
        "" if cost.peak is None else f"{cost.peak:.2f}",
        f"{cost.peak - reference.peak:+.2f}" if compared else "",
        "" if cost.held is None else f"{cost.held:.2f}",
        *kind_cells(cost.kinds),
    ]


def kind_cells(kinds: PeakBytes | None) -> list[str]:
    if kinds is None:
        return [""] * len(KINDS)
    return [f"{getattr(kinds, name) / 2**30:.2f}" for name in KINDS]


TRAINING_TABLE = Table(
    columns=(
        "step ms",
        "/ torch fused",
        "ktok/s",
        "peak GiB",
        "peak - torch's",
        "between steps GiB",
        *(f"{name} GiB" for name in KINDS),
    ),
    measure=measure_training,
    cells=training_cells,
    legend="Forward, backward and optimizer step; medians. *peak*: the most memory of tensors in a step, by the "
    "allocator; *between steps*: weights and states, gradients freed. The last columns divide the peak: *activations* "
    "are what the forward pass has allocated and not freed, *other* the temporary tensors of the backward pass.",
)


def offloaded(
    module: str, name: str, *, gradients: bool = False, **options: object
) -> OptimizerChoice:
    """``module.name`` with its states in host memory."""

    def make(params: object) -> torch.optim.Optimizer:
        base = getattr(importlib.import_module(module), name)
        options_of_all = {"lr": 1e-4, "offload_gradients": gradients, **options}
        return from_module(
            "lowbit.optim", "CPUOffloadOptimizer", params, base_class=base, **options_of_all
        )

    package = "lowbit" if module.startswith("lowbit") else "torch"
    also = " and gradients" if gradients else ""
    return OptimizerChoice(f"{package} {name}, states{also} offloaded", make)


def _choices() -> list[OptimizerChoice]:
    return [
        lowbit_choice("AdamW4bit", "AdamW4bit"),
        lowbit_choice("AdamW8bit", "AdamW8bit"),
        lowbit_choice("AdamWFp8", "AdamWFp8"),
        lowbit_choice("AdamW8bit, stochastic rounding", "AdamW8bit", bf16_stochastic_round=True),
        lowbit_choice("AdamW8bit, weight correction", "AdamW8bit", weight_correction="8bit"),
        torch_fused(),
    ]


def _offloaded_choices() -> list[OptimizerChoice]:
    return [
        offloaded("torch.optim", "AdamW", fused=True),
        offloaded("torch.optim", "AdamW", gradients=True, fused=True),
        offloaded("lowbit.optim", "AdamW8bit"),
    ]


@benchmark(
    "train_memory", "peak memory and time of a training step, 1.2B Llama", table=TRAINING_TABLE
)
def train_memory() -> Iterator[Problem]:
    for batch in ((4, 4096), (1, 4096)):
        candidates = [TrainingCandidate(c, batch) for c in _choices()]
        candidates += [offloading(c, batch) for c in _offloaded_choices()]
        yield Problem(f"batch {batch[0]} x {batch[1]}", candidates, REFERENCE)
    capped = partial(TrainingCandidate, batch=(1, 1024), limit=CAPPED_GIB)
    candidates = [
        capped(lowbit_choice("AdamW4bit", "AdamW4bit")),
        *[offloading(c, (1, 1024), CAPPED_GIB) for c in _offloaded_choices()[:2]],
        capped(torch_fused()),
    ]
    yield Problem(f"batch 1 x 1024, {CAPPED_GIB} GiB of memory", candidates, REFERENCE)


def offloading(
    choice: OptimizerChoice, batch: tuple[int, int], limit: float | None = None
) -> TrainingCandidate:
    """A candidate whose optimizer steps on the CPU, in seconds."""
    return TrainingCandidate(choice, batch, limit, most_repeats=3)


def low_bit_candidates(batch: tuple[int, int]) -> Iterator[TrainingCandidate]:
    adamw8bit = lowbit_choice("AdamW8bit", "AdamW8bit")
    for name, scheme in SCHEMES.items():
        without_head = {"head": None, "*": scheme}
        yield TrainingCandidate(adamw8bit, batch, products=name, scheme=scheme)
        yield TrainingCandidate(
            adamw8bit, batch, products=f"{name}, plain head", scheme=without_head
        )
    recomputing = replace(LLAMA_1B_CONFIG, recompute=True)
    for name, scheme in {**SCHEMES, "bf16": None}.items():
        label = f"{name}, recomputed"
        yield TrainingCandidate(adamw8bit, batch, config=recomputing, products=label, scheme=scheme)
    int8, int8_weights = SCHEMES["int8"], {"head": None, "*": Int8Weight()}
    yield TrainingCandidate(adamw8bit, batch, products="int8 weights", scheme=int8_weights)
    for name, convert in PEERS.items():
        yield TrainingCandidate(torch_fused(), batch, products=name, scheme=convert)
    yield TrainingCandidate(torch_fused(), batch, products="int8", scheme=int8)
    yield TrainingCandidate(adamw8bit, batch, products="bf16")
    yield TrainingCandidate(torch_fused(), batch)


@benchmark(
    "train_llama", "int8 and float8 products in a training step, 1.2B Llama", table=TRAINING_TABLE
)
def train_llama() -> Iterator[Problem]:
    batch = (4, 4096)
    yield Problem(f"batch {batch[0]} x {batch[1]}", list(low_bit_candidates(batch)), REFERENCE)


@benchmark(
    "train_saved",
    "activations saved in int8 in a training step, 1.2B Llama",
    table=replace(
        TRAINING_TABLE,
        columns=(
            "step ms",
            "/ int8",
            "ktok/s",
            "peak GiB",
            "peak - int8's",
            *TRAINING_TABLE.columns[5:],
        ),
    ),
)
def train_saved() -> Iterator[Problem]:
    """The peer is torch's selective checkpointing, which keeps the results of products alone."""
    batch = (4, 4096)
    yield Problem(
        f"batch {batch[0]} x {batch[1]}", list(saving_candidates(batch)), "int8, AdamW8bit"
    )


def saving_candidates(batch: tuple[int, int]) -> Iterator[TrainingCandidate]:
    choice = replace(lowbit_choice("AdamW8bit", "AdamW8bit"), name="AdamW8bit")
    recomputing = replace(LLAMA_1B_CONFIG, recompute=True)
    for products, scheme in (("int8", SCHEMES["int8"]), ("bf16", None)):
        of = partial(TrainingCandidate, choice, batch, scheme=scheme)
        yield of(products=f"{products}, saved in int8", saved_in_int8=True)
        yield of(products=f"{products}, selective checkpointing", config=recomputing)
        yield of(products=products)
