"""What the quick start measures of each model: loss, file, speed, a sample, and what QAT wins back.

`measure` makes the models from the checkpoints, measures them in memory, saves them, and measures the files once more
in a fresh process.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lowbit
from recipes import runs, text
from recipes.command_line import UserError
from recipes.device import choose_device, median_seconds
from recipes.llama import Llama, LlamaConfig
from recipes.phases import Run, phases, scheme, start_or_resume
from recipes.training import TrainingConfig, batch_rows, perplexity, window_losses

SAMPLE_PROMPT = "class Queue:\n    def __init__(self"


@dataclass
class Result:
    """Measurements of one model. `losses`: of each held-out window, nats a token."""

    name: str
    label: str
    bits: int | None
    losses: Tensor
    perplexity: float
    file_bytes: int
    forward_tokens_per_s: float
    generate_tokens_per_s: float
    sample: str
    reloaded_perplexity: float = float("nan")


@dataclass
class Recovery:
    """The share of the perplexity lost by rounding to `bits` that QAT wins back, with its 95% interval."""

    bits: int
    lost: float
    share: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.lost <= 0:
            return "rounding lost nothing"
        return f"{self.share:.0%} recovered" if self.share > 0 else "nothing recovered"


@dataclass
class Measurements:
    """Everything that the report shows."""

    results: list[Result]
    recoveries: list[Recovery]
    optimizer_bytes: dict[str, int]
    parameters: int
    quantized_parameters: int
    seconds: dict[str, float]

    def by_name(self, name: str) -> Result:
        return next(r for r in self.results if r.name == name)


def measure(run: Run) -> Measurements:
    """Make the models, measure each in memory, save it, and measure the files in a fresh process."""
    config, folder = run.config, run.folder
    results = []
    quantized = 0
    for name, label, bits, model in measured_models(run):
        print(f"measuring {label}")
        results.append(measure_model(run, name, label, bits, model))
        low_bit = (p.numel() for p in model.parameters() if isinstance(p, lowbit.LowbitTensor))
        quantized = max(quantized, sum(low_bit))
    print("loading the saved models in a fresh process")
    reloaded = evaluate_in_fresh_process(folder)
    logged = [
        *("perplexity", "reloaded_perplexity", "file_bytes"),
        *("forward_tokens_per_s", "generate_tokens_per_s"),
    ]
    for result in results:
        result.reloaded_perplexity = reloaded[result.name]
        values = {name: getattr(result, name) for name in logged}
        run.tracker.log("result", model=result.name, **values)
    found = Measurements(
        results=results,
        recoveries=recoveries(config, results),
        optimizer_bytes=optimizer_bytes(run),
        parameters=sum(p.numel() for p in Llama(config.model).parameters()),
        quantized_parameters=quantized,
        seconds={
            p.name: runs.load_checkpoint(folder.checkpoint(p.name))["seconds"]
            for p in phases(config)
        },
    )
    for recovery in found.recoveries:
        run.tracker.log("recovery", **vars(recovery))
    return found


def measured_models(run: Run) -> Iterator[tuple[str, str, int | None, Llama]]:
    """(name, label, bits, model) of each model in the report, in its order."""
    by_name = {phase.name: phase for phase in phases(run.config)}

    def trained(name: str) -> Llama:
        return start_or_resume(run, by_name[name]).model.eval()

    yield "high", "high precision", None, trained("high")
    for bits in run.config.bits:
        rounded = trained("high")
        lowbit.quantize_(rounded, scheme(run.config, bits), scales="minmax")
        yield f"int{bits}-rtn", f"int{bits}, rounded after training", bits, rounded
        converted = trained(f"int{bits}")
        lowbit.qat.convert_(converted)
        yield f"int{bits}-qat", f"int{bits}, after QAT", bits, converted


def measure_model(run: Run, name: str, label: str, bits: int | None, model: Llama) -> Result:
    """Measure a model, and save it to the run folder.

    Args:
        run: the run, whose held-out text and tokenizer serve.
        name: the model's name in the run folder.
        label: the model's name in the report.
        bits: bits of a weight; None in high precision.
        model: the finished model.
    """
    config, device = run.config, run.device
    windows = run.heldout_windows(config.heldout_tokens)
    losses = window_losses(model, windows, config.bf16)
    save_model(model, run.folder.model(name), name)

    tokens = windows[: batch_rows(windows, device), :-1].to(device)
    room = config.model.context - config.sample_tokens
    prompt = torch.tensor([run.data.tokenizer.encode(SAMPLE_PROMPT).ids[:room]], device=device)
    generated = prompt

    def generate() -> None:
        nonlocal generated
        draws = torch.Generator().manual_seed(config.seed)  # the same for every model
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
            generated = model.generate(
                prompt, config.sample_tokens, temperature=0.7, top_k=40, generator=draws
            )

    def forward() -> None:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
            model(tokens)

    forward_s = median_seconds(forward, device, repeats=5)
    generate_s = median_seconds(generate, device, repeats=9, at_most_s=3.0)
    return Result(
        name=name,
        label=label,
        bits=bits,
        losses=losses,
        perplexity=perplexity(losses),
        file_bytes=run.folder.model(name).stat().st_size,
        forward_tokens_per_s=round(tokens.numel() / forward_s, 1),
        generate_tokens_per_s=round(config.sample_tokens / generate_s, 1),
        sample=run.data.tokenizer.decode(generated[0].tolist()),
    )


def recoveries(config: TrainingConfig, results: list[Result]) -> list[Recovery]:
    """(rounded − QAT) / (rounded − high), in perplexity, for each bit width.

    The interval is a bootstrap over held-out windows; each draw takes the same windows for all three models.
    """
    losses = {r.name: r.losses.numpy() for r in results}
    count = len(losses["high"])
    draws = np.random.default_rng(config.seed).integers(count, size=(2000, count))
    found = []
    for bits in config.bits:
        names = ("high", f"int{bits}-rtn", f"int{bits}-qat")
        high, rounded, qat = (np.exp(losses[n].mean()) for n in names)
        high_D, rounded_D, qat_D = (np.exp(losses[n][draws].mean(1)) for n in names)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares_D = (rounded_D - qat_D) / (rounded_D - high_D)
            share = (rounded - qat) / (rounded - high)
        low, up = np.percentile(shares_D, [2.5, 97.5])
        found.append(Recovery(bits, float(rounded - high), float(share), float(low), float(up)))
    return found


def optimizer_bytes(run: Run) -> dict[str, int]:
    """Bytes of all state tensors: of torch.optim.AdamW after one step, and of the run's own optimizer."""
    model = Llama(run.config.model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reference = torch.optim.AdamW(model.parameters(), lr=0.0)
    reference.step()
    saved = runs.load_checkpoint(run.folder.checkpoint("high"))["optimizer"]["state"]

    def stored(value: Any) -> int:
        if isinstance(value, lowbit.LowbitTensor):
            return value.nbytes_stored()
        return value.nbytes if isinstance(value, Tensor) else 0

    states = {"torch.optim.AdamW": reference.state, "lowbit.optim.AdamW4bit": saved}
    return {
        name: sum(stored(v) for state in found.values() for v in state.values())
        for name, found in states.items()
    }


def save_model(model: Llama, path: Path, name: str) -> None:
    """Write the weights and, as metadata, the sizes from which `load_model` builds the model."""
    metadata = {"name": name, "model": dataclasses.asdict(model.config)}
    lowbit.save(model, path, metadata=metadata)


def load_model(path: Path, device: torch.device) -> Llama:
    """The model in `path`, quantized as it was saved. UserError when the file is damaged."""
    try:
        config = LlamaConfig(**lowbit.load_metadata(path)["model"])
        model = Llama(config)
        model.load_state_dict(lowbit.load(path), assign=True)
    except (OSError, lowbit.CheckpointError, LookupError, TypeError, ValueError, RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UserError(f"{path} is not a model that the quick start saved: {reason}") from e
    if config.tied:
        model.head.weight = model.embedding.weight
    return model.to(device).eval()


def evaluate_saved(folder: runs.RunFolder) -> dict[str, float]:
    """Perplexity by name of the models in `folder`, each loaded from its file."""
    config = TrainingConfig.from_dict(folder.settings())
    paths = sorted((folder.path / "models").glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder.path} has no models yet; finish its run first")
    data, device = text.load(folder.data), choose_device()
    windows = text.windows_of(data.heldout, config.model.context, config.heldout_tokens)
    return {
        path.stem: perplexity(window_losses(load_model(path, device), windows, config.bf16))
        for path in paths
    }


def evaluate_in_fresh_process(folder: runs.RunFolder) -> dict[str, float]:
    """The perplexities that `python -m recipes.quickstart --evaluate RUN` prints."""
    command = [sys.executable, "-m", "recipes.quickstart", "--evaluate", str(folder.path.resolve())]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise UserError(f"the saved models could not be measured in a fresh process: {reason}")
    return json.loads(done.stdout)
