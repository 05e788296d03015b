"""Training schemes that keep the weight in high precision and run the three products of a linear, each unless switched
off, in 8 bits:

    output       y[M, N]  = x[M, K] · w[N, K]ᵀ
    grad_input   dx[M, K] = dy[M, N] · w[N, K]
    grad_weight  dw[N, K] = dy[M, N]ᵀ · x[M, K]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.granularity import PerBlock, PerGroup
from lowbit.numerics.number_format import Float8
from lowbit.numerics.settings import is_whole
from lowbit.numerics.spec import Spec
from lowbit.schemes.least_sizes import Least, LeastExperts
from lowbit.schemes.matrix_units import missing_block_products
from lowbit.schemes.presets import MXFP8WeightOnly
from lowbit.schemes.training import IN_ATTENTION, LOOKED_UP, Int8Products, LowbitProducts

BLOCK = 128
"""Elements along each side of the blocks of `Float8BlockMixedPrecision`."""
BLOCK_WEIGHT = Spec(Float8(), PerBlock(BLOCK, BLOCK))
"""How `Float8BlockMixedPrecision` rounds a weight, and how such a weight is stored."""
BLOCK_ACTIVATION = Spec(Float8(), PerGroup(BLOCK))
"""How `Float8BlockMixedPrecision` rounds inputs, along the dimension that a product sums over."""
UE8M0_BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION = (
    replace(spec, scale_format="e8m0", mapping="symmetric_no_clipping_err")
    for spec in (BLOCK_WEIGHT, BLOCK_ACTIVATION)
)
"""The same with each scale rounded up to a power of two, as DeepSeek-V3.1 has both."""


@dataclass(frozen=True)
class MixedPrecision(LowbitProducts):
    """Low-bit products with weights that stay in high precision; see `LowbitProducts` for the arguments.

    `beside`: how many times the outputs of this layer another layer has that multiplies the same input by this scheme.
    This layer then gains with a smaller weight and fewer rows.
    """

    beside: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.products:
            raise ValueError(
                f"{type(self).__name__} with output, grad_input and grad_weight all False changes nothing; turn one "
                "on, or leave the model as it is"
            )
        if self.in_blocks and self.stochastic_rounding:
            raise ValueError(
                f"{type(self).__name__} rounds gradients to nearest, and takes no stochastic_rounding=True; accepted: "
                "False, or another scheme, such as Float8MixedPrecision"
            )
        if self.beside is not None:
            self._check_beside(self.beside)
            plain = int(self.beside) if is_whole(self.beside) else float(self.beside)
            object.__setattr__(self, "beside", plain)

    def _check_beside(self, beside: float) -> None:
        if isinstance(beside, bool) or not isinstance(beside, Real):
            raise TypeError(f"beside must be a number or None, got {beside!r}")
        if not 1 <= beside < math.inf:
            raise ValueError(
                "beside is how many times the outputs of this layer a larger one has that multiplies the same input, "
                f"1 or more; got {beside}"
            )
        if self.in_blocks or not (self.output and self.grad_weight):
            raise ValueError(
                f"{type(self).__name__}: beside={beside} has no effect, since layers share codes with a scale a row or "
                "a tensor, of inputs that both output and grad_weight read; leave it out"
            )

    def obstacle(self, shape: Sequence[int], uses: Collection[str]) -> str | None:
        if set(uses) <= {"embedding", "attention"}:
            return IN_ATTENTION if "attention" in uses else LOOKED_UP
        if self.always or (len(shape) > 2 and self.least_experts.may_gain(*shape[-2:])):
            return None
        if self._rows_beside(*shape[-2:]) is not None:
            return None
        return self._too_small(*shape[-2:])

    def gathers_codes(self, weight: Tensor) -> bool:
        """True if FSDP2 gathers codes of this high-precision weight, because every product quantizes the weight.

        A 16-bit weight `beside` a larger one is gathered as it is: codes and scales are two tensors, and the second one
        costs the host more time than the smaller transfer saves."""
        quantizes = self.output and self.grad_input and (self.always or weight.is_cuda)
        return quantizes and (self.beside is None or weight.dtype.itemsize > 2)

    def after_larger(self, shape: Sequence[int], larger: Sequence[int]) -> MixedPrecision | None:
        if self.in_blocks or not (self.output and self.grad_weight) or len(shape) != 2:
            return None
        found = replace(self, beside=larger[0] / shape[0])
        return None if found._rows_beside(*shape) is None else found

    def _rows_beside(self, n: int, k: int) -> int | None:
        """The fewest rows with which both a weight [N, K] and the larger layer gain. None: no number of rows suffices,
        or no layer is `beside`. Tensor parallelism divides the outputs of both layers."""
        if self.beside is None or n * k < self.least.weight_beside:
            return None
        larger = round(self.beside * n)
        if self._too_small(larger, k) is not None:
            return None
        return max(self.least.rows_beside(n, k), self.least.rows(larger, k))

    def _too_little(self, m: int, n: int, k: int) -> str | None:
        rows = self._rows_beside(n, k)
        if rows is None:
            return super()._too_little(m, n, k)
        if m >= rows:
            return None
        return f"too few rows to gain beside a larger layer: {m} is below {rows}"

    def describe(self, shape: Sequence[int]) -> str:
        note = super().describe(shape)
        return note if self.beside is None else f"{note}; input shared with a larger layer"


@dataclass(frozen=True)
class Int8MixedPrecision(Int8Products, MixedPrecision):
    """int8 products with exact int32 sums. Weights stay as they are.

    Each row of an operand has the scale max(−min / 128, max / 127), as dynamic activations do.

    Args:
        output, grad_input, grad_weight: which of the products run in int8; the others run in high precision.
        stochastic_rounding: round gradients up or down at random, so that their mean is exact, or to nearest. None: as
            the format of gradients needs it.
        seed: of this rounding. The random numbers are a function of seed and gradient, so they are equal on every
            replica and after a restart.
        always: low-bit products also where they gain nothing: for small weights and few rows, and on devices without
            units for them, where plain operations replace them. For tests and for studies of numerics on a CPU.
        beside: how many times the outputs of this layer another layer has that multiplies the same input by this
            scheme. One set of codes serves both, so that smaller weights and fewer rows gain. `lowbit.train.prepare_`
            sets `beside` for the key and value layers that it finds; give it for others.

    Raises TypeError, ValueError for other values.
    """


@dataclass(frozen=True)
class Float8MixedPrecision(MixedPrecision):
    """float8 products: inputs and weights in e4m3, a scale a row of each operand. Weights stay as they are.

    Args:
        output, grad_input, grad_weight, stochastic_rounding, seed, always, beside: as for
            `lowbit.Int8MixedPrecision`.
        backward: format of gradients, "e4m3" (3 bits of mantissa) or "e5m2" (2, and a wider range).
        tensorwise: one scale a tensor instead.
    """

    backward: str = field(default="e4m3", kw_only=True)
    tensorwise: bool = field(default=False, kw_only=True)

    capability = (8, 9)
    forward_format = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward not in ("e4m3", "e5m2"):
            raise ValueError(f"backward must be 'e4m3' or 'e5m2', got {self.backward!r}")

    @property
    def backward_format(self) -> str:
        return self.backward

    @property
    def one_scale(self) -> bool:
        return self.tensorwise


@dataclass(frozen=True)
class Float8BlockMixedPrecision(MixedPrecision):
    """float8 (e4m3) products with scales of blocks, as DeepSeek-V3 was trained (arXiv 2412.19437, 3.3).

    Inputs and gradients have a scale for each 128 elements along the dimension that a product sums over, weights one
    for each 128 x 128 elements. An outlying value costs precision in its own block only. The output and the input's
    gradient see the same rounded weight, and `lowbit.train.convert_` makes it a `Float8Tensor` for inference. Training
    may also start from such a weight (`lowbit.train.prepare_`). These products run on GPUs of compute capability 9.0
    (H100, H200), with a torch built for CUDA 12.9 or newer.

    Args:
        output, grad_input, grad_weight, seed, always: as for `lowbit.Int8MixedPrecision`.
        stochastic_rounding: None or False.
        beside: None.
        power_of_two: round each scale up to a power of two, as float8_e8m0fnu (UE8M0) stores it.

    Raises TypeError, ValueError for other values, and ValueError for stochastic rounding, which the recipe lacks.
    """

    power_of_two: bool = field(default=False, kw_only=True)

    capability = (9, 0)
    # The products of blocks save two thirds of what those of rows save (benchmarks/LOG.md), at the same launches.
    least = Least(launches=2.2e10)
    # Measured as for the class's own limits: 552 to 652 and 716 to 785 where experts gain, a tenth higher.
    least_experts = LeastExperts(rows=720, weights=850)
    forward_format = "e4m3"

    @property
    def stored(self) -> tuple[Spec, Spec]:
        """How weights and inputs are rounded, and what `lowbit.train.convert_` makes."""
        if self.power_of_two:
            return UE8M0_BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION
        return BLOCK_WEIGHT, BLOCK_ACTIVATION

    @property
    def in_blocks(self) -> bool:
        return True

    @property
    def input_rounding(self) -> tuple[Any, ...]:
        return *super().input_rounding, self.power_of_two

    def _missing_units(self, device: torch.device) -> str | None:
        return super()._missing_units(device) or missing_block_products(device)

    def starts_from(self, weight: Any) -> bool:
        is_float8 = getattr(weight, "stored_as", None) == "float8"
        is_block = is_float8 and weight.spec in (BLOCK_WEIGHT, UE8M0_BLOCK_WEIGHT)
        return is_block and not weight.transposed

    def describe(self, shape: Sequence[int]) -> str:
        note = f"e4m3, a scale a block of {BLOCK} x {BLOCK}: {', '.join(self.products)}"
        note += "; scales are powers of two" if self.power_of_two else ""
        return note + self._note_of_experts(shape)


@dataclass(frozen=True)
class MXFP8MixedPrecision(MixedPrecision):
    """MXFP8 products: every operand in float8 (e4m3) with a power of two for each 32 elements along the dimension that
    its product sums over (OCP Microscaling Formats v1.0; arXiv 2506.08027). Weights stay as they are.

    lowbit has no kernel for the matrix units of this format, which GPUs of compute capability 10.0 have. Plain products
    of the rounded values stand for them (`lowbit.linear.microscaled_linear`), so that training is studied before it
    moves to such a GPU. They are slower than those of bfloat16, and run with `always=True` only.

    Args:
        output, grad_input, grad_weight, seed, always: as for `lowbit.Int8MixedPrecision`.
        stochastic_rounding: None or False.
        beside: None.
        mapping: how powers of two are chosen, as for `lowbit.MXFP8WeightOnly`.

    Raises TypeError, ValueError for other values.
    """

    mapping: str = field(default="symmetric_no_clipping_err", kw_only=True)

    capability = (10, 0)
    forward_format = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spec  # checks the mapping

    @property
    def spec(self) -> Spec:
        """How every operand is rounded, along its last dimension."""
        return MXFP8WeightOnly(self.mapping).weight  # type: ignore[arg-type]

    @property
    def in_blocks(self) -> bool:
        return True

    @property
    def _grouped_refusal(self) -> str | None:
        return "grouped products take no scales of 32 elements"

    @property
    def input_rounding(self) -> tuple[Any, ...]:
        return *super().input_rounding, self.spec

    def _missing_units(self, device: torch.device) -> str | None:
        return None if device.type in ("cpu", "meta") else "lowbit has no kernel of MXFP8 for it"

    def starts_from(self, weight: Any) -> bool:
        is_float8 = getattr(weight, "stored_as", None) == "float8"
        return is_float8 and weight.spec.same_values(self.spec) and not weight.transposed

    def describe(self, shape: Sequence[int]) -> str:
        note = f"e4m3, a power of two for each 32: {', '.join(self.products)}"
        return note + self._note_of_experts(shape)
