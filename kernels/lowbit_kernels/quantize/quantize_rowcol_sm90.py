"""Launches ``quantize_rowcol_sm90.cu`` on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, LaunchPlan
from lowbit_kernels.runtime.seeds import seed_start, seed_step
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.weight_only.weight_operands import Description, TensorLayout, described

TILE, THREADS, ROW_STEP = 128, 256, 2048
MAX_STEPS = 8
SHARED = 32768 + 2 * TILE * 8 + TILE * 4
"""Bytes of shared memory of a tile: its largest magnitudes or its transposed codes, its scales and factors."""


@dataclass(frozen=True)
class RowcolVariant:
    """The options of a compiled kernel; the head of ``quantize_rowcol_sm90.cu`` explains each field."""

    input: str
    format: str
    rows: bool
    columns: bool
    tensorwise: bool
    stochastic: bool
    factor: bool
    row_scales: bool
    aligned: bool
    steps: int
    own_seed: bool = False


def quantize(
    x, format, rows, columns, tensorwise, seed, row_factor, row_scales, results
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``lowbit::quantize_rowcol``; the arguments have been checked, M and K are > 0. `results`: the op's four."""
    given = x, row_factor
    x = x if x.stride(1) == 1 else x.contiguous()
    row_factor = None if row_factor is None else row_factor.contiguous()
    options = rows, columns, tensorwise, seed is not None, row_factor is not None, row_scales
    plan = planned(described(x), format, *options, results)
    operands, as_given = (x, seed, row_factor), given[0] is x and given[1] is row_factor
    made = launcher.carried_out("quantize_rowcol", plan, operands, as_given)
    return made[0], made[1], made[2], made[3]


@functools.lru_cache(maxsize=4096)
def planned(
    layout: Description,
    format: str,
    rows: bool,
    columns: bool,
    tensorwise: bool,
    stochastic: bool,
    factor: bool,
    row_scales: bool,
    results: tuple[Buffer, ...],
    own_seed: int | None = None,
    apart: bool = False,
) -> LaunchPlan:
    """The plan for x of this layout, with elements of a row side by side. Operands: x, seed and row_factor.

    Args:
        own_seed: the kernels make the seed, as ``seeds.seed_of(x, own_seed)``, unless they read x only once.
        apart: the last two launches write one copy of the codes each, first that along rows; x is read once more.
    """
    x = TensorLayout(*layout)
    m, k = x.shape
    one_pass = rows and not columns and not tensorwise and not factor
    variant = RowcolVariant(
        FLOAT_MACROS[x.dtype],
        format.upper(),
        *(rows, columns, tensorwise, stochastic, factor, row_scales),
        x.misaligned == 0 and x.strides[0] * x.dtype.itemsize % 16 == 0,
        min(-(-k // ROW_STEP), MAX_STEPS) if one_pass else 0,
        own_seed is not None,
    )
    # scratch: the seed, 8 bytes, and the largest magnitudes of rows and columns
    found = Address(7, 8), Address(7, 8 + 4 * m)
    seed = Address(1) if own_seed is None else Address(7)

    def launch(name: str, grid: int, one: RowcolVariant, makes: bool = True) -> Launch:
        """`makes`: whether the launch writes results. It gets no address of a result that it does not write, since
        other tensors of a plan may have that memory then."""
        of_rows = (Address(3), Address(4)) if makes and one.rows else (0, 0)
        of_columns = (Address(5), Address(6)) if makes and one.columns else (0, 0)
        arguments = Address(0), x.strides[0], *of_rows, *of_columns
        arguments += (*((0, 0) if one_pass else found), seed, Address(2), m, k)
        if not one_pass:
            arguments += (0, 0) if own_seed is None else (seed_step(m), seed_start(own_seed))
        return Launch(_kernel(one, name, x.device), grid, THREADS, arguments)

    if one_pass:
        return LaunchPlan(results, (), (launch("rows", m, variant),))
    tiles = -(-m // TILE) * -(-k // TILE)
    copies = [variant]
    if apart and rows and columns and not row_scales:
        copies = [replace(variant, columns=False), replace(variant, rows=False)]
    launches = (
        launch("absmax", tiles, variant, False),
        *(launch("quantize", tiles, one) for one in copies),
    )
    return LaunchPlan(results, (Buffer((2 + m + k,), torch.int32, fill=0),), launches)


def source(variant: RowcolVariant, primitives: str = "runtime/ptx.cuh") -> str:
    """The CUDA C++ to compile."""
    return program(
        asdict(variant), primitives, "elementwise/random_bits.h", "quantize/quantize_rowcol_sm90.cu"
    )


@functools.cache
def _kernel(variant: RowcolVariant, name: str, device: torch.device) -> nvrtc.Kernel:
    arguments, shared = (12, 0) if name == "rows" else (14, SHARED)
    with torch.cuda.device(device):
        arch = nvrtc.architecture(device)
        return nvrtc.kernel(source(variant), name, arguments, arch, shared=shared)
