"""Each argument of the public constructors and functions is given something that it cannot be. The error names the
argument, the value or its type."""

from __future__ import annotations

import collections
import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit import formats, inference, optim, qat, sync, train


class Wrong:
    """No argument takes this."""

    def __repr__(self) -> str:
        return "<wrong>"


WRONG = Wrong()
ACCEPTED_ERRORS = (TypeError, ValueError, NotImplementedError)
INT4 = lb.Int4WeightOnly(32)
X = torch.randn(4, 64)
KINDS = ("Only", "Weight", "Precision", "BitNet")
TENSORS = ("input", "scale", "zero_point", "codes", "min_val", "max_val")
"""Arguments that must be tensors. A product asks nothing of them that torch does not ask."""
ELSEWHERE = {
    ("params",): "torch.optim.Optimizer checks it",
    (
        "tokenizer",
        "scheme",
        "like",
        "example_inputs",
        "dynamic_shapes",
    ): "of another use of `export`",
    ("scale_dtype", "output_dtype"): "torch's errors",
}
PASSES = {name for names in ELSEWHERE for name in names}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def quantized() -> nn.Module:
    model = plain()
    lb.quantize_(model, lb.Int8WeightOnly())
    return model


def prepared() -> nn.Module:
    model = plain()
    qat.prepare_(model, INT4)
    return model


def in_training() -> nn.Module:
    model = plain()
    train.prepare_(model, lb.Int8Weight())
    return model


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(64, 64))]


Call = tuple[Callable[..., Any], dict[str, Callable[[], Any]]]
BLOCK = {"block_size": lambda: (1, 64)}
OF_AFFINE = {**BLOCK, "scale": lambda: torch.ones(4, 1), "zero_point": lambda: None}


def constructors() -> Iterator[tuple[str, Call]]:
    """Name → a callable, and what makes the arguments that it needs."""
    needed: dict[str, dict[str, Callable[[], Any]]] = {
        "IntxWeightOnly": {"bits": lambda: 3},
        "PruneExperts": {"keep": lambda: 2},
        "CPUOffloadOptimizer": {"base_class": lambda: optim.AdamW8bit},
    }
    for name in lb.surface.__all__:
        if name.endswith(KINDS):
            yield name, (getattr(lb, name), needed.get(name, {}))
    for name in (
        "AWQ",
        "GPTQ",
        "LearnedRounding",
        "Prune24",
        "PruneExperts",
        "Rotate",
        "SmoothQuant",
    ):
        yield name, (getattr(inference, name), needed.get(name, {}))
    for name in ("AdamW", "Adam", "SGD", "Lion", "AdEMAMix", "Muon", "SOAP", "CPUOffloadOptimizer"):
        yield name, (getattr(optim, name), {"params": parameters, **needed.get(name, {})})


def calls_of_models() -> Iterator[tuple[str, Call]]:
    models: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "quantize_": (plain, lb.quantize_),
        "calibrate": (plain, lb.calibrate),
        "qat.prepare_": (plain, qat.prepare_),
        "train.prepare_": (plain, train.prepare_),
        "trace": (plain, lb.trace),
        "dequantize_": (quantized, lb.dequantize_),
        "freeze_": (quantized, inference.freeze_),
        "qat.convert_": (prepared, qat.convert_),
        "undo_": (prepared, qat.undo_),
        "enable_": (prepared, qat.enable_),
        "parameter_groups": (prepared, qat.parameter_groups),
        "Schedule": (prepared, qat.Schedule),
        "Distillation": (prepared, qat.Distillation),
        "train.convert_": (in_training, train.convert_),
        "restore_": (in_training, train.restore_),
        "load_": (plain, sync.load_),
    }
    further: dict[str, dict[str, Callable[[], Any]]] = {
        "quantize_": {"scheme": lambda: INT4},
        "calibrate": {"scheme": lambda: INT4, "batches": lambda: [X]},
        "qat.prepare_": {"scheme": lambda: INT4},
        "train.prepare_": {"scheme": lb.Int8Weight},
        "trace": {"input": lambda: X},
        "load_": {"tensors": list},
    }
    for name, (model, call) in models.items():
        yield name, (call, {"model": model, **further.get(name, {})})


