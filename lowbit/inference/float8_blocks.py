"""Checkpoints with float8 weights in blocks of 128 x 128, as DeepSeek-V3 is published (arXiv 2412.19437).

`lowbit.formats.fp8` describes the two tensors of a weight, and reads and writes whole folders. Here a state dict holds
them, N and K need not be multiples of 128, and all other entries are plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lowbit.convert import Entry, Report, find_owners
from lowbit.layers.frozen import show_frozen
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.spec import Spec
from lowbit.schemes.mixed_precision import BLOCK, BLOCK_ACTIVATION, BLOCK_WEIGHT, UE8M0_BLOCK_WEIGHT
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.float8_tensor import E4M3, SCALE_OF_BLOCKS, Float8Tensor

SCALE = SCALE_OF_BLOCKS.removeprefix("weight")
"""The suffix by which the name of the scales differs from that of their weight."""


def load_float8_blocks_(
    model: nn.Module, state_dict: Mapping[str, Tensor], *, quantize_activations: bool = True
) -> Report:
    """Load a state dict with weights as the module describes them into a plain `model`, in place.

        load_float8_blocks_(model, safetensors.torch.load_file("model.safetensors"))

    Each float8 weight becomes a frozen `Float8Tensor` with `PerBlock(128, 128)`, in the dtype and on the device of the
    parameter that it replaces. Everything else is loaded by `model.load_state_dict`. LoRA adapters train beside the
    frozen weights; `lowbit.train.prepare_(model, Float8BlockMixedPrecision())` makes the weights themselves train.

    Args:
        model: with plain parameters, under the names of the state dict.
        state_dict: float8_e4m3fn weights with their scales, and everything else in plain tensors.
        quantize_activations: products in float8, of inputs with a scale for each 128 elements of a token. False:
            the weight is dequantized, and products run in its dtype.

    Raises:
        KeyError: an entry that the model lacks, a missing one, or a float8 weight without scales.
        ValueError: a weight or scale of another shape, scales of a weight that is not float8_e4m3fn, or a parameter of
            the model that is on meta or in low bits already. The model then stays unchanged.
    """
    for name, t in model.state_dict().items():
        if isinstance(t, Tensor) and t.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty(device=...) first")
    scales = {name for name in state_dict if name.endswith(SCALE)}
    of_others = [
        s
        for s in scales
        if getattr(state_dict.get(s.removesuffix(SCALE)), "dtype", None) is not E4M3
    ]
    if of_others:
        raise ValueError(
            f"{', '.join(sorted(of_others)[:3])}: scales of weights that are not {E4M3}, whose values would be lost; "
            "accepted: float8_e4m3fn weights with scales of blocks of 128 x 128"
        )
    plain = {name: t for name, t in state_dict.items() if name not in scales}
    owners = {names[0].fqn: names for names in find_owners(model).values()}
    by_name = {owner.fqn: names for names in owners.values() for owner in names}
    activation = BLOCK_ACTIVATION if quantize_activations else None
    made: dict[str, Float8Tensor] = {}
    for name in [name for name, t in plain.items() if t.dtype is E4M3]:
        if name not in by_name:
            raise KeyError(f"the model has no parameter {name!r}, which the state dict holds")
        module, attribute, _ = by_name[name][0]
        old = getattr(module, attribute)
        made[name] = _assembled(name, plain.pop(name), state_dict, old, activation)
    expected = model.state_dict().keys() - {o.fqn for name in made for o in by_name[name]}
    if expected != plain.keys():
        missing, unknown = sorted(expected - plain.keys()), sorted(plain.keys() - expected)
        raise KeyError(f"the state dict lacks {missing}, and the model lacks {unknown}")
    model.load_state_dict(plain, strict=False)
    report = Report()
    for name, weight in made.items():
        param = nn.Parameter(weight, requires_grad=False)
        for module, attribute, fqn in by_name[name]:
            module.register_parameter(attribute, param)
            note = f"float8 in blocks of {BLOCK} x {BLOCK}, as in the checkpoint"
            report.entries.append(Entry(fqn, tuple(weight.shape), True, note))
    show_frozen(model.modules())
    return report.count(model)


def float8_blocks_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` with its weights in float8 blocks under their names, and their scales as `_scale_inv`
    beside them, for `safetensors.torch.save_file`. All other entries are those of `model.state_dict()`.

    Raises ValueError if no weight is stored in blocks of 128 x 128, or a weight is stored in other low bits.
    """
    found: dict[str, Tensor] = {}
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    blocks = {name: w for name, w in parameters.items() if _is_in_blocks(w)}
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no weights in float8 blocks: lowbit.quantize_ with "
            "Float8DynamicActivationFloat8Weight(PerBlock(128, 128)) makes them, and lowbit.train.convert_ after "
            "training with Float8BlockMixedPrecision()"
        )
    for name, value in model.state_dict().items():
        owner, _, part = name.rpartition(".")
        if owner not in blocks:
            if owner in parameters:
                raise ValueError(
                    f"{owner} is stored otherwise than in float8 blocks, and has no place in such a state dict: "
                    "lowbit.dequantize_ makes it plain"
                )
            found[name] = value
        elif part == "codes":
            weight = blocks[owner]
            rows, columns = weight.shape[-2:]
            found[owner] = as_bytes(value)[..., :rows, :columns].contiguous().view(E4M3)
            found[owner + SCALE] = weight.scale_values().float()
    return found


def _is_in_blocks(weight: Tensor) -> bool:
    if not isinstance(weight, Float8Tensor) or weight.stored_as != "float8":
        return False
    return weight.spec in (BLOCK_WEIGHT, UE8M0_BLOCK_WEIGHT) and not weight.transposed


def _assembled(
    name: str, codes: Tensor, state_dict: Mapping[str, Tensor], old: Tensor, activation: Spec | None
) -> Float8Tensor:
    """The weight of these codes and their scales in the state dict, in place of the parameter `old`."""
    if isinstance(old, LowbitTensor):
        raise ValueError(
            f"{name} is in low bits already: {old!r}; load into a plain model (lowbit.dequantize_ or "
            "lowbit.train.restore_ makes it plain)"
        )
    key = name + SCALE
    if key not in state_dict:
        raise KeyError(f"the float8 weight {name!r} has no scales {key!r} beside it")
    if codes.shape != old.shape:
        raise ValueError(
            f"{name} has the shape {tuple(codes.shape)}; the model takes {tuple(old.shape)}"
        )
    stored, factors = codes.to(old.device), state_dict[key].to(old.device)
    try:
        return Float8Tensor.from_blocks(stored, factors, (BLOCK, BLOCK), old.dtype, activation)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
