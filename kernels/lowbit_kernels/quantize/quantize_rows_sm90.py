"""Launches ``quantize_rows_sm90.cu``: rows of bfloat16 and float16, on GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.launch_plan import (
    Address,
    Buffer,
    Launch,
    LaunchPlan,
)
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.weight_only.weight_operands import TensorLayout

DTYPES = {**FLOAT_MACROS, torch.int8: "INT8", torch.float8_e4m3fn: "E4M3"}
VECTOR = 8  # elements of a 16-byte load
MAX_THREADS = 1024
MAX_VECTORS = 8  # of a thread; more do not fit its registers


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
    scale: Tensor
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


def plan(k: int) -> tuple[int, int]:
    """Vectors of a thread, and threads of a block.

    A thread has four vectors where these suffice. With fewer, the warps of a block wait longer for each other: with one
    vector and many rows the kernel took up to 1.5 times as long on an H200.
    """
    vectors, own = k // VECTOR, 4
    while vectors > own * MAX_THREADS:
        own *= 2
    return own, -(-vectors // (own * 32)) * 32


def quantize(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    format: str,
    op: str | None = None,
    turned: bool = False,
) -> None:
    """Write codes [M, K] and scale [M] of an x for which `takes` holds.

    Args:
        format: "int8" or "e4m3".
        codes: of the format's dtype, or float16 or bfloat16.
        op: the planned op whose call this is all of.
        turned: as `turned_codes` writes them.
    """
    m, k = x.shape
    own, threads = plan(k)
    variant = RowsVariant(DTYPES[x.dtype], format.upper(), DTYPES[codes.dtype], own, turned)
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        addresses = (x.data_ptr(), x.stride(0), codes.data_ptr(), scale.data_ptr())
        kernel = _kernel(variant, torch.cuda.current_device())
        kernel(stream, m, threads, *addresses, k // VECTOR)
    if op is not None and x.is_cuda:
        launcher.take_over(op)
        arguments = (
            Address(0),
            x.stride(0),
            Address(3),
            Address(4),
            k // VECTOR,
        )  # of `quantize_rowcol`
        no_columns = Buffer((0, 0), codes.dtype), Buffer((0,), torch.float32)
        results = Buffer((m, k), codes.dtype), Buffer((m,), torch.float32), *no_columns
        plan_of_call = LaunchPlan(results, (), (Launch(kernel, m, threads, arguments),))
        launcher.learn(op, plan_of_call)


def planned(x: TensorLayout, format: str, dtype: torch.dtype) -> LaunchPlan:
    """The plan of `quantize` for an x of this layout, for which `takes` holds, on the current device: codes [M, K] of
    this dtype, and scale [M]."""
    m, k = x.shape
    own, threads = plan(k)
    variant = RowsVariant(DTYPES[x.dtype], format.upper(), DTYPES[dtype], own, False)
    kernel = _kernel(variant, torch.cuda.current_device())
    arguments = Address(0), x.strides[0], Address(1), Address(2), k // VECTOR
    results = Buffer((m, k), dtype), Buffer((m,), torch.float32)
    return LaunchPlan(results, (), (Launch(kernel, m, threads, arguments),))


def turned_codes(x: Tensor, mxfp4: tuple[Tensor, Tensor] | None = None) -> Turned:
    """Codes [M, K rounded up to a multiple of 128] of an x for which `takes` holds, in the order that
    ``w4a8_mm_sm90.cu`` needs, and scales [M]: int8, or e4m3 for a weight in MXFP4.

    Args:
        mxfp4: codes [N, K / 2] and exponents [N, K / 32] of that weight. The same launch finds the ranges of its
            exponents: first the passes that each 32 rows need, a byte each, for a multiple of 256 rows, then each row's
            largest exponent.
    """
    m, k = x.shape
    format, dtype = ("int8", torch.int8) if mxfp4 is None else ("e4m3", torch.float8_e4m3fn)
    codes = x.new_empty((m, k + -k % 128), dtype=dtype)
    scale = x.new_empty(m, dtype=torch.float32)
    if mxfp4 is None:
        quantize(x, codes, scale, format, turned=True)
        return Turned(codes, scale, None)
    weight, exponents = mxfp4
    n, groups = exponents.shape
    blocks = -(-n // 256) * 8
    ranges = exponents.new_empty(blocks + n)
    own, threads = plan(k)
    variant = RowsVariant(DTYPES[x.dtype], "E4M3", "E4M3", own, True)
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        addresses = (x.data_ptr(), x.stride(0), codes.data_ptr(), scale.data_ptr())
        of_weight = (weight.data_ptr(), weight.stride(0), exponents.data_ptr(), ranges.data_ptr())
        kernel = _kernel(variant, torch.cuda.current_device(), "quantize_rows_and_ranges")
        kernel(stream, m + blocks, threads, *addresses, k // VECTOR, m, *of_weight, n, groups)
    return Turned(codes, scale, ranges)


def source(
    variant: RowsVariant, primitives: tuple[str, ...] = ("runtime/ptx.cuh", "runtime/sm90.cuh")
) -> str:
    """The CUDA C++ to compile."""
    files = *primitives, "quantize/row_codes.cuh", "quantize/quantize_rows_sm90.cu"
    return program(asdict(variant), *files)


ARGUMENTS = {"quantize_rows": 5, "quantize_rows_and_ranges": 12}


@functools.cache
def _kernel(variant: RowsVariant, device: int, name: str = "quantize_rows") -> nvrtc.Kernel:
    module = nvrtc.Module(nvrtc.compiled(source(variant), "sm_90a"))
    return module.kernel(name, ARGUMENTS[name], overlaps=True)
