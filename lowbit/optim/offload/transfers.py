"""Copies between a device and the host, and the parameters that are copied; see `lowbit.optim.offload.offload`.

`Slot` and `CPUOffloadOptimizer` decide the order of copies. `Transfers` makes a copy: on the CPU at once, on CUDA in
the background. So the order can be tested without a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.numerics.sharded import is_dtensor
from lowbit.tensor.core.dtensor import local


class Event(Protocol):
    """A copy that was started."""

    def synchronize(self) -> None:
        """Wait, on the host, until it is done."""


class Transfers:
    """Copies between the host and one device, in the order of the calls.

    This class is for parameters on the CPU: a copy is done when its call returns, so no method returns an event.
    """

    def buffer(self, like: Tensor) -> Tensor:
        """Host memory of the shape and dtype of `like`, from and to which copies can run in the background."""
        return torch.empty_like(like, device="cpu", requires_grad=False)

    def download(self, target: Tensor, source: Tensor) -> Event | None:
        """Start copying the device's `source`, as it is after the work issued so far, to the host."""
        target.copy_(source)
        return None

    def upload(self, target: Tensor, source: Tensor) -> Event | None:
        """Start copying the host's `source` to the device, once the work issued so far has read `target`."""
        target.copy_(source)
        return None

    def join(self) -> None:
        """Let all later work of the device run after the uploads."""


class CudaTransfers(Transfers):
    """Copies on two streams, one for each direction. The host waits only for the events, never in these methods."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)

    def buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True, requires_grad=False)

    def download(self, target: Tensor, source: Tensor) -> Event:
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            target.copy_(source, non_blocking=True)
        # The owner of the source may free it before the copy has run.
        source.record_stream(self.down)
        return self.down.record_event()

    def upload(self, target: Tensor, source: Tensor) -> Event:
        self.up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.up):
            target.copy_(source, non_blocking=True)
        return self.up.record_event()

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.up)


def transfers_for(device: torch.device) -> Transfers:
    """CUDA: in the background. Any other device: at once."""
    return CudaTransfers(device) if device.type == "cuda" else Transfers()


class _HandOver:
    """The hook that hands over a parameter's gradient. It must not keep the optimizer alive."""

    def __init__(self, slot: Slot) -> None:
        self.slot = weakref.ref(slot)

    def __call__(self, _: Tensor) -> None:
        slot = self.slot()
        if slot is not None and not slot.may_be_reduced_later():
            slot.receive(in_backward=True)


