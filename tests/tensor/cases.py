"""Every way a tensor can be stored, as a list that the contract tests run over.

A new representation, exported from `lowbit.tensor`, needs at least one `Case` here; `test_cases.py` fails until it
has one, and from then on every contract test runs over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit import (
    BitNet,
    Float8,
    Float8BlockMixedPrecision,
    Float8DynamicActivationFloat8Weight,
    Float8MixedPrecision,
    Float8WeightOnly,
    Int,
    Int4Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8MixedPrecision,
    Int8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    LookupTable,
    MXFP4WeightOnly,
    MXFP8MixedPrecision,
    MXFP8WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
    PerRow,
    PerTensor,
    Scheme,
    Spec,
    dequantize_,
    testing,
)
from lowbit.tensor import (
    AffineTensor,
    BitNetTensor,
    BlockMixedPrecisionTensor,
    CodebookTensor,
    FakeQuantizedTensor,
    Float8Tensor,
    Int4WeightTensor,
    Int8WeightTensor,
    LowbitTensor,
    MicroscaledTensor,
    MixedPrecisionTensor,
    TableTensor,
    TernaryTensor,
)
from lowbit.tensor.trained.master_weight import MasterWeightTensor
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.testing import same, same_bits, shares_memory, values

__all__ = ["same", "same_bits", "shares_memory", "values"]


@dataclass(frozen=True)
class Case:
    """One representation with one choice of its parameters.

    Attributes:
        name: the test id.
        kind: the class.
        how: what it is made with: a Scheme for weights, the arguments of `from_float` for optimizer states.
        row_step: dimension 0 may be cut at multiples of it; 0: not at all.
        column_step: likewise the last dimension.
    """

    name: str
    kind: type[LowbitTensor]
    how: Any
    row_step: int = 1
    column_step: int = 1

    def make(self, shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        return self.encode(values(shape, seed, dtype))

    def encode(self, x: Tensor) -> Any:
        if self.kind is CodebookTensor:
            x = x if self.how["signed"] else x.square()
            return CodebookTensor.from_float(x, **self.how)
        if self.kind is TernaryTensor:
            return TernaryTensor(x)
        if self.is_trainable:
            return self.kind(x, self.how)
        of_input = STATIC if self.how.is_static else None
        return AffineTensor.quantized(x, self.how, input_qparams=of_input)

    @property
    def is_weight(self) -> bool:
        """It can be the weight of a linear."""
        return self.kind is not CodebookTensor

    @property
    def is_trainable(self) -> bool:
        return issubclass(self.kind, TrainableTensor)

    @property
    def trainable(self) -> bool:
        """`is_trainable`, as `lowbit.testing.Subject` names it."""
        return self.is_trainable

    @property
    def has_master(self) -> bool:
        """It keeps a weight in high precision."""
        return issubclass(self.kind, MasterWeightTensor)

    @property
    def is_qat(self) -> bool:
        return self.kind is FakeQuantizedTensor

    @property
    def is_cast(self) -> bool:
        """A conversion to another dtype also rounds the plain weight that it stores."""
        return issubclass(self.kind, MixedPrecisionTensor)

    @property
    def shares_rows(self) -> bool:
        """All rows of a matrix have one scale, or one scale of scales, so that they cannot be regrouped."""
        if self.kind is TableTensor and self.how.weight.shares_rows:
            return True
        return "tensor" in self.name or self.kind in (TernaryTensor, BitNetTensor)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 2 if self.kind is TernaryTensor else self.how.weight.format.bits

    @property
    def others(self) -> list[Case]:
        """One case of the same class, if there is one: made otherwise."""
        return [c for c in CASES if c.kind is self.kind and c.how != self.how][:1]

    @property
    def activation(self) -> Any:
        """How a linear quantizes its activation, or None."""
        if self.kind in (BitNetTensor, TernaryTensor):
            return Tokens
        found = getattr(self.how, "activation", None)
        return Static(found) if found is not None and found.static else found

    @property
    def is_transposable(self) -> bool:
        return "transposed" in self.kind.meta_attrs

    def values_of(self, t: Any) -> Tensor:
        """The values with which slicing commutes: for QAT the weight itself, because a slice may change scales."""
        return t.master() if self.is_trainable else t.dequantize()


class Tokens:
    """The int8 activation of BitNet: one scale a token, max(−min / 128, max / 127)."""

    @staticmethod
    def fake_quantize(x: Tensor) -> Tensor:
        scale = torch.maximum(-x.float() / 128, x.float() / 127).amax(-1, keepdim=True)
        return ((x.float() / scale).round() * scale).to(x.dtype)


STATIC = (torch.tensor([0.04]), torch.tensor([-9], dtype=torch.int8))
"""Scale and zero point of the inputs of cases with a static activation."""


@dataclass(frozen=True)
class Static:
    """A static activation with the scale and the zero point of `STATIC`."""

    spec: Spec

    def fake_quantize(self, x: Tensor) -> Tensor:
        return self.spec.fake_quantize_by(x, *STATIC)


def _static(weight_only: Scheme) -> Scheme:
    activation = Spec(Int(8), PerTensor(), "asymmetric", static=True)
    return Scheme(weight_only.weight, activation)


_WEIGHTS = {
    "int4-g32": (Int4WeightOnly(32), 1, 32),
    "int4-g32-asymmetric": (Int4WeightOnly(32, "asymmetric"), 1, 32),
    "int4-g32-float-zero-point": (Int4WeightOnly(32, "float_zero_point"), 1, 32),
    "int4-row": (IntxWeightOnly(4), 1, 2),
    "int8-row": (Int8WeightOnly(), 1, 1),
    "int3-g48": (IntxWeightOnly(3, 48), 1, 48),
    "int1-g32-asymmetric": (IntxWeightOnly(1, 32), 1, 32),
    "int2-g32-half-integer": (IntxWeightOnly(2, 32, "half_integer"), 1, 32),
    "int5-row": (IntxWeightOnly(5), 1, 8),
    "uint8-row": (Scheme(Spec(Int(8, signed=False), PerRow(), "asymmetric")), 1, 1),
    "int8-tensor": (Scheme(Spec(Int(8), PerTensor())), 1, 1),
    "int4-tensor": (Scheme(Spec(Int(4), PerTensor(), "asymmetric")), 1, 2),
    "int4-block-8x16": (Scheme(Spec(Int(4), PerBlock(8, 16))), 8, 16),
    "int8dyn-int4-g32": (Int8DynamicActivationInt4Weight(32), 1, 32),
    "int8dyn-int8-row": (Int8DynamicActivationInt8Weight(), 1, 1),
    "int8static-int4-g32": (_static(Int4WeightOnly(32)), 1, 32),
    "int8static-int8-row": (_static(Int8WeightOnly()), 1, 1),
    "int8static-uint4-tensor": (_static(Scheme(Spec(Int(4, False), PerTensor()))), 1, 2),
}
_FLOAT8 = {
    "e4m3-row": (Float8WeightOnly(), 1, 1),
    "e5m2-tensor": (Scheme(Spec(Float8(torch.float8_e5m2), PerTensor())), 1, 1),
    "int8static-e4m3-row": (_static(Float8WeightOnly()), 1, 1),
    "e4m3dyn-e4m3-row": (Float8DynamicActivationFloat8Weight(), 1, 1),
    "mxfp8": (MXFP8WeightOnly(), 1, 32),
    "e4m3dyn-e4m3-block-8x16": (Float8DynamicActivationFloat8Weight(PerBlock(8, 16)), 8, 16),
}
THREE_BITS = LookupTable((-1.0, -0.5, -0.2, 0.0, 0.1, 0.3, 0.6, 1.2))
_TABLES = {
    "nf4-g32": (NF4WeightOnly(32), 1, 32),
    "nf4-g16-double": (NF4WeightOnly(16, double_quantization=True), 1, 16),
    "mxfp4": (MXFP4WeightOnly(), 1, 32),
    "nvfp4": (NVFP4WeightOnly(), 1, 16),
    "table8-row": (Scheme(Spec(THREE_BITS, PerRow())), 1, 8),
    "table8-tensor": (Scheme(Spec(THREE_BITS, PerTensor())), 1, 8),
    "int8static-nvfp4": (_static(NVFP4WeightOnly()), 1, 16),
}
_FAKE = {
    "qat-int4-g32": Int4WeightOnly(32),
    "qat-int3-g48": IntxWeightOnly(3, 48),
    "qat-int8dyn-int4-g32": Int8DynamicActivationInt4Weight(32),
    "qat-int4-block-8x16": Scheme(Spec(Int(4), PerBlock(8, 16))),
    "qat-e4m3-row": Float8WeightOnly(),
    "qat-nf4-g32": NF4WeightOnly(32),
    "qat-mxfp4": MXFP4WeightOnly(),
    "qat-mxfp8": MXFP8WeightOnly(),
    "qat-nvfp4": NVFP4WeightOnly(),
}
# on a CPU their products run in high precision, so that these can be compared; tests/train has the others
_MIXED = {
    "train-int8": Int8MixedPrecision(),
    "train-float8": Float8MixedPrecision(backward="e5m2", tensorwise=True),
}
_WEIGHTS_IN_TRAINING = {
    "train-int8-weight": (Int8WeightTensor, Int8Weight()),
    "train-int4-weight": (Int4WeightTensor, Int4Weight(32), 1, 32),
    "train-int8-weight-products": (Int8WeightTensor, Int8Weight(True, True, True)),
    "train-bitnet": (BitNetTensor, BitNet()),
    "train-bitnet-products": (BitNetTensor, BitNet(True, True)),
}

CASES = [
    *(Case(name, AffineTensor, how, *steps) for name, (how, *steps) in _WEIGHTS.items()),
    *(Case(name, Float8Tensor, how, *steps) for name, (how, *steps) in _FLOAT8.items()),
    *(Case(name, TableTensor, how, *steps) for name, (how, *steps) in _TABLES.items()),
    *(
        Case(
            f"state-{format}-{'signed' if signed else 'unsigned'}",
            CodebookTensor,
            {"format": format, "signed": signed},
            column_step=128 if format == "4bit" else 256,
        )
        for format in ("4bit", "8bit", "float8")
        for signed in (True, False)
    ),
    *(Case(name, FakeQuantizedTensor, how) for name, how in _FAKE.items()),
    *(Case(name, MixedPrecisionTensor, how) for name, how in _MIXED.items()),
    Case("train-float8-blocks", BlockMixedPrecisionTensor, Float8BlockMixedPrecision()),
    Case("train-mxfp8", MicroscaledTensor, MXFP8MixedPrecision()),
    *(Case(name, *how) for name, how in _WEIGHTS_IN_TRAINING.items()),
    Case("ternary", TernaryTensor, None, column_step=4),
]
BY_NAME = {case.name: case for case in CASES}


class FrozenContract(
    testing.BasicContract,
    testing.AutogradContract,
    testing.CompileContract,
    testing.FSDP2Contract,
    testing.SerializationContract,
):
    """What every frozen weight does, but slices of the inputs and with them tensor parallelism along them."""

    column_step = 0
    fsdp_rows = (33, 1)

    def test_a_model_with_it_is_dequantized(self) -> None:
        layer = linear_of(self.make((64, 128)))
        values = layer.weight.dequantize()
        dequantize_(layer)
        assert not isinstance(layer.weight, LowbitTensor)
        assert torch.equal(layer.weight, values)


def linear_of(weight: Any) -> nn.Linear:
    """A frozen linear without a bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def over(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrize a test's `case`."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def structure(case: Case) -> tuple[object, ...]:
    """`storage`, and how rows and columns may be cut."""
    return (*storage(case), case.row_step, case.column_step, case.shares_rows)


each_structure = pytest.mark.cover("values", case=structure)
"""The usual run takes a case of each class, of each set of parts, and of each way to cut rows and columns."""

by_class = pytest.mark.cover("pairs", case=lambda case: case.kind.__name__)
"""The usual run meets each class with each value of the other axes, with cases of the class in turn."""


def named(*names: str) -> list[Case]:
    return [BY_NAME[name] for name in names]


def storage(case: Case) -> tuple[str, ...]:
    """What travels between processes and files: the class, the names of its parts, and the kind of its codes."""
    codes = type(case.how.weight.format).__name__ if isinstance(case.how, Scheme) else ""
    return case.kind.__name__, " ".join(case.make((16, 96)).inner_tensors()), codes


def one_of_each(cases: Sequence[Case], of: Callable[[Case], object] = storage) -> list[Case]:
    """The first case of each kind of `storage`, or of another property."""
    return list({of(case): case for case in reversed(cases)}.values())[::-1]


every_case = over(CASES)
every_weight = over([case for case in CASES if case.is_weight])
every_frozen_weight = over([c for c in CASES if c.is_weight and not c.is_trainable])
every_trainable = over([case for case in CASES if case.is_trainable])
every_master = over([case for case in CASES if case.has_master])
every_kept_in_any_dtype = over([case for case in CASES if not case.is_cast])
every_qat = over([case for case in CASES if case.is_qat])

# Shapes: even, K to be padded, odd and prime, one row, one element, no rows.
SHAPES = [(24, 96), (24, 100), (7, 101), (1, 33), (1, 1), (0, 96)]


def check(t: Any) -> None:
    """The inner tensors have the shapes and dtypes that a tensor of this shape has."""
    expected = t.inner_shapes(t.flat_from or tuple(t.shape))
    found = {name: (tuple(part.shape), part.dtype) for name, part in t.inner_tensors().items()}
    if t.numel() == 0:  # the scale that an empty slice shares with all rows may stay
        expected, found = {"codes": expected.get("codes")}, {"codes": found.get("codes")}
    assert found == expected


def inside_range(weight: Any) -> Tensor:
    """Where x / scale + zero_point lies within the format's range, after rounding to the nearest integer."""
    master = weight.master()
    if not isinstance(weight, FakeQuantizedTensor):
        return torch.ones_like(master, dtype=torch.bool)
    spec = weight.scheme.weight
    if not hasattr(spec.format, "signed"):
        return torch.ones_like(master, dtype=torch.bool)  # scaled to the largest float8
    padded = spec.padded_shape(master.shape)
    _, scale, zero_point = spec.quantize(master)
    if zero_point is None:  # of signed symmetric codes
        zero_point = torch.zeros_like(scale)
    for dim, (size, blocks) in enumerate(zip(padded, scale.shape, strict=True)):
        if blocks:
            scale = scale.repeat_interleave(size // blocks, dim)
            zero_point = zero_point.repeat_interleave(size // blocks, dim)
    crop = tuple(slice(size) for size in master.shape)
    codes = (master * (1 / scale[crop])).round() + zero_point[crop].float()
    return (codes >= spec.format.quant_min) & (codes <= spec.format.quant_max)
