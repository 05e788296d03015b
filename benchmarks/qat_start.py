"""What QAT wins back on six kinds of models, with present and with learned scales, beside torchao's fake quantization.

    python -m benchmarks.qat_start [--kinds TEXT,…] [--seeds 0,1,2,3,4] [--processes N] [--out DIR]

Each model trains 700 steps of AdamW in high precision on bytes of English prose, at a rate that falls from 1e-3 to
5e-4. From there 200 steps from 5e-4 to zero with a new optimizer and the same batches: once in high precision, and for
int4, int3 and int2 in groups of 32 inputs once with each method. All linears, convolutions and experts are rounded;
embeddings are not. torchao's is not run where it leaves a layer alone (convolutions, experts).

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from benchmarks.report import Machine
from benchmarks.small_models import IGNORED, KINDS, batches, text_in

BITS, GROUP = (4, 3, 2), 32
TRUNK, BRANCH, SIZE, CONTEXT = 700, 200, 16, 128
"""Steps in high precision, steps of a branch, and windows of how many bytes a step."""
END = 0.0
"""The rate that the rate of a branch falls to."""
LARGE = "decoder of 99M parameters"
"""The kind that needs a GPU, and trains in bfloat16 autocast."""
HELDOUT = 40
"""Batches of held-out text."""
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
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

    def __init__(self, kind: str, seed: int, text: Tensor) -> None:
        self.kind, self.device = kind, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        steps = TRUNK + BRANCH
        self.train = [t.to(self.device) for t in batches(text, kind, steps, SIZE, CONTEXT, seed)]
        found = batches(text, kind, HELDOUT, SIZE, CONTEXT, 10_000, heldout=True)
        self.heldout = [t.to(self.device) for t in found]
        torch.manual_seed(seed)
        self.model = KINDS[kind](CONTEXT).to(self.device)

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


def run_trial(kind: str, seed: int, out: Path, methods: list[str]) -> str:
    """Run what the file of this kind and seed lacks, and write each loss as it is known. Returns a line."""
    torch.set_num_threads(1)
    path = out / f"{list(KINDS).index(kind)}-{seed}.json"
    record = json.loads(path.read_text()) if path.exists() else {"kind": kind, "seed": seed}
    names = [f"{m}-{bits}" for bits in BITS for m in methods if applies(m, kind)]
    if all(name in record for name in names):
        return f"{kind}, seed {seed}: has everything"
    began, trial = time.perf_counter(), Trial(kind, seed, text_in(out))
    trial.train_(trial.model, 0, TRUNK, 1e-3, 5e-4)
    high = copy.deepcopy(trial.model)
    trial.train_(high, TRUNK, TRUNK + BRANCH, 5e-4, END)
    record |= {"high": trial.measure(high), "trunk": trial.measure(trial.model)}
    for bits in BITS:
        model = copy.deepcopy(high)
        lowbit.quantize_(model, scheme_of(bits), rounded, scales="minmax")
        record[f"rounded-{bits}"] = trial.measure(model)
    for name in names:
        method, _, width = name.partition("-")
        model = copy.deepcopy(trial.model)
        METHODS[method](model, int(width), trial)
        trial.train_(model, TRUNK, TRUNK + BRANCH, 5e-4, END)
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


def table(out: Path) -> str:
    """The rows of every kind and width, from the files of a folder."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*-*.json"))]
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
    add("--seeds", default="0,1,2,3,4")
    add("--methods", default=",".join(METHODS))
    add("--processes", type=int, default=4)
    add("--out", type=Path, default=Path("runs/qat_start"), metavar="DIR")
    add("--page", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    text_in(options.out)  # before processes ask for it
    chosen = [k for k in KINDS if any(part in k for part in options.kinds.split(","))]
    work = [(k, int(s)) for s in options.seeds.split(",") for k in chosen]
    methods = options.methods.split(",")
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(run_trial, k, s, options.out, methods): f"{k}, seed {s}" for k, s in work
        }
        for job in as_completed(jobs):
            failed = job.exception()
            print(job.result() if failed is None else f"{jobs[job]}: {failed!r}", flush=True)
    print(table(options.out))
    if options.page is not None:
        write_page(options.page, options.out)
    return 0


def write_page(page: Path, out: Path) -> None:
    machine = Machine.here("cuda" if torch.cuda.is_available() else "cpu")
    text = [
        "# qat_start: what QAT wins back with present and learned scales\n",
        f"- {date.today()}, `python -m benchmarks.qat_start`",
        f"- {machine.gpu}, torch {machine.torch}, Python {machine.python}",
        "- share of the loss that rounding costs, %; mean of the seeds ± its 95% interval (Student's t);",
        "  differences by pairs of a seed\n",
        table(out),
    ]
    page.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
