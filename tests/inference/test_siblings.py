"""Plain values that siblings take by load_state_dict: the bits that `quantize_` gives the plain model."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.convert.joined import take_joined
from tests.tensor.cases import same_bits

NAMES = ("q_proj", "k_proj", "v_proj")
SCHEMES = {
    "nvfp4": lb.NVFP4WeightOnly(),
    "nvfp4 and float8 inputs": lb.Float8DynamicActivationNVFP4Weight(),
    "one float8 scale": lb.Float8WeightOnly(granularity=lb.PerTensor()),
}
over = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


class Block(nn.Module):
    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rows = (40, 8, 24)
        layers = {n: nn.Linear(72, size, dtype=dtype) for n, size in zip(NAMES, rows, strict=True)}
        self.attention = nn.ModuleDict(layers)
        self.o_proj = nn.Linear(40, 72, dtype=dtype)
        with torch.no_grad():
            self.attention.k_proj.weight.mul_(seed + 3)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if name.endswith("weight")}


def quantized(model: nn.Module, scheme: lb.Scheme) -> nn.Module:
    lb.quantize_(model, scheme)
    return model


@over
@pytest.mark.parametrize("prefix", ["", "attention."])
def test_siblings_keep_one_joint_part(scheme: lb.Scheme, prefix: str) -> None:
    """Into a model, a copy of it, one that was pickled, and the module around the siblings alone."""
    dtype = torch.bfloat16 if scheme.weight.scales else torch.float32  # that of scales elsewhere
    model, plain = quantized(Block(0, dtype), scheme), Block(1)
    plain.attention.v_proj.weight.data.zero_()
    state, expected = plain.state_dict(), quantized(copy.deepcopy(plain), scheme)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for own in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        part = own.get_submodule(prefix.removesuffix("."))
        part.load_state_dict(
            {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        )
        for name, weight in weights(part).items():
            assert same_bits(weight, weights(expected)[prefix + name].to(dtype))


def test_stacked_experts() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.randn(3, 24, 64))
            self.up = nn.Parameter(5 * torch.randn(3, 24, 64))

    scheme, plain = {"*": lb.NVFP4WeightOnly()}, Experts()
    found, expected = Experts(), copy.deepcopy(plain)
    for model in (found, expected):
        lb.quantize_(model, scheme, lambda module, name: True)
    found.load_state_dict(plain.state_dict())
    for name, weight in found.named_parameters():
        assert same_bits(weight, expected.get_parameter(name))


@pytest.mark.parametrize("way", ["calibrate", "assigned", "assigned whole", "frozen"])
def test_other_ways_to_low_bits(way: str, tmp_path: Path) -> None:
    scheme, model, plain = lb.NVFP4WeightOnly(), Block(0), Block(1)
    if way == "calibrate":
        lb.calibrate(model, scheme, steps=[lb.inference.Search()])
    elif way == "assigned whole":
        held = {n: p.detach() for n, p in quantized(Block(2), scheme).named_parameters()}
        nn.ModuleDict({"layer": model}).load_state_dict(
            {f"layer.{n}": p for n, p in held.items()}, assign=True
        )
    else:
        lb.save(quantized(Block(2), scheme).state_dict(), tmp_path / "block.safetensors")
        model.load_state_dict(lb.load(tmp_path / "block.safetensors"), assign=True)
        if way == "frozen":
            lb.inference.freeze_(model)
    model.load_state_dict(plain.state_dict())
    for name, weight in weights(quantized(plain, scheme)).items():
        assert same_bits(weights(model)[name], weight)


def test_a_state_dict_of_qat() -> None:
    """Its description says that it is plain."""
    scheme = lb.NVFP4WeightOnly()
    prepared, model = Block(1), quantized(Block(0), scheme)
    lb.qat.prepare_(prepared, scheme)
    model.load_state_dict(prepared.state_dict())
    lb.qat.convert_(prepared)
    model_again = Block(2)
    for name, weight in weights(model).items():
        assert same_bits(weight, weights(prepared)[name])
    prepared.load_state_dict(model_again.state_dict())
    for name, weight in weights(quantized(model_again, scheme)).items():
        assert same_bits(weights(prepared)[name], weight)


@over
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_values_that_siblings_have_keep_their_bits(scheme: lb.Scheme, some: bool) -> None:
    """Those of searched scales, which the values alone would not give."""
    model = Block(0, torch.bfloat16)
    lb.quantize_(model, scheme, scales="searched")
    before = copy.deepcopy(model)
    held = {name: p.dequantize() for name, p in weights(model).items()}
    if some:
        del held["attention.k_proj.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(held, strict=False)
    for name, weight in weights(model).items():
        assert same_bits(weight, weights(before)[name]), name


def test_one_without_the_others_is_told_of() -> None:
    model, plain = quantized(Block(0), lb.NVFP4WeightOnly()), Block(1).state_dict()
    del plain["attention.k_proj.weight"]
    with pytest.warns(UserWarning, match=r"q_proj.*without attention.k_proj.weight.*together"):
        model.load_state_dict(plain, strict=False)


def test_a_value_that_is_not_finite_is_named() -> None:
    model, plain = quantized(Block(0), lb.NVFP4WeightOnly()), Block(1).state_dict()
    plain["attention.k_proj.weight"][3, 5] = torch.nan
    with pytest.raises(RuntimeError, match=r"k_proj(?s:.*)1 NaN or infinite"):
        model.load_state_dict(plain)
    assert all(bool(w.dequantize().isfinite().all()) for w in weights(model).values())


def test_a_value_that_rounds_to_infinity_is_named() -> None:
    scheme = SCHEMES["one float8 scale"]
    model, plain = quantized(Block(0, torch.float16), scheme), Block(1, torch.float16).state_dict()
    plain["attention.k_proj.weight"][0] = 65504 - 100 * torch.arange(72)
    before = model.attention.k_proj.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"attention.k_proj.weight: \d+ values .* infinity"):
        model.load_state_dict(plain)
    assert same_bits(model.attention.k_proj.weight.detach(), before)


def test_plain_values_by_assignment_stay_plain() -> None:
    model, plain = quantized(Block(0), lb.NVFP4WeightOnly()), Block(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_state_dict(plain.state_dict(), assign=True)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_the_hook_goes_with_the_weights() -> None:
    model = quantized(Block(0), lb.NVFP4WeightOnly())

    def hooked() -> list[str]:
        return [
            name
            for name, module in model.named_modules()
            for hook in module._load_state_dict_pre_hooks.values()
            if getattr(hook, "hook", hook) is take_joined
        ]

    assert hooked() == ["attention"]
    lb.dequantize_(model, lambda module, name: name.endswith("o_proj"))
    assert hooked() == ["attention"]
    lb.dequantize_(model)
    assert not hooked() and not model.attention._load_state_dict_pre_hooks


@pytest.mark.parametrize(
    "scheme",
    [
        *(lb.Int1WeightOnly(), lb.Int2WeightOnly(), lb.Int4WeightOnly(32)),
        lb.Scheme(
            lb.Spec(lb.Int(4), lb.PerGroup(32), "float_zero_point", scale_format="super_block")
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_values_get_the_scales_of_quantize(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    """Those of few codes are searched."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 8, bias=False, dtype=dtype))
    model = copy.deepcopy(plain)
    with torch.no_grad():
        plain[0].weight.mul_(3)
    expected = quantized(copy.deepcopy(plain), scheme)
    quantized(model, scheme).load_state_dict(plain.state_dict())
    assert same_bits(model[0].weight, expected[0].weight)
