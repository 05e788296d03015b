"""GGUF files that lowbit writes, by transformers' own loader and by llama.cpp."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly, LowbitTensor
from tests.formats.test_gguf import FILLED, LLAMA, in_other_types, llama, sentencepiece, tokenizer

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("scheme", [Int4WeightOnly(32), Int8WeightOnly()], ids=["int4", "int8"])
def test_by_from_pretrained(scheme: lowbit.Scheme, tmp_path: Path) -> None:
    model = llama(scheme)
    words = tokenizer(tmp_path / "tokenizer")
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    kind = transformers.AutoModelForCausalLM
    found = kind.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.bfloat16)
    own = dict(found.named_parameters())
    for name, t in model.named_parameters():
        wanted = t.dequantize() if isinstance(t, LowbitTensor) else t
        assert torch.equal(own[name], wanted), name


def test_a_plain_folder_becomes_a_file(tmp_path: Path) -> None:
    words = tokenizer(tmp_path / "plain")
    model = llama({"lm_head": Int8WeightOnly(), "*": Int4WeightOnly(32)})
    lowbit.dequantize_(model)
    model.save_pretrained(words)
    report = lowbit.export(
        words, tmp_path / "model.gguf", "gguf", scheme=Int4WeightOnly(32), lossy=True
    )
    assert len(report.converted) == 14
    found = lowbit.load_pretrained(tmp_path / "model.gguf")
    assert type(found.model.layers[0].mlp.up_proj.weight) is lowbit.AffineTensor


@pytest.mark.parametrize("format", ["compressed-tensors", "lowbit", "gptq"])
def test_a_file_becomes_a_folder(format: str, tmp_path: Path) -> None:
    model = llama({"lm_head": None, "*": Int4WeightOnly(32)})
    words = tokenizer(tmp_path / "tokenizer")
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    report = lowbit.export(tmp_path / "model.gguf", tmp_path / "folder", format)
    assert len(report.converted) == 14 and not report.snr
    found = dict(lowbit.load_pretrained(tmp_path / "folder").named_parameters())
    for name, t in model.named_parameters():
        own = found[name]
        assert isinstance(own, LowbitTensor) == isinstance(t, LowbitTensor), name
        values = [x.dequantize() if isinstance(x, LowbitTensor) else x for x in (own, t)]
        assert torch.equal(values[0].float(), values[1].float()), name
    read = transformers.AutoTokenizer.from_pretrained
    text = "the tokenizer of the file"
    assert read(tmp_path / "folder")(text)["input_ids"] == read(words)(text)["input_ids"]
    settings = (tmp_path / "folder" / "tokenizer_config.json").read_text()
    assert "local_files_only" not in settings


ROPE = {"rope_theta": 10000.0, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": ("LlamaConfig", {}),
    "llama3 rope": ("LlamaConfig", {"rope_parameters": {**ROPE, **LLAMA3}}),
    "linear rope": ("LlamaConfig", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
}


def of_kind(kind: str) -> Any:
    """A float32 model whose biases and norms are not those of a new one, and which attends to positions."""
    name, changes = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**LLAMA, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for param in model.parameters():
        with torch.no_grad():
            param.mul_(3) if param.ndim > 1 else param.add_(torch.randn_like(param) * 0.2)
    lowbit.quantize_(model, lowbit.formats.grid("gguf", Int8WeightOnly(32)))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_by_llama_cpp(kind: str, tmp_path: Path) -> None:
    """The most likely tokens. llama.cpp rounds the inputs of its products to 8 bits."""
    xllamacpp = pytest.importorskip("xllamacpp")
    model, prompt = of_kind(kind), [*range(5, 45)]
    words = tokenizer(tmp_path / "tokenizer")
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert_by_llama_cpp(xllamacpp, tmp_path / "model.gguf", prompt, wanted)
    own = lowbit.load_pretrained(tmp_path / "model.gguf")
    assert type(own) is type(model) or kind == "mistral"
    with torch.no_grad():
        logits = own(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert (logits - wanted).abs().max() < 0.02  # it is in float16


@pytest.mark.parametrize("name", FILLED)
def test_types_with_blocks_of_32_by_llama_cpp(name: str, tmp_path: Path) -> None:
    """Its most likely tokens of a file that lowbit only reads."""
    xllamacpp = pytest.importorskip("xllamacpp")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "initializer_range": 0.08}
    model = llama(Int8WeightOnly(32), **sizes)
    words, prompt = tokenizer(tmp_path / "tokenizer"), [*range(60, 100)]
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    in_other_types(tmp_path / "model.gguf", tmp_path / "other.gguf", FILLED[name])
    own = lowbit.load_pretrained(tmp_path / "other.gguf")
    with torch.no_grad():
        logits = own(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert_by_llama_cpp(xllamacpp, tmp_path / "other.gguf", prompt, logits)


def assert_by_llama_cpp(
    xllamacpp: Any, path: Path, prompt: list[int], wanted: torch.Tensor
) -> None:
    """Its most likely tokens are those of `wanted`, the logarithms of probabilities."""
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": 5, "temperature": 0.0}
    found = server(xllamacpp, path).handle_completions(asked)
    for token in found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        assert abs(token["logprob"] - wanted[token["id"]]) < 0.06


def server(xllamacpp: Any, path: Path) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.warmup, params.cpuparams.n_threads = 64, False, 1
    return xllamacpp.Server(params)


def test_sentencepiece_by_llama_cpp(tmp_path: Path) -> None:
    """Its tokens of a text, and those that transformers takes from the file, are those of the tokenizer."""
    xllamacpp = pytest.importorskip("xllamacpp")
    words = sentencepiece(tmp_path / "tokenizer")
    path = tmp_path / "model.gguf"
    lowbit.export(llama(Int4WeightOnly(32), vocab_size=420), path, "gguf", tokenizer=words)
    running = server(xllamacpp, path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("def test_a_tokenizer", "two  spaces and\na line", "日本 é", " before"):
        wanted = words(text, add_special_tokens=False)["input_ids"]
        body = json.dumps({"content": text}).encode()
        request = urllib.request.Request(
            f"{running.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["tokens"] == wanted, text
        if not text.startswith(" "):  # transformers drops a space there
            assert again(text, add_special_tokens=False)["input_ids"] == wanted, text
