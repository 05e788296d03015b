"""BitNetTensor: a high-precision weight that its products see ternary, for training BitNet b1.58 (arXiv 2402.17764).

    weight  W ≈ γ · round(W / γ) clamped to -1, 0, 1       γ = mean |W|, over the whole [N, K] matrix
    input   x ≈ s · round(x / s)                           s = max |x| / 127, over each token
    output  y[m, n] = s[m] · γ · Σ_k x̂[m, k] ŵ[n, k]       an int8 product with exact sums

Gradients pass straight through both roundings: that of the input is the one of the ternary weight, that of the weight
the one of the rounded input, of which backward keeps the byte an element. They are products in high precision, or int8
x int8 where `BitNet(grad_input=True, grad_weight=True)` says so: the ternary weight is exact in either.

γ belongs to the whole weight, however it is sharded. Under FSDP2 the ternary codes travel, 2 bits an element, after
their γ has been reduced over the ranks: for one weight at its gather, or for all in one reduction, if
`lowbit.train.precompute_bitnet_scale(model)` is called after every optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lowbit import tracer
from lowbit.packing import packed_size
from lowbit.products import (
    autocast_inputs,
    check_first_derivative,
    check_linear,
    quantize_tokens,
    unflattened,
)
from lowbit.tensor.affine_tensor import check_weight
from lowbit.tensor.base import InnerShapes, LowbitTensor, aten, check_not_flat
from lowbit.tensor.kernels import quantize_rowcol, scaled_mm
from lowbit.tensor.mixed_precision import low_bit_product
from lowbit.tensor.ternary import (
    magnitude,
    pack_ternary,
    scale_of,
    ternarize,
    ternary_product,
    unpack_ternary,
)
from lowbit.tensor.trainable import GatheredForm, TrainableTensor
from lowbit.tracer import Note
from lowbit.train_scheme import BitNet


class BitNetTensor(TrainableTensor):
    """A trainable weight [..., N, K] with ternary products. `weight` is the high-precision tensor inside."""

    meta_attrs = ("scheme", "matrix")
    caches = ("precomputed", "writes")
    already = (
        "prepared for training already; lowbit.train.convert_(model) makes it ternary for good"
    )

    scheme: BitNet
    matrix: tuple[int, int]
    """N and K of the whole weight, of which this may be a part."""
    precomputed: tuple[Tensor, tuple[int, int]] | None = None
    """The scale that `lowbit.train.precompute_bitnet_scale` found, and the state of the weight that it is of."""
    writes: list[int] | None = None
    """How often this tensor, or one made of it (which may be over the same memory, as `param.data` is), was written."""

    def __new__(cls, weight: Tensor, scheme: BitNet) -> Self:
        """Wrap `weight` [..., N, K], sharing its memory if it is contiguous.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        weight = weight.detach().contiguous()
        n, k = weight.shape[-2:]
        meta = {"scheme": scheme, "matrix": (n, k)}
        return cls.from_inner({"weight": weight}, meta, weight.shape, weight.dtype)

    @property
    def is_whole(self) -> bool:
        return tuple(self.shape[-2:]) == self.matrix

    def _with(self, *args: Any, **kwargs: Any) -> Self:
        made = super()._with(*args, **kwargs)
        if self.writes is None:
            self.writes = [0]
        made.writes = self.writes
        return made

    def remember_scale(self, scale: Tensor) -> None:
        """Take this as `known_scale` until the weight changes."""
        self.precomputed = (scale, self._state())

    def known_scale(self) -> Tensor | None:
        """The precomputed scale, unless the weight has changed since."""
        if self.precomputed is None or self.precomputed[1] != self._state():
            return None
        return self.precomputed[0]

    def _state(self) -> tuple[int, int]:
        """Kernels that write to the weight inside count its version, operations on this tensor its writes."""
        return self.weight._version, 0 if self.writes is None else self.writes[0]

    def ternary(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """int8 codes [..., N, K] and scale [..., 1, 1].

        Raises NotImplementedError for a part without `scale`, that of the whole weight.
        """
        if scale is None:
            scale = self.own_scale()
        return ternarize(self.weight.detach(), scale), scale

    def own_scale(self) -> Tensor:
        if not self.is_whole:
            raise self._unsupported(
                f"products: it is a part of a weight {self.matrix}, whose scale is the mean magnitude of all of it "
                "(call lowbit.train.precompute_bitnet_scale(model) after sharding and after every optimizer step); or"
            )
        return scale_of(magnitude(self.weight.detach()), self.weight.shape[-2:].numel())

    def dequantize(self) -> Tensor:
        """The ternary values that products see, in this tensor's dtype, without gradient."""
        if self.flat_from is not None:
            return self._with(shape=self.flat_from).dequantize().reshape(-1)
        codes, scale = self.ternary()
        return (codes * scale).to(self.dtype)

    def values(self) -> Tensor:
        return self.dequantize()

    def turned(self) -> BitNetTensor:
        """With the last two dimensions swapped."""
        n, k = self.matrix
        weight = self.weight.mT
        return BitNetTensor.from_inner(
            {"weight": weight}, {**self.meta(), "matrix": (k, n)}, weight.shape, self.dtype
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:  # which here counts no version of the weight inside
            for written in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                if isinstance(written, BitNetTensor):
                    written.writes = written.writes or [0]
                    written.writes[0] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    # ---- FSDP2 -----------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        scale = self.known_scale()
        if scale is None:
            scale = self._reduced_scale(mesh, outer_size)
        codes, _ = self.ternary(scale)
        tensors = {"codes": pack_ternary(codes), "scale": scale}
        wire = GatheredBitNet.from_inner(tensors, self.meta(), self.shape, self.dtype)
        return wire.fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def _reduced_scale(self, mesh: Any, outer_size: torch.Size) -> Tensor:
        total = magnitude(self.weight.detach())
        if tuple(outer_size[-2:]) != self.matrix:  # split by tensor parallelism as well
            return self._with(shape=outer_size).own_scale()  # which says what to do
        if self.ndim == 2:
            dist.all_reduce(total, group=mesh.get_group())
        return scale_of(total, outer_size[-2:].numel())

    # ---- what the base asks for ------------------------------------------------------------------------------

    def _is_stored_like(self, other: Tensor) -> bool:
        """Whatever they are parts of."""
        if not isinstance(other, BitNetTensor) or type(self) is not type(other):
            return False
        return self.scheme == other.scheme

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        joined = super()._cat(tensors, dim)
        if all(t.is_whole for t in tensors):
            n, k = joined.shape[-2:]
            joined.matrix = (n, k)
        return joined

    def meta_to_json(self) -> dict[str, Any]:
        return {"scheme": self.scheme.to_dict(), "matrix": list(self.matrix)}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        scheme = BitNet.from_dict(data["scheme"])
        if not isinstance(scheme, BitNet):
            raise ValueError(f"{scheme} is no BitNet")
        n, k = map(int, data["matrix"])
        return {"scheme": scheme, "matrix": (n, k)}


class GatheredBitNet(GatheredForm, BitNetTensor):
    """What FSDP2 gathers a BitNetTensor to: its ternary codes, packed at 2 bits, and its scale."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale")

    codes: Tensor
    scale: Tensor

    def ternary(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return unpack_ternary(self.codes, self.shape[-1]), self.scale

    def own_scale(self) -> Tensor:
        return self.scale

    def turned(self) -> BitNetTensor:
        codes = pack_ternary(unpack_ternary(self.codes, self.shape[-1]).mT)
        n, k = self.matrix
        meta, shape = {**self.meta(), "matrix": (k, n)}, (*self.shape[:-2], *self.shape[:-3:-1])
        return self.from_inner({"codes": codes, "scale": self.scale}, meta, shape, self.dtype)

    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        return LowbitTensor.fsdp_pre_all_gather(self, *args)

    def _row_attrs(self) -> tuple[str, ...]:
        return ("codes",) if self.ndim == 2 else ("codes", "scale")

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        return {
            "codes": ((*shape[:-1], packed_size(shape[-1], 2)), torch.uint8),
            "scale": ((*shape[:-2], 1, 1), torch.float32),
        }


class _Linear(torch.autograd.Function):
    """x [M, K] times the ternary weight [N, K] transposed, plus bias [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: BitNetTensor,
        bias: Tensor | None,
        scale: Tensor | None,
        note: Note | None,
    ) -> Tensor:
        tokens = quantize_tokens(x)
        codes, scale = weight.ternary(scale)
        ctx.dtype, ctx.note = x.dtype, note
        # A gathered weight has its scale, which FSDP2 writes anew at the next gather. As for the alias: a weight that a
        # graph holds could not be moved or cast, which swaps the tensors of a subclass.
        own = None if isinstance(weight, GatheredBitNet) else scale
        kept = tokens if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight.detach(), own, *kept)
        tracer.record(note, "output", "int8")
        return ternary_product(tokens, codes, scale, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight, scale, *tokens = ctx.saved_tensors
        scheme, note = weight.scheme, ctx.note
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows, columns = for_x and scheme.grad_input, for_weight and scheme.grad_weight
        grad_x = grad_weight = grad_bias = None
        if rows or for_weight:  # the weight's term would be missing
            check_first_derivative(weight)
        if rows or columns:
            codes, scales, codes_t, scales_t = quantize_rowcol(
                grad.to(_narrow(grad.dtype)), "int8", rows=rows, columns=columns
            )
        if for_x:
            ternary, scale = weight.ternary(scale)
            tracer.record(note, "grad_input", "int8" if rows else grad.dtype)
            if rows:
                turned = F.pad(ternary.t(), (0, -ternary.shape[0] % 16)).contiguous()
                both = scales, scale.view(1)
                grad_x = scaled_mm("int8", codes, turned, *both, out_dtype=_narrow(ctx.dtype))
                grad_x = grad_x.to(ctx.dtype)
            else:
                grad_x = grad @ (ternary * scale).to(grad.dtype)
        if for_weight:
            x = (tokens[0][:, : weight.shape[1]] * tokens[1][:, None]).to(grad.dtype)
            if columns:
                _, _, *own = quantize_rowcol(x.to(_narrow(x.dtype)), "int8", rows=False)
                terms = (codes_t, scales_t), (own[0], own[1])
                out = _narrow(weight.dtype)
                grad_weight = low_bit_product(note, "grad_weight", "int8", *terms, out)
                grad_weight = grad_weight.to(weight.dtype)
            else:
                tracer.record(note, "grad_weight", grad.dtype)
                grad_weight = (grad.t() @ x).to(weight.dtype)
        if for_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """What int8 products read and give in place of it."""
    return torch.float32 if dtype is torch.float64 else dtype


class _Tokens(torch.autograd.Function):
    """x [M, K] as int8 products see it, its gradient passed straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        codes, scale = quantize_tokens(x)
        return (codes[:, : x.shape[1]] * scale[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def straight_through(x: Tensor) -> Tensor:
    """x [..., K] rounded as the input of a product is, for one that runs in high precision."""
    return _Tokens.apply(x.reshape(-1, x.shape[-1])).view(x.shape)


class _Zeros(torch.autograd.Function):
    """Zeros in the weight's place, for products without terms or results; their gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: BitNetTensor) -> Tensor:
        return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def bitnet_linear(
    x: Tensor, weight: BitNetTensor, bias: Tensor | None, scale: Tensor | None = None
) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype. `scale`: of the whole weight,
    where this is a part of it.

    Raises ValueError for sizes that do not fit, NotImplementedError for a part without scale.
    """
    check_linear(x, weight)
    n, k = weight.shape
    x, bias = autocast_inputs(x, weight, bias)
    m = math.prod(x.shape[:-1])  # Size.numel() would make a symbol of torch.compile a number
    if 0 in (m, n, k):
        tracer.note(m, n, k, "there is nothing to multiply", weight)
        return F.linear(x, _Zeros.apply(weight).to(x.dtype), bias)
    note = tracer.note(m, n, k, None, weight)
    return unflattened(_Linear.apply(x.reshape(m, k), weight, bias, scale, note), x)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, BitNetTensor) or isinstance(input, LowbitTensor):
        raise NotImplementedError(
            f"linear of {input!r} with {weight!r}: only the weight may be a BitNetTensor"
        )
    return bitnet_linear(input, weight, bias)


@BitNetTensor.implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Any, args: Any, kwargs: Any) -> BitNetTensor:
    self = args[0]
    check_not_flat(self, "transposition")
    same = list(range(self.ndim))
    dims = list(func(torch.empty(same, device="meta"), *args[1:], **kwargs).shape)
    if dims == same:
        return self._with()
    if dims != [*same[:-2], *same[:-3:-1]]:
        raise self._unsupported(
            f"dimensions in the order {dims} (accepted: the last two swapped, as a scale is of a matrix)"
        )
    return self.turned()


def _refused(*args: Any, **kwargs: Any) -> Any:
    weight = next(x for x in (*args, *kwargs.values()) if isinstance(x, BitNetTensor))
    raise NotImplementedError(
        f"{weight!r} as an embedding or in nn.MultiheadAttention, where BitNet b1.58 has no ternary product: leave "
        "that module, and what is tied to it, out by filter_fn or a pattern, e.g. {'lm_head': None, '*': BitNet()}"
    )


BitNetTensor.products = {
    F.linear: _linear,
    F.embedding: _refused,
    F.multi_head_attention_forward: _refused,
}
