"""Many tokens times the weights of the experts that a router chose: launches ``weight_mm_large_batch_sm90.cu`` with
``weight_mm_experts_large_sm90.cuh``.

The stacked weights are one tall weight. Two launches of Triton sort the pairs by expert and gather their rows of x, on
the device; the kernel finds the expert of each of its tiles from where the experts' pairs end, and writes results to
the rows of their pairs. With `gated` operands a block has rows of both halves, and writes silu(gate) * up.

It takes the formats of the large-batch kernel. The weight is rounded only where `weight_lookup_sm90` says "always".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, LaunchPlan, Map, run
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.sources import program
from lowbit_kernels.runtime.triton_runtime import runs_on
from lowbit_kernels.weight_only import weight_mm_large_batch_sm90 as large
from lowbit_kernels.weight_only.expert_operands import ExpertOperands, SortedPairs, Tensors
from lowbit_kernels.weight_only.one_launch import readable
from lowbit_kernels.weight_only.pairs_by_expert import PairsByExpert
from lowbit_kernels.weight_only.weight_lookup_sm90 import Unpacking, unpacking_of
from lowbit_kernels.weight_only.weight_operands import (
    TensorLayout,
    WeightOperands,
    described,
)

TOKENS = (32, 64, 96, 128, 160)
"""The sizes of a tile. An expert whose pairs fill one tile reads and unpacks its weight once."""
BESIDES = 80
ROWS, GROUPS, BESIDE = 128, 2, 2
MOST_EXPERTS = 4096
"""Where their pairs' tiles end is in shared memory."""
Division = tuple[int, int, int, int, int, bool, int, int]
"""The macros of a `LargeBatchDivision`, without its clusters."""


def _flat(operands: ExpertOperands) -> WeightOperands | None:
    """The operands as those of one tall weight and gathered rows of x; None where weights have gaps between them."""
    codes, k = operands.codes.rows(), operands.x.shape[1]
    if codes is None:
        return None
    x = operands.x.copied((operands.pairs, k))
    scale, zeros = (
        None if t is None else t.copied((codes.shape[0], t.shape[2]))
        for t in (operands.scale, operands.zero_point)
    )
    assert scale is not None
    last = operands.group_size, operands.x.dtype, operands.format, operands.global_scale
    return WeightOperands(x, codes, scale, zeros, None, None, None, *last)


def takes(operands: ExpertOperands) -> bool:
    """True if the kernel multiplies these: the formats of the large-batch kernel, in weights that follow each other."""
    flat = _flat(operands)
    return (
        flat is not None
        and large.takes(flat)
        and operands.codes.shape[0] <= MOST_EXPERTS
        and operands.pairs < 2**30
        and flat.n < 2**31
    )


def product(operands: ExpertOperands) -> LargeExpertProduct | None:
    """The planned product; None where the device or the operands are not the kernel's, or Triton is missing."""
    device = operands.x.device
    if not (nvrtc.runs_on_hopper(device) and runs_on(device) and takes(operands)):
        return None
    return LargeExpertProduct(operands, nvrtc.multiprocessors(operands.x.device))


def division_of(operands: ExpertOperands, own: Unpacking) -> Division:
    """The tile that takes the least time for the pairs of most experts, if their numbers spread as random choices do: a
    tile of T tokens takes as long as `BESIDES` + T of them."""
    mean = operands.pairs / operands.codes.shape[0]
    most = mean + 2 * math.sqrt(mean)
    tokens = min(TOKENS, key=lambda t: math.ceil(most / t) * (BESIDES + t))
    rounded = own.rounding == "always"
    chunk = 128 if own.rounding == "never" or operands.x.shape[1] % 128 == 0 else 64
    return with_stages(
        (tokens, ROWS, GROUPS, BESIDE, 1, rounded, chunk), own, operands.codes.shape[0]
    )


def with_stages(shape: tuple, own: Unpacking, experts: int) -> Division:
    """The division with as many stages as fit into shared memory."""
    tokens, rows, groups, *_, chunk = shape
    fixed = large._fixed(tokens, rows, groups, 1, own) + 16 * large.MAX_STAGES + 4 * experts + 4
    fitting = (nvrtc.SHARED_LIMIT - fixed) // _stage(tokens, rows, own, chunk)
    return (*shape, min(fitting, large.MAX_STAGES))


def _stage(tokens: int, rows: int, own: Unpacking, chunk: int) -> int:
    """Bytes of a pipeline stage."""
    return rows * chunk * own.bits // 8 + tokens * chunk * 2


