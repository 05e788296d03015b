"""The decode kernel on weights of every format that it takes, in an emulator and on a GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.cases.formats import FORMATS, Format
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.weight_mm_decode_sm90 import (
    DecodeProduct,
    planned,
    scaling_of,
    takes,
)
from lowbit_kernels.weight_only.weight_operands import WeightOperands
from tests.kernels import decode_emulator
from tests.kernels.compiled_on_cpu import COMPILER

NAMED = {format.name: format for format in FORMATS}
TAKEN = [format for format in FORMATS if format.name != "float8_e5m2"]
NUMBERS = {torch.bfloat16: 8e-4, torch.float16: 3e-4}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
on_cpu = pytest.mark.skipif(not COMPILER, reason="no g++")


class Product:
    """A random product with bias and residual, and its value in float64."""

    def __init__(
        self,
        format: Format,
        m: int,
        n: int,
        k: int,
        group: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(m * 7 + n * 3 + k)
        weight = format.weight(n, k, group)
        self.group_size, self.bits = weight.pop("group_size"), weight.pop("bits")
        self.table = tuple(weight.pop("table"))
        self.weight = {name: None if t is None else t.to(device) for name, t in weight.items()}
        self.x = torch.randn(m, k).to(device, dtype)
        self.ends = torch.randn(n).to(device, dtype), torch.randn(m, n).to(device, dtype)

    @property
    def tensors(self) -> tuple:
        parts = (self.weight[name] for name in ("codes", "scale", "zero_point"))
        return self.x, *parts, *self.ends, None, self.weight["global_scale"]

    @property
    def operands(self) -> WeightOperands:
        format = {"bits": self.bits, "table": self.table}
        return WeightOperands.of(*self.tensors, group_size=self.group_size, **format)

    def exact(self) -> Tensor:
        codes, scale, zero_point, global_scale = self.weight.values()
        parts = (codes, scale, zero_point, self.group_size, self.x.shape[1], torch.float64)
        values = dequantized(*parts, global_scale, self.bits, self.table)
        bias, residual = self.ends
        return self.x.double() @ values.T + bias.double() + residual.double()

    def check(self, out: Tensor) -> None:
        exact = self.exact()
        assert out.dtype == self.x.dtype and out.shape == exact.shape
        rounding = (exact.to(out.dtype).double() - exact).norm()
        error = (out.double() - exact).norm()
        # the rounding of the result, and that of the numbers of a table
        bound = math.hypot(rounding, NUMBERS[out.dtype] * exact.norm())
        assert error <= bound, f"{error / exact.norm():.2e}, rounding {rounding / exact.norm():.2e}"

    def emulated(self, blocks: int = 2, split: int = 1) -> Tensor:
        assert takes(self.operands)
        chosen = planned(self.operands, blocks, splits=(split,))
        assert chosen is not None
        with decode_emulator.emulated():
            return DecodeProduct(self.operands, chosen)(self.tensors)


@on_cpu
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("format", TAKEN, ids=lambda f: f.name)
def test_emulated(format: Format, m: int) -> None:
    """Five chunks a row, and rows that end within a tile."""
    product = Product(format, m, 40, 640)
    product.check(product.emulated())


@on_cpu
@HALVES
@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 0])
@pytest.mark.parametrize("name", ["int3-value", "uint2", "mxfp4", "nvfp4", "nf4"])
def test_emulated_groups(name: str, group: int, m: int, dtype: torch.dtype) -> None:
    product = Product(NAMED[name], m, 24, 1024, group, dtype)
    if not takes(product.operands):
        assert group == 16 and m > 1 and scaling_of(product.operands) is None
        return
    product.check(product.emulated(split=2))
