"""TableTensor: codes of a lookup table (NF4, FP4) with a scale for each block.

    x̂ = values[code] · scale, in float32, rounded once to the tensor's dtype

- `codes`: uint8 [..., K · bits / 8], packed as those of `AffineTensor`: 4 bits have even k in the low nibble. For E2M1
  a code is the nibble that other programs store, with its sign in the highest bit.
- `scale`, and `global_scale`, or `scale_absmax` and `scale_offset`: as `lowbit.numerics.scale_format` lists them.
  Scales in the format "float" are float32, whatever the dtype of the weight, as bitsandbytes stores them.

A block lies within a row: K is padded to whole blocks. Where the block divides K, the blocks and the values are those
of a format that cuts the flattened weight into blocks.

Products dequantize the weight and multiply in the dtype of the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.packing import pack
from lowbit.numerics.row_chunks import chunk_elements
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import InnerShapes
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.requantize import GAIN, REACH


class TableTensor(AffineTensor):
    """A weight in codes of a lookup table; make one with `AffineTensor.from_float(weight, NF4WeightOnly())`."""

    tensor_attrs: ClassVar[tuple[str, ...]] = (
        *("codes", "scale", "global_scale", "scale_absmax", "scale_offset"),
        *("input_scale", "input_zero_point"),
    )
    stored_as = "table"

    zero_point = None
    global_scale: Tensor | None
    scale_absmax: Tensor | None
    scale_offset: Tensor | None

    def __new__(
        cls,
        codes: Tensor,
        scales: Mapping[str, Tensor],
        spec: Spec,
        shape: Sequence[int],
        dtype: torch.dtype,
        activation: Spec | None = None,
    ) -> Self:
        """Assemble inner tensors as the module describes them.

        Args:
            codes: indices of the table, packed.
            scales: the tensors beside the codes, by name.
            spec, shape, dtype, activation: as for `lowbit.AffineTensor`.

        Raises ValueError for a misfit, as `check_parts`.
        """
        return cls.of_parts({"codes": codes, **scales}, spec, shape, dtype, activation)

    # ---- storage ---------------------------------------------------------------------------------------------

    @classmethod
    def stores(cls, spec: Spec) -> bool:
        return isinstance(spec.format, LookupTable)

    @classmethod
    def _code_dtype(cls, spec: Spec) -> torch.dtype:
        return torch.uint8

    @classmethod
    def _store(cls, codes: Tensor, spec: Spec) -> Tensor:
        table = _table(spec)
        return pack(table.codes(codes.contiguous()), table.bits)

    def _load(self, columns: int) -> Tensor:
        return _table(self.spec).look_up(self.codes, columns)

    def _encode(self, values: Tensor, joint: Tensor | None = None) -> dict[str, Tensor | None]:
        found = super()._encode(values, joint)
        own, new = self.scale_absmax, found.get("scale_absmax")
        if own is not None and new is not None and own.shape != new.shape:
            found["scale_absmax"] = new.repeat_interleave(own.shape[-1] // new.shape[-1], -1)
        return found

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        found = super().inner_shapes(shape)
        if self.scale_absmax is not None and (copies := self.scale_absmax.shape[-1]):
            least, dtype = found["scale_absmax"]
            blocks, _ = found["scale"]
            if blocks[-1] % copies == 0 and copies % max(least[-1], 1) == 0:  # a slice has more
                found["scale_absmax"] = ((*least[:-1], copies), dtype)
        return found

    # ---- values ----------------------------------------------------------------------------------------------

    def _dequantized(self, shape: Sequence[int]) -> Tensor:
        """In chunks of rows, whose float32 values take little memory."""
        spec, scale, columns = self.spec, self.scale_values(), self.spec.padded_shape(shape)[-1]
        most = chunk_elements(self.device)
        is_small = self.numel() <= most or torch.compiler.is_compiling()
        if is_small or self.is_meta or any(size > 1 for size in spec.block_size(shape)[:-1]):
            return spec.dequantize(self._load(columns), scale, None, shape, self.dtype)
        values = self.codes.new_empty((math.prod(shape[:-1]), shape[-1]), dtype=self.dtype)
        step = max(most // columns, 1)
        parts = (t.flatten(0, -2).split(step) for t in (self.codes, scale))
        for out, codes, own in zip(values.split(step), *parts, strict=True):
            found = _table(spec).look_up(codes, columns)
            out.copy_(spec.dequantize(found, own, None, out.shape, self.dtype))
        return values.view(tuple(shape))

    def requantize_(self, values: Tensor) -> None:
        """As `AffineTensor` does. The part that blocks share, such as `global_scale`, changes where that is nearer. One
        that siblings may share changes where it does not reach the values, or the squared error falls by a tenth."""
        super().requantize_(values)
        if self.spec.scales is None or not self.spec.scales.shared or self.numel() == 0:
            return
        fresh = self._with(self._encode(values))
        joint, gain = self.spec.scales.joint, 1.0
        if joint is not None and bool(
            (getattr(self, joint) <= REACH * getattr(fresh, joint)).all()
        ):
            gain = GAIN
        if _squared_error(fresh, values) < gain * _squared_error(self, values):
            for name, t in fresh.inner_tensors().items():
                getattr(self, name).copy_(t)

    # ---- parts of the weight ---------------------------------------------------------------------------------

    def _common(self, dim: int) -> dict[str, Tensor]:
        """Parts of a matrix also share its global scale or offset."""
        shared = () if self.spec.scales is None or dim < self.ndim - 2 else self.spec.scales.shared
        return {**self._of_input(), **{name: getattr(self, name) for name in shared}}

    def _scales_of_blocks(self, dim: int, first: int, count: int) -> dict[str, Tensor]:
        if self.scale_absmax is None or dim != self.ndim - 1:
            return super()._scales_of_blocks(dim, first, count)
        per_copy = self.scale.shape[-1] // max(self.scale_absmax.shape[-1], 1)
        step = math.gcd(per_copy, first, count)
        finer = self.scale_absmax.repeat_interleave(per_copy // max(step, 1), -1)
        own = finer.narrow(dim, first // max(step, 1), count // max(step, 1))
        return {"scale": self.scale.narrow(dim, first, count), "scale_absmax": own}

    def _cat(self, tensors: Sequence[Self], dim: int) -> Self:
        along_k = dim == self.ndim - 1 and self.scale_absmax is not None
        if along_k and len({t.scale.shape[-1] / t._absmax_copies() for t in tensors}) > 1:
            raise self._unsupported("cat along K of parts with different numbers of scale_absmax")
        return super()._cat(tensors, dim)

    def _absmax_copies(self) -> int:
        return 1 if self.scale_absmax is None else max(self.scale_absmax.shape[-1], 1)

    def _view(self, shape: tuple[int, ...]) -> Self | None:
        is_shared = self.spec.scales is not None and self.spec.scales.shared
        return None if is_shared else super()._view(shape)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any, make: Any) -> Self:
        """Zeros are codes of zero, since a scale in 8 bits may have no zero."""
        made = super()._new(shape, dtype, device, make)
        if make is not torch.zeros or made.is_meta:
            return made
        table = _table(self.spec)
        if 0.0 not in table.values:
            raise self._unsupported("zeros, which its table does not have")
        zero = torch.full((2**3,), table.values.index(0.0), dtype=torch.uint8)
        pattern = pack(zero, table.bits)  # 8 codes fill whole bytes
        made.codes.copy_(
            pattern.to(device).repeat(-(-made.codes.shape[-1] // len(pattern)))[
                : made.codes.shape[-1]
            ]
        )
        if made.global_scale is not None and "global_scale" not in self._common(0):
            made.global_scale.fill_(1.0)
        return made


def _table(spec: Spec) -> LookupTable:
    return cast(LookupTable, spec.format)


def _squared_error(weight: TableTensor, values: Tensor) -> float:
    return float((weight.dequantize().double() - values.detach().double()).square().sum())
