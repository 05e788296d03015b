"""Launches ``w4a8_mm_sm90.cu``: tokens of 8 bits times a weight of 4 bits, on GPUs of compute capability 9.0.

    out[m, n] = token_scale[m] * sum_g scale[n, g] * (sum_k x[m, k] * (code[n, k] - zero_point[n, g])) + bias[n]

int8 times int4: a group's sum is exact in int32. It is scaled, and added to those of other groups, in float32. Groups
are of 64 or a multiple of 128, or a row has one scale.

float8 e4m3 times MXFP4: the weight is exact in e4m3 under one scale a row, unless the exponents of a row span 15
octaves or more. Then all tiles of these rows are computed in several passes, each with the groups of 15 octaves.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.runtime.tensor_map import takes_rows, tensor_map
from lowbit_kernels.runtime.wgmma import multiply_from_registers
from lowbit_kernels.weight_only.codes_format import E2M1
from lowbit_kernels.weight_only.weight_operands import HALVES, Tensors, WeightOperands, addresses

ROWS, CHUNK, PERIOD, THREADS = 128, 128, 4, 384
CODE_BYTES = ROWS * CHUNK // 2
MAX_STAGES = 12
BAND = 8  # tiles of tokens that the grid works through together


class W4A8Division(NamedTuple):
    """How a product is divided: macros of ``w4a8_mm_sm90.cu``."""

    tokens: int  # of a tile
    split: int = 1  # blocks of a cluster that share a tile's K; if 1, two blocks have adjacent rows

    @property
    def beside(self) -> int:
        return 2 if self.split == 1 else 1

    @property
    def cluster(self) -> int:
        return self.beside * self.split

    def stages(self) -> tuple[int, int]:
        """Stages of the ring, and bytes of shared memory of a block."""
        stage = CODE_BYTES + self.tokens * CHUNK
        sums = 4 * ROWS * self.tokens if self.split > 1 else 1024
        results = 2 * self.tokens // self.split * 128
        numbers = 16 * 8
        fixed = results + sums + 2 * 4 * self.tokens + numbers + 16 * (MAX_STAGES + 1)
        count = min((nvrtc.SHARED_LIMIT - fixed) // stage, MAX_STAGES)
        return count, count * stage + fixed


LEAST_TOKENS = 33  # for which an H200 was faster than with x's codes as floating-point numbers


def plan(m: int, n: int, k: int, multiprocessors: int) -> W4A8Division:
    """The division that was fastest on an H200: small tiles where large ones would occupy too few multiprocessors, and
    shared K where small ones would."""
    pairs = -(-n // (2 * ROWS))  # of blocks, for a tile of tokens
    if m > 64 and 2 * pairs * -(-m // 128) >= 0.7 * multiprocessors:
        return W4A8Division(128)
    if m > 128 and 4 * pairs * -(-m // 128) <= multiprocessors and k > CHUNK * PERIOD:
        return W4A8Division(128, 2)
    shares = 4 * pairs * -(-m // 64) <= multiprocessors and k > CHUNK * PERIOD
    return W4A8Division(64, 2 if shares else 1)


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these, whose x has int8 codes in the order of `quantize_rows_sm90`."""
    codes, width = operands.codes, operands.padded_k
    pitch = codes.strides[0] if operands.n > 1 else codes.shape[1]
    return (
        operands.out in HALVES
        and codes.dtype == torch.uint8
        and (_is_int4(operands) or is_mxfp4(operands))
        and width % 32 == 0
        and codes.strides[1] == 1
        and takes_rows(pitch, codes.shape[1])
        and codes.misaligned == 0
        and min(*operands.x.shape, *codes.shape) > 0
    )


def _is_int4(operands: WeightOperands) -> bool:
    is_integer = operands.format.is_int4_or_int8 and operands.scale.dtype in FLOAT_MACROS
    return is_integer and (operands.group % CHUNK == 0 or operands.group == 64)


def is_mxfp4(operands: WeightOperands) -> bool:
    """True for E2M1 with a power of two as the scale of each 32 codes."""
    is_power = operands.scale.dtype == torch.uint8
    return operands.format.table == E2M1 and is_power and operands.group_size == 32


def product(operands: WeightOperands) -> W4A8Product | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    return W4A8Product(operands)


