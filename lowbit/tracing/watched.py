"""Watching a model: hooks that know which module runs, and a torch function mode that notes the products that don't
note themselves: those of plain layers, QAT and nn.MultiheadAttention.

The mode sees the products of a plain weight that are functions in `_OPERANDS` with the weight as second operand. It
does not see an einsum. Where PyTorch computes the backward products, a hook on the output's autograd node notes them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lowbit.numerics.sharded import held_locally
from lowbit.schemes.training import IN_ATTENTION, LOOKED_UP, PRODUCTS
from lowbit.tracing import tracer
from lowbit.tracing.batches import hooked
from lowbit.tracing.report import weight_format
from lowbit.tracing.tracer import (
    DEQUANTIZED,
    PLAIN_WEIGHT,
    ROUNDED,
    SWITCHED_OFF,
    Note,
    Notes,
    ThreadState,
    is_low_bit,
    is_qat,
    plain_name,
    record,
)
from lowbit_kernels.runtime import launches

_one_at_a_time = threading.Lock()


@contextmanager
def watched(model: nn.Module) -> Iterator[Notes]:
    """Note all products that run inside. Raises RuntimeError while another trace runs, in any thread."""
    # Products and launches are noted for the whole process, so two traces would mix their notes.
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError(
            "another lowbit.trace runs in this process; trace one model at a time, in threads one after the other"
        )
    try:
        tracer.active = watch = Notes(model)
        with launches.listening(watch.launched), _hooked(model, watch.thread, _Products(watch)):
            yield watch
    finally:
        tracer.active = None
        _one_at_a_time.release()


@contextmanager
def _hooked(model: nn.Module, thread: ThreadState, mode: TorchFunctionMode) -> Iterator[None]:
    """Keep `thread.modules` up to date, and `mode` on while any module runs.

    Checkpointing runs modules again in backward, for which torch turns the modes of the caller off. It also leaves
    modules by an exception.
    """

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if not thread.modules:
                mode.__enter__()
            thread.modules.append((name, module))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        thread.modules.pop()
        if not thread.modules:
            mode.__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(plain_name(name)), prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    with hooked(*handles):
        yield


_MATMULS = (
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
    *(torch._grouped_mm, F.grouped_mm),
)
_ADDMMS = (torch.addmm, Tensor.addmm)
_OPERANDS: dict[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    **dict.fromkeys(_MATMULS, ((0, "input"), (1, "mat2"))),
    **dict.fromkeys((torch.matmul, Tensor.matmul), ((0, "input"), (1, "other"))),
    **dict.fromkeys(_ADDMMS, ((1, "mat1"), (2, "mat2"))),
    **dict.fromkeys((F.linear, F.embedding), ((0, "input"), (1, "weight"))),
    **dict.fromkeys((F.conv1d, F.conv2d), ((0, "input"), (1, "weight"))),
}
"""Input and weight among the arguments of a function: position and name."""
_CONVOLUTIONS = (F.conv1d, F.conv2d)


class _Products(TorchFunctionMode):
    """Notes the products of parameters that don't note themselves, and PyTorch's products in backward."""

    def __init__(self, watch: Notes) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, thread = kwargs or {}, self.watch.thread
        looked_at = func in _OPERANDS or func is F.multi_head_attention_forward
        if not looked_at or thread.inside:
            result = self._followed(func, args, kwargs)
            if func is Tensor.__getitem__ and isinstance(result, Tensor):
                self._selected(args[0], result)
            return result
        before = len(self.watch.notes)
        result = func(*args, **kwargs)
        notes = self.watch.notes[before:]
        if func is F.multi_head_attention_forward:
            self._attention(notes, args, kwargs, result[0])
            return result
        (i, x_name), (j, weight_name) = _OPERANDS[func]
        x = args[i] if len(args) > i else kwargs[x_name]
        weight = args[j] if len(args) > j else kwargs[weight_name]
        if not is_low_bit(held_locally(weight)) and self._is_stack(x):  # experts from the left
            experts, x = x, weight.transpose(-2, -1)
            weight = self._followed(Tensor.transpose, (experts, -2, -1), {})
            self._selected(experts, weight)
        if func is F.embedding:
            self._lookup(x, weight, result)
            return result
        if not notes and isinstance(weight, Tensor) and weight.ndim >= 2:
            notes = self._noticed(func, x, weight, result)
        self._follow(notes, x.requires_grad, weight.requires_grad, result)
        return result

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`, whose results are remembered if it reads rounded values."""
        watch = self.watch
        watch.last_rounded = None
        result = func(*args, **kwargs)
        weight = watch.last_rounded
        if weight is None and watch.rounded:
            found = map(watch.rounded_from, tree_leaves((args, kwargs)))
            weight = next((own for own in found if own is not None), None)
        if weight is not None:
            for t in tree_leaves(result):
                if (
                    isinstance(t, Tensor)
                    and t.is_floating_point()
                    and not is_low_bit(held_locally(t))
                ):
                    watch.remember_rounded(t, weight)
        return result

    def _is_stack(self, x: Any) -> bool:
        """True if x is a weight of experts, or a copy of some."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            return False
        return is_low_bit(held_locally(x)) or self.watch.find(x) is not None

    def _selected(self, weight: Tensor, experts: Tensor) -> None:
        """Remember the layer of a copy of experts."""
        if weight.ndim == experts.ndim == 3 and (layer := self.watch.find(weight)) is not None:
            self.watch.selected[id(experts)] = weakref.ref(experts), layer

    def _noticed(self, func: Any, x: Tensor, weight: Tensor, result: Tensor) -> list[Note]:
        local = held_locally(weight)
        is_plain = not is_low_bit(local)
        takes_weights = func is F.linear or func in _CONVOLUTIONS
        if is_plain and not takes_weights and self.watch.find(weight) is None:
            return []  # a product of two activations
        if func in _CONVOLUTIONS:
            n, k = sizes_of_conv(local)
            rows = held_locally(result).numel() // max(n, 1)
            made = self.watch.note(rows, n, k, weight, PLAIN_WEIGHT)
        else:
            n, k = local.shape[-2:] if func is F.linear else local.shape[-2:][::-1]
            made = self._note(x, n, k, weight, PLAIN_WEIGHT)
        read = self.watch.rounded_from(weight)
        made.layer = made.layer if read is None else read[1] or made.layer
        prepared: Any = self.watch.prepared.get(made.layer)
        if read is not None:
            made.weight = read[0] if prepared is None else weight_format(prepared)
            made.why = ROUNDED
        elif prepared is not None and prepared.off is not None:
            made.weight = weight_format(prepared)
            made.why = SWITCHED_OFF if prepared.off == "all" else ROUNDED
        elif not is_plain:
            rounds_input = getattr(local, "activation", None) is not None
            made.why = ROUNDED if is_qat(local) or rounds_input else DEQUANTIZED
        elif made.layer in self.watch.left_alone:
            made.why = f"left alone: {self.watch.left_alone[made.layer]}"
        return [made]

    def _note(self, x: Tensor, n: int, k: int, weight: Tensor, why: str) -> Note:
        return self.watch.note(held_locally(x).shape[:-1].numel(), n, k, weight, why)

    def _lookup(self, indices: Tensor, table: Tensor, found: Tensor) -> None:
        local = held_locally(table)
        if is_low_bit(local):
            rows, columns = local.shape
            made = self.watch.note(indices.numel(), rows, columns, table, LOOKED_UP)
            record(made, "embedding", found.dtype)

    def _attention(self, notes: list[Note], args: Any, kwargs: Any, result: Tensor) -> None:
        """The products of nn.MultiheadAttention with its inputs, and with the attended values."""
        given = signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
        query, key, value = given["query"], given["key"], given["value"]
        joint, out = given["in_proj_weight"], given["out_proj_weight"]
        k = query.shape[-1]
        if joint is None:
            weights = [given[f"{name}_proj_weight"] for name in "qkv"]
            parts = [(x, w, *w.shape) for x, w in zip((query, key, value), weights, strict=True)]
        elif query is key is value:
            parts = [(query, joint, 3 * k, k)]
        elif key is value:
            parts = [(query, joint, k, k), (key, joint, 2 * k, k)]
        else:
            parts = [(x, joint, k, k) for x in (query, key, value)]
        for x, weight, n, columns in parts:
            noted = self._note(x, n, columns, weight, IN_ATTENTION)
            self._follow([noted], x.requires_grad, weight.requires_grad, result)
        attended = any(t.requires_grad for part in parts for t in part[:2])
        n, k = out.shape
        notes = notes or [self._note(query, n, k, out, IN_ATTENTION)]
        self._follow(notes, attended, out.requires_grad, result)

    def _follow(
        self, notes: list[Note], grad_input: bool, grad_weight: bool, result: Tensor
    ) -> None:
        """Record the output, and the backward products that are needed, once the result's gradient is there."""
        needed = [
            name for name, need in zip(PRODUCTS[1:], (grad_input, grad_weight), strict=True) if need
        ]
        notes = [made for made in notes if made.why is not None]

        def backward(grads: Any) -> None:
            for made in notes:
                for name in needed:
                    record(made, name, result_dtype)

        result_dtype, node = result.dtype, result.grad_fn
        for made in notes:
            if "output" not in made.ran:
                record(made, "output", result_dtype)
        if notes and needed and node is not None:
            node.register_prehook(backward)


def sizes_of_conv(weight: Tensor) -> tuple[int, int]:
    """N and K of a weight [N, C/groups, k…], of which an output position takes K products for each of N."""
    return weight.shape[0], weight.shape[1:].numel()
