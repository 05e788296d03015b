"""Adam (arXiv 1412.6980), its states in any format: AdamW's step with the weight decay added to the gradient,
``g = g + weight_decay * p``, and not subtracted from the weight. `lowbit.optim.adamw` has the rest, and the
reference (`decoupled=False`).
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from lowbit.optim.adamw import AdamBase
from lowbit.optim.base import CommonOptions, ParamsT


class Adam(AdamBase):
    """`torch.optim.Adam` with its states in few bits.

    Arguments and errors as for `lowbit.optim.AdamW`, but `weight_decay` is 0 by default, and is added to the
    gradient (L2 penalty).
    """

    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **common: Unpack[CommonOptions],
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, options, common)


class Adam4bit(Adam):
    """`Adam(..., state="4bit")`: 1.06 bytes of state an element where torch.optim.Adam takes 8."""

    default_state = "4bit"


class Adam8bit(Adam):
    """`Adam(..., state="8bit")`: 2.03 bytes of state an element where torch.optim.Adam takes 8."""

    default_state = "8bit"


class AdamFp8(Adam):
    """`Adam(..., state="float8")`: 2.03 bytes of state an element where torch.optim.Adam takes 8."""

    default_state = "float8"
