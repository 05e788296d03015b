"""The products of frozen experts: of rows that are sorted by expert, and of tokens that a router sends to some of them.

The second reads the packed weights of the chosen experts in place, by ids that stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.frozen.weight_only import group_size_of, has_int_kernel
from lowbit.numerics.granularity import PerGroup, PerRow
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.tracing import tracer
from lowbit_kernels.runtime.nvrtc import runs_on_hopper
from lowbit_kernels.weight_only.weight_operands import GROUP_STEP, HALVES

_PlainAttributes = torch._C.DisableTorchFunctionSubclass
_E4M3, _WHOLE_BYTES = Float8(torch.float8_e4m3fn), (Int(4), Int(8))
WHOLE_STREAM = 128
"""Codes of a row come in multiples of it, where they take other numbers of bits than 4 and 8."""


def grouped_product(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    """`lowbit.inference.grouped_linear` in eager code."""
    _check_grouped(x, weight, offsets)
    if _has_grouped_kernel(x, weight):
        codes, group_size = weight.codes, group_size_of(x, weight)
        tensors = (x, codes, weight.scale, weight.zero_point, offsets)
        with tracer.running(x, weight, "grouped_linear"):
            return kernels.grouped_linear.grouped_linear(*tensors, group_size=group_size)
    return _one_by_one(x, weight, offsets)


def _has_grouped_kernel(x: Tensor, weight: Any) -> bool:
    if not x.is_cuda or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if getattr(weight, "stored_as", None) is None or weight.activation is not None:
        return False
    return has_int_kernel(x, weight)


def _one_by_one(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    bounds = list(zip([0, *ends], [*ends, x.shape[0]], strict=True))
    if any(not 0 <= start <= end <= x.shape[0] for start, end in bounds):
        raise ValueError(f"offsets {ends} must rise and end within the {x.shape[0]} rows of x")
    parts = [
        F.linear(x[start:end], weight[expert]) for expert, (start, end) in enumerate(bounds[:-1])
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1] if ends else x.shape[0], weight.shape[1])
    return torch.cat([*parts, rest])


def _check_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_linear takes x [M, K] and weight [E, N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_linear of a {x.dtype} input with a weight of dtype {weight.dtype}: convert one"
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (weight.shape[0],):
        raise ValueError(
            f"offsets must be int32 [{weight.shape[0]}], got {offsets.dtype} {tuple(offsets.shape)}"
        )


# ---- tokens that a router sends to experts -----------------------------------------------------------------------


def has_expert_kernel(
    stored_as: str | None, spec: Spec, activation: Spec | None, k: int, device: torch.device
) -> bool:
    """True if `chosen_product` multiplies such weights [E, N, k], on a GPU without waiting for the host: all codes of 1
    to 8 bits, float8 e4m3 and tables of up to 16 numbers, a scale a row, or in groups of multiples of 32. GPUs other
    than Hopper's: int4, int8, float8 and MXFP4.

    Args:
        stored_as: "integers", "float8" or "table"; the kernel takes no others.
        spec, activation: of the weight, and of its input (None: not rounded).
        k: inputs.
        device: where the weight is.
    """
    if activation is not None or stored_as not in ("integers", "float8", "table"):
        return False
    granularity, format = spec.granularity, spec.format
    if isinstance(granularity, PerGroup):
        if granularity.group_size % GROUP_STEP:
            return False
    elif not isinstance(granularity, PerRow):
        return False
    if stored_as == "float8":
        return format == _E4M3
    if format.bits > (4 if stored_as == "table" else 8) or spec.zero_point_is_value:
        return False
    is_whole = format.bits in (4, 8) or k % WHOLE_STREAM == 0
    return _runs_anywhere(spec) or device.type == "cpu" or (is_whole and runs_on_hopper(device))


def _runs_anywhere(spec: Spec) -> bool:
    """True for formats of `has_expert_kernel` that have a kernel for many tokens on every GPU."""
    format = spec.format
    whole = format in _WHOLE_BYTES or (format == E2M1 and spec.scale_format == "e8m0")
    return whole or format == _E4M3


def chosen_product(
    x: Tensor, weight: Any, ids: Tensor, bias: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Each token times the weights of its experts, transposed, plus their biases: [P, N], or [P, N / 2] where gated.

    Args:
        x: [T, K] in 16 bits.
        weight: [E, N, K], or [E, K, N] that holds this transposed, for which `has_expert_kernel` holds.
        ids: int64 [P], the experts of the tokens, P / T of each.
        bias: [E, N].
        gated: return silu(gate) * up of the two halves of the columns.
    """
    with tracer.running(x, weight, "expert_linear", ids.shape[0]), _PlainAttributes():
        return kernels.expert_linear.expert_linear(
            x, ids=ids, bias=bias, gated=gated, **weight.expert_arguments()
        )


def stacked_product(x: Tensor, weight: Any, offsets: Tensor | None = None) -> Tensor | None:
    """x [E, M, K], or x [M, K] whose rows for each expert end at `offsets`, times a weight [E, K, N] that holds
    [E, N, K] transposed, by the kernels of `chosen_product`; None where it has none. Not on CPUs, where converted
    experts have the outputs of those that were prepared for QAT, to the bit."""
    if x.dtype not in HALVES or not (x.is_cuda and weight.transposed):
        return None
    facts = weight.stored_as, weight.spec, weight.activation, x.shape[-1], x.device
    if not has_expert_kernel(*facts):
        return None
    if offsets is not None and _runs_anywhere(weight.spec):  # the rows are sorted already
        with tracer.running(x, weight, "grouped_linear"), _PlainAttributes():
            arguments = weight.expert_arguments()
            return kernels.grouped_linear.grouped_linear(x, offsets=offsets, **arguments)
    rows = torch.arange(x.shape[-2], device=x.device, dtype=torch.int32)
    if offsets is not None:
        return chosen_product(x, weight, torch.searchsorted(offsets, rows, right=True))
    experts = torch.arange(len(weight), device=x.device).unsqueeze(1).expand(-1, len(rows))
    y = chosen_product(x.reshape(-1, x.shape[-1]), weight, experts.reshape(-1))
    return y.view(*x.shape[:2], -1)
