"""`lowbit.autoquant`: units, damages, times, the choice, and the file of a plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.convert.least import least
from lowbit.inference import GPTQ
from lowbit.inference.planning import call, clock
from lowbit.inference.planning.clock import Clock, in_turns
from lowbit.inference.planning.units import units_of, whole
from lowbit.schemes.lines import line_of, scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tracing.damage import damages
from recipes.llama import Llama, LlamaConfig

INT3, INT8 = (lb.IntxWeightOnly(bits, 32) for bits in (3, 8))
INT4, INT8_INT8 = lb.Int4WeightOnly(32), lb.Int8DynamicActivationInt8Weight()
SCHEMES = [INT3, INT4, INT8]


def llama(tied: bool = True) -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96}
    return Llama(LlamaConfig(**sizes, context=32, tied=tied)).eval()


def every(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


BATCHES = [torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def kl(plain: nn.Module, model: nn.Module, batches: list[Tensor]) -> float:
    with torch.no_grad():
        pairs = [(plain(b).log_softmax(-1), model(b).log_softmax(-1)) for b in batches]
    each = [F.kl_div(q, p, reduction="sum", log_target=True) / p[..., 0].numel() for p, q in pairs]
    return float(sum(each)) / len(each)


@functools.cache
def planned() -> lb.Plan:
    """The plan of `llama()`, which stays as it was."""
    model = llama()
    before = copy.deepcopy(model)
    plan = lb.autoquant(model, BATCHES, SCHEMES, every, bits=5)
    both = zip(model.parameters(), before.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    return plan


# ---- the solver -----------------------------------------------------------------------------------------------


def test_the_solver_finds_the_least_of_all_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        count = int(torch.randint(1, 6, (1,), generator=generator))
        sizes = torch.randint(1, 5, (count,), generator=generator).tolist()
        values = [torch.rand(n, generator=generator, dtype=torch.float64).tolist() for n in sizes]
        costs = [torch.rand(n, generator=generator, dtype=torch.float64).tolist() for n in sizes]
        budget = count * float(torch.rand((), generator=generator))
        sums = [
            (
                sum(map(lambda own, i: own[i], values, at)),
                sum(map(lambda own, i: own[i], costs, at)),
            )
            for at in itertools.product(*map(range, sizes))
        ]
        within = [value for value, cost in sums if cost <= budget]
        found = least(values, costs, budget)
        assert (found is None) == (not within)
        if found is not None:
            assert sum(map(lambda own, i: own[i], costs, found)) <= budget
            assert sum(map(lambda own, i: own[i], values, found)) == pytest.approx(min(within))


def test_the_solver_is_quick_for_many_units() -> None:
    """Units of a large model, where a table of all sums would not fit."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(300, generator=generator).mul(4).exp().tolist()
    sizes = [[1.0, 2.0, 5.0][i % 3] for i in range(300)]
    bits = (2.5, 3.5, 4.5, 6.5, 8.25, 16.0)
    noise = torch.rand(300, 6, generator=generator).tolist()
    values = [
        [w * n * 4.0**-b * (1 + 0.1 * r) for b, r in zip(bits, own, strict=True)]
        for w, n, own in zip(weights, sizes, noise, strict=True)
    ]
    costs = [[n * b for b in bits] for n in sizes]
    found = least(values, costs, 4.2 * sum(sizes))
    assert found is not None
    total = sum(own[i] for own, i in zip(costs, found, strict=True))
    assert 4.19 * sum(sizes) <= total <= 4.2 * sum(sizes)


# ---- what units cost ------------------------------------------------------------------------------------------


