"""FakeQuantizedTensor: a high-precision weight whose products see it quantized (quantization-aware training).

`F.linear` and `F.embedding` round the weight, and the activation where the scheme says so, to what the converted
model will store, through the same `Spec` that converts it; gradients pass straight through to the weight inside
the clamp range. To everything else (optimizers, norms, initialisers) it is the high-precision weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lowbit.affine import within_range
from lowbit.scheme import Float8, Scheme, crop
from lowbit.tensor.affine_tensor import check_weight
from lowbit.tensor.base import InnerShapes, LowbitTensor, aten
from lowbit.tensor.linear import autocast_inputs


class _Master(torch.autograd.Function):
    """The inner weight as a plain tensor, its gradient passed to the FakeQuantizedTensor."""

    @staticmethod
    def forward(ctx: Any, weight: FakeQuantizedTensor) -> Tensor:
        return weight.weight.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class FakeQuantizedTensor(LowbitTensor):
    """A trainable weight that is quantized in every product. `weight` is the high-precision tensor inside."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("weight",)
    meta_attrs = ("scheme",)

    weight: Tensor
    scheme: Scheme

    def __new__(cls, weight: Tensor, scheme: Scheme) -> Self:
        """Wrap `weight` [..., N, K], sharing its memory if it is contiguous.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        weight = weight.detach().contiguous()
        return cls.from_inner({"weight": weight}, {"scheme": scheme}, weight.shape, weight.dtype)

    def fake_quantized(self) -> Tensor:
        """The weight as its products see it: plain, differentiable, equal to the converted weight's values."""
        return self.scheme.weight.fake_quantize(_Master.apply(self), self.weight.dtype)

    def dequantize(self) -> Tensor:
        """The values that the converted weight will have, in this tensor's dtype, without gradient."""
        if self.flat_from is not None:
            return self._with(shape=self.flat_from).dequantize().reshape(-1)
        return self.scheme.weight.fake_quantize(self.weight.detach(), self.weight.dtype).to(
            self.dtype
        )

    def master(self) -> Tensor:
        """The high-precision weight itself: update it in place."""
        return self.weight

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        return {"weight": (tuple(shape), self.weight.dtype)}

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        return {"weight": values}

    def _slice(self, dim: int, start: int, end: int) -> Self:
        shape = list(self.shape)
        shape[dim] = end - start
        return self._map(lambda t: t.narrow(dim, start, end - start), shape=shape)

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        if len(shape) < 2 or shape[-1] != self.shape[-1]:
            return None
        return self._map(lambda t: t.view(shape), shape=shape)

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        joined = torch.cat([t.weight for t in tensors], dim)
        return self._with({"weight": joined}, joined.shape)

    def meta_to_json(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict()}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        return {"scheme": Scheme.from_dict(data["scheme"])}

    def _embedding(self, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Only the rows asked for are quantized, where scales belong to single rows.

        (Inductor 2.13 for CPU miscompiles the other order, a gather of rows that were padded to a whole group.)
        """
        spec = self.scheme.weight
        if spec.shares_rows:
            return F.embedding(indices, self.fake_quantized().to(self.dtype), *args, **kwargs)
        rows = F.embedding(indices, _Master.apply(self), *args, **kwargs)
        return spec.fake_quantize(rows, self.weight.dtype).to(self.dtype)

    def _wire(self) -> LowbitTensor:
        """Under FSDP2 codes travel, not high-precision values: 1 byte an element and the scales."""
        spec = self.scheme.weight
        if spec.shares_rows:
            return self
        codes, scale, zero_point = spec.unclamped_codes(self.weight.detach(), self.weight.dtype)
        tensors = {"codes": codes, "scale": scale, "zero_point": zero_point}
        return GatheredWeight.from_inner(tensors, self.meta(), self.shape, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        if product is not None:
            return product(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(_ON_LISTS):
            return func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


_ON_LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""What torch's optimizers and weight averages do to many weights at once happens to the high-precision ones."""


class _FromCodes(torch.autograd.Function):
    """The values of a GatheredWeight; gradient: identity for codes within the range, zero for those that clip."""

    @staticmethod
    def forward(ctx: Any, weight: GatheredWeight) -> Tensor:
        fmt, codes = weight.scheme.weight.format, weight.codes
        low, high = fmt.quant_min, fmt.quant_max
        inside = within_range(codes.float(), fmt.dtype, low, high)
        ctx.save_for_backward(crop(inside, weight.shape))
        clamped = codes if isinstance(fmt, Float8) else codes.clamp(int(low), int(high))
        return weight.scheme.weight.dequantize(
            clamped.to(fmt.dtype), weight.scale, weight.zero_point, weight.shape, weight.scale.dtype
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0)


class GatheredWeight(FakeQuantizedTensor):
    """What FSDP2 gathers a FakeQuantizedTensor to: codes short of the clamp, from which products and gradients
    come out the same to the bit. It has no high-precision weight; the optimizer works on the shards, which do."""

    tensor_attrs = ("codes", "scale", "zero_point")

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def fake_quantized(self) -> Tensor:
        return _FromCodes.apply(self)

    def dequantize(self) -> Tensor:
        with torch.no_grad():
            return self.fake_quantized().to(self.dtype)

    def master(self) -> Tensor:
        raise self._unsupported(
            "master(): only the sharded parameter has the high-precision weight"
        )

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        spec = self.scheme.weight
        blocks = spec.blocks(shape)
        shapes: InnerShapes = {name: (blocks, t.dtype) for name, t in self.inner_tensors().items()}
        shapes["codes"] = (spec.padded_shape(shape), self.codes.dtype)
        return shapes

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        raise self._unsupported("copying values into it: write to the sharded parameter")

    def _embedding(self, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return F.embedding(indices, self.fake_quantized().to(self.dtype), *args, **kwargs)

    def _wire(self) -> LowbitTensor:
        return self


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, FakeQuantizedTensor) or isinstance(input, LowbitTensor):
        raise NotImplementedError(
            f"linear of {input!r} with {weight!r}: only the weight may be a FakeQuantizedTensor"
        )
    x, bias = autocast_inputs(input, weight, bias)
    activation = weight.scheme.activation
    if activation is not None:
        x = activation.fake_quantize(x)
    return F.linear(x, weight.fake_quantized().to(x.dtype), bias)


def _embedding(input: Tensor, weight: FakeQuantizedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return weight._embedding(input, *args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention multiplies by its out_proj.weight where no override of F.linear reaches."""

    def as_seen(x: Any) -> Any:
        if not isinstance(x, FakeQuantizedTensor):
            return x
        if x.scheme.activation is not None:
            raise NotImplementedError(
                f"{x!r} in nn.MultiheadAttention, whose inputs cannot be quantized in training: leave its out_proj out "
                "by filter_fn or a pattern, e.g. {'*.out_proj': None, '*': scheme}, or choose a weight-only scheme"
            )
        return x.fake_quantized().to(x.dtype)

    return F.multi_head_attention_forward(*map(as_seen, args), **tree_map(as_seen, kwargs))


_PRODUCTS: dict[Any, Any] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
}


@FakeQuantizedTensor.implements(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default
)
def _like(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Optimizer states and gradients of a trainable weight are plain tensors.

    Only `empty_like` makes another QAT weight: by it, `Module.to_empty` gives a model on meta its memory.
    """
    return func(args[0].weight, *args[1:], **{"dtype": args[0].dtype, **kwargs})


@FakeQuantizedTensor.implements(
    *(
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.normal_.default,
        aten.uniform_.default,
        aten.clamp_.default,
    ),
    *(aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.mul_.Tensor, aten.mul_.Scalar),
    *(aten.div_.Tensor, aten.div_.Scalar, aten.addcmul_.default, aten.addcdiv_.default),
    *(aten.lerp_.Scalar, aten.lerp_.Tensor, aten.erfinv_.default),
    *(
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.neg.default,
    ),
    *(aten.abs.default, aten.pow.Tensor_Scalar, aten.isfinite.default, aten.isnan.default),
    *(aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.where.self),
    *(aten.sum.default, aten.mean.default, aten.amax.default, aten.std.correction),
    aten.linalg_vector_norm.default,
)
def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """What an optimizer, an initialiser or a norm does happens to the high-precision weight."""
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    changes_weight = func._schema.is_mutable and isinstance(args[0], FakeQuantizedTensor)
    return args[0] if changes_weight else result


def _unwrap(x: Any) -> Any:
    return x.weight if isinstance(x, FakeQuantizedTensor) else x
