"""Flat low-bit tensors laid end to end, each as it is stored: DistributedDataParallel broadcasts a model so at first.

It flattens parameters into one tensor, sends that, and cuts it up again. In high precision the pieces of a quantized
weight would be rounded anew, each replica by its own scales, and an int8 weight would lose the offsets of its random
draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowbit.tensor.base import LowbitTensor, aten


def wait_for(work: Any) -> None:
    """Wait for a boxed `Work`. NCCL gives none for a synchronous call, which the current stream orders."""
    unboxed = torch._C._distributed_c10d.Work.unbox(work)
    if unboxed is not None:
        unboxed.wait()


class EndToEnd(torch.Tensor):
    """Flat tensors as one, to be broadcast in place and cut up where they meet. Any other operation, such as the norm
    of `parameters_to_vector`, reads the values that `master()` gives."""

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
        return f"EndToEnd({', '.join(map(repr, self.parts))})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.broadcast_.default and len(args[0]) == 1:
            work = None
            for part in args[0][0].parts:
                _, work = func([part], *args[1:], **(kwargs or {}))
                wait_for(work)
            return args[0], work
        if func is aten.slice.Tensor and len(args) == 4 and not kwargs:
            self, _, start, end = args
            for part in self.parts:
                if start == 0 and end == part.numel():
                    return aten.alias.default(part)
                start, end = start - part.numel(), end - part.numel()
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} of parameters laid end to end, which is a copy; accepted: a broadcast, or a change of each "
                "parameter by itself"
            )
        return func(*tree_map(_values, args), **tree_map(_values, kwargs or {}))


def _values(x: Any) -> Any:
    """An EndToEnd as one plain tensor; anything else as it is."""
    if not isinstance(x, EndToEnd):
        return x
    return torch.cat(
        [p.master().reshape(-1) if isinstance(p, LowbitTensor) else p for p in x.parts]
    )
