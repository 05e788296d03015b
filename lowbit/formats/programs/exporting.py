"""`lowbit.export` to a program: check the call, let the format write it, report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from lowbit.formats.base import FormatError
from lowbit.formats.format_file import format_file
from lowbit.formats.module import ModelSource
from lowbit.formats.programs.base import Call, ProgramFormat, example
from lowbit.formats.report import ExportReport
from lowbit.progress import waiting
from lowbit.tensor.core.base import LowbitTensor


def export_program(
    model: nn.Module | str | os.PathLike[str],
    out: Path,
    target: ProgramFormat,
    example_inputs: Any,
    dynamic_shapes: Any,
    lossy: bool,
    overwrite: bool,
) -> ExportReport:
    """`lowbit.export` for a format of programs. Args: those of `lowbit.export`. Raises FormatError."""
    call = _call(model, target, example_inputs, dynamic_shapes)
    source = ModelSource(call.model)
    low = {n: t for n, t in source.tensors.items() if isinstance(t, LowbitTensor)}
    if not low:
        raise FormatError("no weight is in low bits: call lowbit.quantize_ first")
    if away := next((name for name, t in low.items() if t.device.type != "cpu"), None):
        raise FormatError(
            f"{target.name} programs are made on a CPU, and {away} is on {low[away].device}: call model.cpu() first. "
            "torch.export.export traces a model on a GPU, for programs that run lowbit's kernels"
        )
    # The tensors of the model itself: `ModelSource` gives detached aliases.
    own = call.model.state_dict(keep_vars=True)
    call.weights = {name: own[name] for name in low}
    report = ExportReport(format=target.name, path=str(out))
    shown = waiting(f"writing {target.name}")  # compilers do not say how far they are
    with format_file(out, overwrite, target.name, target.suffix) as path, shown:
        held = target.write(call, path, lossy)
        report.nbytes = sum(p.stat().st_size for p in path.parent.iterdir())
    by_name = {item.name: item for item in held}
    for item in source.items():
        item = by_name.get(item.name, item)
        report.enter(item, item.nbytes)
    return report


def _call(model: Any, target: ProgramFormat, example_inputs: Any, dynamic_shapes: Any) -> Call:
    if not isinstance(model, nn.Module):
        raise FormatError(
            f"{target.name} holds a program: give the module, which lowbit.load_pretrained makes of a folder, not "
            f"{model!r}"
        )
    if example_inputs is None:
        raise FormatError(
            f"{target.name} holds a program, which is traced: give example_inputs=(x, …), the arguments of a call"
        )
    model = getattr(model, "_orig_mod", model)
    if model.training:
        raise FormatError("the model is in training mode: call model.eval() first")
    args, kwargs = example(example_inputs)
    return Call(model, args, kwargs, dynamic_shapes)
