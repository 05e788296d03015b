"""Training schemes whose weight itself is in low bits: stored so, without a high-precision copy (`Int8Weight`,
`Int4Weight`), or seen so by every product (`BitNet`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.numerics.settings import is_whole
from lowbit.schemes.matrix_units import missing_units
from lowbit.schemes.training import (
    IN_ATTENTION,
    LOOKED_UP,
    Int8Products,
    TrainingScheme,
    check_bools,
)

_STARTS = ("integers", "float8", "table")
"""How quantized weights that training starts from are stored (`AffineTensor.stored_as`)."""


@dataclass(frozen=True)
class LowbitWeight(Int8Products):
    """The weight itself is in low bits, without a high-precision copy. By default no product runs int8 x int8: the
    weight is dequantized for each, which is exact. See `LowbitProducts` for the arguments.

    A weight that is quantized already, such as one of `lowbit.load_pretrained`, is trained from its values, rounded to
    the codes of the scheme.

    Raises TypeError, ValueError for other values, and ValueError for options of products if there are none.
    """

    output: bool = False
    grad_input: bool = False
    grad_weight: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stochastic_rounding", "always"):
            if getattr(self, name) and not self.products:
                raise ValueError(
                    f"{type(self).__name__}: {name}=True has no effect, because no product runs in int8; turn on "
                    f"output, grad_input or grad_weight, or leave {name} out (updates of the weight always round "
                    "stochastically)"
                )

    @property
    def stored(self) -> str:
        """How the weight is stored, for a report."""
        raise NotImplementedError

    def starts_from(self, weight: Any) -> bool:
        return getattr(weight, "stored_as", None) in _STARTS

    def check(self, weight: Tensor) -> None:
        if self.products:
            super().check(weight)
        else:
            TrainingScheme.check(self, weight)

    def plain_because(self, device: torch.device, m: int, n: int, k: int) -> str | None:
        if not self.products:
            return "none was asked for"
        return super().plain_because(device, m, n, k)

    def grouped_plain_because(
        self, device: torch.device, m: int, experts: int, n: int, k: int
    ) -> str | None:
        if not self.products:
            return "none was asked for"
        return super().grouped_plain_because(device, m, experts, n, k)

    def describe(self, shape: Sequence[int]) -> str:
        note = f"{self.stored}, no high-precision copy"
        return f"{note}; products {super().describe(shape)}" if self.products else note


@dataclass(frozen=True)
class Int8Weight(LowbitWeight):
    """The weight itself is int8, with a scale a row and no high-precision copy; see
    `lowbit.tensor.trained.int8_weight`. Training also starts from weights that are quantized already, such as those of
    `lowbit.load_pretrained`.

    Every rank loads a state dict of such weights itself: torch's `broadcast_from_rank0=True` takes plain values only,
    `value.dequantize()`. DistributedDataParallel sends the weights as they are stored, random-number offsets included.

    Args:
        output, grad_input, grad_weight: which of the products run int8 x int8. The default is none: the weight is
            dequantized for each product, which is exact.
        stochastic_rounding, always: for those products, as in `Int8MixedPrecision`.
        seed: of all random numbers, those of the weight's updates included, which are always stochastic.

    Raises TypeError, ValueError for other values, and ValueError for options of products if there are none.
    """

    @property
    def stored(self) -> str:
        return "int8, a scale a row"


@dataclass(frozen=True)
class Int4Weight(LowbitWeight):
    """The weight itself has 4 bits, with a scale a group and no high-precision copy; see
    `lowbit.tensor.trained.int4_weight`.

    A step moves a weight by far less than the distance of two codes, and stochastic rounding alone adds much noise. So
    lowbit's optimizers put what rounding takes into the momentum (`weight_correction`), unless its states have 4 bits.
    State dicts, FSDP2 and DistributedDataParallel
    treat it as `Int8Weight`.

    Args:
        group_size: inputs that share a scale, an even number; the memory is 4 + 32 / group_size bits a weight.
        output, grad_input, grad_weight: which of the products run int8 x int8. They read the weight's values rounded
            to int8, with a scale a row. The default is none: the weight is dequantized for each product, which is
            exact.
        stochastic_rounding, always: for those products, as in `Int8MixedPrecision`.
        seed: of all random numbers, those of the weight's updates included, which are always stochastic.

    Raises TypeError, ValueError for other values, and ValueError for options of products if there are none.
    """

    output: bool = field(default=False, kw_only=True)
    grad_input: bool = field(default=False, kw_only=True)
    grad_weight: bool = field(default=False, kw_only=True)
    group_size: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.group_size):
            raise TypeError(f"group_size must be an int, got {self.group_size!r}")
        if self.group_size < 2 or self.group_size % 2:
            raise ValueError(f"group_size must be an even number from 2, got {self.group_size}")
        object.__setattr__(self, "group_size", int(self.group_size))

    @property
    def makes_codes(self) -> bool:
        return True

    @property
    def stored(self) -> str:
        return f"int4, a scale a group of {self.group_size}"


@dataclass(frozen=True)
class BitNet(TrainingScheme):
    """BitNet b1.58 (arXiv 2402.17764): products see the weight as -1, 0 or 1 times its mean magnitude, and the input
    in int8, a scale a token.

    Args:
        grad_input, grad_weight: True runs this product int8 x int8 as well; the output's product always does.
    """

    grad_input: bool = False
    grad_weight: bool = False

    capability: ClassVar[tuple[int, int]] = Int8Products.capability

    def __post_init__(self) -> None:
        check_bools(self)

    def check(self, weight: Tensor) -> None:
        super().check(weight)
        reason = missing_units(weight.device, self.capability)
        if reason is not None:
            raise ValueError(
                f"BitNet on {weight.device}: {reason}, so it has no units for int8 products; accepted: the CPU, and "
                "NVIDIA GPUs from compute capability 8.0 on (prepare the model there), or train without BitNet"
            )

    def obstacle(self, shape: Sequence[int], uses: Collection[str]) -> str | None:
        if "attention" in uses:
            return IN_ATTENTION
        if "embedding" not in uses:
            return None
        tied = len(set(uses)) > 1
        return "tied to an embedding, which looks up exact rows" if tied else LOOKED_UP

    def describe(self, shape: Sequence[int]) -> str:
        return "ternary, a scale a tensor; activation int8, a scale a token"
