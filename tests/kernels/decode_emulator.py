"""``weight_mm_decode_sm90`` on a CPU, in the emulator of ``sm90_emulator``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lowbit_kernels.weight_only import weight_mm_decode_sm90
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import HEADER, _words, launches_on_cpu

FOOTER = """
static TensorMap described(const uint64 *m) {
    return {(const unsigned char *)m[0], (long)m[2], (long)m[3], (long)m[4], (int)m[1], (int)m[5], (int)m[6], true};
}
extern "C" void emulated_product(unsigned grid, const uint64 *codes, const uint64 *x, const uint64 *scale,
                                 const uint64 *a) {
    emulation::launch(grid, THREADS, SPLIT, [=] {
        decode_mm(described(codes), described(x), described(scale), (const unsigned short *)a[0],
                      (const unsigned char *)a[1], (const unsigned char *)a[2], (const unsigned char *)a[3],
                      (const unsigned short *)a[4], (const unsigned short *)a[5], (const float *)a[6],
                      (const float *)a[7], (unsigned short *)a[8], a[9],
                      a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18],
                      bits_float((uint32)a[19]), a[20]);
    });
}
"""


def _kernel(variant: weight_mm_decode_sm90.DecodeVariant, *_: object) -> Callable[..., None]:
    code = weight_mm_decode_sm90.source(variant)
    folder = Path(weight_mm_decode_sm90.__file__).parents[1]
    files = ("runtime/ptx.cuh", *weight_mm_decode_sm90.PARTS)
    ptx, *parts = ((folder / file).read_text() for file in files)
    parts = [code[: code.index(ptx)], HEADER.read_text(), *parts, FOOTER]
    compiled = library("\n".join(parts))

    def product(stream: int, grid: int, threads: int, *arguments: tuple[int, ...]) -> None:
        codes, x, scale, *rest = arguments
        maps = map(_words, (codes, x, scale))
        compiled.emulated_product(grid, *maps, _words(tuple(rest)))  # type: ignore[arg-type]

    return product


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `DecodeProduct` takes CPU tensors."""
    with (
        launches_on_cpu(weight_mm_decode_sm90),
        mock.patch.object(weight_mm_decode_sm90, "_kernel", _kernel),
    ):
        yield
