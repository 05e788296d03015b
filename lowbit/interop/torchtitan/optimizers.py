"""Optimizers of lowbit from the parameter groups and options of torchtitan."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.interop import config_lines
from lowbit.optim import LowbitOptimizer, Muon
from lowbit.optim.matrices import is_matrix

OF_ADAM = ("betas", "eps", "weight_decay")
"""Options that torchtitan gives to every optimizer. An optimizer that lacks an option leaves it out."""


def check_line(line: str, given: Iterable[str]) -> tuple[type[LowbitOptimizer], dict[str, Any]]:
    """The class and the options of a line such as "AdamW8bit(seed=1)".

    Raises ValueError for an unknown name, and for an option that is among torchtitan's own settings, `given`.
    """
    kind, options = config_lines.optimizer(line)
    twice = sorted(set(options) & {*given, "lr"})
    if twice:
        raise ValueError(
            f"{line}: {twice[0]} has a place of its own among torchtitan's settings; set it there"
        )
    return kind, options


def made(
    line: str, groups: Sequence[dict[str, Any]], name_of: Mapping[int, str]
) -> LowbitOptimizer:
    """The optimizer of a line.

    Args:
        line: as for `check_line`.
        groups: "params" and torchtitan's options, whose `fused` asks for a kernel if there is one.
        name_of: names of the parameters, by id. Muon takes the matrices of layers, and AdamW the other parameters,
            stacked experts and their biases among them, with the line's `adamw_lr`.
    """
    kind, options = check_line(line, (name for group in groups for name in group))
    own = [_accepted(kind, group) for group in groups]
    if issubclass(kind, Muon):
        own = [
            part
            for group, given in zip(own, groups, strict=True)
            for part in _for_muon(group, given, name_of)
        ]
    return kind(own, **options)


def _accepted(kind: type[LowbitOptimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that this class has. A third beta, which torchtitan lacks, is that of the class."""
    known = inspect.signature(kind).parameters
    own = {n: v for n, v in group.items() if n in known or n not in (*OF_ADAM, "foreach")}
    if "betas" in own:
        given = tuple(own["betas"])
        own["betas"] = (*given, *known["betas"].default[len(given) :])
    return own | {"fused": None if group.get("fused") else False}


def _for_muon(
    group: dict[str, Any], given: dict[str, Any], name_of: Mapping[int, str]
) -> list[dict[str, Any]]:
    """A group split in two: one for Muon, with `group`, and one for AdamW, with its options in `given`."""
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for param in group["params"]:
        name = name_of[id(param)]
        parts[param.ndim == 2 and is_matrix(param, name) and "layers." in name].append(param)
    rest = {n: v for n, v in group.items() if n not in ("params", "param_names", "eps", "betas")}
    for_adamw = {n: v for n, v in rest.items() if n != "lr"} | {
        n: given[n] for n in OF_ADAM if n in given
    }
    options = {True: rest, False: for_adamw}
    return [
        {
            **options[is_muon],
            "params": params,
            "use_muon": is_muon,
            **_named(group, params, name_of),
        }
        for is_muon, params in parts.items()
        if params
    ]


def _named(
    group: dict[str, Any], params: list[Tensor], name_of: Mapping[int, str]
) -> dict[str, list[str]]:
    """The names of these parameters, if the group has names."""
    if "param_names" not in group:
        return {}
    known = {id(p): n for p, n in zip(group["params"], group["param_names"], strict=True)}
    return {"param_names": [known[id(p)] for p in params]}


def steps_done(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """The steps that these optimizers have made, including those before a restart. The host waits for the device."""
    counts = (
        state["step"]
        for optimizer in optimizers
        for state in optimizer.state.values()
        if "step" in state
    )
    return max((int(count) for count in counts), default=0)
