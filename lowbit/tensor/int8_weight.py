"""Int8WeightTensor: a weight that is int8 and nothing else, also while it is trained.

| tensor | shape        | dtype                                                                            |
|--------|--------------|----------------------------------------------------------------------------------|
| codes  | [..., N, K]  | int8, -127 .. 127                                                                |
| scale  | [..., N, 1]  | float32, absmax / 127 of the row; 1 for a row of zeros, NaN for one with a NaN   |
| place  | [..., N, 1]  | int64, where the row's random draws begin (`round_rows`)                         |

So a weight takes 1 byte and 12 bytes a row. It has no high-precision copy: what an optimizer computes in float32 is
rounded stochastically (arXiv 2010.06192), so that an update far below the distance of two codes moves the weight as
often as it should. The draw of an element is a function of (seed, the parameter's name, number of updates, index of
the element in the whole parameter): `place` begins at a hash of the first two plus the row's first index, and every
update moves it on by `NEXT`. As it lies beside the row, it shards, is saved and resumes with it, whoever updates the
weight; so replicas, any sharding and a restart give the same weights.

torch.optim's in-place operations round once each, but for a multiplication by a positive number (decoupled weight
decay), which is one of the scales and exact; lowbit's optimizers round once a step. Copying plain values, as loading
and initialising do, rounds to nearest.

Products see the weight dequantized, or are int8 x int8, as `Int8Weight` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F

from lowbit.granularity import PerRow
from lowbit.scheme import Int, Spec
from lowbit.tensor.affine_tensor import AffineTensor, check_weight
from lowbit.tensor.base import InnerShapes, LowbitTensor
from lowbit.tensor.kernels import dequantize, quantize_rowcol, round_rows
from lowbit.tensor.trainable import KEEP_OUT
from lowbit.train_scheme import Int8Weight

NEXT = -0x61C8864680B583EB
"""From the draws of one update to the next: odd, so that it takes 2**64 of them to come back (the golden ratio of
2**64, as a signed integer)."""


def first_index(seed: int, name: str) -> int:
    """Index of the first draw of the parameter of this name, a signed 64-bit integer: a hash of both."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Columns:
    """Which columns of the whole weight a tensor holds, where it does not hold all.

    A row's scale belongs to all of its columns, so to round them anew takes the largest of all of its parts: `group`
    names the process group over which those are spread, once `lowbit.train.locate_` has found it.
    """

    start: int
    total: int
    group: str | None = None


