"""`lowbit eval`: perplexity of a text and, against the original, divergence and agreement.

With windows of T tokens, logits s of the model and t of the original, over all predicted tokens:

    perplexity = exp(mean −log softmax(s)[next token])
    KL = mean KL(softmax(t) ‖ softmax(s)), in nats
    agreement = share of tokens with argmax s = argmax t
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.cli.language_model import check, load
from lowbit.cli.output import print_json, print_table
from lowbit.cli.windows import tokens_of, windows_of
from lowbit.numerics.divergence import distillation_loss
from lowbit.progress import progress


def evaluate(
    model: Path,
    data: Path,
    against: Path | None,
    context: int | None,
    limit: int | None,
    device: str,
    json: bool,
) -> None:
    """The command `eval`. Args: those of `lowbit.cli.app.evaluate`."""
    for path in (model, *([] if against is None else [against])):
        check(path)
    tokens = tokens_of(model, data, limit)
    judged = load(model, device)
    original = None if against is None else load(against, device)
    windows = windows_of(tokens, judged, context)
    result = measure(judged, original, windows, torch.device(device))
    if json:
        print_json({"model": str(model), "data": str(data), **result})
        return
    rows = [("perplexity", f"{result['perplexity']:.3f}")]
    if original is not None:
        rows += [
            ("perplexity of the original", f"{result['perplexity_original']:.3f}"),
            ("KL(original || model), nats a token", f"{result['kl']:.4g}"),
            ("top-1 agreement", f"{100 * result['agreement']:.1f}%"),
        ]
    print_table(f"{model}, {result['tokens']:,} predicted tokens of {data}", ("", ""), rows)


@torch.no_grad()
def measure(
    model: nn.Module, original: nn.Module | None, windows: list[Tensor], device: torch.device
) -> dict[str, Any]:
    """The figures of the module's docstring, of `model` against `original` (None: alone) on `device`. `windows`: token
    ids [1, T]."""
    sums = dict.fromkeys(("nll", "nll_original", "kl", "agreement"), 0.0)
    count = sum(w.numel() - 1 for w in windows)
    with progress("evaluating", count, unit="tokens") as advance:
        for window in windows:
            ids = window.to(device)
            labels, predicted = ids[0, 1:], ids.numel() - 1
            logits = _logits(model, ids)
            sums["nll"] += predicted * _nll(logits, labels)
            if original is not None:
                given = _logits(original, ids)
                if given.shape != logits.shape:
                    raise ValueError(
                        f"the original has {given.shape[-1]} tokens in its vocabulary, the model {logits.shape[-1]}"
                    )
                sums["nll_original"] += predicted * _nll(given, labels)
                sums["kl"] += predicted * float(distillation_loss(logits, given))
                sums["agreement"] += int((logits.argmax(-1) == given.argmax(-1)).sum())
            advance(predicted)
    found: dict[str, Any] = {"tokens": count, "perplexity": _perplexity(sums["nll"] / count)}
    if original is not None:
        found["perplexity_original"] = _perplexity(sums["nll_original"] / count)
        found |= {"kl": sums["kl"] / count, "agreement": sums["agreement"] / count}
    return found


def _perplexity(nll: float) -> float:
    """exp(nll); infinite if a float cannot hold it, as for a model with broken scales."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits [T − 1, V] that predict the next token of the window."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0, :-1]


def _nll(logits: Tensor, labels: Tensor) -> float:
    """The mean cross-entropy, a few tokens in float32 at a time."""
    return float(distillation_loss(logits, logits, labels, kl_weight=0.0))
