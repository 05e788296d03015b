"""Offloading of accelerate for models with low-bit weights: they wait in host memory or on disk, in low bits.

    lowbit.accelerate.cpu_offload(model, "cuda")              # accelerate.cpu_offload
    lowbit.accelerate.disk_offload(model, "folder", "cuda")   # accelerate.disk_offload

accelerate takes the weights from `model.state_dict()` by the names of the parameters. A state dict holds the parts of a
low-bit weight, `weight.codes`, `weight.scale` …, which have other names. The functions of this module give accelerate
the weights by name. Then accelerate's hooks move the weights of a layer to the execution device before the layer runs,
and to meta afterwards. accelerate's own `cpu_offload` and `disk_offload` call these functions for a model with low-bit
weights (`lowbit.interop.own_offloads`).

`Accelerator.prepare`, `save_state`, `load_state` and FSDP2 do not need this module.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import optional
from lowbit.convert import check_module
from lowbit.numerics.settings import device_of
from lowbit.numerics.sharded import held_locally
from lowbit.tensor.core.base import LowbitTensor

INDEX = "index.json"
"""The file that accelerate writes beside the tensors of a folder."""


def cpu_offload(
    model: nn.Module, execution_device: torch.device | str | int | None = None, **options: Any
) -> nn.Module:
    """`accelerate.cpu_offload` for a model with low-bit weights.

    Args:
        model: changed in place. Its parameters are then on meta, except while their layer runs.
        execution_device: where layers run; None: the device of the first parameter.
        options: `offload_buffers` and `preload_module_classes`, as accelerate takes them.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: a weight that is sharded or on meta.
    """
    accelerate = _accelerate()
    check_module(model)
    if execution_device is not None:
        device_of("execution_device", execution_device)
    state = {name: t.detach().to("cpu") for name, t in tensors_of(model)}
    return accelerate.cpu_offload(model, execution_device, state_dict=state, **options)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | str | int | None = None,
    **options: Any,
) -> nn.Module:
    """`accelerate.disk_offload` for a model with low-bit weights, whose parts are files of `offload_dir`.

    Args:
        model: changed in place, as by `cpu_offload`.
        offload_dir: a folder. If accelerate's index is in it, the files are read, not written.
        execution_device, options: as for `cpu_offload`.

    Raises:
        ImportError, ValueError: as in `cpu_offload`; an `offload_dir` that lacks or differs in parts of a weight.
    """
    accelerate = _accelerate()
    check_module(model)
    if execution_device is not None:
        device_of("execution_device", execution_device)
    tensors = dict(tensors_of(model))
    low = {n: t.detach().to("meta") for n, t in tensors.items() if isinstance(t, LowbitTensor)}
    if not (Path(offload_dir) / INDEX).is_file():
        files = {file: _bytes(p) for name, t in tensors.items() for file, p in _parts(name, t)}
        accelerate.utils.offload_state_dict(offload_dir, files)
    stored = accelerate.utils.OffloadedWeightsLoader(save_folder=offload_dir)
    found = _Stored(stored, low)
    for name, tensor in tensors.items():
        found.check(name, tensor)
    first = next(iter(tensors.values()), None)
    if execution_device is None and first is not None:
        execution_device = first.device
    hooks = accelerate.hooks
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True), append=True)
    hooks.attach_align_device_hook(
        model, execution_device=execution_device, offload=True, weights_map=found, **options
    )
    return model


class _Stored(Mapping[str, Tensor]):
    """The tensors of a folder by the names of the model's parameters. `low`: the low-bit weights, on meta."""

    def __init__(self, files: Mapping[str, Tensor], low: Mapping[str, Any]) -> None:
        self.files, self.low = files, low
        parts = {file for name, t in low.items() for file, _ in _parts(name, t)}
        self.names = [*low, *(file for file in files if file not in parts)]

    def __getitem__(self, name: str) -> Tensor:
        like = self.low.get(name)
        if like is None:
            return self.files[name]
        made = like._with(
            {file.rpartition(".")[2]: self._read(file, p) for file, p in _parts(name, like)}
        )
        made.check_parts()
        return made

    def _read(self, file: str, like: Tensor) -> Tensor:
        """The part in this file; `like`: one of its dtype."""
        held = self.files[file]
        return held.view(like.dtype) if held.dtype is _bytes(like).dtype else held

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise ValueError if files of `tensor` are missing, or differ in shape or dtype."""
        try:
            for file, part in _parts(name, tensor):
                held = self._read(file, part)
                if (held.shape, held.dtype) != (part.shape, part.dtype):
                    raise ValueError(
                        f"{file} is {held.dtype} {tuple(held.shape)} there and {part.dtype} {tuple(part.shape)} here"
                    )
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(
                f"offload_dir does not hold {name} as the model has it ({error}); give a new folder"
            ) from error


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a parameter or buffer, by the names of their files."""
    if isinstance(tensor, LowbitTensor):
        yield from ((f"{name}.{part}", t.detach()) for part, t in tensor.inner_tensors().items())
    else:
        yield name, tensor.detach()


def _bytes(part: Tensor) -> Tensor:
    """float8 as uint8, since accelerate before 1.15 has no files of float8; others as they are."""
    is_float8 = part.dtype.is_floating_point and part.itemsize == 1
    return part.view(torch.uint8) if is_float8 else part


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and saved buffers by name; tied ones by each of their names."""
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if not isinstance(tensor, Tensor):
            continue
        if held_locally(tensor) is not tensor or tensor.is_meta:
            raise ValueError(
                f"{name} is sharded or on meta, and only whole weights with values are offloaded; load the model on "
                "one device first"
            )
        yield name, tensor


def _accelerate() -> Any:
    optional.imported("accelerate.hooks", "lowbit.accelerate needs", "accelerate")
    return importlib.import_module("accelerate")