class Int8WeightTensor(AffineTensor):
    """A trainable weight in int8; see the module. `Int8WeightTensor(weight, Int8Weight(), name)` makes one."""

    tensor_attrs = ("codes", "scale", "place")
    meta_attrs = ("scheme", "columns", "transposed")
    already = "trained in int8 already; lowbit.train.restore_(model) makes it a plain weight again"
    way_out = KEEP_OUT
    stored_as = None

    products: ClassVar[dict[Any, Callable[..., Any]]] = {}
    """What replaces torch's functions on it, such as F.linear: see `lowbit.tensor.int8_weight_ops`."""
    on_lists: ClassVar[Callable[..., Any]]
    """What torch's optimizers do to many weights at once."""

    spec = Spec(Int(8), PerRow())
    activation = None
    zero_point = None

    place: Tensor | None
    """None where it takes no updates: gathered, or made on meta, and not yet placed by `lowbit.train.locate_`."""
    scheme: Int8Weight
    columns: Columns | None
    """None: all of them."""

    def __new__(cls, weight: Tensor, scheme: Int8Weight, name: str = "") -> Self:
        """Round `weight` [..., N, K], float32, bfloat16 or float16, to nearest. With `scheme.seed`, `name` (that of the
        parameter in the model) decides the random draws of its updates.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        rows = weight.detach().float().reshape(weight.shape[:-1].numel(), weight.shape[-1])
        codes, scale = round_rows(rows)
        meta = {"scheme": scheme, "columns": None, "transposed": False}
        tensors = {"codes": codes.view(weight.shape), "scale": scale.view(*weight.shape[:-1], 1)}
        self = cls.from_inner(tensors, meta, weight.shape, weight.dtype)
        if not weight.is_meta:
            self.put_at(name)
        return self

    def put_at(self, name: str, rows: Tensor | None = None) -> None:
        """Give the rows their places: those of the rows of these indices, or of all, of the parameter `name`."""
        columns = self.shape[-1] if self.columns is None else self.columns.total
        if rows is None:
            rows = torch.arange(self.scale.numel()).view(self.scale.shape)
        place = rows * columns + first_index(self.scheme.seed, name)
        self.place = place.to(self.device).view(self.scale.shape)

    # ---- values ----------------------------------------------------------------------------------------------

    def master(self) -> Tensor:
        """The values in float32, a new tensor: `update_` takes the ones that an optimizer makes of them."""
        return self._with(dtype=torch.float32).dequantize()

    def write_master(self, out: Tensor) -> None:
        if self.transposed or self.flat_from is not None:
            super().write_master(out)
        else:
            torch.mul(self.codes, self.scale, out=out)  # in one pass

    def update_(self, values: Tensor) -> None:
        """Take these values [..., N, K], float32, rounded stochastically, and move on to the next random draws.

        Raises NotImplementedError where the weight is a gathered one, or has not been placed.
        """
        place = self._place()
        codes, scale = self._rounded(values, place)
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        place.add_(NEXT)

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply by a positive number: the scales alone, without rounding."""
        self.scale.mul_(factor)

    def _place(self) -> Tensor:
        if self.transposed or self.flat_from is not None:
            raise self._unsupported("an update of a view that is transposed or flattened")
        if self.place is None:
            raise self._unsupported(
                "an update: it is a gathered weight (update the sharded parameter), or was made on meta (call "
                "lowbit.train.locate_(model) once it is in memory)"
            )
        return self.place

    def _rounded(self, values: Tensor, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scale of these values: to nearest without places."""
        rows = values.float().reshape(self.shape[:-1].numel(), self.shape[-1])
        largest, start = None, 0
        if self.columns is not None:
            if self.columns.group is None:
                raise self._unsupported(
                    "taking other values, as rows share a scale that the other columns have a say in: call "
                    "lowbit.train.locate_(model) after its weights are sharded; or"
                )
            start = self.columns.start
            largest = _largest(rows, self.columns.group)
        first = None if place is None else place.reshape(-1)
        codes, scale = round_rows(
            rows, old=self.scale.reshape(-1), largest=largest, first=first, start=start
        )
        return codes.view(self.shape), scale.view(self.scale.shape)

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        if self.transposed:
            return self._untransposed()._encode(values.transpose(-2, -1))
        codes, scale = self._rounded(values)
        return {"codes": codes, "scale": scale, "place": self.place}

    # ---- what `lowbit.tensor.mixed_precision` reads for products in int8 ----------------------------------------

    def row_codes(self) -> tuple[Tensor, Tensor]:
        """Codes [N, K16] and scale [N]."""
        return F.pad(self.codes, (0, -self.shape[1] % 16)), self.scale.view(-1)

    def column_codes(self) -> tuple[Tensor, Tensor]:
        """Codes [K, N16] and scale [K] of the transpose, rounded anew."""
        _, _, codes, scale = quantize_rowcol(self.dequantize(), "int8", rows=False)
        return codes, scale

    def values(self) -> Tensor:
        """What high-precision products multiply by: plain, without gradient."""
        return self.dequantize()

    def values_again(self, dtype: torch.dtype) -> Tensor:
        """The values for a backward pass: `dequantize`, by another op. torch.compile would take the same one for the
        forward pass's, and keep its values meanwhile, at 2 bytes an element."""
        if self.transposed or self.ndim != 2 or self.numel() == 0 or dtype is torch.float64:
            return self.dequantize().to(dtype)
        k = self.shape[1]
        options = {"group_size": k, "size": k, "dtype": self.dtype}
        return dequantize(self.codes, self.scale, **options).to(dtype)

    # ---- what the base asks for ------------------------------------------------------------------------------

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        row = (*shape[:-1], 1)
        found: InnerShapes = {"codes": (tuple(shape), torch.int8), "scale": (row, torch.float32)}
        if self.place is not None:
            found["place"] = (row, torch.int64)
        return found

    _assign_data = LowbitTensor._assign_data

    def _is_stored_like(self, other: Tensor) -> bool:
        """Whichever columns they hold."""
        return (
            isinstance(other, Int8WeightTensor)
            and self.scheme == other.scheme
            and self.transposed == other.transposed
        )

    def _slice(self, dim: int, start: int, end: int) -> Self:
        if self.transposed:
            swapped = {self.ndim - 1: self.ndim - 2, self.ndim - 2: self.ndim - 1}
            return self._untransposed()._slice(swapped.get(dim, dim), start, end)._transposed()
        shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
        if dim < self.ndim - 1:
            return self._map(lambda t: t.narrow(dim, start, end - start), shape=shape)
        tensors = {**self.inner_tensors(), "codes": self.codes.narrow(dim, start, end - start)}
        old = self.columns or Columns(0, self.shape[-1])
        return self._with(
            tensors, shape, columns=_whole(replace(old, start=old.start + start), shape)
        )

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        joined = super()._cat(tensors, dim)
        if dim == self.ndim - 1 and self.columns is not None:
            # gathered parts all say what this rank's says
            at_start = joined.shape[-1] == self.columns.total
            columns = replace(self.columns, start=0) if at_start else self.columns
            joined.columns = _whole(columns, joined.shape)
        return joined

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Any) -> Self:
        """One of this shape has its places too: it is this parameter, or this part of it, in other memory. Rows of
        zeros have none to tell."""
        made = super()._new(shape, dtype, device, make)
        if made.place is None or made.is_meta:
            return made
        if self.is_meta or (make is torch.empty and shape != tuple(self.shape)):
            made.place = None
        elif make is torch.empty and self.place is not None:
            made.place.copy_(self.place)
        return made

    def _wire(self) -> LowbitTensor:
        """A gathered weight is not updated, so its places stay where they are."""
        return self._with({"codes": self.codes, "scale": self.scale})

    def check_meta(self) -> None:
        super().check_meta()
        held = (self.flat_from or self.shape)[-2 if self.transposed else -1]
        part = self.columns
        if part is not None and not 0 <= part.start <= part.start + held <= part.total:
            raise ValueError(f"{held} columns that are {part} of the whole weight")

    def meta_to_json(self) -> dict[str, Any]:
        own = self.columns and _whole(self.columns, self.shape)
        columns = own and [own.start, own.total]
        return {"scheme": self.scheme.to_dict(), "columns": columns}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        scheme = Int8Weight.from_dict(data["scheme"])
        if not isinstance(scheme, Int8Weight):
            raise ValueError(f"{scheme} is no Int8Weight")
        columns = None
        if data["columns"] is not None:
            start, total = map(int, data["columns"])
            columns = Columns(start, total)
        return {"scheme": scheme, "columns": columns, "transposed": False}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = cls.products.get(func)
        if product is not None:
            return product(*args, **(kwargs or {}))
        # past AffineTensor's, which refuses gradients
        return super(AffineTensor, cls).__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("_foreach_", "_fused_")):
            return cls.on_lists(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def _whole(columns: Columns, shape: Sequence[int]) -> Columns | None:
    return None if shape[-1] == columns.total else columns


def _largest(rows: Tensor, group: Any) -> Tensor:
    """Of rows whose columns are spread over a group. A maximum over ranks may lose a NaN, but no infinity."""
    largest = rows.abs().amax(1)
    return all_reduce(torch.where(largest.isfinite(), largest, torch.inf), "max", group)
