"""`lowbit.peft.merge_(model, batches=…)`: the rounding of a merge is learned, and its loss stands beside that of plain
rounding."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
import lowbit.peft
from lowbit.inference import AWQ, GPTQ, Layer, LearnedRounding, Rotate, Search, Step
from tests.integrations.models import (
    VOCABULARY,
    fill_adapters,
    gpt_oss,
    is_inner_linear,
    llama,
    qwen3_moe,
)

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from tests.integrations.packed_models import publish, sums  # noqa: E402

SCHEMES = {
    "int4": lb.Int4WeightOnly(32),
    "int3": lb.IntxWeightOnly(3, 32),
    "zero points": lb.IntxWeightOnly(4, 32, "float_zero_point"),
    "nf4": lb.NF4WeightOnly(32),
    "nf4 double": lb.NF4WeightOnly(32, double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
    "float8": lb.Float8WeightOnly(),
    "float8 tensor": lb.Float8WeightOnly(lb.PerTensor()),
}
TARGETS = ["q_proj", "k_proj", "down_proj"]
CODES = LearnedRounding(steps=4, over="model", scale_rate=0, vector_rate=0)
QUICK = [GPTQ(), CODES]


def batches(count: int = 2, rows: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (rows, 12), generator=generator) for _ in range(count)]


def adapted(model: Any, std: float = 0.03, **options: Any) -> Any:
    """The model with random adapters."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})
    made = peft.get_peft_model(model, config).eval()
    torch.manual_seed(1)
    fill_adapters(made, std)
    return made


def packed(scheme: str = "int4", **changes: Any) -> Any:
    model = llama(initializer_range=0.15, **changes)
    torch.manual_seed(3)
    with torch.no_grad():  # inputs that are correlated, as those of trained models
        model.model.embed_tokens.weight.copy_(torch.randn(VOCABULARY, 6) @ torch.randn(6, 64) / 6)
    lb.quantize_(model, SCHEMES[scheme], is_inner_linear)
    return model


@torch.no_grad()
def outputs(model: nn.Module, given: list[Tensor]) -> list[Tensor]:
    return [model(tokens).logits.double() for tokens in given]


def held_out_kl(expected: list[Tensor], found: list[Tensor]) -> float:
    """Over one sequence in eight, the last ones of fewer than eight batches, in float64."""
    last = -(sum(map(len, expected)) // 8)
    a, b = (logits[-1][last:].log_softmax(-1) for logits in (expected, found))
    return float((a.exp() * (a - b)).sum(-1).mean())


def low_bit(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, lb.LowbitTensor)}


