"""PruneExperts: a mixture of experts keeps those that matter most, and its router loses the rows of the others.

The saliency of an expert j is what it adds to the output of the mixture, over the tokens x that the router sends to it:

    S_j = Σ over x of   g_j(x) · ‖f_j(x)‖

with the weight g_j(x) by which the mixture multiplies the expert's output f_j(x). REAP (arXiv 2510.13999) takes the
mean in place of the sum, in which the number of an expert's tokens does not count. Each layer drops the experts with
the least S_j. Tokens that went to them go to the next best of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lowbit.convert import Target
from lowbit.convert.experts import COUNTS, routers_of, stacked
from lowbit.inference.calibration.batches import Batches
from lowbit.inference.calibration.folding import watched
from lowbit.inference.calibration.step import Step
from lowbit.numerics.settings import is_whole

By = Literal["sum", "reap", "frequency"]
_GROUPS = ("n_group", "num_group", "n_groups")
"""Where routers say into how many groups they divide their experts."""


class _Mixture(NamedTuple):
    """Stacked experts, their name, and the tensors of them and of their router with an entry for each expert."""

    name: str
    experts: nn.Module
    held: list[Tensor]


@dataclass(frozen=True)
class PruneExperts(Step):
    """Drop the experts of each layer that matter least. Comes before steps that round, and changes the outputs.

    For experts that are stacked in parameters [E, …] and called with hidden states, indices and weights, as those of
    transformers are. The model's config gets the new number, so that it saves and loads.

    Args:
        keep: how many experts of each layer stay; a float: what share of them.
        by: what counts. "sum": the sum of the router's weight times the norm of an expert's output over its tokens.
            "reap": the mean over them. "frequency": their number.

    Raises ValueError for other values.
    """

    keep: int | float = 0.5
    by: By = "sum"
    in_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise ValueError(f"by must be one of {', '.join(get_args(By))}, got {self.by!r}")
        is_count = is_whole(self.keep) and self.keep > 0
        if not is_count and not (isinstance(self.keep, float) and 0 < self.keep <= 1):
            raise ValueError(f"keep must be a count from 1, or a float up to 1, got {self.keep!r}")

    @torch.no_grad()
    def fold(self, model: nn.Module, targets: Sequence[Target], batches: Batches) -> dict[int, str]:
        mixtures, size = _mixtures(model)
        sums = [m.held[0].new_zeros((2, size), dtype=torch.float64) for m in mixtures]
        visited = 0

        def see(i: int, *given: Tensor) -> None:
            nonlocal visited
            sums[i] += _saliency(mixtures[i], size, *given)
            visited = max(visited, given[1].shape[1])

        watched(model, [m.experts for m in mixtures], batches, see)
        batches.ranks.add_up(*sums)
        batches.ranks.alike(*sums)
        visited = max(batches.ranks.gathered(visited))
        kept = int(self.keep) if is_whole(self.keep) else round(self.keep * size)
        if not visited <= kept <= size:
            raise ValueError(
                f"{self} keeps {kept} of {size} experts of a layer, and each token takes {visited}; accepted: from "
                f"{visited} to {size}"
            )
        for mixture, (total, tokens) in zip(mixtures, sums, strict=True):
            order = self._scores(total, tokens).argsort(descending=True, stable=True)
            best = order[:kept].sort().values
            for t in mixture.held:
                t.data, t.grad = t.data[best.to(t.device)], None
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None))}
        for owner in (*model.modules(), *configs.values()):
            for name in COUNTS:
                if getattr(owner, name, None) == size:
                    setattr(owner, name, kept)
        return {id(m.experts): f"{self.by}, {kept} of {size} kept" for m in mixtures}

    def _scores(self, total: Tensor, tokens: Tensor) -> Tensor:
        """[E], of which the least go, by the sums of g · ‖f‖ over an expert's tokens, and their number, each [E]."""
        scores = {"reap": total / tokens.clamp(min=1), "sum": total, "frequency": tokens}
        return scores[self.by]


def _saliency(mixture: _Mixture, size: int, *given: Tensor) -> Tensor:
    """float64 [2, E]: sums of g · ‖f‖ and of 1 over the tokens of each expert."""
    if len(given) != 3 or given[1].shape != given[2].shape or given[1].is_floating_point():
        raise ValueError(
            f"{mixture.name}: PruneExperts takes experts that are called with hidden states [T, K], indices [T, n] and "
            f"weights [T, n], got {[tuple(t.shape) for t in given]}"
        )
    x, chosen, weights = given
    found = x.new_zeros((2, len(x), size), dtype=torch.float64)
    for own, weight in zip(chosen.split(1, 1), weights.split(1, 1), strict=True):
        output = mixture.experts.forward(x, own, torch.ones_like(weight))
        norm = output.double().norm(dim=-1, keepdim=True)
        found[0].scatter_(1, own, weight.double() * norm)
        found[1].scatter_(1, own, 1.0)
    return found.sum(1)


def _mixtures(model: nn.Module) -> tuple[list[_Mixture], int]:
    """The mixtures of a model, and the number of their experts. Raises ValueError for those that cannot be pruned."""
    modules, routers, found = dict(model.named_modules()), routers_of(model), []
    for name, module in modules.items():
        if not (stacks := stacked(module, name)):
            continue
        size, block = len(getattr(module, stacks[0])), name.rpartition(".")[0]
        beside = [modules[r] for r in sorted(routers) if r.rpartition(".")[0] == block]
        held = [[*m.parameters(), *m.buffers()] for m in (module, *beside)]
        own = [[t for t in tensors if t.ndim and len(t) == size] for tensors in held]
        owners: list[Any] = [module, modules[block], *beside, getattr(model, "config", None)]
        groups = max(int(getattr(owner, g, None) or 1) for owner in owners for g in _GROUPS)
        plain = all(type(t.data) is Tensor for t in own[0])
        if not any(own[1:]) or groups > 1 or not plain:
            raise ValueError(
                f"{name}: PruneExperts takes plain stacked experts beside a router with a row for each of them, in one "
                f"group, got {type(module).__name__} beside {[type(m).__name__ for m in beside]}, groups: {groups}"
            )
        found.append(_Mixture(name, module, [t for tensors in own for t in tensors]))
    sizes = {m.name: len(m.held[0]) for m in found}
    if len({*sizes.values()}) != 1:
        raise ValueError(
            "PruneExperts takes a model whose layers have the same number of stacked experts, got "
            f"{sizes or 'no experts'}"
        )
    return found, next(iter(sizes.values()))
