"""How much of the loss that rounding costs does QAT win back? One language model, fine-tuned in several ways.

    python -m recipes.recovery [--preset tiny|gpu] [--seeds 0,1,2] [--runs NAME,NAME] [--base-only] [--out DIR]

The model, the text, the batches and the learning rate are the quick start's (`recipes.quickstart`), and so is the
training: for each seed a trunk in high precision, and from its end branches of the same batches, one of them in high
precision. The others train with QAT:

    g32-int4, g32-int3, g32-int2    one scale for 32 inputs; learned scales, part of the loss from the model "high"
    row-int4                        one scale a row
    g32-int8xint4                   int4 weights in groups of 32, and activations in int8, a scale a token
    lora-int4, lora-int2            as g32-, but adapters of PEFT train in place of the blocks' weights, and are merged
                                    before the sum is rounded; norms and the embedding, which is the head too, train
                                    themselves; "lora-high" is the same in high precision
    plain-int4, -int3, -int2        straight-through rounding by the present scales, cross-entropy alone, as many steps
    compute-int4, -int3, -int2      the same for as much compute: a step with a teacher computes a third more

    won back = (loss rounded − loss after QAT) / (loss rounded − loss in high precision), in nats of held-out text

"Rounded" is the branch in high precision ("high", or "lora-high"), rounded by min-max with the run's own scheme. At 2
bits, where QAT trains on the half-integer grid {−1.5, −0.5, 0.5, 1.5}, it is rounded to the usual grid {−2, −1, 0, 1},
and the table has a row against the half-integer grid too. The intervals are bootstraps over windows of held-out text. A
run that was stopped goes on where it was: OUT/results.json has the finished runs, and OUT/seed0 and so on are run
folders of the quick start, with the last checkpoint of an unfinished one.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from filelock import FileLock

import lowbit
from recipes import figures, pages, quickstart, runs, text
from recipes.command_line import UserError, chosen_names, chosen_seeds, exit_status
from recipes.device import choose_device, device_name
from recipes.quickstart import Phase, Run, scheme
from recipes.training import TrainingConfig, override, window_losses

GROUP = 32
TEACHER_COMPUTE = 4 / 3
"""Compute of a step with a teacher, in steps without: forward and backward take three times the forward pass."""


@dataclass(frozen=True)
class Variant:
    """One way to fine-tune with QAT.

    Attributes:
        bits: of the weights; None trains in high precision.
        group_size: None gives each row one scale.
        int8: activations are rounded to int8, with one scale a token.
        scales: as `lowbit.qat.prepare_` takes them.
        distils: whether part of the loss is the divergence from the model in high precision.
        rank: of adapters that train in place of the blocks' weights.
        length: steps, as a multiple of the branch in high precision.
    """

    about: str
    bits: int | None
    group_size: int | None = GROUP
    int8: bool = False
    scales: Literal["learned", "present"] = "learned"
    distils: bool = True
    rank: int | None = None
    length: float = 1.0

    def scheme(self, config: TrainingConfig) -> lowbit.Scheme | None:
        """The quick start's scheme for these bits, with int8 activations where the variant has them."""
        if self.bits is None:
            return None
        own = scheme(dataclasses.replace(config, group_size=self.group_size), self.bits)
        if not self.int8:
            return own
        activation = lowbit.Int8DynamicActivationInt4Weight().activation
        return dataclasses.replace(own, activation=activation)

    @property
    def control(self) -> str:
        """The name of the run in high precision that this one is compared with."""
        return "high" if self.rank is None else "lora-high"

    @property
    def rounded(self) -> str:
        """The name of the control that is rounded after training by the same scheme."""
        after = "" if self.rank is None else "lora "
        return f"rounded {after}{'row' if self.group_size is None else 'g32'}-int{'8x' * self.int8}{self.bits}"

    @property
    def baseline(self) -> str:
        """The name of the rounded model that the share counts from."""
        return self.rounded + WITH_ZERO if self.bits == 2 else self.rounded

    def rounded_models(self, config: TrainingConfig) -> dict[str, lowbit.Scheme]:
        """The scheme by name of each model that is rounded after training: at 2 bits also the grid with a zero."""
        own = self.scheme(config)
        found = {} if own is None else {self.rounded: own}
        if self.bits == 2:
            zero = lowbit.IntxWeightOnly(2, self.group_size, "symmetric")
            found[self.rounded + WITH_ZERO] = zero
        return found


