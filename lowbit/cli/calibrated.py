"""A folder quantized with the help of a text, whose windows are the batches of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

import lowbit
from lowbit.cli.language_model import check, load
from lowbit.cli.windows import tokens_of, windows_of
from lowbit.convert import Schemes
from lowbit.formats.base import FormatError
from lowbit.formats.folder import Folder
from lowbit.progress import progress


def has_static(patterns: Schemes) -> bool:
    """True if a scheme has an activation whose scale a calibration finds."""
    schemes = patterns.values() if isinstance(patterns, Mapping) else (patterns,)
    return any(scheme is not None and scheme.is_static for scheme in schemes)


def calibrated(
    path: Path,
    patterns: Schemes,
    data: Path,
    context: int | None,
    limit: int | None,
    scales: str | None,
    device: str,
) -> nn.Module:
    """The model of the folder `path`, whole in memory, calibrated on the text `data` and quantized: by GPTQ, or with
    static activations rounded to nearest.

    The patterns choose the layers that `lowbit.export(path, scheme=patterns)` would take, but no stacks of experts:
    a static scale belongs to one linear layer. Args: those of `lowbit.cli.app.quantize`.

    Raises ValueError for a text or a window that cannot be used, and for what `lowbit.calibrate` and `lowbit.quantize_`
    refuse; ImportError without transformers.
    """
    folder = check(path)
    if isinstance(folder, Folder) and folder.weights:
        raise FormatError(f"{path} is in low bits already; give the folder of the plain weights")
    tokens = tokens_of(path, data, limit)
    model = load(path, device)
    from lowbit.interop.hf.plan import plan

    given = patterns if isinstance(patterns, Mapping) else {"*": patterns}
    chosen = plan(model, given, experts=False).schemes

    def is_chosen(module: nn.Module, name: str) -> bool:
        return f"{name}.weight" in chosen

    windows = windows_of(tokens, model, context)
    if not has_static(chosen):
        batches = [{"input_ids": window, "use_cache": False} for window in windows]
        lowbit.calibrate(model, chosen, batches, is_chosen)
        return model
    total = sum(window.numel() for window in windows)
    calibration = lowbit.calibrate(model, chosen, is_chosen)
    bar = progress("calibrating on text", total, unit="tokens")
    with calibration, torch.no_grad(), bar as advance:
        for window in windows:
            model(input_ids=window.to(device), use_cache=False)
            advance(window.numel())
    lowbit.quantize_(model, chosen, is_chosen, scales)  # type: ignore[arg-type]  # it checks the name
    return model
