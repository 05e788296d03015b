"""A format of programs: a file with the computation of a model beside its weights, for one runtime.

`lowbit.export(model, out, format=…, example_inputs=…)` traces the model with torch.export and gives the program to the
format. `lowbit.formats.registry` lists the formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit import optional
from lowbit.formats.base import FormatError, with_scales
from lowbit.formats.sources import Item
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor


@dataclass
class Call:
    """A model and a call of it, which torch.export traces.

    Attributes:
        model: the module.
        args, kwargs: the example inputs.
        dynamic_shapes: as torch.export takes it; None: the shapes of the example.
        weights: the low-bit weights by name, each once.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    weights: dict[str, LowbitTensor] = field(default_factory=dict)


class ProgramFormat(ABC):
    """A format that holds a program. A format of your own is a subclass that `lowbit.formats.register` gets."""

    name: ClassVar[str]
    """The name that `lowbit.export(…, format=name)` takes."""
    suffix: ClassVar[str]
    """The end of the file's name, with the dot."""
    scale_dtype: ClassVar[torch.dtype | None] = None
    """As in `lowbit.formats.Format`."""

    def grid(self, scheme: Scheme) -> Scheme:
        return with_scales(scheme, self.scale_dtype)

    @abstractmethod
    def write(self, call: Call, path: Path, lossy: bool) -> list[Item]:
        """Write the program to `path`. Returns the low-bit weights that it holds, for the report.

        Raises FormatError for weights that the runtime cannot hold, and for missing packages.
        """


def example(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keyword arguments of the example call, from a tuple, a dict or one tensor."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise FormatError(
        "example_inputs is a tuple of the model's arguments, a dict of its keyword arguments or one tensor, got "
        f"{type(inputs).__name__}"
    )


def package(name: str, extra: str) -> Any:
    """An optional package. If it is not installed, raises a FormatError that names the extra."""
    return optional.imported(name, f"{extra} programs need", extra, FormatError)
