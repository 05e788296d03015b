"""AdamW and Adam (arXiv 1412.6980; decoupled weight decay: 1711.05101), their states in any format.

With gradient g (negated to maximize), moments m and v, step t counted from 1::

    g = g + weight_decay * p                     Adam only
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    s = max(s, v) with amsgrad, else v
    p = p - lr * weight_decay * p                AdamW only
    p = p - lr * (m / (1 - beta1**t)) / (sqrt(s / (1 - beta2**t)) + eps)

All arithmetic is float32. The update uses the moments before they are encoded again, and the weight is rounded to its
own dtype once.

Errors of weights
-----------------
With `weight_correction="momentum"` the error e of a weight, p before it is rounded less p after, goes into the momentum
(ECO, arXiv 2601.22101)::

    m = m + e * (1 - r / beta1) * (1 - beta1**t) * (sqrt(s / (1 - beta2**t)) + eps) / max(lr, least_lr)
    r = 1 - lr * weight_decay

for Adam with r = 1; nothing where lr is 0. In later steps this part of m decays as beta1**k, and moves the weight by
``e * (r / beta1 - 1) * sum((beta1 / r)**k) = e`` in all, measured after the weight's own decay. So as long as s and lr
stay the same, p + (what m still owes) is exactly the weight that was never rounded. The paper has r = 1 in the quotient
and r as a factor. With its form a part of the order of lr * weight_decay / (1 - beta1) would be left.

The term grows as 1 / lr. If the rate rises again, each step moves the weight by too much: after a warm restart from a
rate near 0 the loss of a small network with int4 weights rose from 0.006 to 395. So below least_lr, a tenth of the
group's largest rate (`LowbitOptimizer.least_rate`), a part of the error is lost, where weights hardly move. The term
must not be clipped: most errors of stochastic rounding are small and of one sign, and the others are large, so clipping
would leave a mean that moves weights faster.

States in few bits
------------------
By the Cauchy-Schwarz inequality, exact moments obey ``abs(m) <= largest_ratio(beta1, beta2) * sqrt(v)``, as long as the
betas stay the same. Moments in 4 bits may not: where the gradients of a block differ by a factor of a hundred, a small
m may be stored as a value many times its size. So with 4 bits the quotient is clamped to this bound.

A maximum, as amsgrad has it, would collect the noise of stochastic rounding in v. So with amsgrad, "4bit" keeps v and s
in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import check_flag, check_nonnegative
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.options import LEAST_RATE, Check, CommonOptions, check_betas


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
    state: str = "fp32",
) -> None:
    """One step in place, on plain tensors of one shape; see the module for the formula.

    Args:
        param: float32 or float64.
        grad: float32 or float64, as the states; it stays as it is.
        exp_avg, exp_avg_sq, max_exp_avg_sq: m, v and s; `max_exp_avg_sq` with amsgrad only.
        step: t, float64 without dimensions.
        decoupled_weight_decay: AdamW, otherwise Adam.
        state: the format of the states; "4bit" clamps the quotient.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    if weight_decay and not decoupled_weight_decay:
        grad = grad + weight_decay * param.to(grad.dtype)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad * (1 - beta2), grad)  # a bare square overflows on a GPU
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        second = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
    # Numerator and denominator are multiplied by `root`, so that the corrections of both moments act on scalars.
    root = (1 - beta2**step).sqrt()
    update = second.sqrt().add_(eps * root)
    torch.div(exp_avg, update, out=update)
    if state == "4bit":
        largest = largest_ratio(beta1, beta2)
        update.clamp_(-largest, largest)
    update.mul_(lr * root / (1 - beta1**step))
    if weight_decay and decoupled_weight_decay:
        param.mul_(1 - lr * weight_decay)
    param.sub_(update)


def compensate(
    error: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, ...],
    eps: float,
    weight_decay: float,
    least_lr: float,
    decoupled_weight_decay: bool = True,
    **others: Tensor,
) -> None:
    """Add the rounding error of the weight to m, in place; see the module for the formula.

    Args:
        error: e, the shape and dtype of the states.
        step: t, float64 without dimensions.
        betas: those of m and v come first.
        least_lr: the rate that stands in the quotient if lr is lower.
        others: states that stay as they are, such as the slow moment of AdEMAMix, in which its update is linear too.
    """
    beta1, beta2 = betas[:2]
    kept = 1 - lr * weight_decay if decoupled_weight_decay else 1.0
    root = (1 - beta2**step).sqrt()
    second = exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq
    factor = per_rate(lr, least_lr, (1 - kept / beta1) * (1 - beta1**step) / root)
    exp_avg.add_(second.sqrt().add_(eps * root).mul_(factor).mul_(error))


def per_rate(lr: float | Tensor, least_lr: float, numerator: Any) -> Any:
    """numerator / max(lr, least_lr); 0 where lr is 0 or nearly so, because nothing may be injected then."""
    if isinstance(lr, Tensor):
        return torch.where(lr > LEAST_RATE, numerator / lr.clamp_min(least_lr), 0.0)
    return numerator / max(lr, least_lr) if lr > LEAST_RATE else 0.0


