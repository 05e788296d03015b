"""A quantizer: by which scales a fake-quantized weight is rounded, and how gradients pass the rounding.

A `FakeQuantizedTensor` holds one. A quantizer of one's own is a frozen dataclass in any file, which writes `qparams`
and no more:

    @dataclass(frozen=True)
    class HalfRange(Quantizer):
        name: ClassVar[str] = "half_range"

        def qparams(self, values, spec, scales):
            scale, zero_point = super().qparams(values, spec, scales)
            return scale / 2, zero_point

    lowbit.qat.prepare_(model, scheme, scales="half_range")

`qparams` serves training and `convert_` alike, so both give the same bits. A quantizer has no tensors: it is metadata
of the weight, which torch.compile guards and pickles hold. What it needs beside the weight are parameters of the module
(`lowbit.tensor.trained.learned_scales`), or follows from other weights (`lowbit.tensor.trained.joint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.linear.coded_linear import CodedWeight, coded_weight, coded_weight_by
from lowbit.linear.fused_rounding import fake_quantize, unclamped_codes
from lowbit.numerics import class_names
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8
from lowbit.numerics.scale_format import E8M0
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import Gather, Wire, rounding_inputs
from lowbit.tensor.trained.packed_codes import packed, saves

Scales = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What a product takes beside the weight: the parameters of learned scales and zero points; and what the scales of
siblings share, or for learned scales other values of the same extremes, where the weight is a part of its blocks. Each
may be None."""
NO_SCALES: Scales = (None, None, None)
_NOT_STORED = ("absolute", "packs")
"""Fields of quantizers that a description writes elsewhere, or not."""


