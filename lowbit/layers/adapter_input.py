"""PEFT's LoRA layers over frozen low-bit linears, without casts that autocast undoes.

PEFT casts the input of adapters to their dtype, float32, and under autocast their first product casts it back. At 8,192
tokens of an 8B Llama the two and their backward passes take a tenth of a step. PEFT leaves them out over bitsandbytes'
layers alone. A layer over a frozen weight of lowbit gets the mixin below while PEFT makes it. Bits stay the same, since
16 bits fit float32. Several active adapters keep PEFT's casts, since they add their gradients in float32. torch tells
of each module that becomes part of another one, and of nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from lowbit.layers.stand_in import StandIn, give

_hook: Any = None


class UncastInput(StandIn):
    """Mixin of PEFT's LoRA layer."""

    def _cast_input_dtype(self: Any, x: Any, dtype: torch.dtype) -> Any:
        if dtype is torch.float32 and _is_cast_back(self, x):
            return x
        plain: Any = super()
        return plain._cast_input_dtype(x, dtype)


def _is_cast_back(layer: Any, x: Any) -> bool:
    """True if the adapters do nothing with their input but products that autocast casts to its dtype. Dropout would
    draw another mask, since the draw depends on the dtype."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if getattr(layer, "lora_variant", True) or len(layer.active_adapters) != 1:
        return False
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not x.dtype:
        return False
    if layer.training and any(getattr(one, "p", 0.0) > 0 for one in layer.lora_dropout.values()):
        return False
    return all(map(_is_unwatched, layer.lora_A.values()))


def _is_unwatched(factor: Any) -> bool:
    return type(factor) is nn.Linear and not (factor._forward_hooks or factor._forward_pre_hooks)


def watch() -> None:
    """Give LoRA layers that PEFT makes over frozen linears from now on the mixin."""
    global _hook
    if _hook is None:
        _hook = register_module_module_registration_hook(_registered)


def _registered(module: nn.Module, name: str, base: nn.Module | None) -> None:
    is_base = name == "base_layer" and hasattr(base, "_lowbit_about_weight")
    if is_base and hasattr(module, "_cast_input_dtype") and not isinstance(module, UncastInput):
        give(module, UncastInput)
