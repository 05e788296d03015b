"""The decode kernel of experts: launches ``weight_mm_experts_sm90.cu``, bound by the bytes of the chosen experts.

    out[p] = x[p // top] times the weight of expert ids[p], transposed, plus its bias,    for a token's pair p

It takes integers of 1 to 8 bits, float8 and tables of up to 16 numbers, in groups of multiples of 32, on GPUs of
compute capability 9.0. The weight is never rounded: codes minus zero points are exact in x's dtype, sums and scales are
float32. With `gated` operands it computes silu(gate) * up before it rounds.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import (
    Address,
    Argument,
    Buffer,
    Launch,
    LaunchPlan,
    run,
)
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import FLOAT_MACROS, SM90, program
from lowbit_kernels.weight_only import weight_mm_decode_sm90 as decode
from lowbit_kernels.weight_only.codes_format import E2M1
from lowbit_kernels.weight_only.expert_operands import ExpertOperands, Tensors
from lowbit_kernels.weight_only.weight_operands import (
    E4M3,
    GROUP_STEP,
    HALVES,
    SCALE_MACROS,
)

SLAB = 16
"""Chunks of 128 codes whose x for 8 tokens is in shared memory."""
MIDDLE_BYTES = 64
"""Bytes of a row's chunk of 4 or 8 bits."""


@dataclass(frozen=True)
class ExpertVariant:
    """The macros that the kernel is compiled with; the head of ``weight_mm_experts_sm90.cu`` explains each."""

    codes: str
    bits: int
    group: int
    scaling: str
    x: str
    scale: str
    zero: str
    tokens: int
    along: int
    beside: int
    depth: int
    gated: bool
    by_expert: bool
    aligned: bool
    values: str = ""
    unit_value: str = "1.0f"
    paired: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block, at most."""
        sums = self.tokens * (1 + self.along * (16 * self.beside + 1))
        sums_of_x = 2 * self.tokens * SLAB * 8 // self.tokens
        table = 256 << 2 * self.bits if self.values else 0
        return 32 * 1024 + 4 * (sums_of_x + sums) + table + 32


def takes(operands: ExpertOperands) -> bool:
    """True if the kernel multiplies these: rows of codes that begin at multiples of 16 bytes, and groups of multiples
    of 32. For float8 K is not padded, since the padding may hold NaN. Streams of other bits have whole chunks."""
    x, codes, format = operands.x, operands.codes, operands.format
    width, k = codes.shape[2], x.shape[1]
    return (
        x.dtype in HALVES
        and (format.exponent == 0 or codes.dtype == E4M3)
        and (not format.table or format.bits <= 4)
        and format.zero_point != "value"
        and operands.scale.dtype in SCALE_MACROS
        and (k == width or codes.dtype != E4M3)
        and (format.bits in (4, 8) or width % (16 * format.bits) == 0)
        and (operands.group == 0 or operands.group_size % GROUP_STEP == 0)
        and codes.misaligned == 0
        and codes.strides[2] == 1
        and all(n % 16 == 0 for n in (width, *codes.strides[:2]))
        and x.strides[1] == 1
        and min(*x.shape, *codes.shape, operands.pairs) > 0
        and max(operands.pairs, codes.shape[0], codes.shape[1]) < 2**24
    )


def _is_scaled_in_codes(operands: ExpertOperands) -> bool:
    """True for MXFP4 in bfloat16, whose numbers times their scale are exact."""
    return (
        operands.format.table == E2M1
        and operands.scale.dtype == torch.uint8
        and operands.group == GROUP_STEP
        and operands.x.dtype == torch.bfloat16
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
        tokens_at_once = _tokens(pairs, experts)
        along, beside, depth = _warps(pairs * n // 16, width, tokens_at_once)
        values, unit = decode._table_macros(operands.format, x.dtype) or ("", "1.0f")
        self.variant = ExpertVariant(
            decode._codes_macro(operands.format, x.dtype),
            operands.format.bits,
            operands.group,
            "IN_CODES" if _is_scaled_in_codes(operands) else "BY_UNIT",
            FLOAT_MACROS[x.dtype],
            SCALE_MACROS[scale.dtype],
            decode._zero_macro(operands.format),
            tokens_at_once,
            along,
            beside,
            depth,
            operands.gated,
            by_expert,
            is_aligned,
            values,
            unit,
        )
        self.shape, self.dtype = (pairs, columns), x.dtype
        self.threads = 32 * along * beside
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
        x, codes, scale, zero_point, bias, ids, global_scale = tensors
        zero_point = None if zero_point is None else zero_point.contiguous()
        bias = None if bias is None else bias.contiguous()
        own = x, codes, aligned(scale), zero_point, bias, ids.contiguous(), global_scale
        with torch.cuda.device_of(x):
            return run(self.launches(), own)[0]

    def launches(self) -> LaunchPlan:
        """The plan for the operands as they are, in the order of `Tensors`, on the current device."""
        x, codes, scale, zero_point, bias, ids, global_scale, out = map(Address, range(8))
        arguments: tuple[Argument, ...]
        arguments = x, codes, scale, zero_point, bias, global_scale, ids, out
        launch = Launch(self.kernel, self.grid, self.threads, (*arguments, *self.sizes))
        return LaunchPlan((Buffer(self.shape, self.dtype),), (), (launch,))


def _tokens(pairs: int, experts: int) -> int:
    """Tokens that a block multiplies at once: enough for those of most experts."""
    mean = pairs / experts
    return 8 if mean <= 4 else 16 if mean <= 10 else 32


def _warps(tiles: int, width: int, tokens: int) -> tuple[int, int, int]:
    """Warps of a block that share a row, warps on adjacent rows, and chunks on their way, for products of so many tiles
    of 16 rows: with few of them, more warps share a row."""
    depth = 6 if tokens == 8 else 4  # as registers suffice
    if tiles < 2048 and width >= 4 * MIDDLE_BYTES:
        return 2, 4, depth
    return 1, 4, depth


def source(variant: ExpertVariant) -> str:
    """The CUDA C++ to compile."""
    macros = {name: value for name, value in asdict(variant).items() if value != ""}
    macros["look_up"] = macros["scales_x"] = False
    own = "weight_only/weight_codes_sm90.cuh", "weight_only/weight_mm_experts_sm90.cu"
    return program(macros, *SM90, *own)


@nvrtc.variants
def _kernel(variant: ExpertVariant, device: int) -> nvrtc.Kernel:
    return nvrtc.kernel(source(variant), "expert_mm", 18, shared=variant.shared, overlaps=True)
