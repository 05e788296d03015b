"""One run: the quick start's steps, with the weights kept as the run says.

The model always computes in bfloat16. Where the optimizer updates float32 weights, the model holds their rounded
copy, made anew after each step, and its gradients are what they get. So all runs do the same arithmetic on the same
kind of weights, and a difference of loss is the optimizer's.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import lowbit
from recipes.convergence.runs import Run
from recipes.llama import Llama
from recipes.quickstart.config import QuickstartConfig
from recipes.quickstart.data import Data, heldout_windows
from recipes.quickstart.evaluate import window_losses
from recipes.quickstart.train import learning_rate_factor, parameter_groups, step_loss

LOOK_EVERY = 25
"""Steps between two looks at whether the loss is a number: each waits for the device."""


class Weights:
    """What the optimizer updates: `trained`, the bfloat16 parameters of `model` themselves, or float32 ones."""

    def __init__(self, model: Llama, run: Run) -> None:
        """`model` is in float32, as it was drawn, and is bfloat16 afterwards, prepared as the run says."""
        drawn = [p.detach().clone() for p in model.parameters()]
        model.to(torch.bfloat16)
        if run.scheme is not None:
            lowbit.train.prepare_(model.blocks, run.scheme)
        self.computing = list(model.parameters())
        self.trained = self.computing
        if run.weights != torch.bfloat16:
            self.trained = [nn.Parameter(tensor.to(run.weights)) for tensor in drawn]

    def take_gradients(self) -> None:
        """Give the trained weights the gradients of those that compute."""
        if self.trained is not self.computing:
            for trained, computing in zip(self.trained, self.computing, strict=True):
                assert computing.grad is not None
                trained.grad = computing.grad.to(trained.dtype)

    @torch.no_grad()
    def round(self) -> None:
        """Give those that compute the trained weights, rounded to nearest."""
        if self.trained is not self.computing:
            for trained, computing in zip(self.trained, self.computing, strict=True):
                computing.copy_(trained)


def train_run(
    config: QuickstartConfig,
    run: Run,
    data: Data,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train from scratch and measure; the record of a finished run. `check` is called between steps and may raise.

    Of a run whose loss is no longer finite "final_loss" is None, and the curve ends there.
    """
    began = time.perf_counter()
    torch.manual_seed(config.seed)
    model = Llama(config.model).to(device)
    weights = Weights(model, run)
    optimizer = run.make(
        parameter_groups(weights.trained),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
    )
    scheduler = LambdaLR(optimizer, learning_rate_factor(config))
    forward = torch.compile(model) if config.compile else model
    probes = heldout_windows(config, data.heldout, config.probe_sequences)
    tokens = data.train.to(device)  # all of them, so that no step waits for a copy
    curve: list[tuple[int, float]] = []

    model.train()
    finite = True
    for step in range(config.steps):
        check()
        if step % config.probe_every == 0:
            curve.append((step, mean_loss(model, probes, device)))
        loss = step_loss(config, forward, tokens, step, device)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.computing, config.grad_clip)
        weights.take_gradients()
        optimizer.step()
        scheduler.step()
        weights.round()
        model.zero_grad()
        if step % LOOK_EVERY == 0 and not math.isfinite(loss.item()):
            finite = False
            break
    final = None
    if finite:
        curve.append((config.steps, mean_loss(model, probes, device)))
        limit = config.heldout_tokens // config.model.context
        measured = mean_loss(model, heldout_windows(config, data.heldout, limit), device)
        final = measured if math.isfinite(measured) else None
    return {
        "run": run.name,
        "seed": config.seed,
        "final_loss": final,
        "curve": [(s, round(v, 5)) for s, v in curve if math.isfinite(v)],
        "seconds": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "settings": settings(config, data),
    }


def mean_loss(model: nn.Module, windows: Tensor, device: torch.device) -> float:
    """Cross entropy over held-out windows, nats a token."""
    return window_losses(model, windows, device, bf16=False).mean().item()


def settings(config: QuickstartConfig, data: Data) -> dict[str, Any]:
    """What runs must have in common to be compared: all settings but the seed, and the text."""
    values = dataclasses.asdict(config)
    unused = ("seed", "bits", "group_size", "sample_tokens", "save_every", "corpus")
    kept = {name: value for name, value in values.items() if name not in unused}
    text = {"train_tokens": len(data.train), "first_tokens_sum": int(data.train[:100_000].sum())}
    return {**kept, **text}
