"""``python -m benchmarks.mapping_error NAME=FILE.safetensors …``: the errors of the two symmetric mappings of weights.

The error is the squared error of the dequantized weights relative to the squared weights, for every width and
granularity that the presets offer. "symmetric" puts the largest value of a group on a tie, (2^b − 1)/2 steps; a
positive one is clipped. "symmetric_no_clipping_err" puts it on a code. The table shows the error of the second mapping
divided by that of the first: below 1, the second is better. It uses the matrices of each file of at least 32 x 128,
with up to 256 rows each, and random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Machine
from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import Granularity, PerGroup, PerRow
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec

SYMMETRIC: MappingName = "symmetric"
NO_CLIPPING: MappingName = "symmetric_no_clipping_err"
BITS = (8, 7, 6, 5, 4, 3, 2)
GRANULARITIES: dict[str, Granularity] = {
    "row": PerRow(),
    "group 128": PerGroup(128),
    "group 64": PerGroup(64),
    "group 32": PerGroup(32),
}
ROWS = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def squared_error(weights: list[Tensor], spec: Spec, dtype: torch.dtype) -> float:
    """Σ(ŵ − w)² / Σw² over all weights together, cast to `dtype`, in which scales and values are kept too."""
    error = total = 0.0
    for weight in weights:
        w = weight.to(dtype)
        values = spec.dequantize(*spec.quantize(w, dtype), w.shape, torch.float32)
        error += (values.double() - w.double()).square().sum().item()
        total += w.double().square().sum().item()
    return error / total


def matrices(path: Path) -> list[Tensor]:
    """Rows of every weight [N, K] of a safetensors file, in float32: at most `ROWS` of each, evenly spread.

    Weights that are too small for a group of each kind are left out.
    """
    from safetensors.torch import load_file

    found = [t for t in load_file(path).values() if t.ndim == 2 and t.is_floating_point()]
    found = [t.float() for t in found if t.shape[0] >= 32 and t.shape[1] >= 128]
    if not found:
        raise SystemExit(f"{path} has no floating-point matrix of at least 32 x 128")
    return [t[:: -(-len(t) // ROWS)].contiguous() for t in found]


def random_weights() -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 1024, generator=generator)
    torch.manual_seed(0)  # distributions take no generator
    student = torch.distributions.StudentT(4.0).sample(torch.Size((512, 1024)))
    return {"Gaussian": [normal * 0.02], "Student t, 4 degrees": [student * 0.02]}


def rows(name: str, weights: list[Tensor]) -> Iterator[str]:
    for dtype_name, dtype in DTYPES.items():
        for per, granularity in GRANULARITIES.items():
            cells = []
            for bits in BITS:
                before, after = (
                    squared_error(weights, Spec(Int(bits), granularity, mapping), dtype)
                    for mapping in (SYMMETRIC, NO_CLIPPING)
                )
                cells.append(f"{after / before:.3f} ({before:.1e})")
            yield f"| {name} | {dtype_name} | {per} | " + " | ".join(cells) + " |"


def main(arguments: list[str]) -> int:
    named = [a.partition("=") for a in arguments]
    if not all(equals for _, equals, _ in named):
        print("usage: python -m benchmarks.mapping_error [NAME=FILE.safetensors …]")
        return 2
    machine = Machine.here("cpu")
    files = [f"{name}={Path(file).name}" for name, _, file in named]
    command = " ".join(["python", "-m", "benchmarks.mapping_error", *files])
    print("# mapping_error: the squared error of the two symmetric mappings\n")
    print(f"- {date.today()}, `{command}`")
    print(f"- {machine.gpu}, torch {machine.torch}, Python {machine.python}")
    print("- the error of symmetric_no_clipping_err over that of symmetric, and (the latter)\n")
    headings = ("weights", "dtype", "a scale a", *(f"int{bits}" for bits in BITS))
    print("| " + " | ".join(headings) + " |\n|---|---|---|" + "--:|" * len(BITS))
    sources = {name: matrices(Path(file)) for name, _, file in named}
    for name, weights in {**sources, **random_weights()}.items():
        for row in rows(name, weights):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
