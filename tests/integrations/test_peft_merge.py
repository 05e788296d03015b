"""`lowbit.peft.merge_`: adapters merged into low-bit weights with one rounding, its loss, and the way back."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
import lowbit.peft
from tests.integrations.models import fill_adapters, is_inner_linear, llama, logits, train
from tests.schemes import relative_error

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from lowbit.interop.peft import merge  # noqa: E402
from tests.integrations.test_peft import ADAPTERS, SCHEMES, TARGETS, base, trained, values  # noqa: E402

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS)


def layers(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "base_layer")}


def exactly(model: Any) -> Any:
    """The same adapters merged into plain weights, in float32."""
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    return plain.merge_and_unload()


def db(signal: torch.Tensor, noise: torch.Tensor) -> float:
    return 10 * math.log10(signal.square().sum().item() / noise.square().sum().item())


@every_scheme
@every_adapter
def test_one_rounding_and_its_loss(scheme: str, adapter: str) -> None:
    model = trained(scheme, adapter)
    target = dict(exactly(model).named_parameters())
    before = {n: values(m.base_layer.weight).float() for n, m in layers(model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = lowbit.peft.merge_(model)
    assert [layer.name for layer in report.layers] == [*before] and not report.plain
    for layer in report.layers:
        held = model.get_submodule(layer.name).base_layer.weight
        assert isinstance(held, lb.LowbitTensor) and held.spec == SCHEMES[scheme].weight
        wanted = target[layer.name.removeprefix("base_model.model.") + ".weight"]
        lost = wanted - held.dequantize()
        assert layer.snr == pytest.approx(db(wanted, lost), abs=0.05)
        assert layer.update_snr == pytest.approx(db(wanted - before[layer.name], lost), abs=0.05)
        assert layer.update_snr < layer.snr


@every_scheme
def test_unmerge_gives_the_base_to_the_bit(scheme: str) -> None:
    model = trained(scheme, "lora")
    expected = logits(model)
    parts = {
        n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, lb.LowbitTensor)
    }
    report = lowbit.peft.merge_(model)
    assert not torch.equal(logits(model), expected)
    report.unmerge_()
    assert torch.equal(logits(model), expected)
    for name, before in parts.items():
        assert torch.equal(model.get_parameter(name).dequantize(), before), name
    assert not any(m.merged for m in layers(model).values())
    with pytest.raises(ValueError, match="no base weights are kept"):
        report.unmerge_()
    losses = train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), 2)
    assert all(math.isfinite(loss) for loss in losses)


@every_scheme
def test_merged_and_unloaded(scheme: str, tmp_path: Any) -> None:
    """The model without adapters is in low bits, and is saved and read as any other."""
    model = trained(scheme, "lora")
    lowbit.peft.merge_(model, keep_base=False)
    expected = logits(model)
    plain = model.merge_and_unload()
    assert type(plain).__name__ == "LlamaForCausalLM" and not layers(plain)
    assert torch.equal(logits(plain), expected)
    lb.export(plain, tmp_path / "merged", format="lowbit")
    assert torch.equal(logits(lb.load_pretrained(tmp_path / "merged")), expected)


def several() -> Any:
    model = trained("int4", "lora")
    for name, seed in (("second", 1), ("third", 2)):
        model.add_adapter(name, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        torch.manual_seed(seed)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_B" in n and name in n:
                    p.normal_(std=0.05)
    return model


def test_several_adapters_are_rounded_once() -> None:
    model = several()
    model.base_model.set_adapter(["default", "second", "third"])
    wanted = logits(exactly(model))
    theirs = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.merge_adapter()
    lowbit.peft.merge_(model)
    assert relative_error(logits(model), wanted) <= relative_error(logits(theirs), wanted)


def test_chosen_adapters() -> None:
    model = several()
    report = lowbit.peft.merge_(model, ["second"])
    assert [layer.name.rpartition(".")[2] for layer in report.layers] == ["q_proj"]
    assert model.get_submodule(report.layers[0].name).merged_adapters == ["second"]
    assert not model.get_submodule(report.layers[0].name.replace("q_proj", "v_proj")).merged


def test_layers_that_are_not_in_low_bits_are_merged_without_rounding() -> None:
    model = llama()
    lb.quantize_(
        model, lb.Int4WeightOnly(32), lambda m, n: is_inner_linear(m, n) and "down" not in n
    )
    model = peft.get_peft_model(model, ADAPTERS["lora"]())
    report = lowbit.peft.merge_(model)
    assert len(report.layers) == 2 and [n.rpartition(".")[2] for n in report.plain] == ["down_proj"]
    text = str(report)
    assert "2 low-bit weights were rounded once more, 1 others were not" in text
    assert "q_proj  merged weight" in text


def test_in_bfloat16() -> None:
    model = trained("int8", "lora", dtype=torch.bfloat16)
    expected = logits(model)
    report = lowbit.peft.merge_(model)
    assert all(m.base_layer.weight.dtype is torch.bfloat16 for m in layers(model).values())
    assert relative_error(logits(model), expected) < 0.05 and min(x.snr for x in report.layers) > 35


def test_refusals_leave_the_model_as_it_was() -> None:
    with pytest.raises(ValueError, match="has no layers of PEFT"):
        lowbit.peft.merge_(base("int4"))
    model = trained("int4", "lora")
    last = [p for n, p in model.named_parameters() if "lora_B" in n][-1]
    kept = last.detach().clone()
    expected = logits(model)
    with torch.no_grad():
        last[0, 0] = float("nan")
    with pytest.raises(ValueError, match="no layer has adapters named 'typo'; accepted: 'default'"):
        lowbit.peft.merge_(model, ["default", "typo"])
    with pytest.raises(TypeError, match=r"a list of names, got 'default'; give \['default'\]"):
        lowbit.peft.merge_(model, "default")
    with pytest.raises(ValueError, match=r"lora_B\.default\.weight has NaN or infinite values"):
        lowbit.peft.merge_(model)
    with torch.no_grad():
        last.copy_(kept)
    assert torch.equal(logits(model), expected)
    lowbit.peft.merge_(model)
    with pytest.raises(ValueError, match="are merged already"):
        lowbit.peft.merge_(model)


def test_a_base_that_trains_in_low_bits_is_refused() -> None:
    model: Any = llama()
    lb.quantize_(model, {"*.v_proj": lb.Int4WeightOnly(32), "*": None})
    lb.train.prepare_(model, {"*.q_proj": lb.Int8Weight(), "*": None})
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    expected = logits(model)
    for keep_base in (True, False):
        with pytest.raises(NotImplementedError, match=r"q_proj holds Int8WeightTensor.*convert_"):
            lowbit.peft.merge_(model, keep_base=keep_base)
        assert torch.equal(logits(model), expected)
    lb.train.convert_(model)
    report = lowbit.peft.merge_(model)
    assert len(report.layers) == 2 and not report.plain
    assert all(layer.snr > 15 for layer in report.layers)


def test_modules_to_save_are_left_alone() -> None:
    config = peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"])
    model = peft.get_peft_model(base("int4"), config)
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    before = head.detach().clone()
    lowbit.peft.merge_(model)
    assert torch.equal(head, before)


def test_the_bytes_of_double_quantization() -> None:
    """QLoRA publishes 4.127 bits a parameter. A row here has copies of what 256 scales share, which add 32 bits a row
    unless it has a multiple of 256 scales."""
    for columns, bits in ((16384, 4.127), (4096, 4.133)):
        weight = torch.randn(64, columns)
        made = lb.AffineTensor.from_float(weight, lb.NF4WeightOnly(64, double_quantization=True))
        assert 8 * made.nbytes_stored() / weight.numel() == pytest.approx(bits, abs=1e-3)


@pytest.mark.parametrize("kind", ["nvfp4", "float8 of a tensor"])
@pytest.mark.parametrize("keep_base", [True, False])
def test_siblings_make_room_for_a_large_adapter(
    kind: str, keep_base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter reaches 30 times as far as what its weight shares with siblings, of which one has no adapter."""
    schemes = {
        "nvfp4": lb.NVFP4WeightOnly(),
        "float8 of a tensor": lb.Float8WeightOnly(granularity=lb.PerTensor()),
    }
    model = llama()
    lb.quantize_(model, schemes[kind], is_inner_linear)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                large = ".q_proj." in name and "lora_B" in name
                param.copy_(torch.randn_like(param) * (3 if large else 0.03))
    attention = model.base_model.model.model.layers[0].self_attn
    weights = attention.q_proj.base_layer.weight, attention.k_proj.weight
    weights = (*weights, attention.v_proj.base_layer.weight)
    before = [w.detach().clone() for w in weights]
    target = exactly(model)
    copies: list[int] = []
    make_room = merge._MergedSiblings.make_room
    monkeypatch.setattr(
        merge._MergedSiblings,
        "make_room",
        lambda self, *args: copies.append(len(self.kept)) or make_room(self, *args),
    )
    report = lowbit.peft.merge_(model, keep_base=keep_base)
    if kind == "nvfp4":  # whose siblings lose nothing here
        assert (max(copies) == 1) is not keep_base
    least = {"nvfp4": 18.0, "float8 of a tensor": 28.0}[kind]
    assert all(layer.snr > least for layer in report.layers), str(report)
    part = "global_scale" if kind == "nvfp4" else "scale"
    own = [getattr(w, part) for w in weights]
    assert torch.equal(own[0], own[1]) and torch.equal(own[1], own[2])
    ratio = (getattr(before[1], part) / own[1]).log2().abs()
    assert torch.equal(ratio, ratio.round()) and ratio > 2
    assert relative_error(weights[1].dequantize(), before[1].dequantize()) < 2e-4
    wanted = target.model.layers[0].self_attn.v_proj.weight
    assert db(wanted, wanted - weights[2].dequantize()) > least
    if keep_base:
        report.unmerge_()
        for weight, was in zip(weights, before, strict=True):
            assert torch.equal(weight, was)