def test_units_are_siblings_and_their_damage_is_that_of_the_model_with_them_alone() -> None:
    model, plan = llama(), planned()
    costs = plan.costs
    assert costs is not None and list(costs.units)[:3] == [
        "embedding.weight",
        "blocks.0.attention.query|key|value",
        "blocks.0.attention.out.weight",
    ]
    unit = costs.units["blocks.0.attention.query|key|value"]
    assert [set(choice.schemes.values()) for choice in unit] == [{None}, *({s} for s in SCHEMES)]
    lone, low, all_low = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    lb.quantize_(lone, unit[1].schemes)
    lb.quantize_(all_low, INT3, every)
    alone = kl(model, lone, BATCHES)
    int3 = [c for own in costs.units.values() for c in own if set(c.schemes.values()) == {INT3}]
    together = kl(model, all_low, BATCHES)
    assert sum(c.damage for c in int3) == pytest.approx(together, rel=1e-3)
    assert 0.5 * alone < unit[1].damage < 2 * alone
    report = lb.quantize_(low, plan)
    stored = {id(p): p for p in low.parameters() if isinstance(p, lb.LowbitTensor)}.values()
    nbytes = sum(p.nbytes_stored() for p in stored)
    assert (
        8 * nbytes / sum(p.numel() for p in stored) == pytest.approx(plan.bits) and plan.bits <= 5
    )
    assert plan.measured == pytest.approx(kl(model, low, BATCHES), rel=1e-3)
    assert len(report.converted) == len(plan) + 1  # the head is tied


def test_a_budget_of_damage_holds_for_the_whole_model_and_no_single_scheme_is_smaller() -> None:
    model = llama()
    held_out = [torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(9))]
    costs = planned().costs
    for single in (INT3, INT4):
        budget = damages(
            model, held_out, [whole(model, single, every, None).changed()], "kl"
        ).added[0]
        plan = lb.autoquant(model, [], costs, every, damage=budget, held_out=held_out)
        (uniform,) = (p for p in costs.uniform() if set(p.values()) == {single})
        assert plan.measured <= budget and plan.bits <= uniform.bits
        low = copy.deepcopy(model)
        lb.quantize_(low, plan)
        assert kl(model, low, held_out) <= budget * 1.001


def test_the_estimate_is_near_the_measured_damage() -> None:
    model = llama()
    schemes = [INT4, lb.IntxWeightOnly(6, 32)]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(1)
    batches = [torch.randint(96, (8, 16)) for _ in range(16)]
    drawn = torch.get_rng_state()
    measured, estimated = (
        lb.autoquant(model, batches, schemes, every, bits=6, estimate=e).costs
        for e in (False, True)
    )
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    ratios = [
        e.damage / m.damage
        for e, m in zip(estimated.choices, measured.choices, strict=True)
        if m.damage > 0
    ]
    assert len(ratios) == 2 * len(measured.units) and min(ratios) > 0.6 and max(ratios) < 1.6


def test_times_are_those_of_the_traced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tied=False)
    taken: list[Any] = []

    def time(module: nn.Module, held: Any, inputs: Any) -> float:
        taken.append((module, held))
        return 1.0 if held is None else 0.25

    monkeypatch.setattr(clock, "_time", time)
    units = units_of(model, [INT4], None, None)
    ids = BATCHES[0]
    own = Clock(model, [(ids, 1.0), (ids[:1, :1], 10.0)], [m for u in units for m in u.modules])
    found = [[own.milliseconds(u, o) for o in u.options] for u in units]
    siblings = next(u for u in units if "query" in u.name)
    assert found[units.index(siblings)] == [3 * 11e3, 3 * 11e3 * 0.25]
    # four sizes: query and out, key and value, gate, up and head, down, and the embedding; two sizes of inputs; plain
    # and int4
    assert len(taken) == 5 * 2 * 2
    plan = lb.autoquant(
        model, BATCHES, [INT4], milliseconds=100e3, timed=[(ids, 1.0), (ids[:1, :1], 10.0)]
    )
    assert plan.milliseconds <= 100e3 and {None, INT4} == set(plan.values())


