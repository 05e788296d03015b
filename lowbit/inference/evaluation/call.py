"""evaluate: perplexity, KL divergence, top-1 agreement and lm-eval's tasks of low-bit models beside the original.

With logits s of a model and t of the original, over all tokens that have a next one:

    perplexity = exp(mean −log softmax(s)[next token])
    KL         = mean KL(softmax(t) ‖ softmax(s)), in nats
    agreement  = share of tokens with argmax s = argmax t
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import optional
from lowbit.convert import check_module
from lowbit.convert.report import nbytes_of
from lowbit.inference.calibration.batches import as_list
from lowbit.inference.evaluation.report import Evaluation, EvaluationReport
from lowbit.numerics.divergence import divergence
from lowbit.numerics.settings import check_flag, check_whole
from lowbit.progress import progress
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tracing.batches import call, entry, eval_mode, on_device_of
from lowbit.tracing.damage import damages

Made = nn.Module | Callable[[], nn.Module]
"""A model, or a function that makes it."""
IGNORED = -100
"""The label of a token that does not count."""
ROWS = 1024
"""Rows of logits that are in float32 at a time."""


def evaluate(
    model: nn.Module | Mapping[str, Made],
    original: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    *,
    by_layer: bool = False,
    tasks: Sequence[Any] | None = (),
    tokenizer: Any = None,
    limit: float | None = None,
) -> EvaluationReport:
    """Measure low-bit language models beside the original on the same tokens.

        report = lowbit.evaluate(model, original, batches, by_layer=True)
        print(report)
        report.draw("evaluation.png")

    Args:
        model: in low bits, or plain; or several by name. A function in place of a model makes it when its turn comes,
            so that only one is in memory beside the original.
        original: the model in high precision. Without it there are no KL and no agreement.
        batches: of tokens: a mapping of keyword arguments with `input_ids`, or one argument, the ids [B, T]; on any
            device. The next token of each is its label, unless the mapping has `labels`, which are those of the
            inputs, unshifted. Labels of −100 and tokens whose `attention_mask` is 0 don't count. None: tasks alone.
        by_layer: measure the original with each layer in low bits alone, a forward pass of all batches a layer. Here
            padding counts.
        tasks: of lm-eval, as its `simple_evaluate` takes them, e.g. ["arc_easy", "hellaswag"]. They need the package
            lm-eval and models of transformers. None: no tasks.
        tokenizer: for the tasks.
        limit: examples of each task, or a share of them between 0 and 1; None for all.

    Returns:
        A report to `print`, `write` as JSON and `draw`.

    Raises:
        TypeError: what is given is not a module.
        ValueError: neither batches nor tasks, no token that has a next one, logits of other shapes than the original's,
            `by_layer` without an original, tasks without a tokenizer.
        ImportError: tasks without lm-eval.
    """
    given = {"model": model} if isinstance(model, nn.Module) else model
    seen = None if batches is None else as_list(batches)
    tasks = () if tasks is None else tasks
    check_flag("by_layer", by_layer)
    if limit is not None and not (isinstance(limit, Real) and 0 < limit < 1):
        limit = check_whole("limit", limit)
    _check(given, original, seen, by_layer, tasks, tokenizer)
    run = partial(_results_of_tasks, tasks=tasks, tokenizer=tokenizer, limit=limit)
    own = None if original is None else _evaluated("original", original, None, seen, run)
    found = []
    for name, made in given.items():
        one = made if isinstance(made, nn.Module) else made()
        check_module(one)
        measured = _evaluated(name, one, original, seen, run)
        if by_layer and original is not None and seen is not None:
            measured = replace(measured, layers=layer_damages(one, original, seen))
        found.append(measured)
        del one, made
    return EvaluationReport(own, tuple(found))


def _check(
    given: Any,
    original: Any,
    seen: list[Any] | None,
    by_layer: bool,
    tasks: Sequence[Any],
    tokenizer: Any,
) -> None:
    """Raise the errors of arguments, before the first pass."""
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise TypeError(f"tasks must be a list of names, such as ['arc_easy'], got {tasks!r}")
    if isinstance(given, list | tuple):
        raise TypeError(
            f"model must be a module, or a dict of names to modules, got a {type(given).__name__}"
        )
    if not isinstance(given, Mapping):
        check_module(given)
    if original is not None:
        check_module(original, "original")
    if not given:
        raise ValueError(
            "evaluate was given no model; accepted: one, or a mapping of names to models"
        )
    if not seen and not tasks:
        raise ValueError(
            "evaluate was given no batches and no tasks; accepted: batches of token ids, tasks, or both"
        )
    if by_layer and (original is None or not seen):
        raise ValueError("by_layer=True compares with the original on batches; give both")
    if tasks and tokenizer is None:
        raise ValueError(f"tasks={list(tasks)} read text; give the model's tokenizer")


def _evaluated(
    name: str,
    model: nn.Module,
    original: nn.Module | None,
    batches: list[Any] | None,
    run: Callable[[nn.Module], dict[str, dict[str, float]]],
) -> Evaluation:
    """One model, without its layers. `run`: gives the results of its tasks."""
    measured = _measured(name, model, original, batches) if batches else {}
    nbytes = sum(nbytes_of(p) for p in model.parameters())
    return Evaluation(name, nbytes, **measured, tasks=run(model))


@torch.no_grad()
def _measured(
    name: str, model: nn.Module, original: nn.Module | None, batches: list[Any]
) -> dict[str, Any]:
    """The figures of the module's docstring."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    with eval_mode(model), progress(f"evaluating {name}", len(batches), unit="batches") as advance:
        for batch in batches:
            labels = next_tokens(batch)
            logits = _logits(model, batch)
            expected = None
            if original is not None:
                with eval_mode(original):
                    expected = _logits(original, batch)
                if expected.shape != logits.shape:
                    raise ValueError(
                        f"{name}: the original gives logits {tuple(expected.shape)}, the model {tuple(logits.shape)}; "
                        "both need the same vocabulary"
                    )
            counted = (labels != IGNORED).to(logits.device)
            wrong = labels[((labels < 0) & (labels != IGNORED)) | (labels >= logits.shape[-1])]
            if len(wrong):
                raise ValueError(
                    f"{name}: token {int(wrong[0])} of a batch is not one of the {logits.shape[-1]} tokens of the "
                    f"vocabulary; a label that does not count is {IGNORED}"
                )
            wanted = None if expected is None else expected[counted.to(expected.device)]
            sums += compared(logits[counted], wanted, labels.to(logits.device)[counted])
            count += int(counted.sum())
            advance(1)
    if not count:
        raise ValueError(
            "no token of the batches has a next one that counts; at least two tokens are needed"
        )
    nll, kl, same = (sums / count).tolist()
    found: dict[str, Any] = {"tokens": count, "perplexity": perplexity(nll)}
    return found if original is None else found | {"kl": kl, "agreement": same}


