"""The phases of a run: a trunk in high precision, and branches that differ in their precision only.

Each phase trains from its own last checkpoint, else from the end of the trunk. Every step is a function of the seed,
the step number and the checkpoint.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import lowbit
from recipes import runs, text
from recipes.command_line import UserError
from recipes.llama import Llama
from recipes.training import (
    TrainingConfig,
    learning_rate_factor,
    parameter_groups,
    step_loss,
    window_losses,
)


@dataclass
class Run:
    """The inputs that every part of a run needs."""

    config: TrainingConfig
    folder: runs.RunFolder
    data: text.Data
    tracker: runs.Tracker
    device: torch.device

    def heldout_windows(self, at_most_tokens: int) -> Tensor:
        return text.windows_of(self.data.heldout, self.config.model.context, at_most_tokens)


@dataclass(frozen=True)
class Phase:
    """Steps `start` to `end` of one model."""

    name: str
    start: int
    end: int
    scheme: lowbit.Scheme | None = None
    """None trains in high precision."""
    scales: Literal["learned", "present"] = "learned"
    rank: int | None = None
    """Rank of adapters that train in place of the blocks' weights; None trains the weights."""
    teacher: str = "high"
    """The phase in high precision whose finished model teaches in QAT. It has the adapters that this phase has."""


def phases(config: TrainingConfig) -> list[Phase]:
    trunk, end = config.trunk_steps, config.steps
    qat = [Phase(f"int{bits}", trunk, end, scheme(config, bits)) for bits in config.bits]
    return [Phase("trunk", 0, trunk), Phase("high", trunk, end), *qat]


def scheme(config: TrainingConfig, bits: int) -> lowbit.Scheme:
    """The one scheme that QAT trains with, that rounding uses, and that the saved model has."""
    if bits == 2:  # the grid without a zero
        return lowbit.Int2WeightOnly(config.group_size)
    return lowbit.IntxWeightOnly(bits, group_size=config.group_size)


@dataclass
class Training:
    """A model with its optimizer and scheduler, and the steps that it has taken."""

    phase: Phase
    model: Llama
    optimizer: lowbit.optim.AdamW4bit
    scheduler: LambdaLR
    step: int
    fresh: bool
    """The phase itself has taken no step yet."""
    teacher: Llama | None = None
    """The finished high-precision model, for QAT."""
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


def start_or_resume(run: Run, phase: Phase) -> Training:
    """The training of `phase` from its own checkpoint, else from the trunk's, else from scratch."""
    config = run.config
    torch.manual_seed(config.seed)
    own, trunk = run.folder.checkpoint(phase.name), run.folder.checkpoint("trunk")
    resumed = own.exists()
    saved = None
    if resumed or phase.start:
        saved = runs.load_checkpoint(own if resumed else trunk)
    model = Llama(config.model).to(run.device)
    if saved is not None and not resumed:
        model.load_state_dict(saved["model"])
    if phase.rank is not None:
        model = with_adapters(model, phase.rank)
    if phase.scheme is not None:
        lowbit.qat.prepare_(model, phase.scheme, scales=phase.scales)
    if saved is not None and resumed:
        model.load_state_dict(saved["model"])
    of_trunk = None
    if saved is not None and not resumed and phase.scheme is None:
        of_trunk = saved["optimizer"]
    optimizer = optimizer_of(config, model, of_trunk)
    last = -1 if saved is None or resumed else phase.start - 1
    factor = learning_rate_factor(config, qat=phase.scheme is not None)
    scheduler = LambdaLR(optimizer, factor, last_epoch=last)
    distils = phase.scheme is not None and config.kl_weight > 0
    teacher = high_precision_model(run, phase.teacher, phase.rank) if distils else None
    training = Training(phase, model, optimizer, scheduler, phase.start, not resumed, teacher)
    if saved is None:
        return training
    if resumed:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"]["cpu"])
    if run.device.type == "cuda" and "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"])
    if resumed:
        training.step, training.seconds = saved["step"], saved["seconds"]
    return training


def high_precision_model(run: Run, name: str = "high", rank: int | None = None) -> Llama:
    """The model at the end of a phase in high precision, its adapters merged."""
    model = Llama(run.config.model).to(run.device)
    if rank is not None:
        model = with_adapters(model, rank)
    model.load_state_dict(runs.load_checkpoint(run.folder.checkpoint(name))["model"])
    for parent in list(model.modules()) if rank is not None else ():
        for child_name, layer in list(parent.named_children()):
            if hasattr(layer, "base_layer"):
                cast(Any, layer).merge()
                setattr(parent, child_name, layer.base_layer)
    return model.eval().requires_grad_(False)


