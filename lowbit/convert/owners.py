"""The modules of a model that hold its parameters, and the names of both."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Owner(NamedTuple):
    """A module that holds a parameter, the attribute, and the parameter's fully qualified name there."""

    module: nn.Module
    attribute: str
    fqn: str


def check_module(model: Any, name: str = "model") -> None:
    """Raise TypeError unless `model`, an argument of this name, is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name} must be an nn.Module, got {type(model).__name__}; its modules hold the weights"
        )


def check_held(owner: Owner, weight: Tensor) -> None:
    """Raise ValueError for a weight whose values accelerate holds elsewhere until its module runs."""
    if weight.device.type == "meta" and hasattr(owner.module, "_hf_hook"):
        raise ValueError(
            f"{owner.fqn} is offloaded by accelerate, which holds its values elsewhere until its module runs: convert "
            "the model before it is offloaded, or call accelerate.hooks.remove_hook_from_module(model, recurse=True) "
            "first"
        )


def joined_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def find_owners(model: nn.Module) -> dict[int, list[Owner]]:
    """id of a parameter → everything that holds the parameter. Raises TypeError unless `model` is a module."""
    check_module(model)
    owners: dict[int, list[Owner]] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append(
                    Owner(module, name, joined_name(prefix, name))
                )
    return owners