def next_tokens(batch: Any) -> Tensor:
    """The label of each position: the token after it [B, T], −100 where there is none or it does not count."""
    named = isinstance(batch, Mapping)
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    ids = batch.get("input_ids") if named else first
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        shape = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"a batch has token ids {shape}; accepted: integers [B, T], or a mapping with input_ids"
        )
    tokens = batch.get("labels") if named else None
    tokens = ids if tokens is None else tokens
    mask = batch.get("attention_mask") if named else None
    if mask is not None:
        # A token counts if it and the one that predicts it are not padding, on either side.
        tokens = tokens.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), IGNORED)
    return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), dim=1)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    """Logits [B, T, V] of a batch, which is moved to the device of the model."""
    output = call(model, on_device_of(model, batch))
    found = output if isinstance(output, Tensor) else entry(output, "logits")
    if not isinstance(found, Tensor) or found.ndim != 3:
        raise TypeError(
            f"the model's output is a {type(output).__name__} without logits [B, T, vocabulary]; evaluate measures "
            "language models, and lowbit.autoquant takes a loss of any model"
        )
    return found


def compared(logits: Tensor, expected: Tensor | None, labels: Tensor) -> Tensor:
    """Sums over rows [N, V], float64 [3] on the CPU: −log p of the label, KL from `expected`, rows of equal argmax."""
    sums = torch.zeros(3, dtype=torch.float64)
    for at in range(0, len(logits), ROWS):
        part = slice(at, at + ROWS)
        q = logits[part].float().log_softmax(-1)
        sums[0] -= q.gather(1, labels[part, None]).sum(dtype=torch.float64).cpu()
        if expected is None:
            continue
        p = expected[part].to(q.device).float().log_softmax(-1)
        sums[1] += divergence(p, q).cpu()
        sums[2] += (p.argmax(-1) == q.argmax(-1)).sum().cpu()
    return sums


