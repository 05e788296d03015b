"""`generate` on an 8B Llama, transformers' own and lowbit's: tokens a second of a model as a user converts it.

The model is transformers' Llama with random weights. `cache_implementation="static"` lets transformers compile the
forward of a token; `lowbit.hf.generate` captures a CUDA graph of it. "plain buffers" is what a compiled graph could
cost at best: each linear is replaced by a module that keeps the codes and scales as buffers and calls the op of
lowbit's int4 kernel, or torch's (tinygemm).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio
from lowbit import Int4WeightOnly, Int8WeightOnly, quantize_
from lowbit.tensor import AffineTensor
from lowbit_kernels.weight_only.weight_linear import weight_linear

PLAIN = "bf16"
GROUP = 128
PROMPT, NEW = 32, 96
"""Tokens of a sequence that the model reads, and that it generates."""
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


class Int4Buffers(nn.Module):
    """A linear with the codes and scales of an int4 weight as buffers."""

    codes: Tensor
    scale: Tensor

    def __init__(self, weight: AffineTensor) -> None:
        super().__init__()
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scale", weight.scale)

    def forward(self, x: Tensor) -> Tensor:
        return weight_linear(x, self.codes, self.scale, None, None, None, group_size=GROUP)


class Tinygemm(nn.Module):
    """A linear in torch's own int4 kernel."""

    def __init__(self, weight: AffineTensor) -> None:
        super().__init__()
        # codes plus 8, two in a byte, the even column high
        codes = (
            weight.dequantize().float().unflatten(1, (-1, GROUP))
            / weight.scale.float().unsqueeze(-1)
        ).round()
        shifted = (codes.flatten(1) + 8).clamp(0, 15).to(torch.uint8)
        packed = shifted[:, ::2] << 4 | shifted[:, 1::2]
        self.register_buffer("codes", torch.ops.aten._convert_weight_to_int4pack(packed, 8))
        scale = weight.scale.to(torch.bfloat16)
        self.register_buffer(
            "scale", torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        y = torch.ops.aten._weight_int4pack_mm(rows, self.codes, GROUP, self.scale)
        return y.view(*x.shape[:-1], -1)


def with_buffers(kind: Callable[[AffineTensor], nn.Module]) -> Callable[[nn.Module], object]:
    def convert(model: nn.Module) -> None:
        quantize_(model, Int4WeightOnly(GROUP))
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, kind(module.weight))  # type: ignore[arg-type]

    return convert


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "int4 g128": lambda model: quantize_(model, Int4WeightOnly(GROUP)),
    "int8": lambda model: quantize_(model, Int8WeightOnly()),
    "int4 g128, plain buffers": with_buffers(Int4Buffers),
    "tinygemm, plain buffers": with_buffers(Tinygemm),
    PLAIN: lambda model: None,
}
OWN_LOOP = ", lowbit.hf.generate"
"""How the names of the rows end that lowbit's loop generates."""
CONVERSIONS |= {name + OWN_LOOP: CONVERSIONS[name] for name in ("int4 g128", "int8", PLAIN)}


def check_peers(device: str = "cuda") -> None:
    """Raise AssertionError unless the modules with plain buffers compute the product of an int4 weight."""
    layer = nn.Linear(512, 256, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(
        False
    )
    quantize_(layer, Int4WeightOnly(GROUP))
    x = torch.randn(3, 512, device=device, dtype=torch.bfloat16)
    expected = x.double() @ layer.weight.dequantize().double().T
    for kind in (Int4Buffers, Tinygemm) if device == "cuda" else (Int4Buffers,):
        error = (kind(layer.weight)(x) - expected).norm() / expected.norm()  # type: ignore[arg-type]
        if not error < 1e-2:
            raise AssertionError(f"{kind.__name__}: {error}")


def random_model(kind: Callable[[Any], nn.Module], config: Any, device: str) -> nn.Module:
    """A frozen bfloat16 model with random weights, which are made on `device`."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Model:
    """A converted model. ``batch``: sequences that it continues at once."""

    name: str
    batch: int
    shape: tuple[tuple[str, int], ...] = tuple(LLAMA_8B.items())
    device: str = "cuda"

    def made(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        no_ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        config = LlamaConfig(**dict(self.shape), **no_ends, dtype="bfloat16")
        model = random_model(LlamaForCausalLM, config, self.device)
        CONVERSIONS[self.name](model)
        return model


@dataclass(frozen=True)
class Speed:
    """``first``: seconds of the first call, which compiles. ``token``: seconds of a token of every sequence, the
    prompt's share included."""

    first: float
    token: float


def measure_generate(candidate: Model, repeats: int) -> Speed:
    """The median of `repeats` calls after two."""
    torch._dynamo.reset()  # with the model before, which its graphs hold
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    from lowbit.hf import generate as own

    model = candidate.made()
    is_own = candidate.name.endswith(OWN_LOOP)
    loop = {"custom_generate": own} if is_own else {"cache_implementation": "static"}
    last = dict(candidate.shape)["vocab_size"]
    tokens = torch.randint(0, last, (candidate.batch, PROMPT), device=candidate.device)

    def seconds() -> float:
        start = time.perf_counter()
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW,
            do_sample=False,
            **loop,
        )
        out.tolist()  # waits for the device
        return time.perf_counter() - start

    first, _ = seconds(), seconds()
    gc.collect()
    gc.disable()  # a collection takes a tenth of a second at any time, and more after longer programs
    try:
        token = statistics.median(seconds() for _ in range(repeats)) / NEW
    finally:
        gc.enable()
    return Speed(first, token)


def generate_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    found: Speed = row.measured
    plain = result.reference.measured
    speed = ratio(plain.token, found.token) if plain is not None else ""
    tokens = row.candidate.batch / found.token
    return [f"{tokens:.0f}", speed, f"{1000 * found.token:.2f}", f"{found.first:.0f}"]


GENERATE_TABLE = Table(
    columns=("tokens/s", "of bf16", "ms a token", "first call s"),
    measure=measure_generate,
    cells=generate_cells,
    legend=f"{PROMPT} tokens of prompt, {NEW} new ones, greedy, "
    '`model.generate(…, cache_implementation="static")` or `(…, custom_generate=lowbit.hf.generate)`; the time of the '
    "whole call, its prompt included, without Python's garbage collector. *first call*: it compiles or captures.",
)


@benchmark("generate", "generate on an 8B Llama, by transformers and lowbit", table=GENERATE_TABLE)
def generate() -> Iterator[Problem]:
    check_peers()
    for batch in (1, 16):
        models = [Model(name, batch) for name in CONVERSIONS]
        yield Problem(f"8B, batch {batch}", models, reference=PLAIN)
