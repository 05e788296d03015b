"""Which weights quantize_ converts, by filters, patterns and ties; and its report."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.tensor import joined

INT4, INT8 = lb.Int4WeightOnly(8), lb.Int8WeightOnly()
BOTH = (nn.Linear, nn.Embedding)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """A small language model; with `tied`, one weight for the first and the last layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def kinds(model: nn.Module) -> dict[str, str]:
    """Every name of every 2-D parameter → the format of the weight."""
    found = model.named_parameters(remove_duplicate=False)
    return {
        name: str(p.spec.format) if isinstance(p, lb.LowbitTensor) else "plain"
        for name, p in found
        if p.ndim == 2
    }


def test_every_linear_by_default() -> None:
    model = Model()
    report = lb.quantize_(model, INT4)
    layers = [f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")]
    assert report.converted == [*layers, "head.weight"]
    assert report.left == {"embedding.weight": "an embedding: a pattern that names it converts it"}
    assert kinds(model)["embedding.weight"] == "plain"
    assert all(kinds(model)[name] == "Int(bits=4, signed=True)" for name in report.converted)
    assert not any(model.get_parameter(name).requires_grad for name in report.converted)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 20)


def test_printed() -> None:
    model = Model(tied=True)
    model.layers[0].up = nn.Linear(13, 24)
    report = lb.quantize_(
        model,
        {
            "layers.1.*": None,
            "layers.0.up": lb.Int8DynamicActivationInt4Weight(8),
            "*": lb.Int4WeightOnly(8),
        },
        lambda m, name: isinstance(m, BOTH),
    )
    lines = str(report).splitlines()
    low = 20 * 16 + 24 * 13 + 16 * 24
    total = sum(p.numel() for p in model.parameters())
    assert lines[0] == (
        f"4 weights converted, 2 left alone; {100 * low / total:.1f}% of {total:,} parameters are now in low bits and "
        f"take {100 * report.low_bit_nbytes / report.nbytes:.1f}% of the bytes"
    )
    assert sorted(line.split()[1] for line in lines[1:-1]) == sorted(
        [*report.converted, *report.left]
    )
    assert "8 vectors (biases, norms)" in lines[-1]
    rows = {line.split()[1]: line for line in lines[1:-1]}
    assert rows["layers.0.up.weight"].split()[:3] == ["+", "layers.0.up.weight", "24x13"]
    assert "padded to 24x16" in rows["layers.0.up.weight"]
    assert "activation Int(bits=8, signed=True), PerToken()" in rows["layers.0.up.weight"]
    assert "PerGroup(group_size=8), symmetric_no_clipping_err" in rows["embedding.weight"]
    assert "tied to embedding.weight" in rows["head.weight"]
    assert rows["layers.1.up.weight"].startswith("  - ")
    assert "no scheme for this name" in rows["layers.1.up.weight"]
    assert "padded" not in rows["layers.0.down.weight"]


def test_the_first_matching_pattern_decides() -> None:
    model = Model()
    lb.quantize_(
        model,
        {
            "head": None,
            r"re:layers\.(0|5)\.up": lb.IntxWeightOnly(3, 8),
            "layers.*.down.weight": lb.Float8WeightOnly(),
            "layers.[01].*": INT8,
        },
    )
    assert kinds(model) == {
        "embedding.weight": "plain",
        "layers.0.up.weight": "Int(bits=3, signed=True)",
        "layers.0.down.weight": str(lb.Float8()),
        "layers.1.up.weight": "Int(bits=8, signed=True)",
        "layers.1.down.weight": str(lb.Float8()),
        "head.weight": "plain",
    }


def test_a_name_without_a_pattern_is_left_and_reported() -> None:
    report = lb.quantize_(Model(), {"layers.0.*": INT4})
    assert report.left["head.weight"] == "no scheme for this name"
    assert report.converted == ["layers.0.up.weight", "layers.0.down.weight"]


def test_regular_expressions_match_whole_names() -> None:
    with pytest.raises(ValueError, match=r"\['re:layers'\] chose no weight"):
        lb.quantize_(Model(), {"re:layers": INT4, "head": INT8})


@pytest.mark.parametrize(
    ("patterns", "unused"),
    [
        ({"*": INT4, "head": INT8}, r"\['head'\]"),
        ({"lm_head": None, "*": INT4}, r"\['lm_head'\]"),
        ({"embed*": INT4, "*": INT4}, r"\['embed\*'\]"),
        ({"a": INT4, "b*": INT4}, r"\['a', 'b\*'\]"),
    ],
    ids=["shadowed", "misspelt", "not named", "two"],
)
def test_a_pattern_that_chooses_nothing_is_refused(patterns, unused) -> None:
    model = Model()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=f"{unused} chose no weight.*names end like"):
        lb.quantize_(model, patterns)
    assert all(model.get_parameter(name) is p for name, p in before.items())


