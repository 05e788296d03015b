"""dequantize_: turn a model in low bits, of any kind, into a plain one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lowbit.convert import (
    Entry,
    Filter,
    Report,
    Target,
    check_held,
    check_module,
    find_owners,
    watch_joined,
)
from lowbit.layers import cache_scales
from lowbit.numerics.sharded import is_dtensor
from lowbit.qat.lora import merging_layers
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.joint import is_joint, joint_parts
from lowbit.train.prepare import replace_prepared
from lowbit.train.prepared import forget_prepared, was_prepared

_FROZEN = "plain, frozen as it was: requires_grad_(True) trains it"


def dequantize_(model: nn.Module, filter_fn: Filter | None = None) -> Report:
    """Replace every low-bit weight of `model` by a plain one with the values that its products see, in place.

        lowbit.dequantize_(model)                  # before PEFT's merge_and_unload, an export, another quantization
        lowbit.dequantize_(model, lambda module, name: name == "lm_head")

    | weights                                    | values                                                          |
    |--------------------------------------------|-----------------------------------------------------------------|
    | quantized, ternary, int8 and int4 weights  | the dequantized codes                                           |
    | prepared for QAT, `BitNet`                 | the trained weights as products round them; without rounding    |
    |                                            | `lowbit.qat.undo_` and `lowbit.train.restore_` give them        |
    | mixed precision                            | the trained weights themselves, in the same memory              |

    Each weight keeps its dtype, device, `requires_grad` and gradient. A quantized weight is frozen and becomes a plain
    frozen one, which `model.requires_grad_(True)` then makes trainable. The parameters are replaced: make an optimizer
    afterwards. Ties stay ties, and prepared modules are again what they were before. Static scales of a KV cache
    (`lowbit.calibrate`) go too, if no `filter_fn` is given.

    Args:
        model: any module.
        filter_fn: `(module, name) -> bool`, which modules' weights to replace; default: all. Any module that holds a
            tied weight can choose it.

    Returns:
        A report of the weights.

    Raises:
        TypeError: `model` is not a module, or `filter_fn` is not a function.
        ValueError: no chosen weight is in low bits, unless `lowbit.train.prepare_` left all alone; a weight is
            sharded, or accelerate offloads it; a weight that products see with LoRA adapters merged. The model is then
            as it was.
    """
    check_module(model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn must be a function of a module and its name, or None, got {filter_fn!r}"
        )
    left = Report()
    chosen = _targets(model, filter_fn, left)
    if not chosen and not was_prepared(model):
        raise ValueError(
            f"{type(model).__name__} has no weights in low bits{' that the filter chooses' if filter_fn else ''}, none "
            "to dequantize"
        )
    frozen = [t for t in chosen if not t.weight.requires_grad]
    trained = [t for t in chosen if t.weight.requires_grad]
    joint = joint_parts(chosen)  # before the first weight is replaced
    del chosen  # so that the memory of each old weight is free before the next one is replaced
    report = left
    for targets, note in ((frozen, _FROZEN), (trained, "plain")):
        report = replace_prepared(
            model, targets, lambda t: _plain(t, joint), note, trainable=True, report=report
        )
    watch_joined(model)
    if filter_fn is None:
        forget_prepared(model, report)
        cache_scales.forget(model)
    return report.count(model)


def _targets(model: nn.Module, filter_fn: Filter | None, left: Report) -> list[Target]:
    """The chosen low-bit weights; `left` gets the others. Raises ValueError for a sharded weight, and for a weight that
    a LoRA layer merges with its adapters."""
    targets, merging = [], merging_layers(model)
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight = getattr(module, name)
        if not isinstance(local(weight), LowbitTensor):
            continue
        if filter_fn is not None and not any(
            filter_fn(owner, full.removesuffix(own).removesuffix("."))
            for owner, own, full in owners
        ):
            shape = tuple(weight.shape)
            left.entries += [
                Entry(n, shape, False, "not selected by the filter") for _, _, n in owners
            ]
            continue
        check_held(owners[0], weight)
        if id(weight) in merging:
            raise ValueError(
                f"{fqn} is prepared for QAT with its adapters merged, so its products see other values: call "
                "lowbit.qat.convert_(model) first, which merges them for good"
            )
        if is_dtensor(weight):
            raise ValueError(
                f"{fqn} is sharded: gather the state dict, load it into a model on one process, and dequantize that"
            )
        targets.append(Target(weight, None, tuple(owners)))
    return targets


def _plain(target: Target, joint: Mapping[str, Tensor]) -> Tensor:
    """The plain values of a weight. `joint`: what siblings share, by the names of the weights."""
    if is_joint(target.weight):
        assert isinstance(target.weight, FakeQuantizedTensor)
        weight, shared = target.weight, joint[target.fqn]
        return weight.rounded(weight.weight, joint=shared).detach().to(weight.dtype).contiguous()
    assert isinstance(target.weight, LowbitTensor)
    return target.weight.dequantize().detach().contiguous()
