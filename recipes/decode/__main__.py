"""The command line; see the package's docstring for what is measured."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch

from recipes.decode import report
from recipes.decode.config import PRESETS, rows
from recipes.decode.measure import measure, trace
from recipes.quickstart.folder import write_text


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.decode",
        description="Decode with bf16, int8 and int4 weights, and with torch's tinygemm.",
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), help="default: 8b with CUDA, else tiny")
    parser.add_argument("--rows", default="", metavar="NAME,NAME", help="default: all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/decode/decode.md"),
        metavar="FILE",
        help="the page (default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="measure nothing: write the products of one row's step at batch 1 to FILE, for `python -m benchmarks "
        "weight_linear --shapes FILE`",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0 done, 2 something to put right (one line says what)."""
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = options.preset or ("8b" if device.type == "cuda" else "tiny")
    config = PRESETS[preset]()
    known = rows(config)
    names = list(dict.fromkeys(options.rows.split(","))) if options.rows else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(
            f"error: no row named {', '.join(map(repr, unknown))}; there are: {', '.join(known)}",
            file=sys.stderr,
        )
        return 2
    page = options.out if options.shapes is None else options.shapes
    try:  # before what takes minutes
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: no folder for {page}: {error.strerror}", file=sys.stderr)
        return 2
    if page.is_dir():
        print(f"error: {page} is a folder; give the name of a file in it", file=sys.stderr)
        return 2
    if options.shapes is not None:
        if not options.rows or len(names) > 1:
            print("error: --shapes takes one row, e.g. --rows int4", file=sys.stderr)
            return 2
        found = trace(config, known[names[0]], 1, device)
        found.write(options.shapes)
        print(found)
        return 0
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
    text = report.text(config, measured, shlex.join(command), device)
    write_text(options.out, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
