"""Training of a published packed model beside the same model in bfloat16: time to open it, memory, tokens a second.

The folders have the shapes of Qwen3-30B-A3B, in int4 (compressed-tensors), and of gpt-oss-20b, with MXFP4 experts.
Their weights are random, and every layer has those of the first: one layer is quantized, and its tensors are written
once for each layer. `lowbit.load_pretrained` opens the folder. The reference is the same model after
`lowbit.dequantize_`, so both have the same values and send the same tokens to the same experts.

    adapters of the attention      LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    … and of the experts           with target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] too
    all parameters                 of fewer layers; packed weights by `qat.prepare_(model, scales="learned")`
    … int8 until write-back        packed weights by `train.prepare_(model, Int8Weight())`

Adapters are float32 under autocast to bfloat16. Everything is trained by `AdamW8bit`, with a checkpoint a layer. Rows
of all parameters lose nothing to rounding: `weight_correction="8bit"`, for the row in int8 "momentum".
"""

from __future__ import annotations

import atexit
import copy
import gc
import importlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import lowbit
from benchmarks.generate import random_model
from benchmarks.generate_experts import QWEN3_MOE
from benchmarks.optimizers import step_seconds, tensor_bytes
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio

GPT_OSS = {
    **{"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201_088},
    **{"num_local_experts": 32, "num_experts_per_tok": 4},
}
PLAIN = "bf16"
IN_INT8 = "int8 until write-back"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK = 16
MOST_REPEATS = 3
SPARE = 1.15
"""The peak may be this many times the packed weights, beside all else."""


@dataclass(frozen=True)
class Published:
    """A folder to make: a model of transformers, `kind`, of these sizes, in a format of `lowbit.formats.names()`."""

    kind: str
    sizes: tuple[tuple[str, int], ...]
    format: str
    scheme: tuple[tuple[str, lowbit.Scheme | None], ...]
    device: str = "cuda"

    def config(self, layers: int) -> Any:
        own = getattr(importlib.import_module("transformers"), f"{self.kind}Config")
        made = own(**dict(self.sizes) | {"num_hidden_layers": layers}, dtype="bfloat16")
        made.architectures = [f"{self.kind}ForCausalLM"]
        return made

    @property
    def layers(self) -> int:
        return dict(self.sizes)["num_hidden_layers"]

    def with_layers(self, layers: int) -> Published:
        return replace(
            self, sizes=tuple((dict(self.sizes) | {"num_hidden_layers": layers}).items())
        )


QWEN3_30B = Published(
    "Qwen3Moe",
    tuple((QWEN3_MOE | {"num_hidden_layers": 48}).items()),
    "compressed-tensors",
    (("*.mlp.gate", None), ("*.layers.*", lowbit.Int4WeightOnly(128))),
)
GPT_OSS_20B = Published(
    "GptOss", tuple(GPT_OSS.items()), "mxfp4", (("*.experts", lowbit.MXFP4WeightOnly()),)
)


# ---- the folders -----------------------------------------------------------------------------------------------------


@cache
def scratch() -> Path:
    """A folder that is deleted at the end of the process."""
    folder = Path(tempfile.mkdtemp(prefix="lowbit-packed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def folder_of(shape: Published) -> Path:
    """The folder of this shape, made at the first call. Its shards have no digests, as those of other programs."""
    safetensors = importlib.import_module("safetensors.torch")
    folder = scratch() / f"{shape.kind}-{shape.layers}"
    first = _first_layer(shape.with_layers(1))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(first.glob("*.safetensors")):
        tensors |= safetensors.load_file(file)
    folder.mkdir()
    of_layer = {name for name in tensors if ".layers.0." in name}
    shards = [{name: t for name, t in tensors.items() if name not in of_layer}]
    for i in range(shape.layers):
        shards.append({_in_layer(name, i): tensors[name] for name in of_layer})
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        safetensors.save_file(shard, folder / name, {"format": "pt"})
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads(shape.config(shape.layers).to_json_string(use_diff=False))
    found = json.loads((first / "config.json").read_text())["quantization_config"]
    config["quantization_config"] = _of_layers(found, shape.layers)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def _first_layer(shape: Published) -> Path:
    """A folder of a model with one layer, as `lowbit.export` writes it."""
    kind = getattr(importlib.import_module("transformers"), f"{shape.kind}ForCausalLM")
    model = random_model(kind, shape.config(1), shape.device)
    lowbit.quantize_(model, dict(shape.scheme))
    folder = scratch() / f"{shape.kind}-first"
    lowbit.export(model, folder, shape.format, max_shard_size="5GB")
    return folder


def _in_layer(name: str, layer: int) -> str:
    return name.replace(".layers.0.", f".layers.{layer}.")


def _of_layers(settings: Any, layers: int) -> Any:
    """ "quantization_config" of a model with one layer, for one with `layers`: lists of names get those of all."""
    if isinstance(settings, Mapping):
        return {key: _of_layers(value, layers) for key, value in settings.items()}
    if not isinstance(settings, list):
        return settings
    named = [each for each in settings if isinstance(each, str) and ".layers.0." in each]
    rest = [_of_layers(each, layers) for each in settings if each not in named]
    return rest + [_in_layer(each, i) for i in range(layers) for each in named]


# ---- what trains -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One way to train a model of `shape`.

    `trains`: "attention", "experts" for adapters of both, or "all". `batch`: sequences and their tokens.
    """

    name: str
    shape: Published
    trains: str
    batch: tuple[int, int] = (4, 2048)

    @property
    def is_plain(self) -> bool:
        return self.name == PLAIN


@dataclass(frozen=True)
class PackedCost:
    """Seconds to open the folder, seconds of a step, and the loss of the first step.

    In GiB, None on a CPU for those of the allocator: `weights`, as the model has them; `opening`, the peak of opening;
    `held`, between steps; `peak`, in a step.
    """

    opened: float
    seconds: float
    loss: float
    weights: float
    opening: float | None
    held: float | None
    peak: float | None


class Opened:
    """The last folder that was opened, as a packed model, and what opening it took."""

    shape: Published | None = None
    packed: Any = None
    plain: Any = None
    """Its copy in bfloat16, made when the first candidate takes it."""
    seconds = 0.0
    peak: float | None = None

    def take(self, candidate: Training) -> Any:
        """The model that `candidate` trains. A copy where it trains all parameters."""
        if self.shape != candidate.shape:
            self.drop()
            self._open(candidate.shape)
        if not candidate.is_plain:
            return copy.deepcopy(self.packed) if candidate.trains == "all" else self.packed
        if self.plain is not None:
            return self.plain
        made = copy.deepcopy(self.packed)
        lowbit.dequantize_(made)
        for p in made.parameters():
            p.data = p.data.contiguous()
        if candidate.trains != "all":
            self.plain = made
        return made

    def _open(self, shape: Published) -> None:
        folder, on_gpu = folder_of(shape), shape.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.packed = lowbit.load_pretrained(folder, device=shape.device)
        if on_gpu:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        self.shape = shape

    def drop(self) -> None:
        """Free the models."""
        self.shape, self.packed, self.plain = None, None, None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


OPENED = Opened()


def adapted(model: Any, experts: bool) -> Any:
    """The model with PEFT's adapters, which alone train."""
    peft = importlib.import_module("peft")
    importlib.import_module("lowbit.peft")
    torch.manual_seed(0)
    own = {"target_parameters": EXPERTS} if experts else {}
    lora = peft.LoraConfig(r=RANK, target_modules=ATTENTION, task_type="CAUSAL_LM", **own)
    return peft.get_peft_model(model, lora)


def prepared(model: Any, candidate: Training) -> Any:
    """The model with all of its parameters in training, packed ones on the grid of the folder or in int8."""
    if candidate.name == IN_INT8:
        packed = {n: lowbit.Int8Weight() if s else None for n, s in candidate.shape.scheme}
        lowbit.train.prepare_(model, packed)
    elif not candidate.is_plain:
        lowbit.qat.prepare_(model, scales="learned")
    return model.requires_grad_(True)


def measure_packed(candidate: Training, repeats: int) -> PackedCost:
    """Time steps after two others. RuntimeError when the loss is not finite."""
    on_gpu, trains_all = candidate.shape.device == "cuda", candidate.trains == "all"
    model = OPENED.take(candidate)
    gc.collect()
    weights = tensor_bytes([*model.parameters(), *model.buffers()])
    others = torch.cuda.memory_allocated() - weights if on_gpu else 0
    checkpoints = {"use_reentrant": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
    trained = (
        prepared(model, candidate) if trains_all else adapted(model, candidate.trains == "experts")
    )
    try:
        loss, seconds, *sizes = _steps(trained.train(), candidate, repeats)
    finally:
        if not trains_all:
            trained.unload()
    held, peak = ((size - others) / 2**30 if on_gpu else None for size in sizes)
    return PackedCost(OPENED.seconds, seconds, loss, weights / 2**30, OPENED.peak, held, peak)


def _steps(model: Any, candidate: Training, repeats: int) -> tuple[float, float, int, int]:
    """The first loss, the median of a step's seconds, and the bytes between steps and at the peak."""
    device, trains_all = candidate.shape.device, candidate.trains == "all"
    on_gpu = device == "cuda"
    groups: Any = [p for p in model.parameters() if p.requires_grad]
    if trains_all and candidate.name not in (PLAIN, IN_INT8):
        groups = lowbit.qat.parameter_groups(model, weight_decay=0.0)
    correction = "momentum" if candidate.name == IN_INT8 else "8bit"
    options: dict[str, Any] = {"weight_correction": correction} if trains_all else {}
    optimizer = lowbit.optim.AdamW8bit(groups, lr=1e-5, **options)
    last = dict(candidate.shape.sizes)["vocab_size"]
    torch.manual_seed(1)
    tokens = torch.randint(last, candidate.batch, device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=not trains_all):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found: torch.Tensor = loss.detach()
        return found

    first, second = step().item(), step()
    if not second.isfinite():
        raise RuntimeError(f"{candidate.name}: the loss is not finite")
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    seconds = statistics.median(step_seconds(step, min(repeats, MOST_REPEATS), on_gpu))
    return first, seconds, held, torch.cuda.max_memory_allocated() if on_gpu else 0


# ---- the table -------------------------------------------------------------------------------------------------------


def bound(cost: PackedCost, plain: PackedCost | None) -> float | None:
    """The most GiB that a step of packed weights may take: `SPARE` times the weights, what else is there between steps,
    and what a step of the plain model takes above that."""
    if cost.held is None or plain is None or plain.peak is None or plain.held is None:
        return None
    return SPARE * cost.weights + (cost.held - cost.weights) + (plain.peak - plain.held)


def packed_cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    cost: PackedCost = row.measured
    plain: PackedCost | None = result.reference.measured
    sizes = cost.opening, cost.held, cost.peak, bound(cost, plain)
    count = row.candidate.batch[0] * row.candidate.batch[1]
    return [
        f"{cost.opened:.1f}",
        f"{cost.weights:.2f}",
        *("" if size is None else f"{size:.2f}" for size in sizes),
        f"{cost.seconds * 1e3:.0f}",
        f"{count / cost.seconds / 1e3:.2f}",
        ratio(plain.seconds, cost.seconds) if plain is not None else "",
        f"{cost.loss:.4f}",
    ]


PACKED_TABLE = Table(
    columns=(
        *("open s", "weights GiB", "peak of opening GiB", "between steps GiB", "peak GiB"),
        *("bound GiB", "step ms", "ktok/s", "of bf16's speed", "first loss"),
    ),
    measure=measure_packed,
    cells=packed_cells,
    legend="Random weights, every layer alike. Forward, backward with a checkpoint a layer, and the step of AdamW8bit; "
    f"medians. *bound*: {SPARE} times the weights, all else between steps, and what a step of bf16 takes above what it "
    "has between steps. bf16 is the packed model after `dequantize_`: *open* and *peak of opening* are of the packed "
    "one.",
)


def problems(shape: Published, name: str, packed: str, few: int = 12) -> Iterator[Problem]:
    """Adapters on the whole model, and all parameters of its first `few` layers."""
    ways: dict[str, Callable[[str], Training]] = {
        f"{name}, adapters of the attention": lambda n: Training(n, shape, "attention"),
        f"{name}, adapters of attention and experts": lambda n: Training(n, shape, "experts"),
        f"{name}, {few} layers, all parameters": lambda n: Training(
            n, shape.with_layers(few), "all"
        ),
    }
    for problem, way in ways.items():
        in_int8 = [way(IN_INT8)] if problem.endswith("all parameters") else []
        yield Problem(problem, [way(packed), *in_int8, way(PLAIN)], PLAIN)


@benchmark("packed_training", "training of published packed models", table=PACKED_TABLE)
def packed_training() -> Iterator[Problem]:
    yield from problems(QWEN3_30B, "Qwen3-30B-A3B", "int4 g128")
    yield from problems(GPT_OSS_20B, "gpt-oss-20b", "MXFP4 experts")
