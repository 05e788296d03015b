"""A training run that is killed and resumed ends with the weights of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import lowbit
from lowbit import Int4Weight, Int8MixedPrecision, Int8Weight, LowbitTensor, optim
from tests import forked

STEPS, SAVE_EVERY = 20, 4
OPTIONS = {"lr": 1e-3, "bf16_stochastic_round": True, "seed": 11}
CLIPPED = {**OPTIONS, "max_grad_norm": 1.0}
PRODUCTS = {"output": True, "grad_input": True, "grad_weight": True, "always": True}
RUNS = {
    "AdamW4bit": (None, partial(optim.AdamW4bit, **CLIPPED)),
    "SOAP8bit": (None, partial(optim.SOAP8bit, **CLIPPED)),
    "Muon4bit": (None, partial(optim.Muon4bit, **CLIPPED)),
    "Muon8bit, Turbo": (
        None, partial(optim.Muon8bit, ns_scaling="gram", ns_steps=4, row_beta2=0.95, **CLIPPED)
    ),
    "exact master": (None, partial(optim.AdamW4bit, lr=1e-3, weight_correction="16bit")),
    "errors in the momentum": (
        None, partial(optim.AdamW8bit, lr=1e-3, seed=11, weight_correction="momentum")
    ),
    "int8 products": (Int8MixedPrecision(always=True), partial(optim.AdamW8bit, **OPTIONS)),
    "int8 weights": (
        Int8Weight(**PRODUCTS), partial(optim.AdamW8bit, weight_correction="momentum", **OPTIONS)
    ),
    "int4 weights": (
        Int4Weight(**PRODUCTS), partial(optim.AdamW8bit, weight_correction="momentum", **OPTIONS)
    ),
}  # fmt: skip
"""Runs by name: the scheme of the weights, and the optimizer. Those with a scheme step in backward."""


def made(scheme):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    if scheme is not None:
        lowbit.train.prepare_(model, scheme)
    return model


def train(path: Path, pause: float) -> nn.Module:
    """Train from the checkpoint at `path` if there is one, and save it atomically every few steps. Autograd keeps
    activations in int8."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = nn.ModuleList(made(scheme) for scheme, _ in RUNS.values())
    pairs = zip(RUNS.values(), models, strict=True)
    optimizers = [make(model.parameters()) for (_, make), model in pairs]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in optimizers]
    for (scheme, _), optimizer in zip(RUNS.values(), optimizers, strict=True):
        if scheme is not None:
            optim.step_in_backward(optimizer)
    parts = [models, *optimizers, *schedulers]
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        first = saved["step"]
    for step in range(first, STEPS):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        models.zero_grad()
        with lowbit.train.save_in_int8(models, min_numel=1):
            outputs = [model(x) for model in models]
        sum((y - x).square().mean() for y in outputs).backward()
        for part in (*optimizers, *schedulers):
            part.step()
        if (step + 1) % SAVE_EVERY == 0:
            saved = {"parts": [part.state_dict() for part in parts], "step": step + 1}
            torch.save(saved, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
        time.sleep(pause)
    return models


TRAINS = """
import sys
from pathlib import Path
from tests.optim.test_kill import train
train(Path(sys.argv[1]), pause=0.05)
"""


def test_killed_and_resumed(tmp_path):
    undisturbed = train(tmp_path / "undisturbed.pt", pause=0.0)
    path = tmp_path / "killed.pt"
    child = forked.Program(TRAINS, path, folder=Path.cwd())
    try:
        deadline = time.monotonic() + 100
        while not path.exists() and child.status() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.13)  # somewhere between two checkpoints
    finally:
        child.kill(signal.SIGKILL)
        done = child.finished(30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    step = torch.load(path, weights_only=True)["step"]
    assert 0 < step < STEPS
    resumed = train(path, pause=0.0)
    for name, one, other in zip(RUNS, resumed, undisturbed, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            p, q = (t.dequantize() if isinstance(t, LowbitTensor) else t for t in (p, q))
            assert torch.equal(p, q), name
