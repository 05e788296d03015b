"""Training a small Llama on text, as the recipes share it: settings, learning rate, loss, held-out loss."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lowbit
from recipes import text
from recipes.command_line import UserError
from recipes.command_line import override as override_fields
from recipes.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class TrainingConfig:
    """Sizes and settings of one run. Lengths are in steps of `batch_size * model.context` tokens."""

    preset: str
    model: LlamaConfig
    batch_size: int
    """Sequences a step."""
    steps: int
    """Steps of every reported model, the shared ones included."""
    branch_steps: int
    """The last of these steps, which run once in high precision and once with QAT for each bit width."""
    warmup_steps: int
    """Steps in which the learning rate rises to `lr`."""
    decay_steps: int
    """Steps, just before the branches, in which it falls to `branch_lr * lr`."""
    lr: float
    branch_lr: float = 0.1
    """Learning rate at the start of the branches, as a share of `lr`; it falls to zero in them. QAT is fine-tuning:
    at the full rate the weights do not settle under the noise of rounding."""
    qat_lr: float = 1.0
    """Learning rates of QAT, as multiples of those of the branch in high precision. A code changes only when its weight
    crosses a rounding boundary, so more can be better in a short branch."""
    weight_decay: float = 0.1
    beta2: float = 0.95
    grad_clip: float = 1.0
    bits: tuple[int, ...] = (4, 3, 2)
    kl_weight: float = 0.8
    """In QAT, the share of the loss that is the divergence from the high-precision model; 0 does without it."""
    group_size: int | None = None
    """Inputs that share a scale. None gives each row one scale, with which rounding loses most."""
    corpus: str = "stdlib"
    """The text without --data: "stdlib", or "stdlib+torch" for PyTorch's own source as well."""
    heldout_share: float = 0.03
    heldout_tokens: int = 200_000
    """Held-out tokens in the report, at most."""
    probe_sequences: int = 64
    """Held-out sequences of each point of the curves."""
    probe_every: int = 50
    save_every: int = 500
    bf16: bool = False
    """bfloat16 autocast over float32 weights."""
    compile: bool = False
    """torch.compile the training forward and backward of each block."""
    sample_tokens: int = 160
    seed: int = 0

    def __post_init__(self) -> None:
        counts = [
            *("batch_size", "steps", "probe_sequences", "probe_every", "save_every"),
            *("heldout_tokens", "sample_tokens"),
        ]
        bits_are_right = all(type(b) is int and 2 <= b <= 8 for b in self.bits)
        most_decay = self.trunk_steps - self.warmup_steps
        checks = [
            *((name, getattr(self, name) >= 1, "at least 1") for name in counts),
            ("branch_steps", 1 <= self.branch_steps < self.steps, f"1 to below steps={self.steps}"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("decay_steps", 0 <= self.decay_steps <= most_decay,
             f"0 to steps - branch_steps - warmup_steps = {most_decay}"),
            ("lr", 0 < self.lr < math.inf, "finite and above 0"),
            ("kl_weight", 0 <= self.kl_weight <= 1, "0 to 1"),
            ("branch_lr", 0 < self.branch_lr <= 1, "a share of lr, above 0 and at most 1"),
            ("qat_lr", 0 < self.qat_lr < math.inf, "finite and above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "finite and at least 0"),
            ("beta2", 0 <= self.beta2 < 1, "at least 0 and below 1"),
            ("grad_clip", 0 <= self.grad_clip < math.inf, "finite and at least 0"),
            ("bits", self.bits and bits_are_right and len({*self.bits}) == len(self.bits),
             "one or more different whole numbers from 2 to 8"),
            ("group_size", self.group_size is None or self.group_size >= 1,
             "at least 1, or None for one scale a row"),
            ("corpus", self.corpus in text.CORPORA, " or ".join(text.CORPORA)),
            ("heldout_share", 0 < self.heldout_share < 0.5, "above 0 and below 0.5"),
            ("sample_tokens", self.sample_tokens < self.model.context,
             f"below the model's context of {self.model.context}, which must hold the prompt too"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        ]  # fmt: skip
        for name, holds, accepted in checks:
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)}; accepted: {accepted}")

    @property
    def trunk_steps(self) -> int:
        """Steps that all models share before the branches."""
        return self.steps - self.branch_steps

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.model.context

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingConfig:
        """The inverse of `dataclasses.asdict`, also after a journey through JSON."""
        try:
            model, bits = LlamaConfig(**values["model"]), tuple(values["bits"])
            return cls(**{**values, "model": model, "bits": bits})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"config.json is not a configuration of the quick start ({error}); start a new run"
            ) from error


