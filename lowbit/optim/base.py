"""The base of every optimizer: parameter groups, states in any format, the step over parameters, checkpoints.

An algorithm is a subclass that declares its moments and gives `scalars` and `update`; see `lowbit.optim.adamw`.
What the base does with them:

- A state is created as zeros at a parameter's first step: a `CodebookTensor`, or plain float32 or bfloat16. A
  sharded parameter (DTensor, FSDP2) gets states sharded alike, over its own part only.
- A step collects its jobs (`lowbit.optim.job`), finds out what clipping and skipping make of the gradients
  (`lowbit.optim.clip`), and updates: decode, compute in float32, encode, and write the weight back in its own dtype
  once (`lowbit.optim.eager`).
- Steps are counted in float64 (`state.STEP`), on the parameter's device.
- Random draws (`lowbit.rounding`) have the key (the group's seed, the parameter's own step, 4 * its index in the
  optimizer + slot, index of the element in the whole parameter), with slot 0 for the weight and i + 1 for the i-th
  name of `state_names`: the same draws at any sharding, and after a restart.
- Loading a checkpoint keeps this optimizer's own formats, whatever the checkpoint holds: torch.optim's loader
  would cast states to the parameter's dtype.
"""

from __future__ import annotations

import inspect
import operator
import reprlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.optim import eager
from lowbit.optim import state as states
from lowbit.optim.clip import GradScale, grad_scale
from lowbit.optim.job import Job, collect
from lowbit.optim.options import (
    COMMON_DEFAULTS,
    KEPT_ON_LOADING,
    CommonOptions,
    check_common,
    check_flag,
    check_nonnegative,
    check_number,
    check_param,
    check_shared,
)
from lowbit.optim.saved import check_dtype, check_states, parameter_names, step_of
from lowbit.optim.stepped_by import SteppedBy
from lowbit.optim.stepped_by import read as read_stepped_by

if TYPE_CHECKING:
    from lowbit.optim.fused import FusedSteps
    from lowbit_kernels.fused_step import Rule

__all__ = [
    "CommonOptions",
    "LowbitOptimizer",
    "ParamsT",
    "check_flag",
    "check_nonnegative",
    "check_number",
]


