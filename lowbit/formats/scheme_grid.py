"""The grid of a format as a scheme: the format then stores the weights that QAT trains, to the bit.

A grid is the set of values that a weight can take. Codes, zero points and the dtype of scales decide it. Scales have
the dtype of the weight unless the scheme names another, and several formats store float16 only. GGUF's Q4_1 stores the
smallest value of each group in place of a zero point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.convert import check_schemes
from lowbit.formats.base import Format, FormatError
from lowbit.formats.registry import target
from lowbit.numerics.granularity import PerGroup
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.affine_tensor import AffineTensor

SchemeOrPatterns = TypeVar("SchemeOrPatterns", Scheme, Mapping[str, Scheme | None])
_ROWS, _COLUMNS = 256, 256
"""The least size of the weight that `grid` tries."""


def grid(format: str, scheme: SchemeOrPatterns) -> SchemeOrPatterns:
    """`scheme` with the scales that a format stores. Weights that `lowbit.qat.prepare_` trains by it are exported to
    the bit.

        scheme = lowbit.formats.grid("gptq", lowbit.Int4WeightOnly(128))    # float16 scales
        lowbit.qat.prepare_(model, scheme)                                  # model may be float32 or bfloat16

    Args:
        format: a name of `lowbit.formats.names()`.
        scheme: a Scheme, or a dict of patterns to a Scheme or None. A `scale_dtype` of its own stays.

    Raises:
        FormatError: an unknown format; a scheme whose weights the format cannot hold. `grid` tries a small weight, but
            not for programs ("aoti", "executorch", "onnx").
        TypeError: not a Scheme.
    """
    found = target(format)
    given: Mapping[str, Scheme | None] = scheme if isinstance(scheme, Mapping) else {"*": scheme}
    check_schemes(scheme, Scheme)
    made = {pattern: None if one is None else found.grid(one) for pattern, one in given.items()}
    if isinstance(found, Format):
        for one in made.values():
            if one is not None:
                _check(found, one)
    return made if isinstance(scheme, Mapping) else made["*"]  # type: ignore[return-value]


def _check(format: Format, scheme: Scheme) -> None:
    """Raise FormatError if the format holds no weight of this scheme."""
    shapes: list[tuple[int, ...]] = [(_ROWS, _columns(scheme))]
    if format.holds_stacks:
        shapes.append((2, *shapes[0]))
    reason = ""
    for shape in shapes:
        try:
            format.encode(example(shape, scheme))
        except FormatError as error:
            reason = reason or str(error)
        else:
            return
    raise FormatError(f"{format.name} cannot hold weights of this scheme: {reason}")


def _columns(scheme: Scheme) -> int:
    """A number of inputs that every group of the scheme, and of formats, divides."""
    sizes = scheme.weight.granularity
    group = sizes.group_size if isinstance(sizes, PerGroup) else 1
    return math.lcm(group, _COLUMNS)


def example(
    shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype = torch.float32
) -> AffineTensor:
    """A weight of this dtype with both signs in each group."""
    values = ((torch.arange(math.prod(shape)) * 5 % 17 - 8.25).view(shape) / 64).to(dtype)
    of_input: tuple[Tensor, Tensor | None] | None = None
    if scheme.activation is not None and scheme.is_static:
        spec = replace(scheme.activation, static=False)
        of_input = spec.choose_qparams(values[:1, :1].flatten(0, -2), torch.float32)
    return AffineTensor.from_float(values, scheme, input_qparams=of_input)