class LargeExpertProduct:
    """The product of operands for which `takes` holds."""

    def __init__(
        self, operands: ExpertOperands, multiprocessors: int, division: Division | None = None
    ) -> None:
        flat = _flat(operands)
        assert flat is not None
        own = unpacking_of(flat)
        assert own is not None
        division = division_of(operands, own) if division is None else division
        tokens, rows, groups, beside, _, _, chunk, _ = division
        (experts, n, width), pairs, k = operands.codes.shape, operands.pairs, operands.x.shape[1]
        self.by_expert = PairsByExpert(pairs, experts, operands.x)
        self.shape, self.dtype = (pairs, operands.results), operands.x.dtype
        half = 2 if operands.gated else 1
        box = min(rows // half, 128)
        pitch = flat.codes.strides[0]
        self.codes_map = (1, experts * n, width, pitch, box, chunk * flat.bits // 8)
        self.x_box = tokens // beside
        across = -(-operands.results // (rows // half * beside))
        most = across * min(pairs, pairs // tokens + experts + 1)
        self.grid = min(multiprocessors // beside, most) * beside
        wide = operands.results % 8 == 0
        self.sizes = (pairs, n, -(-k // chunk), flat.groups, across, 0, 1, int(wide))
        self.threads = 128 * (groups + 1)
        self.macros = (self.dtype, own, division, experts, operands.gated)

    @functools.cached_property
    def kernel(self) -> nvrtc.Kernel:
        """On the current device."""
        return _kernel(*self.macros, torch.cuda.current_device())

    def x_map(self, rows: Tensor) -> tuple[int, ...]:
        """The tensor map of rows of x, without its address."""
        m, k = rows.shape
        return 2, m, k, rows.stride(0) if m > 1 else -(-k // 8) * 8, self.x_box, 64

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, bias, ids, global_scale = tensors
        order, ends, rows = self.by_expert(x, ids)
        parts = (rows, codes, scale, zero_point, bias, order, ends, global_scale)
        return self.of_sorted(SortedPairs(*parts))

    def launches(self) -> LaunchPlan | None:
        """The plan for the operands as they are, in the order of `Tensors`, on the current device; None before the
        first call, and where Triton's launches cannot be planned."""
        x, codes, scale, zero_point, bias, ids, global_scale, out, order, ends, rows = range(11)
        before = self.by_expert.launches(x, ids, (order, ends, rows))
        if not before:
            return None
        buffers = self.by_expert.buffers
        pairs, pitch = buffers[-1].shape
        rows_map = Map(rows, 2, pairs, self.by_expert.k, pitch, self.x_box, 64)
        numbers = codes, scale, zero_point, bias, order, ends, global_scale, out
        last = self._launch(rows_map, numbers)
        return LaunchPlan((Buffer(self.shape, self.dtype),), buffers, (*before, last))

    def _launch(self, rows: Map, numbers: Iterable[int]) -> Launch:
        """The launch for x and, with these numbers, the other tensors of `SortedPairs` and the result."""
        codes, *others = numbers
        scale, zero_point, bias, order, ends, global_scale, out = map(Address, others)
        parts = scale, zero_point, bias, 0, 0, global_scale, out
        arguments = Map(codes, *self.codes_map), rows, *parts, *self.sizes, order, ends
        return Launch(self.kernel, self.grid, self.threads, arguments)

    def of_sorted(self, pairs: SortedPairs) -> Tensor:
        """The product of rows of x that are sorted by expert. `order`: where their results belong."""
        rows, codes, scale, zero_point, bias, order, ends, global_scale = pairs
        zero_point = None if zero_point is None else aligned(zero_point)
        bias = None if bias is None else bias.contiguous()
        rows = rows if large.is_readable(TensorLayout(*described(rows))) else readable(rows)
        own = rows, codes, aligned(scale), zero_point, bias, order, ends, global_scale
        with torch.cuda.device_of(rows):
            launch = self._launch(Map(0, *self.x_map(rows)), range(1, 9))
            plan = LaunchPlan((Buffer(self.shape, self.dtype),), (), (launch,))
            return run(plan, own)[0]


def source(
    dtype: torch.dtype, own: Unpacking, division: Division, experts: int, gated: bool
) -> str:
    """The CUDA C++ to compile."""
    own_part = program({}, "weight_only/weight_mm_experts_large_sm90.cuh")
    macros = program({"EXPERTS": experts, "GATED": gated})
    return "\n".join([macros, large.source(dtype, dtype, own, division), own_part])


@functools.cache
def _kernel(
    dtype: torch.dtype,
    own: Unpacking,
    division: Division,
    experts: int,
    gated: bool,
    device: int,
) -> nvrtc.Kernel:
    tokens, rows, groups, *_, chunk, stages = division
    shared = stages * (_stage(tokens, rows, own, chunk) + 16)
    shared += large._fixed(tokens, rows, groups, 1, own) + 4 * experts + 4
    code = source(dtype, own, division, experts, gated)
    return nvrtc.kernel(code, "weight_mm", 19, structs=2, shared=shared, overlaps=True)
