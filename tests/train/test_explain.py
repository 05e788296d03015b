"""explain: what it says of each layer, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowbit import LowbitTensor, MixedPrecisionTensor, tracer, train
from tests.train.problems import SCHEMES, linear, outcome, prepared, snr, values
from tests.train.test_training import Block

INT8 = SCHEMES["int8"]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head, self.unused = Block(), linear(10, 64), linear(10, 64)
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(64)

    def forward(self, x):
        return {"logits": self.head(self.norm(self.dropout(self.block(x))))}


@pytest.mark.parametrize("compiled", [False, True])
def test_explain(compiled):
    torch._dynamo.reset()
    model = Mixed()
    float8 = train.Float8MixedPrecision(always=True, backward="e5m2", grad_weight=False)
    train.prepare_(
        model,
        {"*.gate": None, "*.down": float8, "head": None, "*": INT8},
    )
    plain = MixedPrecisionTensor(model.block.gate.weight, train.Int8MixedPrecision())
    model.block.gate.weight = nn.Parameter(plain)
    if compiled:
        model.compile(backend="aot_eager")
    model.head.weight.grad = torch.ones_like(model.head.weight)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    explanation = train.explain(model, values(16, 64))
    layers = explanation.layers
    assert set(layers) == {"block.gate", "block.up", "block.down", "head", "unused"}
    assert explanation.calls == {"scaled_mm int8 torch": 3, "scaled_mm float8 torch": 2}
    assert layers["block.up"].low_bit == ["output", "grad_input", "grad_weight"]
    assert layers["block.up"].sizes == [(16, 128, 64)]
    assert layers["block.down"].low_bit == ["output", "grad_input"]
    assert layers["block.down"].ran["output"] == {"e4m3": 1}
    assert layers["block.down"].ran["grad_input"] == {"e5m2": 1}
    assert layers["block.down"].ran["grad_weight"] == {"float32": 1}
    assert layers["block.gate"].low_bit == [] and "on cpu" in layers["block.gate"].why[0]
    assert layers["head"].why == ["not prepared"]
    assert layers["unused"].why == ["not reached by this input"]
    text = str(explanation)
    assert "2 layers of 5 ran in low bits" in text and "- head" in text and "+ block.up" in text
    # no trace of it
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.block.up.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    for name, b in model.named_buffers():
        assert torch.equal(b, buffers[name]), name
    assert not model.block.up._forward_hooks and tracer.note(1, 1, 1, None) is None


def test_explain_with_checkpointing_and_without_gradients():
    low = prepared(Block(), INT8)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = low

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    explanation = train.explain(Checkpointed(), values(16, 64))
    assert explanation.layers["block.up"].ran["output"] == {"int8": 2}
    assert explanation.layers["block.up"].ran["grad_input"] == {"int8": 1}
    low.requires_grad_(False)
    explanation = train.explain(low, values(16, 64))
    assert explanation.calls == {"scaled_mm int8 torch": 3}


def test_attention_of_torch_runs_in_high_precision_and_the_report_says_so():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    low, x = prepared(layer, INT8), values(2, 16, 64)
    found, expected = outcome(low, x), outcome(layer, x)
    for name, value in expected.items():
        # the gradient of the keys' bias is zero but for rounding
        assert name == "self_attn.in_proj_bias" or snr(found[name], value) > 20, name
    layers = train.explain(low, x).layers
    assert layers["linear1"].low_bit and layers["linear2"].low_bit
    assert layers["self_attn.out_proj"].why == ["not prepared"]


def test_explain_with_a_weight_of_attention_that_was_made_by_hand():
    layer, x = nn.MultiheadAttention(64, 4, batch_first=True), values(2, 16, 64)
    layer.out_proj.weight = nn.Parameter(MixedPrecisionTensor(layer.out_proj.weight, INT8))
    found = train.explain(layer, x, x, x).layers[""]
    assert "own product" in found.why[0] and not found.low_bit


@pytest.mark.parametrize(
    "scheme", [None, INT8, train.Int8Weight()], ids=["plain", "int8", "weight"]
)
def test_explain_runs_no_optimizer_that_waits_in_a_hook(scheme):
    model, x = Block(), values(16, 64)
    if scheme is not None:
        train.prepare_(model, scheme)
    before = [p.detach().clone() for p in model.parameters()]
    ran = []

    def step(p):
        torch.optim.SGD([p], lr=0.1).step()
        p.grad = None
        ran.append(p)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    handle = model.up.weight.register_hook(lambda grad: ran.append(grad))
    train.explain(model, x)
    assert not ran
    for p, own in zip(model.parameters(), before, strict=True):
        value = (p.dequantize(), own.dequantize()) if isinstance(p, LowbitTensor) else (p, own)
        assert torch.equal(*value)
    with pytest.raises((ValueError, RuntimeError)):
        train.explain(model, values(16, 65))
    model(x).sum().backward()
    count = len(before)
    assert len(ran) == count + 1, "afterwards they do"
    handle.remove()
    model(x).sum().backward()
    assert len(ran) == 2 * count + 1


def test_explain_leaves_no_trace_of_a_failure():
    low = prepared(Block(), INT8)
    low.up.weight.grad = torch.ones(128, 64)
    with pytest.raises(ValueError, match="K differs"):
        train.explain(low.up, values(16, 65))
    assert low.up.weight.grad is not None and not low.up._forward_hooks
    assert tracer.note(1, 1, 1, None) is None


class Counting(nn.Module):
    """Puts other tensors in the place of its buffers."""

    def __init__(self):
        super().__init__()
        self.layer = linear(32, 64)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.count, self.last = self.count + 1, x.detach()
        return self.layer(x)


def test_explain_leaves_inputs_and_replaced_buffers_as_they_were():
    model, x = prepared(Counting(), INT8), values(16, 64).requires_grad_()
    buffer, before = model.count, values(16, 64)
    x.grad = before.clone()
    found = train.explain(model, x=x).layers["layer"]
    assert found.ran["grad_input"] and torch.equal(x.grad, before)
    assert model.count is buffer and not buffer.any() and model.last is None
    computed = (x * 2).requires_grad_()
    train.explain(model, computed)
    computed.sum().backward()
    assert torch.equal(x.grad, before + 2), "its own graph is there still, and has not run"
