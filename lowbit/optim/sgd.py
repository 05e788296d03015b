"""SGD with momentum as torch.optim.SGD has it (Nesterov's as in Sutskever et al., 2013), the momentum in any format.

With gradient g (negated to maximize) and momentum b, whose first value is the gradient itself::

    g = g + weight_decay * p
    b = momentum * b + (1 - dampening) * g      b = g at the first step
    p = p - lr * (g + momentum * b)             with nesterov
    p = p - lr * b                              otherwise; without momentum p = p - lr * g

With `weight_correction="momentum"` the error e of a weight, p before it is rounded less p after, goes into the momentum
(ECO, arXiv 2601.22101), whose later steps move the weight by e in all; nothing where lr is 0::

    b = b + e * (1 - 1 / momentum) / max(lr, least_lr)      divided by momentum again with nesterov

`least_lr` is a tenth of the group's largest rate, see `lowbit.optim.adam`.

Because states start at zero, the first step is the ordinary one without dampening.

A step changes the momentum by a share of 1 - momentum. To nearest, a change below half the distance of two codes is
lost; 4 bits are rounded stochastically instead (see `lowbit.optim.lion`). The loss of a small network (600 steps) was
at most 0.3% above that with a float32 momentum for "bf16", "8bit" and "float8". With "4bit" another network (500
steps) was less than 0.1% above for momentum = 0.9, and 8% for 0.99.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import check_finite, check_flag, check_nonnegative
from lowbit.optim.adam import per_rate
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.options import Check, CommonOptions


def reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    step: Tensor,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """One step in place, on plain tensors of one shape; see the module for the formula.

    Args:
        param: float32 or float64.
        grad: float32 or float64, as the momentum; it stays as it is.
        momentum_buffer: b, zeros at the first step; None if `momentum` is 0.
        step: float64 without dimensions, 1 at the first step.
    """
    if maximize:
        grad = -grad
    if weight_decay:
        grad = grad + weight_decay * param.to(grad.dtype)
    if momentum_buffer is not None:
        new = grad * torch.where(step == 1, 1.0, 1.0 - dampening) if dampening else grad
        momentum_buffer.mul_(momentum).add_(new)
        grad = grad.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
    param.sub_(grad * lr)


def compensate(
    error: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float | Tensor,
    momentum: float,
    least_lr: float,
    nesterov: bool = False,
) -> None:
    """Add the rounding error of the weight to b, in place; see the module for the formula.

    Args:
        error: e, the shape and dtype of the momentum.
        least_lr: the rate that stands in the quotient if lr is lower.
    """
    share = (1 - 1 / momentum) / (momentum if nesterov else 1)
    momentum_buffer.add_(error * per_rate(lr, least_lr, share))


class SGD(LowbitOptimizer):
    """`torch.optim.SGD` with its momentum in few bits. Without momentum its only state is the step counter.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params" and any option below).
            float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: learning rate, a float or a tensor of one element.
        momentum: decay of the momentum; 0 for none.
        dampening: the gradient enters the momentum with the factor 1 - dampening, except at the first step.
        weight_decay: times the weight, added to the gradient (L2 penalty).
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`. `state`, the format of the momentum, is by default this class's own,
            "8bit" for SGD itself. Bytes of state an element: "4bit" 0.53, "8bit" and "float8" 1.02, "bf16" 2,
            "fp32" 4; small parameters keep float32 states, see `lowbit.optim.AdamW`.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    moments: ClassVar[dict[str, bool]] = {"momentum_buffer": True}
    options: ClassVar[Mapping[str, Check]] = {
        "momentum": check_nonnegative,
        "weight_decay": check_nonnegative,
        "dampening": check_finite,
        "nesterov": check_flag,
        "maximize": check_flag,
    }
    reference = staticmethod(reference)
    compensate = staticmethod(compensate)
    hyper_names = ("momentum", "dampening", "weight_decay")
    prepare = """
        c[0] = lr;
        c[1] = momentum;
        c[2] = t == 1.0 ? 1.0 : 1.0 - dampening;
        c[3] = weight_decay;
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": dampening}
        options |= {"weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        super().__init__(params, options, common)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov=True takes a momentum above 0 and dampening=0, got "
                f"momentum={group['momentum']!r}, dampening={group['dampening']!r}"
            )

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return self.moments if group["momentum"] else {}

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """torch.optim.SGD counts no steps. A momentum in its checkpoint is past the first step."""
        saved = dict(saved)
        if "momentum_buffer" in saved and (
            saved["momentum_buffer"] is None or not group["momentum"]
        ):
            del saved["momentum_buffer"]
        if "momentum_buffer" in saved:
            saved.setdefault("step", 1.0)
        return super()._loaded_state(group, param, saved, name)

    def compensation(self, group: dict[str, Any]) -> tuple[str, str] | None:
        if not 0 < group["momentum"] < 1:
            return None
        seen = " / momentum" if group["nesterov"] else ""
        return f"(1.0 - 1.0 / momentum){seen} / rate", "s[0] += c[11] * e;"

    def rule(self, group: dict[str, Any]) -> str:
        if not group["momentum"]:
            return "g += c[3] * w; w -= g * c[0];"
        change = "g + c[1] * s[0]" if group["nesterov"] else "s[0]"
        return f"g += c[3] * w; s[0] = c[1] * s[0] + c[2] * g; w -= ({change}) * c[0];"


class SGD4bit(SGD, state="4bit"):
    """`SGD(..., state="4bit")`: 0.53 bytes of momentum an element where torch.optim.SGD takes 4."""


class SGD8bit(SGD, state="8bit"):
    """`SGD(..., state="8bit")`: 1.02 bytes of momentum an element where torch.optim.SGD takes 4."""


class SGDFp8(SGD, state="float8"):
    """`SGD(..., state="float8")`: 1.02 bytes of momentum an element where torch.optim.SGD takes 4."""