FLOWS = {
    "quantize_": (lb.quantize_, INT8),
    "qat": (lb.qat.prepare_, INT8),
    "train": (lb.train.prepare_, lb.train.Int8Weight()),
}
LEFT_ALONE = {
    "not selected by the default": ({"embedding": None}, None),
    "not selected by the filter": (
        {"head": None},
        lambda m, n: isinstance(m, nn.Linear) and n != "head",
    ),
    "by the weight's name": ({"head.weight": None}, lambda m, n: "layers" in n),
    "a norm": ({"layers.*.norm": None}, None),
    "a bias": ({"layers.0.up.bias": None}, None),
    "by an expression": ({"re:embed.*": None, "re:.*norm": None}, None),
}
"""Patterns that leave alone what stays in high precision anyway, and the filter."""


@pytest.mark.parametrize("case", LEFT_ALONE.values(), ids=LEFT_ALONE)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_none_for_a_layer_that_stays_as_it_is(flow, case) -> None:
    (convert, scheme), (patterns, choose) = flow, case
    model, plain = Model(), Model()
    report = convert(model, {**patterns, "*": scheme}, choose)
    assert report.converted == convert(plain, scheme, choose).converted


def test_none_for_a_weight_in_low_bits() -> None:
    model = Model()
    lb.quantize_(model, {"head": INT8, "*": None})
    report = lb.quantize_(model, {"head": None, "*": INT4})
    assert len(report.converted) == 4 and "already in low bits" in report.left["head.weight"]


@pytest.mark.parametrize(
    "patterns",
    [{"*": INT8, "head": None}, {"layers.0": None, "*": INT8}, {"head2": None, "*": INT8}],
    ids=["shadowed", "a block, whose layers have other names", "misspelt"],
)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_none_that_leaves_nothing_alone_is_refused(flow, patterns) -> None:
    convert, scheme = flow
    given = {name: own and scheme for name, own in patterns.items()}
    with pytest.raises(ValueError, match="chose no weight"):
        convert(Model(), given)


def test_none_for_a_second_name_of_a_converted_weight() -> None:
    """The filter takes the embedding alone, and the head is the same weight."""
    with pytest.raises(ValueError, match="are one tied weight, but the patterns give them"):
        lb.quantize_(Model(tied=True), {"head": None, "*": INT8}, lambda m, n: n == "embedding")


def test_a_filter_sees_modules_and_names() -> None:
    model, seen = Model(), []

    def choose(module: nn.Module, name: str) -> bool:
        seen.append((name, module))
        return name.endswith("up") or name == "embedding"

    report = lb.quantize_(model, INT8, choose)
    assert seen == list(model.named_modules())
    assert report.converted == ["embedding.weight", "layers.0.up.weight", "layers.1.up.weight"]
    assert set(report.left) == {"layers.0.down.weight", "layers.1.down.weight", "head.weight"}


def test_a_filter_that_takes_all_leaves_parameters_without_product() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv3d(2, 2, 3), nn.Bilinear(4, 4, 2), nn.LSTM(8, 8))
    report = lb.quantize_(model, INT8, lambda m, name: True)
    assert report.converted == ["0.weight"]
    assert report.left["1.weight"] == "no low-bit product for Conv3d"
    assert report.left["2.weight"] == "no low-bit product for Bilinear"
    assert report.left["3.weight_ih_l0"] == "no low-bit product for LSTM"
    model[1](model[0](torch.randn(1, 2, 8, 8, 8)))


def test_a_subclass_of_linear_is_converted() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(16, 8))
    exact = model(torch.ones(1, 16))
    assert lb.quantize_(model, INT8).converted == ["0.weight"]
    assert torch.allclose(model(torch.ones(1, 16)), exact, rtol=0.02, atol=0.02)


