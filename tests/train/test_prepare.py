"""prepare_ and restore_: prepared weights, reports, refusals, state dicts, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowbit
from lowbit import MixedPrecisionTensor, train
from lowbit.layers.prepared import Linear
from lowbit.schemes.matrix_units import missing_units
from lowbit.schemes.training import TrainingScheme
from lowbit.train import BitNet, Float8MixedPrecision, Int8MixedPrecision, Int8Weight
from lowbit_kernels.runtime import nvrtc
from tests.train.problems import SCHEMES, every_scheme, linear, outcome, prepared, values

INT8 = SCHEMES["int8"]
INT8_BESIDE = replace(INT8, beside=4.0)


class Model(nn.Module):
    """An embedding tied to the head, and two layers between."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.up, self.down = linear(64, 32), linear(32, 64)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(self.up(x).relu()))


def tokens():
    return torch.arange(24).view(2, 12) % 50


def test_the_report_and_the_parameters():
    model = Model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    report = train.prepare_(model, {"head": None, "*.weight": INT8})
    assert report.converted == ["up.weight", "down.weight"]
    assert report.left == {
        "embedding.weight": "an embedding: a pattern that names it converts it",
        "head.weight": "no scheme for this name",
    }
    assert "int8, a scale a row: output, grad_input, grad_weight" in str(report)
    weight = model.up.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, MixedPrecisionTensor)
    assert weight.requires_grad and weight.master().data_ptr() == before["up.weight"]
    assert weight.scheme == INT8


def test_a_tied_weight_stays_tied_and_looks_its_rows_up_exactly():
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    report = train.prepare_(model, INT8)
    assert model.head.weight is model.embedding.weight
    assert "embedding.weight" in report.converted and "head.weight" in report.converted
    assert torch.equal(model.embedding(tokens()), plain.embedding(tokens()))
    model(tokens()).square().sum().backward()
    plain(tokens()).square().sum().backward()
    error = model.head.weight.grad - plain.head.weight.grad
    assert error.norm() < 0.05 * plain.head.weight.grad.norm()


def test_an_embedding_alone_is_left():
    model = nn.Sequential(nn.Embedding(50, 32), linear(64, 32))
    report = train.prepare_(model, INT8, lambda module, name: True)
    assert report.left == {"0.weight": "an embedding looks rows up and multiplies nothing"}


def test_weights_too_small_to_gain_are_left_alone():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 8), nn.Linear(64, 64))
    report = train.prepare_(model, Int8MixedPrecision())
    least = Int8MixedPrecision.least.weight
    assert report.converted == ["0.weight"]
    assert (
        report.left["1.weight"] == f"too small to gain: N·K / (N + K) of 8 x 4096 is below {least}"
    )
    assert "64 x 64" in report.left["2.weight"]
    small = nn.Linear(64, 64)
    report = train.prepare_(small, Float8MixedPrecision())
    assert not report.converted and "too small to gain" in report.left["weight"]
    assert type(small) is nn.Linear and type(small.weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"nothing to convert.*not selected"):
        train.prepare_(small, Float8MixedPrecision(), lambda module, name: False)


class Attention(nn.Module):
    """A query layer, its smaller siblings, and others with as many inputs."""

    def __init__(self):
        super().__init__()
        self.early = nn.Linear(2048, 512)
        self.query, self.key, self.value = (nn.Linear(2048, n) for n in (2048, 512, 512))
        self.right_after = nn.Linear(2048, 512)
        self.few_rows, self.few_columns = nn.Linear(2048, 8), nn.Linear(512, 2048)
        self.late = nn.Linear(2048, 512)
        self.in_turn = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 512))
        self.gate, self.up = nn.Linear(2048, 2048), nn.Linear(4096, 256)  # of another input


LARGE = ["query.weight", "in_turn.0.weight", "gate.weight"]
SMALL = ["key.weight", "value.weight"]


def test_a_small_weight_shares_the_input_of_its_larger_sibling():
    model = Attention()
    report = train.prepare_(model, Int8MixedPrecision())
    assert report.converted == [LARGE[0], *SMALL, *LARGE[1:]]  # in the order of the model
    left = ("early", "right_after", "few_rows", "few_columns", "late", "in_turn.1", "up")
    assert list(report.left) == [f"{name}.weight" for name in left]
    assert all(why.startswith("too small to gain: N·K") for why in report.left.values())
    assert str(report).count("input shared with a larger layer") == len(SMALL)
    key, query = model.key.weight.scheme, model.query.weight.scheme
    assert key == replace(query, beside=4.0) and key.input_rounding == query.input_rounding
    assert TrainingScheme.from_dict(key.to_dict()) == key
    assert copy.deepcopy(model).value.weight.scheme == key


