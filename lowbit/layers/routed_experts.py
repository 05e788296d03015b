"""The forward pass of a mixture's stacked experts, where their weights are frozen: two products of the chosen experts.

transformers gives its modules of experts one interface: a forward of (hidden states, expert ids, routing weights), and
attributes that say how the weights are stored. Its own implementations gather the chosen experts' weights
("batched_mm"), sort the tokens ("grouped_mm") or loop over experts on the host ("eager"). With low-bit weights all
three would dequantize first. So such a module gets this forward, whatever the implementation that it is set to.

    h = gate(experts(ids) @ x)     one launch: up, and gate beside it
    y = experts(ids) @ h           one launch
    out = sum of y by the routing weights, one launch

It takes inputs in 16 bits whose gradient nobody asks for, and formats that have a kernel. All others go to the stock
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import lowbit_kernels as kernels
from lowbit.linear.frozen.experts import chosen_product, has_expert_kernel
from lowbit_kernels.weight_only.weight_operands import HALVES

DOWN = "down_proj"
UP = ("gate_up_proj", "up_proj")
SILU = ("SiLU", "SiLUActivation")
"""torch's and transformers' classes of silu."""
Known = Callable[[Any, str, torch.dtype, torch.device], bool]
"""A function of a module, the name of a weight, and the dtype and device of x: `_fits`, or the same in code that
torch.compile traces."""
_is_compiling = torch.compiler.is_dynamo_compiling
# Without this, reading the shape or dtype of a weight goes through its __torch_function__, at microseconds each.
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


def routed_forward(
    plain: type[nn.Module], names: Iterable[str], known: Known
) -> Callable[..., Any] | None:
    """The forward of modules of `plain` whose parameters of these names are frozen; None for classes without
    transformers' interface, and where an expert's weights are not all frozen.

    Args:
        known: see `Known`.
    """
    up = next((name for name in UP if name in names), None)
    if up is None or DOWN not in names or not hasattr(plain.forward, "__wrapped__"):
        return None
    gate = getattr(plain, "_apply_gate", None)
    if gate is None:
        return None
    stock, halves = plain.forward, gate.__name__ == "_default_apply_gate"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3 or not _takes(self, args[0], (up, DOWN), known):
            return stock(self, *args, **kwargs)
        return _run(self, up, halves, *args)

    return forward


def _takes(module: Any, x: Tensor, names: tuple[str, str], known: Known) -> bool:
    if not hasattr(module, "is_transposed") or type(x) is not Tensor or x.ndim != 2:
        return False
    if x.dtype not in HALVES or x.device.type not in ("cpu", "cuda"):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or _trains_biases(module, names)):
        return False
    if _is_compiling():
        return all(known(module, name, x.dtype, x.device) for name in names)
    with _PlainAttributes():
        return all(_fits(module._parameters.get(name), x, module.is_transposed) for name in names)


def _trains_biases(module: Any, names: Iterable[str]) -> bool:
    return module.has_bias and any(getattr(module, f"{n}_bias").requires_grad for n in names)


def _fits(weight: Any, x: Tensor, transposed: bool) -> bool:
    stored_as = getattr(weight, "stored_as", None)
    return (
        stored_as is not None
        and weight.ndim == 3
        and weight.transposed == transposed
        and weight.dtype == x.dtype
        and has_expert_kernel(
            stored_as,
            weight.spec,
            weight.activation,
            weight.shape[1 if transposed else 2],
            x.device,
        )
    )


def _run(
    module: Any, up: str, halves: bool, x: Tensor, ids: Tensor, routing_weights: Tensor
) -> Tensor:
    tokens, top = ids.shape
    pairs = ids.reshape(-1).long()
    gated = halves and module.has_gate and type(module.act_fn).__name__ in SILU
    h = _product(module, up, x, pairs, gated)
    if not gated:
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    y = _product(module, DOWN, h, pairs, False)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    trains = torch.is_grad_enabled() and (y.requires_grad or routing_weights.requires_grad)
    if _is_compiling() or trains:
        y = y * routing_weights.reshape(-1, 1)
        return y.view(tokens, top, -1).sum(1).to(x.dtype)
    return kernels.weighted_sum.weighted_sum(y, routing_weights.reshape(tokens, top)).to(x.dtype)


def _product(module: Any, name: str, x: Tensor, ids: Tensor, gated: bool) -> Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    weight = getattr(module, name)
    if _is_compiling():
        from lowbit.linear.frozen import in_graph

        return in_graph.chosen_product(x, weight, ids, bias, gated)
    return chosen_product(x, weight, ids, bias, gated)
