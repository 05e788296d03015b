"""Weights of 1 to 8 bits, integers or float8, to float32 on a CPU: the kernel of ``dequantize_cpu.cpp``.

    x[n, k] = (code[n, k] - zero_point) * scale
    x[n, k] = (code[n, k] - mid) * scale + zero_point       of zero points that are values

    codes       uint8 [N, Kp * bits / 8], a little-endian bit stream of codes less the smallest; of 8 bits int8, uint8
                or float8 [N, Kp]
    scale       float32 [N / scale_rows, Kp / group_size]
    zero_point  None; int8 or uint8, on the grid of the codes; or float32: of scale's shape
    x           float32 [N, Kp]

To the bit what PyTorch's operations give. They are some 25, at a few microseconds each on the host whatever the size.
On one core of an EPYC with AVX-512 (int4, one scale a row, microseconds, the call included):

                       128 x 128    512 x 128    1408 x 512
    PyTorch                   66          100           452
    this kernel              2.9          5.6            40

A variant for each format is compiled at first use, in a tenth of a second, once on a machine (`host_compiler`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.codes_cpu import Format, Layout, functions, warn_not_compiled

_FLOAT32 = torch.float32
MOST_KEPT = 2**22  # elements of the memory that a thread keeps: 16 MB


class Dequantizer(Layout):
    """The kernel for weights of one format and layout; arguments as of `Layout`.

    Raises:
        RuntimeError: the kernel can't be compiled (see `codes_cpu.functions`).
    """

    def __init__(self, format: Format, *sizes: int) -> None:
        super().__init__(format, *sizes)
        self._dequantize, self._look_up = _functions(format)
        self._special = self.threads()[0] is not None or self.zero_bytes > 0

    def fits(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
        """Whether the kernel can read these: plain memory without gaps, and float32 scales."""
        return (
            codes.nbytes == self.codes_bytes
            and codes.is_contiguous()
            and scale.dtype is torch.float32
            and scale.nbytes == self.scale_bytes
            and scale.is_contiguous()
            and (
                self.zero_bytes == 0
                if zero_point is None
                else zero_point.nbytes == self.zero_bytes and zero_point.is_contiguous()
            )
        )

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """float32 [N, Kp] of operands that it `fits`."""
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        self._run(out.data_ptr(), codes, scale, zero_point)
        return out

    def kept(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """The same in memory of this thread, which the next call writes to: for a product that is done by then."""
        found = _memory.views.get(self)
        if found is None:
            rows, columns = self.shape
            if rows * columns > MOST_KEPT:
                return self.dequantize(codes, scale, zero_point)
            found = _memory.view(self)
        values, _, address = found
        self._run(address, codes, scale, zero_point)
        return values

    def kept_transposed(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None
    ) -> Tensor | None:
        """`kept(...)`, viewed as [Kp, N]; None for operands that it doesn't fit.

        Decoding calls this for every layer and token: what it would call stands here once more.
        """
        found = _memory.views.get(self)
        if found is None or self._special or zero_point is not None:
            fits = self.fits(codes, scale, zero_point)
            return self.kept(codes, scale, zero_point).t() if fits else None
        if (
            codes.nbytes != self.codes_bytes
            or scale.nbytes != self.scale_bytes
            or scale.dtype is not _FLOAT32
            or not codes.is_contiguous()
            or not scale.is_contiguous()
        ):
            return None
        _, transposed, address = found
        self._dequantize(self.address, address, codes.data_ptr(), scale.data_ptr(), None, None, 1)
        return transposed

    def look_up(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, index: Tensor
    ) -> Tensor | None:
        """float32 [..., Kp]: the rows of an int64 index [...], contiguous. None where one is not in 0 .. N - 1."""
        shape = (*index.shape, self.shape[1])
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        zero = None if zero_point is None else zero_point.data_ptr()
        addresses = (out.data_ptr(), codes.data_ptr(), scale.data_ptr(), zero, index.data_ptr())
        return out if self._look_up(self.address, *addresses, index.numel()) else None

    def _run(self, out: int, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
        zero = None if zero_point is None else zero_point.data_ptr()
        self._dequantize(
            self.address, out, codes.data_ptr(), scale.data_ptr(), zero, *self.threads()
        )


class _Memory(threading.local):
    """What a thread dequantizes into, product after product, so that it stays in the cache."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.views: dict[Dequantizer, tuple[Tensor, Tensor, int]] = {}
        """A weight's values, these transposed, and their address."""

    def view(self, layout: Dequantizer) -> tuple[Tensor, Tensor, int]:
        rows, columns = layout.shape
        # an inference tensor could not be used outside of inference mode
        with torch.inference_mode(False):
            if self.whole is None or self.whole.numel() < rows * columns:
                self.views.clear()
                self.whole = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
            values = self.whole[: rows * columns].view(rows, columns)
            found = values, values.t(), values.data_ptr()
        if len(self.views) >= 256:  # of models that are gone
            self.views.clear()
        self.views[layout] = found
        return found


_memory = _Memory()


def dequantizer(format: Format, *sizes: int) -> Dequantizer | None:
    """A `Dequantizer`; None, after a warning, where it can't be compiled."""
    try:
        return Dequantizer(format, *sizes)
    except RuntimeError as error:
        warn_not_compiled(error)
        return None


@functools.cache
def _functions(format: Format) -> tuple[Any, Any]:
    source = format.source("dequantize_cpu.cpp", "TO_MEMORY")
    dequantize, look_up = functions(source, "dequantize", "look_up")
    for function in (dequantize, look_up):
        function.argtypes = [*([ctypes.c_void_p] * 6), ctypes.c_int64]
    return dequantize, look_up
