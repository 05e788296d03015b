"""Low-bit products on a GPU: against float64, compiled, captured, in no more memory than bfloat16 takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit
from lowbit import train
from lowbit.train import Float8BlockMixedPrecision, Float8MixedPrecision, Int8MixedPrecision
from tests.scaled_products import scaled_products
from tests.traced import reasons
from tests.train.problems import linear, outcome, peak_of_a_step, prepared, snr, values

pytestmark = pytest.mark.gpu

SCHEMES = {
    "int8": Int8MixedPrecision(always=True),
    "int8-nearest": Int8MixedPrecision(stochastic_rounding=False, always=True),
    "float8": Float8MixedPrecision(always=True),
    "float8-e5m2": Float8MixedPrecision(backward="e5m2", always=True),
    "float8-tensorwise": Float8MixedPrecision(tensorwise=True, backward="e5m2", always=True),
    "float8-blocks": Float8BlockMixedPrecision(always=True),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


class Block(nn.Module):
    """A gated MLP, 2048 wide."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(2048)
        self.gate, self.up = linear(4096, 2048, bias=False), linear(4096, 2048, bias=False)
        self.down = linear(2048, 4096)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@every_scheme
@every_dtype
def test_as_float64(scheme, dtype):
    layer = linear(2064, 2032, dtype=dtype).cuda()
    x = values(3, 700, 2032, dtype=dtype).cuda()
    upstream = values(3, 700, 2064, seed=3, dtype=dtype).cuda()
    with scaled_products() as calls:
        found = outcome(prepared(layer, scheme), x, upstream)
    assert sum(calls.values()) == 3
    expected = outcome(copy.deepcopy(layer).double(), x.double(), upstream.double())
    for name, value in expected.items():
        assert found[name].dtype is dtype and snr(found[name], value) > 20, name


def test_too_few_rows_run_in_high_precision():
    layer = linear(2048, 2048, dtype=torch.bfloat16).cuda()
    low, x = prepared(layer, Int8MixedPrecision()), values(16, 2048, dtype=torch.bfloat16).cuda()
    with scaled_products() as calls:
        found = low(x)
    assert torch.equal(found, layer(x)) and not calls
    assert "too few rows" in reasons(lowbit.trace(low, x)).pop()


@every_scheme
def test_compiled(scheme):
    torch._dynamo.reset()
    low = prepared(Block().bfloat16(), scheme).cuda()
    x = values(2, 1024, 2048, dtype=torch.bfloat16).cuda()
    upstream = values(2, 1024, 2048, seed=3, dtype=torch.bfloat16).cuda()
    compiled = copy.deepcopy(low)
    compiled.compile(fullgraph=True)
    for _ in range(2):
        with scaled_products() as calls:
            found = outcome(compiled, x, upstream)
        assert sum(calls.values()) == 9
    expected = outcome(low, x, upstream)
    for name, value in expected.items():
        assert snr(found[name], value) > 20, name


@every_scheme
def test_no_more_memory_than_bfloat16(scheme):
    """Forward and backward of compiled blocks; backward keeps half the bytes."""
    peaks = []
    for low in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(*(Block() for _ in range(3))).bfloat16().cuda()
        if low:
            train.prepare_(model, scheme)
        for block in model:
            block.compile()
        x = values(4, 4096, 2048, dtype=torch.bfloat16).cuda()
        peaks.append(peak_of_a_step(model, x))
        del model, x
    assert peaks[1] <= peaks[0], [peak / 2**20 for peak in peaks]


@every_scheme
def test_captured_in_a_cuda_graph(scheme):
    low = prepared(Block().bfloat16(), scheme).cuda()
    x = values(1, 2048, 2048, dtype=torch.bfloat16).cuda()

    def gradients():
        return torch.autograd.grad(low(x).float().square().mean(), list(low.parameters()))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    x.copy_(values(1, 2048, 2048, seed=5, dtype=torch.bfloat16))
    graph.replay()
    for found, expected in zip(captured, gradients(), strict=True):
        assert snr(found, expected) > 40


@every_scheme
def test_trains_with_the_fused_step(scheme):
    model = Block().bfloat16().cuda()
    low = prepared(model, scheme)
    losses = []
    for m in (model, low):
        optimizer = lowbit.optim.AdamW8bit(m.parameters(), lr=1e-3, fused=True)
        found = []
        for step in range(10):
            x = values(1, 2048, 2048, seed=step, dtype=torch.bfloat16).cuda()
            loss = (m(x) - 0.5 * x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert abs(losses[1][-1] - losses[0][-1]) < 0.05 * losses[0][-1]