class LowbitOptimizer(torch.optim.Optimizer):
    """See the module. Subclasses give `moments`, `scalars` and `update`, and `rule` and `hyper` for the kernels."""

    moments: ClassVar[dict[str, bool]]
    """Names of the state tensors, and whether their values have a sign."""
    default_state: ClassVar[str] = "8bit"
    """The format of states where none is asked for."""

    _plan: FusedSteps | None = None  # of the last step
    _checked: Sequence[Any] = ()  # the options of all groups that were looked at
    _stepped_by: SteppedBy

    def __init__(self, params: ParamsT, options: dict[str, Any], common: CommonOptions) -> None:
        """`options`: the algorithm's own, with their values. Raises TypeError, ValueError for bad ones."""
        unknown = sorted(set(common) - set(CommonOptions.__annotations__))
        if unknown:
            own = [
                n for n in inspect.signature(type(self)).parameters if n not in ("params", "common")
            ]
            accepted = ", ".join([*own, *CommonOptions.__annotations__])
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {unknown[0]!r}; accepted: {accepted}"
            )
        defaults = {**options, **COMMON_DEFAULTS, **common}
        if defaults.get("state") is None:
            defaults["state"] = self.default_state
        self.check_group(defaults)
        self._stepped_by = SteppedBy()
        super().__init__(params, defaults)

    # ---- what an algorithm provides ------------------------------------------------------------------------

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        """The moments that parameters of this group have."""
        return self.moments

    def state_format(self, group: dict[str, Any], name: str) -> str:
        """The format of one of them, for parameters large enough for it."""
        return group["state"]

    def scalars(
        self, group: dict[str, Any], lr: float | Tensor, steps: Tensor
    ) -> tuple[Tensor, ...]:
        """What `update` needs of the step count: float64 tensors [P], from float64 `steps` [P] of P parameters.
        `lr` is a float, or float64 of one element without dimensions."""
        raise NotImplementedError

    def update(
        self,
        group: dict[str, Any],
        scalars: tuple[Tensor, ...],
        weight: Tensor,
        grad: Tensor,
        states: dict[str, Tensor],
    ) -> None:
        """Update `weight` [R, C] (float32, or float64) and float32 `states` in place; leave `grad` alone."""
        raise NotImplementedError

    def rule(self, group: dict[str, Any]) -> Rule | None:
        """The same step as C++ text for the kernels; None: there is none, and `update` runs everywhere."""
        return None

    def hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The values of `Rule.hyper`, in that order."""
        raise NotImplementedError

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise for an option that isn't taken; put options into their normal form."""
        check_common(group)

    def fix_group(self, group: dict[str, Any]) -> None:
        """Give a loaded group, which an older version may have saved, the options that it lacks."""
        for name, value in COMMON_DEFAULTS.items():
            group.setdefault(name, value)

    # ---- groups ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options that differ from the defaults. Raises before anything is added."""
        if isinstance(param_group, dict):  # torch.optim refuses anything else
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

    # ---- the step -------------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling and skipping to `step`: where a parameter is float16, whose
        gradients the scaler itself refuses to unscale. Lightning reads this too, and refuses to clip gradients where it
        is True, in bfloat16 as well, where nothing is scaled; its mixed precision keeps parameters in float32."""
        params = (p for group in self.param_groups for p in group["params"])
        return any(p.dtype == torch.float16 for p in params)

    @torch._disable_dynamo  # its states cannot be traced: a compiled training step runs it as it is
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` does, which is called first.

        Raises:
            RuntimeError: a gradient that is sparse or of another shape than its parameter, or a parameter of another
                shape than in earlier steps. It has not changed then.
            ValueError, TypeError: an option set since the last step isn't taken, or groups disagree in what concerns
                all gradients together. Nothing has changed then.
        """
        self._check_options()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plan is not None and not self._plan.holds(self):
            self._plan = None
        jobs = collect(self.param_groups) if self._plan is None else self._plan.jobs()
        options = self.param_groups[0]
        scale = grad_scale(
            jobs,
            options["max_grad_norm"],
            options["skip_nonfinite"],
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
        )
        if self._plan is None and scale.skip is not None and scale.skip.device.type == "cpu":
            # without even making states; a GPU's answer would have to be waited for
            if bool(scale.skip):
                return loss
            scale = scale._replace(skip=None)
        self._update(jobs, scale)
        return loss

    def _check_options(self) -> None:
        """Look at options that were set since the last step, as the constructor does."""
        for group in self.param_groups:
            # a tensor's value is not looked at: it would wait for the device
            check = check_number if isinstance(group["lr"], Tensor) else check_nonnegative
            check("lr", group["lr"])
        names = [name for name in self.defaults if name != "lr"]
        found = [group.get(name) for group in self.param_groups for name in names]
        if len(found) == len(self._checked) and all(map(operator.is_, found, self._checked)):
            return
        made = [{**group, "lr": 0.0} for group in self.param_groups]
        for checked in made:
            self.check_group(checked)
        check_shared(made[0], made[1:])
        for group, checked in zip(self.param_groups, made, strict=True):
            group.update({**checked, "lr": group["lr"]})
        self._checked = [group[name] for group in self.param_groups for name in names]

    def _update(self, jobs: list[Job], scale: GradScale) -> None:
        """Have kernels do what they can, and PyTorch operations the rest."""
        rest = jobs if self._plan is None else self._plan.pop_rest()
        for job in rest:
            for param in job.params:
                self._ensure_state(job.group, param)
        if self._plan is None and any(job.may_fuse for job in jobs):
            # where there is no kernel, none of this need be imported
            from lowbit.optim.fused import FusedSteps

            self._plan = FusedSteps(self, jobs)
            for places, by in self._plan.stepped_by():
                self._stepped_by.note(self.param_groups, places, by)
            rest = self._plan.pop_rest()
        if self._plan is not None:
            self._plan.run(self, scale)
        # finding out whether to skip waits for the device
        if rest and not (scale.skip is not None and bool(scale.skip)):
            for job in rest:
                self._stepped_by.note(self.param_groups, job.indices, "eager")
            self._step_eagerly(rest, scale.coefficient)

    def _step_eagerly(self, jobs: list[Job], coefficient: Tensor | None) -> None:
        """Update these by PyTorch operations, their gradients multiplied by `coefficient`. Their states exist."""
        for job in jobs:
            torch._foreach_add_([self.state[param]["step"] for param in job.params], 1)
            eager.Step(self, job, coefficient).run()

    def _ensure_state(self, group: dict[str, Any], param: Tensor) -> None:
        """Give a parameter the states that it lacks: all, or that of an option turned on since."""
        state = self.state[param]
        made = states.moved(state, param)
        if not state:
            made["step"] = states.new_step(param)
        for name, signed in self.state_names(group).items():
            if name not in state:
                made[name] = states.new_state(param, self.state_format(group, name), signed)
            elif state[name].shape != param.shape:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} had the shape {tuple(state[name].shape)} in earlier "
                    "steps; make a new optimizer after its data is replaced by that of another shape"
                )
        if states.has_correction(group, param) and "weight_correction" not in state:
            made["weight_correction"] = states.new_correction(param)
        state.update(made)

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim. Its `_metadata` records which implementation last updated each parameter, so that a run
        that resumes can warn if it changes (`lowbit.optim.stepped_by`)."""
        made = super().state_dict()
        return self._stepped_by.attach(made) if isinstance(made, dict) else made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer in any state format, or of its namesake in torch.optim.

        Options come from the checkpoint, as with torch.optim; but `state`, the format, stays this optimizer's,
        and states are converted to it. They are copies: the checkpoint's tensors are not shared. If the next step is
        by another implementation than the checkpoint's last one, compiled or not, it warns once.

        Raises:
            ValueError, TypeError: the checkpoint doesn't fit. Nothing has changed then.
        """
        stepped_by = read_stepped_by(state_dict)
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
            raise TypeError(
                "state_dict must be what state_dict() of an optimizer returned, with 'state' and 'param_groups', "
                f"got {reprlib.repr(got)}"
            )
        groups = self._loaded_groups(state_dict)
        saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        slots = [(group, param) for group in groups for param in group["params"]]
        named = zip(slots, parameter_names(groups), strict=True)
        by_id = dict(zip(saved_ids, named, strict=True))
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        with torch.no_grad():
            check_states(groups, state_dict)
            for key, value in state_dict["state"].items():
                if key in by_id:
                    (group, param), name = by_id[key]
                    loaded[param] = self._loaded_state(group, param, value, name)
                else:
                    loaded[key] = value
        self.__setstate__({"state": loaded, "param_groups": groups})
        self._stepped_by = stepped_by
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
            self.fix_group(group)
            self.check_group(group)
            check_shared(group, groups)
            groups.append(group)
        return groups

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        if not saved:
            return {}
        signs = self.state_names(group)
        if set(saved) - {"weight_correction"} != {"step", *signs}:
            raise ValueError(
                f"{name}: the checkpoint's state has {sorted(saved)}, {type(self).__name__} takes "
                f"{sorted(['step', *signs])}; is it the checkpoint of another optimizer?"
            )
        made = {"step": states.new_step(param, step_of(name, saved["step"]))}
        for key in saved.keys() - {"step"}:
            states.check_loaded(f"{name}: {key}", saved[key], param)
            check_dtype(f"{name}: {key}", key, saved[key])
        for key, signed in signs.items():
            made[key] = states.converted(saved[key], param, self.state_format(group, key), signed)
        if "weight_correction" in saved and states.has_correction(group, param):
            made["weight_correction"] = states.new_correction(param)
            states.fill(made["weight_correction"], saved["weight_correction"], param)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._stepped_by = None, SteppedBy()
        for group in self.param_groups:
            self.fix_group(group)

    def state_bytes(self) -> int:
        """Bytes that the states take, on this rank and as of now (states are created at the first step)."""
        tensors = (t for state in self.state.values() for t in state.values())
        return sum(states.nbytes(t) for t in tensors if isinstance(t, Tensor))
