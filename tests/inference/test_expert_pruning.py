"""PruneExperts against the saliency in float64, on a mixture that is called as those of transformers are."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import GPTQ, PruneExperts, Search
from lowbit.testing import launch

E, K, HIDDEN = 5, 32, 64
INT8 = lb.Int8WeightOnly()


class Router(nn.Module):
    def __init__(self, visited: int) -> None:
        super().__init__()
        self.visited, self.num_experts = visited, E
        self.weight, self.bias = nn.Parameter(torch.randn(E, K)), nn.Parameter(torch.zeros(E))
        self.register_buffer("correction", torch.zeros(E))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight, self.bias).softmax(-1)
        weights, chosen = (scores + self.correction).topk(self.visited)
        return chosen, weights / weights.sum(-1, keepdim=True)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.up = nn.Parameter(torch.randn(E, HIDDEN, K) / K**0.5)
        self.down = nn.Parameter(torch.randn(E, K, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            at, place = torch.where(chosen == e)
            own = F.linear(F.gelu(F.linear(x[at], self.up[e])), self.down[e])
            out.index_add_(0, at, own * weights[at, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self, visited: int) -> None:
        super().__init__()
        self.router, self.experts = Router(visited), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, *self.router(x))


class Model(nn.Module):
    def __init__(self, visited: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(num_local_experts=E)
        self.blocks = nn.ModuleList([Mixture(visited) for _ in range(2)])

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = x.flatten(0, -2)
        for block in self.blocks:
            x = block(x)
        return x


def batches() -> list[Any]:
    torch.manual_seed(1)
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[1, 7:] = 0
    return [torch.randn(2, 30, K), {"x": torch.randn(3, 20, K), "attention_mask": mask}]


@torch.no_grad()
def saliency(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """S of each expert of each block, and how many tokens it has."""
    twin = copy.deepcopy(model).double()
    found, counts = [], []
    given = [batches()[0].flatten(0, 1), batches()[1]["x"].flatten(0, 1)]
    counted = torch.cat(
        [torch.ones(60, dtype=torch.bool), batches()[1]["attention_mask"].flatten().bool()]
    )
    x = torch.cat(given).double()
    for block in twin.blocks:
        chosen, weights = block.router(x)
        sums, tokens = torch.zeros(2, E, dtype=torch.float64)
        for t in torch.where(counted)[0].tolist():
            for e, g in zip(chosen[t].tolist(), weights[t].tolist(), strict=True):
                f = block.experts.down[e] @ F.gelu(block.experts.up[e] @ x[t])
                sums[e] += g * f.norm()
                tokens[e] += 1
        found.append(sums / tokens.clamp(min=1))
        counts.append(tokens)
        x = block(x)
    return found, counts


@pytest.mark.parametrize("by", ["reap", "sum", "frequency"])
def test_the_least_salient_experts_go_and_the_others_stay(by: Any) -> None:
    plain = Model()
    with torch.no_grad():
        plain.blocks[0].experts.down[0] *= 1e-2  # the least, whose many tokens
        plain.blocks[0].router.bias[0] = 2.0  # make it the most frequent one
    model = copy.deepcopy(plain)
    report = lb.calibrate(model, INT8, batches(), steps=[PruneExperts(3, by), Search()])
    by_saliency, tokens = saliency(plain)
    assert by_saliency[0].argmin() == 0 == tokens[0].argmax()
    sums = [one * n for one, n in zip(by_saliency, tokens, strict=True)]
    scores = {"reap": by_saliency, "sum": sums, "frequency": tokens}[by]
    for old, new, score in zip(plain.blocks, model.blocks, scores, strict=True):
        best = score.argsort(descending=True)[:3].sort().values
        expected = copy.deepcopy(old)
        for part in (expected.router, expected.experts):
            part.num_experts = 3
            for t in (*part.parameters(), *part.buffers()):
                t.data = t.data[best]
        assert torch.equal(new.router.weight, expected.router.weight)
        assert (
            torch.equal(new.router.bias, expected.router.bias) and len(new.router.correction) == 3
        )
        lb.quantize_(expected, INT8, lambda module, name: "experts" in name)
        assert (new.experts.num_experts, new.router.num_experts) == (3, 3)
        for name in ("up", "down"):
            own, other = (getattr(m.experts, name).dequantize() for m in (new, expected))
            assert own.shape[0] == 3 and float((own - other).norm() / other.norm()) < 0.01
    assert model.config.num_local_experts == 3
    assert report.layers["blocks.0.experts.up"].method == f"PruneExperts {by}, 3 of 5 kept, Search"
    shapes = {e.fqn: e.shape for e in report.entries}
    assert shapes["blocks.1.experts.up"] == (3, HIDDEN, K) and shapes["blocks.1.router.weight"] == (
        3,
        K,
    )
    assert model(batches()[0]).isfinite().all()


def test_a_useless_expert_costs_nothing() -> None:
    """Experts 1 and 3 give zeros to many tokens, and one takes those of the other. Frequency does not tell."""
    plain = Model(visited=1)
    with torch.no_grad():
        for block in plain.blocks:
            block.experts.down[1::2] = 0
            block.router.weight[3] = block.router.weight[1] + torch.randn(K) / 1000
            block.router.bias[1::2] = 3.0
    x, lost = batches()[0], {}
    alone = {"blocks.0.experts.up": INT8}  # whose rows are rounded each by itself
    low = copy.deepcopy(plain)
    lb.quantize_(low, alone)
    with torch.no_grad():
        for by in ("reap", "sum", "frequency"):
            model = copy.deepcopy(plain)
            lb.calibrate(model, alone, [x], steps=[PruneExperts(0.8, by)])
            assert len(model.blocks[1].experts.down) == 4
            lost[by] = float((model(x) - low(x)).norm() / low(x).norm())
    assert max(lost["reap"], lost["sum"]) < 1e-6 < 0.01 < lost["frequency"], lost


def pruned(rank: int, world: int, *shares: list[int]) -> dict[str, Tensor]:
    model, given = Model(), batches()
    own = [given[i] for i in shares[rank]]
    group = dist.group.WORLD if world > 1 else None
    lb.calibrate(model, INT8, own, steps=[PruneExperts(3), Search()], group=group)
    assert model.config.num_local_experts == 3
    return {n: t.clone() for n, t in model.state_dict().items()}


def test_processes_with_a_share_of_the_batches() -> None:
    one = pruned(0, 1, [0, 1])
    for found in launch(pruned, 2, [0], [1]):
        assert found.keys() == one.keys()
        assert all(
            torch.equal(found[n], one[n]) for n in one if "scale" not in n and "codes" not in n
        )
    for found in launch(pruned, 2, [], [0, 1]):
        assert all(torch.equal(found[n], one[n]) for n in one)


def test_what_is_refused() -> None:
    for keep in (0, -1, 1.5, 0.0, True, "2"):
        with pytest.raises(
            ValueError, match="keep must be a count from 1, or a float up to 1, got"
        ):
            PruneExperts(keep)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="by must be one of sum, reap, frequency, got 'magnitude'"):
        PruneExperts(2, "magnitude")  # type: ignore[arg-type]
    for keep in (1, 6):
        model = Model()
        with pytest.raises(
            ValueError, match=rf"keeps {keep} of 5 experts.*takes 2; accepted: from 2 to 5"
        ):
            lb.calibrate(model, INT8, batches(), steps=[PruneExperts(keep)])
        assert model.config.num_local_experts == 5 == len(model.blocks[0].experts.up)
    model.blocks[0].router.n_group = 5
    with pytest.raises(
        ValueError,
        match=r"blocks.0.experts: .* in one group, got Experts beside \['Router'\], groups: 5",
    ):
        lb.calibrate(model, INT8, batches(), steps=[PruneExperts(2)])
    with pytest.raises(ValueError, match=r"the same number of stacked experts, got no experts"):
        lb.calibrate(
            nn.Sequential(nn.Linear(64, 8)), INT8, [torch.randn(4, 64)], steps=[PruneExperts(2)]
        )
    with pytest.raises(ValueError, match=r"PruneExperts changes the model in high precision"):
        lb.calibrate(Model(), INT8, batches(), steps=[GPTQ(), PruneExperts(2)])
    with pytest.raises(ValueError, match=r"PruneExperts changes config\.json"):
        lb.calibrate("folder", INT8, batches(), steps=[PruneExperts(2)], out="new")
