"""Folders that lowbit writes, read by transformers' own loaders, and folders of theirs read by lowbit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8StaticActivationInt8Weight,
    Int8WeightOnly,
    LowbitTensor,
    PerBlock,
    quantize_,
)
from lowbit.layers.cache_scales import held_in
from tests.formats.models import SCHEMES
from tests.integrations.models import TOKENS, VOCABULARY, dtype_of_exact_blocks

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
ROUNDS_INPUTS = {n for n, s in SCHEMES.items() if s.activation is not None}


def llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A tiny Llama, with the buffers that transformers' loaders give it in any dtype."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def low_bit(scheme: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = llama(dtype)
    quantize_(model, {"lm_head": None, "*": scheme})
    return model


def loaded(folder: Path, dequantize: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    """By `from_pretrained`, as a plain model (`dequantize`), or as the package runs it."""
    config = transformers.CompressedTensorsConfig(dequantize=dequantize)
    options = {"quantization_config": config} if dequantize else {}
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits.float()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def assert_same_weights(found: nn.Module, model: nn.Module) -> None:
    own = dict(found.named_parameters())
    for name, t in model.named_parameters():
        wanted = t.dequantize() if isinstance(t, LowbitTensor) else t
        assert torch.equal(own[name], wanted), name


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_by_from_pretrained(name: str, tmp_path: Path) -> None:
    dtype = dtype_of_exact_blocks() if name == "float8 blocks" else torch.bfloat16
    model = low_bit(SCHEMES[name], dtype)
    lowbit.export(model, tmp_path / "out", max_shard_size="100KB")
    found = loaded(tmp_path / "out", dtype=dtype)
    assert_same_weights(found, model)
    # The dequantized model rounds no inputs: 8 bits of them make up the difference.
    assert error(logits(found), logits(model)) < (0.06 if name in ROUNDS_INPUTS else 0.02)


@pytest.mark.parametrize(
    "name",
    [
        *("int4 g64", "int4 rows", "int8", "int8 g64", "int3 symmetric", "int2 half-integer"),
        *("int8 x int8", "int8 x int4", "float8", "float8 tensor", "float8 x float8"),
    ],
)
def test_compressed_tensors_as_the_package_runs_it(name: str, tmp_path: Path) -> None:
    """Without an argument: the package decompresses at the first call, and rounds inputs where the scheme does."""
    model = low_bit(SCHEMES[name])
    lowbit.export(model, tmp_path / "out")
    found = loaded(tmp_path / "out", dequantize=False)
    assert error(logits(found), logits(model)) < (0.06 if name in ROUNDS_INPUTS else 0.02)
    assert_same_weights(found, model)


def test_float32_logits(tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(32), torch.float32)
    lowbit.export(model, tmp_path / "out")
    found = loaded(tmp_path / "out", dtype=torch.float32)
    assert_same_weights(found, model)
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-4, atol=1e-5)


def test_several_schemes_in_one_folder(tmp_path: Path) -> None:
    patterns = {
        "lm_head": None,
        "*mlp*": Int8DynamicActivationInt8Weight(),
        "*q_proj": lowbit.Float8WeightOnly(),
        "*": Int4WeightOnly(64),
    }
    model = llama()
    quantize_(model, patterns)
    lowbit.export(model, tmp_path / "out")
    found = loaded(tmp_path / "out", dequantize=False)
    assert error(logits(found), logits(model)) < 0.06
    assert_same_weights(found, model)
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


def test_static_scales_of_inputs(tmp_path: Path) -> None:
    model, scheme = llama(), {"lm_head": None, "*": Int8StaticActivationInt8Weight()}
    with lowbit.calibrate(model, scheme), torch.no_grad():
        model(TOKENS)
    quantize_(model, scheme)
    lowbit.export(model, tmp_path / "out")
    found = loaded(tmp_path / "out", dequantize=False)
    assert error(logits(found), logits(model)) < 0.06
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


def test_float8_blocks_by_from_pretrained(tmp_path: Path) -> None:
    model = low_bit(BLOCKS)
    lowbit.export(model, tmp_path / "out", "fp8", max_shard_size="100KB")
    kind = transformers.LlamaForCausalLM
    found = kind.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    if not torch.cuda.is_available():  # on a GPU its weights stay in float8
        assert_same_weights(found, model)
    assert error(logits(found.cpu()), logits(model)) < 0.06


@pytest.mark.parametrize("format", ["lowbit", "compressed-tensors", "fp8"])
def test_load_pretrained_builds_the_model(format: str, tmp_path: Path) -> None:
    model = low_bit(BLOCKS)
    lowbit.export(model, tmp_path / "out", format, max_shard_size="100KB")
    found = lowbit.load_pretrained(tmp_path / "out")
    assert type(found) is type(model) and not found.training
    assert type(found.model.layers[1].mlp.up_proj.weight) is lowbit.Float8Tensor
    assert torch.equal(logits(found), logits(model))
    assert found.config.quantization_config.quant_method == "lowbit"  # if it is saved again
    generated = found.generate(TOKENS, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, model.generate(TOKENS, max_new_tokens=3, do_sample=False))


def test_load_pretrained_ties_as_the_config_says(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    quantize_(model, {"*lm_head*": None, "*proj": Int4WeightOnly(64)})
    report = lowbit.export(model, tmp_path / "out")
    assert "lm_head.weight" not in [e.fqn for e in report.entries]
    assert error(logits(loaded(tmp_path / "out", dequantize=False)), logits(model)) < 0.02
    found = lowbit.load_pretrained(tmp_path / "out")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert torch.equal(logits(found), logits(model))


def test_a_head_in_low_bits_is_no_longer_tied(tmp_path: Path) -> None:
    """Its config.json says so: otherwise loaders would put the embedding in its place."""
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    quantize_(model, Int4WeightOnly(64))
    lowbit.export(model, tmp_path / "out")
    assert_same_weights(loaded(tmp_path / "out"), model)
    found = lowbit.load_pretrained(tmp_path / "out")
    assert type(found.lm_head.weight) is lowbit.AffineTensor
    assert torch.equal(logits(found), logits(model))


def test_a_folder_of_transformers_is_quantized_while_writing(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "plain", max_shard_size="200KB")
    report = lowbit.export(
        tmp_path / "plain", tmp_path / "out", scheme=Int4WeightOnly(64), max_shard_size="100KB"
    )
    assert len(report.converted) == 14 and report.snr.keys() == {*report.converted}
    quantize_(model, {"lm_head": None, "*": Int4WeightOnly(64)})
    assert_same_weights(loaded(tmp_path / "out"), model)
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


def test_plain_folders_load_as_transformers_loads_them(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "plain")), logits(model))


@pytest.mark.parametrize("quantizer", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"])
def test_folders_that_the_package_writes(quantizer: str, tmp_path: Path) -> None:
    """Compressed by compressed-tensors itself: lowbit reads the values that the package decompresses."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = llama()
    group = preset_name_to_scheme(quantizer, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _choose_scales(module)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "out")
    compressor.update_config(tmp_path / "out")
    found = lowbit.load_pretrained(tmp_path / "out")
    assert isinstance(found.model.layers[0].mlp.up_proj.weight, LowbitTensor)
    assert_same_weights(loaded(tmp_path / "out"), found)


