"""Launches ``quantize_blocks_sm90.cu`` on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lowbit_kernels.quantize.quantize_rowcol_sm90 import SHARED, THREADS, TILE
from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, LaunchPlan
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.weight_only.weight_operands import Description, TensorLayout, described

EACH = 4
"""Tiles of a block in ``quantize_blocks_sm90.cu``, if rows are those of experts."""
OF_ROWCOL = {
    "FORMAT": "E4M3",
    "TENSORWISE": 0,
    "STOCHASTIC": 0,
    "FACTOR": 0,
    "ROW_SCALES": 0,
    "STEPS": -1,
}
"""The macros that ``quantize_rowcol_sm90.cu`` needs; these STEPS compile none of its kernels."""


@dataclass(frozen=True)
class BlocksVariant:
    """The options of a compiled kernel; the head of ``quantize_blocks_sm90.cu`` explains each field."""

    input: str
    tiles: bool
    rows: bool
    columns: bool
    power_of_two: bool
    tokens: bool
    aligned: bool


def quantize(
    x, tiles, rows, columns, power_of_two, offsets, results
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``lowbit::quantize_blocks``; x has been checked, no size of it is 0. `results`: the op's four."""
    given = x, offsets
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous()
    offsets = None if offsets is None else offsets.contiguous()
    experts = offsets.shape[0] if columns and offsets is not None else None
    plan = planned(described(x), tiles, rows, columns, power_of_two, experts, results)
    as_given = x is given[0] and offsets is given[1]
    made = launcher.carried_out("quantize_blocks", plan, (x, offsets), as_given)
    return made[0], made[1], made[2], made[3]


@functools.lru_cache(maxsize=4096)
def planned(
    layout: Description,
    tiles: bool,
    rows: bool,
    columns: bool,
    power_of_two: bool,
    experts: int | None,
    results: tuple[Buffer, ...],
) -> LaunchPlan:
    """The plan for an x with the elements of a row side by side.

    Args:
        layout: of x [M, K], or of a contiguous stack.
        tiles, rows, columns, power_of_two: as the op takes them.
        experts: whose tokens the rows are, or None.
        results: the op's four.
    """
    x = TensorLayout(*layout)
    *stack, m, k = x.shape
    # a contiguous tensor may have any stride along a dimension of 1
    stride, tokens = k if stack else x.strides[0], experts is not None
    is_aligned = x.misaligned == 0 and stride * x.dtype.itemsize % 16 == 0
    options = tiles, rows, columns, power_of_two, tokens, is_aligned
    variant = BlocksVariant(FLOAT_MACROS[x.dtype], *options)
    out = (Address(2), Address(3), Address(4), Address(5))
    width = results[2].shape[1] if experts is not None else 0
    of_tokens = (Address(1), experts or 0, width) if tokens else (0, 0, 0)
    arguments = (Address(0), stride, *out, m, k, *of_tokens)
    down = width // TILE if tokens else math.prod(stack) * -(-m // TILE)
    across = -(-k // TILE)
    blocks = down * (-(-across // EACH) if tokens else across)
    return LaunchPlan(
        results, (), (Launch(_kernel(variant, x.device), blocks, THREADS, arguments),)
    )


def source(variant: BlocksVariant, primitives: str = "runtime/ptx.cuh") -> str:
    """The CUDA C++ to compile."""
    macros = {**asdict(variant), **OF_ROWCOL}
    files = (
        "elementwise/random_bits.h",
        "quantize/quantize_rowcol_sm90.cu",
        "quantize/quantize_blocks_sm90.cu",
    )
    return program(macros, primitives, *files)


@functools.cache
def _kernel(variant: BlocksVariant, device: torch.device) -> nvrtc.Kernel:
    with torch.cuda.device(device):
        arch = nvrtc.architecture(device)
        return nvrtc.kernel(source(variant), "quantize_blocks", 11, arch, shared=SHARED)
