"""The compiled step of weights that are codes, on a GPU: one launch reads codes, updates the values and rounds them.

A block of threads keeps the new values of a row in shared memory until the row's scales are known. Where rounding
errors go into the momentum, it computes the values twice. So the device moves the codes, states and gradients alone,
and there is no buffer of float32 values as in `lowbit.optim.step.rounded`, whose bits this step gives. It takes the
weights for which `bits_for` is not 0; all others take the step with the buffer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from lowbit.optim.state import state as states
from lowbit.optim.step.job import GradScale
from lowbit.optim.step.launch import StepLaunch
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor
from lowbit_kernels.elementwise.fused_step import COLUMN
from lowbit_kernels.runtime import tensor_memory
from lowbit_kernels.runtime.nvrtc import runs_on_hopper

NARROWEST = 512
"""Elements of a row. A block of threads has less work than it waits for in a narrower one."""
WIDEST = 32768
"""Elements of a row, whose values fit in shared memory."""


@dataclass
class CodedLaunch(StepLaunch):
    """One table and one launch, whose blocks take rows of weights."""

    @staticmethod
    def _seen(weights: list[Any]) -> Any:
        found = [weight.codes_by_row() for weight in weights]
        if not all(found):  # one is the average of others, for example
            return None
        return tensor_memory.read(list(chain.from_iterable(each.tensors for each in found)))

    @staticmethod
    def _tiles_of(rows: np.ndarray) -> np.ndarray:
        return rows[:, COLUMN["numel"]] // rows[:, COLUMN["width"]]

    def run(self, optimizer: Any, scale: GradScale) -> None:
        weights: list[Any] = list(map(states.memory, self.params))
        super().run(optimizer, scale)
        for weight in weights:
            weight.was_updated()

    @functools.cached_property
    def shared(self) -> int:
        width, scale_width = self.rows[:, COLUMN["width"]], self.rows[:, COLUMN["scale_width"]]
        kept = 4 * width if self.variant.error == "dropped" else 0
        return int((kept + 16 * (width // scale_width)).max())


def bits_for(own: Any, state: list[Tensor]) -> int:
    """Bits of the codes of a weight that `CodedLaunch` can update, else 0.

    Args:
        own: this rank's part of the weight, a LowbitTensor.
        state: its states.
    """
    found = own.codes_by_row()
    if found is None or not runs_on_hopper(own.device):
        return 0
    width = own.shape[-1]
    # Lanes take eight elements, whose codes begin at a multiple of their size.
    if not NARROWEST <= width <= WIDEST or width % 8 or found.scale_width % 8:
        return 0
    if found.codes.data_ptr() % found.bits:
        return 0
    coded = [part for part in map(local, state) if isinstance(part, CodebookTensor)]
    return found.bits if all(part.cols_of(own.shape) == width for part in coded) else 0