def test_the_clock_times_modules_and_leaves_them_as_they_were() -> None:
    model = llama()
    held = dict(model.named_parameters())
    timed = [(BATCHES[0], 1.0), (BATCHES[0][:1, :1], 16.0)]
    plan = lb.autoquant(model, BATCHES[:1], [INT4], every, damage=1.0, timed=timed)
    assert plan.milliseconds > 0 and plan.costs.timed
    assert all(held[n] is p for n, p in model.named_parameters())
    assert type(model.blocks[0].mlp.up) is nn.Linear


@pytest.mark.parametrize(("ratio", "is_mixed"), [(0.95, True), (0.985, False), (1.01, False)])
def test_a_single_scheme_stays_unless_the_plan_is_faster(
    ratio: float, is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules in int4 take half of the time of those in int8, so a plan by modules mixes them."""
    model, held_out = llama(), BATCHES[1:]
    costs = lb.autoquant(model, BATCHES[:1], [INT4, INT8], every, bits=8).costs
    assert costs is not None
    times = {None: 4.0, INT8: 2.0, INT4: 1.0}
    timed = tuple(
        dataclasses.replace(c, milliseconds=times[next(iter(c.schemes.values()))])
        for c in costs.choices
    )
    costs = dataclasses.replace(costs, choices=timed)
    lost = [
        damages(model, held_out, [whole(model, one, every, None).changed()], "kl").added[0]
        for one in (INT8, INT4)
    ]
    compared: list[list[Any]] = []

    def in_turns(own: nn.Module, batches: Any, contexts: Any) -> list[float]:
        for context in contexts:
            with context():
                kinds = {str(p) for p in own.parameters() if isinstance(p, LowbitTensor)}
            compared.append(sorted(kinds))
        return [ratio, 1.0]

    monkeypatch.setattr(call, "in_turns", in_turns)
    plan = lb.autoquant(
        model, [], costs, every,
        damage=(lost[0] + lost[1]) / 2, held_out=held_out, timed=[(BATCHES[0], 1.0)],
    )  # fmt: skip
    assert len(compared) == 2 and len(compared[0]) > len(compared[1])
    assert (len(set(plan.values())) > 1) == is_mixed
    why = f"the whole model takes {ratio} ms by the plan of several and 1 ms by int8(group_size=32) for all"
    assert plan.why.startswith(why) and plan.why.endswith("to leave it") != is_mixed
    assert plan.why in str(plan)
    assert plan.measured <= (lost[0] + lost[1]) / 2


def test_whole_models_are_timed_in_turns() -> None:
    model = llama()
    order: list[str] = []

    def context(name: str) -> Any:
        @contextlib.contextmanager
        def changed() -> Any:
            order.append(name)
            if name == "slow":
                time.sleep(0.02)
            yield

        return changed

    slow, fast = in_turns(model, [(BATCHES[0], 1.0)], [context("slow"), context("fast")])
    assert order[2:6] == ["slow", "fast", "slow", "fast"] and slow > fast + 15
    thrice = in_turns(model, [(BATCHES[0], 3.0)], [context("slow")])
    assert thrice[0] >= 60


@pytest.mark.gpu
def test_whole_models_are_timed_by_graphs_on_a_gpu() -> None:
    """Which replay the weights of the contexts, and leave the model as it was."""
    model, ids = llama().cuda(), BATCHES[0].cuda()
    with torch.no_grad():
        expected = model(ids)
    contexts = [contextlib.nullcontext, whole(model, INT4, every, None).changed()]
    once, twice = (in_turns(model, [(ids, count)], contexts) for count in (1.0, 200.0))
    assert all(0 < a < 50 and b > 20 * a for a, b in zip(once, twice, strict=True))
    with torch.no_grad():
        assert torch.equal(model(ids), expected) and type(model.blocks[0].mlp.up) is nn.Linear
    timed = [(ids, 1.0), (ids[:1, :1], 16.0)]
    plan = lb.autoquant(model, BATCHES[:1], [INT4, INT8], every, damage=1.0, timed=timed)
    assert plan.measured <= 1.0 and plan.milliseconds > 0


def test_stacked_experts_are_one_unit() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(3, 32, 32)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return sum(
                lb.inference.linear(x, self.up[i]).relu() @ self.down[i].mT for i in range(3)
            )

    model = nn.Sequential(nn.Linear(32, 32), Experts(), nn.Linear(32, 8))
    costs = lb.autoquant(
        model, [torch.randn(4, 32)], [INT4], bits=5, timed=[(torch.randn(1, 32), 1)]
    ).costs
    assert list(costs.units) == ["0.weight", "1", "2.weight"]
    assert list(costs.units["1"][1].schemes) == ["1.up", "1.down"]


def test_a_plan_is_a_scheme_of_calibrate_and_prepare() -> None:
    model, plan = llama(), planned()
    rounded, calibrated, prepared = (copy.deepcopy(model) for _ in range(3))
    lb.quantize_(rounded, plan)
    lb.calibrate(calibrated, plan, BATCHES, steps=[GPTQ()])
    assert kl(model, calibrated, BATCHES) < kl(model, rounded, BATCHES)
    assert set(lb.qat.prepare_(prepared, plan).converted) >= {"blocks.0.mlp.up.weight"}


def test_a_plan_that_leaves_all_in_high_precision_changes_nothing() -> None:
    model = llama()
    plan = lb.autoquant(model, BATCHES, SCHEMES, every, damage=0)
    assert set(plan.values()) == {None}
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    rounded = lb.quantize_(model, plan)
    calibrated = lb.calibrate(model, plan, BATCHES, steps=[GPTQ()])
    for report in (rounded, calibrated):
        assert not report.converted
        assert "blocks.0.mlp.up.weight" in report.left
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    with pytest.raises(ValueError, match="nothing to convert in Llama"):
        lb.quantize_(model, dict(plan))
    with pytest.raises(ValueError, match=r"nothing to prepare in Llama .*no scheme for this name"):
        lb.qat.prepare_(model, plan)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({}, TypeError, "give one budget"),
        ({"bits": 4, "damage": 1}, TypeError, "give one budget"),
        ({"bits": True}, TypeError, "bits must be a number"),
        ({"bits": "4"}, TypeError, "bits must be a number, e.g. 4.5; got '4'"),
        ({"bits": 0}, ValueError, "bits must be a number above 0"),
        ({"bits": float("nan")}, ValueError, "bits must be a number above 0"),
        ({"damage": -1.0}, ValueError, "damage must be a number of at least 0, e.g. 0.01; got -1.0"),
        ({"milliseconds": 0}, ValueError, "milliseconds must be a number above 0, e.g. 2.0"),
        ({"milliseconds": 1e-9, "timed": [(BATCHES[0][:1], 1)]}, ValueError, r"choices take [\d.e-]+ ms; "),
        ({"bits": 1.0}, ValueError, "smallest choices take 4.* bits a weight"),
        ({"milliseconds": 1.0}, ValueError, "timed="),
        ({"bits": 4, "batches": []}, ValueError, "no batches"),
        ({"bits": 4, "batches": BATCHES[0]}, TypeError, r"got one Tensor; give \[batch\]"),
        ({"bits": 4, "held_out": BATCHES[0]}, TypeError, "held_out must be a list of batches, got one Tensor"),
        ({"bits": 4, "estimate": True, "loss": "error"}, ValueError, "estimate=True"),
        ({"bits": 4, "schemes": [lb.Int8StaticActivationInt8Weight()]}, NotImplementedError, "static"),
        ({"bits": 9, "estimate": True, "schemes": [INT8_INT8]}, ValueError, "rounds activations"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(
    given: dict[str, Any], error: type[Exception], match: str
) -> None:
    options: dict[str, Any] = {"batches": BATCHES[:1], "schemes": [INT3, INT4], **given}
    with pytest.raises(error, match=match):
        lb.autoquant(llama(), filter_fn=every, **options)


def test_names_with_signs_of_patterns() -> None:
    model = nn.Sequential()
    model.add_module("a[0]", nn.Linear(32, 32))
    model.add_module("a0", nn.Linear(32, 32))
    plan = lb.autoquant(model, [torch.randn(2, 32)], [INT8, INT3], bits=7)
    assert len(plan) == 2 and set(plan.values()) == {INT8, INT3}
    assert len(lb.qat.prepare_(model, plan).converted) == 2


def test_batches_of_a_stream() -> None:
    """A loader of an IterableDataset has no length, and says so when it is asked."""
    seen = [torch.randn(2, 32) for _ in range(2)]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(seen)

    streamed = torch.utils.data.DataLoader(Stream(), batch_size=None)
    found = [lb.autoquant(nn.Linear(32, 32), x, [INT3], bits=32).bits for x in (streamed, seen)]
    assert found[0] == found[1]


# ---- the file -------------------------------------------------------------------------------------------------


def test_a_plan_is_a_file_to_read_and_to_edit(tmp_path: Path) -> None:
    model, plan = llama(), planned()
    path = tmp_path / "plan.json"
    plan.save(path)
    again = lb.Plan.load(path)
    assert again == plan and list(again) == list(plan) and again.figures == plan.figures
    text = path.read_text()
    assert '"blocks.0.mlp.gate.weight": "' in text and "together" in str(again)
    data = json.loads(text)
    data["schemes"] = {"blocks.0.*": None, **data["schemes"], "*": INT8.to_dict()}
    path.write_text(json.dumps(data))
    edited = lb.Plan.load(path)
    assert edited["*"] == INT8 and next(iter(edited.items())) == ("blocks.0.*", None)
    path.write_text('{"schemes": {"*": "int4(group_size=32)"}}')
    report = lb.quantize_(model, lb.Plan.load(path))
    assert "blocks.1.mlp.up.weight" in report.converted


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1]", "no patterns under"),
        ("{", "not a plan in JSON"),
        ('{"schemes": {"*": "int4", "*": "int8"}}', "given twice"),
        ('{"schemes": {"*": "int5"}}', r"'\*': there is no scheme 'int5'"),
        ('{"schemes": {"*": 4}}', r"'\*'"),
        ('{"schemes": {"re:(": "int4"}}', "not a regular expression"),
        ('{"schemes": {"re:(a+)+": "int4"}}', "does not run"),
        ('{"schemes": {}, "bit": 3}', "unknown entry 'bit'"),
        ('{"schemes": {}, "version": 2}', "version 2"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        lb.Plan.load(path)


@pytest.mark.parametrize(
    "given",
    [
        lb.Int4WeightOnly(), lb.IntxWeightOnly(3, 32, "float_zero_point"), lb.Int8WeightOnly(),
        lb.NF4WeightOnly(double_quantization=True), lb.MXFP4WeightOnly(), lb.NVFP4WeightOnly(),
        lb.IntxWeightOnly(4, 128, "symmetric", scale_dtype=torch.float16),
        lb.Int8DynamicActivationInt4Weight(64), lb.Float8DynamicActivationFloat8Weight(),
    ],
)  # fmt: skip
def test_presets_have_lines(given: lb.Scheme) -> None:
    line = line_of(given)
    assert line is not None and scheme(line) == given


def test_a_scheme_of_no_preset_has_no_line() -> None:
    assert line_of(lb.Scheme(lb.Spec(lb.Int(4), lb.PerBlock(16, 16), "symmetric"))) is None


@pytest.mark.parametrize("schemes", [[], lb.Int8WeightOnly()])
def test_no_list_of_schemes_is_refused(schemes: Any) -> None:
    with pytest.raises(ValueError, match="schemes must be a list of one Scheme or more"):
        lb.autoquant(nn.Sequential(nn.Linear(32, 32)), [torch.ones(1, 32)], schemes, bits=4)


def test_gradients_that_are_there_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight.grad = torch.ones(32, 32)
    batches = [torch.randn(4, 32)]
    found = lb.autoquant(model, batches, [lb.Int8WeightOnly()], bits=32, estimate=True)
    assert torch.equal(model[0].weight.grad, torch.ones(32, 32))
    model[0].weight.grad = None
    again = lb.autoquant(model, batches, [lb.Int8WeightOnly()], bits=32, estimate=True)
    assert found.damage == again.damage


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0"])
def test_k_quants_count_as_in_the_file(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    model, given = nn.Sequential(nn.Linear(512, 24, bias=False)), lb.formats.gguf_scheme(kind)
    (unit,) = units_of(model, [given], None, None)
    lb.quantize_(model, given)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert unit.options[1].nbytes() == 24 * 512 // elements * size


def test_bytes_are_counted_without_quantizing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv1d(8, 12, 3), nn.Linear(70, 30), nn.Embedding(9, 40))
    schemes = [
        lb.IntxWeightOnly(3),
        lb.IntxWeightOnly(4, 32, "asymmetric"),
        lb.Float8WeightOnly(),
        lb.NF4WeightOnly(16),
    ]
    for given in schemes:
        own = copy.deepcopy(model)
        takes = (
            (lambda m, _: not isinstance(m, nn.Conv1d))
            if given is schemes[3]
            else (lambda m, _: True)
        )
        units = units_of(model, [given], takes, "searched")
        with monkeypatch.context() as patch:
            patch.setattr("lowbit.inference.planning.units.Option.weights", None)
            found = [unit.options[1].nbytes() for unit in units]
        lb.quantize_(own, given, takes)
        stored = [m.weight.nbytes_stored() for m in own if isinstance(m.weight, lb.LowbitTensor)]
        assert found == stored


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_in_plans(tied: bool) -> None:
    model = llama(tied)
    plan = lb.autoquant(model, BATCHES[:1], [INT4, INT8_INT8], bits=6)
    assert any("embedding" in p and s is not None for p, s in plan.items())
    lb.quantize_(model, plan)
    assert isinstance(model.embedding.weight, lb.LowbitTensor)
    other = nn.Sequential(nn.Embedding(9, 32, max_norm=1.0), nn.Linear(32, 8))
    assert [u.name for u in units_of(other, [INT4], None, None)] == ["1.weight"]


def test_batches_move_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.inference.planning import call

    seen: list[Tensor] = []

    def moved(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch)
        return torch.randn(4, 32)

    monkeypatch.setattr(call, "on_device_of", moved)
    given = [torch.empty(4, 32, device="meta") for _ in range(3)]
    model = nn.Sequential(nn.Linear(32, 32))
    lb.autoquant(model, given[:1], [INT4], damage=1.0, held_out=given[1:2], timed=[(given[2], 1)])
    assert [id(x) for x in seen] == [id(x) for x in (given[0], given[2], given[1])]


def test_one_whole_model_is_quantized_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.inference.planning import call

    alive: list[Any] = []
    together = call._together

    def made(options: list[Any]) -> Any:
        assert all(ref() is None for ref in alive)
        found = together(options)
        alive.append(weakref.ref(found.args[0][0].parameters["weight"]))
        return found

    monkeypatch.setattr(call, "_together", made)
    lb.autoquant(llama(), BATCHES[:1], SCHEMES, every, bits=5)
    assert len(alive) == len(SCHEMES)


def test_a_loss_before_logits_is_not_what_is_measured() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.inner(ids)
            return logits.mean(), logits

    found = lb.autoquant(WithLoss(), BATCHES[:1], [INT4], bits=6).costs
    expected = lb.autoquant(llama(), BATCHES[:1], [INT4], bits=6).costs
    assert [c.damage for c in found.choices] == [c.damage for c in expected.choices]
