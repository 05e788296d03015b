"""Weights of 1 to 8 bits, integers, float8 or codes of a table, to float32 on a CPU: launches ``dequantize_cpu.cpp``.

    x[n, k] = (number(code[n, k]) - zero_point) * scale
    x[n, k] = (number(code[n, k]) - mid) * scale + zero_point       if zero points are values

    codes       uint8 [N, Kp * bits / 8], a little-endian bit stream of codes minus the smallest code;
                8 bits: int8, uint8 or float8 [N, Kp]
    scale       float32 [N / scale_rows, Kp / group_size], or bytes that a table gives a float32 value each
    zero_point  None; int8 or uint8, on the grid of the codes; or float32. It has the shape of scale
    x           float32 [N, Kp]

The values equal those of PyTorch's operations to the bit. PyTorch needs about 25 operations of a few microseconds each:
int4 codes of 128 x 128 take 66 us, and 2.9 us in this kernel (one core of an EPYC with AVX-512). A variant for each
format is compiled at first use, in a tenth of a second, once a machine (`host_compiler`).

Products read a large weight in tiles of rows (`Dequantizer.tiles`). All of them lie in the same memory, which stays in
the cache. As a whole, the values of a weight of 32 MiB and more would go to fresh pages in every call, since the C
library returns memory of that size to the system: ten times the time of the product.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.weight_only.codes_cpu import (
    CodesLayout,
    Parts,
    functions,
    source,
    warn_not_compiled,
)
from lowbit_kernels.weight_only.codes_format import CodesFormat

_FLOAT32 = torch.float32
MOST_KEPT = 2**22
"""Elements of the buffer that a thread keeps: 16 MB."""
TILE = 2**19
"""Elements of a tile for each thread that decodes it: 2 MB. Half of it and twice as much take up to 10% longer."""
ROWS_OF_A_TILE = 64
"""A tile has a multiple of so many rows, and the last one no fewer. PyTorch's product with it then has the bits of that
with the whole weight. BLAS sums up fewer rows in another order."""


def rows_in_tiles(n: int, most: int) -> Iterator[slice]:
    """The rows of each tile of a weight of n rows: at most `most`, where the rule of `ROWS_OF_A_TILE` lets it."""
    rows = max(most // ROWS_OF_A_TILE, 1) * ROWS_OF_A_TILE
    firsts = range(0, max(n - ROWS_OF_A_TILE, 0) + 1, rows)
    for first in firsts:
        yield slice(first, n if first == firsts[-1] else first + rows)


class Dequantizer(CodesLayout):
    """The kernel for weights of one format and layout. The arguments are those of `CodesLayout`.

    Raises:
        RuntimeError: the kernel cannot be compiled (see `codes_cpu.functions`).
    """

    def __init__(self, format: CodesFormat, *sizes: int) -> None:
        super().__init__(format, *sizes)
        self._dequantize, self._look_up = _functions(format)
        self._special = self.threads()[0] is not None or self.zero_bytes > 0
        rows, columns = self.shape
        self.is_small = rows * columns <= TILE

    def dequantize(self, parts: Parts) -> Tensor:
        """float32 [N, Kp]; the parts must fit (`CodesLayout.fits`)."""
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        self._run(out.data_ptr(), parts.addresses(), 0, self.shape[0])
        return out

    def tiles(self, parts: Parts) -> Iterator[tuple[slice, Tensor]]:
        """The rows in order, a tile at a time: which rows, and their values, float32 [rows, Kp].

        All tiles are in the same memory of this thread: use one before the next. The parts must fit.
        """
        n, columns = self.shape
        most = min(TILE * self.threads()[1], MOST_KEPT)
        slices = [*rows_in_tiles(n, most // columns)]
        largest = max(rows.stop - rows.start for rows in slices)
        values, read = _memory.rows(largest, columns), parts.addresses()
        address = values.data_ptr()
        for rows in slices:
            self._run(address, read, rows.start, rows.stop)
            yield rows, values[: rows.stop - rows.start]

    def kept_transposed(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None
    ) -> Tensor | None:
        """All values of a small weight (`is_small`), viewed as [Kp, N], in the memory of `tiles`; None if the arguments
        do not fit.

        Decoding calls this method for every layer and token, so it inlines the functions that it would call.
        """
        found = _memory.views.get(self)
        if found is None or self._special or zero_point is not None:
            parts = Parts(codes, scale, zero_point)
            if not self.fits(parts):
                return None
            _, transposed, address = found or _memory.view(self)
            self._run(address, parts.addresses(), 0, self.shape[0])
            return transposed
        if (
            codes.nbytes != self.codes_bytes
            or scale.nbytes != self.scale_bytes
            or scale.dtype is not _FLOAT32
            or not codes.is_contiguous()
            or not scale.is_contiguous()
        ):
            return None
        _, transposed, address = found
        read = (codes.data_ptr(), scale.data_ptr(), None, None)
        self._dequantize(self.address, address, *read, 0, self.shape[0], None, 1)
        return transposed

    def look_up(self, parts: Parts, index: Tensor) -> Tensor | None:
        """float32 [..., Kp]: the rows of a contiguous int64 index [...]; None if an index is not in 0 .. N - 1."""
        shape = (*index.shape, self.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        addresses = (out.data_ptr(), *parts.addresses(), index.data_ptr())
        return out if self._look_up(self.address, *addresses, index.numel()) else None

    def _run(self, out: int, read: tuple[int | None, ...], first: int, end: int) -> None:
        self._dequantize(self.address, out, *read, first, end, *self.threads())


class _Memory(threading.local):
    """The buffer that a thread dequantizes into. One buffer for all products stays in the cache."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.views: dict[Dequantizer, tuple[Tensor, Tensor, int]] = {}
        """For each weight: its values, the transposed view, and their address."""

    def rows(self, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns] of the buffer; more than `MOST_KEPT` elements are a new tensor."""
        size = rows * columns
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            whole = self.whole
            if whole is None or whole.numel() < size:
                whole = torch.empty(size, dtype=torch.float32, device="cpu")
                if size <= MOST_KEPT:
                    self.views.clear()
                    self.whole = whole
            return whole[:size].view(rows, columns)

    def view(self, layout: Dequantizer) -> tuple[Tensor, Tensor, int]:
        values = self.rows(*layout.shape)
        with torch.inference_mode(False):
            found = values, values.t(), values.data_ptr()
        if len(self.views) >= 256:  # most belong to models that are gone
            self.views.clear()
        self.views[layout] = found
        return found


_memory = _Memory()


def dequantizer(format: CodesFormat, *sizes: int) -> Dequantizer | None:
    """A `Dequantizer`; None, after a warning, if it cannot be compiled."""
    try:
        return Dequantizer(format, *sizes)
    except RuntimeError as error:
        warn_not_compiled(error)
        return None


@functools.cache
def _functions(format: CodesFormat) -> tuple[Any, Any]:
    program = source(format, "weight_only/dequantize_cpu.cpp", defined="TO_MEMORY")
    dequantize, look_up = functions(program, "dequantize", "look_up")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    dequantize.argtypes = [*([pointer] * 6), number, number, pointer, number]
    look_up.argtypes = [*([pointer] * 7), number]
    return dequantize, look_up
