"""freeze_codes_: the second phase of EfficientQAT (arXiv 2407.11062), in which scales alone train, end to end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import Report, Target, replace_weights
from lowbit.qat.exchange import learned_scales, prepared_targets
from lowbit.qat.weights import prepared_weight


@torch.no_grad()
def freeze_codes_(model: nn.Module) -> list[Tensor]:
    """Freeze all parameters of a prepared model but its learned scales, in place, and give these.

        qat.train_blocks(model, model.model.layers, batches)
        optimizer = torch.optim.AdamW(qat.freeze_codes_(model), lr=1e-3)
        ...                                            # train on the model's loss, for a short time
        qat.convert_(model)

    The parameters of weights are replaced, so make the optimizer afterwards. Each weight becomes the values that
    products see, so outputs stay the same to the bit. Parameters of scales stay, and now hold the scales themselves,
    divided as `lowbit.numerics.learned_scales` says: no weight moves that they could follow. Codes stay while a scale
    changes by less than 1/2 divided by the largest code (25% for 2 bits, 12% for 3, 6% for 4), and ∂ŵ/∂s is the code.

    To freeze weights by `requires_grad_(False)` alone does worse than no second phase. Training leaves many weights
    near the middle between two codes, and they change their code when their scale moves a little.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no learned scales; a weight that its dtype cannot hold so exactly that its codes stay (8 bits in
            bfloat16). The model is then as it was.
    """
    scales: list[Tensor] = []
    pairs: list[tuple[Tensor, Any]] = []
    targets: list[Target] = []
    made: dict[int, Tensor] = {}
    for target in prepared_targets(model):
        found = learned_scales(target)
        if found is None:
            continue
        weight: Any = target.weight
        seen, spec = weight.quantized_by(*found), target.scheme.weight
        rows = weight.rows(weight.weight)
        scale, zero, _ = weight.quantizer.scales_at(rows, spec, (*found, None))
        frozen = replace(weight.quantizer, constant_codes=True, absolute=True)
        new: Any = prepared_weight(target, seen, target.scheme, frozen)
        if not torch.equal(new.quantized_by(scale, zero), seen):
            raise ValueError(
                f"{target.fqn} of {weight.weight.dtype} would change codes of {target.scheme.weight.format}; "
                "accepted: float32, or fewer bits"
            )
        pairs += [(p, t) for p, t in zip(found, (scale, zero), strict=True) if p is not None]
        scales.append(found[0])
        targets.append(target)
        made[id(weight)] = new.to(weight.dtype)
    if not scales:
        raise ValueError(
            f"{type(model).__name__} has no learned scales; call "
            "lowbit.qat.prepare_(model, scheme, scales='learned') first"
        )
    replace_weights(targets, Report(), lambda t: made[id(t.weight)], trainable=True)
    for held, value in pairs:
        held.copy_(value)
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is scale for scale in scales))
    return scales
