"""``scaled_mm_sm90`` on a CPU, emulated as ``sm90_emulator`` emulates ``weight_mm_large_batch_sm90``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from lowbit_kernels.matmul import mm_tiles_sm90, scaled_mm_sm90
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.emulator import filled_memory
from tests.kernels.sm90_emulator import DESCRIBED, HEADER, launches_on_cpu, launching

MULTIPLY = """
template <int SUMS> static inline void multiply(SUM (&sums)[SUMS], uint32 a, uint32 b, int add) {{
    multiply_bytes(sums, a, b, add, from_{}, from_{});
}}
"""
PRODUCT = """
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        scaled_mm(described(m), described(m + 7), described(m + 14), (const float *)a[0], (const float *)a[1],
                (const void *)a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
    });
}
"""
COMBINE = """
extern "C" void emulated(unsigned grid, const uint64 *, const uint64 *a) {
    emulation::launch(grid, 256, 1, [=] {
        combine((const SUM *)a[0], (unsigned char *)a[1], (const float *)a[2], (const float *)a[3], (const void *)a[4],
                a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
    });
}
"""


def _kernel(
    formats: scaled_mm_sm90.Formats,
    out: torch.dtype,
    bias: torch.dtype | None,
    width: int,
    footer: str,
) -> Callable[..., None]:
    code = scaled_mm_sm90.source(formats, out, bias, width)
    multiply = MULTIPLY.format(*(mm_tiles_sm90.FORMATS[own] for own in formats))
    folder = Path(scaled_mm_sm90.__file__).parents[1]
    names = ("runtime/ptx.cuh", "matmul/mm_tiles_sm90.cuh", "matmul/scaled_mm_sm90.cu")
    ptx, tiles, kernel = ((folder / f).read_text() for f in names)
    defines = code[: code.index(ptx)]
    compiled = library(
        "\n".join([defines, HEADER.read_text(), multiply, tiles, kernel, DESCRIBED, footer])
    )
    return launching(compiled.emulated)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, ``scaled_mm_sm90.multiply`` takes CPU tensors, as on a GPU of two multiprocessors."""

    def product(formats, out, bias, width, device):
        return _kernel(formats, out, bias, width, PRODUCT)

    def combine(formats, out, bias, device):
        return _kernel(formats, out, bias, scaled_mm_sm90.WIDTHS[0], COMBINE)

    with (
        launches_on_cpu(launch_plan),
        filled_memory(),
        mock.patch.object(launcher, "take_over", lambda *_: None),
        mock.patch.object(scaled_mm_sm90, "_product", product),
        mock.patch.object(scaled_mm_sm90, "_combine", combine),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 2),
    ):
        scaled_mm_sm90.planned.cache_clear()  # plans hold kernels
        try:
            yield
        finally:
            scaled_mm_sm90.planned.cache_clear()
