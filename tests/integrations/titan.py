"""Runs of the torchtitan recipes in CPU processes, and what they logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipes.torchtitan.compare import LOSS, scalars
from tests.forked import all_finished, ranks

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


def started(text: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """The training program on two processes, by torchrun, in a process group of its own. Options are torchtitan's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, "-m", "recipes.torchtitan.train", *_arguments(text, out, *options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )


def ran(text: Path, out: Path, *options: str, processes: int = 2) -> str:
    """The log of a run that must end well, on forks."""
    code = "from recipes.torchtitan import train; train.main()"
    given = _arguments(text, out, *options)
    return all_finished(ranks(code, *given, processes=processes, folder=ROOT))


def _arguments(text: Path, out: Path, *options: str) -> list[str]:
    """The options, and those of a short run beside them."""
    data = {
        "--job.config_file": DEBUG,
        "--job.dump_folder": out,
        "--model.hf_assets_path": text,
        "--training.dataset_path": text,
    }
    more = {name: value for name, value in {**data, **SHORT}.items() if name not in options}
    return [*(str(word) for pair in more.items() for word in pair), *options]


def logged(out: Path, metric: str = LOSS) -> dict[int, float]:
    """The values of a metric by step, of the last start of a run."""
    return scalars(out).get(metric, {})
