"""The step of ``fused_step.py`` on a CPU: the kernel of ``fused_step_cpu.cpp``, over the same table of pointers.

Compiling a variant takes about a second, once on a machine (`host_compiler`).
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import torch

from lowbit_kernels.elementwise.fused_step import StepArguments, StepVariant
from lowbit_kernels.runtime import host_compiler

# `Pieces` of the .cpp.
_PIECES = np.dtype(
    [
        *(("boundary", np.uint32, 32), ("before", np.uint32, 32)),
        *(("slope", np.float32, 16), ("offset", np.float32, 16), ("last", np.uint32, 16)),
        *(("lowest", np.uint32), ("bytes", np.uint8, (4, 256))),
    ]
)


class StepKernelCpu:
    """The kernel of one variant.

    Args:
        variant: its compile-time parameters. `scaled` makes no difference.

    Raises:
        RuntimeError: the kernel can't be compiled (see `host_compiler.library`).
    """

    def __init__(self, variant: StepVariant) -> None:
        self.variant = variant
        alike = dataclasses.replace(variant, scaled=False)
        self._step = host_compiler.library(
            alike.source("runtime/cpu.h", ("elementwise/fused_step_cpu.cpp",)),
            *host_compiler.C_HEADERS,
        ).step
        self._step.restype = None
        address, number = ctypes.c_void_p, ctypes.c_longlong
        self._step.argtypes = [*([address] * 4), number, address, number]
        pieces = [_pieces(table.values) for table in variant.tables if table and len(table.cells)]
        self._tables = np.concatenate([variant.table_words(), *pieces])
        self._address = self._tables.ctypes.data

    def __call__(self, step: StepArguments) -> None:
        """Do the step, on at most ``torch.get_num_threads()`` threads. `locate` and `tiles` are not used."""
        tensors, groups, scalars, _, count, _, control, _ = step
        flag = None if control is None else control.data_ptr()
        threads = torch.get_num_threads()
        self._step(tensors, groups, scalars.data_ptr(), self._address, count, flag, threads)


def _pieces(values: np.ndarray) -> np.ndarray:
    """A table of 8 bits, ascending values, as ``Pieces`` of the .cpp: uint32.

    A boundary is stored as the first float32 beyond it, with its bits rotated left by one so that the sign is the last
    bit: at an exact tie a negative number goes up, to the lower code.
    """
    magnitudes = values[values >= 0].astype(np.float64)
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    nearest = middle.astype(np.float32)
    below = nearest.view(np.uint32).astype(np.int64) - (nearest > middle)
    beyond = 2 * below + np.where(nearest == middle, 1, 2)
    pieces = np.zeros((), _PIECES)
    signed = values[0] < 0
    # a decade has twice as many magnitudes as the one below
    starts = np.array([0, *(2 ** np.arange(8) * (1 if signed else 2) - (not signed))])
    ends = np.append(starts[1:], len(magnitudes)) - 1
    first = np.maximum(starts, not signed)  # a second moment never becomes zero
    spans = magnitudes[ends] - magnitudes[starts]
    slope = np.divide(ends - starts, spans, out=np.zeros_like(spans), where=spans > 0)
    pieces["slope"][:9] = slope
    pieces["offset"][:9] = first + 0.5 - magnitudes[starts] * slope
    pieces["last"][:9] = np.maximum(ends, first)
    turns = beyond[starts[1:] - 1]  # from one piece to the next
    power = turns >> 24
    pieces["lowest"] = power[0]
    pieces["before"] = np.searchsorted(power, power[0] + np.arange(32))
    pieces["boundary"] = 2**32 - 1
    pieces["boundary"][power - power[0]] = turns
    pieces["bytes"] = values.view(np.uint8).reshape(256, 4).T
    return _words(pieces)


def _words(struct: np.ndarray) -> np.ndarray:
    return np.frombuffer(struct.tobytes(), np.uint32)