class W4A8Product:
    """The product of operands for which `takes` holds. A residual is added to the rounded product. With MXFP4 it takes
    the ranges of exponents of `quantize_rows_sm90` in place of zero points."""

    def __init__(self, operands: WeightOperands, division: W4A8Division | None = None) -> None:
        (n, row), m, k = operands.codes.shape, operands.m, operands.k
        multiprocessors = nvrtc.multiprocessors(operands.codes.device)
        division = division or plan(m, n, k, multiprocessors)
        tokens, beside, cluster = division.tokens, division.beside, division.cluster
        self.out = operands.out
        self.pitch = -(-n // 8) * 8  # the TMA stores rows that begin at multiples of 16 bytes
        pitch = operands.codes.strides[0] if n > 1 else row
        width = k + -k % CHUNK
        chunks = max(-(-k // (CHUNK * PERIOD)), division.split) * PERIOD
        self.shape = m, n
        self.codes_map = (1, n, row, pitch, ROWS, CHUNK // 2)
        self.x_map = (1, m, width, width, tokens // beside, CHUNK)
        self.out_map = (2, m, n, self.pitch, tokens // division.split, 64)
        rows, columns = -(-n // (ROWS * beside)), -(-m // tokens)
        self.grid = min(rows * columns, multiprocessors // cluster) * cluster
        self.sizes = m, n, chunks, operands.groups, rows, columns, BAND
        if is_mxfp4(operands):
            self.macros = "E2M1", operands.out, torch.float32, 0, False, division
        else:
            zero = operands.zero_point is not None
            self.macros = "INT4", operands.out, operands.scale.dtype, operands.group, zero, division

    @functools.cached_property
    def kernel(self) -> nvrtc.Kernel:
        """On the current device."""
        return _kernel(*self.macros, torch.cuda.current_device())

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, residual, token_scale, _ = tensors
        scale = aligned(scale)
        zero_point = None if zero_point is None else zero_point.contiguous()
        (m, n), pitch = self.shape, self.pitch
        out = codes.new_empty((m, pitch), dtype=self.out)
        with torch.cuda.device_of(x):
            self.kernel(
                torch.cuda.current_stream().cuda_stream,
                self.grid,
                THREADS,
                tensor_map(codes.data_ptr(), *self.codes_map).getPtr(),
                tensor_map(x.data_ptr(), *self.x_map).getPtr(),
                tensor_map(out.data_ptr(), *self.out_map).getPtr(),
                *addresses(scale, zero_point, bias, token_scale),
                *self.sizes,
            )
        out = out if pitch == n else out[:, :n].contiguous()
        return out if residual is None else out.add_(residual)


CONSUMERS = {
    "INT4": ("s32.s8.s8", "weight_only/int4_as_int8.cuh", "matmul/w4a8_int4_sm90.cuh"),
    "E2M1": ("f32.e4m3.e4m3", "matmul/w4a8_e2m1_sm90.cuh"),
}
"""The types of the products of each format, and the files of its consumers."""


def source(
    codes: str, out: torch.dtype, scale: torch.dtype, group: int, zero: bool, division: W4A8Division
) -> str:
    """The CUDA C++ to compile."""
    macros: dict[str, object] = {"CODES": codes, "OUT": FLOAT_MACROS[out]}
    macros |= {"SCALE": FLOAT_MACROS[scale], "GROUP": group, "ZERO": zero}
    macros |= {"TOKENS": division.tokens, "SPLIT": division.split, "STAGES": division.stages()[0]}
    types, *consumer = CONSUMERS[codes]
    before = *SM90, "matmul/w4a8_tiles_sm90.cuh"
    multiply = multiply_from_registers(division.tokens, 32, types)
    return program(macros, *before, multiply, *consumer, "matmul/w4a8_mm_sm90.cu")


@nvrtc.variants
def _kernel(
    codes: str,
    out: torch.dtype,
    scale: torch.dtype,
    group: int,
    zero: bool,
    division: W4A8Division,
    device: int,
) -> nvrtc.Kernel:
    code = source(codes, out, scale, group, zero, division)
    shared = division.stages()[1]
    return nvrtc.kernel(code, "w4a8_mm", 14, structs=3, shared=shared, overlaps=True)
