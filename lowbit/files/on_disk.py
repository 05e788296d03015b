"""Tensors whose memory is a file: the system keeps the pages that are used, and may drop others."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def zeros_on_disk(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in a file without a name in `folder`, which is gone when the tensor, or the process, is."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(tuple(shape), dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(count * dtype.itemsize)
        found = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    return found.view(tuple(shape))
