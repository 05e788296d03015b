"""What rounding to nearest lost in an int8 weight that a program averages.

A loop such as `average.copy_(decay * average + (1 - decay) * weight)` reads the average by arithmetic, and copies plain
values into it. With a decay of 0.999 a value moves by far less than half a code in each turn, so that rounded to
nearest it would never move. Such a copy therefore keeps the remainder beside the codes, and the next arithmetic reads
codes and remainder. Products, state dicts and collectives see the codes alone, which are the nearest to the average.

    remainder   int16, an element each: (value / scale - code) * 2**16

Arithmetic that reads a weight without gradients begins this: within torch.no_grad, or of a detached weight, as
AveragedModel hands it to `avg_fn`. An update ends it, and so does a copy of an int8 weight without a remainder. A
weight that is trained or loaded has none: nothing is computed from it and then copied into it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

UNITS = 2**16
"""Units of a remainder in a code."""
_REMAINDERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The remainders by the codes, which all views of a parameter share; None before the first copy."""


def expect(weight: Any) -> None:
    """Arithmetic reads `weight`, an `Int8WeightTensor`: the next copy of plain values keeps a remainder."""
    codes, differentiated = weight.codes, weight.requires_grad and torch.is_grad_enabled()
    if type(codes) is not Tensor or differentiated or torch.compiler.is_compiling():
        return
    if codes not in _REMAINDERS:
        _REMAINDERS[codes] = None


def of(codes: Tensor) -> Tensor | None:
    """The remainder, int16 of the weight's shape; None where there is none."""
    found: Tensor | None = _REMAINDERS.get(codes) if _REMAINDERS else None
    return found


def keep(weight: Any, values: Tensor) -> None:
    """`weight`, an `Int8WeightTensor`, has rounded `values` of its shape. Keep the remainder if it is expected."""
    codes = weight.codes
    if not _REMAINDERS or codes not in _REMAINDERS:
        return
    if values.dtype in (torch.bfloat16, torch.float16):
        warnings.warn(
            f"an average of int8 weights is computed in {values.dtype}, where steps below half a unit in the last "
            "place are lost, as for plain weights of this dtype. Use AveragedModel(model, multi_avg_fn="
            "get_ema_multi_avg_fn(decay)) or average.lerp_(weight, 1 - decay), which compute in float32",
            stacklevel=1,  # this line, so that all weights together warn once
        )
    rest = (values.float() / weight.spread_scale() - weight.unpacked()).mul_(UNITS).round_()
    limits = torch.iinfo(torch.int16)
    rest = rest.nan_to_num_(0.0).clamp_(limits.min, limits.max)
    _REMAINDERS[codes] = rest.to(torch.int16)


def restore(codes: Tensor, rest: Tensor) -> None:
    """The weight with these codes has this remainder, int16 of its shape."""
    _REMAINDERS[codes] = rest


def share(codes: Tensor, other: Tensor) -> None:
    """`other` are the same codes in a copy of the weight."""
    rest = of(codes)
    if rest is None or type(other) is not Tensor:
        forget(other)
    else:
        _REMAINDERS[other] = rest.to(other.device)  # nothing writes to a remainder


def forget(codes: Tensor) -> None:
    """The weight with these codes has other values now."""
    if _REMAINDERS:
        _REMAINDERS.pop(codes, None)
