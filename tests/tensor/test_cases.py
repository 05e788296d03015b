"""The contract covers every representation: an exported tensor without a case fails here."""

from __future__ import annotations

import lowbit
import lowbit.tensor
from lowbit.tensor import LowbitTensor
from tests.tensor.cases import CASES, SHAPES, every_case


def exported() -> set[type]:
    found = (getattr(lowbit.tensor, name) for name in lowbit.tensor.__all__)
    return {kind for kind in found if isinstance(kind, type)} - {LowbitTensor}


def test_every_exported_tensor_has_a_case_and_is_a_lowbit_tensor():
    assert {case.kind for case in CASES} == exported()
    assert all(issubclass(kind, LowbitTensor) for kind in exported())


def test_every_exported_tensor_is_on_the_surface_of_lowbit():
    assert exported() <= {getattr(lowbit, name) for name in lowbit.__all__}


@every_case
def test_a_case_makes_a_tensor_of_its_class(case):
    for shape in SHAPES:
        t = case.make(shape)
        assert type(t) is case.kind
        assert tuple(t.shape) == shape and t.is_contiguous()
        assert t.dequantize().shape == shape
