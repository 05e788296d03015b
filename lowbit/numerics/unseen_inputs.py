"""An estimate of the inputs that a weight reads, where no batch has shown them, and stored scales that suit it.

A trained weight W [N, K] reads the directions that its inputs have, since its gradients are sums of them. So the sums
Σ x xᵀ of inputs are taken to grow with A = WᵀW / mean(diag WᵀW), but by less: as its square root, by the Padé
approximant around 1

    H = (I + 3 A) (3 I + A)⁻¹ = 3 I − 8 (3 I + A)⁻¹,

which is 1/3 where A is 0, and at most 3. Each block of a row then takes the stored scale (for NVFP4 an e4m3 number)
with the least (ŵ − w) H (ŵ − w)ᵀ, one block after another, all other blocks as they are by then. Codes are the
nearest ones. Errors of `INPUTS` neighbouring inputs are seen together.

A scale decides the codes of its block, so each block has one error vector d for each scale that it may take, whatever
the other blocks do. All d, and their own costs d H dᵀ, are computed once. A block then compares d H dᵀ + 2 d · r, where
r is what the errors of all other blocks add up to.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.spec import Spec

QParams = tuple[Tensor, Tensor | None]

INPUTS = 2048
"""Inputs of which H is made at once: it takes some matrices of this size in float32."""
ROWS = {"cpu": 2**8, "cuda": 2**13}
"""Rows that choose at once, by the type of device, of several matrices where these have fewer. The errors of all their
scales are in memory: 4 bytes for each of `INPUTS` and each scale. Other devices as "cuda"."""
PANEL = 128
"""Inputs whose r is computed by one product."""
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
def search_qparams(
    spec: Spec,
    x: Tensor,
    scale_dtype: torch.dtype = torch.float32,
    joint: Tensor | None = None,
) -> QParams:
    """Scales that suit the inputs of trained weights: stored ones of tables, of blocks of one row. Those of all other
    formats have the least squared error (`Spec.search_qparams`).

    Args:
        spec: how x is quantized.
        x: real floating [..., N, K], not padded.
        scale_dtype, joint: as for `Spec.search_qparams`.
    """
    stored, table = spec.scales, spec.format
    is_stored = stored is not None and stored.is_byte and isinstance(table, LookupTable)
    *rows, group = spec.block_size(tuple(x.shape))
    if not is_stored or set(rows) != {1} or x.is_meta or not x.numel():
        return spec.search_qparams(x, scale_dtype, joint=joint)
    assert stored is not None and isinstance(table, LookupTable)
    largest = {
        name: p.reshape(-1, *p.shape[-2:])
        for name, p in spec.choose_scales(spec.pad(x), joint=joint).items()
    }
    count = largest["scale"].shape[-1]
    found = torch.empty((*x.shape[:-1], count), dtype=torch.float32, device=x.device)
    matrices, scales = (t.reshape(-1, *t.shape[-2:]) for t in (x, found))
    step, most = max(INPUTS // group, 1), ROWS.get(x.device.type, ROWS["cuda"])
    together = max(most // max(x.shape[-2], 1), 1)
    parts = itertools.product(range(0, len(matrices), together), range(0, count, step))
    with torch.autocast(x.device.type, enabled=False):
        for first, at in parts:
            experts, blocks = slice(first, first + together), slice(at, at + step)
            w = matrices[experts, :, at * group : (at + step) * group].float()
            choice = _Choice(stand_in(w), group, table)
            for row in range(0, w.shape[1], most):
                own = experts, slice(row, row + most), blocks
                start = {
                    n: p[experts] if n in stored.shared else p[own] for n, p in largest.items()
                }
                offered = [stored.decode(p) for p in (start, *stored.neighbours(start))]
                scales[own] = choice.of(w[:, row : row + most], torch.stack(offered, -1))
    return found, None


class _Choice:
    """Scales for the rows of E matrices that have these sums H [E, K, K]."""

    def __init__(self, hessian: Tensor, group: int, table: LookupTable) -> None:
        self.group, self.table = group, table
        missing = -hessian.shape[-1] % group
        self.others = F.pad(hessian, (0, missing, 0, missing))
        """H without its blocks on the diagonal."""
        within = self.others.unflatten(-1, (-1, group)).unflatten(1, (-1, group))
        within = within.diagonal(dim1=1, dim2=3)
        self.own = within.permute(3, 0, 1, 2).contiguous()
        """These blocks, [blocks, E, group, group]."""
        within.zero_()

    def of(self, w: Tensor, tried: Tensor) -> Tensor:
        """One of the scales `tried` [E, N, blocks, choices] for each block of w [E, N, K]."""
        group, (experts, rows, count, choices) = self.group, tried.shape
        # Errors are relative to the row's largest value, so that no square overflows or underflows.
        largest = w.abs().amax(-1, keepdim=True)
        unit = torch.ones_like(largest).ldexp(-largest.frexp().exponent.clamp(-100, 120))
        w = F.pad(w, (0, count * group - w.shape[-1]))
        x = w.unflatten(-1, (count, group)).movedim(2, 0).contiguous().unsqueeze(-2)
        scale = tried.movedim(2, 0).contiguous().unsqueeze(-1)
        errors = w.new_empty(count, experts, rows, choices, group)
        costs = w.new_empty(count, experts, rows * choices)
        panel = max(PANEL // group, 1)
        for at in range(0, count, panel):
            some = slice(at, at + panel)
            error = self.table.nearest(x[some] / scale[some]).mul_(scale[some])
            error.sub_(x[some]).mul_(unit[..., None])
            flat = error.view(-1, rows * choices, group)
            cost = (flat @ self.own[some].flatten(0, 1)).mul_(flat).sum(-1)
            errors[some], costs[some] = error, cost.view(-1, experts, rows * choices)
        errors, costs = errors.view(count, -1, choices, group), costs.view(count, -1, choices)

        def take(g: int) -> Tensor:
            at = chosen[g, :, None, None].expand(-1, 1, group)
            return errors[g].gather(1, at).view(experts, rows, group)

        chosen = costs.argmin(-1)
        wrong = torch.cat([take(g) for g in range(count)], -1)
        for at in [*range(0, count, panel)] * SWEEPS:
            columns = slice(at * group, (at + panel) * group)
            slope = wrong @ self.others[..., columns]
            for g in range(at, min(at + panel, count)):
                own = slice(g * group, (g + 1) * group)
                rest = slope[..., (g - at) * group : (g - at + 1) * group].reshape(-1, group, 1)
                cost = torch.baddbmm(costs[g, ..., None], errors[g], rest, alpha=2)
                chosen[g] = cost.squeeze(-1).argmin(-1)
                moved = take(g)
                slope.baddbmm_(moved - wrong[..., own], self.others[:, own, columns])
                wrong[..., own] = moved
        return tried.gather(-1, chosen.T.reshape(experts, rows, count, 1)).squeeze(-1)
