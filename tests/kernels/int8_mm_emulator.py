"""``int8_mm_sm90`` on a CPU, emulated as ``sm90_emulator`` emulates ``weight_mm_large_batch_sm90``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from lowbit_kernels import int8_mm_sm90, nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import DESCRIBED, HEADER, _words, launches_on_cpu

MULTIPLY = """
template <int SUMS> static inline void multiply(int (&sums)[SUMS], uint32 a, uint32 b, int add) {
    multiply_bytes(sums, a, b, add);
}
"""
PRODUCT = """
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        int8_mm(described(m), described(m + 7), described(m + 14), (const float *)a[0], (const float *)a[1],
                (const void *)a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
    });
}
"""
COMBINE = """
extern "C" void emulated(unsigned grid, const uint64 *, const uint64 *a) {
    emulation::launch(grid, 256, 1, [=] {
        combine((const int *)a[0], (unsigned char *)a[1], (const float *)a[2], (const float *)a[3], (const void *)a[4],
                a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
    });
}
"""


def _kernel(
    out: torch.dtype, bias: torch.dtype | None, width: int, footer: str
) -> Callable[..., None]:
    code = int8_mm_sm90.source(out, bias, width)
    folder = Path(int8_mm_sm90.__file__).parent
    names = ("ptx.cuh", "mm_tiles_sm90.cuh", "int8_mm_sm90.cu")
    ptx, tiles, kernel = ((folder / name).read_text() for name in names)
    defines = code[: code.index(ptx)]
    compiled = library(
        "\n".join([defines, HEADER.read_text(), MULTIPLY, tiles, kernel, DESCRIBED, footer])
    )

    def launch(stream: int, grid: int, threads: int, *arguments: int | tuple[int, ...]) -> None:
        maps = [word for one in arguments if isinstance(one, tuple) for word in one]
        rest = [one for one in arguments if not isinstance(one, tuple)]
        compiled.emulated(grid, _words(tuple(maps)), _words(tuple(rest)))

    return launch


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, ``int8_mm_sm90.int8_mm`` takes CPU tensors, as on a GPU of two multiprocessors."""

    def product(out: torch.dtype, bias: torch.dtype | None, width: int, device: int):
        return _kernel(out, bias, width, PRODUCT)

    def combine(out: torch.dtype, bias: torch.dtype | None, device: int):
        return _kernel(out, bias, int8_mm_sm90.WIDTHS[0], COMBINE)

    with (
        launches_on_cpu(int8_mm_sm90),
        mock.patch.object(int8_mm_sm90, "_product", product),
        mock.patch.object(int8_mm_sm90, "_combine", combine),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 2),
    ):
        yield
