"""Does low-bit training reach the same loss? One model, trained once for each way to keep weights and states.

    python -m recipes.convergence --preset gpu [--runs fp32,4bit] [--seeds 0,1,2] [--minutes 9]
    python -m recipes.convergence --report DIR

The model, the text, the batches and the learning rate are the quick start's (`recipes.quickstart`). Every run computes
with bfloat16 weights and activations. The runs differ in what the optimizer updates and how it keeps its states:

    fp32, 8bit, float8, 4bit                        float32 weights, rounded to bfloat16 for each forward pass;
                                                    AdamW's states in that format
    bf16-nearest, bf16-stochastic, bf16-corrected   bfloat16 weights without a float32 copy, AdamW's states in float32;
                                                    the new weight rounded to nearest, stochastically, or with the
                                                    bits below bfloat16 kept in one more byte
    int8-products, float8-products                  as fp32; the linear layers of the blocks multiply in 8 bits, forward
                                                    and backward (`lowbit.train`)
    int8-weights                                    int8 weights in the blocks, without a copy
    bitnet                                          as fp32; the weights of the blocks are ternary in every product

Runs of one seed start from the same weights and see the same batches, so they are compared seed by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import lowbit
from lowbit.files import new_path
from lowbit.train import TrainingScheme
from recipes import figures, pages, quickstart, text
from recipes.command_line import UserError, chosen_names, chosen_seeds, exit_status
from recipes.device import choose_device
from recipes.llama import Llama, LlamaConfig
from recipes.runs import write_text
from recipes.training import (
    TrainingConfig,
    learning_rate_factor,
    override,
    parameter_groups,
    step_loss,
    window_losses,
)

FOLDER = Path("runs/convergence")
REFERENCE = "fp32"

# ---- the runs, and the settings that they share ------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to keep weights and states.

    Attributes:
        about: a description for the table.
        weights: dtype of the weights that the optimizer updates.
        make: makes AdamW over parameter groups with lr, betas and weight_decay.
        allowed: the largest loss above the reference's, as a share of it; None sets no limit.
        scheme: of `lowbit.train`, for the linear layers of the blocks.
    """

    name: str
    about: str
    weights: torch.dtype
    make: Callable[..., torch.optim.Optimizer]
    allowed: float | None = None
    scheme: TrainingScheme | None = None


def variants() -> dict[str, Variant]:
    """Every layer takes part, however small it is: `always=True`."""
    fp32, bf16 = torch.float32, torch.bfloat16
    torch_adamw: Any = torch.optim.AdamW
    adamw: Any = partial(lowbit.optim.AdamW, state="fp32")
    stochastic: Any = partial(adamw, bf16_stochastic_round=True)
    corrected: Any = partial(adamw, weight_correction="8bit")
    int8, float8 = lowbit.Int8MixedPrecision(always=True), lowbit.Float8MixedPrecision(always=True)
    int8_weight, bitnet = lowbit.Int8Weight(), lowbit.BitNet()
    found = [
        Variant(REFERENCE, "fp32 weights, fp32 states (torch)", fp32, torch_adamw),
        Variant("8bit", "fp32 weights, 8-bit states", fp32, lowbit.optim.AdamW8bit, 0.003),
        Variant("float8", "fp32 weights, float8 states", fp32, lowbit.optim.AdamWFp8, 0.003),
        Variant("4bit", "fp32 weights, 4-bit states", fp32, lowbit.optim.AdamW4bit, 0.01),
        Variant("bf16-nearest", "bf16 weights, rounded to nearest", bf16, adamw),
        Variant("bf16-stochastic", "bf16 weights, rounded stochastically", bf16, stochastic, 0.005),
        Variant("bf16-corrected", "bf16 weights, 8-bit correction", bf16, corrected, 0.005),
        Variant("int8-products", "int8 products", fp32, torch_adamw, 0.005, int8),
        Variant(
            "float8-products", "float8 products, a scale a row", fp32, torch_adamw, 0.005, float8
        ),
        Variant("int8-weights", "int8 weights, no copy", bf16, adamw, None, int8_weight),
        Variant("bitnet", "BitNet b1.58: ternary weights", fp32, torch_adamw, None, bitnet),
    ]
    return {variant.name: variant for variant in found}


RUNS = variants()


def gpu() -> TrainingConfig:
    """The quick start's 99M parameters, 1,000 steps of 8,192 tokens: less than one pass over the text, so no dropout.
    About 16 s a run on a datacentre GPU.

    The quick start's learning rate of 1.5e-3 is at the edge of stability for these short runs: equal runs ended up to
    2% apart, and 4-bit states, which were rounded to nearest then, 4 to 11% below float32 ones, as damped updates help
    there. Its updates are also so large that bfloat16 has enough bits for them. This rate avoids both.
    """
    base = quickstart.gpu()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dropout=0.0),
        batch_size=8,
        lr=3e-4,
        bf16=False,  # no autocast: the weights that compute are bfloat16 themselves
        compile=True,
    )


def tiny() -> TrainingConfig:
    """0.1M parameters, to try the program: a second or two a run on a CPU, too small for any conclusion."""
    return dataclasses.replace(
        quickstart.tiny(),
        model=LlamaConfig(
            vocab_size=512, dim=64, layers=1, heads=2, kv_heads=1, hidden=128, context=64
        ),
        batch_size=4,
        steps=40,
        branch_steps=10,
        warmup_steps=4,
        decay_steps=12,
        heldout_tokens=4096,
        probe_sequences=8,
        probe_every=10,
        sample_tokens=8,
    )


PRESETS = {"tiny": tiny, "gpu": gpu}

# ---- the text ----------------------------------------------------------------------------------------------

STRETCH = 4096
"""Tokens of a stretch of text that is held out as a whole."""


def cached_data(config: TrainingConfig, source: Path | None, cache: Path) -> text.Data:
    """The quick start's text, read and encoded once for all runs with these files, split and vocabulary."""
    key = f"stretches {file_versions(source)} {config.corpus} {config.model.vocab_size} {config.heldout_share}"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:12]
    if folder.exists():
        return text.load(folder)
    model = config.model
    data = in_stretches(
        text.prepare(source, config.corpus, config.heldout_share, model.vocab_size, model.context),
        config.heldout_share,
    )
    cache.mkdir(parents=True, exist_ok=True)
    with new_path.workplace(folder) as place:
        text.save(data, place / "data")
        new_path.put_folder(place / "data", folder)
    return data


def file_versions(source: Path | None) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a text, which change when one of them does."""
    if source is None:
        return []
    source = source.resolve()
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def in_stretches(data: text.Data, share: float) -> text.Data:
    """The same text with one stretch of every 1 / `share` held out instead of whole files. On kinds of text that a
    model has never seen, equal runs differ by whole per cents."""
    tokens = torch.cat([data.train, data.heldout])
    every = max(round(1 / share), 2)
    stretches = list(tokens.split(STRETCH))
    train = [s for i, s in enumerate(stretches) if i % every != every - 1]
    heldout = stretches[every - 1 :: every] or train[-1:]
    return dataclasses.replace(data, train=torch.cat(train), heldout=torch.cat(heldout))


# ---- one run -----------------------------------------------------------------------------------------------

CHECK_EVERY = 25
"""Steps between two checks that the loss is finite: each waits for the device."""


class Weights:
    """The model computes with `computing`, in bfloat16; the optimizer updates `trained`.

    They are the same tensors, or `trained` is in float32, and `computing` is its copy, rounded after each step. So all
    runs compute alike, and a difference of loss comes from the optimizer.
    """

    def __init__(self, model: Llama, variant: Variant) -> None:
        """`model` comes in float32, as initialized, and becomes bfloat16, prepared for the variant's scheme."""
        initial = [p.detach().clone() for p in model.parameters()]
        model.to(torch.bfloat16)
        if variant.scheme is not None:
            lowbit.train.prepare_(model.blocks, variant.scheme)
        self.computing = list(model.parameters())
        self.trained = self.computing
        if variant.weights != torch.bfloat16:
            self.trained = [nn.Parameter(tensor.to(variant.weights)) for tensor in initial]

    def take_gradients(self) -> None:
        """Give `trained` the gradients of `computing`."""
        if self.trained is not self.computing:
            for trained, computing in zip(self.trained, self.computing, strict=True):
                assert computing.grad is not None
                trained.grad = computing.grad.to(trained.dtype)

    @torch.no_grad()
    def round(self) -> None:
        """Copy `trained` to `computing`, rounded to nearest."""
        if self.trained is not self.computing:
            for trained, computing in zip(self.trained, self.computing, strict=True):
                computing.copy_(trained)


