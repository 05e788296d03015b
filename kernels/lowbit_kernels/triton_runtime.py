"""Triton, where it is installed.

Without Triton, ``jit``, with options or without, returns the plain function that it decorates. Nobody calls that
function, so modules of ops need no condition around their kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

triton: Any
tl: Any
jit: Callable[..., Any]

try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:
    triton = tl = None

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return jit if function is None else function
else:
    jit = triton.jit


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of ``device``. On the CPU they do under ``TRITON_INTERPRET=1`` only."""
    if triton is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)


def stored_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a kernel writes a result of ``dtype``; the launcher converts it afterwards.

    The interpreter (triton 3.7) truncates float32 to bfloat16, where a GPU rounds to nearest even.
    """
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype
