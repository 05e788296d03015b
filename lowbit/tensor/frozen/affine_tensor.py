"""AffineTensor: integer codes of 1 to 8 bits with a scale and a zero point for each block.

Storage, all row-major, sliceable along dimension 0 without unpacking:

- `codes`: 8 bits: int8 or uint8 [..., K]. Fewer: the code minus the format's smallest, packed as a little-endian
  bit stream along the last dimension (`lowbit.numerics.packing`); 4 bits: uint8 [..., K/2], even k in the low nibble.
- `scale`, `zero_point`: one element a block, [..., K/group]. Signed symmetric codes have no zero point.
- `input_scale` (float32), `input_zero_point`: one element, [1, 1]. Those of the input of its product, where the spec of
  the activation is static.

K, and every blocked dimension, is padded to a whole number of blocks; `shape` is the logical one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen import quantized_linear
from lowbit.linear.frozen.kinds import KINDS, representation_of
from lowbit.linear.lazy_stack import ATTRIBUTES
from lowbit.numerics.gain import can_grow, of_full_gain
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.packing import pack, packed_size, unpack
from lowbit.numerics.row_chunks import count_nonfinite, encode_in_chunks
from lowbit.numerics.scale_format import ScaleFormat
from lowbit.numerics.spec import Spec
from lowbit.numerics.spec_checks import check_reach
from lowbit.numerics.unseen_inputs import search_qparams
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core import (
    InnerShapes,
    LowbitTensor,
    check_finite,
    check_weight,
    is_traced,
    refuse_trace,
    stored_shape,
)
from lowbit.tensor.frozen.blocked import BlockedTensor
from lowbit.tensor.frozen.cpu_values import ReadOnCpu, rows_of_embedding
from lowbit.tensor.frozen.frozen import asks_for_gradient
from lowbit.tensor.frozen.op_arguments import ReadByOps
from lowbit.tensor.frozen.products import multiplied, rounded_for_experts
from lowbit.tensor.frozen.requantize import check_room, holds, requantize, rescale, write_exactly
from lowbit.tracing.report import specs_name

torch.serialization.add_safe_globals([Int, Float8, LookupTable, Spec, Scheme])
_Own = torch._C.DisableTorchFunctionSubclass
_LINEAR = F.linear  # a name of this module: an attribute lookup takes time at each product


class AffineTensor(ReadByOps, ReadOnCpu, BlockedTensor):
    """A weight in integer codes; see the module for the layout. Make one with `AffineTensor.from_float`.

    It is frozen: `requires_grad_()` leaves `requires_grad` False, and warns where the tensor is a parameter. Gradients
    flow through its linear to the input. `weight[i]` is a row, as plain values.

    A subclass stores certain specs in another layout. It overrides `stores`, gives its layout a name in `stored_as`,
    and overrides what differs of `_stored_bits`, `_store` and `_load`. Without a product of its own (`register_linear`)
    its products multiply the dequantized weight.
    """

    tensor_attrs: ClassVar[tuple[str, ...]] = (
        *("codes", "scale", "zero_point"),
        *("input_scale", "input_zero_point"),
    )
    meta_attrs: ClassVar[tuple[str, ...]] = ("spec", "activation", "transposed")
    way_out: ClassVar[str] = (
        "call .dequantize() for a plain tensor first, or lowbit.dequantize_(model) for a plain model"
    )
    caches = (*LowbitTensor.caches, "_known_products", "_reader")
    stored_as: ClassVar[str | None] = "integers"
    """The name of the layout of the codes. lowbit's kernels read the layouts of lowbit's own classes alone."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None
    spec: Spec
    """How the weight is quantized."""
    activation: Spec | None
    """How the activation of its linear is quantized, or None."""
    _known_products: tuple[Any, ...] = ()
    """The last decisions of `lowbit.linear.frozen` on products of this weight."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "stores" in cls.__dict__:  # KINDS has the newest class first
            KINDS.insert(0, cls)

    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        spec: Spec,
        shape: Sequence[int],
        dtype: torch.dtype,
        activation: Spec | None = None,
    ) -> Self:
        """Assemble inner tensors as the module describes them.

        Args:
            codes: integers, packed where `spec` packs them.
            scale: floating, one a block.
            zero_point: one a block; None where `spec` has none.
            spec: how the weight is quantized.
            shape: that of the weight, without padding.
            dtype: that of its values.
            activation: how the input of its products is quantized; None: not at all.

        Raises ValueError for a misfit, as `check_parts`.
        """
        if spec.has_zero_point != (zero_point is not None):
            takes = "takes a" if spec.has_zero_point else "takes no"
            got = "none" if zero_point is None else f"one of shape {tuple(zero_point.shape)}"
            raise ValueError(f"{spec} {takes} zero_point, got {got}")
        tensors = {"codes": codes, "scale": scale, "zero_point": zero_point}
        return cls.of_parts(tensors, spec, shape, dtype, activation)

    @classmethod
    def of_parts(
        cls,
        parts: Mapping[str, Tensor | None],
        spec: Spec,
        shape: Sequence[int],
        dtype: torch.dtype,
        activation: Spec | None = None,
    ) -> Self:
        """Assemble inner tensors by name, also the static scale of inputs.

        Args: `parts`, the tensors by the names in `tensor_attrs`; the others are those of the constructor.

        Raises ValueError for a misfit, as `check_parts`.
        """
        meta = {"spec": spec, "activation": activation, "transposed": False}
        self = cls.from_inner(parts, meta, shape, dtype)
        self.check_parts()
        return self

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        scheme: Scheme | Spec,
        qparams: tuple[Tensor, Tensor | None] | None = None,
        input_qparams: tuple[Tensor, Tensor | None] | None = None,
        joint: Tensor | None = None,
    ) -> AffineTensor:
        """Quantize `weight` [..., N, K], rounding to nearest. A Float8 format gives a `Float8Tensor`, a LookupTable a
        `TableTensor`.

        Args:
            qparams: scale and zero point of each block, as `Spec.search_qparams` and `Spec.choose_qparams` give them;
                their dtypes stay, and a `scale_dtype` of the scheme must be that of the scale. A scale may be negative.
                None chooses them by the mapping, in the `scale_dtype`, or else in `weight`'s dtype (float32 for
                float64, and for float8 in blocks).
            input_qparams: scale and zero point of the input, one element each, for a static activation.
            joint: what `Spec.joint_part` gives for this weight and its siblings, in place of `qparams`.

        Raises:
            ValueError: integer, complex, low-bit, 1-D, NaN or infinite weights; scales and zero points of another shape
                or dtype; scales that are zero or not finite, as those of weights too large for a `scale_dtype` of
                float16; weights that round to infinity in their dtype; a static activation without `input_qparams`.
        """
        spec = scheme.weight if isinstance(scheme, Scheme) else scheme
        activation = scheme.activation if isinstance(scheme, Scheme) else None
        check_weight(weight)
        spec.check_padding(weight.shape)
        if qparams is not None:
            spec.check_qparams(weight.shape, *qparams, joint)
        kind = representation_of(spec)
        scale_dtype = spec.scale_dtype_for(weight.dtype)
        meta = {"spec": spec, "activation": activation, "transposed": False}
        joint = None if joint is None else joint.clone()  # each weight has its own memory
        if joint is not None and spec.scales is None:
            qparams, joint = (joint, None), None
        tensors = kind._encode_as(weight.detach(), spec, scale_dtype, qparams, joint)
        check_reach(spec, tensors)
        tensors.update(_parts_of_input(activation, input_qparams))
        made = kind.from_inner(tensors, meta, weight.shape, weight.dtype)
        check_finite(made, weight)
        return made

    @classmethod
    def searched(
        cls,
        weight: Tensor,
        scheme: Scheme | Spec,
        importance: Tensor | None = None,
        input_qparams: tuple[Tensor, Tensor | None] | None = None,
        joint: Tensor | None = None,
    ) -> AffineTensor:
        """`from_float` by a search: it loses less by rounding.

        Codes are those of `Spec.search_qparams`, with the least squared error. Without an importance, stored scales of
        FP4 suit the inputs that trained weights have (`lowbit.numerics.unseen_inputs`). Then scales become larger, so
        that the rounded weight is not too small (`lowbit.numerics.gain`).

        Args:
            weight, scheme, input_qparams, joint: as for `from_float`.
            importance: the weight of each input channel's error, as for `Spec.search_qparams`; None: all alike.

        Raises ValueError as `from_float` and the search do.
        """
        spec = scheme.weight if isinstance(scheme, Scheme) else scheme
        check_weight(weight)
        scale_dtype = spec.scale_dtype_for(weight.dtype)
        if spec.scales is not None and spec.scales.joint is not None and joint is None:
            joint = spec.joint_part([weight.detach()], scale_dtype)
        plain = weight.detach()
        if importance is None:
            qparams = search_qparams(spec, plain, scale_dtype, joint)
        else:
            qparams = spec.search_qparams(plain, scale_dtype, importance, joint)
        if plain.is_meta or not can_grow(spec, joint):
            return cls.from_float(weight, scheme, qparams, input_qparams, joint)
        spec.check_qparams(weight.shape, *qparams, joint)
        values, qparams, joint = of_full_gain(spec, plain, qparams, importance, joint)
        made = cls.from_float(values, scheme, qparams, input_qparams, joint)._with(
            dtype=weight.dtype
        )
        check_finite(made, weight)
        return made

    @classmethod
    def quantized(
        cls,
        weight: Tensor,
        scheme: Scheme | Spec,
        scales: str | None = None,
        input_qparams: tuple[Tensor, Tensor | None] | None = None,
        joint: Tensor | None = None,
    ) -> AffineTensor:
        """`from_float` where `scales` is "minmax", `searched` where it is "searched".

        Args:
            weight, scheme, input_qparams: as for `from_float`.
            scales: None takes the search for integers of 1 and 2 bits and for "super_block" scales, and "minmax" for
                all else.
            joint: as for `from_float`. Scales that siblings share whole are then those of `from_float`.

        Raises ValueError as both do.
        """
        spec = scheme.weight if isinstance(scheme, Scheme) else scheme
        if joint is not None and (spec.scales is None or scales != "searched"):
            return cls.from_float(weight, scheme, input_qparams=input_qparams, joint=joint)
        if scales is None:
            scales = "searched" if spec.is_searched else "minmax"
        if scales == "searched":
            return cls.searched(weight, scheme, input_qparams=input_qparams, joint=joint)
        return cls.from_float(weight, scheme, input_qparams=input_qparams)

    @classmethod
    def _encode_as(
        cls,
        weight: Tensor,
        spec: Spec,
        scale_dtype: torch.dtype,
        qparams: tuple[Tensor, Tensor | None] | None = None,
        joint: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        if spec.scales is not None:
            return cls._encode_stored(weight, spec, spec.scales, qparams, joint)

        def encode(
            part: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None
        ) -> dict[str, Tensor | None]:
            own = None if scale is None else (scale.contiguous(), zero_point)
            codes, scale, zero_point = spec.quantize(part.contiguous(), scale_dtype, own)
            return {"codes": cls._store(codes, spec), "scale": scale, "zero_point": zero_point}

        given = qparams or ()
        if spec.shares_rows:
            return encode(weight, *given)
        return encode_in_chunks(weight, encode, *given)

    @classmethod
    def _encode_stored(
        cls,
        weight: Tensor,
        spec: Spec,
        scales: ScaleFormat,
        qparams: tuple[Tensor, Tensor | None] | None,
        joint: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """`_encode_as` where scales are stored in a scale format."""
        stored = (
            spec.choose_scales(spec.pad(weight), joint=joint)
            if qparams is None
            else scales.encode_given(qparams[0], spec.kept_parts(joint))
        )

        def encode(part: Tensor, scale: Tensor) -> dict[str, Tensor | None]:
            codes, _, _ = spec.quantize(part.contiguous(), qparams=(scale, None))
            return {"codes": cls._store(codes, spec)}

        scale = scales.decode(stored)
        whole = spec.granularity.shares_rows
        found = encode(weight, scale) if whole else encode_in_chunks(weight, encode, scale)
        return {**found, **stored}

    # ---- storage of the codes, overridden by other representations ------------------------------------------

    @classmethod
    def stores(cls, spec: Spec) -> bool:
        """True if this class stores weights of this spec. The newest class that does is the one that
        `lowbit.quantize_`, QAT and `from_float` make."""
        return isinstance(spec.format, Int)

    @classmethod
    def _stored_bits(cls, spec: Spec) -> int:
        """Bits that a code takes in `codes`; 8: codes are stored one by one, in the dtype of the format."""
        return spec.format.bits

    @classmethod
    def _store(cls, codes: Tensor, spec: Spec) -> Tensor:
        if cls._stored_bits(spec) == 8:
            return codes.contiguous()
        return pack((codes - int(spec.format.quant_min)).view(torch.uint8), spec.format.bits)

    @classmethod
    def _code_dtype(cls, spec: Spec) -> torch.dtype:
        return spec.format.dtype if cls._stored_bits(spec) == 8 else torch.uint8

    def _load(self, columns: int) -> Tensor:
        """Codes [..., columns] in the format's own dtype, on its own grid."""
        fmt = self.spec.format
        if self._stored_bits(self.spec) == 8:
            return self.codes
        return (unpack(self.codes, fmt.bits, columns).view(fmt.dtype)) + int(fmt.quant_min)

    # ---- LowbitTensor's methods ------------------------------------------------------------------------------

    def _stored_values(self) -> Tensor:
        """Values [..., N, K] in this tensor's dtype: (code − zero_point) · scale in float32, rounded once."""
        if 0 in self.shape:  # an empty slice keeps the scales of the original
            return self.scale.new_empty(tuple(self.shape), dtype=self.dtype)
        shape = self.shape_of_codes(self.shape)
        if self.codes.is_cuda and (values := self._dequantize_on_gpu()) is not None:
            return values
        if (values := self._dequantize_on_cpu()) is not None:
            return values
        return self._dequantized(shape)

    def _dequantized(self, shape: Sequence[int]) -> Tensor:
        """The values of a matrix, or a stack of them, of the shape of the codes, by PyTorch's operations."""
        codes = self._load(self.spec.padded_shape(shape)[-1])
        return self.spec.dequantize(codes, self.scale_values(), self.zero_point, shape, self.dtype)

    def scale_values(self) -> Tensor:
        """The scale of each block, as `lowbit.numerics.affine` takes it."""
        scales = self.spec.scales
        return self.scale if scales is None else scales.decode(self.inner_tensors())

    def is_floating(self, name: str) -> bool:
        return name == "scale" and self.spec.scales is None

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        shape = self.shape_of_codes(stored_shape(self, shape))
        padded, blocks = self.spec.padded_shape(shape), self.spec.blocks(shape)
        bits = self._stored_bits(self.spec)
        found: InnerShapes = {
            "codes": ((*padded[:-1], packed_size(padded[-1], bits)), self._code_dtype(self.spec)),
            "scale": (blocks, self.spec.stored_scale_dtype or self.scale.dtype),
        }
        if self.spec.has_zero_point:  # the spec decides, so a checkpoint without it does not fit
            is_value = self.spec.zero_point_is_value
            dtype = self.scale.dtype if is_value else self.spec.format.dtype
            found["zero_point"] = (blocks, dtype)
        if self.spec.scales is not None:
            found.update(self.spec.scales.shapes(blocks))
        if self.activation is not None and self.activation.static:
            found["input_scale"] = ((1, 1), torch.float32)
            if self.activation.has_zero_point:
                found["input_zero_point"] = ((1, 1), _zero_point_dtype(self.activation))
        return found

    def _as_stored(self, values: Tensor) -> tuple[AffineTensor, Tensor]:
        """The tensor that holds these codes and is not transposed, and `values` [..., N, K] as it holds them."""
        return (self._transposed(), values.transpose(-2, -1)) if self.transposed else (self, values)

    def _encode(self, values: Tensor, joint: Tensor | None = None) -> dict[str, Tensor | None]:
        """By the default scales of `quantized`. Raises ValueError for NaN and infinite values, since one makes
        its whole block useless. `joint`: what the scales share with siblings (`Spec.joint_part`)."""
        weight, stored = self._as_stored(values)
        if type(weight) is not type(self):
            return weight._encode(stored, joint)
        is_known = not values.is_meta and not torch.compiler.is_compiling()
        if is_known and (bad := count_nonfinite(values)):
            raise ValueError(
                f"{bad} NaN or infinite values of {values.numel()} cannot be written into {self!r}: repair or reload "
                "them first"
            )
        spec, dtype = self.spec, self.scale.dtype
        if spec.scales is None and joint is not None:
            found = self._encode_as(stored, spec, dtype, (joint, None))
        elif (
            is_known
            and stored.numel()
            and spec.is_searched
            and representation_of(spec) is type(self)
        ):
            has_format = spec.scales is not None or spec.super_blocks is not None  # of scales
            searched = spec if has_format else replace(spec, scale_dtype=dtype)
            found = {**AffineTensor.searched(stored, searched).inner_tensors()}
        else:
            found = self._encode_as(stored, spec, dtype, None, joint)
        found.update(self._of_input())
        check_reach(self.spec, found)
        check_finite(self._with(found), values)
        return found

    def _takes_meta_of(self, other: Tensor) -> bool:
        """Accepts the other symmetric mapping, as in a checkpoint of a preset that had it, and another `scale_dtype`
        where the scales have one dtype all the same."""
        if type(self) is not type(other) or not self.spec.same_values(other.spec):
            return False
        is_other = self.spec.scale_dtype != other.spec.scale_dtype
        if is_other and self.scale.dtype != other.scale.dtype:
            return False  # a copy would round the scales
        return {**self.meta(), "spec": None} == {**other.meta(), "spec": None}

    def check_meta(self) -> None:
        super().check_meta()
        if not isinstance(self.transposed, bool):
            raise ValueError(f"transposed must be True or False, got {self.transposed!r}")
        if not self.stores(self.spec):
            raise ValueError(f"{type(self).__name__} does not store {self.spec}")

    def stored_format(self) -> str:
        return specs_name(self.spec, self.activation)

    def meta_to_json(self) -> dict[str, Any]:
        return {"scheme": Scheme(self.spec, self.activation).to_dict()}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        scheme = Scheme.from_dict(data["scheme"])
        return {"spec": scheme.weight, "activation": scheme.activation, "transposed": False}

    # ---- reading and writing values ---------------------------------------------------------------------------

    def requantize_(self, values: Tensor) -> None:
        """Write `values` [..., N, K], in the weight's scheme; each block keeps its scale where that is nearer. A
        scale of the whole matrix, which siblings may share, stays unless it does not reach the values, or the squared
        error falls by a tenth.
        Multiples of what the blocks hold multiply their scales, which loses nothing, and values that the present scales
        give exactly, as those of a pruned weight, keep the scales.

        Warns where it rounds. Raises ValueError for values of another shape, and for those that are not finite or round
        to infinity. The weight then stays unchanged.
        """
        if values.shape != self.shape:
            raise ValueError(f"values of shape {tuple(values.shape)} for {self!r}")
        weight, stored = self._as_stored(values)
        if type(weight) is not type(self):
            weight.requantize_(stored)
            return
        if rescale(weight, stored) or write_exactly(weight, stored):
            return
        check_weight(values, f"the new value of {type(self).__name__} {tuple(self.shape)}")
        check_room(weight, stored, requantize)
        warnings.warn(
            f"{type(self).__name__} of {self.spec.format} takes new values, rounded to its own codes: changes below "
            "half the distance of two of them are lost. lowbit.dequantize_(model) before the change loses nothing. To "
            "merge adapters into low-bit weights, lowbit.peft.merge_(model, batches=…) learns the rounding",
            stacklevel=1,  # this line, so that all weights together warn once
        )
        requantize(weight, stored)

    def holds(self, values: Tensor) -> bool:
        if self.flat_from is not None:
            return False
        if self.transposed:
            return self._transposed().holds(values.transpose(-2, -1))
        return holds(self, values)

    def _write_exactly(self, values: Tensor) -> bool:
        return self.flat_from is None and write_exactly(*self._as_stored(values))

    def _new_scales(self, x: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor | None]]:
        """Scales and zero points of padded values x: the inner tensors, by name, and as `lowbit.numerics.affine` takes
        them. The part that all blocks share stays."""
        if self.spec.scales is not None:
            found = self.spec.choose_scales(x, kept=self.inner_tensors())
            return {"scale": found["scale"]}, (self.spec.scales.decode(found), None)
        searches = self.spec.is_searched and not x.is_meta and not torch.compiler.is_compiling()
        choose = self.spec.search_qparams if searches else self.spec.choose_qparams
        scale, zero_point = choose(x, self.scale.dtype)
        point = {} if zero_point is None else {"zero_point": zero_point}
        return {"scale": scale, **point}, (scale, zero_point)

    def _assign_data(self, values: Any) -> None:
        """`self.data = values`: takes over a low-bit tensor with its codes, its dtype and its device, or quantizes
        plain values. Raises ValueError for another shape, for low-bit data that is stored differently, for plain values
        of another dtype or device, and as `requantize_`."""
        facts: dict[str, tuple[Any, Any]] = {"shape": (tuple(values.shape), tuple(self.shape))}
        if not isinstance(values, LowbitTensor):
            facts["dtype"] = values.dtype, self.dtype
            facts["device"] = values.device, self.device
        for what, (got, own) in facts.items():
            if got != own:
                raise ValueError(
                    f"assigning .data of {what} {got} to {self!r}, which has {own}; change the plain model (resize "
                    "embeddings, cast) before lowbit.quantize_, or call lowbit.dequantize_(module) first"
                )
        if not isinstance(values, LowbitTensor):
            source: Any = self.clone()
            source.requantize_(values)
        elif self._is_stored_like(values):
            source = values
        else:
            raise ValueError(
                f"assigning {values!r} as .data of {self!r}: they are stored differently; assign values.dequantize() "
                "to quantize them again"
            )
        self._take_over(source)

    @property
    def rounds_inputs(self) -> bool:
        """True if its products round their inputs."""
        return self.activation is not None

    def rounded_input(self, x: Tensor) -> Tensor:
        """x [..., K] as this weight's products round it, for one that runs in high precision."""
        if self.activation is None:
            return x
        if self.input_scale is None:
            return self.activation.fake_quantize(x)
        return self.activation.fake_quantize_by(x, self.input_scale, self.input_zero_point)

    def quantized_input(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes [M, K], scale and zero point of x [M, K], by the static scale of this weight's input."""
        assert self.activation is not None and self.input_scale is not None
        return self.activation.quantize(x, qparams=(self.input_scale, self.input_zero_point))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _LINEAR and isinstance(
            args[1] if len(args) > 1 else kwargs["weight"], AffineTensor
        ):
            if is_traced() is not None:
                refuse_trace()
            return quantized_linear(*args, **kwargs) if kwargs else quantized_linear(*args)
        if func in ATTRIBUTES and is_traced() is None:  # the fastest way, as PEFT asks often
            with _Own():
                return func(*args)
        kwargs = kwargs or {}
        if (product := multiplied(func, args, kwargs)) is not None:
            return product
        args = rounded_for_experts(func, args)
        if func is F.embedding and (rows := rows_of_embedding(*args, **kwargs)) is not None:
            return rows
        if asks_for_gradient(func, args, kwargs):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


KINDS.append(AffineTensor)


def _zero_point_dtype(spec: Spec) -> torch.dtype:
    """The dtype of zero points beside float32 scales."""
    return torch.float32 if spec.zero_point_is_value else spec.format.dtype


def _parts_of_input(
    activation: Spec | None, qparams: tuple[Tensor, Tensor | None] | None
) -> dict[str, Tensor | None]:
    """The inner tensors for a static activation; none for another."""
    if activation is None or not activation.static:
        return {}
    if qparams is None:
        raise ValueError(
            f"{activation} is static, and no scale of the input is given: call lowbit.calibrate(model, scheme) first, "
            "or give input_qparams"
        )
    scale, zero_point = qparams
    found: dict[str, Tensor | None] = {"input_scale": scale.detach().float().clone().view(1, 1)}
    if zero_point is not None:
        zero_point = zero_point.detach().to(_zero_point_dtype(activation), copy=True).view(1, 1)
    return {**found, "input_zero_point": zero_point}
