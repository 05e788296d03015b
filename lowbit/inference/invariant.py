"""invariant_: the same logits, to the bit, on any device, for any batch, padding, chunks and tensor-parallel width.

A model is changed in two steps. First its int8 linears, RMS norms, activations, rotary angles and attention are given
the forms of `lowbit.layers.invariant`. Then one batch runs, and every operation of it is watched: what has no fixed
order on all devices raises an error that names the module. So nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lowbit.convert import check_module
from lowbit.layers import invariant
from lowbit.layers.stand_in import give, take
from lowbit.tracing.batches import call, eval_mode, hooked, on_device_of

WAYS_OUT = {
    "mm": "quantize this layer too, with lowbit.Int8DynamicActivationInt8Weight()",
    "scaled_dot_product": "call lowbit.inference.invariant_attention in its place",
    "softmax": "for attention, call lowbit.inference.invariant_attention in its place",
    "silu": "call a module nn.SiLU() in its place",
    "gelu": "call a module nn.GELU(approximate='tanh') in its place",
    "rms_norm": "call a module nn.RMSNorm in its place",
    "mean": "for an RMS norm, call a module nn.RMSNorm in its place",
    "rsqrt": "for an RMS norm, call a module nn.RMSNorm in its place",
    "cos": "for rotary angles, use a module with the form of transformers' LlamaRotaryEmbedding",
}
"""What to do about an operation whose name begins or ends so."""

SELECTION = """
alias arange as_strided _to_copy _unsafe_view cat chunk clone constant_pad_nd contiguous copy detach embedding empty
empty_like expand fill flip full full_like gather index index_put index_select lift_fresh masked_fill narrow new_empty
new_full new_ones new_zeros ones ones_like permute repeat reshape _reshape_alias roll scalar_tensor scatter select slice
slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unfold unsqueeze view view_as where zero
zeros zeros_like _local_scalar_dense
"""
ARITHMETIC = """
abs add amax amin argmax argmin ceil clamp clamp_max clamp_min div eq floor ge gt isfinite isinf isnan le leaky_relu lt
max maximum min minimum mul nan_to_num ne neg reciprocal relu round rsub sign sub threshold trunc
"""
LOWBIT = """
cast dequantize quantize_rowcol scaled_mm invariant_activation invariant_attention invariant_linear invariant_norm
invariant_rotary
"""
EXACT = {f"aten.{name}" for name in (SELECTION + ARITHMETIC).split()}
EXACT |= {f"lowbit.{name}" for name in LOWBIT.split()}
"""Operations on floats that round each result once, or not at all, and whose results do not depend on an order. Their
forms in place count too."""


def invariant_(model: nn.Module, batch: Any = None) -> None:
    """Change an int8 model in place so that its logits are equal to the bit on any device, for any batch, padding,
    chunks and tensor-parallel width.

        lowbit.quantize_(model, lowbit.Int8DynamicActivationInt8Weight())
        lowbit.inference.invariant_(model)

    The logits of a token then depend only on the weights and on the tokens that it sees. They do not depend on the
    other sequences of the batch, on padding at either side, on how a prompt is cut into chunks or decoded token by
    token with a cache, on the width of tensor parallelism, or on the device. The model that `lowbit.qat.prepare_`
    made with this scheme has the same logits in training, with straight-through gradients.

    It works for models of transformers, and for others that are made of nn.Linear, nn.RMSNorm, nn.SiLU or tanh GELU
    modules and `lowbit.inference.invariant_attention`. Attention is rounded to int8 as well, with a scale a token and
    head. Run the model eagerly or in CUDA graphs: torch.compile changes the roundings between layers. See
    docs/invariance.md for what is guaranteed and what is not.

    Call it after `quantize_` or `prepare_`. Tensor parallelism comes afterwards.

    Args:
        model: its linears have weights in `Int8DynamicActivationInt8Weight`, frozen or prepared, the head included.
        batch: inputs of one call that shows all operations of the model: a mapping of arguments, a tuple or list of
            them, or one tensor. None for a model of transformers: four tokens.

    Raises:
        TypeError: `model` is not a module, or `batch` is missing.
        NotImplementedError: a layer that it cannot make invariant; the message names the layer and the way out. The
            model is then as it was.
    """
    check_module(model)
    if batch is None:
        batch = _four_tokens(model)
    _refuse_linears(model)
    changed = _give_all(model)
    implementations = _attention_of(model)
    try:
        for set_attention in invariant.attention_setters:
            set_attention(model)
        _watch(model, batch)
    except BaseException:
        for module, mixin in changed:
            take(module, mixin)
            for name in ("invariant_kind", "invariant_form"):
                module.__dict__.pop(name, None)
        for module, name in implementations:
            module.set_attn_implementation(name)
        raise


def _four_tokens(model: nn.Module) -> dict[str, Tensor]:
    """A batch for a model of transformers. Raises TypeError for other models."""
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(
            f"invariant_ of a {type(model).__name__} needs a batch, which shows the operations of the model; pass "
            "batch=inputs, a tensor, a tuple or a mapping"
        )
    return {"input_ids": torch.arange(4)[None]}


def _attention_of(model: nn.Module) -> list[tuple[Any, str]]:
    """The models of transformers in `model`, each with the name of its attention."""
    found = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "set_attn_implementation") and hasattr(config, "_attn_implementation"):
            found.append((module, config._attn_implementation))
    return found


def _refuse_linears(model: nn.Module) -> None:
    """Raise NotImplementedError for a linear that is not in int8 with int8 inputs."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            why = invariant.why_no_linear(module.weight)
            if why is not None:
                raise NotImplementedError(
                    f"{name or type(module).__name__}: {why}; invariant_ takes the weights of "
                    "lowbit.quantize_(model, lowbit.Int8DynamicActivationInt8Weight()), or of lowbit.qat.prepare_ with "
                    "that scheme, the head included"
                )


