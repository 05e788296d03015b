"""Muon (Keller Jordan et al., https://kellerjordan.github.io/posts/muon/), its momentum in any format (8-bit Muon:
arXiv 2509.23106): momentum SGD for matrices, whose update is replaced by the nearest orthogonal matrix.

With gradient G (negated to maximize) and momentum M of a matrix P [rows, cols]::

    M = momentum * M + (1 - momentum) * G
    U = (1 - momentum) * G + momentum * M  with nesterov, else M
    O = orthogonalize(U)
    P = P - lr * weight_decay * P - lr * ratio * O

    ratio = sqrt(max(1, rows / cols))      adjust_lr_fn None or "original"
    ratio = 0.2 * sqrt(max(rows, cols))    adjust_lr_fn "match_rms_adamw" (arXiv 2502.16982)

With row_beta2 (NorMuon, arXiv 2510.05491) each row i of O is scaled, with a state r of one number a row::

    r_i = row_beta2 * r_i + (1 - row_beta2) * mean_j(O_ij**2)
    O_i = O_i / sqrt(r_i),  then  O = O * sqrt(min(rows, cols)) / norm(O)

The orthogonalization is::

    orthogonalize(X):  X = X / max(norm(X), eps), then ns_steps times
                       X = a X + (b A + c A A) X,  A = X X^T        X transposed first if it is tall

These Newton-Schulz iterations of an odd polynomial of degree 5 move all singular values near 1. They run in batches of
one shape, in float16 on CUDA and in float32 elsewhere (`lowbit.optim.step.orthogonalize`); U is bfloat16 on CUDA, and
everything else is float32, from the decoded momentum. Ranks divide sharded matrices among themselves, and the result is
that of one process (`lowbit.optim.step.matrix_step`). Parameters that are not hidden matrices go to AdamW
(`lowbit.optim.adam`), in their own groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import (
    check_below_one,
    check_choice,
    check_finite,
    check_flag,
    check_numbers,
    check_whole,
)
from lowbit.optim.matrices import MatrixBase
from lowbit.optim.options import Check, CommonOptions, check_betas
from lowbit.optim.step.muon_formula import (
    descend,
    direction,
    even_rows,
    learning_rate_ratio,
    stack_shape,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of Keller Jordan's Muon."""


def reference(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    maximize: bool = False,
    stacked: bool = False,
    ns_scaling: str = "norm",
    row_beta2: float | None = None,
    row_moment: Tensor | None = None,
) -> None:
    """One step in place, on plain tensors of one shape [rows, ...]; see the module for the formula.

    `lowbit.optim.step.matrix_step` makes the same three steps, for batches of matrices.

    Args:
        param, grad, momentum_buffer: of one shape, each its own memory. `grad` stays as it is.
        row_moment: with `row_beta2`, the mean squares of rows, float32, updated in place.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as `Muon` takes them.
        maximize, stacked, ns_scaling, row_beta2: as `Muon` takes them.
    """
    from lowbit.optim.step.orthogonalize import orthogonalize

    update = direction(
        grad, momentum_buffer, momentum=momentum, nesterov=nesterov, maximize=maximize
    )
    matrices = update.reshape(stack_shape(param.shape, stacked))
    matrices = orthogonalize(matrices, ns_coefficients, steps=ns_steps, eps=eps, scaling=ns_scaling)
    if row_beta2 is not None and row_moment is not None:
        matrices = even_rows(matrices, row_moment.view(matrices.shape[:2]), row_beta2)
    ratio = learning_rate_ratio(param.shape, {"adjust_lr_fn": adjust_lr_fn, "stacked": stacked})
    descend(param, matrices.reshape(param.shape), lr=lr, weight_decay=weight_decay, ratio=ratio)


def _check_row_beta2(name: str, value: Any) -> float | None:
    return None if value is None else check_below_one(name, value)


# ---- the optimizer ------------------------------------------------------------------------------------------


