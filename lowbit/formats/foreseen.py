"""What `lowbit.export` will refuse of a model, found from names, shapes, schemes and config before any work is done.

A calibration takes hours, and its format is written at the end. `check_export` runs the writer's own walk first, over
an example in place of each weight that will be in low bits: small, with the remainders that the weight's shape has. One
example stands for the weights of all layers whose names differ in numbers alone.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lowbit.convert import Target, find_owners, is_conv, is_turned, shape_of_blocks
from lowbit.formats.base import Format, FormatError
from lowbit.formats.experts import published
from lowbit.formats.folder import Folder
from lowbit.formats.gguf.file import GgufWriter
from lowbit.formats.gguf.format import Gguf
from lowbit.formats.gguf.llama import in_gguf, settings_of
from lowbit.formats.module import config_of, holder_of
from lowbit.formats.registry import target as target_of
from lowbit.formats.scheme_grid import example
from lowbit.formats.sources import Item
from lowbit.formats.writing import NOTHING_LOW, walk
from lowbit.numerics.granularity import PerGroup
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor

_ROWS, _COLUMNS = 512, 256
"""Multiples that formats and kernels may ask of a shape. An example has fewer than three times as many."""


def check_export(
    model: nn.Module,
    targets: Sequence[Target],
    format: str,
    lossy: bool,
    folder: Folder | None = None,
) -> None:
    """Raise the FormatError that `lowbit.export(…, format, lossy=lossy)` will raise for these weights in low bits.

    What follows from values alone, such as scales that siblings do not share, is not foreseen.

    Args:
        model: with its weights or without.
        targets: the weights, with schemes on the grid of the format.
        folder: that of the model; None: it is in memory alone, and its tokenizer not known.
    """
    target = target_of(format)
    if not isinstance(target, Format):
        raise FormatError(
            f"{format} holds a program, which lowbit.export traces; leave out format="
        )
    if isinstance(target, Gguf):
        settings_of(config_of(model) if folder is None else folder.config)
        for owners in find_owners(model).values():
            in_gguf(owners[0].fqn)
        if folder is not None:
            with tempfile.TemporaryDirectory() as place:
                GgufWriter(Path(place) / "model.gguf", folder)
    source: Any = _Examples(model, targets, folder)
    if target.holds_experts:
        source = published(source)
    found = {
        item.name: meta
        for item, _, meta in walk(source, target, lossy, f"checking {target.name}")
        if meta is not None
    }
    if not found:
        raise FormatError(NOTHING_LOW)
    target.config(found, source.linears())


class _Examples:
    """A `lowbit.formats.sources.Source` of one example for each kind of weight."""

    nbytes = 0
    left_out = ()

    def __init__(self, model: nn.Module, targets: Sequence[Target], folder: Folder | None) -> None:
        self.config = config_of(model) if folder is None else folder.config
        self._folder = folder
        low = {id(owner.module) for target in targets for owner in target.owners}
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._left = {name for name, module in linears.items() if id(module) not in low}
        self._targets: dict[Any, Target] = {}
        for target in targets:
            shared = re.sub(r"\d+", "*", target.fqn)
            kind = shared, target.scheme, tuple(target.weight.shape), target.weight.dtype
            self._targets.setdefault(kind, target)

    def names(self) -> list[str]:
        return [target.fqn for target in self._targets.values()]

    def linears(self) -> set[str]:
        return self._left

    def copy_files(self, folder: Path) -> None:
        """None has files."""

    def items(self) -> Iterator[Item]:
        for target in self._targets.values():
            name, value = target.fqn, _example_of(target)
            if self._folder is None:
                yield Item(name, value, holder_of(name, target.owners, target.weight.ndim))
            else:
                yield Item(name, value, self._folder.holder(name, value))


def _example_of(target: Target) -> LowbitTensor:
    """A small weight that `target.scheme` makes, stored as that of `target` will be."""
    shape, dtype = shape_of_blocks(target), target.weight.dtype
    if is_conv(target):
        made = example(shape, target.scheme, dtype)
        return ConvTensor.of_matrix(made, target.weight.shape)
    *stack, rows, columns = shape
    sizes = target.scheme.weight.granularity
    group = sizes.group_size if isinstance(sizes, PerGroup) else 1
    small = _cut(rows, _ROWS), _cut(columns, math.lcm(group, _COLUMNS))
    made = example((*(min(count, 2) for count in stack), *small), target.scheme, dtype)
    return made._transposed() if is_turned(target) else made


def _cut(size: int, unit: int) -> int:
    """A size with the same remainder by `unit`, and at most twice as large."""
    return size if size <= 2 * unit else unit + size % unit
