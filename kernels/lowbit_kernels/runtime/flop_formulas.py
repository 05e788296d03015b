"""Formulas for torch's FlopCounterMode, which counts an op without a formula as 0.

An op is counted as a product in high precision of the same shapes, so that a model has the same count before and after
its products run in low bits. Where an op takes operands padded to whole blocks, it counts the padding.

``torch.utils.flop_counter`` imports Triton, so the formulas wait until somebody imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.runtime.when_imported import when_imported

_MODULE = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}


def add(op: Any, formula: Callable[..., int]) -> None:
    """Let FlopCounterMode count `op`, of ``torch.ops``, by `formula`, unless torch has a formula for it.

    Args:
        op: of ``torch.ops``, without its overload.
        formula: it gets the arguments of the op, and its result as `out_val`. It returns the number of multiplications
            and additions.
    """
    _formulas[op] = formula
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE])


def _register(flop_counter: ModuleType) -> None:
    for op, formula in _formulas.items():
        if op not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(op, get_raw=True)(formula)


when_imported(_MODULE, _register)


# ---- torch's own products, for which torch 2.13 has no formulas ------------------------------------------------------


def _mm(a: Tensor, b: Tensor, *, out_val: Tensor) -> int:
    """The formula of [M, K] @ [K, N]."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _grouped_mm(a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """The formula of [M, K] @ [E, K, N], where a row meets one expert, and of other forms of ``torch._grouped_mm``."""
    matrices = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * matrices * a.shape[-2] * a.shape[-1] * b.shape[-1]


add(torch.ops.aten._int_mm, _mm)
add(torch.ops.aten._grouped_mm, _grouped_mm)
