"""What QAT wins back on six kinds of models, with present and with learned scales, beside torchao's fake quantization.

    python -m benchmarks.qat_start [--size full|small|finished] [--kinds TEXT,…] [--seeds 0,1,2,3,4] [--processes N]
        [--out DIR]

Each model trains 700 steps of AdamW in high precision on bytes of English prose, at a rate that falls to half. From
there 200 steps from that rate to zero with a new optimizer and the same batches: once in high precision, and for int4,
int3 and int2 in groups of 32 inputs once with each method. All linears, convolutions and experts are rounded;
embeddings are not. torchao's is not run where it leaves a layer alone (convolutions, experts). An encoder learns from
the bytes that are masked alone, so its model trains six times as many steps. `--size small` is for a CPU: narrower
models, fewer steps, fewer bytes a step. With `--size finished` these models train until their rate is zero, and the
steps after that run at a tenth of the first rate, so that methods differ less by chance.

    won back = (loss rounded − loss after QAT) / (loss rounded − loss in high precision), in nats of held-out text

"Rounded" is the branch in high precision, rounded by min-max with the scheme that the method trains by. A finished
(kind, seed) is a file of DIR, so a run that was stopped goes on. `--page FILE` writes the table.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from benchmarks.report import Machine
from benchmarks.small_models import IGNORED, KINDS, batches, text_in

BITS, GROUP = (4, 3, 2), 32


class Size(NamedTuple):
    """How large models and batches are."""

    dim: int
    context: int
    """Bytes of a window."""
    windows: int
    """Windows a step."""
    heldout: int
    """Batches of held-out text."""
    trunk: int
    """Steps in high precision."""
    branch: int
    """Steps of a branch."""
    lr: float
    """The first rate of the trunk."""
    end: float
    """Its last rate."""
    branch_lr: float
    """The first rate of a branch, which falls to zero."""

    def trunk_of(self, kind: str) -> int:
        return self.trunk * (6 if kind == "encoder" else 1)


SIZES = {
    "full": Size(128, 128, 16, 40, 700, 200, 1e-3, 5e-4, 5e-4),  # 0.6M to 0.7M parameters
    "small": Size(64, 32, 8, 64, 500, 150, 2e-3, 1e-3, 1e-3),  # 0.15M to 0.2M parameters
    "finished": Size(64, 32, 8, 400, 650, 150, 2e-3, 0.0, 2e-4),
}
LARGE = "decoder of 99M parameters"
"""The kind that needs a GPU, and trains in bfloat16 autocast."""
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Half-widths of a 95% interval in standard errors, by the number of seeds."""


def scheme_of(bits: int) -> lowbit.Scheme:
    return lowbit.IntxWeightOnly(bits, GROUP)


def rounded(module: nn.Module, name: str) -> bool:
    """The layers of the page: linears, convolutions, experts."""
    kinds = (nn.Linear, nn.Conv1d)
    return isinstance(module, kinds) or type(module).__name__ == "Experts"


def present(model: nn.Module, bits: int, trial: Trial) -> None:
    lowbit.qat.prepare_(model, scheme_of(bits), rounded)


def learned(model: nn.Module, bits: int, trial: Trial) -> None:
    lowbit.qat.prepare_(model, scheme_of(bits), rounded, scales="learned")


def torchao(model: nn.Module, bits: int, trial: Trial) -> None:
    """torchao's fake quantization with symmetric groups, of all linears."""
    qat = importlib.import_module("torchao.quantization.qat")
    dtype = getattr(torch, f"int{bits}")
    own = qat.IntxFakeQuantizeConfig(dtype, group_size=GROUP, is_symmetric=True)
    quantize = importlib.import_module("torchao.quantization").quantize_
    quantize(model, qat.QATConfig(weight_config=own, step="prepare"))


METHODS: dict[str, Callable[[nn.Module, int, Trial], None]] = {
    "present": present,
    "learned": learned,
    "torchao": torchao,
}


class Trial:
    """One kind of model with one seed: its batches, its training and its held-out loss."""

    def __init__(self, kind: str, seed: int, text: Tensor, size: Size) -> None:
        self.kind, self.device = kind, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        steps, shape = size.trunk_of(kind) + size.branch, (size.windows, size.context)
        self.train = [t.to(self.device) for t in batches(text, kind, steps, *shape, seed)]
        found = batches(text, kind, size.heldout, *shape, 10_000, heldout=True)
        self.heldout = [t.to(self.device) for t in found]
        torch.manual_seed(seed)
        self.model = KINDS[kind](size.dim, size.context).to(self.device)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        bf16 = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with bf16 if self.kind == LARGE else nullcontext():
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def train_(self, model: nn.Module, first: int, last: int, lr: float, end: float) -> None:
        """Train by the batches of steps `first` to `last`, at a rate that falls linearly from `lr` to `end`. On a GPU
        all but three steps replay a graph of one."""
        model.train()
        on_gpu = self.device.type == "cuda"
        rate = torch.tensor(lr, device=self.device)  # a graph reads its present value
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=on_gpu)
        inputs, labels = (t[first].clone() for t in self.train)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            self.loss(model, inputs, labels).backward()
            optimizer.step()

        run: Callable[[], None] = step
        for i in range(first, last):
            rate.fill_(lr + (end - lr) * (i - first) / (last - first))
            inputs.copy_(self.train[0][i])
            labels.copy_(self.train[1][i])
            if on_gpu and i == first + 3:
                try:
                    run = captured(step)
                except RuntimeError as error:
                    print(f"{self.kind}: no graph: {error!r}"[:600], flush=True)
            run_beside(run) if on_gpu and i < first + 3 else run()

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """The mean held-out loss, in nats a byte."""
        model.eval()
        losses = [self.loss(model, x, y) for x, y in zip(*self.heldout, strict=True)]
        return float(torch.stack(losses).double().mean())


