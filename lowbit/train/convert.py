"""convert_: a model trained with int8 or ternary weights as one for inference, of the very same weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.convert import Entry, Report, Target, find_owners
from lowbit.presets import Int8WeightOnly
from lowbit.tensor.affine_tensor import AffineTensor, check_weight
from lowbit.tensor.bitnet import BitNetTensor
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.mixed_precision import MixedPrecisionTensor
from lowbit.tensor.ternary import TernaryTensor
from lowbit.train.prepare import prepared_targets, replace_prepared
from lowbit.train.prepared import forget_prepared

_MIXED = "a weight in high precision: lowbit.train.restore_(model) makes it plain"


def convert_(model: nn.Module) -> Report:
    """Make the weights that `prepare_` gave `BitNet()` or `Int8Weight()` frozen ones for inference, in place.

    BitNet weights become `TernaryTensor`, 2 bits an element, and compute what they did in training, to the bit. int8
    weights become `AffineTensor` of `Int8WeightOnly()`: their values are the same, and so are outputs, unless training
    multiplied int8 x int8 (`Int8Weight(output=True)`). Weights of mixed precision are left, and reported. Where
    `prepare_` left all weights alone, nothing is done, and the report says so.

    Raises:
        ValueError: there are none, the model is sharded, or a weight has NaN or infinite values. It is then as it was.
    """
    targets = prepared_targets(model, (BitNetTensor, Int8WeightTensor), "convert")
    for target in targets:
        assert isinstance(target.weight, BitNetTensor | Int8WeightTensor)
        check_weight(target.weight.master(), target.owners[0][2])
    report = replace_prepared(
        targets, _frozen, "for inference", trainable=False, report=_mixed(model)
    )
    return forget_prepared(model, report).count(model)


def _mixed(model: nn.Module) -> Report:
    """The weights of mixed precision, which have nothing to be converted to."""
    report = Report()
    for owners in find_owners(model).values():
        module, name, _ = owners[0]
        weight = getattr(module, name)
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if isinstance(local, MixedPrecisionTensor):
            report.entries += [
                Entry(fqn, tuple(weight.shape), False, _MIXED) for _, _, fqn in owners
            ]
    return report


def _frozen(target: Target) -> Tensor:
    weight = target.weight
    if isinstance(weight, BitNetTensor):
        return TernaryTensor(weight.weight).to(weight.dtype)
    assert isinstance(weight, Int8WeightTensor)
    spec = Int8WeightOnly().weight
    scale = (
        weight.scale.new_ones(spec.blocks(weight.shape)) if weight.numel() == 0 else weight.scale
    )
    return AffineTensor(weight.codes, scale, None, spec, weight.shape, weight.dtype)