def scaled(
    dtype: torch.dtype,
    scheme: str | lb.Scheme,
    factor: float,
    targets: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
) -> Any:
    """Adapters whose change of the base is this large, in a model of `dtype`."""
    model = llama().to(dtype)
    scheme = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    lb.quantize_(model, scheme, is_inner_linear)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[*targets]))
    torch.manual_seed(0)
    fill_adapters(model, factor)
    return model


@pytest.mark.parametrize("scheme", ["int4", "int8", "nvfp4"])
@pytest.mark.parametrize("keep_base", [True, False])
def test_a_sum_beyond_the_dtype_is_refused_and_changes_nothing(
    scheme: str, keep_base: bool
) -> None:
    model = scaled(torch.float16, scheme, 1e7)
    before = {n: values(m.base_layer.weight).clone() for n, m in layers(model).items()}
    with pytest.raises(ValueError, match=r"_proj and its adapters: \d+ values .* torch.float16"):
        lowbit.peft.merge_(model, keep_base=keep_base)
    for name, m in layers(model).items():
        assert torch.equal(values(m.base_layer.weight), before[name])
        assert not m.merged


@pytest.mark.parametrize("scheme", ["int4", "int8", "nvfp4"])
def test_a_sum_whose_squares_are_infinite_is_merged(scheme: str) -> None:
    model = scaled(torch.float32, scheme, 1e21)
    for layer in lowbit.peft.merge_(model).layers:
        held = model.get_submodule(layer.name)
        change = held.lora_B["default"].weight.double() @ held.lora_A["default"].weight.double()
        expected = held.scaling["default"] * change
        assert relative_error(values(held.base_layer.weight), expected) < 0.2


