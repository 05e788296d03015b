"""CUDA sources of ``lowbit_kernels`` on a CPU: ``fused_step``, and ``quantize_rowcol``, ``quantize_grouped``,
``quantize_blocks`` and ``quantize_rows`` for sm_90.

The machine's C++ compiler compiles them; ``cuda_on_cpu.h`` emulates the GPU's instructions. The emulation does not show
the rounding of a GPU's approximate division and square root, races between warps, or speed. Tests marked ``gpu`` do.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from lowbit_kernels.elementwise.fused_step import StepKernel, StepVariant
from lowbit_kernels.quantize import (
    quantize_blocks_sm90,
    quantize_grouped_sm90,
    quantize_rowcol_sm90,
    quantize_rows_sm90,
)
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc
from tests.kernels.compiled_on_cpu import library

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
FOOTER = """
extern "C" void emulated_prepare(unsigned grid, unsigned threads, const uint64_t *a) {
    emulation::launch(grid, threads, [=] {
        prepare((const Tensor *)a[0], (const Group *)a[1], (Scalars *)a[2], a[3], (const float *)a[4]);
    });
}
extern "C" void emulated_step(unsigned grid, unsigned threads, const uint64_t *a) {
    emulation::launch(grid, threads, [=] {
        step((const Tensor *)a[0], (const Scalars *)a[1], (const int *)a[2], (const uint32 *)a[3], a[4],
             (const float *)a[5]);
    });
}
"""


class EmulatedStep(StepKernel):
    """`StepKernel` for tensors on the CPU."""

    def __init__(self, variant: StepVariant, device: torch.device) -> None:
        assert device.type == "cpu"
        self.variant, self.device = variant, device
        source = variant.source(primitives=HEADER.read_text()) + FOOTER
        compiled = library(source)
        self._prepare = self._call(compiled.emulated_prepare)
        step = self._call(compiled.emulated_step)
        self._step = lambda shared: step
        self._multiprocessors = 2
        self._tables = torch.from_numpy(variant.table_words().view("int32"))

    def _call(self, function):
        def call(stream: int, grid: int, threads: int, *arguments: int) -> None:
            function(grid, threads, (ctypes.c_uint64 * len(arguments))(*arguments))

        return call

    def _stream(self) -> int:
        return 0


QUANTIZE_FOOTER = """
extern "C" void emulated(unsigned grid, unsigned threads, const uint64_t *a) {
    emulation::launch(grid, threads, [=] {
        NAME((const unsigned char *)a[0], a[1], (unsigned char *)a[2], (float *)a[3], (unsigned char *)a[4],
             (float *)a[5], (uint32 *)a[6], (uint32 *)a[7], (long long *)a[8],
             (const float *)a[9], a[10], a[11]);
    });
}
"""


_MORE = {
    "quantize_grouped": ", (const int *)a[12], a[13], a[14], a[15], (uint32 *)a[16]",
    "transpose_weights": ", a[12]",
    "short_rows": "",
}
GROUPED_FOOTERS = {
    name: QUANTIZE_FOOTER.replace("NAME", name).replace("a[11]);", f"a[11]{more});")
    for name, more in _MORE.items()
}


BLOCKS_FOOTER = """
extern "C" void emulated(unsigned grid, unsigned threads, const uint64_t *a) {
    emulation::launch(grid, threads, [=] {
        quantize_blocks((const unsigned char *)a[0], a[1], (unsigned char *)a[2], (float *)a[3], (unsigned char *)a[4],
                        (float *)a[5], a[6], a[7], (const int *)a[8], a[9], a[10]);
    });
}
"""
TOKENS_FOOTER = """
extern "C" void emulated(unsigned grid, unsigned threads, const uint64_t *a) {
    emulation::launch(grid, threads, [=] {
        quantize_rows((const unsigned char *)a[0], a[1], (unsigned char *)a[2], (float *)a[3], a[4]);
    });
}
"""
RANGES_FOOTER = """
extern "C" void emulated(unsigned grid, unsigned threads, const uint64_t *a) {
    emulation::launch(grid, threads, [=] {
        quantize_rows_and_ranges((const unsigned char *)a[0], a[1], (unsigned char *)a[2], (float *)a[3], a[4], a[5],
                                 (const unsigned char *)a[6], a[7], (const unsigned char *)a[8], (unsigned char *)a[9],
                                 a[10], a[11]);
    });
}
"""


def _emulated(source: str):
    function = library(source).emulated

    def call(stream: int, grid: int, threads: int, *values: int) -> None:
        function(grid, threads, (ctypes.c_uint64 * len(values))(*values))

    return call


@contextlib.contextmanager
def _on_cpu(module, kernel) -> Iterator[None]:
    with (
        mock.patch.object(module, "_kernel", kernel),
        mock.patch.object(torch.cuda, "device_of", lambda x: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=0)),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


@contextlib.contextmanager
def rows_quantization() -> Iterator[None]:
    """Inside, ``quantize_rows_sm90`` takes CPU tensors."""

    def kernel(variant: quantize_rows_sm90.RowsVariant, device, name: str = "quantize_rows"):
        source = quantize_rows_sm90.source(variant, primitives=(HEADER.read_text(),))
        footer = TOKENS_FOOTER if name == "quantize_rows" else RANGES_FOOTER
        return _emulated("typedef unsigned int uint32;\n" + source + footer)

    with _plans_on_cpu(quantize_rows_sm90, kernel):
        yield


@contextlib.contextmanager
def _plans_on_cpu(module: ModuleType, kernel: Callable) -> Iterator[None]:
    """Inside, plans of `module` run on CPU tensors, in memory that is not zero."""
    with (
        _on_cpu(module, kernel),
        mock.patch.object(launcher, "take_over", lambda *_: None),
        filled_memory(),
    ):
        planned = [
            function for name, function in vars(module).items() if name.startswith("planned")
        ]
        for function in planned:
            function.cache_clear()  # plans hold kernels
        try:
            yield
        finally:
            for function in planned:
                function.cache_clear()


@contextlib.contextmanager
def quantization() -> Iterator[None]:
    """Inside, ``quantize_rowcol_sm90`` takes CPU tensors."""

    def kernel(variant: quantize_rowcol_sm90.RowcolVariant, name: str, device: torch.device):
        source = quantize_rowcol_sm90.source(variant, primitives=HEADER.read_text())
        more = "" if name == "rows" else ", a[12], a[13]"
        footer = QUANTIZE_FOOTER.replace("NAME", name).replace("a[11]);", f"a[11]{more});")
        return _emulated(source + footer)

    with _plans_on_cpu(quantize_rowcol_sm90, kernel):
        yield


def quantize_rowcol(*arguments):
    """``quantize_rowcol_sm90.quantize`` on CPU tensors."""
    with quantization():
        return quantize_rowcol_sm90.quantize(*arguments)


@contextlib.contextmanager
def grouped_quantization(lag: int) -> Iterator[None]:
    """Inside, ``quantize_grouped_sm90`` takes CPU tensors, with this distance of its two passes. One block takes all
    items in their order. It traps where an item does not come after those that it needs."""

    def kernel(name: str, variant: quantize_grouped_sm90.GroupedVariant, device: torch.device):
        variant = replace(variant, lag=lag)
        source = quantize_grouped_sm90.source(variant, primitives=HEADER.read_text())
        return _emulated(source + GROUPED_FOOTERS[name])

    with (
        _plans_on_cpu(quantize_grouped_sm90, kernel),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 1),
    ):
        yield


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, plans are made of kernels that are not compiled and cannot run."""
    with (
        mock.patch("tests.kernels.emulator.library"),
        mock.patch("tests.kernels.scaled_mm_emulator.library"),
        quantization(),
    ):
        yield


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Inside, launch plans run in memory that is not zero, so that a result which no kernel writes is seen."""
    allocated = launch_plan._allocated

    def filled(buffer, device):
        made = allocated(buffer, device)
        if buffer.fill is not None:
            return made
        return made.view(torch.uint8).fill_(0xAA).view(buffer.dtype)

    with mock.patch.object(launch_plan, "_allocated", filled):
        yield


def quantize_blocks(*arguments):
    """``quantize_blocks_sm90.quantize`` on CPU tensors."""

    def kernel(variant: quantize_blocks_sm90.BlocksVariant, device: torch.device):
        source = quantize_blocks_sm90.source(variant, primitives=HEADER.read_text())
        return _emulated(source + BLOCKS_FOOTER)

    with _plans_on_cpu(quantize_blocks_sm90, kernel):
        return quantize_blocks_sm90.quantize(*arguments)
