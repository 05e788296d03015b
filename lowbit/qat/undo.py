"""undo_: a prepared model with plain weights again, without quantizing them."""

from __future__ import annotations

from torch import nn

from lowbit.convert import Report, check_module, modules_of, replace_weights
from lowbit.layers.prepared import make_plain
from lowbit.qat.exchange import plain_weight, prepared_targets
from lowbit.qat.lora import multiply_as_before
from lowbit.tensor.core.regather import reshard


def undo_(model: nn.Module) -> Report:
    """Give a prepared model plain weights again, in place: the trained high-precision ones, in their dtype.

    They keep `requires_grad`, gradient, hooks and ties. The parameters are replaced and share the old ones' memory,
    so make an optimizer afterwards. Modules are of the class that they had before `prepare_`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: nothing is prepared, or the model is sharded or offloaded. It is then as it was.
    """
    check_module(model)
    reshard(model)  # so that no gathered weight passes for one that is not sharded
    targets = prepared_targets(
        model,
        "gather the state dict and load it into a plain model, which takes the trained high-precision weights",
    )
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights, none to undo; lowbit.dequantize_(model) gives plain "
            "weights for those of other kinds"
        )
    modules = modules_of(targets)
    report = replace_weights(
        targets, Report(), lambda t: plain_weight(t.weight), trainable=True, note="plain again"
    )
    multiply_as_before(model.modules())
    make_plain(model, modules)
    return report.count(model)