def perplexity(nll: float) -> float:
    """exp(nll); infinite if a float cannot hold it, as for a model with broken scales."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def layer_damages(model: nn.Module, original: nn.Module, batches: list[Any]) -> dict[str, float]:
    """KL(original ‖ original with only this layer of `model`), by the name of each layer in low bits. Layers that share
    a weight are exchanged together, and have the name of the first.

    Raises ValueError for a layer that the original does not have."""
    groups = _layers(model)
    modules = dict(original.named_modules())
    for name in (name for names in groups.values() for name in names):
        if not name or name not in modules:
            raise ValueError(
                f"by_layer=True exchanges layers, and the original has no layer {name!r} inside of it; accepted: a "
                "model with the layers of the original"
            )
    contexts = [partial(_exchanged, original, model, names) for names in groups.values()]
    moved = [on_device_of(original, batch) for batch in batches]
    passes = len(contexts) * len(moved)
    with eval_mode(model), progress("evaluating layers", passes, unit="passes") as advance:
        found = damages(original, moved, contexts, "kl", passed=lambda: advance(1))
    return dict(zip(groups, found.values, strict=True))


def _layers(model: nn.Module) -> dict[str, list[str]]:
    """The modules with weights in low bits, those that share one together, by the name of the first."""
    groups: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for fqn, module in model.named_modules():
        own = [
            id(p)
            for p in module._parameters.values()
            if p is not None and isinstance(local(p), LowbitTensor)
        ]
        if own:
            name = next((first[i] for i in own if i in first), fqn)
            groups.setdefault(name, []).append(fqn)
            first.update(dict.fromkeys(own, name))
    return groups


@contextmanager
def _exchanged(original: nn.Module, model: nn.Module, names: list[str]) -> Iterator[None]:
    """The context in which the layers `names` of the original are those of the model, on the devices that they have
    there."""
    places = [(original.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]
    before = [parent._modules[child] for parent, child in places]
    try:
        copies: dict[int, Any] = {}  # of parameters too, as layers may share one
        for (parent, child), name, own in zip(places, names, before, strict=True):
            layer, home = model.get_submodule(name), _device_of(own)
            if _device_of(layer) != home:
                layer = copy.deepcopy(layer, copies).to(home)
            parent._modules[child] = layer
        yield
    finally:
        for (parent, child), module in zip(places, before, strict=True):
            parent._modules[child] = module


def _device_of(module: Any) -> torch.device | None:
    return next((p.device for p in module.parameters()), None)


def _results_of_tasks(
    model: nn.Module, tasks: Sequence[Any], tokenizer: Any, limit: float | None
) -> dict[str, dict[str, float]]:
    """Task of lm-eval → metric → value, by its `simple_evaluate`. Empty without tasks."""
    if not tasks:
        return {}
    harness = optional.imported("lm_eval", "tasks need", "eval")
    wrapped = optional.imported("lm_eval.models.huggingface", "tasks need", "eval").HFLM
    own = wrapped(pretrained=model, tokenizer=tokenizer)
    with eval_mode(model):
        results = harness.simple_evaluate(model=own, tasks=list(tasks), limit=limit)["results"]
    return {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in key
        }
        for task, metrics in results.items()
    }
