"""``weight_mm_large_batch_sm90`` on a CPU, compiled by the host compiler; ``sm90_on_cpu.h`` emulates the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from lowbit_kernels.runtime import launch_plan
from lowbit_kernels.weight_only import weight_mm_large_batch_sm90
from tests.kernels.compiled_on_cpu import library

HEADER = Path(__file__).with_name("sm90_on_cpu.h")
DESCRIBED = """
static TensorMap described(const uint64 *a) {
    return {(const unsigned char *)a[0], (long)a[2], (long)a[3], (long)a[4], (int)a[1], (int)a[5], (int)a[6]};
}
"""
FOOTER = """
extern "C" void emulated_product(unsigned grid, const uint64 *codes, const uint64 *x, const uint64 *a) {
    emulation::launch(grid, THREADS, CLUSTER, [=] {
        weight_mm(described(codes), described(x),
#if LAST_TOKENS
                  described(x + 7),
#endif
                  (const void *)a[0], (const signed char *)a[1], (const void *)a[2],
                  (const void *)a[3], (const float *)a[4], (const float *)a[5], (unsigned short *)a[6], a[7], a[8],
                  a[9], a[10], a[11], a[12], a[13], a[14]
#if LAST_TOKENS
                  , a[15], a[16]
#elif EXPERTS
                  , (const int *)a[15], (const int *)a[16]
#endif
        );
    });
}
"""


def _words(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def launching(emulated: Callable[..., None]) -> Callable[..., None]:
    """A launch of `emulated`, which takes the grid, the words of all tensor maps, and the other arguments."""

    def launch(stream: int, grid: int, threads: int, *arguments: int | tuple[int, ...]) -> None:
        maps = [word for one in arguments if isinstance(one, tuple) for word in one]
        rest = [one for one in arguments if not isinstance(one, tuple)]
        emulated(grid, _words(tuple(maps)), _words(tuple(rest)))

    return launch


class _Map(tuple[int, ...]):
    def getPtr(self) -> tuple[int, ...]:
        return self


def _kernel(dtype: torch.dtype, *macros: object) -> Callable[..., None]:
    return kernel_of(weight_mm_large_batch_sm90.source(dtype, *macros[:-1]), dtype)  # type: ignore[arg-type]


def kernel_of(code: str, dtype: torch.dtype, more: str = "") -> Callable[..., None]:
    """The product of a source of the large-batch kernel. more: the text that comes behind it."""
    folder = Path(weight_mm_large_batch_sm90.__file__).parents[1]
    ptx, lookup, tiles, products, kernel = (
        (folder / f).read_text()
        for f in (
            "runtime/ptx.cuh",
            "weight_only/weight_lookup_sm90.cuh",
            "weight_only/weight_mm_large_batch_tiles_sm90.cuh",
            "weight_only/weight_mm_large_batch_products_sm90.cuh",
            "weight_only/weight_mm_large_batch_sm90.cu",
        )
    )
    half = "true" if dtype == torch.float16 else "false"
    multiply = f"""
template <int SUMS> static inline void multiply(float (&sums)[SUMS], const uint32 *a, uint64 b, int add) {{
    multiply_fragments<{half}>(sums, a, b, add);
}}
"""
    defines = code[: code.index(ptx)]
    source = "\n".join(
        [
            defines,
            HEADER.read_text(),
            lookup,
            tiles,
            multiply,
            products,
            kernel,
            more,
            DESCRIBED,
            FOOTER,
        ]
    )
    product_of = library(source).emulated_product

    def product(stream: int, grid: int, threads: int, *arguments: tuple[int, ...]) -> None:
        maps = [one for one in arguments if isinstance(one, tuple)]
        x = tuple(itertools.chain(*maps[1:]))  # in boxes of one or two sizes
        product_of(grid, _words(maps[0]), _words(x), _words(arguments[len(maps) :]))  # type: ignore[arg-type]

    return product


@contextlib.contextmanager
def launches_on_cpu(module: ModuleType) -> Iterator[None]:
    """Inside, `module` and launch plans pass tensor maps to the emulator and need no GPU."""
    with (
        mock.patch.object(module, "tensor_map", lambda *a: _Map(a), create=True),
        mock.patch.object(launch_plan, "tensor_map", lambda *a: _Map(a)),
        mock.patch.object(torch.cuda, "device_of", lambda x: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda: mock.Mock(cuda_stream=0)),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `LargeBatchProduct` takes CPU tensors."""
    with (
        launches_on_cpu(weight_mm_large_batch_sm90),
        mock.patch.object(weight_mm_large_batch_sm90, "_kernel", _kernel),
    ):
        yield
