"""Folders of GPTQ and AWQ that lowbit writes, loaded by transformers and GPTQModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit import Int4WeightOnly, IntxWeightOnly, LowbitTensor
from lowbit.tensor.frozen.ordered_tensor import OrderedTensor
from tests.integrations.test_formats import error, llama, logits, low_bit
from tests.integrations.test_packed_lora import sort_inputs

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gptqmodel")
pytest.importorskip("optimum")

CASES = {
    "gptq": {
        "int4": Int4WeightOnly(64),
        "int4 rows": IntxWeightOnly(4),
        "int8": IntxWeightOnly(8, 64, "symmetric"),
        "int3": IntxWeightOnly(3, 64, "symmetric"),
        "int2": IntxWeightOnly(2, 32, "symmetric"),
    },
    "gptq_v2": {
        "int4": Int4WeightOnly(64),
        "int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric"),
        "int8 asymmetric": IntxWeightOnly(8, 32, "asymmetric"),
        "int3 asymmetric": IntxWeightOnly(3, 32, "asymmetric"),
        "int2 asymmetric": IntxWeightOnly(2, 32, "asymmetric"),
    },
    "awq": {
        "int4": Int4WeightOnly(64),
        "int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric"),
    },
}
ALL = [(format, name) for format, schemes in CASES.items() for name in schemes]


def loaded(folder: Path, format: str) -> Any:
    """In torch's kernels: others of GPTQModel are compiled for minutes at first use."""
    kind = transformers.AutoModelForCausalLM
    settings = transformers.AwqConfig if format == "awq" else transformers.GPTQConfig
    chosen = settings(bits=4, backend="torch_awq" if format == "awq" else "gptq_torch")
    options = {"dtype": torch.float16, "device_map": "cpu", "quantization_config": chosen}
    return kind.from_pretrained(folder, **options).eval()


def assert_same_weights(found: Any, model: Any) -> None:
    """Products with unit vectors give each weight of a linear alone; and all plain ones."""
    own, modules = dict(found.named_parameters()), dict(found.named_modules())
    for name, t in model.named_parameters():
        if isinstance(t, LowbitTensor):
            units = torch.eye(t.shape[1], dtype=torch.float16)
            with torch.no_grad():
                values = modules[name.removesuffix(".weight")](units).T
            assert torch.equal(values, t.dequantize()), name
        else:
            assert torch.equal(own[name], t), name


@pytest.mark.parametrize(("format", "name"), ALL)
def test_by_from_pretrained(format: str, name: str, tmp_path: Path) -> None:
    model = low_bit(CASES[format][name], torch.float16)
    lowbit.export(model, tmp_path / "out", format, max_shard_size="100KB")
    found = loaded(tmp_path / "out", format)
    assert_same_weights(found, model)
    assert error(logits(found), logits(model)) < 0.01
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_linears_that_stay_plain(format: str, tmp_path: Path) -> None:
    model = llama(torch.float16)
    lowbit.quantize_(model, {"lm_head": None, "*down_proj": None, "*": Int4WeightOnly(64)})
    lowbit.export(model, tmp_path / "out", format)
    found = loaded(tmp_path / "out", format)
    assert type(found.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert_same_weights(found, model)


@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_act_order(format: str, tmp_path: Path) -> None:
    """Groups of any inputs: lowbit and GPTQModel read the same values, and lowbit writes them back."""
    model = low_bit(Int4WeightOnly(64), torch.float16)
    lowbit.export(model, tmp_path / "out", format)
    sort_inputs(tmp_path / "out")
    found = lowbit.load_pretrained(tmp_path / "out")
    assert type(found.model.layers[0].mlp.up_proj.weight.data) is OrderedTensor
    lowbit.export(found, tmp_path / "again", format)
    for folder in ("out", "again"):
        assert_same_weights(loaded(tmp_path / folder, format), found)
