"""FakeQuantizedTensor: a high-precision weight whose products see it quantized (quantization-aware training).

`F.linear` and `F.embedding` round the weight, and the activation where the scheme has one, to the values that the
converted model will store, through the same `Spec` that converts it. Gradients pass straight through to the weight
inside the clamp range.

`off` switches the rounding off, that of the weight, of activations, or both (`lowbit.qat.enable_`). With both off,
torch's own functions get the high-precision weight, so that results equal those of the plain model to the bit. `off` is
metadata of the tensor: torch.compile guards it, and copies of the tensor have it. A state dict does not hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.linear.coded_linear import CodedWeight, coded_linear, product_of
from lowbit.linear.frozen.checks import (
    autocast_inputs,
    check_addend,
    in_transform,
    refuse_transforms,
)
from lowbit.linear.fused_rounding import fake_quantize
from lowbit.linear.operands import Values
from lowbit.linear.rounded_linear import rounded_linear, rounding_of
from lowbit.numerics.spec import Spec
from lowbit.schemes.mixed_precision import MixedPrecision
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core import (
    ROUNDING_INPUTS,
    InnerShapes,
    LowbitTensor,
    is_traced,
    read,
    reads,
    refuse_trace,
    stored_shape,
)
from lowbit.tensor.frozen import AffineTensor, ConvTensor, matrix_shape
from lowbit.tensor.trained.codes_before_clamp import CodesBeforeClamp
from lowbit.tensor.trained.master_weight import MasterWeightTensor
from lowbit.tensor.trained.other_products import OtherProducts
from lowbit.tensor.trained.quantizers import NO_SCALES, PRESENT, Quantizer, Scales
from lowbit.tracing import tracer
from lowbit.tracing.report import specs_name

Qparams = tuple[Tensor, Tensor | None]
"""A scale and a zero point."""
Off = Literal["weights", "activations", "all", None]
"""Which rounding of a weight's products is switched off."""
Role = Literal["matrix", "convolution", "base"]
"""The role of a weight in its layer. "matrix": [N, K], or a stack of them. "convolution": [N, C/groups, k…], which
keeps its shape, and which is rounded and converted as the matrix [N, K] of its rows. "base": a matrix that a LoRA
layer rounds with its adapters merged (`lowbit.tensor.trained.adapted`). FSDP2 gathers all but the first unrounded."""


