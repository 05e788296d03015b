"""A matrix in float8 (e4m3) with a scale for each 128 elements of a row, or for each tile of 128 x 128, and in the same
pass the transposed copy.

For products that sum over groups of 128 with a scale each (`block_scaled_mm`); DeepSeek-V3, arXiv 2412.19437, 3.3.
K' is K rounded up to a multiple of 128, M' the same of M. The codes of the padding are 0.

Groups (``tiles=False``), for activations and gradients:

    scale[g, m]    = max |x[m, 128 g .. 128 g + 127]| / 448          float32 [K'/128, M]
    codes[m, k]    = round(x[m, k] * (1 / scale[k // 128, m]))       float8_e4m3fn [M, K']
    scale_t[h, k]  = max |x[128 h .. 128 h + 127, k]| / 448          float32 [M'/128, K]
    codes_t[k, m]  = round(x[m, k] * (1 / scale_t[m // 128, k]))     float8_e4m3fn [K, M']

The groups of codes_t lie along M, as the product that sums over M needs them, so both copies are rounded on their own.
Scales of one group index lie beside each other, as the matrix units' kernels load them.

Tiles (``tiles=True``), for weights:

    scale[h, g]    = max of the 128 x 128 tile / 448                 float32 [M'/128, K'/128]
    codes          as above with the tile's scale                    float8_e4m3fn [M, K']
    scale_t        = scale transposed                                float32 [K'/128, M'/128]
    codes_t        = codes transposed                                float8_e4m3fn [K, M']

Both products of a weight then see the same rounded weight. A pair that is not requested (`rows`, `columns`) comes back
as [0, 0], [0, 0].

Weights may be a stack [..., M, K] of matrices, such as experts: all results then have these dimensions first.

With `offsets` (int32 [E]) the rows of x are tokens, sorted by expert, and offsets holds the end of each expert's, as
for `grouped_scaled_mm`. Groups of codes_t then lie within an expert:

    codes_t[k, place(m)]    the columns of experts as `grouped_columns` places them, float8_e4m3fn [K, P]
    scale_t                 float32 [P/128, K], where P is its `width` rounded up to a multiple of 128

Columns of codes_t and their scales after the last expert's, and the codes and scales of rows that no expert has, have
any values.

x is float32, bfloat16 or float16 with any strides. No scale is smaller than 2**-126. Codes and scales are bit for bit
those of ``lowbit``'s `Spec` with the same blocks. A group with a NaN or an infinity has scale NaN and codes 0, so that
its products are NaN. ``power_of_two`` rounds each scale up to a power of two, as float8_e8m0fnu (UE8M0) stores it.

Implementations: quantize_blocks_sm90.cu on GPUs of compute capability 9.0, PyTorch elsewhere. The kernel reads each
tile once: on an H200 it moves 4 bytes for each 16-bit element and two codes at 88 to 91% of the speed of a copy
(``benchmarks/LOG.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels.matmul import grouped_columns
from lowbit_kernels.quantize import quantize_blocks_sm90
from lowbit_kernels.quantize.quantize_rowcol import Result, encode
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op

BLOCK = 128
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
SMALLEST_SCALE = 2.0**-126


@op(
    "allocate(x, tiles, rows, columns, offsets)",
    planned=True,
    x="float [..., M, K]",
    offsets="int32 [E]",
    rules={
        "tiles or x.dim() == 2": (
            "without tiles x must be [M, K], got {tuple(x.shape)}; flatten leading dimensions first"
        ),
        "offsets is None or not tiles": "offsets are for groups, tiles=False; leave them out",
    },
)
def quantize_blocks(
    x: Tensor,
    *,
    tiles: bool,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
    offsets: Tensor | None = None,
) -> Result:
    """codes, scale, codes_t, scale_t; see the module's docstring."""
    *stack, m, k = x.shape
    out = allocate(x, tiles, rows, columns, offsets)
    if not (rows or columns):
        return out
    if offsets is not None:
        width = out[2].shape[1] if columns else 0
        spread = x.new_zeros((width + 1, k))
        if columns:
            spread.index_copy_(0, grouped_columns.places(offsets, m, width), x)
        codes, scale, _, _ = reference(x, False, rows, False, power_of_two, None)
        of_columns = reference(spread[:width], False, False, columns, power_of_two, None)
        return codes, scale, *of_columns[2:]
    if stack:
        for i, one in enumerate(x.flatten(0, -3)):
            alone = reference(one, tiles, rows, columns, power_of_two, None)
            for to, found in zip(out, alone, strict=True):
                if found.numel():
                    to.view(-1, *found.shape)[i].view(torch.uint8).copy_(found.view(torch.uint8))
        return out
    # [M'/128, 128, K'/128, 128]: the padding of zeros changes no maximum
    blocks = F.pad(x.to(torch.float32), (0, -k % BLOCK, 0, -m % BLOCK))
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    for wanted, at, within in ((rows, 0, (3,)), (columns, 2, (1,))):
        if not wanted:
            continue
        scale = _scale(blocks, (1, 3) if tiles else within, power_of_two)
        codes = encode(blocks, scale, "e4m3", None).flatten(2).flatten(0, 1)
        codes, scale = codes.view(torch.uint8), scale.squeeze(within[0])
        if at == 0:
            scale = scale.squeeze(1) if tiles else scale.flatten(0, 1)[:m].t()
            codes = codes[:m]
        else:
            scale = scale.squeeze(2).t() if tiles else scale.flatten(1)[:, :k]
            codes = codes[:, :k].t()
        out[at].view(torch.uint8).copy_(codes)
        out[at + 1].copy_(scale)
    return out


