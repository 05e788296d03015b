"""The program; see the package's docstring for what it measures."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import platform
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly, Scheme, quantize_
from recipes import pages
from recipes.command_line import UserError, exit_status
from recipes.decode.decoder import WARM_UP, Decoder, captured, fold_norms_
from recipes.decode.tinygemm import use_tinygemm_
from recipes.device import choose_device, device_name, median_seconds, synchronize
from recipes.llama import Llama, LlamaConfig
from recipes.runs import write_text

# ---- settings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeConfig:
    """Settings of a measurement. Decoding starts at position `start` of a cache of `positions`."""

    model: LlamaConfig
    dtype: torch.dtype
    group_size: int
    batches: tuple[int, ...] = (1, 16)
    prompt: int = 2048
    """Tokens of a prefill, a sequence."""
    positions: int = 1024
    start: int = 512
    tokens: int = 128
    """Decoded in one timing, a sequence."""
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.start + self.tokens > self.positions:
            raise ValueError(
                f"DecodeConfig: start={self.start} and tokens={self.tokens} pass the cache of {self.positions}"
            )
        if self.start < WARM_UP:
            raise ValueError(
                f"DecodeConfig: start={self.start} leaves no {WARM_UP} positions to warm up"
            )
        longest = max(self.prompt, self.positions)
        if longest > self.model.context:
            raise ValueError(
                f"DecodeConfig: {longest} positions pass the model's context of {self.model.context}"
            )


def llama_8b() -> DecodeConfig:
    """The shapes of Llama-3.1-8B."""
    model = LlamaConfig(
        vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14_336, context=2048
    )
    model = dataclasses.replace(model, tied=False, rope_theta=500_000.0)
    return DecodeConfig(model, torch.bfloat16, group_size=128)


def tiny() -> DecodeConfig:
    """Seconds on one CPU core."""
    model = LlamaConfig(
        vocab_size=256, dim=64, layers=3, heads=4, kv_heads=2, hidden=160, context=64, tied=False
    )
    sizes = {"prompt": 32, "positions": 48, "start": 16, "tokens": 8, "repeats": 2}
    return DecodeConfig(model, torch.float32, group_size=32, batches=(1, 3), **sizes)


PRESETS = {"8b": llama_8b, "tiny": tiny}
REFERENCE = "bf16"


@dataclass(frozen=True)
class Row:
    """One line of the table. Without a `scheme` the weights stay as they are, or go to torch's tinygemm."""

    name: str
    about: str
    scheme: dict[str, Scheme | None] | None = None
    tinygemm: bool = False
    longest_prefill: int | None = None
    """Tokens of all sequences above which the prefill is skipped."""


def rows(config: DecodeConfig) -> dict[str, Row]:
    """Every row by its name."""
    int4, int8 = Int4WeightOnly(config.group_size), Int8WeightOnly()
    group = f"group {config.group_size}"
    high = str(config.dtype).removeprefix("torch.")
    head = f"{high} head"
    tinygemm = f"int4, {group}, {head}, in torch's own kernel"
    found = [
        Row(REFERENCE, f"{high} weights"),
        Row("int8", f"one scale a row, {head}", {"head": None, "*": int8}),
        Row("int4", f"{group}, {head}", {"head": None, "*": int4}),
        Row("int4-int8-head", f"{group}, int8 head", {"head": int8, "*": int4}),
        # a prefill of 16 sequences would take it 13 s, a dozen times
        Row("tinygemm", tinygemm, tinygemm=True, longest_prefill=config.prompt),
    ]
    return {row.name: row for row in found}


# ---- the model ---------------------------------------------------------------------------------------------


def build(config: DecodeConfig, device: torch.device) -> Llama:
    """A model with random weights, made on the device in its final dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    torch.manual_seed(config.seed)
    try:
        with torch.device(device):
            model = Llama(config.model)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def convert_(model: Llama, row: Row, group_size: int) -> None:
    """Convert the model to the row's weights, in place, layer by layer."""
    fold_norms_(model)
    if row.tinygemm:
        use_tinygemm_(model.blocks, group_size)
    elif row.scheme is not None:
        quantize_(model, row.scheme)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(t.nbytes_stored() if hasattr(t, "nbytes_stored") else t.nbytes for t in tensors)


# ---- the measurement ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """One row at one batch size. Peaks are in bytes, 0 without a GPU. `prefill_ms` is None for a skipped prefill."""

    tokens_per_s: float
    decode_peak: int
    prefill_ms: float | None
    prefill_peak: int


