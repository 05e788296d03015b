"""Weights of 1 to 8 bits, integers or float8, to float32 on a CPU: launches ``dequantize_cpu.cpp``.

    x[n, k] = (code[n, k] - zero_point) * scale
    x[n, k] = (code[n, k] - mid) * scale + zero_point       if zero points are values

    codes       uint8 [N, Kp * bits / 8], a little-endian bit stream of codes minus the smallest code;
                8 bits: int8, uint8 or float8 [N, Kp]
    scale       float32 [N / scale_rows, Kp / group_size]
    zero_point  None; int8 or uint8, on the grid of the codes; or float32. It has the shape of scale
    x           float32 [N, Kp]

The values equal those of PyTorch's operations to the bit. PyTorch needs about 25 operations of a few microseconds each:
int4 codes of 128 x 128 take 66 us, and 2.9 us in this kernel (one core of an EPYC with AVX-512). A variant for each
format is compiled at first use, in a tenth of a second, once a machine (`host_compiler`).
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
MOST_KEPT = 2**22
"""Elements of the buffer that a thread keeps: 16 MB."""


class Dequantizer(Layout):
    """The kernel for weights of one format and layout. The arguments are those of `Layout`.

    Raises:
        RuntimeError: the kernel cannot be compiled (see `codes_cpu.functions`).
    """

    def __init__(self, format: Format, *sizes: int) -> None:
        super().__init__(format, *sizes)
        self._dequantize, self._look_up = _functions(format)
        self._special = self.threads()[0] is not None or self.zero_bytes > 0

    def fits(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
        """Whether the kernel can read these: contiguous memory of the right sizes, and float32 scales."""
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
        """float32 [N, Kp]; the arguments must fit (`fits`)."""
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        self._run(out.data_ptr(), codes, scale, zero_point)
        return out

    def kept(self, codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """The same in a buffer of this thread, which the next call overwrites; use it in a product before that."""
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
        """`kept(...)`, viewed as [Kp, N]; None if the arguments do not fit.

        Decoding calls this method for every layer and token, so it inlines the functions that it would call.
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
        """float32 [..., Kp]: the rows of a contiguous int64 index [...]; None if an index is not in 0 .. N - 1."""
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
    """The buffer that a thread dequantizes into. One buffer for all products stays in the cache."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.views: dict[Dequantizer, tuple[Tensor, Tensor, int]] = {}
        """For each weight: its values, the transposed view, and their address."""

    def view(self, layout: Dequantizer) -> tuple[Tensor, Tensor, int]:
        rows, columns = layout.shape
        # An inference tensor could not be used outside of inference mode.
        with torch.inference_mode(False):
            if self.whole is None or self.whole.numel() < rows * columns:
                self.views.clear()
                self.whole = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
            values = self.whole[: rows * columns].view(rows, columns)
            found = values, values.t(), values.data_ptr()
        if len(self.views) >= 256:  # most belong to models that are gone
            self.views.clear()
        self.views[layout] = found
        return found


_memory = _Memory()


def dequantizer(format: Format, *sizes: int) -> Dequantizer | None:
    """A `Dequantizer`; None, after a warning, if it cannot be compiled."""
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
