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


def train(path: Path, pause: float) -> nn.Module:
    """Train from the checkpoint at `path` if there is one, and save it atomically every few steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    optimizer = optim.AdamW4bit(
        model.parameters(), lr=1e-3, bf16_stochastic_round=True, seed=11, max_grad_norm=1.0
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"]
    for step in range(first, STEPS):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % SAVE_EVERY == 0:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**saved, "step": step + 1}, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
        time.sleep(pause)
    return model


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
