"""Reports: weights that were left alone, shares of the model, and second weights in a layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from tests.inference.test_report import INT4, INT8, Model


class Conv1D(nn.Module):
    """GPT-2's: a linear whose weight is [K, N]."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(k, n))
        self.bias = nn.Parameter(torch.zeros(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 16))


class Mixed(nn.Module):
    """A linear and experts, and what only a pattern that names it or a filter takes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.conv = nn.Conv2d(3, 8, 3)
        self.c_attn = Conv1D(16, 48)
        self.experts = Experts()
        self.position = nn.Parameter(torch.randn(10, 16))
        self.norm = nn.LayerNorm(16)
        self.embedding = nn.Embedding(20, 16)


def test_weights_left_alone_are_reported_with_their_share() -> None:
    model = Mixed()
    report = lb.quantize_(model, INT8)
    own = "a pattern that names it converts it"
    assert report.converted == ["proj.weight", "experts.up"]
    assert report.left == {
        "position": f"a parameter of a Mixed: {own}",
        "conv.weight": f"a convolution: {own}",
        "c_attn.weight": f"a parameter of a Conv1D: {own}",
        "embedding.weight": f"an embedding: {own}",
    }
    total = sum(
        p.nbytes_stored() if isinstance(p, lb.LowbitTensor) else p.nbytes
        for p in model.parameters()
    )
    sizes = {e.fqn: e.nbytes for e in report.entries}
    assert report.nbytes == total == sum(sizes.values()) + report.vector_nbytes
    assert sizes["experts.up"] == 4 * 32 * 16 + 4 * 4 * 32 and report.vectors == 5
    rows = {line.split()[1]: line for line in str(report).splitlines()[1:-1]}
    for name, size in sizes.items():
        assert f" {100 * size / total:.1f}% of bytes " in rows[name], name
    low = sum(sizes[name] for name in report.converted)
    assert report.low_bit_nbytes == low
    head = str(report).splitlines()[0]
    assert head.endswith(f"are now in low bits and take {100 * low / total:.1f}% of the bytes")


def test_a_tied_weight_counts_once() -> None:
    model = Model(tied=True)
    report = lb.quantize_(model, {"layers.*": INT4})
    sizes = {e.fqn: e.nbytes for e in report.entries}
    assert sizes["embedding.weight"] == 4 * 20 * 16 and sizes["head.weight"] == 0
    assert report.parameters == sum(p.numel() for p in model.parameters())


def test_the_share_counts_what_was_converted_before() -> None:
    model = Model()
    lb.quantize_(model, {"head": INT8})
    report = lb.quantize_(model, {"layers.0.up": INT4})
    assert report.low_bits == 20 * 16 + 24 * 16
    assert report.left["head.weight"] == "already in low bits (AffineTensor)"


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (
            lambda m: lb.qat.prepare_(m, INT4),
            "; 0.0% of 3,656 parameters are now in low bits, 50.8%",
        ),
        (lambda m: lb.train.prepare_(m, lb.BitNet()), "low bits, 50.8% have low-bit products"),
        (lambda m: lb.train.prepare_(m, lb.Int8Weight()), "; 50.8% of 3,656 parameters are now"),
        (
            lambda m: (lb.qat.prepare_(m, INT4), lb.qat.convert_(m))[1],
            "; 50.8% of 3,656 parameters",
        ),
        (lambda m: (lb.quantize_(m, INT4), lb.dequantize_(m))[1], "; 0.0% of 3,656 parameters"),
    ],
    ids=["qat", "bitnet", "int8 weight", "converted", "dequantized"],
)
def test_every_report_says_how_much_is_in_low_bits(prepare, says) -> None:
    model = nn.Sequential(nn.Embedding(100, 16), *(nn.Linear(16, 16) for _ in range(8)))
    model.insert(1, nn.LayerNorm(16)).insert(1, nn.LayerNorm(16))
    model.append(nn.Linear(16, 1, bias=False))
    report = prepare(model)
    assert says.replace("3,656", f"{report.parameters:,}").replace(
        "50.8%", f"{100 * (8 * 256 + 16) / report.parameters:.1f}%"
    ) in str(report)


def test_a_chosen_conv1d_computes_what_its_values_do() -> None:
    model = Mixed()
    report = lb.quantize_(model, lb.Int8WeightOnly(16), lambda m, name: isinstance(m, Conv1D))
    assert report.converted == ["c_attn.weight"]
    x = torch.randn(5, 16, requires_grad=True)
    y = model.c_attn(x)
    values = model.c_attn.weight.dequantize()
    assert torch.allclose(y, x @ values, atol=1e-5)
    y.sum().backward()
    assert torch.allclose(x.grad, values.sum(1).expand(5, 16), atol=1e-5)


# ---- a second parameter beside the weight ------------------------------------------------------------------------


class Gated(nn.Linear):
    """Two weights and one bias in one module, and `lora`, which stays in high precision."""

    def __init__(self) -> None:
        super().__init__(16, 24)
        self.weight2 = nn.Parameter(torch.randn(24, 16))
        self.lora = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.linear(x, self.weight2)
        return super().forward(x) * gate.sigmoid() + nn.functional.linear(x, self.lora).mean()


BESIDE = "beside the weight of a Gated: a pattern or filter that names it converts it"


@pytest.mark.parametrize(
    ("schemes", "choose", "converted"),
    [
        (INT4, None, ["gated.weight"]),
        ({"*": INT4}, None, ["gated.weight"]),
        ({"gated": INT4}, None, ["gated.weight"]),
        ({"gated.weight2": INT4, "*": INT8}, None, ["gated.weight", "gated.weight2"]),
        ({"*.weight2": INT4}, None, ["gated.weight2"]),
        ({r"re:.*\.weight2?": INT4}, None, ["gated.weight", "gated.weight2"]),
        (INT4, lambda m, name: isinstance(m, nn.Linear), ["gated.weight"]),
        (INT4, lambda m, name: name.endswith(".weight2"), ["gated.weight2"]),
        (INT4, lambda m, name: name == "gated.lora", ["gated.lora"]),
    ],
)
def test_a_second_weight_converts_where_it_is_named(schemes, choose, converted) -> None:
    model = nn.ModuleDict({"gated": Gated()})
    plain = copy.deepcopy(model)
    report = lb.quantize_(model, schemes, choose)
    assert report.converted == converted
    others = {"gated.weight", "gated.weight2", "gated.lora"} - set(converted)
    assert set(report.left) == others
    beside = {name for name, why in report.left.items() if why == BESIDE}
    assert beside == others - {"gated.weight"}
    x = torch.randn(3, 16)
    for name in converted:
        assert isinstance(model.get_parameter(name), lb.AffineTensor)
        with torch.no_grad():
            plain.get_parameter(name).copy_(model.get_parameter(name).dequantize())
    assert torch.allclose(model.gated(x), plain.gated(x), atol=1e-5)


def test_a_second_weight_that_a_pattern_leaves_alone() -> None:
    model = nn.ModuleDict({"gated": Gated()})
    report = lb.quantize_(model, {"gated.weight2": None, "*": INT4})
    assert report.left["gated.weight2"] == "no scheme for this name"
    with pytest.raises(ValueError, match=r"\['gated.weight2'\] chose no weight"):
        lb.quantize_(nn.ModuleDict({"gated": Gated()}), {"*": INT4, "gated.weight2": INT8})


@pytest.mark.parametrize(
    "flow",
    [
        lambda m: lb.qat.prepare_(m, {"gated.weight2": INT4}),
        lambda m: lb.train.prepare_(m, {"gated.weight2": lb.Int8Weight()}),
        lambda m: lb.train.prepare_(m, {"gated.weight2": lb.BitNet()}),
    ],
    ids=["qat", "int8 weight", "bitnet"],
)
def test_a_second_weight_is_prepared_too(flow) -> None:
    model = nn.ModuleDict({"gated": Gated()})
    assert flow(model).converted == ["gated.weight2"]
    model.gated(torch.randn(3, 16)).sum().backward()
    assert model.gated.weight2.grad.any() and isinstance(model.gated.weight2, lb.LowbitTensor)


class Adapted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)
        self.lora_A = nn.Parameter(torch.randn(8, 32))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32))


@pytest.mark.parametrize(
    "exclude",
    [
        lambda module, name: name not in ("router", "head", "emb"),
        lambda module, name: isinstance(module, nn.Linear) and name != "head",
    ],
)
def test_a_filter_that_excludes_by_name_chooses_no_parameter_of_what_it_excludes(exclude) -> None:
    model = nn.ModuleDict(
        {"up": nn.Linear(32, 32), "head": Adapted(), "router": Router(), "emb": nn.Embedding(9, 32)}
    )
    assert lb.quantize_(model, INT8, exclude).converted == ["up.weight"]


def test_a_filter_that_names_a_parameter_chooses_it() -> None:
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "head": Adapted()})
    report = lb.quantize_(model, INT8, lambda _, name: name.endswith("lora_A"))
    assert report.converted == ["head.lora_A"]


def test_freezing_adapters_warns() -> None:
    model = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 8))
    with pytest.warns(UserWarning, match=r"freezes 1 weights.*such as 1\.weight: adapters"):
        lb.quantize_(model, INT8)