def with_adapters(model: Llama, rank: int) -> Llama:
    """PEFT's LoRA on every linear layer of the blocks. The adapters train, and so do the norms and the embedding, which
    is the head too and is rounded as well. UserError without PEFT."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f'LoRA needs PEFT ({error}): pip install -e ".[finetune]", or leave these runs out'
        ) from error
    layers = "|".join(("query", "key", "value", "out", "gate", "up", "down"))
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=rf".*\.({layers})")
    inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".base_layer." not in name)
    return model


LORA_LR = 10.0
"""Learning rate of adapters, as a multiple of that of weights."""


def optimizer_of(
    config: TrainingConfig, model: Llama, of_trunk: dict[str, Any] | None
) -> lowbit.optim.AdamW4bit:
    """The optimizer of all that trains, with the trunk's states where `of_trunk` has them and the weights train."""
    weights, adapters, scales = trained_parameters(model)
    groups = parameter_groups(weights)
    if adapters:
        groups.append({"params": adapters, "lr": LORA_LR * config.lr, "weight_decay": 0.0})
    optimizer = lowbit.optim.AdamW4bit(
        groups, lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay
    )
    if of_trunk is not None and not adapters:
        optimizer.load_state_dict(of_trunk)
    if scales:
        optimizer.add_param_group({"params": scales, "weight_decay": 0.0, "lr": config.lr})
    for group in optimizer.param_groups:  # which a schedule that starts late expects
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def trained_parameters(model: Llama) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, adapters, and the scales that QAT trains beside them."""
    weights: list[Tensor] = []
    adapters: list[Tensor] = []
    scales: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale"):
            scales.append(parameter)
        elif ".lora_" in name:
            adapters.append(parameter)
        elif parameter.requires_grad:
            weights.append(parameter)
    return weights, adapters, scales


def train_phase(run: Run, phase: Phase) -> None:
    """Train `phase` to its end from its last checkpoint. On Ctrl-C save a checkpoint and raise KeyboardInterrupt."""
    config, tracker = run.config, run.tracker
    training = start_or_resume(run, phase)
    tracker.drop(phase.name, after_step=-1 if training.fresh else training.step)
    if training.step == phase.end:
        return
    windows = run.heldout_windows(config.probe_sequences * config.model.context)

    def probe() -> None:
        with torch.compiler.set_stance("force_eager"):  # other shapes, hence other graphs
            losses = window_losses(training.model, windows, config.bf16)
        tracker.log(phase.name, step=training.step, heldout_loss=losses.mean().item())

    if training.fresh:
        probe()
    if config.compile:
        compile_blocks(training)
    training.model.train()
    every = 0.5 if sys.stderr.isatty() else 20  # seconds
    bar = tqdm(total=phase.end, initial=training.step, desc=f"{phase.name:>5}", mininterval=every)
    with bar, runs.DelayedInterrupt() as interrupt:
        while training.step < phase.end:
            started = time.perf_counter()
            values = train_step(run, training)
            seconds = time.perf_counter() - started
            training.seconds += seconds
            training.step += 1
            speed = config.step_tokens / seconds
            tracker.log(phase.name, step=training.step, **values, tokens_per_s=round(speed, 1))
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            done, stop = training.step == phase.end, interrupt.requested
            if done or training.step % config.probe_every == 0:
                probe()
            if done or stop or training.step % config.save_every == 0:
                tracker.flush()
                runs.save_checkpoint(run.folder.checkpoint(phase.name), training.state())
            if stop:
                raise KeyboardInterrupt


def compile_blocks(training: Training) -> None:
    """Compile the blocks of the model and of its teacher. All blocks of a model share one graph, so this takes seconds,
    where the whole model as one graph takes a minute."""
    torch.compiler.reset()  # each phase has graphs of its own, and torch keeps only a few a function
    for model in (training.model, training.teacher):
        for block in () if model is None else model.blocks:
            block.compile()


def train_step(run: Run, training: Training) -> dict[str, float]:
    """One optimizer step: its {"loss", "lr", "grad_norm"}. UserError when the loss is not finite."""
    config = run.config
    lr = training.scheduler.get_last_lr()[0]
    model, teacher = training.model, training.teacher
    loss = step_loss(config, model, run.data.train, training.step, run.device, teacher)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    if not math.isfinite(loss.item()):
        raise UserError(
            f"the loss is {loss.item()} at step {training.step} of {training.phase.name}; "
            f"start again with a smaller learning rate than {config.lr}: --set lr={config.lr / 2:g}"
        )
    return {"loss": loss.item(), "lr": float(lr), "grad_norm": grad_norm.item()}
