"""The step of ``fused_step.py`` on a CPU: the kernel of ``fused_step_cpu.cpp``, over the same table of pointers.

Compiling takes half a second for a variant, once on a machine (`host_compiler`).
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch

from lowbit_kernels import host_compiler
from lowbit_kernels.fused_step import Variant

_PIECES_WORDS = 32 + 32 + 16 + 16 + 16 + 1 + 256
_NONE = np.zeros(0, np.int64)


class FusedStepCpu:
    """The kernel of one variant.

    Args:
        variant: what it is compiled for; whether gradients are scaled makes no difference.

    Raises:
        RuntimeError: it can't be compiled (see `host_compiler.library`).
    """

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        alike = dataclasses.replace(variant, scaled=False)
        self._step = host_compiler.library(alike.source("cpu.h", "fused_step_cpu.cpp")).step
        self._step.restype = None
        self._step.argtypes = [
            *([ctypes.c_void_p] * 4),
            ctypes.c_longlong,
            ctypes.c_void_p,
            ctypes.c_longlong,
        ]
        pieces = [_pieces(table.values) for table in variant.tables if table is not None]
        self._tables = np.concatenate([variant.table_words(), *pieces])
        self._address = self._tables.ctypes.data

    def __call__(
        self,
        tensors: int,
        groups: int,
        scalars: torch.Tensor,
        locate: torch.Tensor,
        count: int,
        tiles: int,
        control: torch.Tensor | None,
    ) -> None:
        """Do the step, on at most ``torch.get_num_threads()`` threads. Arguments as for `FusedStep`, in host memory;
        where a tile lies it finds by itself."""
        flag = None if control is None else control.data_ptr()
        threads = torch.get_num_threads()
        self._step(tensors, groups, scalars.data_ptr(), self._address, count, flag, threads)


def _pieces(values: np.ndarray) -> np.ndarray:
    """A table of ascending values as ``Pieces`` of the .cpp: uint32.

    A boundary is the first float32 beyond it, its bits rotated left by one, so that the sign comes last: at an exact
    tie a negative number goes up, to the lower code.
    """
    magnitudes = values[values >= 0].astype(np.float64)
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    nearest = middle.astype(np.float32)
    below = nearest.view(np.uint32).astype(np.int64) - (nearest > middle)
    beyond = 2 * below + np.where(nearest == middle, 1, 2)
    if len(values) == 16:
        return _words(beyond)
    signed = values[0] < 0
    # a decade has twice as many magnitudes as the one below
    starts = np.array([0, *(2 ** np.arange(8) * (1 if signed else 2) - (not signed))])
    ends = np.append(starts[1:], len(magnitudes)) - 1
    spans = magnitudes[ends] - magnitudes[starts]
    slope = np.divide(ends - starts, spans, out=np.zeros_like(spans), where=spans > 0)
    first = np.maximum(starts, not signed)  # a second moment never becomes zero
    offset = first + 0.5 - magnitudes[starts] * slope
    turns = beyond[starts[1:] - 1]
    power = turns >> 24
    at = np.arange(power[0], power[0] + 32)
    boundary = np.full(32, 2**32 - 1)
    boundary[power - power[0]] = turns
    before, last = np.searchsorted(power, at), np.maximum(ends, first)
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(256, 4).T).view(np.uint32).ravel()
    return _words(boundary, before, slope, offset, last, power[:1], planes)


def _words(
    boundary: np.ndarray,
    before: np.ndarray = _NONE,
    slope: np.ndarray = _NONE,
    offset: np.ndarray = _NONE,
    last: np.ndarray = _NONE,
    lowest: np.ndarray = _NONE,
    planes: np.ndarray = _NONE,
) -> np.ndarray:
    words = np.zeros(_PIECES_WORDS, np.uint32)
    parts = (boundary, before, slope, offset, last, lowest, planes)
    for start, part in zip((0, 32, 64, 80, 96, 112, 113), parts, strict=True):
        numbers = part.astype(np.float32).view(np.uint32) if part.dtype == float else part
        words[start : start + len(part)] = numbers
    return words
