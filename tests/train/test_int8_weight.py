"""Int8 weights: unbiased rounding that no sharding changes, every optimizer, resuming, refusals."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import AffineTensor, Int8Weight, Int8WeightTensor, train
from lowbit.optim import eager
from lowbit.rounding import NEXT, first_index, round_at
from lowbit_kernels.scaled_mm import calls
from tests.train.problems import linear, outcome, prepared, relative, values

PRODUCTS = Int8Weight(True, True, True, always=True)


def weight_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, name: str = "w"):
    return Int8WeightTensor(values(*shape, seed=seed, dtype=dtype), Int8Weight(), name)


def same(a: Int8WeightTensor, b: Int8WeightTensor) -> bool:
    pairs = zip(a.inner_tensors().values(), b.inner_tensors().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 64, padding_idx=3)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 50)

    def forward(self, tokens):
        return self.down(F.silu(self.up(self.table(tokens))))


def every_weight(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def tokens(step: int = 0):
    return torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(step))


def train_step(model, optimizer, step):
    out = model(tokens(step))
    loss = F.cross_entropy(out.flatten(0, -2).float(), tokens(step).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# ---- rounding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0.0, 1e-4, 0.01, 0.25, 0.5, 0.75, 0.999, 1.0])
def test_rounding_is_unbiased(distance):
    """The mean of n draws within 5 standard errors, and what rounding may keep back, of the value."""
    n = 2**20
    for low in (-127.0, -3.0, 0.0, 88.0):
        x = torch.full((n,), low + distance)
        mean = round_at(x, torch.arange(n) + first_index(0, "w")).double().mean()
        error = 5 * math.sqrt(distance * (1 - distance) / n) + 2**-16
        assert abs(mean - float(x[0])) <= error + 1e-5 * (low != 0), (low, distance)


def test_an_update_is_unbiased_over_the_weights():
    """A weight moved by a hundredth of a code moves by that on average, whatever the row."""
    t = weight_of(64, 1001)
    before, moved = t.master(), 0.01 * t.scale
    inside = t.codes.abs() < 127
    t.update_(before + torch.where(inside, moved, 0.0))
    change = ((t.master() - before) / t.scale)[inside].double()
    assert (change.abs() < 1.01).all()
    assert abs(change.mean() - 0.01) < 5 * math.sqrt(0.01 / change.numel()) + 2**-16


def test_draws_of_rows_updates_and_names_are_not_alike():
    def draws(name, row, update):
        index = torch.arange(1000) + row * 1000 + first_index(0, name)
        index = index + torch.tensor(update) * NEXT  # modulo 2**64
        return round_at(torch.full((1000,), 0.5), index)

    seen = [draws(*k) for k in [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 0, 2), ("b", 0, 0)]]
    for i, first in enumerate(seen):
        for second in seen[:i]:
            assert abs((first == second).float().mean() - 0.5) < 0.1
    assert first_index(0, "a") != first_index(1, "a")


@given(st.integers(0, 6), st.integers(1, 9), st.floats(1e-30, 1e30))
def test_what_has_not_changed_stays(rows, columns, size):
    """Also after a multiplication of the scales, by which they are no quotient of 127 any more."""
    t = Int8WeightTensor(torch.randn(rows, columns) * size, Int8Weight())
    t.scale_(0.99973)
    before = t.clone()
    t.update_(t.master())
    assert torch.equal(t.codes, before.codes) and torch.equal(t.scale, before.scale)
    assert torch.equal(t.place, before.place + NEXT)


@given(st.data())
def test_any_cut_into_rows_updates_alike(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 40)))
    t, whole = weight_of(*shape), weight_of(*shape)
    new = whole.master() + values(*shape, seed=1) * 0.01
    whole.update_(new)
    edge = data.draw(st.integers(0, shape[0]))
    for part, values_ in ((t[:edge], new[:edge]), (t[edge:], new[edge:])):
        part.update_(values_)
    assert same(t, whole)


def test_rows_of_zeros_nan_infinity_and_extreme_scales():
    x = values(7, 33)
    x[0], x[1, 3], x[2, 4] = 0, math.nan, math.inf
    x[3] *= 1e-34
    x[4] *= 3e35
    x[5] *= 1e-44
    t = weight_of(7, 33)
    t.update_(x)
    found = t.master()
    assert torch.equal(found[0], torch.zeros(33)) and t.scale[0] == 1
    assert found[1:3].isnan().all(), "they stay visible in the whole row"
    for row in (3, 4, 6):
        assert relative(found[row], x[row]) < 0.02
    assert found[5].abs().max() < 1e-37 and found[3:].isfinite().all()
    t.update_(torch.ones(7, 33))
    assert torch.equal(t.master(), torch.ones(7, 33))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_low_precision_lose_no_small_updates(dtype):
    """Far below half of the last bit of the dtype, and of a code."""
    t = weight_of(64, 256, dtype=dtype)
    weight = nn.Parameter(t)
    start = weight.master().detach()
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    for _ in range(50):
        weight.grad = torch.ones(64, 256, dtype=dtype)
        optimizer.step()
    assert weight.dtype is dtype
    change = (weight.master().detach() - start).double().mean()
    # as many steps of a code, each a coin of variance below 1/4
    noise = float(t.scale.mean()) * math.sqrt(50 / 4 / t.numel())
    assert abs(change + 50 * 1e-4) < 5 * noise


# ---- training ------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    **{
        f"torch-{name}": (getattr(torch.optim, name), {})
        for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Rprop")
    },
    "torch-AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "torch-AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "torch-SGD-foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "weight_decay": 0.1}),
    "torch-SGD-fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    **{
        name: (getattr(lowbit.optim, name), {})
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "SGD", "Lion8bit", "AdEMAMix", "Muon")
    },
    "AdamW-fp32": (lowbit.optim.AdamW, {"state": "fp32"}),
    "AdamW-bf16": (lowbit.optim.AdamW, {"state": "bf16"}),
    "AdamW4bit-corrected": (lowbit.optim.AdamW4bit, {"weight_correction": "8bit"}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_follows_the_float32_step_to_a_code(name, dtype):
    """One step of it, from the same weights and gradient."""
    cls, options = OPTIMIZERS[name]
    for shape in ((40, 300), (3, 16, 100)):
        if len(shape) == 3 and name.startswith("torch-Muon"):
            continue
        weight = nn.Parameter(weight_of(*shape, dtype=dtype))
        plain = nn.Parameter(weight.master().detach().clone())
        weight.grad = values(*shape, seed=1, dtype=dtype)
        plain.grad = weight.grad.float()
        for p in (weight, plain):
            cls([p], lr=1e-2, **options).step()
        assert type(weight.detach()) is Int8WeightTensor
        t = weight.detach()
        off = ((t.master() - plain.detach()) / t.scale).abs()
        assert off.max() < (2.1 if name == "torch-NAdam" else 1.1)  # which adds twice
        assert t.dtype is dtype and abs(float(off.double().mean())) < 0.5
        states = (s for s in cls([weight], lr=1e-2, **options).state.values() for s in s.values())
        assert all(not isinstance(s, Int8WeightTensor) for s in states)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW-fp32", "SGD"])
def test_how_a_step_is_cut_changes_no_bit(name, monkeypatch):
    cls, options = OPTIMIZERS[name]
    found = []
    for piece in (2**17, 1000):
        monkeypatch.setattr(eager, "PIECE_CPU", piece)
        weight = nn.Parameter(weight_of(70, 1030))
        optimizer = cls([nn.Parameter(torch.zeros(5)), weight], lr=1e-2, **options)
        for step in range(2):
            weight.grad = values(70, 1030, seed=step)
            optimizer.step()
        found.append(weight.detach())
    assert same(*found)


def test_weight_decay_of_torch_is_exact():
    weight = nn.Parameter(weight_of(24, 100))
    before = weight.detach().clone()
    weight.grad = torch.zeros(24, 100)
    torch.optim.AdamW([weight], lr=1e-3, weight_decay=1e-3).step()
    assert torch.equal(weight.codes, before.codes)
    assert torch.equal(weight.scale, before.scale * (1 - 1e-6))


def test_a_step_of_nothing_changes_nothing():
    """As DCP takes one to make the states."""
    for cls in (torch.optim.AdamW, lowbit.optim.AdamW8bit):
        weight = nn.Parameter(weight_of(24, 100))
        before = weight.detach().clone()
        weight.grad = torch.zeros(24, 100)
        cls([weight], lr=0.0).step()
        assert torch.equal(weight.codes, before.codes) and torch.equal(weight.scale, before.scale)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, lowbit.optim.AdamW8bit])
def test_it_learns_as_plain_weights_do(cls):
    losses = []
    for scheme in (None, Int8Weight(), PRODUCTS):
        model = Model()
        if scheme is not None:
            train.prepare_(model, scheme, every_weight)
        optimizer = cls(model.parameters(), lr=3e-3)
        losses.append([train_step(model, optimizer, step % 4) for step in range(60)][-1])
    assert losses[1] < 1.1 * losses[0] + 0.05 and losses[2] < 1.1 * losses[0] + 0.05


def test_resumed_bit_for_bit():
    def fresh():
        model = Model()
        train.prepare_(model, Int8Weight(), every_weight)
        return model, lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2)

    model, optimizer = fresh()
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train_step(model, optimizer, step)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, optimizer = fresh()
    train_step(again, optimizer, 9)  # places that the checkpoint must overwrite
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        train_step(again, optimizer, step)
    for name, p in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], p), name


def test_replicas_agree_and_seeds_and_names_differ():
    def trained(seed=0, rename=False):
        model = Model()
        train.prepare_(model, Int8Weight(seed=seed), every_weight)
        if rename:
            model.up.weight.put_at("other")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        train_step(model, optimizer, 0)
        return model.up.weight.detach()

    first = trained()
    assert same(first, trained())
    for other in (trained(seed=1), trained(rename=True)):
        assert not torch.equal(first.codes, other.codes)


def test_gradients_accumulate():
    model = Model()
    train.prepare_(model, Int8Weight(), every_weight)
    for step in (0, 1):
        model(tokens(step)).float().square().mean().backward()
    parts = []
    for step in (0, 1):
        twin = Model()
        train.prepare_(twin, Int8Weight(), every_weight)
        twin(tokens(step)).float().square().mean().backward()
        parts.append({n: p.grad for n, p in twin.named_parameters()})
    for name, p in model.named_parameters():
        assert relative(p.grad, parts[0][name] + parts[1][name]) < 1e-6, name


# ---- products ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (2, 3, 7), (1,), (0,)], ids=str)
def test_gradients_against_float64_by_name(shape):
    layer = linear(24, 100)
    model, x = prepared(layer, Int8Weight()), values(*shape, 100, seed=4)
    found = outcome(model, x)
    twin = copy.deepcopy(layer).double()
    with torch.no_grad():
        twin.weight.copy_(model.weight.dequantize())
    expected = outcome(twin, x.double())
    assert found.keys() == expected.keys() == {"output", "input", "weight", "bias"}
    for name, value in expected.items():
        assert found[name].shape == value.shape
        if value.numel() and value.any():
            assert relative(found[name], value) < 1e-6, name


def test_int8_products_run_and_are_counted():
    layer = linear(48, 96)
    x = values(2, 16, 96, seed=4)
    expected = outcome(prepared(layer, Int8Weight()), x)
    model = prepared(layer, PRODUCTS)
    before = calls["int8_scaled_mm"]
    found = outcome(model, x)
    assert calls["int8_scaled_mm"] == before + 3
    for name, value in expected.items():
        assert relative(found[name], value) < 0.03, name
    for name in ("output", "input", "weight"):
        assert not torch.equal(found[name], expected[name])
    with torch.no_grad():
        assert torch.equal(model(x), found["output"])
    assert calls["int8_scaled_mm"] == before + 4


@pytest.mark.parametrize("scheme", [Int8Weight(), PRODUCTS], ids=["weight", "products"])
@pytest.mark.parametrize("how", ["whole", "checkpointed", "compiled"])
def test_compiled_and_checkpointed(scheme, how):
    torch._dynamo.reset()
    model, x = prepared(linear(48, 96), scheme), values(32, 96, seed=4)
    expected = outcome(model, x)
    before = calls["int8_scaled_mm"]
    run = {
        "whole": lambda x: checkpoint(model, x, use_reentrant=True),
        "checkpointed": lambda x: checkpoint(model, x, use_reentrant=False),
        "compiled": torch.compile(model, fullgraph=True, backend="aot_eager"),
    }[how]
    model.zero_grad()
    y = x.clone().requires_grad_()
    out = run(y)
    out.backward(values(*out.shape, seed=3))
    assert (calls["int8_scaled_mm"] > before) == (scheme is PRODUCTS)
    found = {"output": out, "input": y.grad, "weight": model.weight.grad, "bias": model.bias.grad}
    for name, value in expected.items():
        assert relative(found[name].detach(), value) < 1e-5, name


def test_layers_share_one_compiled_graph():
    """What tells them apart are values and not metadata."""
    torch._dynamo.reset()
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    train.prepare_(layers, Int8Weight())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda x, w, b: F.linear(x, w, b), fullgraph=True, backend=counter)
    for layer in layers:
        call(values(4, 32), layer.weight, layer.bias)
    assert counter.frame_count == 1


def test_a_compiled_step_updates_as_the_eager_one():
    torch._dynamo.reset()
    weight, twin = (nn.Parameter(weight_of(24, 100)) for _ in range(2))

    def step(p, g):
        with torch.no_grad():
            p.mul_(0.999).add_(g, alpha=-0.01)

    g = values(24, 100, seed=1)
    torch.compile(step, fullgraph=True, backend="aot_eager")(weight, g)
    step(twin, g)
    assert same(weight.detach(), twin.detach())


def test_an_embedding_gets_dense_gradients():
    model, plain = Model(), Model()
    train.prepare_(model, Int8Weight(), lambda m, n: isinstance(m, nn.Embedding))
    with torch.no_grad():
        plain.table.weight.copy_(model.table.weight.dequantize())
    for m in (model, plain):
        m(tokens()).square().mean().backward()
    assert relative(model.table.weight.grad, plain.table.weight.grad) < 1e-6
    assert not model.table.weight.grad[3].any(), "the padding"


def test_attention_and_experts():
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    x = values(2, 5, 32)
    plain = copy.deepcopy(attention)
    weight = Int8WeightTensor(attention.out_proj.weight.detach(), Int8Weight())
    attention.out_proj.weight = nn.Parameter(weight)
    with torch.no_grad():
        plain.out_proj.weight.copy_(weight.dequantize())
    for m in (attention, plain):
        m(x, x, x)[0].square().mean().backward()
    assert relative(attention.out_proj.weight.grad, plain.out_proj.weight.grad) < 1e-5
    experts = nn.Parameter(weight_of(3, 16, 100))
    F.linear(values(5, 100), experts[1]).sum().backward()
    torch.optim.SGD([experts], lr=0.1).step()
    assert experts.grad[1].any() and not experts.grad[[0, 2]].any()


# ---- the model -----------------------------------------------------------------------------------------------


def test_a_byte_a_parameter():
    t = weight_of(64, 1024)
    assert t.nbytes_stored() == 64 * (1024 + 12)


def test_restored_and_converted():
    model = Model()
    train.prepare_(model, Int8Weight())
    x = tokens()
    expected = model(x)
    plain = copy.deepcopy(model)
    report = train.restore_(plain)
    assert report.converted == ["up.weight", "down.weight"]
    assert type(plain.up.weight.detach()) is torch.Tensor and plain.up.weight.requires_grad
    assert relative(plain(x).detach(), expected) < 1e-6
    train.convert_(model)
    assert type(model.up.weight.detach()) is AffineTensor and not model.up.weight.requires_grad
    assert relative(model(x).detach(), expected) < 1e-6
    with pytest.raises(ValueError, match="none to convert"):
        train.convert_(model)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_saved_as_plain_tensors_and_loaded(tmp_path, suffix):
    model = Model()
    train.prepare_(model, Int8Weight(), every_weight)
    lowbit.save(model, tmp_path / f"model{suffix}")
    other = Model()
    train.prepare_(other, Int8Weight(), every_weight)
    train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), 0)
    other.load_state_dict(lowbit.load(tmp_path / f"model{suffix}"))
    assert same(other.up.weight.detach(), model.up.weight.detach())
    info = lowbit.checkpoint.to_plain(model.state_dict())[1]
    assert info["tensors"]["up.weight"]["kind"] == "Int8WeightTensor"


@pytest.mark.parametrize("assign", [False, True])
def test_plain_weights_load_and_are_rounded(assign):
    plain, model = Model(), Model()
    train.prepare_(model, Int8Weight())
    state = {name: value + 0.5 for name, value in plain.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert type(model.up.weight.detach()) is Int8WeightTensor
    assert relative(model.up.weight.detach().master(), state["up.weight"]) < 0.01
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def test_from_meta():
    with torch.device("meta"):
        model = Model()
    train.prepare_(model, Int8Weight())
    model.to_empty(device="cpu")
    state = Model().state_dict()
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match=r"meta.*locate_"):
        train_step(model, optimizer, 0)
    optimizer.zero_grad()
    model.load_state_dict(state)  # other weights have taken that step
    train.locate_(torch.compile(model))
    train_step(model, optimizer, 0)
    other = Model()
    other.load_state_dict(state)
    train.prepare_(other, Int8Weight())
    train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), 0)
    assert same(other.up.weight.detach(), model.up.weight.detach())


def test_explained():
    model = prepared(linear(48, 96), Int8Weight())
    text = str(train.explain(model, values(4, 96)))
    assert "int8 weight, dequantized" in text


# ---- refusals ------------------------------------------------------------------------------------------------


def test_a_float64_model_is_refused():
    with pytest.raises(ValueError, match=r"float64.*Int8Weight takes"):
        train.prepare_(nn.Linear(4, 4).double(), Int8Weight())


def test_parts_of_rows_are_not_rounded_alone():
    part = weight_of(8, 32)[:, :16]
    with pytest.raises(NotImplementedError, match=r"rows share a scale.*locate_"):
        part.update_(part.master())
    with pytest.raises(NotImplementedError, match=r"rows share a scale"):
        part.copy_(torch.zeros(8, 16))


def test_gathered_and_turned_weights_are_not_updated():
    t = weight_of(8, 32)
    with pytest.raises(NotImplementedError, match="gathered"):
        t._wire().update_(torch.zeros(8, 32))
    with pytest.raises(NotImplementedError, match="transposed"):
        t.t().update_(torch.zeros(32, 8))


def test_offloading_is_refused():
    weight = nn.Parameter(weight_of(8, 32))
    with pytest.raises(TypeError, match="Int8WeightTensor.*lowbit optimizer"):
        lowbit.optim.CPUOffloadOptimizer([weight], torch.optim.AdamW)


@pytest.mark.parametrize("options", [{"output": 1}, {"seed": -1}, {"seed": "a"}])
def test_options_are_checked(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        Int8Weight(**options)
