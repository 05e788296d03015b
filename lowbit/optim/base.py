"""The base of every optimizer: parameter groups, states in any format, the step over parameters, checkpoints.

An optimizer is a subclass that names its states in `moments` and gives its formula on plain tensors, `reference`. The
same formula as C++ for the kernels, `hyper_names`, `prepare` and `rule`, is optional. A subclass may be in any file:

    class SignSGD(LowbitOptimizer):
        moments: ClassVar = {"momentum": True}

        def __init__(self, params, lr=1e-3, beta=0.9, **common):
            super().__init__(params, {"lr": lr, "beta": beta}, common)

        @staticmethod
        def reference(param, grad, momentum, *, lr, beta):
            momentum.lerp_(grad, 1 - beta)
            param.sub_(momentum.sign() * lr)

`options` names the check of each option of the algorithm; a step calls them again if an option has changed:

        options: ClassVar = {"beta": check_below_one}  # of lowbit.optim.options

A variant with another default of `state` is `class SignSGD4bit(SignSGD, state="4bit")`.

The base provides the rest:

- A parameter's first step creates its states as zeros, each a `CodebookTensor` or plain float32 or bfloat16. The states
  of a sharded parameter (DTensor, FSDP2) are sharded alike.
- Kernels update the parameters that they take (`lowbit.optim.step.fused`), PyTorch operations the others
  (`lowbit.optim.step.eager`). Both decode the states, compute in float32, encode, and round the weight once.
- Random bits (`lowbit.numerics.rounding`) have the key (the group's seed, the parameter's own step, 4 * its index in
  the optimizer + slot, index of the element in the whole parameter), with slot 0 for the weight and i + 1 for the i-th
  name of `state_names`. So they are the same at any sharding and after a restart.
- Loading a checkpoint (`lowbit.optim.state.checkpoint`) converts its states to this optimizer's formats.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import check_nonnegative, check_number
from lowbit.optim.options import (
    COMMON_DEFAULTS,
    KEPT_ON_LOADING,
    LEAST_RATE,
    RETURN_SHARE,
    Check,
    CommonOptions,
    check_common,
    check_definition,
    check_options,
    check_param,
    check_shared,
)
from lowbit.optim.state import state as states
from lowbit.optim.state.checkpoint import (
    check_is_state_dict,
    check_loadable,
    checked_states,
    converted,
    fill,
    parameter_names,
)
from lowbit.optim.state.described import described
from lowbit.optim.state.foreign import translated
from lowbit.optim.step.eager import EagerStep
from lowbit.optim.step.job import GradScale, Job, StepOfJobs, collect, grad_scale
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local

if TYPE_CHECKING:
    from lowbit.optim.step.fused import FusedStep
    from lowbit_kernels.elementwise.fused_step import Rule


def _read(rate: float | Tensor) -> float:
    """The value of a learning rate; 0 without one, on the meta device."""
    return 0.0 if isinstance(rate, Tensor) and rate.is_meta else float(rate)


@functools.cache
def _made_rule(hyper: tuple[str, ...], prepare: str, update: str, compensate: str) -> Rule:
    from lowbit_kernels.elementwise.fused_step import Rule

    return Rule(hyper, prepare, update, compensate)


class LowbitOptimizer(torch.optim.Optimizer):
    """The base of lowbit's optimizers. Subclasses give `moments` and `reference`, and may give `rule` for the kernels.

    Args:
        params: parameters, (name, parameter) pairs, or groups.
        options: the algorithm's own options and their values, `lr` among them.
        common: `lowbit.optim.CommonOptions`, as a dict.

    Raises:
        TypeError, ValueError: an option or a parameter that is not accepted.
    """

    moments: ClassVar[dict[str, bool]]
    """Names of the state tensors, and whether their values have a sign."""
    options: ClassVar[Mapping[str, Check]] = {}
    """The algorithm's own options that are checked, each with its check (`lowbit.optim.options`)."""
    slow_moments: ClassVar[frozenset[str]] = frozenset()
    """Moments with a sign that change too little in a step to be rounded to nearest, see `stochastic`."""
    default_state: ClassVar[str] = "8bit"
    """The default format of states."""
    hyper_names: ClassVar[tuple[str, ...]] = ()
    """The options that the kernel reads, in `prepare` and by these names: `Rule.hyper`."""
    prepare: ClassVar[str] = ""
    """C++ that the kernel runs once a tensor: `Rule.prepare`."""
    reference: ClassVar[Callable[..., None]]
    """The formula: a static function that makes one step in place, on tensors of one shape.

    It is called with `param` (float32 or float64) and `grad` (float32, to be left alone), with the states (float32) by
    their names in `moments`, and by name with whatever else it takes: `step` (float64 without dimensions, 1 at the
    first step) and options of the group. `lr` is a float, or float64 without dimensions. The function must be
    elementwise, because tensors may be pieces of a parameter or several parameters, and must not read values on the
    host."""
    compensate: ClassVar[Callable[..., None] | None] = None
    """The formula of `weight_correction="momentum"`: a static function that adds the error of a rounded weight to the
    states, in place; None: the algorithm has none. It is called after `reference`, with `error` (float32), the weight
    before it was rounded less the weight after, in place of `param` and `grad`, and may take `least_lr`, see
    `least_rate`. It adds nothing where `lr` is 0."""
    eager_steps: ClassVar[tuple[StepOfJobs, ...]] = (EagerStep(),)
    """The steps that update the parameters that kernels leave, in this order."""

    _fused: FusedStep | None = None  # of the last step
    _in_backward: Any = None  # the handle of step_in_backward
    _checked: Sequence[Any] = ()  # the options of all groups, as they were checked last

    def __init_subclass__(cls, *, state: str | None = None, **kwargs: Any) -> None:
        """`state` sets `default_state`: a variant of an optimizer is a class with this one difference."""
        super().__init_subclass__(**kwargs)
        if state is not None:
            cls.default_state = state
        cls.__doc__ = described(cls)

    def __init__(self, params: ParamsT, options: dict[str, Any], common: CommonOptions) -> None:
        """The docstring of the class describes the arguments."""
        unknown = sorted(set(common) - set(CommonOptions.__annotations__))
        if unknown:
            own = [
                n for n in inspect.signature(type(self)).parameters if n not in ("params", "common")
            ]
            accepted = ", ".join([*own, *CommonOptions.__annotations__])
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {unknown[0]!r}; accepted: {accepted}"
            )
        if "lr" not in options:
            raise TypeError(f"{type(self).__name__} must give its learning rate as the option 'lr'")
        defaults = {**options, **COMMON_DEFAULTS, **common}
        if defaults.get("state") is None:
            defaults["state"] = self.default_state
        self.check_group(defaults)
        check_definition(self, defaults)
        super().__init__(params, defaults)

    # ---- methods that an algorithm overrides ---------------------------------------------------------------

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        """The moments that parameters of this group have."""
        return self.moments

    def stochastic(self, group: dict[str, Any]) -> dict[str, bool]:
        """The names of `state_names`, each with True if the state is rounded stochastically in bfloat16. States in 4
        bits always are (`lowbit.numerics.codebook`). Other formats round to nearest.

        Slow moments and those without a sign are rounded stochastically. A second moment with beta2 = 0.999 shrinks by
        less than half a unit in the last place in a step. Rounded to nearest, it would never shrink.
        """
        signs = self.state_names(group)
        return {name: not signed or name in self.slow_moments for name, signed in signs.items()}

    def state_format(self, group: dict[str, Any], name: str) -> str:
        """The format of one of the moments, for parameters that are large enough for it."""
        return group["state"]

    def other_states(self, group: dict[str, Any], param: Tensor) -> dict[str, Callable[[], Tensor]]:
        """States of a parameter that have a shape of their own, each with a function that makes it as it is before
        the first step. `reference` does not get them: one of `eager_steps` reads and writes them."""
        return {}

    def rule(self, group: dict[str, Any]) -> str | None:
        """The formula as C++ for the kernels, `Rule.update` for gradients to descend along. None: there is no kernel,
        and `reference` runs everywhere."""
        return None

    def compensation(self, group: dict[str, Any]) -> tuple[str, str] | None:
        """The formula of `compensate` as C++ for the kernels: an expression in double of the options and `rate`, the
        larger of `lr` and `least_lr`, stored as `c[11]` (0 where `lr` is 0); and statements, `Rule.compensate`. None: a
        group that has no momentum to take errors."""
        return None

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        """True if the kernel of `rule` makes the whole step of this group. Otherwise one of `eager_steps` makes it,
        with kernels or without."""
        return True

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The values of `hyper_names`, in that order; by default the group's options of these names."""
        try:
            return tuple(float(group[name]) for name in self.hyper_names)
        except KeyError as error:
            raise ValueError(
                f"{type(self).__name__}.hyper_names has {error}, which is none of its options {sorted(group)}; rename "
                "it, or override hyper()"
            ) from error

    def kernel_rule(self, group: dict[str, Any], returns_errors: bool = False) -> Rule | None:
        """`hyper_names`, `prepare` and `rule`, with the gradient turned for a group that ascends.

        Args:
            group: the options.
            returns_errors: for weights whose rounding errors go into the momentum, by `compensation`. Without it the
                errors are dropped.
        """
        update = self.rule(group)
        if update is None:
            return None
        turned = "g = -g;\n" if group.get("maximize") else ""
        prepare, compensate = self.prepare, ""
        if returns_errors and (found := self.compensation(group)) is not None:
            factor, compensate = found
            prepare += "const double rate = fmax(lr, least_lr);"
            prepare += f"c[11] = lr > {LEAST_RATE} ? {factor} : 0.0;"
        return _made_rule(self.hyper_names, prepare, turned + update, compensate)

    def least_rate(self, group: dict[str, Any]) -> float:
        """The learning rate below which errors go into the momentum as at this one: `RETURN_SHARE` of the largest rate
        of the group so far, that with which it was added among them. A rate on a device is read only then.
        """
        rate, largest = group["lr"], group.get("largest_lr", 0.0)  # groups may be set by hand
        if not isinstance(rate, Tensor) or rate.device.type == "cpu":
            largest = group["largest_lr"] = max(largest, float(rate))
        return RETURN_SHARE * largest

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise for an option that is not accepted; put options into their normal form."""
        check_common(group)
        check_options(group, self.options)
        if group["weight_correction"] == "momentum" and self.compensation(group) is None:
            options = [f"{n}={group[n]!r}" for n in ("betas", "momentum", "use_muon") if n in group]
            raise ValueError(
                "weight_correction='momentum' adds the rounding errors of weights to a momentum, and "
                f"{type(self).__name__} has none that moves a weight by its size, with "
                f"{', '.join(options) or 'any options'}; accepted: AdamW, "
                "Adam and AdEMAMix with betas[0] above 0, SGD with a momentum above 0 and below 1, and Muon's groups "
                "with use_muon=False. For others leave it out, or take weight_correction='16bit' for bfloat16 weights"
            )

    # ---- groups ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options that differ from the defaults. Raises before anything is added."""
        if isinstance(param_group, dict):  # torch.optim refuses anything else
            if "params" not in param_group:
                raise ValueError(
                    f"a param group holds its parameters under 'params', got the keys {sorted(map(str, param_group))}"
                )
            param_group = {**self.defaults, **param_group}
            if isinstance(param_group["params"], Tensor):
                param_group["params"] = [param_group["params"]]
            elif not isinstance(param_group["params"], set):
                param_group["params"] = list(param_group["params"])
            for param in param_group["params"]:
                check_param(*param) if isinstance(param, tuple) else check_param("", param)
            if param_group["state"] is None:
                param_group["state"] = self.defaults["state"]
            self.check_group(param_group)
            check_shared(param_group, self.param_groups)
        super().add_param_group(param_group)
        self._checked = [*self._checked, *self._options_of(self.param_groups[-1:])]
        self.param_groups[-1].setdefault("largest_lr", _read(self.param_groups[-1]["lr"]))

    # ---- the step -------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if torch.amp.GradScaler leaves unscaling and skipping to `step`.

        It does if a parameter is float16, because the scaler refuses to unscale float16 gradients. It does not in
        general, because Lightning then refuses to clip gradients.
        """
        params = (p for group in self.param_groups for p in group["params"])
        return any(p.dtype == torch.float16 for p in params)

    @torch._disable_dynamo  # states cannot be traced: a compiled training step calls this one as it is
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Calls `closure` first, and returns what it returns.

        Raises:
            RuntimeError: a gradient is sparse or of another shape than its parameter, or a parameter has another shape
                than in earlier steps. This parameter has not changed then. With `step_in_backward`: several backwards
                have stepped a parameter since the last call, or since `zero_grad`.
            ValueError, TypeError: an option set since the last step is not accepted, or groups disagree in an option
                that concerns all gradients together. Nothing has changed then.
        """
        if self._in_backward is not None and getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                "grad_scale is set, as torch's GradScaler sets it, and step_in_backward has used the gradients: use "
                "bfloat16 without a scaler, set grad_scale to None, or step after backward, by remove() of the handle"
            )
        self._check_options()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.check_one_backward()
        self._step_gradients()
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or make them zero."""
        super().zero_grad(set_to_none)
        if self._in_backward is not None:
            self._in_backward.begin_anew()

    def _step_gradients(self) -> None:
        """Update every parameter that has a gradient. The options have been checked."""
        # Reading attributes of low-bit weights through `__torch_function__` would take most of the host's time.
        with torch._C.DisableTorchFunctionSubclass():
            holds = self._fused is not None and self._fused.holds(self)
        if not holds:
            self._fused = None
        jobs = collect(self.param_groups) if self._fused is None else self._fused.jobs()
        options = self.param_groups[0]
        scale = grad_scale(
            jobs,
            options["max_grad_norm"],
            options["skip_nonfinite"],
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
        )
        if self._fused is None and scale.skip is not None and scale.skip.device.type == "cpu":
            # Skips before states are created. On a GPU the host would have to wait for the answer.
            if bool(scale.skip):
                return
            scale = scale._replace(skip=None)
        kept = self._offsets_to_keep()
        self._update(jobs, scale)
        for offsets, before in kept:
            offsets.copy_(before)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._keep_captured(jobs)

    def _keep_captured(self, jobs: list[Job]) -> None:
        """Keep the memory that the CUDA graph being captured uses at each replay. The optimizer may get other states
        and learning rates before a replay."""
        rates = [group["lr"] for group in self.param_groups]
        used = [(states.memory(p), dict(self.state[p])) for job in jobs for p in job.params]
        self.__dict__.setdefault("_captured", []).append((rates, used))

    def _offsets_to_keep(self) -> list[tuple[Tensor, Tensor]]:
        """Random-number offsets of weights that the coming step must not advance, and copies of them.

        torch's `get_optimizer_state_dict` calls `step` with a learning rate of 0 to create the states. A program that
        loads a model first and then the optimizer would go on with other random numbers.
        """
        rates = [group["lr"] for group in self.param_groups]
        if self.state or any(isinstance(lr, Tensor) and lr.device.type != "cpu" for lr in rates):
            return []
        if any(map(float, rates)):
            return []
        params = (local(p) for group in self.param_groups for p in group["params"])
        found = (p.random_offsets() for p in params if isinstance(p, LowbitTensor))
        return [(offsets, offsets.clone()) for offsets in found if offsets is not None]

    def _check_options(self) -> None:
        """Check options that were set since the last step, as the constructor does."""
        for group in self.param_groups:
            # The value of a tensor is not checked, because reading it waits for the device.
            check = check_number if isinstance(group["lr"], Tensor) else check_nonnegative
            check("lr", group["lr"])
        found = self._options_of(self.param_groups)
        if len(found) == len(self._checked) and all(map(operator.is_, found, self._checked)):
            return
        made = [{**group, "lr": 0.0} for group in self.param_groups]
        for checked in made:
            self.check_group(checked)
        check_shared(made[0], made[1:])
        for group, checked in zip(self.param_groups, made, strict=True):
            group.update({**checked, "lr": group["lr"]})
        self._checked = self._options_of(self.param_groups)

    def _options_of(self, groups: list[dict[str, Any]]) -> list[Any]:
        """The options of groups that a step checks if they have changed: all except the learning rate."""
        names = [name for name in self.defaults if name != "lr"]
        return [group.get(name) for group in groups for name in names]

    def _update(self, jobs: list[Job], scale: GradScale) -> None:
        """Create missing states; update parameters by kernels, and the others by PyTorch operations."""
        for job in jobs if self._fused is None else self._fused.rest:
            signs = self.state_names(job.group)
            formats = {name: self.state_format(job.group, name) for name in signs}
            for param in job.params:
                self._ensure_state(job.group, param, signs, formats)
        if self._fused is None and any(
            job.may_fuse and self.is_elementwise(job.group) for job in jobs
        ):
            from lowbit.optim.step.fused import FusedStep

            self._fused = FusedStep(self, jobs)
        if self._fused is not None:
            jobs = self._fused.run(self, jobs, scale)
        # Kernels skip on the device. For PyTorch operations the host waits for the answer.
        if jobs and not (scale.skip is not None and bool(scale.skip)):
            for step in self.eager_steps:
                jobs = step.run(self, jobs, scale)

    def _ensure_state(
        self, group: dict[str, Any], param: Tensor, signs: dict[str, bool], formats: dict[str, str]
    ) -> None:
        """Give a parameter the states that it lacks: all of them, or those of an option that was turned on since.
        `signs` and `formats`: `state_names` of the group, and the format of each."""
        state = self.state[param]
        made = states.moved(state, param) if state else {}
        if not state:
            made["step"] = states.new_step(param)
        for name, signed in signs.items():
            if name not in state:
                made[name] = states.new_state(param, formats[name], signed)
            elif state[name].shape != param.shape:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} had the shape {tuple(state[name].shape)} in earlier "
                    "steps; make a new optimizer after its data is replaced by that of another shape"
                )
        for name, new in self.other_states(group, param).items():
            if name not in state:
                made[name] = new()
        if states.has_correction(group, param):
            old = state.get("weight_correction")
            if old is None:
                made["weight_correction"] = states.new_correction(group, param)
            else:  # the option may have changed since the last step
                made["weight_correction"] = states.correction_like(group, param, old)
        state.update(made)

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer in any state format, or of its namesake in torch.optim, torchao.optim or
        bitsandbytes.optim (`lowbit.optim.state.foreign`).

        Options come from the checkpoint, as with torch.optim, except `state`: the optimizer keeps its own format and
        converts the states to it. It copies the checkpoint's tensors. A CUDA graph captured before keeps the states and
        learning rates of its capture. A warning then asks to capture again.

        Raises:
            ValueError, TypeError: the checkpoint doesn't fit. Nothing has changed then.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        check_is_state_dict(state_dict)
        with torch.no_grad():
            state_dict = translated(state_dict, self.param_groups, self.state_names)
        groups = self._loaded_groups(state_dict)
        with torch.no_grad():
            loaded = self._loaded_states(groups, state_dict)
        self.__setstate__({"state": loaded, "param_groups": groups})
        if self.__dict__.get("_captured"):
            warnings.warn(
                "a CUDA graph captured before load_state_dict updates the states of its capture, with its learning "
                "rates, not those just loaded; take one step and capture again",
                stacklevel=2,
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_groups(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        saved_groups = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in self.param_groups]
        saved_sizes = [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(
                f"the checkpoint has parameter groups of {saved_sizes} parameters, this optimizer of {sizes}; "
                "build it with the groups of the one that was saved"
            )
        groups: list[dict[str, Any]] = []
        for own, saved in zip(self.param_groups, saved_groups, strict=True):
            group = {**own, **deepcopy({k: v for k, v in saved.items() if k != "params"})}
            group.update({name: own[name] for name in ("params", *KEPT_ON_LOADING)})
            self.check_group(group)
            check_shared(group, groups)
            groups.append(group)
        return groups

    def _loaded_states(
        self, groups: list[dict[str, Any]], state_dict: Mapping[str, Any]
    ) -> defaultdict[Any, Any]:
        saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        owners = [(group, param) for group in groups for param in group["params"]]
        named = zip(owners, parameter_names(groups), strict=True)
        by_id = dict(zip(saved_ids, named, strict=True))
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in checked_states(groups, state_dict).items():
            if key in by_id:
                (group, param), name = by_id[key]
                loaded[param] = self._loaded_state(group, param, value, name)
            else:
                loaded[key] = value
        return loaded

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """The states of a parameter, called `name` in messages, from an entry of `checkpoint.checked_states`."""
        if not saved:
            return {}
        signs = self.state_names(group)
        others = {key: new() for key, new in self.other_states(group, param).items()}
        if set(saved) - {"weight_correction"} != {"step", *signs, *others}:
            raise ValueError(
                f"{name}: the checkpoint's state has {sorted(saved)}, {type(self).__name__} takes "
                f"{sorted(['step', *signs, *others])}; is it the checkpoint of another optimizer?"
            )
        for key in saved.keys() - {"step"}:
            check_loadable(name, key, saved[key], others.get(key, param))
        for key, state in others.items():
            fill(state, saved[key], state)
        made = {"step": states.new_step(param, saved["step"]), **others}
        for key, signed in signs.items():
            made[key] = converted(saved[key], param, self.state_format(group, key), signed)
        if "weight_correction" in saved and states.has_correction(group, param):
            kept = states.empty_correction(param, saved["weight_correction"])
            fill(kept, saved["weight_correction"], param)
            made["weight_correction"] = states.correction_like(group, param, kept)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fused = None
        for group in self.param_groups:  # of a state made by other code
            group.setdefault("largest_lr", _read(group["lr"]))

    def state_bytes(self) -> int:
        """Bytes that the states take on this rank now. States are created at the first step."""
        own = (self.state[p] for g in self.param_groups for p in g["params"] if p in self.state)
        tensors = (t for state in own for t in state.values())
        return sum(states.nbytes(t) for t in tensors if isinstance(t, Tensor))
