"""prepare_ and restore_: between them, train as usual.

train.prepare_(model, Int8MixedPrecision())           # products of linear layers run in int8
optimizer = AdamW8bit(model.parameters())             # made after prepare_, which replaces the parameters
...                                                   # train
train.restore_(model)                                 # plain weights, as they were trained
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.convert import (
    Filter,
    Report,
    Target,
    TrainingSchemes,
    find_owners,
    find_targets,
    replace_weights,
)
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.bitnet import BitNetTensor
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.mixed_precision import MixedPrecisionTensor
from lowbit.tensor.sharded_linear import make_plain, make_shardable
from lowbit.train.prepared import forget_prepared, remember_prepared, was_prepared
from lowbit.train_scheme import (
    BitNet,
    Float8MixedPrecision,
    Int8MixedPrecision,
    Int8Weight,
    TrainingScheme,
)

TENSORS: dict[type[TrainingScheme], type[LowbitTensor]] = {
    Int8MixedPrecision: MixedPrecisionTensor,
    Float8MixedPrecision: MixedPrecisionTensor,
    Int8Weight: Int8WeightTensor,
    BitNet: BitNetTensor,
}
"""The tensor that carries a scheme out: made as `cls(weight, scheme)`, and has that `scheme`."""


def prepare_(model: nn.Module, scheme: TrainingSchemes, filter_fn: Filter | None = None) -> Report:
    """Make the weights of `model` train by `scheme`, in place, and report which do and which were left alone.

    Arguments and errors are those of `lowbit.quantize_`, with training schemes. The parameters are replaced (those
    of mixed precision share the old ones' memory; all keep their gradients): make the optimizer afterwards, and shard
    afterwards too. Each `nn.Linear` becomes a subclass of it, for tensor
    parallelism. The state dict stays that of the plain
    model, as far as weights are kept in high precision.

    Low-bit products run on GPUs that have units for them (int8: compute capability 8.0, float8: 8.9), where they gain
    by what was measured: too small weights are left alone, and products with too few rows run in high precision. What a
    scheme leaves alone by a rule of its own is reported, even if it is all of the model. On a
    CPU all run in high precision, unless the scheme has `always=True`. `lowbit.trace` tells which products ran in what.

    Raises also ValueError for weights on a GPU that has no such units.
    """
    targets, report = find_targets(model, scheme, filter_fn, TrainingScheme)
    owners = {module for target in targets for module, _, _ in target.owners}
    report = replace_weights(targets, report, _prepared, trainable=True)
    make_shardable(owners)
    remember_prepared(model, report)
    return report.count(model)


def _prepared(target: Target) -> Tensor:
    if isinstance(target.scheme, Int8Weight):  # its random draws are told by the name
        return Int8WeightTensor(target.weight, target.scheme, target.owners[0][2])
    return TENSORS[type(target.scheme)](target.weight, target.scheme)


def restore_(model: nn.Module) -> Report:
    """Give a prepared model plain weights back, in place: those it trained, in their dtype, still trainable.

    The parameters are replaced (those of mixed precision share the old ones' memory).

    Where `prepare_` left all weights alone, nothing is done, and the report says so.

    Raises:
        ValueError: the model was never prepared, or is sharded. It is then as it was.
    """
    targets = prepared_targets(model, tuple(TENSORS.values()), "restore")
    report = replace_prepared(targets, _plain, "plain again", trainable=True)
    return forget_prepared(model, report).count(model)


def prepared_targets(model: nn.Module, kinds: tuple[type, ...], what: str) -> list[Target]:
    """The prepared weights of these classes. Raises ValueError for sharded ones, and if there are none, unless
    `prepare_` left all weights alone."""
    targets = []
    others = False
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight = getattr(module, name)
        others |= isinstance(weight, tuple(TENSORS.values()))
        if isinstance(weight, DTensor) and isinstance(weight.to_local(), kinds):
            raise ValueError(
                f"{fqn} is sharded: gather the state dict, load it into a model on one process, and {what} that"
            )
        if isinstance(weight, kinds):
            targets.append(Target(weight, weight.scheme, tuple(owners)))  # type: ignore[arg-type, attr-defined]
    if not targets and (others or not was_prepared(model)):
        names = " or ".join(sorted({kind.__name__ for kind in kinds}))
        raise ValueError(
            f"{type(model).__name__} has no weights that lowbit.train.prepare_ prepared, none to {what}; accepted: "
            f"{names}"
        )
    return targets


def replace_prepared(
    targets: list[Target],
    make: Callable[[Target], Tensor],
    note: str,
    trainable: bool,
    report: Report | None = None,
) -> Report:
    """Replace prepared weights, undo what `prepare_` did to their modules, and complete the report."""
    modules: set[nn.Module] = {module for target in targets for module, _, _ in target.owners}
    report = replace_weights(targets, report or Report(), make, trainable=trainable, note=note)
    make_plain(modules)
    return report


def _plain(target: Target) -> Tensor:
    weight = target.weight
    assert isinstance(weight, LowbitTensor)
    return weight.master().detach().to(weight.dtype)
