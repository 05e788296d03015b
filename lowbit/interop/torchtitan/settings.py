"""The settings of a run: their checks, and their use on a model. Nothing here depends on torchtitan's release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from lowbit import qat, train
from lowbit.convert import Report, stacked
from lowbit.interop import config_lines
from lowbit.numerics.sharded import held_locally
from lowbit.schemes import lines
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import LowbitProducts, TrainingScheme
from lowbit.tensor.trained.bitnet import BitNetTensor

LEFT_OUT = ("output", "lm_head", "router.gate")
"""Parts of the names of layers that stay as they are: the output head, under its names in torchtitan's models, and the
router of a mixture of experts."""


@dataclass
class Lowbit:
    """The section `lowbit` of a configuration.

    Args:
        train: how weights train: int8, float8, int8_weights, int4_weights or bitnet, also with options:
            int8(grad_weight=False).
        qat: the scheme of quantization-aware training: int4, int8, int8_int4, …, also with options:
            int4(group_size=32).
        qat_scales: "present" or "learned", as `lowbit.qat.prepare_` takes it.
        qat_start: steps without fake quantization.
        qat_freeze_observers: steps that observe the inputs of layers with a static activation, before their scales are
            set. A scheme with static activations needs such steps. 0: none.
        filter_fqns: layers whose name contains one of these stay as they are, as for torchtitan's own float8.
        compress: whether FSDP2 reduces gradients in 8 bits, and gathers weights of QAT in their own bits
            (`lowbit.train.compress_collectives_`).
        save_in_int8: whether autograd keeps activations in int8 (`lowbit.train.save_in_int8`).
        experts: also the stacked weights of experts, which are parameters of three dimensions.
        metrics_freq: how many logging steps lie between two measurements of lowbit's metrics. 0: none.
    """

    train: str = ""
    qat: str = ""
    qat_scales: str = "present"
    qat_start: int = 0
    qat_freeze_observers: int = 0
    filter_fqns: list[str] = field(default_factory=lambda: list(LEFT_OUT))
    compress: bool = False
    save_in_int8: bool = False
    experts: bool = False
    metrics_freq: int = 0


def scheme_of(settings: Lowbit, device: torch.device) -> TrainingScheme | Scheme | None:
    """The scheme that the settings ask for, if any.

    Raises ValueError for settings that contradict each other, unknown names, and a scheme that the device cannot run.
    """
    if settings.metrics_freq < 0:
        raise ValueError(
            f"lowbit.metrics_freq must be 0 (never) or more, got {settings.metrics_freq}"
        )
    if settings.train and settings.qat:
        raise ValueError(
            f"lowbit.train={settings.train!r} and lowbit.qat={settings.qat!r} both change the weights; give one of them"
        )
    _check_qat(settings)
    if settings.qat:
        chosen = qat_scheme(settings.qat, bool(settings.qat_freeze_observers))
        schedule_of(settings)
        return chosen
    if not settings.train:
        return None
    scheme = config_lines.training_scheme(settings.train)
    # The model is still on meta, so its weights cannot tell which device it will train on.
    scheme.check(torch.empty(1, 1, device=device, dtype=torch.bfloat16))
    return scheme


def qat_scheme(line: str, observes: bool = False) -> Scheme:
    """The scheme of a line. Raises ValueError for an unknown name, and for a static activation that nothing
    `observes`."""
    scheme = lines.scheme(line)
    if scheme.is_static and not observes:
        raise ValueError(
            f"{line}: its static activations need steps that observe them; set lowbit.qat_freeze_observers to a number "
            "of steps, or take dynamic ones, such as int8_int8"
        )
    if observes and not scheme.is_static:
        raise ValueError(
            f"lowbit.qat_freeze_observers: {line} has no static activation to observe; leave it out"
        )
    return scheme


def _check_qat(settings: Lowbit) -> None:
    """Raise ValueError for a `qat_scales` that does not exist, and for settings of QAT without a scheme."""
    if settings.qat_scales not in ("present", "learned"):
        raise ValueError(
            f"lowbit.qat_scales={settings.qat_scales!r}; accepted: 'present', 'learned'"
        )
    if settings.qat:
        return
    given = [f.name for f in fields(Lowbit) if f.name.startswith("qat_")]
    given = [n for n in given if getattr(settings, n) != getattr(Lowbit, n)]
    if given:
        raise ValueError(
            f"lowbit.{given[0]}={getattr(settings, given[0])!r} without QAT; set lowbit.qat to a scheme, such as int4"
        )


def schedule_of(settings: Lowbit) -> dict[str, Any]:
    """The arguments of `lowbit.qat.Schedule`; {} for training that is the same at each step.

    Raises ValueError for a negative number of steps.
    """
    found: dict[str, Any] = {}
    if settings.qat_start:
        found["start"] = settings.qat_start
    if settings.qat_freeze_observers:
        found["freeze_observers"] = settings.qat_freeze_observers
    for name, steps in found.items():
        if steps < 0:
            raise ValueError(f"lowbit.qat_{name}={steps}; accepted: a number of steps, 0 for none")
    return found


def prepare(model: nn.Module, scheme: TrainingScheme | Scheme, settings: Lowbit) -> Report:
    """Make the weights of `model`, which is not sharded yet, train by `scheme`."""

    def selected(module: nn.Module, name: str) -> bool:
        if any(part in name for part in settings.filter_fqns):
            return False
        return isinstance(module, nn.Linear) or (settings.experts and bool(stacked(module, name)))

    if isinstance(scheme, Scheme):
        scales: Any = settings.qat_scales
        return qat.prepare_(model, scheme, selected, scales=scales)
    return train.prepare_(model, scheme, selected)


def summary(report: Report, scheme: TrainingScheme | Scheme, device: torch.device) -> str:
    """The report in a line, with the number of weights that were left alone for each reason."""
    head = str(report).split("\n", 1)[0]
    reasons = Counter(report.left.values())
    parts = [head, *(f"{count} left alone: {why}" for why, count in reasons.items())]
    wants_products = isinstance(scheme, LowbitProducts) and scheme.products and not scheme.always
    if wants_products and device.type == "cpu":
        parts.append("on a CPU their products run in high precision, unless always=True")
    return "; ".join(parts)


def precompute_scales(models: Iterable[nn.Module]) -> None:
    """After a step, the scales of all BitNet weights in one reduction for each part of the model that has some."""
    for model in models:
        if has_bitnet([model]):
            train.precompute_bitnet_scale(model)


def has_bitnet(models: Iterable[nn.Module]) -> bool:
    return any(isinstance(held_locally(p), BitNetTensor) for m in models for p in m.parameters())
