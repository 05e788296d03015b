"""Launches ``quantize_rows_sm90.cu``: rows of bfloat16 and float16, on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Composition, Launch, LaunchPlan, run
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.weight_only.weight_operands import Description, TensorLayout, described

DTYPES = {**FLOAT_MACROS, torch.int8: "INT8", torch.float8_e4m3fn: "E4M3"}
VECTOR = 8  # elements of a 16-byte load
MAX_THREADS = 1024
MAX_VECTORS = 8  # of a thread; more do not fit its registers


Results = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RowsVariant:
    """The options of a compiled kernel; the head of ``quantize_rows_sm90.cu`` explains each field."""

    x: str
    codes: str
    out: str
    vectors: int
    turned: bool


class Turned(NamedTuple):
    """What `turned_codes` returns."""

    codes: Tensor
    scale: Tensor  # float32; negative for loud rows of int8
    ranges: Tensor | None  # of exponents


def takes(x: TensorLayout) -> bool:
    """True if `quantize` takes x [M, K], M and K > 0: rows begin at multiples of 16 bytes, K is a multiple of 16."""
    m, k = x.shape
    return (
        nvrtc.runs_on_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and k % 16 == 0
        and k <= VECTOR * MAX_THREADS * MAX_VECTORS
        and x.strides[1] == 1
        and (m == 1 or x.strides[0] % VECTOR == 0)
        and x.misaligned == 0
    )


FEW_ROWS = 512
"""Rows up to which a thread has one vector."""


def plan(m: int, k: int) -> tuple[int, int]:
    """Vectors of a thread, and threads of a block.

    A thread has four vectors where these suffice. With fewer, the warps of a block wait longer for each other: with one
    vector and many rows the kernel took up to 1.5 times as long on an H200. Up to `FEW_ROWS` a thread has one, which
    makes blocks large: they start early, on the few multiprocessors where the launch before leaves room, and too many
    small ones would gather there.
    """
    vectors, own = k // VECTOR, 1 if m <= FEW_ROWS else 4
    while vectors > own * MAX_THREADS:
        own *= 2
    return own, -(-vectors // (own * 32)) * 32


def quantize(x: Tensor, format: str, dtype: torch.dtype, op: str | None = None) -> Results:
    """Codes [M, K] of this dtype, and scale [M], of an x for which `takes` holds.

    Args:
        format: "int8" or "e4m3".
        dtype: that of the format, or float16 or bfloat16.
        op: "quantize_rowcol" where this is all of a call of that op.
    """
    if op is None:
        codes, scale = run(planned(described(x), format, dtype), (x,))
    else:
        plan = _of_rowcol(described(x), format, dtype)
        codes, scale, *_ = launcher.carried_out(op, plan, (x, None, None))
    return codes, scale


@functools.lru_cache(maxsize=4096)
def planned(
    layout: Description,
    format: str,
    dtype: torch.dtype,
    turned: bool = False,
    mxfp4: tuple[Description, Description] | None = None,
) -> LaunchPlan:
    """The plan of `quantize` for an x of this layout: codes and scale.

    Args:
        format, dtype: as for `quantize`.
        turned: codes as `turned_codes` gives them.
        mxfp4: the weight and its exponents, the other operands, whose ranges are the third result.
    """
    x = TensorLayout(*layout)
    m, k = x.shape
    own, threads = plan(m, k)
    variant = RowsVariant(DTYPES[x.dtype], format.upper(), DTYPES[dtype], own, turned)
    width = k + -k % 128 if turned else k
    results = Buffer((m, width), dtype), Buffer((m,), torch.float32)
    first = 1 if mxfp4 is None else 3
    arguments = Address(0), x.strides[0], Address(first), Address(first + 1), k // VECTOR
    if mxfp4 is None:
        launch = Launch(_kernel(variant, x.device), m, threads, arguments)
        return LaunchPlan(results, (), (launch,))
    weight, exponents = (TensorLayout(*one) for one in mxfp4)
    n, groups = exponents.shape
    blocks = -(-n // 256) * 8
    of_weight = Address(1), weight.strides[0], Address(2), Address(first + 2), n, groups
    kernel = _kernel(variant, x.device, "quantize_rows_and_ranges")
    launch = Launch(kernel, m + blocks, threads, (*arguments, m, *of_weight))
    return LaunchPlan((*results, Buffer((blocks + n,), exponents.dtype)), (), (launch,))


@functools.lru_cache(maxsize=4096)
def _of_rowcol(layout: Description, format: str, dtype: torch.dtype) -> LaunchPlan:
    """`planned` as a plan of the op "quantize_rowcol", without codes of columns."""
    own = planned(layout, format, dtype)
    columns = Buffer((0, 0), dtype), Buffer((0,), torch.float32)
    whole = Composition(3, (*own.results, *columns))
    whole.add(own, (0,), (3, 4))
    return whole.plan()


def turned_codes(x: Tensor, mxfp4: tuple[Tensor, Tensor] | None = None) -> Turned:
    """Codes [M, K rounded up to a multiple of 128] of an x for which `takes` holds, in the order that
    ``w4a8_mm_sm90.cu`` needs, and scales [M]: int8, or e4m3 for a weight in MXFP4.

    Scales of int8 are for that kernel alone. Those of loud rows are negative: the squares of their codes add up to more
    than 2^22 in some 1,024 of K. The kernel takes the magnitude as the scale. No scale is 0.

    Args:
        mxfp4: codes [N, K / 2] and exponents [N, K / 32] of that weight. The same launch finds the ranges of its
            exponents: first the passes that each 32 rows need, a byte each, for a multiple of 256 rows, then each row's
            largest exponent.
    """
    if mxfp4 is None:
        codes, scale = run(planned(described(x), "int8", torch.int8, True), (x,))
        return Turned(codes, scale, None)
    weight, exponents = mxfp4
    others = described(weight), described(exponents)
    plan = planned(described(x), "e4m3", torch.float8_e4m3fn, True, others)
    return Turned(*run(plan, (x, weight, exponents)))


def source(variant: RowsVariant, primitives: tuple[str, ...] = SM90) -> str:
    """The CUDA C++ to compile."""
    files = *primitives, "quantize/row_codes.cuh", "quantize/quantize_rows_sm90.cu"
    return program(asdict(variant), *files)


ARGUMENTS = {"quantize_rows": 5, "quantize_rows_and_ranges": 12}


@functools.cache
def _kernel(
    variant: RowsVariant, device: torch.device, name: str = "quantize_rows"
) -> nvrtc.Kernel:
    with torch.cuda.device(device):
        return nvrtc.kernel(source(variant), name, ARGUMENTS[name], overlaps=True)
