"""A whole step of QLoRA: PEFT's adapters on every linear of an 8B Llama in NF4, with gradient checkpointing.

The model is transformers' Llama with random weights, and double-quantized NF4 in blocks of 64, by lowbit or by
bitsandbytes. Everything else is the same: `LoraConfig(r=16, target_modules="all-linear")`, adapters in float32 under
autocast to bfloat16, checkpoints of each layer without reentrance, and torch's fused AdamW over the adapters. Liger
Kernel brings norms, rotations, SwiGLU and the loss, over either.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowbit
from benchmarks.optimizers import step_seconds
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

LLAMA_8B = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
}
BATCH = (4, 2048)
REFERENCE = "bitsandbytes + PEFT"
MOST_REPEATS = 5


def is_inner_linear(module: nn.Module, name: str) -> bool:
    """All linears but the head, as bitsandbytes and PEFT choose them."""
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def with_lowbit(model: Any) -> None:
    scheme = lowbit.NF4WeightOnly(group_size=64, double_quantization=True)
    lowbit.quantize_(model, scheme, is_inner_linear)


def with_bitsandbytes(model: Any) -> None:
    """What transformers does for `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", …)`."""
    bnb = importlib.import_module("bitsandbytes").nn
    for name, module in [*model.named_modules()]:
        if is_inner_linear(module, name):
            parent, _, own = name.rpartition(".")
            options = {"compress_statistics": True, "quant_type": "nf4"}
            sizes = (module.in_features, module.out_features, False)
            new = bnb.Linear4bit(*sizes, compute_dtype=torch.bfloat16, **options, device="meta")
            new.weight = bnb.Params4bit(module.weight.data, requires_grad=False, **options)
            setattr(model.get_submodule(parent), own, new.to(module.weight.device))
    model.is_loaded_in_4bit = True


@dataclass(frozen=True)
class QloraCandidate:
    """One way to train adapters: what quantizes the base, whether Liger Kernel or torch.compile runs the decoder
    layers."""

    name: str
    quantize: Callable[[Any], None] | None
    liger: bool = False
    compiled: bool = False
    layers: int = LLAMA_8B["num_hidden_layers"]


@dataclass(frozen=True)
class QloraCost:
    """Seconds of a step, GiB at its peak and between steps, and the loss of the first step."""

    seconds: float
    peak: float
    held: float
    loss: float


def adapted_model(candidate: QloraCandidate) -> Any:
    transformers, peft = (importlib.import_module(name) for name in ("transformers", "peft"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA_8B | {"num_hidden_layers": candidate.layers})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if candidate.quantize is not None:
        candidate.quantize(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters).train()
    if candidate.compiled:
        torch.compiler.reset()
        for layer in model.get_base_model().model.layers:
            layer.compile(dynamic=False)
    return model


@contextmanager
def by_liger(model: Any) -> Iterator[None]:
    """The context in which Liger Kernel runs a model. It replaces the rotation of all Llama models of the process."""
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    rotation = llama.apply_rotary_pos_emb
    liger = importlib.import_module("liger_kernel.transformers")
    liger.apply_liger_kernel_to_llama(model=model.get_base_model())
    try:
        yield
    finally:
        llama.apply_rotary_pos_emb = rotation


def measure_qlora(candidate: QloraCandidate, repeats: int) -> QloraCost:
    """Time steps after two others. RuntimeError when the loss is not finite."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = adapted_model(candidate)
    with by_liger(model) if candidate.liger else nullcontext():
        return measure_steps(candidate.name, model, before, repeats)


def measure_steps(name: str, model: Any, before: int, repeats: int) -> QloraCost:
    """`measure_qlora` of a model; `before`: bytes of the process that are not its own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(LLAMA_8B["vocab_size"], BATCH, device="cuda")

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = step()
    if not step().isfinite():
        raise RuntimeError(f"{name}: the loss is not finite")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() - before
    seconds = statistics.median(step_seconds(step, min(repeats, MOST_REPEATS), True))
    peak = torch.cuda.max_memory_allocated() - before
    return QloraCost(seconds, peak / 2**30, held / 2**30, first.item())


def qlora_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost, reference = row.measured, result.reference.measured
    return [
        f"{cost.seconds * 1e3:.0f}",
        ratio(cost.seconds, reference and reference.seconds),
        f"{BATCH[0] * BATCH[1] / cost.seconds / 1e3:.2f}",
        f"{cost.peak:.2f}",
        ratio(cost.peak, reference and reference.peak),
        f"{cost.held:.2f}",
        f"{cost.loss:.4f}",
    ]


QLORA_TABLE = Table(
    columns=(
        *("step ms", f"/ {REFERENCE}", "ktok/s", "peak GiB", f"/ {REFERENCE}"),
        *("between steps GiB", "first loss"),
    ),
    measure=measure_qlora,
    cells=qlora_cells,
    legend="Forward, backward and optimizer step; medians. *peak*: the most memory of tensors in a step, by the "
    "allocator. *Liger*: Liger Kernel's `apply_liger_kernel_to_llama`; *compiled*: each decoder layer by "
    "torch.compile.",
)


@benchmark("qlora_step", "a QLoRA step of an 8B Llama in NF4, with PEFT", table=QLORA_TABLE)
def qlora_step() -> Iterator[Problem]:
    candidates = [
        QloraCandidate("lowbit + PEFT", with_lowbit),
        QloraCandidate("lowbit + PEFT, Liger", with_lowbit, liger=True),
        QloraCandidate("lowbit + PEFT, compiled", with_lowbit, compiled=True),
        QloraCandidate(REFERENCE, with_bitsandbytes),
        QloraCandidate(f"{REFERENCE}, Liger", with_bitsandbytes, liger=True),
        QloraCandidate(f"{REFERENCE}, compiled", with_bitsandbytes, compiled=True),
        QloraCandidate("bfloat16 + PEFT", None),
    ]
    name = f"8B, {LLAMA_8B['num_hidden_layers']} layers, batch {BATCH[0]} x {BATCH[1]}"
    yield Problem(name, candidates, REFERENCE)
