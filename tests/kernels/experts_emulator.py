"""``weight_mm_experts_sm90`` and its sibling for many tokens on a CPU, in the emulator of ``sm90_emulator``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

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
        self.experts, self.k, self.top = experts, x.shape[1], pairs // x.shape[0]
        self.pitch = -(-self.k // 8) * 8

    def __call__(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.where((ids < 0) | (ids > self.experts), self.experts, ids)
        order = own.argsort(stable=True)
        ends = torch.bincount(own, minlength=self.experts + 1)[: self.experts].cumsum(0)
        rows = torch.full((len(ids), self.pitch), torch.nan, dtype=x.dtype)
        rows[:, : self.k] = x[order // self.top]
        return order.int(), ends.int(), rows[:, : self.k]


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
