"""Marks a model as prepared, even where `prepare_` left all of its weights alone."""

from __future__ import annotations

from torch import nn

from lowbit.convert import Entry, Report, joined_name
from lowbit.tracing.tracer import LEFT_ALONE


def remember_prepared(model: nn.Module, report: Report) -> None:
    """Note that `prepare_` was called on `model`, and which weights it left alone."""
    left = report.left
    for prefix, module in model.named_modules():
        names = {name: joined_name(prefix, name) for name in module._parameters}
        setattr(module, LEFT_ALONE, {name: left[fqn] for name, fqn in names.items() if fqn in left})


def was_prepared(model: nn.Module) -> bool:
    """True if `prepare_` was called on `model`, or on a part of it, and not undone."""
    return any(hasattr(module, LEFT_ALONE) for module in model.modules())


def forget_prepared(model: nn.Module, report: Report) -> Report:
    """Forget that `model` was prepared. If no weight was converted, the report gets all that were left alone."""
    for prefix, module in model.named_modules():
        left = module.__dict__.pop(LEFT_ALONE, {})
        if report.converted:
            continue
        for name, why in left.items():
            param, note = module._parameters.get(name), f"prepare_ left it alone: {why}"
            shape = () if param is None else tuple(param.shape)
            report.entries.append(Entry(joined_name(prefix, name), shape, False, note))
    return report
