"""`lowbit eval` and `generate`, and what transformers makes of the folders that `lowbit quantize` writes."""

from __future__ import annotations

import json
import logging
import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lowbit
from lowbit.cli import main
from lowbit.formats import FormatError
from lowbit.inference import GPTQ, Search, Step, sampled_batches
from tests.cli.command import CONFIG, MATRICES, TEXT, make_model, weights
from tests.cli.command import lowbit as command
from tests.cli.examples import PAGES, beside_pages, needs_transformers, of_page

pytest.importorskip("transformers")


def add_tokenizer(folder: Path) -> None:
    """One token a byte, one that ends a text, and two that merges make, as GGUF needs some."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*letters, "<end>", "zq", "qz"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("z", "q"), ("q", "z")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with `model`, its tokenizer, `text.txt` and `model-int4`."""
    add_tokenizer(make_model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", "model", "--out", "model-int4"]) == 0
    return tmp_path


def logits_of(path: str, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = lowbit.load_pretrained(path)(input_ids=tokens).logits
    return found.float()


def test_eval_reports_what_the_formulas_give(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--data", "text.txt", "--against", "model", "--context", "32", "--limit", "80")
    assert main(["eval", "model-int4", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report, original = printed["models"][0], printed["original"]
    from transformers import AutoTokenizer

    ids = torch.tensor(AutoTokenizer.from_pretrained("model")(TEXT)["input_ids"])[:80]
    nll, kl, agreement = [], [], []
    for window in ids.split(32):
        made, wanted = (logits_of(p, window[None])[0, :-1] for p in ("model-int4", "model"))
        nll.append(F.cross_entropy(made, window[1:], reduction="none"))
        log = made.log_softmax(-1), wanted.log_softmax(-1)
        kl.append(F.kl_div(*log, reduction="none", log_target=True).sum(-1))
        agreement.append(made.argmax(-1) == wanted.argmax(-1))
    assert report["tokens"] == 80 - 3
    assert report["perplexity"] == pytest.approx(math.exp(torch.cat(nll).mean()), rel=1e-4)
    assert report["kl"] == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert report["agreement"] == pytest.approx(float(torch.cat(agreement).float().mean()))
    assert original["perplexity"] != report["perplexity"] and original["kl"] is None
    assert original["nbytes"] > report["nbytes"]


def test_a_model_agrees_with_itself(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "model", "--data", "text.txt", "--against", "model", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = printed["models"][0]
    assert report["kl"] == pytest.approx(0.0, abs=1e-6) and report["agreement"] == 1.0
    assert report["perplexity"] == printed["original"]["perplexity"]


def test_eval_shows_several_models_and_their_layers(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "model", "--scheme", "int8", "--out", "model-int8"]) == 0
    capsys.readouterr()
    options = ["--data", "text.txt", "--against", "model", "--by-layer", "--picture", "eval.png"]
    assert main(["eval", "model-int4", "model-int8", *options]) == 0
    shown = capsys.readouterr().out
    assert (home / "eval.png").stat().st_size > 10_000
    for word in (
        "model-int4",
        "model-int8",
        "original",
        "top-1 agreement",
        "layers.1.mlp.down_proj",
    ):
        assert word in shown


def test_generate_continues_as_transformers_does(home: Path) -> None:
    options = ("--prompt", "the model", "--max-new-tokens", "8", "--json")
    done = command("generate", "model-int4", *options, cwd=home)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    ids = tokenizer("the model", return_tensors="pt")["input_ids"]
    model: Any = lowbit.load_pretrained("model-int4")
    made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert report["text"] == tokenizer.decode(made, skip_special_tokens=True)
    assert report["tokens"] == len(made)


def test_the_bar_counts_the_tokens_that_are_made(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.cli import generate

    counts: list[int] = []

    @contextmanager
    def counted(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        assert (what, total, unit) == ("generating", 5, "tokens")
        yield counts.append

    monkeypatch.setattr(generate, "progress", counted)
    line = "generate model-int4 --prompt the --max-new-tokens 5"
    assert main(shlex.split(line)) == 0
    assert 0 < sum(counts) <= 5


def test_a_model_that_searches_over_beams(home: Path, capsys: Any) -> None:
    """transformers streams no tokens then."""
    folder = home / "beams"
    shutil.copytree(home / "model-int4", folder)
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 2}))
    assert main(shlex.split("generate beams --prompt the --max-new-tokens 3 --json")) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 3
    shutil.rmtree(folder)


def test_logs_of_other_packages_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """torchao, for example, logs which of its libraries it cannot load."""
    from lowbit.cli.language_model import _quiet

    other = logging.getLogger("of another package")
    other.addHandler(logging.StreamHandler())
    other.propagate = False
    with _quiet():
        other.warning("within")
    other.warning("afterwards")
    assert capfd.readouterr().err.split() == ["afterwards"]


@pytest.mark.parametrize("format", ["compressed-tensors", "lowbit"])
def test_static_activations_are_calibrated_on_the_text(
    format: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model as `calibrate` and `quantize_` give on the same windows, but for the head and the first layer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ("--data", "text.txt", "--context", "32", "--limit", "80", "--batch", "1")
    options += ("--format", format)
    given = ("--scheme", "int8_int8_static", "--layers", "*.layers.0.*=none")
    assert main(["quantize", "model", *given, *options, "--out", "made", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "lm_head.weight" in report["left"]

    model = AutoModelForCausalLM.from_pretrained("model")
    patterns = {"lm_head": None, "*.layers.0.*": None, "*": lowbit.Int8StaticActivationInt8Weight()}
    ids = torch.tensor(AutoTokenizer.from_pretrained("model")(TEXT)["input_ids"])[:80]
    with lowbit.calibrate(model, patterns), torch.no_grad():
        for window in ids.split(32):
            model(input_ids=window[None])
    lowbit.quantize_(model, patterns)
    named = lowbit.load_pretrained("made").named_parameters()
    assert sum(isinstance(param, lowbit.AffineTensor) for _, param in named) == 7
    with torch.no_grad():
        assert torch.equal(
            model(input_ids=ids[None, :20]).logits, logits_of("made", ids[None, :20])
        )


@pytest.mark.parametrize(
    ("methods", "steps"),
    [
        ("gptq", [GPTQ()]),
        ("search, GPTQ(asymmetric=0, damping=0.05)", [Search(), GPTQ(0.05, asymmetric=0)]),
        ("smooth-quant,learned-rounding(steps=2)", None),
    ],
)
def test_weights_are_calibrated_on_the_text(
    methods: str, steps: list[Step] | None, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the steps of --method, as `calibrate` does on the same windows."""
    options = ["--data", "text.txt", "--context", "32", "--limit", "80", "--method", methods]
    line = ["quantize", "model", "--group-size", "32", *options, "--out", "made"]
    assert main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["left"].keys() == {"lm_head.weight", "model.embed_tokens.weight"}
    assert len(report["calibrated"]) == MATRICES
    used = "calibrated on 80 tokens of text.txt: 3 windows of up to 32, 8 at a time"
    assert used in report["notes"]
    names = [layer["method"] for layer in report["calibrated"].values()]
    assert all("SmoothQuant" in name if steps is None else "GPTQ" in name for name in names)
    assert [path.name for path in home.glob(".made.*")] == []
    if steps is None:
        assert main([*line, "--overwrite"]) == 0
        assert "Largest relative squared errors of outputs" in capsys.readouterr().out
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("model")
    ids = torch.tensor(AutoTokenizer.from_pretrained("model")(TEXT)["input_ids"])[:80]
    patterns = {"lm_head": None, "*": lowbit.Int4WeightOnly(32)}
    batches = [ids[:64].view(2, 32), ids[None, 64:]]
    lowbit.calibrate(model, patterns, batches, steps=steps)
    with torch.no_grad():
        expected = model(input_ids=ids[None, :20]).logits.float()
        assert torch.equal(expected, logits_of("made", ids[None, :20]))


def test_weights_are_calibrated_without_a_text(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["quantize", "model", "--scheme", "nvfp4", "--method", "gptq", "--out", "made"]
    assert main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["calibrated"]) == MATRICES
    assert {layer["method"] for layer in report["calibrated"].values()} == {"GPTQ"}
    assert not any("tokens of" in note for note in report["notes"])
    model = lowbit.load_pretrained("model")
    patterns = {"lm_head": None, "*": lowbit.NVFP4WeightOnly()}
    lowbit.calibrate(model, patterns, steps=[GPTQ()])
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits.float(), logits_of("made", ids))


def test_weights_are_calibrated_on_tokens_that_the_model_draws(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", "sampled", "--context", "16", "--limit", "80", "--batch", "2"]
    line = ["quantize", "model", "--group-size", "32", *options, "--out", "made"]
    assert main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["calibrated"]) == MATRICES
    used = "calibrated on 5 sequences of 16 tokens that the model drew"
    assert used in report["notes"]
    model = lowbit.load_pretrained("model")
    batches = sampled_batches(model, 5, 16, batch_size=2)
    assert {int(ids[0, 0]) for ids in batches} == {model.config.bos_token_id}
    patterns = {"lm_head": None, "*": lowbit.Int4WeightOnly(32)}
    lowbit.calibrate(model, patterns, batches)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits.float(), logits_of("made", ids))


def test_as_much_of_a_text_is_read_as_it_takes(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 windows of what the model takes, of a text of 100 times as much; a token may be many characters."""
    from lowbit.cli import windows

    (home / "long.txt").write_text(TEXT * 2000, encoding="utf-8")
    sizes, read = [], windows.text_of

    def counted(data: Path, size: int = -1) -> str:
        text = read(data, size)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(windows, "text_of", counted)
    assert windows.tokens_of(Path("model"), Path("long.txt"), 50).tolist() == list(
        windows.tokens_of(Path("model"), Path("text.txt"), None)[:50]
    )
    assert max(sizes) <= 2 * len(TEXT)
    monkeypatch.setattr(windows, "_CHARACTERS", 1)
    (home / "rare.txt").write_text("zq" * 500, encoding="utf-8")
    assert windows.tokens_of(Path("model"), Path("rare.txt"), 300).tolist() == [257] * 300
    line = ["quantize", "model", "--data", "long.txt", "--method", "none", "--out", "made"]
    assert main([*line, "--group-size", "32"]) == 0
    used = "calibrated on 8,192 tokens of long.txt: 128 windows of up to 64, 8 at a time"
    assert used in capsys.readouterr().out


REFUSED = {
    "quantize model --scheme int8_int8_static --out out": "give --data TEXT",
    "quantize model --data short.txt --out out": "has 1 tokens",
    "quantize model --data few.txt --out out": "30 tokens, and a window has 64; accepted",
    "quantize model --data binary --out out": "not a text in UTF-8",
    "quantize model --batch 4 --out out": "--batch is for batches of a text: give --data TEXT",
    "quantize model --data text.txt --layers model.embed_tokens=int8 --out out": "of an embedding",
    "quantize model --data text.txt --method rotate --out out": "Rotate(online=False)",
    "quantize model --limit 20 --out out": "--limit is for batches of a text: give --data TEXT",
    "quantize model --method awq --out out": "AWQ: needs --data TEXT or --data sampled",
    "quantize model --method gptq --scales searched --out out": "--method search",
    "quantize model --data text.txt --scales searched --out out": "--method search",
    "quantize model --data text.txt --method gptq,obq --out out": "no method 'obq'; accepted: awq",
    "quantize model --data text.txt --method 'gptq(damping=-1)' --out out": "gptq(damping=-1): damp",
    "quantize model --data text.txt --method learned-rounding,gptq --out out": "come last",
    "quantize model --scheme int8_int8_static --data text.txt --context 65 --out out": "2 to 64",
    "quantize model-int4 --scheme int8_int8_static --data text.txt --out out": "in low bits already",
    "quantize model --scheme int8_int8_static --data text.txt --out model-int4": "exists already",
    "quantize model --scheme int8_int8_static --data missing.txt --format awk --out out": "'awk'",
    "quantize untokenized --scheme int8_int8_static --data text.txt --out out": "has no tokenizer",
    "quantize model --scheme int8_int8_static --data text.txt --layers x.*=int4 --out out": "x.*",
    "eval model-int4 --data missing.txt": "missing.txt cannot be read: No such file",
    "eval model-int4 --data binary": "not a text in UTF-8",
    "eval model-int4 --data short.txt": "at least 2",
    "eval model-int4 --data text.txt --context 65": "2 to 64",
    "eval model-int4 --data text.txt --context 1": "2 to 64",
    "eval missing --data text.txt": "does not exist",
    "eval untokenized --data text.txt": "has no tokenizer",
    "generate model-int4 --prompt ''": "at least one word",
    "generate unnamed --prompt the": "names no architecture",
    "quantize adapter --out out": "has no config.json: it is an adapter of PEFT; merge it into its model ",
    "quantize pipeline --out out": "has no config.json: it is a pipeline of diffusers; give the folder "
    "of a part: transformer, vae",
}


@pytest.mark.parametrize(("line", "way_out"), REFUSED.items(), ids=REFUSED)
def test_refusals_are_one_line(
    line: str, way_out: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "binary").write_bytes(b"\xff\xfe\xff")
    (home / "short.txt").write_text("a")
    (home / "few.txt").write_text("a b" * 10)
    make_model(home / "untokenized")
    (home / "untokenized/tokenizer.json").unlink()
    add_tokenizer(make_model(home / "unnamed"))
    (home / "unnamed/config.json").write_text("{}")
    for part in ("transformer/config", "vae/config", "model_index"):
        path = home / "pipeline" / f"{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (home / "adapter").mkdir(exist_ok=True)
    (home / "adapter/adapter_config.json").write_text("{}")
    capfd.readouterr()
    assert main(shlex.split(line)) == 1
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and way_out in printed.err
    assert not (home / "out").exists()


def test_transformers_takes_the_folder(home: Path) -> None:
    """Loaded by transformers, with the logits that lowbit computes."""
    from transformers import AutoModelForCausalLM

    import lowbit.hf  # noqa: F401

    assert main(["export", "model-int4", "--format", "lowbit", "--out", "own"]) == 0
    model = AutoModelForCausalLM.from_pretrained("own")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits.float(), logits_of("model-int4", tokens))


def test_estimate_takes_the_shapes_of_transformers(home: Path) -> None:
    from lowbit.cli import shapes

    found = shapes.read(home / "model/config.json")
    assert found.source == "transformers"
    assert found.weights == {name: tuple(t.shape) for name, t in weights().items()}
    assert len([*found.matrices()]) == MATRICES


def test_estimate_takes_a_model_of_text_and_images(tmp_path: Path) -> None:
    """Its config.json leaves out the fields of the language model that have transformers' defaults."""
    from lowbit.cli import shapes

    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    written = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written))
    found = shapes.read(path)
    assert found.source == "transformers"
    assert found.weights["model.language_model.embed_tokens.weight"] == (262208, 64)
    assert any("vision_tower" in name for name in found.weights)
    assert found.sizes == shapes.DecoderSizes(2, 64, 8 * 256, 4 * 256, 96, 262208)


def test_estimate_counts_experts_once_each_and_activations_by_those_visited(tmp_path: Path) -> None:
    from lowbit.cli import shapes

    config = {**CONFIG, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = shapes.read(path)
    experts = [shape for name, shape in found.weights.items() if "experts" in name]
    assert sum(map(math.prod, experts)) == 2 * 8 * 3 * 256 * found.sizes.hidden
    assert found.sizes.inner == 2 * 256


def test_estimate_says_why_transformers_refuses_a_model(tmp_path: Path) -> None:
    from lowbit.cli import shapes

    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "unheard"}))
    with pytest.raises(
        FormatError, match=r"'unheard': transformers 5.* does not know this model .*; or give a"
    ):
        shapes.read(path)


@pytest.mark.parametrize(
    ("hidden", "inner", "layers", "vocabulary"), [(256, 704, 4, 1000), (512, 1408, 2, 4000)]
)
def test_estimated_activations_are_those_that_autograd_keeps(
    hidden: int, inner: int, layers: int, vocabulary: int
) -> None:
    """All tensors that are kept for the backward pass of an eager Llama, but the weights. The formula adds logits in
    bfloat16 and the gradient of those in float32, which exist during the backward pass."""
    import transformers

    from lowbit.cli.memory import Run, activation_bytes
    from lowbit.cli.shapes import DecoderSizes

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": vocabulary}
    config = transformers.LlamaConfig(
        **{**CONFIG, **sizes, **heads, "max_position_embeddings": 256}
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    tokens = torch.randint(vocabulary, (2, 256))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    run = Run(2, 256)
    shape = DecoderSizes(layers, hidden, hidden, hidden // 2, inner, vocabulary)
    estimated = activation_bytes(shape, run) - 6 * run.tokens * vocabulary
    assert measured == pytest.approx(estimated, rel=0.02)


@pytest.mark.parametrize("line", [e for e in beside_pages() if needs_transformers(e)])
def test_examples_of_the_help_run(line: str, home: Path) -> None:
    assert main(shlex.split(line)[1:]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tokenizer(make_model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "plan.json").write_text('{"schemes": {"*": "int4(group_size=32)"}}')
    monkeypatch.chdir(tmp_path)
    for line in of_page(page):
        assert main(shlex.split(line)[1:]) == 0, line


def test_gguf_files_are_written_inspected_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    from tests.formats.test_gguf import tokenizer  # which skips without gguf

    monkeypatch.chdir(tmp_path)
    tokenizer(make_model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    line = "quantize model --group-size 32 --format gguf --out model.gguf"
    assert main(line.split()) == 0
    assert main(["inspect", "model.gguf", "--against", "model"]) == 0
    shown = capsys.readouterr().out
    assert "model.gguf: gguf" in shown and shown.count(" dB\n") == MATRICES + 5, (
        "and the five worst"
    )
    assert main(["generate", "model.gguf", "--prompt", "the", "--max-new-tokens", "4"]) == 0
    assert main(["eval", "model.gguf", "--data", "text.txt", "--against", "model"]) == 0


def test_a_mix_of_gguf_is_calibrated_on_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The calibrated file is nearer to the original than the searched one; --layers goes before the mix."""
    pytest.importorskip("gguf")
    from tests.formats.test_gguf import tokenizer  # which skips without gguf

    monkeypatch.chdir(tmp_path)
    tokenizer(make_model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text(TEXT * 8, encoding="utf-8")
    line = "quantize model --scheme Q2_K --format gguf --layers lm_head=Q8_0 --json"
    assert main([*line.split()[:6], "--out", "searched.gguf"]) == 0
    assert main([*line.split()[:6], "--out", "data.gguf", "--data", "text.txt"]) == 0
    capsys.readouterr()
    kl = {}
    for name in ("searched", "data"):
        options = ("--data", "text.txt", "--against", "model", "--limit", "256", "--json")
        assert main(["eval", f"{name}.gguf", *options]) == 0
        kl[name] = json.loads(capsys.readouterr().out)["models"][0]["kl"]
    assert kl["data"] < kl["searched"]
    for given, why in {
        "quantize model --scheme Q2_K --out out": "Q2_K is for --format gguf",
        "quantize model --scheme Q2_K --format gguf --group-size 32 --out out": "is not for --scheme",
    }.items():
        assert main(given.split()) == 1
        assert why in capsys.readouterr().err, given
