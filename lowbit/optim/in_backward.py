"""Step parameters while backward runs, so that the gradients of a whole model are never in memory at once.

torch calls a hook for each parameter when its gradient of this backward is complete. The hook collects parameters into
a bucket. A full bucket is one step of the optimizer over these parameters, with the same kernels and random bits as in
`optimizer.step()`, and frees their gradients. The end of backward steps the last bucket. Parameters are updated one by
one from their own gradients, so the result equals that of `optimizer.step()` after backward to the bit.

A reentrant checkpoint runs a backward inside of the backward. "Complete" then means complete in the inner one: a block
that is used again, in another checkpoint or outside, adds to the gradient later. So gradients of inner backwards are
refused.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), arXiv
2306.09782, which fuses the update into backward.
"""

from __future__ import annotations

import sys
from itertools import chain
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.numerics.settings import check_positive
from lowbit.numerics.sharded import is_dtensor
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.muon import Muon
from lowbit.optim.state.checkpoint import parameter_names
from lowbit.tensor.core.dtensor import local

_BUCKET_MIB = 64.0
_MOST_STEPS = 256
"""Compiled steps that are kept, or as many as parameters if these are more. There are as many as buckets, unless each
backward reaches other parameters."""
_RUN = torch.autograd.graph._engine_run_backward.__code__
_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__
"""Frames of a backward, and of a Python function that a backward calls."""


def step_in_backward(
    optimizer: LowbitOptimizer, *, bucket_mib: float = _BUCKET_MIB
) -> StepInBackward:
    """From now on step each parameter of `optimizer` during backward, and free its gradient (`param.grad` is None).

    The gradients in memory are at most those of one bucket and of one more parameter. Every backward is a step:
    gradients do not accumulate. `optimizer.step()` may stay in the loop, where learning-rate schedulers expect it. It
    raises if several backwards came before it.

        optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-3)
        lowbit.optim.step_in_backward(optimizer)
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()

    Under FSDP2 a parameter is stepped once its gradient is reduced. Parameters that are frozen now, or added later, are
    stepped by `optimizer.step()`, whose hooks run at its call only.

    Checkpoints must have `use_reentrant=False`. A reentrant one runs a backward of its own, whose gradients may be
    parts: they are refused with a RuntimeError in backward.

    Args:
        optimizer: any of `lowbit.optim` except `CPUOffloadOptimizer`, which has `offload_gradients=True`.
        bucket_mib: MiB of gradients, of this rank, that are stepped together. Small buckets cost more launches.

    Returns:
        A handle; `remove()` ends it.

    Raises:
        TypeError: not an optimizer of lowbit.
        ValueError: `bucket_mib` is not positive. `max_grad_norm` or `skip_nonfinite` is set: both need all gradients at
            once. A parameter is not sharded although there are several processes: the hook comes before
            DistributedDataParallel's mean over the ranks. The parameters are Muon's and sharded: ranks exchange whole
            matrices for its step.
        RuntimeError: the optimizer steps in backward already.
    """
    if not isinstance(optimizer, LowbitOptimizer):
        if isinstance(getattr(optimizer, "optimizer", None), LowbitOptimizer):
            raise TypeError(
                f"step_in_backward takes an optimizer of lowbit.optim, and this {type(optimizer).__name__} wraps one: "
                "give it its .optimizer, or call it before the optimizer is wrapped"
            )
        raise TypeError(
            f"step_in_backward takes an optimizer of lowbit.optim, got {type(optimizer).__name__}; for those of torch, "
            "register_post_accumulate_grad_hook on each parameter does the same"
        )
    check_positive("bucket_mib", bucket_mib)
    if optimizer._in_backward is not None:
        raise RuntimeError("this optimizer steps in backward already; call remove() of its handle")
    _check_separable(optimizer)
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        _check_param(optimizer, param)
    return StepInBackward(optimizer, bucket_mib)


def _check_separable(optimizer: LowbitOptimizer) -> None:
    """Raise ValueError for an option that concerns all gradients together."""
    options = optimizer.param_groups[0]
    for name in ("max_grad_norm", "skip_nonfinite"):
        if options[name]:
            raise ValueError(
                f"{name}={options[name]!r} needs the gradients of all parameters at once, which step_in_backward never "
                f"has; leave {name} out, or step after backward"
            )


def _check_param(optimizer: LowbitOptimizer, param: Tensor) -> None:
    is_sharded = is_dtensor(param)
    if is_sharded and isinstance(optimizer, Muon):
        raise ValueError(
            "Muon exchanges sharded matrices among the ranks, which cannot happen in backward; step after backward"
        )
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not is_sharded:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not sharded over the {dist.get_world_size()} processes, so "
            "that its gradient in backward is that of one rank; accepted: models that fully_shard has sharded whole"
        )


