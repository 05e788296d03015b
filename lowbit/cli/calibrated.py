"""A folder quantized with the help of a text, whose windows are the batches of a calibration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

import lowbit
from lowbit import formats
from lowbit.cli.language_model import check, load, skeleton, tokenizer_of
from lowbit.cli.windows import length_of, text_of, tokens_of, windows_of
from lowbit.convert import Schemes, has_static
from lowbit.formats.folder import Folder
from lowbit.formats.gguf.file import GgufFile
from lowbit.inference import GPTQ, CalibrationReport, Step, sampled_batches
from lowbit.inference.calibration.kv_cache import CacheFormat
from lowbit.schemes import lines

_NONE = "none"
SAMPLED = "sampled"
"""The value of --data for tokens that the model draws itself."""
SAMPLED_LENGTH = 512
"""The most tokens of a window that is drawn, unless --context says otherwise."""
WINDOWS, BATCH = 128, 8
"""How many windows of the text are taken, and how many make a batch, unless --limit and --batch say otherwise."""


def steps_of(methods: str | None, schemes: Schemes) -> list[Step]:
    """The steps of a list such as "awq, gptq(damping=0.05)". Hyphens and capitals do not count.

    "none" rounds to nearest. None is that for schemes with static activations, and GPTQ for others. Raises ValueError
    for an unknown name, and options that the step refuses.
    """
    if methods is None:
        return [] if has_static(schemes) else [GPTQ()]
    if methods.strip().lower() == _NONE:
        return []
    kinds = {_spelled(name): kind for name, kind in sorted(Step.kinds.items())}
    found = []
    for line in re.split(r",(?![^(]*\))", methods):
        name, options = lines.parsed(
            re.sub(r"(?<=[a-z])-(?=[a-z])", "", line), "method", "gptq(damping=0.05)"
        )
        known = {n.replace("-", ""): n for n in kinds}
        name = known.get(name.lower(), name.lower())
        found.append(lines.made(lines.named(name, "method", kinds), options, line.strip()))
    return found


def _spelled(name: str) -> str:
    """The class name of a step as a word of the command line: learned-rounding."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", name).lower()


def calibrate(
    path: Path,
    out: Path,
    schemes: Schemes,
    steps: Sequence[Step],
    data: Path | None,
    context: int | None,
    limit: int | None,
    batch: int,
    device: str,
    kv_cache: CacheFormat | None,
    writing: Mapping[str, Any],
) -> CalibrationReport:
    """Calibrate the model `path` on the text `data`, and write it to `out`. A folder comes into memory block by block,
    and a GGUF file, or without `data` any model, whole. `data` "sampled": on tokens that the model draws, for which it
    comes into memory whole as well.

    Args: those of `lowbit.cli.app.quantize`; `writing`: options of `lowbit.export`.

    The schemes choose the layers that `lowbit.export(path, scheme=schemes)` would take, but with static activations no
    stacks of experts: a static scale belongs to one linear layer.

    Raises ValueError for a text or a window that cannot be used, and for what `lowbit.calibrate` refuses; ImportError
    without transformers.
    """
    folder = check(path)
    formats.writing.check_writing(path, out, schemes, **writing)
    batches, used = (
        (None, []) if data is None else _batches(path, folder, data, context, limit, batch, device)
    )
    if isinstance(folder, Folder):
        report = lowbit.calibrate(
            *(path, schemes, batches),
            **{"out": out, "steps": steps, "device": device, "kv_cache": kv_cache, **writing},
        )
        assert report.written is not None
        report.written.notes += used
        return report
    model = load(path, device)
    from lowbit.interop.hf.plan import plan

    given = schemes if isinstance(schemes, Mapping) else {"*": schemes}
    chosen = plan(model, given, experts=False).schemes

    def is_chosen(module: nn.Module, name: str) -> bool:
        return f"{name}.weight" in chosen

    form = {name: writing[name] for name in ("format", "lossy")} | {"kv_cache": kv_cache}
    report = lowbit.calibrate(model, chosen, batches, is_chosen, steps=steps, **form)
    report.written = lowbit.export(model, out, tokenizer=tokenizer_of(path), **writing)
    report.written.notes += [*report.notes, *used]
    return report


def _batches(
    path: Path,
    folder: Folder | GgufFile,
    data: Path,
    context: int | None,
    limit: int | None,
    batch: int,
    device: str,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The windows of the text, and a note on them. Args: those of `calibrate`; `folder`: the model's headers."""
    if str(data) == SAMPLED:
        length = length_of(skeleton(folder), context)
        length = min(length, SAMPLED_LENGTH) if context is None else length
        count = WINDOWS if limit is None else max(limit // length, 1)
        windows = sampled_batches(load(path, device), count, length, batch_size=batch)
        batches = [{"input_ids": window, "use_cache": False} for window in windows]
        return batches, [
            f"calibrated on {count:,} sequences of {length:,} tokens that the model drew"
        ]
    text_of(data, 1)
    length = length_of(skeleton(folder), context)
    tokens = tokens_of(path, data, WINDOWS * length if limit is None else limit)
    if len(tokens) < length and (limit is None or limit >= length):
        raise ValueError(
            f"{data} has {len(tokens):,} tokens, and a window has {length:,}; accepted: a text of at least one window, "
            f"if possible {WINDOWS} of them, or shorter windows by --context"
        )
    windows = windows_of(tokens, length, batch)
    batches = [{"input_ids": window, "use_cache": False} for window in windows]
    count = sum(map(len, windows))
    used = f"calibrated on {len(tokens):,} tokens of {data}: {count:,} windows of up to {length:,}, {batch} at a time"
    return batches, [used]
