"""Launches ``int8_int4_mm_sm90.cu``: int8 tokens times a weight of 4 bits, on GPUs of compute capability 9.0.

    out[m, n] = token_scale[m] * sum_g scale[n, g] * (sum_k x[m, k] * (code[n, k] - zero_point[n, g])) + bias[n]

A group's sum is exact in int32. It is scaled, and added to those of other groups, in float32. Groups are multiples of
128, or a row has one scale.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.runtime.tensor_map import takes_rows, tensor_map
from lowbit_kernels.runtime.wgmma import multiply_from_registers
from lowbit_kernels.weight_only.weight_operands import (
    HALVES,
    Tensors,
    WeightOperands,
    addresses,
)

ROWS, CHUNK, CLUSTER, THREADS = 128, 128, 2, 384
CODE_BYTES = ROWS * CHUNK // 2
TOKENS = 128  # of a tile
MAX_STAGES = 12
BAND = 8  # tiles of tokens that the grid works through together


def stages(tokens: int) -> tuple[int, int]:
    """Stages of the ring for tiles of so many tokens, and bytes of shared memory of a block."""
    stage = CODE_BYTES + tokens * CHUNK
    fixed = 2 * tokens * 128 + 2 * 4 * tokens + 16 * MAX_STAGES
    count = min((nvrtc.SHARED_LIMIT - fixed) // stage, MAX_STAGES)
    return count, count * stage + fixed


LEAST_TOKENS, LEAST_TILES = 96, 48


def is_faster(m: int, n: int) -> bool:
    """True where an H200 was faster than with x's codes as floating-point numbers: for full tiles that occupy more than
    half of its multiprocessors."""
    return m >= LEAST_TOKENS and -(-m // TOKENS) * -(-n // (ROWS * CLUSTER)) >= LEAST_TILES


def takes(operands: WeightOperands) -> bool:
    """True if the kernel multiplies these, whose x has int8 codes in the order of `quantize_rows_sm90`."""
    codes, width = operands.codes, operands.padded_k
    pitch = codes.strides[0] if operands.n > 1 else codes.shape[1]
    return (
        operands.out in HALVES
        and codes.dtype == torch.uint8
        and operands.format.is_int4_or_int8
        and operands.scale.dtype in FLOAT_MACROS
        and operands.group % CHUNK == 0
        and width % 32 == 0
        and codes.strides[1] == 1
        and takes_rows(pitch, codes.shape[1])
        and codes.misaligned == 0
        and min(*operands.x.shape, *codes.shape) > 0
    )


def product(operands: WeightOperands) -> Int8Int4Product | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    return Int8Int4Product(operands)


class Int8Int4Product:
    """The product of operands for which `takes` holds. A residual is added to the rounded product."""

    def __init__(self, operands: WeightOperands) -> None:
        (n, row), m = operands.codes.shape, operands.m
        self.tokens, self.out = TOKENS, operands.out
        self.pitch = -(-n // 8) * 8  # the TMA stores rows that begin at multiples of 16 bytes
        pitch = operands.codes.strides[0] if n > 1 else row
        chunks = -(-operands.k // CHUNK)
        self.shape = m, n
        self.codes_map = (1, n, row, pitch, ROWS, CHUNK // 2)
        self.x_map = (1, m, chunks * CHUNK, chunks * CHUNK, self.tokens // CLUSTER, CHUNK)
        self.out_map = (2, m, n, self.pitch, self.tokens, 64)
        rows, columns = -(-n // (ROWS * CLUSTER)), -(-m // self.tokens)
        most = nvrtc.multiprocessors(operands.codes.device) // CLUSTER
        self.grid = min(rows * columns, most) * CLUSTER
        self.sizes = m, n, chunks, operands.groups, rows, columns, BAND
        zero = operands.zero_point is not None
        self.macros = operands.out, operands.scale.dtype, operands.group, zero, self.tokens

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


def source(out: torch.dtype, scale: torch.dtype, group: int, zero: bool, tokens: int) -> str:
    """The CUDA C++ to compile."""
    macros: dict[str, object] = {"OUT": FLOAT_MACROS[out], "SCALE": FLOAT_MACROS[scale]}
    macros |= {"GROUP": group, "ZERO": zero, "TOKENS": tokens, "STAGES": stages(tokens)[0]}
    before = "runtime/ptx.cuh", "runtime/sm90.cuh", "weight_only/int4_as_int8.cuh"
    multiply = multiply_from_registers(tokens, 32, "s32.s8.s8")
    return program(macros, *before, multiply, "matmul/int8_int4_mm_sm90.cu")


@nvrtc.variants
def _kernel(
    out: torch.dtype, scale: torch.dtype, group: int, zero: bool, tokens: int, device: int
) -> nvrtc.Kernel:
    module = nvrtc.Module(nvrtc.compiled(source(out, scale, group, zero, tokens), "sm_90a"))
    shared = stages(tokens)[1]
    return module.kernel("int8_int4_mm", 14, structs=3, shared=shared, overlaps=True)
