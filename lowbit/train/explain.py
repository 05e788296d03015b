"""explain: which layers ran which products in what, and why the others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.convert import check_module
from lowbit.tensor.base import LowbitTensor
from lowbit.tracer import Note, Watch, watched
from lowbit.train_scheme import PRODUCTS

LOW_BIT_PRODUCTS = ("scaled_mm", "ternary_mm")


@dataclass
class Layer:
    """What the products of one module ran in, over all its calls.

    Attributes:
        name: of the module.
        ran: for "output", "grad_input" and "grad_weight", how many ran in what: "int8", "e4m3", "e5m2" or a dtype.
        why: the reasons why products did not run in low bits.
        sizes: (M, N, K) of its products: rows of the input, and the weight's shape.
    """

    name: str
    ran: dict[str, Counter[str]] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, note: Note) -> None:
        if (note.m, note.n, note.k) not in self.sizes:
            self.sizes.append((note.m, note.n, note.k))
        if note.why is not None and note.why not in self.why:
            self.why.append(note.why)
        for product, what in note.ran.items():
            self.ran.setdefault(product, Counter())[what] += 1

    @property
    def low_bit(self) -> list[str]:
        """The products that ran in low bits, each time that they ran."""
        return [name for name, found in self.ran.items() if set(found) <= {"int8", "e4m3", "e5m2"}]

    def __str__(self) -> str:
        parts = [f"{name} {', '.join(self.ran[name])}" for name in PRODUCTS if name in self.ran]
        sizes = ", ".join("{} x {} x {}".format(*size) for size in self.sizes)
        return "; ".join([*([sizes] if sizes else []), *parts, *self.why])


@dataclass
class Explanation:
    """`print` it, or read `layers` and `calls`.

    Attributes:
        layers: every module with a prepared weight and every other `nn.Linear`, by name.
        calls: how often each low-bit product ran, by its implementation ("scaled_mm int8 sm90").
    """

    layers: dict[str, Layer]
    calls: Counter[str]

    def __str__(self) -> str:
        low = sum(bool(layer.low_bit) for layer in self.layers.values())
        ran = ", ".join(f"{op} {count} times" for op, count in self.calls.items())
        lines = [f"{low} layers of {len(self.layers)} ran in low bits ({ran or 'no such product'})"]
        width = max(map(len, self.layers), default=0)
        for name, layer in self.layers.items():
            lines.append(f"  {'+' if layer.low_bit else '-'} {name:<{width}}  {layer}")
        return "\n".join(lines)


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """Run `model(*args, **kwargs)` and a backward pass from the sum of its outputs, and tell what ran in what.

    It runs eagerly, also where the model is compiled: what is decided is the same. Gradients, those of the arguments
    too, buffers and random states are as before afterwards. Hooks on gradients of parameters (`register_hook`,
    `register_post_accumulate_grad_hook`), in which an optimizer may wait, do not run; hooks of modules do. Under FSDP2
    all ranks must call it.

    Raises TypeError for what is no module.
    """
    check_module(model)
    from lowbit_kernels import launches  # with the kernels, as everywhere: at the first use

    layers = {name: Layer(name) for name, module in model.named_modules() if _is_layer(module)}
    stance = torch.compiler.set_stance("force_eager")
    with (
        launches.counted() as counted,
        stance,
        _nothing_changed(model),
        watched() as watch,
        _named(model, watch),
        torch.enable_grad(),
    ):
        apart_args, apart_kwargs = tree_map(_apart, (args, kwargs))
        outputs = model(*apart_args, **apart_kwargs)
        found = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if found:
            torch.autograd.backward([t.float().sum() for t in found])
    for note in watch.notes:
        layers.setdefault(note.layer, Layer(note.layer)).add(note)
    for name, module in model.named_modules():
        if name in layers and not layers[name].sizes:
            prepared = _is_prepared(module)
            reason = "not reached by this input" if prepared else "not prepared"
            layers[name].why.append(reason)
    calls = {" ".join(ran): n for ran, n in counted.items() if ran[0] in LOW_BIT_PRODUCTS}
    return Explanation(layers, Counter(calls))


def _apart(x: Any) -> Any:
    """An argument of the same values, whose gradient is not that of the caller's."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _is_prepared(module: nn.Module) -> bool:
    own = (p.to_local() if isinstance(p, DTensor) else p for p in module._parameters.values())
    return any(isinstance(p, LowbitTensor) for p in own)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_prepared(module)


@contextmanager
def _named(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Tell which module is running. Checkpointing may leave one without telling, by an exception; the next one to be
    entered is the innermost all the same."""
    handles = []

    def enter(name: str) -> Any:
        return lambda module, args: watch.running.append(name)

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            while watch.running and watch.running.pop() != name:
                pass

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _nothing_changed(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and random states as before, and no hook on a gradient run."""
    hooks = [
        h
        for p in model.parameters()
        for h in (p._backward_hooks, p._post_accumulate_grad_hooks)
        if h
    ]
    waiting = [dict(h) for h in hooks]  # emptied in place, since autograd holds the dict itself
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for p, _ in grads:
        p.grad = None
    for h in hooks:
        h.clear()
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        for h, its_own in zip(hooks, waiting, strict=True):
            h.update(its_own)
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # which forward may have replaced
                if buffer is not None and value is not None:
                    buffer.copy_(value)
