"""A training step of a diffusion transformer of diffusers: its time and its peak memory, in bfloat16 and in 8 bits.

`flux` has FLUX.1's widths (3,072 channels, 24 heads) and a quarter of its blocks, over 4,096 image tokens and 512 of
text: one picture of 1024 x 1024. `dit` is DiT-XL/2 (28 blocks of 1,152 channels) over 256 tokens of each of 64
pictures. Weights, latents and targets are random. LoRA has rank 16, on queries, keys, values and the output of
attention. Blocks are compiled one by one, without checkpoints, and each row compiles anew. Rows of torchao convert the
linears that have many rows, which is what its own filter asks for.

cuDNN's attention is off: in torch 2.11 its backward pass reads illegal memory in compiled blocks of Flux. Its
single-stream blocks return two views of one tensor, which torch does not compile beside tensor subclasses. So they
return copies.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.optimizers import OptimizerChoice, lowbit_choice, step_seconds, torch_fused
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from lowbit import Float8MixedPrecision, Int8MixedPrecision, train

REFERENCE = "bf16"
RANK = 16
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
WARM_UP = 2
FLUX = {"num_layers": 5, "num_single_layers": 9, "guidance_embeds": True}
"""The rest are FLUX.1's sizes, the defaults of diffusers."""
DIT = {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28, "sample_size": 32}


@dataclass(frozen=True)
class Kind:
    """A class of diffusers with its sizes, and what one step draws.

    Attributes:
        model: its name.
        sizes: its options.
        blocks: the names of its lists of blocks.
        pictures: the batch.
        tokens: of each picture, and of its text.
    """

    model: str
    sizes: Mapping[str, Any]
    blocks: tuple[str, ...]
    pictures: int
    tokens: tuple[int, int]

    def build(self, device: str) -> Any:
        made = getattr(importlib.import_module("diffusers"), self.model)
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                return made(**self.sizes)
        finally:
            torch.set_default_dtype(before)


KINDS = {
    "flux": Kind(
        "FluxTransformer2DModel",
        FLUX,
        ("transformer_blocks", "single_transformer_blocks"),
        1,
        (4096, 512),
    ),
    "dit": Kind("DiTTransformer2DModel", DIT, ("transformer_blocks",), 64, (256, 0)),
}


@dataclass(frozen=True)
class DiffusionCandidate:
    """Training of one model.

    Attributes:
        name: name of the row.
        kind: the model.
        convert: changes it, or None.
        choice: the optimizer.
        adapters: train LoRA alone, else all weights.
        device: "cuda", or "cpu" to try the benchmark.
    """

    name: str
    kind: Kind
    convert: Callable[[nn.Module], Any] | None
    choice: OptimizerChoice
    adapters: bool
    device: str = "cuda"


@dataclass(frozen=True)
class DiffusionCost:
    """Seconds of a step, GiB at its peak (None on a CPU), and the first and the last loss."""

    seconds: float
    peak: float | None
    losses: tuple[float, float]


