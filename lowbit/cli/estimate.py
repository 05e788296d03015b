"""`lowbit estimate`: which training and serving fits on which GPU, from the shapes alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from lowbit.cli import shapes
from lowbit.cli.gpus import CONTEXT, GIB, Gpu, smallest
from lowbit.cli.memory import MemoryUse, Run, serving, training
from lowbit.cli.output import print_json, print_table


def estimate(
    config: Path, batch: int, sequence: int, recompute: bool, compiled: bool, json: bool
) -> None:
    """The command `estimate`. Args: those of `lowbit.cli.app.estimate`."""
    model = shapes.read(config)
    run = Run(batch, sequence, recompute, compiled)
    parts = {**training(model, run), **serving(model, run)}
    if json:
        choices: dict[str, Any] = {
            name: {**asdict(part), "total": part.total, "gpu": _gpu(smallest(part.total))}
            for name, part in parts.items()
        }
        head = {"parameters": model.parameters, "shapes_from": model.source, **asdict(run)}
        print_json({**head, "cuda_context": CONTEXT, "choices": choices})
        return
    typer.echo(
        f"{model.parameters:,} parameters, shapes from {model.source}; {batch} x {sequence} tokens"
        f"{', layers recomputed' if recompute else ''}{', compiled' if compiled else ''}"
    )
    header = ("", "weights", "gradients", "states", "activations", "total", "smallest GPU")
    print_table("", header, [_row(name, part) for name, part in parts.items()])
    typer.echo(
        f"Activations of inference: keys, values and one layer. A GPU needs {CONTEXT / GIB:.0f} GiB besides."
    )


def _row(name: str, part: MemoryUse) -> tuple[str, ...]:
    numbers = (part.weights, part.gradients, part.states, part.activations, part.total)
    gpu = _gpu(smallest(part.total)) or "more than one"
    return (name, *(f"{n / GIB:.2f} GiB" if n else "-" for n in numbers), gpu)


def _gpu(gpu: Gpu | None) -> str | None:
    return None if gpu is None else f"{gpu.gib:.0f} GiB: {gpu.names}"
