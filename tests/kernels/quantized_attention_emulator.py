"""``quantized_attention_sm90`` on a CPU, in the emulator of ``sm90_emulator``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lowbit_kernels.decoding import quantized_attention_sm90
from lowbit_kernels.runtime import nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import HEADER, _words, launches_on_cpu

FOOTER = """
static TensorMap described(const uint64 *m) {
    return {(const unsigned char *)m[0], (long)m[2], (long)m[3], (long)m[4], (int)m[1], (int)m[5], (int)m[6],
            m[1] == 8};
}
static float number(uint64 word) { return bits_float((uint32)word); }
extern "C" void emulated_attend(unsigned grid, const uint64 *keys, const uint64 *values, const uint64 *a) {
    emulation::launch(grid, THREADS, 1, [=] {
        attend(described(keys), described(values), (const unsigned short *)a[0], a[1], a[2],
               (const unsigned char *)a[3], (const unsigned char *)a[4], (const unsigned char *)a[5],
               (const long long *)a[6], a[7], (const unsigned char *)a[8], a[9], (const long long *)a[10],
               (const float *)a[11], (unsigned short *)a[12], (float *)a[13], (float *)a[14], a[15], a[16], a[17],
               a[18], a[19], a[20], a[21], number(a[22]), number(a[23]));
    });
}
extern "C" void emulated_combine(unsigned grid, unsigned threads, const uint64 *a) {
    emulation::launch(grid, threads, 1, [=] {
        combine((const float *)a[0], (const float *)a[1], (const float *)a[2], (unsigned short *)a[3],
                a[4], a[5], a[6]);
    });
}
"""


def _kernels(
    variant: quantized_attention_sm90.AttentionVariant, *_: object
) -> tuple[Callable[..., None], Callable[..., None]]:
    code = quantized_attention_sm90.source(variant)
    folder = Path(quantized_attention_sm90.__file__).parents[1]
    ptx, kernel = (
        (folder / f).read_text()
        for f in ("runtime/ptx.cuh", "decoding/quantized_attention_sm90.cu")
    )
    compiled = library("\n".join([code[: code.index(ptx)], HEADER.read_text(), kernel, FOOTER]))

    def attend(stream: int, grid: int, threads: int, *arguments: tuple[int, ...]) -> None:
        keys, values, *rest = arguments
        compiled.emulated_attend(grid, _words(keys), _words(values), _words(tuple(rest)))  # type: ignore[arg-type]

    def combine(stream: int, grid: int, threads: int, *arguments: int) -> None:
        compiled.emulated_combine(grid, threads, _words(arguments))

    return attend, combine


@contextlib.contextmanager
def emulated(multiprocessors: int = 1) -> Iterator[None]:
    """Inside, `attend` takes CPU tensors."""
    with (
        launches_on_cpu(quantized_attention_sm90),
        mock.patch.object(quantized_attention_sm90, "_kernels", _kernels),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: multiprocessors),
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
    ):
        yield
