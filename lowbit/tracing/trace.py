"""`lowbit.trace`: one run of a model, and the format of every product in it.

trace = lowbit.trace(model, tokens)
print(trace)
trace.write("shapes.json")        # python -m benchmarks weight_linear --shapes shapes.json
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.numerics.settings import check_flag
from lowbit.numerics.sharded import held_locally
from lowbit.tracing.report import Trace, TracedProduct, weight_format
from lowbit.tracing.tracer import is_low_bit, layer_name, plain_name
from lowbit.tracing.watched import sizes_of_conv, watched

NOT_REACHED = "not reached by these inputs"


def trace(model: nn.Module, *args: Any, backward: bool | None = None, **kwargs: Any) -> Trace:
    """Run `model(*args, **kwargs)` once, and report the format of every product of every layer, and why.

    Args:
        backward: also run a backward pass, from the sum of the outputs. By default, if the model is in training mode,
            and a parameter or an argument requires a gradient. Without it, the model runs without gradients.

    A compiled model runs eagerly here. Shapes, dtypes, devices and schemes decide what runs in what, so the compiled
    model makes the same choices, with two exceptions. It keeps the implementations that were registered when it was
    compiled (`register_linear`). Where the eager model runs "cpu_linear" or "cpu_half_linear", the graph has
    "plain_linear".

    Afterwards gradients (those of the arguments too), buffers and random states are as before. Hooks on gradients of
    parameters (`register_hook`, `register_post_accumulate_grad_hook`) do not run, as an optimizer step may be one.
    Hooks of modules do. Under FSDP2 and tensor parallelism all ranks must call it.

    Raises:
        TypeError: the model is not a module, or `backward` not a bool or None.
        ValueError: `backward=True`, but no output requires a gradient.
        RuntimeError: another trace runs, in this thread or another one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_flag("backward", backward, or_none=True)
    args, kwargs = _detached(args, kwargs)
    with_grad = model.training and _learns(model, args, kwargs) if backward is None else backward
    with (
        watched(model) as watch,
        torch.compiler.set_stance("force_eager"),
        state_restored(model),
        torch.set_grad_enabled(with_grad),
    ):
        outputs = [t for t in tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor)]
        ends = [t for t in outputs if t.requires_grad and with_grad]
        if backward and not ends:
            raise ValueError("backward=True, but no output of the model requires a gradient")
        if ends:  # contiguous gradients, which grouped products of torch require
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    ran = tuple(watch.products())
    return Trace((*ran, *_not_reached(model, {p.layer for p in ran})), watch.launches)


def _detached(args: Any, kwargs: Any) -> Any:
    """The arguments as detached tensors, so that the caller's gradients stay; one tensor stays one."""
    made: dict[int, Tensor] = {}

    def detached(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = x.detach().requires_grad_(x.requires_grad)
        return made[id(x)]

    return tree_map(detached, (args, kwargs))


def _learns(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """True if a parameter or an argument requires a gradient."""
    tensors = (*model.parameters(), *tree_leaves((args, kwargs)))
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _not_reached(model: nn.Module, reached: set[str]) -> Iterator[TracedProduct]:
    """Linear layers, and other modules with low-bit weights, that did not run."""
    for name, module in model.named_modules():
        is_linear, is_lookup = isinstance(module, nn.Linear), isinstance(module, nn.Embedding)
        for attribute, p in module._parameters.items():
            if p is None or not (
                is_low_bit(held_locally(p)) or (is_linear and attribute == "weight")
            ):
                continue
            layer = layer_name(plain_name(name), attribute)
            if layer not in reached:
                product, form = (
                    "embedding" if is_lookup else "output",
                    weight_format(held_locally(p)),
                )
                is_conv = isinstance(module, nn.Conv1d | nn.Conv2d) and p.ndim > 2
                n, k = sizes_of_conv(p) if is_conv else p.shape[-2:]
                yield TracedProduct(layer, product, 0, n, k, form, "", "", 0, NOT_REACHED)


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and random states back, and let no hook on a parameter's gradient run."""
    parameters = list(model.parameters())
    hooks = [h for p in parameters for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h]
    waiting = [dict(h) for h in hooks]
    grads = [p.grad for p in parameters]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    for p in parameters:
        p.grad = None
    for h in hooks:
        h.clear()  # in place: autograd holds the dict itself
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        for h, own in zip(hooks, waiting, strict=True):
            h.update(own)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # forward may have put another in its place
                if buffer is not None and value is not None:
                    buffer.copy_(value)
