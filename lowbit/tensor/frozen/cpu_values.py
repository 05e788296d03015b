"""Read the codes of a low-bit weight on a CPU by one compiled kernel, `lowbit_kernels.weight_only.dequantize_cpu`, for
its values and for its products.

The values equal those of `Spec.dequantize` to the bit. `Spec.dequantize` takes 25 PyTorch operations a weight, of a few
microseconds each, which dominate the time of a decoded token on small models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec, crop

if TYPE_CHECKING:
    from lowbit_kernels.weight_only.codes_cpu import Parts
    from lowbit_kernels.weight_only.codes_format import CodesFormat
    from lowbit_kernels.weight_only.dequantize_cpu import Dequantizer
    from lowbit_kernels.weight_only.weight_mm_cpu import Multiplier

# Names of this module, because looking up an attribute takes as long as some of these calls.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced = torch._C._is_tracing
_has_transforms = torch._C._are_functorch_transforms_active
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


MOST_TOKENS = 16
"""The most tokens of a product in 16 bits that decodes in registers. More tokens are multiplied by decoded tiles."""
_LAYOUTS = ("integers", "float8", "ternary", "table")
"""The values of `stored_as` whose layout of codes the kernel knows."""


class Reader(NamedTuple):
    """The kernel that reads a weight's codes, found once for each weight."""

    spec: Spec
    """The weight's spec when the reader was made. A copy into the weight may change the spec."""
    layout: Dequantizer | None
    """None where no kernel reads such codes."""
    is_padded: bool
    """The kernel's rows are longer or more than the weight's."""
    gives_rows: bool
    """Rows of the kernel are rows of the weight, in its dtype."""


class ReadOnCpu:
    """The part of an AffineTensor that reads its codes on a CPU."""

    _reader: Reader | None = None

    def shape_of_codes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that the blocks of the scheme divide, of a tensor of this shape that is not transposed."""
        return tuple(shape)

    def values_for_product(self: Any) -> Tensor | None:
        """Values [K, N] of a small float32 matrix, transposed, for a product that is done before this thread's next.

        The memory belongs to the thread, and the next call writes to it. None for a weight that is not small, and where
        the kernel cannot run.
        """
        if _dispatch_modes() or _is_traced():
            return None
        reader = self._reader
        # Repeats a part of `_reader_of`, because a call would take as long as all the rest here.
        if reader is None or reader[0] is not self.spec:
            reader = _reader_of(self)
        _, layout, is_padded, _ = reader
        if layout is None or not layout.is_small:
            return None
        values = layout.kept_transposed(self.codes, self.scale, self.zero_point)
        if is_padded and values is not None:
            # Longer rows are another operand to BLAS, and may give another sum.
            values = crop(values.t(), self.shape).t()
        return values

    def product_on_cpu(self: Any, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., K], in float32 or 16 bits, times this matrix [N, K] transposed, plus bias [N]: [..., N].

        In float32 it equals the product with `dequantize()` to the bit
        (`lowbit_kernels.weight_only.weight_mm_tiles_cpu` names an exception). None where no kernel can run.
        """
        with _PlainAttributes():
            found, (n, k), codes_shape = (
                kernel_of(self),
                self.shape,
                self.shape_of_codes(self.shape),
            )
        if found is None:
            return None
        layout, parts = found
        tokens = x.numel() // k
        if x.dtype is not torch.float32 and 0 < tokens <= MOST_TOKENS:
            multiplier = _multiplier(self.spec, codes_shape)
            if multiplier is not None:
                out = multiplier.multiply(x.reshape(tokens, k), parts)[:, :n]
                out = out if bias is None else out.add_(bias)
                return out.to(x.dtype).reshape(*x.shape[:-1], n)
        from lowbit_kernels.weight_only.weight_mm_tiles_cpu import has_tokens_inside, linear

        if has_tokens_inside(x):
            return None
        tiles = layout.tiles(parts)
        if layout.shape[0] != n:
            tiles = _first_rows(tiles, n)
        return linear(x, tiles, n, bias)

    def _dequantize_on_cpu(self: Any) -> Tensor | None:
        """`dequantize()` of a tensor that is neither transposed nor flat; None where the kernel cannot run."""
        found = kernel_of(self)
        if found is None:
            return None
        layout, parts = found
        if self.dtype is torch.float32:
            values = layout.dequantize(parts)
        else:
            values = torch.empty(layout.shape, dtype=self.dtype, device="cpu")
            for rows, tile in layout.tiles(parts):
                values[rows] = tile
        shape = self.shape_of_codes(self.shape)
        if values.shape == shape:
            return values
        return crop(values.view(self.spec.padded_shape(shape)), shape)


def _first_rows(
    tiles: Iterable[tuple[slice, Tensor]], count: int
) -> Iterator[tuple[slice, Tensor]]:
    """Tiles without the rows from `count` on, which blocks of rows pad."""
    for rows, tile in tiles:
        if rows.start < count:
            end = min(rows.stop, count)
            yield slice(rows.start, end), tile[: end - rows.start]


