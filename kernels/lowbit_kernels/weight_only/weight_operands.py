"""Descriptions of the operands of a product with a low-bit weight: everything that its plan depends on, no values.

An op describes its tensors at each call and looks up the plan of this description. It checks and plans only
descriptions that it has not seen. An implementation reads the same descriptions, so it plans a product without tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_kernels.runtime.library import contiguous_strides
from lowbit_kernels.runtime.sources import FLOAT_MACROS
from lowbit_kernels.weight_only.codes_format import CodesFormat, format_of

HALVES = (torch.bfloat16, torch.float16)
GROUP_STEP = 32
"""The fast kernels of `weight_linear` take groups of a multiple of this size, or one scale a row."""
E4M3 = torch.float8_e4m3fn

SCALE_MACROS = {**FLOAT_MACROS, torch.uint8: "E8M0", E4M3: "E4M3"}
"""Names of the dtypes of scales in the CUDA sources."""

STORED_BITS = "(4 if codes.dtype == torch.uint8 else 8)"
"""In a rule, the bits of a code where an op gives none, as `codes_format.bits_of`."""


WIDTH = f"-(-groups * group_size * (bits or {STORED_BITS}) // 8)"
"""In a rule, the bytes of a row's codes."""

FORMAT_RULES = {
    "0 <= bits <= 8 and (codes.dtype == torch.uint8 or bits in (0, 8))": (
        "bits must be 0 (4 for uint8 codes, else 8) or, of a bit stream in uint8, 1 to 8; got {bits} for {codes.dtype}"
    ),
    f"not table or (codes.dtype == torch.uint8 and len(table) == 2 ** (bits or {STORED_BITS}))": (
        f"a table goes with uint8 codes and has a number for each code of {{bits or {STORED_BITS}}} bits; got "
        "{len(table)} for {codes.dtype}"
    ),
    "table or codes.dtype != torch.uint8 or bits < 8 or (zero_point is not None and zero_point.dtype != torch.int8)": (
        "uint8 codes of 8 bits begin at 0 and take a zero_point in uint8 or floats; signed codes of 8 bits are int8"
    ),
    "zero_point is None or not (table or codes.dtype.is_floating_point)": (
        "codes of a table and float8 codes take no zero_point"
    ),
    "zero_point is None or zero_point.dtype != torch.uint8 or codes.dtype == torch.uint8": (
        "zero_point must be int8 for int8 codes, which begin below 0; got torch.uint8"
    ),
    "global_scale is None or scale.dtype == torch.float8_e4m3fn": (
        "global_scale goes with a scale of torch.float8_e4m3fn; got one of {scale.dtype}"
    ),
    "group_size >= 1": "group_size must be 1 or more elements, got {group_size}",
    f"W == {WIDTH}": (
        "a scale of shape {tuple(scale.shape)} with group_size {group_size} takes {codes.dtype} codes of shape "
        f"{{(*codes.shape[:-1], {WIDTH})}}, got {{tuple(codes.shape)}}"
    ),
}
"""Rules of ops that take every format of `codes_format`."""
FORMAT_OPERANDS: dict[str, Any] = {  # strings; Any, since they are passed on by **
    "codes": "uint8|codes [N, W]; uint8 holds a bit stream of codes, flatten leading dimensions first",
    "scale": "float|uint8|float8_e4m3fn [N, groups]; uint8 is e8m0",
    "zero_point": "int8|uint8|float [N, groups]; integers lie on the grid of the codes, floats are values",
    "global_scale": "float32 [] or [1] or [1, 1]",
}
"""The tensors of every format, for the declarations of these ops."""
SIZE_RULE = {
    "0 <= size <= groups * group_size": "size must be 0..{groups * group_size}, the codes of a row; got {size}"
}
"""The rule of the elements of a row without the padding."""
K_RULE = {
    "(groups - 1) * group_size < K <= groups * group_size or not (K or groups)": (
        "x has K = {K}, but {groups} groups of {group_size} hold a K of {max((groups - 1) * group_size + 1, 0)} to "
        "{groups * group_size}"
    )
}
"""The rule of products of x [..., K] and such codes."""
ADDEND_TYPES = {
    f"{name} is None or {name}.dtype == x.dtype": (
        f"{name} must be of x's dtype, {{x.dtype}}; got {{{name}.dtype}}"
    )
    for name in ("bias", "residual")
}
"""What products of x require of the dtypes of bias and residual."""

ALIGNMENT = 16  # bytes: the widest load of any kernel, and the requirement of the TMA

Tensors = tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
]
"""x, codes, scale, zero_point, bias, residual, token_scale and global_scale of a product."""

Product = Callable[[Tensors], Tensor]
"""A planned product."""


