"""The CPU's kernel alone: codes and values of every format, threads, processors without AVX-512."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from lowbit import optim
from lowbit.numerics.codebook import Codebook
from lowbit.optim.step.launch import _table
from lowbit.tensor import CodebookTensor
from lowbit_kernels.elementwise import fused_step
from lowbit_kernels.elementwise.fused_step import COLUMN, Rule, StepArguments, StepVariant
from lowbit_kernels.elementwise.fused_step_cpu import StepKernelCpu
from lowbit_kernels.runtime import host_compiler
from tests.optim.problems import is_beside, parameters, rand, run

pytestmark = pytest.mark.skipif(not host_compiler.compiler(), reason="no C++ compiler")

STATES = [("8bit", True), ("8bit", False), ("4bit", True), ("4bit", False)]
STATES += [("float8", True), ("float8", False)]
states = pytest.mark.parametrize(("format", "signed"), STATES)
RULE = Rule((), "", "w = s[0]; s[0] = g;")


def pass_through(values, state):
    """The decoded values of `state`. Encodes `values` into it."""
    table = _table(state.format, state.signed)
    single = (torch.float32, torch.float32, (state.format,), (state.signed,), (False,))
    step = StepKernelCpu(StepVariant(RULE, *single, tables=(table,)))
    weight, counter = torch.zeros_like(values), torch.zeros((), dtype=torch.float64)
    row = np.zeros(len(fused_step.TENSOR) + fused_step.GROUP_WORDS, np.int64)
    pointers = {"grad": values, "param": weight, "state_0": state.codes, "scale_0": state.scale}
    for name, tensor in {**pointers, "step": counter}.items():
        row[COLUMN[name]] = tensor.data_ptr()
    row[COLUMN["cols"]], row[COLUMN["numel"]] = values.shape[1], values.numel()
    scalars = torch.zeros(fused_step.SCALARS_WORDS, dtype=torch.int64)
    address = row.ctypes.data
    groups = address + 8 * len(fused_step.TENSOR)
    step(StepArguments(address, groups, scalars, scalars, 1, 0, None))
    assert counter == 1
    return weight


def near_boundaries(format, signed):
    """Numbers on, beside and between the boundaries of codes, in rows with a scale of 1."""
    if format == "float8":
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = values[values.isfinite()].unique()
    else:
        values = Codebook(8, signed).table()
    middle = (values[1:].double() + values[:-1].double()).div(2).float()
    edges = torch.cat([values, middle])
    up, down = (torch.nextafter(edges, torch.tensor(s)) for s in (9e9, -9e9))
    x = torch.cat([edges, up, down, rand(1000).clamp(-1, 1) * values.max(), torch.zeros(40)])
    if not signed:
        x = x.abs()
    x = x.clamp(-values.max(), values.max())
    x = torch.cat([x, torch.zeros(-len(x) % 255)]).view(-1, 255)
    return torch.cat([x, values.max().expand(len(x), 1)], dim=1)


@pytest.mark.parametrize(("format", "signed"), [s for s in STATES if s[0] != "4bit"])
def test_codes_are_the_nearest(format, signed):
    x = near_boundaries(format, signed)
    expected = CodebookTensor.from_float(x, format, signed=signed)
    found = CodebookTensor.zeros(x.shape, format, signed=signed)
    pass_through(x, found)
    assert torch.equal(found.scale, expected.scale)
    if format == "float8" and not signed:  # a second moment never becomes zero
        expected = CodebookTensor.from_float(x.clamp_min(2.0**-9), format, signed=False)
    assert torch.equal(found.codes, expected.codes)


@states
@pytest.mark.parametrize("shape", [(3, 1), (5, 33), (7, 64), (9, 96), (2, 255), (4, 101), (3, 700)])
def test_every_code_is_decoded(format, signed, shape):
    old, new = (rand(*shape, seed=seed) for seed in (0, 1))
    if not signed:
        old, new = old.abs(), new.abs()
    state = CodebookTensor.from_float(old, format, signed=signed)
    codes = torch.arange(state.codes.numel()).mul(101).remainder(256).to(torch.uint8)
    if format == "float8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    codes = codes.view_as(state.codes)
    if format == "4bit" and shape[1] % 2:
        codes[:, -1] &= 15
    state.codes.copy_(codes)
    expected = state.dequantize()
    assert torch.equal(pass_through(new, state), expected)
    other = CodebookTensor.from_float(new, format, signed=signed)
    assert torch.equal(state.scale, other.scale)
    if format == "4bit":  # rounded stochastically: the value above or below
        assert is_beside(state, new).all()
        return
    # the kernel multiplies with the inverse, which may round to the other side of a boundary
    assert (state.codes != other.codes).sum() <= 1


@states
def test_blocks_that_are_not_finite_and_huge_ones(format, signed):
    x = torch.full((6, 256), 0.5)
    x[0, 3], x[1, 5], x[2], x[3], x[4] = float("nan"), float("inf"), 3e38, 1e-38, 0.0
    state = CodebookTensor.zeros(x.shape, format, signed=signed)
    pass_through(x, state)
    expected = CodebookTensor.from_float(x, format, signed=signed)
    assert torch.equal(state.scale.isnan(), expected.scale.isnan())
    kept = ~expected.dequantize().isnan()
    found = state.dequantize()
    assert torch.equal(found.isnan(), ~kept)
    assert ((found - expected.dequantize()).abs()[kept] <= 2.0**-99).all()


def trained(threads=1, formats=("8bit", "4bit", "float8", "bf16")):
    """Weights and states after two steps of every format."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    results = []
    try:
        for state in formats:
            shapes = (300, 257), (512, 256), (64, 64), (77, 101), (9,)
            params = parameters(*shapes, dtype=torch.bfloat16)
            optimizer = optim.AdamW(
                params, lr=1e-2, state=state, bf16_stochastic_round=True, fused=True
            )
            run(optimizer, params, 2)
            for p in params:
                results.append(p.detach())
                for name in ("exp_avg", "exp_avg_sq"):
                    kept = optimizer.state[p][name]
                    coded = isinstance(kept, CodebookTensor)
                    results += kept.inner_tensors().values() if coded else [kept]
    finally:
        torch.set_num_threads(before)
    return results


def test_threads_change_no_bit():
    alone = trained()
    for threads in (2, 5):
        assert all(map(torch.equal, alone, trained(threads=threads)))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="options of x86")
@pytest.mark.parametrize(
    "option", [pytest.param("-mno-avx512f", marks=pytest.mark.exhaustive), "-mno-avx"]
)
def test_other_processors_give_the_same_bits(option, monkeypatch):
    """Without AVX-512, tables are read from memory; without AVX, which AVX-512 needs, vectors are shorter, too."""
    tables = "8bit", "4bit"
    here = trained(formats=tables)
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "NATIVE", ("-march=native", option))
        patch.setattr(
            "lowbit.optim.step.launch.compiled", lambda variant, device: StepKernelCpu(variant)
        )
        host_compiler.library.cache_clear()
        other = trained(formats=tables)
    host_compiler.library.cache_clear()
    assert all(map(torch.equal, here, other))