@pytest.mark.parametrize("kind", ["nvfp4", "float8"])
def test_a_sum_that_would_wipe_out_siblings_is_refused(kind: str) -> None:
    """They share a scale, which has no smaller multiple for the values of the others."""
    scheme: Any = lb.Float8WeightOnly(granularity=lb.PerTensor()) if kind == "float8" else "nvfp4"
    model = scaled(torch.float32, scheme, 1e30, ["q_proj"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"[kv]_proj.weight shares .*dequantize_"):
        lowbit.peft.merge_(model, keep_base=False)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
    model = scaled(torch.float32, scheme, 1.0, ["q_proj"])
    own = [n for n, _ in model.named_parameters() if n.endswith("k_proj.weight")]
    values = [model.get_parameter(name).dequantize() for name in own]
    lowbit.peft.merge_(model)
    for name, was in zip(own, values, strict=True):
        assert relative_error(model.get_parameter(name).dequantize(), was) < 0.1


def joint_parts(model: nn.Module) -> list[list[torch.Tensor]]:
    """What q, k and v share of their scales, for each layer."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, param in model.named_parameters():
        if isinstance(param, lb.AffineTensor) and any(f"{own}_proj" in name for own in "qkv"):
            part = "scale" if param.spec.scales is None else param.spec.scales.joint
            found.setdefault(name.partition(".self_attn")[0], []).append(getattr(param, part))
    return [*found.values()]


@pytest.mark.parametrize("kind", ["nvfp4", "float8"])
@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("safe", [False, True])
def test_siblings_stay_together_where_peft_merges(kind: str, way: str, safe: bool) -> None:
    """To the bits of `merge_`, and also where PEFT takes the adapters back."""
    scheme: Any = lb.Float8WeightOnly(granularity=lb.PerTensor()) if kind == "float8" else "nvfp4"
    model = scaled(torch.float32, scheme, 1.0, ["q_proj", "v_proj"])
    before = copy.deepcopy(model)
    wanted = copy.deepcopy(model)
    lowbit.peft.merge_(wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = getattr(model, way)(safe_merge=safe) or model
    shared = joint_parts(merged)
    assert shared and all(len(own) == 3 for own in shared)
    assert all(torch.equal(own[0], t) for own in shared for t in own)
    held = wanted.merge_and_unload() if way == "merge_and_unload" else wanted
    for name, param in held.named_parameters():
        assert torch.equal(param, merged.get_parameter(name)), name
    if way == "merge_and_unload":
        return
    assert all(m.merged for m in layers(model).values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.unmerge_adapter()
    assert not any(m.merged for m in layers(model).values())
    assert all(torch.equal(own[0], t) for own in joint_parts(model) for t in own)
    for name, m in layers(model).items():
        own = (values(each.get_submodule(name).base_layer.weight) for each in (before, wanted))
        base_weight, sum_of_both = own
        lost = (values(m.base_layer.weight) - base_weight).norm() / sum_of_both.norm()
        assert lost < 0.15  # two roundings of values as large as the sum
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()


@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("mixed", [False, True])
def test_siblings_stay_together_with_adapters_of_two_kinds(mixed: bool, way: str) -> None:
    """Each layer lacks one of the active adapters, which is nothing to warn of."""
    model: Any = llama()
    lb.quantize_(model, SCHEMES["nvfp4"], is_inner_linear)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]), mixed=mixed)
    config = peft.LoHaConfig if mixed else peft.LoraConfig
    model.add_adapter("other", config(r=2, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "other"])
    torch.manual_seed(0)
    fill_adapters(model, 1.0)
    wanted = copy.deepcopy(model)
    lowbit.peft.merge_(wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = getattr(model.base_model, way)() or model
    shared = joint_parts(merged)
    assert shared and all(torch.equal(own[0], t) for own in shared for t in own)
    held = wanted.merge_and_unload() if way == "merge_and_unload" else wanted
    for name, param in held.named_parameters():
        assert torch.equal(param, merged.get_parameter(name)), name


def test_pefts_own_merge_that_would_wipe_out_siblings_is_refused() -> None:
    """And the model is as it was."""
    model = scaled(torch.float32, "nvfp4", 1e30, ["q_proj"])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"[kv]_proj.weight shares .*dequantize_"):
        model.merge_adapter()
    assert not any(m.merged for m in layers(model).values())
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
