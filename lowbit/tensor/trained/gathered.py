"""GatheredTensor: what FSDP2 gathered of a sharded weight, in low bits, for the products of a forward or backward pass.

    shard ── codec.encode ──▶ codes, scales ── all-gather ──▶ GatheredTensor ── the codec's other methods ──▶ products

Each class of weights names its codec (`class …(MasterWeightTensor, codec=…)`), which stands beside it and says the two
things that differ from class to class: what travels, and what the products of that class read of what arrived. The form
does the rest. It has the scheme and the products of the weight, and no high-precision weight: the shards have, and the
optimizer works on them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lowbit.tensor.core import Gather, InnerShapes, LowbitTensor, Wire


class Codec(Protocol):
    """What a codec declares. Besides it has the methods by which the products of its class ask for operands; `self` is
    the gathered tensor."""

    tensor_attrs: ClassVar[tuple[str, ...]]

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire | None:
        """What of `shard` travels; None: the shard itself. All ranks decide alike."""

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        """The shape and dtype of each inner tensor of a gathered tensor of that logical shape."""

    def decoded_values(self) -> Tensor:
        """The values that products see, as stored (not transposed), in any floating dtype, without gradient."""


class _Decoded(torch.autograd.Function):
    """The values of a gathered weight, by the codec's `decoded_values` and `gradients_by`. `scale` and `zero` are the
    parameters of learned scales, or None. The values are left out where only their gradients are wanted."""

    @staticmethod
    def forward(
        ctx: Any, weight: Any, scale: Tensor | None, zero: Tensor | None, is_read: bool
    ) -> Tensor:
        ctx.save_for_backward(weight.detach(), scale, zero)
        if is_read:
            return weight.decoded_values()
        return weight.scale.new_empty((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, zero = ctx.saved_tensors
        return *weight.gradients_by(grads[0], scale, zero), None


class GatheredTensor:
    """The form of a weight that FSDP2 has gathered. The weight's class, by `gathered_form`, completes it."""

    is_described = False
    is_gathered: ClassVar[bool] = True

    dequantize = LowbitTensor.dequantize

    def _stored_values(self: Any) -> Tensor:
        """The values that products see."""
        with torch.no_grad():
            return self.decoded_values().to(self.dtype)

    def values(self: Any) -> Tensor:
        return self.dequantize()

    def differentiable_values(
        self, scale: Tensor | None = None, zero: Tensor | None = None, is_read: bool = True
    ) -> Tensor:
        """See `_Decoded`."""
        return _Decoded.apply(self, scale, zero, is_read)

    def operand_of_rounding(self) -> Any:
        return self

    def master(self: Any) -> Tensor:
        raise self._unsupported(
            "master(): only the sharded parameter has the high-precision weight"
        )

    def updated_in_place(self) -> None:
        return None

    def row_counter(self) -> None:
        return None

    def _encode(self: Any, values: Tensor) -> dict[str, Tensor | None]:
        raise self._unsupported("copying values into it: write to the sharded parameter")

    def _on_the_wire(self, gather: Gather) -> None:
        return None

    # along rows only, since the columns of codes may be padded
    _slice, _cat, _row, _all_rows = (
        LowbitTensor._slice,
        LowbitTensor._cat,
        LowbitTensor._row,
        LowbitTensor._all_rows,
    )

    def _view(self, shape: tuple[int, ...]) -> None:
        return None


def gathered_form(kind: Any, codec: type[Codec]) -> type[GatheredTensor]:
    """`GatheredTensor` for the weights of class `kind`, named after it and found in its module, where pickles look.

    Raises TypeError if the module has that name already, for something else.
    """
    name = f"Gathered{kind.__name__.removesuffix('Tensor')}"
    held = getattr(sys.modules[kind.__module__], name, None)
    if held is not None and not getattr(held, "is_gathered", False):
        raise TypeError(
            f"{kind.__module__} has a {name}, the name that the gathered form of {kind.__name__} takes; rename it"
        )
    own = {"__module__": kind.__module__, "__doc__": f"A GatheredTensor of a {kind.__name__}."}
    made = type(kind)(name, (codec, GatheredTensor, kind), own)
    setattr(sys.modules[kind.__module__], name, made)
    return made