class ByName(nn.Module):
    """Siblings by name, in another order, with a layer between them that has as many inputs."""

    def __init__(self):
        super().__init__()
        self.k_proj = nn.Linear(2048, 512)
        self.norm = nn.LayerNorm(2048)
        self.q_proj = nn.Linear(2048, 2048)
        self.o_proj = nn.Linear(2048, 2048)
        self.v_proj = nn.Linear(2048, 512)


def test_siblings_by_name_share_their_input_in_any_order():
    model = ByName()
    report = train.prepare_(model, Int8MixedPrecision())
    assert report.converted == [f"{name}_proj.weight" for name in ("k", "q", "o", "v")]
    beside = replace(model.q_proj.weight.scheme, beside=4.0)
    shared = [n for n, p in model.named_parameters() if getattr(p, "scheme", None) == beside]
    assert shared == ["k_proj.weight", "v_proj.weight"]


def test_the_rule_by_rows_beside_a_larger_layer(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc, "capability", lambda device: (9, 0))
    gpu, scheme = torch.device("cuda", 0), Int8MixedPrecision(beside=4)
    least = scheme.least
    enough = max(least.rows_beside(512, 2048), least.rows(2048, 2048))
    assert 8192 < enough <= 16384 and 4096 < least.rows_beside(256, 4096) <= 16384  # measured
    why = str(scheme.plain_because(gpu, enough - 1, 512, 2048))
    assert why == f"too few rows to gain beside a larger layer: {enough - 1} is below {enough}"
    assert scheme.plain_because(gpu, enough, 512, 2048) is None
    # with fewer rows the larger layer is in high precision, and this one would pay for the input
    near = Int8MixedPrecision(beside=2048 / 1900)
    assert near._rows_beside(1900, 2048) == least.rows(2048, 2048) > least.rows_beside(1900, 2048)
    for n, k in ((256, 2048), (256, 1536)):  # too small; tensor parallelism made the larger one so
        assert "too small to gain: N·K" in str(scheme.plain_because(gpu, 2**30, n, k))


@pytest.mark.parametrize(
    "schemes",
    [
        {"query": None, "*": Int8MixedPrecision()},
        {"query": Float8MixedPrecision(), "*": Int8MixedPrecision()},
        Int8MixedPrecision(output=False),
        Int8MixedPrecision(grad_weight=False),
        train.Float8BlockMixedPrecision(),
    ],
    ids=["plain", "other scheme", "no output", "no gradient", "blocks"],
)
def test_a_small_weight_after_a_layer_that_does_not_quantize_its_input_is_left_alone(schemes):
    model = Attention()
    report = train.prepare_(model, schemes)
    assert "too small to gain: N·K" in report.left["key.weight"]
    assert type(model.key.weight) is nn.Parameter


def test_a_small_weight_of_attentions_own_product_is_left_alone():
    class Own(nn.MultiheadAttention):
        def __init__(self):
            super().__init__(1536, 4)
            self.extra = nn.Linear(1536, 6144)
            self.out_proj = self._modules.pop("out_proj")  # after the larger one

    report = train.prepare_(Own(), Int8MixedPrecision())
    assert report.converted == ["extra.weight"]
    assert report.left["out_proj.weight"] == "nn.MultiheadAttention has its own product"


def test_the_search_for_a_larger_layer_computes_no_weight():
    """The attribute of a parametrized weight would take a step of the power iteration."""
    model = Attention()
    model.query = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(2048, 2048))
    before = copy.deepcopy(model.query.state_dict())
    report = train.prepare_(model, Int8MixedPrecision())
    assert "key.weight" in report.left
    assert all(torch.equal(v, before[k]) for k, v in model.query.state_dict().items())


def test_a_lazy_layer_beside_a_small_one_is_refused_by_name():
    model = nn.Module()
    model.lazy, model.small = nn.LazyLinear(2048), nn.Linear(2048, 8)
    with pytest.raises(ValueError, match=r"lazy.weight has no shape yet"):
        train.prepare_(model, Int8MixedPrecision())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beside": True}, TypeError, "a number or None, got True"),
        ({"beside": "4"}, TypeError, "a number or None, got '4'"),
        ({"beside": 0.5}, ValueError, "1 or more; got 0.5"),
        ({"beside": float("nan")}, ValueError, "1 or more; got nan"),
        ({"beside": float("inf")}, ValueError, "1 or more; got inf"),
        ({"beside": 4, "output": False}, ValueError, "beside=4 has no effect"),
        ({"beside": 4, "grad_weight": False}, ValueError, "beside=4 has no effect"),
    ],
)
def test_beside_refuses_what_has_no_meaning(options, error, message):
    with pytest.raises(error, match=message):
        Int8MixedPrecision(**options)


