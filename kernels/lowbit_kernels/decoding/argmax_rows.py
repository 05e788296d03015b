"""The largest score of each row.

    token[r] = the first k with the largest scores[r, k]

    scores  float [R, V], V at least 1
    token   int64 [R]; a NaN counts as the largest score, so that a choice among NaNs shows

`next_token` also writes the tokens where the next step of decoding reads them, and increments its position.

torch.argmax gives a row to few programs. Here one launch searches chunks of all rows and another one the chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, tl, triton

BLOCK = 1024
"""Scores that a program searches."""


@op(
    "empty(torch.int64, R)",
    scores="float [R, V]; flatten leading dimensions first",
    rules={"V > 0": "rows must have a score, got {V}"},
)
def argmax_rows(scores: Tensor) -> Tensor:
    """The index of the first largest score of each row, int64 [R]."""
    return scores.argmax(-1)


reference = argmax_rows.reference


@op(
    "empty(torch.int64, R)",
    writes=("token", "position"),
    scores="float [R, V]",
    token="int64 [R, 1]",
    position="int64 [1]",
    rules={
        "V > 0": "rows must have a score, got {V}",
        "token.is_contiguous()": "token must be contiguous",
    },
)
def next_token(scores: Tensor, token: Tensor, position: Tensor) -> Tensor:
    """The index of the first largest score of each row, int64 [R], which it also writes to `token` [R, 1]; `position`
    [1] grows by 1."""
    chosen = argmax_rows.reference(scores)
    token.copy_(chosen[:, None])
    position.add_(1)
    return chosen


@jit
def _argmax_of_chunks(scores, best, best_at, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    own = tl.load(scores + row * stride + columns, mask=columns < width, other=float("-inf"))
    own = own.to(tl.float32)
    own = tl.where(own == own, own, float("inf"))
    largest, at = tl.max(own, 0, return_indices=True)
    tl.store(best + row * chunks + chunk, largest)
    tl.store(best_at + row * chunks + chunk, tl.minimum(chunk * BLOCK + at, width - 1))


@jit
def _argmax_of_rows(
    best, best_at, token, into, position, chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    wait_for_previous(PDL)
    own = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    _, first = tl.max(own, 0, return_indices=True)
    chosen = tl.load(best_at + row * chunks + tl.minimum(first, chunks - 1))
    tl.store(token + row, chosen.to(tl.int64))
    if into is not None:
        tl.store(into + row, chosen.to(tl.int64))
        if row == 0:
            tl.store(position, tl.load(position) + 1)


@argmax_rows.kernel
def _launch(scores: Tensor) -> Tensor | None:
    """The Triton kernels where they run, else the reference."""
    return _launched("argmax_rows", scores)


@next_token.kernel
def _launch_next(scores: Tensor, token: Tensor, position: Tensor) -> Tensor | None:
    """The same; the second launch also writes `token` and `position`."""
    return _launched("next_token", scores, token, position)


def _launched(name: str, scores: Tensor, *written: Tensor) -> Tensor | None:
    rows, width = scores.shape
    if not runs_on(scores.device) or rows == 0:
        return None
    ran(name, "triton")
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    chunks = triton.cdiv(width, BLOCK)
    best = torch.empty((rows, chunks), dtype=torch.float32, device=scores.device)
    best_at = torch.empty((rows, chunks), dtype=torch.int32, device=scores.device)
    token = torch.empty(rows, dtype=torch.int64, device=scores.device)
    overlaps = overlap_options(scores.device)
    with torch.cuda.device_of(scores):
        _argmax_of_chunks[(rows, chunks)](
            *(scores, best, best_at, width, scores.stride(0)), BLOCK=BLOCK, **overlaps
        )
        _argmax_of_rows[(rows,)](
            *(best, best_at, token, *(written or (None, None)), chunks),
            CHUNKS=triton.next_power_of_2(chunks),
            **overlaps,
        )
    return token
