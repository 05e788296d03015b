"""The class of a prepared weight, by the module that holds it and by what is trained."""

from __future__ import annotations

from lowbit.convert import Target, is_conv
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor, Role
from lowbit.tensor.trained.joint import JointTensor
from lowbit.tensor.trained.learned_scales import LearnedScalesTensor


def prepared_kind(target: Target, learned: bool, joint: bool = False) -> type[FakeQuantizedTensor]:
    """`learned`: its scales are parameters. `joint`: it shares a part of its scales with siblings."""
    if joint:
        return JointTensor
    return LearnedScalesTensor if learned else FakeQuantizedTensor


def role_of(target: Target) -> Role:
    """What the weight is to its layer."""
    return "convolution" if is_conv(target) else "matrix"
