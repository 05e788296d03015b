"""Runs of the torchtitan recipes in CPU processes, and what they logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipes.torchtitan.compare import LOSS, scalars

ROOT = Path(__file__).resolve().parents[2]
DEBUG = ROOT / "recipes/torchtitan/debug.toml"
SHORT = {
    "--training.steps": 4,
    "--checkpoint.interval": 2,
    "--lr_scheduler.warmup_steps": 2,
    "--lowbit.metrics_freq": 2,
}


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "WANDB_MODE": "offline"}


def started(
    text: Path, out: Path, *options: str, processes: int = 2, config: Path = DEBUG
) -> subprocess.Popen[str]:
    """The training program in a process group of its own. Options are those of torchtitan."""
    data = {
        "--job.config_file": config,
        "--job.dump_folder": out,
        "--model.hf_assets_path": text,
        "--training.dataset_path": text,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "recipes.torchtitan.train"]
    given = {*options}
    for name, value in {**data, **SHORT}.items():
        if name not in given:
            command += [name, str(value)]
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )


def ran(text: Path, out: Path, *options: str, processes: int = 2, config: Path = DEBUG) -> str:
    """The log of a run that must end well."""
    process = started(text, out, *options, processes=processes, config=config)
    log, _ = process.communicate(timeout=240)
    assert process.returncode == 0, log[-6000:]
    return log


def logged(out: Path, metric: str = LOSS) -> dict[int, float]:
    """The values of a metric by step, of the last start of a run."""
    return scalars(out).get(metric, {})