def other_calls() -> Iterator[tuple[str, Call]]:
    own = {"model": plain, "batches": lambda: [X], "schemes": lambda: [INT4], "bits": lambda: 32}
    ids = torch.randint(32, (2, 4))
    embed = {"model": lambda: nn.Embedding(32, 32), "batches": lambda: [ids]}
    yield "autoquant", (lb.autoquant, own)
    yield "evaluate", (lb.evaluate, embed)
    yield "Int", (lb.Int, {"bits": lambda: 4})
    yield "Float8", (lb.Float8, {})
    yield "LookupTable", (lb.LookupTable, {"values": lambda: range(16)})
    yield "PerGroup", (lb.PerGroup, {"group_size": lambda: 32})
    yield "Spec", (lb.Spec, {"format": lambda: lb.Int(4), "granularity": lambda: lb.PerGroup(32)})
    yield "Scheme", (lb.Scheme, {"weight": lambda: INT4.weight})
    yield "Plan", (lb.Plan, {"schemes": lambda: {"*": INT4}})
    yield (
        "step_in_backward",
        (optim.step_in_backward, {"optimizer": lambda: optim.SGD(parameters())}),
    )
    yield "formats.register", (formats.register, {"format": lambda: WRONG})
    logits = {"student_logits": lambda: X, "teacher_logits": lambda: X}
    yield "distillation_loss", (qat.distillation_loss, logits)
    functions = {"condition": lambda: bool, "impl": lambda: bool}
    yield "register_linear", (lb.register_linear, functions)
    choose = {**BLOCK, "input": lambda: X, "mapping": lambda: "symmetric"}
    yield (
        "choose_qparams",
        (lb.choose_qparams_affine, choose | {"target_dtype": lambda: torch.int8}),
    )
    quantize = {**OF_AFFINE, "input": lambda: X, "output_dtype": lambda: torch.int8}
    yield "quantize_affine", (lb.quantize_affine, quantize)
    fake = {**OF_AFFINE, "input": lambda: X, "quant_dtype": lambda: torch.int8}
    yield "fake_quantize_affine", (lb.fake_quantize_affine, fake)
    codes = {**OF_AFFINE, "codes": lambda: X.to(torch.int8)}
    yield "dequantize_affine", (lb.dequantize_affine, codes)


CALLS = dict((*constructors(), *calls_of_models(), *other_calls()))


