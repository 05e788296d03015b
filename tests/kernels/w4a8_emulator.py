"""``w4a8_mm_sm90`` on a CPU, emulated as ``sm90_emulator`` emulates ``weight_mm_large_batch_sm90``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lowbit_kernels.matmul import w4a8_mm_sm90
from lowbit_kernels.runtime import nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import DESCRIBED, HEADER, launches_on_cpu, launching

FOOTER = """
template <int SUMS> static inline void multiply({0} (&sums)[SUMS], const uint32 *a, uint64 b, int add) {{
    multiply_words(sums, a, b, add, {1});
}}
"""
FOOTERS = {"INT4": FOOTER.format("int", "from_s8"), "E2M1": FOOTER.format("float", "from_e4m3")}
PRODUCT = """
extern "C" int shared_size() { return sizeof(Shared); }
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        w4a8_mm(described(m), described(m + 7), described(m + 14), described(m + 21), described(m + 28),
                (const void *)a[0], (const signed char *)a[1], (const void *)a[2], (const float *)a[3], a[4], a[5],
                a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
    });
}
"""


def _kernel(codes: str, *macros: object) -> Callable[..., None]:
    code = w4a8_mm_sm90.source(codes, *macros[:-1])  # type: ignore[arg-type]
    folder = Path(w4a8_mm_sm90.__file__).parents[1]
    _, *consumer = w4a8_mm_sm90.CONSUMERS[codes]
    tiles = "runtime/load_words.cuh", "matmul/w4a8_tiles_sm90.cuh"
    files = ("runtime/ptx.cuh", *tiles, *consumer, "matmul/w4a8_mm_sm90.cu")
    ptx, *kernel = ((folder / f).read_text() for f in files)
    defines = code[: code.index(ptx)]
    parts = [defines, HEADER.read_text(), FOOTERS[codes], *kernel, DESCRIBED, PRODUCT]
    compiled = library("\n".join(parts))
    *_, division, _ = macros
    assert compiled.shared_size() <= division.stages()[1]  # type: ignore[attr-defined]
    return launching(compiled.emulated)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `W4A8Product` takes CPU tensors, as on a GPU of two multiprocessors."""
    with (
        launches_on_cpu(w4a8_mm_sm90),
        mock.patch.object(w4a8_mm_sm90, "_kernel", _kernel),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 2),
    ):
        yield
