"""AffineTensor: integer codes of 1 to 8 bits with a scale and a zero point for each block.

Storage, all row-major, sliceable along dimension 0 without unpacking:

- `codes`: 8 bits: int8 or uint8 [..., K]. Fewer: the code less the format's smallest, packed as a little-endian
  bit stream along the last dimension (`lowbit.packing`); 4 bits: uint8 [..., K/2], even k in the low nibble.
- `scale`, `zero_point`: one element a block, [..., K/group]. Signed symmetric codes have no zero point.

K, and every blocked dimension, is padded to a whole number of blocks; `shape` is the logical one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.granularity import PerGroup, PerRow, PerTensor
from lowbit.packing import pack, packed_size, unpack
from lowbit.products import quantized_linear
from lowbit.scheme import Int, Scheme, Spec
from lowbit.tensor.base import InnerShapes, LowbitTensor
from lowbit.tensor.cpu_values import ReadOnCpu, rows_of_embedding
from lowbit.tensor.frozen import asks_for_gradient
from lowbit.tensor.row_parts import count_nonfinite, encode_in_parts

_LINEAR = (
    F.linear
)  # a name of this module, because looking up an attribute takes time at each product


def check_weight(weight: Tensor, name: str = "weight") -> None:
    """Raise ValueError unless `weight` is a real floating tensor, of at least two dimensions, and finite."""
    if isinstance(weight, LowbitTensor):
        raise ValueError(
            f"{name} is already quantized: {weight!r}; dequantize it or start from the original"
        )
    if not weight.dtype.is_floating_point:
        raise ValueError(
            f"{name} has dtype {weight.dtype}; only real floating-point weights can be quantized "
            "(float32, bfloat16, float16): convert it or leave it out with filter_fn"
        )
    if weight.dtype.itemsize < 2:
        raise ValueError(
            f"{name} has dtype {weight.dtype}, which is low-bit already; leave it out with filter_fn"
        )
    if weight.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; a quantized weight has 2 or more dimensions"
        )
    if not weight.is_meta and (bad := count_nonfinite(weight)):
        raise ValueError(
            f"{name} has {bad} NaN or infinite values of {weight.numel()}; repair or reload it before quantizing"
        )


class AffineTensor(ReadOnCpu, LowbitTensor):
    """A weight in integer codes; see the module for the layout. Make one with `AffineTensor.from_float`.

    It is frozen: `requires_grad_()` leaves `requires_grad` False, and of a parameter warns. Gradients flow through its
    linear to the input. Arithmetic with it reads its values, in-place arithmetic and `.data = values` quantize anew:
    see `lowbit.tensor.affine_arithmetic`. `weight[i]` is a row, as plain values.
    """

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale", "zero_point")
    meta_attrs: ClassVar[tuple[str, ...]] = ("spec", "activation", "transposed")
    way_out: ClassVar[str] = (
        "call .dequantize() for a plain tensor first, or lowbit.dequantize_(model) for a plain model"
    )

    caches = ("_known_product", "_reader")
    stored_as: ClassVar[str | None] = "integers"

    formats: ClassVar[type] = Int  # that the class stores

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    spec: Spec
    """Of the weight."""
    activation: Spec | None
    """How the activation of its linear is quantized, or None."""
    transposed: bool
    """The logical tensor is the stored one with its last two dimensions swapped."""
    _known_product: Any = None
    """The last decision of `lowbit.products` on a product of this weight."""

    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        spec: Spec,
        shape: Sequence[int],
        dtype: torch.dtype,
        activation: Spec | None = None,
    ) -> Self:
        """From parts as the module describes them. Raises ValueError where they don't fit, as `check_parts`."""
        tensors = {"codes": codes, "scale": scale, "zero_point": zero_point}
        meta = {"spec": spec, "activation": activation, "transposed": False}
        self = cls.from_inner(tensors, meta, shape, dtype)
        if spec.has_zero_point != (zero_point is not None):
            takes = "takes a" if spec.has_zero_point else "takes no"
            got = "none" if zero_point is None else f"one of shape {tuple(zero_point.shape)}"
            raise ValueError(f"{spec} {takes} zero_point, got {got}")
        self.check_parts()
        return self

    @classmethod
    def from_float(cls, weight: Tensor, scheme: Scheme | Spec) -> AffineTensor:
        """Quantize `weight` [..., N, K], rounding to nearest. Scales take `weight`'s dtype (float32 for float64).

        A Float8 format gives a `Float8Tensor`. Raises ValueError for integer, complex, low-bit, 1-D, NaN or
        infinite weights.
        """
        spec, activation = (
            (scheme.weight, scheme.activation) if isinstance(scheme, Scheme) else (scheme, None)
        )
        check_weight(weight)
        kind = representation_of(spec)
        scale_dtype = torch.float32 if weight.dtype is torch.float64 else weight.dtype
        meta = {"spec": spec, "activation": activation, "transposed": False}
        tensors = kind._encode_as(weight.detach(), spec, scale_dtype)
        return kind.from_inner(tensors, meta, weight.shape, weight.dtype)

    @classmethod
    def _encode_as(
        cls, weight: Tensor, spec: Spec, scale_dtype: torch.dtype
    ) -> dict[str, Tensor | None]:
        def encode(part: Tensor) -> dict[str, Tensor | None]:
            codes, scale, zero_point = spec.quantize(part.contiguous(), scale_dtype)
            return {"codes": cls._store(codes, spec), "scale": scale, "zero_point": zero_point}

        return encode(weight) if spec.shares_rows else encode_in_parts(weight, encode)

    # ---- storage of the codes, overridden by Float8Tensor ----------------------------------------------------

    @staticmethod
    def _store(codes: Tensor, spec: Spec) -> Tensor:
        if spec.format.bits == 8:
            return codes.contiguous()
        return pack((codes - int(spec.format.quant_min)).view(torch.uint8), spec.format.bits)

    @classmethod
    def _code_dtype(cls, spec: Spec) -> torch.dtype:
        return spec.format.dtype if spec.format.bits == 8 else torch.uint8

    def _load(self, columns: int) -> Tensor:
        """Codes [..., columns] in the format's own dtype, on its own grid."""
        fmt = self.spec.format
        if fmt.bits == 8:
            return self.codes
        return (unpack(self.codes, fmt.bits, columns).view(fmt.dtype)) + int(fmt.quant_min)

    # ---- what the base asks for ------------------------------------------------------------------------------

    def dequantize(self) -> Tensor:
        """Values [..., N, K] in this tensor's dtype: (code − zero_point) · scale in float32, rounded once."""
        if self.flat_from is not None:
            return self._with(shape=self.flat_from).dequantize().reshape(-1)
        if self.transposed:
            return self._untransposed().dequantize().transpose(-2, -1)
        shape = tuple(self.shape)
        if 0 in shape:  # an empty slice keeps the scales that it shared
            return self.scale.new_empty(shape, dtype=self.dtype)
        if self.codes.is_cuda and self._has_int4_kernel():
            return self._dequantize_int4()
        if (values := self._dequantize_on_cpu()) is not None:
            return values
        codes = self._load(self.spec.padded_shape(shape)[-1])
        return self.spec.dequantize(codes, self.scale, self.zero_point, shape, self.dtype)

    def _has_int4_kernel(self) -> bool:
        spec = self.spec
        return (
            type(self) is AffineTensor
            and spec.format == Int(4)
            and isinstance(spec.granularity, PerGroup | PerRow)
            and spec.mapping != "float_zero_point"
            and self.dtype is not torch.float64
        )

    def _dequantize_int4(self) -> Tensor:
        """The same bits from one kernel. Imported here, as all kernels are: at their first use."""
        from lowbit_kernels.dequantize import dequantize

        zero_point = None if self.zero_point is None else self.zero_point.flatten(0, -2)
        values = dequantize(
            self.codes.flatten(0, -2),
            self.scale.flatten(0, -2),
            zero_point,
            group_size=self.spec.block_size(self.shape)[-1],
            size=self.shape[-1],
            dtype=self.dtype,
        )
        return values.view(self.shape)

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        padded, blocks = self.spec.padded_shape(shape), self.spec.blocks(shape)
        bits = self.spec.format.bits
        found: InnerShapes = {
            "codes": ((*padded[:-1], packed_size(padded[-1], bits)), self._code_dtype(self.spec)),
            "scale": (blocks, self.scale.dtype),
        }
        if (
            self.spec.has_zero_point
        ):  # said by the spec, so that a checkpoint which lacks it does not fit
            is_code = self.spec.mapping != "float_zero_point"
            dtype = self.spec.format.dtype if is_code else self.scale.dtype
            found["zero_point"] = (blocks, dtype)
        return found

    def _assign_data(self, values: Tensor) -> None:
        from lowbit.tensor.affine_arithmetic import assign

        assign(self, values)

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        """Raises ValueError for NaN and infinite values, of which each would spoil its whole block."""
        is_known = not values.is_meta and not torch.compiler.is_compiling()
        if is_known and (bad := count_nonfinite(values)):
            raise ValueError(
                f"{bad} NaN or infinite values of {values.numel()} cannot be written into {self!r}: repair or reload "
                "them first"
            )
        if self.transposed:
            values = values.transpose(-2, -1)
        return type(self)._encode_as(values, self.spec, self.scale.dtype)

    def _takes_meta_of(self, other: Tensor) -> bool:
        """Accepts the other symmetric mapping, as in a checkpoint of a preset that had it."""
        if type(self) is not type(other) or not self.spec.same_values(other.spec):
            return False
        return {**self.meta(), "spec": None} == {**other.meta(), "spec": None}

    @classmethod
    def _strides(cls, shape: Sequence[int], meta: Any) -> tuple[int, ...] | None:
        if not meta["transposed"] or len(shape) < 2:
            return None
        base = list(torch.empty((*shape[:-2], shape[-1], shape[-2]), device="meta").stride())
        return (*base[:-2], base[-1], base[-2])

    def _blocks_along(self, dim: int) -> int:
        """Elements of a block along `dim`; 0 where the granularity says that one block covers all of it."""
        granularity = self.spec.granularity
        last = dim == self.ndim - 1
        if isinstance(granularity, PerTensor) or (last and isinstance(granularity, PerRow)):
            return 0
        return self.spec.block_size(self.shape)[dim]

    def _row_attrs(self) -> tuple[str, ...]:
        block = self._blocks_along(0)
        if block > 1:
            raise self._unsupported(f"sharding rows that share scales in blocks of {block}")
        return ("codes",) if block == 0 else tuple(self.inner_tensors())

    def _slice(self, dim: int, start: int, end: int) -> Self:
        if self.transposed:
            swapped = {self.ndim - 1: self.ndim - 2, self.ndim - 2: self.ndim - 1}
            return self._untransposed()._slice(swapped.get(dim, dim), start, end)._transposed()
        size, block = self.shape[dim], self._blocks_along(dim)
        if (start, end) == (0, size):
            return self._with()
        bits = self.spec.format.bits if dim == self.ndim - 1 else 8
        if any(edge != size and (edge % max(block, 1) or edge * bits % 8) for edge in (start, end)):
            raise self._unsupported(
                f"slicing dimension {dim} of {size} at {start}:{end} "
                f"(accepted: multiples of its blocks of {max(block, 1)}, at whole bytes)"
            )
        shape = list(self.shape)
        shape[dim] = end - start
        if start == end:
            start = end = 0
        elif end == size:  # keep the padding that belongs to the last block
            end = self.spec.padded_shape(self.shape)[dim]
        codes = self.codes.narrow(dim, start * bits // 8, packed_size(end - start, bits))
        tensors: dict[str, Tensor | None] = {"codes": codes}
        for name in ("scale", "zero_point"):
            t = getattr(self, name)
            if t is not None and block:
                t = t.narrow(dim, start // block, -(-(end - start) // block))
            tensors[name] = t
        return self._with(tensors, shape)

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        """Leading dimensions merged or split; the blocked ones must stay."""
        leading = self._blocks_along(0) == 1 and self.ndim > 1
        if (
            self.transposed
            or not shape
            or not leading
            or shape[-1] != self.shape[-1]
            or len(shape) < 2
        ):
            return None
        if any(self._blocks_along(dim) != 1 for dim in range(self.ndim - 1)):
            return None
        return self._map(lambda t: t.view(*shape[:-1], t.shape[-1]), shape=shape)

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        if self.transposed:
            raise self._unsupported("cat of transposed tensors")
        block = self._blocks_along(dim)
        total = sum(t.shape[dim] for t in tensors)
        shape = (*self.shape[:dim], total, *self.shape[dim + 1 :])
        bits = self.spec.format.bits if dim == self.ndim - 1 else 8
        if any(t.shape[dim] * bits % 8 for t in tensors[:-1]):
            raise self._unsupported(f"cat along dimension {dim} of parts that end within a byte")
        if block == 0 and all(self._has_scales_of(t) for t in tensors):
            codes = torch.cat([t.codes for t in tensors], dim)
            return self._with({**self.inner_tensors(), "codes": codes}, shape)
        if block == 0 or any(t.shape[dim] % block for t in tensors[:-1]):
            raise self._unsupported(
                f"cat along dimension {dim}, which does not end in whole blocks with scales of their own"
            )
        joined = {
            name: torch.cat([getattr(t, name) for t in tensors], dim)
            for name in self.inner_tensors()
        }
        return self._with(joined, shape)

    def _has_scales_of(self, other: Self) -> bool:
        """Both are parts of one tensor; each may have been gathered or moved on its own."""
        names = self.inner_tensors().keys() - {"codes"}
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        return all(a.data_ptr() == b.data_ptr() or torch.equal(a, b) for a, b in pairs)

    def _expert(self, index: int) -> Self:
        if self.transposed:
            return self._untransposed()._expert(index)._transposed()
        return super()._expert(index)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Any) -> Self:
        """Where all rows share one scale, with it: to an FSDP2 rank without rows it comes from nowhere else."""
        if self.transposed or self._blocks_along(0) or self.is_meta:
            return super()._new(shape, dtype, device, make)
        zeros = self._slice(0, 0, 0)._pad_rows(shape[0])
        return zeros._map(lambda t: t.to(device, copy=True), dtype=dtype)

    def _pad_rows(self, rows: int) -> Self:
        if self._blocks_along(0):
            return super()._pad_rows(rows)
        codes = self._load(self.spec.padded_shape(self.shape)[-1])
        zero_point = self.zero_point
        if zero_point is not None and zero_point.is_floating_point():
            raise self._unsupported(
                "padding with zeros, for which its one float zero point may have no code"
            )
        filler = codes.new_zeros((rows, *codes.shape[1:]))
        if zero_point is not None:
            filler = filler + zero_point.to(codes.dtype)
        joined = torch.cat([self.codes, self._store(filler, self.spec)])
        return self._with(
            {**self.inner_tensors(), "codes": joined}, (self.shape[0] + rows, *self.shape[1:])
        )

    def check_meta(self) -> None:
        super().check_meta()
        if not isinstance(self.transposed, bool):
            raise ValueError(f"transposed must be True or False, got {self.transposed!r}")
        if not isinstance(self.spec.format, self.formats):
            raise ValueError(f"{self.spec.format} is no {self.formats.__name__}")

    def meta_to_json(self) -> dict[str, Any]:
        return {"scheme": Scheme(self.spec, self.activation).to_dict()}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        scheme = Scheme.from_dict(data["scheme"])
        return {"spec": scheme.weight, "activation": scheme.activation, "transposed": False}

    # ---- transposition, rows, experts -------------------------------------------------------------------------

    def _transposed(self) -> Self:
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self._with(shape=shape, transposed=not self.transposed)

    _untransposed = _transposed

    def _take(self, rows: Tensor) -> Self:
        """The rows at a 1-D index of dimension 0. Negative ones are out of range, as in an embedding."""
        names = self._row_attrs()
        tensors = {
            name: _select_rows(t, rows) if name in names else t
            for name, t in self.inner_tensors().items()
        }
        return self._with(tensors, (rows.shape[0], *self.shape[1:]))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _LINEAR and isinstance(
            args[1] if len(args) > 1 else kwargs["weight"], AffineTensor
        ):
            return quantized_linear(*args, **kwargs) if kwargs else quantized_linear(*args)
        kwargs = kwargs or {}
        if func is F.embedding and (rows := rows_of_embedding(*args, **kwargs)) is not None:
            return rows
        if asks_for_gradient(func, args, kwargs):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def _select_rows(t: Tensor, rows: Tensor) -> Tensor:
    if t.dtype.itemsize == 1:  # float8 has fewer kernels than bytes
        return t.view(torch.uint8).index_select(0, rows).view(t.dtype)
    return t.index_select(0, rows)


def representation_of(spec: Spec) -> type[AffineTensor]:
    """The class that stores a weight of this spec."""
    from lowbit.tensor.float8_tensor import Float8Tensor

    return AffineTensor if isinstance(spec.format, Int) else Float8Tensor
