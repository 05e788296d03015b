"""``decode_attention_sm90`` on a CPU, in the emulator of ``sm90_emulator``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from lowbit_kernels.decoding import decode_attention_sm90
from lowbit_kernels.runtime import nvrtc
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import HEADER, _words

FOOTER = """
static float number(uint64 word) { return bits_float((uint32)word); }
extern "C" int shared_size() { return sizeof(Shared); }
extern "C" void emulated_attend(unsigned grid, const uint64 *a) {
    typedef const unsigned short *Halves;
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        attend((Halves)a[0], (Halves)a[1], (Halves)a[2], (Halves)a[3], (Halves)a[4], (Halves)a[5],
               (unsigned short *)a[6], (unsigned short *)a[7], (const long long *)a[8], (const long long *)a[9],
               (const float *)a[10], (unsigned short *)a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19],
               a[20], number(a[21]), number(a[22]), number(a[23]));
    });
}
"""


def _kernel(
    variant: decode_attention_sm90.DecodeAttentionVariant, *_: object
) -> Callable[..., None]:
    code = decode_attention_sm90.source(variant)
    folder = Path(decode_attention_sm90.__file__).parents[1]
    ptx, kernel = (
        (folder / f).read_text() for f in ("runtime/ptx.cuh", "decoding/decode_attention_sm90.cu")
    )
    compiled = library("\n".join([code[: code.index(ptx)], HEADER.read_text(), kernel, FOOTER]))
    size = compiled.shared_size() if hasattr(compiled, "shared_size") else None
    assert size is None or size <= decode_attention_sm90.shared_bytes(variant)

    def attend(stream: int, grid: int, threads: int, *arguments: int) -> None:
        compiled.emulated_attend(grid, _words(tuple(a % 2**64 for a in arguments)))

    return attend


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `attend` takes CPU tensors."""
    with (
        mock.patch.object(torch.cuda, "device_of", lambda x: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=0)),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(decode_attention_sm90, "_kernel", _kernel),
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
    ):
        yield
