"""SGD with momentum as torch.optim.SGD has it (Nesterov's as in Sutskever et al., 2013), the momentum in any format.

With gradient g (negated to maximize) and momentum b, whose first value is the gradient itself::

    g = g + weight_decay * p
    b = momentum * b + (1 - dampening) * g      b = g at the first step
    p = p - lr * (g + momentum * b)             with nesterov
    p = p - lr * b                              otherwise; without momentum p = p - lr * g

As states start at zero, the first step is the ordinary one without dampening; which step is the first is told by
the step counter, on the device.

What a format does to a momentum depends on how long it remembers: a step changes it by a share of 1 - momentum, and
what is below half the distance of two codes is lost. See `lowbit.optim.lion` for figures. Training loss of a small
network (600 steps, batches of 32) above that with a float32 momentum: "bf16", "8bit" and "float8" at most 0.3%; "4bit"
0.8% with momentum = 0.9, but 56% with 0.99, which 4 bits cannot hold.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor

from lowbit.optim.base import (
    CommonOptions,
    LowbitOptimizer,
    ParamsT,
    check_flag,
    check_nonnegative,
    check_number,
)

if TYPE_CHECKING:
    from lowbit_kernels.fused_step import Rule


def reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One step on plain tensors of one shape and dtype, changing none of them.

    Args:
        param, grad, momentum_buffer: the parameter, its gradient and its momentum; None at the first step, and
            always where `momentum` is 0.

    Returns:
        The new (param, momentum_buffer).
    """
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    if momentum == 0:
        return param - lr * grad, None
    if momentum_buffer is None:
        momentum_buffer, dampening = torch.zeros_like(grad), 0.0
    momentum_buffer = momentum * momentum_buffer + (1 - dampening) * grad
    update = grad + momentum * momentum_buffer if nesterov else momentum_buffer
    return param - lr * update, momentum_buffer


class SGD(LowbitOptimizer):
    """`torch.optim.SGD` with its momentum in few bits. Without momentum there is no state but the step counter.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params" and any option below).
            float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: learning rate, a float or a tensor of one element.
        momentum: decay of the momentum; 0 for none.
        dampening: the gradient enters the momentum with the factor 1 - dampening, but for the first time.
        weight_decay: added to the gradient, times the weight (L2 penalty).
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
        maximize: ascend.
        common: `lowbit.optim.CommonOptions`. `state`, the format of the momentum, is by default this class's own,
            "8bit" for SGD itself. Bytes of state an element: "4bit" 0.53, "8bit" and "float8" 1.02, "bf16" 2,
            "fp32" 4; small parameters keep float32 states, see `lowbit.optim.AdamW`.

    Raises:
        ValueError, TypeError: an option or a parameter that it doesn't take, named with its value.
    """

    moments: ClassVar[dict[str, bool]] = {"momentum_buffer": True}

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
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, options, common)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for name in ("momentum", "weight_decay"):
            check_nonnegative(name, group[name])
        dampening = group["dampening"]
        check_number("dampening", dampening)
        if not math.isfinite(dampening):
            raise ValueError(f"dampening must be a finite number, got {dampening!r}")
        check_flag("nesterov", group["nesterov"])
        check_flag("maximize", group["maximize"])
        for name in ("momentum", "dampening", "weight_decay"):
            group[name] = float(group[name])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                "nesterov=True takes a momentum above 0 and dampening=0, got "
                f"momentum={group['momentum']!r}, dampening={group['dampening']!r}"
            )

    def fix_group(self, group: dict[str, Any]) -> None:
        super().fix_group(group)
        group.setdefault("nesterov", False)
        group.setdefault("maximize", False)

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return self.moments if group["momentum"] else {}

    def scalars(
        self, group: dict[str, Any], lr: float | Tensor, steps: Tensor
    ) -> tuple[Tensor, ...]:
        """(lr, factor of the gradient in the momentum) for each parameter."""
        rate = lr * torch.ones_like(steps)
        return rate, torch.where(steps == 1, 1.0, 1.0 - group["dampening"]).to(steps.dtype)

    def update(
        self,
        group: dict[str, Any],
        scalars: tuple[Tensor, ...],
        weight: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
    ) -> None:
        lr, share = scalars
        momentum = group["momentum"]
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * weight.float()
        if momentum:
            buffer = states["momentum_buffer"].mul_(momentum)
            buffer.add_(grad * share if group["dampening"] else grad)
            grad = grad.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        weight.sub_(grad * lr)

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """torch.optim.SGD counts no steps: its momentum, where there is one, is past the first."""
        saved = dict(saved)
        if "momentum_buffer" in saved and (
            saved["momentum_buffer"] is None or not group["momentum"]
        ):
            del saved["momentum_buffer"]
        if "momentum_buffer" in saved:
            saved.setdefault("step", 1.0)
        return super()._loaded_state(group, param, saved, name)

    def rule(self, group: dict[str, Any]) -> Rule:
        from lowbit_kernels.fused_step import Rule

        lines = ["g = -g;"] if group["maximize"] else []
        lines.append("g += c[3] * w;")
        if group["momentum"]:
            lines.append("s[0] = c[1] * s[0] + c[2] * g;")
        if not group["momentum"]:
            lines.append("w -= g * c[0];")
        elif group["nesterov"]:
            lines.append("w -= (g + c[1] * s[0]) * c[0];")
        else:
            lines.append("w -= s[0] * c[0];")
        return Rule(hyper=_HYPER, prepare=_PREPARE, update="\n".join(lines))

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        return group["momentum"], group["dampening"], group["weight_decay"]


_HYPER = ("momentum", "dampening", "weight_decay")
_PREPARE = """
c[0] = lr;
c[1] = momentum;
c[2] = t == 1.0 ? 1.0 : 1.0 - dampening;
c[3] = weight_decay;
"""


class SGD4bit(SGD):
    """`SGD(..., state="4bit")`: 0.53 bytes of momentum an element where torch.optim.SGD takes 4."""

    default_state = "4bit"


class SGD8bit(SGD):
    """`SGD(..., state="8bit")`: 1.02 bytes of momentum an element where torch.optim.SGD takes 4."""

    default_state = "8bit"


class SGDFp8(SGD):
    """`SGD(..., state="float8")`: 1.02 bytes of momentum an element where torch.optim.SGD takes 4."""

    default_state = "float8"
