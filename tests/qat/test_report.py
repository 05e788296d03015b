"""qat.report: what each weight's rounding costs, measured without changing the model, and plans made of it."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import qat
from lowbit.convert import Costs, PlanChoice
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme

INT2, INT3, INT8 = lb.IntxWeightOnly(2, 32), lb.IntxWeightOnly(3, 32), lb.Int8WeightOnly(32)
DYNAMIC = lb.Int8DynamicActivationInt4Weight(32)


class Experts(nn.Module):
    """Two experts in 3-D parameters, each token through the first or the second by its position."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 48, 32) / 6)
        self.down = nn.Parameter(torch.randn(2, 32, 48) / 7)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(2, -1, x.shape[-1])
        hidden = F.gelu(torch.bmm(rows, self.up.transpose(-2, -1)))
        return torch.bmm(hidden, self.down.transpose(-2, -1)).view(x.shape)


class Model(nn.Module):
    """A tied embedding, linears, experts, dropout, a buffer that counts calls, and a linear that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(53, 32)
        self.first = nn.Linear(32, 96)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(96, 32)
        self.experts = Experts()
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, 53, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.table(tokens)
        x = x + self.second(self.drop(F.gelu(self.first(x))))
        return self.head(x + self.experts(x))


def every(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding | Experts)


def batches(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(53, (4, 6), generator=generator) for _ in range(count)]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def rows_of(report: qat.SensitivityReport) -> dict[str, qat.Sensitivity]:
    return {row.weight: row for row in report.rows}


@pytest.mark.parametrize("scheme", [INT3, DYNAMIC], ids=["int3", "int8xint4"])
def test_each_loss_is_that_of_a_model_with_this_weight_prepared(scheme) -> None:
    model, data = Model().eval(), batches()
    found = qat.report(model, data, scheme, every, loss=loss)
    assert found.measure == "loss"
    assert found.baseline == pytest.approx(sum(loss(model, b).item() for b in data) / 2, rel=1e-6)
    rows = rows_of(found)
    assert list(rows) == [
        "table.weight", "first.weight", "second.weight", "experts.up", "experts.down", "unused.weight",
    ]  # fmt: skip
    assert rows["table.weight"].tied == ("head.weight",)
    for name in rows:
        alone = copy.deepcopy(model)
        pattern = "re:table.weight|head.weight" if name == "table.weight" else name
        qat.prepare_(alone, {pattern: scheme}, every)
        with torch.no_grad():
            expected = sum(loss(alone, b).item() for b in data) / 2
        assert rows[name].loss == expected
        assert rows[name].reached == (name != "unused.weight")
    qat.prepare_(model, scheme, every)
    with torch.no_grad():
        assert found.together == (sum(loss(model, b).item() for b in data) / 2,)


def test_numbers_of_a_weight_and_its_activation() -> None:
    model, data = Model().eval(), batches(1)
    inputs = []
    model.first.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    found = qat.report(model, data, {"first": DYNAMIC, "second": INT2}, loss=loss)
    rows = rows_of(found)
    w = model.first.weight.detach()
    rounded = copy.deepcopy(model)
    lb.quantize_(rounded, {"first": DYNAMIC, "second": INT2})
    noise = (w - rounded.first.weight.dequantize()).square().sum()
    assert rows["first.weight"].weight_snr == pytest.approx(
        10 * math.log10(w.square().sum() / noise), abs=1e-4
    )
    x = inputs[0].detach()
    noise = (x - DYNAMIC.activation.fake_quantize(x)).square().sum()
    assert rows["first.weight"].activation_snr == pytest.approx(
        10 * math.log10(x.square().sum() / noise), abs=1e-4
    )
    assert rows["second.weight"].activation_snr is None
    for name in ("first", "second"):
        row = rows[f"{name}.weight"]
        assert row.nbytes == getattr(rounded, name).weight.nbytes_stored()
        assert row.plain_nbytes == 4 * 32 * 96
    codes, *_ = INT2.weight.unclamped_codes(model.second.weight.detach(), torch.float32)
    clipped = ((codes > 1) | (codes < -2)).float().mean().item()
    assert rows["second.weight"].clipped == pytest.approx(clipped) and clipped > 0
    assert rows["first.weight"].format == "int4-g32-int8-token"


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("scales", [None, "present", "learned"])
def test_the_model_stays_as_it_was(training, scales) -> None:
    model = Model().train(training)
    model.second.eval()
    if scales is not None:
        qat.prepare_(model, DYNAMIC, every, scales=scales)
    loss(model, batches(1)[0]).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    kinds = [type(module) for module in model.modules()]
    order = [list(module._parameters) for module in model.modules()]
    random = torch.get_rng_state()
    scheme = DYNAMIC if scales is None else None
    qat.report(model, batches(), scheme, every, loss="kl")
    assert torch.equal(torch.get_rng_state(), random)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)
    now = dict(model.named_parameters(remove_duplicate=False))
    assert all(now[name] is p for name, p in parameters.items()) and list(now) == list(parameters)
    assert all(torch.equal(parameters[name].grad, grad) for name, grad in grads.items())
    assert [type(module) for module in model.modules()] == kinds
    assert [list(module._parameters) for module in model.modules()] == order
    assert model.training == training and model.first.training == training
    assert not model.second.training


def test_the_model_stays_as_it_was_after_an_error() -> None:
    model = Model().train()
    weight, seen = model.first.weight, []

    def failing(model: nn.Module, tokens: Tensor) -> Tensor:
        seen.append(type(model.first.weight))
        if seen[-1] is lb.FakeQuantizedTensor or len(seen) > 3:
            raise RuntimeError("stop")
        return loss(model, tokens)

    with pytest.raises(RuntimeError, match="stop"):
        qat.report(model, batches(), INT3, every, loss=failing)
    assert model.first.weight is weight and model.training and model.calls == 0


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_a_prepared_model_is_measured_by_its_own_schemes(scales) -> None:
    plain, model, data = Model().eval(), Model().eval(), batches()
    qat.prepare_(model, INT3, every, scales=scales)
    expected = qat.report(plain, data, INT3, every, loss=loss)
    found = qat.report(model, data, loss=loss)
    with torch.no_grad():
        together = sum(loss(model, b).item() for b in data) / 2
    assert found.baseline == expected.baseline and found.together == (together,)
    assert list(rows_of(found)) == list(rows_of(expected))
    if scales == "present":
        assert found == expected
    if scales == "learned":
        with torch.no_grad():
            model.first.weight_scale.mul_(0.5)
        changed = rows_of(qat.report(model, data, loss=loss))
        assert changed["first.weight"].clipped > rows_of(found)["first.weight"].clipped
        assert changed["first.weight"].weight_snr < rows_of(found)["first.weight"].weight_snr
        assert changed["second.weight"] == rows_of(found)["second.weight"]


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize(
    "candidates",
    [[lb.Int4WeightOnly(16), INT3], lb.Int8DynamicActivationInt8Weight(), {"*": INT3}],
    ids=["several", "with-activations", "by-pattern"],
)
def test_a_prepared_model_is_measured_by_other_schemes(candidates, scales) -> None:
    plain, model, data = Model().eval(), Model().eval(), batches()
    qat.prepare_(model, lb.Int4WeightOnly(32), every, scales=scales)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert qat.report(model, data, candidates, every, loss=loss) == qat.report(
        plain, data, candidates, every, loss=loss
    )
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_measures_without_a_loss() -> None:
    class Output(dict):
        __getattr__ = dict.get

    class Wrapped(Model):
        def forward(self, tokens, labels=None):
            logits = super().forward(tokens)
            given = {"logits": logits}
            if labels is not None:
                given["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return Output(given)

    data = batches(1)
    wrapped = Wrapped().eval()
    wrapped.load_state_dict(Model().state_dict())
    with_labels = [{"tokens": data[0], "labels": data[0]}]
    assert (
        qat.report(wrapped, with_labels, INT2).baseline
        == qat.report(Model(), data, INT2, loss=loss).baseline
    )
    kl = qat.report(wrapped, [(data[0],)], INT2)
    assert kl.measure == "kl" and kl == qat.report(Model(), data, INT2, loss="kl")
    error = qat.report(Model(), data, INT2)
    assert error.measure == "error" and error.baseline == 0
    model = Model().eval()
    rounded = copy.deepcopy(model)
    lb.quantize_(rounded, {"first": INT2}, scales="minmax")
    with torch.no_grad():
        y, q = model(data[0]), rounded(data[0])
    expected = ((y - q).square().sum() / y.square().sum()).item()
    assert rows_of(error)["first.weight"].loss == pytest.approx(expected, rel=1e-5)
    p, log_q = y.log_softmax(-1), q.log_softmax(-1)
    expected = F.kl_div(
        log_q.flatten(0, 1), p.flatten(0, 1), reduction="batchmean", log_target=True
    )
    assert rows_of(kl)["first.weight"].loss == pytest.approx(expected.item(), rel=1e-4)


def test_batches_are_read_once_and_passes_counted() -> None:
    done: list[int] = []
    qat.report(Model(), iter(batches(3)), INT3, progress=done.append)
    assert done == [*range(1, 3 * 7 + 1)]  # six weights, a tied one and experts among them, and all


def test_batches_of_a_stream() -> None:
    """A loader of an IterableDataset has no length, and says so when it is asked."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(batches(3))

    streamed = torch.utils.data.DataLoader(Stream(), batch_size=None)
    found, expected = (qat.report(Model(), given, INT3) for given in (streamed, batches(3)))
    assert [row.weight for row in found.rows] == [row.weight for row in expected.rows]


