"""PEFT's own `merge_adapter`, `unmerge_adapter` and `merge_and_unload`, and diffusers' `fuse_lora` and `unfuse_lora`,
over siblings that share a part of their scales.

They change one weight after the other, and each would take scales of its own. q, k and v in NVFP4 would then have
three global scales, which servers that merge these layers refuse. So these methods first change such siblings together
(`lowbit.interop.peft.merge.change_siblings`), and then go on with all other layers. `layer.merge()` of one layer of
PEFT knows no siblings: the shared part stays there as long as it reaches the sum (`TableTensor.requantize_`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lowbit_kernels.runtime.when_imported import when_imported

_METHODS = ("merge_adapter", "unmerge_adapter", "_unload_and_optionally_merge")
_CLASSES = {"peft.tuners.tuners_utils": "BaseTuner", "peft.tuners.mixed.model": "MixedModel"}
"""The classes that have such methods of their own, by their modules."""


def listen() -> None:
    """Wrap the methods as soon as PEFT or diffusers is imported, or now."""
    for module in _CLASSES:
        when_imported(module, _wrap)
    when_imported("diffusers.loaders.peft", _wrap_fuses)


def _wrap(module: ModuleType) -> None:
    kind = getattr(module, _CLASSES[module.__name__])
    for name in _METHODS:
        if (method := vars(kind).get(name)) is not None:
            setattr(kind, name, _together(method))


def _together(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)
    unmerges = method.__name__ == "unmerge_adapter"

    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given.get("merge", True):
            return method(self, *args, **kwargs)
        if not unmerges:
            self._check_merge_allowed()
        names = given.get("adapter_names")

        def is_due(layer: Any) -> bool:
            if unmerges:
                return bool(layer.merged)
            return not {*(names or layer.active_adapters)} <= {*layer.merged_adapters}

        def change(layer: Any) -> None:
            if unmerges:
                layer.unmerge()
            else:
                layer.merge(safe_merge=given["safe_merge"], adapter_names=names)

        merging = importlib.import_module("lowbit.interop.peft.merge")
        due = {n: layer for n, layer in merging.layers_of(self.model).items() if is_due(layer)}
        if not merging.change_siblings(self.model, due, change):
            return method(self, *args, **kwargs)
        with warnings.catch_warnings():  # of the layers that are done
            warnings.filterwarnings(
                "ignore", "All adapters are already|Already (unmerged|following)"
            )
            return method(self, *args, **kwargs)

    return changed


def _wrap_fuses(module: ModuleType) -> None:
    kind = getattr(module, "PeftAdapterMixin", None)
    for name in ("fuse_lora", "unfuse_lora"):
        method = getattr(kind, name, None)
        if method is not None and hasattr(kind, f"_{name}_apply"):  # not in all releases
            setattr(kind, name, _layer_by_layer(method, f"_{name}_apply"))


def _layer_by_layer(method: Callable[..., Any], step: str) -> Callable[..., Any]:
    """`method`, which calls `step` with each module of a model. Siblings take that step together, before all others."""

    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        merging = importlib.import_module("lowbit.interop.peft.merge")
        layers, one = merging.layers_of(self), getattr(self, step)
        done: set[int] = set()

        def change(module: Any, *more: Any, **named: Any) -> None:
            if not done:
                names = merging.change_siblings(self, layers, lambda own: one(own, *more, **named))
                done.update({id(layers[name]) for name in names}, {id(self)})
            if id(module) not in done:
                one(module, *more, **named)

        self.__dict__[step] = change
        try:
            return method(self, *args, **kwargs)
        finally:
            del self.__dict__[step]

    return changed
