"""``symmetric_mm_sm90`` on a CPU, emulated as `scaled_mm_emulator` emulates ``scaled_mm_sm90``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lowbit_kernels.matmul import symmetric_mm_sm90
from lowbit_kernels.runtime import nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import DESCRIBED, HEADER, launches_on_cpu, launching

FOOTER = """
extern "C" int shared_size() { return sizeof(Shared); }
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        symmetric_mm(described(m), described(m + 7), described(m + 14), described(m + 21), a[0], a[1], a[2], a[3],
                     bits_float(a[4]), bits_float(a[5]), bits_float(a[6]));
    });
}
"""
MULTIPLY = """
template <int SUMS> static inline void multiply(float (&sums)[SUMS], uint32 a, uint32 b, int add) {
    multiply_halves(sums, a, b, add);
}
"""


@functools.cache
def _kernel(adds: bool, device: int) -> Callable[..., None]:
    code = symmetric_mm_sm90.source(adds)
    folder = Path(symmetric_mm_sm90.__file__).parents[1]
    ptx, kernel = (
        (folder / name).read_text() for name in ("runtime/ptx.cuh", "matmul/symmetric_mm_sm90.cu")
    )
    parts = [code[: code.index(ptx)], HEADER.read_text(), MULTIPLY, kernel, DESCRIBED, FOOTER]
    compiled = library("\n".join(parts))
    assert compiled.shared_size() <= symmetric_mm_sm90.SHARED
    return launching(compiled.emulated)


@contextlib.contextmanager
def emulated(multiprocessors: int = 2) -> Iterator[None]:
    """Inside, `symmetric_mm_sm90.symmetric_mm` takes CPU tensors, as on a GPU of so many multiprocessors."""
    with (
        launches_on_cpu(symmetric_mm_sm90),
        mock.patch.object(symmetric_mm_sm90, "_kernel", _kernel),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: multiprocessors),
    ):
        yield
