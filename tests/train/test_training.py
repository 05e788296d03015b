"""Training with low-bit products: optimizers, accumulation, checkpointing, torch.compile, resuming."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import Int8MixedPrecision, Int8Weight, MixedPrecisionTensor, train
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.runtime import launches
from tests.scaled_products import scaled_products
from tests.train.problems import (
    SCHEMES,
    every_scheme,
    linear,
    outcome,
    prepared,
    relative,
    snr,
    values,
)

INT8 = SCHEMES["int8"]


class Block(nn.Module):
    """64 → 128 → 64 with a residual, and a norm before."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = linear(128, 64, bias=False), linear(128, 64)
        self.down = linear(64, 128)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


def batches(count, rows=32):
    """Inputs, and targets that a linear map of them gives."""
    target = values(64, 64, seed=77) / 8
    for step in range(count):
        x = values(rows, 64, seed=100 + step)
        yield x, x @ target


def step(model, optimizer, x, y):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.cover("values")
@every_scheme
@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, torch.optim.SGD, lowbit.optim.AdamW4bit, lowbit.optim.Muon],
    ids=lambda cls: f"{cls.__module__.split('.')[0]}-{cls.__name__}",
)
def test_learns_as_in_high_precision(scheme, make):
    model = Block()
    low = prepared(model, scheme)
    losses = []
    for m in (model, low):
        optimizer = make(m.parameters(), lr=1e-2)
        losses.append([step(m, optimizer, x, y) for x, y in batches(25)])
    plain, found = losses
    assert plain[-1] < 0.97 * plain[0]
    assert abs(found[-1] - plain[-1]) < 0.05 * plain[-1]


def test_the_optimizer_writes_to_the_weight_itself():
    model = Block()
    low = prepared(model, INT8)
    memory = low.up.weight.master().data_ptr()
    for m in (model, low):
        optimizer = lowbit.optim.AdamW8bit(m.parameters(), lr=1e-2)
        for p in m.parameters():
            p.grad = values(1, p.numel(), seed=p.numel()).view(p.shape)
        optimizer.step()
    assert isinstance(low.up.weight, MixedPrecisionTensor)
    assert low.up.weight.master().data_ptr() == memory
    for name, value in low.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@every_scheme
def test_gradients_accumulate(scheme):
    low = prepared(Block(), scheme)
    parts = [values(8, 64, seed=s) for s in range(3)]
    grads = []
    for x in parts:
        low.zero_grad()
        low(x).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in low.named_parameters()})
    low.zero_grad()
    for x in parts:
        low(x).square().sum().backward()
    for name, p in low.named_parameters():
        total = torch.stack([g[name] for g in grads]).sum(0)
        assert relative(p.grad, total) < 1e-6, name


UPDATES = {
    "mul_": lambda w: w.mul_(2),
    "copy_": lambda w: w.copy_(torch.ones(64, 64)),
    "foreach": lambda w: torch._foreach_mul_([w], 2),
    "item": lambda w: w.__setitem__(0, torch.ones(64)),
    "row": lambda w: w[0].fill_(1),
    "last-row": lambda w: w[-1].fill_(1),
    "detached-row": lambda w: w.detach()[3].fill_(1),
    "unbind": lambda w: w.unbind()[5].mul_(2),
    "slice": lambda w: w[1:].zero_(),
    "chunk": lambda w: w.chunk(2)[1].zero_(),
    "init": nn.init.normal_,
}


