"""A tiny Llama from its first training step to the programs that serve it: what QAT trained is what each of them holds.

train with a low-bit optimizer → QAT, of all weights or of PEFT's adapters → convert → export, in Python and by the
command line → transformers with the package of each format, and llama.cpp.

The model is float16, as GPTQ, AWQ and GGUF have scales of float16. Weights are compared to the bit: products with unit
vectors give each weight of a linear alone, as the program computes with it. Tests skip the packages that are not
installed; GPTQ's and AWQ's tensors are also read by the formulas of those formats, without any package.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from tests.cli.command import TEXT
from tests.cli.command import lowbit as command
from tests.integrations import models
from tests.integrations.test_formats import error
from tests.integrations.test_four_bit_folders import of_bitsandbytes

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SCHEMES = {"int4": lowbit.Int4WeightOnly(group_size=32), "nf4": lowbit.NF4WeightOnly(64)}
IN_FLOAT16 = 0.01
"""The relative error of logits between programs that round other sums to float16."""
LLAMA_CPP = 0.02
"""The difference of log probabilities to llama.cpp, which rounds the inputs of products to 8 bits in blocks of 32."""

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """A model after QAT, converted, with what it computed before the conversion, and its folder in lowbit's format."""

    model: Any
    weights: Weights
    logits: Tensor
    folder: Path


# ---- training --------------------------------------------------------------------------------------------------------


def make_tokenizer(folder: Path) -> Any:
    """Byte-level BPE, trained on the text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return fast


def tokens_of(folder: Path) -> Tensor:
    found = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    return torch.tensor(found[:48])[None]


def train(model: Any, tokens: Tensor, steps: int, rate: float) -> list[float]:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = lowbit.optim.AdamW8bit(weights, lr=rate)
    losses = models.train(model, optimizer, steps, tokens)
    states = [t for state in optimizer.state.values() for t in state.values()]
    assert any(isinstance(t, lowbit.CodebookTensor) for t in states)
    return losses


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model in high precision, with its tokenizer."""
    folder = tmp_path_factory.mktemp("end-to-end") / "plain"
    words = make_tokenizer(folder)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(words),
        max_position_embeddings=64,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    losses = train(model, tokens_of(folder), 30, 2e-3)
    assert losses[-1] < losses[0] / 2
    model.half().save_pretrained(folder)
    return folder


def adapted(model: Any) -> Any:
    """LoRA over all linears of the blocks."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=32, target_modules="all-linear")
    return peft.get_peft_model(model, config)


@pytest.fixture(scope="module")
def trained(plain: Path) -> Callable[[str, str], Trained]:
    """By the method of QAT, "full" or "lora", and the scheme; each is trained once."""
    return functools.cache(lambda method, scheme: qat(plain, method, scheme))


def qat(plain: Path, method: str, scheme: str) -> Trained:
    start = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
    tokens = tokens_of(plain)
    model = adapted(start) if method == "lora" else start
    before = weights_of(model)
    lowbit.qat.prepare_(model, {"*lm_head": None, "*": SCHEMES[scheme]})
    rounded = weights_of(model)
    losses = train(model, tokens, 10, 5e-3 if method == "lora" else 2e-4)
    assert losses[-1] < losses[0]
    values, logits = weights_of(model), logits_of(model, tokens)
    for name, values_of_one in values.items():
        assert not torch.equal(rounded[name], before[name]), name
        assert not torch.equal(values_of_one, rounded[name]), name
    lowbit.qat.convert_(model)
    model = model.merge_and_unload() if method == "lora" else model
    folder = plain.parent / f"{method}-{scheme}"
    lowbit.export(model, folder, "lowbit", tokenizer=plain)
    return Trained(model, values, logits, folder)


# ---- what a program computes with ------------------------------------------------------------------------------------


@torch.no_grad()
def weights_of(model: Any) -> Weights:
    """The 14 weights of the blocks."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            units = torch.eye(module.in_features, dtype=torch.float16)
            is_bnb = (
                type(module).__name__ == "Linear4bit"
            )  # whose product on a CPU rounds to bfloat16
            values = of_bitsandbytes(module) if is_bnb else module(units).T
            found[name.removeprefix("base_model.model.")] = values
    assert len(found) == 14
    return found


