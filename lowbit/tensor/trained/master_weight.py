"""MasterWeightTensor: a trainable weight that stays in high precision.

`lowbit.tensor.core.reading` says which operations get the weight itself, and which its rounded values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lowbit.linear.frozen.checks import TRANSFORMS
from lowbit.linear.operands import Uncopied, Values
from lowbit.tensor.core import (
    Gather,
    InnerShapes,
    LowbitTensor,
    Wire,
    aten,
    below_transform,
    check_weight,
    in_forward,
)
from lowbit.tensor.trained.gathered import Codec, gathered_form
from lowbit.tensor.trained.trainable import INITIALISE, READ, UPDATE, TrainableTensor
from lowbit.tracing.report import dtype_name


class MasterWeightTensor(TrainableTensor):
    """A trainable weight that stays in high precision, as `weight`. Its products see it rounded.

    Optimizers, initialisers and norms work on `weight` itself. A state dict holds `weight` under the parameter's own
    name, as that of a plain model does.
    """

    tensor_attrs: ClassVar[tuple[str, ...]] = ("weight",)
    is_described = False
    is_stored_plain = True
    rounds_reads = True
    codec: ClassVar[type[Codec] | None] = None
    gathered: ClassVar[Any]
    """The class of what FSDP2 gathers by `codec`."""
    is_gathered: ClassVar[bool] = False

    weight: Tensor

    def __init_subclass__(
        cls, codec: type[Codec] | EllipsisType | None = ..., **kwargs: Any
    ) -> None:
        """`codec`: how FSDP2 gathers weights in low bits. None: they travel themselves. Left out: as in the base."""
        super().__init_subclass__(**kwargs)
        if isinstance(codec, EllipsisType):
            return
        cls.codec = codec
        if codec is not None:
            cls.gathered = gathered_form(cls, codec)

    def __new__(cls, weight: Tensor, scheme: Any) -> Self:
        """Wrap `weight` [..., N, K] for `scheme`, sharing its memory if it is contiguous.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        weight = weight.detach().contiguous()
        meta = {"scheme": scheme, **cls._meta_of(weight)}
        return cls.from_inner({"weight": weight}, meta, weight.shape, weight.dtype)

    @classmethod
    def _meta_of(cls, weight: Tensor) -> dict[str, Any]:
        """The metadata besides `scheme` of a whole weight."""
        return {}

    def over(self, values: Tensor) -> Self:
        """The same over another high-precision weight of this shape, sharing its memory if it is contiguous."""
        check_weight(values)
        if values.shape != self.shape:
            raise ValueError(
                f"a weight of shape {tuple(values.shape)} in place of one of {tuple(self.shape)}; accepted: that "
                "shape, sharded as the parameter is"
            )
        values = values.detach().contiguous()
        return self._with({"weight": values}, dtype=values.dtype)

    def stored_format(self) -> str:
        return dtype_name(self.dtype)

    def entries_beside(
        self,
        module: nn.Module,
        name: str,
        state_dict: Mapping[str, Any],
        prefix: str,
        entry: Any,
        assign: bool,
    ) -> dict[str, Tensor]:
        """Entries that a state dict lacks and that follow from its entry of this weight: other parameters of `module`,
        whose parameter `name` this is.

        Args:
            entry: the description of this weight in the state dict, or None.
            assign: whether entries take the place of parameters.

        Raises ValueError for entries that do not fit."""
        return {}

    def _on_the_wire(self, gather: Gather) -> Wire | None:
        return None if self.codec is None else self.codec.encode(self, gather)

    def master(self) -> Tensor:
        """The high-precision weight itself: update it in place."""
        return self.weight

    def whole(self, changes: bool) -> Tensor:
        return _master(self) if changes else _in_its_dtype(self)

    def write_whole(self, values: Tensor) -> None:
        """`values` are the master's memory, except for a flat weight that is transposed."""
        if self.transposed and self.flat_from is not None:
            self.master().mT.copy_(values.view(self.flat_from))

    def updated_in_place(self) -> Tensor | None:
        return self.weight

    def row_counter(self) -> Tensor | None:
        """A tensor without elements that shares this tensor's version, for autograd to keep beside `weight`: torch
        counts a write to a row, such as `w[3].zero_()`, here and not there. None where autograd does not compare
        versions."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return None  # a tensor made in inference mode could not be kept later
        if self.is_inference() or not self.shape[0]:
            return None
        held: Uncopied | None = self.__dict__.get("_row_counter")
        if held is None or held.tensor is None:
            with torch.no_grad():
                # Without `detach` it is a view, which would keep this tensor.
                row = self.select(0, 0).detach()
                row.data = row.new_empty(0)  # the version stays, the memory of the weight does not
            held = self._row_counter = Uncopied(row)
        found: Tensor = held.tensor
        return found

    def read(self) -> Tensor:
        """What an operation of a model computes with: the values of its products, plain, with the gradient of this
        tensor."""
        return Values.apply(self)

    def settled(self) -> Tensor:
        """A tensor over the values of `read()` of which any part is a part of these. Where products of this weight
        round their input, it is a weight whose products do. This tensor itself if it is one."""
        return self.read()

    def factor(self) -> Tensor:
        """The operand of a contraction that runs as another product (`lowbit.tensor.core.contracted`): a weight where
        its products round their input, and the values of `read()` elsewhere."""
        return self.settled()

    @property
    def is_settled(self) -> bool:
        """True if products round nothing of it."""
        return False

    @property
    def has_rows_alone(self) -> bool:
        """True if parts along dimension 0 are rounded alone as they are in the whole."""
        return False

    @property
    def has_experts_alone(self) -> bool:
        """True if it is a stack [E, N, K], from which one expert may be selected."""
        return self.ndim == 3

    @property
    def swaps_last(self) -> bool:
        """True if its last two dimensions can be swapped."""
        return True

    def values(self) -> Tensor:
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
        """A row of `weight`, whose memory it shares unless `weight` has another dtype than this tensor."""
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

    @classmethod
    def on_lists(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*tree_map(_master, args), **tree_map(_master, kwargs))


@MasterWeightTensor.implements(*INITIALISE, *UPDATE, *READ)
def _on_the_master(func: Any, args: Any, kwargs: Any) -> Any:
    is_mutable = func._schema.is_mutable
    reads = _in_its_dtype if torch.compiler.is_compiling() or not in_forward() else _seen
    value = _master if is_mutable else reads
    own = tree_map(value, args)
    result = func(*own, **tree_map(value, kwargs))
    if is_mutable and isinstance(args[0], MasterWeightTensor):
        args[0].write_whole(own[0])
        return args[0]
    return result


@MasterWeightTensor.implements(
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.embedding.default),
    aten.convolution.default,
)
def _product_below_autograd(func: Any, args: Any, kwargs: Any) -> Any:
    weight: Any = next(x for x in args if isinstance(x, MasterWeightTensor))
    _refuse_transforms(weight)
    raise weight._unsupported(
        f"{func} below autograd, where no product rounds it (accepted: layers, F.linear and the like)"
    )


def _refuse_transforms(weight: Any) -> None:
    if below_transform():
        raise weight._unsupported(TRANSFORMS)


def _master(x: Any) -> Any:
    if not isinstance(x, TrainableTensor):
        return x
    found = x.master().mT if x.transposed else x.master()
    return found if x.flat_from is None else found.reshape(-1)


def _in_its_dtype(x: Any) -> Any:
    """The master in the dtype that the weight shows: `.double()` and the like leave the master as it is."""
    found = _master(x)
    return found if found is x else found.to(x.dtype)


def _seen(x: Any) -> Any:
    """What a forward pass reads below autograd, as of the local part of a DTensor."""
    if not (isinstance(x, LowbitTensor) and x.rounds_reads):
        return _master(x)
    _refuse_transforms(x)
    return x.dequantize()
