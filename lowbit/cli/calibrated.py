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
from lowbit.cli.windows import tokens_of, windows_of
from lowbit.convert import Schemes, has_static
from lowbit.formats.folder import Folder
from lowbit.inference import GPTQ, CalibrationReport, Step
from lowbit.schemes import lines

_NONE = "none"


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
    data: Path,
    context: int | None,
    limit: int | None,
    device: str,
    writing: Mapping[str, Any],
) -> CalibrationReport:
    """Calibrate the model `path` on the text `data`, and write it to `out`. A folder comes into memory block by block,
    a GGUF file whole. Args: those of `lowbit.cli.app.quantize`; `writing`: options of `lowbit.export`.

    The schemes choose the layers that `lowbit.export(path, scheme=schemes)` would take, but with static activations no
    stacks of experts: a static scale belongs to one linear layer.

    Raises ValueError for a text or a window that cannot be used, and for what `lowbit.calibrate` refuses; ImportError
    without transformers.
    """
    folder = check(path)
    formats.writing.check_writing(path, out, schemes, **writing)
    tokens = tokens_of(path, data, limit)
    is_folder = isinstance(folder, Folder)
    model = skeleton(folder) if is_folder else load(path, device)
    windows = windows_of(tokens, model, context)
    batches = [{"input_ids": window, "use_cache": False} for window in windows]
    if is_folder:
        return lowbit.calibrate(
            *(path, schemes, batches), out=out, steps=steps, device=device, **writing
        )
    from lowbit.interop.hf.plan import plan

    given = schemes if isinstance(schemes, Mapping) else {"*": schemes}
    chosen = plan(model, given, experts=False).schemes

    def is_chosen(module: nn.Module, name: str) -> bool:
        return f"{name}.weight" in chosen

    report = lowbit.calibrate(model, chosen, batches, is_chosen, steps=steps)
    report.written = lowbit.export(model, out, tokenizer=tokenizer_of(path), **writing)
    return report
