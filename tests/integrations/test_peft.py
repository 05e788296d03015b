"""PEFT's adapters over a quantized base: they train, save, load and merge, or an error names the way out."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.inference import AWQ, GPTQ
from tests.integrations.models import TOKENS, is_inner_linear, llama, logits, train
from tests.schemes import relative_error

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from lowbit.hf import LowbitConfig  # noqa: E402

SCHEMES = {
    "int4": lb.Int4WeightOnly(32),
    "int8": lb.Int8WeightOnly(),
    "float8": lb.Float8WeightOnly(),
    "nf4": lb.NF4WeightOnly(32, double_quantization=True),
    "nvfp4": lb.NVFP4WeightOnly(),
}
ROUNDING = {"int4": 0.2, "int8": 0.02, "float8": 0.08, "nf4": 0.2, "nvfp4": 0.2}
"""Relative error of outputs where a weight is quantized a second time."""
TARGETS = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS),
    "rslora": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules=TARGETS),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=TARGETS),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS)
quiet = pytest.mark.filterwarnings("ignore:.* takes new values", "ignore:Unmerge result")


def base(scheme: str, **changes: Any) -> nn.Module:
    model = llama(**changes)
    lb.quantize_(model, SCHEMES[scheme], is_inner_linear)
    return model


def trained(scheme: str, adapter: str, steps: int = 5, dtype: torch.dtype = torch.float32) -> Any:
    model = peft.get_peft_model(base(scheme).to(dtype), ADAPTERS[adapter]())
    weights = [p for p in model.parameters() if p.requires_grad]
    assert weights and not any(isinstance(p, lb.LowbitTensor) for p in weights)
    losses = train(model, torch.optim.AdamW(weights, lr=1e-2), steps)
    assert losses[-1] < losses[0]
    return model


def values(weight: torch.Tensor) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, lb.LowbitTensor) else weight.detach().clone()


def base_weights(model: nn.Module) -> dict[str, lb.LowbitTensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, lb.LowbitTensor)}


@every_scheme
@every_adapter
def test_adapters_train_and_the_base_does_not(scheme, adapter) -> None:
    model = peft.get_peft_model(base(scheme), ADAPTERS[adapter]())
    before = {name: copy.deepcopy(p.data) for name, p in base_weights(model).items()}
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    started = {name: p.detach().clone() for name, p in adapters.items()}
    optimizer = lb.optim.AdamW8bit(adapters.values(), lr=1e-2)
    losses = train(model, optimizer, steps=5)
    assert losses[-1] < losses[0]
    assert any(not torch.equal(p, started[name]) for name, p in adapters.items())
    assert before and all(torch.equal(base_weights(model)[name], w) for name, w in before.items())


def test_an_adapter_that_adds_to_the_output_in_place() -> None:
    """AdaLoRA's forward says `result += …`."""
    model = llama()
    lb.quantize_(model, lb.Int8DynamicActivationInt8Weight(), is_inner_linear)
    config = peft.AdaLoraConfig(total_step=10, target_modules=TARGETS)
    model = peft.get_peft_model(model, config)
    weights = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, torch.optim.AdamW(weights, lr=1e-2), 3)
    assert losses[-1] < losses[0]


@quiet
@every_scheme
def test_an_adapter_that_multiplies_the_weight(scheme) -> None:
    """HRA reflects the inputs: `torch.mm(weight, reflections)`, whose gradient has the weight as first operand."""
    model = peft.get_peft_model(base(scheme), peft.HRAConfig(r=4, target_modules=TARGETS))
    weights = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, torch.optim.AdamW(weights, lr=1e-1), 5)
    assert losses[-1] < losses[0]
    expected = logits(model)
    assert relative_error(logits(model.merge_and_unload()), expected) < ROUNDING[scheme]


@every_scheme
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_saved_and_loaded(scheme, adapter, tmp_path) -> None:
    model = trained(scheme, adapter)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(scheme), tmp_path)
    assert torch.equal(logits(loaded), expected)


@quiet
@every_scheme
@every_adapter
@pytest.mark.parametrize("safe", [False, True], ids=["fast", "safe"])
def test_merged_into_the_quantized_base(scheme, adapter, safe) -> None:
    """Merging quantizes each weight a second time, in its own scheme: outputs differ by that rounding."""
    model = trained(scheme, adapter)
    expected = logits(model)
    kinds = {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name in base_weights(model)
    }
    merged = model.merge_and_unload(safe_merge=safe)
    assert set(base_weights(merged)) == kinds
    assert relative_error(logits(merged), expected) < ROUNDING[scheme]