def run_beside(step: Callable[[], None]) -> None:
    """Run a step on another stream, as CUDA graphs ask before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def run_trial(
    kind: str, seed: int, out: Path, methods: list[str], bits_of: list[int], size: str
) -> str:
    """Run what the file of this kind and seed lacks, and write each loss as it is known. Returns a line."""
    torch.set_num_threads(1)
    path = out / f"{size}-{list(KINDS).index(kind)}-{seed}.json"
    record = json.loads(path.read_text()) if path.exists() else {"kind": kind, "seed": seed}
    names = [f"{m}-{bits}" for bits in bits_of for m in methods if applies(m, kind)]
    if all(name in record for name in names):
        return f"{kind}, seed {seed}: has everything"
    began, own = time.perf_counter(), SIZES[size]
    trial, trunk = Trial(kind, seed, text_in(out), own), own.trunk_of(kind)
    trial.train_(trial.model, 0, trunk, own.lr, own.end)
    high, last = copy.deepcopy(trial.model), trunk + own.branch
    trial.train_(high, trunk, last, own.branch_lr, 0.0)
    record |= {"high": trial.measure(high), "trunk": trial.measure(trial.model)}
    for bits in bits_of:
        model = copy.deepcopy(high)
        lowbit.quantize_(model, scheme_of(bits), rounded, scales="minmax")
        record[f"rounded-{bits}"] = trial.measure(model)
    for name in names:
        if name in record:
            continue
        method, _, width = name.partition("-")
        model = copy.deepcopy(trial.model)
        METHODS[method](model, int(width), trial)
        trial.train_(model, trunk, last, own.branch_lr, 0.0)
        record[name] = trial.measure(model)
        path.write_text(json.dumps(record))
    shares = " ".join(f"{name} {share(record, name):.0f}" for name in names)
    return (
        f"{kind}, seed {seed}, {time.perf_counter() - began:.0f} s: {record['high']:.4f}; {shares}"
    )


def applies(method: str, kind: str) -> bool:
    return method != "torchao" or kind not in ("convolutional", "mixture of experts")


def share(record: dict[str, Any], name: str) -> float:
    lost = record[f"rounded-{name.rpartition('-')[2]}"]
    return 100 * (lost - record[name]) / (lost - record["high"])


def interval(values: list[float]) -> str:
    """Mean ± half of the 95% interval over seeds."""
    if len(values) < 2:
        return " ".join(f"{x:.1f}" for x in values)
    width = T_95.get(len(values), 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {width:.1f}"


def table(out: Path, size: str) -> str:
    """The rows of every kind and width, from the files of a folder."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob(f"{size}-*-*.json"))]
    heads = [
        "model",
        "",
        "seeds",
        "rounded, nats",
        *METHODS,
        "learned − present",
        "present − torchao",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|--:|" + "--:|" * (len(heads) - 3)]
    for kind in KINDS:
        for bits in BITS:
            own = [r for r in found if r["kind"] == kind and f"learned-{bits}" in r]
            if not own:
                continue
            has = {m: [share(r, f"{m}-{bits}") for r in own if f"{m}-{bits}" in r] for m in METHODS}
            cost = statistics.mean(r[f"rounded-{bits}"] - r["high"] for r in own)
            pairs = [("learned", "present"), ("present", "torchao")]
            differences = [
                interval(
                    [
                        share(r, f"{a}-{bits}") - share(r, f"{b}-{bits}")
                        for r in own
                        if f"{b}-{bits}" in r
                    ]
                )
                for a, b in pairs
            ]
            cells = [kind, f"int{bits}", str(len(own)), f"+{cost:.4f}"]
            cells += [*(interval(v) for v in has.values()), *differences]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.qat_start", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kinds", default="", help="parts of names of kinds, by commas (default: all)")
    add("--size", default="full", choices=SIZES)
    add("--seeds", default="0,1,2,3,4")
    add("--bits", default=",".join(map(str, BITS)))
    add("--methods", default=",".join(METHODS))
    add("--processes", type=int, default=4)
    add("--out", type=Path, default=Path("runs/qat_start"), metavar="DIR")
    add("--page", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    text_in(options.out)  # before processes ask for it
    chosen = [k for k in KINDS if any(part in k for part in options.kinds.split(","))]
    work = [(k, int(s)) for s in options.seeds.split(",") for k in chosen]
    methods, bits = options.methods.split(","), [int(b) for b in options.bits.split(",")]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(run_trial, k, s, options.out, methods, bits, options.size): f"{k}, seed {s}"
            for k, s in work
        }
        for job in as_completed(jobs):
            failed = job.exception()
            print(job.result() if failed is None else f"{jobs[job]}: {failed!r}", flush=True)
    print(table(options.out, options.size))
    if options.page is not None:
        write_page(options.page, options.out, options.size)
    return 0


def write_page(page: Path, out: Path, size: str) -> None:
    machine = Machine.here("cuda" if torch.cuda.is_available() else "cpu")
    text = [
        "# qat_start: what QAT wins back with present and learned scales\n",
        f"- {date.today()}, `python -m benchmarks.qat_start --size {size}`",
        f"- {machine.gpu}, torch {machine.torch}, Python {machine.python}",
        "- share of the loss that rounding costs, %; mean of the seeds ± its 95% interval (Student's t);",
        "  differences by pairs of a seed\n",
        table(out, size),
    ]
    page.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
