"""A router's choice: the most probable experts of each token.

p = softmax of a row of logits, in float32
ids[t]      the K experts with the largest p, the largest first; of equal ones any order
weights[t]  their p, or p / the sum of these where `normalized`

logits      float [T, E]
weights     dtype [T, K], contiguous
ids         int64 [T, K], contiguous
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton


@op(
    "empty(dtype, T, top), empty(torch.int64, T, top)",
    logits="float [T, E]",
    dtype="float",
    rules={"1 <= top <= E": "top must be 1 to the {E} experts, got {top}"},
)
def top_experts(
    logits: Tensor, top: int, *, normalized: bool = False, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weights and the ids of each token's `top` = K experts; see the module's docstring."""
    weights, ids = logits.float().softmax(-1).topk(top)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), ids


reference = top_experts.reference


@jit
def _kernel(
    logits,
    weights,
    ids,
    experts,
    stride,
    TOP: tl.constexpr,
    PLACES: tl.constexpr,  # a power of two, at least TOP
    NORMALIZED: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    token, every, places = (
        tl.program_id(0).to(tl.int64),
        tl.arange(0, EXPERTS),
        tl.arange(0, PLACES),
    )
    wait_for_previous(PDL)
    own = tl.load(logits + token * stride + every, mask=every < experts, other=float("-inf"))
    own = own.to(tl.float32)
    p = tl.exp(own - tl.max(own, 0))
    p = p / tl.sum(p, 0)  # all NaN if one is
    left = tl.where(every < experts, p, -1.0)
    chosen = tl.zeros((PLACES,), tl.float32)
    chosen_ids = tl.zeros((PLACES,), tl.int32)
    for i in tl.static_range(TOP):
        largest, at = tl.max(left, 0, return_indices=True)
        chosen = tl.where(places == i, largest, chosen)
        chosen_ids = tl.where(places == i, tl.minimum(at, experts - 1), chosen_ids)
        left = tl.where(every == at, -1.0, left)
    if NORMALIZED:
        chosen = chosen / tl.sum(chosen, 0)
    to, inside = token * TOP + places, places < TOP
    tl.store(weights + to, chosen.to(weights.dtype.element_ty), mask=inside)
    tl.store(ids + to, chosen_ids.to(tl.int64), mask=inside)


@top_experts.kernel
def _launch(logits, top, normalized, dtype) -> tuple[Tensor, Tensor] | None:
    """The Triton kernel where it runs, else the reference."""
    tokens, experts = logits.shape
    if not runs_on(logits.device) or tokens == 0:
        return None
    ran("top_experts", "triton")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    stored, device = stored_dtype(dtype, logits.device), logits.device
    weights = torch.empty((tokens, top), dtype=stored, device=device)
    ids = torch.empty((tokens, top), dtype=torch.int64, device=device)
    with torch.cuda.device_of(logits):
        _kernel[(tokens,)](
            *(logits, weights, ids, experts, logits.stride(0)),
            TOP=top,
            PLACES=triton.next_power_of_2(top),
            NORMALIZED=normalized,
            EXPERTS=triton.next_power_of_2(experts),
            num_warps=1,
            **overlap_options(device),
        )
    return weights.to(dtype), ids
