"""`lowbit quantize`, `inspect` and `load_pretrained` of random checkpoints in shards, each in a fresh process.

The checkpoints have the shapes of Llama 3.2 1B and Llama 3.1 8B, in bfloat16 and shards of at most 5 GB, as models are
published. They lie in the folder for temporary files: the 8B one takes 16 GB, and what is made of it 11 GB more. They
were written just before, so that the system has what fits into its memory in its cache.

The peak is `ru_maxrss` of the process. It counts the pages of a mapped shard that were read, although the system takes
them back where memory is short. "beyond a shard" is what it has over the size of the largest shard that the process
reads: at most 2 GiB are accepted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.ranks import environment_of_programs
from benchmarks.registry import Problem, Result, Row, Table, benchmark

MOST_IN_A_SHARD = 5 * 10**9

COMMAND = """
import sys, torch
from lowbit.cli import main
if status := main(sys.argv[1:]):
    sys.exit(status)
print(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, file=sys.stderr)
"""
LOAD = """
import sys, torch, lowbit
model = lowbit.load_pretrained(sys.argv[1], device=sys.argv[2])
assert not any(p.is_meta for p in model.parameters())
print(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, file=sys.stderr)
"""
MAKE = "import sys; from benchmarks.quantize_folder import make; make(*sys.argv[1:])"


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama."""

    hidden: int
    inner: int
    layers: int
    kv_heads: int
    head_dim: int
    tied: bool
    heads: int = 32
    vocabulary: int = 128_256

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its name, in the order of published checkpoints."""
        hidden, inner, keys = self.hidden, self.inner, self.kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for i in range(self.layers):
            found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        found["model.norm.weight"] = (hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, hidden)
        return found

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "dtype": "bfloat16",
        }


MODELS = {
    "1B": Llama(2048, 8192, 16, 8, 64, tied=True),
    "8B": Llama(4096, 14336, 32, 8, 128, tied=False),
    "tiny": Llama(128, 256, 2, 2, 32, tied=False, heads=4, vocabulary=256),  # for the tests
}


def make(size: str, folder: str, device: str = "cpu") -> None:
    """Write a checkpoint with random weights, drawn on `device`, to `folder`, shard by shard."""
    from safetensors.torch import save_file

    model, out = MODELS[size], Path(folder)
    out.mkdir()
    shards: list[list[str]] = [[]]
    waiting = 0
    for name, shape in model.shapes().items():
        nbytes = 2 * torch.Size(shape).numel()
        if waiting + nbytes > MOST_IN_A_SHARD:
            shards.append([])
            waiting = 0
        shards[-1].append(name)
        waiting += nbytes
    torch.manual_seed(0)
    where: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        shapes = {name: model.shapes()[name] for name in names}
        normal = partial(torch.randn, dtype=torch.bfloat16, device=device)
        tensors = {n: normal(s).mul_(0.02).cpu() for n, s in shapes.items()}
        save_file(tensors, out / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(model.config()))


@dataclass(frozen=True)
class Step:
    """A program in a fresh process.

    Attributes:
        name: name in the report.
        program: its source in Python, and its arguments.
        reads: the folder whose largest shard the peak may exceed by 2 GiB.
        writes: the folder that it makes; None if it makes none.
        after: the step that makes the folder that this one reads. It runs first where the folder is missing.
    """

    name: str
    program: tuple[str, ...]
    reads: Path
    writes: Path | None = None
    after: Step | None = None


@dataclass(frozen=True)
class Spent:
    """What a process took: seconds, of the clock and of processors; bytes of its peak, of the largest shard that it
    read, of the peak on the GPU, and of what it wrote."""

    seconds: float
    processor: float
    peak: int
    shard: int
    device_peak: int
    written: int


def measure_step(step: Step, repeats: int) -> Spent:
    """One run; ignores `repeats`. RuntimeError with the last line of a process that fails."""
    if step.program[0] == LOAD and importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers")
    if step.after is not None and step.after.writes is not None and not step.after.writes.exists():
        measure_step(step.after, repeats)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", *step.program],
        env=environment_of_programs(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = process.stderr.read().strip().splitlines() or ["no message"]
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"ended with {process.returncode}: {lines[-1]}")
    return Spent(
        seconds,
        usage.ru_utime + usage.ru_stime,
        1024 * usage.ru_maxrss,
        max(path.stat().st_size for path in step.reads.glob("*.safetensors")),
        int(lines[-1]),
        sum(p.stat().st_size for p in step.writes.iterdir()) if step.writes else 0,
    )


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    found: Spent = row.measured
    beyond = max(0, found.peak - found.shard)
    return [
        f"{found.seconds:.1f}",
        f"{found.processor:.1f}",
        f"{found.peak / 2**30:.2f}",
        f"{found.shard / 2**30:.2f}",
        "" if row.candidate.program[0] == LOAD else f"{beyond / 2**30:.2f}",
        f"{found.device_peak / 2**30:.2f}" if found.device_peak else "",
        f"{found.written / 1e9:.2f}" if found.written else "",
    ]


TABLE = Table(
    columns=(
        *("s", "processor s", "peak GiB", "largest shard GiB", "beyond a shard GiB", "GPU GiB"),
        "written GB",
    ),
    measure=measure_step,
    cells=cells,
    legend="Random weights to int4 in groups of 128, and those read. One fresh process each, with the import of torch; "
    "files in the system's cache as far as they fit. *Peak*: of the process's resident memory, mapped pages included. "
    "*Beyond a shard*: the peak over the size of the largest shard that is read; 0 where it is less. `load_pretrained` "
    "holds what is in high precision; low-bit weights stay in the mapped file until they are used.",
)


def steps(size: str, home: Path, device: str) -> Iterator[Step]:
    """What is measured of a checkpoint, which lies in `home`."""
    model = home / size
    on = ("--device", device)
    for format in ("lowbit", "compressed-tensors"):
        out = home / f"{size}-{format}"
        line = ("quantize", str(model), "--scheme", "int4", "--group-size", "128")
        options = ("--format", format, "--out", str(out), *on, "--json")
        made = Step(f"quantize, {format}", (COMMAND, *line, *options), model, out)
        yield made
        against = ("inspect", str(out), "--against", str(model), "--json")
        yield Step(f"inspect, {format}", (COMMAND, *against), model, after=made)
        yield Step(f"load_pretrained, {format}", (LOAD, str(out), device), out, after=made)


def problems(device: str, sizes: tuple[str, ...] = ("1B", "8B")) -> Iterator[Problem]:
    """The checkpoints, each in a folder that is deleted before the next one is made."""
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="lowbit-quantize-") as home:
            # Another process makes it, as the system counts the memory of this one as its children's at their start.
            made = [sys.executable, "-c", MAKE, size, str(Path(home) / size), device]
            subprocess.run(made, env=environment_of_programs(), check=True)
            yield Problem(f"{size}, bfloat16", [*steps(size, Path(home), device)])


@benchmark("quantize_folder", "folders to int4 by the command line, on a GPU", table=TABLE)
def quantize_folder() -> Iterator[Problem]:
    yield from problems("cuda")


@benchmark(
    "quantize_folder_cpu",
    "folders to int4 by the command line, on a CPU",
    table=TABLE,
    device="cpu",
)
def quantize_folder_cpu() -> Iterator[Problem]:
    yield from problems("cpu")
