"""`lowbit.calibrate` with batches that two processes share: the result is that of one process with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import AWQ, GPTQ, LearnedRounding, Prune24, Rotate, Search, SmoothQuant
from lowbit.inference.calibration import learned_rounding
from lowbit.testing import launch
from lowbit.testing.comparison import relative_error
from recipes.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab_size=96, dim=64, layers=2, heads=4, kv_heads=2, hidden=96, context=32)
INT4, STATIC = lb.Int4WeightOnly(32), lb.Int8StaticActivationInt8Weight()
STEPS: dict[str, tuple[lb.Scheme, list[Any]]] = {
    "Search": (INT4, [Search()]),
    "GPTQ": (INT4, [GPTQ()]),
    "AWQ": (INT4, [AWQ(4), Search()]),
    "SmoothQuant, static": (STATIC, [SmoothQuant()]),
    "all": (INT4, [AWQ(4), Rotate(folded=False), Prune24(), GPTQ()]),
}


def everything(module: nn.Module, name: str) -> bool:
    return True


def decoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.ndim > 1 else 1)
    return model.eval()


def tokens() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(96, shape) for shape in ((4, 32), (2, 17), (1, 5))]


class Branches(nn.Module):
    """Weights that all multiply the input, of which a batch reaches some. Sums over integers are exact."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(32, 16), nn.Linear(32, 16)
        self.experts = nn.ModuleList([nn.Linear(32, 16) for _ in range(3)])
        self.stack = nn.Parameter(torch.randn(3, 16, 32))
        self.conv = nn.Conv1d(4, 16, 3, groups=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0])
        out = self.first(x) + self.experts[number](x) + F.linear(x, self.stack[number])
        if number == 1:
            out = out + self.second(x)
        return out + self.conv(x.view(-1, 4, 8)).amax(-1)


def numbered() -> list[Tensor]:
    """Batches of small integers, which begin with the number of the expert that they reach: 1 or 0."""
    torch.manual_seed(2)
    given = [torch.randint(-4, 5, (rows, 32)).float() for rows in (40, 3, 7, 60)]
    for x, number in zip(given, (1, 0, 0, 1), strict=True):
        x[0, 0] = number
    return given


