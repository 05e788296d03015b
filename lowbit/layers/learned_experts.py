"""Modules that multiply by 3-D weights with learned scales: the experts of a mixture.

Such a module has several stacked weights [E, …] and a forward of its own, which indexes them, transposes them, and
multiplies by all of them at once. Its class is a `Scaled` one. While its forward runs, each of
these weights reads as what products see: the whole weight rounded once by its scales, plain and differentiable. So any
product that forward contains is that of a plain weight. Grouped products round by themselves where a kernel does it in
one pass (`lowbit.layers.rounded_stack`). Outside of forward the module holds its parameters.

Where the scheme rounds the inputs too, the weight reads as a FakeQuantizedTensor over the rounded values, or as their
codes, whose products round the inputs as they do with present scales.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.layers.rounded_stack import seen_by_experts
from lowbit.layers.stand_in import StandIn, names_given
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.tensor.core.dtensor import by_rows, placed_as
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import hold, settled_by


class Holder(StandIn):
    """A layer of weights that know their module."""

    def __setstate__(self, state: Any) -> None:
        """A copy's weights know the copy."""
        super().__setstate__(state)
        hold(self)


class Scaled(Holder):
    """Mixin of modules whose weights of the `names` given have scales beside them: see the file."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = self._parameters
        weights = {
            name: parameters[name]
            for name in names_given(self, Scaled)
            if isinstance(held_locally(parameters[name]), FakeQuantizedTensor)
        }
        try:
            for name, weight in weights.items():
                parameters[name] = _seen(
                    weight, parameters[f"{name}_scale"], parameters[f"{name}_zero"]
                )
            return super().forward(*args, **kwargs)
        finally:
            parameters.update(weights)


def _seen(weight: Any, scale: Any, zero: Any) -> Tensor:
    """The weight as the products of its module see it now, in its dtype; a DTensor where the weight is one."""
    if not is_dtensor(weight):
        return seen_by_experts(weight, scale, zero)
    placements = weight.placements
    parts = [t for t in (weight, scale, zero) if t is not None]
    split_alike = all(is_dtensor(t) and t.placements == placements for t in parts)
    if not split_alike or not by_rows(placements):
        raise NotImplementedError(
            f"experts {tuple(weight.shape)} with learned scales, placed as {placements}, and scales that are not split "
            "alike; accepted: whole experts on each rank (Shard(0)), for the parameters of scales too, or prepare_ "
            "with scales='present'"
        )
    own: list[Any] = [
        None if t is None else t.to_local(grad_placements=placements) for t in (weight, scale, zero)
    ]
    return placed_as(weight, settled_by(*own))
