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
from torch import Tensor

from lowbit_kernels.runtime import launch_plan
from lowbit_kernels.weight_only import weight_mm_large_batch_sm90
from lowbit_kernels.weight_only.weight_lookup_sm90 import Unpacking
from lowbit_kernels.weight_only.weight_mm_large_batch_sm90 import LargeBatchDivision
from tests.kernels.compiled_on_cpu import library

HEADER = Path(__file__).with_name("sm90_on_cpu.h")
DESCRIBED = """
static TensorMap described(const uint64 *a) {
    return {(const unsigned char *)a[0], (long)a[2], (long)a[3], (long)a[4], (int)a[1], (int)a[5], (int)a[6]};
}
"""
FOOTER = """
static_assert(TILES_AT <= 227 * 1024, "a block's shared memory");
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


SCHEDULE = """
// Writes the row, token, tokens, first chunk and end of each block's tiles, and the row and token from which it stores.
extern "C" int scheduled(int grid, const int *s, int (*tiles)[7]) {
    const Shape shape = {s[0], s[1], s[2], 1, s[3], s[4], s[5], s[6], s[7]};
    int count = 0;
    gridDim.x = grid;
    for (int block = 0; block < grid; ++block) {
        blockIdx.x = block;
        for (Schedule schedule(shape, block % CLUSTER); schedule.take(); ++count) {
            const Corner own = schedule.own();
            const int tile[7] = {schedule.row, schedule.token, schedule.tokens(), schedule.first, schedule.last,
                                 own.row, own.token};
            for (int i = 0; i < 7; ++i) tiles[count][i] = tile[i];
        }
    }
    return count;
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


def _library(code: str, dtype: torch.dtype, more: str) -> ctypes.CDLL:
    """A source of the large-batch kernel, compiled for the CPU. more: the text that comes behind it."""
    folder = Path(weight_mm_large_batch_sm90.__file__).parents[1]
    ptx, words, lookup, tiles, products, kernel = (
        (folder / f).read_text()
        for f in (
            "runtime/ptx.cuh",
            "runtime/load_words.cuh",
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
            words,
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
    return library(source)


def kernel_of(code: str, dtype: torch.dtype, more: str = "") -> Callable[..., None]:
    """The product of a source of the large-batch kernel. more: the text that comes behind it."""
    product_of = _library(code, dtype, more).emulated_product

    def product(stream: int, grid: int, threads: int, *arguments: tuple[int, ...]) -> None:
        maps = [one for one in arguments if isinstance(one, tuple)]
        x = tuple(itertools.chain(*maps[1:]))  # in boxes of one or two sizes
        product_of(grid, _words(maps[0]), _words(x), _words(arguments[len(maps) :]))  # type: ignore[arg-type]

    return product


def schedule_of(
    compiled: LargeBatchDivision,
) -> Callable[[LargeBatchDivision, int, int, int], Tensor]:
    """For a division with the same tiles, and M, N and K: int32 [tiles, 7], what blocks do; see `SCHEDULE`."""
    own = Unpacking("INT4", 4, 128, rounding="large")
    code = weight_mm_large_batch_sm90.source(
        torch.float16, torch.float16, own, compiled[:8], compiled.last_tokens, compiled.joined
    )
    scheduled = _library(code, torch.float16, SCHEDULE).scheduled

    def tiles(division: LargeBatchDivision, m: int, n: int, k: int) -> Tensor:
        rows, columns = -(-n // (division.rows * division.beside)), -(-m // division.tokens)
        last_columns = -(-m // division.last_tokens) if division.last_tokens else 0
        sizes = (m, n, -(-k // division.chunk), rows, columns, weight_mm_large_batch_sm90.BAND)
        sizes = (*sizes, division.full_rows, last_columns)
        most = 2 * division.cluster * rows * max(columns, last_columns)
        found = torch.empty(most, 7, dtype=torch.int32)
        count = scheduled(
            division.clusters * division.cluster,
            (ctypes.c_int * len(sizes))(*sizes),
            ctypes.c_void_p(found.data_ptr()),
        )
        return found[:count]

    return tiles


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