def described(model: nn.Module, report: Any) -> dict[str, Any]:
    """All bits of a model, the values of its weights, and what the report says of them."""
    state = {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    found = [
        (n, p.dequantize() if isinstance(p, lb.AffineTensor) else p.data)
        for n, p in model.named_parameters()
    ]
    layers = {
        n: (one.rows, one.unreached, one.method, one.before, one.after)
        for n, one in report.layers.items()
    }
    return {"state": state, "values": dict(found), "layers": layers}


def of_decoder(rank: int, world: int, name: str, *shares: Sequence[int]) -> dict[str, Any]:
    scheme, steps = STEPS[name]
    model, given = decoder(rank), tokens()  # the first rank's weights count
    own = [given[i] for i in shares[rank]]
    group = dist.group.WORLD if world > 1 else None
    return described(model, lb.calibrate(model, scheme, own, steps=steps, group=group))


def of_branches(rank: int, world: int, *shares: Sequence[int]) -> dict[str, Any]:
    model, given = Branches(rank), numbered()
    own = [given[i] for i in shares[rank]]
    group = dist.group.WORLD if world > 1 else None
    return described(model, lb.calibrate(model, INT4, own, everything, blocks=[], group=group))


def are_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", STEPS)
def test_two_processes_give_what_one_gives(name: str) -> None:
    """Codes differ where a sum, rounded in another order, falls to the other side of a border."""
    first, second = launch(of_decoder, 2, name, [0], [1, 2])
    assert are_equal(first["state"], second["state"]) and first["layers"] == second["layers"]
    one = of_decoder(0, 1, name, [0, 1, 2])
    assert one["layers"].keys() == first["layers"].keys()
    for (*own, before, after), (*expected, least, most) in zip(
        first["layers"].values(), one["layers"].values(), strict=True
    ):
        assert own == expected
        assert (before, after) == pytest.approx((least, most), rel=0.2)
    if "GPTQ" not in str(
        STEPS[name][1]
    ):  # which passes a code's difference on to all columns that follow
        for n, values in one["values"].items():
            assert relative_error(first["values"][n], values) < 1e-2, n


@pytest.mark.parametrize("name", STEPS)
def test_a_process_without_batches(name: str) -> None:
    """The sums are those of the other one, and so are all bits."""
    first, second = launch(of_decoder, 2, name, [], [0, 1, 2])
    one = of_decoder(0, 1, name, [0, 1, 2])
    for own in (first, second):
        assert are_equal(own["state"], one["state"]) and own["layers"] == one["layers"]


@pytest.mark.parametrize("shares", [([0, 1], [2, 3]), ([1], [2, 0, 3]), ([0, 3], [1, 2])], ids=str)
def test_where_sums_are_exact_all_bits_are_those_of_one_process(shares: tuple) -> None:
    """Also where one process alone reaches a layer or an expert, and where none does."""
    first, second = launch(of_branches, 2, *shares)
    one = of_branches(0, 1, [number for own in shares for number in own])
    assert one["layers"]["stack"][:2] == (110, 1) and one["layers"]["experts.2.weight"][0] == 0
    for own in (first, second):
        assert are_equal(own["state"], one["state"]) and own["layers"] == one["layers"]


LEARNED = [Search(), LearnedRounding(6, 5), LearnedRounding(4, 5, over="model")]


def learned(rank: int, world: int, shares: Sequence[Sequence[int]], holds_out: bool = True) -> Any:
    """Described as `of_decoder`, and the losses. Without `holds_out` every sequence is learned from."""
    model, given = decoder(rank), tokens()
    own = [given[i] for i in shares[rank]]
    group = dist.group.WORLD if world > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        if not holds_out:
            patch.setattr(learned_rounding, "_held_out", lambda sequences: [0] * len(sequences))
            steps = [Search(), LearnedRounding(6, 6 if world > 1 else 7, reach=0.1)]
        report = lb.calibrate(model, INT4, own, steps=LEARNED if holds_out else steps, group=group)
    return described(model, report), report.learned


def test_processes_learn_the_rounding_together() -> None:
    """All bits and losses are the same, and a process without batches only follows."""
    for shares in (([0], [1, 2]), ([], [0, 1, 2])):
        (first, losses), (second, others) = launch(learned, 2, shares)
        assert are_equal(first["state"], second["state"]) and losses == others
        assert [name for name, _ in losses] == ["block 0", "block 1", "the model"]
        assert all(own.held_out is not None for _, own in losses)
        assert any(own.kept and own.after < own.before for _, own in losses)
    one, alone = learned(0, 1, ([0, 1, 2],))
    assert are_equal(first["state"], one["state"]) and losses == alone


def test_gradients_of_processes_add_up() -> None:
    """Where all take all of their batches in each step, they learn what one process learns from all. A sign differs
    where sums, rounded in another order, are near 0."""
    (first, losses), _ = launch(learned, 2, ([0], [1, 2]), False)
    one, alone = learned(0, 1, ([0, 1, 2],), False)
    for (name, own), (_, other) in zip(losses, alone, strict=True):
        assert own.before == pytest.approx(other.before, rel=1e-4), name
        assert own.after == pytest.approx(other.after, rel=0.05), name
    for n, values in one["values"].items():
        assert relative_error(first["values"][n], values) < 0.05, n


class Again(nn.Module):
    """A block that multiplies by `two` once more for batches of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.one, self.two, self.three = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x).tanh()).tanh()
        y = self.two(y).tanh() if len(x) == self.rows else y
        return x + self.three(y)


def varying(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model, group = nn.Sequential(Again(0), Again(7)), dist.group.WORLD
    own = [torch.randn(9 - 2 * rank, 32)]
    report = lb.calibrate(model, INT4, own, steps=[GPTQ()], blocks=list(model), group=group)
    return [note for note in report.notes if "another number of times" in note]


def test_both_processes_name_a_weight_that_the_batches_of_one_multiply_more_often() -> None:
    first, second = launch(varying, 2)
    assert first == second and [note[:13] for note in first] == ["1.two.weight:"]


def failing(rank: int, world: int) -> str:
    given = tokens() if rank == 0 else [torch.full((1, 4), 96)]
    with pytest.raises((RuntimeError, ValueError)) as found:
        lb.calibrate(decoder(), INT4, given, group=dist.group.WORLD)
    return f"{found.type.__name__}: {found.value}"


def test_an_error_of_one_process_ends_all() -> None:
    first, second = launch(failing, 2)
    assert first.startswith(
        "RuntimeError: rank 1 of the process group failed: ValueError: the model does not run on b"
    )
    assert second.startswith("ValueError: the model does not run on batch 0")


def refused(rank: int, world: int) -> None:
    group, x = dist.group.WORLD, torch.randn(4, 64)
    model = nn.Sequential(nn.Linear(64, 32))

    def raises(
        message: str, given: Any, scheme: Any = INT4, of: Any = model, **options: Any
    ) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            lb.calibrate(of, scheme, given, **{"group": group, **options})

    raises("the inputs of 0.weight have NaN", [x * torch.nan if rank else x])
    raises("none of which has elements", [])
    raises(
        f"rank {1 - rank} has other steps than rank {rank}", [x], steps=[Search(), GPTQ()][rank::2]
    )
    raises(f"rank {1 - rank} has other weights or schemes", [x], [INT4, STATIC][rank])
    message = r"all batches in one process.*accepted with group=…: .*Rotate\(folded=False\)"
    raises(message, [x], steps=[Rotate()])
    raises("group is for batches that the processes share", None, steps=[GPTQ()])
    raises("group must be a torch.distributed.ProcessGroup of this.*got 'gloo'", [x], group="gloo")
    raises("group must be .*got -100", [x], group=dist.GroupMember.NON_GROUP_MEMBER)


def test_what_is_refused() -> None:
    launch(refused, 2)


def alone(rank: int, world: int) -> bool:
    """Only one of the processes of a group calls."""
    if rank:
        return True
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(8, 64)
    lb.calibrate(model, STATIC, [x])
    return bool(model[0].weight.input_scale > 0)


def test_without_a_group_a_process_is_alone() -> None:
    assert launch(alone, 2) == [True, True]
