"""Optimizers that a user defines in a separate file, without and with a rule for the kernels."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn

from lowbit.numerics.settings import check_below_one, check_flag, check_nonnegative
from lowbit.optim import CPUOffloadOptimizer, LowbitOptimizer, dequantize_state_dict
from lowbit.tensor import CodebookTensor
from tests.optim.conftest import needs_compiler
from tests.optim.counted import LAUNCHES, count
from tests.optim.problems import parameters, rand, relative, run, set_grads
from tests.optim.test_sharded import same_state


class SignSGD(LowbitOptimizer):
    """The least that an optimizer needs: its states, its options, its formula."""

    moments: ClassVar = {"momentum": True}
    options: ClassVar = {"beta": check_below_one}

    def __init__(self, params, lr=1e-3, beta=0.9, **common):
        super().__init__(params, {"lr": lr, "beta": beta}, common)

    @staticmethod
    def reference(param, grad, momentum, *, lr, beta):
        momentum.lerp_(grad, 1 - beta)
        param.sub_(momentum.sign() * lr)


class RMSprop(LowbitOptimizer):
    """With a bias correction, an option that is checked, and a rule for the kernels."""

    moments: ClassVar = {"square": False}
    options: ClassVar = {"alpha": check_nonnegative, "centered": check_flag}

    def __init__(self, params, lr=1e-2, alpha=0.9, eps=1e-8, centered=False, **common):
        options = {"lr": lr, "alpha": alpha, "eps": eps, "centered": centered}
        super().__init__(params, options, common)

    @staticmethod
    def reference(param, grad, square, *, step, lr, alpha, eps):
        square.mul_(alpha).addcmul_(grad * (1 - alpha), grad)
        param.sub_(grad / (square / (1 - alpha**step)).sqrt().add_(eps) * lr)

    hyper_names = ("alpha", "eps")
    prepare = "c[0] = lr; c[1] = alpha; c[2] = 1.0 - alpha; c[3] = eps; c[4] = 1.0 - pow(alpha, t);"

    def rule(self, group):
        return (
            "s[0] = c[1] * s[0] + c[2] * g * g; w -= quotient(g, sqrtf(s[0] / c[4]) + c[3]) * c[0];"
        )


class SignSGD4bit(SignSGD, state="4bit"):
    """A variant: another default of `state`."""


def test_a_variant_has_its_format_and_checked_options():
    (group,) = SignSGD4bit(parameters((4, 4)), beta=0).param_groups
    assert (group["state"], SignSGD.default_state) == ("4bit", "8bit")
    assert isinstance(group["beta"], float)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1"):
        SignSGD4bit(parameters((4, 4)), beta=1)


own = pytest.mark.parametrize("cls", [SignSGD, RMSprop], ids=lambda c: c.__name__)
every = pytest.mark.parametrize("state", ["4bit", "fp32"])
SHAPES = [(64, 96), (33, 131), (13,), (), (0, 5)]


@every
@own
@pytest.mark.usefixtures("steps")
def test_a_step_is_the_reference_on_decoded_states(cls, state):
    params = parameters(*SHAPES)
    optimizer = cls(params, state=state)
    names = {SignSGD: ("lr", "beta"), RMSprop: ("lr", "alpha", "eps")}[cls]
    options = {name: optimizer.param_groups[0][name] for name in names}
    for t in range(1, 5):
        set_grads(params, t)
        expected = []
        for p in params:
            held = optimizer.state[p].get(next(iter(cls.moments)), torch.zeros_like(p))
            held = held.dequantize() if isinstance(held, CodebookTensor) else held.float()
            expected.append((p.detach().clone(), held.clone()))
        optimizer.step()
        step = {"step": torch.tensor(float(t))} if cls is RMSprop else {}
        for p, (weight, moment) in zip(params, expected, strict=True):
            cls.reference(weight, p.grad, moment, **step, **options)
            assert p.numel() == 0 or relative(p, weight) < 1e-6
    stored = optimizer.state[params[0]][next(iter(cls.moments))]
    assert isinstance(stored, CodebookTensor) == (state == "4bit")


@needs_compiler
@every
def test_a_rule_makes_a_compiled_step(state, monkeypatch):
    count(monkeypatch)
    LAUNCHES.clear()
    made = [(ps := parameters(*SHAPES), RMSprop(ps, state=state, fused=f)) for f in (True, False)]
    for params, optimizer in made:
        run(optimizer, params, 3)
    assert len(LAUNCHES) >= 3
    for p, q in zip(made[0][0], made[1][0], strict=True):
        assert p.numel() == 0 or relative(p, q) < 1e-3  # a code may fall to the other side
        assert state != "fp32" or p.numel() == 0 or relative(p, q) < 1e-6


class SlowMomentum(SignSGD):
    slow_moments = frozenset({"momentum"})

    hyper_names, prepare = ("beta",), "c[0] = lr; c[1] = 1.0 - beta;"

    def rule(self, group):
        return "s[0] += c[1] * (g - s[0]); w -= s[0] > 0 ? c[0] : -c[0];"


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_compiler)])
def test_a_slow_moment_in_bf16_is_rounded_stochastically(fused):
    """Rounded to nearest, it stops where (1 - beta) * (1 - m) is half a unit in the last place, near m = 0.8."""
    param = nn.Parameter(torch.zeros(64, 96))
    optimizer = SlowMomentum([param], beta=0.99, state="bf16", fused=fused)
    param.grad = torch.ones_like(param)
    for _ in range(400):
        optimizer.step()
    momentum = optimizer.state[param]["momentum"]
    assert momentum.dtype == torch.bfloat16
    assert momentum.float().mean().item() == pytest.approx(1 - 0.99**400, rel=1e-2)


def test_without_a_rule_fused_is_refused():
    params = parameters((64, 96))
    optimizer = SignSGD(params, fused=True)
    set_grads(params, 0)
    with pytest.raises(RuntimeError, match="SignSGD has no kernel"):
        optimizer.step()


@every
@own
def test_it_resumes_to_the_bit(cls, state):
    params = parameters(*SHAPES)
    optimizer = cls(params, lr=0.05, state=state)
    run(optimizer, params, 2)
    again = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = cls(again, state=state)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for ps, o in ((params, optimizer), (again, resumed)):
        run(o, ps, 2, first=2)
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)
        assert all(same_state(v, resumed.state[q][k]) for k, v in optimizer.state[p].items())


@own
@pytest.mark.usefixtures("steps")
def test_its_checkpoint_loads_in_another_format_and_in_float32(cls):
    params = parameters(*SHAPES)
    optimizer = cls(params, state="8bit")
    run(optimizer, params, 2)
    low = cls(parameters(*SHAPES), state="4bit")
    low.load_state_dict(optimizer.state_dict())
    assert {g["state"] for g in low.param_groups} == {"4bit"}
    name = next(iter(cls.moments))
    exact = dequantize_state_dict(optimizer.state_dict())["state"][0][name]
    assert torch.equal(exact, optimizer.state[params[0]][name].dequantize())
    (p, *_) = low.param_groups[0]["params"]
    assert relative(low.state[p][name].dequantize(), exact) < 0.3


@own
@pytest.mark.parametrize(
    "options",
    [{"bf16_stochastic_round": True}, {"weight_correction": "8bit"}, {"max_grad_norm": 0.1}],
    ids=str,
)
@pytest.mark.usefixtures("steps")
def test_the_common_options_are_its_own(cls, options):
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    optimizer = cls(params, lr=1e-4, **options)
    twin = copy.deepcopy(optimizer)
    others = twin.param_groups[0]["params"]
    run(optimizer, params, 3)
    run(twin, others, 3)
    start = parameters(*SHAPES, dtype=torch.bfloat16)
    assert not torch.equal(params[0], start[0])
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert ("weight_correction" in optimizer.state[params[0]]) == ("weight_correction" in options)


@own
def test_it_is_offloaded(cls):
    direct, params = parameters(*SHAPES), parameters(*SHAPES)
    run(cls(direct), direct, 3)
    run(CPUOffloadOptimizer(params, cls), params, 3)
    assert all(torch.equal(p, q) for p, q in zip(direct, params, strict=True))


def test_its_options_are_checked():
    with pytest.raises(ValueError, match=r"alpha must be .* got -1"):
        RMSprop([nn.Parameter(rand(4))], alpha=-1.0)
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'gamma'; accepted: lr, beta, state"
    ):
        SignSGD([nn.Parameter(rand(4))], gamma=1)
    with pytest.raises(ValueError, match="lr must be"):
        SignSGD([nn.Parameter(rand(4))], lr=-1.0)


def _define(**members):
    return type("Own", (SignSGD,), members)


def _with_beta(param, grad, *, lr, beta):
    """A formula that takes no state."""


def _with_momentum(param, grad, momentum, *, lr, betta):
    """A formula whose option is misspelt."""


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"moments": None}, "Own must name its states in `moments`"),
        ({"moments": {"step": True}}, "names a state 'step', which the base keeps itself"),
        ({"slow_moments": {"momntum"}}, r"slow_moments \['momntum'\] are none of its states"),
        ({"reference": _with_momentum}, "as a static method, reference"),
        ({"reference": staticmethod(_with_beta)}, r"lacks the states \['momentum'\]"),
        ({"reference": staticmethod(_with_momentum)}, r"\['betta'\] are neither states nor"),
    ],
    ids=[
        "no moments",
        "taken name",
        "no such state",
        "a method",
        "state not taken",
        "unknown option",
    ],
)
def test_a_mistake_in_the_definition_is_named_when_it_is_made(members, message):
    with pytest.raises(TypeError, match=message):
        _define(**members)(parameters((64, 96)))


def test_a_learning_rate_is_an_option():
    class WithoutRate(LowbitOptimizer):
        moments: ClassVar = {}
        reference = staticmethod(_with_beta)

        def __init__(self, params):
            super().__init__(params, {"beta": 0.9}, {})

    with pytest.raises(TypeError, match="WithoutRate must give its learning rate"):
        WithoutRate(parameters((64, 96)))


@needs_compiler
def test_a_rule_that_names_an_unknown_option_says_so():
    params = parameters((64, 96))
    own = {"hyper_names": ("alpha",), "prepare": "c[0] = lr;"}
    optimizer = _define(**own, rule=lambda self, group: "w -= c[0] * g;")(params)
    set_grads(params, 0)
    with pytest.raises(ValueError, match="hyper_names has 'alpha'"):
        optimizer.step()


def test_what_is_no_state_dict_is_refused():
    with pytest.raises(TypeError, match="what state_dict\\(\\) of an optimizer returned"):
        dequantize_state_dict(nn.Linear(2, 2).state_dict())
