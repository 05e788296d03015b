"""Adapters of PEFT, found by their interface, so that nothing imports PEFT. They stay in high precision.

A tuner layer of PEFT stands around a layer, its `base_layer`; `active_adapters` names those in use. All else in it is
of adapters: LoRA's factors, DoRA's vectors, LoHa's parameters. Prompts are in the `prompt_encoder` of the model. A copy
of a module that trains whole (`modules_to_save`) is not an adapter: it takes the module's place.
"""

from __future__ import annotations

from torch import nn


def is_tuner(module: nn.Module) -> bool:
    """True if this is a layer of PEFT around another one."""
    return "base_layer" in module._modules and hasattr(module, "active_adapters")


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """Every module of an adapter, and the tuner layers themselves, without the layers that they stand around."""
    found: set[nn.Module] = set()
    _collect(model, False, found)
    return found


def _collect(module: nn.Module, inside: bool, found: set[nn.Module]) -> None:
    own = is_tuner(module)
    if inside or own:
        found.add(module)
    prompts = hasattr(module, "peft_config")
    for name, child in module._modules.items():
        if child is not None:
            is_adapter = inside or own or (prompts and name == "prompt_encoder")
            _collect(child, is_adapter and not (own and name == "base_layer"), found)
