"""Trace: the result of `lowbit.trace`, as a table and as JSON.

The JSON is `{"products": [{"layer": "layers.0.mlp.down_proj", "product": "output", "m": 1, …}, …]}`, with the fields of
`TracedProduct`. The kernel benchmark takes its shapes from it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lowbit.numerics.granularity import PerBlock, PerGroup
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec

LOW_BITS = frozenset({"int8", "e4m3", "e5m2"})
"""Formats of the operands of a product that runs in low bits."""


@dataclass(frozen=True)
class TracedProduct:
    """One product of a layer, at one size.

    Attributes:
        layer: the name of the module; of the parameter, where that is not called `weight`.
        product: "output", "grad_input", "grad_weight", or "embedding" for a lookup in a low-bit table.
        m: rows of the input, positions of a convolution's output, or indices of a lookup; 0 where the product did not
            run.
        n, k: the weight is [n, k], also for the products of backward; that of a convolution is [n, k] as a matrix.
            Under tensor parallelism: on this rank.
        weight: how the weight is stored, such as "int4-g128", "int8-row-int8-token" (the activation's format last),
            "QAT int4-g32", "int8 weight", "BitNet", or a dtype: what `LowbitTensor.stored_format` gives.
        ran_in: the format of the operands, "int8", "e4m3" or "e5m2", or a dtype.
        implementation: the row in the list of `lowbit.linear.frozen` and the kernels that ran, such as "weight_linear
            decode"; "torch" for products of PyTorch.
        calls: how often the product ran.
        why: the reason why it did not run in low bits; "" where it did.
    """

    layer: str
    product: str
    m: int
    n: int
    k: int
    weight: str
    ran_in: str
    implementation: str
    calls: int
    why: str

    @property
    def in_low_bits(self) -> bool:
        return self.ran_in in LOW_BITS


@dataclass(frozen=True)
class Trace:
    """The result of `lowbit.trace`: `print` it, or read `products`.

    Attributes:
        products: in the order of the first calls, those of one call together; then the layers that did not run.
        launches: how often each implementation of each low-bit product ran, by (op, implementation).
    """

    products: tuple[TracedProduct, ...]
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __str__(self) -> str:
        """A table. Layers whose names differ only in the first number share a line: "blocks.0-31.up"."""
        layers = {p.layer for p in self.products}
        low = {p.layer for p in self.products if p.in_low_bits}
        rows = [HEAD, *map(_cells, _folded(self.products))]
        table = aligned(rows, [i for i, title in enumerate(HEAD) if title not in NUMBERS])
        return f"{len(low)} of {len(layers)} layers ran products in low bits\n{table}"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, see the module. `python -m benchmarks weight_linear --shapes PATH` times these shapes."""
        text = json.dumps({"products": [asdict(p) for p in self.products]}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


HEAD = ("layer", "product", "M", "N", "K", "weight", "ran in", "implementation", "calls", "why")
"""The columns: the fields of a TracedProduct."""
NUMBERS = {"M", "N", "K", "calls"}


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """The rows of a table as lines. The columns of these numbers are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _cells(p: TracedProduct) -> tuple[str, ...]:
    return tuple(map(str, astuple(replace(p, layer=p.layer or "(model)"))))


def _folded(products: tuple[TracedProduct, ...]) -> list[TracedProduct]:
    """Merge the products that differ only in the first number of the layer's name."""
    folded: dict[TracedProduct, list[int]] = {}
    for p in products:
        parts = p.layer.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        numbers = [] if at is None else [int(parts[at])]
        template = ".".join("{}" if i == at else part for i, part in enumerate(parts))
        folded.setdefault(replace(p, layer=template), []).extend(numbers)
    return [
        replace(p, layer=p.layer.replace("{}", _ranges(numbers), 1))
        for p, numbers in folded.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def weight_format(weight: Any) -> str:
    """How a local weight is stored, and its activation quantized, in a word or two."""
    if hasattr(type(weight), "stored_format"):
        return weight.stored_format()
    return dtype_name(weight.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 as "float32"."""
    return str(dtype).removeprefix("torch.")


def specs_name(weight: Spec, activation: Spec | None) -> str:
    """The specs of a weight and its activation, such as "int8-row-int8-token"."""
    return _spec_name(weight) + ("" if activation is None else f"-{_spec_name(activation)}")


def _spec_name(spec: Spec) -> str:
    fmt, granularity = spec.format, spec.granularity
    if isinstance(fmt, Int):
        name = f"{'' if fmt.signed else 'u'}int{fmt.bits}"
    else:
        name = fmt.name if isinstance(fmt, LookupTable) else dtype_name(fmt.dtype)
    if spec.static:
        name += "-static"
    elif isinstance(granularity, PerGroup):
        name += f"-g{granularity.group_size}"
    elif isinstance(granularity, PerBlock):
        name += "-block" + "x".join(map(str, granularity.shape))
    else:
        name += "-" + type(granularity).__name__.removeprefix("Per").lower()
        name += "x".join(map(str, granularity.sizes()))
    if spec.scale_format != "float":
        name += f"-{spec.scale_format}"
    return name if spec.mapping.startswith("symmetric") else f"{name}-{spec.mapping}"
