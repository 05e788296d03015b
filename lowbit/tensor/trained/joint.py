"""JointTensor: a FakeQuantizedTensor that shares a part of its scales with sibling weights (`Spec.joins`).

A product rounds the weight by the global scale that it and its siblings have now: that of the one with the largest
magnitude (`Spec.joint_part`). So each module knows the others (`lowbit.layers.prepared.make_siblings`). Nothing is
stored besides the weights, and state dicts are those of the plain model. A parameter finds its siblings through its
module, also outside of forward. A copy of the parameter, or what FSDP2 gathers, has none and raises an error.

Under FSDP2 the siblings are gathered together: they belong to one `fully_shard` unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.linear.coded_linear import CodedWeight, coded_weight
from lowbit.linear.dequantized import Values
from lowbit.numerics.sharded import is_dtensor
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor, Qparams, frozen_as
from lowbit.tensor.trained.trainable import TrainableTensor


class JointTensor(FakeQuantizedTensor):
    """See the module."""

    is_described = False  # read from a file, it would be without its siblings
    caches = ("holder",)
    holder: weakref.ref[nn.Module] | None = None
    """The module of the parameter, which knows its siblings."""

    def rounded_with(self, joint: Tensor) -> Tensor:
        """The weight as its products see it: plain, differentiable, equal to the converted weight's values. `joint`: of
        it and its siblings."""
        return self.rounded(Values.apply(self), joint)

    def coded_with(self, joint: Tensor) -> CodedWeight:
        """`rounded_with` for a product of codes."""
        return coded_weight(Values.apply(self), self.scheme.weight, joint)

    def dequantized_with(self, joint: Tensor) -> Tensor:
        """The values that the converted weight will have, in this tensor's dtype, without gradient."""
        return self.rounded(self.weight.detach(), joint).to(self.dtype)

    def frozen_with(self, joint: Tensor, input_qparams: Qparams | None = None) -> LowbitTensor:
        """`frozen` with the part of the scales that siblings share."""
        found = frozen_as(self).from_float(
            self.weight, self.scheme, input_qparams=input_qparams, joint=joint
        )
        return found.to(self.dtype)

    def scales_elsewhere(self, what: str) -> Tensor:
        """What its scales share with those of its siblings now. Raises NotImplementedError for a tensor that is not the
        parameter of a module that knows them, such as a copy; `what` then needs them."""
        known = None if torch.compiler.is_compiling() else self.holder
        module = None if known is None else known()
        if module is None or _weight_of(module) is not self:
            raise self._unsupported(
                f"{what} without its siblings, with which it shares a part of its scales; call the module, whose "
                "forward has them, or make it a weight for inference by lowbit.qat.convert_(model)"
            )
        return joint_of(module)

    @property
    def swaps_last(self) -> bool:
        return False  # a view has no siblings; its values have been rounded with them

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        cls.check_operands(input, weight)
        return cls.product(input, weight, weight.operand, weight.coded, bias)


def operands_with(weight: JointTensor, joint: Tensor) -> tuple[Any, Any]:
    """What products see of the weight, and the same as codes. It is not a method, since Dynamo takes each method of a
    tensor for one of its operations, which return tensors."""
    return partial(weight.rounded_with, joint), partial(weight.coded_with, joint)


def _weight_of(module: nn.Module) -> Tensor | None:
    """The parameter that is the weight of a linear. Pruning gives it another name. None: the module has none."""
    joint = (p for p in module._parameters.values() if isinstance(p, JointTensor))
    return next(joint, module._parameters.get("weight"))


@torch.no_grad()
def joint_of(module: Any) -> Tensor:
    """The part of the scales that the weight of `module` and its siblings share now.

    Raises NotImplementedError for siblings that are sharded while this module's weight is not, and for one whose weight
    a parametrization computes.
    """
    held: Any = _weight_of(module)
    spec: Spec = held.scheme.weight
    values = []
    for sibling in module.siblings:
        weight = _weight_of(sibling)
        if weight is None:
            raise NotImplementedError(
                f"a weight {tuple(held.shape)} prepared for QAT in {spec} shares a part of its scales with a "
                f"{type(sibling).__name__} that has no weight of its own, as under torch.nn.utils.parametrize; "
                "accepted: torch.nn.utils.parametrize.remove_parametrizations, or None for that layer in prepare_"
            )
        if is_dtensor(weight):
            raise NotImplementedError(
                f"a sibling of a weight {tuple(held.shape)} prepared for QAT in {spec} is sharded while this one is "
                "gathered, and both share a part of their scales; accepted: siblings in one fully_shard unit, such as "
                "their block"
            )
        own = weight.values() if isinstance(weight, TrainableTensor) else weight
        if not isinstance(own, LowbitTensor):  # one that is converted has its scales
            values.append(own.detach())
    dtype = spec.scale_dtype_for(values[0].dtype)
    return spec.joint_part(values, dtype)


def joint_parts(targets: Iterable[Any]) -> dict[str, Tensor]:
    """`joint_of` of each target whose weight is a JointTensor, by its first name, before any is replaced."""
    found: dict[int, Tensor] = {}
    for target in targets:
        module = target.owners[0].module
        if isinstance(target.weight, JointTensor) and id(module) not in found:
            joint = joint_of(module)
            found |= {id(sibling): joint for sibling in module.siblings}
    return {
        target.owners[0].fqn: found[id(target.owners[0].module)]
        for target in targets
        if isinstance(target.weight, JointTensor)
    }
