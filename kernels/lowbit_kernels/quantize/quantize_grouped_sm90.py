"""Launches ``quantize_grouped_sm90.cu`` on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from lowbit_kernels.quantize.quantize_rowcol_sm90 import SHARED, THREADS, TILE
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.weight_only.weight_operands import addresses

LAG = 400
"""Tiles of 128 x 128 between the two passes over an expert: 13 MB of bfloat16. On an H200, 200 to 640 are alike; with
fewer, blocks wait for each other."""
MOST_SHORT = 2048
"""Elements of a row that one warp keeps."""


@dataclass(frozen=True)
class GroupedVariant:
    """The options of a compiled kernel; the heads of ``quantize_rowcol_sm90.cu`` and ``quantize_grouped_sm90.cu``
    explain each field."""

    input: str
    format: str
    rows: bool
    columns: bool
    stochastic: bool
    factor: bool
    row_scales: bool
    aligned: bool
    weights: bool
    tensorwise: bool = False
    steps: int = -1
    lag: int = LAG
    given: bool = False

    @property
    def blocks(self) -> int:
        """Blocks for each multiprocessor: as many as fit without keeping registers in memory. No more are started,
        since a late one has to walk over all experts."""
        if self.input == "FP32":
            return 2
        return 4 if self.format == "INT8" and not self.stochastic else 3


def tokens(x, offsets, format, rows, columns, seed, row_factor, out) -> None:
    """Write the results of ``lowbit::quantize_grouped`` to `out`; the arguments have been checked, no size is 0."""
    x = x if x.stride(1) == 1 else x.contiguous()
    options = (rows, columns, seed is not None, row_factor is not None, False)
    experts, k = offsets.shape[0], x.shape[1]
    offsets = offsets.contiguous()
    factor = None if row_factor is None else row_factor.contiguous()
    _launch(x, format, options, out, seed, factor, offsets, experts, experts * k)


def weights(x: Tensor, format: str, codes: Tensor, scale: Tensor) -> None:
    """Write the codes and scales of the rows of x [E, N, K]; checked, no size is 0, K is at most `MOST_SHORT`."""
    flat = x.contiguous().view(-1, x.shape[2])
    options = (True, False, False, False, False)
    variant = replace(_variant(flat, format, options, True), steps=1)
    made = (*addresses(codes, scale), 0, 0, 0, 0)
    _run("short_rows", variant, flat, -(-len(flat) * 32 // THREADS), made)


def weights_t(x: Tensor, format: str, codes_t: Tensor, scale: Tensor, is_given: bool) -> None:
    """Write the transposed codes of experts. The arguments have been checked, no size is 0.

    Args:
        x: [E, N, K].
        format: of the codes.
        codes_t, scale: what is written; `scale` only without `is_given`.
        is_given: True where `scale` holds the scales.
    """
    experts, n, k = x.shape
    flat = x.contiguous().view(experts * n, k)
    options = (False, True, False, False, True)
    if not is_given:
        out = (codes_t, scale, codes_t, scale)  # row codes are not written
        _launch(flat, format, options, out, None, None, None, experts, 0)
        return
    variant = replace(_variant(flat, format, options, True), given=True)
    tiles = experts * -(-n // TILE) * -(-k // TILE)
    # the kernel writes the scales again, as they are
    made = (0, 0, *addresses(codes_t, scale, scale), 0)
    _run("transpose_weights", variant, flat, tiles, made, n)


def _run(
    name: str,
    variant: GroupedVariant,
    x: Tensor,
    grid: int,
    made: tuple[int, ...],
    *more: int,
    read: Sequence[int] = (0, 0),
) -> None:
    """`made`: addresses of codes, scale, codes_t, scale_t and the largest magnitudes of rows and columns; `read`: of
    the seed and the factors."""
    with torch.cuda.device_of(x):
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
        arguments = (x.data_ptr(), x.stride(0), *made, *read, *x.shape, *more)
        _kernel(name, variant, device)(stream, grid, THREADS, *arguments)


def _variant(
    x: Tensor, format: str, options: tuple[bool, bool, bool, bool, bool], weights: bool
) -> GroupedVariant:
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return GroupedVariant(FLOAT_MACROS[x.dtype], format.upper(), *options, is_aligned, weights)


def _launch(
    x: Tensor,
    format: str,
    options: tuple[bool, bool, bool, bool, bool],
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    seed: Tensor | None,
    factor: Tensor | None,
    offsets: Tensor | None,
    experts: int,
    column_maxima: int,
) -> None:
    """`options`: rows, columns, stochastic, factor and row_scales of the variant."""
    m = x.shape[0]
    variant = _variant(x, format, options, offsets is None)
    scratch = torch.zeros(m + column_maxima + experts + 1, dtype=torch.int32, device=x.device)
    found, blocks = scratch.data_ptr(), variant.blocks * nvrtc.multiprocessors(x.device)
    made = *addresses(*out), found, found + 4 * m
    of_experts = *addresses(offsets), experts, m // experts
    last = 0 if offsets is None else out[2].shape[1], found + 4 * (m + column_maxima)
    more, read = (*of_experts, *last), addresses(seed, factor)
    _run("quantize_grouped", variant, x, blocks, made, *more, read=read)


def source(variant: GroupedVariant, primitives: str = "runtime/ptx.cuh") -> str:
    """The CUDA C++ to compile."""
    parts = (
        primitives,
        "elementwise/random_bits.h",
        "quantize/quantize_rowcol_sm90.cu",
        "quantize/quantize_grouped_sm90.cu",
    )
    return program({**asdict(variant), "blocks": variant.blocks}, *parts)


ARGUMENTS = {"quantize_grouped": 17, "transpose_weights": 13, "short_rows": 12}


@functools.cache
def _kernel(name: str, variant: GroupedVariant, device: int) -> nvrtc.Kernel:
    arch = nvrtc.architecture(torch.device("cuda", device))
    shared = 0 if name == "short_rows" else SHARED
    return nvrtc.kernel(source(variant), name, ARGUMENTS[name], arch, shared=shared)
