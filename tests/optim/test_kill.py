"""A training run that is killed and resumed ends with the weights of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from lowbit import optim
from tests import forked

STEPS, SAVE_EVERY = 40, 4
CLASSES = (optim.AdamW4bit, optim.SOAP8bit, optim.Muon4bit)


def train(path: Path, pause: float) -> nn.Module:
    """Train from the checkpoint at `path` if there is one, and save it atomically every few steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16() for _ in CLASSES
    )
    options = {"lr": 1e-3, "bf16_stochastic_round": True, "seed": 11, "max_grad_norm": 1.0}
    pairs = zip(CLASSES, models, strict=True)
    optimizers = [cls(model.parameters(), **options) for cls, model in pairs]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in optimizers]
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
        sum((model(x) - x).square().mean() for model in models).backward()
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
    for p, q in zip(resumed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(p, q)