def test_a_computed_weight_is_reported() -> None:
    """A parametrized layer has no weight to convert. The report must say so."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    report = lb.quantize_(model, INT8)
    assert report.converted == ["1.weight"]
    assert "computed from other parameters" in report.left["0.weight"]
    assert "0.weight" in str(report)


def test_quantizing_more_of_a_model_later() -> None:
    model = Model()
    lb.quantize_(model, {"head": INT8})
    weight = model.head.weight
    report = lb.quantize_(model, INT4)
    assert report.left["head.weight"] == "already in low bits (AffineTensor)"
    assert model.head.weight is weight
    assert len(report.converted) == 4
    with pytest.raises(
        ValueError, match=r"nothing to convert.*already in low bits \(AffineTensor\)"
    ):
        lb.quantize_(model, INT4)


def test_a_module_under_two_names_is_converted_once() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(16, 16))})
    report = lb.quantize_(model, INT4)
    assert report.converted == ["a.weight", "b.1.weight"]
    assert model["a"] is model["b"][0] is shared and isinstance(shared.weight, lb.AffineTensor)


# ---- ties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", [BOTH, nn.Linear, nn.Embedding], ids=["both", "head", "embed"])
def test_a_tied_weight_is_converted_in_all_its_modules(select) -> None:
    model = Model(tied=True)
    report = lb.quantize_(model, INT4, lambda m, name: isinstance(m, select))
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, lb.AffineTensor)
    assert {"embedding.weight", "head.weight"} <= set(report.converted)
    assert not {"embedding.weight", "head.weight"} & set(report.left)
    assert sum(e.note == "tied to embedding.weight" for e in report.entries) == 1
    assert len(report.entries) == len({e.fqn for e in report.entries})
    tokens = torch.tensor([[1, 2, 3]])
    table = model.embedding.weight.dequantize()
    assert torch.equal(model.embedding(tokens), table[tokens])
    assert torch.equal(model.head(table), table @ table.t())


@pytest.mark.parametrize(
    "patterns",
    [{"embedding": INT4, "*": INT8}, {"head": None, "*": INT4}, {"embedding": None, "*": INT4}],
    ids=["two schemes", "head left", "embedding left"],
)
def test_one_weight_with_two_schemes_is_refused(patterns) -> None:
    model = Model(tied=True)
    weight = model.head.weight
    with pytest.raises(ValueError, match=r"embedding.weight and head.weight are one tied weight"):
        lb.quantize_(model, patterns, lambda m, name: isinstance(m, BOTH))
    assert model.head.weight is weight and model.embedding.weight is weight


def test_a_pattern_for_one_of_the_tied_names_is_enough() -> None:
    model = Model(tied=True)
    report = lb.quantize_(model, {"head": INT4}, lambda m, name: isinstance(m, BOTH))
    assert set(report.converted) == {"embedding.weight", "head.weight"}


def test_ties_survive_copies_casts_and_state_dicts() -> None:
    model = Model(tied=True)
    lb.quantize_(model, INT4)
    tokens = torch.tensor([[3, 1, 4]])
    y = model(tokens)

    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight is not model.head.weight
    assert torch.equal(copied(tokens), y)

    state = copied.state_dict()
    other = Model(tied=True)
    lb.quantize_(other, INT4)
    other.load_state_dict(state)
    assert other.head.weight is other.embedding.weight and torch.equal(other(tokens), y)
    fresh = Model(tied=True)
    fresh.load_state_dict(joined(state), assign=True)
    assert torch.equal(fresh(tokens), y)
    assert fresh.head.weight.codes.data_ptr() == fresh.embedding.weight.codes.data_ptr()

    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu")):
        cast(copied)
        assert copied.head.weight is copied.embedding.weight
    assert copied.head.weight.dtype is torch.float16


def test_one_parameter_under_two_names_of_one_module_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Parameter(torch.randn(16, 16))

    model = Twice()
    report = lb.quantize_(model, INT8, lambda m, name: True)
    assert model.first is model.second and isinstance(model.first, lb.AffineTensor)
    assert report.converted == ["first", "second"]


def test_parameters_without_low_bit_product_are_reported() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.Linear(8, 4))
    report = lb.quantize_(model, lb.Int8WeightOnly(), lambda module, name: True)
    assert report.left == {"0.weight": "no low-bit product for ConvTranspose2d"}
    with pytest.raises(ValueError, match="no low-bit product for Conv3d"):
        lb.quantize_(nn.Sequential(nn.Conv3d(3, 8, 3)), lb.Int8WeightOnly(), lambda m, n: True)


def test_an_embedding_whose_rows_would_share_scales_is_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    scheme = lb.Scheme(lb.Spec(lb.Int(4), lb.PerBlock(8, 8)))
    report = lb.quantize_(model, scheme, lambda module, name: True)
    assert report.converted == ["1.weight"] and "blocks of 8" in report.left["0.weight"]
    assert model(torch.tensor([[3, 1]])).shape == (1, 2, 16)


def test_the_report_states_the_cost_of_padding() -> None:
    report = lb.quantize_(nn.Linear(16, 8), lb.Int4WeightOnly(group_size=128))
    assert "padded to 8x128, 8.00 times the weights" in str(report)
