"""Users' mistakes: the error names the value and the accepted ones, and the model is unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import qat
from lowbit.linear.frozen import registered

Lazy = nn.UninitializedParameter
INT4, INT8 = lb.Int4WeightOnly(8), lb.Int8WeightOnly()
FLOWS = pytest.mark.parametrize("flow", [lb.quantize_, qat.prepare_], ids=["quantize", "prepare"])
Flow = Callable[..., lb.Report]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 8, 8))


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8, bias=False), nn.Linear(8, 4)
    )


def check_refused(
    net: nn.Module, call: Callable[[], Any], error: type[Exception], match: str
) -> None:
    """`call` raises, and the parameters of `net` are the same objects with the same bits."""
    before = [
        (n, p, None if isinstance(p, Lazy) else copy.deepcopy(p.detach()), p.requires_grad)
        for n, p in net.named_parameters()
    ]
    modules = list(net.modules())
    with pytest.raises(error, match=match):
        call()
    assert list(net.modules()) == modules
    assert [n for n, *_ in before] == [n for n, _ in net.named_parameters()]
    for name, param, values, requires_grad in before:
        assert net.get_parameter(name) is param and param.requires_grad == requires_grad
        if values is not None:
            assert param.dtype is values.dtype
            assert torch.equal(param.detach().view(torch.uint8), values.view(torch.uint8)), name


@FLOWS
@pytest.mark.parametrize(
    "scheme",
    ["int4", 4, None, torch.int8, lb.Int4WeightOnly, lb.Int(4), INT4.weight, [INT4], {"*": 4}],
)
def test_unknown_schemes(flow: Flow, scheme: Any) -> None:
    net = model()
    if (
        scheme is None and flow is qat.prepare_
    ):  # takes the schemes of weights that are in low bits already
        check_refused(net, lambda: flow(net, scheme), ValueError, "has no weights in low bits")
        return
    shown = repr(scheme["*"] if isinstance(scheme, dict) else scheme)
    with pytest.raises(TypeError) as error:
        flow(net, scheme)
    message = str(error.value)
    assert message.startswith("unknown scheme ") and shown in message
    assert "lowbit.Int4WeightOnly(group_size=128)" in message
    check_refused(net, lambda: flow(net, scheme), TypeError, "accepted: a Scheme")


@FLOWS
@pytest.mark.parametrize(
    ("patterns", "error", "match"),
    [
        ({"re:(": INT4}, ValueError, r"'re:\(' is not a regular expression"),
        ({"re:[a": INT4, "*": INT8}, ValueError, r"'re:\[a'"),
        ({3: INT4}, TypeError, r"a pattern must be a str, got 3"),
        ({None: INT4}, TypeError, r"got None"),
        ({"nothing": INT4}, ValueError, r"\['nothing'\] chose no weight.*0.weight"),
        ({"*": INT4, "0": INT8}, ValueError, r"\['0'\] chose no weight.*before them"),
        ({"*": None}, ValueError, r"nothing to convert.*no scheme for this name"),
        ({}, ValueError, r"nothing to convert.*no scheme for this name"),
    ],
    ids=str,
)
def test_patterns(flow: Flow, patterns, error, match) -> None:
    net = model()
    check_refused(net, lambda: flow(net, patterns), error, match)


@FLOWS
def test_nothing_to_quantize(flow: Flow) -> None:
    for net, match in [
        (nn.ReLU(), r"nothing to convert in ReLU \(it has no nn.Linear\).*filter_fn"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(8)), r"nothing to convert in Sequential"),
        (nn.Embedding(8, 8), r"nothing to convert.*weight: an embedding: a pattern that names it"),
    ]:
        check_refused(net, lambda net=net: flow(net, INT4), ValueError, match)
    net = model()
    check_refused(
        net, lambda: flow(net, INT4, lambda m, n: False), ValueError, "not selected by the filter"
    )
    net = nn.Sequential(nn.Conv3d(4, 4, 3))
    check_refused(
        net,
        lambda: flow(net, INT4, lambda m, n: True),
        ValueError,
        "0.weight: no low-bit product for Conv3d",
    )


def with_weight(weight: Tensor) -> nn.Module:
    """The last of three layers has this weight, so the layers before it could already be converted."""
    net = model()
    net[3].weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return net


BAD_WEIGHTS = {
    "int64": (torch.zeros(4, 8, dtype=torch.int64), r"dtype torch.int64.*float32"),
    "uint8": (torch.zeros(4, 8, dtype=torch.uint8), r"dtype torch.uint8.*filter_fn"),
    "bool": (torch.zeros(4, 8, dtype=torch.bool), r"dtype torch.bool"),
    "complex": (torch.zeros(4, 8, dtype=torch.complex64), r"dtype torch.complex64"),
    "float8": (
        torch.zeros(4, 8).to(torch.float8_e4m3fn),
        r"dtype torch.float8_e4m3fn, which is low-bit",
    ),
    "nan": (torch.full((4, 8), float("nan")), r"32 NaN or infinite values of 32"),
    "a row": (torch.eye(4, 8).index_fill(0, torch.tensor(2), float("nan")), r"8 NaN or infinite"),
    "inf": (torch.ones(4, 8) * float("-inf"), r"32 NaN or infinite values"),
    "1-D": (torch.zeros(8), r"shape \(8,\).*2 or more dimensions"),
}


@FLOWS
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_cannot_be_quantized(flow: Flow, name: str) -> None:
    weight, match = BAD_WEIGHTS[name]
    net = with_weight(weight)
    check_refused(net, lambda: flow(net, INT4), ValueError, rf"3\.weight has {match}")
    check_refused(net, lambda: flow(net, {"0": INT8, "*": INT4}), ValueError, r"3\.weight has ")


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_tensors_that_cannot_be_quantized(name: str) -> None:
    weight, match = BAD_WEIGHTS[name]
    for make in (lb.AffineTensor.from_float, lb.Float8Tensor.from_float, lb.FakeQuantizedTensor):
        with pytest.raises(ValueError, match=match):
            make(weight, INT8)


@FLOWS
def test_a_bad_weight_that_is_left_out_does_not_matter(flow: Flow) -> None:
    net = with_weight(BAD_WEIGHTS["nan"][0])
    report = flow(net, {"3": None, "*": INT4})
    assert report.converted == ["0.weight", "2.weight"]


@FLOWS
def test_blocks_that_a_weight_cannot_have(flow: Flow) -> None:
    """The error comes before the first weight is replaced, although other weights could be converted."""
    net = nn.Sequential(Experts(), nn.Linear(8, 8))
    scheme = lb.Scheme(lb.Spec(lb.Int(8), lb.PerBlock(1, 4, 4)))
    check_refused(
        net,
        lambda: flow(net, scheme, lambda m, n: n != ""),
        ValueError,
        r"1.weight: PerBlock\(1, 4, 4\) needs a tensor of at least 3 dimensions.*\(8, 8\)",
    )


@FLOWS
def test_lazy_layers(flow: Flow) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    check_refused(net, lambda: flow(net, INT4), ValueError, r"1.weight has no shape yet.*once")
    net(torch.randn(1, 8))
    assert len(flow(net, INT4).converted) == 2


@FLOWS
def test_a_filter_that_fails(flow: Flow) -> None:
    net = model()

    def filter_fn(module: nn.Module, name: str) -> bool:
        if name == "3":
            raise KeyError("mine")
        return isinstance(module, nn.Linear)

    check_refused(net, lambda: flow(net, INT4, filter_fn), KeyError, "mine")


def test_parts_that_do_not_fit() -> None:
    good = lb.AffineTensor.from_float(torch.randn(4, 16), INT4)
    parts = {"codes": good.codes, "scale": good.scale, "zero_point": None}
    for name, bad in [
        ("codes", good.codes[:, :-1]),
        ("codes", good.codes[:3]),
        ("scale", good.scale[:, :1]),
        ("scale", good.scale.flatten()),
    ]:
        with pytest.raises(ValueError, match=rf"{name} of shape .*does not fit"):
            lb.AffineTensor(
                **{**parts, name: bad}, spec=INT4.weight, shape=(4, 16), dtype=torch.float32
            )
    zero_point = torch.zeros(4, 2, dtype=torch.int8)
    with pytest.raises(
        ValueError, match=r"symmetric.* takes no zero_point, got one of shape \(4, 2\)"
    ):
        lb.AffineTensor(
            **{**parts, "zero_point": zero_point},
            spec=INT4.weight,
            shape=(4, 16),
            dtype=torch.float32,
        )
    asymmetric = lb.Int4WeightOnly(8, "asymmetric").weight
    with pytest.raises(ValueError, match=r"asymmetric.* takes a zero_point, got none"):
        lb.AffineTensor(**parts, spec=asymmetric, shape=(4, 16), dtype=torch.float32)


@FLOWS
@pytest.mark.parametrize(
    "scheme",
    [
        lb.Int4WeightOnly(10**9),
        lb.Int8WeightOnly(10**9),
        lb.IntxWeightOnly(3, 10**9),
        lb.NF4WeightOnly(10**9),
        lb.Int8DynamicActivationInt4Weight(10**9),
        lb.Float8WeightOnly(lb.PerBlock(10**5, 10**5)),
        lb.Scheme(INT8.weight, lb.Spec(lb.Int(8), lb.PerGroup(10**9))),
    ],
    ids=str,
)
def test_a_group_far_beyond_the_layer(flow: Flow, scheme: lb.Scheme) -> None:
    """It would take gigabytes of padding."""
    net = model()
    match = r"0\.weight: Per.* pads .* to .*, more than 256 times its elements; take a block of up to 16"
    check_refused(net, lambda: flow(net, scheme), ValueError, match)
    if scheme.activation is None:
        with pytest.raises(ValueError, match="more than 256 times"):
            lb.AffineTensor.from_float(net[0].weight, scheme)


@FLOWS
@pytest.mark.parametrize("value", ["int4", 4, None, INT4], ids=str)
def test_a_model_that_is_none(flow: Flow, value: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got "):
        flow(value, INT4)


@pytest.mark.parametrize(
    ("flow", "scheme", "remedy"),
    [
        (lb.quantize_, lb.Int8WeightOnly, r"call it: Int8WeightOnly\(\)$"),
        (lb.quantize_, lb.BitNet(), r"A training scheme is for lowbit.train.prepare_$"),
        (lb.train.prepare_, lb.BitNet, r"call it: BitNet\(\)$"),
        (lb.train.prepare_, INT8, r"for lowbit.quantize_ and lowbit.qat.prepare_$"),
    ],
)
def test_the_wrong_kind_of_scheme_is_told_where_it_belongs(
    flow: Any, scheme: Any, remedy: str
) -> None:
    with pytest.raises(TypeError, match=remedy):
        flow(model(), scheme)


def test_only_functions_are_registered() -> None:
    rows = registered.rows
    with pytest.raises(TypeError, match=r"register_linear takes functions.*got 3"):
        lb.register_linear(lambda x, weight, bias: True, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"register_linear takes functions.*got True"):
        lb.register_linear(True)  # type: ignore[arg-type]
    assert registered.rows is rows


def test_saving_anything_else_names_what_is_saved(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"takes an nn.Module or a state dict, got Tensor"):
        lb.save(torch.randn(3), tmp_path / "model.safetensors")  # type: ignore[arg-type]