def variants() -> dict[str, Variant]:
    plain: dict[str, Any] = {"scales": "present", "distils": False}
    found = {f"g32-int{bits}": Variant("full", bits) for bits in (4, 3, 2)}
    found["row-int4"] = Variant("full, a scale a row", 4, None)
    found["g32-int8xint4"] = Variant("full, int8 activations", 4, int8=True)
    found["lora-high"] = Variant("LoRA in high precision", None, rank=LORA_RANK)
    found |= {f"lora-int{bits}": Variant("LoRA", bits, rank=LORA_RANK) for bits in (4, 2)}
    for bits in (4, 3, 2):
        found[f"plain-int{bits}"] = Variant("straight-through", bits, **plain)
    for bits in (4, 3, 2):
        about = "straight-through, equal compute"
        found[f"compute-int{bits}"] = Variant(about, bits, **plain, length=TEACHER_COMPUTE)
    return found


WITH_ZERO = ", {−2 … 1}"
LORA_RANK = 32
RUNS = variants()


def tiny() -> TrainingConfig:
    """The quick start's 0.4M parameters: about a minute a run on one CPU core."""
    return quickstart.tiny()


def gpu() -> TrainingConfig:
    """The quick start's 99M parameters, trained on 69M tokens of the source of the installed packages. The blocks are
    compiled. No dropout: the text is read two or three times at most.

    The rate falls to zero in nearly a straight line. Of three rates in the branch this one is the best for the model in
    high precision, but for 0.0012 nats. QAT starts at twice the rate of the branch that it is compared with.
    """
    base = quickstart.gpu()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dropout=0.0),
        corpus="installed",
        steps=2100,
        branch_steps=250,
        warmup_steps=100,
        decay_steps=800,
        branch_lr=0.25,
        qat_lr=2.0,
        compile=True,
    )


PRESETS = {"tiny": tiny, "gpu": gpu}

# ---- one seed ----------------------------------------------------------------------------------------------------


def phase_of(run: Run, name: str) -> tuple[Run, Phase]:
    """The phase of a variant, and the run with the settings that it trains by."""
    variant, config = RUNS[name], run.config
    branch = round(variant.length * config.branch_steps)
    own = dataclasses.replace(
        config,
        steps=config.trunk_steps + branch,
        branch_steps=branch,
        kl_weight=config.kl_weight if variant.distils else 0.0,
        group_size=variant.group_size,
    )
    phase = Phase(
        name,
        own.trunk_steps,
        own.steps,
        variant.scheme(own),
        variant.scales,
        variant.rank,
        variant.control,
    )
    return dataclasses.replace(run, config=own), phase


def base_phases(run: Run) -> list[Phase]:
    """The trunk and the branch in high precision."""
    return [phase for phase in quickstart.phases(run.config) if phase.scheme is None]


def train_base(run: Run, results: Results) -> None:
    """Train in high precision, and measure that model."""
    if results.has(run, "high"):
        return
    seconds = 0.0
    for phase in base_phases(run):
        quickstart.train_phase(run, phase)
        seconds += runs.load_checkpoint(run.folder.checkpoint(phase.name))["seconds"]
    model = quickstart.high_precision_model(run)
    results.add(run, "high", measured(run, model, seconds, run.config.steps))


def round_variant(run: Run, name: str, results: Results) -> None:
    """Measure the models in high precision that are rounded after training to the variant's formats."""
    for rounded, own in RUNS[name].rounded_models(run.config).items():
        if not results.has(run, rounded):
            model = quickstart.high_precision_model(run, RUNS[name].control, RUNS[name].rank)
            lowbit.quantize_(model, own, scales="minmax")
            results.add(run, rounded, measured(run, model, 0.0, run.config.steps))


def train_variant(run: Run, name: str, results: Results) -> None:
    """Train one variant, convert it, and measure it."""
    own, phase = phase_of(run, name)
    quickstart.train_phase(own, phase)
    training = quickstart.start_or_resume(own, phase)
    if phase.scheme is not None:
        lowbit.qat.convert_(training.model)
    results.add(run, name, measured(run, training.model, training.seconds, phase.end))
    if phase.scheme is not None:  # a control teaches, and is rounded, later
        run.folder.checkpoint(name).unlink()  # 0.5 GB of a model of 100M parameters