@pytest.mark.parametrize("quantizer", [None, "W4A16", "FP8_DYNAMIC"])
def test_folders_with_scales_of_a_cache(quantizer: str | None, tmp_path: Path) -> None:
    """As llm-compressor writes them for `kv_cache_scheme`: read, and written again. Alone, the folder is that of a
    plain model."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = llama()
    groups = {} if quantizer is None else {"g": preset_name_to_scheme(quantizer, ["Linear"])}
    cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    config = QuantizationConfig(config_groups=groups, kv_cache_scheme=cache, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            if hasattr(module, name):
                getattr(module, name).data.fill_(0.05)
        if isinstance(module, nn.Linear) and hasattr(module, "quantization_scheme"):
            _choose_scales(module)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "out")
    compressor.update_config(tmp_path / "out")
    found = lowbit.load_pretrained(tmp_path / "out")
    scales = held_in(found)
    assert len(scales) == 4 and all(t == torch.tensor([0.05]).to(t.dtype) for t in scales.values())
    is_low = isinstance(found.model.layers[0].mlp.up_proj.weight, LowbitTensor)
    assert is_low == (quantizer is not None)
    if quantizer is None:
        assert torch.equal(logits(found), logits(llama()))
        scheme = Int4WeightOnly(64)
        report = lowbit.export(tmp_path / "out", tmp_path / "own", "lowbit", scheme=scheme)
    else:
        assert_same_weights(loaded(tmp_path / "out"), found)
        report = lowbit.export(tmp_path / "out", tmp_path / "own", "lowbit")
    assert len(report.converted) == 14 and report.notes == []
    again = held_in(lowbit.load_pretrained(tmp_path / "own"))
    assert again.keys() == scales.keys() and all(torch.equal(again[n], scales[n]) for n in scales)


def _choose_scales(module: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    args = module.quantization_scheme.weights
    weight = module.weight.detach()
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)


def test_an_embedding_in_low_bits_is_not_given_to_others(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, Int8WeightOnly(), filter_fn=lambda m, _: isinstance(m, nn.Embedding))
    with pytest.raises(lowbit.formats.FormatError, match="is the weight of an embedding"):
        lowbit.export(model, tmp_path / "out")
    lowbit.export(model, tmp_path / "out", "lowbit")
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))
