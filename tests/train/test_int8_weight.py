"""Int8 weights: every optimizer, resuming, saving, converting, refusals."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import lowbit
from lowbit import AffineTensor, Int4Weight, Int8Weight, Int8WeightTensor, train
from lowbit.optim.step import job
from tests.as_sent import as_sent
from tests.train.problems import Model, linear, prepared, relative, tokens, train_step, values

PRODUCTS = Int8Weight(True, True, True, always=True)
INT4_PRODUCTS = Int4Weight(24, output=True, grad_input=True, grad_weight=True, always=True)


def weight_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, name: str = "w"):
    return Int8WeightTensor(values(*shape, seed=seed, dtype=dtype), Int8Weight(), name)


def same(a: Int8WeightTensor, b: Int8WeightTensor) -> bool:
    pairs = zip(a.inner_tensors().values(), b.inner_tensors().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def every_weight(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


# ---- training ------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    **{
        f"torch-{name}": (getattr(torch.optim, name), {})
        for name in (
            *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Rprop"),
            *("Muon", "Adamax", "RAdam", "Adadelta", "ASGD", "LBFGS"),
        )
    },
    "torch-AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "torch-AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "torch-SGD-foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "weight_decay": 0.1}),
    "torch-SGD-fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    **{
        name: (getattr(lowbit.optim, name), {})
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "SGD", "Lion8bit", "AdEMAMix")
    },
    "Muon": (lowbit.optim.Muon, {"stacked": False}),
    "AdamW-fp32": (lowbit.optim.AdamW, {"state": "fp32"}),
    "AdamW-bf16": (lowbit.optim.AdamW, {"state": "bf16"}),
    "AdamW4bit-corrected": (lowbit.optim.AdamW4bit, {"weight_correction": "8bit"}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.mark.cover("values")
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_follows_the_float32_step_to_a_code(name, dtype):
    """One step of this optimizer, from the same weights and gradient."""
    cls, options = OPTIMIZERS[name]
    for shape in ((40, 300), (3, 16, 100)):
        if len(shape) == 3 and name == "torch-Muon":
            continue  # which takes matrices only
        weight = nn.Parameter(weight_of(*shape, dtype=dtype))
        plain = nn.Parameter(weight.master().detach().clone())
        weight.grad = values(*shape, seed=1, dtype=dtype)
        plain.grad = weight.grad.float()
        optimizers = [cls([p], lr=1e-2, **options) for p in (weight, plain)]
        for optimizer in optimizers:
            if name == "torch-LBFGS":
                optimizer.step(lambda: 1.0)
            else:
                optimizer.step()
        assert type(weight.detach()) is Int8WeightTensor
        t = weight.detach()
        off = ((t.master() - plain.detach()) / t.scale).abs()
        assert off.max() < (2.1 if name == "torch-NAdam" else 1.1)  # which adds twice
        assert t.dtype is dtype and abs(float(off.double().mean())) < 0.5
        states = [s for state in optimizers[0].state.values() for s in state.values()]
        assert bool(states) is (name != "torch-SGD")
        assert all(not isinstance(s, Int8WeightTensor) for s in states)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW-fp32", "SGD"])
def test_how_a_step_is_cut_changes_no_bit(name, monkeypatch):
    cls, options = OPTIMIZERS[name]
    found = []
    for piece in (2**17, 1000):
        monkeypatch.setattr(job, "PIECE_CPU", piece)
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


@pytest.mark.parametrize("scheme", [Int8Weight(), Int4Weight(32), Int4Weight(64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_op_and_pytorchs_operations_give_the_same_values(scheme, dtype):
    """GPUs dequantize by the op in eager code; rows of 100 end within a group."""
    layer = nn.Linear(100, 7, bias=False).to(dtype)
    train.prepare_(layer, scheme)
    weight = layer.weight.detach()
    expected = (weight.unpacked() * weight.spread_scale()).to(dtype)
    assert torch.equal(weight.values_again(dtype), expected)
    assert torch.equal(weight.dequantize(), expected)


def test_a_step_without_update_changes_no_code():
    """As DCP takes one to make the states."""
    for cls in (torch.optim.AdamW, lowbit.optim.AdamW8bit):
        weight = nn.Parameter(weight_of(24, 100))
        before = weight.detach().clone()
        weight.grad = torch.zeros(24, 100)
        cls([weight], lr=0.0).step()
        assert torch.equal(weight.codes, before.codes) and torch.equal(weight.scale, before.scale)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, lowbit.optim.AdamW8bit])
def test_low_bit_weights_learn_as_plain_weights_do(cls):
    losses = []
    for scheme in (None, Int8Weight(), PRODUCTS, Int4Weight(24), INT4_PRODUCTS):
        model = Model()
        if scheme is not None:
            train.prepare_(model, scheme, every_weight)
        optimizer = cls(model.parameters(), lr=3e-3)
        losses.append([train_step(model, optimizer, step % 4) for step in range(60)][-1])
    assert max(losses[1:3]) < 1.1 * losses[0] + 0.05 and losses[4] < 1.1 * losses[3] + 0.05


@pytest.mark.parametrize("scheme", [Int8Weight(), INT4_PRODUCTS], ids=["int8", "int4-products"])
def test_resumed_bit_for_bit(scheme):
    def fresh():
        model = Model()
        train.prepare_(model, scheme, every_weight)
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
    train_step(again, optimizer, 9)  # offsets that the checkpoint must overwrite
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
            model.up.weight.set_offsets("other")
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


def test_saved_as_plain_tensors_and_loaded(tmp_path):
    model = Model()
    train.prepare_(model, Int8Weight(), every_weight)
    lowbit.save(model, tmp_path / "model.safetensors")
    other = Model()
    train.prepare_(other, Int8Weight(), every_weight)
    train_step(other, torch.optim.SGD(other.parameters(), lr=0.1), 0)
    other.load_state_dict(lowbit.load(tmp_path / "model.safetensors"))
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
    fresh = Model()
    train.prepare_(fresh, Int8Weight())
    assert torch.equal(
        model.up.weight.place, fresh.up.weight.place
    )  # each row has its own random bits
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def trained_and_fresh():
    """Two prepared models, one of which has made a step, and its state dict."""
    model, fresh = Model(), Model()
    for m in (model, fresh):
        train.prepare_(m, Int8Weight())
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert not torch.equal(model.up.weight.place, fresh.up.weight.place)
    return model, fresh


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("onto_meta", [False, True])
def test_random_offsets_are_part_of_a_checkpoint(assign, onto_meta):
    model, fresh = trained_and_fresh()
    if onto_meta:
        fresh.to("meta")
        if not assign:
            fresh.to_empty(device="cpu")
    fresh.load_state_dict(model.state_dict(), assign=assign)
    for m in (model, fresh):
        train_step(m, torch.optim.SGD(m.parameters(), lr=0.1), 1)
    assert same(model.up.weight.detach(), fresh.up.weight.detach())


def test_random_offsets_survive_moves_and_are_required_after_meta():
    model, fresh = trained_and_fresh()
    offsets = model.up.weight.place.clone()
    model.to_empty(device="cpu")
    assert torch.equal(model.up.weight.place, offsets)
    assert torch.empty_like(model.up.weight).place is not model.up.weight.place
    assert torch.zeros_like(model.up.weight).count_nonzero() == 0
    assert model.up.weight.detach().new_empty((5, 64)).place is None
    # plain values loaded by assignment into a model on meta: in memory, and not placed
    fresh.to("meta")
    fresh.load_state_dict(Model().state_dict(), assign=True)
    assert fresh.up.weight.device.type == "cpu" and fresh.up.weight.place is None
    with pytest.raises(NotImplementedError, match=r"meta.*locate_"):
        train_step(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), 0)
    train.locate_(fresh)
    assert torch.equal(fresh.up.weight.place, weight_of(96, 64, name="up.weight").place)


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


def test_traced():
    model = prepared(linear(48, 96), Int8Weight())
    text = str(lowbit.trace(model, values(4, 96)))
    assert "int8 weight, dequantized" in text


# ---- refusals ------------------------------------------------------------------------------------------------


def test_a_float64_model_is_refused():
    with pytest.raises(ValueError, match=r"float64.*Int8Weight takes"):
        train.prepare_(nn.Linear(4, 4).double(), Int8Weight())


def test_parts_of_rows_are_not_rounded_alone():
    part = weight_of(8, 32)[:, :16]
    with pytest.raises(NotImplementedError, match=r"the scale of a row depends.*locate_"):
        part.update_(part.master())
    with pytest.raises(NotImplementedError, match=r"the scale of a row depends"):
        part.copy_(torch.zeros(8, 16))


def test_gathered_and_turned_weights_are_not_updated():
    t = weight_of(8, 32)
    with pytest.raises(NotImplementedError, match="gathered"):
        as_sent(t).update_(torch.zeros(8, 32))
    with pytest.raises(NotImplementedError, match="transposed"):
        t.t().update_(torch.zeros(32, 8))


def test_offloading_is_refused():
    weight = nn.Parameter(weight_of(8, 32))
    with pytest.raises(TypeError, match=r"Int8WeightTensor.*lowbit optimizer"):
        lowbit.optim.CPUOffloadOptimizer([weight], torch.optim.AdamW)


@pytest.mark.parametrize("kind", [Int8Weight, Int4Weight])
@pytest.mark.parametrize("name", ["stochastic_rounding", "always"])
def test_options_of_products_need_products(name, kind):
    with pytest.raises(
        ValueError,
        match=rf"{kind.__name__}: {name}=True has no effect, because no product.*turn on output",
    ):
        kind(**{name: True})
    scheme = kind(grad_input=True, **{name: True})
    assert getattr(scheme, name) and lowbit.TrainingScheme.from_dict(scheme.to_dict()) == scheme


@pytest.mark.parametrize(
    "kind, stored",
    [(Int8Weight, "int8, a scale a row"), (Int4Weight, "int4, a scale a group of 32")],
)
def test_the_report_names_the_products(kind, stored):
    (entry,) = train.prepare_(linear(48, 96), kind(grad_weight=True, always=True)).entries
    products = "products int8, a scale a row: grad_weight; gradients rounded stochastically"
    assert entry.note == f"{stored}, no high-precision copy; {products}"
    (entry,) = train.prepare_(linear(48, 96), kind()).entries
    assert entry.note == f"{stored}, no high-precision copy"


def test_weights_of_mixed_precision_are_reported_by_convert():
    model = Model()
    train.prepare_(model, {"up": Int8Weight(), "down": train.Int8MixedPrecision(always=True)})
    report = train.convert_(model)
    assert report.converted == ["up.weight"]
    assert "restore_" in report.left["down.weight"]
    train.restore_(model)
    assert type(model.down.weight) is nn.Parameter


@pytest.mark.parametrize("kind", [Int8Weight, Int4Weight])
@pytest.mark.parametrize(
    "options", [{"output": 1}, {"seed": -1}, {"seed": "a"}, {"group_size": 3}, {"group_size": "a"}]
)
def test_options_are_checked(options, kind):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        kind(**options)