@every_scheme
@every_adapter
def test_merging_after_dequantize_loses_nothing(scheme, adapter) -> None:
    model = trained(scheme, adapter)
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        lb.dequantize_(model)
        assert relative_error(logits(model), expected) < 1e-5
        merged = model.merge_and_unload()
    assert not base_weights(merged)
    assert relative_error(logits(merged), expected) < 1e-5


@quiet
@every_scheme
@pytest.mark.parametrize("adapter", ["lora", "dora", "loha"])
def test_merged_and_unmerged(scheme, adapter) -> None:
    """Merging and unmerging round twice; weights without an adapter stay the same to the bit."""
    model = trained(scheme, adapter)
    expected, before = logits(model), {n: p.dequantize() for n, p in base_weights(model).items()}
    model.merge_adapter()
    assert relative_error(logits(model), expected) < ROUNDING[scheme]
    model.unmerge_adapter()
    assert relative_error(logits(model), expected) < 2 * ROUNDING[scheme]
    for name, p in base_weights(model).items():
        if not any(target in name for target in TARGETS):
            assert torch.equal(p.dequantize(), before[name])


def test_merging_warns_of_its_rounding() -> None:
    model = trained("int4", "lora", steps=2)
    with pytest.warns(UserWarning, match=r"rounded to its own codes.*lowbit\.dequantize_\(model\)"):
        model.merge_adapter()


@every_scheme
def test_doras_norm_is_that_of_the_dequantized_weight(scheme) -> None:
    model = peft.get_peft_model(base(scheme), ADAPTERS["dora"]())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    values = layer.base_layer.weight.dequantize()
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert torch.equal(magnitude, torch.linalg.norm(values, dim=1))
    plain = lb.dequantize_(twin := copy.deepcopy(model))
    assert plain.converted and torch.allclose(logits(model), logits(twin), atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_takes_the_base_apart_says_what_to_call(init) -> None:
    """This initialisation would change the base weight by values computed from it in high precision."""
    config = peft.LoraConfig(r=4, init_lora_weights=init, target_modules=TARGETS)
    model = base("int4")
    with pytest.raises(NotImplementedError, match=r"lowbit\.dequantize_\(model\)"):
        peft.get_peft_model(model, config)
    model = base("int4")
    lb.dequantize_(model)
    train(peft.get_peft_model(model, config), torch.optim.SGD(model.parameters(), lr=0.0), steps=1)


@every_scheme
def test_an_adapter_that_subtracts_itself_from_the_base_warns_and_rounds_it_again(scheme) -> None:
    """PEFT's approximate PiSSA needs products alone, so it gets as far as its write to the base."""
    config = peft.LoraConfig(r=4, init_lora_weights="pissa_niter_2", target_modules=TARGETS)
    model = base(scheme)
    before, kind = logits(model), type(model.model.layers[0].self_attn.q_proj.weight)
    with pytest.warns(UserWarning, match=r"lowbit\.dequantize_\(model\)"):
        adapted = peft.get_peft_model(model, config)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer.base_layer.weight) is kind
    assert layer.lora_B["default"].weight.any()  # a part of the base moved into the adapter
    assert 0 < relative_error(logits(adapted), before) < ROUNDING[scheme]


# ---- modules_to_save -------------------------------------------------------------------------------------------


def saved_head() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])


def test_a_quantized_head_in_modules_to_save_says_that_it_stays_frozen() -> None:
    model = llama()
    lb.quantize_(model, lb.Int8WeightOnly())
    with pytest.warns(
        UserWarning, match=r"leaves AffineTensor frozen.*modules_to_save.*dequantize_"
    ):
        peft.get_peft_model(model, saved_head())


