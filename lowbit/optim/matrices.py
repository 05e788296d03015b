"""The common part of optimizers whose step of a matrix is not elementwise, Muon and SOAP: their groups.

Each group is either one of matrices or one for AdamW; the option named `matrix_option` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from lowbit.numerics.settings import check_nonnegative
from lowbit.optim.adam import AdamBase
from lowbit.optim.options import Check, check_optional_flag
from lowbit.optim.step.eager import EagerStep
from lowbit.optim.step.job import GradScale, Job, StepOfJobs


class MatrixStep:
    """`lowbit.optim.step.job.StepOfJobs` of the groups of matrices; it leaves the others."""

    def run(self, optimizer: MatrixBase, jobs: list[Job], scale: GradScale) -> list[Job]:
        option = optimizer.matrix_option
        own = [job for job in jobs if job.group[option]]
        if own:
            import_module(optimizer.matrix_module).run(optimizer, own, scale)
        return [job for job in jobs if not job.group[option]]


def is_matrix(param: Tensor, name: str = "") -> bool:
    """True for a parameter of 2 and more dimensions whose name, if it has one, is not that of a bias: gpt-oss's
    `gate_up_proj_bias` is [experts, features]."""
    return param.ndim >= 2 and not name.endswith("bias")


class MatrixBase(AdamBase):
    """AdamW for the groups without matrices, and the step of `matrix_module` for the others."""

    eager_steps: ClassVar[tuple[StepOfJobs, ...]] = (MatrixStep(), EagerStep())
    matrix_module: ClassVar[str]
    """The module whose `run` steps matrices. It imports Triton, so it is imported by the first step."""
    matrix_option: ClassVar[str]
    """The option that is True in groups of matrices. A group without it is split in two by `is_matrix`."""
    options: ClassVar[Mapping[str, Check]] = {**AdamBase.options, "stacked": check_optional_flag}
    decoupled = True
    _adamw: dict[str, Any] = {}  # noqa: RUF012 (an instance has its own)
    """Options of the AdamW part of a group that is split, and their defaults; a group sets them as adamw_<name>."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in one group or, without `matrix_option`, in one of matrices and one for AdamW."""
        if not isinstance(param_group, dict) or isinstance(param_group.get("params"), set):
            return super().add_param_group(param_group)  # which refuses it
        options = dict(param_group)
        params = options.pop("params")
        params = [params] if isinstance(params, Tensor) else list(params)
        for_adamw = {k: options.pop(f"adamw_{k}", v) for k, v in self._adamw.items()}
        for name in for_adamw.keys() - {"betas"}:
            check_nonnegative(f"adamw_{name}", for_adamw[name])
        takes_matrices = options.pop(self.matrix_option, None)
        check_optional_flag(self.matrix_option, takes_matrices)
        self._refuse_foreign(options)
        if takes_matrices is None:
            parts: dict[bool, list[Any]] = {True: [], False: []}
            for param in params:
                name, tensor = param if isinstance(param, tuple) else ("", param)
                parts[isinstance(tensor, Tensor) and is_matrix(tensor, name)].append(param)
            parts = {k: v for k, v in parts.items() if v} or {True: []}
            for_adamw = {**options, **for_adamw}
        else:
            parts = {takes_matrices: params}
            for_adamw = {**for_adamw, **options}
        before = len(self.param_groups)
        try:
            for taken, part in parts.items():
                own = options if taken else for_adamw
                super().add_param_group({**own, "params": part, self.matrix_option: taken})
        except BaseException:
            del self.param_groups[before:]
            raise

    def _refuse_foreign(self, options: Mapping[str, Any]) -> None:
        """Raise TypeError for an option of a group that is none of this optimizer's, and looks like one by which others
        take AdamW for it, such as use_muon."""
        for name in options:
            if name == "precondition" or name.startswith(("use_", "adamw_")):
                adamw = [f"adamw_{name}" for name in self._adamw]
                raise TypeError(
                    f"{type(self).__name__} has no option {name!r} of a group; accepted: "
                    f"{', '.join([self.matrix_option, *adamw])}, and those of its parameters"
                )

    def __getstate__(self) -> dict[str, Any]:
        # a copy needs them to take more groups
        return {**super().__getstate__(), "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans: dict[Any, Any] = {}  # of lowbit.optim.step.matrix_step

    def check_group(self, group: dict[str, Any]) -> None:
        check_optional_flag(self.matrix_option, group[self.matrix_option])
        super().check_group(group)
        if group[self.matrix_option]:
            for param in group.get("params", ()):
                name, tensor = param if isinstance(param, tuple) else ("", param)
                if isinstance(tensor, Tensor):
                    label = f"parameter {name!r}" if name else "a parameter"
                    self._check_shape(label, tensor, group["stacked"])

    def _check_shape(self, label: str, param: Tensor, stacked: bool | None) -> None:
        """Raise ValueError for a parameter that is not a matrix, or that may be a matrix or a stack."""
        shape, option = tuple(param.shape), self.matrix_option
        if param.ndim < 2:
            raise ValueError(
                f"{option}=True takes matrices, got {label} of shape {shape}; leave {option} out to have such "
                f"parameters updated by AdamW, or give them in a group with {option}=False"
            )
        if stacked and param.ndim != 3:
            raise ValueError(
                f"stacked=True takes stacks of matrices, [matrices, rows, cols], got {label} of shape {shape}; give it "
                "in a group with stacked=False"
            )
        if stacked is None and param.ndim == 3:
            count, rows, cols = shape
            raise ValueError(
                f"{label} of shape {shape} has three dimensions, and nothing shows what they are. Give it in a group "
                f"with stacked=True if it holds {count} matrices of {rows} x {cols}, as the experts of a layer, or "
                f"with stacked=False if it is one matrix of {count} x {rows * cols}, as the weight of a Conv1d"
            )

    def rule(self, group: dict[str, Any]) -> str | None:
        return None if group[self.matrix_option] else super().rule(group)

    def compensation(self, group: dict[str, Any]) -> tuple[str, str] | None:
        return None if group[self.matrix_option] else super().compensation(group)

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        return not group[self.matrix_option]
