"""The compiled step of an optimizer: which launches it takes, and whether they are still the right ones.

All parameters with the same algorithm, dtypes, state format and rounding are updated by one launch
(`lowbit.optim.launch`); those that round themselves, by one for every few of them (`lowbit.optim.rounded`). What
doesn't change between steps is worked out once (`FusedSteps`). Each step looks whether it still holds: the same
parameters have gradients, and weights and states lie where they lay, in the same shapes. Then it collects the addresses
of the gradients. On a GPU the table is copied to the device if anything in it has changed: a pinned, asynchronous copy
of some kilobytes; on a CPU it is read where it is. Nothing is read back.

A plan knows states by weak references, so that they are freed with the optimizer, or with what the user takes out of
it. It knows parameters by their ids: weak references would keep `nn.Module.to` from swapping them. The optimizer's
`state` keeps these parameters alive, so no other object can take their ids.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from lowbit.optim import state as states
from lowbit.optim.clip import GradScale
from lowbit.optim.job import Job, local_grad
from lowbit.optim.kernel import options_of, variant_of
from lowbit.optim.launch import Item, Launch
from lowbit.optim.rounded import RoundedLaunch
from lowbit.tensor.codebook_tensor import CodebookTensor

_GRAD, _CODES, _SCALE = map(operator.attrgetter, ("grad", "codes", "scale"))


class FusedSteps:
    """What kernels do of an optimizer's step, and what they leave to PyTorch operations.

    Args:
        optimizer: a `LowbitOptimizer`. It isn't kept: every method is given it.
        jobs: what there is to do now, of parameters whose states exist.
    """

    def __init__(self, optimizer: Any, jobs: list[Job]) -> None:
        groups = optimizer.param_groups
        numbers = {id(group): i for i, group in enumerate(groups)}
        batches: dict[Any, list[Item]] = defaultdict(list)
        self._left: list[Job] = []  # of the step at hand
        for job in jobs:
            rest = Job(job.group)
            for param, index, grad in zip(job.params, job.indices, job.grads, strict=True):
                variant = variant_of(optimizer, job.group, param, grad) if job.may_fuse else None
                if variant is None:
                    rest.add(param, index, grad)
                else:
                    own = states.memory(param)
                    item = Item(param, own, numbers[id(job.group)], index, grad)
                    kind = RoundedLaunch if states.rounds_itself(param) else Launch
                    batches[kind, variant, own.device].append(item)
            if rest.params:
                self._left.append(rest)
        self._rest = [(numbers[id(job.group)], job.indices) for job in self._left]
        self.launches: list[Launch] = [
            kind.of(optimizer, variant, items) for (kind, variant, _), items in batches.items()
        ]
        if self.launches:
            self._remember(optimizer, jobs)

    def _remember(self, optimizer: Any, jobs: list[Job]) -> None:
        """What `holds` compares."""
        groups = optimizer.param_groups
        params = _params(optimizer)
        self._params = list(map(id, params))
        self._sizes = [len(group["params"]) for group in groups]
        self._options = [options_of(optimizer, group) for group in groups]
        used = {index for job in jobs for index in job.indices}
        self._idle = [i not in used for i in range(len(params))]
        # In the order of the parameters, in which all ranks exchange data: what the kernels take may differ.
        self._sharded = sorted(i for i in used if states.is_dtensor(params[i]))
        taken = {id(params[place]) for launch in self.launches for place in launch.places}
        self._is_taken = [id(key) in taken for key in optimizer.state]
        tensors = self._tensors_of(optimizer)
        self._tensors = list(map(_weak, tensors))
        parts = list(map(states.local, tensors))
        self._has_codes = [isinstance(part, CodebookTensor) for part in parts]
        self._is_plain = [
            isinstance(part, Tensor) and not isinstance(part, CodebookTensor) for part in parts
        ]
        self._is_sharded = any(map(states.is_dtensor, tensors))
        self._addresses = self._addresses_of(tensors)

    # ---- each step ------------------------------------------------------------------------------------------

    def holds(self, optimizer: Any) -> bool:
        """Whether this still describes the optimizer, whose gradients are taken up then; if not, make another one.

        This is most of what the host does in a step: loops in Python would take three times as long.
        """
        groups, params = optimizer.param_groups, _params(optimizer)
        if not self.launches or list(map(id, params)) != self._params:
            return False
        if [len(group["params"]) for group in groups] != self._sizes:
            return False
        if any(grad is not None for grad in map(_GRAD, compress(params, self._idle))):
            return False
        if [options_of(optimizer, group) for group in groups] != self._options:
            return False
        if not self._states_hold(optimizer):
            return False
        for _, places in self._rest:
            for param in map(params.__getitem__, places):
                grad = param.grad
                if grad is None or grad.layout is not torch.strided or grad.shape != param.shape:
                    return False
        for launch in self.launches:
            if not launch.holds(list(map(params.__getitem__, launch.places))):
                return False
        return self._take_gradients(groups, params)

    def _states_hold(self, optimizer: Any) -> bool:
        """Whether the states are the very tensors of before, and each in the same memory."""
        if len(optimizer.state) != len(self._is_taken):
            return False
        tensors = self._tensors_of(optimizer)
        return _are(tensors, self._tensors) and self._addresses_of(tensors) == self._addresses

    def _tensors_of(self, optimizer: Any) -> list[Any]:
        """The states of the parameters that kernels take."""
        owned = compress(optimizer.state.values(), self._is_taken)
        return list(chain.from_iterable(map(dict.values, owned)))

    def _addresses_of(self, tensors: list[Any]) -> list[int]:
        if self._is_sharded:
            tensors = list(map(states.local, tensors))
        coded = list(compress(tensors, self._has_codes))
        memory = chain(compress(tensors, self._is_plain), map(_CODES, coded), map(_SCALE, coded))
        return list(map(Tensor.data_ptr, memory))

    def _take_gradients(self, groups: list[dict[str, Any]], params: list[Tensor]) -> bool:
        moved = {place: local_grad(params[place]) for place in self._sharded}
        self._left = []
        for group, places in self._rest:
            own = [params[place] for place in places]
            grads = [
                moved[place] if place in moved else local_grad(param)
                for place, param in zip(places, own, strict=True)
            ]
            self._left.append(Job(groups[group], own, places, grads))
        return all(launch.take(moved) for launch in self.launches)

    def jobs(self) -> list[Job]:
        """All that there is to do, with the gradients at hand."""
        taken = [Job({}, x.params, x.places, x.grads) for x in self.launches]
        return self._left + taken

    def pop_rest(self) -> list[Job]:
        """What kernels don't do of it, once a step."""
        rest, self._left = self._left, []
        return rest

    def stepped_by(self) -> Iterator[tuple[list[int], str]]:
        """The places of the parameters that kernels update, and of what device; see `lowbit.optim.stepped_by`."""
        for launch in self.launches:
            yield launch.places, f"fused {launch.table.device.type}"

    def run(self, optimizer: Any, scale: GradScale) -> None:
        """Update what the kernels take."""
        for launch in self.launches:
            launch.run(optimizer, scale)


def _params(optimizer: Any) -> list[Any]:
    """All parameters, in the order of their places."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _weak(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: value


def _are(found: list[Any], kept: list[Callable[[], Any]]) -> bool:
    """Whether these are the very objects."""
    return len(found) == len(kept) and all(map(operator.is_, found, map(operator.call, kept)))
