"""`lowbit.peft.fuse_`: LoRA layers of PEFT by `lowbit.layers.fused_lora`."""

from __future__ import annotations

from torch import nn

from lowbit.convert import check_module, is_tuner
from lowbit.layers.fused_lora import Fused
from lowbit.layers.stand_in import give


def fuse_(model: nn.Module) -> int:
    """Give the LoRA layers of `model` over an nn.Linear the forward of `lowbit.layers.fused_lora`, in place.

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        lowbit.peft.fuse_(model)

    The adapters stay PEFT's: parameters, state dict, `save_pretrained`, `set_adapter`, merging. A layer computes as
    PEFT does where it has DoRA or another variant, a bias of an adapter, or several adapters with dropout in training,
    where its base is not frozen, where the base or a factor has hooks or a forward of its own, where PEFT's forward is
    patched, and in evaluation without gradients. The adapters' products run in the dtype of autocast or, without it, of
    the input, where PEFT's run in that of the adapters; sums are float32. In torch.compile the layers are PEFT's too:
    the compiler fuses the passes itself.

    Args:
        model: with adapters of PEFT, over low-bit or plain frozen weights.

    Returns: how many layers were given the new forward.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no LoRA layer over an nn.Linear.
    """
    check_module(model)
    layers = [m for m in model.modules() if is_tuner(m) and hasattr(m, "lora_variant")]
    layers = [m for m in layers if isinstance(m.base_layer, nn.Linear)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no LoRA layers of PEFT over nn.Linear; make them by "
            "peft.get_peft_model(model, LoraConfig(...)) first"
        )
    fresh = [m for m in layers if not isinstance(m, Fused)]
    for layer in fresh:
        give(layer, Fused)
    return len(fresh)
