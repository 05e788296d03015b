"""Errors of short memory, which say nothing about the file that a process reads."""

from __future__ import annotations

import torch

_MESSAGES = ("can't allocate memory", "not enough memory")
"""Parts of the RuntimeError that torch's CPU allocator raises: on Linux and macOS, and on Windows."""


def is_short_memory(error: BaseException) -> bool:
    """True for errors of the allocators of Python, of torch on the CPU, and of torch on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
