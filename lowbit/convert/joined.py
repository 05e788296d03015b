"""The weights of a model that share a part of their scales as siblings (`lowbit.convert.siblings`): those to be
quantized, and frozen ones, which take plain values together.

`load_state_dict` gives a module the plain values of one weight after the other. `take_joined`, a hook on the module
around siblings, sees all of them before, so they get the scales that `lowbit.quantize_` would give them. Every flow
that makes low-bit weights adds the hook, and so does `load_state_dict(…, assign=True)` that puts them into a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.siblings import families, family_of
from lowbit.convert.walk import Target, is_conv, shape_of_blocks
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.sharded import held_locally
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.base import stored_shape
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.core.parts import gathered, holds, is_plain_for
from lowbit.tensor.core.state_dict import followers, take_values
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor
from lowbit.tensor.frozen.siblings import joint_part


def families_of(targets: Sequence[Target]) -> list[list[Target]]:
    """The targets, two or more at a time, that are siblings (`lowbit.convert.siblings`) and whose schemes join a part
    of their scales."""
    by_name = {target.fqn: target for target in targets if _joins(target)}
    weights = {
        name: (
            [owner.fqn for owner in target.owners],
            alike(target.scheme.weight, shape_of_blocks(target)),
        )
        for name, target in by_name.items()
    }
    return [[by_name[name] for name in group] for group in families(weights)]


def _joins(target: Target) -> bool:
    return target.scheme.weight.joins and target.weight.ndim >= 2 and not is_conv(target)


def alike(spec: Spec, shape: Sequence[int]) -> Hashable:
    """The properties in which siblings must agree to share a part of their scales."""
    return spec, tuple(shape[:-2]), shape[-1]


def joint_parts(targets: Sequence[Target], searched: bool = False) -> dict[str, Tensor]:
    """The shared part of each family of weights, by the first name of each weight. `searched`: as for `joint_part`."""
    found: dict[str, Tensor] = {}
    for family in families_of(targets):
        weights = [target.weight for target in family]
        shared = joint_part(family[0].scheme.weight, weights, searched)
        found |= {target.fqn: shared for target in family}
    return found


def frozen_families(module: nn.Module) -> list[dict[str, Any]]:
    """The frozen weights, sharded or not, that share a part of their scales: a dict of names to weights a family."""
    held: dict[str, Any] = {}
    weights: dict[str, tuple[tuple[str], Hashable]] = {}
    for name, param in module.named_parameters():
        own = held_locally(param)
        if isinstance(own, AffineTensor) and own.spec.joins and not isinstance(own, ConvTensor):
            held[name] = param
            weights[name] = (name,), alike(own.spec, stored_shape(own, param.shape))
    return [{name: held[name] for name in names} for names in families(weights)]


def watch_joined(model: nn.Module) -> None:
    """Add the hook `take_joined` to the modules around siblings in `model`, and remove it from all others."""
    around = {_around(name) for family in frozen_families(model) for name in family}
    for path, module in model.named_modules():
        hooks = module._load_state_dict_pre_hooks
        ours = [n for n, hook in hooks.items() if getattr(hook, "hook", hook) is take_joined]
        if path in around and not ours:
            module.register_load_state_dict_pre_hook(take_joined)
        elif path not in around:
            for number in ours:
                del hooks[number]


def _around(weight: str) -> str:
    """The name of the module around a weight and its siblings."""
    family = family_of(weight) or ""
    return family.partition("|")[0].rpartition(".")[0]


@torch.no_grad()
def take_joined(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """The hook before loading: plain values of siblings become low-bit weights with a joint part of their scales.
    Siblings that have these values already keep their bits, as other weights do.

    Args: those of `nn.Module.register_load_state_dict_pre_hook`'s hooks.
    """
    if metadata.get("assign_to_params_buffers"):
        return
    for family in frozen_families(module):
        given = {n: w for n, w in family.items() if is_plain_for(w, state_dict.get(prefix + n))}
        if all(holds(w, state_dict[prefix + n]) for n, w in given.items()):
            continue
        if lacking := [prefix + n for n in family if n not in given]:
            warnings.warn(
                f"{', '.join(prefix + n for n in given)} take plain values without {', '.join(lacking)}, which then "
                "have other scales; servers that merge these layers need one: load them together",
                stacklevel=2,
            )
        values = {n: gathered(state_dict[prefix + n]).to(local(w).device) for n, w in given.items()}
        if any(count_nonfinite(value) for value in values.values()):
            continue  # torch reports the error of the copy, with the name of the weight
        like = [held_locally(w)._with(shape=tuple(w.shape)) for w in given.values()]
        rows = [w._as_stored(v)[1] for w, v in zip(like, values.values(), strict=True)]
        joint = like[0].spec.joint_part(rows, like[0].scale.dtype)
        for name, value in values.items():
            own = joint.to(value.device)
            take_values(given[name], prefix + name, state_dict, value, errors, own)


followers.append(watch_joined)
