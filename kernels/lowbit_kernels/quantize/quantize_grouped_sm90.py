"""Launches ``quantize_grouped_sm90.cu`` on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from lowbit_kernels.matmul import grouped_columns
from lowbit_kernels.quantize.quantize_rowcol_sm90 import SHARED, THREADS, TILE
from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, LaunchPlan
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.weight_only.weight_operands import Description, TensorLayout, described

Options = tuple[bool, bool, bool, bool, bool]
"""rows, columns, stochastic, factor and row_scales of a variant."""

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
        return 2 if self.input == "FP32" else 3


def tokens(x, offsets, format, rows, columns, seed, row_factor, results) -> list[Tensor]:
    """``lowbit::quantize_grouped``; the arguments have been checked, no size is 0. `results`: the op's four."""
    given = x, offsets, row_factor
    x = x if x.stride(1) == 1 else x.contiguous()
    offsets, row_factor = (
        offsets.contiguous(),
        None if row_factor is None else row_factor.contiguous(),
    )
    options = (rows, columns, seed is not None, row_factor is not None, False)
    plan = planned_tokens(described(x), offsets.shape[0], format, options, results)
    as_given = all(one is other for one, other in zip(given, (x, offsets, row_factor), strict=True))
    operands = x, offsets, seed, row_factor
    return launcher.carried_out("quantize_grouped", plan, operands, as_given)


@functools.lru_cache(maxsize=4096)
def planned_tokens(
    layout: Description, experts: int, format: str, options: Options, results: tuple[Buffer, ...]
) -> LaunchPlan:
    """The plan for x of this layout. Operands: x, offsets, seed and row_factor."""
    x = TensorLayout(*layout)
    variant = _variant(x, format, options, False)
    made = tuple(map(Address, range(4, 8)))
    read = Address(2), Address(3)
    return LaunchPlan(results, *_both_passes(x, variant, made, read, Address(1), experts, 8))


def weights(x: Tensor, format: str, results: tuple[Buffer, ...]) -> list[Tensor]:
    """``lowbit::quantize_experts`` along rows: x is [E, N, K], checked, no size is 0, K is at most `MOST_SHORT`."""
    own = x.contiguous()
    plan = planned_weights(described(own), format, results)
    return launcher.carried_out("quantize_experts", plan, (own, None), own is x)


@functools.lru_cache(maxsize=4096)
def planned_weights(layout: Description, format: str, results: tuple[Buffer, ...]) -> LaunchPlan:
    """The plan for x of this layout. Operands: x and None."""
    x = _flat(TensorLayout(*layout))
    variant = replace(_variant(x, format, (True, False, False, False, False), True), steps=1)
    made = (Address(2), Address(3), 0, 0)
    grid = -(-x.shape[0] * 32 // THREADS)
    return LaunchPlan(results, (), (_launch("short_rows", variant, x, grid, made, (0, 0)),))


def weights_t(
    x: Tensor, format: str, scale: Tensor | None, results: tuple[Buffer, ...]
) -> list[Tensor]:
    """``lowbit::quantize_experts`` transposed. The arguments have been checked, no size is 0.

    Args:
        x: [E, N, K].
        format: of the codes.
        scale: of the codes, if they are known.
        results: the op's two.
    """
    own, own_scale = x.contiguous(), None if scale is None else scale.contiguous()
    plan = planned_weights_t(described(own), format, scale is not None, results)
    as_given = own is x and own_scale is scale
    return launcher.carried_out("quantize_experts", plan, (own, own_scale), as_given)


@functools.lru_cache(maxsize=4096)
def planned_weights_t(
    layout: Description, format: str, is_given: bool, results: tuple[Buffer, ...]
) -> LaunchPlan:
    """The plan for x of this layout. Operands: x and the scales, or None."""
    given = TensorLayout(*layout)
    (experts, n, k), x = given.shape, _flat(given)
    variant = _variant(x, format, (False, True, False, False, True), True)
    made = (0, 0, Address(2), Address(3))
    if not is_given:
        return LaunchPlan(results, *_both_passes(x, variant, made, (0, 0), None, experts, 4))
    variant = replace(variant, given=True)
    tiles = experts * -(-n // TILE) * -(-k // TILE)
    launch = _launch("transpose_weights", variant, x, tiles, made, (Address(1), 0), n)
    return LaunchPlan(results, (), (launch,))


def _both_passes(
    x: TensorLayout,
    variant: GroupedVariant,
    made: tuple[int | Address, ...],
    read: tuple[int | Address, ...],
    offsets: Address | None,
    experts: int,
    scratch: int,
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Scratch memory, whose tensor has the number `scratch`, and the launch of both passes.

    Args:
        x: its layout, with two dimensions.
        variant: of the kernel.
        made: codes, scale, codes_t, scale_t.
        read: the seed and the factors.
        offsets: of tokens; None for weights.
        experts: how many.
        scratch: see above.
    """
    m, k = x.shape
    maxima = 0 if variant.row_scales else experts * k
    found = Address(scratch), Address(scratch, 4 * m)
    width = 0 if offsets is None else grouped_columns.width(m, experts)
    more = (0 if offsets is None else offsets, experts, m // experts, width)
    grid = variant.blocks * nvrtc.multiprocessors(x.device)
    done = Address(scratch, 4 * (m + maxima))
    launch = _launch("quantize_grouped", variant, x, grid, made, found, *more, done, read=read)
    return (Buffer((m + maxima + experts + 1,), torch.int32, fill=0),), (launch,)


def _launch(
    name: str,
    variant: GroupedVariant,
    x: TensorLayout,
    grid: int,
    made: tuple[int | Address, ...],
    found: tuple[int | Address, ...],
    *more: int | Address,
    read: tuple[int | Address, ...] = (0, 0),
) -> Launch:
    """`made`: codes, scale, codes_t, scale_t; `found`: the largest magnitudes of rows and columns; `read`: the seed and
    the factors."""
    arguments = (Address(0), x.strides[0], *made, *found, *read, *x.shape, *more)
    return Launch(_kernel(name, variant, x.device), grid, THREADS, arguments)


def _flat(x: TensorLayout) -> TensorLayout:
    """The layout of contiguous experts [E, N, K] as one matrix."""
    experts, n, k = x.shape
    return x._replace(shape=(experts * n, k), strides=(k, 1))


def _variant(x: TensorLayout, format: str, options: Options, weights: bool) -> GroupedVariant:
    is_aligned = x.misaligned % 16 == 0 and x.strides[0] * x.dtype.itemsize % 16 == 0
    return GroupedVariant(FLOAT_MACROS[x.dtype], format.upper(), *options, is_aligned, weights)


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
def _kernel(name: str, variant: GroupedVariant, device: torch.device) -> nvrtc.Kernel:
    shared = 0 if name == "short_rows" else SHARED
    with torch.cuda.device(device):
        arch = nvrtc.architecture(device)
        return nvrtc.kernel(source(variant), name, ARGUMENTS[name], arch, shared=shared)
