"""TrainableTensor: the base of the weights that stay in high precision and whose products see something else.

`weight` is the high-precision tensor inside, `scheme` says what the products make of it. To everything but the
functions in `products` (optimizers, norms, initialisers) it is the high-precision weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.tensor.affine_tensor import check_weight
from lowbit.tensor.base import InnerShapes, LowbitTensor, aten

KEEP_OUT = (
    "leave this weight out by filter_fn, call lowbit.dequantize_(model) for a plain model, or .dequantize() for a "
    "plain tensor, from which no gradient reaches it"
)
"""The way out for a weight that is trained: in a plain tensor's place it would stop learning, in silence."""


class Values(torch.autograd.Function):
    """`weight.values()`, a plain tensor, whose gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        return weight.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class TrainableTensor(LowbitTensor):
    """See the module. A subclass gives `products`, `dequantize` and `meta_from_json`."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("weight",)
    meta_attrs: ClassVar[tuple[str, ...]] = ("scheme",)
    way_out = KEEP_OUT
    products: ClassVar[dict[Any, Callable[..., Any]]] = {}
    """What replaces torch's functions on it, such as F.linear; called with their arguments."""

    weight: Tensor
    scheme: Any

    def __new__(cls, weight: Tensor, scheme: Any) -> Self:
        """Wrap `weight` [..., N, K], sharing its memory if it is contiguous.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        weight = weight.detach().contiguous()
        return cls.from_inner({"weight": weight}, {"scheme": scheme}, weight.shape, weight.dtype)

    def over(self, weight: Tensor) -> Self:
        """The same over another high-precision weight, of this shape. Raises ValueError for another shape, and as
        making one does."""
        check_weight(weight)
        if weight.shape != self.shape:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} in place of one of {tuple(self.shape)}; accepted: that "
                "shape, sharded as the parameter is"
            )
        weight = weight.detach().contiguous()
        return self._with({"weight": weight}, dtype=weight.dtype)

    def master(self) -> Tensor:
        """The high-precision weight itself: update it in place."""
        return self.weight

    def updated_in_place(self) -> Tensor | None:
        return self.weight

    def values(self) -> Tensor:
        """What high-precision products multiply by: plain, without gradient."""
        return self.weight.detach()

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        return {"weight": (tuple(shape), self.weight.dtype)}

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        return {"weight": values}

    def _slice(self, dim: int, start: int, end: int) -> Self:
        shape = list(self.shape)
        shape[dim] = end - start
        return self._map(lambda t: t.narrow(dim, start, end - start), shape=shape)

    def _row(self, index: int) -> Tensor:
        """Of the high-precision weight, whose memory it shares unless the weight inside has another dtype."""
        return self.weight.select(0, index).to(self.dtype)

    def _all_rows(self) -> list[Tensor]:
        return list(self.weight.to(self.dtype).unbind())

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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = cls.products.get(func)
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


class GatheredForm:
    """Mixin of what FSDP2 gathers such a weight to. It has no high-precision weight: the shards have, on which
    the optimizer works."""

    def master(self: Any) -> Tensor:
        raise self._unsupported(
            "master(): only the sharded parameter has the high-precision weight"
        )

    def updated_in_place(self) -> None:
        return None

    def _encode(self: Any, values: Tensor) -> dict[str, Tensor | None]:
        raise self._unsupported("copying values into it: write to the sharded parameter")

    def _wire(self: Any) -> LowbitTensor:
        return self

    _slice, _cat, _row, _all_rows = (
        LowbitTensor._slice,
        LowbitTensor._cat,
        LowbitTensor._row,
        LowbitTensor._all_rows,
    )  # by rows: of the codes, columns may be padded

    def _view(self, shape: tuple[int, ...]) -> None:
        return None


@TrainableTensor.implements(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _like(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Optimizer states and gradients of a trainable weight are plain tensors.

    Only `empty_like` makes another such weight: by it, `Module.to_empty` gives a model on meta its memory.
    """
    return func(args[0].master(), *args[1:], **{"dtype": args[0].dtype, **kwargs})


@TrainableTensor.implements(
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
    *(aten.abs.default, aten.sgn.default, aten.pow.Tensor_Scalar),
    *(aten.isfinite.default, aten.isnan.default),
    *(aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.where.self),
    *(aten.sum.default, aten.mean.default, aten.amax.default, aten.std.correction),
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amin.default),
    aten.linalg_vector_norm.default,
)
def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """What an optimizer, an initialiser or a norm does happens to the high-precision weight."""
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    changes_weight = func._schema.is_mutable and isinstance(args[0], TrainableTensor)
    return args[0] if changes_weight else result


def _unwrap(x: Any) -> Any:
    return x.master() if isinstance(x, TrainableTensor) else x
