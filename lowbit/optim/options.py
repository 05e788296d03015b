"""The options that every optimizer takes, and the checks of options and parameters.

A check raises before anything has changed. Its message names the value, the accepted values, and the way out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

from torch import Tensor

from lowbit.numerics.code_range import FLOATS
from lowbit.numerics.settings import (
    check_below_one,
    check_choice,
    check_flag,
    check_nonnegative,
    check_numbers,
    is_whole,
)
from lowbit.optim.state import state as states

Check = Callable[[str, Any], Any]
"""Takes the name and the value of an option. It returns the value in its normal form, or raises ValueError or TypeError
for one that is not accepted."""


class CommonOptions(TypedDict, total=False):
    """The options that every optimizer of lowbit takes. A group may have its own values, except of `max_grad_norm` and
    `skip_nonfinite`, which concern the gradients of all groups together.

    Args:
        state: format of the states: "4bit", "8bit", "float8", "bf16" or "fp32"; None: the class's own. States keep the
            format that they were created in. To change it, load `state_dict()` into an optimizer made with another
            format.
        bf16_stochastic_round: round bfloat16 weights stochastically (arXiv 2010.06192), so that updates below half of
            their last bit are not lost. The random bits are a function of (seed, step, parameter, element): the same at
            any sharding, and after a restart. Weights of other dtypes are unaffected. False by default.
        weight_correction: what becomes of the part of a weight that rounding takes. None, the default: that of an
            `Int4Weight` goes into the momentum, as with "momentum", if there is one and it has more than 4 bits; that
            of other weights is lost. False: all of it is lost. "8bit": the bits below a bfloat16 weight are kept in one
            more byte of state, so that it behaves as a weight of 24 bits. "16bit": in two more bytes, so that it is a
            float32 weight. Steps are those of float32 weights to the bit, with states in any format; the bfloat16
            weight is the nearest, and a tie goes away from zero. Neither together with `bf16_stochastic_round`. Other
            weights are treated as with None. "momentum": it goes into the momentum, which moves the weight later (ECO,
            arXiv 2601.22101), and takes no memory. This is for bfloat16, `Int8Weight` and `Int4Weight`, and for AdamW,
            Adam, AdEMAMix and SGD with momentum. All of them are rounded stochastically, whatever
            `bf16_stochastic_round` says: to nearest, a weight would lag behind by up to beta / (2 - 2 beta) roundings.
            While the learning rate is below a tenth of the group's largest one so far (its `largest_lr`), only a part
            of an error goes there, so that a rate that rises again, as at a restart, does no harm. Other weights are
            unaffected.
        max_grad_norm: scale the gradients of a step to at most this norm over all of them (and all ranks), as
            `torch.nn.utils.clip_grad_norm_` does, but inside the step: `.grad` stays as it is. None (never) by default.
        skip_nonfinite: a step whose gradients hold a NaN or an infinity changes nothing: no weight, state or step
            counter. False by default.
        seed: seed of the random bits. 0 by default.
        fused: chooses between a compiled kernel, on an NVIDIA GPU or a CPU, and PyTorch operations, which are several
            times slower. None: a kernel where one applies, compiled at first use and kept on disk, PyTorch operations
            elsewhere. False: PyTorch operations always. True: a kernel always; where none applies, an error says why.
            For a CPU the machine's C++ compiler (`$CXX`, or c++, g++ or clang++ on the path) compiles the kernel, in
            about a second for each format and dtype. Without a compiler a warning says so once. PyTorch operations
            update float64 weights, and decode and round low-bit weights before and after their kernel.
        foreach: accepted without effect; as in torch.optim, not together with `fused`.
        capturable: accepted without effect: a step, except SOAP's, can be captured in a CUDA graph, after one step with
            the same gradients, which creates the states. The host waits for the GPU only if the step may be skipped and
            PyTorch operations do a part of it, as for Muon's matrices.
        differentiable: True is refused.
    """

    state: str | None
    bf16_stochastic_round: bool
    weight_correction: str | bool | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    seed: int
    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool


COMMON_DEFAULTS: dict[str, Any] = {
    "bf16_stochastic_round": False,
    "weight_correction": None,
    "max_grad_norm": None,
    "skip_nonfinite": False,
    "seed": 0,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
SHARED = ("max_grad_norm", "skip_nonfinite")
"""Options with one value for all groups."""
KEPT_ON_LOADING = ("state", "foreach", "fused")
"""Options that do not change the result. Loading a checkpoint keeps the optimizer's own values."""


LEAST_RATE = 1e-30
"""At learning rates up to this one no rounding error goes into a momentum: it would be divided by 0, or overflow."""


RETURN_SHARE = 0.1
"""At learning rates below this share of a group's largest one so far, rounding errors go into a momentum as at this
share. A later rise to that rate, as at a warm restart, multiplies them by 1 / RETURN_SHARE at most."""