@dataclass(frozen=True, repr=False)
class Quantizer:
    """Which scales round a fake-quantized weight, and how gradients pass. Metadata of the weight, without tensors.

    Attributes:
        absolute: True where the parameters of learned scales do not follow the weight.
    """

    kinds: ClassVar[dict[str, type[Quantizer]]] = {}
    """Every quantizer by its name. Each class enters itself. A name that another class has raises TypeError."""
    name: ClassVar[str] = ""
    """By which `lowbit.qat.prepare_(scales=…)` and descriptions of weights know a class that has one of its own."""
    rounds_parts: ClassVar[bool] = True
    """True if a part of a weight with blocks of its own is rounded as it is in the whole."""
    rounds_again: ClassVar[bool] = False
    """True if `lowbit.linear.rounded_linear` knows the formula, so that products keep no rounded weight."""
    swaps_last: ClassVar[bool] = True
    """True if a transposed view finds its scales."""
    has_scales_beside: ClassVar[bool] = False
    """True if products take something beside the weight (`scales_in`)."""
    is_describable: ClassVar[bool] = True
    """True if a description suffices to read a weight back: it needs no other weight."""
    absolute: bool = False

    def __repr__(self) -> str:
        others = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in others)})"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            holder = Quantizer.kinds.get(cls.name)
            class_names.check_free(holder, cls, f"the quantizer {cls.name!r}")
            Quantizer.kinds[cls.name] = cls
        torch.serialization.add_safe_globals([cls])

    # ---- scales ----------------------------------------------------------------------------------------------

    def scales_in(self, module: Any, attribute: str = "weight") -> Scales:
        """What products of the weight of this module take beside it."""
        return NO_SCALES

    def scales_alone(self, weight: Any, what: str) -> Scales:
        """The same for a weight alone. Raises NotImplementedError where it does not know its module; `what` needs
        them."""
        return NO_SCALES

    def qparams(self, values: Tensor, spec: Spec, scales: Scales) -> tuple[Tensor, Tensor | None]:
        """The scale and the zero point by which `values`, plain and padded to whole blocks, are rounded now."""
        return spec.choose_qparams(values, spec.scale_dtype_for(values.dtype))

    def scales_at(self, values: Tensor, spec: Spec, scales: Scales) -> Scales:
        """`scales` as the formulas take them for plain `values` [..., N, K]: those that follow the weight, computed."""
        return scales

    # ---- rounding --------------------------------------------------------------------------------------------

    def rounded(self, values: Tensor, spec: Spec, scales: Scales) -> Tensor:
        """Plain `values` [..., N, K], rounded: differentiable, in their dtype."""
        found = self._found(values, spec, scales)
        return spec.fake_quantize_by(values, *found)

    def coded(self, values: Tensor, spec: Spec, scales: Scales) -> CodedWeight:
        """Plain `values` [N, K] for a product of codes, of formats without zero points."""
        return coded_weight_by(values, spec, self._found(values, spec, scales)[0])

    def frozen_options(self, values: Tensor, spec: Spec, scales: Scales) -> dict[str, Any]:
        """The arguments of `AffineTensor.from_float` that make the weight for inference have the scales of these plain
        values."""
        return {"qparams": self._found(values, spec, scales)}

    def _found(self, values: Tensor, spec: Spec, scales: Scales) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return self.qparams(spec.pad(values.detach()), spec, scales)

    def like(self, other: Quantizer) -> bool:
        """True if weights of both quantizers may be copied to each other."""
        return self == other

    def splits_rows(self, spec: Spec) -> bool:
        """True if parts of a row may share its scale, in whatever way tensor parallelism splits the weight."""
        return False

    def entries_beside(self, weight: Any, *args: Any) -> dict[str, Tensor]:
        """`MasterWeightTensor.entries_beside` of a weight, whose other arguments these are."""
        return {}

    # ---- parts, and the weight as an operand of other operations -----------------------------------------------

    def settled(self, weight: Any) -> Tensor:
        """`weight.settled()` of a weight whose products round it and their input."""
        return rounding_inputs(weight, weight.read().to(weight.dtype))

    def factor(self, weight: Any) -> Tensor:
        """`weight.factor()` of a weight whose products round their input."""
        return weight

    # ---- FSDP2 -----------------------------------------------------------------------------------------------

    def encode(self, shard: Any, gather: Gather) -> Wire | None:
        """What of a shard travels in an all-gather, as `FakeQuantizedTensor.gathered`; None: the shard itself. All
        ranks decide alike."""
        return None

    # ---- descriptions ----------------------------------------------------------------------------------------

    def to_json(self, spec: Spec) -> dict[str, Any]:
        """Its entries in the description of a weight of this spec."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_STORED}
        return {"quantizer": self.name, **({"quantizer_options": own} if own else {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Quantizer:
        """The quantizer of such a description. Raises ValueError for one that is not known."""
        name = data.get("quantizer", PRESENT.name)
        if name not in Quantizer.kinds:
            raise ValueError(f"quantizer {name!r}; known: {', '.join(Quantizer.kinds)}")
        return Quantizer.kinds[name].read(data)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Quantizer:
        """One of this class, by the entries of `to_json`."""
        return cls(**data.get("quantizer_options", {}))


@dataclass(frozen=True, repr=False)
class PresentScales(Quantizer):
    """The scales and zero points that the Spec chooses for the present weight.

    Args:
        packs: True where FSDP2 gathers codes in fewer bits than a byte (`lowbit.train.compress_collectives_`).
    """

    name: ClassVar[str] = "present"
    rounds_again: ClassVar[bool] = True
    packs: bool = field(default=False, compare=False)

    def rounded(self, values: Tensor, spec: Spec, scales: Scales) -> Tensor:
        return fake_quantize(values, spec, spec.scale_dtype_for(values.dtype), scales[2])

    def coded(self, values: Tensor, spec: Spec, scales: Scales) -> CodedWeight:
        return coded_weight(values, spec, scales[2])

    def frozen_options(self, values: Tensor, spec: Spec, scales: Scales) -> dict[str, Any]:
        return {} if scales[2] is None else {"joint": scales[2]}

    def encode(self, shard: Any, gather: Gather) -> Wire | None:
        """Codes before the clamp and scales, which give the same products and gradients to the bit.

        A weight that products see in high precision travels itself. So does a weight of two bytes an element: finding
        its codes takes many operations before the gather, and takes longer than the byte that they would save.
        """
        weight, spec = shard.weight, shard.scheme.weight
        if weight.dtype.itemsize <= 2 or not shard.rounds_weight or spec.shares_rows:
            return None
        packs = self.packs and saves(spec)
        if isinstance(spec.format, Float8) and spec.may_clip(torch.float32):
            return None  # float8 codes do not show which of them clip
        # codes of a table before the clamp are float32, unless they are packed
        if shard.role != "matrix" or (isinstance(spec.format, LookupTable) and not packs):
            return None
        weight = weight.detach()
        codes, scale, zero = unclamped_codes(weight, spec, spec.scale_dtype_for(weight.dtype))
        if packs:
            codes = packed(codes, spec, spec.may_clip(scale.dtype))
            if isinstance(spec.scales, E8M0):
                scale = spec.scales.bytes_of(scale)
        tensors = {"codes": codes, "scale": scale, "zero_point": zero}
        return Wire(shard.gathered, {name: t for name, t in tensors.items() if t is not None})

    def to_json(self, spec: Spec) -> dict[str, Any]:
        has_own = "name" in type(self).__dict__ and self != PRESENT
        return super().to_json(spec) if has_own else {}


PRESENT = PresentScales()
