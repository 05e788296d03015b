"""`lowbit.evaluate` against the formulas, layer by layer, and through lm-eval."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit.inference import EvaluationReport
from lowbit.inference.evaluation.call import perplexity
from lowbit.tracing.batches import eval_mode

VOCABULARY = 50
INT2 = lowbit.Int2WeightOnly(32)


class Model(nn.Module):
    """A language model of ids, with a tied head and dropout, which evaluation switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        nn.init.normal_(self.embedding.weight, std=0.6)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 32))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + self.block(x))


def made(scheme: lowbit.Scheme | None = None) -> Model:
    torch.manual_seed(0)
    model = Model()
    if scheme is not None:
        lowbit.quantize_(model, scheme)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def by_formula(model: nn.Module, original: nn.Module, rows: list[tuple[Tensor, Tensor]]) -> Any:
    """(tokens, perplexity, KL, agreement) over (input, labels)."""
    nll, kl, same = [], [], []
    for tokens, labels in rows:
        with torch.no_grad(), eval_mode(model), eval_mode(original):
            s, t = model(tokens).double(), original(tokens).double()
        counted = labels != -100
        log_s, log_t = s[counted].log_softmax(-1), t[counted].log_softmax(-1)
        nll.append(F.nll_loss(log_s, labels[counted], reduction="none"))
        kl.append(F.kl_div(log_s, log_t, log_target=True, reduction="none").sum(-1))
        same.append(log_s.argmax(-1) == log_t.argmax(-1))
    means = [torch.cat(x).double().mean().item() for x in (nll, kl, same)]
    return len(torch.cat(nll)), math.exp(means[0]), *means[1:]


def shifted(tokens: Tensor) -> Tensor:
    return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], -100)), 1)


def test_the_figures_are_those_of_the_formulas() -> None:
    """Over ragged batches of three forms, with padding and labels of −100."""
    model, original = made(INT2), made()
    with torch.no_grad():
        original.embedding.weight += torch.rand_like(original.embedding.weight)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    labels = ids(1, 7).clone()
    labels[0, :3] = -100
    batches = [
        ids(3, 12),
        (ids(1, 2),),
        {"input_ids": ids(2, 9), "attention_mask": mask},
        {"input_ids": ids(1, 7), "labels": labels},
        ids(0, 5),
    ]
    padded = ids(2, 9).masked_fill(mask == 0, -100)
    rows = [
        (ids(3, 12), shifted(ids(3, 12))),
        (ids(1, 2), shifted(ids(1, 2))),
        (ids(2, 9), shifted(padded)),
        (ids(1, 7), shifted(labels)),
    ]
    report = lowbit.evaluate(model, original, iter(batches))
    found, plain = report.models[0], report.original
    assert plain is not None and plain.kl is None and plain.name == "original"
    wanted = by_formula(model, original, rows)
    assert (found.tokens, found.perplexity, found.kl, found.agreement) == pytest.approx(
        wanted, rel=1e-3
    )
    assert found.agreement is not None and found.agreement < 1
    assert plain.perplexity == pytest.approx(by_formula(original, original, rows)[1])
    assert model.training and original.training and found.nbytes < plain.nbytes
    alone = lowbit.evaluate(model, batches=[ids(3, 12)])
    assert alone.original is None and alone.models[0].kl is None
    assert alone.models[0].perplexity == pytest.approx(by_formula(model, model, rows[:1])[1])


def test_a_layer_alone_loses_what_the_original_loses_with_it(tmp_path: Path) -> None:
    original = made()
    low = made()
    lowbit.quantize_(low, {"embedding": INT2, "*": INT2})
    before = dict(original.named_modules())
    report = lowbit.evaluate({"low": lambda: low}, original, [ids(3, 12)], by_layer=True)
    layers = report.models[0].layers
    assert [*layers] == ["embedding", "block.0", "block.3"]  # the head is the embedding
    assert {n: id(m) for n, m in original.named_modules()} == {n: id(m) for n, m in before.items()}
    for name, found in layers.items():
        changed = copy.deepcopy(original)
        if name == "embedding":
            changed.embedding, changed.head = low.embedding, low.head
        else:
            changed.block[int(name[-1])] = low.get_submodule(name)
        every = torch.cat((ids(3, 12)[:, 1:], ids(3, 1)), 1)  # the last position counts here
        assert found == pytest.approx(
            by_formula(changed, original, [(ids(3, 12), every)])[2], rel=1e-2
        )
    text = str(report)
    assert all(word in text for word in ("low", "original", "top-1 agreement", "block.3"))
    assert text.index("embedding") < text.index("block.0")  # the one that loses most first
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["models"][0]["layers"] == layers


def test_a_picture_has_a_point_a_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    models = {"int8": made(lowbit.Int8WeightOnly()), "int2": made(INT2)}
    report = lowbit.evaluate(models, made(), [ids(2, 8)], by_layer=True)
    points, bars = report.figure().axes
    assert [t.get_text() for t in points.texts] == ["int8", "int2"]
    assert {t.get_text() for t in bars.get_yticklabels()} == {"embedding", "block.0", "block.3"}
    report.draw(tmp_path / "report.svg")
    assert (tmp_path / "report.svg").stat().st_size > 1000
    assert len(lowbit.evaluate(models, batches=[ids(2, 8)]).figure().axes) == 1