def measured(run: Run, model: Any, seconds: float, steps: int) -> dict[str, Any]:
    """The record of a finished model."""
    windows = run.heldout_windows(run.config.heldout_tokens)
    losses = window_losses(model, windows, run.config.bf16)
    return {
        "loss": losses.mean().item(),
        "steps": steps,
        "seconds": round(seconds, 1),
        "losses": [round(x, 5) for x in losses.tolist()],
    }


# ---- the results -------------------------------------------------------------------------------------------------


class Results:
    """`results.json`: settings, machine, and of each seed the finished models with the loss of each held-out window."""

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


# ---- the page ----------------------------------------------------------------------------------------------------


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


# ---- the command line --------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.recovery",
        description="Fine-tune one model with QAT in several ways and compare what each wins back.",
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), help="default: gpu with CUDA, else tiny")
    add("--runs", default="", metavar="NAME,NAME", help=f"of {', '.join(RUNS)} (default: all)")
    add("--seeds", default="0,1,2", help="default: 0,1,2")
    add("--base-only", action="store_true", help="train in high precision alone")
    add("--out", type=Path, default=Path("runs/recovery"), metavar="DIR",
        help="results and checkpoints; runs that it has are not run again (default: %(default)s)")  # fmt: skip
    add("--data", type=Path, metavar="FILE_OR_FOLDER",
        help="your own UTF-8 text (default: the preset's corpus)")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="change a setting, e.g. --set steps=2000 (see training.py)")  # fmt: skip
    return parser.parse_args(arguments)


def open_seed(options: argparse.Namespace, config: TrainingConfig, device: torch.device) -> Run:
    """The run folder of a seed, made at its first use. All seeds share the text of the first one."""
    folder = runs.RunFolder(options.out / f"seed{config.seed}")
    others = sorted(options.out.glob("seed*/config.json"))
    model = config.model
    if (folder.path / "config.json").exists():
        data = text.load(folder.data)
    elif others:
        data = text.load(runs.RunFolder(others[0].parent).data)
    else:
        data = text.prepare(
            options.data, config.corpus, config.heldout_share, model.vocab_size, model.context
        )
    if not (folder.path / "config.json").exists():
        folder.create(dataclasses.asdict(config), data)
    tracker = runs.Tracker(folder, dataclasses.asdict(config), "disabled")
    return Run(config, folder, data, tracker, device)


def train_all(options: argparse.Namespace) -> None:
    """Train every chosen run that is not in the results yet, seed by seed."""
    device = choose_device()
    preset = options.preset or ("gpu" if device.type == "cuda" else "tiny")
    config = override(PRESETS[preset](), options.assignments)
    chosen = [] if options.base_only else chosen_names(options.runs, RUNS)
    seeds = chosen_seeds(options.seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out, config, device)
    results.note(command_of(preset, options))
    for seed in seeds:
        run = open_seed(options, dataclasses.replace(config, seed=seed), device)
        try:
            train_seed(run, chosen, results)
        finally:
            run.tracker.close(0)
        write_page(options.out, results)
    print(table(results.content))
    print(f"report: {options.out / 'report.md'}")


def train_seed(run: Run, chosen: list[str], results: Results) -> None:
    """What is left of one seed."""
    seed = run.config.seed
    train_base(run, results)
    print(f"high precision, seed {seed}: held-out loss {results.of(run, 'high')['loss']:.4f}")
    controls = [RUNS[name].control for name in chosen if RUNS[name].control in RUNS]
    for name in dict.fromkeys([*controls, *chosen]):
        round_variant(run, name, results)
        if results.has(run, name):
            continue
        train_variant(run, name, results)
        share = share_of({str(seed): results.content["seeds"][str(seed)]}, name)
        won = "" if share is None else f"  {share.mean:5.1f}% won back"
        print(f"{name:<16} seed {seed}  loss {results.of(run, name)['loss']:.4f}{won}", flush=True)


def command_of(preset: str, options: argparse.Namespace) -> str:
    """The command line, without the folders of this machine."""
    words = ["python", "-m", "recipes.recovery", "--preset", preset, "--seeds", options.seeds]
    words += ["--runs", options.runs] if options.runs else []
    words += ["--base-only"] if options.base_only else []
    words += [word for assignment in options.assignments for word in ("--set", assignment)]
    return shlex.join(words)


def main(arguments: list[str] | None = None) -> int:
    """0 done, 2 a mistake that the user can correct (in one line), 130 interrupted."""
    options = parse(arguments)
    return exit_status(lambda: train_all(options))


if __name__ == "__main__":
    sys.exit(main())