def inputs_of(kind: Kind, model: Any, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """What `model` takes, and the target of its output. bfloat16."""
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    sizes, rows = model.config, kind.pictures
    if kind.model == "DiTTransformer2DModel":
        side = sizes.sample_size
        latents = draw(rows, sizes.in_channels, side, side)
        times = torch.randint(1000, (rows,), device=device)
        found = {"hidden_states": latents, "timestep": times, "class_labels": times}
        channels = sizes.out_channels or sizes.in_channels
        return found, draw(rows, channels, side, side)
    image, text = kind.tokens
    found = {
        "hidden_states": draw(rows, image, sizes.in_channels),
        "encoder_hidden_states": draw(rows, text, sizes.joint_attention_dim),
        "pooled_projections": draw(rows, sizes.pooled_projection_dim),
        "timestep": draw(rows).sigmoid(),
        "guidance": draw(rows).exp(),
        "img_ids": torch.zeros(image, 3, device=device),
        "txt_ids": torch.zeros(text, 3, device=device),
    }
    return found, draw(rows, image, sizes.in_channels)


def with_copies(forward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`forward` with results that share no memory."""
    return lambda *args, **kwargs: tuple(t.clone() for t in forward(*args, **kwargs))


def training_step(candidate: DiffusionCandidate) -> Callable[[], Tensor]:
    """Takes one step, and returns its loss."""
    kind = candidate.kind
    model = kind.build(candidate.device)
    if candidate.adapters:
        peft = importlib.import_module("peft")
        model.requires_grad_(False)
        peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, target_modules=ATTENTION), model)
    if candidate.convert is not None:
        candidate.convert(model)
    torch.compiler.reset()
    for blocks in kind.blocks:
        for block in getattr(model, blocks):
            if blocks == "single_transformer_blocks":
                block.forward = with_copies(block.forward)
            block.compile(dynamic=False)
    model.train()
    optimizer = candidate.choice.make([p for p in model.parameters() if p.requires_grad])
    inputs, target = inputs_of(kind, model, candidate.device)

    def step() -> Tensor:
        found = model(**inputs).sample
        loss = (found.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure_training(candidate: DiffusionCandidate, repeats: int) -> DiffusionCost:
    """Time `repeats` steps after two others.

    Raises:
        RuntimeError: the loss is not finite, or rose.
    """
    on_gpu = candidate.device == "cuda"
    gc.collect()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        before = torch.cuda.memory_allocated() if on_gpu else 0
        step = training_step(candidate)
        first = step().item()
        for _ in range(WARM_UP - 1):
            step()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(step_seconds(step, repeats, on_gpu))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None
        last = step().item()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
    if not last < 1.01 * first:  # or not a number
        raise RuntimeError(f"{candidate.name}: the loss is {first} before and {last} after")
    return DiffusionCost(seconds, peak, (first, last))


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost: DiffusionCost = row.measured
    reference = result.reference.measured
    compared = reference is not None and cost.peak is not None and row is not result.reference
    return [
        f"{cost.seconds * 1e3:.1f}",
        ratio(reference.seconds, cost.seconds) if compared else "",
        "" if cost.peak is None else f"{cost.peak:.2f}",
        f"{cost.peak - reference.peak:+.2f}" if compared else "",
        f"{cost.losses[0]:.4f}",
        f"{cost.losses[1]:.4f}",
    ]


TABLE = Table(
    columns=("step ms", "x bf16's speed", "peak GiB", "peak - bf16's", "first loss", "last loss"),
    measure=measure_training,
    cells=cells,
    legend="Forward, backward and optimizer step; medians. *peak*: the most memory of tensors in a step, by the "
    "allocator. Losses are of one batch of random targets: they say that the step trains, and no more.",
)


def torchao_float8(recipe: str, model: nn.Module) -> None:
    """float8 products of torchao in the linears of the blocks that have many rows."""
    torchao = importlib.import_module("torchao.float8")

    def is_chosen(module: nn.Module, name: str) -> bool:
        outside = "blocks." not in name or ".norm" in name or "lora_" in name
        return isinstance(module, nn.Linear) and not outside

    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=is_chosen)


def candidates(kind: Kind, adapters: bool, device: str = "cuda") -> list[DiffusionCandidate]:
    """lowbit's products, torchao's, and the plain model; the reference is the plain one."""
    adamw = lowbit_choice("AdamW8bit", "AdamW8bit", lr=1e-3 if adapters else 1e-4)
    schemes = {
        "int8": Int8MixedPrecision(),
        "float8": Float8MixedPrecision(),
        "float8 tensorwise": Float8MixedPrecision(tensorwise=True, backward="e5m2"),
    }
    make = partial(DiffusionCandidate, kind=kind, adapters=adapters, device=device)
    found = [
        make(name, convert=partial(train.prepare_, scheme=scheme), choice=adamw)
        for name, scheme in schemes.items()
    ]
    found += [
        make(f"torchao float8 {recipe}", convert=partial(torchao_float8, recipe), choice=adamw)
        for recipe in ("rowwise", "tensorwise")
    ]
    found.append(make(REFERENCE, convert=None, choice=adamw))
    if not adapters:
        found.append(make("bf16, torch AdamW fused", convert=None, choice=torch_fused()))
    return found


@benchmark("train_diffusion", "a training step of a Flux transformer and of DiT-XL/2", table=TABLE)
def train_diffusion() -> Iterator[Problem]:
    for name, kind in KINDS.items():
        for adapters in (True, False):
            what = "LoRA" if adapters else "all weights"
            yield Problem(f"{name}, {what}", candidates(kind, adapters), REFERENCE)
