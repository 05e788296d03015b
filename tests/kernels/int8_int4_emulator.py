"""``int8_int4_mm_sm90`` on a CPU, emulated as ``sm90_emulator`` emulates ``weight_mm_large_batch_sm90``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lowbit_kernels.matmul import int8_int4_mm_sm90
from lowbit_kernels.runtime import nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import DESCRIBED, HEADER, launches_on_cpu, launching

FOOTER = """
template <int SUMS> static inline void multiply(int (&sums)[SUMS], const uint32 *a, uint64 b, int add) {
    multiply_integers(sums, a, b, add);
}
"""
PRODUCT = """
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        int8_int4_mm(described(m), described(m + 7), described(m + 14), (const void *)a[0], (const signed char *)a[1],
                     (const void *)a[2], (const float *)a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]);
    });
}
"""


def _kernel(*macros: object) -> Callable[..., None]:
    code = int8_int4_mm_sm90.source(*macros[:-1])  # type: ignore[arg-type]
    folder = Path(int8_int4_mm_sm90.__file__).parents[1]
    names = "runtime/ptx.cuh", "weight_only/int4_as_int8.cuh", "matmul/int8_int4_mm_sm90.cu"
    ptx, unpacking, kernel = ((folder / f).read_text() for f in names)
    defines = code[: code.index(ptx)]
    parts = [defines, HEADER.read_text(), FOOTER, unpacking, kernel, DESCRIBED, PRODUCT]
    compiled = library("\n".join(parts))
    return launching(compiled.emulated)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `Int8Int4Product` takes CPU tensors, as on a GPU of two multiprocessors."""
    with (
        launches_on_cpu(int8_int4_mm_sm90),
        mock.patch.object(int8_int4_mm_sm90, "_kernel", _kernel),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 2),
    ):
        yield
