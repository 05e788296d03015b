"""Schemes: what is quantized, to which number format, at which granularity.

A `Spec` describes one quantized tensor: format + granularity + mapping. A `Scheme` holds the `Spec` of a weight and,
where activations are quantized too, the `Spec` of the activation. The same Scheme drives `quantize_`, `qat.prepare_`
and checkpoints, so nothing is configured twice.

`lowbit.schemes.presets` defines the usual schemes (`Int4WeightOnly(group_size=128)`, …) as functions that return a
`Scheme`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.granularity import Granularity, PerBlock, PerGroup, PerTensor, PerToken
from lowbit.numerics.lookup_table import TABLES, LookupTable
from lowbit.numerics.number_format import Float8, Int, NumberFormat
from lowbit.numerics.spec import Spec
from lowbit.numerics.spec_checks import SCALE_DTYPES


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized.

    Args:
        weight: how the weight is quantized.
        activation: how the input of the product is quantized; None: the input stays in high precision.
    """

    weight: Spec
    activation: Spec | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Spec):
            raise TypeError(f"weight must be a Spec, got {self.weight!r}")
        if isinstance(self.weight.granularity, PerToken):
            raise ValueError("PerToken() is for activations; a weight takes PerRow()")
        if self.weight.static:
            raise ValueError("static=True is for activations; a weight has scales of its own")
        if self.activation is None:
            return
        if not isinstance(self.activation, Spec):
            raise TypeError(f"activation must be a Spec or None, got {self.activation!r}")
        if self.activation.scale_dtype is not None:
            raise ValueError(
                f"scale_dtype is for weights; the scales of an activation are float32, got {self.activation}"
            )
        if isinstance(self.activation.format, LookupTable):
            raise ValueError(
                f"a LookupTable is for weights, got an activation {self.activation}; accepted: Int(bits) or Float8()"
            )
        if not isinstance(self.activation.granularity, PerToken | PerTensor | PerGroup):
            raise ValueError(
                "an activation takes PerToken(), PerTensor() or PerGroup(g), got "
                f"{self.activation.granularity!r}"
            )

    def obstacle(self, shape: Sequence[int], uses: Collection[str]) -> str | None:
        """Why a weight of this shape is left alone; None: it is converted. `uses`: the kinds of the modules that hold
        the weight, each one of `lowbit.convert.USES`."""
        gran = self.weight.granularity
        rows = gran.shape[0] if isinstance(gran, PerBlock) and len(gran.shape) > 1 else 1
        if "embedding" in uses and rows > 1:
            return f"its rows would share scales in blocks of {rows}, and are looked up singly"
        of_input = None if self.activation is None else self.activation.granularity
        if "conv" in uses and not isinstance(of_input, PerTensor | None):
            return (
                f"the input of a convolution has no rows, which an activation {of_input} gives scales; accepted: a "
                "weight-only scheme, or an activation with PerTensor(), such as that of "
                "Int8StaticActivationInt8Weight()"
            )
        if self.is_static and not {"linear", "conv"} & set(uses):
            return "no nn.Linear, whose input a static activation scale is calibrated for"
        if self.is_static and not set(uses) <= {"linear", "embedding", "conv"}:
            return (
                "one weight of an nn.Linear and of another module, whose input no static scale fits"
            )
        return None

    @property
    def is_static(self) -> bool:
        """True if the input of the product has a scale that `lowbit.calibrate` finds."""
        return self.activation is not None and self.activation.static

    def check(self, weight: Tensor) -> None:
        """Raise ValueError for a weight that this scheme cannot take."""
        self.weight.check_padding(weight.shape)
        if self.activation is not None and weight.ndim > 1:
            self.activation.check_padding((1, weight.shape[-1]))

    def describe(self, shape: Sequence[int]) -> str:
        """A report's note on a weight that was converted."""
        spec, activation = self.weight, self.activation
        note = f"{spec.format}, {spec.granularity}, {spec.mapping}"
        note += "" if spec.scale_format == "float" else f", {spec.scale_format} scales"
        if spec.scale_dtype is not None:
            note += f", {str(spec.scale_dtype).removeprefix('torch.')} scales"
        if activation is not None:
            note += f"; activation {activation.format}, {activation.granularity}"
            note += ", static" if activation.static else ""
        padded = spec.padded_shape(shape)
        if padded != tuple(shape):
            growth = math.prod(padded) / max(math.prod(shape), 1)
            note += f"; padded to {'x'.join(map(str, padded))}, {growth:.2f} times the weights"
        return note

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `Scheme.from_dict` reads it back."""
        return {
            "weight": _spec_to_dict(self.weight),
            "activation": None if self.activation is None else _spec_to_dict(self.activation),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Scheme:
        """The scheme that `to_dict` described. Raises ValueError for anything else."""
        try:
            activation = data.get("activation")
            return Scheme(
                weight=_spec_from_dict(data["weight"]),
                activation=None if activation is None else _spec_from_dict(activation),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{data!r} is not what Scheme.to_dict gives: {type(error).__name__} {error}"
            ) from error


def _spec_to_dict(spec: Spec) -> dict[str, Any]:
    fmt, gran = spec.format, spec.granularity
    described: dict[str, Any]
    if isinstance(fmt, Int):
        described = {"bits": fmt.bits, "signed": fmt.signed}
    elif isinstance(fmt, Float8):
        described = {"float8": str(fmt.dtype).removeprefix("torch.")}
    elif fmt.name in TABLES:
        described = {"table": fmt.name}
    else:
        described = {"table": list(fmt.values), "ties_to_even": fmt.ties_to_even}
    granularity = [type(gran).__name__, *gran.sizes()]
    found: dict[str, Any] = {
        "format": described,
        "granularity": granularity,
        "mapping": spec.mapping,
    }
    # defaults are left out
    if spec.static:
        found["static"] = True
    if spec.scale_format != "float":
        found["scale_format"] = spec.scale_format
    if spec.scale_dtype is not None:
        found["scale_dtype"] = str(spec.scale_dtype).removeprefix("torch.")
    return found


def _spec_from_dict(data: dict[str, Any]) -> Spec:
    fmt = data["format"]
    name, *sizes = data["granularity"]
    kinds: dict[str, Any] = {**Granularity.kinds}
    if name not in kinds:
        raise ValueError(
            f"unknown granularity {name!r}; accepted: {', '.join(kinds)}; import the module that defines another first"
        )
    return Spec(
        _format_from_dict(fmt),
        kinds[name](*sizes),
        data["mapping"],
        static=data.get("static", False),
        scale_format=data.get("scale_format", "float"),
        scale_dtype=_scale_dtype_from(data.get("scale_dtype")),
    )


def _scale_dtype_from(name: Any) -> torch.dtype | None:
    """The dtype that `_spec_to_dict` named. Raises ValueError for another name."""
    if name is None:
        return None
    if name not in SCALE_DTYPES:
        raise ValueError(f"unknown scale_dtype {name!r}; accepted: {', '.join(SCALE_DTYPES)}")
    return SCALE_DTYPES[name]


def _format_from_dict(described: dict[str, Any]) -> NumberFormat:
    if "float8" in described:
        return Float8(getattr(torch, described["float8"]))
    if "table" not in described:
        return Int(described["bits"], described["signed"])
    table = described["table"]
    if isinstance(table, str):
        return TABLES[table]
    return LookupTable(tuple(table), described["ties_to_even"])
