"""The decode kernel of experts: launches ``weight_mm_experts_sm90.cu``, bound by the bytes of the chosen experts.

    out[p] = x[p // top] times the weight of expert ids[p], transposed, plus its bias,    for a token's pair p

It takes weights of 4 or 8 bits, integers, float8 or MXFP4, on GPUs of compute capability 9.0. The weight is never
rounded: codes minus zero points are exact in x's dtype, sums and scales are float32. With `gated` operands it computes
silu(gate) * up before it rounds.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, program
from lowbit_kernels.weight_only.expert_operands import ExpertOperands, Tensors
from lowbit_kernels.weight_only.weight_operands import GROUP_STEP, HALVES, addresses

SLAB, UNITS = 16, 4
"""Chunks of 4 bits whose x for 8 tokens is in shared memory, and the most groups in one."""
CHUNK_BYTES = 64
"""Bytes of a row's codes that a warp multiplies at a time."""
SCALES = FLOAT_MACROS | {torch.uint8: "E8M0"}


@dataclass(frozen=True)
class ExpertVariant:
    """The macros that the kernel is compiled with; the head of ``weight_mm_experts_sm90.cu`` explains each."""

    codes: str
    group: int
    x: str
    scale: str
    zero: bool
    tiles: int
    along: int
    beside: int
    depth: int
    gated: bool
    by_expert: bool
    aligned: bool

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        sums = 8 * self.tiles * (1 + self.along * (16 * self.beside + 1))
        slab = SLAB // self.tiles * (1 if self.codes in ("INT4", "E2M1") else 2)
        return 32 * 1024 + 4 * (8 * self.tiles * UNITS * slab + sums)


def takes(operands: ExpertOperands) -> bool:
    """True if the kernel multiplies these: rows of codes that begin at multiples of 16 bytes, and groups of multiples
    of 32. For float8 K is not padded, since the padding may hold NaN."""
    x, codes = operands.x, operands.codes
    width, k = codes.shape[2], x.shape[1]
    return (
        x.dtype in HALVES
        and operands.name != ""
        and operands.scale.dtype in SCALES
        and operands.has_integer_zeros
        and (k == width or operands.name != "E4M3")
        and (operands.group == 0 or operands.group_size % GROUP_STEP == 0)
        and codes.misaligned == 0
        and codes.strides[2] == 1
        and all(n % 16 == 0 for n in (width, *codes.strides[:2]))
        and x.strides[1] == 1
        and min(*x.shape, *codes.shape, operands.pairs) > 0
        and max(operands.pairs, codes.shape[0], codes.shape[1]) < 2**24
    )


def product(operands: ExpertOperands) -> ExpertProduct | None:
    """The planned product; None where the device or the operands are not the kernel's."""
    if not (nvrtc.runs_on_hopper(operands.x.device) and takes(operands)):
        return None
    return ExpertProduct(operands)


class ExpertProduct:
    """The product of operands for which `takes` holds."""

    def __init__(self, operands: ExpertOperands) -> None:
        x, codes, scale, pairs = operands.x, operands.codes, operands.scale, operands.pairs
        (tokens, k), (experts, n, width) = x.shape, codes.shape
        columns = operands.results
        is_aligned = k % 8 == 0 and x.misaligned == 0 and (tokens == 1 or x.strides[0] % 8 == 0)
        by_expert = pairs >= experts
        along, beside, depth = _warps(pairs * n // 16, width, operands.gated)
        self.variant = ExpertVariant(
            operands.name,
            operands.group,
            FLOAT_MACROS[x.dtype],
            SCALES[scale.dtype],
            operands.zero_point is not None,
            _tiles(pairs, experts),
            along,
            beside,
            depth,
            operands.gated,
            by_expert,
            is_aligned,
        )
        self.shape, self.dtype = (pairs, columns), x.dtype
        own = 8 * beside if operands.gated else 16 * beside
        self.grid = -(-columns // own) * (experts + 1 if by_expert else pairs)
        strides = (x.strides[0], *codes.strides[1::-1])
        self.sizes = (
            *strides,
            *(pairs, pairs // tokens, experts, n, k, width, scale.shape[2]),
        )

    @functools.cached_property
    def kernel(self) -> nvrtc.Kernel:
        """On the current device."""
        return _kernel(self.variant, torch.cuda.current_device())

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, ids = tensors
        out = x.new_empty(self.shape, dtype=self.dtype)
        scale = aligned(scale)
        zero_point = None if zero_point is None else zero_point.contiguous()
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device_of(x):
            self.kernel(
                torch.cuda.current_stream().cuda_stream,
                self.grid,
                32 * self.variant.along * self.variant.beside,
                *addresses(x, codes, scale, zero_point, bias, ids.contiguous(), out),
                *self.sizes,
            )
        return out


def _tiles(pairs: int, experts: int) -> int:
    """Of 8 tokens that a block multiplies at once: enough for the tokens of most experts."""
    mean = pairs / experts
    return 1 if mean <= 4 else 2 if mean <= 10 else 4


def _warps(tiles: int, width: int, gated: bool) -> tuple[int, int, int]:
    """Warps of a block that share a row, warps on adjacent rows, and chunks on their way, for products of so many tiles
    of 16 rows: with few of them, more warps share a row, and each has more chunks on their way."""
    if tiles < 2048 and width >= 4 * CHUNK_BYTES:
        return 2, 4, 6
    return 1, 4, 4


def source(variant: ExpertVariant) -> str:
    """The CUDA C++ to compile."""
    return program(
        asdict(variant),
        "runtime/ptx.cuh",
        "runtime/sm90.cuh",
        "weight_only/weight_mm_experts_sm90.cu",
    )


@nvrtc.variants
def _kernel(variant: ExpertVariant, device: int) -> nvrtc.Kernel:
    module = nvrtc.Module(nvrtc.compiled(source(variant), "sm_90a"))
    return module.kernel("expert_mm", 17, shared=variant.shared, overlaps=True)
