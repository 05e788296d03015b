"""PEFT's LoRA layers over frozen weights, with the adapters added into the result of the base product.

    t = x · Aᵀ            y = x · ŵᵀ + b, then y += s · t · Bᵀ in place
    gt = s · g · B        dB = s · gᵀ · t        dA = gtᵀ · x        dx = gt · A, then dx += g · ŵ in place

With dropout t and dA take dropout(x) in place of x, and gt · A is the gradient of dropout(x).

PEFT passes over [M, N] four more times in each forward: it stores the adapter's result, scales it, and adds it to that
of the base. Where the adapters are float32, it casts the input to float32 too, and autocast casts it back.

With gradient checkpointing the second forward of a block ends as soon as all that backward needs is there again. So the
node of autograd that keeps x and t comes before the base product, and the product keeps nothing: the last product of a
block, a quarter of its weights in a Llama, does not run twice. `_Adapted` is that node. It returns a tensor without
memory in the shape of y, whose gradient is that of y. `_Product` takes it, and has no other gradient.

A layer over a frozen weight of lowbit gets `FewerPasses` while PEFT makes it: torch tells of each module that becomes
part of another one, and of nothing else. Products run in the dtype that PEFT's have, with fewer roundings between them.
`lowbit.peft.fuse_` gives every layer `Fused`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import (
    _has_any_global_hook,
    register_module_module_registration_hook,
)

from lowbit.layers.stand_in import StandIn, give, without
from lowbit.linear.frozen.checks import autocast_dtype
from lowbit.linear.frozen.row import grad_of_input
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tracing import tracer
from lowbit_kernels.runtime.library import FLOATS

_PlainAttributes = torch._C.DisableTorchFunctionSubclass
_dispatch_modes = torch._C._len_torch_dispatch_stack
_hook: Any = None


class _Adapted(torch.autograd.Function):
    """(x [..., K], dropout(x) or None, A [R, K], B [N, R], s, the base layer) → the stand-in for y [..., N]. `found`
    gets t [M, R] and B in the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        a: Tensor,
        b: Tensor,
        s: float,
        base: Any,
        found: list[Tensor],
    ) -> Tensor:
        own_b = b.to(x.dtype)
        ctx.drops = dropped is not None
        x = x if dropped is None else dropped
        t = x.reshape(-1, x.shape[-1]) @ a.to(x.dtype).t()
        found += [t, own_b.detach()]
        ctx.save_for_backward(x, t)
        # Not saved: hooks of saved tensors, of checkpoints too, take longer than to round A and B again.
        ctx.base, ctx.scale, ctx.factors = base, s, tuple((f, _version(f)) for f in (a, b))
        return x.new_empty(()).expand(*x.shape[:-1], b.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, t = ctx.saved_tensors
        a, b = (_unchanged(*factor) for factor in ctx.factors)
        if torch.is_grad_enabled():  # for second derivatives, which t has none of
            t = x.reshape(-1, x.shape[-1]) @ a.to(x.dtype).t()
        needs_x, needs_dropped, needs_a, needs_b, *_ = ctx.needs_input_grad
        g = grad.reshape(-1, grad.shape[-1])
        gt = (g @ b.to(x.dtype)).mul_(ctx.scale)
        dx = dropped = da = db = None
        if needs_b:
            db = (g.t() @ t).to(b.dtype).mul_(ctx.scale)
        if needs_a:
            da = (gt.t() @ x.reshape(-1, x.shape[-1])).to(a.dtype)
        if needs_dropped:
            dropped = (gt @ a.to(x.dtype)).view(x.shape)
        if needs_x:
            to = None if ctx.drops else gt @ a.to(x.dtype)
            dx = grad_of_input(g, ctx.base.weight, to).view(x.shape)
        return dx, dropped, da, db, None, None, None


def _version(factor: Tensor) -> int:
    return 0 if factor.is_inference() else factor._version


def _unchanged(factor: Tensor, version: int) -> Tensor:
    """Raise RuntimeError, as autograd does, if the factor of an adapter was written to since the forward pass."""
    if _version(factor) != version:
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
        elif rows.is_cuda:
            from lowbit_kernels.matmul.add_grouped_mm import add_grouped_mm_  # imports Triton

            add_grouped_mm_(rows, t, b.t()[None], None, s)
        else:
            rows.addmm_(t, b.t(), alpha=s)
        return y.detach()  # not a view, as in `RoundedLinear`

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, None


class FewerPasses(StandIn):
    """Mixin of the layers of PEFT's tuners."""

    any_dtype = False
    """True: the factors' dtypes do not decide in which dtype the products run."""
    forward_of_lora: Any = None
    """The forward of PEFT's LoRA layer of an nn.Linear, where the class below the mixin has that one."""

    @classmethod
    def members(cls, plain: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
        peft: Any = sys.modules.get("peft.tuners.lora.layer")
        forward: Any = without(plain, FewerPasses).forward
        is_lora = peft is not None and forward is peft.Linear.forward
        if not is_lora or getattr(forward, "__globals__", None) is not vars(peft):  # or patched
            return {}
        return {"forward_of_lora": staticmethod(forward)}

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, plain = None, super().forward
        # In training also without gradients, as in the first pass of checkpoints with reentrance.
        if (torch.is_grad_enabled() or self.training) and not torch.compiler.is_compiling():
            own = self.forward_of_lora
            if own is not None and getattr(plain, "__func__", None) is own:  # not patched since
                y = _result(self, x, args, kwargs)
        if y is None:
            result: Tensor = plain(x, *args, **kwargs)
            return result
        return y

    def _cast_input_dtype(self: Any, x: Any, dtype: torch.dtype) -> Any:
        """Where PEFT's forward serves, x without a cast that autocast undoes; bits stay, since 16 bits fit float32."""
        if dtype is torch.float32 and _is_cast_back(self, x):
            return x
        plain: Any = super()
        return plain._cast_input_dtype(x, dtype)


class Fused(FewerPasses):
    """Mixin of the layers that `lowbit.peft.fuse_` changes."""

    any_dtype = True


def _result(layer: Any, x: Tensor, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a layer; None where PEFT's forward serves."""
    base, names = layer.base_layer, _adapters(layer)
    given = args or any(value is not None for value in kwargs.values())
    if given or not names or not _is_served(base, x):
        return None
    factors = [(layer.lora_A[name].weight, layer.lora_B[name].weight) for name in names]
    if any(type(one) is not nn.Parameter for pair in factors for one in pair):
        return None
    dtype = autocast_dtype(x.device.type)
    if dtype is None:
        dtype = x.dtype
        if not layer.any_dtype and any(f.dtype is not dtype for pair in factors for f in pair):
            return None
    scales = [layer.scaling[name] for name in names]
    (a, b), s = factors[0], scales[0]
    if len(names) > 1:
        a = torch.cat([a for a, _ in factors])
        b = torch.cat([b * s for (_, b), s in zip(factors, scales, strict=True)], 1)
        s = 1.0
    found: list[Tensor] = []
    x = x.to(dtype)
    # In 16 bits it draws other values than PEFT, which has cast x to float32.
    dropped = layer.lora_dropout[names[0]](x) if _drops(layer, names[0]) else None
    standing = _Adapted.apply(x, dropped, a, b, s, base, found)
    y: Tensor = _Product.apply(standing, x.detach(), *found, s, base)
    return y


def _adapters(layer: Any) -> list[str]:
    """The adapters in use, if the layer has no others than plain LoRA; otherwise none."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged:
        return []
    for name in names:
        factors = layer.lora_A[name], layer.lora_B[name]
        if not all(_is_unwatched(f) and f.bias is None for f in factors):
            return []
        if name in layer.lora_variant or (len(names) > 1 and _drops(layer, name)):
            return []
    return names


def _drops(layer: Any, name: str) -> bool:
    """True unless the dropout of this adapter returns its input."""
    module = layer.lora_dropout[name]
    kind = type(module)
    returns = kind is nn.Identity or (kind is nn.Dropout and not (module.training and module.p > 0))
    return not (returns and _is_plain(module))


def _is_unwatched(factor: Any) -> bool:
    return type(factor) is nn.Linear and _is_plain(factor)


def _is_plain(module: Any) -> bool:
    """True if a call of this module runs the forward of its class and nothing else."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    own = vars(module).get("forward")  # accelerate's hooks leave the one of the class there
    return own is None or getattr(own, "__func__", None) is type(module).forward


def _is_served(base: Any, x: Tensor) -> bool:
    """True for the product of an nn.Linear with a frozen weight that nothing but autograd watches."""
    if not _is_plain(base) or hasattr(base, "_hf_hook") or _has_any_global_hook():
        return False
    if tracer.active is not None or torch._C._are_functorch_transforms_active():
        return False
    if forward_ad._current_level >= 0:  # forward mode, which the Functions here do not have
        return False
    forward: Any = type(base).forward
    if getattr(forward, "stands_for", forward) is not nn.Linear.forward:
        return False
    if type(x) is not Tensor or x.dtype not in FLOATS or x.numel() == 0:
        return False
    weight, bias = base.weight, base.bias
    with _PlainAttributes():
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return False
    return isinstance(weight, AffineTensor) or type(weight) is nn.Parameter


def _is_cast_back(layer: Any, x: Any) -> bool:
    """True if the adapters do nothing with their input but products that autocast casts to its dtype. Dropout would
    draw another mask, since the draw depends on the dtype. Several adapters add their gradients in float32."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if getattr(layer, "lora_variant", True) or len(layer.active_adapters) != 1:
        return False
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not x.dtype:
        return False
    if any(_drops(layer, name) for name in layer.lora_dropout):
        return False
    return all(map(_is_unwatched, layer.lora_A.values()))


def watch() -> None:
    """Give LoRA layers that PEFT makes over frozen linears from now on the mixin."""
    global _hook
    if _hook is None:
        _hook = register_module_module_registration_hook(_registered)


def _registered(module: nn.Module, name: str, base: nn.Module | None) -> None:
    is_base = name == "base_layer" and hasattr(base, "_lowbit_about_weight")
    if is_base and hasattr(module, "_cast_input_dtype") and not isinstance(module, FewerPasses):
        give(module, FewerPasses)
