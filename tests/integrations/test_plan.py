"""A plan of autoquant loads a folder of transformers, experts included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import lowbit
from lowbit.hf import LowbitConfig
from lowbit.inference import AWQ, GPTQ

SCHEMES = [lowbit.IntxWeightOnly(3, 32), lowbit.Int4WeightOnly(32), lowbit.Int8WeightOnly()]


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()


def test_a_plan_loads_a_folder(tmp_path: Path) -> None:
    model = mixtral()
    batches = [{"input_ids": torch.randint(96, (2, 16))} for _ in range(2)]
    timed = [({"input_ids": batches[0]["input_ids"][:1, :1], "use_cache": False}, 10)]
    plan = lowbit.autoquant(model, batches, SCHEMES, bits=4.5, timed=timed)
    assert plan.milliseconds and plan.bits <= 4.5 and len({*plan.values()}) > 1
    experts = {plan[f"model.layers.0.mlp.experts.{n}"] for n in ("gate_up_proj", "down_proj")}
    assert len(experts) == 1
    plan.save(tmp_path / "plan.json")
    model.save_pretrained(tmp_path / "model")
    config = LowbitConfig(lowbit.Plan.load(tmp_path / "plan.json"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config
    )
    low = copy.deepcopy(model)
    lowbit.quantize_(low, plan)
    with torch.no_grad():
        assert torch.equal(loaded(**batches[0]).logits, low(**batches[0]).logits)
    report = lowbit.calibrate(model, plan, batches, steps=[AWQ(), GPTQ()])
    method = report.layers["model.layers.0.self_attn.q_proj.weight"].method
    assert method.startswith("AWQ into model.layers.0.input_layernorm") and method.endswith("GPTQ")