class FakeQuantizedTensor(OtherProducts, MasterWeightTensor, codec=CodesBeforeClamp):  # type: ignore[misc]
    """A trainable weight that is quantized in every product. `weight` is the high-precision tensor inside."""

    is_described = True
    already = "prepared for QAT already; lowbit.qat.convert_(model) converts it"
    schemes = (Scheme,)
    meta_attrs: ClassVar[tuple[str, ...]] = (
        "scheme",
        "transposed",
        "off",
        "gradients",
        "role",
        "quantizer",
    )
    products: ClassVar[dict[Any, str]] = {
        **MasterWeightTensor.products,
        F.conv1d: "conv1d",
        F.conv2d: "conv2d",
    }

    caches = (*MasterWeightTensor.caches, "holder")

    scheme: Scheme
    off: Off
    gradients: MixedPrecision | None
    """How the products of gradients run in low bits, where the product itself does; None: in high precision."""
    role: Role
    quantizer: Quantizer
    holder: weakref.ref[nn.Module] | None = None
    """The module of the weight, where its quantizer looks for scales (`hold`)."""

    def __new__(
        cls, weight: Tensor, scheme: Any, role: Role = "matrix", quantizer: Quantizer = PRESENT
    ) -> Self:
        """Wrap `weight` for `scheme`, sharing its memory if it is contiguous.

        Args:
            weight: plain, of a floating dtype.
            scheme: how products round it and their input.
            role: what it is to its layer.
            quantizer: by which scales it is rounded.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        made = super().__new__(cls, weight, scheme)
        made.role, made.quantizer = role, quantizer
        return made

    @classmethod
    def _meta_of(cls, weight: Tensor) -> dict[str, Any]:
        return {
            "transposed": False,
            "off": None,
            "gradients": None,
            "role": "matrix",
            "quantizer": PRESENT,
        }

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        own = {**cls._meta_of(torch.empty(0)), "quantizer": Quantizer.from_json(data)}
        return {**super().meta_from_json(data), **own}

    def meta_to_json(self) -> dict[str, Any]:
        return {**super().meta_to_json(), **self.quantizer.to_json(self.scheme.weight)}

    @property
    def is_describable(self) -> bool:
        """Not without the layer that knows what the weight is to it, or its siblings."""
        alone = self.role == "matrix" and self.quantizer.is_describable
        return alone and super().is_describable

    def _with(self, *args: Any, **kwargs: Any) -> Self:
        made = super()._with(*args, **kwargs)
        if self.holder is not None:
            made.holder = self.holder
        return made

    def _take_over(self, other: Any) -> None:
        holder = self.holder  # a cache, which other data would end
        super()._take_over(other)
        self.holder = holder

    def check_meta(self) -> None:
        super().check_meta()
        if self.off not in get_args(Off):
            raise ValueError(f"off={self.off!r}; accepted: {get_args(Off)}")
        if self.role not in get_args(Role):
            raise ValueError(f"role={self.role!r}; accepted: {get_args(Role)}")

    def _is_stored_like(self, other: Tensor) -> bool:
        """Neither a rounding that is switched off, nor the scheme of gradients, nor the name of the weight makes a
        difference."""
        if type(other) is type(self) and self.quantizer.like(other.quantizer):
            own = {"off": self.off, "gradients": self.gradients, "quantizer": self.quantizer}
            other = other._with(**own)
        return super()._is_stored_like(other)

    def switch(self, weights: bool, activations: bool) -> None:
        """Switch the rounding of the weight and of activations on or off, in place."""
        if self.scheme.activation is None:
            activations = weights  # one state, not two that torch.compile would tell apart
        states: dict[tuple[bool, bool], Off] = {
            (True, True): None,
            (False, True): "weights",
            (True, False): "activations",
            (False, False): "all",
        }
        self.off = states[weights, activations]

    @property
    def rounds_weight(self) -> bool:
        """True if products see the weight rounded."""
        return self.off not in ("weights", "all")

    @property
    def input_spec(self) -> Spec | None:
        """How products round their input; None where they do not."""
        return self.scheme.activation if self.off not in ("activations", "all") else None

    def operand(self) -> Tensor:
        """The weight as its products see it now: plain, differentiable, of this tensor's dtype where not rounded."""
        return self.seen_by(*self.scales_now("a product"))

    def scales_now(self, what: str) -> Scales:
        """What its products take beside it now. Raises NotImplementedError where `what` lacks its module."""
        return self.quantizer.scales_alone(self, what) if self.rounds_weight else NO_SCALES

    def read(self) -> Tensor:
        return self.operand()

    def settled(self) -> Tensor:
        # a part of the rows of a convolution is not a weight of a convolution
        if self.input_spec is None or self.role == "convolution":
            return self.read()
        if self.is_settled:
            return self
        if self.transposed:
            stored: Any = self.transpose(-2, -1)
            return stored.settled().transpose(-2, -1)
        return self.quantizer.settled(self)

    def factor(self) -> Tensor:
        return self.read() if self.input_spec is None else self.quantizer.factor(self)

    @property
    def is_settled(self) -> bool:
        return not self.rounds_weight

    @property
    def has_rows_alone(self) -> bool:
        spec = self.scheme.weight
        if self.role == "convolution":
            return False
        if not self.rounds_weight:
            return True
        if not self.quantizer.rounds_parts:
            return False
        if self.ndim == 3:
            return not spec.granularity.spans(0, 3)
        return not (self.transposed or spec.shares_rows)

    def high_precision(self) -> Tensor:
        """The weight without rounding: plain, differentiable, of this tensor's dtype."""
        return Values.apply(self).to(self.dtype)

    def fake_quantized(self) -> Tensor:
        """The rounded weight: plain, differentiable, equal to the converted weight's values."""
        return self.quantized_by(*self.quantizer.scales_alone(self, "a product"))

    def quantized_by(
        self, scale: Tensor | None = None, zero: Tensor | None = None, joint: Tensor | None = None
    ) -> Tensor:
        """The weight as its products see it: plain, equal to the converted weight's values, differentiable in the
        weight and in the parameters `scale` and `zero`.

        Args:
            scale, zero, joint: what the quantizer gives (`lowbit.tensor.trained.quantizers.Scales`).
        """
        if self.transposed:
            stored: Any = self.transpose(-2, -1)
            return stored.quantized_by(scale, zero, joint).transpose(-2, -1)
        return self.rounded(Values.apply(self), scale, zero, joint)

    def seen_by(
        self, scale: Tensor | None = None, zero: Tensor | None = None, joint: Tensor | None = None
    ) -> Tensor:
        """`quantized_by`, or the high-precision weight while its rounding is off."""
        refuse_transforms(self)
        if not self.rounds_weight:
            return self.high_precision()
        values = self.quantized_by(scale, zero, joint)
        tracer.rounded(values, self)
        return values

    @property
    def has_experts_alone(self) -> bool:
        return self.ndim == 3 and (self.quantizer.rounds_parts or not self.rounds_weight)

    @property
    def swaps_last(self) -> bool:
        return self.role != "convolution" and self.quantizer.swaps_last

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape that the blocks of its scheme divide."""
        if self.role == "convolution":
            return matrix_shape(self.shape)
        return stored_shape(self, self.shape)

    def rows(self, values: Tensor) -> Tensor:
        """Plain `values` of this weight in the shape that the blocks of its scheme divide."""
        return values.flatten(1) if self.role == "convolution" else values

    def rounded(
        self,
        values: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        joint: Tensor | None = None,
    ) -> Tensor:
        """Plain `values` (all of this weight, or whole rows), rounded as it is: differentiable, in their dtype.
        Args: those of `quantized_by`."""
        rows, spec = self.rows(values), self.scheme.weight
        return self.quantizer.rounded(rows, spec, (scale, zero, joint)).reshape(values.shape)

    def codes_on_grid(
        self, scale: Tensor, zero: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes on the grid of the format by learned scales, their scales and zero points, without gradient."""
        spec, own = self.scheme.weight, self.weight.detach()
        scales = scale.detach(), None if zero is None else zero.detach(), None
        found = self.quantizer.frozen_options(own, spec, scales)["qparams"]
        codes, _, _ = spec.quantize(own, qparams=found)
        return codes, *found

    def coded_by(
        self,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        joint: Tensor | None = None,
        values: Tensor | None = None,
    ) -> CodedWeight:
        """The rounded weight [N, K] for a product of codes. Args: those of `quantized_by`.

        `values`: plain values in place of its own."""
        own = Values.apply(self) if values is None else values
        return self.quantizer.coded(own, self.scheme.weight, (scale, zero, joint))

    @property
    def rounds_again(self) -> bool:
        """True if `rounded_linear` can multiply by this weight."""
        formula = self.quantizer.rounds_again
        return (
            formula and not self.transposed and self.ndim == 2 and self.off in (None, "activations")
        )

    def _stored_values(self) -> Tensor:
        """The values that the converted weight will have."""
        scales = self.quantizer.scales_alone(self, "dequantization")
        with torch.no_grad():
            return self.rounded(self.weight.detach(), *scales).to(self.dtype)

    def _takes_meta_of(self, other: Tensor) -> bool:
        """Accepts the other symmetric mapping, if this is a parameter. A view would lose the new metadata."""
        return (
            type(self) is type(other)
            and self.quantizer.rounds_parts
            and self.quantizer == other.quantizer
            and isinstance(self, nn.Parameter)
            and self.scheme.activation == other.scheme.activation
            and self.scheme.weight.same_values(other.scheme.weight)
            and self.scheme.weight.scale_dtype == other.scheme.weight.scale_dtype
        )

    def stored_format(self) -> str:
        return f"QAT {specs_name(self.scheme.weight, self.scheme.activation)}"

    def frozen(self, input_qparams: Qparams | None = None) -> LowbitTensor:
        """`frozen_by` the scales that the weight has now."""
        return self.frozen_by(self.quantizer.scales_alone(self, "conversion"), input_qparams)

    def frozen_by(self, scales: Scales, input_qparams: Qparams | None = None) -> LowbitTensor:
        """The weight for inference, in this tensor's dtype, which model.to(dtype) changes, and not in that of `weight`.

        Args:
            scales: what the quantizer gives.
            input_qparams: those of the input, for a static activation.
        """
        kind, spec = ConvTensor if self.role == "convolution" else AffineTensor, self.scheme.weight
        how = self.quantizer.frozen_options(self.rows(self.weight), spec, scales)
        found = kind.from_float(self.weight, self.scheme, input_qparams=input_qparams, **how)
        return found.to(self.dtype)  # type: ignore[return-value]

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return cls.product(input, weight, bias, weight.scales_now("a product"))

    def operand_of_rounding(self) -> Tensor:
        """What `rounded_linear` takes."""
        return Values.apply(self)

    @staticmethod
    def product(
        input: Tensor,
        weight: Any,
        bias: Tensor | None,
        scales: Scales,
        static: Any = None,
        values: Tensor | None = None,
        in_codes: bool = True,
    ) -> Tensor:
        """input [..., K] times what products see of this weight [N, K], transposed, plus bias [N].

        Args:
            scales: what the quantizer gives.
            static: the module, where it rounds its input by a static scale.
            values: plain values [N, K] in place of the weight's own.
            in_codes: False for high precision, where the converted weight does not multiply codes.
        """
        refuse_transforms(weight)
        if is_traced() is not None:
            refuse_trace()
        with torch._C.DisableTorchFunctionSubclass():  # `dtype` and `ndim` pass through it
            check_addend("bias", bias, (weight.shape[0],), input, weight)
            input, bias = autocast_inputs(input, weight, bias)
            again = in_codes and static is None and values is None and weight.rounds_again
        is_observed = static is not None and static.is_observed
        found = None
        if in_codes and weight.scheme.activation is not None and not is_observed:
            found = product_of(input, weight)
        if found is not None:
            own = weight.coded_by(*scales, values=values)
            return coded_linear(input, weight, own, bias, found, static)
        if again:
            own = weight.operand_of_rounding()
            return rounded_linear(input, own, bias, rounding_of(weight, own.dtype), scales)
        if values is None:
            values = weight.seen_by(*scales)
        elif weight.rounds_weight:
            values = weight.rounded(values, *scales)
            tracer.rounded(values, weight)
        x = FakeQuantizedTensor._rounded_input(
            input, weight, None if static is None else static.rounded
        )
        return F.linear(x, values.to(x.dtype), bias)

    @staticmethod
    def _rounded_input(
        x: Tensor, weight: Any, rounded: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """The input as the product sees it. `rounded`: rounds it, where its scale is static."""
        activation = weight.input_spec
        if rounded is not None and activation is not None:
            return rounded(x)
        return x if activation is None else fake_quantize(x, activation)

    def values(self) -> Tensor:
        weight = self.weight.detach()
        return weight.transpose(-2, -1) if self.transposed else weight

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        return super().inner_shapes(stored_shape(self, shape))

    def _transposed(self) -> Self:
        if self.role == "convolution":
            raise self._unsupported("transposition")
        return super()._transposed()

    def _expert(self, index: int) -> Self:
        self._check_experts_apart("selecting an expert")
        return super()._expert(index)

    def _take(self, rows: Tensor) -> Self:
        self._check_experts_apart("selecting experts")
        return super()._take(rows)

    def _check_experts_apart(self, what: str) -> None:
        """Raise NotImplementedError where experts share a scale: alone, one would be rounded by another one."""
        is_stack = (
            self.ndim == 3 and self.shape[0] > 1 and self.scheme.weight.granularity.spans(0, 3)
        )
        if is_stack and self.rounds_weight:
            raise self._unsupported(
                f"{what}, since they share scales (accepted: grouped and batched products of all of them, "
                "scales='learned', or a granularity other than that of the whole tensor)"
            )

    def _slice(self, dim: int, start: int, end: int) -> Self:
        if self.transposed:
            return self._slice_as_stored(dim, start, end)
        return super()._slice(dim, start, end)

    def _row(self, index: int) -> Tensor:
        if not self.transposed:
            return super()._row(index)
        return self.weight.select(1, index).to(self.dtype)

    def _all_rows(self) -> list[Tensor]:
        weight = self.weight.mT if self.transposed else self.weight
        return list(weight.to(self.dtype).unbind())

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        return super()._encode(values.transpose(-2, -1) if self.transposed else values)

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        return None if self.transposed else super()._view(shape)

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if self.transposed:
            raise self._unsupported("cat of transposed tensors")
        return super()._cat(tensors, dim)

    def in_attention(self, rows: int) -> Tensor:
        if self.input_spec is not None:
            raise NotImplementedError(
                f"nn.MultiheadAttention with an out_proj prepared as {self.stored_format()}, whose inputs it cannot "
                "quantize in training: leave out_proj out by filter_fn or a pattern, e.g. {'*.out_proj': None, "
                "'*': scheme}, or choose a weight-only scheme"
            )
        return self.operand().to(self.dtype)

    @classmethod
    def computed(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        states = set()  # not a comprehension: every product passes here
        for x in (*args, *kwargs.values()):
            if isinstance(x, FakeQuantizedTensor):
                states.add(x.off)
        if states == {"all"} and not in_transform():
            named = {name: _plain(x) for name, x in kwargs.items()}
            return func(*(_plain(x) for x in args), **named)
        if func in _CONVOLUTIONS and not any(map(_convolves, (*args, *kwargs.values()))):
            if reads(func, args, kwargs):
                return read(func, args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return super().computed(func, args, kwargs)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        found = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        if found is not None:
            whole: Any = found[0]
            whole.holder = self.holder
        return found

    def entries_beside(self, *args: Any) -> dict[str, Tensor]:
        return self.quantizer.entries_beside(self, *args)

    def check_placement(self, param: Any) -> None:
        """Refuse parts that cut through a block: each would have its own scale, which `convert_` would not
        reproduce."""
        if self.scheme.is_static:
            raise NotImplementedError(
                f"tensor parallelism of a weight {tuple(param.shape)} prepared for QAT with a static activation, whose "
                "scale is its module's; accepted: a dynamic activation, or FSDP2"
            )
        spec = self.scheme.weight
        if self.quantizer.splits_rows(spec):
            return
        if spec.scales is not None and spec.scales.shared:
            raise NotImplementedError(
                f"tensor parallelism of a weight {tuple(param.shape)} prepared for QAT in {spec}: each part would "
                f"choose its own {', '.join(spec.scales.shared)}; accepted: FSDP2, or scale_format='e8m0' or 'float'"
            )
        sizes = spec.block_size(spec.padded_shape(param.shape))
        for mesh_dim, placement in enumerate(param.placements):
            dim = getattr(placement, "dim", None)
            if dim is None:
                continue
            part = -(-param.shape[dim] // param.device_mesh.size(mesh_dim))
            if part < param.shape[dim] and part % sizes[dim]:
                raise NotImplementedError(
                    f"a weight of shape {tuple(param.shape)} prepared for QAT with {spec.granularity!r}, split along "
                    f"dimension {dim} into parts of {part}, which cut through blocks of {sizes[dim]} that share a "
                    "scale; accepted: parts of whole blocks, such as PerGroup(g) with g dividing in_features / ranks "
                    "under RowwiseParallel, or PerRow() under ColwiseParallel"
                )


@FakeQuantizedTensor.implements(ROUNDING_INPUTS)
def _rounding_inputs(func: Any, args: Any, kwargs: Any) -> Tensor:
    weight, values = args
    meta = {name: getattr(weight, name) for name in FakeQuantizedTensor.meta_attrs}
    meta |= {"transposed": False, "off": "weights"}
    return FakeQuantizedTensor.from_inner({"weight": values}, meta, values.shape, values.dtype)


_CONVOLUTIONS = (F.conv1d, F.conv2d)


def _convolves(x: Any) -> bool:
    return isinstance(x, FakeQuantizedTensor) and x.role == "convolution"


def _plain(x: Any) -> Any:
    return x.high_precision() if isinstance(x, FakeQuantizedTensor) else x
