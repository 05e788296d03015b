"""``block_mm_sm90`` on a CPU, emulated as ``sm90_emulator`` emulates ``weight_mm_large_batch_sm90``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from lowbit_kernels import block_mm_sm90, nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import HEADER, _words, launches_on_cpu

MULTIPLY = """
template <int SUMS> static inline void multiply(float (&sums)[SUMS], uint32 a, uint32 b, int add) {
    multiply_e4m3(sums, a, b, add);
}
"""
PRODUCT = """
// Elements of 8 bytes are pairs of scales, which are not swizzled.
static TensorMap described(const uint64 *a) {
    return {(const unsigned char *)a[0], (long)a[2], (long)a[3], (long)a[4], (int)a[1], (int)a[5], (int)a[6], a[1] == 8};
}
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        block_mm(described(m), described(m + 7), described(m + 14), described(m + 21), described(m + 28),
                 (const float *)a[0], (const void *)a[1], a[2], a[3], a[4], a[5]);
    });
}
"""


def _kernel(
    out: torch.dtype, bias: torch.dtype | None, column_scales: bool, waves: int, device: int
) -> Callable[..., None]:
    code = block_mm_sm90.source(out, bias, column_scales, waves)
    folder = Path(block_mm_sm90.__file__).parent
    ptx, kernel = ((folder / f).read_text() for f in ("ptx.cuh", "block_mm_sm90.cu"))
    defines = code[: code.index(ptx)]
    compiled = library("\n".join([defines, HEADER.read_text(), MULTIPLY, kernel, PRODUCT]))

    def launch(stream: int, grid: int, threads: int, *arguments: int | tuple[int, ...]) -> None:
        maps = [word for one in arguments if isinstance(one, tuple) for word in one]
        rest = [one for one in arguments if not isinstance(one, tuple)]
        compiled.emulated(grid, _words(tuple(maps)), _words(tuple(rest)))

    return launch


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, ``block_mm_sm90.block_mm`` takes CPU tensors, as on a GPU of two multiprocessors."""
    with (
        launches_on_cpu(block_mm_sm90),
        mock.patch.object(block_mm_sm90, "_kernel", _kernel),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 2),
    ):
        yield