@pytest.mark.parametrize("way", ["left out", "dequantized", "int8 weight"])
def test_the_ways_out_train_the_head(way) -> None:
    model = llama()
    if way == "dequantized":
        lb.quantize_(model, lb.Int8WeightOnly())
        lb.dequantize_(model, lambda module, name: name == "lm_head")
    else:
        lb.quantize_(model, lb.Int8WeightOnly(), is_inner_linear)
    if way == "int8 weight":
        lb.train.prepare_(model.lm_head, lb.Int8Weight())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings(
            "ignore", ".*ensure_weight_tying"
        )  # PEFT before 0.21 takes all heads for tied
        model = peft.get_peft_model(model, saved_head())
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert head.requires_grad
    before = values(head)
    train(model, lb.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    assert not torch.equal(values(head), before)
    original = model.base_model.model.lm_head.original_module.weight
    assert torch.equal(values(original), before)


# ---- other dtypes, other layers ----------------------------------------------------------------------------------


@quiet
def test_in_bfloat16() -> None:
    model = trained("int8", "lora", dtype=torch.bfloat16)
    expected = logits(model)
    assert relative_error(logits(copy.deepcopy(model).merge_and_unload()), expected) < 0.05
    lb.dequantize_(model)
    assert relative_error(logits(model.merge_and_unload()), expected) < 0.05


def test_a_base_in_training_of_low_bits_is_merged_as_a_plain_one_is() -> None:
    """QAT keeps a high-precision weight, so merging the adapter loses nothing."""
    model = llama()
    lb.qat.prepare_(model, SCHEMES["int8"], is_inner_linear)
    model = peft.get_peft_model(model, ADAPTERS["lora"]())
    weights = [p for p in model.parameters() if p.requires_grad]
    train(model, torch.optim.AdamW(weights, lr=1e-2))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    wanted = layer.base_layer.weight.master() + layer.get_delta_weight("default")
    merged = model.merge_and_unload()
    found = merged.model.layers[0].self_attn.q_proj.weight
    assert isinstance(found, lb.FakeQuantizedTensor) and torch.allclose(found.master(), wanted)


def test_generating_with_an_adapter() -> None:
    model = trained("int4", "lora", steps=2)
    found = model.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False)
    assert found.shape[0] == 2 and found.shape[1] > 12


WITH_OTHERS = ADAPTERS | {
    "tokens": lambda: peft.LoraConfig(
        r=4, target_modules=TARGETS, trainable_token_indices={"embed_tokens": [1, 2]}
    ),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=[*TARGETS, "embed_tokens"]),
    "prompts": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32
    ),
}


@pytest.mark.parametrize(
    ("flow", "adapter"),
    [
        *(("filter", adapter) for adapter in WITH_OTHERS),
        *(("quantize_", adapter) for adapter in ("lora", "prompts")),
        ("calibrate", "dora"),
    ],
)
def test_conversion_leaves_adapters_in_high_precision(flow: str, adapter: str) -> None:
    model = peft.get_peft_model(llama(), WITH_OTHERS[adapter]())
    scheme, batches = lb.IntxWeightOnly(4, 32), [{"input_ids": TOKENS}]
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    adapters = [n for n, p in model.named_parameters() if n in before and p.ndim > 1]
    if flow == "calibrate":
        report = lb.calibrate(model, scheme, batches, steps=[AWQ(), GPTQ()])
    else:
        report = lb.quantize_(model, scheme, None if flow == "quantize_" else lambda m, n: True)
    assert before and all(torch.equal(model.get_parameter(n), p) for n, p in before.items())
    low = [n for n, p in model.named_parameters() if isinstance(p, lb.LowbitTensor)]
    assert len(low) >= 7 and not {*low} & {*before}
    assert all(report.left[n] == "of an adapter, which stays in high precision" for n in adapters)


def test_a_pattern_cannot_choose_an_adapter() -> None:
    model = peft.get_peft_model(llama(), ADAPTERS["lora"]())
    with pytest.raises(ValueError, match=r"chose no weight.*lora_A.*of an adapter"):
        lb.quantize_(model, {"*.lora_A.default": lb.Int8WeightOnly()})


def test_adapters_of_a_folder_stay_when_lowbit_config_quantizes(tmp_path) -> None:
    llama().save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(llama(), ADAPTERS["lora"]())
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    config = LowbitConfig(lb.Int8WeightOnly())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "adapter", quantization_config=config
    )
    found = {n: isinstance(p, lb.LowbitTensor) for n, p in loaded.named_parameters()}
    assert {n for n, low in found.items() if "lora_" in n} and not any(
        low for n, low in found.items() if "lora_" in n
    )
    assert any(found.values())
