"""Training settings: presets, overrides, invalid values, and the learning rate."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace

import numpy as np
import pytest

import lowbit
from recipes.command_line import UserError
from recipes.device import choose_device
from recipes.phases import scheme
from recipes.presets import PRESETS, tiny
from recipes.training import (
    TrainingConfig,
    chosen_config,
    learning_rate_factor,
    override,
    rise_and_fall,
)


@pytest.mark.parametrize("name", PRESETS, ids="preset-{}".format)
def test_presets_survive_json(name: str) -> None:
    config = PRESETS[name]()
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert config.preset == name and TrainingConfig.from_dict(values) == config


@pytest.mark.parametrize("name", PRESETS, ids="preset-{}".format)
def test_learning_rate_warms_up_stays_and_falls_to_zero(name: str) -> None:
    config = PRESETS[name]()
    rates = [learning_rate_factor(config)(step) for step in range(config.steps + 1)]
    assert rates[0] == pytest.approx(1 / config.warmup_steps) and rates[-1] == 0.0
    assert max(rates) == 1.0
    assert rates[config.trunk_steps] == pytest.approx(config.branch_lr)
    assert rates[config.warmup_steps :] == sorted(rates[config.warmup_steps :], reverse=True)


def test_qat_has_a_rate_of_its_own_in_the_branch_alone() -> None:
    config = dataclasses.replace(tiny(), qat_lr=3.0)
    trunk, steps = config.trunk_steps, range(config.steps + 1)
    high, qat = (
        [learning_rate_factor(config, own)(step) for step in steps] for own in (False, True)
    )
    assert qat[:trunk] == high[:trunk] and qat[-1] == 0.0
    assert qat[trunk:] == pytest.approx([3 * rate for rate in high[trunk:]])


def test_steps_scale_the_parts_of_a_run() -> None:
    config = override(tiny(), [f"steps={2 * tiny().steps}", "warmup_steps=3"])
    assert config.branch_steps == 2 * tiny().branch_steps
    assert (config.warmup_steps, config.decay_steps) == (3, 2 * tiny().decay_steps)


@pytest.mark.parametrize("text,due", [("true", True), ("Yes", True), ("1", True), ("off", False)])
def test_switches_are_written_as_people_do(text, due):
    assert override(tiny(), [f"bf16={text}"]).bf16 is due


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("speed=3", "NAME one of"),
        ("model.width=3", "NAME one of"),
        ("steps", "NAME=VALUE"),
        ("steps=many", "accepted: a whole number"),
        ("steps=True", "accepted: a whole number"),
        ("lr=fast", "accepted: a number"),
        ("steps=0", "steps is 0"),
        ("branch_steps=5000", "below steps="),
        ("model.kv_heads=3", "kv_heads=3"),
        ("bits=9", "bits is"),
        ("bf16=maybe", "the value is 'maybe'; accepted: true or false"),
        ("group_size=x", "accepted: a whole number or None"),
        ("corpus=web", "accepted: stdlib"),
        ("lr=0", "lr is 0"),
        ("qat_lr=0", "qat_lr is 0"),
        ("qat_lr=1e999", "qat_lr is inf"),
        ("lr=1e999", "lr is inf"),
        ("group_size=0", "group_size is 0"),
        ("group_size=-4", "group_size is -4"),
        ("bits=(4.5,)", "bits is"),
        ("bits=(4, 4)", "bits is"),
        ("bits=('a',)", "bits is"),
        ("beta2=1.5", "beta2 is 1.5"),
        ("weight_decay=-1", "weight_decay is -1"),
        ("grad_clip=-1", "grad_clip is -1"),
        ("seed=-1", "seed is -1"),
        ("sample_tokens=256", "below the model's context of 256"),
        ("warmup_steps=600", "decay_steps is 440; accepted: 0 to"),
    ],
)
def test_invalid_settings(assignment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(tiny(), [assignment])


@pytest.mark.parametrize(("has_gpu", "preset"), [(True, "gpu"), (False, "tiny")])
def test_the_machine_chooses_the_preset(
    has_gpu: bool, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    options = Namespace(preset=None, assignments=["seed=3"])
    config = chosen_config(PRESETS, options, choose_device())
    assert (config.preset, config.seed) == (preset, 3)


def test_settings_are_taken() -> None:
    changes = ["steps=900", "lr=1e-3", "model.dim=64", "bits=(4, 2)", "group_size=32", "bf16=True"]
    config = override(tiny(), changes)
    assert (config.steps, config.lr, config.model.dim, config.bits) == (900, 1e-3, 64, (4, 2))
    assert config.group_size == 32 and config.bf16 is True
    assert scheme(config, 4) == lowbit.Int4WeightOnly(group_size=32)


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_a_rate_rises_and_falls(least: float) -> None:
    found = [rise_and_fall(step, 30, 10, least) for step in range(31)]
    assert found[:11] == [*(pytest.approx((step + 1) / 10) for step in range(10)), 1.0]
    assert np.allclose(np.diff(found[10:]), (least - 1) / 20)
    assert rise_and_fall(0, 4, 0) == 1.0 and rise_and_fall(3, 4, 9) == 4 / 9
