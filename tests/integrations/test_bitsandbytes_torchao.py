"""Folders of bitsandbytes and torchao, written by lowbit and loaded by transformers, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import (
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    LowbitTensor,
)
from tests.integrations.test_formats import error, llama, logits, low_bit

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

FOR_TORCHAO = {
    "int8": Int8WeightOnly(),
    "int8 x int8": Int8DynamicActivationInt8Weight(),
    "int8 g64": Int8WeightOnly(64),
    "int4 g64": Int4WeightOnly(64),
    "int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric"),
    "int3 rows": IntxWeightOnly(3),
    "float8": Float8WeightOnly(),
}


def loaded(folder: Path) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu").eval()


def assert_same_values(found: nn.Module, model: nn.Module, dequantize: Any) -> None:
    modules = dict(found.named_modules())
    for name, t in model.named_parameters():
        module = modules[name.rpartition(".")[0]]
        values = dequantize(module) if isinstance(t, LowbitTensor) else module.weight
        wanted = t.dequantize() if isinstance(t, LowbitTensor) else t
        assert torch.equal(values, wanted), name


@pytest.mark.parametrize("name", FOR_TORCHAO)
def test_torchao_by_from_pretrained(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    model = low_bit(FOR_TORCHAO[name])
    lowbit.export(model, tmp_path / "out", "torchao", max_shard_size="100KB")
    found = loaded(tmp_path / "out")
    assert_same_values(found, model, lambda module: module.weight.dequantize())
    assert error(logits(found), logits(model)) < 0.02
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


def test_a_folder_that_torchao_makes(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(64))
    llama().save_pretrained(tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        dtype=torch.bfloat16,
        quantization_config=transformers.TorchAoConfig(config),
    )
    theirs.save_pretrained(tmp_path / "out")
    found = lowbit.load_pretrained(tmp_path / "out")
    assert isinstance(found.model.layers[0].mlp.up_proj.weight, LowbitTensor)
    assert_same_values(theirs, found, lambda module: module.weight.dequantize())


def _of_bitsandbytes(module: Any) -> torch.Tensor:
    functional = pytest.importorskip("bitsandbytes").functional
    largest = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    return functional.int8_vectorwise_dequant(module.weight.data, largest).bfloat16()


@pytest.mark.parametrize("name", ["int8", "int8 x int8"])
def test_bitsandbytes_by_from_pretrained(name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = low_bit(FOR_TORCHAO[name])
    lowbit.export(model, tmp_path / "out", "bitsandbytes-int8", max_shard_size="100KB")
    found = loaded(tmp_path / "out")
    assert_same_values(found, model, _of_bitsandbytes)
    assert error(logits(found), logits(model)) < 0.06
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


def test_a_folder_that_bitsandbytes_makes(tmp_path: Path) -> None:
    """Its scales are absmax / 127, which float32 rounds: the last bit of a few values may differ."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        dtype=torch.bfloat16,
        quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True),
    )
    theirs.save_pretrained(tmp_path / "out")
    found = lowbit.load_pretrained(tmp_path / "out")
    modules = dict(theirs.named_modules())
    for name, t in found.named_parameters():
        if isinstance(t, LowbitTensor):
            wanted = _of_bitsandbytes(modules[name.removesuffix(".weight")])
            torch.testing.assert_close(t.dequantize(), wanted, rtol=2**-7, atol=0)
            assert (t.dequantize() != wanted).float().mean() < 1e-3


def test_a_head_in_low_bits_that_bitsandbytes_reads(tmp_path: Path) -> None:
    """Without a list of skipped layers transformers skips the head."""
    pytest.importorskip("bitsandbytes")
    model = llama(tie_word_embeddings=False)
    lowbit.quantize_(model, Int8WeightOnly())
    assert isinstance(model.lm_head.weight, LowbitTensor)
    lowbit.export(model, tmp_path / "out", "bitsandbytes-int8")
    assert_same_values(loaded(tmp_path / "out"), model, _of_bitsandbytes)


def test_layers_that_transformers_keeps_in_float32(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 64}
    config = transformers.T5Config(num_layers=1, decoder_start_token_id=0, **sizes)
    plain = transformers.T5ForConditionalGeneration(config)
    plain.save_pretrained(tmp_path / "plain")
    scheme = {"shared": None, "lm_head": None, "*": lowbit.NF4WeightOnly(64)}
    with pytest.raises(lowbit.formats.FormatError, match=r"wo.weight: transformers keeps this"):
        lowbit.export(tmp_path / "plain", tmp_path / "out", "bitsandbytes-4bit", scheme=scheme)
    model = type(plain).from_pretrained(tmp_path / "plain")
    lowbit.quantize_(model, scheme)
    with pytest.raises(lowbit.formats.FormatError, match="leave it out by a pattern"):
        lowbit.export(model, tmp_path / "out", "bitsandbytes-4bit")
    lowbit.quantize_(plain, {"*.wo": None, **scheme})
    lowbit.export(plain, tmp_path / "out", "bitsandbytes-4bit")
    found = type(plain).from_pretrained(tmp_path / "out")
    weight = found.encoder.block[0].layer[0].SelfAttention.q.weight
    values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert torch.equal(values, plain.encoder.block[0].layer[0].SelfAttention.q.weight.dequantize())
