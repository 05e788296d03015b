"""FakeQuantizedTensor: a high-precision weight whose products see it quantized (quantization-aware training).

`F.linear` and `F.embedding` round the weight, and the activation where the scheme has one, to the values that the
converted model will store, through the same `Spec` that converts it. Gradients pass straight through to the weight
inside the clamp range.

`off` switches the rounding off, that of the weight, of activations, or both (`lowbit.qat.enable_`). With both off,
torch's own functions get the high-precision weight, so that results equal those of the plain model to the bit. `off` is
metadata of the tensor: torch.compile guards it, and copies of the tensor have it. A state dict does not hold it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.linear.coded_linear import (
    CodedWeight,
    coded_linear,
    coded_weight,
    codes_again,
    product_of,
)
from lowbit.linear.dequantized import Values
from lowbit.linear.frozen.checks import autocast_inputs, in_transform, refuse_transforms
from lowbit.linear.fused_rounding import (
    Inside,
    fake_quantize,
    rounded,
    unclamped_codes,
)
from lowbit.linear.rounded_linear import Rounding, RoundingOfGathered, rounded_linear
from lowbit.numerics.affine import StraightThrough
from lowbit.numerics.code_range import within_range
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8
from lowbit.numerics.spec import Spec, crop
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import MixedPrecision
from lowbit.tensor.core import (
    Gather,
    InnerShapes,
    LowbitTensor,
    Wire,
    rounding_inputs,
    stored_shape,
)
from lowbit.tensor.core.reading import read, reads
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor, check_convolution, matrix_shape
from lowbit.tensor.trained.master_weight import MasterWeightTensor
from lowbit.tracing import tracer
from lowbit.tracing.report import specs_name

Qparams = tuple[Tensor, Tensor | None]
"""A scale and a zero point."""
Off = Literal["weights", "activations", "all", None]
"""Which rounding of a weight's products is switched off."""
Role = Literal["matrix", "convolution"]
"""What a weight is to its layer. "matrix": [N, K], or a stack of them. "convolution": [N, C/groups, k…], which keeps
its shape, and which is rounded and converted as the matrix [N, K] of its rows. FSDP2 gathers it itself."""


class CodesBeforeClamp:
    """What the codecs of both kinds of scales share: codes before the clamp, one byte an element, and scales."""

    def inner_shapes(self: Any, shape: Sequence[int]) -> InnerShapes:
        spec, shape = self.scheme.weight, stored_shape(self, shape)
        of_elements, of_blocks = spec.padded_shape(shape), spec.blocks(shape)
        return {
            name: (of_elements if name in ("codes", "residual") else of_blocks, t.dtype)
            for name, t in self.inner_tensors().items()
        }

    def clamped(self: Any) -> Tensor:
        """The codes on the grid of the format."""
        fmt, codes = self.scheme.weight.format, self.codes
        if not isinstance(fmt, Float8):
            codes = codes.clamp(int(fmt.quant_min), int(fmt.quant_max))
        return codes.to(fmt.dtype)

    def decoded_values(self: Any) -> Tensor:
        """In float32, which the weights had that travel as codes."""
        spec = self.scheme.weight
        return spec.dequantize(
            self.clamped(), self.scale, self.zero_point, self.shape, torch.float32
        )

    def coded_by(self: Any, scale: Tensor | None, zero: Tensor | None) -> CodedWeight:
        codes, _ = codes_again(self.scheme.weight, self.codes, self.scale)
        return CodedWeight(
            codes, self.scale, self.differentiable_values(scale, zero, False), self.codes
        )


