"""convert_: make a trained model one for inference, with the very same weights."""

from __future__ import annotations

from torch import Tensor, nn

from lowbit.convert import Entry, Report, Target, find_owners
from lowbit.schemes.training import TrainingScheme
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.train.prepare import prepared_targets, replace_prepared
from lowbit.train.prepared import forget_prepared


def convert_(model: nn.Module) -> Report:
    """Freeze the low-bit weights of a prepared model for inference, in place.

    BitNet weights become `TernaryTensor`, 2 bits an element, and give the outputs of training, to the bit. int8
    weights become `AffineTensor` of `Int8WeightOnly()`. Their values are the same, and so are outputs, unless training
    multiplied int8 x int8 (`Int8Weight(output=True)`). Weights of `Float8BlockMixedPrecision` become `Float8Tensor`
    with `PerBlock(128, 128)`, the codes that the output's product read. The report lists other weights of mixed
    precision, which stay. If `prepare_` left all weights alone, nothing changes, and the report says so.

    Args:
        model: prepared by `lowbit.train.prepare_`.

    Raises:
        ValueError: the model has no such weights, or is sharded or offloaded, or a weight has NaN or infinite values.
            The model is then as it was.
    """
    kinds = TrainableTensor.for_schemes(TrainingScheme)
    targets = prepared_targets(model, tuple(k for k in kinds if not k.stays), "convert")
    for target in targets:
        assert isinstance(target.weight, TrainableTensor)
        check_weight(target.weight.master(), target.fqn)
    report = replace_prepared(
        model, targets, _frozen, "for inference", trainable=False, report=_staying(model)
    )
    return forget_prepared(model, report).count(model)


def _staying(model: nn.Module) -> Report:
    """The prepared weights that have no form for inference."""
    report = Report()
    for owners in find_owners(model).values():
        module, name, _ = owners[0]
        weight = getattr(module, name)
        own = local(weight)
        if isinstance(own, TrainableTensor) and own.stays:
            report.entries += [
                Entry(fqn, tuple(weight.shape), False, own.stays) for _, _, fqn in owners
            ]
    return report


def _frozen(target: Target) -> Tensor:
    assert isinstance(target.weight, TrainableTensor)
    return target.weight.frozen()