def train_run(
    config: TrainingConfig, variant: Variant, data: text.Data, device: torch.device
) -> dict[str, Any]:
    """Train from scratch and measure: the record of a finished run.

    A run whose loss stops being finite has the "final_loss" None, and its curve ends there.
    """
    began = time.perf_counter()
    torch.manual_seed(config.seed)
    model = Llama(config.model).to(device)
    weights = Weights(model, variant)
    optimizer = variant.make(
        parameter_groups(weights.trained),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
    )
    scheduler = LambdaLR(optimizer, learning_rate_factor(config))
    forward = torch.compile(model) if config.compile else model
    context = config.model.context
    probes = text.windows_of(data.heldout, context, config.probe_sequences * context)
    tokens = data.train.to(device)  # all of them, so that no step waits for a copy
    curve: list[tuple[int, float]] = []

    model.train()
    finite = True
    for step in range(config.steps):
        if step % config.probe_every == 0:
            curve.append((step, mean_loss(model, probes)))
        loss = step_loss(config, forward, tokens, step, device)
        loss.backward()
        nn.utils.clip_grad_norm_(weights.computing, config.grad_clip)
        weights.take_gradients()
        optimizer.step()
        scheduler.step()
        weights.round()
        model.zero_grad()
        if step % CHECK_EVERY == 0 and not math.isfinite(loss.item()):
            finite = False
            break
    final = math.nan
    if finite:
        curve.append((config.steps, mean_loss(model, probes)))
        final = mean_loss(model, text.windows_of(data.heldout, context, config.heldout_tokens))
    return {
        "run": variant.name,
        "seed": config.seed,
        "final_loss": final if math.isfinite(final) else None,
        "curve": [(s, round(v, 5)) for s, v in curve if math.isfinite(v)],
        "seconds": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "settings": settings(config, data),
    }


def mean_loss(model: Llama, windows: Tensor) -> float:
    """Cross entropy over held-out windows, nats a token."""
    return window_losses(model, windows, bf16=False).mean().item()


def settings(config: TrainingConfig, data: text.Data) -> dict[str, Any]:
    """The values that compared runs must share: all settings except the seed, and the text."""
    values = dataclasses.asdict(config)
    unused = ("seed", "bits", "group_size", "sample_tokens", "save_every", "corpus")
    kept = {name: value for name, value in values.items() if name not in unused}
    return {
        **kept,
        "train_tokens": len(data.train),
        "first_tokens_sum": int(data.train[:100_000].sum()),
    }


# ---- the results: finished runs, one JSON object a line ----------------------------------------------------

FIELDS = {
    *("run", "seed", "final_loss", "curve", "seconds", "device", "torch", "date", "settings"),
    "command",
}


def read_results(path: Path) -> list[dict[str, Any]]:
    """All finished runs, without a last line that was cut short. UserError for a file with other content."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or FIELDS - set(record):
            raise UserError(
                f"{path} holds something else than finished runs; give another --results"
            )
        records.append(record)
    return records


def append_result(path: Path, record: dict[str, Any]) -> None:
    """Add a line, also after one that was cut short. It is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def check_settings(records: list[dict[str, Any]], own: dict[str, Any], path: Path) -> None:
    """UserError when the file holds runs with other settings, which can't be compared."""
    wanted = json.loads(json.dumps(own))
    for record in records:
        found = record["settings"]
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                raise UserError(
                    f"{path} holds a run with {name} {found.get(name)!r}, here it is {wanted.get(name)!r}; "
                    "give another --results, or the same settings and text"
                )


STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t with 1, 2, … degrees of freedom."""


@dataclass(frozen=True)
class Summary:
    """One variant over its seeds.

    Attributes:
        losses: final held-out loss by seed; None where it diverged.
        difference: (loss / reference's loss − 1), the mean over common seeds; None without a common seed.
        interval: half the width of its 95% interval; None with fewer than two seeds.
    """

    variant: Variant
    losses: dict[int, float | None]
    difference: float | None
    interval: float | None

    @property
    def within(self) -> bool | None:
        """Whether all runs converged and the mean difference is allowed; None without a limit."""
        if self.variant.allowed is None or self.difference is None:
            return None
        return None not in self.losses.values() and self.difference <= self.variant.allowed


def summarize(records: list[dict[str, Any]]) -> list[Summary]:
    """One summary a variant that has runs, in the order of RUNS."""
    losses: dict[str, dict[int, float | None]] = {name: {} for name in RUNS}
    for record in sorted(records, key=lambda r: r["seed"]):
        losses[record["run"]][record["seed"]] = record["final_loss"]
    found = []
    for name, own in losses.items():
        pairs = [(loss, losses[REFERENCE].get(seed)) for seed, loss in own.items()]
        differences = [a / b - 1 for a, b in pairs if a is not None and b is not None]
        mean = statistics.mean(differences) if differences and name != REFERENCE else None
        interval = half_interval(differences) if mean is not None else None
        if own:
            found.append(Summary(RUNS[name], own, mean, interval))
    return found


def half_interval(values: list[float]) -> float | None:
    """Half of the 95% interval of the mean (Student's t). From 11 values on the factor is that of 11: a little wide."""
    if len(values) < 2:
        return None
    factor = STUDENT_T[min(len(values) - 2, len(STUDENT_T) - 1)]
    return factor * statistics.stdev(values) / math.sqrt(len(values))


# ---- the report --------------------------------------------------------------------------------------------


def table(summaries: list[Summary]) -> str:
    """One row a variant, in Markdown."""
    header = ["run", "", "seeds", "final held-out loss", "lowest .. highest", "against fp32",
              "allowed", "kept"]  # fmt: skip
    rows = []
    for s in summaries:
        finished = [loss for loss in s.losses.values() if loss is not None]
        diverged = len(s.losses) - len(finished)
        mean = f"{statistics.mean(finished):.4f}" if finished else ""
        spread = f"{min(finished):.4f} .. {max(finished):.4f}" if finished else ""
        spread += f" ({diverged} diverged)" if diverged else ""
        difference = "" if s.difference is None else f"{s.difference:+.2%}"
        difference += "" if s.interval is None else f" ± {s.interval:.2%}"
        allowed = "" if s.variant.allowed is None else f"{s.variant.allowed:+.1%}"
        kept = {True: "yes", False: "no", None: ""}[s.within]
        count = str(len(s.losses))
        rows.append(
            [s.variant.name, s.variant.about, count, mean, spread, difference, allowed, kept]
        )
    return pages.table(header, rows, left=(0, 1, 7)) + "\n"


def page(records: list[dict[str, Any]]) -> str:
    """The report in Markdown."""
    own = records[0]["settings"]
    model, tokens = own["model"], own["batch_size"] * own["model"]["context"]
    commands = "\n".join(f"- `{command}`" for command in sorted({r["command"] for r in records}))
    machines = "; ".join(sorted({f"{r['device']}, torch {r['torch']}, {r['date']}" for r in records}))  # fmt: skip
    seconds = statistics.median(r["seconds"] for r in records)
    return f"""# Convergence: low-bit states, weights and products

{commands}
- {machines}; {seconds:.0f} s a run
- {model["layers"]} layers of width {model["dim"]}, vocabulary {model["vocab_size"]}; {own["steps"]} steps of {tokens} \
tokens, lr {own["lr"]:g}; {own["train_tokens"]} tokens to train on

Every run computes with bfloat16 weights; see `recipes/convergence.py`. *Against fp32*: the relative difference of the \
final loss, seed by seed, with the 95% interval of its mean (Student's t over the seeds).

{table(summarize(records))}
![Held-out loss](convergence.png)
"""


def write_report(records: list[dict[str, Any]], folder: Path) -> None:
    """`convergence.md` and `convergence.png` in `folder`. UserError without finished runs."""
    if not records:
        raise UserError(
            "there are no finished runs yet; train some, or name their file with --results"
        )
    folder.mkdir(parents=True, exist_ok=True)
    summaries = summarize(records)
    names = [s.variant.name for s in summaries]
    final = {
        s.variant.name: figures.Difference(s.difference, s.interval, s.variant.allowed)
        for s in summaries
        if s.difference is not None
    }
    figures.draw_convergence(
        folder / "convergence.png",
        REFERENCE,
        {name: mean_curve(records, name) for name in names},
        {name: difference_curve(records, name) for name in final},
        final,
    )
    write_text(folder / "convergence.md", page(records))


def curves_of(records: list[dict[str, Any]], name: str) -> dict[int, dict[int, float]]:
    """Held-out loss by step, by seed."""
    return {r["seed"]: dict(r["curve"]) for r in records if r["run"] == name}


def mean_curve(records: list[dict[str, Any]], name: str) -> figures.Points:
    """The mean loss of all seeds at each step that all of them reached."""
    curves = list(curves_of(records, name).values())
    steps = sorted(set.intersection(*map(set, curves)))
    return [(step, statistics.mean(curve[step] for curve in curves)) for step in steps]


def difference_curve(records: list[dict[str, Any]], name: str) -> figures.Points:
    """The relative difference from the reference at each step after the first, the mean over common seeds."""
    own, reference = curves_of(records, name), curves_of(records, REFERENCE)
    pairs = [(own[seed], reference[seed]) for seed in own.keys() & reference.keys()]
    steps = sorted(set.intersection(*(set(curve) for pair in pairs for curve in pair)) - {0})
    return [(s, statistics.mean(a[s] / b[s] - 1 for a, b in pairs)) for s in steps]


# ---- the command line --------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.convergence",
        description="Train one model with low-bit optimizer states, weights and products, and compare the losses.",
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), help="default: gpu with CUDA, else tiny")
    add("--runs", default="", metavar="NAME,NAME", help=f"of {', '.join(RUNS)} (default: all)")
    add("--seeds", default="0,1,2", help="default: 0,1,2")
    add("--results", type=Path, default=FOLDER / "results.jsonl", metavar="FILE",
        help="finished runs, which are not run again (default: %(default)s)")  # fmt: skip
    add("--data", type=Path, metavar="FILE_OR_FOLDER",
        help="your own UTF-8 text (default: the preset's corpus)")  # fmt: skip
    add("--cache", type=Path, default=FOLDER / "data", metavar="DIR",
        help="keeps tokenizer and tokens (default: %(default)s)")  # fmt: skip
    add("--minutes", type=float, default=math.inf,
        help="start no run that would end after so many, judged by the last run (default: no limit)")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="change a setting, e.g. --set steps=2000 (see training.py)")  # fmt: skip
    add("--report", type=Path, metavar="DIR",
        help="write the table and the curves of --results to DIR, and train nothing")  # fmt: skip
    return parser.parse_args(arguments)


