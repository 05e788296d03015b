"""Build, quantize, decode, prefill: what the page shows of one row."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import lowbit
from lowbit import quantize_
from lowbit.inference import fuse_linears_
from recipes.decode.capture import WARM_UP, captured
from recipes.decode.config import DecodeConfig, Row
from recipes.decode.decoder import Decoder
from recipes.decode.fold_norms import fold_norms_
from recipes.decode.tinygemm import use_tinygemm_
from recipes.llama import Llama


@dataclass(frozen=True)
class Speed:
    """At one batch size. Peaks in bytes; 0 without a GPU. A prefill that is left out has None."""

    tokens_per_s: float
    decode_peak: int
    prefill_ms: float | None
    prefill_peak: int


@dataclass(frozen=True)
class Measured:
    """Of one row."""

    row: Row
    weight_bytes: int
    quantize_s: float
    quantize_extra: int
    """Bytes on the GPU at the peak of quantizing beyond the model as it was before."""
    speeds: dict[int, Speed] = field(default_factory=dict)


def build(config: DecodeConfig, device: torch.device) -> Llama:
    """Random weights, made on the device in the dtype that they keep."""
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
    """Make the model what the row says, in place, layer by layer."""
    fold_norms_(model)
    if row.tinygemm:
        use_tinygemm_(model.blocks, group_size)
    elif row.scheme is not None:
        quantize_(model, row.scheme)
        fuse_linears_(model)


def measure(config: DecodeConfig, row: Row, device: torch.device, backend: str | None) -> Measured:
    """Times and peaks of one row at every batch size."""
    torch.compiler.reset()  # rows differ in what the blocks' graphs call
    model = build(config, device)
    _free(device)
    held = _allocated(device)
    began = time.perf_counter()
    convert_(model, row, config.group_size)
    _synchronize(device)
    seconds = time.perf_counter() - began
    extra = _peak(device) - held
    _free(device)
    found = Measured(row, stored_bytes(model), seconds, extra)
    for batch in config.batches:
        with torch.no_grad():
            found.speeds[batch] = _speed(config, row, model, batch, device, backend)
    return found


def _speed(
    config: DecodeConfig,
    row: Row,
    model: Llama,
    batch: int,
    device: torch.device,
    backend: str | None,
) -> Speed:
    torch.compiler.reset()
    decode_s, decode_peak = _decode(config, model, batch, device, backend)
    tokens_per_s = batch * config.tokens / decode_s
    if row.longest_prefill is not None and batch * config.prompt > row.longest_prefill:
        return Speed(tokens_per_s, decode_peak, None, 0)
    prefill_s, prefill_peak = _prefill(config, model, batch, device, backend)
    return Speed(tokens_per_s, decode_peak, prefill_s * 1e3, prefill_peak)


def _decode(
    config: DecodeConfig, model: Llama, batch: int, device: torch.device, backend: str | None
) -> tuple[float, int]:
    """Seconds for all tokens, and the peak."""
    _free(device)
    decoder = Decoder(model, batch, config.positions, backend)
    decoder.position.fill_(config.start - WARM_UP)
    step = captured(decoder.step, device)

    def decode() -> None:
        decoder.position.fill_(config.start)
        for _ in range(config.tokens):
            step()

    return _median_seconds(decode, config.repeats, device), _peak(device)


def _prefill(
    config: DecodeConfig, model: Llama, batch: int, device: torch.device, backend: str | None
) -> tuple[float, int]:
    """Seconds for a prompt of every sequence, and the peak."""
    _free(device)
    decoder = Decoder(model, batch, config.prompt, backend)
    prompt = torch.randint(config.model.vocab_size, (batch, config.prompt), device=device)
    run = captured(lambda: decoder.prefill(prompt), device)
    return _median_seconds(run, config.repeats, device), _peak(device)


def trace(config: DecodeConfig, row: Row, batch: int, device: torch.device) -> lowbit.Trace:
    """The products of a decoding step."""
    model = build(config, device)
    convert_(model, row, config.group_size)
    decoder = Decoder(model, batch, config.positions)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> None:
            decoder.step()

    found = lowbit.trace(Step(), backward=False)
    products = (
        dataclasses.replace(p, layer=p.layer.removeprefix("model.")) for p in found.products
    )
    return dataclasses.replace(found, products=tuple(products))


def stored_bytes(model: nn.Module) -> int:
    """What the parameters and buffers take."""
    total = 0
    for t in (*model.parameters(), *model.buffers()):
        total += t.nbytes_stored() if hasattr(t, "nbytes_stored") else t.nbytes
    return total


def _median_seconds(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    run()
    found = []
    for _ in range(repeats):
        _synchronize(device)
        began = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _free(device: torch.device) -> None:
    """Give memory back, and measure the next peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
