"""Models of LowbitConfig under PEFT and the Trainer, lowbit's optimizers by name, QAT as a callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.formats.base import FormatError
from lowbit.tensor.core.base import LowbitTensor
from tests.integrations.models import TOKENS, is_inner_linear, llama, logits, mixtral, qwen3_moe
from tests.schemes import relative_error

transformers = pytest.importorskip("transformers")

from lowbit.hf import LowbitConfig, QATCallback, optimizer  # noqa: E402

DATA = [{"input_ids": row, "labels": row} for row in TOKENS]
INT4 = lb.Int4WeightOnly(32)


def quantized(folder: Path, model: Any, scheme: Any = INT4) -> Any:
    model.save_pretrained(folder)
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, quantization_config=LowbitConfig(scheme))


def arguments(folder: Path, **options: Any) -> Any:
    given = {"max_steps": 4, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    given |= {"disable_tqdm": True, "learning_rate": 1e-2}
    return transformers.TrainingArguments(output_dir=str(folder), **{**given, **options})


def trained(model: Any, args: Any, **options: Any) -> tuple[Any, list[float]]:
    """The Trainer after the run, and its losses."""
    trainer = transformers.Trainer(model=model, args=args, train_dataset=DATA, **options)
    trainer.train()
    return trainer, [e["loss"] for e in trainer.state.log_history if "loss" in e]


# ---- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, mixtral, qwen3_moe])
@pytest.mark.parametrize(
    "scheme", ["int4(group_size=32)", "int8_int8", "float8", "nf4(group_size=32)", "nvfp4"]
)
def test_gradients_reach_the_inputs_and_the_adapters(make, scheme: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = quantized(tmp_path, make(), scheme)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    model(inputs_embeds=x).logits.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0
    adapters = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert len(adapters) == 4
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (name in adapters), name
        assert p.grad is None or p.grad.abs().sum() > 0, name


def test_the_trainer_trains_adapters_and_saves_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = quantized(tmp_path / "plain", llama())
    base = model.get_parameter("model.layers.0.self_attn.o_proj.weight").dequantize()
    model.save_pretrained(tmp_path / "base")
    held = model
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(
        FormatError, match=r"base_layer\.weight lies in a layer of PEFT.* unload\(\)"
    ):
        held.save_pretrained(tmp_path / "refused")
    args = arguments(
        tmp_path / "out", logging_steps=1, max_steps=6, save_strategy="steps", save_steps=3
    )
    chosen = optimizer("AdamW8bit", args)
    trainer, losses = trained(model, args, optimizer_cls_and_kwargs=chosen)
    assert isinstance(trainer.optimizer.optimizer, lb.optim.AdamW8bit)
    assert losses[-1] < losses[0]
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    assert torch.equal(layer.base_layer.weight.dequantize(), base)
    model.eval()
    saved = tmp_path / "out" / "checkpoint-6"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(again, saved)
    assert torch.equal(logits(again), logits(model))
    merged = model.base_model.model
    merged.dequantize()
    assert not any(isinstance(p, LowbitTensor) for p in merged.parameters())
    expected = logits(model)
    assert relative_error(logits(model.merge_and_unload()), expected) < 1e-5


def test_adapters_of_transformers_itself(tmp_path: Path) -> None:
    """`add_adapter` of a model, whose `save_pretrained` then writes the adapters only."""
    peft = pytest.importorskip("peft")
    model = quantized(tmp_path / "plain", llama())
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter(config)
    model.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again.load_adapter(str(tmp_path / "adapters"))
    assert torch.equal(logits(again), logits(model))


def test_the_trainer_refuses_a_quantized_model_without_adapters(tmp_path: Path) -> None:
    model = quantized(tmp_path, llama())
    with pytest.raises(ValueError, match="purely quantized"):
        transformers.Trainer(model=model, args=arguments(tmp_path), train_dataset=DATA)


# ---- optimizers by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW4bit", "AdamW8bit(bf16_stochastic_round=True)", "AdamWFp8"])
def test_optimizers_by_name(name: str, tmp_path: Path) -> None:
    args = arguments(
        tmp_path, weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-7, logging_steps=1
    )
    trainer, losses = trained(llama(), args, optimizer_cls_and_kwargs=optimizer(name, args))
    own = trainer.optimizer.optimizer
    assert type(own).__name__ == name.split("(")[0]
    decay, plain = own.param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decay["betas"] == (0.9, 0.95) and decay["eps"] == 1e-7
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw_4bit_lowbit", "AdamW4bit"),
        ("adamw_8bit(bf16_stochastic_round=True)", "AdamW8bit"),
        ("lion_8bit_lowbit", "Lion8bit"),
    ],
)
def test_names_in_the_manner_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    assert optimizer(name, arguments(tmp_path))[0] is getattr(lb.optim, kind)


def test_an_optimizer_gets_what_it_has(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=3e-3)
    assert optimizer("AdamW8bit", args, lr=1.0)[1]["lr"] == 1.0
    kind, options = optimizer("SGD", args)
    assert options["lr"] == 3e-3 and "betas" not in options and "eps" not in options
    kind([nn.Parameter(torch.randn(8, 8))], **options)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("AdamW5bit", "there is no optimizer 'AdamW5bit'; accepted: "),
        ("AdamW8bit(rate=1)", "unexpected keyword argument 'rate'"),
        ("Muon", "pass Trainer.optimizers=.lowbit.optim.Muon"),
    ],
)
def test_refused_optimizers(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as error:
        optimizer(name, arguments(tmp_path))
    assert "\n" not in str(error.value)


def test_arguments_of_other_types(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"args must be the TrainingArguments, .* got dict"):
        optimizer("AdamW8bit", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a str, such as 'AdamW8bit', got None"):
        optimizer(None, arguments(tmp_path))  # type: ignore[arg-type]


def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "seed": 1}
    args = arguments(tmp_path / "whole", **options)
    whole, _ = trained(llama(), args, optimizer_cls_and_kwargs=optimizer("AdamW4bit", args))
    trainer = transformers.Trainer(
        model=llama(),
        args=args,
        train_dataset=DATA,
        optimizer_cls_and_kwargs=optimizer("AdamW4bit", args),
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, p), q in zip(
        whole.model.named_parameters(), trainer.model.parameters(), strict=True
    ):
        assert torch.equal(p, q), name


# ---- QAT and training in low bits ------------------------------------------------------------------------------------


def test_the_callback_prepares_trains_and_converts(tmp_path: Path) -> None:
    model, args = llama(), arguments(tmp_path / "out", logging_steps=1)
    callback = QATCallback(INT4, is_inner_linear, start=2)
    seen = []

    class Look(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            weight = kwargs["model"].model.layers[0].self_attn.q_proj.weight
            seen.append((type(weight).__name__, weight.off))

    found, losses = trained(
        model,
        args,
        callbacks=[callback, Look()],
        optimizer_cls_and_kwargs=optimizer("AdamW8bit", args),
    )
    assert seen == [("FakeQuantizedTensor", off) for off in ("all", "all", None, None)]
    assert losses[-1] < losses[0]
    weights = [m.weight for n, m in model.named_modules() if is_inner_linear(m, n)]
    assert len(callback.report.converted) == len(weights) == 7
    assert all(isinstance(w, lb.AffineTensor) for w in weights)
    lb.export(model, tmp_path / "int4", format="lowbit")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int4")
    assert torch.equal(logits(again), logits(found.model.eval()))


def test_a_training_that_ends_by_start_warns(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    with pytest.warns(UserWarning, match=r"ended after 2 steps.*start=2: no step trained rounded"):
        trained(llama(), args, callbacks=[QATCallback(INT4, is_inner_linear, start=2)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no step trained rounded")
        trained(llama(), args, callbacks=[QATCallback(INT4, is_inner_linear, start=1)])


SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "started": (INT4, {"start": 3}),
    "observed": (
        lb.Int8StaticActivationInt8Weight(),
        {"scales": "learned", "start": 1, "freeze_observers": 3},
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_qat_continues_the_schedule(name: str, tmp_path: Path) -> None:
    """Also one that was stopped while it observed inputs."""
    scheme, settings = SCHEDULES[name]
    models = []
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        model = llama()
        args = arguments(tmp_path / "out", save_strategy="steps", save_steps=2)
        callback = QATCallback(scheme, is_inner_linear, **settings)
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=DATA, callbacks=[callback]
        )
        trainer.train(resume_from_checkpoint=resume)
        models.append(model)
    assert torch.equal(*map(logits, models))


def test_the_callback_refuses_another_model(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        model_init=lambda: llama(),
        args=arguments(tmp_path),
        train_dataset=DATA,
        callbacks=[QATCallback(INT4, is_inner_linear)],
    )
    with pytest.raises(RuntimeError, match="another model than the one that trains"):
        trainer.train()


@pytest.mark.parametrize("scheme", [lb.Int8Weight(), lb.Int8MixedPrecision(always=True)])
def test_the_trainer_trains_in_low_bits(scheme: Any, tmp_path: Path) -> None:
    model, args = llama(), arguments(tmp_path, logging_steps=1, max_steps=6)
    lb.train.prepare_(model, scheme, is_inner_linear)
    _, losses = trained(model, args, optimizer_cls_and_kwargs=optimizer("AdamW8bit", args))
    assert losses[-1] < losses[0]
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, LowbitTensor)


def test_a_quantized_model_trains_further_once_it_is_dequantized(tmp_path: Path) -> None:
    model = quantized(tmp_path / "plain", llama()).dequantize()
    model.requires_grad_(True)
    args = arguments(tmp_path / "out", logging_steps=1)
    trained(model, args, callbacks=[QATCallback(INT4, is_inner_linear)])
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, lb.AffineTensor)
