"""The inputs of a model's blocks, captured without running the blocks.

`capture` runs the model once for each batch, with the forward of each block replaced: it notes the block's arguments
and hands its hidden state on. So each block's own masks, position embeddings and layer numbers are known, at the cost
of what the model computes before the first block. The first block of each class runs, since what a block returns
beside the hidden state may be an argument of later ones. The model stops after the last block. A
compiled model runs eagerly here.

`call_after` runs what follows the last block in the same way.

The hidden state is a block's first positional argument, or `hidden_states`, and its output or the first of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.tracing.batches import call

HIDDEN = "hidden_states"
"""The hidden state's name among the keyword arguments, where no argument is positional."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of a block, without the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The hidden state that the block gives for this one, on the device of `hidden`, in its dtype."""
        args, kwargs = tree_map(
            lambda x: moved(x, hidden.device) if isinstance(x, Tensor) else x,
            (self.args, self.kwargs),
        )
        found = (
            block(**{HIDDEN: hidden}, **kwargs) if self.by_name else block(hidden, *args, **kwargs)
        )
        return _hidden_of(found).to(hidden.dtype)


def moved(x: Tensor, device: torch.device | None, copy: bool = False) -> Tensor:
    """x on a device (None: its own). A GPU writes host memory whose pages are locked 20 times as fast as new memory
    of other kinds, and reads it without the host waiting.

    `copy`: never x itself."""
    of_gpu = x.is_cuda or (copy and x.is_pinned())
    if device is None or device.type != "cpu" or not of_gpu or type(x) is not Tensor:
        onto_gpu = device is not None and device.type == "cuda"
        return x.to(device=device, copy=copy, non_blocking=onto_gpu)
    try:
        locked = torch.empty_like(x, device=device, pin_memory=True)
    except RuntimeError:  # the system locks no more memory
        return x.to(device=device, copy=copy)
    return locked.copy_(x)


@dataclass(frozen=True)
class Captured:
    """For one batch: the hidden state that the first block gets, and the other arguments of each block."""

    hidden: Tensor
    arguments: tuple[Arguments, ...]


class NotAChain(ValueError, TypeError):
    """The model does not call the blocks one after another, or a block gets other arguments than `capture` takes."""


class _Stop(Exception):
    """The last block was reached."""


def capture(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Iterable[Any],
    device: torch.device | None,
) -> Iterator[Captured]:
    """Yield what the blocks get for each batch, stored on `device` (None: where it is).

    Raises:
        NotAChain: the model does not call the blocks one after another in this order, each once, or changes the hidden
            state in between; a block gets a cache of keys and values, or no hidden state.
    """
    for batch in batches:
        recorder = _Recorder(blocks, device)
        eager = torch.compiler.set_stance("force_eager")
        with recorder.in_place_of_forward(), without_cache(model), eager, suppress(_Stop):
            call(model, batch)
        yield recorder.captured()


class _Recorder:
    """The calls of the blocks in one forward pass."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device | None) -> None:
        self.blocks, self.device = blocks, device
        self.first: Tensor | None = None
        self.passed_on: Tensor | None = None
        self.calls: list[Arguments] = []
        self.beside: dict[type, tuple[type, tuple[Any, ...]]] = {}
        """By class of a block: the type of its output, and what follows the hidden state there."""
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        """id of an argument → itself, which keeps the id valid, and the stored tensor."""

    @contextmanager
    def in_place_of_forward(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                stack.enter_context(forward_of(block, self._recorded(index, block)))
            yield

    def _recorded(self, index: int, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def record(*args: Any, **kwargs: Any) -> Any:
            by_name = not args
            hidden = kwargs.get(HIDDEN) if by_name else args[0]
            self._check(index, hidden, (args[1:], kwargs))
            if type(block) not in self.beside:
                found = forward(*args, **kwargs)
                _hidden_of(found)
                several = isinstance(found, tuple | list)
                self.beside[type(block)] = (type(found), tuple(found[1:]) if several else ())
            others = {n: self._store(x) for n, x in kwargs.items() if not (by_name and n == HIDDEN)}
            self.calls.append(Arguments(tuple(map(self._store, args[1:])), others, by_name))
            if index == 0:
                self.first = hidden
            self.passed_on = hidden
            if index == len(self.blocks) - 1:
                raise _Stop
            kind, rest = self.beside[type(block)]
            return hidden if not issubclass(kind, tuple | list) else (hidden, *rest)

        return record

    def _check(self, index: int, hidden: Any, others: Any) -> None:
        if index != len(self.calls):
            raise NotAChain(
                f"the model calls block {index} as number {len(self.calls)}; accepted: the blocks in "
                "the order in which the model calls them, each called once"
            )
        if not isinstance(hidden, Tensor):
            raise NotAChain(
                f"block {index} gets no hidden state; accepted: a tensor as its first argument, or as {HIDDEN!r}"
            )
        if index and hidden is not self.passed_on:
            raise NotAChain(
                f"the model changes the hidden state between blocks {index - 1} and {index}; accepted: blocks that "
                "follow each other, e.g. each with what comes before it, in one module"
            )
        caches = [x for x in tree_leaves(others) if "Cache" in type(x).__name__]
        if caches:
            raise NotAChain(
                f"block {index} gets a {type(caches[0]).__name__}, which each call would fill further; accepted: "
                "batches for which the model makes none, e.g. with use_cache=False"
            )

    def _store(self, tree: Any) -> Any:
        return tree_map(self._store_tensor, tree)

    def _store_tensor(self, x: Any) -> Any:
        """One tensor that several blocks get is stored once."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.stored:
            self.stored[id(x)] = (x, moved(x.detach(), self.device))
        return self.stored[id(x)][1]

    def captured(self) -> Captured:
        if len(self.calls) < len(self.blocks) or self.first is None:
            raise NotAChain(
                f"the model calls {len(self.calls)} of the {len(self.blocks)} blocks; accepted: blocks that it calls "
                "for every batch"
            )
        return Captured(moved(self.first.detach(), self.device), tuple(self.calls))


def call_after(model: nn.Module, blocks: Sequence[nn.Module], batch: Any, hidden: Tensor) -> Any:
    """The model's output for a batch, with `hidden` in place of the hidden state that the last block gives. The first
    block of each class runs, to see what it returns beside the hidden state."""
    beside: dict[type, Any] = {}

    def given(block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def give(*args: Any, **kwargs: Any) -> Any:
            if type(block) not in beside:
                beside[type(block)] = forward(*args, **kwargs)
            found = beside[type(block)]
            return (hidden, *found[1:]) if isinstance(found, tuple | list) else hidden

        return give

    eager = torch.compiler.set_stance("force_eager")
    with ExitStack() as stack, without_cache(model), eager:
        for block in blocks:
            stack.enter_context(forward_of(block, given(block)))
        return call(model, batch)


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The context in which a call of the module runs this function."""
    own = module.__dict__.get("forward")  # tools such as accelerate put one there
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """The context in which transformers makes no cache of keys and values, as it does unless the configuration says
    not to."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    using = [c for c in configs.values() if getattr(c, "use_cache", False) is True]
    for config in using:
        config.use_cache = False
    try:
        yield
    finally:
        for config in using:
            config.use_cache = True


def _hidden_of(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(found, Tensor):
        raise NotAChain(
            f"a block gives a {type(output).__name__}; accepted: the hidden state, or a tuple that begins with it"
        )
    return found