def arguments(call: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [p for p in inspect.signature(call).parameters.values() if p.kind in kinds]
    if isinstance(call, type) and issubclass(call, optim.LowbitOptimizer):
        names = optim.CommonOptions.__annotations__
        found += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    return [p for p in found if p.name not in TENSORS and p.name not in PASSES]


@pytest.mark.parametrize(
    ("name", "argument"), [(n, p.name) for n, (call, _) in CALLS.items() for p in arguments(call)]
)
def test_no_argument_takes_anything(name: str, argument: str) -> None:
    call, made = CALLS[name]
    for wrong in (WRONG, *wrong_of(call, argument)):
        given = {key: make() for key, make in made.items()} | {argument: wrong}
        with pytest.raises(ACCEPTED_ERRORS) as error:
            call(**given)
        message = str(error.value)
        named = (argument, repr(wrong), type(wrong).__name__, str(wrong))
        assert any(each in message for each in named), (wrong, message)


def wrong_of(call: Callable[..., Any], argument: str) -> list[Any]:
    """Further wrong values, by the annotation."""
    parameter = next(p for p in arguments(call) if p.name == argument)
    annotation = str(parameter.annotation)
    found: list[Any] = ["nope"] if annotation in ("bool", "int", "float", "bool | None") else []
    found += [2, None] if annotation == "bool" else []
    found += [2.5] if annotation == "int" else []
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_arguments_that_are_not_wrong(name: str) -> None:
    """Else the errors above may be of another argument."""
    if name in ("formats.register", "evaluate", "register_linear"):
        return
    call, made = CALLS[name]
    call(**{key: make() for key, make in made.items()})


@pytest.mark.parametrize("figure", ["bits", "damage", "measured", "milliseconds"])
def test_figures_of_a_plan(figure: str, tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({figure: "x", "schemes": {"*": "int4"}}))
    with pytest.raises(ValueError, match=rf"plan.json: {figure} must be a number, got 'x'"):
        lb.Plan.load(path)
    lb.Plan({"*": INT4}, **{figure: 0.0}).save(path)
    assert getattr(lb.Plan.load(path), figure) == 0.0
    if figure in ("bits", "milliseconds"):
        with pytest.raises(ValueError, match=f"{figure} must be a finite number of at least 0"):
            lb.Plan({"*": INT4}, **{figure: -1.0})
        with pytest.raises(ValueError, match=figure):
            lb.Plan({"*": INT4}, **{figure: math.nan})


@pytest.mark.parametrize("option", ["lossy", "overwrite", "scales", "device", "max_shard_size"])
@pytest.mark.parametrize("wrong", ["x", 2.5, WRONG], ids=str)
def test_options_of_export(option: str, wrong: Any, tmp_path) -> None:
    if (option, wrong) == ("device", "x"):
        return  # torch's error names it
    for call in (lb.export, sync.write):
        if option in inspect.signature(call).parameters:
            with pytest.raises((TypeError, ValueError), match=option):
                call(quantized(), tmp_path / "out", "lowbit", **{option: wrong})
    assert not (tmp_path / "out").exists()


def test_files(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    lb.save(plain(), path)
    for call in (lb.load, lb.load_metadata):
        with pytest.raises(TypeError, match="verify must be True or False, got 'x'"):
            call(path, verify="x")  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"device must be a torch\.device, .* got <wrong>"):
        lb.load(path, device=WRONG)  # type: ignore[arg-type]


class Listed(collections.UserList[Any]):
    """A sequence that is neither a list nor a tuple, as omegaconf and hydra give."""


def test_values_of_configs_and_of_numpy(tmp_path) -> None:
    """Other types of the values that an argument takes."""
    optimizer = optim.AdamW8bit(
        parameters(), lr=np.float32(0.5), betas=Listed([0, np.float64(0.5)])
    )
    assert optimizer.param_groups[0]["betas"] == (0.0, 0.5)
    scale, _ = lb.choose_qparams_affine(X, "symmetric", Listed([1, 64]), torch.int8)
    assert torch.equal(scale, lb.choose_qparams_affine(X, "symmetric", (1, 64), torch.int8)[0])
    path = tmp_path / "plan.json"
    lb.Plan({"*": INT4}, bits=np.float32(4.5), damage=torch.tensor(0.25), measured=1).save(path)
    plan = lb.Plan.load(path)
    assert (plan.bits, plan.damage, plan.measured) == (4.5, 0.25, 1.0)
    sizes = [formats.shards.size_in_bytes(size) for size in (5000, 5e3, np.int64(5000), "5KB")]
    assert sizes == [5000] * 4


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")], ids=str)
def test_devices(device: Any, tmp_path) -> None:
    model = quantized()
    lb.save(model, tmp_path / "model.safetensors")
    lb.export(model, tmp_path / "out", "lowbit", device=device)
    loaded = plain()
    loaded.load_state_dict(lb.load(tmp_path / "model.safetensors", device=device), assign=True)
    read = lb.load_pretrained(tmp_path / "out", plain(), device=device)
    assert torch.equal(loaded(X), model(X)) and torch.equal(read(X), model(X))
    with pytest.raises(RuntimeError, match="nodevice"):
        lb.load(tmp_path / "model.safetensors", device="nodevice")


def test_options_of_numpy_and_none() -> None:
    given = {"student_logits": X[:2], "teacher_logits": X[2:], "labels": torch.tensor([1, -7])}
    losses = [
        qat.distillation_loss(**given, kl_weight=0.5, ignore_index=i) for i in (-7, np.int64(-7))
    ]
    assert torch.equal(*losses)
    assert inference.GPTQ(damping=np.float32(0.5)) == inference.GPTQ(damping=0.5)
    ids = torch.randint(32, (2, 4))
    assert lb.evaluate(nn.Embedding(32, 32), batches=[ids], tasks=None).models[0].tasks == {}


def test_pairs_of_autoquant() -> None:
    own = {"model": plain(), "batches": [X], "schemes": [INT4], "bits": 32}
    assert lb.autoquant(**own, timed=iter([(X, 0), (X[:1], np.int64(2))])).milliseconds is not None
    for wrong in ({1: 2}, X, (X, 1), "x", [X]):
        with pytest.raises(TypeError, match="timed must be a list of pairs"):
            lb.autoquant(**own, timed=wrong)
    with pytest.raises(
        ValueError, match="a count of timed must be a finite number of at least 0, got -1"
    ):
        lb.autoquant(**own, timed=[(X, -1)])


def test_blocks_are_a_list() -> None:
    model = plain()
    with pytest.raises(TypeError, match="blocks must be a list of modules"):
        lb.calibrate(model, [X], INT4, blocks=model[0])


@pytest.mark.parametrize("limit", [3, 0.25, None])
def test_limits_and_tasks_as_lm_eval_takes_them(limit: Any, monkeypatch) -> None:
    seen: list[Any] = []
    harness = types.SimpleNamespace(
        simple_evaluate=lambda **given: seen.append(given) or {"results": {}}
    )
    wrapped = types.SimpleNamespace(HFLM=lambda **given: None)
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", wrapped)
    lb.evaluate(plain(), tasks=Listed(["arc_easy"]), tokenizer=WRONG, limit=limit)
    assert [(g["tasks"], g["limit"]) for g in seen] == [(["arc_easy"], limit)]
