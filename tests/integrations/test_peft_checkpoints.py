"""PEFT: adapters over a quantized model are saved and loaded, with a quantized head among `modules_to_save`."""

from __future__ import annotations

import pytest

from tests.integrations.models import fill_adapters
from tests.tensor.cases import same_bits

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from tests.integrations.test_transformers_checkpoints import llama, logits  # noqa: E402


def test_adapters_over_a_quantized_model(tmp_path):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(llama("int4"), config).eval()
    fill_adapters(model, 1.0)
    model.save_pretrained(tmp_path)
    other = peft.PeftModel.from_pretrained(llama("int4"), tmp_path)
    assert same_bits(logits(other), logits(model))
    names = peft.get_peft_model_state_dict(model)
    assert {"base_model.model.lm_head.weight.codes", "base_model.model.lm_head.weight.scale"} <= {
        *names
    }
