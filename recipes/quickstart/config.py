"""What a run is made of: one frozen dataclass, a preset per function, overrides from the command line."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from recipes.llama import LlamaConfig


class UserError(Exception):
    """Something the user can put right. The program prints it as one line and exits with status 2."""


@dataclass(frozen=True)
class QuickstartConfig:
    """Sizes and settings of one run. Lengths are in steps of `batch_size * model.context` tokens."""

    preset: str
    model: LlamaConfig
    batch_size: int
    """Sequences a step."""
    steps: int
    """Steps of every reported model, the shared ones included."""
    branch_steps: int
    """How many of them, at the end, run once in high precision and once with QAT for each bit width."""
    warmup_steps: int
    """Steps in which the learning rate rises to `lr`."""
    decay_steps: int
    """Steps, just before the branches, in which it falls to `branch_lr * lr`."""
    lr: float
    branch_lr: float = 0.1
    """Learning rate at the start of the branches, as a share of `lr`; it falls to zero in them. QAT is
    fine-tuning: at the full rate, rounding is one more noise that the weights don't settle under."""
    weight_decay: float = 0.1
    beta2: float = 0.95
    grad_clip: float = 1.0
    bits: tuple[int, ...] = (4, 3)
    group_size: int | None = None
    """Inputs that share a scale; None is one scale a row, the setting at which rounding hurts most."""
    corpus: str = "stdlib"
    """What to learn from without --data: "stdlib", or "stdlib+torch" for PyTorch's own source as well."""
    heldout_share: float = 0.03
    heldout_tokens: int = 200_000
    """At most this many held-out tokens are measured in the report."""
    probe_sequences: int = 64
    """Held-out sequences measured along the way, for the curves."""
    probe_every: int = 50
    save_every: int = 500
    bf16: bool = False
    """bfloat16 autocast over float32 weights."""
    compile: bool = False
    """torch.compile the training forward and backward."""
    sample_tokens: int = 160
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one = (
            "batch_size",
            "steps",
            "branch_steps",
            "probe_sequences",
            "probe_every",
            "save_every",
        )
        for name in (*at_least_one, "heldout_tokens", "sample_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.branch_steps < self.steps:
            raise UserError(
                f"branch_steps is {self.branch_steps}; it must be at least 1 and below steps={self.steps}"
            )
        ramps = self.warmup_steps + self.decay_steps
        if self.warmup_steps < 0 or self.decay_steps < 0 or ramps > self.trunk_steps:
            raise UserError(
                f"warmup_steps is {self.warmup_steps} and decay_steps is {self.decay_steps}; together "
                f"they must be 0 to steps - branch_steps = {self.trunk_steps}"
            )
        if not self.lr > 0 or not 0 < self.branch_lr <= 1:
            raise UserError(
                f"lr is {self.lr} and branch_lr is {self.branch_lr}; lr must be above 0, and branch_lr, "
                "a share of it, above 0 and at most 1"
            )
        if not 0 < self.heldout_share < 0.5:
            raise UserError(f"heldout_share is {self.heldout_share}; it must be between 0 and 0.5")
        if self.corpus not in CORPORA:
            raise UserError(f"corpus is {self.corpus!r}; accepted: {', '.join(CORPORA)}")
        self._check_quantization()
        if not 0 <= self.beta2 < 1:
            raise UserError(f"beta2 is {self.beta2}; it must be at least 0 and below 1")
        for name in ("weight_decay", "grad_clip", "lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(
                    f"{name} is {getattr(self, name)}; it must be 0 or more, and finite"
                )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")
        if self.sample_tokens >= self.model.context:
            raise UserError(
                f"sample_tokens is {self.sample_tokens}; the model's context of {self.model.context} "
                "must hold them and the prompt"
            )

    def _check_quantization(self) -> None:
        whole = all(type(bits) is int and 2 <= bits <= 8 for bits in self.bits)
        if not self.bits or not whole or len(set(self.bits)) != len(self.bits):
            raise UserError(
                f"bits is {self.bits}; it takes one or more different whole numbers from 2 to 8"
            )
        if self.group_size is not None and self.group_size < 1:
            raise UserError(
                f"group_size is {self.group_size}; it must be at least 1, or None for one scale a row"
            )

    @property
    def trunk_steps(self) -> int:
        """Steps that all models share before they part."""
        return self.steps - self.branch_steps

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.model.context


CORPORA = ("stdlib", "stdlib+torch")


def tiny() -> QuickstartConfig:
    """0.4M parameters, a few minutes on two CPU cores. Small on purpose: a model that has seen many tokens for
    each of its weights is the one that rounding hurts."""
    return QuickstartConfig(
        preset="tiny",
        model=LlamaConfig(
            vocab_size=512, dim=128, layers=2, heads=4, kv_heads=2, hidden=320, context=256
        ),
        batch_size=8,
        steps=1200,
        branch_steps=360,
        warmup_steps=40,
        decay_steps=440,
        lr=2.5e-3,
        probe_sequences=32,
        save_every=200,
    )


def small() -> QuickstartConfig:
    """3M parameters, under an hour on a few CPU cores or a few minutes on a GPU."""
    return QuickstartConfig(
        preset="small",
        model=LlamaConfig(
            vocab_size=2048, dim=256, layers=4, heads=8, kv_heads=4, hidden=640, context=256
        ),
        batch_size=16,
        steps=1800,
        branch_steps=540,
        warmup_steps=80,
        decay_steps=650,
        lr=2e-3,
    )


def gpu() -> QuickstartConfig:
    """99M parameters in bfloat16 autocast, a few minutes on one datacentre GPU."""
    return QuickstartConfig(
        preset="gpu",
        model=LlamaConfig(
            vocab_size=8192,
            dim=1024,
            layers=8,
            heads=16,
            kv_heads=4,
            hidden=2816,
            context=1024,
            dropout=0.1,
        ),
        batch_size=32,
        steps=1000,
        branch_steps=250,
        warmup_steps=50,
        decay_steps=375,
        lr=1.5e-3,
        corpus="stdlib+torch",
        heldout_tokens=1_000_000,
        probe_sequences=32,
        bf16=True,
    )


PRESETS = {"tiny": tiny, "small": small, "gpu": gpu}


def override(config: QuickstartConfig, assignments: list[str]) -> QuickstartConfig:
    """Apply `name=value` texts (`lr=1e-3`, `model.dim=96`); `steps` scales the parts of a run with it.

    UserError names a field that doesn't exist, or a value that it doesn't take.
    """
    changes: dict[str, Any] = {}
    model_changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        inside_model = name.startswith("model.")
        owner: Any = config.model if inside_model else config
        field = name.removeprefix("model.")
        known = [f.name for f in dataclasses.fields(owner) if f.name not in ("model", "preset")]
        if not equals or field not in known:
            prefix = "model." if inside_model else ""
            raise UserError(
                f"--set {assignment}: expected NAME=VALUE with NAME one of "
                + ", ".join(prefix + n for n in known)
                + ("" if inside_model else ", or model.NAME")
            )
        (model_changes if inside_model else changes)[field] = _parse(
            assignment, text, getattr(owner, field)
        )
    if "steps" in changes:  # the parts of a run keep their shares of it
        for name in ("branch_steps", "warmup_steps", "decay_steps"):
            scaled = round(getattr(config, name) * changes["steps"] / config.steps)
            changes.setdefault(name, max(scaled, 1))
    try:
        model = dataclasses.replace(config.model, **model_changes)
    except ValueError as error:
        raise UserError(str(error)) from error
    return dataclasses.replace(config, model=model, **changes)


def _parse(assignment: str, text: str, current: Any) -> Any:
    """The value of `text`, of the kind that `current` is."""
    if isinstance(current, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(current, tuple) and isinstance(value, int):
        value = (value,)
    accepted: tuple[type, ...] = (type(current),)
    if isinstance(current, float):
        accepted = (float, int)
    elif current is None or assignment.startswith("group_size="):
        accepted = (int, type(None))
    if not isinstance(value, accepted) or isinstance(value, bool) != isinstance(current, bool):
        names = " or ".join(t.__name__ for t in accepted)
        raise UserError(f"--set {assignment}: the value is {text!r}; accepted: {names}")
    return value


def to_json(config: QuickstartConfig) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> QuickstartConfig:
    """The inverse of `to_json`. UserError when it isn't the text of such a configuration."""
    try:
        values = json.loads(text)
        values["model"] = LlamaConfig(**values["model"])
        values["bits"] = tuple(values["bits"])
        return QuickstartConfig(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"config.json is not a quick start configuration: {error}") from error
