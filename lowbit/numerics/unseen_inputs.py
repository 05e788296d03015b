"""What stands for the inputs of a weight that no batch has shown, and stored scales that suit them.

A trained weight W [N, K] reads the directions that its inputs have, since its gradients are sums of them. So the sums
Σ x xᵀ of inputs are taken to grow with A = WᵀW / mean(diag WᵀW), but by less: as its square root, by the Padé
approximant around 1

    H = (I + 3 A) (3 I + A)⁻¹ = 3 I − 8 (3 I + A)⁻¹,

which is 1/3 where A is 0, and at most 3. Of stored scales, such as the e4m3 numbers of NVFP4, each block of a row then
takes the one with the least (ŵ − w) H (ŵ − w)ᵀ, one block after another, all other blocks as they are by then. Codes
are the nearest ones. Errors of `INPUTS` neighbouring inputs are seen together.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.search import MARGIN
from lowbit.numerics.spec import Spec

QParams = tuple[Tensor, Tensor | None]

INPUTS = 2048
"""Inputs of which H is made at once: it takes some matrices of this size in float32."""
ROWS = {"cpu": 2**10, "cuda": 2**15}
"""Rows that choose at once, by the type of device: all candidates of their scales are in memory. Others as "cuda"."""
SWEEPS = 2
"""How often each block chooses."""


def own_sums(weight: Tensor) -> Tensor:
    """A [..., K, K] of weights [..., N, K], float32, as the module describes it."""
    w = weight.float()
    if w.numel():
        # By a power of two, which rounds nothing, so that no square leaves float32.
        exponent = w.abs().amax((-2, -1), keepdim=True).frexp().exponent
        w = w.ldexp(-exponent.clamp(min=-100))
    a = w.mT @ w
    mean = a.diagonal(dim1=-2, dim2=-1).mean(-1)
    return a.div_(mean.clamp(min=1e-30)[..., None, None])


def stand_in(weight: Tensor) -> Tensor:
    """H [..., K, K] of weights [..., N, K], float32, as the module describes it."""
    a = own_sums(weight)
    a.diagonal(dim1=-2, dim2=-1).add_(3)
    h = torch.cholesky_inverse(torch.linalg.cholesky_ex(a)[0]).mul_(-8)
    h.diagonal(dim1=-2, dim2=-1).add_(3)
    return h


@torch.no_grad()
def settled(spec: Spec, x: Tensor, qparams: QParams, joint: Tensor | None = None) -> QParams:
    """Scales that suit the inputs of trained weights: stored ones of tables, of blocks of one row. Others stay.

    Args:
        spec: how x is quantized.
        x: real floating [..., N, K], not padded.
        qparams: where each block starts, as `Spec.search_qparams` gives them: float32 [..., N, blocks] and None.
        joint: as for `Spec.search_qparams`.
    """
    stored, table = spec.scales, spec.format
    is_stored = stored is not None and stored.is_byte and isinstance(table, LookupTable)
    *rows, group = spec.block_size(tuple(x.shape))
    if not is_stored or set(rows) != {1} or x.is_meta or not x.numel():
        return qparams
    assert stored is not None and isinstance(table, LookupTable)
    start = spec.choose_scales(spec.pad(x), joint=joint)
    matrices, scales = (t.reshape(-1, *t.shape[-2:]) for t in (x, qparams[0]))
    largest = {name: p.reshape(-1, *p.shape[-2:]) for name, p in start.items()}
    step, rows_at_once = max(INPUTS // group, 1), ROWS.get(x.device.type, ROWS["cuda"])
    found = torch.empty_like(scales)
    with torch.autocast(x.device.type, enabled=False):
        for i, at in itertools.product(range(len(scales)), range(0, scales.shape[-1], step)):
            w = matrices[i, :, at * group : (at + step) * group].float()
            hessian = stand_in(w)
            for row in range(0, len(w), rows_at_once):
                own = slice(row, row + rows_at_once), slice(at, at + step)
                parts = {n: p[i] if n in stored.shared else p[i][own] for n, p in largest.items()}
                offered = (stored.decode(p) for p in (parts, *stored.neighbours(parts)))
                tried = torch.stack([scales[i][own], *offered])
                found[i][own] = _settled(w[own[0]], tried, hessian, group, table)
    return found.reshape(qparams[0].shape), None


def _settled(w: Tensor, tried: Tensor, hessian: Tensor, group: int, table: LookupTable) -> Tensor:
    """One of the scales `tried` [choices, N, blocks] for each block of w [N, K], from the first ones on."""
    # Errors are relative to the row's largest value, so that no square overflows or underflows.
    largest = w.abs().amax(1, keepdim=True)
    unit = torch.ones_like(largest).ldexp(-largest.frexp().exponent.clamp(-100, 120))

    def error(own: slice, scale: Tensor) -> Tensor:
        return table.nearest(w[:, own] / scale).mul_(scale).sub_(w[:, own]).mul_(unit)

    scales = tried[0].clone()
    blocks = [slice(at, min(at + group, w.shape[1])) for at in range(0, w.shape[1], group)]
    wrong = torch.cat([error(own, scales[:, g, None]) for g, own in enumerate(blocks)], -1)
    slope = wrong @ hessian
    for g, own in [*enumerate(blocks)] * SWEEPS:
        within, now = hessian[own, own], wrong[:, own]
        rest = slope[:, own] - now @ within
        choices = torch.cat([scales[None, :, g], tried[..., g]])
        moved = error(own, choices.unsqueeze(-1))
        cost = ((moved @ within + 2 * rest) * moved).sum(-1)
        least, at = cost.min(0)
        better = least < cost[0] - (1 - MARGIN) * cost[0].abs()
        at = torch.where(better, at, 0)[None]
        best = moved.gather(0, at[..., None].expand(1, *now.shape))[0]
        slope += (best - now) @ hessian[own]
        wrong[:, own] = best
        scales[:, g] = choices.gather(0, at)[0]
    return scales
