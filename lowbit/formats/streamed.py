"""A model of transformers whose weights lie in its folder, and come into memory for a while.

Elsewhere a parameter is one element that is expanded to its shape. So names, shapes, dtypes, ties and the device are
those of the whole model, and a walk over the model finds all weights. The `Parameter` object stays the same when its
values come and go.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.files.on_disk import zeros_on_disk
from lowbit.formats import building
from lowbit.formats.base import FormatError
from lowbit.formats.experts import Joined
from lowbit.formats.gguf.file import GgufFile
from lowbit.formats.reading import check_shape, matched, opened, place_computed
from lowbit.tensor.core.base import LowbitTensor


class StreamedModel:
    """The model of a folder with plain weights.

    Args:
        path: the folder.
        device: where its weights come to.

    Attributes:
        folder: the folder.
        model: in evaluation mode, without values.
        device: that of the parameters.

    Raises FormatError for a path that `lowbit.load_pretrained` refuses, a GGUF file, and weights in low bits.
    """

    def __init__(self, path: str | PathLike[str], device: str | torch.device = "cpu") -> None:
        folder = opened(path)
        if isinstance(folder, GgufFile):
            raise FormatError(
                f"{folder.path} is a GGUF file, which is not read block by block; load it by lowbit.load_pretrained"
            )
        if folder.weights:
            raise FormatError(
                f"{folder.path} is in low bits already; give the folder of the plain weights"
            )
        self.folder, self.device = folder, torch.device(device)
        self.model = building.built(folder).eval()
        self._source: Any
        self._source, self._places = matched(self.model, folder, torch.device("cpu"))
        self._by_module: dict[int, list[str]] = {}
        for name, places in self._places.items():
            self._by_module.setdefault(id(places[0][0]), []).append(name)
            for module, attribute in places:
                if attribute in module._buffers:
                    shape = tuple(module._buffers[attribute].shape)  # type: ignore[union-attr]
                    module._buffers[attribute] = self._empty(name, shape)
            module, attribute = places[0]
            if (held := module._parameters.get(attribute)) is not None:
                empty = self._empty(name, tuple(held.shape))
                trains = held.requires_grad and empty.is_floating_point()
                self._put(name, nn.Parameter(empty, requires_grad=trains))
        place_computed(self.model, folder.path, self.device)

    def names(self) -> list[str]:
        """The names of all tensors in the model; a tied one has one name."""
        return list(self._places)

    def names_in(self, module: nn.Module) -> list[str]:
        """The names of the tensors that lie in a module."""
        return [name for own in module.modules() for name in self._by_module.get(id(own), ())]

    def value(self, name: str) -> Tensor:
        """The parameter or buffer of this name, as the model has it now."""
        module, attribute = self._places[name][0]
        found: Tensor = getattr(module, attribute)
        return found

    def bring(self, names: Iterable[str], copies: bool = True, disk: Path | None = None) -> None:
        """Read tensors into memory. `copies`: False leaves those on the CPU views of their files, whose pages the
        system reads when they are used, and may drop again. `disk`: a folder in which stacks of experts become such
        files, if they have none; then stacks are views, too."""
        for name in names:
            if disk is not None and self.device.type == "cpu" and self.value(name).ndim == 3:
                self._set(name, self._on_disk(name, disk))
                continue
            value: Tensor = self._source.read(name)
            held = self.value(name)
            check_shape(self.folder.path, name, value, held)
            on_cpu = self.device.type == "cpu"
            value = (value.clone() if copies else value) if on_cpu else value.to(self.device)
            self._set(name, value)

    def _on_disk(self, name: str, disk: Path) -> Tensor:
        """A stack, in the folder's own file or in one in `disk`."""
        held = self.value(name)
        if isinstance(self._source, Joined) and self._source.is_stack(name):
            found = zeros_on_disk(disk, held.shape, self._source.plain_dtype(name))
            self._source.fill(name, found)
            return found
        value: Tensor = self._source.read(name)
        check_shape(self.folder.path, name, value, held)
        return value

    def put(self, name: str, value: Tensor) -> None:
        """Give a plain tensor these values."""
        self._set(name, value.to(self.device))

    def drop(self, names: Iterable[str]) -> None:
        """Let go of the values. A low-bit weight goes to meta."""
        for name in names:
            held = self.value(name)
            if isinstance(held, LowbitTensor):
                meta = held._map(lambda t: t.detach().to("meta"))
                self._put(name, nn.Parameter(meta, requires_grad=False))
            else:
                self._set(name, self._empty(name, tuple(held.shape)))

    def _set(self, name: str, value: Tensor) -> None:
        held = self.value(name)
        if isinstance(held, nn.Parameter):
            held.data = value
            return
        for module, attribute in self._places[name]:
            module._buffers[attribute] = value

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for module, attribute in self._places[name]:
            module.register_parameter(attribute, parameter)

    def _empty(self, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = self._source.plain_dtype(name)
        return torch.zeros((), dtype=dtype, device=self.device).expand(shape)
