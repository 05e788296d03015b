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

import torch
from torch import Tensor

from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.search import MARGIN
from lowbit.numerics.spec import Spec

QParams = tuple[Tensor, Tensor | None]

INPUTS = 2048
"""Inputs of which H is made at once: it takes some matrices of this size in float32."""
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
    if not is_stored or set(rows) > {1} or x.is_meta or not x.numel():
        return qparams
    assert stored is not None and isinstance(table, LookupTable)
    scale = qparams[0]
    start = spec.choose_scales(spec.pad(x), joint=joint)
    offered = [stored.decode(p) for p in (start, *stored.neighbours(start))]
    tried = torch.stack([s.reshape(-1, *s.shape[-2:]) for s in (scale, *offered)])
    blocks = max(INPUTS // group, 1)
    found = []
    with torch.autocast(x.device.type, enabled=False):
        for i, matrix in enumerate(x.reshape(-1, *x.shape[-2:]).float()):
            columns, scales = matrix.split(blocks * group, -1), tried[:, i].split(blocks, -1)
            parts = zip(columns, scales, strict=True)
            found.append(torch.cat([_settled(w, s, group, table) for w, s in parts], -1))
    return torch.stack(found).reshape(scale.shape), None


def _settled(w: Tensor, tried: Tensor, group: int, table: LookupTable) -> Tensor:
    """One of the scales `tried` [choices, N, blocks] for each block of w [N, K], from the first ones on."""
    hessian = stand_in(w)

    def error(own: slice, scale: Tensor) -> Tensor:
        return table.nearest(w[:, own] / scale) * scale - w[:, own]

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
