"""A `Spec`: how one tensor is quantized, and its arithmetic.

A `Spec` is format + granularity + mapping. A `Spec` also does its arithmetic (`quantize`, `dequantize`,
`fake_quantize`) through `lowbit.numerics.affine`, so every flow gives the same bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.affine import (
    VALUE_ZERO_POINT,
    Grid,
    MappingName,
    absmax_of_blocks,
    chosen_qparams,
    codes_and_values,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
    rounded_affine,
    unchecked_grid,
    unclamped_codes,
)
from lowbit.numerics.blocks import crop
from lowbit.numerics.code_range import FLOATS, CodeType, clamped, within_range
from lowbit.numerics.float32 import round_to_dtype
from lowbit.numerics.granularity import Granularity, PerBlock, PerTensor
from lowbit.numerics.lookup_table import E2M1, LookupTable
from lowbit.numerics.number_format import Float8, Int, NumberFormat
from lowbit.numerics.scale_format import SCALE_FORMATS, ScaleFormat
from lowbit.numerics.search import best_of_scales, search_qparams_affine
from lowbit.numerics.spec_checks import check_fields, super_blocks_of
from lowbit.numerics.super_blocks import SuperBlocks

_MXFP4 = SCALE_FORMATS["e8m0"], E2M1
ScaleFormatName = Literal["float", "e8m0", "e4m3", "e4m3_inverse", "double", "super_block"]


MOST_PADDING, ALWAYS_PADDED = 256, 2**20
"""The most elements that a whole number of blocks may have, as a multiple of the tensor's own, and the elements up to
which any multiple is taken."""


class _Computed:
    """Values that a `Spec` computes of its fields once, at construction. Comparisons and pickles leave them out."""

    _grid: Grid
    """The codes, for `lowbit.numerics.affine`."""
    scales: ScaleFormat | None
    """How scales are stored; None: as they are, in a floating dtype."""
    super_blocks: SuperBlocks | None
    """Which scales there are, where groups share parts of them ("super_block"); None: any."""
    rounds_minimum: bool
    """True if the smallest value of each block is rounded to `scale_dtype`, like its scale."""
    has_zero_point: bool
    """True if each scale has a zero point beside it. Otherwise the zero point is 0."""
    zero_point_is_value: bool
    """True if zero points are values in the dtype of the scales, and not codes."""
    stored_scale_dtype: torch.dtype | None
    """The dtype of scales in a weight; None: any."""
    _limits: tuple[CodeType, float, float]
    """The dtype and the range of the format's codes, as `lowbit.numerics.affine` takes them."""
    _new_scale_dtype: torch.dtype | None
    """The dtype of scales that are computed from a weight; None: that of the weight."""


