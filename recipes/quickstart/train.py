"""Training: a shared trunk, then branches that differ in one thing only.

    steps 0 … trunk_steps          "trunk"  high precision
    trunk_steps … steps            "high"   as before
                                   "int4"   the same steps with the weights rounded to 4 bits in every product
                                   "int3"   …to 3 bits

Each branch starts from the trunk's weights and optimizer states and sees the same batches in the same order at
the same learning rate. So whatever a QAT model does better than the rounded "high" model is not owed to more
training. The learning rate warms up, stays, and falls (as in arXiv 2404.06395); the branches have the
last of the fall, when a high-precision model only settles.

The batch of a step is a function of the seed and the step; a checkpoint holds the weights, the optimizer and
scheduler states and the random states, and what metrics.jsonl says of later steps is dropped on resuming. So
a run that was interrupted goes on as if it had not been, to the bit on a CPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import lowbit
from recipes.llama import Llama
from recipes.quickstart.config import QuickstartConfig, UserError
from recipes.quickstart.data import Data, batch, heldout_windows
from recipes.quickstart.evaluate import window_losses
from recipes.quickstart.folder import RunFolder, load_checkpoint, save_checkpoint
from recipes.quickstart.interrupt import Interrupt, Interrupted
from recipes.quickstart.tracking import Tracker


@dataclass(frozen=True)
class Phase:
    """Steps `start` to `end` of one model; `bits` None trains in high precision."""

    name: str
    start: int
    end: int
    bits: int | None = None


def phases(config: QuickstartConfig) -> list[Phase]:
    trunk, end = config.trunk_steps, config.steps
    qat = [Phase(f"int{bits}", trunk, end, bits) for bits in config.bits]
    return [Phase("trunk", 0, trunk), Phase("high", trunk, end), *qat]


def scheme(config: QuickstartConfig, bits: int) -> lowbit.Scheme:
    """The one scheme that QAT trains with, that rounding uses, and that the saved model has."""
    return lowbit.IntxWeightOnly(bits, group_size=config.group_size)


def learning_rate_factor(config: QuickstartConfig) -> Callable[[int], float]:
    """Share of `config.lr` at each step: warm-up, stable, decay to `branch_lr`, and from there to zero."""

    def factor(step: int) -> float:
        until_branch = config.trunk_steps - step
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if until_branch <= 0:
            return config.branch_lr * max(0.0, 1 + until_branch / config.branch_steps)
        if until_branch < config.decay_steps:
            return config.branch_lr + (1 - config.branch_lr) * until_branch / config.decay_steps
        return 1.0

    return factor


@dataclass
class Training:
    """A model with its optimizer and scheduler, and how far it has come."""

    phase: Phase
    model: Llama
    optimizer: lowbit.optim.AdamW4bit
    scheduler: LambdaLR
    step: int
    fresh: bool
    """No step of the phase itself has been taken yet."""
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        random = {"cpu": torch.get_rng_state()}
        if self.model.cos.is_cuda:
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "phase": self.phase.name,
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": random,
        }


def start_or_resume(
    config: QuickstartConfig, phase: Phase, folder: RunFolder, device: torch.device
) -> Training:
    """The training of `phase` from its own checkpoint, else from the trunk's, else from scratch."""
    torch.manual_seed(config.seed)
    own, trunk = folder.checkpoint(phase.name), folder.checkpoint("trunk")
    resumed = own.exists()
    saved = load_checkpoint(own) if resumed else load_checkpoint(trunk) if phase.start else None
    model = Llama(config.model).to(device)
    if saved is not None and not resumed:
        model.load_state_dict(saved["model"])
    if phase.bits is not None:
        lowbit.qat.prepare_(model, scheme(config, phase.bits))
    if resumed and saved is not None:
        model.load_state_dict(saved["model"])
    optimizer = lowbit.optim.AdamW4bit(
        parameter_groups(list(model.parameters())),
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
    )
    scheduler = LambdaLR(optimizer, learning_rate_factor(config))
    training = Training(phase, model, optimizer, scheduler, phase.start, fresh=not resumed)
    if saved is None:
        return training
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"]["cpu"])
    if device.type == "cuda" and "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"])
    if resumed:
        training.step, training.seconds = saved["step"], saved["seconds"]
    return training


def parameter_groups(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Matrices, and the gains of the norms, which don't decay."""
    matrices = [p for p in parameters if p.dim() >= 2]
    gains = [p for p in parameters if p.dim() < 2]
    return [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]


def train_phase(
    config: QuickstartConfig,
    phase: Phase,
    folder: RunFolder,
    data: Data,
    device: torch.device,
    tracker: Tracker,
    interrupt: Interrupt,
) -> None:
    """Train `phase` to its end, from wherever it stands. Interrupted, once a checkpoint is written."""
    training = start_or_resume(config, phase, folder, device)
    tracker.drop(phase.name, after_step=-1 if training.fresh else training.step)
    if training.step == phase.end:
        return
    probe_windows = heldout_windows(config, data.heldout, config.probe_sequences)

    def probe() -> None:
        losses = window_losses(training.model, probe_windows, device, config.bf16)
        tracker.log(phase.name, step=training.step, heldout_loss=losses.mean().item())

    def save() -> None:
        tracker.flush()
        save_checkpoint(folder.checkpoint(phase.name), training.state())

    if training.fresh:
        probe()
    forward = torch.compile(training.model) if config.compile else training.model
    training.model.train()
    bar = tqdm(
        total=phase.end,
        initial=training.step,
        desc=f"{phase.name:>5}",
        unit="step",
        mininterval=0.5 if sys.stderr.isatty() else 20,
        dynamic_ncols=True,
    )
    with bar:
        while training.step < phase.end:
            started = time.perf_counter()
            values = train_step(config, training, forward, data.train, device)
            seconds = time.perf_counter() - started
            training.seconds += seconds
            training.step += 1
            speed = config.step_tokens / seconds
            tracker.log(phase.name, step=training.step, **values, tokens_per_s=round(speed, 1))
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            done = training.step == phase.end
            if done or training.step % config.probe_every == 0:
                probe()
            stop = interrupt.requested
            if done or stop or training.step % config.save_every == 0:
                save()
            if stop:
                raise Interrupted


def step_loss(
    config: QuickstartConfig,
    forward: Callable[[Tensor], Tensor],
    train_tokens: Tensor,
    step: int,
    device: torch.device,
) -> Tensor:
    """The loss of the batch of `step`, to call backward() on."""
    tokens_BT, targets_BT = (t.to(device) for t in batch(config, train_tokens, step))
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
        logits_BTV = forward(tokens_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def train_step(
    config: QuickstartConfig,
    training: Training,
    forward: Callable[[Tensor], Tensor],
    train_tokens: Tensor,
    device: torch.device,
) -> dict[str, float]:
    """One optimizer step: {"loss", "lr", "grad_norm"} of it. UserError when the loss is no longer finite."""
    lr = training.scheduler.get_last_lr()[0]
    loss = step_loss(config, forward, train_tokens, training.step, device)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(training.model.parameters(), config.grad_clip)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    if not math.isfinite(loss.item()):
        raise UserError(
            f"the loss is {loss.item()} at step {training.step} of {training.phase.name}; "
            f"start again with a smaller learning rate than {config.lr}: --set lr={config.lr / 2:g}"
        )
    return {"loss": loss.item(), "lr": float(lr), "grad_norm": grad_norm.item()}
