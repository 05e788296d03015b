"""GGUF files that lowbit writes, by transformers' own loader and by llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly, LowbitTensor
from tests.formats.test_gguf import llama, tokenizer

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


def test_by_llama_cpp(tmp_path: Path) -> None:
    """The most likely tokens. llama.cpp rounds the inputs of its products to 8 bits."""
    xllamacpp = pytest.importorskip("xllamacpp")
    model, prompt = llama(Int4WeightOnly(32)), [5, 9, 20, 33, 7]
    words = tokenizer(tmp_path / "tokenizer")
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "model.gguf")
    params.n_ctx, params.warmup, params.cpuparams.n_threads = 64, False, 1
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": 5, "temperature": 0.0}
    found = xllamacpp.Server(params).handle_completions(asked)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    for token in found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        assert abs(token["logprob"] - wanted[token["id"]]) < 0.01
