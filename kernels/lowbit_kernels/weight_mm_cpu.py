"""Few bfloat16 tokens by a weight of 4 or 8 bits on a CPU, by torch's own kernels for packed weights.

``aten::_weight_int4pack_mm_for_cpu`` wants nibbles in an order of its own. A weight is packed at its first product
(50 ms for 4096 x 4096), and the packed copy, as large as the weight, lives beside it as long as the weight's memory
does; it is never saved. Changing the codes or scales in place packs anew: torch's version counter says so. ``.data``
hides it, as it does from autograd, and so does the inside of a ``__torch_dispatch__``, where views have counters of
their own: who writes there calls `forget`.
``aten::_weight_int8pack_mm`` reads the codes as they are; it crashes on memory that isn't aligned, as in a file that is
mapped, of which an aligned copy is kept in the same way.

Both sum exact products in float32 and round once. They take scales of x's dtype only, so that other scales, and zero
points, which are rounded to it, go without them. Measured on one core of an EPYC with AVX-512 (bfloat16, 4096 x 4096,
milliseconds, for 1, 8, 16, 32, 64 and 512 tokens; ``benchmarks/LOG.md``):

    int4, torch's kernel          0.9    3.2    6.9     13     26    203
    int4, dequantized in chunks    11     16     12     15     20     97
    int8, torch's kernel          1.1    3.9    8.3     17     33    251
    int8, dequantized in chunks   3.9    9.0    8.9     11     16     90

In float32 torch's kernels aren't vectorized: 29 (int4) and 14 ms (int8) for each token, where chunks take 11 and 4 ms
for one and 17 and 9 for eight. So they serve bfloat16 only, up to the numbers of tokens below.
``aten::_dyn_quant_matmul_4bit`` quantizes the activations and is another function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowbit_kernels.library import aligned

MOST_TOKENS = {4: 32, 8: 16}
GROUPS = (256, 128, 64, 32)  # that the int4 kernel takes
ALIGNED = 64  # bytes: a vector of AVX-512

# Where codes (and scale) lie: their versions, and the packed weight, its scales and zeros; or the aligned codes.
_packed: dict[tuple, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}


def takes(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> bool:
    """Whether `weight_mm` multiplies these."""
    (m, k), (n, groups) = x.shape, scale.shape
    fits = (
        x.device.type == "cpu"
        and x.dtype == scale.dtype == torch.bfloat16
        and zero_point is None
        and m <= MOST_TOKENS[bits]
        and k == groups * group_size
        and k % 32 == 0  # _weight_int8pack_mm crashes on some others
        and codes.is_contiguous()
    )
    hidden = codes.is_inference() or scale.is_inference()  # nothing tells when they change
    if not fits or bits == 8:
        return fits and groups == 1 and (_is_aligned(codes) or not hidden)
    return n % 16 == 0 and group_size % 32 == 0 and not hidden


def weight_mm(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> Tensor:
    """The product of `weight_linear`, of operands that it `takes`. Bias and residual are added with a rounding each."""
    x = aligned(x, ALIGNED)
    if bits == 8:
        if not _is_aligned(codes):
            (codes,) = _kept((codes,), lambda: (codes.detach().clone(),))
        out = torch.ops.aten._weight_int8pack_mm(x, codes, scale[:, 0].contiguous())
    else:
        group = next(g for g in GROUPS if group_size % g == 0)
        repeats = group_size // group
        weight, scales = _kept((codes, scale), lambda: _pack(codes, scale, repeats))
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group, scales)
    for part in (bias, residual):
        if part is not None:
            out.add_(part)
    return out


def _pack(codes: Tensor, scale: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    """The packed weight, and its scales and zeros [groups, N, 2], each group's scale `repeats` times."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(torch.int32)
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    scales = scale.detach().t().repeat_interleave(repeats, 0)
    return weight, torch.stack([scales, torch.zeros_like(scales)], dim=-1)


def _kept(parts: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `make` makes of these parts of a weight, made once."""
    versions = tuple(part._version for part in parts)
    place = tuple(map(_place, parts))
    kept = _packed.get(place)
    if kept is None or kept[0] != versions:
        kept = _packed[place] = (versions, make())
        for part in parts:  # not the tensor, which may be a view that dies first
            weakref.finalize(part.untyped_storage(), _packed.pop, place, None).atexit = False
    return kept[1]


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGNED == 0


def _place(x: Tensor) -> tuple[Any, ...]:
    """The same for every view of the same elements; a weak reference to their memory is part of it."""
    return StorageWeakRef(x.untyped_storage()), x.storage_offset(), tuple(x.shape), x.stride()


def forget(*written: Tensor) -> None:
    """Pack weights anew whose codes or scales lie, in whole or in part, in the memory of these tensors."""
    storages = {StorageWeakRef(t.untyped_storage()) for t in written} if _packed else set()
    for place in list(_packed):
        if any(storage in storages for storage, *_ in place):
            _packed.pop(place, None)
