"""JointScales: scales of which a part is shared with sibling weights (`Spec.joins`).

A product rounds the weight by the global scale that it and its siblings have now: that of the one with the largest
magnitude (`Spec.joint_part`). So each module knows the others (`lowbit.layers.prepared.make_siblings`). Nothing is
stored besides the weights, and state dicts are those of the plain model. A parameter finds its siblings through its
module, also outside of forward. A copy of the parameter, or what FSDP2 gathers, has none and raises an error.

Under FSDP2 the siblings are gathered together: they belong to one `fully_shard` unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.numerics.spec import Spec
from lowbit.tensor.core import LowbitTensor, largest_over_ranks
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import PresentScales, Scales
from lowbit.tensor.trained.trainable import TrainableTensor


@dataclass(frozen=True, repr=False)
class JointScales(PresentScales):
    """Present scales, of which a part is that of all siblings (see the module)."""

    has_scales_beside: ClassVar[bool] = True
    swaps_last: ClassVar[bool] = (
        False  # a view has no siblings; its values have been rounded with them
    )
    is_describable: ClassVar[bool] = (
        False  # read from a file, a weight would be without its siblings
    )

    def scales_in(self, module: Any, attribute: str = "weight") -> Scales:
        return None, None, joint_of(module)

    def scales_alone(self, weight: Any, what: str) -> Scales:
        """Raises NotImplementedError for a tensor that is not the parameter of a module that knows its siblings, such
        as a copy."""
        known = None if torch.compiler.is_compiling() else weight.holder
        module = None if known is None else known()
        if module is None or _weight_of(module) is not weight:
            raise weight._unsupported(
                f"{what} without its siblings, with which it shares a part of its scales; call the module, whose "
                "forward has them, or make it a weight for inference by lowbit.qat.convert_(model)"
            )
        return self.scales_in(module)


def is_joint(weight: Any) -> bool:
    """True for a fake-quantized weight that shares a part of its scales."""
    return isinstance(weight, FakeQuantizedTensor) and isinstance(weight.quantizer, JointScales)


def _weight_of(module: nn.Module) -> Tensor | None:
    """The parameter that is the weight of a linear. Pruning gives it another name. None: the module has none."""
    joint = (p for p in module._parameters.values() if is_joint(p))
    return next(joint, module._parameters.get("weight"))


@torch.no_grad()
def joint_of(module: Any) -> Tensor:
    """The part of the scales that the weight of `module` and its siblings share now. A collective of all ranks where
    they are sharded.

    Raises NotImplementedError for siblings that are sharded while this module's weight is not, and for one whose weight
    a parametrization computes.
    """
    held: Any = _weight_of(module)
    spec: Spec = held_locally(held).scheme.weight
    values = []
    for sibling in module.siblings:
        weight = _weight_of(sibling)
        if weight is None:
            raise NotImplementedError(
                f"a weight {tuple(held.shape)} prepared for QAT in {spec} shares a part of its scales with a "
                f"{type(sibling).__name__} that has no weight of its own, as under torch.nn.utils.parametrize; "
                "accepted: torch.nn.utils.parametrize.remove_parametrizations, or None for that layer in prepare_"
            )
        if is_dtensor(weight) and not is_dtensor(held):
            raise NotImplementedError(
                f"a sibling of a weight {tuple(held.shape)} prepared for QAT in {spec} is sharded while this one is "
                "gathered, and both share a part of their scales; accepted: siblings in one fully_shard unit, such as "
                "their block"
            )
        part = held_locally(weight)
        own = part.values() if isinstance(part, TrainableTensor) else part
        if not isinstance(own, LowbitTensor):  # one that is converted has its scales
            # a rank may hold no row
            values.append(own.detach() if own.numel() else own.new_zeros((1, *own.shape[1:])))
    dtype = spec.scale_dtype_for(values[0].dtype)
    if not is_dtensor(held):
        return spec.joint_part(values, dtype)
    return spec.joint_part(values, dtype, partial(largest_over_ranks, mesh=held.device_mesh))


def joint_parts(targets: Iterable[Any]) -> dict[str, Tensor]:
    """`joint_of` of each target whose weight has JointScales, by its first name, before any is replaced."""
    found: dict[int, Tensor] = {}
    for target in targets:
        module = target.owners[0].module
        if is_joint(target.weight) and id(module) not in found:
            joint = joint_of(module)
            found |= {id(sibling): joint for sibling in module.siblings}
    return {
        target.fqn: found[id(target.owners[0].module)]
        for target in targets
        if is_joint(target.weight)
    }
