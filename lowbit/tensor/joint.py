"""JointTensor: a FakeQuantizedTensor that shares a part of its scales with sibling weights (`Spec.joins`).

A product rounds the weight by the global scale that it and its siblings have now: that of the one with the largest
magnitude (`Spec.joint_part`). `F.linear(x, module.weight)` has one weight alone, so here the module multiplies:
`make_siblings` makes each `nn.Linear` a `Linear`, which knows the others. Nothing is stored besides the weights, so
state dicts are those of the plain model.

Under FSDP2 the siblings are gathered together: they belong to one `fully_shard` unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.scheme import Spec
from lowbit.tensor import sharded_linear
from lowbit.tensor.affine_tensor import representation_of
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.coded_linear import CodedWeight, coded_weight
from lowbit.tensor.fake_quantized import FakeQuantizedTensor, Qparams
from lowbit.tensor.trainable import TrainableTensor, Values


class JointTensor(FakeQuantizedTensor):
    """See the module."""

    is_described = False  # read from a file, it would be without its siblings

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
        found = self.frozen_as.from_float(
            self.weight, self.scheme, input_qparams=input_qparams, joint=joint
        )
        return found.to(self.dtype)  # type: ignore[return-value]

    def _alone(self, what: str) -> NotImplementedError:
        return self._unsupported(
            f"{what} without its siblings, with which it shares a part of its scales; call the module, whose forward "
            "has them, or make it a weight for inference by lowbit.qat.convert_(model)"
        )

    def fake_quantized(self) -> Tensor:
        raise self._alone("a product")

    def coded(self) -> CodedWeight:
        raise self._alone("a product")

    def dequantize(self) -> Tensor:
        raise self._alone("dequantization")

    def frozen(self, input_qparams: Qparams | None = None) -> LowbitTensor:
        raise self._alone("conversion")

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Without siblings, only while the rounding of the weight is off."""
        cls.check_operands(input, weight)
        return cls.product(input, weight, weight.operand, None, bias)


class Linear(sharded_linear.Linear):
    """nn.Linear whose weight shares a part of its scales with those of its siblings."""

    siblings: tuple[nn.Module, ...]
    """All modules that share it, this one included."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        if not isinstance(weight, JointTensor) or not weight.rounds_weight:
            return super().forward(input)
        joint = joint_of(self)
        seen, coded = operands(weight, joint)
        return FakeQuantizedTensor.product(input, weight, seen, coded, self.bias, joint=joint)


def operands(weight: JointTensor, joint: Tensor) -> tuple[Any, Any]:
    """What products see of the weight, and the same as codes. It is no method, since Dynamo takes each method of a
    tensor for one of its operations, which return tensors."""
    return partial(weight.rounded_with, joint), partial(weight.coded_with, joint)


sharded_linear.MADE.append(Linear)


@torch.no_grad()
def joint_of(module: Linear) -> Tensor:
    """The part of the scales that the weight of `module` and its siblings share now.

    Raises NotImplementedError for siblings that are sharded while this module's weight is not.
    """
    held: Any = module.weight
    spec: Spec = held.scheme.weight
    values = []
    for sibling in module.siblings:
        weight = sibling._parameters["weight"]
        if isinstance(weight, DTensor):
            raise NotImplementedError(
                f"a sibling of a weight {tuple(module.weight.shape)} prepared for QAT in {spec} is sharded while this "
                "one is gathered, and both share a part of their scales; accepted: siblings in one fully_shard unit, "
                "such as their block"
            )
        own = weight.values() if isinstance(weight, TrainableTensor) else weight
        if own is not None and not isinstance(
            own, LowbitTensor
        ):  # one that is converted has its scales
            values.append(own.detach())
    dtype = representation_of(spec).scale_dtype(spec, values[0].dtype)
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


def make_siblings(modules: Sequence[nn.Module]) -> None:
    """Make these linears, whose weights are JointTensors, know each other."""
    for module in modules:
        module.__class__ = Linear
        module.__dict__["siblings"] = tuple(modules)


def forget_siblings(modules: Iterable[nn.Module]) -> None:
    """Undo `make_siblings`, apart from the class of the modules."""
    for module in modules:
        module.__dict__.pop("siblings", None)
