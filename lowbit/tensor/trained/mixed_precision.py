"""MixedPrecisionTensor: a high-precision weight with products in int8 or float8 (`lowbit.linear.low_bit_linear`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.low_bit_grouped import low_bit_grouped_mm
from lowbit.linear.low_bit_linear import Codes, Operand, low_bit_linear
from lowbit.schemes.mixed_precision import MixedPrecision
from lowbit.tensor.core import (
    Gather,
    InnerShapes,
    LowbitTensor,
    Wire,
    aten,
    check_not_flat,
    stored_shape,
)
from lowbit.tensor.trained.master_weight import MasterWeightTensor


class RowCodes:
    """The codec of a MixedPrecisionTensor: codes of its rows, one byte an element, and a scale a row. Products in high
    precision, and an embedding tied to it, read the dequantized weight."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale")
    meta_attrs: ClassVar[tuple[str, ...]] = ("scheme", "transposed")

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire | None:
        scheme, weight = shard.scheme, shard.weight  # other attributes take Python longer
        if not scheme.gathers_codes(weight):
            return None
        shape = weight.shape
        rows = weight if weight.ndim == 2 else weight.reshape(shape[:-1].numel(), shape[-1])
        codes, scale, _, _ = kernels.quantize_rowcol.quantize_rowcol(
            rows, scheme.forward_format, columns=False, tensorwise=scheme.one_scale
        )
        scale = scale.expand(len(rows)).contiguous() if scheme.one_scale else scale
        if rows is not weight:
            codes = codes.view(*shape[:-1], codes.shape[1])
        return Wire(shard.gathered, {"codes": codes, "scale": scale.view(*shape[:-1], 1)})

    def inner_shapes(self: Any, shape: Sequence[int]) -> InnerShapes:
        *rows, k = stored_shape(self, shape)
        codes = (*rows, -(-k // 16) * 16), self.codes.dtype
        return {"codes": codes, "scale": ((*rows, 1), torch.float32)}

    def decoded_values(self: Any) -> Tensor:
        codes = self.codes[..., : self.shape[-1]]
        # int8 times float32 is one operation; float8 has no such product
        is_int8 = codes.dtype is torch.int8
        return codes * self.scale if is_int8 else codes.float().mul_(self.scale)

    def expert_codes(self: Any) -> Codes:
        return self.codes, self.scale.squeeze(-1)

    product_operand = expert_codes

    def expert_codes_t(
        self: Any, scale: Tensor | None = None, after: Tensor | None = None
    ) -> Codes:
        codes = kernels.transpose_codes.transpose_codes(self.codes, self.shape[-1], after)
        return codes, self.scale.squeeze(-1)


class MixedPrecisionTensor(MasterWeightTensor, codec=RowCodes):
    """A trainable weight [..., N, K] with low-bit products. `weight` is the high-precision tensor inside."""

    already = "prepared for training already; lowbit.train.restore_(model) gives back plain weights"

    schemes = (MixedPrecision,)
    cast_attrs = ("weight",)
    rounds_reads = False  # nothing rounds it later
    stays = "a weight in high precision: lowbit.train.restore_(model) makes it plain"
    # an embedding tied to it arrives as aten.embedding below
    products: ClassVar[dict[Any, str]] = {
        function: name
        for function, name in MasterWeightTensor.products.items()
        if function is not F.embedding
    }

    scheme: MixedPrecision

    @classmethod
    def prepared(cls, weight: Tensor, scheme: Any, name: str) -> Self:
        """A quantized weight, in the blocks of the scheme, is trained from the values that its codes stand for."""
        return cls(weight.dequantize() if isinstance(weight, LowbitTensor) else weight, scheme)

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return low_bit_linear(input, weight, bias)

    @classmethod
    def product_of_experts(cls, x: Tensor, weight: Any, offs: Tensor) -> Tensor:
        return low_bit_grouped_mm(x, weight, offs)

    def _stored_values(self) -> Tensor:
        """The high-precision weight."""
        return self.weight.detach().to(self.dtype)

    def product_operand(self) -> Operand:
        """The weight [N, K] as products read it: here in high precision, for them to round. They do so in each
        direction, since torch.compile would keep the codes of the forward pass until the backward pass."""
        return self.weight, None

    def expert_codes(self) -> Codes:
        """The experts [E, N, K] as the output's product reads them: codes [E, N, K16], scale [E, N]."""
        return kernels.quantize_experts.quantize_experts(self.weight, self.scheme.forward_format)

    def expert_codes_t(self, scale: Tensor | None = None, after: Tensor | None = None) -> Codes:
        """The same codes as the product for the input's gradient reads them: [E, K, N16], and the same scales, which
        `expert_codes` may have given."""
        return kernels.quantize_experts.quantize_experts(
            self.weight, self.scheme.forward_format, transposed=True, scale=scale
        )

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows of `dequantize()`."""
        taken = self._take(indices.reshape(-1)).dequantize()
        return taken.view(*indices.shape, self.shape[-1])


@MixedPrecisionTensor.implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _transpose(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Gathered experts keep their codes, which grouped products read. Other gathered forms become weights again."""
    self = args[0]
    check_not_flat(self, "transposition")
    swaps = func is aten.transpose.int and {dim % self.ndim for dim in args[1:]} == {1, 2}
    if swaps and "transposed" in self.meta_attrs:
        return self._transposed()
    weight = func(self.values(), *args[1:], **kwargs)
    kind = MasterWeightTensor.of(self.scheme)
    return kind.from_inner({"weight": weight}, self.meta(), weight.shape, self.dtype)


@MixedPrecisionTensor.implements(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> Tensor:
    """For a weight that an embedding and a linear share. Dequantizes only the rows that it looks up."""
    return args[0].rows(args[1])
