"""FlopCounterMode counts a low-bit model as the plain one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import lowbit
import lowbit_kernels as kernels
from lowbit_kernels.matmul import grouped_columns
from lowbit_kernels.runtime import flop_formulas
from lowbit_kernels.runtime.library import SCHEMAS
from lowbit_kernels.runtime.when_imported import when_imported
from tests.schemes import SCHEMES

OPS = [line.partition("(")[0].split() for line in SCHEMAS.read_text().splitlines()]
"""The module and the name of each op."""
PRODUCTS = ("mm", "linear", "attention", "linear_gradients", "input_gradient", "low_rank")
TRAINED = {
    "int8": lowbit.Int8MixedPrecision(always=True),
    "float8": lowbit.Float8MixedPrecision(always=True),
    "blocks": lowbit.Float8BlockMixedPrecision(always=True),
    "mxfp8": lowbit.MXFP8MixedPrecision(always=True),
    "int8-weights": lowbit.Int8Weight(),
    "int8-products": lowbit.Int8Weight(output=True, grad_input=True, grad_weight=True, always=True),
    "int4-weights": lowbit.Int4Weight(group_size=32),
    "bitnet": lowbit.BitNet(),
}
ROWS = 128


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 96, 128) / 16)

    def forward(self, rows: Tensor) -> Tensor:
        ends = torch.tensor([5, 5, 60, ROWS], dtype=torch.int32)
        return torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)


def counted(call: Callable[..., Any], *args: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*args)
    return counter.get_total_flops()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))


def trained(model: nn.Module) -> int:
    x = torch.randn(ROWS, 128, requires_grad=True)
    return counted(lambda: model(x).square().mean().backward())


@pytest.mark.parametrize("scheme", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("build", [linear, Experts])
def test_a_training_step_counts_as_the_plain_one(build: Any, scheme: Any) -> None:
    model = build()
    plain = trained(model)
    assert plain == 6 * ROWS * 128 * (2 * 256 if build is linear else 96)
    lowbit.train.prepare_(model, scheme)
    # the operands of an expert's gradient do not tell its number of rows, only a multiple of 16
    most = plain if build is linear else plain + 2 * 15 * 128 * 96
    if build is Experts and scheme is TRAINED["blocks"]:  # a multiple of 128, as 96 outputs are
        most = plain + 2 * 127 * 128 * 96 + 2 * ROWS * 128 * (128 - 96)
    assert plain <= trained(model) <= most


@pytest.mark.parametrize("name", SCHEMES)
def test_inference_and_the_gradient_of_its_input_count_as_the_plain_ones(name: str) -> None:
    model = linear().requires_grad_(False)
    plain, x = trained(model), torch.randn(ROWS, 128)
    assert plain == 4 * ROWS * 128 * 2 * 256
    lowbit.quantize_(model, SCHEMES[name])
    with torch.no_grad():
        assert counted(model, x) == plain // 2
    if SCHEMES[name].activation is None:
        assert trained(model) == plain


def test_other_products() -> None:
    a, b = torch.randn(3, 4, 8).half(), torch.randn(3, 8, 5).half()
    assert counted(kernels.batched_mm.batched_mm, a, b) == counted(torch.bmm, a, b)
    w, down, up = torch.zeros(6, 8), torch.randn(2, 8), torch.randn(6, 2)
    low_rank = kernels.add_low_rank
    assert counted(low_rank.add_low_rank, w, [down], [up], [1.0]) == counted(torch.mm, up, down)
    assert counted(low_rank.low_rank_gradients, w, down, up, 1.0) == 2 * counted(torch.mm, up, down)
    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    attention = kernels.invariant_attention.invariant_attention
    own = counted(lambda: attention(q, k, v, scale=0.25, causal=False))
    with sdpa_kernel(SDPBackend.MATH):
        assert own == counted(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_every_product_has_a_formula() -> None:
    for module, name in OPS:
        getattr(kernels, module)
        assert getattr(torch.ops.lowbit, name) in flop_registry
    declared = {name: getattr(getattr(kernels, module), name).flops for module, name in OPS}
    assert [n for n, flops in declared.items() if n.endswith(PRODUCTS) and flops == "0"] == []


def test_tokens_of_a_width() -> None:
    for tokens in (0, 1, 16, 100, 129):
        found = grouped_columns.tokens(grouped_columns.width(tokens, 5), 5)
        assert tokens <= found < tokens + 16


def test_either_is_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    monkeypatch.setattr(flop_formulas, "_formulas", {})
    when_imported("torch.utils.flop_counter", flop_formulas._register)
    flop_formulas.add(torch.ops.lowbit.scaled_mm, len)
    later = importlib.import_module("torch.utils.flop_counter")
    assert later.flop_registry[torch.ops.lowbit.scaled_mm] is len
    flop_formulas.add(torch.ops.lowbit.weight_linear, len)
    assert later.flop_registry[torch.ops.lowbit.weight_linear] is len
    torchs = later.flop_registry[torch.ops.aten.mm]
    flop_formulas.add(torch.ops.aten.mm, len)
    assert later.flop_registry[torch.ops.aten.mm] is torchs
