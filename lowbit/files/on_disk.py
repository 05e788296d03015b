"""Tensors whose memory is a file: the system keeps the pages that are used, and may drop others."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def zeros_on_disk(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in a file without a name in `folder`, which is gone when the tensor, or the process, is. Raises OSError for
    a disk without room for all of it, since a write to such memory would end the process."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(tuple(shape), dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        _reserve(file, folder, count * dtype.itemsize)
        found = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    return found.view(tuple(shape))


def _reserve(file: Any, folder: Path, nbytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS, Windows
        file.truncate(nbytes)
        return
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: {folder} has no room for a tensor of {nbytes} bytes; free some, or give another folder",
        ) from error