def override(config: TrainingConfig, assignments: list[str]) -> TrainingConfig:
    """Apply `--set` assignments. A change of `steps` scales the parts of a run that are not set themselves."""
    steps = [a.removeprefix("steps=") for a in assignments if a.startswith("steps=")]
    if steps and steps[-1].isdecimal():
        for name in ("branch_steps", "warmup_steps", "decay_steps"):
            scaled = round(getattr(config, name) * int(steps[-1]) / config.steps)
            assignments = [f"{name}={max(scaled, 1)}", *assignments]
    return override_fields(config, assignments)


def chosen_config(
    presets: dict[str, Callable[[], TrainingConfig]], options: Namespace, device: torch.device
) -> TrainingConfig:
    """The preset of a command line (default: gpu with CUDA, else tiny), changed by its `--set` assignments."""
    preset = options.preset or ("gpu" if device.type == "cuda" else "tiny")
    return override(presets[preset](), options.assignments)


def prepare_text(config: TrainingConfig, source: Path | None) -> text.Data:
    """The tokens of `source`, or without it of the corpus of `config`. UserError without text to train on."""
    model = config.model
    return text.prepare(
        source, config.corpus, config.heldout_share, model.vocab_size, model.context
    )


def learning_rate_factor(config: TrainingConfig, qat: bool = False) -> Callable[[int], float]:
    """Share of `config.lr` at each step: warm-up, constant, decay to `branch_lr` (as in arXiv 2404.06395), and in the
    branches down to zero, with `qat` from `qat_lr` times as much."""
    at_branch = config.branch_lr * (config.qat_lr if qat else 1.0)

    def factor(step: int) -> float:
        until_branch = config.trunk_steps - step
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if until_branch <= 0:
            return at_branch * max(0.0, 1 + until_branch / config.branch_steps)
        if until_branch < config.decay_steps:
            return config.branch_lr + (1 - config.branch_lr) * until_branch / config.decay_steps
        return 1.0

    return factor


def rise_and_fall(step: int, steps: int, warmup: int, least: float = 0.0) -> float:
    """Share of the highest learning rate: a rise over `warmup` steps, then a straight fall to `least` at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return least + (1 - least) * ((steps - step) / max(steps - warmup, 1))


def parameter_groups(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Matrices, and the weights of the norms, which have no weight decay."""
    matrices = [p for p in parameters if p.dim() >= 2]
    norms = [p for p in parameters if p.dim() < 2]
    return [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]


def step_loss(
    config: TrainingConfig, forward: Callable[[Tensor], Tensor], train_tokens: Tensor, step: int,
    device: torch.device, teacher: Llama | None = None,
) -> Tensor:  # fmt: skip
    """The loss of the batch of `step`, ready for backward().

    The loss is the cross-entropy. With a teacher it is the mean of the cross-entropy and of the divergence from the
    teacher's logits, weighted by `config.kl_weight`.

    Args:
        config: batch size, context, seed and precision.
        forward: maps token ids [B, T] to logits [B, T, V].
        train_tokens: the text to train on.
        step: number of the optimizer step, which chooses the batch.
        device: where `forward` computes.
        teacher: the model in high precision that teaches; None does without.
    """
    inputs, targets = text.batch(
        train_tokens,
        step,
        batch_size=config.batch_size,
        context=config.model.context,
        seed=config.seed,
    )
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
        logits_BTV = forward(inputs.to(device))
        if teacher is None:
            return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets.to(device).flatten())
        with torch.no_grad():
            expected_BTV = teacher(inputs.to(device))
    return lowbit.qat.distillation_loss(
        logits_BTV, expected_BTV, targets.to(device), kl_weight=config.kl_weight
    )


BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}
"""Tokens a batch. Fixed, so that every process adds in the same order."""


@torch.no_grad()
def window_losses(model: Llama, windows: Tensor, bf16: bool) -> Tensor:
    """Mean cross entropy of each window [count, context + 1], in nats a token: float64 [count]."""
    was_training, device = model.training, model.cos.device
    model.eval()
    losses = []
    for part in windows.split(batch_rows(windows, device)):
        tokens = part.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = model(tokens[:, :-1])
        each = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        losses.append(each.double().mean(1).cpu())
    model.train(was_training)
    return torch.cat(losses)


def batch_rows(windows: Tensor, device: torch.device) -> int:
    return max(1, BATCH_TOKENS[device.type] // (windows.shape[1] - 1))


def perplexity(losses: Tensor) -> float:
    """exp(mean cross entropy in nats a token) over `window_losses`."""
    return math.exp(losses.mean().item())