reference = quantize_blocks.reference


def _scale(blocks: Tensor, within: tuple[int, ...], power_of_two: bool) -> Tensor:
    """The scale of each block, with the dimensions `within` of it kept as 1."""
    if blocks.numel() == 0:
        shape = [1 if dim in within else size for dim, size in enumerate(blocks.shape)]
        return blocks.new_ones(shape)
    found = blocks.abs().amax(within, keepdim=True)
    # The divisor is a tensor, since CUDA multiplies by the reciprocal of a Python number.
    scale = (found / torch.full_like(found, LARGEST)).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return torch.where(found.isfinite(), scale, torch.nan)


def blocks_of(size: int) -> int:
    """How many blocks of 128 hold `size` elements."""
    return -(-size // BLOCK)


def results_of(
    shape: Sequence[int], tiles: bool, rows: bool, columns: bool, experts: int | None = None
) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """codes, scale, codes_t and scale_t for x [..., m, k]; `experts`: of the tokens, or None."""
    found: list[Buffer] = []
    *stack, m, k = shape
    columns_t = m if experts is None else grouped_columns.width(m, experts)
    for wanted, across, along in ((rows, m, k), (columns, k, columns_t)):
        groups = blocks_of(along)
        codes, scale = (across, groups * BLOCK), (groups, across)
        if tiles:
            scale = (blocks_of(across), groups)
        found.append(Buffer((*stack, *codes) if wanted else (0, 0), E4M3))
        found.append(Buffer((*stack, *scale) if wanted else (0, 0), torch.float32))
    return found[0], found[1], found[2], found[3]


def allocate(
    x: Tensor, tiles: bool, rows: bool, columns: bool, offsets: Tensor | None = None
) -> Result:
    """Uninitialised results."""
    experts = None if offsets is None else offsets.shape[0]
    codes, scale, codes_t, scale_t = results_of(x.shape, tiles, rows, columns, experts)
    return codes.empty(x), scale.empty(x), codes_t.empty(x), scale_t.empty(x)


@quantize_blocks.kernel
def _launch(x, tiles, rows, columns, power_of_two, offsets) -> Result | None:
    if x.numel() and (rows or columns) and nvrtc.runs_on_hopper(x.device):
        ran("quantize_blocks", "sm90")
        # rows do not depend on the expert
        experts = offsets.shape[0] if columns and offsets is not None else None
        results = results_of(x.shape, tiles, rows, columns, experts)
        return quantize_blocks_sm90.quantize(
            x, tiles, rows, columns, power_of_two, offsets, results
        )
    return None
