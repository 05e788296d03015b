"""prepare_ and convert_: between them, train as usual.

    qat.prepare_(model, Int4WeightOnly(group_size=32))    # weights fake-quantize in every product
    optimizer = AdamW4bit(model.parameters())             # made after prepare_, which replaces the parameters
    ...                                                   # train
    qat.convert_(model)                                   # int4 weights, equal to the last bit to those trained

The straight-through estimator (arXiv 1308.3432) carries gradients through the rounding; scales are those of the
present weight at every step. Source of the procedure: Jacob et al., arXiv 1712.05877.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.convert import (
    Filter,
    Report,
    Schemes,
    Target,
    find_owners,
    find_targets,
    replace_weights,
)
from lowbit.tensor.base import check_weight
from lowbit.tensor.dtensor import local
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.sharded_linear import make_plain, make_shardable


def prepare_(model: nn.Module, scheme: Schemes, filter_fn: Filter | None = None) -> Report:
    """Make the weights of `model` fake-quantize in every product, in place; they stay trainable.

    Arguments, report and errors are those of `lowbit.quantize_`. The parameters are replaced (the new ones share the
    old ones' memory): make the optimizer afterwards. The state dict stays that of the plain model. Each `nn.Linear`
    becomes a subclass of it until `convert_`, so that tensor parallelism can split its weight.
    """
    targets, report = find_targets(model, scheme, filter_fn)
    modules = _modules(targets)
    report = replace_weights(
        targets, report, lambda t: FakeQuantizedTensor(t.weight, t.scheme), trainable=True
    )
    make_shardable(modules)
    return report.count(model)


def _modules(targets: list[Target]) -> set[nn.Module]:
    return {module for target in targets for module, _, _ in target.owners}


def convert_(model: nn.Module) -> Report:
    """Quantize the weights of a prepared model for good, each by the scheme it was prepared with, in place.

    Dequantized, they equal the fake-quantized ones to the bit.

    Raises:
        ValueError: the model was never prepared, or a trained weight has NaN or infinite values. The model is then
        as it was.
    """
    targets = []
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight = getattr(module, name)
        if isinstance(weight, DTensor) and isinstance(local(weight), FakeQuantizedTensor):
            raise ValueError(
                f"{fqn} is sharded: gather the state dict, load it into a prepared model on one process, convert that"
            )
        if isinstance(weight, FakeQuantizedTensor):
            check_weight(weight.weight, fqn)
            targets.append(Target(weight, weight.scheme, tuple(owners)))
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights; call lowbit.qat.prepare_(model, scheme) and train first, "
            "or lowbit.quantize_(model, scheme) to convert without training"
        )
    modules = _modules(targets)
    report = replace_weights(targets, Report(), _frozen, trainable=False)
    make_plain(modules)
    return report.count(model)


def _frozen(target: Target) -> Tensor:
    assert isinstance(target.weight, FakeQuantizedTensor)
    return target.weight.frozen()
