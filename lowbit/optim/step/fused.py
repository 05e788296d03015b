"""The compiled step of an optimizer: which kernel updates a parameter, and which launches a step takes.

One launch (`lowbit.optim.step.launch`) updates all parameters with the same algorithm, dtypes, state format and
rounding. Weights that round themselves have launches of their own (`lowbit.optim.step.coded`, and where that does not
fit, `lowbit.optim.step.rounded`). A `FusedStep` keeps what does not change between steps: which parameters have
gradients, and the addresses and shapes of weights and states. Each step checks these, and collects the addresses of the
gradients. On a GPU the table of addresses is copied to the device if it has changed, by a pinned, asynchronous copy of
some kilobytes; on a CPU the kernel reads it in place. The host reads nothing back.

A `FusedStep` holds weak references to states, so that they are freed with the optimizer. It holds ids of parameters,
because weak references would keep `nn.Module.to` from swapping them. The optimizer's `state` keeps these parameters
alive, so no other object can take their ids.
"""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.sharded import is_dtensor
from lowbit.optim.options import rounds_bf16_stochastically
from lowbit.optim.state import state as states
from lowbit.optim.step import coded
from lowbit.optim.step.job import GradScale, Job, local_grad
from lowbit.optim.step.launch import StepItem, StepLaunch, compiled, has_own_memory, variant
from lowbit.optim.step.rounded import RoundedLaunch
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import FORMATS, CodebookTensor, row_layout
from lowbit_kernels.elementwise.fused_step import StepVariant
from lowbit_kernels.runtime import host_compiler, nvrtc
from lowbit_kernels.runtime.sources import FLOAT_MACROS
from lowbit_kernels.runtime.tensor_memory import MemoryWatch
from lowbit_kernels.runtime.warned import warn_once

_GRAD = operator.attrgetter("grad")
_INNER = operator.attrgetter(*CodebookTensor.tensor_attrs)


