"""Layers that are not nn.Linear, GPT-2's Conv1D and routers: loaders of most formats would leave such a low-bit weight
random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.formats import FormatError
from tests.integrations.models import gpt2, logits, mixtral, qwen3_moe

transformers = pytest.importorskip("transformers")

SCHEMES = {
    "compressed-tensors": lb.Int4WeightOnly(32),
    "fp8": lb.Float8DynamicActivationFloat8Weight(lb.PerBlock(128, 128)),
    "gptq": lb.Int4WeightOnly(32),
    "gptq_v2": lb.Int4WeightOnly(32),
    "awq": lb.Int4WeightOnly(32, "asymmetric"),
    "bitsandbytes-int8": lb.Int8WeightOnly(),
    "bitsandbytes-4bit": lb.NF4WeightOnly(64),
    "mxfp4": lb.MXFP4WeightOnly(),
    "modelopt": lb.NVFP4WeightOnly(),
    "torchao": lb.Int8WeightOnly(),
}
"""Those that each format takes for a linear."""
MODELS = {"gpt2": gpt2, "mixtral": mixtral, "qwen3_moe": qwen3_moe}
over_models = pytest.mark.parametrize("model_type", MODELS)


def quantized(model_type: str, scheme: lb.Scheme) -> Any:
    model = MODELS[model_type]()
    kinds = ("Conv1D", "TopKRouter")
    lb.quantize_(model, scheme, lambda module, name: type(module).__name__.endswith(kinds))
    return model


def loaded(folder: Path) -> Any:
    kind = transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def test_the_list_of_formats_is_whole() -> None:
    programs_and_files = {"aoti", "executorch", "onnx", "gguf"}
    assert {*lb.formats.names()} - programs_and_files == {*SCHEMES, "lowbit"}


@over_models
@pytest.mark.parametrize("format", SCHEMES)
def test_refused_where_readers_would_leave_it_random(
    format: str, model_type: str, tmp_path: Path
) -> None:
    model = quantized(model_type, SCHEMES[format])
    with pytest.raises(FormatError, match=r"such as Conv1D or a router.*format='lowbit'"):
        lb.export(model, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


@over_models
def test_the_own_format_holds_it(model_type: str, tmp_path: Path) -> None:
    model = quantized(model_type, lb.Int4WeightOnly(32))
    lb.export(model, tmp_path / "out", "lowbit")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("format", SCHEMES)
def test_from_folder_to_folder_too(format: str, tmp_path: Path) -> None:
    lb.export(quantized("gpt2", SCHEMES[format]), tmp_path / "own", "lowbit")
    with pytest.raises(FormatError, match=r"such as Conv1D or a router"):
        lb.export(tmp_path / "own", tmp_path / "out", format)


def test_a_folder_of_plain_conv1d_names_the_way(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "plain")
    with pytest.raises(FormatError, match=r"gpt2 stores its weights transposed.*format='lowbit'"):
        lb.export(tmp_path / "plain", tmp_path / "out", scheme=lb.Int4WeightOnly(32))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_lossy_stores_it_plainly(model_type: str, tmp_path: Path) -> None:
    model = quantized(model_type, lb.Int4WeightOnly(32))
    lb.quantize_(model, {"lm_head": lb.Int4WeightOnly(32)})
    report = lb.export(model, tmp_path / "out", "compressed-tensors", lossy=True)
    assert report.converted == ["lm_head.weight"]
    again = loaded(tmp_path / "out")
    assert (logits(again) - logits(model)).norm() < 1e-3 * logits(model).norm()
