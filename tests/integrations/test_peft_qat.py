"""QAT of PEFT's LoRA layers: the merged weight is rounded in training, and conversion gives exactly that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.layers.frozen import shown_class
from lowbit.tensor.trained.adapted import is_merged
from tests.integrations.models import TOKENS, gpt2, is_inner_linear, llama, logits, train
from tests.schemes import relative_error

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

INT4 = lb.Int4WeightOnly(32)
TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "patterns": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 9}},
    "saved-head": {"modules_to_save": ["lm_head"]},
    "all-linear": {"target_modules": "all-linear"},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
quiet = pytest.mark.filterwarnings("ignore:Already unmerged")


def adapted(dtype: torch.dtype = torch.float32, base: Any = None, **options: Any) -> Any:
    """A tiny Llama with adapters whose B is not zero."""
    config = {"r": 4, "target_modules": TARGETS, **options}
    model = peft.get_peft_model(base or llama().to(dtype), peft.LoraConfig(**config))
    randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                p.normal_(std=0.02)


def prepared(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = adapted(dtype, **options)
    lb.qat.prepare_(model, INT4, is_inner_linear)
    return model


def trained(model: Any, count: int = 4) -> list[float]:
    weights = [p for p in model.parameters() if p.requires_grad]
    return train(model, torch.optim.AdamW(weights, lr=1e-2), count)


def layers(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}


# ---- conversion ----------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", CONFIGS)
def test_conversion_gives_the_merged_weight_that_was_trained(name: str, dtype: Any) -> None:
    model = prepared(dtype, **CONFIGS[name])
    assert all(p.dtype is torch.float32 for n, p in model.named_parameters() if "lora_" in n)
    if dtype is torch.float32:
        losses = trained(model)
        assert losses[-1] < losses[0]
    seen = {}
    for fqn, layer in layers(model).items():
        columns = layer.base_layer.in_features
        with torch.no_grad():
            seen[fqn] = layer(torch.eye(columns, dtype=dtype)).t()
        # PEFT's own merge, in the weight's dtype
        merged = copy.deepcopy(layer.base_layer.weight.master())
        merged += layer.get_delta_weight("default")
        assert relative_error(seen[fqn], INT4.weight.fake_quantize(merged, dtype)) < 0.01, fqn
    expected = logits(model)
    lb.qat.convert_(model)
    modules = dict(model.named_modules())
    assert seen and not layers(model)
    for fqn, weight in seen.items():
        assert shown_class(modules[fqn]) is nn.Linear
        assert torch.equal(modules[fqn].weight.dequantize(), weight), fqn
    if dtype is torch.float32:
        assert torch.equal(logits(model), expected)
        plain = model.merge_and_unload()
        assert type(plain).__name__ == "LlamaForCausalLM" and torch.equal(logits(plain), expected)


def test_the_same_text_before_and_after() -> None:
    model = prepared()
    trained(model)
    options = {"max_new_tokens": 12, "do_sample": False}
    before = model.generate(input_ids=TOKENS, **options)
    lb.qat.convert_(model)
    assert torch.equal(model.generate(input_ids=TOKENS, **options), before)


def test_several_adapters_and_set_adapter() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"]))
    randomize(model)
    lb.qat.prepare_(model, INT4, is_inner_linear)
    outputs = []
    for names in ("default", "other", ["default", "other"]):
        model.base_model.set_adapter(names)
        outputs.append(logits(model))
        final = copy.deepcopy(model)
        lb.qat.convert_(final)
        assert torch.equal(logits(final), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_biases_that_train_with_the_adapters() -> None:
    model = adapted(base=llama(attention_bias=True), bias="lora_only")
    lb.qat.prepare_(model, INT4, is_inner_linear)
    biases = {n: p for n, p in model.named_parameters() if n.endswith("bias") and p.requires_grad}
    before = {n: p.detach().clone() for n, p in biases.items()}
    trained(model)
    assert len(biases) == 2 and not any(torch.equal(p, before[n]) for n, p in biases.items())
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected)


def test_int8_activations() -> None:
    model = adapted()
    lb.qat.prepare_(model, lb.Int8DynamicActivationInt4Weight(32), is_inner_linear)
    losses = trained(model)
    expected = logits(model)
    lb.qat.convert_(model)
    assert losses[-1] < losses[0] and relative_error(logits(model), expected) < 1e-4


def test_adapters_of_an_embedding() -> None:
    model = adapted(target_modules=["embed_tokens", "q_proj"])
    lb.qat.prepare_(model, INT4, lambda m, n: isinstance(m, nn.Linear | nn.Embedding))
    losses = trained(model)
    expected = logits(model)
    lb.qat.convert_(model)
    assert losses[-1] < losses[0] and torch.equal(logits(model), expected)
    assert shown_class(model.base_model.model.model.embed_tokens) is nn.Embedding


# ---- PEFT's own functions --------------------------------------------------------------------------------------------


def test_the_state_dict_is_pefts(tmp_path: Any) -> None:
    plain, model = adapted(), prepared()
    assert [*plain.state_dict()] == [*model.state_dict()]
    trained(model)
    model.save_pretrained(tmp_path)
    other = peft.PeftModel.from_pretrained(llama(), tmp_path)
    lb.qat.prepare_(other, INT4, is_inner_linear)
    assert torch.equal(logits(other), logits(model))


def test_adapters_saved_in_the_middle_of_training_go_on(tmp_path: Any) -> None:
    model = prepared()
    trained(model, 2)
    model.save_pretrained(tmp_path)
    losses = trained(model, 2)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    lb.qat.prepare_(again, INT4, is_inner_linear)
    assert trained(again, 2) == losses
    third = prepared()
    third.load_adapter(tmp_path, "loaded", is_trainable=True)
    third.set_adapter("loaded")
    assert trained(third, 2) == losses


def test_disable_adapter_leaves_the_rounded_base() -> None:
    base = llama()
    lb.qat.prepare_(base, INT4, is_inner_linear)
    model = prepared()
    expected = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base))
        with pytest.raises(ValueError, match="disabled"):
            lb.qat.convert_(model)
    assert torch.equal(logits(model), expected)


@quiet
def test_merged_by_peft() -> None:
    """PEFT's merge changes the high-precision weight, so its rounded form is what the adapters gave."""
    model = prepared()
    expected = logits(model)
    model.merge_adapter()
    assert torch.equal(logits(model), expected)
    final = copy.deepcopy(model)
    lb.qat.convert_(final)
    assert torch.equal(logits(final), expected)
    model.unmerge_adapter()
    assert relative_error(logits(model), expected) < 0.05
    merged = prepared().merge_and_unload()
    assert torch.equal(logits(merged), expected)
    lb.qat.convert_(merged)
    assert torch.equal(logits(merged), expected) and not layers(merged)