def largest_ratio(beta1: float, beta2: float) -> float:
    """The largest magnitude of m / sqrt(v) of exact moments, infinite if beta1**2 >= beta2. The result lies a little
    above it, so that rounding in float32 does not reach it."""
    if beta1**2 >= beta2:
        return math.inf
    return 1.0001 * (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


class AdamBase(LowbitOptimizer):
    """The common part of AdamW and Adam: everything except where the weight decay goes (`decoupled`)."""

    moments: ClassVar[dict[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
    options: ClassVar[Mapping[str, Check]] = {
        "eps": check_nonnegative,
        "weight_decay": check_nonnegative,
        "betas": check_betas(2),
        "amsgrad": check_flag,
        "maximize": check_flag,
    }
    reference = staticmethod(reference)
    compensate = staticmethod(compensate)
    hyper_names = ("beta1", "beta2", "eps", "weight_decay", "largest")
    prepare = """
        double root = sqrt(1.0 - pow(beta2, t));
        c[0] = lr * root / (1.0 - pow(beta1, t));
        c[1] = eps * root;
        c[2] = 1.0 - lr * weight_decay;
        c[3] = 1.0 - beta1;
        c[4] = beta2;
        c[5] = 1.0 - beta2;
        c[6] = weight_decay;
        c[7] = largest;
    """
    decoupled: ClassVar[bool]

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        group["decoupled_weight_decay"] = self.decoupled

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return {**self.moments, "max_exp_avg_sq": False} if group["amsgrad"] else self.moments

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        if not group["amsgrad"]:  # turned off before the checkpoint was saved
            saved = {k: v for k, v in saved.items() if k != "max_exp_avg_sq"}
        return super()._loaded_state(group, param, saved, name)

    def rule(self, group: dict[str, Any]) -> str | None:
        lines = [] if self.decoupled else ["g += c[6] * w;"]
        lines += ["s[0] += c[3] * (g - s[0]);", "s[1] = c[4] * s[1] + c[5] * g * g;"]
        second = "s[1]"
        if group["amsgrad"]:  # fmaxf would drop a NaN
            lines.append("s[2] = s[2] >= s[1] || s[2] != s[2] ? s[2] : s[1];")
            second = "s[2]"
        if self.decoupled:
            lines.append("w *= c[2];")
        lines.append(f"float q = quotient(s[0], sqrtf({second}) + c[1]);")
        if group["state"] == "4bit":
            lines.append("q = limit_magnitude(q, c[7]);")
        return "\n".join([*lines, "w -= q * c[0];"])

    def compensation(self, group: dict[str, Any]) -> tuple[str, str] | None:
        if not group["betas"][0]:
            return None
        kept = "(1.0 - lr * weight_decay)" if self.decoupled else "1.0"
        factor = f"(1.0 - {kept} / beta1) * (1.0 - pow(beta1, t)) / root / rate"
        second = "s[2]" if group["amsgrad"] else "s[1]"
        return factor, f"s[0] += (sqrtf({second}) + c[1]) * c[11] * e;"

    def state_format(self, group: dict[str, Any], name: str) -> str:
        if group["state"] == "4bit" and group["amsgrad"] and not self.state_names(group)[name]:
            return "8bit"
        return group["state"]

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        betas: tuple[float, float] = group["betas"]
        return (*betas, group["eps"], group["weight_decay"], largest_ratio(*betas))


class AdamW(AdamBase):
    """`torch.optim.AdamW` with its states in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params" and any option below).
            float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: learning rate, a float or a tensor of one element.
        betas: decay of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decay of the weights per unit of lr, not mixed into the gradient.
        amsgrad: divide by the largest second moment so far; one more state.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`, such as `bf16_stochastic_round`, `max_grad_norm` and `fused`. `state` is
            the format of the moments; the default is that of the class, "8bit" for AdamW itself. The table gives the
            bytes that both moments of an element take.

            | state | bytes | how |
            |---|---|---|
            | "4bit" | 1.06 | blocks of 128, rounded stochastically; squares, and second moments as powers of two |
            | "8bit" | 2.03 | blocks of 256, signed and unsigned dynamic 8-bit tables |
            | "float8" | 2.03 | blocks of 256, e4m3 with a scale of absmax / 448 |
            | "bf16" | 4 | second moment rounded stochastically, or it could never decay |
            | "fp32" | 8 | |

            1-D tensors, those under 4096 elements (over all shards), and those whose rows are shorter than 32
            elements keep float32 states in every format.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, options, common)


class AdamW4bit(AdamW, state="4bit"):
    """`AdamW(..., state="4bit")`: 1.06 bytes of state an element where torch.optim.AdamW takes 8."""


class AdamW8bit(AdamW, state="8bit"):
    """`AdamW(..., state="8bit")`: 2.03 bytes of state an element where torch.optim.AdamW takes 8."""


class AdamWFp8(AdamW, state="float8"):
    """`AdamW(..., state="float8")`: 2.03 bytes of state an element where torch.optim.AdamW takes 8."""


class Adam(AdamBase):
    """`torch.optim.Adam` with its states in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as `lowbit.optim.AdamW` takes them.
        lr: learning rate, a float or a tensor of one element.
        betas: decay of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: times the weight, added to the gradient (L2 penalty).
        amsgrad: divide by the largest second moment so far; one more state.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`. Formats of `state` and their bytes are those of `lowbit.optim.AdamW`.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize}
        super().__init__(params, options, common)


class Adam4bit(Adam, state="4bit"):
    """`Adam(..., state="4bit")`: 1.06 bytes of state an element where torch.optim.Adam takes 8."""


class Adam8bit(Adam, state="8bit"):
    """`Adam(..., state="8bit")`: 2.03 bytes of state an element where torch.optim.Adam takes 8."""


class AdamFp8(Adam, state="float8"):
    """`Adam(..., state="float8")`: 2.03 bytes of state an element where torch.optim.Adam takes 8."""
