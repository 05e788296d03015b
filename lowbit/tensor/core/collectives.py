"""Collectives on low-bit tensors: each runs on the inner tensors, so that the stored form travels and nothing is
rounded again.

DistributedDataParallel first broadcasts a model: it flattens the parameters into one tensor, sends that, and cuts it up
again. In high precision each replica would round the pieces of a quantized weight again, by its own scales, and an int8
weight would lose its random-number offsets. So flat low-bit tensors are concatenated as a `Concatenated`, which keeps
each as it is stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed._functional_collectives  # defines the operators of that name
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.numerics.packing import as_bytes
from lowbit.tensor.core.base import LowbitTensor, aten
from lowbit.tensor.core.checks import check_not_flat

MOST_SECONDS = 0.1
"""The longest wait for threads that a collective on the CPU leaves behind."""
_funcol = torch.ops._c10d_functional
_implements = LowbitTensor.implements


@_implements(_funcol._wrap_tensor_autograd.default)
def _wait(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    """Waits at once. (A gathered plain DTensor waits when its values are first read.)"""
    return args[0]._map(_funcol.wait_tensor)


@_implements(_funcol.wait_tensor.default, _funcol.broadcast.default)
def _functional(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    return args[0]._map(partial(_finished, func, args[1:], kwargs))


def _finished(func: Any, args: Any, kwargs: Any, inner: Tensor) -> Tensor:
    """Run a collective over the bytes of `inner`, and wait until nothing else refers to its input and its output.

    Gloo's threads drop their references after the result is there: 11% of calls returned before, on a busy machine. If
    Python frees a temporary input or output in the middle of that, the heap is corrupted (torch 2.13, one abort in some
    hundred thousand collectives).
    """
    sent = as_bytes(inner).contiguous()
    with released(sent):
        result = _funcol.wait_tensor(func(sent, *args, **kwargs))
    _wait_for_release(result, 1)
    return result.view(inner.dtype)


@contextmanager
def released(t: Tensor) -> Iterator[None]:
    """The context of a collective on `t` that is waited for inside. Its end waits until gloo's threads have dropped `t`
    (see `_finished`)."""
    references = _references(t)
    yield
    _wait_for_release(t, references)


def _wait_for_release(t: Tensor, references: int) -> None:
    end = time.monotonic() + MOST_SECONDS
    while _references(t) > references:
        if time.monotonic() > end:  # the caller has a reference of its own
            break
        time.sleep(0)


def _references(t: Tensor) -> int:
    """C++'s references to a plain tensor on the CPU, of which all of Python has one; 0 for others."""
    is_plain = type(t) is Tensor and t.device.type == "cpu"
    return t._use_count() if is_plain else 0  # type: ignore[attr-defined]


@_implements(_funcol.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    self, world = args[0], args[1]
    check_not_flat(self, "an all-gather")
    gathered = {
        name: _finished(func, args[1:], kwargs, getattr(self, name)) for name in self._row_attrs()
    }
    return self._with(
        {**self.inner_tensors(), **gathered}, (self.shape[0] * world, *self.shape[1:])
    )


@_implements(torch.ops.c10d.broadcast_.default, torch.ops.c10d.scatter_.default)
def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs on every inner tensor in turn, and waits for each (see `_finished`), so that the caller's wait returns at
    once."""
    outputs = args[0]
    if func is torch.ops.c10d.scatter_.default:
        check_not_flat(outputs[0], "a collective")
    work = None
    for name in outputs[0].inner_tensors():
        inner_args = tree_map(partial(_inner_bytes, name), args)
        _, work = func(*inner_args, **kwargs)
        _wait_for(work)
        for output, sent in zip(outputs, inner_args[0], strict=True):
            received = as_bytes(getattr(output, name))
            if received.data_ptr() != sent.data_ptr():  # it was not contiguous
                received.copy_(sent)
    return outputs, work


def _inner_bytes(name: str, leaf: Any) -> Any:
    """Inner tensor `name` as contiguous bytes. A slice along the columns has one that is not contiguous, although its
    wrapper is."""
    return as_bytes(getattr(leaf, name)).contiguous() if isinstance(leaf, LowbitTensor) else leaf


def _wait_for(work: Any) -> None:
    """Wait for a boxed `Work`. NCCL returns none for a synchronous call, which the current stream orders."""
    unboxed = torch._C._distributed_c10d.Work.unbox(work)
    if unboxed is not None:
        unboxed.wait()


class Concatenated(torch.Tensor):
    """Flat tensors, of which at least one is low-bit, as one tensor. It can be broadcast in place, and sliced where
    its parts meet. Any other operation, such as the norm of `parameters_to_vector`, reads the values of `master()`."""

    parts: list[Tensor]

    def __new__(cls, parts: Sequence[Tensor]) -> Self:
        first = parts[0]
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            torch.Size([sum(part.numel() for part in parts)]),
            dtype=first.dtype,
            device=first.device,
            requires_grad=False,
        )
        self.parts = list(parts)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Concatenated({', '.join(map(repr, self.parts))})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.broadcast_.default and len(args[0]) == 1:
            work = None
            for part in args[0][0].parts:
                _, work = func([part], *args[1:], **(kwargs or {}))
                _wait_for(work)
            return args[0], work
        if func is aten.slice.Tensor and len(args) == 4 and not kwargs:
            self, _, start, end = args
            for part in self.parts:
                if start == 0 and end == part.numel():
                    return aten.alias.default(part)
                start, end = start - part.numel(), end - part.numel()
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} of concatenated parameters, which are a copy; accepted: a broadcast, or a change of each "
                "parameter by itself"
            )
        return func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))


def _values(x: Any) -> Any:
    """A `Concatenated` as one plain tensor; anything else unchanged."""
    if not isinstance(x, Concatenated):
        return x
    return torch.cat(
        [p.master().reshape(-1) if isinstance(p, LowbitTensor) else p for p in x.parts]
    )
