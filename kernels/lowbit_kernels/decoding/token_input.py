"""What a decoder's first block reads: embeddings of one token a sequence, and the rotary angles of its position.

x[b] = embedding[token[b]]
c = (table_c[position], table_c[position])        c one of cos and sin

token         int64 [B, 1], 0 to V - 1; others make their x NaN
position      int64 [1], 0 to S - 1; others make the angles NaN
embedding     float [V, D], V at least 1
cos, sin      float [S, P], S at least 1: a cosine or sine for each pair of a head's elements
x             embedding's dtype [B, 1, D], contiguous
angles        embedding's dtype [1, 1, 2 P] each, as `decode_attention` takes them
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, tl, triton

BLOCK = 1024
"""Columns of an embedding that a program copies."""
ANGLES = "empty(embedding.dtype, 1, 1, 2 * P)"


@op(
    f"empty(embedding.dtype, B, 1, D), {ANGLES}, {ANGLES}",
    token="int64 [B, 1]",
    position="int64 [1]",
    embedding="float [V, D]",
    cos="float [S, P]",
    sin="float [S, P]",
    rules={"V > 0 and S > 0": "tables must have a row, got {V} embeddings and {S} positions"},
)
def token_input(
    token: Tensor, position: Tensor, embedding: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x, and the cosines and sines; see the module's docstring."""
    x = _row(embedding, token)
    angles = [_row(t, position).to(x.dtype).repeat(1, 2)[None] for t in (cos, sin)]
    return x, angles[0], angles[1]


reference = token_input.reference


def _row(table: Tensor, index: Tensor) -> Tensor:
    """table[index], NaN where there is no such row."""
    exists = (index >= 0) & (index < len(table))
    found = table[index.clamp(0, len(table) - 1)]
    return torch.where(exists[..., None], found, torch.nan)


@jit
def _kernel(
    token,
    position,
    embedding,
    cos,
    sin,
    x,
    cos_of,
    sin_of,
    batch,
    rows,
    width,
    positions,
    pairs,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, PAIRS)
    wait_for_previous(PDL)
    if row < batch:
        of_token = tl.load(token + row)
        inside = columns < width
        exists = inside & (of_token >= 0) & (of_token < rows)
        found = tl.load(embedding + of_token * width + columns, mask=exists, other=float("nan"))
        tl.store(x + row * width + columns, found, mask=inside)
    else:
        of_position = tl.load(position)
        held = pair < pairs
        seen = held & (of_position >= 0) & (of_position < positions)
        from_ = of_position * pairs + pair
        c = tl.load(cos + from_, mask=seen, other=float("nan")).to(cos_of.dtype.element_ty)
        s = tl.load(sin + from_, mask=seen, other=float("nan")).to(sin_of.dtype.element_ty)
        for half in tl.static_range(2):
            tl.store(cos_of + half * pairs + pair, c, mask=held)
            tl.store(sin_of + half * pairs + pair, s, mask=held)


@token_input.kernel
def _launch(token, position, embedding, cos, sin) -> tuple[Tensor, Tensor, Tensor] | None:
    """The Triton kernel where it runs and tables have no gaps, else the reference."""
    tables = embedding, cos, sin
    if (
        not runs_on(embedding.device)
        or not all(t.is_contiguous() and t.numel() for t in tables)
        or not len(token)
    ):
        return None
    ran("token_input", "triton")
    (rows, width), (positions, pairs), batch = embedding.shape, cos.shape, len(token)
    x = embedding.new_empty((batch, 1, width))
    angles = [embedding.new_empty((1, 1, 2 * pairs)) for _ in range(2)]
    with torch.cuda.device_of(embedding):
        _kernel[(batch + 1, triton.cdiv(width, BLOCK))](
            *(token.contiguous(), position, embedding, cos, sin, x, *angles),
            *(batch, rows, width, positions, pairs),
            BLOCK=BLOCK,
            PAIRS=triton.next_power_of_2(pairs),
            **overlap_options(embedding.device),
        )
    return x, angles[0], angles[1]
