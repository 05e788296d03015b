"""Folders of models that are not Llamas: encoders, encoder-decoders, recurrent and vision models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly
from tests.covering import usually

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(14).view(2, 7) + 3
SEEN = {"vocab_size": 96}
ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
BERT = SEEN | ENCODER | {"hidden_size": 64}
BOTH = SEEN | {
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "d_model": 64,
}
T5 = SEEN | {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
LATE = {"pad_token_id": 0, "decoder_start_token_id": 0}
SPEECH = {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}
WAVES = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1}
STATE = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
IMAGES = ENCODER | {"hidden_size": 64, "image_size": 16}
LLAVA: dict[str, Any] = {"image_token_index": 95, "vision_feature_layer": -1}
LLAVA |= {"vision_config": {"model_type": "clip_vision_model", "patch_size": 8, **IMAGES}}
LLAVA |= {"text_config": {"model_type": "llama", **BERT}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", BERT | {"embedding_size": 32}),
    "bert": ("BertForMaskedLM", BERT),
    "biogpt": ("BioGptForCausalLM", BERT),
    "bart": ("BartForConditionalGeneration", BOTH | {"max_position_embeddings": 32}),
    "distilbert": ("DistilBertForMaskedLM", SEEN | {"dim": 64, "n_layers": 1, "n_heads": 4}),
    "electra": ("ElectraForMaskedLM", BERT | {"embedding_size": 32}),
    "llava": ("LlavaForConditionalGeneration", LLAVA),
    "mamba2": ("Mamba2ForCausalLM", SEEN | STATE | {"hidden_size": 64, "num_hidden_layers": 1}),
    "marian": ("MarianMTModel", BOTH | LATE | {"max_position_embeddings": 32}),
    "modernbert": ("ModernBertForMaskedLM", BERT | SPECIAL | {"eos_token_id": 2}),
    "mpnet": ("MPNetForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", BERT),
    "rwkv": ("RwkvForCausalLM", SEEN | {"hidden_size": 64, "num_hidden_layers": 2}),
    "t5": ("T5ForConditionalGeneration", T5),
    "vit": ("ViTForImageClassification", IMAGES | {"num_hidden_layers": 3}),
    "wav2vec2": ("Wav2Vec2ForCTC", BERT | WAVES | {"num_conv_pos_embedding_groups": 4}),
    "whisper": ("WhisperForConditionalGeneration", BOTH | SPEECH | SPECIAL | LATE),
    "xlnet": ("XLNetLMHeadModel", SEEN | {"d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 96}),
}
RENAMED = {"llava", "vit"}
"""Models whose folders have other names than the model in memory."""
OWN_INITIALISATION = {"mamba2", "modernbert", "rwkv", "t5", "wav2vec2"}
"""Models whose classes initialise `weight`, which packed layers of compressed-tensors do not have."""


def built(name: str) -> Any:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    return model(model.config_class(**sizes)).eval()


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    inputs: dict[str, Callable[[], Tensor]] = {
        "pixel_values": lambda: torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16),
        "input_values": lambda: torch.linspace(-9, 9, 800).sin().view(2, 400),
        "input_features": lambda: torch.linspace(-9, 9, 2 * 16 * 64).sin().view(2, 16, 64),
    }
    own = model.main_input_name
    given = {own: inputs[own]() if own in inputs else TOKENS}
    if model.config.model_type == "llava":
        given["input_ids"] = torch.tensor([[3, 95, 95, 95, 95, 5, 6], [4, 95, 95, 95, 95, 6, 5]])
        given["pixel_values"] = inputs["pixel_values"]()
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = TOKENS[:, :5]
    return model(**given).logits


@pytest.mark.parametrize("name", usually(MODELS, "bert", "electra", "rwkv", "t5", "vit"))
def test_a_folder_and_a_load_choose_the_same_weights(name: str, tmp_path: Path) -> None:
    """No embedding and no head that computes logits, whatever their names are."""
    from lowbit.hf import LowbitConfig

    model, scheme = built(name), Int8WeightOnly()
    model.save_pretrained(tmp_path / "plain")
    report = lowbit.export(tmp_path / "plain", tmp_path / "out", "lowbit", scheme=scheme)
    config = LowbitConfig(scheme)
    loaded = type(model).from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    if name not in RENAMED:
        assert {*report.converted} == {*loaded.hf_quantizer.report.converted}
    assert len(report.converted) == len(loaded.hf_quantizer.report.converted)
    head = model.get_output_embeddings()
    plain = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding) or m is head}
    assert not {f"{layer}.weight" for layer in plain} & {*report.converted}

    expected = outputs(loaded)
    assert torch.equal(outputs(lowbit.load_pretrained(tmp_path / "out")), expected)
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path / "out").eval()), expected)
    assert 0 < (expected - outputs(model)).norm() < 0.05 * expected.norm()


@pytest.mark.cover("values")
@pytest.mark.parametrize("format", ["compressed-tensors", "bitsandbytes-4bit"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - OWN_INITIALISATION))
def test_transformers_finds_a_tied_head(name: str, format: str, tmp_path: Path) -> None:
    """A folder lacks its weight, so config.json names the head among the plain layers."""
    package = {"compressed-tensors": "compressed_tensors"}.get(format, "bitsandbytes")
    pytest.importorskip(package)
    model = built(name)
    model.save_pretrained(tmp_path / "plain")
    is_nf4 = format == "bitsandbytes-4bit"
    scheme = lowbit.NF4WeightOnly() if is_nf4 else Int4WeightOnly(32)
    lowbit.export(tmp_path / "plain", tmp_path / "out", format, scheme=scheme, lossy=True)
    expected = outputs(lowbit.load_pretrained(tmp_path / "out"))
    found = outputs(type(model).from_pretrained(tmp_path / "out").eval())
    # bitsandbytes multiplies in bfloat16 here
    assert (found - expected).norm() <= (0.1 if is_nf4 else 1e-6) * expected.norm()


@pytest.mark.parametrize("format", ["lowbit", "compressed-tensors", "bitsandbytes-4bit"])
@pytest.mark.parametrize("name", sorted(RENAMED))
def test_layers_left_plain_in_a_folder_of_other_names(
    name: str, format: str, tmp_path: Path
) -> None:
    """transformers renames tensors while it reads them, and looks for the new names in config.json."""
    package = {"compressed-tensors": "compressed_tensors", "bitsandbytes-4bit": "bitsandbytes"}
    pytest.importorskip(package.get(format, "torch"))
    model = built(name)
    model.save_pretrained(tmp_path / "plain")
    is_nf4 = format == "bitsandbytes-4bit"
    scheme = lowbit.NF4WeightOnly(32) if is_nf4 else Int4WeightOnly(32)
    first = {"lowbit": Int8WeightOnly(), "compressed-tensors": Int8WeightOnly()}.get(format)
    patterns = {"*.0.*": first, "*.1.*": None, "*": scheme}
    lowbit.export(tmp_path / "plain", tmp_path / "out", format, scheme=patterns, lossy=is_nf4)
    expected = outputs(lowbit.load_pretrained(tmp_path / "out"))
    found = outputs(type(model).from_pretrained(tmp_path / "out").eval())
    assert (found - expected).norm() <= (0.1 if is_nf4 else 1e-6) * expected.norm()
    assert (expected - outputs(model)).norm() > 1e-4 * expected.norm()


def test_positions_that_are_computed_have_the_dtype_of_the_weights(tmp_path: Path) -> None:
    model = built("marian").bfloat16()
    model.save_pretrained(tmp_path)
    found = lowbit.load_pretrained(tmp_path)
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    name = "model.encoder.embed_positions.weight"
    assert torch.equal(found.get_parameter(name), theirs.get_parameter(name))
    assert torch.equal(outputs(found), outputs(theirs))


def test_infinity_in_a_config_stays(tmp_path: Path) -> None:
    built("mamba2").save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    assert lowbit.load_pretrained(tmp_path).config.time_step_limit[1] == float("inf")


@pytest.mark.filterwarnings("error:.* takes new values")
@pytest.mark.parametrize("name", ["int3", "ternary"])
def test_rwkv_halves_weights_for_inference_without_rounding(name: str) -> None:
    """It divides the weights of later layers by powers of two, and multiplies them again to train."""
    kind, sizes = MODELS["rwkv"]
    plain = getattr(transformers, kind)
    torch.manual_seed(0)
    model = plain(plain.config_class(**sizes | {"num_hidden_layers": 3, "rescale_every": 1}))
    if name == "ternary":
        lowbit.train.prepare_(model, lowbit.BitNet())
        lowbit.train.convert_(model)
    else:
        lowbit.quantize_(model, lowbit.IntxWeightOnly(3, 32))
    expected = outputs(model.train())
    assert (outputs(model.eval()) - expected).norm() <= 0.02 * expected.norm()  # its norms differ
    assert torch.equal(outputs(model.train()), expected)
