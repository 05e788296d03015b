"""Training schemes: how `lowbit.train.prepare_` stores a weight and computes its products.

A scheme is a frozen dataclass that validates itself. This file has what all share. `mixed_precision.py` has those of
weights in high precision, `low_bit_weights.py` those whose weight itself is in low bits. The tensor class that carries
a scheme out names it in its `schemes` (`lowbit.tensor.trained.trainable`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.numerics import class_names
from lowbit.numerics.code_range import FLOATS
from lowbit.numerics.settings import is_whole
from lowbit.schemes.least_sizes import Least, LeastExperts
from lowbit.schemes.matrix_units import missing_units

TRAINED_DTYPES = tuple(dtype for dtype in FLOATS if dtype is not torch.float64)
"""Dtypes of weights and inputs that training schemes take."""
PRODUCTS = ("output", "grad_input", "grad_weight")
LOOKED_UP = "an embedding looks rows up and multiplies nothing"
IN_ATTENTION = "nn.MultiheadAttention has its own product"


class TrainingScheme:
    """The rules of a training scheme that the walk over a model (`lowbit.convert`) asks for. Subclasses are frozen
    dataclasses."""

    kinds: ClassVar[dict[str, type[TrainingScheme]]] = {}
    """Every training scheme by the name that checkpoints use. Each class enters itself. A name that another class has
    raises TypeError."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        class_names.enter(TrainingScheme.kinds, cls)
        torch.serialization.add_safe_globals([cls])  # the metadata of a pickled tensor

    def obstacle(self, shape: Sequence[int], uses: Collection[str]) -> str | None:
        """Why a weight of this shape is left alone; None: it is prepared. `uses`: the kinds of the modules that hold
        the weight, of `lowbit.convert.USES`."""
        return None

    def after_larger(self, shape: Sequence[int], larger: Sequence[int]) -> TrainingScheme | None:
        """The scheme of a weight that is too small alone, for a layer that shares its input with a layer of this scheme
        and a weight of the shape `larger`. None: the weight is left alone there too."""
        return None

    def starts_from(self, weight: Any) -> bool:
        """True if training may start from this quantized weight, from the values that its codes stand for."""
        return False

    def check(self, weight: Tensor) -> None:
        """Raise ValueError for a weight that this scheme cannot take."""
        if weight.dtype not in TRAINED_DTYPES:
            raise ValueError(
                f"its dtype is {weight.dtype}; {type(self).__name__} takes {', '.join(map(str, TRAINED_DTYPES))}: "
                "convert the model, or leave this weight out with filter_fn"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError if the prepared model was cast to a dtype without products."""
        if dtype not in TRAINED_DTYPES:
            raise ValueError(
                f"a layer in {dtype} has no products of {type(self).__name__}, which takes "
                f"{', '.join(map(str, TRAINED_DTYPES))}: cast the model to one of them, or make it plain again by "
                "lowbit.train.restore_(model)"
            )

    def describe(self, shape: Sequence[int]) -> str:
        """The report's note on a weight that was prepared."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `TrainingScheme.from_dict` reads it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"name": type(self).__name__, **values}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TrainingScheme:
        """Raises ValueError for a dict that `to_dict` does not produce."""
        try:
            values = dict(data)
            return TrainingScheme.kinds[values.pop("name")](**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{data!r} is not what to_dict of a training scheme gives: {type(error).__name__} {error}"
            ) from error


@dataclass(frozen=True)
class LowbitProducts(TrainingScheme):
    """The fields and rules of schemes that choose which products run in low bits.

    Args:
        output, grad_input, grad_weight: which of the products run in low bits; the others run in high precision.
        stochastic_rounding: round gradients up or down at random, so that their mean is exact, or to nearest. None: as
            the format of gradients needs it (`rounds_stochastically`).
        seed: of this rounding. The random numbers are a function of seed and gradient, so they are equal on every
            replica and after a restart.
        always: low-bit products also where they gain nothing: for small weights and few rows, and on devices without
            units for them, where plain operations replace them. For tests and for studies of numerics on a CPU.

    Raises TypeError, ValueError for other values.
    """

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    stochastic_rounding: bool | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    always: bool = field(default=False, kw_only=True)

    capability: ClassVar[tuple[int, int]]
    """The lowest CUDA compute capability of GPUs with units for these products."""
    least: ClassVar[Least] = Least()
    least_experts: ClassVar[LeastExperts] = LeastExperts()
    forward_format: ClassVar[str]
    """The format of inputs and weights, of `lowbit_kernels.quantize.quantize_rowcol`."""

    def __post_init__(self) -> None:
        check_bools(self)
        if self.stochastic_rounding not in (None, True, False):
            raise TypeError(
                f"stochastic_rounding must be True, False or None, got {self.stochastic_rounding!r}"
            )
        object.__setattr__(self, "seed", check_seed(self.seed))

    @property
    def products(self) -> list[str]:
        """The members of `PRODUCTS` that run in low bits."""
        return [name for name in PRODUCTS if getattr(self, name)]

    @property
    def backward_format(self) -> str:
        """The format of gradients of outputs."""
        return self.forward_format

    @property
    def rounds_stochastically(self) -> bool:
        """True if gradients round stochastically: by default in int8, whose numbers are equally far apart.

        Rounding to nearest makes the many small gradients beside a large one 0 in every step, and a Llama of 316M
        parameters loses 4% in its first 120 steps (`benchmarks/LOG.md`). float8 keeps small gradients, and loses
        nothing.
        """
        if self.stochastic_rounding is None:
            return self.backward_format == "int8"
        return self.stochastic_rounding

    @property
    def one_scale(self) -> bool:
        """True if each tensor has one scale, instead of one for each row or column."""
        return False

    @property
    def in_blocks(self) -> bool:
        """True if operands have a scale for each block (`lowbit_kernels.quantize.quantize_blocks`)."""
        return False

    @property
    def _grouped_refusal(self) -> str | None:
        """Why products of experts run in high precision; None if they may run in low bits."""
        if self.one_scale:
            return "grouped products take a scale a row, and the scheme one a tensor"
        return None

    @property
    def power_of_two(self) -> bool:
        """True if scales of blocks are powers of two."""
        return False

    @property
    def makes_codes(self) -> bool:
        """True if each product makes the codes of the weight, by `row_codes` or `transposed_codes` of its class."""
        return self.in_blocks

    @property
    def input_rounding(self) -> tuple[Any, ...]:
        """Equal for schemes that round an input alike."""
        return self.forward_format, self.one_scale, self.in_blocks

    def describe(self, shape: Sequence[int]) -> str:
        scale = "one scale a tensor" if self.one_scale else "a scale a row"
        note = f"{self.forward_format}, {scale}: {', '.join(self.products)}"
        if self.backward_format != self.forward_format:
            note += f"; gradients {self.backward_format}"
        if self.rounds_stochastically and {"grad_input", "grad_weight"} & set(self.products):
            note += "; gradients rounded stochastically"
        return note + self._note_of_experts(shape)

    def _note_of_experts(self, shape: Sequence[int]) -> str:
        in_high_precision = len(shape) > 2 and self._grouped_refusal is not None
        return "; grouped products in high precision" if in_high_precision else ""

    def check(self, weight: Tensor) -> None:
        super().check(weight)
        refusal = self._refusal_of(weight.device)
        if refusal is not None:
            raise ValueError(refusal)

    def _missing_units(self, device: torch.device) -> str | None:
        """Why `device` does not run these products; None if it does."""
        return missing_units(device, self.capability)

    def _refusal_of(self, device: torch.device) -> str | None:
        """Error message for devices without int8 or float8 matrix units; None for those that have them."""
        reason = None if self.always else self._missing_units(device)
        if reason is None:
            return None
        return (
            f"{type(self).__name__} on {device}: {reason}; train without it (lowbit.train.restore_(model) undoes it), "
            "or slowly, by plain operations, with always=True"
        )

    def _too_small(self, n: int, k: int) -> str | None:
        if n * k >= self.least.weight * (n + k):
            return None
        return f"too small to gain: N·K / (N + K) of {n} x {k} is below {self.least.weight}"

    def _too_little(self, m: int, n: int, k: int) -> str | None:
        """Why products of these sizes gain nothing; None if they gain."""
        too_small = self._too_small(n, k)
        if too_small is not None:
            return too_small
        rows = self.least.rows(n, k)
        return f"too few rows to gain: {m} is below {rows}" if m < rows else None

    def plain_because(self, device: torch.device, m: int, n: int, k: int) -> str | None:
        """Why products of an input [m, k] and a weight [n, k] run in high precision; None if they run in low bits.

        Raises RuntimeError on a GPU that has no units for them.
        """
        if m == 0 or n == 0 or k == 0:
            return "there is nothing to multiply"
        if self.always:
            return None
        if device.type in ("cpu", "meta"):
            return f"on {device.type} low-bit products are not faster"
        too_little = self._too_little(m, n, k)
        if too_little is None:
            self._check_units(device)
        return too_little

    def grouped_plain_because(
        self, device: torch.device, m: int, experts: int, n: int, k: int
    ) -> str | None:
        """`plain_because` for a grouped product of rows [m, k] and experts [experts, n, k]. Only the device knows the
        rows of each expert, so the decision depends on their mean."""
        if 0 in (m, experts, n, k):
            return "there is nothing to multiply"
        if self._grouped_refusal is not None:
            return self._grouped_refusal
        if self.always:
            return None
        if device.type in ("cpu", "meta"):
            return f"on {device.type} low-bit products are not faster"
        if not self.least_experts.gains(m, experts, n, k):
            return f"too small to gain: {m} rows for {experts} experts of {n} x {k}"
        self._check_units(device)
        return None

    def _check_units(self, device: torch.device) -> None:
        refusal = self._refusal_of(device)
        if refusal is not None:
            raise RuntimeError(refusal)


@dataclass(frozen=True)
class Int8Products(LowbitProducts):
    """Both operands in int8, with a scale a row of each."""

    capability = (8, 0)
    forward_format = "int8"


def check_seed(seed: Any) -> int:
    """The seed as an int. Raises TypeError or ValueError for anything but a whole number from 0 to 2**31 - 1."""
    if not is_whole(seed):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be 0 to 2**31 - 1, got {seed}")
    return int(seed)


def check_bools(scheme: Any) -> None:
    """Raise TypeError for a field declared as bool that holds something else."""
    for each in fields(scheme):
        value = getattr(scheme, each.name)
        if each.type == "bool" and not isinstance(value, bool):
            raise TypeError(f"{each.name} must be True or False, got {value!r}")