def test_kept_adapters() -> None:
    model = adapted()
    lb.qat.prepare_(model, INT4, is_inner_linear, adapters="keep")
    trained(model)
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected) and len(layers(model)) == 3
    assert all(isinstance(m.base_layer.weight, lb.AffineTensor) for m in layers(model).values())


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("scheme", [INT4, lb.Int8DynamicActivationInt4Weight(32)], ids=str)
@pytest.mark.parametrize("first", ["prepare_", "get_peft_model"])
@pytest.mark.filterwarnings("ignore:learned scales are parameters of base layers")
def test_dora_beside_a_rounded_base(first: str, scheme: Any, scales: Any) -> None:
    """Its norm reads the rounded weight while it trains, as it does after conversion."""
    model = llama()
    if first == "prepare_":
        lb.qat.prepare_(model, scheme, is_inner_linear, scales=scales)
    model = adapted(base=model, use_dora=True)
    if first == "get_peft_model":
        lb.qat.prepare_(model, scheme, is_inner_linear, scales=scales, adapters="keep")
    losses = trained(model)
    assert losses[-1] < losses[0]
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected) and len(layers(model)) == 3


def test_adapters_over_a_prepared_base_are_kept() -> None:
    base = llama()
    lb.qat.prepare_(base, INT4, is_inner_linear)
    model = adapted(base=base)
    trained(model)
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected) and len(layers(model)) == 3


