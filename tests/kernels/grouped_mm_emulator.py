"""``grouped_mm_sm90`` on a CPU, emulated as `scaled_mm_emulator` emulates ``scaled_mm_sm90``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from lowbit_kernels.matmul import grouped_mm_sm90
from lowbit_kernels.matmul.mm_tiles_sm90 import FORMATS, Formats
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.emulator import filled_memory
from tests.kernels.scaled_mm_emulator import MULTIPLY
from tests.kernels.sm90_emulator import DESCRIBED, HEADER, launches_on_cpu, launching

FOOTER = """
extern "C" void emulated(unsigned grid, const uint64 *m, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        grouped_mm(described(m), described(m + 7), described(m + 14), (unsigned char *)a[0], (const float *)a[1],
                   (const float *)a[2], (const int *)a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    });
}
"""


def _kernel(
    out: torch.dtype,
    formats: Formats,
    ragged: bool,
    across: int,
    blocks: bool,
    device: torch.device,
) -> Callable[..., None]:
    code = grouped_mm_sm90.source(out, formats, ragged, across, blocks)
    folder = Path(grouped_mm_sm90.__file__).parents[1]
    names = ("runtime/ptx.cuh", "matmul/mm_tiles_sm90.cuh", "matmul/grouped_mm_sm90.cu")
    ptx, tiles, kernel = ((folder / name).read_text() for name in names)
    defines = code[: code.index(ptx)]
    multiply = MULTIPLY.format(*(FORMATS[own] for own in formats))
    parts = [defines, HEADER.read_text(), multiply, tiles, kernel, DESCRIBED, FOOTER]
    compiled = library("\n".join(parts))
    return launching(compiled.emulated)


@contextlib.contextmanager
def emulated(multiprocessors: int = 4) -> Iterator[None]:
    """Inside, ``grouped_mm_sm90.grouped_mm`` takes CPU tensors, as on a GPU of so many multiprocessors."""
    with (
        launches_on_cpu(launch_plan),
        filled_memory(),
        mock.patch.object(launcher, "take_over", lambda *_: None),
        mock.patch.object(grouped_mm_sm90, "_kernel", _kernel),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: multiprocessors),
    ):
        grouped_mm_sm90.planned.cache_clear()  # plans hold kernels
        try:
            yield
        finally:
            grouped_mm_sm90.planned.cache_clear()
