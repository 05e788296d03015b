"""AdEMAMix (arXiv 2409.03137): AdamW with a second, very slow first moment; states in any format.

With gradient g (negated to maximize), moments m (fast), n (slow) and v, step t counted from 1, T = t_alpha_beta3::

    m = beta1 * m + (1 - beta1) * g
    n = b * n + (1 - b) * g
    v = beta2 * v + (1 - beta2) * g**2
    u = (m / (1 - beta1**t) + a * n) / (sqrt(v / (1 - beta2**t)) + eps)
    p = p - lr * weight_decay * p - lr * u

    a = alpha * min(1, t / T)                                           alpha and beta3 themselves without T
    b = min(beta3, exp(1 / ((1 - t / T) / ln(beta1) + (t / T) / ln(beta3))))

The slow moment is not corrected for its start at zero. Its half-life, ln(0.5) / ln(b), grows linearly with t, from
that of beta1 to that of beta3.

The slow moment in few bits
---------------------------
With beta3 = 0.9999 a step changes n by about 1% of its size if gradients are mostly noise, and by 0.01% if they agree.
Rounding to nearest loses such changes. The table gives the relative error of n after 6,000 steps on gradients of 4,096
elements: normal noise with a standard deviation of 1, plus a constant mean from a normal distribution.

===================  =====  =====  =====
deviation of means       0    0.1      1
===================  =====  =====  =====
bf16, nearest         0.08   0.21   0.78
8bit                  0.54   0.43   0.11
float8                 7.3   0.99   0.17
4bit                    12    1.7   0.43
bf16, stochastic      0.12   0.09   0.05
===================  =====  =====  =====

Stochastic rounding of 8-bit codes is unbiased, but n adds up the noise of 10,000 roundings, which needs about 8 bits of
mantissa. So in every format except "fp32" the slow moment is bfloat16, rounded stochastically.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import check_flag, check_nonnegative, is_whole
from lowbit.optim.adam import compensate, largest_ratio
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.options import Check, CommonOptions, check_betas


def reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_slow: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float, float],
    alpha: float,
    t_alpha_beta3: int | None,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    state: str = "fp32",
) -> None:
    """One step in place, on plain tensors of one shape; see the module for the formula.

    Args:
        param: float32 or float64.
        grad: float32 or float64, as the states; it stays as it is.
        exp_avg, exp_avg_slow, exp_avg_sq: m, n and v.
        step: t, float64 without dimensions.
        state: the format of the states; "4bit" clamps m as `lowbit.optim.adam` says.
    """
    beta1, beta2, _ = betas
    weight, share = slow_moment_schedule(step, betas, alpha, t_alpha_beta3)
    if maximize:
        grad = -grad
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_slow.add_((grad - exp_avg_slow).mul_(share))
    exp_avg_sq.mul_(beta2).addcmul_(grad * (1 - beta2), grad)  # a bare square overflows on a GPU
    # Numerator and denominator are multiplied by `root`, so that the corrections of the moments act on scalars.
    root = (1 - beta2**step).sqrt()
    factor = lr * root
    below, fast, largest = exp_avg_sq.sqrt(), exp_avg, largest_ratio(beta1, beta2)
    if state == "4bit" and largest < math.inf:
        fast = fast.clamp(-largest * below, largest * below)
    update = (fast * (factor / (1 - beta1**step))).add_(exp_avg_slow * (factor * weight))
    update.div_(below.add_(eps * root))
    if weight_decay:
        param.mul_(1 - lr * weight_decay)
    param.sub_(update)


def slow_moment_schedule(
    step: Tensor, betas: tuple[float, float, float], alpha: float, t_alpha_beta3: int | None
) -> tuple[Tensor | float, Tensor | float]:
    """a, and 1 - b, of the module docstring: float64 of the shape of `step`, or numbers without warmup."""
    beta1, _, beta3 = betas
    if t_alpha_beta3 is None:
        return alpha, 1 - beta3
    done = (step / t_alpha_beta3).clamp(max=1.0)
    warm = (1 / ((1 - done) * _inverse_log(beta1) + done * _inverse_log(beta3))).exp()
    return alpha * done, 1 - torch.where(done < 1, warm.clamp(max=beta3), beta3)


def _inverse_log(beta: float) -> float:
    """1 / ln(beta), which is proportional to the half-life; the limit 0 at beta = 0."""
    return 1 / math.log(beta) if beta > 0 else 0.0


def _check_warmup(name: str, steps: Any) -> int | None:
    if steps is not None and (not is_whole(steps) or steps < 1):
        raise ValueError(
            f"{name} must be a number of steps, an int above 0, or None for no warmup; got {steps!r}"
        )
    return None if steps is None else int(steps)


class AdEMAMix(LowbitOptimizer):
    """AdEMAMix with its states in few bits.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params" and any option below).
            float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: learning rate, a float or a tensor of one element.
        betas: decay of the fast, the second and the slow moment, in [0, 1).
        alpha: weight of the slow moment in the update.
        t_alpha_beta3: steps over which alpha and beta3 are warmed up; the paper takes the length of the run. None:
            no warmup.
        eps: added to the root of the second moment.
        weight_decay: decay of the weights per unit of lr, not mixed into the gradient.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`. `state`, the format of the states, is by default this class's own,
            "8bit" for AdEMAMix itself. Bytes that the three states of an element take, of which 2 go to the slow
            one, bfloat16 except in "fp32" (see `lowbit.optim.ademamix`): "4bit" 3.06, "8bit" and "float8" 4.03,
            "bf16" 6, "fp32" 12; small parameters keep float32 states, see `lowbit.optim.AdamW`.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    reference = staticmethod(reference)
    compensate = staticmethod(compensate)
    hyper_names = ("beta1", "beta2", "beta3", "alpha", "warmup", "eps", "weight_decay", "largest")
    prepare = """
        double done = t < warmup ? t / warmup : 1.0;
        double slow = beta3;
        if (done < 1.0) {
            double start = beta1 > 0.0 ? 1.0 / log(beta1) : 0.0;
            double end = beta3 > 0.0 ? 1.0 / log(beta3) : 0.0;
            double warm = exp(1.0 / ((1.0 - done) * start + done * end));
            slow = warm < beta3 ? warm : beta3;
        }
        double root = sqrt(1.0 - pow(beta2, t));
        c[0] = lr * root / (1.0 - pow(beta1, t));
        c[1] = lr * root * alpha * done;
        c[2] = 1.0 - slow;
        c[3] = eps * root;
        c[4] = 1.0 - lr * weight_decay;
        c[5] = 1.0 - beta1;
        c[6] = beta2;
        c[7] = 1.0 - beta2;
        c[8] = largest;
    """
    moments: ClassVar[dict[str, bool]] = {
        "exp_avg": True,
        "exp_avg_slow": True,
        "exp_avg_sq": False,
    }
    slow_moments = frozenset({"exp_avg_slow"})
    options: ClassVar[Mapping[str, Check]] = {
        "alpha": check_nonnegative,
        "eps": check_nonnegative,
        "weight_decay": check_nonnegative,
        "t_alpha_beta3": _check_warmup,
        "betas": check_betas(3),
        "maximize": check_flag,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "alpha": alpha}
        options |= {"t_alpha_beta3": t_alpha_beta3, "eps": eps}
        options |= {"weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, common)

    def state_format(self, group: dict[str, Any], name: str) -> str:
        if name == "exp_avg_slow" and group["state"] != "fp32":
            return "bf16"
        return group["state"]

    def rule(self, group: dict[str, Any]) -> str:
        lines = [
            "s[0] += c[5] * (g - s[0]);",
            "s[1] += c[2] * (g - s[1]);",
            "s[2] = c[6] * s[2] + c[7] * g * g;",
            "w *= c[4];",
            "const float below = sqrtf(s[2]);",
            "float fast = s[0];",
        ]
        if group["state"] == "4bit":
            lines.append("const float most = c[8] * below;")
            lines.append("fast = limit_magnitude(fast, most);")
        lines.append("w -= quotient(fast * c[0] + s[1] * c[1], below + c[3]);")
        return "\n".join(lines)

    def compensation(self, group: dict[str, Any]) -> tuple[str, str] | None:
        if not group["betas"][0]:
            return None
        factor = "(1.0 - (1.0 - lr * weight_decay) / beta1) * (1.0 - pow(beta1, t)) / root / rate"
        return factor, "s[0] += (sqrtf(s[2]) + c[3]) * c[11] * e;"

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        warmup = float(group["t_alpha_beta3"] or 0)
        own = (group["alpha"], warmup, group["eps"], group["weight_decay"])
        return (*group["betas"], *own, largest_ratio(*group["betas"][:2]))


class AdEMAMix4bit(AdEMAMix, state="4bit"):
    """`AdEMAMix(..., state="4bit")`: 3.06 bytes of state an element instead of 12."""


class AdEMAMix8bit(AdEMAMix, state="8bit"):
    """`AdEMAMix(..., state="8bit")`: 4.03 bytes of state an element instead of 12."""


class AdEMAMixFp8(AdEMAMix, state="float8"):
    """`AdEMAMix(..., state="float8")`: 4.03 bytes of state an element instead of 12."""
