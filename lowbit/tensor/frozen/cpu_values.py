"""Read the codes of a low-bit weight on a CPU by one compiled kernel, `lowbit_kernels.weight_only.dequantize_cpu`, for
its values and for its products.

The values equal those of `Spec.dequantize` to the bit. `Spec.dequantize` takes 25 PyTorch operations a weight, of a few
microseconds each, which dominate the time of a decoded token on small models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.numerics.blocks import crop
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit_kernels.runtime.launches import ran

if TYPE_CHECKING:
    from lowbit_kernels.weight_only.codes_cpu import Parts
    from lowbit_kernels.weight_only.codes_format import CodesFormat
    from lowbit_kernels.weight_only.dequantize_cpu import Dequantizer
    from lowbit_kernels.weight_only.weight_mm_cpu import Multiplier

# Names of this module, because looking up an attribute takes as long as some of these calls.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced = torch._C._is_tracing
_function_modes = torch._C._len_torch_function_stack
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_grad_enabled = torch.is_grad_enabled
_has_transforms = torch._C._are_functorch_transforms_active
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


_LAYOUTS = ("integers", "float8", "ternary", "table")
"""The values of `stored_as` whose layout of codes the kernel knows."""


class Reader:
    """The kernels that read a weight's codes, found once for each weight."""

    __slots__ = ("gives_rows", "is_padded", "last", "layout", "multiplier", "rows", "shape", "spec")

    def __init__(self, weight: Any, is_known: bool) -> None:
        shape = weight.shape_of_codes(weight.shape)
        self.spec: Spec = weight.spec
        """The weight's spec when the reader was made. A copy into the weight may change the spec."""
        self.layout: Dequantizer | None = _layout(self.spec, shape) if is_known else None
        """None where no kernel reads such codes."""
        self.is_padded = self.layout is not None and self.layout.shape != shape
        """The kernel's rows are longer or more than the weight's."""
        is_turned = weight.transposed or weight.flat_from
        self.gives_rows = not (self.is_padded or is_turned) and weight.dtype is torch.float32
        """Rows of the kernel are rows of the weight, in its dtype."""
        self.shape: tuple[int, ...] = shape
        """That of the codes, without padding."""
        self.rows: int = weight.shape[0]
        """Rows of a matrix [N, K], which are the columns of its product."""
        self.multiplier: Multiplier | bool | None = self.layout is not None
        """The kernel of products; True where the first product makes it, and None or False where there is none."""
        self.last: tuple[Any, torch.dtype | None, Any, bool] = (None, None, None, False)
        """The last product without a bias or a rounded input: shape and dtype of x, its `Extent`, and `of_op`."""

    def __deepcopy__(self, memo: Any) -> Reader:
        return self


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
        if reader is None or reader.spec is not self.spec:
            reader = _reader_of(self)
        layout = reader.layout
        if layout is None or not layout.is_small:
            return None
        values = layout.kept_transposed(self.codes, self.scale, self.zero_point)
        if reader.is_padded and values is not None:
            # Longer rows are another operand to BLAS, and may give another sum.
            values = crop(values.t(), self.shape).t()
        return values

    def product_on_cpu(
        self: Any, x: Tensor, bias: Tensor | None, of_op: bool = False
    ) -> Tensor | None:
        """x [..., K], in float32 or 16 bits, times this matrix [N, K] transposed, plus bias [N]: [..., N].

        Sums are float32, and the weight is not rounded. None where no kernel can run, and where `product_in_tiles` is
        faster. `of_op`: report a launch of the op `weight_linear`, in whose place this call stands.
        """
        if _is_compiling() or _dispatch_modes() or _is_traced() or type(x) is not Tensor:
            return None
        reader = self._reader
        if reader is None or reader.spec is not self.spec:
            reader = _reader_of(self)
        multiplier = reader.multiplier
        if multiplier is True:
            multiplier = reader.multiplier = _multiplier(reader.spec, reader.shape)
        if not multiplier:
            return None
        from lowbit_kernels.weight_only.weight_mm_cpu import Extent

        dtype, extent = x.dtype, Extent.of(x.shape, reader.rows)
        if dtype is torch.float16:
            x, bias = x.float(), None if bias is None else bias.float()
        y = None
        if reader.spec.scales is None:
            y = multiplier.multiply(x, extent, bias, self.codes, self.scale, self.zero_point)
            if y is not None and self.activation is None and bias is None:
                reader.last = (x.shape, dtype, extent, of_op)
        if y is None:
            found = kernel_of(self)
            if found is None:
                return None
            y = multiplier.multiply(x, extent, bias, *found[1])
        if y is None:
            return None
        if of_op:
            ran("weight_linear", "cpu")
        return y if y.dtype is dtype else y.to(dtype)

    def quick_product(self: Any, x: Tensor) -> Tensor | None:
        """`product_on_cpu` of an input like that of the last call, where nothing but this product can be meant.

        A layer of 128 x 128 takes 4 us in high precision, and the way through torch's dispatch half as much.
        """
        reader = self._reader
        if reader is None or reader.spec is not self.spec or type(x) is not Tensor:
            return None
        shape, dtype, extent, of_op = reader.last
        if (
            x.shape != shape
            or x.dtype is not dtype
            or not x.is_cpu
            or _is_grad_enabled()
            or _dispatch_modes()
            or _function_modes()
            or _is_any_autocast_enabled()
            or _has_transforms()
            or _is_traced()
        ):
            return None
        y = reader.multiplier.multiply(x, extent, None, self.codes, self.scale, self.zero_point)
        if of_op and y is not None:
            ran("weight_linear", "cpu")
        return y

    def product_in_tiles(self: Any, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The same by PyTorch's product with a decoded tile of rows at a time.

        In float32 it equals the product with `dequantize()` to the bit
        (`lowbit_kernels.weight_only.weight_mm_tiles_cpu` names an exception). In bfloat16 the tiles are rounded. None
        where no kernel can run.
        """
        from lowbit_kernels.weight_only.weight_mm_tiles_cpu import has_tokens_inside, linear

        with _PlainAttributes():
            found, n = kernel_of(self), self.shape[0]
        if found is None or has_tokens_inside(x):
            return None
        layout, parts = found
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
    reader = _reader_of(weight)
    layout = reader.layout
    if (
        layout is None
        or not reader.gives_rows
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
    layout = _reader_of(weight).layout
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
    if reader is not None and reader.spec is weight.spec:
        return reader
    with _PlainAttributes():
        codes = weight.codes
        is_plain = type(codes) is Tensor and codes.is_cpu and weight.stored_as in _LAYOUTS
        reader = Reader(weight, is_plain)
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
    scales = spec.scales
    scale_bytes = scales is not None and scales.is_byte and (dims == 2 or not scales.shared)
    if isinstance(fmt, LookupTable):
        return CodesFormat(fmt.bits, table=fmt.values, scale_bytes=scale_bytes)
    if not isinstance(fmt, Int):
        exponent = 4 if fmt.dtype is torch.float8_e4m3fn else 5
        return CodesFormat(fmt.bits, exponent=exponent, scale_bytes=scale_bytes)
    if not spec.has_zero_point:
        return CodesFormat(fmt.bits, fmt.quant_min)
    kind = "value" if spec.zero_point_is_value else "code"
    mid = (fmt.quant_min + fmt.quant_max + 1) // 2
    return CodesFormat(fmt.bits, fmt.quant_min, zero_point=kind, mid=mid)
