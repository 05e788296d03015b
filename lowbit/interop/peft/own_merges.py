"""PEFT's own `merge_adapter`, `unmerge_adapter` and `merge_and_unload` over siblings that share a part of their scales.

PEFT changes one weight after the other, and each would take scales of its own, so that q, k and v in NVFP4 had three
global scales, and servers that merge these layers refused them. So these methods change such siblings together first
(`lowbit.interop.peft.merge.change_siblings`), and PEFT then goes on with all other layers.
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


def listen() -> None:
    """Wrap the methods as soon as PEFT is imported, or now."""
    when_imported("peft.tuners.tuners_utils", _wrap)


def _wrap(module: ModuleType) -> None:
    for name in _METHODS:
        if (method := getattr(module.BaseTuner, name, None)) is not None:
            setattr(module.BaseTuner, name, _together(method))


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
        if not due:
            return method(self, *args, **kwargs)
        merging.change_siblings(self.model, due, change)
        with warnings.catch_warnings():  # of the layers that are done
            warnings.filterwarnings("ignore", "All adapters are already merged|Already unmerged")
            return method(self, *args, **kwargs)

    return changed