def rows_of_embedding(
    index: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *options: Any,
    **others: Any,
) -> Tensor | None:
    """`F.embedding(...)` of a float32 weight by one kernel; the other options do not change the result.

    None where the kernel cannot run, or refuses an index.
    """
    if max_norm is not None or type(index) is not Tensor or not _may_run() or _has_transforms():
        return None
    _, layout, _, gives_rows = _reader_of(weight)
    if (
        layout is None
        or not gives_rows
        or index.dtype is not torch.int64
        or not index.is_contiguous()
        or not index.is_cpu
        or (padding_idx is not None and not -layout.shape[0] <= padding_idx < layout.shape[0])
        or not layout.fits(parts := _parts(weight, layout))
    ):
        return None
    return layout.look_up(parts, index)


def kernel_of(weight: Any) -> tuple[Dequantizer, Parts] | None:
    """The kernel that reads an AffineTensor's codes, and its operands; None where no kernel exists, or while it may not
    run."""
    if not _may_run():
        return None
    _, layout, _, _ = _reader_of(weight)
    if layout is None:
        return None
    parts = _parts(weight, layout)
    return (layout, parts) if layout.fits(parts) else None


def _parts(weight: Any, layout: Dequantizer) -> Parts:
    from lowbit_kernels.weight_only.codes_cpu import Parts

    codes, scale, zero_point, of_byte = weight.codes, weight.scale, weight.zero_point, None
    scales = weight.spec.scales
    if layout.has_byte_scales:
        of_byte = scales.of_byte(weight.inner_tensors())
    elif scales is not None:
        scale = weight.scale_values()
    elif scale.dtype is not torch.float32:
        scale = scale.float()
        if zero_point is not None and zero_point.is_floating_point():
            zero_point = zero_point.float()
    return Parts(codes, scale, zero_point, of_byte)


def _may_run() -> bool:
    """False while something compiles, traces or intercepts operations, which would not see the kernel."""
    return not (_is_compiling() or _dispatch_modes() or _is_traced())


def _reader_of(weight: Any) -> Reader:
    reader = weight._reader
    if reader is not None and reader[0] is weight.spec:
        return reader
    with _PlainAttributes():
        spec, codes = weight.spec, weight.codes
        shape = weight.shape_of_codes(weight.shape)
        is_plain = type(codes) is Tensor and codes.is_cpu and weight.stored_as in _LAYOUTS
        layout = _layout(spec, shape) if is_plain else None
        is_padded = layout is not None and layout.shape != shape
        gives_rows = not (is_padded or weight.transposed or weight.flat_from)
        reader = Reader(spec, layout, is_padded, gives_rows and weight.dtype is torch.float32)
    if is_plain:
        weight._reader = reader
    return reader


@functools.lru_cache(maxsize=4096)
def _layout(spec: Spec, shape: tuple[int, ...]) -> Dequantizer | None:
    sizes = _sizes(spec, shape)
    if sizes is None:
        return None
    from lowbit_kernels.weight_only.dequantize_cpu import dequantizer

    return dequantizer(_format(spec, len(shape)), *sizes)


@functools.lru_cache(maxsize=4096)
def _multiplier(spec: Spec, shape: tuple[int, ...]) -> Multiplier | None:
    sizes = _sizes(spec, shape)
    if sizes is None:
        return None
    from lowbit_kernels.weight_only.weight_mm_cpu import multiplier

    return multiplier(_format(spec, len(shape)), *sizes)


def _sizes(spec: Spec, shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """Rows, columns, group size and rows that share a scale; None where these don't say where the scales are."""
    padded, blocks, block = spec.padded_shape(shape), spec.blocks(shape), spec.block_size(shape)
    rows, scale_rows = math.prod(padded[:-1]), math.prod(blocks[:-1])
    if 0 in padded or (scale_rows != 1 and any(size != 1 for size in block[:-2])):
        return None
    return rows, padded[-1], block[-1], rows // scale_rows


@functools.lru_cache
def _format(spec: Spec, dims: int) -> CodesFormat:
    from lowbit_kernels.weight_only.codes_format import CodesFormat

    fmt = spec.format
    if isinstance(fmt, LookupTable):
        scales = spec.scales
        scale_bytes = scales is not None and scales.is_byte and (dims == 2 or not scales.shared)
        return CodesFormat(fmt.bits, table=fmt.values, scale_bytes=scale_bytes)
    if not isinstance(fmt, Int):
        return CodesFormat(fmt.bits, exponent=4 if fmt.dtype is torch.float8_e4m3fn else 5)
    if not spec.has_zero_point:
        return CodesFormat(fmt.bits, fmt.quant_min)
    kind = "value" if spec.zero_point_is_value else "code"
    mid = (fmt.quant_min + fmt.quant_max + 1) // 2
    return CodesFormat(fmt.bits, fmt.quant_min, zero_point=kind, mid=mid)