def test_blocks_share_no_input():
    with pytest.raises(ValueError, match="Float8BlockMixedPrecision: beside=2 has no effect"):
        train.Float8BlockMixedPrecision(beside=2)


def test_a_weight_beside_a_larger_one_is_gathered_in_16_bits():
    beside, alone = INT8_BESIDE, INT8
    half, single = (torch.zeros(512, 2048, dtype=d) for d in (torch.bfloat16, torch.float32))
    assert not beside.gathers_codes(half) and beside.gathers_codes(single)
    assert alone.gathers_codes(half) and alone.gathers_codes(single)


@pytest.mark.parametrize("scheme", [INT8, BitNet()], ids=["int8", "bitnet"])
def test_attentions_own_product_is_left_alone(scheme):
    """Weights that are reported as converted have products in low bits."""
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    report = train.prepare_(model, scheme)
    assert report.converted == ["linear1.weight", "linear2.weight"]
    assert report.left == {
        "self_attn.in_proj_weight": "no low-bit product for MultiheadAttention",
        "self_attn.out_proj.weight": "nn.MultiheadAttention has its own product",
    }
    model(values(2, 5, 32)).sum().backward()
    assert model.linear1.weight.grad.any()
    assert not train.prepare_(nn.MultiheadAttention(32, 4), scheme).converted


@pytest.mark.parametrize("scheme", [INT8, Int8Weight(), BitNet()], ids=["int8", "weight", "bitnet"])
def test_every_owner_of_a_tied_weight_counts(scheme):
    model = Model()
    model.embedding.max_norm = 1.0
    report = train.prepare_(model, scheme)
    assert report.converted == ["up.weight", "down.weight"]
    assert report.left["head.weight"] == "its max_norm rewrites rows at every lookup"
    model(tokens()).sum().backward()


@pytest.mark.parametrize("scheme", [INT8, Int8Weight(), BitNet()], ids=["int8", "weight", "bitnet"])
def test_accumulated_gradients_are_kept(scheme):
    model, whole = Model(), Model()
    whole.load_state_dict(model.state_dict())
    model(tokens()).square().mean().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    train.prepare_(model, scheme)
    assert isinstance(model.up.weight, lowbit.LowbitTensor)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name]), name
    model(tokens()).square().mean().backward()
    twice = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert not torch.equal(twice["up.weight"], before["up.weight"])
    train.restore_(model)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, twice[name]), name


@pytest.mark.parametrize(
    "scheme",
    [*SCHEMES.values(), Int8Weight(True, True, True, always=True)],
    ids=[*SCHEMES, "weight"],
)
def test_a_model_cast_to_float64_afterwards_raises_with_the_way_out(scheme):
    model = prepared(linear(24, 64), scheme).double()
    with pytest.raises(ValueError, match=r"layer in torch.float64.*takes torch.float32.*restore_"):
        model(values(5, 64).double())
    model.float()(values(5, 64)).sum().backward()
    train.restore_(model.double())
    assert model(values(5, 64).double()).dtype is torch.float64


def test_the_rule_by_rows():
    scheme, gpu = Int8MixedPrecision(), torch.device("cuda")
    enough = scheme.least.rows(4096, 4096)
    assert "too few rows" in str(scheme.plain_because(gpu, enough - 1, 4096, 4096))
    assert "on cpu" in str(scheme.plain_because(torch.device("cpu"), enough, 4096, 4096))
    assert "too small" in str(scheme.plain_because(gpu, 2**30, 1024, 1024))
    # what was measured: these gain, and lose
    assert scheme.least.rows(2048, 2048) <= 16384 and scheme.least.rows(4096, 4096) <= 8192
    assert scheme.least.rows(2048, 2048) > 1024 and scheme.least.rows(1024, 1024) > 4096
    assert INT8.plain_because(torch.device("cpu"), 1, 1, 1) is None
    assert INT8.plain_because(torch.device("cpu"), 0, 1, 1) is not None


