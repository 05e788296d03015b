"""From trained checkpoints to the figures of the report.

Rounds the high-precision model to each bit width (`lowbit.quantize_`), converts the QAT models
(`lowbit.qat.convert_`), saves all of them, and measures perplexity, size, speed, optimizer memory, a sample; then
has a fresh process load the files and measure again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lowbit
from recipes.llama import Llama
from recipes.quickstart.config import QuickstartConfig, UserError
from recipes.quickstart.data import Data, heldout_windows
from recipes.quickstart.evaluate import (
    forward_speed,
    perplexity,
    sample,
    save_model,
    window_losses,
)
from recipes.quickstart.folder import RunFolder, load_checkpoint
from recipes.quickstart.interrupt import Interrupt
from recipes.quickstart.tracking import Tracker
from recipes.quickstart.train import Phase, phases, scheme, start_or_resume


@dataclass
class Result:
    """What was measured of one model. `losses`: of each held-out window, nats a token."""

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
    """What QAT wins back of the perplexity that rounding to `bits` loses, with a 95% interval."""

    bits: int
    lost: float
    share: float
    low: float
    high: float


@dataclass
class Measurements:
    """Everything the report shows."""

    results: list[Result]
    recoveries: list[Recovery]
    optimizer_bytes: dict[str, int]
    bf16_file_bytes: int
    parameters: int
    quantized_parameters: int
    seconds: dict[str, float]

    def by_name(self, name: str) -> Result:
        return next(r for r in self.results if r.name == name)

    def generating(self) -> list[float]:
        """The speed of each low-bit model at generating text, as a share of high precision's."""
        high = self.by_name("high").generate_tokens_per_s
        return [r.generate_tokens_per_s / high for r in self.results if r.bits is not None]


def measure(
    config: QuickstartConfig,
    folder: RunFolder,
    data: Data,
    device: torch.device,
    tracker: Tracker,
    interrupt: Interrupt,
) -> Measurements:
    """Make the models, measure each in memory, save it, and measure the files in a fresh process."""
    limit = config.heldout_tokens // config.model.context
    windows = heldout_windows(config, data.heldout, limit)
    results = []
    quantized = 0
    for name, label, bits, model in final_models(config, folder, device):
        interrupt.check()
        print(f"measuring {label}")
        losses = window_losses(model, windows, device, config.bf16, interrupt.check)
        save_model(model, folder.model(name), name)
        text, generate_speed = sample(model, data, config, device)
        result = Result(
            name=name,
            label=label,
            bits=bits,
            losses=losses,
            perplexity=perplexity(losses),
            file_bytes=folder.model(name).stat().st_size,
            forward_tokens_per_s=forward_speed(model, windows, device, config.bf16),
            generate_tokens_per_s=generate_speed,
            sample=text,
        )
        results.append(result)
        quantized = max(quantized, quantized_parameters(model))
    interrupt.check()
    print("loading the saved models in a fresh process")
    reloaded = evaluate_in_fresh_process(folder, interrupt)
    for result in results:
        result.reloaded_perplexity = reloaded[result.name]
        tracker.log(
            "result",
            model=result.name,
            perplexity=result.perplexity,
            reloaded_perplexity=result.reloaded_perplexity,
            file_bytes=result.file_bytes,
            forward_tokens_per_s=round(result.forward_tokens_per_s, 1),
            generate_tokens_per_s=round(result.generate_tokens_per_s, 1),
        )
    found = Measurements(
        results=results,
        recoveries=recoveries(config, results),
        optimizer_bytes=optimizer_bytes(config, folder),
        bf16_file_bytes=bf16_file_bytes(config, folder),
        parameters=sum(p.numel() for p in Llama(config.model).parameters()),
        quantized_parameters=quantized,
        seconds={
            p.name: load_checkpoint(folder.checkpoint(p.name))["seconds"] for p in phases(config)
        },
    )
    for recovery in found.recoveries:
        tracker.log("recovery", **vars(recovery))
    return found


def final_models(config: QuickstartConfig, folder: RunFolder, device: torch.device) -> Any:
    """Yield (name, label, bits, model) of each model that is reported, in the report's order."""
    by_name = {phase.name: phase for phase in phases(config)}

    def trained(phase: Phase) -> Llama:
        return start_or_resume(config, phase, folder, device).model.eval()

    yield "high", "high precision", None, trained(by_name["high"])
    for bits in config.bits:
        rounded = trained(by_name["high"])
        lowbit.quantize_(rounded, scheme(config, bits))
        yield f"int{bits}-rtn", f"int{bits}, rounded after training", bits, rounded
        converted = trained(by_name[f"int{bits}"])
        lowbit.qat.convert_(converted)
        yield f"int{bits}-qat", f"int{bits}, after QAT", bits, converted


def quantized_parameters(model: Llama) -> int:
    return sum(p.numel() for p in model.parameters() if isinstance(p, lowbit.LowbitTensor))


def recoveries(config: QuickstartConfig, results: list[Result]) -> list[Recovery]:
    """(rounded − QAT) / (rounded − high), in perplexity, for each bit width.

    The interval is a bootstrap over held-out windows, the same windows drawn for all three models.
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


def tensor_bytes(value: Any) -> int:
    """Bytes that a tensor's data take, of a quantized one its codes and scales."""
    if not isinstance(value, Tensor):
        return 0
    return value.nbytes_stored() if isinstance(value, lowbit.LowbitTensor) else value.nbytes


def optimizer_bytes(config: QuickstartConfig, folder: RunFolder) -> dict[str, int]:
    """Bytes of all state tensors: of the run's own optimizer, and of torch.optim.AdamW after one step."""
    saved = load_checkpoint(folder.checkpoint("high"))["optimizer"]["state"]
    model = Llama(config.model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reference = torch.optim.AdamW(model.parameters(), lr=0.0)
    reference.step()
    states = {"torch.optim.AdamW": reference.state, "lowbit.optim.AdamW4bit": saved}
    return {
        name: sum(tensor_bytes(v) for state in found.values() for v in state.values())
        for name, found in states.items()
    }


def bf16_file_bytes(config: QuickstartConfig, folder: RunFolder) -> int:
    """Size of the high-precision model's file with its weights in bfloat16."""
    model = Llama(config.model)
    model.load_state_dict(load_checkpoint(folder.checkpoint("high"))["model"])
    path = folder.path / "bf16.safetensors"
    try:
        save_model(model.bfloat16(), path, "high-bf16")
        return path.stat().st_size
    finally:
        path.unlink(missing_ok=True)


def evaluate_in_fresh_process(folder: RunFolder, interrupt: Interrupt) -> dict[str, float]:
    """What `python -m recipes.quickstart.evaluate RUN --json` prints, run in its own session."""
    command = [
        sys.executable,
        "-m",
        "recipes.quickstart.evaluate",
        str(folder.path.resolve()),
        "--json",
    ]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process only, which then ends the other
    )
    try:
        while True:
            interrupt.check()
            try:
                output, errors = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        reason = (
            errors.strip().splitlines()[-1] if errors.strip() else f"status {process.returncode}"
        )
        raise UserError(f"the saved models could not be measured in a fresh process: {reason}")
    return json.loads(output)
