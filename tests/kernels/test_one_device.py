"""Kernels take addresses: tensors of two devices are refused before any is read."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit_kernels

OPS = ("dequantize", "dynamic_linear", "grouped_linear", "ternary_mm", "weight_linear")


def moved() -> Iterator[Any]:
    """Each op with each tensor but its first on another device."""
    for op in OPS:
        getattr(lowbit_kernels, op)
        arguments = import_module(f"benchmarks.cases.{op}").CASES[0].arguments()
        for i, part in enumerate(arguments):
            if i and isinstance(part, Tensor):
                wrong = (*arguments[:i], part.to("meta"), *arguments[i + 1 :])
                yield pytest.param(op, wrong, id=f"{op}-{i}")


@pytest.mark.parametrize(("op", "arguments"), [*moved()])
def test_tensors_of_two_devices_are_refused(op: str, arguments: tuple) -> None:
    with pytest.raises(ValueError, match=r"one device, got .*on cpu.* on meta.*move them"):
        getattr(torch.ops.lowbit, op)(*arguments)