def check_common(group: dict[str, Any]) -> None:
    """Raise for a learning rate or a common option that is not accepted."""
    rate = check_nonnegative("lr", group["lr"])
    if not isinstance(group["lr"], Tensor):
        group["lr"] = rate
    if group["state"] not in states.STATE_FORMATS:
        formats = ", ".join(map(repr, states.STATE_FORMATS))
        raise ValueError(f"state must be one of {formats}, got {group['state']!r}")
    check_options(group, _COMMON)
    if group["weight_correction"] in states.CORRECTIONS and group["bf16_stochastic_round"]:
        raise ValueError(
            f"weight_correction={group['weight_correction']!r} and bf16_stochastic_round=True cannot be asked for "
            "together: a corrected weight loses nothing that stochastic rounding could make up for; leave one out"
        )
    if group["max_grad_norm"] is not None:
        group["max_grad_norm"] = check_nonnegative("max_grad_norm", group["max_grad_norm"])
        if not group["max_grad_norm"] > 0:
            raise ValueError("max_grad_norm must be above 0, or None not to clip; got 0")
    if not is_whole(group["seed"]):
        raise TypeError(f"seed must be an int, got {group['seed']!r}")
    group["seed"] = int(group["seed"])
    if group["differentiable"]:
        raise ValueError(
            "differentiable=True is not supported: states are rounded, which has no gradient; "
            "use torch.optim for a differentiable step"
        )
    if group["foreach"] and group["fused"]:
        raise RuntimeError(
            "foreach=True and fused=True cannot be asked for together; leave both out"
        )


def rounds_bf16_stochastically(group: dict[str, Any]) -> bool:
    """True if the bfloat16 weights of this group are rounded stochastically. Groups of other optimizers than lowbit's
    lack the options, and are not."""
    return bool(group.get("bf16_stochastic_round")) or group.get("weight_correction") == "momentum"


def check_options(group: dict[str, Any], checks: Mapping[str, Check]) -> None:
    """Check options of a group by a table, and put them into their normal form."""
    for name, check in checks.items():
        group[name] = check(name, group[name])


def check_shared(group: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Raise if `group` differs from `others` in an option that concerns all gradients together."""
    for name in SHARED:
        for other in others:
            if group[name] != other[name]:
                raise ValueError(
                    f"{name}={group[name]!r} in one group and {other[name]!r} in another: it concerns the "
                    "gradients of all groups together; give it once, to the optimizer"
                )


# ---- checks of one option -----------------------------------------------------------------------------------


def check_betas(count: int) -> Check:
    """The check of `count` numbers in [0, 1)."""
    return partial(check_numbers, count=count, each=check_below_one, of=" in [0, 1)")


check_optional_flag = partial(check_flag, or_none=True)
_COMMON: dict[str, Check] = {
    "bf16_stochastic_round": check_flag,
    "skip_nonfinite": check_flag,
    "capturable": check_flag,
    "differentiable": check_flag,
    "foreach": check_optional_flag,
    "fused": check_optional_flag,
    "weight_correction": partial(
        check_choice, accepted=(None, False, "momentum", *states.CORRECTIONS)
    ),
}


def check_param(name: str, param: Any) -> None:
    """Raise TypeError for a parameter of a dtype that cannot be trained, called `name` in the message if not empty."""
    if not isinstance(param, Tensor) or param.dtype in FLOATS:
        return  # torch.optim refuses anything that is not a tensor
    label = f"{'parameter ' + repr(name) if name else 'a parameter'} of shape {tuple(param.shape)}"
    if param.is_complex():
        way_out = "optimize its real view: torch.view_as_real(param)"
    else:
        way_out = (
            "pass only parameters to train: (p for p in model.parameters() if p.requires_grad)"
        )
    accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
    raise TypeError(f"{label} is {param.dtype}; accepted are {accepted}. Way out: {way_out}")


# ---- the definition of an algorithm ------------------------------------------------------------------------

OWN_STATES = {"step", "weight_correction"}
"""Names that no moment may have."""


def check_definition(optimizer: Any, group: dict[str, Any]) -> None:
    """Raise TypeError for an optimizer of a class whose formula a step could not call. `group`: the default options."""
    cls = type(optimizer)
    if not isinstance(getattr(cls, "moments", None), dict):
        raise TypeError(
            f"{cls.__name__} must name its states in `moments`, with whether their values have a sign, e.g. "
            "{'momentum': True}; {} without states"
        )
    named = {**optimizer.moments, **optimizer.state_names(group)}
    if taken := OWN_STATES & named.keys():
        raise TypeError(
            f"{cls.__name__} names a state {taken.pop()!r}, which the base keeps itself; rename it"
        )
    if unknown := sorted(optimizer.slow_moments - named.keys()):
        raise TypeError(
            f"{cls.__name__}.slow_moments {unknown} are none of its states {sorted(named)}"
        )
    formula = inspect.getattr_static(cls, "reference", None)
    if not isinstance(formula, staticmethod):
        raise TypeError(
            f"{cls.__name__} must give its formula as a static method, reference(param, grad, <states>, *, "
            "<options>)"
        )
    parameters = [*inspect.signature(formula.__func__).parameters.values()][2:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    missing = [name for name in optimizer.state_names(group) if name not in names and not takes_any]
    undefined = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in {*named, *group, "step"}
    ]
    if missing or undefined:
        raise TypeError(
            f"{cls.__name__}.reference takes {sorted(names)}: "
            + (
                f"it lacks the states {missing}"
                if missing
                else f"{undefined} are neither states nor options"
            )
            + f"; states: {sorted(named)}, options: {sorted(group)}, and step"
        )
