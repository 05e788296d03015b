"""Int8WeightTensor: a weight that is stored in int8 alone, also during training.

| tensor | shape        | dtype                                                                            |
|--------|--------------|----------------------------------------------------------------------------------|
| codes  | [..., N, K]  | int8, -127 .. 127                                                                |
| scale  | [..., N, 1]  | float32, absmax / 127 of the row; 1 for a row of zeros, NaN for one with a NaN   |
| place  | [..., N, 1]  | int64, random-number offset of the row (`round_rows`)                            |

There is no high-precision copy: the float32 result of an optimizer is rounded stochastically (arXiv 2010.06192), so
that an update far below the distance of two codes moves the weight with the right probability. The random number of an
element is a function of (seed, the parameter's name, number of updates, index of the element in the whole parameter).
The offset of a row starts at a hash of seed and name, plus the row's first index; every update advances it by `NEXT`.
The offset is sharded, saved and resumed with the row. So replicas, any sharding and a restart give the same weights.

lowbit's optimizers round once a step, torch.optim's in-place operations once each, except a multiplication by a
positive number (decoupled weight decay), which multiplies the scales. Copies of plain values round to nearest; those of
an average keep what rounding lost (`lowbit.tensor.trained.remainder`).

Products dequantize the weight, or run int8 x int8, as the scheme `Int8Weight` says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.low_bit_grouped import low_bit_grouped_mm
from lowbit.linear.low_bit_linear import Codes, Operand, low_bit_linear
from lowbit.numerics.sharded import is_dtensor
from lowbit.schemes.low_bit_weights import Int8Weight
from lowbit.schemes.presets import Int8WeightOnly
from lowbit.tensor.core import (
    CodesByRow,
    Gather,
    InnerShapes,
    LowbitTensor,
    Wire,
    aten,
    check_weight,
    copy_,
    experts_in_high_precision,
    looked_up,
    own_region,
    product_below_autograd,
    stored_shape,
    to_copy,
)
from lowbit.tensor.frozen import AffineTensor, ReadOnCpu
from lowbit.tensor.trained import remainder
from lowbit.tensor.trained.trainable import TrainableTensor, grouped_in_high_precision
from lowbit.tracing import tracer

NEXT = -0x61C8864680B583EB
"""Distance of the random-number offsets of two updates. It is odd, so an offset returns after 2**64 updates (the golden
ratio of 2**64, as a signed integer)."""


def first_offset(seed: int, name: str) -> int:
    """Random-number offset of the first element of the parameter of this name, a signed 64-bit integer: a hash of seed
    and name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class Columns:
    """The columns of the whole weight that a tensor holds, where it does not hold all.

    A row's scale belongs to all of its columns, so rounding needs the maximum over all parts of the row. `group` names
    the process group over which they are spread, once `lowbit.train.locate_` has found it.
    """

    start: int
    total: int
    group: str | None = None


torch.serialization.add_safe_globals([Columns])