class StepInBackward:
    """The handle of `step_in_backward`."""

    def __init__(self, optimizer: LowbitOptimizer, bucket_mib: float) -> None:
        self._optimizer = optimizer
        self._limit = bucket_mib * 2**20
        # Parameters, with the streams that made their gradients; None on a CPU.
        self._bucket: dict[Tensor, Any] = {}
        self._nbytes = 0
        # torch's number of the backward whose end steps the last bucket.
        self._backward = -1
        # The parameters stepped since the last `optimizer.step()`, and one that more than one backward has stepped.
        self._since_step: set[Tensor] = set()
        self._repeated: Tensor | None = None
        # Compiled steps, by the parameters of a bucket; the one used last comes last.
        self._steps: dict[tuple[int, ...], Any] = {}
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._collect)
            for param in params
            if param.requires_grad
        ]
        optimizer._in_backward = self

    def remove(self) -> None:
        """Step after backward again. Gradients that wait for their step stay in `param.grad`."""
        for hook in self._hooks:
            hook.remove()
        self._forget()
        if self._optimizer._in_backward is self:
            self._optimizer._in_backward = None

    def check_one_backward(self) -> None:
        """`optimizer.step()` is called: raise RuntimeError if several backwards have stepped a parameter since the last
        call, or since `zero_grad`, as they do in a loop that accumulates gradients."""
        repeated, self._repeated = self._repeated, None
        self._since_step.clear()
        if repeated is not None:
            raise RuntimeError(
                f"several backwards came before this optimizer.step(), and each has stepped {self._label(repeated)} "
                "with its own gradient: with step_in_backward gradients do not accumulate. Call optimizer.step() after "
                "each backward, or never; to accumulate, call remove() of the handle and step after backward, or use "
                "CPUOffloadOptimizer(..., offload_gradients=True)"
            )

    def _collect(self, param: Tensor) -> None:
        """The hook of a parameter: its gradient of the running backward is complete."""
        assert param.grad is not None
        if id(param) not in self._known:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} is not the optimizer's: a conversion, such as prepare_, "
                "has replaced it. Call remove() of the handle of step_in_backward, make the optimizer after the "
                "conversion, and call step_in_backward again"
            )
        running = torch._C._current_graph_task_id()
        if self._backward != running:  # not a flag, which a backward that fails would leave set
            self._check_is_outermost(param)
            self._backward = running
            torch.autograd.Variable._execution_engine.queue_callback(self._step)
        stream = torch.cuda.current_stream(param.device) if param.is_cuda else None
        self._bucket[param] = stream
        own = local(param.grad)
        self._nbytes += own.numel() * own.element_size()  # nbytes raises for a sparse one
        if self._nbytes >= self._limit:
            self._step()

    def _check_is_outermost(self, param: Tensor) -> None:
        """Raise RuntimeError if the running backward is inside of another: it may give a part of this gradient."""
        if _runs_inside_another():
            self._forget()
            raise RuntimeError(
                f"step_in_backward got the gradient of {self._label(param)} from a backward inside of the backward, as "
                "a reentrant checkpoint runs it, and it may be a part of the whole one: use checkpoint(..., "
                "use_reentrant=False), or call remove() of the handle and step after backward. Parameters after this "
                "one in the model may have been stepped already"
            )

    def begin_anew(self) -> None:
        """`optimizer.zero_grad()` was called: no gradient accumulates over it, and a failed backward leaves nothing."""
        self._forget()
        self._since_step.clear()
        self._repeated = None

    def _forget(self) -> None:
        """Forget the gradients that wait; they stay in `param.grad`."""
        self._bucket.clear()
        self._nbytes = 0

    def _label(self, param: Tensor) -> str:
        groups = self._optimizer.param_groups
        params = chain.from_iterable(group["params"] for group in groups)
        pairs = zip(parameter_names(groups), params, strict=True)
        name = next((name for name, own in pairs if own is param), "a parameter")
        return f"{name} of shape {tuple(param.shape)}"

    def _step(self) -> None:
        bucket, self._bucket, self._nbytes = self._bucket, {}, 0
        # Every bucket reads the gradients of all weights, each of them through `__torch_function__` otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            ready = {p: stream for p, stream in bucket.items() if p.grad is not None}
        if not ready:
            return
        again = self._since_step & ready.keys()
        self._repeated = next(iter(again), self._repeated)
        self._since_step |= ready.keys()
        optimizer = self._optimizer
        optimizer._check_options()
        _check_separable(optimizer)
        for param, stream in ready.items():
            _wait_for(param, stream)
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        with torch._C.DisableTorchFunctionSubclass():
            waiting = {p: p.grad for p in params if p.grad is not None and p not in ready}
        key = tuple(i for i, p in enumerate(params) if p in ready)
        ordinary = optimizer._fused
        try:
            for param in waiting:
                param.grad = None
            optimizer._fused = self._steps.get(key)
            with torch.no_grad():
                optimizer._step_gradients()
            self._steps.pop(key, None)
            if len(self._steps) >= max(_MOST_STEPS, len(params)):
                self._steps.pop(next(iter(self._steps)))
            self._steps[key] = optimizer._fused
        finally:
            optimizer._fused = ordinary
            for param, grad in waiting.items():
                param.grad = grad
        for param in ready:
            param.grad = None


def _wait_for(param: Any, stream: Any) -> None:
    """FSDP2 reduces gradients on a stream of its own, and the last bucket is stepped on another."""
    if stream is None:
        return
    current = torch.cuda.current_stream(param.device)
    if current != stream:
        current.wait_stream(stream)
        local(param.grad).record_stream(current)


def _runs_inside_another() -> bool:
    """True if a node of another backward runs the one that calls the hook, as reentrant checkpoints do.

    torch does not say so while a backward runs. Python's frames do: a function that a backward calls, or another
    backward, lies below the innermost backward. On a thread that computes for a GPU the outermost has no frame.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _RUN:
        frame = frame.f_back
    while frame is not None:
        frame = frame.f_back
        if frame is not None and frame.f_code in (_RUN, _FUNCTION):
            return True
    return False
