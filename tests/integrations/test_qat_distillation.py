"""Distillation and schedules of QAT: in transformers' Trainer, with PEFT, and in a bare loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit import qat
from tests.integrations.models import TOKENS, is_inner_linear, llama, logits
from tests.integrations.test_transformers import CHECKPOINTING, Tokens, losses, trainer
from tests.schemes import relative_error

transformers = pytest.importorskip("transformers")

INT4 = lb.Int4WeightOnly(32)


def prepared(**changes: Any) -> Any:
    model = llama(**changes)
    qat.prepare_(model, INT4, is_inner_linear)
    return model


def weight_of(model: Any) -> Any:
    return model.model.layers[0].self_attn.q_proj.weight


def test_off_is_the_plain_model() -> None:
    plain, model = llama(), prepared()
    expected = logits(plain)
    assert not torch.equal(logits(model), expected)
    with qat.high_precision(model):
        assert torch.equal(logits(model), expected)
        tokens = model.generate(input_ids=TOKENS, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, plain.generate(input_ids=TOKENS, max_new_tokens=8, do_sample=False))
    qat.undo_(model)
    assert torch.equal(logits(model), expected)


def test_a_bare_loop_with_padding_and_hidden_states() -> None:
    model = prepared().train()
    mask = torch.ones_like(TOKENS)
    mask[1, 7:] = 0
    distill = qat.Distillation(model, kl_weight=0.5, temperature=2.0, hidden_weight=0.1)
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=3e-3)
    found = []
    for _ in range(12):
        loss = distill(input_ids=TOKENS, attention_mask=mask, labels=TOKENS, use_cache=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < found[0]


def test_the_cross_entropy_is_that_of_the_model() -> None:
    """With no share for KL the loss is transformers' own, also for labels that do not count."""
    model = prepared()
    labels = TOKENS.clone()
    labels[0, :5] = -100
    found = qat.Distillation(model, kl_weight=0.0)(input_ids=TOKENS, labels=labels)
    assert relative_error(found, model(input_ids=TOKENS, labels=labels).loss) < 1e-6


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_the_trainer(checkpointing, tmp_path) -> None:
    """The quantized model comes near another one, which only its logits describe."""
    model, teacher = prepared(), llama(initializer_range=0.1)
    run = trainer(model, tmp_path, steps=20, **{CHECKPOINTING: checkpointing})
    qat.Distillation(model, teacher).attach(run)
    found = losses(run)
    assert found[-1] < 0.5 * found[0]
    qat.convert_(model.eval())
    kl = qat.distillation_loss(logits(model), logits(teacher))
    assert kl < 0.5 * found[0]


def test_accumulated_micro_batches_have_the_loss_of_one_batch(tmp_path) -> None:
    """Batches of different lengths count by their tokens."""

    class Ragged(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            item = super().__getitem__(index)
            labels = item["labels"].clone()
            labels[3 + 4 * (index % 2) :] = -100
            return {**item, "labels": labels}

    found = []
    for size, steps in ((4, 1), (1, 4), (2, 2)):
        model = prepared()
        run = trainer(
            model,
            tmp_path,
            steps=3,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            optim="sgd",
        )
        run.train_dataset = Ragged()
        qat.Distillation(model, kl_weight=0.5).attach(run)
        found.append((losses(run), weight_of(model).master().clone()))
    for other, weight in found[1:]:
        assert other == pytest.approx(found[0][0], rel=1e-3)
        assert relative_error(weight, found[0][1]) < 1e-5


def test_evaluation_keeps_the_loss_of_the_model(tmp_path) -> None:
    model = prepared()
    run = trainer(model, tmp_path)
    expected = run.evaluate(Tokens())["eval_loss"]
    qat.Distillation(model).attach(run)
    assert run.evaluate(Tokens())["eval_loss"] == expected


def test_a_schedule_in_the_trainer_and_resumed(tmp_path) -> None:
    def run_to(folder: Any, steps: int, resume: bool = False, **options: Any) -> tuple[Any, Any]:
        model = prepared()
        schedule = qat.Schedule(model, start=2)
        run = trainer(model, folder, steps=6, save_strategy="steps", save_steps=3)
        run.add_callback(schedule.callback())

        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop |= state.global_step >= steps

        run.add_callback(Stop())
        run.train(resume_from_checkpoint=resume or None)
        return model, schedule

    expected, schedule = run_to(tmp_path / "whole", 6)
    assert schedule.steps == 6 and weight_of(expected).scheme == INT4
    stopped, schedule = run_to(tmp_path / "parts", 3)
    assert schedule.steps == 3 and weight_of(stopped).off is None
    found, schedule = run_to(tmp_path / "parts", 6, resume=True)
    assert schedule.steps == 6
    assert torch.equal(weight_of(found).master(), weight_of(expected).master())


# ---- PEFT -------------------------------------------------------------------------------------------------------


def adapted() -> Any:
    """Adapters over a prepared, frozen base; they begin away from zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1
    )
    model = peft.get_peft_model(prepared(), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.05)
    return model


def test_the_teacher_of_adapters_is_the_base_without_them() -> None:
    model, plain = adapted(), llama()
    distill = qat.Distillation(model.eval())
    expected = qat.distillation_loss(logits(model), logits(plain))
    with torch.no_grad():
        assert relative_error(distill(input_ids=TOKENS), expected) < 1e-6
    assert not torch.equal(logits(model), logits(plain)), "the adapters are on again"


def test_adapters_in_the_trainer(tmp_path) -> None:
    model = adapted()
    weight = next(p for p in model.parameters() if isinstance(p, lb.FakeQuantizedTensor))
    before = weight.master().clone()
    run = trainer(model, tmp_path, steps=20)
    qat.Distillation(model).attach(run)
    found = losses(run)
    assert found[-1] < 0.5 * found[0]
    assert torch.equal(weight.master(), before) and not weight.requires_grad