def _give_all(model: nn.Module) -> list[tuple[nn.Module, type[Any]]]:
    """Give the modules of `model` their stand-ins; returns which got what."""
    changed: list[tuple[nn.Module, type[Any]]] = []
    for module in model.modules():
        if isinstance(module, invariant.STAND_INS):
            continue
        mixin: type[Any] | None = None
        own: Any = module
        if isinstance(module, nn.Linear):
            mixin = invariant.Linear
        elif (kind := invariant.activation_kind(module)) is not None:
            mixin, own.invariant_kind = invariant.Activation, kind
        elif (form := invariant.norm_form(module)) is not None:
            mixin, own.invariant_form = invariant.Norm, form
        elif invariant.has_rotary_form(module):
            mixin = invariant.Rotary
        if mixin is not None:
            give(module, mixin)
            changed.append((module, mixin))
    return changed


# ---- watching --------------------------------------------------------------------------------------------------------


def _watch(model: nn.Module, batch: Any) -> None:
    """Run the model once; NotImplementedError for an operation that has no fixed order."""
    inside: list[tuple[str, nn.Module]] = []
    hooks: list[RemovableHandle] = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        inside.append((name, module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    def place() -> str | None:
        name, module = inside[-1] if inside else ("", model)
        if isinstance(module, invariant.STAND_INS):
            return None
        return f"{name or 'the model'} ({type(module).__name__})"

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(leave))
    with hooked(*hooks), torch.no_grad(), eval_mode(model), _InvariantWatch(place):
        call(model, on_device_of(model, batch))


class _InvariantWatch(TorchDispatchMode):
    """Raises NotImplementedError for an operation on floats that is not among `EXACT`. `place` names the module; None
    for one of `lowbit.layers.invariant`."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__()
        self.place = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, result = str(func.overloadpacket), func(*args, **(kwargs or {}))
        if name.removesuffix("_") in EXACT:
            return result
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        place = self.place() if any(x.is_floating_point() for x in tensors) else None
        if place is not None:
            short = name.split(".")[-1]
            ways = (way for key, way in WAYS_OUT.items() if key in short)
            way = next(
                ways, "the model has no invariant form with this layer, so leave invariant_ out"
            )
            raise NotImplementedError(
                f"{place} calls {name}, whose result depends on the device or on the shape of the batch; {way}"
            )
        return result
