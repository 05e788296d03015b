"""The contract tests of `lowbit.testing`, which users inherit, over every representation of lowbit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lowbit import Scheme, testing
from tests.schemes import axes_of
from tests.tensor.cases import CASES, Case, check, inside_range, storage, structure

WEIGHTS = [case for case in CASES if case.is_weight]


class OfCase(testing.Subject):
    """The subject of a contract is a case of the list."""

    case: Case
    fsdp_rows = (33, 1)  # tests/distributed has rows that divide

    def takes(self, case: Case) -> None:
        self.case = case
        self.trainable, self.casts_values = case.is_trainable, not case.is_cast
        self.row_step, self.column_step = case.row_step, case.column_step
        if not case.is_weight:  # states have float32 values
            self.dtypes = (torch.float32,)
        if case.name == "train-bitnet-products":  # int8 products backward round the gradient
            self.gradient_tolerance = 0.02
        if case.activation is not None:  # each part of an activation has its own scales
            self.parallel_tolerance = 0.02

    def encode(self, weight):
        return self.case.encode(weight)

    def values_of(self, t):
        return self.case.values_of(t)

    def rounded_input(self, x):
        spec = self.case.activation
        return x if spec is None else spec.fake_quantize(x)

    def passes(self, weight):
        return inside_range(weight)

    def check(self, t):
        check(t)


def over(cases: Sequence[Case]) -> Callable[[type], type]:
    """Run the tests of the class over these cases."""

    def decorate(cls: type) -> type:
        @pytest.fixture(autouse=True, params=cases, ids=[case.name for case in cases])
        def _case(self: Any, request: pytest.FixtureRequest) -> None:
            self.takes(request.param)

        cls._case = _case  # type: ignore[attr-defined]
        return cls

    return decorate


@pytest.mark.cover("values", _case=structure)
@over(CASES)
class TestBasic(OfCase, testing.BasicContract):
    pass


@over(CASES)
class TestTorchSave(OfCase, testing.TorchSaveContract):
    pass


def of_graphs(case: Case) -> tuple[object, ...]:
    """What changes operations, and so graphs and collectives, not their numbers alone."""
    has_spec = isinstance(case.how, Scheme)
    return case.kind, *(axes_of(case.how) if has_spec else [case.name])


@pytest.mark.cover("values", _case=of_graphs)
@over(WEIGHTS)
class TestAutograd(OfCase, testing.AutogradContract):
    pass


def parts(case: Case) -> dict[str, object]:
    return case.make((16, 96)).inner_tensors()


PARTS = sorted({name for case in WEIGHTS for name in parts(case)})


def flattened(case: Case) -> tuple[object, ...]:
    """What a graph sees: the class, each of its parts, the kind of its codes, and whether it rounds inputs."""
    found = parts(case)
    kind, _, codes = storage(case)
    return kind, codes, *(name in found for name in PARTS), case.activation is not None


@pytest.mark.cover("values", _case=flattened)
@over(WEIGHTS)
class TestCompile(OfCase, testing.CompileContract):
    pass


@pytest.mark.cover("values", _case=storage)
@over([case for case in WEIGHTS if case.row_step == 1])
class TestFSDP2(OfCase, testing.FSDP2Contract):
    pass


@pytest.mark.cover("values", _case=of_graphs)
@over([c for c in WEIGHTS if not c.is_trainable and c.row_step == 1 and 96 % c.column_step == 0])
class TestTensorParallel(OfCase, testing.TensorParallelContract):
    pass


@pytest.mark.cover("values", _case=storage)
@over([case for case in WEIGHTS if case.row_step == 1])
class TestSerialization(OfCase, testing.SerializationContract):
    pass