def test_modules_that_are_saved_whole_train() -> None:
    model = adapted(modules_to_save=["lm_head"])
    lb.qat.prepare_(model, INT4)
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    before = head.master().clone()
    trained(model)
    assert isinstance(head, lb.FakeQuantizedTensor) and not torch.equal(head.master(), before)
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected)


def test_transformers_own_adapters() -> None:
    model = llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    randomize(model)
    lb.qat.prepare_(model, INT4, is_inner_linear)
    expected = logits(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected) and not layers(model)


# ---- refusals ------------------------------------------------------------------------------------------------------


def refused(model: Any, match: str, filter_fn: Any = is_inner_linear) -> None:
    with pytest.raises(NotImplementedError, match=match):
        lb.qat.prepare_(model, INT4, filter_fn)
    assert not any(isinstance(p, lb.LowbitTensor) for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"use_dora": True},
            r"q_proj: QAT does not merge DoRA \(adapter 'default'\).*adapters=\"keep\"",
        ),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1.*set lora_dropout=0"),
        ({"target_parameters": ["q_proj.weight"], "target_modules": []}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias=True"),
    ],
    ids=["dora", "dropout", "parameters", "lora-bias"],
)
@pytest.mark.filterwarnings("ignore:.*lora_bias=True")
def test_adapters_that_do_not_merge(options: dict[str, Any], match: str) -> None:
    refused(adapted(**options), match)


def test_other_layers_that_do_not_merge() -> None:
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    refused(peft.get_peft_model(gpt2(), config), "LoRA of a Conv1D", lambda m, n: "c_attn" in n)
    config = peft.LoHaConfig(r=4, target_modules=TARGETS)
    refused(peft.get_peft_model(llama(), config), "which is not LoRA")
    tied = llama(tie_word_embeddings=True)
    model = peft.get_peft_model(tied, peft.LoraConfig(r=4, target_modules=["embed_tokens"]))
    refused(model, "share a weight", lambda m, n: isinstance(m, nn.Linear | nn.Embedding))


def test_an_adapter_with_dropout_that_comes_later() -> None:
    model = prepared()
    model.add_adapter("late", peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj"]))
    logits(model)
    model.set_adapter("late")
    with pytest.raises(NotImplementedError, match=r"lora_dropout=0.2 \('late'\)"):
        logits(model)


def test_other_samples_other_adapters() -> None:
    model = prepared().eval()
    with pytest.raises(NotImplementedError, match="all rows of a batch share the merged weight"):
        model(input_ids=TOKENS, adapter_names=["default", "__base__"])


def test_compiled() -> None:
    """The whole model in one graph; every merged weight to the bit."""
    torch._dynamo.reset()
    model = prepared()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    losses = [m(input_ids=TOKENS, labels=TOKENS).loss for m in (model, compiled)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses)
    grads = [dict(m.named_parameters()) for m in (model, compiled._orig_mod)]
    for name, p in grads[0].items():
        if p.grad is not None:
            assert relative_error(grads[1][name].grad, p.grad) < 1e-4, name
    torch._dynamo.reset()


# ---- trainers ------------------------------------------------------------------------------------------------------


def test_the_trainer(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    model = prepared(target_modules="all-linear")
    assert any(is_merged(p) for p in model.parameters())
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS for _ in range(4)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()
    model.eval()
    options = {"max_new_tokens": 8, "do_sample": False}
    expected, text = logits(model), model.generate(input_ids=TOKENS, **options)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), expected)
    assert torch.equal(model.generate(input_ids=TOKENS, **options), text)
