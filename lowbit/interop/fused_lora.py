"""PEFT's LoRA layers over frozen weights, with the adapters added into the result of the base product.

    t = x · Aᵀ            y = x · ŵᵀ + b, then y += s · t · Bᵀ in place
    gt = s · g · B        dB = s · gᵀ · t        dA = gtᵀ · x        dx = gt · A, then dx += g · ŵ in place

PEFT passes over [M, N] four more times in each forward: it stores the adapter's result, scales it, and adds it to that
of the base. Where the adapters are float32 without autocast, those passes read and write float32.

With gradient checkpointing the second forward of a block ends as soon as all that backward needs is there again. So the
node of autograd that keeps x and t comes before the base product, and the product keeps nothing: the last product of a
block, a quarter of its weights in a Llama, does not run twice. `_Adapted` is that node. It returns a tensor without
memory in the shape of y, whose gradient is that of y. `_Product` takes it, and has no other gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowbit.convert import check_module, is_tuner
from lowbit.layers.frozen import shown_class
from lowbit.layers.stand_in import StandIn, give
from lowbit.linear.frozen.checks import autocast_dtype
from lowbit.linear.frozen.row import grad_of_input
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tracing import tracer

_PlainAttributes = torch._C.DisableTorchFunctionSubclass
_dispatch_modes = torch._C._len_torch_dispatch_stack


class _Adapted(torch.autograd.Function):
    """(x [..., K], A [R, K], B [N, R], s, the base layer) → the stand-in for y [..., N]. `found` gets t [M, R] and B in
    x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, s: float, base: Any, found: list[Tensor]
    ) -> Tensor:
        own_b = b.to(x.dtype)
        t = x.reshape(-1, x.shape[-1]) @ a.to(x.dtype).t()
        found += [t, own_b]
        ctx.save_for_backward(x, t)
        # Not saved: hooks of saved tensors, of checkpoints too, take longer than to round A and B again.
        ctx.base, ctx.scale, ctx.factors = base, s, ((a, a._version), (b, b._version))
        return x.new_empty(()).expand(*x.shape[:-1], b.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, t = ctx.saved_tensors
        a, b = (_unchanged(*factor) for factor in ctx.factors)
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        gt = (g @ b.to(x.dtype)).mul_(ctx.scale)
        dx = da = db = None
        if needs_b:
            db = (g.t() @ t).to(b.dtype).mul_(ctx.scale)
        if needs_a:
            da = (gt.t() @ x.reshape(-1, x.shape[-1])).to(a.dtype)
        if needs_x:
            dx = grad_of_input(g, ctx.base.weight, gt @ a.to(x.dtype)).view(x.shape)
        return dx, da, db, None, None, None


def _unchanged(factor: Tensor, version: int) -> Tensor:
    """Raise RuntimeError, as autograd does, if the factor of an adapter was written to since the forward pass."""
    if factor._version != version:
        raise RuntimeError(
            f"the factor {tuple(factor.shape)} of an adapter has been modified by an inplace operation between forward "
            "and backward: step the optimizer after backward"
        )
    return factor


class _Product(torch.autograd.Function):
    """x · ŵᵀ + b + s · t · Bᵀ. The gradient goes to the stand-in alone, whose node knows those of all operands."""

    @staticmethod
    def forward(
        ctx: Any, standing: Tensor, x: Tensor, t: Tensor, b: Tensor, s: float, base: Any
    ) -> Tensor:
        y = F.linear(x, base.weight, base.bias)
        rows = y.view(-1, y.shape[-1])
        if _dispatch_modes():  # such as selective checkpointing, which keeps results
            y = torch.addmm(rows, t, b.t(), alpha=s).view(y.shape)
        else:
            rows.addmm_(t, b.t(), alpha=s)
        return y.detach()  # not a view, as in `RoundedLinear`

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, None


class _Fused(StandIn):
    """Mixin of PEFT's LoRA layer of an nn.Linear."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y = _result(self, x, args, kwargs)
        if y is None:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        return y


def _result(layer: Any, x: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a layer; None where PEFT's forward serves."""
    base, names = layer.base_layer, _adapters(layer)
    given = args or any(value is not None for value in kwargs.values())
    if given or not names or not _is_served(base, x):
        return None
    dtype = autocast_dtype(x.device.type) or x.dtype
    a, b, s = layer.lora_A, layer.lora_B, 1.0
    if len(names) == 1:
        a, b, s = a[names[0]].weight, b[names[0]].weight, layer.scaling[names[0]]
    else:
        a = torch.cat([a[name].weight for name in names])
        b = torch.cat([b[name].weight * layer.scaling[name] for name in names], 1)
    found: list[Tensor] = []
    x = x.to(dtype)
    standing = _Adapted.apply(x, a, b, s, base, found)
    y: Tensor = _Product.apply(standing, x.detach(), *found, s, base)
    return y


def _adapters(layer: Any) -> list[str]:
    """The adapters in use, if the layer has no others than plain LoRA; otherwise none."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged:
        return []
    for name in names:
        drops = layer.training and getattr(layer.lora_dropout[name], "p", 0.0) > 0
        with_bias = layer.lora_A[name].bias is not None or layer.lora_B[name].bias is not None
        factors = layer.lora_A[name], layer.lora_B[name]
        if any(f._forward_hooks or f._forward_pre_hooks or f._backward_hooks for f in factors):
            return []
        if drops or with_bias or name in layer.lora_variant:
            return []
    return names


def _is_served(base: Any, x: Tensor) -> bool:
    """True for the product of an nn.Linear with a frozen weight that nothing but autograd watches."""
    is_seen = base._forward_hooks or base._forward_pre_hooks or hasattr(base, "_hf_hook")
    if is_seen or tracer.active is not None or torch._C._are_functorch_transforms_active():
        return False
    if shown_class(base).forward is not nn.Linear.forward or not x.is_floating_point():
        return False
    if x.numel() == 0:
        return False
    weight, bias = base.weight, base.bias
    with _PlainAttributes():
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return False
    return isinstance(weight, AffineTensor) or type(weight) is nn.Parameter


def fuse_(model: nn.Module) -> int:
    """Give the LoRA layers of `model` over an nn.Linear the forward and backward of this module, in place.

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        lowbit.peft.fuse_(model)

    The adapters stay PEFT's: parameters, state dict, `save_pretrained`, `set_adapter`, merging. A layer computes as
    PEFT does where it has DoRA or another variant, dropout in training or a bias of an adapter, where its base is not
    frozen, where the base or a factor has hooks, and in evaluation without gradients. The adapters' products run in the
    dtype of autocast or, without it, of the input, where PEFT's run in that of the adapters; sums are float32. In
    torch.compile the layers are PEFT's too: the compiler fuses the passes itself.

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
    fresh = [m for m in layers if not isinstance(m, _Fused)]
    for layer in fresh:
        give(layer, _Fused)
    return len(fresh)
