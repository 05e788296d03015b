"""What a run asks of lowbit, checked, and applied to a model: the part that does not depend on torchtitan's release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from lowbit import names, qat, train
from lowbit.convert import Report
from lowbit.scheme import Scheme
from lowbit.tensor.bitnet import BitNetTensor
from lowbit.tensor.dtensor import held_locally
from lowbit.train_scheme import LowbitProducts, TrainingScheme

LEFT_OUT = ("output", "lm_head", "router.gate")
"""Parts of the names of layers that stay as they are: the output head, under the names that it has in the models of
torchtitan, and the router of a mixture of experts."""


@dataclass
class Lowbit:
    """The section `lowbit` of a configuration.

    Args:
        train: how weights train: int8, float8, int8_weights or bitnet, also with options: int8(grad_weight=False).
        qat: the scheme of quantization-aware training: int4, int8, int8_int4, …, also with options:
            int4(group_size=32).
        filter_fqns: layers whose name contains one of these stay as they are, as for torchtitan's own float8.
        experts: also the stacked weights of experts, which are parameters of three dimensions.
        metrics_freq: how many logging steps lie between two measurements of lowbit's metrics. 0: none.
    """

    train: str = ""
    qat: str = ""
    filter_fqns: list[str] = field(default_factory=lambda: list(LEFT_OUT))
    experts: bool = False
    metrics_freq: int = 0


def scheme_of(settings: Lowbit, device: torch.device) -> TrainingScheme | Scheme | None:
    """The scheme that the settings ask for; None for none.

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
    if settings.qat:
        return qat_scheme(settings.qat)
    if not settings.train:
        return None
    scheme = names.training_scheme(settings.train)
    # The model is still on meta, so its weights cannot tell which device it will train on.
    scheme.check(torch.empty(1, 1, device=device, dtype=torch.bfloat16))
    return scheme


def qat_scheme(line: str) -> Scheme:
    """Raises ValueError for a line that names no scheme, and for a static activation."""
    scheme = names.scheme(line)
    if scheme.is_static:
        raise ValueError(
            f"{line}: torchtitan's trainer runs no calibration, which static activations need; accepted: dynamic ones, "
            "such as int8_int8"
        )
    return scheme


def prepare(model: nn.Module, scheme: TrainingScheme | Scheme, settings: Lowbit) -> Report:
    """Make the weights of `model`, which is not sharded yet, train by `scheme`."""

    def selected(module: nn.Module, name: str) -> bool:
        if any(part in name for part in settings.filter_fqns):
            return False
        return isinstance(module, nn.Linear) or (settings.experts and holds_experts(module))

    if isinstance(scheme, Scheme):
        return qat.prepare_(model, scheme, selected)
    return train.prepare_(model, scheme, selected)


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds the stacked weights of experts."""
    return any(p is not None and p.ndim == 3 for p in module._parameters.values())


def summary(report: Report, scheme: TrainingScheme | Scheme, device: torch.device) -> str:
    """The report in a line: weights that were left alone are counted by their reason."""
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