class Int8WeightTensor(ReadOnCpu, TrainableTensor):
    """A trainable weight in int8; see the module. `Int8WeightTensor(weight, Int8Weight(), name)` makes one."""

    tensor_attrs = ("codes", "scale", "place")
    meta_attrs = ("scheme", "columns", "transposed")
    already = "trained in int8 already; lowbit.train.restore_(model) makes it a plain weight again"
    caches = (*TrainableTensor.caches, "_reader")
    schemes: ClassVar[tuple[type[Any], ...]] = (Int8Weight,)
    spec = Int8WeightOnly().weight
    """The spec of an AffineTensor with the same codes and scales."""
    zero_point = None
    code_bits: ClassVar[int] = 8

    codes: Tensor
    scale: Tensor
    place: Tensor | None
    """The random-number offsets; "place" is their name in files. None where the weight takes no updates, because it is
    gathered, or because it was made on meta and `lowbit.train.locate_` has not set the offsets yet."""
    scheme: Int8Weight
    columns: Columns | None
    """None where the tensor holds all columns."""

    def __new__(cls, weight: Tensor, scheme: Int8Weight, name: str = "") -> Self:
        """Round `weight` [..., N, K], float32, bfloat16 or float16, to nearest. `scheme.seed` and `name`, that of the
        parameter in the model, determine the random numbers of its updates.

        Raises ValueError as `AffineTensor.from_float` does.
        """
        check_weight(weight)
        meta = {"scheme": scheme, "columns": None, "transposed": False}
        tensors = cls._nearest(weight.detach(), scheme)
        self = cls.from_inner(tensors, meta, weight.shape, weight.dtype)
        if not weight.is_meta:
            self.set_offsets(name)
        return self

    @classmethod
    def _nearest(cls, weight: Tensor, scheme: Any) -> dict[str, Tensor]:
        """The codes and scales of a plain weight, rounded to nearest."""
        rows = weight.float().reshape(weight.shape[:-1].numel(), weight.shape[-1])
        codes, scale = kernels.round_rows.round_rows(rows)
        return {"codes": codes.view(weight.shape), "scale": scale.view(*weight.shape[:-1], 1)}

    @classmethod
    def prepared(cls, weight: Tensor, scheme: Int8Weight, name: str) -> Int8WeightTensor:
        """A quantized weight is trained from the values that its codes stand for."""
        values = weight.dequantize() if isinstance(weight, LowbitTensor) else weight
        return cls(values, scheme, name)

    def frozen(self) -> LowbitTensor:
        """An AffineTensor of the same codes and scales."""
        spec = self.spec
        empty = self.numel() == 0
        scale = self.scale.new_ones(spec.blocks(self.shape)) if empty else self.scale
        return AffineTensor(self.codes, scale, None, spec, self.shape, self.dtype)

    def stored_format(self) -> str:
        return "int8 weight"

    def set_offsets(self, name: str, rows: Tensor | None = None) -> None:
        """Set the random-number offsets of the parameter `name`. `rows`: indices of this tensor's rows; None: all."""
        columns = self.shape[-1] if self.columns is None else self.columns.total
        lead = self.scale.shape[:-1]
        if rows is None:
            rows = torch.arange(lead.numel())
        offsets = rows * columns + first_offset(self.scheme.seed, name)
        self.place = offsets.to(self.device).view(*lead, 1)

    # ---- values ----------------------------------------------------------------------------------------------

    def _stored_values(self) -> Tensor:
        """Values [..., N, K] in this tensor's dtype: code · scale in float32, rounded once."""
        # torch.compile fuses operations. While it traces, a backward pass shows it by the class of its tensors alone.
        is_eager = type(self.codes) is Tensor and not torch.compiler.is_compiling()
        if is_eager and self.codes.is_cuda and self._fits_the_op():
            return self._by_the_op()
        values = self._dequantize_on_cpu()
        if values is None:
            values = (self.unpacked() * self.spread_scale()).to(self.dtype)
        return values

    def _fits_the_op(self) -> bool:
        return self.ndim > 1 and self.numel() > 0 and self.dtype is not torch.float64

    def _by_the_op(self) -> Tensor:
        """The values in one kernel, with the bits of PyTorch's operations."""
        codes, scale = self.codes.flatten(0, -2), self.scale.flatten(0, -2)
        return kernels.dequantize.dequantize(
            codes, scale, group_size=self._group(), size=self.shape[-1], dtype=self.dtype
        ).view(self.shape)

    def _group(self) -> int:
        """Elements of a row that share a scale."""
        return self.shape[-1]

    def unpacked(self) -> Tensor:
        """The codes, one an element of the stored shape [..., N, K]."""
        return self.codes

    def spread_scale(self) -> Tensor:
        """The scales, which broadcast over `unpacked()`."""
        return self.scale

    def master(self) -> Tensor:
        """The values in float32, with the remainder of an average."""
        rest = None if self.transposed or self.flat_from is not None else remainder.of(self.codes)
        if rest is None:
            return super().master()
        return (self.unpacked() + rest / remainder.UNITS) * self.spread_scale()

    def was_read(self) -> None:
        remainder.expect(self)

    def operand(self) -> Tensor:
        self.was_read()
        return self.master().to(self.dtype)

    def write_master(self, out: Tensor) -> None:
        if self.transposed or self.flat_from is not None or remainder.of(self.codes) is not None:
            super().write_master(out)
        elif self.codes.is_cuda and self._fits_the_op():
            codes, scale = self.codes.flatten(0, -2), self.scale.flatten(0, -2)
            rows = out.view(-1, self.shape[-1])
            kernels.dequantize.dequantize_into(rows, codes, scale, self._group())
        else:
            torch.mul(self.unpacked(), self.spread_scale(), out=out)  # in one pass

    def update_(self, values: Tensor) -> None:
        """Take these values [..., N, K], float32, rounded stochastically, and advance the random-number offsets.

        Raises NotImplementedError where the weight is a gathered one, or has no offsets yet.
        """
        offsets = self._offsets_for_update()
        codes, scale = self._rounded(values, offsets)
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        offsets.add_(NEXT)
        remainder.forget(self.codes)

    def codes_by_row(self) -> CodesByRow | None:
        is_view = self.transposed or self.flat_from is not None or self.columns is not None
        if is_view or self.place is None or remainder.of(self.codes) is not None:
            return None
        if self.numel() == 0 or self.shape[-1] % self._group():
            return None
        tensors = self.codes, self.scale, self.place
        if any(type(t) is not Tensor or not t.is_contiguous() for t in tensors):
            return None
        return CodesByRow(*tensors, bits=self.code_bits, scale_width=self._group())

    def was_updated(self) -> None:
        torch.autograd.graph.increment_version(list(self.inner_tensors().values()))
        remainder.forget(self.codes)

    def scale_(self, factor: Any) -> bool:
        """A positive number multiplies the scales alone, which columns share with the rest of their rows."""
        is_number = isinstance(factor, int | float) and 0 < factor < math.inf
        exact = is_number and "scale" not in self.shares
        if exact:
            self.scale.mul_(factor)
        return exact

    def random_offsets(self) -> Tensor | None:
        return self.place

    def _offsets_for_update(self) -> Tensor:
        if self.transposed or self.flat_from is not None:
            raise self._unsupported("an update of a view that is transposed or flattened")
        if self.place is None:
            raise self._unsupported(
                "an update: it is a gathered weight (update the sharded parameter), or was made on meta (call "
                "lowbit.train.locate_(model) once it is in memory)"
            )
        return self.place

    def _rounded(self, values: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scale of these values, rounded stochastically with these random-number offsets, else to nearest."""
        rows = values.float().reshape(self.shape[:-1].numel(), self.shape[-1])
        largest, start = None, 0
        if self.columns is not None:
            if self.columns.group is None:
                raise self._unsupported(
                    "taking other values, as the scale of a row depends on columns that this part lacks (where they "
                    "are on other ranks: call lowbit.train.locate_(model) after sharding)"
                )
            start = self.columns.start
            largest = _largest(rows, self.columns.group)
        first = None if offsets is None else offsets.reshape(-1)
        codes, scale = kernels.round_rows.round_rows(
            rows, old=self.scale.reshape(-1), largest=largest, first=first, start=start
        )
        return codes.view(self.shape), scale.view(self.scale.shape)

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        if self.flat_from is not None:
            return self._with(shape=self.flat_from)._encode(values.view(self.flat_from))
        if self.transposed:
            return self._transposed()._encode(values.transpose(-2, -1))
        codes, scale = self._rounded(values)
        return {"codes": codes, "scale": scale, "place": self.place}

    # ---- products --------------------------------------------------------------------------------------------

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return low_bit_linear(input, weight, bias)

    @classmethod
    def product_of_experts(cls, x: Tensor, weight: Any, offs: Tensor) -> Tensor:
        n, k = weight.shape[-1], weight.shape[-2]
        scheme, m, experts = weight.scheme, x.shape[0], weight.shape[0]
        why = scheme.grouped_plain_because(x.device, m, experts, n, k)
        if why is None and not weight.transposed:  # stored as [E, K, N]
            why = "its scales belong to columns"
        if why is None:
            return low_bit_grouped_mm(x, weight, offs)
        tracer.note(m, n, k, f"int{cls.code_bits} weight, dequantized: {why}", weight)
        return grouped_in_high_precision(x, weight, offs)

    @classmethod
    def embedding(
        cls,
        input: Tensor,
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if max_norm is not None or sparse:
            raise weight._unsupported(
                f"an embedding with max_norm={max_norm}, sparse={sparse} (accepted: neither)"
            )
        padding = -1 if padding_idx is None else padding_idx % max(weight.shape[0], 1)
        return _Rows.apply(weight, input, padding, scale_grad_by_freq)

    def product_operand(self) -> Operand:
        return self.codes, self.scale.view(-1)

    def expert_codes(self) -> Codes:
        """Codes [E, N, K16] and scale [E, N] of experts."""
        return F.pad(self.codes, (0, -self.shape[-1] % 16)), self.scale.squeeze(-1)

    def expert_codes_t(self, scale: Tensor | None = None, after: Tensor | None = None) -> Codes:
        """Codes [E, K, N16] of their transposes, and the same scales."""
        codes = kernels.transpose_codes.transpose_codes(self.codes, self.shape[-1], after)
        return codes, self.scale.squeeze(-1)

    def values_again(self, dtype: torch.dtype) -> Tensor:
        """`dequantize` by another op. torch.compile would merge the same op with that of the forward pass, and keep
        its values meanwhile, at 2 bytes an element."""
        if self.transposed or not self._fits_the_op():
            return self.dequantize().to(dtype)
        return self._by_the_op().to(dtype)

    # ---- sharding --------------------------------------------------------------------------------------------

    def was_placed(self, param: Any) -> None:
        """Where the columns of `param` are split, the parts find the scales of their rows together.

        Raises NotImplementedError for columns split along two dimensions of a mesh.
        """
        if self.columns is None:
            return
        split = (getattr(placed, "dim", None) for placed in param.placements)
        dims = [mesh_dim for mesh_dim, dim in enumerate(split) if dim == param.ndim - 1]
        if len(dims) != 1 or self.shape[-1] == 0:
            raise NotImplementedError(
                f"a low-bit weight of shape {tuple(param.shape)} placed as {param.placements}, of which this rank has "
                f"{self.shape[-1]} columns; accepted: columns split along one dimension of the mesh, some on every rank"
            )
        _, offset = own_region(param)
        group = param.device_mesh.get_group(dims[0]).group_name
        # a scatter may have put the part into a tensor with the metadata of the first part
        self.columns = replace(self.columns, start=offset[-1], group=group)

    def locate(self, param: Tensor, name: str) -> None:
        if is_dtensor(param):
            self.was_placed(param)
        if self.place is None:
            self.set_offsets(name, _rows_of(param))

    # ---- LowbitTensor's methods ------------------------------------------------------------------------------

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        shape = stored_shape(self, shape)
        row = (*shape[:-1], 1)
        found: InnerShapes = {"codes": (tuple(shape), torch.int8), "scale": (row, torch.float32)}
        if self.place is not None:
            found["place"] = (row, torch.int64)
        return found

    def _is_stored_like(self, other: Tensor) -> bool:
        """Compares schemes and orientation. The two may hold different columns."""
        return (
            isinstance(other, Int8WeightTensor)
            and self.scheme == other.scheme
            and self.transposed == other.transposed
        )

    def _slice(self, dim: int, start: int, end: int) -> Self:
        if self.transposed:
            return self._slice_as_stored(dim, start, end)
        shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
        if dim < self.ndim - 1:
            return self._map(lambda t: t.narrow(dim, start, end - start), shape=shape)
        tensors = {**self.inner_tensors(), "codes": self.codes.narrow(dim, start, end - start)}
        return self._with(tensors, shape, columns=self._columns_from(start, shape))

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if self.transposed:
            raise self._unsupported("cat of transposed tensors")
        shape = (*self.shape[:dim], sum(t.shape[dim] for t in tensors), *self.shape[dim + 1 :])
        if dim < self.ndim - 1:
            joined = {
                name: torch.cat([getattr(t, name) for t in tensors], dim)
                for name in self.inner_tensors()
            }
            return self._with(joined, shape)
        scale = self.scale
        if not all(
            t.scale.data_ptr() == scale.data_ptr() or torch.equal(t.scale, scale) for t in tensors
        ):
            raise self._unsupported(
                f"cat along dimension {dim}, of parts of rows that have other scales"
            )
        codes = torch.cat([t.codes for t in tensors], dim)
        columns = self._columns_of(shape)
        return self._with({**self.inner_tensors(), "codes": codes}, shape, columns=columns)

    def _columns_of(self, shape: Sequence[int]) -> Columns | None:
        """`columns` of the columns of this tensor followed by others, in all of this shape."""
        if self.columns is None:
            return None
        # gathered parts all have the metadata of this rank's
        is_whole = shape[-1] == self.columns.total
        return _whole(replace(self.columns, start=0) if is_whole else self.columns, shape)

    def _columns_from(self, start: int, shape: Sequence[int]) -> Columns | None:
        """`columns` of the columns from `start` on, of a part of this shape."""
        old = self.columns or Columns(0, self.shape[-1])
        return _whole(replace(old, start=old.start + start), shape)

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        """Merges or splits leading dimensions."""
        if self.transposed or len(shape) < 2 or shape[-1] != self.shape[-1]:
            return None
        return self._map(lambda t: t.view(*shape[:-1], t.shape[-1]), shape=shape)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Any) -> Self:
        """torch.empty of this shape copies the offsets too, because `Module.to_empty` moves a parameter by it."""
        made = super()._new(shape, dtype, device, make)
        if made.place is None or made.is_meta:
            return made
        if self.is_meta or (make is torch.empty and shape != tuple(self.shape)):
            made.place = None
        elif make is torch.empty and self.place is not None:
            made.place.copy_(self.place)
        return made

    def _on_the_wire(self, gather: Gather) -> Wire:
        """A gathered weight is not updated, so its offsets do not travel."""
        return Wire(type(self), {"codes": self.codes, "scale": self.scale})

    def check_meta(self) -> None:
        super().check_meta()
        if not isinstance(self.transposed, bool):
            raise ValueError(f"transposed must be True or False, got {self.transposed!r}")
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
        columns = None
        if data["columns"] is not None:
            start, total = map(int, data["columns"])
            columns = Columns(start, total)
        return {**super().meta_from_json(data), "columns": columns, "transposed": False}


def _whole(columns: Columns, shape: Sequence[int]) -> Columns | None:
    return None if shape[-1] == columns.total else columns


def _largest(rows: Tensor, group: Any) -> Tensor:
    """The largest magnitude of each row over all ranks. NaN becomes infinity, which a maximum over ranks keeps."""
    largest = rows.abs().amax(1)
    return all_reduce(torch.where(largest.isfinite(), largest, torch.inf), "max", group)


def _rows_of(param: Any) -> Tensor | None:
    """Indices in the whole weight of the rows that this rank has: [..., N, 1]; None: all."""
    if not is_dtensor(param):
        return None
    shape, offset = own_region(param)
    rows = torch.zeros((), dtype=torch.int64)
    for dim in range(param.ndim - 1):
        stride = math.prod(param.shape[dim + 1 : -1])
        rows = rows.unsqueeze(-1) + (torch.arange(shape[dim]) + offset[dim]) * stride
    return rows.unsqueeze(-1)


class _Rows(torch.autograd.Function):
    """The rows of a table [V, D] at `indices`. Only those are dequantized."""

    @staticmethod
    def forward(
        ctx: Any, table: Int8WeightTensor, indices: Tensor, padding_idx: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.options = (table.shape[0], padding_idx, by_frequency)
        return aten.embedding(table.detach(), indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return aten.embedding_dense_backward(grads[0], indices, *ctx.options), None, None, None


# ---- aten operations ---------------------------------------------------------------------------------------------

_implements = Int8WeightTensor.implements
_implements(aten.embedding.default)(looked_up)
_implements(aten.bmm.default, aten._grouped_mm.default)(experts_in_high_precision)


@_implements(aten.mm.default, aten.addmm.default, aten.linear.default)
def _matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    return product_below_autograd(Int8WeightTensor.linear, func, args, kwargs)


@_implements(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    """With the remainder of an average, as callbacks that swap a model and its average clone both."""
    made: Any = args[0]._map(func)
    remainder.share(args[0].codes, made.codes)
    return made


@_implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    """In another dtype it is an operand of arithmetic, as in `average.float() * decay`."""
    self = args[0]
    made: Any = to_copy(func, args, kwargs)
    if made.dtype != self.dtype:
        self.was_read()
    remainder.share(self.codes, made.codes)
    return made


@_implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Copies the random-number offsets too, so that training continues as it would have. A source without offsets
    leaves those of the target. Plain values that were computed from the target leave a remainder."""
    dst, src = args[0], args[1]
    if isinstance(dst, Int8WeightTensor) and isinstance(src, Int8WeightTensor):
        if src.place is not None and dst.place is None and dst.shape == src.shape:
            dst.place = src.place.to(dst.device, copy=True)
        elif src.place is None and dst.place is not None:
            src = src._with({**src.inner_tensors(), "place": dst.place})
    copied = copy_(func, (dst, src), kwargs)
    if isinstance(dst, Int8WeightTensor):
        if isinstance(src, Int8WeightTensor):
            remainder.share(src.codes, dst.codes)
        elif dst.transposed or dst.flat_from is not None:
            remainder.forget(dst.codes)
        else:
            remainder.keep(dst, src)
    return copied
