"""Subclasses that modules are given in place: several on one module, copies, and the way back."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn
from torch.nn.utils import parametrize

from lowbit.layers.stand_in import StandIn, give, names_given, take, without


class First(StandIn):
    def who(self) -> str:
        return "first"


class Second(StandIn):
    def who(self) -> str:
        return f"second {names_given(self, Second)}"


def given() -> nn.Linear:
    layer = nn.Linear(3, 2)
    give(layer, First)
    give(layer, Second, ("weight",))
    return layer


def test_several_on_one_module() -> None:
    layer, plain = given(), nn.Linear(2, 2)
    assert layer.who() == "second ('weight',)" and type(layer) is type(given())
    kind = type(layer)
    assert (kind.__name__, kind.__module__) == (nn.Linear.__name__, nn.Linear.__module__)
    assert isinstance(plain, kind) and not isinstance(plain, First) and isinstance(layer, First)
    assert without(kind) is nn.Linear
    take(layer, First)
    assert isinstance(layer, Second) and not isinstance(layer, First)
    take(layer)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_the_same_classes(copied) -> None:
    layer = given()
    found = copied(layer)
    assert type(found) is type(layer) and found.weight.equal(layer.weight)


def test_parametrizations_stay_on_top() -> None:
    layer = given()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    other = copy.deepcopy(layer)
    take(layer, Second)
    assert layer.who() == "first" and other.who().startswith("second")
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer).__bases__ == (First, nn.Linear)