@pytest.mark.parametrize("capability,fits", [((7, 5), 0), ((8, 0), 1), ((8, 6), 1), ((9, 0), 2)])
def test_gpus_without_units_are_refused(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc, "capability", lambda device: capability)
    gpu = torch.device("cuda", 0)
    rows = 2**20
    for scheme, has in ((Int8MixedPrecision(), fits >= 1), (Float8MixedPrecision(), fits == 2)):
        if has:
            assert scheme.plain_because(gpu, rows, 4096, 4096) is None
            continue
        name = type(scheme).__name__
        with pytest.raises(RuntimeError, match=rf"{name} on cuda:0.*below.*restore_.*always=True"):
            scheme.plain_because(gpu, rows, 4096, 4096)
        assert scheme._refusal_of(gpu) is not None
    assert INT8._refusal_of(gpu) is None


def test_the_compiler_takes_the_answer_for_a_constant():
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert marked.__dict__ == missing_units.__dict__


def test_other_devices_are_refused():
    assert missing_units(torch.device("mps"), (8, 0)) == "it is not an NVIDIA GPU"
    assert missing_units(torch.device("meta"), (8, 0)) is None
    with pytest.raises(RuntimeError, match="not an NVIDIA GPU"):
        Int8MixedPrecision().plain_because(torch.device("xpu"), 2**20, 4096, 4096)


def test_bad_weights_are_refused_and_nothing_changes():
    for bad, message in (
        (torch.ones(8, 8, dtype=torch.int32), "int32"),
        (torch.full((8, 8), float("nan")), "NaN or infinite"),
        (torch.ones(8, 8, dtype=torch.float64), "float64.*float32, torch.bfloat16"),
    ):
        model = nn.Sequential(linear(8, 8), nn.Linear(8, 8, dtype=torch.float32))
        model[1].weight = nn.Parameter(bad, requires_grad=False)
        with pytest.raises(ValueError, match=rf"1\.weight.*{message}"):
            train.prepare_(model, INT8)
        assert type(model[0]) is nn.Linear and type(model[0].weight) is nn.Parameter
        assert not isinstance(model[0].weight, MixedPrecisionTensor)


def test_prepared_twice_and_by_the_wrong_call():
    model = prepared(linear(8, 16), INT8)
    with pytest.raises(ValueError, match=r"prepared for training already.*restore_"):
        train.prepare_(model, INT8)
    with pytest.raises(ValueError, match=r"prepared for training already.*restore_"):
        lowbit.quantize_(model, lowbit.Int8WeightOnly())
    with pytest.raises(TypeError, match=r"training scheme.*Int8MixedPrecision"):
        train.prepare_(linear(8, 16), lowbit.Int8WeightOnly())
    with pytest.raises(TypeError, match=r"Int4WeightOnly"):
        lowbit.quantize_(linear(8, 16), INT8)
    with pytest.raises(ValueError, match="chose no weight"):
        train.prepare_(linear(8, 16), {"up": INT8})
    qat = linear(8, 16)
    lowbit.qat.prepare_(qat, lowbit.Int8WeightOnly())
    with pytest.raises(ValueError, match="prepared for QAT already"):
        train.prepare_(qat, INT8)