@torch.no_grad()
def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens).logits.float()


def assert_same_weights(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def assert_same(found: Any, wanted: Trained) -> None:
    # The weights first: bitsandbytes packs them for the CPU at the first call, and does not dequantize that.
    assert_same_weights(weights_of(found), wanted.weights)
    assert error(logits_of(found, tokens_of(wanted.folder)), wanted.logits) < IN_FLOAT16


def load(folder: Path, **options: Any) -> Any:
    return models.loaded(folder, torch.float16, **options)


def by_compressed_tensors(folder: Path) -> Any:
    return models.by_compressed_tensors(folder, torch.float16)


def by_gptqmodel(folder: Path) -> Any:
    """In torch's kernels: the package compiles its others for minutes at first use."""
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    is_awq = folder.name == "awq"
    settings = transformers.AwqConfig if is_awq else transformers.GPTQConfig
    chosen = settings(bits=4, backend="torch_awq" if is_awq else "gptq_torch")
    return load(folder, device_map="cpu", quantization_config=chosen)


def by_bitsandbytes(folder: Path) -> Any:
    pytest.importorskip("bitsandbytes")
    return load(folder, device_map="cpu")


def by_gguf(file: Path) -> Any:
    pytest.importorskip("gguf")
    return load(file.parent, gguf_file=file.name)


def by_lowbit_hf(folder: Path) -> Any:
    import lowbit.hf  # noqa: F401

    return load(folder)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "lowbit": ("int4", by_lowbit_hf),
    "compressed-tensors": ("int4", by_compressed_tensors),
    "gptq": ("int4", by_gptqmodel),
    "awq": ("int4", by_gptqmodel),
    "gguf": ("int4", by_gguf),
    "bitsandbytes-4bit": ("nf4", by_bitsandbytes),
}
"""By format: the scheme that it holds, and how transformers loads it."""
each_format = pytest.mark.parametrize("format", READERS)
each_method = pytest.mark.parametrize("method", ["full", "lora"])


def out_of(folder: Path, format: str) -> Path:
    if format == "gguf":
        pytest.importorskip("gguf")
    return folder / ("model.gguf" if format == "gguf" else format)


