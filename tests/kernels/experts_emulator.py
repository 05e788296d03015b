"""``weight_mm_experts_sm90`` and its sibling for many tokens on a CPU, in the emulator of ``sm90_emulator``."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch
from lowbit_kernels.weight_only import weight_mm_experts_large_sm90, weight_mm_experts_sm90
from tests.kernels.compiled_on_cpu import library
from tests.kernels.sm90_emulator import HEADER, _words, kernel_of, launches_on_cpu

FOOTER = """
extern "C" void emulated_product(unsigned grid, const uint64 *a) {
    emulation::launch(grid, THREADS, 1, [=] {
        expert_mm((const unsigned short *)a[0], (const unsigned char *)a[1], (const unsigned char *)a[2],
                  (const unsigned char *)a[3], (const unsigned short *)a[4], (const float *)a[5],
                  (const long long *)a[6], (unsigned short *)a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
                  a[16], a[17]);
    });
}
"""


def _kernel(variant: weight_mm_experts_sm90.ExpertVariant, *_: object) -> Callable[..., None]:
    code = weight_mm_experts_sm90.source(variant)
    folder = Path(weight_mm_experts_sm90.__file__).parents[1]
    ptx, codes, kernel = (
        (folder / f).read_text()
        for f in (
            "runtime/ptx.cuh",
            "weight_only/weight_codes_sm90.cuh",
            "weight_only/weight_mm_experts_sm90.cu",
        )
    )
    parts = [code[: code.index(ptx)], HEADER.read_text(), codes, kernel, FOOTER]
    compiled = library("\n".join(parts))

    def product(stream: int, grid: int, threads: int, *arguments: int) -> None:
        compiled.emulated_product(grid, _words(arguments))

    return product


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Inside, `ExpertProduct` takes CPU tensors."""
    with (
        launches_on_cpu(weight_mm_experts_sm90),
        mock.patch.object(weight_mm_experts_sm90, "_kernel", _kernel),
    ):
        yield


class PairsOnCpu:
    """`PairsByExpert` in PyTorch."""

    def __init__(self, pairs: int, experts: int, x: Tensor) -> None:
        self.pairs, self.experts, self.x = pairs, experts, x
        self.k, self.top = x.shape[1], pairs // x.shape[0]
        self.pitch = -(-self.k // 8) * 8

    def __call__(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.where((ids < 0) | (ids > self.experts), self.experts, ids)
        order = own.argsort(stable=True)
        ends = torch.bincount(own, minlength=self.experts + 1)[: self.experts].cumsum(0)
        rows = torch.full((len(ids), self.pitch), torch.nan, dtype=x.dtype)
        rows[:, : self.k] = x[order // self.top]
        return order.int(), ends.int(), rows[:, : self.k]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        made = (self.pairs,), (self.experts,)
        numbers = (Buffer(shape, torch.int32) for shape in made)
        return *numbers, Buffer((self.pairs, self.pitch), self.x.dtype)

    def launches(self, x: int, ids: int, made: tuple[int, ...]) -> list[Launch]:
        """One launch in place of two."""
        return [Launch(self._at_addresses, 1, 1, tuple(map(Address, (x, ids, *made))))]

    def _at_addresses(self, stream: int, grid: int, threads: int, *addresses: int) -> None:
        (tokens, k), (stride, _) = self.x.shape, self.x.strides
        x, ids = addresses[:2]
        values = _memory(x, (tokens - 1) * stride + k, self.x.dtype)
        found = self(
            values.as_strided((tokens, k), (stride, 1)), _memory(ids, self.pairs, torch.int64)
        )
        for address, buffer, one in zip(addresses[2:], self.buffers, found, strict=True):
            to = _memory(address, math.prod(buffer.shape), buffer.dtype).view(buffer.shape)
            to[..., : one.shape[-1]] = one


def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def _large(dtype: torch.dtype, *macros: object) -> Callable[..., None]:
    code = weight_mm_experts_large_sm90.source(dtype, *macros[:-1])  # type: ignore[arg-type]
    path = Path(weight_mm_experts_large_sm90.__file__).with_suffix(".cuh")
    return kernel_of(code, dtype, path.read_text())


@contextlib.contextmanager
def emulated_large() -> Iterator[None]:
    """Inside, `LargeExpertProduct` takes CPU tensors."""
    with (
        launches_on_cpu(weight_mm_experts_large_sm90),
        mock.patch.object(weight_mm_experts_large_sm90, "PairsByExpert", PairsOnCpu),
        mock.patch.object(weight_mm_experts_large_sm90, "_kernel", _large),
    ):
        yield