@dataclass(frozen=True)
class Measured:
    """One row. `quantize_extra`: bytes on the GPU at the peak of quantizing, beyond the high-precision model."""

    row: Row
    weight_bytes: int
    quantize_s: float
    quantize_extra: int
    speeds: dict[int, Speed] = field(default_factory=dict)


def measure(config: DecodeConfig, row: Row, device: torch.device, backend: str | None) -> Measured:
    """Times and peaks of one row at every batch size.

    Args:
        config: sizes of the model and of the measurement.
        row: the format of the weights.
        device: where the model computes.
        backend: the backend of `torch.compile`; None runs eagerly.
    """
    torch.compiler.reset()  # the blocks of another row call other functions
    model = build(config, device)
    free_memory(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    began = time.perf_counter()
    convert_(model, row, config.group_size)
    synchronize(device)
    seconds = time.perf_counter() - began
    extra = peak_memory(device) - held
    free_memory(device)
    found = Measured(row, stored_bytes(model), seconds, extra)
    for batch in config.batches:
        with torch.no_grad():
            torch.compiler.reset()
            decode_s, decode_peak = measure_decode(config, model, batch, device, backend)
            prefill_s, prefill_peak = None, 0
            if row.longest_prefill is None or batch * config.prompt <= row.longest_prefill:
                prefill_s, prefill_peak = measure_prefill(config, model, batch, device, backend)
        found.speeds[batch] = Speed(
            batch * config.tokens / decode_s,
            decode_peak,
            None if prefill_s is None else prefill_s * 1e3,
            prefill_peak,
        )
    return found


def measure_decode(
    config: DecodeConfig, model: Llama, batch: int, device: torch.device, backend: str | None
) -> tuple[float, int]:
    """Seconds for `config.tokens` tokens of each sequence, and the peak.

    Args:
        config: sizes of the model and of the measurement.
        model: the model in its format.
        batch: sequences.
        device: where the model computes.
        backend: the backend of `torch.compile`; None runs eagerly.
    """
    free_memory(device)
    decoder = Decoder(model, batch, config.positions, backend)
    decoder.position.fill_(config.start - WARM_UP)
    step = captured(decoder.step, device)

    def decode() -> None:
        decoder.position.fill_(config.start)
        for _ in range(config.tokens):
            step()

    return median_seconds(decode, device, config.repeats), peak_memory(device)


def measure_prefill(
    config: DecodeConfig, model: Llama, batch: int, device: torch.device, backend: str | None
) -> tuple[float, int]:
    """Seconds for a prompt of each sequence, and the peak; the arguments are those of `measure_decode`."""
    free_memory(device)
    decoder = Decoder(model, batch, config.prompt, backend)
    prompt = torch.randint(config.model.vocab_size, (batch, config.prompt), device=device)
    run = captured(lambda: decoder.prefill(prompt), device)
    return median_seconds(run, device, config.repeats), peak_memory(device)


def peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """Return unused memory to the GPU, and restart the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Step(nn.Module):
    """A decode step as a module, for `trace`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model, self.decoder = decoder.model, decoder

    def forward(self) -> None:
        self.decoder.step()


def trace(config: DecodeConfig, row: Row, batch: int, device: torch.device) -> lowbit.Trace:
    """The products of a decode step.

    Args:
        config: sizes of the model and of the measurement.
        row: the format of the weights.
        batch: sequences.
        device: where the model computes.
    """
    model = build(config, device)
    convert_(model, row, config.group_size)
    decoder = Decoder(model, batch, config.positions)
    decoder.joint = [None] * config.model.layers  # a product for each linear
    found = lowbit.trace(Step(decoder), backward=False)
    products = (
        dataclasses.replace(p, layer=p.layer.removeprefix("model.")) for p in found.products
    )
    return dataclasses.replace(found, products=tuple(products))


# ---- the page ----------------------------------------------------------------------------------------------


def page(config: DecodeConfig, measured: list[Measured], command: str, device: torch.device) -> str:
    """The page in Markdown: one table a batch size.

    Args:
        config: sizes of the model and of the measurement.
        measured: the measured rows.
        command: the command line, for the head of the page.
        device: the device that was measured.
    """
    model = config.model
    how = "Uncompiled, without CUDA graphs."
    if device.type == "cuda":
        how = "Blocks compiled, a step in one CUDA graph."
    stored = [
        [m.row.name, m.row.about, gib(m.weight_bytes), f"{m.quantize_s:.1f}", gib(m.quantize_extra)]
        for m in measured
    ]
    header = ["weights", "", "stored GiB", "quantized in s", "extra GiB"]
    speeds = "\n\n".join(speed_table(measured, batch) for batch in config.batches)
    return f"""# decode: tokens a second, weights in bf16, int8 and int4

- {datetime.date.today()}, `{command}`
- {device_name(device)}, torch {torch.__version__}, Python {platform.python_version()}
- {model.layers} layers of width {model.dim}, {model.heads}/{model.kv_heads} heads, feed-forward {model.hidden}, \
vocabulary {model.vocab_size}; random weights

*decode*: {config.tokens} tokens a sequence from position {config.start} of a cache of {config.positions}; *prefill*: \
{config.prompt} tokens a sequence. Medians of {config.repeats}. {how} *peak*: the most memory that tensors took, \
weights and cache included. *extra*: the peak of quantizing beyond the high-precision model. The weights of the norms \
are folded into the linears. int8 and int4 have q, k and v in one product, gate and up in another, and add the \
residual in the products that end in it; bf16 and tinygemm run as the model's code has them.

{pages.table(header, stored, left=(0, 1))}

{speeds}
"""


def speed_table(measured: list[Measured], batch: int) -> str:
    header = [f"batch {batch}", "decode tok/s", f"/ {REFERENCE}", "ms a step", "peak GiB", "prefill ms",
              f"/ {REFERENCE}", "peak GiB"]  # fmt: skip
    reference = next((m.speeds[batch] for m in measured if m.row.name == REFERENCE), None)
    lines = []
    for m in measured:
        speed = m.speeds[batch]
        decode_ratio = prefill_ratio = ""
        if reference is not None:
            decode_ratio = f"{speed.tokens_per_s / reference.tokens_per_s:.2f}"
            if speed.prefill_ms is not None and reference.prefill_ms is not None:
                prefill_ratio = f"{speed.prefill_ms / reference.prefill_ms:.2f}"
        prefill = "" if speed.prefill_ms is None else f"{speed.prefill_ms:.1f}"
        step_ms = f"{1e3 * batch / speed.tokens_per_s:.3f}"
        decode = [f"{speed.tokens_per_s:.0f}", decode_ratio, step_ms, gib(speed.decode_peak)]
        lines.append([m.row.name, *decode, prefill, prefill_ratio, gib(speed.prefill_peak)])
    return pages.table(header, lines)


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else ""


# ---- the command line --------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.decode",
        description="Decode with bf16, int8 and int4 weights, and with torch's tinygemm.",
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), help="default: 8b with CUDA, else tiny")
    add("--rows", default="", metavar="NAME,NAME", help="default: all")
    add("--out", type=Path, default=Path("runs/decode/decode.md"), metavar="FILE",
        help="the page (default: %(default)s)")  # fmt: skip
    add("--shapes", type=Path, metavar="FILE",
        help="measure nothing: write the products of one row's step at batch 1 to FILE, for `python -m benchmarks "
        "weight_linear --shapes FILE`")  # fmt: skip
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    device = choose_device()
    preset = options.preset or ("8b" if device.type == "cuda" else "tiny")
    config = PRESETS[preset]()
    known = rows(config)
    names = list(dict.fromkeys(options.rows.split(","))) if options.rows else list(known)
    unknown = [repr(name) for name in names if name not in known]
    if unknown:
        raise UserError(f"no row named {', '.join(unknown)}; there are: {', '.join(known)}")
    check_writable(options.out if options.shapes is None else options.shapes)
    if options.shapes is not None:
        if not options.rows or len(names) > 1:
            raise UserError("--shapes takes one row, e.g. --rows int4")
        found = trace(config, known[names[0]], 1, device)
        found.write(options.shapes)
        print(found)
        return
    backend = "inductor" if device.type == "cuda" else None
    measured = []
    for name in names:
        measured.append(measure(config, known[name], device, backend))
        for batch, speed in measured[-1].speeds.items():
            line = f"{name:<16} batch {batch:<3} {speed.tokens_per_s:8.0f} tok/s"
            if speed.prefill_ms is not None:
                line += f"  prefill {speed.prefill_ms:8.1f} ms"
            print(line, flush=True)
    command = ["python", "-m", "recipes.decode", "--preset", preset]
    command += ["--rows", options.rows] if options.rows else []
    text = page(config, measured, shlex.join(command), device)
    write_text(options.out, text)
    print(text)


def check_writable(file: Path) -> None:
    """Make the folder of `file`, before minutes of measuring. UserError when that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"no folder for {file}: {error.strerror}") from error
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of a file in it")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parse(arguments)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
