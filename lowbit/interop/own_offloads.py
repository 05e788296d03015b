"""accelerate's own `cpu_offload`, `disk_offload` and `dispatch_model` of a model with low-bit weights.

These functions look for weights by the names of the parameters. For low-bit weights a state dict has their parts, or
the values that QAT trains. So for such a model they get the weights by name (`lowbit.interop.accelerate`), as soon as
accelerate is imported.

accelerate's loading of a file with low-bit weights into a plain model raises an error: accelerate would find none of
these weights, and log a warning.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lowbit.files.tensor_file import TensorFile
from lowbit.numerics.sharded import held_locally
from lowbit.tensor.core.base import LowbitTensor
from lowbit_kernels.runtime.when_imported import when_imported

_MODULE = "accelerate.big_modeling"


def listen() -> None:
    """Wrap the functions as soon as accelerate is imported, or now."""
    when_imported(_MODULE, _wrap)


def _wrap(module: ModuleType) -> None:
    """Put the wrapped functions in place of accelerate's, in all modules that have them by name: transformers, PEFT and
    scripts may have imported them before lowbit."""
    found = [(getattr(module, name, None), name, by_name) for name, by_name in _FUNCTIONS.items()]
    wrapped = {n: (plain, _for_low_bits(plain, by)) for plain, n, by in found if plain is not None}
    if (loads := getattr(module, _LOAD, None)) is not None:
        wrapped[_LOAD] = loads, _into_low_bits(loads)
    for holder in [*sys.modules.values()]:
        own = getattr(holder, "__dict__", {})
        for name, (plain, ours) in wrapped.items():
            if own.get(name) is plain:
                setattr(holder, name, ours)


def _for_low_bits(plain: Callable[..., Any], by_name: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def offload(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        model, given = bound.arguments["model"], bound.arguments.get("state_dict")
        low_bits = {n for n, p in model.named_parameters() if _is_low_bit(p)}
        whole = model.state_dict() if given is None and low_bits else {}
        if given is not None or all(_is_low_bit(whole.get(name)) for name in low_bits):
            return plain(*args, **kwargs)  # the model's own hooks name whole weights
        return by_name(plain, dict(bound.arguments))

    return offload


def _into_low_bits(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        own = {n for n, p in given["model"].named_parameters() if not _is_low_bit(p)}
        codes = {name.removesuffix(".codes") for name in _names_in(Path(given["checkpoint"]))}
        if lost := sorted(own & codes):
            raise ValueError(
                f"{given['checkpoint']} has low-bit weights, such as {lost[0]}, for which the model has plain ones; "
                "accelerate loads tensor by tensor and would leave these as they were. Load first, by "
                "model.load_state_dict(lowbit.load(file), assign=True) or lowbit.load_pretrained(folder), and then "
                "call accelerate.dispatch_model"
            )
        return plain(*args, **kwargs)

    return load


def _names_in(checkpoint: Path) -> Iterator[str]:
    """The names of the codes in the files of safetensors that accelerate reads of a checkpoint."""
    with suppress(ValueError, OSError):  # accelerate raises its own
        for file in _files_of(checkpoint):
            if file.suffix == ".safetensors":
                yield from (name for name in TensorFile(file).entries if name.endswith(".codes"))


def _files_of(checkpoint: Path) -> Iterable[Path]:
    """The files of a checkpoint, a file, an index or a folder. Of a folder accelerate takes the first of these."""
    if checkpoint.is_dir():
        whole = [checkpoint / name for name in ("pytorch_model.bin", "model.safetensors")]
        found = [file for file in whole if file.exists()] or [*checkpoint.glob("*.index.json")]
        return _files_of(found[0]) if found else ()
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = json.loads(checkpoint.read_text())
    return {checkpoint.parent / name for name in index.get("weight_map", index).values()}


def _is_low_bit(weight: Any) -> bool:
    return isinstance(held_locally(weight), LowbitTensor)


def _in_memory(plain: Callable[..., Any], given: dict[str, Any]) -> Any:
    return plain(**{**given, "state_dict": _on_cpu(given["model"], [""])})


def _on_cpu(model: Any, places: list[str]) -> dict[str, Any]:
    """The tensors of the modules of these names, by name and whole; "" is the whole model."""
    own = importlib.import_module("lowbit.interop.accelerate")
    return {
        name: t.detach().to("cpu")
        for name, t in own.tensors_of(model)
        if any(not top or name == top or name.startswith(f"{top}.") for top in places)
    }


def _on_disk(plain: Callable[..., Any], given: dict[str, Any]) -> Any:
    return importlib.import_module("lowbit.interop.accelerate").disk_offload(**given)


def _dispatched(plain: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The weights that `device_map` places on the CPU, if others are elsewhere."""
    places = given["device_map"]
    if "disk" in places.values():
        raise NotImplementedError(
            'accelerate.dispatch_model of low-bit weights onto "disk"; accepted: devices and "cpu" in device_map, '
            "or the whole model by lowbit.accelerate.disk_offload(model, folder, device)"
        )
    on_cpu = [name for name, device in places.items() if device == "cpu"]
    if not on_cpu or (len({*places.values()}) < 2 and not given.get("force_hooks")):
        return plain(**given)
    return plain(**{**given, "state_dict": _on_cpu(given["model"], on_cpu)})


_LOAD = "load_checkpoint_in_model"
"""The function that `load_checkpoint_and_dispatch` calls, too."""
_FUNCTIONS = {"cpu_offload": _in_memory, "disk_offload": _on_disk, "dispatch_model": _dispatched}