class Slot:
    """One parameter: its copy on the host, its gradient there, and the copies under way."""

    def __init__(self, param: Tensor, transfers: Transfers, offload_gradients: bool) -> None:
        self.param: Any = param
        self.transfers = transfers
        self.offload_gradients = offload_gradients
        part = local(param)
        self.device = part.device
        # allocated at the first copy of the weight: a frozen parameter takes no memory
        self.host_part = torch.zeros((), dtype=part.dtype).expand(part.shape)
        self.host = self._wrapped(self.host_part).requires_grad_(param.requires_grad)
        self.has_memory = False
        self.weight_seen: tuple[int, ...] = ()
        self.weight_event: Event | None = None
        self.has_grad = False
        self.grad: Tensor | None = None  # the gradient on the host
        self.more: Tensor | None = None  # the gradient of the next backward, to be added to `grad`
        self.has_more = False
        self.mark = object()
        self.grad_version: tuple[int, ...] = ()
        self.grad_event: Event | None = None
        self.hook: Any = None

    def watch(self) -> None:
        """Register a hook by which backward hands over the gradient at once."""
        if self.hook is None and self.param.requires_grad:
            hooks: dict[int, Any] = self.param._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, _HandOver)]:
                # The hook of an optimizer that was replaced would take the gradients.
                del hooks[key]
            self.hook = self.param.register_post_accumulate_grad_hook(_HandOver(self))

    def may_be_reduced_later(self) -> bool:
        """True if a gradient may still change between its hook and the end of backward. DistributedDataParallel
        averages it over the ranks in between, and neither hooks nor version counters show that."""
        is_plain = not is_dtensor(self.param)
        return is_plain and dist.is_initialized() and dist.get_world_size() > 1

    @torch.no_grad()
    def receive(self, in_backward: bool = False) -> None:
        """Start copying the device's gradient, unless the host has it."""
        own: Any = self.param.grad
        if own is None:
            self.has_grad = self.has_grad and self.offload_gradients
            return
        if own.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.param.shape)} is sparse ({own.layout}), which "
                "cannot be offloaded; use nn.Embedding(sparse=False), or torch.optim.SparseAdam for that parameter"
            )
        grad = own
        if is_dtensor(own) and own.placements != self.param.placements:
            if in_backward:
                return  # redistributing communicates; in the step all ranks do it in the same order
            grad = own.redistribute(self.param.device_mesh, self.param.placements)
        part = local(grad)
        if self.offload_gradients:
            self._add(part)
            self.param.grad = None
        elif not self._has_copied(own):
            self.grad = self._buffer(self.grad, part)
            # A mark on the gradient object itself. A weak reference would keep `nn.Module.to` from swapping it.
            own._copied_by, self.grad_version = self.mark, _version(own)
            self.grad_event = self.transfers.download(self.grad, part)
        self.has_grad = True

    def _has_copied(self, grad: Tensor) -> bool:
        is_marked = getattr(grad, "_copied_by", None) is self.mark
        return self.has_grad and is_marked and _version(grad) == self.grad_version

    def _add(self, part: Tensor) -> None:
        if self.has_grad:
            self.arrive()
            self.more = self._buffer(self.more, part)
            self.grad_event = self.transfers.download(self.more, part)
            self.has_more = True
        else:
            self.grad = self._buffer(self.grad, part)
            self.grad_event = self.transfers.download(self.grad, part)

    def _buffer(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            return self.transfers.buffer(like)
        return buffer

    def arrive(self) -> Tensor:
        """The gradient on the host, once it is there."""
        _wait(self.grad_event)
        self.grad_event = None
        assert self.grad is not None
        if self.has_more:
            assert self.more is not None
            self.grad.add_(self.more)
            self.has_more = False
        return self.grad

    def forget(self, set_to_none: bool = True) -> None:
        """Drop the host's gradient (its memory stays for the next one), or make it zero."""
        if self.has_grad and not set_to_none:
            self.arrive().zero_()
        else:
            self.has_grad = self.has_more = False

    def refresh(self) -> None:
        """Start copying the weight to the host, unless the host has this version of it."""
        part = local(self.param)
        if part.device != self.device:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.param.shape)} is on {part.device}, and was on {self.device} when "
                "the optimizer was made; move the model first"
            )
        if part.dtype != self.host_part.dtype:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.param.shape)} is {part.dtype}, and was {self.host_part.dtype} "
                "when the optimizer was made; convert the model first"
            )
        seen = self._weight_version(part)
        if seen != self.weight_seen:
            if not self.has_memory:
                self.host_part.data = self.transfers.buffer(part)
                self.has_memory = True
            self.weight_event = self.transfers.download(self.host_part, part)
            self.weight_seen = seen

    def give(self) -> None:
        """Give the gradient to the base optimizer, and wait until no copy uses the host's weight."""
        self.host.grad = self._wrapped(self.arrive())
        self.settle()

    def settle(self) -> None:
        _wait(self.weight_event)
        self.weight_event = None

    def send(self) -> None:
        """Start copying the updated weight to the device."""
        part = local(self.param)
        self.weight_event = self.transfers.upload(part, self.host_part)
        self.weight_seen = self._weight_version(part)

    def _weight_version(self, part: Tensor) -> tuple[int, ...]:
        return (self.param._version, part._version, part.data_ptr())

    def _wrapped(self, part: Tensor) -> Tensor:
        """`part`, which stays on the host, as a DTensor sharded as the parameter. (from_local would move it.)"""
        if not is_dtensor(self.param):
            return part
        from torch.distributed.tensor import DTensor

        return DTensor(part, self.param._spec, requires_grad=False)


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, local(tensor)._version