class FusedStep:
    """`lowbit.optim.step.job.StepOfJobs` by kernels. It leaves the parameters that no kernel takes.

    Args:
        optimizer: a `LowbitOptimizer`. It is not kept: every method is given it.
        jobs: the work of this step. All states exist.
    """

    def __init__(self, optimizer: Any, jobs: list[Job]) -> None:
        groups = optimizer.param_groups
        numbers = {id(group): i for i, group in enumerate(groups)}
        batches: dict[Any, list[StepItem]] = defaultdict(list)
        self.rest: list[Job] = []
        """The jobs that kernels leave, until they are run."""
        for job in jobs:
            rest = Job(job.group)
            may_fuse = optimizer.is_elementwise(job.group) and job.may_fuse
            choice = KernelChoice(optimizer, job.group) if may_fuse else None
            for param, index, grad in zip(job.params, job.indices, job.grads, strict=True):
                own = states.memory(param)
                found = choice.variant(param, own, grad) if choice else None
                if found is None:
                    rest.add(param, index, grad)
                else:
                    item = StepItem(param, own, numbers[id(job.group)], index, grad)
                    batches[_kind(own, found), found, own.device].append(item)
            if rest.params:
                self.rest.append(rest)
        self._rest = [(numbers[id(job.group)], job.indices) for job in self.rest]
        self.launches: list[StepLaunch] = [
            kind.of(optimizer, found, items) for (kind, found, _), items in batches.items()
        ]
        if self.launches:
            self._remember(optimizer, jobs)

    def _remember(self, optimizer: Any, jobs: list[Job]) -> None:
        """Store the values that `holds` compares."""
        groups = optimizer.param_groups
        params = _params(optimizer)
        self._params = list(map(id, params))
        self._sizes = [len(group["params"]) for group in groups]
        self._options = [options_of(optimizer, group) for group in groups]
        used = set(chain.from_iterable([job.indices for job in jobs]))
        self._idle = [i not in used for i in range(len(params))]
        # In the order of the parameters: all ranks exchange data in it, even if their kernels take different ones.
        self._sharded = sorted([i for i in used if is_dtensor(params[i])])
        owned = list(chain.from_iterable([launch.indices for launch in self.launches]))
        taken = {id(params[index]) for index in owned}
        self._is_taken = [id(key) in taken for key in optimizer.state]
        # The states of a DTensor are DTensors, which compiled code cannot look into.
        self._is_sharded = not set(self._sharded).isdisjoint(owned)
        self._watch = None if self._is_sharded else _watch(optimizer.state, self._is_taken)
        if self._watch is None:
            self._remember_states(optimizer)

    def _remember_states(self, optimizer: Any) -> None:
        """Store what `_states_hold` compares in Python."""
        tensors = self._tensors_of(optimizer)
        self._tensors = list(map(_weak, tensors))
        parts = list(map(local, tensors))
        self._has_codes = [isinstance(part, CodebookTensor) for part in parts]
        self._is_plain = [
            isinstance(part, Tensor) and not isinstance(part, CodebookTensor) for part in parts
        ]
        self._addresses = self._addresses_of(tensors)

    # ---- each step ------------------------------------------------------------------------------------------

    def holds(self, optimizer: Any) -> bool:
        """True if this still describes the optimizer. The launches then take the gradients of this step.

        This is most of the host's work in a step. Compiled code asks each weight, state and gradient
        (`lowbit_kernels.runtime.tensor_memory`); for the rest Python loops would take longer than `map` and `compress`.
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
        for _, indices in self._rest:
            for param in map(params.__getitem__, indices):
                grad = param.grad
                if grad is None or grad.layout is not torch.strided or grad.shape != param.shape:
                    return False
        for launch in self.launches:
            if not launch.holds(list(map(params.__getitem__, launch.indices))):
                return False
        return self._take_gradients(groups, params)

    def _states_hold(self, optimizer: Any) -> bool:
        """True if the states are the same tensor objects as before, each in the same memory."""
        if self._watch is not None:
            return self._watch.holds(optimizer.state)
        if len(optimizer.state) != len(self._is_taken):
            return False
        tensors = self._tensors_of(optimizer)
        return _are_same(tensors, self._tensors) and self._addresses_of(tensors) == self._addresses

    def _tensors_of(self, optimizer: Any) -> list[Any]:
        """The states of the parameters that kernels update."""
        owned = compress(optimizer.state.values(), self._is_taken)
        return list(chain.from_iterable(map(dict.values, owned)))

    def _addresses_of(self, tensors: list[Any]) -> list[int]:
        if self._is_sharded:
            tensors = list(map(local, tensors))
        inner = chain.from_iterable(map(_INNER, compress(tensors, self._has_codes)))
        return list(map(Tensor.data_ptr, chain(compress(tensors, self._is_plain), inner)))

    def _take_gradients(self, groups: list[dict[str, Any]], params: list[Tensor]) -> bool:
        moved = {index: local_grad(params[index]) for index in self._sharded}
        self.rest = []
        for group, indices in self._rest:
            own = [params[index] for index in indices]
            grads = [
                moved[index] if index in moved else local_grad(param)
                for index, param in zip(indices, own, strict=True)
            ]
            self.rest.append(Job(groups[group], own, indices, grads))
        return all(launch.take_moved(moved) for launch in self.launches)

    def jobs(self) -> list[Job]:
        """The work of this step, with its gradients."""
        return self.rest + [Job({}, x.params, x.indices, x.grads) for x in self.launches]

    def run(self, optimizer: Any, jobs: list[Job], scale: GradScale) -> list[Job]:
        """`jobs` are those of the constructor, or of `jobs()` if `holds` was asked last."""
        for launch in self.launches:
            launch.run(optimizer, scale)
        rest, self.rest = self.rest, []  # frees the gradients
        return rest


def _kind(own: Tensor, found: StepVariant) -> type[StepLaunch]:
    if found.code_bits:
        return coded.CodedLaunch
    return RoundedLaunch if isinstance(own, LowbitTensor) else StepLaunch


def _params(optimizer: Any) -> list[Any]:
    """All parameters, in the order of their indices."""
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


def _weak(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: value


def _are_same(found: list[Any], kept: list[Callable[[], Any]]) -> bool:
    return len(found) == len(kept) and all(map(operator.is_, found, map(operator.call, kept)))


def _watch(state: Any, is_taken: list[bool]) -> MemoryWatch | None:
    """The compiled form of `FusedStep._states_hold`; None where it cannot be compiled, or cannot look into `state`."""
    try:
        made = MemoryWatch(state, is_taken, (CodebookTensor, CodebookTensor.tensor_attrs))
    except (RuntimeError, OSError, AttributeError):
        return None
    return made if made.holds(state) else None


# ---- which kernel ------------------------------------------------------------------------------------------


class KernelChoice:
    """Chooses the kernels of the parameters of one group, whose states exist.

    Args:
        optimizer: gives the group its rule, its states and their rounding.
        group: the parameters' group.
    """

    def __init__(self, optimizer: Any, group: dict[str, Any]) -> None:
        self.group, self._state, self._name = group, optimizer.state, type(optimizer).__name__
        self.rule, self._signs = optimizer.kernel_rule(group), optimizer.state_names(group)
        self._returning = optimizer.kernel_rule(group, returns_errors=True)
        self.of_states = tuple(self._signs.values()), tuple(optimizer.stochastic(group).values())
        # Many parameters have the same answers.
        self._rounding = functools.cache(functools.partial(rounding_of, group))
        self._device_obstacle = functools.cache(device_obstacle)
        self._not_compiled = functools.cache(functools.partial(not_compiled, group))

    def variant(self, param: Tensor, own: Tensor, grad: Tensor) -> StepVariant | None:
        """The kernel to compile for a parameter; None where no kernel applies. Arguments are those of `obstacle`.

        Raises:
            RuntimeError: no kernel applies, and the group has `fused=True`.
        """
        formats = self.formats(param)
        reason = self.obstacle(param, own, grad, formats)
        if reason is None:
            # A weight that rounds itself is given float32 values.
            dtype = torch.float32 if isinstance(own, LowbitTensor) else own.dtype
            kinds = *self.of_states, self._rounding(dtype)
            rule, error, bits = self.rule, "dropped", 0
            if isinstance(own, LowbitTensor):
                bits = coded.bits_for(own, list(map(self._state[param].__getitem__, self._signs)))
            returns = self._returning is not None and self._returning.compensate
            if returns and states.is_compensated(self.group, param):
                rule = self._returning
                error = "tried" if isinstance(own, LowbitTensor) and not bits else "returned"
            found = variant(rule, dtype, grad.dtype, formats, *kinds, error=error, code_bits=bits)
            reason = scattered(found, param) or self._not_compiled(own.device, found)
            if reason is None:
                return found
        check_kernel_optional(self.group, param, reason)
        return None

    def formats(self, param: Tensor) -> tuple[str, ...]:
        """The kernel's names of the formats of a parameter's states; "" for a state that it cannot read."""
        state = self._state[param]
        return tuple(map(kernel_format, map(local, map(state.__getitem__, self._signs))))

    def obstacle(
        self, param: Tensor, own: Tensor, grad: Tensor, formats: tuple[str, ...]
    ) -> str | None:
        """Why no kernel updates a parameter; None if one does.

        Args:
            param: the parameter.
            own: the tensor that the step writes to, see `states.memory`.
            grad: this rank's part of the gradient.
            formats: `formats(param)`.
        """
        if self.group["fused"] is False:
            return "fused=False"
        if self.rule is None:
            return f"{self._name} has no kernel"
        if own.dtype != param.dtype:
            return f"its dtype is {param.dtype}, over a weight in {own.dtype}"
        for name, tensor in (("it", own), ("its gradient", grad)):
            if tensor.dtype not in FLOAT_MACROS:
                return f"{name} has the dtype {tensor.dtype}"
            if tensor is own and isinstance(own, LowbitTensor):
                continue  # the launch puts its values into memory
            if not has_own_memory(type(tensor)):
                return f"{name} is a {type(tensor).__name__}"
            if tensor.numel() and not tensor.is_meta and tensor.data_ptr() == 0:
                return f"{name} has no memory"
        if not own.is_contiguous() or own.is_neg():
            return f"its strides are {own.stride()}, or it is a view with the sign turned"
        if "" in formats:
            return "its states are not stored as the kernel reads them"
        coded = FORMATS.keys() & formats
        if (
            len(coded) > 1
            and len({row_layout(own.shape, FORMATS[f].block_size)[1] for f in coded}) > 1
        ):
            return "its states have rows of several lengths"
        return self._device_obstacle(own.device, "float8" in formats)


def scattered(found: StepVariant, param: Tensor) -> str | None:
    """Why the kernel cannot draw random bits for a parameter; None if it can, or draws none."""
    if found.is_random and len(states.global_index(param)[1]) > 1:
        return "it is rounded stochastically, and sharded in two dimensions besides the first"
    return None


def not_compiled(group: dict[str, Any], device: torch.device, found: StepVariant) -> str | None:
    """`compile_obstacle`. With fused=True a kernel that did not compile is compiled again at once."""
    if group["fused"]:  # the user may have removed the cause
        _failed.pop((found, device), None)
    return compile_obstacle(found, device)


def check_kernel_optional(group: dict[str, Any], param: Tensor, reason: str) -> None:
    """Raise RuntimeError if the group has fused=True; `reason`: why no kernel takes the parameter."""
    if group["fused"]:
        raise RuntimeError(
            f"fused=True, but no kernel takes a parameter of shape {tuple(param.shape)}: {reason}; "
            "leave fused out to have it updated by PyTorch operations"
        )


def options_of(optimizer: Any, group: dict[str, Any]) -> tuple[Any, ...]:
    """The options of a group that decide, together with a parameter, which kernel updates it."""
    names = ("fused", "bf16_stochastic_round", "weight_correction")
    stochastic = tuple(optimizer.stochastic(group).values())
    rule = optimizer.kernel_rule(group, returns_errors=True)  # it has all that the other one has
    return rule, stochastic, *map(group.__getitem__, names)


def kernel_format(state: Tensor) -> str:
    """The kernel's name of a state's format; "" for a state that it cannot read."""
    if isinstance(state, CodebookTensor):
        is_todays = state.block_size == FORMATS[state.format].block_size
        contiguous = state.codes.is_contiguous() and state.scale.is_contiguous()
        return state.format if is_todays and contiguous else ""
    if not state.is_contiguous():
        return ""
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(state.dtype, "")


def rounding_of(group: dict[str, Any], dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16 and rounds_bf16_stochastically(group):
        return "stochastic"
    if dtype == torch.bfloat16 and group["weight_correction"] in states.CORRECTIONS:
        return {"8bit": "corrected", "16bit": "exact"}[group["weight_correction"]]
    return "nearest"


def device_obstacle(device: torch.device, float8: bool) -> str | None:
    """Why no kernel runs on a device, with float8 states or others; None if one does."""
    if device.type == "cpu":
        return _no_compiler()
    if device.type != "cuda":
        return f"there is none for {device.type}"
    if torch.version.cuda is None:
        return "the GPU is not NVIDIA's"
    if not nvrtc.is_available():
        warn_once(
            "optimizer: no cuda-bindings",
            "lowbit's CUDA optimizer step needs the package cuda-bindings (part of torch's CUDA builds), which is "
            "not installed: optimizers run by PyTorch ops, several times slower",
        )
        return "cuda.bindings is not installed"
    needed = (8, 9) if float8 else (8, 0)
    if torch.cuda.get_device_capability(device) < needed:
        return f"the GPU's compute capability is below {needed[0]}.{needed[1]}"
    return None


def _no_compiler() -> str | None:
    try:
        if host_compiler.compiler():
            return None
        reason = "no C++ compiler was found (c++, g++ or clang++ on the path, or one named in $CXX)"
    except RuntimeError as error:
        reason = str(error)
    warn_once(
        "optimizer: no compiler",
        f"lowbit's optimizer step on a CPU is compiled at first use, and {reason}: optimizers run by PyTorch "
        "operations, several times slower. Install g++ or clang++, or name a compiler in $CXX; fused=False asks for "
        "PyTorch operations",
    )
    return reason


_failed: dict[tuple[StepVariant, torch.device], tuple[str, float]] = {}
"""Kernels for a CPU that did not compile: why, and when."""
RETRY_SECONDS = 600.0
"""Time until a kernel that did not compile is compiled again. A full disk may be free by then; a compiler that refuses
the kernel costs about a second each time."""


def compile_obstacle(variant: StepVariant, device: torch.device) -> str | None:
    """Why the kernel for a CPU does not compile on this machine; None if it does, or if it is for a GPU."""
    if device.type != "cpu":
        return None
    key = variant, device
    if key in _failed and time.monotonic() - _failed[key][1] < RETRY_SECONDS:
        return _failed[key][0]
    try:
        compiled(variant, device)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        first = next((line for line in lines[1:] if "error" in line), "")
        reason = f"could not be compiled: {lines[0]} {first}".rstrip()
        warn_once(
            "optimizer: not compiled",
            "lowbit's optimizer step for this CPU runs by PyTorch operations, several times slower, because it "
            f"{reason}. lowbit tries again in {RETRY_SECONDS / 60:.0f} minutes, or at once with fused=True",
        )
        _failed[key] = f"it {reason}", time.monotonic()
        return _failed[key][0]
    _failed.pop(key, None)
    return None
