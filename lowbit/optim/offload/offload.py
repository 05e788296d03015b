"""CPUOffloadOptimizer: the states (and gradients) of any optimizer in host memory, its step on the CPU.

Each parameter has a copy in host memory, and the base optimizer is built over these copies: its states are created and
updated there, and never move. Two things move, through pinned memory and on separate streams:

    gradient   device -> host   as soon as backward has it, by a hook on the parameter
    weight     host -> device   as soon as the CPU has updated it, while the CPU goes on with others

A step updates some parameters at a time, the last ones first, because backward delivers them first: it waits for their
gradients, updates, and starts their copies back. The device's next work runs after those copies; nothing else waits.

Clipping, unscaling, another backward and `load_state_dict` can make a copy stale. All of these change tensors in place,
which changes their version counters. So a copy is used only if its source has not changed; otherwise `step` copies
again.

ZeRO-Offload, arXiv 2101.06840, describes the scheme.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.long_norm import long_norm
from lowbit.numerics.settings import check_flag
from lowbit.optim.base import LowbitOptimizer
from lowbit.optim.offload.transfers import Slot, Transfers, transfers_for
from lowbit.optim.state.checkpoint import checked_states
from lowbit.optim.step.job import norm_over_ranks, sharding
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local

# Elements that one call of the base optimizer updates: small beside the model, large beside the cost of a call.
BUCKET = 2**24


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """Any optimizer, its states (and gradients) in host memory and its step on the CPU.

    Use this class as the wrapped optimizer. Its `state_dict()` is that of `base_class` used directly: each loads the
    other's, at any time, also between the backward passes of one step. Learning rate schedulers and changes of
    `param_groups` take effect at the next step. A loop needs no change, except with `offload_gradients=True`: the
    gradients have left the device then, so clip with `clip_grad_norm_` of this class.

        optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    Numerics: the copies on the host have the dtype of the parameters, and the result is that of `base_class` on the
    CPU, bit for bit. So with bfloat16 weights, torch.optim.AdamW has bfloat16 states too, and loses updates below
    half of a weight's last bit, as it does without offload. `lowbit.optim.AdamW` with `state="fp32"` (or "8bit") and
    `weight_correction="8bit"` or `bf16_stochastic_round=True` does not.

    A parameter sharded by FSDP2 or DTensor is offloaded as its local part, in a DTensor with the same placements. If
    several processes hold plain parameters, as under DistributedDataParallel, which averages gradients at the end of
    backward, then `step` copies the gradients, which stay on the device until then.

    Args:
        params: as for `base_class`: parameters, (name, parameter) pairs, or groups. Plain tensors or DTensors.
        base_class: a class of optimizers; all of torch.optim but LBFGS and SparseAdam, all of lowbit.optim, others.
            An optimizer of torch.optim or lowbit.optim updates some parameters while the gradients of others are on
            their way. Any other one, and one that clips or skips inside its step, is called once, with all gradients.
        offload_gradients: free the device's gradients as backward delivers them, and add up those of several
            backward passes on the host, in the gradients' dtype. Then `.grad` is None after backward, so
            `torch.nn.utils.clip_grad_norm_` and `GradScaler` find nothing: clip with `clip_grad_norm_` of this
            class, or by `max_grad_norm` of lowbit's optimizers, and scale by hand or not at all. `step` uses the
            gradients up; drop them without a step by `zero_grad` of this class (the model's cannot).
        base_options: for `base_class`: lr, betas, fused, ...

    Raises:
        TypeError, ValueError: a parameter or class that can't be offloaded, and whatever `base_class` raises.

    The next step sees weights that were changed in place or loaded, but not those changed through `.data`, which no
    version counter records: write `with torch.no_grad(): p.mul_(...)` instead of `p.data.mul_(...)`.
    """

    base: torch.optim.Optimizer
    """The optimizer over the copies on the host."""

    def __init__(
        self,
        params: ParamsT,
        base_class: type[torch.optim.Optimizer],
        *,
        offload_gradients: bool = False,
        **base_options: Any,
    ) -> None:
        _check_class(base_class)
        self._slots: dict[Tensor, Slot] = {}
        self._transfers: dict[torch.device, Transfers] = {}
        check_flag("offload_gradients", offload_gradients)
        self._offload_gradients = offload_gradients
        self._base_options = base_options
        self._made = False
        super().__init__(params, {})  # checks the parameters and puts them into groups
        hosts = [self._on_host(group) for group in self.param_groups]
        self.base = base_class(hosts, **base_options)
        self.defaults = self.base.defaults
        self.param_groups.clear()
        self._mirror_new_groups()
        self._made = True

    # ---- groups ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of `base_class`. Raises before anything is added."""
        super().add_param_group(param_group)
        if self._made:
            known = set(self._slots)
            added = self.param_groups.pop()
            try:
                self.base.add_param_group(self._on_host(added))
            except BaseException:
                self._slots = {p: slot for p, slot in self._slots.items() if p in known}
                raise
            self._mirror_new_groups()

    def _on_host(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group of the base optimizer for one over the device's parameters."""
        for param in group["params"]:
            _check_param(param)
        slots = []
        with torch.no_grad():
            for param in group["params"]:
                device = local(param).device
                if device not in self._transfers:
                    self._transfers[device] = transfers_for(device)
                slot = Slot(param, self._transfers[device], self._offload_gradients)
                if param.requires_grad:
                    slot.refresh()
                self._slots[param] = slot
                slots.append(slot)
            for slot in slots:
                slot.settle()
        hosts: list[Any] = [slot.host for slot in slots]
        if "param_names" in group:
            hosts = list(zip(group["param_names"], hosts, strict=True))
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        return {**options, "params": hosts}

    def _mirror_new_groups(self) -> None:
        """Add the groups of the base optimizer, which may have split those it was given, over device parameters."""
        params = {slot.host: param for param, slot in self._slots.items()}
        for theirs in self.base.param_groups[len(self.param_groups) :]:
            own = {**theirs, "params": [params[host] for host in theirs["params"]]}
            self.param_groups.append(own)
            for param in own["params"]:
                self._slots[param].watch()

    def _hand_options_down(self) -> list[dict[str, Any]]:
        handed = []
        for own, theirs in zip(self.param_groups, self.base.param_groups, strict=True):
            options = {k: v for k, v in own.items() if k != "params"}
            for name, value in options.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    options[name] = value.detach().cpu()
            theirs.update(options)
            handed.append(options)
        return handed

    def _take_options_back(self, handed: list[dict[str, Any]]) -> None:
        """Copy options that the base optimizer changed in its groups, such as a counter."""
        for own, theirs, options in zip(
            self.param_groups, self.base.param_groups, handed, strict=True
        ):
            for name, value in theirs.items():
                if name != "params" and (name not in options or value is not options[name]):
                    own[name] = value

    def _link_states(self) -> None:
        params = {slot.host: param for param, slot in self._slots.items()}
        self.state.clear()
        for key, value in self.base.state.items():
            self.state[params.get(key, key)] = value

    # ---- the step -------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Calls `closure` first, and returns what it returns.

        Returns when the CPU is done. The device may still be receiving weights; its next work runs after that.

        Raises:
            RuntimeError: a sparse gradient, or a parameter that was moved to another device or converted to another
                dtype. No parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slots = self._with_gradients()
        for slot in slots:
            slot.refresh()
        handed = self._hand_options_down()
        try:
            for bucket in self._buckets(slots):
                self._step_bucket(bucket)
        finally:
            for transfers in self._transfers.values():
                transfers.join()
            self._take_options_back(handed)
            self._link_states()
        if self._offload_gradients:
            for slot in slots:
                slot.forget()
        return loss

    def _step_bucket(self, bucket: list[Slot]) -> None:
        try:
            for slot in bucket:
                slot.give()
            self.base.step()
        finally:
            for slot in bucket:
                slot.host.grad = None
                slot.send()

    def _with_gradients(self) -> list[Slot]:
        """The parameters that have a gradient, the last first. The copies of all gradients to the host are started."""
        slots = [self._slots[p] for group in self.param_groups for p in group["params"]]
        for slot in slots:
            slot.watch()  # a parameter that was frozen when it was added may be trained now
            slot.receive()
        return [slot for slot in reversed(slots) if slot.has_grad]

    def _buckets(self, slots: list[Slot]) -> Iterator[list[Slot]]:
        # By sizes of whole parameters, so that ranks agree: an optimizer may communicate.
        limit = BUCKET if self._is_separable() else float("inf")
        bucket: list[Slot] = []
        size = 0
        for slot in slots:
            if bucket and size + slot.param.numel() > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(slot)
            size += slot.param.numel()
        if bucket:
            yield bucket

    def _is_separable(self) -> bool:
        """True if a parameter's update depends only on its own gradient and state."""
        known = isinstance(self.base, LowbitOptimizer)
        if not known and not type(self.base).__module__.startswith("torch.optim."):
            return False
        groups = self.base.param_groups
        return not any(g.get("max_grad_norm") or g.get("skip_nonfinite") for g in groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients on the device and on the host, or make them zero."""
        super().zero_grad(set_to_none)
        if self._offload_gradients:
            for slot in self._slots.values():
                slot.forget(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the host's gradients to a norm of at most `max_norm` over all of them (and all ranks).

        Like torch.nn.utils.clip_grad_norm_, to be called after the last backward pass of a step. Gradients that are
        still on the device stay as they are. The norm is exact to float32's precision, for any number of elements.

        Returns:
            The norm before, a tensor without dimensions on the CPU.
        """
        slots = self._with_gradients()
        norm = _total_norm(slots)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for slot in slots:
            slot.arrive().mul_(factor)
        return norm

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As that of `base_class` used directly; its tensors are on the CPU. Gradients are not part of it."""
        self._link_states()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of `base_class` used directly. Gradients stay.

        Raises:
            ValueError, TypeError: as `base_class`, where the checkpoint doesn't fit, or holds values that no run
                leaves, such as a negative step. Nothing has changed then.
        """
        state_dict = copy(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        if not isinstance(self.base, LowbitOptimizer):  # which checks itself
            with torch.no_grad():
                checked_states(self.base.param_groups, state_dict)
        self.base.load_state_dict(state_dict)
        for own, theirs in zip(self.param_groups, self.base.param_groups, strict=True):
            params = own["params"]
            own.clear()
            own.update(theirs, params=params)
        self._link_states()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ---- copies ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle: `state_dict`, and what is needed to rebuild the rest."""
        made_by = type(self.base), self._base_options, self._offload_gradients
        return {
            **super().__getstate__(),
            "state": {},
            "base_state": self.base.state_dict(),
            "made_by": made_by,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        saved = own.pop("base_state")
        base_class, self._base_options, self._offload_gradients = own.pop("made_by")
        self._slots, self._transfers = {}, {}
        super().__setstate__({**own, "state": defaultdict(dict)})
        hosts = [self._on_host(group) for group in self.param_groups]
        self.base = base_class(hosts, **self._base_options)
        self.base.load_state_dict(saved)
        for slot in self._slots.values():
            slot.watch()
        self._link_states()
        self._made = True


def _total_norm(slots: list[Slot]) -> Tensor:
    """The norm of all gradients on the host; over all ranks where they are sharded."""
    squares: dict[Any, Any] = {}
    for slot in slots:
        key = sharding(slot.param)
        squares[key] = squares.get(key, 0.0) + long_norm(slot.arrive()).square()
    return norm_over_ranks(squares.items(), torch.device("cpu")).float()


def _check_class(base_class: Any) -> None:
    if not (isinstance(base_class, type) and issubclass(base_class, torch.optim.Optimizer)):
        raise TypeError(
            f"base_class must be a class of optimizers, such as torch.optim.AdamW, got {base_class!r}; its options "
            "follow by name: CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-4)"
        )
    refused = {
        torch.optim.LBFGS: "calls its closure during the step, between updates",
        torch.optim.SparseAdam: "takes sparse gradients, which cannot be offloaded",
        CPUOffloadOptimizer: "already is on the CPU",
    }
    for cls, reason in refused.items():
        if issubclass(base_class, cls):
            raise ValueError(
                f"base_class {base_class.__name__} {reason}; use it directly, or another, such as torch.optim.AdamW"
            )


def _check_param(param: Tensor) -> None:
    with torch.no_grad():
        part = local(param)
    if isinstance(part, LowbitTensor):
        raise TypeError(
            f"a parameter of shape {tuple(param.shape)} is a {type(part).__name__}, whose weights cannot be "
            "offloaded; give low-bit weights to a lowbit optimizer directly (its states take few bits)"
        )
    if part.device.type == "meta":
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is on the meta device: it has no values yet; make the "
            "optimizer after model.to_empty(device=...) and loading or initialising it"
        )
