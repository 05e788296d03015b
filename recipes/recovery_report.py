"""The recovery recipe's results: the file of finished models, the shares won back, and the page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

import lowbit
from recipes import figures, pages, runs
from recipes.command_line import UserError
from recipes.device import device_name
from recipes.phases import Run
from recipes.recovery_variants import RUNS, TEACHER_COMPUTE
from recipes.training import TrainingConfig


class Results:
    """`results.json`: settings, machine, and of each seed's finished models the loss of each held-out window."""

    def __init__(self, folder: Path, config: TrainingConfig, device: torch.device) -> None:
        self.path = folder / "results.json"
        self.content = {
            "settings": json.loads(json.dumps(dataclasses.asdict(config))),
            "device": device_name(device),
            "torch": torch.__version__,
            "lowbit": lowbit.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "commands": [],
            "seeds": {},
        }
        self._read()

    def _read(self) -> None:
        if self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self._check(found["settings"])
            found["commands"] = list(dict.fromkeys(found["commands"] + self.content["commands"]))
            self.content = found

    def _check(self, found: dict[str, Any]) -> None:
        wanted = self.content["settings"]
        for name in wanted:
            if name != "seed" and found.get(name) != wanted[name]:
                raise UserError(
                    f"{self.path} has runs with {name} {found.get(name)!r}, here it is {wanted[name]!r}; give another "
                    "--out, or the same settings"
                )

    def has(self, run: Run, name: str) -> bool:
        return name in self.content["seeds"].get(str(run.config.seed), {})

    def add(self, run: Run, name: str, record: dict[str, Any]) -> None:
        with FileLock(f"{self.path}.lock"):
            self._read()  # another process may have added seeds of its own
            self.content["seeds"].setdefault(str(run.config.seed), {})[name] = record
            runs.write_text(self.path, json.dumps(self.content) + "\n")

    def of(self, run: Run, name: str) -> dict[str, Any]:
        record: dict[str, Any] = self.content["seeds"][str(run.config.seed)][name]
        return record

    def note(self, command: str) -> None:
        """Add a command line to those that made these results."""
        if command not in self.content["commands"]:
            self.content["commands"].append(command)


@dataclass(frozen=True)
class Share:
    """What one variant won back, in per cent: the mean over seeds, its bootstrap interval, and each seed."""

    name: str
    mean: float
    low: float
    high: float
    seeds: dict[str, float]


def share_of(seeds: dict[str, Any], name: str, rounded: str = "") -> Share | None:
    """None without a finished run. Each draw of the bootstrap takes the same windows for the three models of a seed.

    rounded: the name of the rounded model; "" for the variant's `baseline`.
    """
    if RUNS[name].bits is None:
        return None
    rounded, control = rounded or RUNS[name].baseline, RUNS[name].control
    found = {s: own for s, own in seeds.items() if name in own and rounded in own}
    if not found:
        return None
    random = np.random.default_rng(0)
    shares, draws = {}, []
    for seed, own in found.items():
        parts = np.array([own[n]["losses"] for n in (control, rounded, name)])
        draw = random.integers(parts.shape[1], size=(2000, parts.shape[1]))
        high_D, rounded_D, qat_D = (part[draw].mean(1) for part in parts)
        draws.append(100 * (rounded_D - qat_D) / (rounded_D - high_D))
        high, lost, qat = parts.mean(1)
        shares[seed] = float(100 * (lost - qat) / (lost - high))
    low, up = np.percentile(np.mean(draws, axis=0), [2.5, 97.5])
    return Share(name, statistics.mean(shares.values()), float(low), float(up), shares)


def table(content: dict[str, Any]) -> str:
    seeds = content["seeds"]
    header = ["run", "", "rounded, nats", "after QAT", "won back, %", "95% interval", "each seed",
              "seconds"]  # fmt: skip
    rows = []
    pairs = [(name, rounded) for name, variant in RUNS.items()
             for rounded in dict.fromkeys((variant.baseline, variant.rounded))]  # fmt: skip
    for name, rounded in pairs:
        share = share_of(seeds, name, rounded)
        if share is None:
            continue
        own = [seeds[s] for s in share.seeds]
        control = RUNS[name].control
        lost = statistics.mean(o[rounded]["loss"] - o[control]["loss"] for o in own)
        left = statistics.mean(o[name]["loss"] - o[control]["loss"] for o in own)
        seconds = statistics.mean(o[name]["seconds"] for o in own)
        each = ", ".join(f"{value:.1f}" for value in share.seeds.values())
        interval = f"{share.low:.1f} to {share.high:.1f}"
        about = RUNS[name].about
        about += "" if rounded == RUNS[name].baseline else "; against the half-integer grid"
        rows.append([name, about, f"{lost:+.4f}", f"{left:+.4f}", f"**{share.mean:.1f}**",
                     interval, each, f"{seconds:.0f}"])  # fmt: skip
    return pages.table(header, rows, left=(0, 1))


def page(content: dict[str, Any]) -> str:
    own, seeds = content["settings"], content["seeds"]
    model, tokens = own["model"], own["batch_size"] * own["model"]["context"]
    high = ", ".join(f"{s['high']['loss']:.4f}" for s in seeds.values())
    commands = "\n".join(f"- `{command}`" for command in content["commands"])
    of_qat = "" if own["qat_lr"] == 1 else f", for QAT {own['qat_lr']:g} times as much"
    return f"""# What QAT wins back of the loss that rounding costs

{commands}
- {content["device"]}, torch {content["torch"]}, Python {content["python"]}, {content["date"]}
- {model["layers"]} layers of width {model["dim"]}, vocabulary {model["vocab_size"]}, embedding and head tied and \
quantized too
- {own["steps"]:,} steps of {tokens:,} tokens, {own["steps"] * tokens / 1e6:.1f}M in all, the last \
{own["branch_steps"]} in branches; AdamW4bit, lr {own["lr"]:g}, in the branches {own["branch_lr"]:g} of it and falling \
to zero{of_qat}
- held-out loss in high precision, nats a token, by seed: {high}

*Rounded* and *after QAT*: nats above high precision, the mean over seeds. All runs of a seed share the trunk, and \
their branches see the same batches; the compute- runs go on for {TEACHER_COMPUTE:.2f} times as many steps. \
*Won back* = (rounded − after QAT) / (rounded − high precision). The interval is a 95% bootstrap over windows of \
held-out text; it does not cover the choice of seeds. *Seconds* of training, the branch alone.

{table(content)}

![Loss of the branches, and the share won back.](recovery.png)
"""


def draw(folder: Path, content: dict[str, Any]) -> None:
    """`recovery.png`: the curves of the first seed whose run folder is here, and the shares."""
    first = next(s for s in content["seeds"] if (folder / f"seed{s}").exists())
    finished = [name for name in ("high", *RUNS) if name in content["seeds"][first]]
    records = runs.read_metrics(runs.RunFolder(folder / f"seed{first}"))
    curves = {
        name: [(r["step"], r["heldout_loss"]) for r in records
               if r["phase"] == name and "heldout_loss" in r]
        for name in finished
    }  # fmt: skip
    curves = {name: points for name, points in curves.items() if points}
    shares = [share for name in RUNS if (share := share_of(content["seeds"], name)) is not None]
    bars = {s.name: (s.mean, s.low, s.high) for s in shares}
    figures.draw_recovery(folder / "recovery.png", curves, bars)


def write_page(folder: Path, results: Results) -> None:
    draw(folder, results.content)
    pages.write(folder, page(results.content))
