"""Static scales of the keys and values that an attention layer writes to a cache, for servers that keep it in float8.

    key ≈ e4m3(key / k_scale) · k_scale      value ≈ e4m3(value / v_scale) · v_scale

`k_scale` and `v_scale` are float32 buffers [1] of the attention module, the names that vLLM and compressed-tensors
have for them. `lowbit.calibrate(…, kv_cache="float8")` finds them, and `lowbit.export` writes them. They stay float32
where `model.half()` or `.to(torch.bfloat16)` casts the model. lowbit itself computes with keys and values as they are:
its own cache, `lowbit.hf.KVCache`, has a scale for each token and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.layers.stand_in import StandIn, give, take
from lowbit.numerics.granularity import PerTensor
from lowbit.numerics.number_format import Float8
from lowbit.numerics.spec import Spec
from lowbit.numerics.uncast import Uncast

KEY, VALUE = "k_scale", "v_scale"
SPEC = Spec(Float8(), PerTensor(), static=True)
SETTINGS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
"""The "kv_cache_scheme" of a "quantization_config" with such scales."""


class CacheScales(Uncast, StandIn):
    """Mixin of a module whose buffers KEY and VALUE are such scales."""

    uncast = (KEY, VALUE)


def hold(module: nn.Module, scales: Mapping[str, Tensor]) -> None:
    """Give an attention module its scales, by `KEY` and `VALUE`, in place of earlier ones.

    Raises ValueError for a module that has another attribute of such a name."""
    for name in scales:
        if not isinstance(module, CacheScales) and hasattr(module, name):
            raise ValueError(
                f"a {type(module).__name__} has a {name} of its own, so that scales of its keys and values have no "
                "place; accepted: attention layers without such an attribute, or leave out kv_cache"
            )
    for name, value in scales.items():
        module.register_buffer(name, value)
    if not isinstance(module, CacheScales):
        give(module, CacheScales)


def held_in(model: nn.Module) -> dict[str, Tensor]:
    """The scales in a model, by their names in its state dict."""
    return {
        f"{name}.{own}" if name else own: scale
        for name, module in model.named_modules()
        if isinstance(module, CacheScales)
        for own in (KEY, VALUE)
        if (scale := module._buffers.get(own)) is not None
    }


def forget(model: nn.Module) -> None:
    """Take the scales from the attention modules of a model."""
    for module in model.modules():
        if isinstance(module, CacheScales):
            take(module, CacheScales)
            for name in (KEY, VALUE):
                module._buffers.pop(name, None)


def is_named_so(name: str) -> bool:
    """True for the name of such a scale."""
    return name.rpartition(".")[2] in (KEY, VALUE)


def settings_for(names: Iterable[str]) -> dict[str, Any]:
    """What a "quantization_config" says of scales with these names; {} of none."""
    return {"kv_cache_scheme": SETTINGS} if any(True for _ in names) else {}


def describes(settings: Mapping[str, Any]) -> bool:
    """True if this "quantization_config" says that a cache has such scales."""
    found = settings.get("kv_cache_scheme")
    return isinstance(found, Mapping) and all(found.get(k) == v for k, v in SETTINGS.items())


def make_room(model: nn.Module, names: Iterable[str]) -> bool:
    """Give the module of the first of these names that the model has NaN in place of the scale, for a reader to fill.
    Returns False where the model has no such module."""
    for name in names:
        layer, _, own = name.rpartition(".")
        try:
            module = model.get_submodule(layer)
        except AttributeError:
            continue
        if not hasattr(module, own):
            hold(module, {own: torch.full((1,), torch.nan)})
        return True
    return False
