"""CodebookTensor: an optimizer state with 4 or 8 bits an element, or in float8.

Values are stored blockwise: the scale of a block is its largest magnitude, or the power of two above it for second
moments in 4 bits; the code of an element is the nearest entry of a table (`lowbit.numerics.codebook`; 8-bit optimizers,
arXiv 2110.02861; 4-bit ones, arXiv 2309.01507). A step of an optimizer rounds 4 bits stochastically in place of to
nearest.

Blocks never cross a row. A tensor of shape (d0, ..., dn) is viewed as [d0, mid..., cols], where `cols` is the
product of the fewest trailing dimensions that reaches the block size; dimension 0 is never one of them. Blocks
run along `cols`, with a shorter last one:

| tensor | shape                              | dtype                                                |
|--------|------------------------------------|------------------------------------------------------|
| codes  | [d0, mid..., cols], or of ceil(cols/2) bytes for 4 bits | uint8 (of float8: its bits)      |
| scale  | [d0, mid..., ceil(cols / block_size)]                   | float32                         |

So codes and scale are cut along dimension 0 exactly as the values are. Any uneven FSDP2 shard, and any resharding, is a
slice, and the precision of a state never depends on how its parameter is sharded.

Unsigned formats hold second moments, which are divisors. A positive value never becomes zero in them: a value that
would round to zero takes the smallest positive code (the 4-bit table has no zero). Otherwise the division of a first
moment by a second moment of zero makes updates thousands of times too large, as soon as the magnitudes of the gradients
in a block differ by a factor of a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lowbit.numerics.codebook import (
    Codebook,
    dequantize_blockwise,
    quantize_blockwise,
    scale_blocks,
)
from lowbit.numerics.packing import pack, packed_size
from lowbit.tensor.core import InnerShapes, LowbitTensor


@dataclass(frozen=True)
class _Format:
    bits: int
    block_size: int  # by default


FORMATS = {"4bit": _Format(4, 128), "8bit": _Format(8, 256), "float8": _Format(8, 256)}


def row_layout(shape: Sequence[int], block_size: int) -> tuple[tuple[int, ...], int]:
    """The leading dimensions, which stay, and `cols`, the product of the trailing dimensions that blocks run along."""
    split, cols = len(shape), 1
    while split > 1 and cols < block_size:
        split -= 1
        cols *= shape[split]
    return tuple(shape[:split]), cols


class CodebookTensor(LowbitTensor):
    """A float32 tensor of any shape in about 0.53 ("4bit") or 1.02 ("8bit", "float8") bytes an element.

    Make one with `CodebookTensor.zeros` or `CodebookTensor.from_float`; `copy_` from high-precision values
    encodes them in place, and from a tensor of the same format copies the codes.
    """

    tensor_attrs = ("codes", "scale")
    meta_attrs = ("format", "signed", "block_size")
    way_out = (
        "call .dequantize() for a plain tensor, or lowbit.optim.dequantize_state_dict(state_dict) for what torch.optim "
        "loads"
    )
    codes: Tensor
    scale: Tensor
    format: str
    signed: bool
    block_size: int

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        format: str,
        *,
        signed: bool,
        block_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """A tensor that dequantizes to zeros exactly, in every format: its scales are 0.

        Args:
            shape: logical shape.
            format: "4bit", "8bit" or "float8" (e4m3).
            signed: whether values may be below 0.
            block_size: elements that share a scale, an even number; by default 128 for 4 bits, 256 for 8.
            device: of the result.

        Raises:
            ValueError: an unknown format, or a block size that is not a positive even integer.
        """
        if block_size is None and format in FORMATS:
            block_size = FORMATS[format].block_size
        signed = bool(signed)
        meta = cls.meta_from_json({"format": format, "signed": signed, "block_size": block_size})
        shapes = inner_shapes(shape, format, meta["block_size"])
        tensors = {
            name: torch.zeros(s, dtype=dtype, device=device) for name, (s, dtype) in shapes.items()
        }
        return cls.from_inner(tensors, meta, shape, torch.float32)

    @classmethod
    def from_float(
        cls, values: Tensor, format: str, *, signed: bool, block_size: int | None = None
    ) -> Self:
        """Encode `values`.

        Args:
            values: of any floating dtype, shape and strides.
            format, signed, block_size: as for `zeros`.

        A block with a NaN or an infinity dequantizes to NaN throughout.
        """
        self = cls.zeros(
            values.shape, format, signed=signed, block_size=block_size, device=values.device
        )
        with torch.no_grad():
            self.copy_(values)
        return self

    def dequantize(self) -> Tensor:
        values = self.decode_rows(self.codes, self.scale)
        return values.reshape(self.shape).to(self.dtype)

    # ---- access by rows, for optimizers -------------------------------------------------------------------

    def cols_of(self, shape: Sequence[int]) -> int:
        """Elements in a row of a tensor of `shape` in this format: `cols` of the module."""
        return row_layout(shape, self.block_size)[1]

    @property
    def rounds_stochastically(self) -> bool:
        """True if `encode_rows` takes random bits."""
        book = self._book()
        return isinstance(book, Codebook) and book.rounds_stochastically

    def encode_rows(self, values: Tensor, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes (packed) and scale of float32 rows `values` [..., cols], in the form that this tensor stores.

        `random`: None, or bits as `quantize_blockwise` takes them, for stochastic rounding.
        """
        codes, scale = quantize_blockwise(values, self._book(), self.block_size, random)
        if self.format == "4bit":
            return pack(codes, 4), scale
        codes = codes.view(torch.uint8)
        # In both 8-bit formats, code 1 is the smallest positive value.
        return codes if self.signed else codes.clamp_(min=1), scale

    def decode_rows(self, codes: Tensor, scale: Tensor) -> Tensor:
        """float32 values [..., cols], a new tensor, from the results of `encode_rows`."""
        book = self._book()
        if self.format == "4bit":
            assert isinstance(book, Codebook)
            values = book.decode_packed(codes, self._layout()[1])
            return scale_blocks(values, scale, self.block_size)
        if self.format == "float8":
            codes = codes.view(torch.float8_e4m3fn)
        return dequantize_blockwise(codes, scale, book, self.block_size)

    def _book(self) -> Codebook | torch.dtype:
        if self.format == "float8":
            return torch.float8_e4m3fn
        return Codebook(FORMATS[self.format].bits, self.signed)

    def _layout(self) -> tuple[tuple[int, ...], int]:
        return row_layout(self.flat_from or self.shape, self.block_size)

    # ---- LowbitTensor's methods ---------------------------------------------------------------------------

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        return inner_shapes(shape, self.format, self.block_size)

    def _encode(self, values: Tensor) -> dict[str, Tensor | None]:
        lead, cols = self._layout()
        codes, scale = self.encode_rows(values.reshape(*lead, cols))
        return {"codes": codes, "scale": scale}

    @classmethod
    def meta_from_json(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError, as `zeros` does."""
        format, signed, block_size = data["format"], data["signed"], data["block_size"]
        if format not in FORMATS:
            raise ValueError(
                f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}"
            )
        if not isinstance(signed, bool):
            raise ValueError(f"signed must be True or False, got {signed!r}")
        if type(block_size) is not int or block_size < 2 or block_size % 2:
            raise ValueError(f"block_size must be a positive even integer, got {block_size!r}")
        return {"format": format, "signed": signed, "block_size": block_size}

    def _slice(self, dim: int, start: int, end: int) -> Self:
        """Dimension 0 and `mid` can be cut anywhere, the other dimensions at the ends of blocks."""
        shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
        if shape == tuple(self.shape):
            return self._with()
        lead, cols = row_layout(self.shape, self.block_size)
        new_lead, new_cols = row_layout(shape, self.block_size)
        if dim < len(lead) and new_cols == cols:
            return self._with(
                {
                    name: t.narrow(dim, start, end - start)
                    for name, t in self.inner_tensors().items()
                },
                shape,
            )
        inner = math.prod(self.shape[dim + 1 :])
        first, last = start * inner, end * inner
        if (
            dim != len(lead)
            or len(new_lead) != len(lead)
            or first % self.block_size
            or (last % self.block_size and last != cols)
        ):
            raise self._unsupported(
                f"slicing [{start}:{end}] along dimension {dim}, through blocks of {self.block_size} elements"
            )
        codes_per_byte = 8 // FORMATS[self.format].bits
        codes = self.codes[..., first // codes_per_byte : -(-last // codes_per_byte)]
        scale = self.scale[..., first // self.block_size : -(-last // self.block_size)]
        return self._with({"codes": codes, "scale": scale}, shape)


def inner_shapes(shape: Sequence[int], format: str, block_size: int) -> InnerShapes:
    lead, cols = row_layout(shape, block_size)
    form = FORMATS[format]
    return {
        "codes": ((*lead, packed_size(cols, form.bits)), torch.uint8),
        "scale": ((*lead, -(-cols // block_size)), torch.float32),
    }
