"""PEFT's LoRA of stacked experts in low bits (`target_parameters`): the life of an adapter beside the packed stack."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
import lowbit.peft
from lowbit_kernels.runtime import launches
from tests.integrations.models import TOKENS, gpt_oss, logits, qwen3_moe
from tests.schemes import relative_error

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

FAMILIES = {"qwen3-moe": qwen3_moe, "gpt-oss": gpt_oss}
"""Of stacks [E, outputs, inputs], and of [E, inputs, outputs] with biases."""
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PRODUCTS = ("add_grouped_mm", "torch")
every_family = pytest.mark.parametrize("family", FAMILIES)


def base(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = FAMILIES[family]().to(dtype)
    lb.quantize_(model, {"*.experts.*_proj": lb.Int4WeightOnly(32), "*": None})
    return model


def config(**options: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 2, "target_modules": [], "target_parameters": TARGETS, **options}
    )


def shaken(model: Any, name: str = "default", seed: int = 1) -> Any:
    torch.manual_seed(seed)
    for own, param in model.named_parameters():
        if f".{name}." in own:
            torch.nn.init.normal_(param, std=0.2)
    return model


def adapted(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return shaken(peft.get_peft_model(base(family, dtype), config(**options)).eval())


def dequantized(model: Any) -> Any:
    """The same adapters over the values of the stacks, added to them in each call."""
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    return plain


def counted(model: Any) -> tuple[torch.Tensor, int]:
    """Logits, and how many products of adapters stood beside those of a stack."""
    with launches.counted() as calls:
        found = logits(model)
    return found, calls[PRODUCTS]


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_follows_the_adapter(family: str, dtype: torch.dtype) -> None:
    """Never the values of an adapter before it changed, was turned off or loaded."""
    model = adapted(family, dtype)
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for seed in (1, 2):
        found, products = counted(shaken(model, seed=seed))
        assert products == 2
        assert relative_error(found.float(), logits(dequantized(model).float()).float()) < bound
    with model.disable_adapter():
        without, products = counted(model)
    assert products == 0 and torch.equal(without, logits(base(family, dtype)))
    assert torch.equal(logits(model), found) and relative_error(without, found) > 0.02
    with torch.inference_mode():
        assert torch.equal(model(input_ids=TOKENS).logits, found)


@every_family
def test_generates(family: str) -> None:
    model = adapted(family)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "input_ids": TOKENS}
    with launches.counted() as calls:
        found = model.generate(**settings)
    assert calls[PRODUCTS] == 2 * 4
    expected = dequantized(model).generate(**settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5


@every_family
def test_saved_and_opened(family: str, tmp_path: Path) -> None:
    model = adapted(family)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(family), tmp_path, is_trainable=True)
    assert torch.equal(logits(again), expected)
    again(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in again.parameters() if p.requires_grad)


@every_family
def test_two_adapters(family: str) -> None:
    """One at a time beside the stack; both at once by the sum, as PEFT adds them."""
    model = adapted(family)
    first = logits(model)
    model.add_adapter("second", config(r=3))
    shaken(model, "second", 2)
    assert torch.equal(logits(model), first)
    for names, beside in ((["second"], 2), (["default", "second"], 0), (["default"], 2)):
        model.base_model.set_adapter(names)
        found, products = counted(model)
        assert products == beside
        assert relative_error(found, logits(dequantized(model))) < 1e-5
        assert torch.equal(found, first) == (names == ["default"])


@every_family
def test_rank_stabilized(family: str) -> None:
    model = adapted(family, use_rslora=True, r=5, lora_alpha=3)
    found, products = counted(model)
    assert products == 2 and relative_error(found, logits(dequantized(model))) < 1e-5


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=str)
def test_what_peft_refuses_for_parameters(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"does not work with .*({next(iter(option))}|DoRA)"):
        peft.get_peft_model(base("qwen3-moe"), config(**option))


@every_family
@pytest.mark.parametrize("own", [True, False], ids=["lowbit.peft.merge_", "merge_and_unload"])
def test_merged(family: str, own: bool) -> None:
    """The stacks hold the sum, rounded again; our merge states what that loses."""
    model = adapted(family)
    wanted = dict(dequantized(model).merge_and_unload().named_parameters())
    report = lowbit.peft.merge_(model, keep_base=False) if own else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = model.merge_and_unload()
    assert any("takes new values" in str(one.message) for one in caught) != own
    for target in TARGETS:
        name = f"model.layers.0.{target}"
        held, values = merged.get_parameter(name), wanted[name]
        again = copy.deepcopy(held)
        again.requantize_(values)
        assert isinstance(held, lb.AffineTensor)
        assert relative_error(held.dequantize(), again.dequantize()) < 1e-3
        assert relative_error(held.dequantize(), values) < 0.2
        if report is not None:
            stack = target.rpartition(".")[2]
            (line,) = (one for one in report.layers if one.name.endswith(stack))
            lost = (values - held.dequantize()).square().sum() / values.square().sum()
            assert line.snr == pytest.approx(-10 * float(lost.log10()), abs=0.05)
