"""The script by which people train QLoRA, line by line as PEFT and transformers publish it, over lowbit's weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from tests.integrations.models import TOKENS, is_inner_linear, llama, logits

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from lowbit.hf import LowbitConfig, optimizer  # noqa: E402

NF4 = lb.NF4WeightOnly(64, double_quantization=True)
SCHEMES = {
    "nf4": NF4,
    "int4": lb.Int4WeightOnly(32),
    "int8": lb.Int8WeightOnly(),
    "float8": lb.Float8WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
    "mxfp4": lb.MXFP4WeightOnly(),
    "int8xint8": lb.Int8DynamicActivationInt8Weight(),
}
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]
SIXTEEN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    """PEFT and transformers warn of each other's settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def base(folder: Path, scheme: Any, dtype: torch.dtype, loader: str) -> Any:
    """The quantized model, made in memory or while `from_pretrained` reads it."""
    if loader == "quantize_":
        model = llama().to(dtype)
        lb.quantize_(model, scheme, is_inner_linear)
        return model
    if not folder.exists():
        llama().save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=LowbitConfig(scheme), dtype=dtype
    )


def low_bit(model: Any) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, lb.LowbitTensor)}


@SIXTEEN
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kbit_preparation_keeps_codes_and_computes_in_float32(
    scheme: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = base(tmp_path, SCHEMES[scheme], dtype, "quantize_")
    held = {n: p.data for n, p in low_bit(model).items()}
    same = peft.prepare_model_for_kbit_training(model)
    assert same is model and not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert low_bit(model).keys() == held.keys()
    for name, weight in low_bit(model).items():
        assert torch.equal(weight.data, held[name].to(torch.float32)), name
    assert logits(model).dtype is torch.float32


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("loader", ["quantize_", "LowbitConfig"])
@pytest.mark.parametrize("scheme", ["nf4", "int4", "int8xint8"])
def test_the_published_script(scheme: str, loader: str, reentrant: bool, tmp_path: Path) -> None:
    made = tmp_path / "plain", SCHEMES[scheme], torch.bfloat16, loader
    model = base(*made)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model = peft.prepare_model_for_kbit_training(model)
    kept = {n: p.data for n, p in low_bit(model).items()}
    config = peft.LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.05,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config)
    model.config.use_cache = False
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        warmup_steps=1,
        max_steps=6,
        learning_rate=2e-2,
        logging_steps=1,
        save_steps=3,
        bf16=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    chosen = optimizer("AdamW8bit", args)
    trainer = transformers.Trainer(model, args, train_dataset=DATA, optimizer_cls_and_kwargs=chosen)
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert losses[-1] < losses[0]
    weights = low_bit(model.get_base_model())
    for name, weight in kept.items():
        name = name.replace("q_proj", "q_proj.base_layer").replace("v_proj", "v_proj.base_layer")
        assert torch.equal(weights[name].data, weight), name
    trainer.save_model(tmp_path / "adapter")
    expected = logits(model.eval())

    again = peft.PeftModel.from_pretrained(
        peft.prepare_model_for_kbit_training(base(*made)), tmp_path / "adapter", is_trainable=True
    )
    with torch.autocast("cpu", torch.bfloat16):  # as the Trainer's forward computes
        assert torch.equal(logits(again.eval()).float(), expected)
    second = transformers.Trainer(again, args, train_dataset=DATA, optimizer_cls_and_kwargs=chosen)
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert second.state.global_step == 6
    assert torch.equal(logits(again.eval()), expected)