class Muon(MatrixBase):
    """Muon for matrices, with its momentum in few bits, and `lowbit.optim.AdamW` for the other parameters.

    The option `use_muon` of a group decides whether Muon or AdamW updates it. A group without this option is split in
    two: parameters of 2 and more dimensions go to Muon, the others to AdamW. This rule cannot distinguish an embedding
    or an output layer from a hidden matrix: give those in a separate group with `use_muon=False`. A name that ends in
    "bias", as of experts' biases [experts, features], gives a parameter to AdamW too: pass (name, parameter) pairs.

    Parameters of 4 and more dimensions are those of convolutions, and flattened to [first, rest]. One of 3 dimensions
    may hold experts [experts, rows, cols], or be the one matrix of a Conv1d, and nothing shows which. So its group says
    `stacked=True` or `stacked=False`.

        head = {"params": [model.embed.weight, model.head.weight], "use_muon": False}
        optimizer = Muon([{"params": model.blocks.parameters()}, head], lr=0.02, adamw_lr=3e-4)

    Every group has its own `lr`, `weight_decay` and `eps` (and `betas` with AdamW); learning rate schedulers scale
    each. Groups are ordered as given, the Muon part of a group that is split before the AdamW part.

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params", "use_muon" and any option
            below). float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: Muon's learning rate, a float or a tensor of one element. `adjust_lr_fn` scales it for each matrix.
        weight_decay: decay of Muon's weights per unit of lr, not mixed into the gradient.
        momentum: decay of the momentum, in [0, 1).
        nesterov: orthogonalize the gradient mixed with the momentum, instead of the momentum alone.
        ns_coefficients: a, b and c of the Newton-Schulz polynomial of degree 5; see `lowbit.optim.muon`.
        eps: smallest number by which a matrix or its rows are divided before the iterations.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: None or "original": lr times sqrt(max(1, rows / cols)). "match_rms_adamw": lr times
            0.2 * sqrt(max(rows, cols)), so that a learning rate of AdamW fits (arXiv 2502.16982).
        adamw_lr, adamw_weight_decay, adamw_betas, adamw_eps: AdamW's, unless its groups give their own `lr`,
            `weight_decay`, `betas`, `eps`. In a group that is split, these names set the options of the AdamW part.
        maximize: ascend.
        stacked: True: each parameter of Muon is a stack of matrices, [matrices, rows, cols]. Ranks should shard stacks
            in dimension 0; then they exchange nothing. False: one of more than 2 dimensions is one matrix, flattened
            to [first, rest]. None: as False, and parameters of 3 dimensions are refused.
        ns_scaling: "norm" divides a matrix by its norm before the iterations. "gram" divides its rows instead, as
            Turbo-Muon does (arXiv 2512.04632), so that `ns_steps=4` comes as near to orthogonal as 5 otherwise. Their
            squares must fit float32: gradients of 1e18 and more give no update, or NaN.
        row_beta2: NorMuon (arXiv 2510.05491): divide each row of the orthogonal matrix by the root of its mean square
            over steps, whose decay this is; the paper takes 0.95 with `adjust_lr_fn="match_rms_adamw"`. One more
            float32 state a row. None: plain Muon.
        common: `lowbit.optim.CommonOptions`. `state` is the format of the momentum and of AdamW's moments, by default
            this class's own, "8bit" for Muon itself. Bytes of momentum an element: "4bit" 0.53, "8bit" and "float8"
            1.02, "bf16" 2, "fp32" 4.

    The rounding error of a momentum's codes is noise in every direction. Orthogonalization amplifies it to the size of
    the signal where the signal is small: 8 bits cost little, 4 bits slow training down.

    A checkpoint of torch.optim.Muon with the same groups loads; `dequantize_state_dict` makes one for torch.optim.Muon.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    options: ClassVar[Mapping[str, Check]] = {
        **MatrixBase.options,
        "momentum": check_below_one,
        "nesterov": check_flag,
        "ns_coefficients": partial(check_numbers, count=3, each=check_finite),
        "ns_scaling": partial(check_choice, accepted=("norm", "gram")),
        "row_beta2": _check_row_beta2,
        "ns_steps": partial(check_whole, most=99),
        "adjust_lr_fn": partial(check_choice, accepted=(None, "original", "match_rms_adamw")),
    }
    matrix_option = "use_muon"
    matrix_module = "lowbit.optim.step.muon_step"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor = 3e-4,
        adamw_weight_decay: float = 0.01,
        adamw_betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
        stacked: bool | None = None,
        ns_scaling: str = "norm",
        row_beta2: float | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        check_betas(2)("adamw_betas", adamw_betas)  # the option of a group is named `betas`
        self._adamw = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
        self._adamw |= {"betas": adamw_betas, "eps": adamw_eps}
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        options |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        options |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "betas": adamw_betas}
        options |= {"amsgrad": False, "maximize": maximize, "use_muon": None}
        options |= {"stacked": stacked, "ns_scaling": ns_scaling, "row_beta2": row_beta2}
        super().__init__(params, options, common)

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return {"momentum_buffer": True} if group["use_muon"] else super().state_names(group)

    def other_states(self, group: dict[str, Any], param: Tensor) -> dict[str, Callable[[], Tensor]]:
        if not group["use_muon"] or group["row_beta2"] is None:
            return {}
        from lowbit.optim.step.muon_step import new_row_moment

        return {"row_moment": partial(new_row_moment, param, group["stacked"])}

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def _loaded_state(
        self, group: dict[str, Any], param: Tensor, saved: dict[str, Any], name: str
    ) -> dict[str, Any]:
        if saved and group["use_muon"] and "step" not in saved:
            # torch.optim.Muon counts none, and has no moments of rows: they begin as at a first step.
            begun = {key: new() for key, new in self.other_states(group, param).items()}
            saved = {"step": 0.0, **begun, **saved}
        return super()._loaded_state(group, param, saved, name)


class Muon4bit(Muon, state="4bit"):
    """`Muon(..., state="4bit")`: 0.53 bytes of momentum an element where torch.optim.Muon takes 4; see `Muon` for
    the cost."""


class Muon8bit(Muon, state="8bit"):
    """`Muon(..., state="8bit")`: 1.02 bytes of momentum an element where torch.optim.Muon takes 4."""


class MuonFp8(Muon, state="float8"):
    """`Muon(..., state="float8")`: 1.02 bytes of momentum an element where torch.optim.Muon takes 4."""
