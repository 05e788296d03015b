"""The kernels of one new position but for attention: `gate_next`, `norm_next` and `choose_next`.

Where launches overlap (OVERLAPS; programmatic dependent launch), a kernel lets the next one begin when it begins
itself, and waits for the results of the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 256
"""Of silu(gate) · up, elements of a program."""
CHOICE_BLOCK = 1024
"""Of logits, those that a program looks through."""


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """Lets the next launch begin, which may then be before the one before this one is done: it must read nothing that
    either writes until it has waited itself, as the linears and the kernels here do."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Until the launch before is done and its results are seen."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def factor_of(x, row, width, eps, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of a row: what RMS norm multiplies it by."""
    columns = tl.arange(0, BLOCK)
    own = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(own * own, 0) / width + eps)


@triton.jit
def _norm_rows(x, weight, result, eps, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    let_next_begin(OVERLAPS)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    own = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    y = own * tl.rsqrt(tl.sum(own * own, 0) / width + eps) * factor
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gate_rows(
    gate,
    up,
    x,
    result,
    gate_stride,
    up_stride,
    width,
    x_width,
    eps,
    BLOCK: tl.constexpr,
    X_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """x is read before the wait: it is older than the launch before, as in `_stretches`."""
    let_next_begin(OVERLAPS)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    factor = factor_of(x, row, x_width, eps, X_BLOCK)
    wait_for_previous(OVERLAPS)
    own = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    own, other = own * factor, other * factor
    y = own * tl.sigmoid(own) * other
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _best_of_chunks(logits, best, best_at, vocabulary, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Of equal ones the first. An index stays within the vocabulary, whatever NaNs there are."""
    let_next_begin(OVERLAPS)
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(OVERLAPS)
    own = tl.load(
        logits + row * vocabulary + columns, mask=columns < vocabulary, other=float("-inf")
    )
    largest, at = tl.max(own.to(tl.float32), 0, return_indices=True)
    tl.store(best + row * chunks + chunk, largest)
    tl.store(best_at + row * chunks + chunk, tl.minimum(chunk * BLOCK + at, vocabulary - 1))


@triton.jit
def _choose(best, best_at, token, position, chunks, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    let_next_begin(OVERLAPS)
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    wait_for_previous(OVERLAPS)
    own = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, first = tl.max(own, 0, return_indices=True)
    chosen = tl.load(best_at + row * chunks + tl.minimum(first, chunks - 1))
    tl.store(token + row, chosen.to(tl.int64))
    if row == 0:
        tl.store(position, tl.load(position) + 1)


def overlapping(device: torch.device) -> dict[str, bool]:
    """Of a Triton launch: whether it may begin before the one before it is done, for which its kernel waits."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `norm_next`."""
    x, width = x.contiguous(), x.shape[-1]
    result = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 256, 1), 16)
    _norm_rows[(x.numel() // width,)](
        *(x, weight, result, eps, width),
        BLOCK=block,
        num_warps=warps,
        **overlapping(x.device),
    )
    return result


def gate_rows(gate: Tensor, up: Tensor, x: Tensor, eps: float) -> Tensor:
    """As `gate_next`."""
    batch, _, width = gate.shape
    if not x.is_contiguous():  # a copy would be younger than it may be
        raise ValueError(f"x must be contiguous, got strides {x.stride()}; pass x.contiguous()")
    gate, up = (t if t.stride(2) == 1 else t.contiguous() for t in (gate, up))
    result = gate.new_empty(gate.shape)
    _gate_rows[(batch, triton.cdiv(width, GATE_BLOCK))](
        *(gate, up, x, result),
        *(gate.stride(0), up.stride(0), width, x.shape[-1], eps),
        BLOCK=GATE_BLOCK,
        X_BLOCK=triton.next_power_of_2(x.shape[-1]),
        **overlapping(gate.device),
    )
    return result


def choose_rows(logits: Tensor, token: Tensor, position: Tensor) -> None:
    """As `choose_next`."""
    batch, _, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHOICE_BLOCK)
    best = torch.empty((batch, chunks), dtype=torch.float32, device=logits.device)
    best_at = torch.empty((batch, chunks), dtype=torch.int32, device=logits.device)
    overlaps = overlapping(logits.device)
    _best_of_chunks[(batch, chunks)](
        *(logits.contiguous(), best, best_at, vocabulary), BLOCK=CHOICE_BLOCK, **overlaps
    )
    _choose[(batch,)](
        *(best, best_at, token, position, chunks),
        CHUNKS=triton.next_power_of_2(chunks),
        **overlaps,
    )
