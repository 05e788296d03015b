"""SOAP (arXiv 2409.11321): Adam in the eigenbases of Shampoo's preconditioners, all states in any format.

With gradient G (negated to maximize) of a matrix P [rows, cols], and t counted from 0::

    t = 0:  L = (1 - beta2) * G G^T,  R = (1 - beta2) * G^T G,  Q_L, Q_R = their eigenvectors; P stays

    t > 0:  L = beta2 * L + (1 - beta2) * G G^T
            R = beta2 * R + (1 - beta2) * G^T G
            G' = Q_L^T G Q_R
            M = beta1 * M + (1 - beta1) * G'
            V = beta2 * V + (1 - beta2) * G'**2
            N = (M / (1 - beta1**t)) / (sqrt(V / (1 - beta2**t)) + eps)
            P = P - lr * weight_decay * P - lr * Q_L N Q_R^T

    every precondition_frequency-th t, after that:
            columns of Q_L sorted by diag(Q_L^T L Q_L), the largest first; rows of V along
            Q_L' = QR(L Q_L),  M = Q_L'^T Q_L M,  Q_L = Q_L'                    and alike for R and columns

M is the mean of the gradients in the basis; turning it with the basis keeps it that of the unrotated gradients. A side
longer than `max_precondition_dim` has no preconditioner, and Q is the identity there. Products, QR and eigenvectors are
float32 on decoded states. `lowbit.optim.step.soap_step` makes the step.

With states other than "fp32" the quotient M / sqrt(V) is clamped to `lowbit.optim.adam.largest_ratio`. Directions
without gradients, such as those of rows whose gradients are 0, have a V near 0. A basis in few bits that was refreshed
turns a little of the other directions' M into them, and they would move by hundreds of learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lowbit.numerics.settings import check_whole
from lowbit.optim.matrices import MatrixBase
from lowbit.optim.options import Check, CommonOptions


class SOAP(MatrixBase):
    """SOAP for matrices, and `lowbit.optim.AdamW` with the same options for the other parameters.

    A group without the option `precondition` is split in two: parameters of 2 and more dimensions are preconditioned,
    the others go to AdamW, and so do those whose name ends in "bias". `precondition=False` gives a whole group to
    AdamW, as for embeddings with a long side. Parameters of more than 2 dimensions are flattened to [first, rest], or
    are stacks of matrices with `stacked=True`.

        head = {"params": [model.embed.weight], "precondition": False}
        optimizer = SOAP8bit([{"params": model.blocks.parameters()}, head], lr=3e-3)

    Args:
        params: parameters, (name, parameter) pairs, or groups (dicts with "params", "precondition" and any option
            below). float32, bfloat16, float16 or float64; plain, DTensor, or low-bit tensors.
        lr: learning rate, a float or a tensor of one element.
        betas: decay of the two moments, in [0, 1); the second also of the preconditioners.
        eps: added to the root of the second moment.
        weight_decay: decay of the weights per unit of lr, not mixed into the gradient.
        precondition_frequency: steps between two refreshes of the bases.
        max_precondition_dim: the longest side of a matrix that gets a preconditioner. One of s elements takes two
            states of s * s elements, so a long side can take more memory than the weights.
        maximize: ascend.
        stacked: True: each parameter is a stack of matrices, [matrices, rows, cols]. False: one of more than 2
            dimensions is one matrix. None: as False, and parameters of 3 dimensions are refused.
        common: `lowbit.optim.CommonOptions`. `state` is the format of all states, by default this class's own, "8bit"
            for SOAP itself. With "4bit", second moments of matrices take 4 bits, and everything else 8.

    The first step of a parameter makes its bases, and leaves the weight as it is. Gradients of zeros before it are no
    step; `get_optimizer_state_dict` gives such gradients to make states. Under FSDP2 every rank works on whole matrices
    and holds whole preconditioners and bases; moments are sharded, and the weights are those of one process. A step
    cannot be captured in a CUDA graph.

    Raises:
        ValueError, TypeError: an option or a parameter that is not accepted, named with its value.
    """

    options: ClassVar[Mapping[str, Check]] = {
        **MatrixBase.options,
        "precondition_frequency": check_whole,
        "max_precondition_dim": check_whole,
    }
    matrix_option = "precondition"
    matrix_module = "lowbit.optim.step.soap_step"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10_000,
        *,
        maximize: bool = False,
        stacked: bool | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "amsgrad": False, "maximize": maximize}
        options |= {"precondition_frequency": precondition_frequency, "precondition": None}
        options |= {"max_precondition_dim": max_precondition_dim, "stacked": stacked}
        self._counts: dict[Tensor, tuple[Tensor, int]] = {}  # of lowbit.optim.step.soap_step
        super().__init__(params, options, common)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._counts = {}

    def state_names(self, group: dict[str, Any]) -> dict[str, bool]:
        return self.moments if group["precondition"] else super().state_names(group)

    def state_format(self, group: dict[str, Any], name: str) -> str:
        if group["precondition"] and group["state"] == "4bit" and name == "exp_avg":
            return "8bit"  # 4 bits would cost all that SOAP gains over AdamW
        return super().state_format(group, name)

    def other_states(self, group: dict[str, Any], param: Tensor) -> dict[str, Callable[[], Tensor]]:
        if not group["precondition"]:
            return {}
        from lowbit.optim.step.soap_step import new_factors

        return new_factors(group, param)


class SOAP4bit(SOAP, state="4bit"):
    """`SOAP(..., state="4bit")`: moments in 1.55 bytes an element, preconditioners and bases in 1.02 each."""


class SOAP8bit(SOAP, state="8bit"):
    """`SOAP(..., state="8bit")`: moments in 2.03 bytes an element, preconditioners and bases in 1.02 each."""


class SOAPFp8(SOAP, state="float8"):
    """`SOAP(..., state="float8")`: moments in 2.03 bytes an element, preconditioners and bases in 1.02 each."""
