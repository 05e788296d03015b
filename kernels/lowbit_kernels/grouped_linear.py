"""Tokens sorted by expert, each by its expert's weight of 4 or 8 bits.

    out[m] = the product of `weight_linear` of x[m] and expert e's weight,  for offsets[e - 1] <= m < offsets[e]

    x           bfloat16, float16 or float32 [M, K]
    packed      int4_grouped_linear: uint8 [E, N, ceil(Kp / 2)];  codes of int8_grouped_linear: int8 [E, N, Kp]
    scale       float32, bfloat16 or float16 [E, N, Kp / G]
    zero_point  int8 [E, N, Kp / G], or None for 0
    offsets     int32 [E], on x's device: where each expert's tokens end, as ``torch._grouped_mm`` has them; ascending,
                0 to M. Their values aren't checked, which would wait for a GPU (``lowbit.inference.grouped_linear``
                checks where the host reads them): of others, tokens go to any expert, or get zeros
    out         x's dtype [M, N], contiguous; rows from the last offset on are 0

On GPUs one launch of a Triton kernel: its grid is the most tiles of tokens that any offsets can make, and a program
reads from the offsets which expert its tile is of, or that there is none. So nothing waits for the host, and the
offsets may change between replays of a CUDA graph. The weight is never rounded. Groups that aren't multiples of 32 or
whole rows, and CPUs, take a loop over the experts, which on a GPU waits for the offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowbit_kernels import weight_linear, weight_mm_triton
from lowbit_kernels.library import LIBRARY, check_one_device
from lowbit_kernels.triton_runtime import jit, runs_on, stored_dtype, tl, triton
from lowbit_kernels.weight_mm_triton import sums_of_blocks

MOST_ROWS = 64  # of a tile


def int4_grouped_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int,
) -> Tensor:
    """Tokens by their experts' int4 weights; shapes, dtypes and the formula are in the module's docstring.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: shapes that don't fit each other.
    """
    return torch.ops.lowbit.int4_grouped_linear(x, packed, scale, zero_point, offsets, group_size)


def int8_grouped_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    *,
    group_size: int,
) -> Tensor:
    """Tokens by their experts' int8 weights; arguments and errors as of `int4_grouped_linear`."""
    return torch.ops.lowbit.int8_grouped_linear(x, codes, scale, zero_point, offsets, group_size)


def reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    group_size: int,
) -> Tensor:
    """The formula in float64, on any device, for either op."""
    return _loop(weight_linear.reference, x, codes, scale, zero_point, offsets, group_size)


def _loop(linear, x, codes, scale, zero_point, offsets, group_size) -> Tensor:
    out = x.new_zeros((x.shape[0], codes.shape[1]))
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            zero = None if zero_point is None else zero_point[e]
            out[start:end] = linear(x[start:end], codes[e], scale[e], zero, None, None, group_size)
        start = max(start, end)
    return out