class UnclampedCodes(CodesBeforeClamp):
    """The codec of a FakeQuantizedTensor: codes before the clamp and scales, which give the same products and gradients
    to the bit.

    A weight that products see in high precision travels itself. So does a weight of two bytes an element: finding
    its codes takes many operations before the gather, and takes longer than the byte that they would save.
    """

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale", "zero_point")

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire | None:
        weight, spec = shard.weight, shard.scheme.weight
        if weight.dtype.itemsize <= 2 or not shard.rounds_weight or spec.shares_rows:
            return None
        if shard.role != "matrix":
            return None
        if isinstance(spec.format, LookupTable):  # whose codes before the clamp are float32
            return None
        weight = weight.detach()
        dtype = spec.scale_dtype_for(weight.dtype)
        codes, scale, zero_point = unclamped_codes(weight, spec, dtype)
        tensors = {"codes": codes, "scale": scale}
        if zero_point is not None:
            tensors["zero_point"] = zero_point
        return Wire(shard.gathered, tensors)

    def passed(self: Any, grad: Tensor) -> Tensor:
        """The gradient of the weight from that of its values: the same where codes do not clip, zero where they do."""
        fmt = self.scheme.weight.format
        inside = within_range(self.codes.float(), fmt.dtype, fmt.quant_min, fmt.quant_max)
        return Inside(crop(inside, self.shape)).passed(grad)

    def gradients_by(self: Any, grad: Tensor, scale: None, zero: None) -> tuple[Any, ...]:
        return self.passed(grad), None, None

    def fake_quantized(self: Any) -> Tensor:
        if self.transposed:
            return self.transpose(-2, -1).fake_quantized().transpose(-2, -1)
        return self.differentiable_values()

    def coded(self: Any) -> CodedWeight:
        return self.coded_by(None, None)

    def _look_up(self: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_sparse(args, kwargs):
            raise self._unsupported(
                "nn.Embedding(sparse=True) under FSDP2, which reduces no sparse gradients (accepted: sparse=False)"
            )
        return F.embedding(indices, self.fake_quantized().to(self.dtype), *args, **kwargs)


class FakeQuantizedTensor(MasterWeightTensor, codec=UnclampedCodes):
    """A trainable weight that is quantized in every product. `weight` is the high-precision tensor inside."""

    is_described = True
    already = "prepared for QAT already; lowbit.qat.convert_(model) converts it"
    schemes = (Scheme,)
    meta_attrs: ClassVar[tuple[str, ...]] = ("scheme", "transposed", "off", "gradients", "role")
    products: ClassVar[dict[Any, str]] = {
        **MasterWeightTensor.products,
        F.conv1d: "conv1d",
        F.conv2d: "conv2d",
    }

    constant_codes: bool = False
    """True if the gradient of learned scales is that of constant codes."""

    scales_elsewhere: ClassVar[Callable[[Any, str], Tensor] | None] = None
    """For a class whose weights find only a part of their scales by themselves: gives the part that siblings share, or
    raises NotImplementedError for `what` would need it. None: a weight finds its scales by itself."""

    scheme: Scheme
    off: Off
    gradients: MixedPrecision | None
    """How the products of gradients run in low bits, where the product itself does; None: in high precision."""
    role: Role

    def __new__(cls, weight: Tensor, scheme: Any, role: Role = "matrix") -> Self:
        """Wrap `weight` for `scheme`, sharing its memory if it is contiguous.

        Args:
            weight: plain, of a floating dtype.
            scheme: how products round it and their input.
            role: what it is to its layer.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        made = super().__new__(cls, weight, scheme)
        made.role = role
        return made

    @classmethod
    def _meta_of(cls, weight: Tensor) -> dict[str, Any]:
        return {"transposed": False, "off": None, "gradients": None, "role": "matrix"}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        return {**super().meta_from_json(data), **cls._meta_of(torch.empty(0))}

    @property
    def is_describable(self) -> bool:
        """Not without its layer, which knows what the weight is to it."""
        return self.role == "matrix" and super().is_describable

    def check_meta(self) -> None:
        super().check_meta()
        if self.off not in get_args(Off):
            raise ValueError(f"off={self.off!r}; accepted: {get_args(Off)}")
        if self.role not in get_args(Role):
            raise ValueError(f"role={self.role!r}; accepted: {get_args(Role)}")

    def _is_stored_like(self, other: Tensor) -> bool:
        """Neither a rounding that is switched off nor the scheme of gradients makes a difference."""
        if type(other) is type(self):
            other = other._with(off=self.off, gradients=self.gradients)
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
        if not self.rounds_weight:
            return self.high_precision()
        values = self.fake_quantized()
        tracer.rounded(values, self)
        return values

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
        return rounding_inputs(self, self.read().to(self.dtype))

    def factor(self) -> Tensor:
        return self.read() if self.input_spec is None else self

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
        if self.ndim == 3:
            return not spec.granularity.spans(0, 3)
        return not (self.transposed or spec.shares_rows)

    def high_precision(self) -> Tensor:
        """The weight without rounding: plain, differentiable, of this tensor's dtype."""
        return Values.apply(self).to(self.dtype)

    def fake_quantized(self) -> Tensor:
        """The rounded weight: plain, differentiable, equal to the converted weight's values."""
        if self.transposed:
            stored: Any = self.transpose(-2, -1)
            return stored.fake_quantized().transpose(-2, -1)
        joint = joint_of_weight(self, "a product")
        return self.rounded(Values.apply(self), joint)

    @property
    def swaps_last(self) -> bool:
        return self.role == "matrix"

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape that the blocks of its scheme divide."""
        return matrix_shape(self.shape) if self.role == "convolution" else tuple(self.shape)

    def rows(self, values: Tensor) -> Tensor:
        """Plain `values` of this weight in the shape that the blocks of its scheme divide."""
        return values.flatten(1) if self.role == "convolution" else values

    def rounded(self, values: Tensor, joint: Tensor | None = None) -> Tensor:
        """Plain `values` (all of this weight, or whole rows), rounded as it is: differentiable, in their dtype.
        `joint`: as for `Spec.choose_qparams`."""
        rounding = rounding_of(self, values.dtype)
        found = fake_quantize(self.rows(values), rounding.weight, rounding.scale_dtype, joint)
        return found.reshape(values.shape)

    def coded(self) -> CodedWeight:
        """The rounded weight [N, K] for a product of codes."""
        joint = joint_of_weight(self, "a product")
        return coded_weight(Values.apply(self), self.scheme.weight, joint)

    @property
    def rounds_again(self) -> bool:
        """True if `rounded_linear` can multiply by this weight."""
        return not self.transposed and self.ndim == 2 and self.off in (None, "activations")

    def dequantize(self) -> Tensor:
        """The values that the converted weight will have, in this tensor's dtype, without gradient."""
        if self.flat_from is not None:
            return self._with(shape=self.flat_from).dequantize().reshape(-1)
        if self.transposed:
            return self._transposed().dequantize().transpose(-2, -1)
        joint = joint_of_weight(self, "dequantization")
        return self.rounded(self.weight.detach(), joint).to(self.dtype)

    def _takes_meta_of(self, other: Tensor) -> bool:
        """Accepts the other symmetric mapping, if this is a parameter. A view would lose the new metadata."""
        return (
            type(self) is type(other)
            and isinstance(self, nn.Parameter)
            and self.scheme.activation == other.scheme.activation
            and self.scheme.weight.same_values(other.scheme.weight)
            and self.scheme.weight.scale_dtype == other.scheme.weight.scale_dtype
        )

    def stored_format(self) -> str:
        return f"QAT {specs_name(self.scheme.weight, self.scheme.activation)}"

    def frozen(self, input_qparams: Qparams | None = None) -> LowbitTensor:
        """In this tensor's dtype, which model.to(dtype) changes, and not in that of `weight`. `input_qparams`: those of
        the input, for a static activation."""
        joint = joint_of_weight(self, "conversion")
        shared: dict[str, Any] = {} if joint is None else {"joint": joint}
        found = frozen_as(self).from_float(
            self.weight, self.scheme, input_qparams=input_qparams, **shared
        )
        return found.to(self.dtype)

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return cls.product(input, weight, weight.operand, weight.coded, bias, scales=(None, None))

    def operand_of_rounding(self) -> Tensor:
        """What `rounded_linear` takes."""
        return Values.apply(self)

    @staticmethod
    def product(
        input: Tensor,
        weight: Any,
        seen: Callable[[], Tensor],
        coded: Callable[[], CodedWeight] | None,
        bias: Tensor | None,
        static: Any = None,
        scales: tuple[Tensor | None, Tensor | None] | None = None,
        joint: Tensor | None = None,
    ) -> Tensor:
        """input [..., K] times what products see of this weight [N, K], transposed, plus bias [N].

        Args:
            seen: gives the operand in high precision.
            coded: gives it as codes, where the converted weight multiplies codes; None keeps high precision.
            static: the module, where it rounds its input by a static scale.
            scales: the parameters of learned scales, or None twice for present ones, where the product may round both
                operands again for backward, and keep neither (`lowbit.linear.rounded_linear`).
            joint: what present scales share with those of siblings. Then the product may do so too.
        """
        refuse_transforms(weight)
        input, bias = autocast_inputs(input, weight, bias)
        is_observed = static is not None and static.is_observed
        found = None
        if coded is not None and weight.scheme.activation is not None and not is_observed:
            found = product_of(input, weight)
        if coded is not None and found is not None:
            return coded_linear(input, weight, coded(), bias, found, static)
        if (scales is not None or joint is not None) and weight.rounds_again:
            values = weight.operand_of_rounding()
            how = rounding_of(weight, values.dtype)
            return rounded_linear(input, values, bias, how, *(scales or (None, None)), joint)
        values, rounded = seen(), None if static is None else static.rounded
        x = FakeQuantizedTensor._rounded_input(input, weight, rounded)
        return F.linear(x, values.to(x.dtype), bias)

    @staticmethod
    def operands(
        input: Tensor,
        weight: Any,
        values: Tensor,
        bias: Tensor | None,
        rounded: Callable[[Tensor], Tensor] | None = None,
        product: str = "linear",
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The plain input, weight and bias that torch's own function multiplies: cast, the input rounded.

        Args:
            values: what products see of the weight.
            rounded: rounds the input, where its scale is static.
            product: the name of torch's function, for messages.
        """
        refuse_transforms(weight)
        x, bias = autocast_inputs(input, weight, bias, product)
        x = FakeQuantizedTensor._rounded_input(x, weight, rounded)
        return x, values.to(x.dtype), bias

    @staticmethod
    def _rounded_input(
        x: Tensor, weight: Any, rounded: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """The input as the product sees it; `rounded` as for `operands`."""
        activation = weight.input_spec
        if rounded is not None and activation is not None:
            return rounded(x)
        if activation is not None and not weight.transposed:  # as for the converted weight
            return fake_quantize(x, activation)
        return x

    @classmethod
    def matmul(cls, x: Any, weight: Any) -> Tensor:
        """As for every weight, and the product of experts [E, N, K] from the left with an input [E, K, M]. Experts
        multiply at once."""
        is_left = isinstance(x, FakeQuantizedTensor) and x.ndim == weight.ndim == 3
        if is_left and not isinstance(weight, LowbitTensor):
            experts, inputs = x, weight
            cls.check_stacked(inputs.transpose(-2, -1), experts.transpose(-2, -1))
            inputs = experts.rounded_for_experts(inputs.transpose(-2, -1)).transpose(-2, -1)
            return torch.bmm(experts.operand().to(inputs.dtype), inputs)
        cls.check_operands(x, weight)
        if weight.ndim == 2:
            return super().matmul(x, weight)
        cls.check_stacked(x, weight)
        return torch.bmm(weight.rounded_for_experts(x), weight.operand().to(x.dtype))

    @classmethod
    def product_of_expert(cls, x: Tensor, weight: Any) -> Tensor:
        """In high precision, as converted experts multiply."""
        return cls.product(x, weight, weight.operand, None, None)

    @classmethod
    def product_of_experts(cls, x: Tensor, weight: Any, offs: Tensor) -> Tensor:
        x = weight.rounded_for_experts(x)
        return torch._grouped_mm(x, weight.operand().to(x.dtype), offs=offs)

    def rounded_for_experts(self, x: Tensor) -> Tensor:
        """x [..., K], the input of a product of all experts, rounded as for the converted weight."""
        return x if self.input_spec is None else fake_quantize(x, self.input_spec)

    def values(self) -> Tensor:
        weight = super().values()
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
            swapped = {self.ndim - 1: self.ndim - 2, self.ndim - 2: self.ndim - 1}
            return self._transposed()._slice(swapped.get(dim, dim), start, end)._transposed()
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

    @classmethod
    def conv1d(
        cls, input: Tensor, weight: Any, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return F.conv1d(*_convolved(input, weight, bias), *args, **kwargs)

    @classmethod
    def conv2d(
        cls, input: Tensor, weight: Any, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return F.conv2d(*_convolved(input, weight, bias), *args, **kwargs)

    @classmethod
    def embedding(cls, input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        return weight._look_up(input, *args, **kwargs)

    def _look_up(self, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        joint_of_weight(self, "a lookup")
        if not self.rounds_weight:
            return F.embedding(indices, self.high_precision(), *args, **kwargs)
        return self.rows_of(Values.apply(self), indices, *args, **kwargs)

    def rows_of(self, values: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The rows at `indices` of plain `values` [V, D], rounded as this weight is.

        Quantizes only the rows that are looked up, where scales belong to single rows. (Inductor 2.13 for CPU
        miscompiles the other order, a gather of rows that were padded to a whole group.)
        """
        if self.scheme.weight.shares_rows:
            if is_sparse(args, kwargs):
                return self._rows_with_sparse_gradient(values, indices, *args, **kwargs)
            return F.embedding(indices, self.rounded(values).to(self.dtype), *args, **kwargs)
        return self.rounded(F.embedding(indices, values, *args, **kwargs)).to(self.dtype)

    def _rows_with_sparse_gradient(
        self, values: Tensor, indices: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """`rows_of` a table that is rounded as a whole. The gradient of the lookup, which is sparse, goes to `values`,
        since rounding has no gradient of a sparse one."""
        rows = F.embedding(indices, values, *args, **kwargs)
        rounding = rounding_of(self, values.dtype)
        whole, inside = rounded(values, rounding.weight, rounding.scale_dtype)
        mask = inside.passed(torch.ones_like(whole))
        found = StraightThrough.apply(rows, whole[indices], mask[indices], operator.mul)
        return found.to(self.dtype)

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

    def check_placement(self, param: Any) -> None:
        """Refuse parts that cut through a block: each would have its own scale, which `convert_` would not
        reproduce."""
        if self.scheme.is_static:
            raise NotImplementedError(
                f"tensor parallelism of a weight {tuple(param.shape)} prepared for QAT with a static activation, whose "
                "scale is its module's; accepted: a dynamic activation, or FSDP2"
            )
        spec = self.scheme.weight
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


@FakeQuantizedTensor.implements(torch.ops.lowbit.rounding_inputs.default)
def _rounding_inputs(func: Any, args: Any, kwargs: Any) -> Tensor:
    weight, values = args
    meta = {name: getattr(weight, name) for name in FakeQuantizedTensor.meta_attrs}
    meta |= {"transposed": False, "off": "weights"}
    return FakeQuantizedTensor.from_inner({"weight": values}, meta, values.shape, values.dtype)


def rounding_of(weight: FakeQuantizedTensor, dtype: torch.dtype) -> Rounding:
    """How products round their operands, where the plain values of `weight` are of `dtype`.

    It is not a method, since Dynamo takes each method of a tensor for an operation that returns tensors.
    """
    spec = weight.scheme.weight
    scale_dtype = spec.scale_dtype_for(dtype)
    kind = RoundingOfGathered if weight.is_gathered else Rounding
    return kind(spec, scale_dtype, weight.input_spec, weight.constant_codes)


def joint_of_weight(weight: Any, what: str) -> Tensor | None:
    """What the scales of `weight` share with those of siblings, or None, for `what` has the weight alone. Raises
    NotImplementedError where the scales are elsewhere. It is a function for the reason that `rounding_of` is one."""
    elsewhere = type(weight).scales_elsewhere
    return None if elsewhere is None else elsewhere(weight, what)


def frozen_as(weight: FakeQuantizedTensor) -> Any:
    """The class of the weight for inference. `representation_of` may choose a subclass."""
    return ConvTensor if weight.role == "convolution" else AffineTensor


_CONVOLUTIONS = (F.conv1d, F.conv2d)


def _convolves(x: Any) -> bool:
    return isinstance(x, FakeQuantizedTensor) and x.role == "convolution"


def _convolved(
    input: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The plain operands of torch's own convolution."""
    check_convolution(input, weight)
    return FakeQuantizedTensor.operands(
        input, weight, weight.operand(), bias, product="convolution"
    )


def _plain(x: Any) -> Any:
    return x.high_precision() if isinstance(x, FakeQuantizedTensor) else x


def is_sparse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if these arguments of F.embedding after the table ask for a sparse gradient."""
    return bool(kwargs.get("sparse", args[4] if len(args) > 4 else False))
