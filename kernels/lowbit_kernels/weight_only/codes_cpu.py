"""The memory layout of a weight on a CPU, and how kernels that include ``codes_cpu.h`` are compiled."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lowbit_kernels.runtime import host_compiler
from lowbit_kernels.runtime.sources import program
from lowbit_kernels.runtime.warned import warn_once
from lowbit_kernels.weight_only.codes_format import CodesFormat

GRAIN = 2**20
"""Elements of a weight above which several threads are faster than one."""


def source(format: CodesFormat, *files: str, defined: str = "") -> str:
    """The C++ program of files that use ``codes_cpu.h``, with the name `defined` set to 1."""
    zero = ("none", "code", "value").index(format.zero_point)
    defines = {"BITS": format.bits, "LOW": format.low, "EXPONENT": format.exponent}
    defines |= {"ZERO": zero, "MID": format.mid, "SCALE_BYTES": int(format.scale_bytes)}
    defines |= {defined: 1} if defined else {}
    values = {name: f"({n})" for name, n in defines.items()}
    if format.table:
        values["TABLE"] = ", ".join(f"{value.hex()}f" for value in format.table)
    return program(values, "weight_only/codes_cpu.h", *files)


class Parts(NamedTuple):
    """The tensors of a weight: codes, scale and zero_point as in `dequantize_cpu`.

    of_byte: float32 [256], the scale that each byte of `scale` stands for; None for float32 scales.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    of_byte: Tensor | None = None

    def addresses(self) -> tuple[int, int, int | None, int | None]:
        """In the order in which the kernels take them."""
        codes, scale, zero_point, of_byte = self
        return (
            codes.data_ptr(),
            scale.data_ptr(),
            None if zero_point is None else zero_point.data_ptr(),
            None if of_byte is None else of_byte.data_ptr(),
        )


class CodesLayout:
    """A weight's layout in memory, the struct ``Layout`` of the header.

    Args:
        format: the format of the codes.
        rows, columns: N and Kp.
        group_size: columns that share a scale; divides Kp.
        scale_rows: rows that share a scale; divides N.
    """

    def __init__(
        self, format: CodesFormat, rows: int, columns: int, group_size: int, scale_rows: int = 1
    ) -> None:
        self.shape = (rows, columns)
        row_bytes, groups = (columns * format.bits + 7) // 8, columns // group_size
        words = (rows, columns, row_bytes, group_size, groups, scale_rows)
        self._words = np.array(words, np.int64)
        self.address = self._words.ctypes.data
        self.codes_bytes = rows * row_bytes
        scales = rows // scale_rows * groups
        self.scale_bytes = scales if format.scale_bytes else 4 * scales
        self.has_byte_scales = format.scale_bytes
        self.zero_bytes = {"none": 0, "code": scales, "value": 4 * scales}[format.zero_point]
        self._parallel = _parallel() if rows * columns >= GRAIN else None

    def fits(self, parts: Parts) -> bool:
        """True if the kernels can read these: contiguous memory of the right sizes, and scales of the right type."""
        codes, scale, zero_point, of_byte = parts
        return (
            codes.nbytes == self.codes_bytes
            and codes.is_contiguous()
            and scale.nbytes == self.scale_bytes
            and scale.is_contiguous()
            and (scale.itemsize == 1 if self.has_byte_scales else scale.dtype is torch.float32)
            and (of_byte is not None) == self.has_byte_scales
            and (
                self.zero_bytes == 0
                if zero_point is None
                else zero_point.nbytes == self.zero_bytes and zero_point.is_contiguous()
            )
        )

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def threads(self) -> tuple[int | None, int]:
        """The address of the function that runs PyTorch's threads, and the number of threads."""
        return self._parallel, 1 if self._parallel is None else torch.get_num_threads()


def functions(source: str, *names: str) -> list[Any]:
    """C functions of a program; each returns an int64.

    Raises:
        RuntimeError: the program cannot be compiled (see `host_compiler.library`), or the machine is big-endian.
    """
    if sys.byteorder != "little":
        raise RuntimeError("the kernels need a little-endian machine, and this one is big-endian")
    library = host_compiler.library(source, *host_compiler.C_HEADERS)
    found = [getattr(library, name) for name in names]
    for function in found:
        function.restype = ctypes.c_int64
    return found


@functools.cache
def _parallel() -> int | None:
    """The address of the OpenMP function that runs PyTorch's threads; None if PyTorch has no OpenMP."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, TypeError, AttributeError):
        return None


def warn_not_compiled(error: RuntimeError) -> None:
    """Warn once that the kernels cannot be compiled, and why."""
    reason = str(error).splitlines()[0]
    warn_once(
        reason,
        "low-bit weights on this CPU are dequantized by PyTorch operations, several times slower than by lowbit's "
        f"kernels, which are compiled at first use: {reason}",
    )
