"""The page: one table a batch size."""

from __future__ import annotations

import datetime
import platform

import torch

from recipes.decode.config import DecodeConfig
from recipes.decode.measure import Measured

REFERENCE = "bf16"


def machine(device: torch.device) -> str:
    """The device and the versions that decide how fast it is."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def text(config: DecodeConfig, measured: list[Measured], command: str, device: torch.device) -> str:
    """The page in markdown."""
    model = config.model
    lines = [
        "# decode: tokens a second, weights in bf16, int8 and int4",
        "",
        f"- {datetime.date.today()}, `{command}`",
        f"- {machine(device)}",
        f"- {model.layers} layers of width {model.dim}, {model.heads}/{model.kv_heads} heads, feed-forward "
        f"{model.hidden}, vocabulary {model.vocab_size}; random weights",
        "",
        f"*decode*: {config.tokens} tokens a sequence from position {config.start} of a cache of {config.positions}; "
        f"*prefill*: {config.prompt} tokens a sequence. Medians of {config.repeats}. {_how(device)} *peak*: the most "
        "that tensors took, weights and cache included. *extra*: the peak of quantizing beyond the high-precision "
        "model. The linears have the norms' weights. int8 and int4 have q, k and v in one product, gate and up in "
        "another, and the residual in the products that end in it; bf16 and tinygemm are as a model's code has them.",
        "",
        "| weights | | stored GiB | quantized in s | extra GiB |",
        "|---|---|--:|--:|--:|",
    ]
    for m in measured:
        lines.append(
            f"| {m.row.name} | {m.row.about} | {_gib(m.weight_bytes)} | {m.quantize_s:.1f} | {_gib(m.quantize_extra)} |"
        )
    for batch in config.batches:
        lines += ["", *_table(measured, batch)]
    return "\n".join(lines) + "\n"


def _how(device: torch.device) -> str:
    if device.type == "cuda":
        return "Blocks compiled, a step in one CUDA graph."
    return "Uncompiled, without CUDA graphs."


def _table(measured: list[Measured], batch: int) -> list[str]:
    reference = next((m.speeds[batch] for m in measured if m.row.name == REFERENCE), None)
    lines = [
        f"| batch {batch} | decode tok/s | / {REFERENCE} | ms a step | peak GiB | "
        f"prefill ms | / {REFERENCE} | peak GiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for m in measured:
        speed = m.speeds[batch]
        faster = slower = prefill = ""
        if speed.prefill_ms is not None:
            prefill = f"{speed.prefill_ms:.1f}"
        if reference is not None:
            faster = f"{speed.tokens_per_s / reference.tokens_per_s:.2f}"
            if speed.prefill_ms is not None and reference.prefill_ms is not None:
                slower = f"{speed.prefill_ms / reference.prefill_ms:.2f}"
        cells = [
            *(m.row.name, f"{speed.tokens_per_s:.0f}", faster),
            *(f"{1e3 * batch / speed.tokens_per_s:.3f}", _gib(speed.decode_peak)),
            *(prefill, slower, _gib(speed.prefill_peak)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else ""