def test_tasks_run_through_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of its two functions: which tasks and models it is given, and which of its results are kept."""
    seen: list[Any] = []

    class HFLM:
        def __init__(self, pretrained: nn.Module, tokenizer: Any) -> None:
            assert tokenizer == "words"
            self.model = pretrained

    def simple_evaluate(model: HFLM, tasks: list[str], limit: int | None) -> Any:
        seen.append((model.model, tasks, limit, model.model.training))
        own = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_stderr": "N/A"}
        return {"results": dict.fromkeys(tasks, own)}

    harness, models, own = ModuleType("lm_eval"), ModuleType("models"), ModuleType("huggingface")
    harness.simple_evaluate, own.HFLM = simple_evaluate, HFLM  # type: ignore[attr-defined]
    names = ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface")
    for name, module in zip(names, (harness, models, own), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    model, original = made(INT2), made()
    report = lowbit.evaluate(model, original, tasks=["arc"], tokenizer="words", limit=3)
    assert seen == [(original, ["arc"], 3, False), (model, ["arc"], 3, False)]
    assert report.models[0].tasks == {"arc": {"acc": 0.5}} and report.models[0].perplexity is None
    assert "arc acc" in str(report)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = made(INT2), [ids(2, 5)]
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (model, {}, "no batches and no tasks"),
        (model, {"batches": []}, "no batches and no tasks"),
        ({}, {"batches": batches}, "no model"),
        (model, {"batches": batches, "by_layer": True}, "give both"),
        (model, {"tasks": ["arc"]}, "give the model's tokenizer"),
        (model, {"batches": [ids(2, 1)]}, "no token"),
        (model, {"batches": [torch.rand(2, 3)]}, r"torch.float32 \(2, 3\)"),
        (model, {"batches": batches, "original": nn.Embedding(60, 60)}, "same vocabulary"),
        (nn.Embedding(60, 30), {"batches": batches}, "30 tokens of the vocabulary"),
    ]
    for given, options, message in refusals:
        with pytest.raises(ValueError, match=message):
            lowbit.evaluate(given, **options)
    with pytest.raises(TypeError, match="without logits"):
        lowbit.evaluate(nn.Sequential(nn.Embedding(VOCABULARY, 3), nn.LSTM(3, 3)), batches=batches)
    with pytest.raises(ValueError, match="no layer 'embedding'"):
        lowbit.evaluate(model, nn.Embedding(VOCABULARY, VOCABULARY), batches, by_layer=True)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"lowbit\[eval\]"):
        lowbit.evaluate(model, tasks=["arc"], tokenizer="words")


def test_a_broken_model_has_an_infinite_perplexity() -> None:
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert perplexity(1.0) == math.e
    assert str(EvaluationReport(None, ())) == "model"


def test_padding_on_the_left_predicts_nothing() -> None:
    """The last token of the padding has the first real one as its next token."""

    class Table(nn.Embedding):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(input_ids)

    torch.manual_seed(0)
    model, mask = Table(20, 20), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    found = []
    for pad in (3, 9):
        ids = torch.tensor([[pad, pad, 5, 6], [1, 2, 4, pad]])
        batch = {"input_ids": ids, "attention_mask": mask}
        (result,) = lowbit.evaluate(copy.deepcopy(model), model, [batch]).models
        assert result.tokens == 3
        found.append(result.perplexity)
    assert found[0] == found[1]


def test_one_name_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match="tasks must be a list"):
        lowbit.evaluate(nn.Embedding(4, 4), tasks="arc_easy")
    with pytest.raises(TypeError, match="dict of names"):
        lowbit.evaluate([nn.Embedding(4, 4)], None, [torch.zeros(1, 2, dtype=torch.long)])
    with pytest.raises(TypeError, match=r"original must be an nn\.Module, got list"):
        lowbit.evaluate(nn.Embedding(4, 4), [torch.zeros(1, 2, dtype=torch.long)])


class Named(Model):
    """Gives a dict, as models outside of transformers do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {"loss": None, "logits": super().forward(*args, **kwargs)}


def test_an_output_may_be_a_dict() -> None:
    torch.manual_seed(0)
    named = Named()
    found = lowbit.evaluate(named, made(INT2), [ids(3, 12)], by_layer=True)
    plain = lowbit.evaluate(made(), made(INT2), [ids(3, 12)])
    assert found.models[0].kl == plain.models[0].kl and found.models[0].kl
    assert found.models[0].perplexity == plain.models[0].perplexity


@pytest.mark.parametrize("label", [-1, -101, VOCABULARY])
def test_a_label_that_is_no_token_is_named(label: int) -> None:
    batch = {"input_ids": ids(1, 6), "labels": ids(1, 6).index_fill(1, torch.tensor([3]), label)}
    with pytest.raises(ValueError, match=rf"model: token {label} .* 50 tokens .* is -100"):
        lowbit.evaluate(made(), batches=[batch])


def test_a_layer_on_another_device_is_moved_to_the_original(monkeypatch: Any) -> None:
    from lowbit.inference.evaluation import call

    low = made(INT2)
    low.block[0].apart = True
    real, moved = call._device_of, []

    def device_of(module: Any) -> Any:
        return torch.device("meta") if hasattr(module, "apart") else real(module)

    def to(self: Any, device: Any) -> Any:
        moved.append((self.apart, device))
        return self

    monkeypatch.setattr(call, "_device_of", device_of)
    monkeypatch.setattr(nn.Module, "to", to)
    found = lowbit.evaluate(low, made(), [ids(3, 12)], by_layer=True).models[0].layers
    assert moved == [(True, torch.device("cpu"))]
    assert (
        found == lowbit.evaluate(made(INT2), made(), [ids(3, 12)], by_layer=True).models[0].layers
    )


@pytest.mark.gpu
def test_models_on_different_devices_are_compared_by_layer() -> None:
    found = lowbit.evaluate(made(INT2), made().cuda(), [ids(3, 12)], by_layer=True).models[0].layers
    expected = lowbit.evaluate(made(INT2), made(), [ids(3, 12)], by_layer=True).models[0].layers
    assert found == pytest.approx(expected, rel=1e-2)