@pytest.mark.parametrize(
    "make,error,message",
    [
        (lambda: Int8MixedPrecision(False, False, False), ValueError, "changes nothing"),
        (lambda: Int8MixedPrecision(output=1), TypeError, "output must be True or False, got 1"),
        (lambda: Int8MixedPrecision(always="yes"), TypeError, "always must be"),
        (lambda: Int8MixedPrecision(seed=-1), ValueError, "seed must be 0 to"),
        (lambda: Int8MixedPrecision(seed=1.0), TypeError, "seed must be an int"),
        (lambda: Float8MixedPrecision(backward="int8"), ValueError, "'e4m3' or 'e5m2', got 'int8'"),
        (lambda: Float8MixedPrecision(tensorwise=None), TypeError, "tensorwise must be"),
    ],
)
def test_schemes_validate_themselves(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_schemes_as_json():
    for scheme in SCHEMES.values():
        assert TrainingScheme.from_dict(scheme.to_dict()) == scheme
        assert isinstance(hash(scheme), int)
    for bad in ({}, {"name": "Int4"}, {"name": "Int8MixedPrecision", "bits": 3}, []):
        with pytest.raises(ValueError, match="training scheme"):
            TrainingScheme.from_dict(bad)


def test_restored():
    model = Model()
    kinds = {name: type(m) for name, m in model.named_modules()}
    train.prepare_(model, INT8)
    assert isinstance(model.up, Linear) and str(model.up).startswith("Linear(in_features=32")
    memory = model.up.weight.master().data_ptr()
    report = train.restore_(model)
    assert set(report.converted) == {
        "embedding.weight",
        "head.weight",
        "up.weight",
        "down.weight",
    }
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert model.head.weight is model.embedding.weight and type(model.up.weight) is nn.Parameter
    assert model.up.weight.requires_grad and model.up.weight.data_ptr() == memory
    assert not model.up._state_dict_hooks and not model.up._load_state_dict_pre_hooks
    with pytest.raises(ValueError, match=r"no weights that lowbit\.train\.prepare_ prepared"):
        train.restore_(model)
    train.prepare_(model, SCHEMES["float8"])
    assert model(tokens()).isfinite().all()


def test_frozen_weights_stay_frozen():
    model = linear(8, 16)
    model.weight.requires_grad_(False)
    train.prepare_(model, INT8)
    assert not model.weight.requires_grad
    train.restore_(model)
    assert not model.weight.requires_grad


# ---- state dicts --------------------------------------------------------------------------------------------


def test_the_state_dict_is_the_plain_models():
    model = Model()
    expected = model.state_dict()
    train.prepare_(model, INT8)
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert type(value) is torch.Tensor and torch.equal(value, expected[name])
        assert value.data_ptr() == expected[name].data_ptr(), "live memory, as ever"
    assert model.state_dict(keep_vars=True)["up.weight"] is model.up.weight
    nested = nn.ModuleDict({"inner": model})
    assert type(nested.state_dict()["inner.up.weight"]) is torch.Tensor


@pytest.mark.parametrize("assign", [False, True])
def test_plain_weights_load_into_a_prepared_model(assign):
    source, model = Model(), Model()
    train.prepare_(model, INT8)
    assert model.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert isinstance(model.up.weight, MixedPrecisionTensor)
    assert torch.equal(model.up.weight.master(), source.up.weight)
    assert (model.up.weight.master().data_ptr() == source.up.weight.data_ptr()) == assign
    plain = Model()
    plain.load_state_dict(model.state_dict(), assign=assign)
    assert type(plain.up.weight) is nn.Parameter
    assert torch.equal(plain.up.weight, source.up.weight)


def test_saved_as_plain_weights(tmp_path):
    model, fresh = Model(), Model()
    train.prepare_(model, INT8)
    lowbit.save(model, tmp_path / "model.safetensors")
    loaded = lowbit.load(tmp_path / "model.safetensors")
    assert {type(t) for t in loaded.values()} == {torch.Tensor}
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh.up.weight, model.up.weight.master())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["down.weight"], model.down.weight.master())


def test_a_model_built_on_meta():
    source = Model()
    with torch.device("meta"):
        model = Model()
    train.prepare_(model, Float8MixedPrecision(always=True))
    model.load_state_dict(source.state_dict(), assign=True)
    model.head.weight = model.embedding.weight
    assert model.up.weight.device.type == "cpu"
    expected = prepared(source, SCHEMES["float8"])(tokens())
    assert torch.equal(model(tokens()), expected)
    with torch.device("meta"):
        other = linear_on_meta()
    other.to_empty(device="cpu").load_state_dict(source.up.state_dict())
    assert torch.equal(other.weight.master(), source.up.weight)


def linear_on_meta():
    layer = nn.Linear(32, 64)
    train.prepare_(layer, INT8)
    return layer


def test_copied_and_pickled_whole():
    model = Model()
    train.prepare_(model, INT8)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert twin.head.weight is twin.embedding.weight and twin.up.weight.scheme == INT8
        assert twin.up.weight.master().data_ptr() != model.up.weight.master().data_ptr()
        assert torch.equal(twin(tokens()), model(tokens()))
        assert type(twin.state_dict()["up.weight"]) is torch.Tensor
        train.restore_(twin)
        assert not twin.up._state_dict_hooks


@every_scheme
def test_to_another_dtype_casts_the_weight_itself(scheme):
    model = prepared(linear(24, 64), scheme)
    exact = model.weight.master().clone()
    model.to(torch.bfloat16)
    assert model.weight.dtype is model.weight.master().dtype is torch.bfloat16
    assert torch.equal(model.weight.master(), exact.bfloat16())
    found = outcome(model, values(16, 64, dtype=torch.bfloat16))
    assert found["weight"].dtype is torch.bfloat16
    assert model.state_dict()["weight"].dtype is torch.bfloat16