def train_all(options: argparse.Namespace) -> None:
    """Train every chosen run that is not in the results yet, seed by seed, so that finished seeds can be compared."""
    began = time.perf_counter()
    device = choose_device()
    preset = options.preset or ("gpu" if device.type == "cuda" else "tiny")
    config = override(PRESETS[preset](), options.assignments)
    seeds = chosen_seeds(options.seeds)
    chosen = [RUNS[name] for name in chosen_names(options.runs, RUNS)]
    wanted = [(dataclasses.replace(config, seed=s), variant) for s in seeds for variant in chosen]
    data = cached_data(config, options.data, options.cache)
    records = read_results(options.results)
    check_settings(records, settings(config, data), options.results)
    done = {(r["seed"], r["run"]) for r in records}
    left = [(own, variant) for own, variant in wanted if (own.seed, variant.name) not in done]
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} runs are done; {config.steps} steps on {device}"
    )
    command = ["python", "-m", "recipes.convergence", "--preset", preset]
    command += [word for assignment in options.assignments for word in ("--set", assignment)]
    longest = 0.0
    for i, (own, variant) in enumerate(left):
        started = time.perf_counter()
        if (started - began + longest) / 60 > options.minutes:
            print(f"{len(left) - i} runs are left for another {options.minutes:g} minutes")
            break
        record = {**train_run(own, variant, data, device), "command": shlex.join(command)}
        append_result(options.results, record)
        records.append(record)
        longest = time.perf_counter() - started
        loss = "diverged" if record["final_loss"] is None else f"{record['final_loss']:.4f}"
        line = f"{variant.name:<16} seed {own.seed}  held-out loss {loss}  {longest:6.1f} s"
        print(line, flush=True)
    print(table(summarize(records)))


def report_results(options: argparse.Namespace) -> None:
    write_report(read_results(options.results), options.report)
    for name in ("convergence.md", "convergence.png"):
        print(options.report / name)


def main(arguments: list[str] | None = None) -> int:
    """0 done, 2 a mistake that the user can correct (in one line), 130 interrupted."""
    options = parse(arguments)
    program = train_all if options.report is None else report_results
    return exit_status(lambda: program(options))


if __name__ == "__main__":
    sys.exit(main())