@jit
def _find(offsets, m, experts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a tile: its expert (`experts` where there is none), which of its tiles it is, where its tokens begin, end."""
    every = tl.arange(0, EXPERTS)
    ends = tl.minimum(tl.load(offsets + every, mask=every < experts, other=0), m)
    inside = (every > 0) & (every < experts)
    starts = tl.minimum(tl.load(offsets + every - 1, mask=inside, other=0), m)
    tiles = tl.maximum(tl.where(every < experts, ends - starts, 0), 0)
    tiles = (tiles + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(every < expert, tiles, 0), 0)
    start = tl.sum(tl.where(every == expert, starts, 0), 0)
    end = tl.sum(tl.where(every == expert, ends, 0), 0)
    return expert, tile - first, start, end


@jit
def _kernel(
    x,
    codes,
    scale,
    zero_point,
    offsets,
    out,
    m,
    n,
    k,
    experts,
    width,
    x_stride,
    codes_expert,  # distance of experts
    codes_stride,
    scale_expert,
    scale_stride,
    zero_expert,
    zero_stride,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    expert, tile, start, end = _find(offsets, m, experts, tile, EXPERTS, BLOCK_M)
    if expert < experts:
        rows = start.to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        row_inside, column_inside = rows < end, columns < n
        e = expert.to(tl.int64)
        zero_rows = zero_point
        if zero_point is not None:
            zero_rows = zero_point + e * zero_expert + columns * zero_stride
        sums = sums_of_blocks(
            x + rows * x_stride,
            row_inside,
            codes + e * codes_expert + columns * codes_stride,
            scale + e * scale_expert + columns * scale_stride,
            zero_rows,
            column_inside,
            0,
            k,
            k,
            width,
            GROUP_SIZE,
            BITS,
            WORD,
            BLOCK_K,
        )
        at = rows[:, None] * n + columns[None, :]
        wanted = row_inside[:, None] & column_inside[None, :]
        tl.store(out + at, tl.trans(sums).to(out.dtype.element_ty), mask=wanted)


def _launch(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    group_size: int,
    bits: int,
) -> Tensor:
    _check(x, codes, scale, zero_point, offsets, group_size, bits)
    op = f"int{bits}_grouped_linear"
    weight_linear.calls[op] += 1
    (m, k), (experts, n, groups), dtype = x.shape, scale.shape, x.dtype
    if 0 in (m, n, k, experts):
        return x.new_zeros((m, n))
    block = weight_mm_triton.block_of_k(group_size, groups)
    if not (runs_on(x.device) and block):
        linear = getattr(torch.ops.lowbit, f"int{bits}_linear")
        return _loop(linear, x, codes, scale, zero_point, offsets, group_size)
    weight_linear.calls[f"{op} triton"] += 1
    if x.device.type == "cpu":  # the interpreter has no bfloat16
        x = x.float()
    x, codes, scale = (
        part if part.stride(-1) == 1 else part.contiguous() for part in (x, codes, scale)
    )
    zeros = None if zero_point is None else zero_point.contiguous()
    words, word = weight_mm_triton.words_of(codes, bits, block)
    out = x.new_zeros((m, n), dtype=stored_dtype(dtype, x.device))
    rows = max(16, min(MOST_ROWS, triton.next_power_of_2(-(-m // experts))))
    with torch.cuda.device_of(x):
        _kernel[(min(m, m // rows + experts), triton.cdiv(n, 64))](
            *(x, words, scale, zeros, offsets.contiguous(), out),
            *(m, n, k, experts, words.shape[2], x.stride(0)),
            *(*words.stride()[:2], *scale.stride()[:2], *(n * groups, groups)),
            GROUP_SIZE=0 if groups == 1 else group_size,
            BITS=bits,
            WORD=word,
            EXPERTS=triton.next_power_of_2(experts),
            BLOCK_M=rows,
            BLOCK_N=64,
            BLOCK_K=block,
            num_warps=4,
            num_stages=3,
        )
    return out.to(dtype)


def _fake(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    group_size: int,
    bits: int,
) -> Tensor:
    _check(x, codes, scale, zero_point, offsets, group_size, bits)
    return x.new_empty((x.shape[0], codes.shape[1]))


def _check(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    offsets: Tensor,
    group_size: int,
    bits: int,
) -> None:
    check_one_device(x=x, codes=codes, scale=scale, zero_point=zero_point, offsets=offsets)
    if x.dim() != 2 or codes.dim() != 3 or scale.dim() != 3:
        raise ValueError(
            f"int{bits}_grouped_linear takes x [M, K], codes [E, N, .] and scale [E, N, Kp/G], got {tuple(x.shape)}, "
            f"{tuple(codes.shape)} and {tuple(scale.shape)}"
        )
    if scale.shape[0] != codes.shape[0]:
        raise ValueError(f"codes are of {codes.shape[0]} experts, scales of {scale.shape[0]}")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(
            f"zero_point must have the shape of scale, {tuple(scale.shape)}; got {tuple(zero_point.shape)}"
        )
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets must be torch.int32, got {offsets.dtype}")
    if offsets.shape != codes.shape[:1]:
        raise ValueError(
            f"offsets must have the shape ({codes.shape[0]},), got {tuple(offsets.shape)}"
        )
    # one expert's, by shape and dtype alone
    one, its_scale = (part.new_empty(part.shape[1:], device="meta") for part in (codes, scale))
    zero = None if zero_point is None else zero_point.new_empty(scale.shape[1:], device="meta")
    weight_linear.check(x.to("meta"), one, its_scale, zero, None, None, group_size, bits)


for _bits, _codes in ((4, "packed"), (8, "codes")):
    _name = f"int{_bits}_grouped_linear"
    LIBRARY.define(
        f"{_name}(Tensor x, Tensor {_codes}, Tensor scale, Tensor? zero_point, Tensor offsets, int group_size) "
        "-> Tensor"
    )
    LIBRARY.impl(_name, partial(_launch, bits=_bits), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowbit::{_name}", partial(_fake, bits=_bits), lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    tokens: tuple[int, ...]  # of each expert
    n: int
    k: int
    group_size: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.bfloat16
    zero_point: bool = False
    beyond: int = 0  # tokens after the last expert's
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, codes, scale, zero_point, offsets, group_size."""
        m, experts = sum(self.tokens) + self.beyond, len(self.tokens)
        one = weight_linear.Case("", 0, experts * self.n, self.k, self.group_size, self.bits)
        _, codes, scale, *_ = one.arguments(device)
        shape = (experts, self.n, scale.shape[1])
        zero_point = torch.randint(-8, 8, shape, dtype=torch.int8, device=device)
        return (
            torch.randn(m, self.k, device=device).to(self.dtype),
            codes.view(experts, self.n, -1) if codes.numel() else codes.view(experts, self.n, 0),
            scale.view(shape).to(self.scale_dtype),
            zero_point if self.zero_point else None,
            torch.tensor(self.tokens, device=device).cumsum(0).to(torch.int32),
            self.group_size,
        )


SHAPES: list[tuple[str, tuple[int, ...], int, int, int, dict]] = [
    ("typical", (5, 17, 1, 9), 48, 256, 128, {}),
    ("empty-experts", (0, 3, 0, 0, 20, 0), 33, 160, 32, {"zero_point": True}),
    ("one-expert", (7,), 24, 128, 64, {}),
    ("beyond", (2, 3), 24, 130, 64, {"beyond": 4, "zero_point": True}),
    ("nothing-but-beyond", (0, 0), 16, 64, 32, {"beyond": 3}),
    ("per-row", (3, 40, 2), 17, 99, 99, {"dtype": torch.float16, "scale_dtype": torch.float32}),
    ("fp32", (3, 4, 2), 17, 96, 32, {"dtype": torch.float32}),
    ("odd-group", (3, 4), 9, 45, 9, {}),
    ("no-tokens", (0, 0), 8, 64, 32, {}),
]
CASES = [
    *(Case(name, t, n, k, group, **options) for name, t, n, k, group, options in SHAPES),
    *(
        Case(f"int8-{name}", t, n, k, group, 8, **options)
        for name, t, n, k, group, options in SHAPES
    ),
    Case("mixtral-up", (2,) * 8, 14336, 4096, 128, large=True),
    Case("mixtral-up-many", (256,) * 8, 14336, 4096, 128, large=True),
]
