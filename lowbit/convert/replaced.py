"""Parameters that a conversion replaced: the new ones take over hooks and attributes.

An optimizer that was made before the conversion holds the old parameters. They get no gradients any more, so its steps
would silently skip them. This module keeps weak references to the old parameters, and the next step of an optimizer
that holds one raises an error.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowbit.tensor.core.base import LowbitTensor


class _Replaced(NamedTuple):
    name: str
    kind: str
    alive: weakref.ref[Tensor]


_REPLACED: dict[int, _Replaced] = {}
"""Keyed by the id of parameters that are alive, since a dictionary of tensors would compare them elementwise."""
_HANDED_OVER = "_lowbit_handed_over"
"""Marks the gradient of a replaced parameter that now belongs to the new one."""
_INSTALLED: list[Any] = []
"""The handles of the hooks, from the first replacement on."""


def hand_over(old: Tensor, new: nn.Parameter, name: str, trainable: bool) -> str:
    """Move hooks, attributes and gradient of a parameter to the parameter that replaces it, and remember `old`.

    Both parameters share their hooks (`register_hook`, `register_post_accumulate_grad_hook`) from now on: a handle
    removes its hook from both. Hooks get the gradient, a plain tensor, and the new parameter. Attributes are copied by
    reference. The new parameter shares the old one's gradient, unless it is for inference.

    Args:
        old, new: the parameters.
        name: of both, for messages.
        trainable: True if gradients reach the new parameter. Otherwise hooks stay behind.

    Returns:
        The hooks and attributes that could not be moved, for the report; "" if all were.
    """
    left = []
    hooks = [old._backward_hooks, old._post_accumulate_grad_hooks]
    if trainable:
        new.grad = old.grad
        # the same dictionaries, since a handle removes its hook from the dictionary that it knows
        if hooks[0] is not None:
            new._backward_hooks = hooks[0]
        if hooks[1] is not None:
            new._post_accumulate_grad_hooks = hooks[1]
    elif count := sum(map(len, filter(None, hooks))):
        left.append(f"{count} gradient hook{'s' * (count > 1)}, as it gets no gradients")
    if old.grad is not None:
        setattr(old.grad, _HANDED_OVER, True)
    own = {*old.detach().__dict__, *old.caches} if isinstance(old, LowbitTensor) else set()
    for attribute, value in old.__dict__.items():
        if attribute in own or attribute == "_is_param":  # the representation's, and torch's
            continue
        if hasattr(new, attribute):
            left.append(f"the attribute {attribute!r}, which {type(new).__name__} has itself")
        else:
            setattr(new, attribute, value)
    _remember(old, name, type(new).__name__)
    return f"left behind: {'; '.join(left)}" if left else ""


def _remember(old: Tensor, name: str, kind: str) -> None:
    key, forget = id(old), _REPLACED.pop
    _REPLACED[key] = _Replaced(name, kind, weakref.ref(old, lambda _: forget(key, None)))
    if not _INSTALLED:
        _INSTALLED.append(register_optimizer_step_pre_hook(_before_step))
        _INSTALLED.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _REPLACED and not _has_closure(args, kwargs):
        _check(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The check for a step with a closure, which has made the gradients by now."""
    if _REPLACED and _has_closure(args, kwargs):
        _check(optimizer)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def _check(optimizer: Optimizer) -> None:
    """Raise RuntimeError if the optimizer holds replaced parameters without gradients. A replaced parameter that gets
    gradients is in use by another model."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    stale = [_REPLACED[id(p)] for p in params if id(p) in _REPLACED and _is_idle(p)]
    if not stale:
        return
    names = ", ".join(found.name for found in stale[:3]) + (", ..." if len(stale) > 3 else "")
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    raise RuntimeError(
        f"{type(optimizer).__name__} holds {len(stale)} parameters (of {total}) that are no longer those of their "
        f"model: {names}. A conversion replaced them (by {stale[0].kind}) after the optimizer was made, which would "
        "not train them. Make the optimizer after prepare_, restore_, convert_ or quantize_, and what holds it (a "
        "scheduler, say); load_state_dict(old.state_dict()) gives it the old one's states. Where another model still "
        "uses such a parameter, step when it has a gradient"
    )


def _is_idle(param: Tensor) -> bool:
    """True if `param` got no gradient since it was replaced."""
    return param.requires_grad and (param.grad is None or hasattr(param.grad, _HANDED_OVER))
