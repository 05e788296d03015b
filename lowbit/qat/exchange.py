"""The plain weights of a prepared model, and the prepared ones of a plain model.

A module of a prepared model differs from the plain one in its weight, in the parameters of learned scales, and in its
class. `Held` is these three.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lowbit.convert import Target, check_held, find_owners
from lowbit.layers.exchange import Held
from lowbit.layers.stand_in import without
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor


def prepared_targets(
    model: nn.Module, if_sharded: str | None = "accepted: the model before fully_shard"
) -> list[Target]:
    """The weights that `lowbit.qat.prepare_` prepared, a tied one once.

    Raises TypeError for anything but a module, ValueError for a weight that accelerate offloads and for a sharded
    weight, with the way out `if_sharded`. None: sharded weights are taken too.
    """
    targets: list[Target] = []
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight: Any = module._parameters[name]
        own = held_locally(weight)
        if not isinstance(own, FakeQuantizedTensor):
            continue
        if is_dtensor(weight) and if_sharded is not None:
            raise ValueError(f"{fqn} is sharded: {if_sharded}")
        check_held(owners[0], weight)
        targets.append(Target(weight, own.scheme, tuple(owners)))
    return targets


def plain_weight(weight: Tensor) -> Tensor:
    """The high-precision weight of a prepared one, in its dtype."""
    if not isinstance(weight, FakeQuantizedTensor):
        return weight.detach()
    return weight.master().detach().to(weight.dtype)


def in_high_precision(targets: Iterable[Target]) -> list[Held]:
    """The modules of prepared weights with plain weights of the same memory."""
    made: dict[int, Held] = {}
    for target in targets:
        plain = nn.Parameter(plain_weight(target.weight), requires_grad=False)
        for owner in target.owners:
            held = made.get(id(owner.module))
            own = {} if held is None else held.parameters
            kind = without(type(owner.module)) if held is None else held.kind
            made[id(owner.module)] = Held(owner.module, kind, {**own, owner.attribute: plain})
    return list(made.values())