@dataclass(frozen=True)
class Spec(_Computed):
    """How one tensor is quantized.

    Args:
        format: `Int(bits, signed)`, `Float8(dtype)` or a `LookupTable`, such as `NF4` and `E2M1`.
        granularity: which elements share a scale: `PerTensor`, `PerRow`, `PerGroup(g)`, `PerToken`, `PerBlock`.
        mapping: "symmetric", "symmetric_no_clipping_err", "asymmetric", "float_zero_point" or "half_integer" (see
            `lowbit.numerics.affine`).
        static: for an activation, with `PerTensor()`. False: the scale is dynamic, computed from each input. True: all
            inputs have one scale, which `lowbit.calibrate` finds before and which the layer stores.
        scale_format: for a LookupTable, how scales are stored: "float", "e8m0", "e4m3", "double", … (see
            `lowbit.numerics.scale_format`). For a Float8 "float" or "e8m0". For the integers of
            `lowbit.numerics.super_blocks` also "super_block": the scales that the K-quants of GGUF have, kept in
            float32.
        scale_dtype: for the weight of an Int or Float8 scheme, the dtype that scales are rounded to: torch.float16,
            torch.bfloat16 or torch.float32. None: the dtype of the weight (float32 for float64, and for float8 in
            blocks). GPTQ, AWQ and GGUF store float16 scales; `lowbit.formats.grid` gives the dtype of a format. With
            "float_zero_point" and a dtype of 16 bits, the smallest value of each block is rounded to it too, as GGUF's
            Q4_1 stores it. The weight then keeps scale and zero point in float32, which represents both exactly.

    Raises:
        ValueError, TypeError: an impossible combination, e.g. float8 with a zero point.
    """

    format: NumberFormat
    granularity: Granularity
    mapping: MappingName = "symmetric"
    static: bool = field(default=False, kw_only=True)
    scale_format: ScaleFormatName = field(default="float", kw_only=True)
    scale_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        self._compute()

    def _compute(self) -> None:
        fmt, is_int = self.format, isinstance(self.format, Int)
        is_short = self.scale_dtype in (torch.float16, torch.bfloat16)
        rounds_minimum = is_short and self.mapping == "float_zero_point"
        symmetric = self.mapping.startswith("symmetric")
        is_value_zero = self.mapping in VALUE_ZERO_POINT
        zero_dtype = fmt.dtype if is_int and not is_value_zero else None
        if rounds_minimum:
            zero_dtype = torch.float32
        in_blocks = isinstance(fmt, Float8) and isinstance(self.granularity, PerBlock)
        in_super_blocks = self.scale_format == "super_block"
        is_stored = isinstance(fmt, LookupTable) or self.scale_format == "e8m0"
        is_wide = rounds_minimum or in_blocks or in_super_blocks or is_stored
        in_float32 = rounds_minimum or in_super_blocks
        self.__dict__.update(
            super_blocks=super_blocks_of(self) if in_super_blocks else None,
            _grid=unchecked_grid(self.mapping, fmt.dtype, fmt.quant_min, fmt.quant_max, zero_dtype),
            _limits=(fmt.dtype, fmt.quant_min, fmt.quant_max),
            scales=SCALE_FORMATS[self.scale_format],
            rounds_minimum=rounds_minimum,
            has_zero_point=is_int and not (getattr(fmt, "signed", False) and symmetric),
            zero_point_is_value=is_value_zero,
            stored_scale_dtype=torch.float32 if in_float32 else self.scale_dtype,
            _new_scale_dtype=torch.float32 if is_wide else self.scale_dtype,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._compute()

    def __repr__(self) -> str:
        left_out: tuple[str, ...] = () if self.scale_format != "float" else ("scale_format",)
        left_out += () if self.scale_dtype is not None else ("scale_dtype",)
        shown = [f.name for f in fields(self) if f.name not in left_out]
        return f"Spec({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def same_values(self, other: Spec) -> bool:
        """True if codes and scales mean the same values under both specs. The two symmetric mappings choose different
        scales but decode them alike. So do specs that differ in `scale_dtype`, and the scale formats "e4m3" and
        "e4m3_inverse"."""

        def meaning(spec: Spec) -> tuple[Any, ...]:
            symmetric = spec.mapping.startswith("symmetric")
            inverse = spec.scale_format == "e4m3_inverse"
            own: dict[str, Any] = {
                "mapping": "symmetric" if symmetric else spec.mapping,
                "scale_format": "e4m3" if inverse else spec.scale_format,
                "scale_dtype": None,
            }
            return tuple(own.get(f.name, getattr(spec, f.name)) for f in fields(spec))

        return meaning(self) == meaning(other)

    def scale_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of scales that are computed from a weight of `dtype`."""
        return self._new_scale_dtype or (torch.float32 if dtype is torch.float64 else dtype)

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`shape` with each dimension rounded up to a whole number of blocks."""
        block = self.block_size(shape)
        return tuple(-(-size // b) * b for size, b in zip(shape, block, strict=True))

    def check_padding(self, shape: Sequence[int]) -> None:
        """Raise ValueError if nearly all of a tensor of this shape would be padding."""
        padded, size = self.padded_shape(shape), math.prod(shape)
        if size and math.prod(padded) > max(MOST_PADDING * size, ALWAYS_PADDED):
            raise ValueError(
                f"{self.granularity} pads {'x'.join(map(str, shape))} to {'x'.join(map(str, padded))}, more than "
                f"{MOST_PADDING} times its elements; take a block of up to {shape[-1]} inputs, or PerRow() "
                "(group_size=None)"
            )

    def blocks(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Blocks along each dimension: the shape of scale and zero point."""
        block = self.block_size(shape)
        return tuple(n // b for n, b in zip(self.padded_shape(shape), block, strict=True))

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.granularity.block_size(shape)

    def pad(self, x: Tensor) -> Tensor:
        """`x` padded with zeros to `padded_shape`. Zeros never change a range, which always includes zero."""
        padding = []
        for size, b in zip(x.shape, self.block_size(x.shape), strict=True):
            padding.append(-size % b)
        if not any(padding):
            return x
        return F.pad(x, [p for extra in reversed(padding) for p in (0, extra)])

    @property
    def joins(self) -> bool:
        """True if all layers that a server merges have one part of the scales in common, so that siblings must share
        that part: the global scale of NVFP4, and the scale of a whole tensor in float8."""
        if self.scales is not None:
            return self.scales.joint is not None
        return isinstance(self.format, Float8) and isinstance(self.granularity, PerTensor)

    def joint_part(
        self,
        weights: Sequence[Tensor],
        scale_dtype: torch.dtype,
        largest: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> Tensor:
        """The part of the scales that these weights share as siblings, where the spec `joins`. The weight with the
        largest magnitude decides it. float32 [..., 1, 1] for a `scale_format`; otherwise the scale of each weight.

        Args:
            weights: plain, of the same number of dimensions, and of the same size in all but the last two.
            largest: the maximum of what each rank finds, where the ranks have parts of the weights.
        """
        device = weights[0].device
        if self.scales is None:
            found = [self.choose_qparams(self.pad(w), scale_dtype)[0].to(device) for w in weights]
            return largest(torch.stack(found).amax(0))
        assert isinstance(self.format, LookupTable)
        most = []
        for x in weights:
            if x.numel():  # one pass over each matrix
                own = torch.linalg.vector_norm(x, math.inf, (-2, -1), keepdim=True)
            else:
                own = x.new_zeros((*x.shape[:-2], 1, 1))
            most.append(own.float().to(device))
        return self.scales.joint_part(largest(torch.stack(most).amax(0)), self.format)

    def choose_qparams(
        self, x: Tensor, scale_dtype: torch.dtype, joint: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(scale, zero_point) of `x` (already padded), both of shape [blocks along each dimension].

        Args:
            scale_dtype: in every method, the dtype of scales where the spec names none.
            joint: in every method, what `joint_part` gives for x and its siblings. None: x has none.

        zero_point is None where it is 0 by definition: for float8, and for signed symmetric codes.

        Raises ValueError for a static spec, which takes no scale from the tensor itself.
        """
        if self.static:
            raise ValueError(
                f"{self} is static: its scale belongs to the layer, not to the present input; call the module itself "
                "(not F.linear with its weight), or take a dynamic activation (static=False)"
            )
        if self.scales is not None:
            return self.scales.decode(self.choose_scales(x, joint=joint)), None
        if joint is not None:
            return joint, None
        if self.super_blocks is not None:
            return self.super_blocks.of_range(x)
        block, own = self.block_size(x.shape), self.scale_dtype or scale_dtype
        scale, zero_point = chosen_qparams(x, self._grid, block, scale_dtype=own)
        return self._as_stored(scale, zero_point) if self.has_zero_point else (scale, None)

    def choose_scales(
        self, x: Tensor, kept: dict[str, Tensor] | None = None, joint: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The scales of `x` (already padded) as they are stored, by name, where `scales` says how.

        `kept`: the parts of a weight that keeps what all of its blocks share.
        """
        assert self.scales is not None
        kept = self.kept_parts(joint) or kept
        if x.ndim < 2 and self.scales.shared:
            raise ValueError(
                f"{self} is for matrices [..., N, K], got shape {tuple(x.shape)}; reshape it"
            )
        absmax = absmax_of_blocks(x, self.block_size(x.shape))
        return self.scales.encode(absmax, self.format, self.mapping, kept)

    @property
    def is_searchable(self) -> bool:
        """True if each block's scale can be chosen by itself, as `search_qparams` does: not for "double"."""
        return self.scales is None or self.scales.is_byte

    @property
    def has_few_codes(self) -> bool:
        """True for integers of 1 and 2 bits, whose scales are searched by default. Min-max loses most there: random
        weights in 1 bit and groups of 32 had a relative error of 0.96, and 0.49 after a search."""
        return isinstance(self.format, Int) and self.format.bits <= 2

    @property
    def is_searched(self) -> bool:
        """True if scales are searched where nothing else is asked for."""
        return self.has_few_codes or self.super_blocks is not None

    def kept_parts(self, joint: Tensor | None) -> dict[str, Tensor] | None:
        """The part of stored scales that `joint` is, by its name; None where scales have none."""
        if joint is None or self.scales is None or self.scales.joint is None:
            return None
        return {self.scales.joint: joint}

    def check_free_scales(self, what: str, way_out: str) -> None:
        """Raise ValueError if scales cannot take any floating value. `what` needs such scales."""
        if self.scale_format != "float":
            raise ValueError(
                f"{what} needs scales that take any value, and {self} stores them as {self.scale_format!r}; "
                f"{way_out}, or take scale_format='float'"
            )

    def search_qparams(
        self,
        x: Tensor,
        scale_dtype: torch.dtype,
        importance: Tensor | None = None,
        joint: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`choose_qparams` with the smallest Σ importance · (x − x̂)² that `lowbit.numerics.search` finds.

        The error is never above that of `choose_qparams`, unless smallest values are rounded to a `scale_dtype`: this
        rounding comes after the search. Scales of symmetric integers may be negative. Scales of a `scale_format` are
        among those that it stores: powers of two for "e8m0", and for "e4m3" multiples of the part that the matrix, and
        its siblings, share.

        Args:
            x: real floating tensor, padded or not.
            importance: broadcastable to x, finite, not negative; None for 1. The mean square of each input channel [K]
                makes it the error of the layer's output, if channels are uncorrelated.
            joint: what `joint_part` gives for x and its siblings, where `scales` has such a part.

        Raises:
            ValueError: an importance that does not fit; a `scale_format` of "double".
        """
        if not self.is_searchable:
            self.check_free_scales("a search of scales", "call quantize_ with scales='minmax'")
        padded = self.pad(x)
        if padded is not x and (importance is not None or self.zero_point_is_value):
            importance = self._pad_importance(importance, x)
        block = self.block_size(padded.shape)
        if self.scales is not None:
            start = self.choose_scales(padded, joint=joint)
            offered = (self.scales.decode(p) for p in self.scales.neighbours(start))
            best = self.scales.decode(start)
            return best_of_scales(padded, block, self._grid.dtype, best, offered, importance), None
        if self.super_blocks is not None and not x.is_meta and x.numel():
            return self.super_blocks.search(padded, importance)
        scale, zero_point = search_qparams_affine(
            padded,
            self.mapping,
            block,
            *self._limits,
            scale_dtype=self.scale_dtype or scale_dtype,
            zero_point_dtype=self._grid.zero_point_dtype,
            importance=importance,
        )
        return self._as_stored(scale, zero_point)

    def _pad_importance(self, importance: Tensor | None, x: Tensor) -> Tensor:
        """The padding has no importance. Dimensions that are not padded stay broadcast."""
        own = x.new_ones((), dtype=torch.float32) if importance is None else importance
        if own.ndim > x.ndim:
            return own  # refused by the search
        own = own[(None,) * (x.ndim - own.ndim)]
        padding: list[int] = []
        for dim, size in reversed(list(enumerate(self.padded_shape(x.shape)))):
            if size != x.shape[dim] and own.shape[dim] == 1:
                own = own.expand(*own.shape[:dim], x.shape[dim], *own.shape[dim + 1 :])
            padding += [0, size - x.shape[dim] if own.shape[dim] == x.shape[dim] else 0]
        return F.pad(own, padding)

    def _as_stored(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The chosen scale and zero point in the form that weights store."""
        if not self.has_zero_point:
            return scale, None
        return self.with_minimum(scale, zero_point) if self.rounds_minimum else (scale, zero_point)

    def with_minimum(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
        """(scale, zero_point) in float32, after the smallest value of each block, m = z − steps · s, is rounded to
        `scale_dtype`. z = m + steps · s must be exact in float32: where m is too small beside s for that, it becomes 0.
        """
        assert zero_point is not None and isinstance(self.format, Int) and self.scale_dtype
        steps = 2 ** (self.format.bits - 1)
        first = scale.double() * steps
        least = round_to_dtype((zero_point.double() - first).float(), self.scale_dtype)
        exact = least.double() + first
        point = exact.float()
        return scale.float(), torch.where(point.double() == exact, point, first.float())

    def quantize(
        self,
        x: Tensor,
        scale_dtype: torch.dtype = torch.float32,
        qparams: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scale, zero_point) of `x`.

        codes: `padded_shape(x.shape)`, dtype of the format, and for a LookupTable its values in float32; scale and
        zero_point: blocks along each dimension. These are `qparams` where given, and otherwise those of
        `choose_qparams`.
        """
        x = self.pad(x)
        scale, zero_point = self.choose_qparams(x, scale_dtype) if qparams is None else qparams
        block = self.block_size(x.shape)
        codes = quantize_affine(x, block, scale, zero_point, *self._limits)
        return codes, scale, zero_point

    def quantize_by(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of `quantize` for a given scale, without zero points, and the mask of those that do not clip."""
        x = self.pad(x)
        codes = unclamped_codes(x, self.block_size(x.shape), scale, None, *self._limits)
        inside = within_range(codes, *self._limits)
        return clamped(codes, *self._limits), inside

    def codes_and_values(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The codes before the clamp and the values of x by a given scale and zero point: both float32, of
        `padded_shape`."""
        x, grid = self.pad(x), self._grid
        block = self.block_size(x.shape)
        return codes_and_values(x, block, scale, zero_point, grid.dtype, grid.low, grid.high)

    def may_clip(self, scale_dtype: torch.dtype) -> bool:
        """True if values may clip at the scale that `choose_qparams` gives in this dtype. If False, backward needs no
        mask.

        "symmetric_no_clipping_err" and float8 put the largest value on the last code. In float8 with e8m0 scales
        "symmetric_no_clipping_err" puts it on or below the last code, and in MXFP4 less than half a step beyond it;
        "symmetric" may clip it. The rounding of a scale to bfloat16 moves it by 2^-8 of itself, which is half a step of
        8 bits at most: -128 to -128.5, which rounds to -128. Unsigned codes reach 128.5 - 128.5 = 0 too. In float16
        small scales are subnormal and have fewer digits.
        """
        scale_dtype = self.scale_dtype or scale_dtype
        if self.static or scale_dtype is torch.float16:
            return True
        if isinstance(self.format, LookupTable) and (self.scales, self.format) != _MXFP4:
            return True
        is_exact = isinstance(self.format, Float8) and self.scales is None
        return not is_exact and self.mapping != "symmetric_no_clipping_err"

    def check_qparams(
        self,
        shape: Sequence[int],
        scale: Tensor,
        zero_point: Tensor | None,
        joint: Tensor | None = None,
    ) -> None:
        """Raise ValueError for a scale or zero point that a tensor of this shape, with this `joint_part`, cannot have.

        A scale is finite, not zero, and not so small that its reciprocal overflows float32. A scale may be negative,
        unless the `scale_format` has no sign, and has the `stored_scale_dtype`, if there is one.
        """
        blocks, own = self.blocks(shape), self.stored_scale_dtype
        fits = scale.dtype in FLOATS if own is None else scale.dtype is own
        if not fits or tuple(scale.shape) != blocks:
            raise ValueError(
                f"the scale of a tensor {tuple(shape)} in {self} is {own or 'floating'}, of shape {blocks}, got "
                f"{scale.dtype} {tuple(scale.shape)}; reshape or convert it"
            )
        if self.has_zero_point != (zero_point is not None):
            takes = (
                "takes a zero point" if self.has_zero_point else "takes no zero point: give None"
            )
            raise ValueError(f"{self} {takes}")
        if zero_point is not None:
            dtype = self._grid.zero_point_dtype or scale.dtype
            if zero_point.dtype is not dtype or tuple(zero_point.shape) != blocks:
                raise ValueError(
                    f"the zero point of a tensor {tuple(shape)} in {self} is {dtype} {blocks}, got {zero_point.dtype} "
                    f"{tuple(zero_point.shape)}"
                )
        if scale.is_meta or torch.compiler.is_compiling():
            return
        bad = ~(scale.isfinite() & scale.float().reciprocal().isfinite())
        if bool(bad.any()):
            raise ValueError(
                f"{int(bad.sum())} of {scale.numel()} scales cannot be used, such as {scale[bad][0].item()}: a scale, "
                f"negative or not, is finite (the largest of {scale.dtype} is {torch.finfo(scale.dtype).max:g}), not "
                "zero, and has a finite reciprocal; `choose_qparams` and `search_qparams` give such scales where the "
                "dtype holds them"
            )
        if self.scales is not None:
            self.scales.encode_given(scale, self.kept_parts(joint))

    def unclamped_codes(
        self, x: Tensor, scale_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`quantize` without the clamp: codes in the narrowest dtype that still shows which of them clip.

        The dtype is int8, which holds one step beyond the range on either side; int16 for 8-bit codes of which some may
        clip; float8 for float8, which never clips at its own scale; float32 for a LookupTable.
        """
        x = self.pad(x)
        scale, zero_point = self.choose_qparams(x, scale_dtype)
        codes = unclamped_codes(x, self.block_size(x.shape), scale, zero_point, *self._limits)
        return self.narrowed(codes, self.may_clip(scale_dtype)), scale, zero_point

    def narrowed(self, codes: Tensor, may_clip: bool = True) -> Tensor:
        """float32 codes before the clamp, in the dtype that `unclamped_codes` names."""
        fmt = self.format
        if isinstance(fmt, LookupTable):
            return codes
        beyond = may_clip and not isinstance(fmt, Float8)
        return codes.clamp(fmt.quant_min - beyond, fmt.quant_max + beyond).to(
            self.unclamped_dtype(may_clip)
        )

    def unclamped_dtype(self, may_clip: bool = True) -> torch.dtype:
        """The dtype that `unclamped_codes` names, for an Int or Float8."""
        fmt = self.format
        if isinstance(fmt, Float8) or not may_clip:
            return fmt.dtype
        return torch.int8 if fmt.quant_min > -128 and fmt.quant_max < 127 else torch.int16

    @property
    def shares_rows(self) -> bool:
        """True if the scale of a row (an index of dimension 0) may depend on other rows."""
        return self.granularity.shares_rows or (
            self.scales is not None and bool(self.scales.shared)
        )

    def dequantize(
        self,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        shape: Sequence[int],
        output_dtype: torch.dtype,
    ) -> Tensor:
        """The values of `codes`, `scale` and `zero_point`, which `quantize` gave, without the padding: a tensor of
        `shape` and `output_dtype`."""
        block, (_, *limits) = self.block_size(shape), self._limits
        values = dequantize_affine(
            codes, block, scale, zero_point, *limits, output_dtype=output_dtype
        )
        return crop(values, shape)

    def rounded(
        self,
        x: Tensor,
        scale_dtype: torch.dtype = torch.float32,
        masked: bool = True,
        joint: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The values of `fake_quantize`, without gradient. If `masked`, also the mask of where the gradient passes.
        Args: those of `fake_quantize`."""
        if x.numel() == 0:
            return x.detach(), None
        grid, own, block = self._grid, x.detach(), self.block_size(x.shape)
        padded = own
        if any(map(operator.mod, own.shape, block)):
            padded = self.pad(own)
            block = self.block_size(padded.shape)
        values, inside = rounded_affine(
            padded,
            block,
            *self.choose_qparams(padded, scale_dtype, joint),
            grid.dtype,
            grid.low,
            grid.high,
            masked,
        )
        if padded is own:
            return values, inside
        return crop(values, x.shape), None if inside is None else crop(inside, x.shape)

    def fake_quantize(
        self, x: Tensor, scale_dtype: torch.dtype = torch.float32, joint: Tensor | None = None
    ) -> Tensor:
        """`dequantize(*quantize(x))` to the bit, in `x`'s shape and dtype, with straight-through gradients."""
        padded = self.pad(x)
        with torch.no_grad():
            scale, zero_point = self.choose_qparams(padded.detach(), scale_dtype, joint)
        return self._fake_quantize(x, scale, zero_point, self.may_clip(scale_dtype))

    def fake_quantize_by(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """`fake_quantize` for a given scale and zero point, one element a block. NaN stays NaN."""
        return self._fake_quantize(x, scale, zero_point, clips=True)

    def _fake_quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, clips: bool
    ) -> Tensor:
        if x.numel() == 0:  # no block, for which one scale would be too many
            return x
        padded = self.pad(x)
        block = self.block_size(padded.shape)
        values = fake_quantize_affine(padded, block, scale, zero_point, *self._limits, clips)
        return crop(values, x.shape)