@each_format
@each_method
def test_what_was_trained_is_what_transformers_loads(
    method: str, format: str, trained: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    out, (scheme, read) = out_of(tmp_path, format), READERS[format]
    wanted = trained(method, scheme)
    report = lowbit.export(wanted.model, out, format, tokenizer=wanted.folder)
    assert len(report.converted) == 14 and not report.snr
    tokens = tokens_of(wanted.folder)
    converted = logits_of(wanted.model, tokens)
    assert error(converted, wanted.logits) < IN_FLOAT16
    assert torch.equal(logits_of(lowbit.load_pretrained(out), tokens), converted)
    assert_same(read(out), wanted)


def four_bits(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Number i of a word of 32 bits lies at bits 4·order[i] and above; words [R, C] → numbers [R, 8 C]."""
    shifts = 4 * torch.tensor(order)
    return (((words.long() & 0xFFFFFFFF)[..., None] >> shifts) & 15).flatten(1)


def of_gptq(part: Callable[[str], Tensor]) -> Tensor:
    """Inputs lie along the bits of a word; a zero point is stored less one."""
    codes, zeros = four_bits(part("qweight").T), four_bits(part("qzeros")) + 1  # [N, K], [G, N]
    group = part("g_idx").long()
    return (codes - zeros.T[:, group]) * part("scales").T[:, group]


def of_awq(part: Callable[[str], Tensor]) -> Tensor:
    """Outputs lie along the bits of a word, the even ones of eight below the odd ones."""
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    codes, zeros = four_bits(part("qweight"), order), four_bits(part("qzeros"), order)
    size = len(codes) // len(zeros)  # [K, N], [G, N]
    shifted = codes - zeros.repeat_interleave(size, 0)
    return (shifted * part("scales").repeat_interleave(size, 0)).T


@pytest.mark.parametrize(("format", "values_of"), [("gptq", of_gptq), ("awq", of_awq)])
@each_method
def test_what_was_trained_is_what_the_tensors_say(
    method: str,
    format: str,
    values_of: Callable[[Callable[[str], Tensor]], Tensor],
    trained: Callable[[str, str], Trained],
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    wanted = trained(method, "int4")
    lowbit.export(wanted.model, tmp_path / format, format, tokenizer=wanted.folder)
    tensors = load_file(tmp_path / format / "model.safetensors")
    found = {n: values_of(lambda part, n=n: tensors[f"{n}.{part}"]) for n in wanted.weights}
    assert_same_weights(found, wanted.weights)


@each_method
def test_what_was_trained_is_what_llama_cpp_runs(
    method: str, trained: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    xllamacpp = pytest.importorskip("xllamacpp")
    made = trained(method, "int4")
    lowbit.export(made.model, tmp_path / "model.gguf", "gguf", tokenizer=made.folder)
    tokens = tokens_of(made.folder)[:, :12]
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "model.gguf")
    params.n_ctx, params.warmup, params.cpuparams.n_threads = 64, False, 1
    count = made.model.config.vocab_size
    asked = {"prompt": tokens[0].tolist(), "n_predict": 1, "n_probs": count, "temperature": 0.0}
    found = xllamacpp.Server(params).handle_completions(asked)
    listed = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    wanted = logits_of(made.model, tokens)[0, -1].log_softmax(-1)
    likely = [token for token in listed if wanted[token["id"]] > -7]
    assert len(likely) > 3 and listed[0]["id"] == int(wanted.argmax())
    for token in likely:
        assert abs(token["logprob"] - float(wanted[token["id"]])) < LLAMA_CPP, token


# ---- the command line, each step in a process of its own ------------------------------------------------------------


def run(*arguments: str, cwd: Path) -> dict[str, Any]:
    done = command(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@each_format
def test_the_command_line_exports_the_same(
    format: str, trained: Callable[[str, str], Trained], tmp_path: Path
) -> None:
    scheme, read = READERS[format]
    wanted, out = trained("full", scheme), out_of(tmp_path, format)
    report = run("export", str(wanted.folder), "--format", format, "--out", str(out), cwd=tmp_path)
    assert report["snr_db"] == {} and report["low_bit_bytes"] > 0
    shown = run("inspect", str(out), "--against", str(wanted.folder), cwd=tmp_path)
    low = [w for w in shown["weights"] if w["low_bit"]]
    assert len(low) == 14 and all(w["snr_db"] is None for w in low)  # infinite: no value changed
    assert_same(read(out), wanted)


def test_the_command_line_quantizes_and_runs(plain: Path, tmp_path: Path) -> None:
    """A plain folder to one that transformers runs, without Python."""
    pytest.importorskip("compressed_tensors")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = ("--scheme", "int4", "--group-size", "32", "--out", "int4")
    report = run("quantize", str(plain), *options, cwd=tmp_path)
    assert len(report["snr_db"]) == 14 and min(report["snr_db"].values()) > 15
    found = run("eval", "int4", "--data", "text.txt", "--against", str(plain), cwd=tmp_path)
    judged, original = found["models"][0], found["original"]
    assert judged["perplexity"] < 1.1 * original["perplexity"] and judged["kl"] < 0.05
    made = run("generate", "int4", "--prompt", "the model", "--max-new-tokens", "8", cwd=tmp_path)
    theirs = load(tmp_path / "int4")
    words = transformers.AutoTokenizer.from_pretrained(plain)
    ids = words("the model", return_tensors="pt")["input_ids"]
    text = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert made["text"] == words.decode(text, skip_special_tokens=True)
    model = load(plain)
    lowbit.quantize_(model, {"lm_head": None, "*": SCHEMES["int4"]})
    assert_same_weights(weights_of(theirs), weights_of(model))