def test_the_report_is_text_json_and_a_picture(tmp_path) -> None:
    found = qat.report(Model(), batches(), [INT8, INT2], every, loss=loss)
    lines = str(found).splitlines()
    assert len(lines) == 2 + 2 * 6 and "table.weight = head.weight" in str(found)
    assert "not reached" in next(line for line in lines if line.startswith("unused"))
    found.write(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read == found.to_dict() and len(read["rows"]) == len(found.rows)
    pytest.importorskip("matplotlib")
    found.draw(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flow", [qat.prepare_, lb.quantize_], ids=["prepare", "quantize"])
@pytest.mark.parametrize("chosen", [None, every], ids=["linears", "all"])
def test_a_plan_drives_the_flows(flow, chosen) -> None:
    model = Model()
    found = qat.report(model, batches(), [INT8, INT3, INT2], chosen, loss=loss)
    plan = found.plan(5.0)
    assert plan.bits <= 5.0 and set(plan.values()) <= {INT8, INT3, INT2}
    report = flow(model, plan, chosen)
    assert len(report.converted) == sum(1 + len(row.tied) for row in rows_of(found).values())
    if flow is lb.quantize_:
        weights = {id(p): p for p in model.parameters() if isinstance(p, lb.LowbitTensor)}.values()
        bits = 8 * sum(w.nbytes_stored() for w in weights) / sum(w.numel() for w in weights)
        assert bits == pytest.approx(plan.bits)


def test_a_plan_may_leave_weights_in_high_precision() -> None:
    found = qat.report(Model(), batches(), INT2, lambda m, n: isinstance(m, nn.Linear), loss=loss)
    plan = found.plan(20.0)
    assert None in plan.values() and INT2 in plan.values()
    with pytest.raises(ValueError, match=r"smallest choices take 3 bits a weight"):
        found.plan(2.9)
    assert set(found.plan(3.0).values()) == {INT2}
    assert set(found.plan(40.0, high_precision=False).values()) == {INT2}


def test_siblings_take_one_scheme() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.q_proj, model.k_proj = nn.Linear(32, 32), nn.Linear(32, 16)
    model.forward = lambda x: model.q_proj(x).sum(-1, True) + model.k_proj(x)
    found = qat.report(model, [torch.randn(4, 32)], [INT8, INT3, INT2])
    assert {choice.unit for choice in found.costs().choices} == {"q_proj|k_proj|v_proj"}
    plan = found.plan(4.0)
    assert list(plan) == ["q_proj.weight", "k_proj.weight"] and set(plan.values()) == {INT3}


def test_more_sensitive_weights_get_more_bits() -> None:
    choices = [
        PlanChoice(name, {name: scheme}, nbytes, loss * factor)
        for name, factor in (("a", 1.0), ("b", 10.0))
        for scheme, nbytes, loss in ((INT8, 100, 0.0), (INT2, 25, 1.0))
    ]
    assert Costs(tuple(choices), 200, "loss").plan(5.0) == {"a": INT2, "b": INT8}


def test_names_with_signs_of_patterns() -> None:
    model = nn.Sequential()
    model.add_module("a[0]", nn.Linear(32, 32))
    model.add_module("a0", nn.Linear(32, 32))
    plan = qat.report(model, [torch.randn(2, 32)], [INT8, INT2]).plan(6.0)
    assert len(plan) == 2 and set(plan.values()) == {INT8, INT2}
    assert len(qat.prepare_(model, plan).converted) == 2


@pytest.mark.parametrize("bits", ["4", None, True])
def test_bits_that_are_no_number_are_refused(bits) -> None:
    found = qat.report(nn.Sequential(nn.Linear(32, 32)), [torch.randn(2, 32)], [INT8, INT2])
    with pytest.raises(TypeError, match=r"bits must be a number|give one budget of bits"):
        found.plan(bits)


class InDict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": super().forward(x)}


def test_errors() -> None:
    model = Model()
    with pytest.raises(ValueError, match="no prepared weights"):
        qat.report(model, batches())
    with pytest.raises(ValueError, match="no batches"):
        qat.report(model, [], INT3)
    with pytest.raises(ValueError, match="no schemes"):
        qat.report(model, batches(), [])
    with pytest.raises(ValueError, match="'kl', 'error' or None, got 'mse'"):
        qat.report(model, batches(), INT3, loss="mse")
    with pytest.raises(TypeError, match="model must be"):
        qat.report([], batches(), INT3)
    with pytest.raises(TypeError, match="a dict without loss, logits or a tensor"):
        qat.report(InDict(), [torch.randn(2, 32)], INT3)
    with pytest.raises(TypeError, match=r"gave a tensor of shape \(2, 32\); accepted: a scalar"):
        qat.report(nn.Linear(32, 32), [torch.randn(2, 32)], INT3, loss=lambda m, b: m(b))
    for loss in (None, lambda m, b: m(b).sum()):
        bad = [torch.randn(2, 32), torch.full((2, 32), math.nan)]
        with pytest.raises(ValueError, match=r"batch 1: the (error|loss) .* high precision is nan"):
            qat.report(nn.Linear(32, 32), bad, INT3, loss=loss)
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        qat.report(nn.Linear(32, 32), [torch.empty(2, 32)], INT3)


def test_zero_and_exact_weights() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight.zero_()
    spec = Spec(Int(8), PerGroup(32))
    found = qat.report(model, [torch.randn(2, 32)], Scheme(spec))
    assert rows_of(found)["0.weight"].weight_snr == 200 and rows_of(found)["0.weight"].clipped == 0
    json.loads(json.dumps(found.to_dict()), parse_constant=pytest.fail)


def test_low_precision_models() -> None:
    model = Model().bfloat16()
    found = qat.report(model, batches(), [INT3, DYNAMIC], every, loss=loss)
    assert all(math.isfinite(row.loss) and row.weight_snr > 5 for row in found.rows)
    assert all(row.plain_nbytes == 2 * row.elements for row in found.rows)
