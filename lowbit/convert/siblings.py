"""Sibling projections: layers of one module that multiply the same input, by their names.

Servers merge them into one layer: vLLM makes q, k and v one `qkv_proj`, and gate and up one `gate_up_proj`. The
parts must share a value that the merged layer has once, such as the global scale of NVFP4. One table of names serves
the schemes whose scales join (`Spec.joins`), the formats that servers read, weights that share a launch
(`lowbit.convert.side_by_side`), and the rule of `lowbit.train` about small layers beside a larger one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What servers name the layer that they merge of these."""
_GROUPS: list[tuple[str, ...]] = [
    *MERGED.values(),
    ("query", "key", "value"),
    ("gate", "up"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
]
"""Llama and most others; BERT and recipes/llama.py; Mistral's own names; diffusers; the experts of Mixtral, and
InternLM2; DeepSeek; Qwen3.5 and Qwen3-Next."""
_EXPERT = re.compile(r"(experts?\.)\d+\.")
"""One expert of a list."""
_INSIDE = ("base_layer",)
"""Modules that hold the weight of the layer around them, as PEFT's layers do."""


def siblings() -> tuple[tuple[str, ...], ...]:
    """The groups of names, those of `register_siblings` last."""
    return tuple(_GROUPS)


def register_siblings(*names: str) -> None:
    """Add a group of sibling projections to the table.

        lowbit.register_siblings("q_map", "k_map", "v_map")

    Args:
        names: of modules, or of parameters with one matrix an expert, that one module has and that multiply its input.

    Raises:
        TypeError: a name that is not a str.
        ValueError: fewer than two names, a name with a dot, or one that is in another group.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"siblings are names such as 'q_proj', got {name!r}")
        if "." in name or not name:
            raise ValueError(
                f"{name!r} is not the last part of a name; accepted: 'q_proj', not 'layers.0.q_proj'"
            )
    if len(set(names)) < 2:
        raise ValueError(f"siblings are two names or more, got {names}")
    if names in _GROUPS:
        return
    if taken := [group for group in _GROUPS if set(group) & set(names)]:
        raise ValueError(f"{names} share a name with {taken[0]}, and a name is in one group only")
    _GROUPS.append(names)


def group_of(name: str) -> tuple[str, ...]:
    """The siblings of a module or parameter of this name, itself included; () where the table has none."""
    return next((group for group in _GROUPS if name in group), ())


def family_of(weight: str) -> str | None:
    """A name that a weight shares with its siblings, `layers.0.q_proj|k_proj|v_proj`; None where the table has
    none. `weight`: its fully qualified name."""
    parts = weight.split(".")
    at = len(parts) - 1
    if at and parts[at] == "weight":
        at -= 1
    while at and parts[at] in _INSIDE:
        at -= 1
    group = group_of(parts[at])
    return ".".join((*parts[:at], "|".join(group))) if group else None


def of_any_expert(weight: str) -> str:
    """The name of a weight, the same for all experts of a list."""
    return _EXPERT.sub(r"\1*.", weight)


def unit_of(weight: str, shape: Sequence[int]) -> str:
    """A name that a weight shares with those which take one scheme in a plan, as one launch may read them: siblings,
    the stacked experts of a module, and the same weights of all experts of a list."""
    name = of_any_expert(weight)
    if len(shape) == 3:
        return name.rpartition(".")[0] or name
    return family_of(name) or name


def families(weights: Mapping[str, tuple[Iterable[str], Hashable]]) -> list[list[str]]:
    """The weights, two or more at a time, that are siblings and alike, in the order of their keys, so that sums over
    them are the same to the bit wherever they come from. A weight that modules share joins the siblings of all.

    Args:
        weights: for each weight, by any key, the fully qualified names of the weight, and what siblings must agree in.
    """
    groups: dict[str, list[str]] = {}
    """The members of each group, which all of its keys share."""
    first: dict[tuple[str, Hashable], str] = {}
    for key, (names, alike) in weights.items():
        groups[key] = [key]
        for family in filter(None, map(family_of, names)):
            own, others = groups[first.setdefault((family, alike), key)], groups[key]
            if own is not others:
                own += others
                groups |= dict.fromkeys(others, own)
    unique = {id(group): group for group in groups.values() if len(group) > 1}
    return list(map(sorted, unique.values()))