class TensorLayout(NamedTuple):
    """Shape, strides (in elements), dtype and device of a tensor, and its address modulo ALIGNMENT."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misaligned: int

    @property
    def is_contiguous(self) -> bool:
        """As ``Tensor.is_contiguous``: strides of dimensions of size 1 do not matter."""
        wanted = contiguous_strides(self.shape)
        each = zip(self.shape, self.strides, wanted, strict=True)
        return all(size == 1 or own == other for size, own, other in each)

    @property
    def is_aligned(self) -> bool:
        """True if `library.aligned` returns the tensor itself."""
        return self.is_contiguous and self.misaligned == 0

    def copied(self, shape: tuple[int, ...] | None = None) -> TensorLayout:
        """The layout of a contiguous copy, in this shape or another one."""
        shape = self.shape if shape is None else shape
        return TensorLayout(shape, contiguous_strides(shape), self.dtype, self.device, 0)

    def contiguous(self, shape: tuple[int, ...]) -> TensorLayout:
        """The layout of ``reshape(shape).contiguous()``, which copies only a tensor with gaps."""
        return self.copied(shape)._replace(misaligned=self.misaligned if self.is_contiguous else 0)

    def rows(self) -> TensorLayout | None:
        """The layout of a view [M, K] of this [..., K]; None where that takes a copy, or its columns have gaps, also a
        single one: callers copy such a view."""
        *leading, last = self.shape
        count, step, expected = 1, last, None
        for size, stride in zip(reversed(leading), reversed(self.strides[:-1]), strict=True):
            count *= size
            if size == 1:
                continue
            if expected is None:
                step = stride
            elif stride != expected:
                return None
            expected = stride * size
        if self.strides[-1] != 1 and not self.is_contiguous:
            return None
        return self._replace(shape=(count, last), strides=(step, 1))


Description = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device, int]


def described(t: Tensor) -> Description:
    """The fields of the tensor's `TensorLayout` as a plain tuple, the cheapest key for a cache of plans."""
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT


def all_described(*tensors: Tensor | None) -> tuple[Description | None, ...]:
    """Each of them `described`; None for None."""
    return tuple([None if t is None else described(t) for t in tensors])


def layout(t: Tensor | None) -> TensorLayout | None:
    """The tensor's `TensorLayout`; None for None."""
    return None if t is None else TensorLayout(*described(t))


def all_layouts(descriptions: Iterable[Description | None]) -> list[Any]:
    """The `TensorLayout` of each of them; None for None."""
    return [None if one is None else TensorLayout(*one) for one in descriptions]


class Gate(NamedTuple):
    """What a product does with its two halves of outputs, gate and up (`gated_linear`).

    Attributes:
        activation: of the gate.
        eps: of the RMS norm of x, whose factor comes first; None: there is no norm.
    """

    activation: str
    eps: float | None = None


class WeightOperands(NamedTuple):
    """Operands of one product: x [M, K]; codes, scale, zero_point and bias as in `weight_linear`; residual [M, N].

    token_scale: float32 [M], multiplied into the sums; out: the dtype of the result, the bias and the residual. Bias,
    residual and token_scale are contiguous. format: that of the codes and scales; an implementation declines the ones
    that it doesn't take. rounds: torch.int8 or torch.float8_e4m3fn where the kernel rounds x to codes with a scale a
    token. exact: sums of int8 products are int32 alone. gate: the rows of codes are those of a gate and of up.
    """

    x: TensorLayout
    codes: TensorLayout
    scale: TensorLayout
    zero_point: TensorLayout | None
    bias: TensorLayout | None
    residual: TensorLayout | None
    token_scale: TensorLayout | None
    group_size: int
    out: torch.dtype
    format: CodesFormat
    global_scale: TensorLayout | None = None
    rounds: torch.dtype | None = None
    exact: bool = False
    gate: Gate | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        zero_point: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        token_scale: Tensor | None = None,
        global_scale: Tensor | None = None,
        *,
        group_size: int,
        out: torch.dtype | None = None,
        bits: int = 0,
        table: tuple[float, ...] = (),
        rounds: torch.dtype | None = None,
    ) -> WeightOperands:
        """The operands of a product of these tensors; x and residual are matrices already."""
        tensors = x, codes, scale, zero_point, bias, residual, token_scale
        zeros = None if zero_point is None else zero_point.dtype
        format = format_of(codes.dtype, scale.dtype, zeros, bits, table)
        last = group_size, out or x.dtype, format, layout(global_scale), rounds, False, None
        return cls._make((*map(layout, tensors), *last))

    @property
    def m(self) -> int:
        return self.x.shape[0]

    @property
    def k(self) -> int:
        return self.x.shape[1]

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def numbers(self) -> torch.dtype:
        """The dtype in which x is multiplied: float16 holds codes of e4m3, and so does bfloat16, for a table."""
        if self.rounds != E4M3:
            return self.x.dtype
        return torch.bfloat16 if self.format.table else torch.float16

    @property
    def bits(self) -> int:
        return self.format.bits

    @property
    def padded_k(self) -> int:
        """K as the codes have it, padded to whole groups (and to whole bytes)."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def groups(self) -> int:
        return self.scale.shape[1]

    @property
    def group(self) -> int:
        """The group size; 0 where a row has one scale."""
        return 0 if self.groups == 1 else self.group_size

    @property
    def has_aligned_scales(self) -> bool:
        """True if kernels can read scale and zero point without a copy."""
        return self.scale.is_aligned and (self.zero_point is None or self.zero_point.is_aligned)


def addresses(*tensors: Tensor | None) -> list[int]:
    """Their addresses; 0 for None, a null pointer."""
    return [0 if t is None else t.data_ptr() for t in tensors]
