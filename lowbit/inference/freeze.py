"""freeze_: let compiled graphs read frozen weights as plain tensors."""

from __future__ import annotations

from torch import nn

from lowbit.convert import check_module, watch_joined
from lowbit.convert.side_by_side import lay_side_by_side
from lowbit.layers.frozen import show_frozen


def freeze_(model: nn.Module) -> None:
    """Have graphs of torch.compile read the codes and scales of the frozen low-bit weights of `model` as plain tensors,
    in place. A call of such a graph costs the host what plain weights cost.

        model.load_state_dict(lowbit.load("model.safetensors"), assign=True)
        lowbit.inference.freeze_(model)
        fast = torch.compile(model)

    `quantize_`, `load_pretrained`, `convert_` and `LowbitConfig` do so. Call it for a model whose plain weights were
    replaced by low-bit ones in another way. Call it again after a change that went past the layers, which compiled code
    would not follow: a write to `layer._parameters`, as by `torch.func.functional_call` or accelerate's
    `set_module_tensor_to_device`; `torch.utils.swap_tensors`; another inner tensor, `weight.scale = other`.

    On a GPU, siblings such as q, k and v get memory side by side. `lowbit.hf.generate`, and graphs of torch.compile
    without gradients, then compute them in one launch. Such a graph does not follow `layer.bias.data = other`. A CUDA
    graph that was captured before reads their former memory. A model that was moved, as by `model.to`, needs the call
    for that.

    Layers get a subclass of their class, of the same name. Parameters, state dicts and eager code stay as they are.

    Args:
        model: any module, with frozen low-bit weights or without.

    Raises TypeError for anything but a module.
    """
    check_module(model)
    show_frozen(model.modules())
    lay_side_by_side(model)
    watch_joined(model)
