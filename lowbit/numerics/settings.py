"""The checks of one option: a number, a flag, a choice. Each gives the value back, or raises an error that names the
option and the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_whole(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """`value` as an int, if it is a whole number from `least` to `most`, numpy's too. Raises ValueError with the `name`
    for anything else."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        accepted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {accepted}, got {value!r}")
    return int(value)


def is_whole(value: Any) -> bool:
    """True for an int and for a whole number of numpy, and not for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_nonnegative(name: str, value: Any) -> float:
    """A number of at least 0 (or a tensor that holds one) as a float. Raises for anything else."""
    check_number(name, value)
    if not (value >= 0.0 and value < math.inf):  # also for NaN
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """A number above 0 as a float. Raises for anything else."""
    number = check_nonnegative(name, value)
    if not number > 0.0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return number


def check_below_one(name: str, value: Any) -> float:
    """A number in [0, 1) as a float. Raises for anything else."""
    number = check_nonnegative(name, value)
    if not number < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    return number


def check_finite(name: str, value: Any) -> float:
    """A finite number as a float. Raises for anything else."""
    check_number(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def check_number(name: str, value: Any) -> None:
    """Raise unless `value` is a real number, or a tensor that holds one."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}"
            )
        is_number = value.dtype != torch.bool and not value.is_complex() and not value.is_meta
    else:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_numbers(
    name: str, values: Any, *, count: int, each: Callable[[str, Any], float], of: str = ""
) -> tuple[float, ...]:
    """Several numbers as floats. Raises for anything else.

    Args:
        name: of the option, for messages.
        values: the option, a sequence such as a tuple, a list or the list of a config of omegaconf.
        count: how many numbers there must be, two or three.
        each: the check of one number.
        of: the range of the numbers, for messages: " in [0, 1)".
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        words = {2: "two", 3: "three"}[count]
        raise ValueError(f"{name} must be {words} numbers{of}, got {values!r}")
    return tuple(each(f"{name}[{i}]", value) for i, value in enumerate(values))


def check_flag(name: str, value: Any, *, or_none: bool = False) -> Any:
    """`value` if it is True or False, or None where that is accepted too. Raises for anything else."""
    if not isinstance(value, bool) and not (or_none and value is None):
        accepted = "True, False or None" if or_none else "True or False"
        raise TypeError(f"{name} must be {accepted}, got {value!r}")
    return value


def check_choice(name: str, value: Any, *, accepted: Sequence[Any]) -> Any:
    """`value` if it is one of those accepted. Raises for anything else."""
    if value not in accepted:
        *first, last = map(repr, accepted)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")
    return value


def device_of(name: str, value: Any) -> torch.device:
    """The device that `value` names; None is the CPU. Raises TypeError for a value that names none, and torch's
    RuntimeError for a name that torch does not know."""
    if value is None:
        return torch.device("cpu")
    if isinstance(value, bool) or not isinstance(value, torch.device | str | Integral):
        raise TypeError(f"{name} must be a torch.device, or its name such as 'cuda', got {value!r}")
    return torch.device(int(value) if isinstance(value, Integral) else value)
