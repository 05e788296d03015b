"""prepare_ and restore_: between them, train as usual.

train.prepare_(model, Int8MixedPrecision())           # products of linear layers run in int8
optimizer = AdamW8bit(model.parameters())             # made after prepare_, which replaces the parameters
...                                                   # train
train.restore_(model)                                 # plain weights, as they were trained
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowbit.convert import (
    Filter,
    Report,
    Target,
    TrainingSchemes,
    check_held,
    find_owners,
    find_targets,
    modules_of,
    replace_weights,
)
from lowbit.layers.prepared import make_plain, make_prepared
from lowbit.numerics.settings import device_of
from lowbit.numerics.sharded import is_dtensor
from lowbit.schemes.training import TrainingScheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.train.prepared import forget_prepared, remember_prepared, was_prepared


def prepare_(
    model: nn.Module,
    scheme: TrainingSchemes,
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Make the weights of `model` train by `scheme`, in place. The report lists these weights, and those left alone.

    `scheme`, `filter_fn`, `device` and errors are those of `lowbit.quantize_`, with training schemes. Experts stored as
    [experts, inputs, outputs] have no low-bit products. A scheme that asks for some leaves them alone unless the filter
    takes them.

    Weights that are quantized already, as of `lowbit.load_pretrained`, are trained from their values where the scheme
    says so: `Int8Weight` and `Int4Weight`, and schemes of mixed precision in the blocks in which float8 weights are
    stored. Others stay packed.

    The parameters are replaced (those of mixed precision share the memory of the old ones; all keep their gradients):
    make the optimizer, and shard, afterwards. Each `nn.Linear` becomes a subclass of it, for tensor parallelism.
    Weights that are kept in high precision have the same entries in the state dict as those of the plain model.

    Low-bit products run on GPUs with units for them (int8: compute capability 8.0, float8: 8.9), where measurements
    show a gain: `prepare_` leaves too small weights alone, and products with too few rows run in high precision. The
    report names every weight that a rule of the scheme leaves alone, even if that is the whole model. On a CPU, all
    products run in high precision, unless the scheme has `always=True`. `lowbit.trace` reports the format of each
    product.

    Also raises ValueError for weights on a GPU that has no such units.
    """
    targets, report = find_targets(model, scheme, filter_fn, TrainingScheme)
    if device is not None:
        device = device_of("device", device)  # `.to` takes a dtype too
        for target in targets:
            target.scheme.check(torch.empty(0, dtype=target.weight.dtype, device=device))
    modules = modules_of(targets)
    report = replace_weights(targets, report, _prepared, trainable=True, device=device)
    if device is not None:
        model.to(device)
    make_prepared(modules, [nn.Linear])
    remember_prepared(model, report)
    return report.count(model)


def _prepared(target: Target) -> Tensor:
    kind = TrainableTensor.of(target.scheme)
    return kind.prepared(target.weight, target.scheme, target.fqn)


def restore_(model: nn.Module) -> Report:
    """Give a prepared `model` plain weights again, in place: the trained values, in their dtype, still trainable.

    The parameters are replaced (those of mixed precision share the memory of the old ones).

    If `prepare_` left all weights alone, nothing changes, and the report says so.

    Raises:
        ValueError: the model was never prepared, or is sharded. The model then stays unchanged.
    """
    targets = prepared_targets(model, TrainableTensor.for_schemes(TrainingScheme), "restore")
    report = replace_prepared(model, targets, _plain, "plain again", trainable=True)
    return forget_prepared(model, report).count(model)


def prepared_targets(model: nn.Module, kinds: tuple[type, ...], what: str) -> list[Target]:
    """The prepared weights of these classes. Raises ValueError for a sharded or offloaded weight, and if the model has
    none of these weights, unless `prepare_` left all alone."""
    all_kinds = TrainableTensor.for_schemes(TrainingScheme)
    targets: list[Target] = []
    other: type[TrainableTensor] | None = None
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight = getattr(module, name)
        if isinstance(weight, all_kinds):
            other = type(weight)
        if is_dtensor(weight) and isinstance(local(weight), all_kinds):
            raise ValueError(
                f"{fqn} is sharded: gather the state dict, load it into a model on one process, and {what} that"
            )
        if isinstance(weight, kinds):
            assert isinstance(weight, TrainableTensor)
            check_held(owners[0], weight)
            targets.append(Target(weight, weight.scheme, tuple(owners)))
    if not targets and other is not None:
        raise ValueError(
            f"{type(model).__name__} has weights prepared for training, but none to {what}: {other.__name__} is "
            f"{other.stays}"
        )
    if not targets and not was_prepared(model):
        names = " or ".join(sorted({kind.__name__ for kind in kinds}))
        raise ValueError(
            f"{type(model).__name__} has no weights that lowbit.train.prepare_ prepared, none to {what}; accepted: "
            f"{names}"
        )
    return targets


def replace_prepared(
    model: nn.Module,
    targets: list[Target],
    make: Callable[[Target], Tensor],
    note: str,
    trainable: bool,
    report: Report | None = None,
) -> Report:
    """`replace_weights` for prepared weights of `model`. Also undoes what `prepare_` did to its modules. The other
    `Args:` are the same."""
    modules = modules_of(targets)
    report = replace_weights(targets, report or Report(), make, trainable=trainable, note=note)
    make_plain(model, modules)
    return report


def _plain(target: Target) -> Tensor:
    weight = target.weight
    assert isinstance(weight, LowbitTensor)
    return weight.master().detach().to(weight.dtype)
