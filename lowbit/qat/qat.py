"""prepare_ and convert_: between them, train as usual.

    qat.prepare_(model, Int4WeightOnly(group_size=32))    # weights fake-quantize in every product
    optimizer = AdamW4bit(model.parameters())             # made after prepare_, which replaces the parameters
    ...                                                   # train
    qat.convert_(model)                                   # int4 weights, equal to the last bit to those trained

The straight-through estimator (arXiv 1308.3432) carries gradients through the rounding; scales are those of the
present weight at every step. Source of the procedure: Jacob et al., arXiv 1712.05877.
"""

from __future__ import annotations

from torch import nn

from lowbit.tensor.affine_tensor import AffineTensor, check_weight
from lowbit.tensor.apply import Filter, Report, Schemes, Target, find_targets, replace_weights
from lowbit.tensor.fake_quantized import FakeQuantizedTensor


def prepare_(model: nn.Module, scheme: Schemes, filter_fn: Filter | None = None) -> Report:
    """Make the weights of `model` fake-quantize in every product, in place; they stay trainable.

    Arguments, report and errors are those of `lowbit.quantize_`. The parameters are replaced (the new ones share the
    old ones' memory): make the optimizer afterwards.
    """
    targets, report = find_targets(model, scheme, filter_fn)
    return replace_weights(
        targets, report, lambda t: FakeQuantizedTensor(t.weight, t.scheme), trainable=True
    )


def convert_(model: nn.Module) -> Report:
    """Quantize the weights of a prepared model for good, each by the scheme it was prepared with, in place.

    Dequantized, they equal the fake-quantized ones to the bit.

    Raises:
        ValueError: the model was never prepared, or a trained weight has NaN or infinite values. The model is then
        as it was.
    """
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    weights: dict[int, FakeQuantizedTensor] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if isinstance(param, FakeQuantizedTensor):
                owners.setdefault(id(param), []).append(
                    (module, name, f"{prefix}.{name}" if prefix else name)
                )
                weights[id(param)] = param
    if not weights:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights; call lowbit.qat.prepare_(model, scheme) and train first, "
            "or lowbit.quantize_(model, scheme) to convert without training"
        )
    for key, weight in weights.items():
        check_weight(weight.weight, owners[key][0][2])
    targets = [Target(w.weight, w.scheme, tuple(owners[key])) for key, w in weights.items()]
    return replace_weights(
        targets,
        Report(),
        lambda t: AffineTensor.from_float(t.weight, t.scheme),
        trainable=False,
    )
