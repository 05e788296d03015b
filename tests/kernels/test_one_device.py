"""Kernels take addresses, so ops refuse tensors of two devices before they read any."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

OPS = (
    *(("dequantize", "dequantize"), ("ternary_mm", "ternary_mm"), ("weight_linear", "int4_linear")),
    *(("dynamic_linear", "int8_dynamic_linear"), ("grouped_linear", "int4_grouped_linear")),
)


def cases_of(module: str) -> list[Any]:
    home = "lowbit_kernels" if module.endswith("_linear") else "benchmarks.cases"
    return import_module(f"{home}.{module}").CASES


def moved() -> Iterator[Any]:
    """Each op, with each tensor except the first on another device."""
    for module, op in OPS:
        import_module(f"lowbit_kernels.{module}")
        arguments = cases_of(module)[0].arguments()
        for i, part in enumerate(arguments):
            if i and isinstance(part, Tensor):
                wrong = (*arguments[:i], part.to("meta"), *arguments[i + 1 :])
                yield pytest.param(op, wrong, id=f"{op}-{i}")


@pytest.mark.parametrize(("op", "arguments"), list(moved()))
def test_tensors_of_two_devices_are_refused(op: str, arguments: tuple) -> None:
    with pytest.raises(ValueError, match=r"one device, got .*on cpu.* on meta.*move them"):
        getattr(torch.ops.lowbit, op)(*arguments)
