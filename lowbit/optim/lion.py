"""Lion (arXiv 2302.06675): the sign of a momentum, with decoupled weight decay; one state, in any format.

With gradient g (negated to maximize) and momentum m::

    u = sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g
    p = p - lr * weight_decay * p - lr * u

The sign is that of the momentum before the step, mixed with the gradient. Every element moves by lr, so lr is taken
3 to 10 times smaller than for AdamW, and weight_decay as much larger.

How long each format remembers
------------------------------
A step changes m by a share of 1 - beta2. To nearest, a change below half the distance of two codes is lost. 4 bits are
rounded stochastically instead, which adds noise. The table gives the relative error of m after some hundred steps on
gradients of pure noise.

========  ====  ====  ====  ====
beta2      0.9  0.95  0.98  0.99
========  ====  ====  ====  ====
"8bit"    0.02  0.04  0.05  0.08
"float8"  0.06  0.08  0.13  0.18
"4bit"    0.43  0.67   1.3   2.2
========  ====  ====  ====  ====

The loss of a small network (500 steps) is within 1.5% of that with float32 states for "bf16", "8bit" and "float8". With
"4bit" it is 4.6% higher for betas=(0.9, 0.99), and 2.3% for (0.9, 0.95): use the latter with "4bit". To nearest it was
41% and 3.0% higher, although m had a smaller error: its mean was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import check_flag, check_nonnegative
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.options import Check, CommonOptions, check_betas


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """One step in place, on plain tensors of one shape; see the module for the formula.

    Args:
        param: float32 or float64.
        grad, exp_avg: the gradient, which stays as it is, and the momentum m; float32 or float64.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    mixed = exp_avg.lerp(grad, 1 - beta1)
    exp_avg.lerp_(grad, 1 - beta2)
    if weight_decay:
        param.mul_(1 - lr * weight_decay)
    # NaN where the gradient is not finite: the sign alone would hide that
    param.sub_(mixed.sign().add_(mixed, alpha=0).mul_(lr))


class Lion(LowbitOptimizer):
    """Lion with its momentum in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params" and any option below).
            float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: learning rate, a float or a tensor of one element.
        betas: weight of the momentum in the update, and its decay; in [0, 1). With "4bit" take (0.9, 0.95), see
            `lowbit.optim.lion`.
        weight_decay: decay of the weights per unit of lr, not mixed into the gradient.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`. `state`, the format of the momentum, is by default this class's own,
            "8bit" for Lion itself. Bytes of state an element: "4bit" 0.53, "8bit" and "float8" 1.02, "bf16" 2,
            "fp32" 4; small parameters keep float32 states, see `lowbit.optim.AdamW`.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    moments: ClassVar[dict[str, bool]] = {"exp_avg": True}
    options: ClassVar[Mapping[str, Check]] = {
        "weight_decay": check_nonnegative,
        "betas": check_betas(2),
        "maximize": check_flag,
    }
    reference = staticmethod(reference)
    hyper_names = ("beta1", "beta2", "weight_decay")
    prepare = """
        c[0] = lr;
        c[1] = 1.0 - lr * weight_decay;
        c[2] = 1.0 - beta1;
        c[3] = 1.0 - beta2;
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, common)

    def rule(self, group: dict[str, Any]) -> str:
        lines = ["float d = s[0] + c[2] * (g - s[0]);", "s[0] += c[3] * (g - s[0]);", "w *= c[1];"]
        lines.append("w -= ((d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : 0.0f) + (d - d)) * c[0];")
        return "\n".join(lines)

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        return (*group["betas"], group["weight_decay"])


class Lion4bit(Lion, state="4bit"):
    """`Lion(..., state="4bit")`: 0.53 bytes of state an element instead of 4. Take betas=(0.9, 0.95) with it: 4 bits
    are noisy with beta2 = 0.99 (see `lowbit.optim.lion`)."""


class Lion8bit(Lion, state="8bit"):
    """`Lion(..., state="8bit")`: 1.02 bytes of state an element instead of 4."""


class LionFp8(Lion, state="float8"):
    """`Lion(..., state="float8")`: 1.02 bytes of state an element instead of 4."""
