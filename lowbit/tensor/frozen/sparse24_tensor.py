"""Sparse24Tensor: a weight of which each four neighbouring inputs hold two values, and only these are stored.

- `codes`: uint8 [..., V + I], two parts of each row, so that rows slice and shard as one tensor:
    V = 2⌈K/4⌉ codes of the scheme's format, in the order of their inputs, packed as those of an AffineTensor;
    I = ⌈K/8⌉ bytes of positions. Four inputs have 4 bits, i | j << 2 for the inputs i < j of the four that are stored.
      Even fours have the low nibble.
- `scale` and the scale of the input: those of `dense`, an AffineTensor or a Float8Tensor.

b bits a weight become b/2 + 1: 8 become 5, 4 become 3, and 2 stay 2. Hardware with 2:4 units takes the same positions.
A product decodes the weight first, so it saves memory and no time. Inputs cannot be sliced. Zero points are not stored:
without one, code 0 is the value 0. Values are those of `dense`, but a float8 zero has no sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.packing import as_bytes, pack, packed_size, unpack
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import InnerShapes, stored_shape
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.float8_tensor import Float8Tensor

_FOUR = 4


class Sparse24Tensor(AffineTensor):
    """A pruned weight in integer codes. `Sparse24Tensor.of_dense(weight)` makes one."""

    stored_as = "sparse24"
    inputs_are = "whose values and positions lie apart"
    _plain: ClassVar[type[AffineTensor]] = AffineTensor

    @staticmethod
    def of_dense(weight: AffineTensor) -> Sparse24Tensor:
        """A pruned weight [..., N, K], compressed.

        Raises ValueError for more than two values in four neighbouring inputs, of which the last may be fewer; for zero
        points; for a weight that is transposed or of another class than AffineTensor and Float8Tensor.
        """
        kind = next((k for k in (Sparse24Tensor, Sparse24Float8) if type(weight) is k._plain), None)
        if kind is None or weight.transposed or weight.flat_from is not None:
            raise ValueError(f"{weight!r}; accepted: an AffineTensor or a Float8Tensor [..., N, K]")
        _check(weight.spec)
        codes = weight._load(weight.spec.padded_shape(weight.shape)[-1])
        inner = {**weight.inner_tensors(), "codes": kind._store(codes, weight.spec)}
        self = kind.from_inner(inner, weight.meta(), weight.shape, weight.dtype)
        self.check_parts()
        return self

    @property
    def dense(self) -> AffineTensor:
        """The ordinary weight with codes of 0. Not for a transposed tensor."""
        codes = self._load(self.spec.padded_shape(self.shape)[-1])
        inner = {**self.inner_tensors(), "codes": self._plain._store(codes, self.spec)}
        return self._plain.from_inner(inner, self.meta(), self.shape, self.dtype)

    # ---- storage of the codes --------------------------------------------------------------------------------

    @classmethod
    def _store(cls, codes: Tensor, spec: Spec) -> Tensor:
        padded = F.pad(as_bytes(codes), (0, -codes.shape[-1] % _FOUR))
        fours = padded.unflatten(-1, (-1, _FOUR))
        used = (fours & 0x7F if codes.is_floating_point() else fours) != 0
        if not codes.is_meta and bool((used.sum(-1) > 2).any()):
            raise ValueError(
                f"{int((used.sum(-1) > 2).sum())} of {used[..., 0].numel()} groups of four inputs hold more than two "
                "values; prune them first by lowbit.inference.Prune24, or take the ordinary weight, .dense"
            )
        at = used.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :2]
        at = at.sort(-1).values
        values = fours.gather(-1, at).flatten(-2)
        if (bits := spec.format.bits) < 8:
            values = pack((values - int(spec.format.quant_min)).view(torch.uint8), bits)
        places = pack(at[..., 0] | at[..., 1] << 2, 4)
        return torch.cat([values.view(torch.uint8), places], -1)

    @classmethod
    def _code_dtype(cls, spec: Spec) -> torch.dtype:
        return torch.uint8

    def _load(self, columns: int) -> Tensor:
        fmt, count = self.spec.format, -(-columns // _FOUR)
        values, places = self.codes.split(_row_parts(columns, fmt.bits), -1)
        places = unpack(places.contiguous(), 4, count)
        if fmt.bits < 8:
            values = unpack(values.contiguous(), fmt.bits, 2 * count)
            values = values.view(fmt.dtype) + int(fmt.quant_min)
        values, places = values.view(torch.uint8).int(), places.int()
        first, second = values[..., ::2], values[..., 1::2]
        word = first << 8 * (places & 3) | second << 8 * (places >> 2)  # the four as bytes
        return word.view(torch.uint8)[..., :columns].contiguous().view(fmt.dtype)

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        found = super().inner_shapes(shape)
        padded = self.spec.padded_shape(stored_shape(self, shape))
        row = sum(_row_parts(padded[-1], self.spec.format.bits))
        return {**found, "codes": ((*padded[:-1], row), torch.uint8)}

    # ---- AffineTensor's methods ------------------------------------------------------------------------------

    def _stored_values(self) -> Tensor:
        if 0 in self.shape:
            return super()._stored_values()
        return self.dense.dequantize()

    def stored_format(self) -> str:
        return f"{super().stored_format()}, 2 of 4 inputs"

    def check_meta(self) -> None:
        super().check_meta()
        _check(self.spec)


class Sparse24Float8(Sparse24Tensor, Float8Tensor):
    """A pruned weight in float8."""

    _plain = Float8Tensor


def _row_parts(columns: int, bits: int) -> list[int]:
    """Bytes of values and of positions in a row of so many inputs."""
    fours = -(-columns // _FOUR)
    return [packed_size(2 * fours, bits), packed_size(fours, 4)]


def _check(spec: Spec) -> None:
    """Raise ValueError for a weight with zero points."""
    if spec.has_zero_point:
        raise ValueError(f"Sparse24Tensor stores no zero points, got {spec}")