@pytest.mark.cover("values")
@every_scheme
@pytest.mark.parametrize("update", UPDATES)
def test_backward_after_an_update_of_the_weight_is_refused(scheme, update):
    """As of plain weights: it would give the input the gradient of other weights than the forward pass had."""
    for again in (False, True):  # the second time of a copy of the layer, cast and cast back
        low = prepared(linear(64, 64), scheme)
        if again:
            low(values(16, 64)).sum().backward()
            low = copy.deepcopy(low).double().float()
        y = low(values(16, 64).requires_grad_())
        with torch.no_grad():
            UPDATES[update](low.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_counts_writes_to_rows_keeps_no_memory():
    weight = prepared(linear(64, 64), Int8MixedPrecision(always=True)).weight
    counter = weight.row_counter()
    assert counter is weight.row_counter() and counter.untyped_storage().nbytes() == 0
    with torch.no_grad():
        weight[5].zero_()
    assert counter._version == weight._version == 1 and weight._use_count() == 1
    assert copy.deepcopy(weight).row_counter() is not counter


@every_scheme
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(scheme, reentrant):
    low = prepared(Block(), scheme)
    x = values(2, 16, 64)
    expected = outcome(low, x)

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    with scaled_products() as calls:
        found = outcome(Checkpointed(low), x)
    assert sum(calls.values()) == 12, "three products a layer, and the outputs once more"
    for name, value in expected.items():
        other = found[f"inner.{name}"] if name not in ("output", "input") else found[name]
        assert torch.equal(other, value), name


def test_resumed_to_the_bit():
    scheme = train.Float8MixedPrecision(always=True, stochastic_rounding=True, backward="e5m2")
    whole = prepared(Block(), scheme)
    optimizer = lowbit.optim.AdamW8bit(whole.parameters(), lr=1e-2)
    data = list(batches(6))
    for x, y in data[:3]:
        step(whole, optimizer, x, y)
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for x, y in data[3:]:
        step(whole, optimizer, x, y)
    file.seek(0)
    saved = torch.load(file)
    resumed = prepared(Block(), scheme)
    resumed.load_state_dict(saved["model"])
    optimizer = lowbit.optim.AdamW8bit(resumed.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved["optimizer"])
    for x, y in data[3:]:
        step(resumed, optimizer, x, y)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


# ---- torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,backend",
    [
        ("int8", "aot_eager_decomp_partition"),
        ("float8-tensorwise", "aot_eager"),
        pytest.param("int8", "inductor", marks=pytest.mark.exhaustive),
        pytest.param("float8", "aot_eager_decomp_partition", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_without_graph_breaks(name, backend):
    """A graph for training quantizes the input that gate and up share once. One without gradients does not merge equal
    operations."""
    torch._dynamo.reset()
    low = prepared(Block(), SCHEMES[name])
    x = values(2, 16, 64)
    expected = outcome(low, x)
    compiled = copy.deepcopy(low)
    compiled.compile(fullgraph=True, backend=backend)
    for _ in range(2):
        with scaled_products() as calls, launches.counted() as ran:
            found = outcome(compiled, x)
        assert sum(calls.values()) == 9
        for key, value in expected.items():
            assert relative(found[key], value) < 1e-5, key
    if backend != "aot_eager":
        forward, backward = 2 + 3, 3 + 3  # inputs, gradients, weights
        assert sum(n for (op, _), n in ran.items() if op == "quantize_rowcol") == forward + backward


@pytest.mark.cover("values")
@pytest.mark.parametrize("rows", [(2, 90), (130, 900)], ids=["few", "many"])
@pytest.mark.parametrize(
    "scheme",
    [
        train.Int8MixedPrecision(always=True),
        SCHEMES["float8"],
        Int8Weight(*[True] * 3, always=True),
    ],
    ids=["int8", "float8", "int8-weight"],
)
def test_a_compiled_step_is_compiled_once_for_other_token_counts(scheme, rows):
    """The first step for its own size, all others by the graph of the second."""
    torch._dynamo.reset()
    low = prepared(Block(), scheme)
    low.compile(fullgraph=True, backend="aot_eager")
    optimizer = lowbit.optim.AdamW8bit(low.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        count = int(torch.randint(*rows, (1,), generator=generator))
        x = values(2, count, 64, seed=number)
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            step(low, optimizer, x, x)


def test_compiled_with_stochastic_rounding_and_other_sizes():
    torch._dynamo.reset()
    scheme = train.Int8MixedPrecision(always=True, stochastic_rounding=True)
    low = prepared(Block(), scheme)
    compiled = copy.deepcopy(low)
    compiled.compile(fullgraph=True, backend="aot_eager")
    for rows in (16, 24, 40):
        found, expected = outcome(compiled, values(rows, 64)), outcome(low, values(rows, 64))
        for key, value in expected.items():
            assert relative(found[key], value) < 0.03, key


def test_a_compiled_step_trains():
    torch._dynamo.reset()
    model, low = Block(), prepared(Block(), INT8)
    low.compile(fullgraph=True, backend="aot_eager")
    losses = []
    for m in (model, low):
        optimizer = lowbit.optim.AdamW8bit(m.parameters(), lr=1e-2)
        losses.append([step(m, optimizer, x, y) for x, y in batches(10)])
    assert abs(losses[1][-1] - losses[0][-1]) < 0.05 * losses[0][-1]


# ---- stochastic rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "float8", "float8-e5m2", "float8-tensorwise"])
def test_stochastic_rounding_has_the_mean_of_the_exact_gradient(name):
    """Over seeds. One draw is off by at most a step; the mean of n by its share of 1 / sqrt(n)."""

    layer, x, upstream = linear(24, 64), values(32, 64), values(32, 24, seed=3)
    exact_operands = replace(SCHEMES[name], output=False)
    total: dict[str, torch.Tensor] = {}
    count = 100
    for seed in range(count):
        scheme = replace(exact_operands, stochastic_rounding=True, seed=seed)
        found = outcome(prepared(layer, scheme), x, upstream)
        for key in ("input", "weight"):
            total[key] = total.get(key, 0) + found[key].double() / count
    reference = nearest_operands(layer, exact_operands, x, upstream)
    for key, mean in total.items():
        one = relative(found[key], reference[key])
        assert one > 1e-4, "it does round"
        assert relative(mean, reference[key]) < 2 * one / count**0.5, key


def nearest_operands(layer, scheme, x, upstream):
    """Gradients with only the gradient of the output exact."""

    def rounded(t):
        """Along rows."""
        codes, scale, _, _ = quantize_rowcol(
            t.detach(), scheme.forward_format, columns=False, tensorwise=scheme.one_scale
        )
        return codes.double()[:, : t.shape[1]] * scale.double()[:, None]

    grad = upstream.double()
    return {"input": grad @ rounded(layer.weight), "weight": grad.t() @ rounded(x.t()).t()}


def test_int8_gradients_are_rounded_stochastically_by_default_and_float8_to_nearest():
    layer, x, upstream = linear(24, 64), values(32, 64), values(32, 24, seed=3)
    for name, default in (("int8", True), ("float8", False)):
        scheme = replace(SCHEMES[name], stochastic_rounding=None)
        found = outcome(prepared(layer, scheme), x, upstream)
        for choice in (True, False):
            explicit = replace(scheme, stochastic_rounding=choice)
            other = outcome(prepared(layer, explicit), x, upstream)
            assert torch.equal(found["input"], other["input"]) is (choice is default), name
            assert torch.equal(found["weight"], other["weight"]) is (choice is default), name
    with pytest.raises(
        TypeError, match="stochastic_rounding must be True, False or None, got 'no'"
    ):
        train.Int8MixedPrecision(stochastic_rounding="no")


def test_stochastic_rounding_is_the_same_on_every_replica_and_differs_by_gradient():
    scheme = train.Int8MixedPrecision(always=True, stochastic_rounding=True)
    one, two = prepared(Block(), scheme), prepared(Block(), scheme)
    x = values(32, 64)
    found, other = outcome(one, x), outcome(two, x)
    for name, value in found.items():
        assert torch.equal(other[name], value), name
    layer = prepared(linear(24, 64), scheme)
    upstream = values(16, 24, seed=3)
    errors = []
    for size in (1.0, 1.0 + 2**-20):
        grad = outcome(layer, values(16, 64), upstream * size)["input"]
        errors.append(grad / size - upstream @ layer.weight.master())
    correlation = (errors[0] * errors[1]).sum() / errors[0].norm() / errors[1].norm()
    assert correlation < 0.9, "other draws"


# ---- penalties and precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [INT8, train.Int8Weight(), train.BitNet()], ids=str)
def test_penalties_on_a_weight_have_a_gradient(scheme):
    weight = prepared(linear(24, 64), scheme).weight
    own = weight.master().detach().clone().requires_grad_()
    for penalty in (
        lambda w: w.abs().sum(),
        lambda w: w.pow(2).mean(),
        lambda w: w.norm(),
        lambda w: (w * w).sum(),
    ):
        (found,) = torch.autograd.grad(penalty(weight), weight)
        (expected,) = torch.autograd.grad(penalty(own), own)
        assert relative(found, expected) < 1e-6


def test_signal_to_noise_of_a_whole_block():
    model, x = Block(), values(64, 64)
    expected = outcome(model, x)
    for name, scheme in SCHEMES.items():
        for key, value in outcome(prepared(model, scheme), x).items():
            assert snr(value, expected[key]) > 20, (name, key)