def bits(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that a model stores."""
    low = low_bit(model)
    found = {n: p.detach().clone() for n, p in model.named_parameters() if n not in low}
    for name, weight in low.items():
        found |= {f"{name}.{k}": t.clone() for k, t in weight.inner_tensors().items()}
    return found


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    after = bits(model)
    assert before.keys() == after.keys()
    return {n for n, t in before.items() if not torch.equal(as_bytes(t), as_bytes(after[n]))}


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_learned_beside_plain(scheme: str) -> None:
    """Both losses are those of the models; only adapted weights change; and all comes back."""
    model, given = adapted(packed(scheme)), batches()
    before, expected = bits(model), outputs(model, given)
    plain = copy.deepcopy(model)
    lowbit.peft.merge_(plain)
    requantized = held_out_kl(expected, outputs(plain, given))

    report = lowbit.peft.merge_(model, batches=given, steps=QUICK)
    losses = report.losses
    assert losses is not None and losses.requantized == pytest.approx(requantized, rel=1e-3)
    now = held_out_kl(expected, outputs(model, given))
    assert now == pytest.approx(min(losses.learned, losses.requantized), rel=1e-3)
    assert losses.kept == (losses.learned < losses.requantized)
    assert losses.learned < 0.7 * losses.requantized
    of_adapted = {n for n in before if ".base_layer.weight" in n}
    assert changed(before, model) and changed(before, model) <= of_adapted
    for name, weight in low_bit(model).items():
        for part, t in weight.inner_tensors().items():
            other = plain.get_parameter(name).inner_tensors()[part]
            assert part == "codes" or torch.equal(as_bytes(t), as_bytes(other)), (name, part)
    assert str(losses) in str(report)
    report.unmerge_()
    assert not changed(before, model)
    assert all(torch.equal(a, b) for a, b in zip(expected, outputs(model, given), strict=True))


def test_changes_below_half_a_step() -> None:
    """Plain rounding gives the base again, and learned rounding keeps what the adapters do."""
    model, given = adapted(packed("mxfp4"), std=0.006), batches(4, 8)
    report = lowbit.peft.merge_(model)
    assert all(layer.update_snr == 0 for layer in report.layers)
    report.unmerge_()
    report = lowbit.peft.merge_(model, batches=given, steps=QUICK)
    assert report.losses is not None
    assert report.losses.requantized == report.losses.without
    assert report.losses.learned < 0.8 * report.losses.without


@pytest.mark.parametrize("scheme", ["int4", "mxfp4"])
def test_adapters_of_zeros_change_no_byte(scheme: str) -> None:
    model = peft.get_peft_model(packed(scheme), peft.LoraConfig(r=4, target_modules=TARGETS))
    before = bits(model)
    report = lowbit.peft.merge_(model, batches=batches())
    assert not changed(before, model) and report.losses is None and report.calibration is None
    assert len(report.layers) == len(TARGETS)
    report.unmerge_()

    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "q_proj.lora_B" in n).normal_(std=0.05)
    lowbit.peft.merge_(model, batches=batches(), steps=QUICK)
    assert {"q_proj" in n for n in changed(before, model)} == {True}


def test_several_adapters_and_chosen_ones() -> None:
    model, given = adapted(packed()), batches()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B.second" in name:
                p.normal_(std=0.05)
    model.base_model.set_adapter(["default", "second"])
    expected = outputs(model, given)
    report = lowbit.peft.merge_(model, batches=given, steps=QUICK)
    assert report.losses is not None and report.losses.kept
    assert held_out_kl(expected, outputs(model, given)) == pytest.approx(
        report.losses.learned, rel=1e-3
    )
    report.unmerge_()
    before = bits(model)
    report = lowbit.peft.merge_(model, ["second"], batches=given, steps=QUICK)
    assert [one.name.rpartition(".")[2] for one in report.layers] == ["q_proj"]
    assert {"q_proj" in n for n in changed(before, model)} == {True}


@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss])
def test_stacked_experts(make: Any) -> None:
    """gpt-oss stores them with the inputs first. Without batches they are rounded once, and reported, too."""
    model = make()
    model.lm_head.weight.data *= 50
    scheme = lb.MXFP4WeightOnly() if make is gpt_oss else lb.Int4WeightOnly(32)
    lb.quantize_(model, {"*.experts.*_proj": scheme, "*": None})
    names = ["gate_up_proj", "down_proj"]
    model = adapted(model, target_modules=[], target_parameters=[f"mlp.experts.{n}" for n in names])
    given = batches()
    before, expected = bits(model), outputs(model, given)
    report = lowbit.peft.merge_(model)
    assert {one.name.rpartition(".")[2] for one in report.layers} == {*names}
    assert not report.plain and all(5 < one.update_snr < one.snr for one in report.layers)
    report.unmerge_()
    assert not changed(before, model)
    for steps in (QUICK, [GPTQ()]):
        report = lowbit.peft.merge_(model, batches=given, steps=steps)
        assert report.losses is not None and changed(before, model)
        assert held_out_kl(expected, outputs(model, given)) == pytest.approx(
            min(report.losses.learned, report.losses.requantized), rel=1e-3
        )
        report.unmerge_()
        assert not changed(before, model)


def test_changed_biases_count_once() -> None:
    """LoRA with `lora_bias` also changes the base layer's bias, which the reference of the losses must not keep."""
    model, given = packed(attention_bias=True), batches()
    options = {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}
    model = adapted(model, std=0.1, **options)
    before, expected = bits(model), outputs(model, given)
    report = lowbit.peft.merge_(model, batches=given, steps=QUICK)
    losses = report.losses
    assert losses is not None
    now = held_out_kl(expected, outputs(model, given))
    assert now == pytest.approx(min(losses.learned, losses.requantized), rel=1e-3)
    report.unmerge_()
    with model.disable_adapter():
        without = held_out_kl(expected, outputs(model, given))
    assert losses.without == pytest.approx(without, rel=1e-3)
    assert not changed(before, model)


def test_in_bfloat16_the_sum_is_not_rounded_first() -> None:
    """Changes below bfloat16's own spacing are in what is rounded."""
    model = adapted(packed().bfloat16(), std=1e-4)
    given, seen = batches(), {}

    class See(Step):
        def apply(self, layer: Layer) -> None:
            seen[layer.name] = layer.weight.clone()

    wanted = {}
    for name, weight in low_bit(model).items():
        if "base_layer" in name:
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            change = layer.scaling["default"] * (b.double() @ a.double())
            wanted[name] = weight._with(dtype=torch.float32).dequantize().double() + change
    report = lowbit.peft.merge_(model, batches=given, steps=[See()])
    assert seen.keys() == wanted.keys()
    for name, values in seen.items():
        assert (values - wanted[name]).abs().max() < 1e-7
        assert (values - values.bfloat16()).abs().max() > 1e-4
    report.unmerge_()
    model = adapted(packed().bfloat16())
    report = lowbit.peft.merge_(model, batches=given, steps=QUICK)
    assert report.losses is not None and report.losses.learned < report.losses.requantized
    assert {w.dtype for w in low_bit(model).values()} == {torch.bfloat16}


def test_norms_that_were_learned_come_back() -> None:
    model = adapted(packed())
    before = bits(model)
    steps = [GPTQ(), LearnedRounding(steps=8, over="model", reach=0, scale_rate=0)]
    report = lowbit.peft.merge_(model, batches=batches(), steps=steps)
    assert any("norm" in n for n in changed(before, model))
    assert report.calibration is not None and report.calibration.learned[0][1].kept
    report.unmerge_()
    assert not changed(before, model)


@pytest.mark.parametrize("kind", ["Qwen3-MoE int4", "Qwen3 NVFP4"])
@pytest.mark.parametrize("learned", [False, True], ids=["plain", "learned"])
def test_written_like_the_folder(kind: str, learned: bool, tmp_path: Path) -> None:
    folder = publish(kind, tmp_path / "published")
    model = adapted(lb.load_pretrained(folder), target_modules=["q_proj", "v_proj"], std=0.1)
    given = batches() if learned else None
    steps = QUICK if learned else None
    report = lowbit.peft.merge_(model, batches=given, steps=steps, keep_base=False)
    with pytest.raises(ValueError, match="no base weights are kept"):
        report.unmerge_()
    merged = model.merge_and_unload()
    expected = outputs(merged, batches())
    lb.export(merged, tmp_path / "tuned", like=folder)
    again = outputs(lb.load_pretrained(tmp_path / "tuned"), batches())
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    old, new = sums(folder), sums(tmp_path / "tuned")
    differ = {n for n in old if old[n] != new[n]}
    assert differ and all("q_proj" in n or "v_proj" in n for n in differ)


def test_bad_input_leaves_the_model_as_it_was() -> None:
    model = adapted(packed())
    before = bits(model)
    merge = lowbit.peft.merge_
    with pytest.raises(TypeError, match="steps need batches"):
        merge(model, steps=[GPTQ()])
    with pytest.raises(ValueError, match="got 0 batches"):
        merge(model, batches=[])
    with pytest.raises(ValueError, match="got 1 batches, none of which has elements"):
        merge(model, batches=[torch.empty(0, 12, dtype=torch.long)])
    with pytest.raises(TypeError, match=r"give \[batch\]"):
        merge(model, batches=batches()[0])
    with pytest.raises(TypeError, match="steps must be a list of steps"):
        merge(model, batches=batches(), steps=["GPTQ"])
    with pytest.raises(ValueError, match="AWQ changes the model in high precision"):
        merge(model, batches=batches(), steps=[AWQ(), GPTQ()])
    with pytest.raises(ValueError, match="Rotate changes"):
        merge(model, batches=batches(), steps=[Rotate(folded=False), GPTQ()])

    class Fails(Step):
        def apply(self, layer: Layer) -> None:
            if "down_proj" in layer.name:
                raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        merge(model, batches=batches(), steps=[Fails()], keep_base=False)
    assert not changed(before, model)
    assert not any(getattr(m, "merged", False) for m in model.modules())


def test_weights_that_no_step_rounds_are_refused() -> None:
    model = packed("nf4 double")
    with pytest.raises(ValueError, match="double"):
        lowbit.peft.merge_(adapted(model), batches=batches(), steps=[Search()])
    model = llama()
    lb.calibrate(
        model,
        {"*.q_proj": lb.Int4WeightOnly(32), "*": None},
        batches(),
        steps=[lb.inference.Rotate(folded=False)],
    )
    model = adapted(model)
    before = bits(model)
    with pytest.raises(NotImplementedError, match=r"q_proj holds RotatedTensor.*without batches"):
        lowbit.peft.merge_(model, batches=batches())
    assert not changed(before, model)
    assert math.isfinite(lowbit.peft.merge_(model).layers[0].snr)


def test_a_tied_weight_is_refused() -> None:
    model = llama(tie_word_embeddings=True)
    both = lb.Int4WeightOnly(32)
    lb.quantize_(model, {"*.embed_tokens": both, "lm_head": both, "*": None})
    model = adapted(model, target_modules=["embed_tokens"])
    before = bits(model)
    with pytest.raises(NotImplementedError, match=r"embed_tokens.*and.*lm_head"):
        lowbit.peft.merge_(model, batches=batches())
    assert not changed(before, model)
