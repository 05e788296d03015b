"""Training schemes: how `lowbit.train.prepare_` stores a weight and computes its products.

A scheme is a frozen dataclass that validates itself. `Int8MixedPrecision` and `Float8MixedPrecision` keep the weight
in high precision and run the three products of a linear, each unless switched off, in 8 bits:

    output       y[M, N]  = x[M, K] · w[N, K]ᵀ
    grad_input   dx[M, K] = dy[M, N] · w[N, K]
    grad_weight  dw[N, K] = dy[M, N]ᵀ · x[M, K]

The tensor class that carries a scheme out names it in its `schemes` (`lowbit.tensor.trained.trainable`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.numerics import class_names
from lowbit.numerics.code_range import FLOATS
from lowbit.numerics.granularity import PerBlock, PerGroup
from lowbit.numerics.number_format import Float8
from lowbit.numerics.spec import Spec
from lowbit.schemes.least_sizes import Least, LeastExperts
from lowbit.schemes.matrix_units import missing_block_products, missing_units
from lowbit.schemes.presets import MXFP8WeightOnly

TRAINED_DTYPES = tuple(dtype for dtype in FLOATS if dtype is not torch.float64)
"""Dtypes of weights and inputs that training schemes take."""
PRODUCTS = ("output", "grad_input", "grad_weight")
LOOKED_UP = "an embedding looks rows up and multiplies nothing"
IN_ATTENTION = "nn.MultiheadAttention has its own product"
BLOCK = 128
"""Elements along each side of the blocks of `Float8BlockMixedPrecision`."""
BLOCK_WEIGHT = Spec(Float8(), PerBlock(BLOCK, BLOCK))
"""How `Float8BlockMixedPrecision` rounds a weight, and how such a weight is stored."""
BLOCK_ACTIVATION = Spec(Float8(), PerGroup(BLOCK))
"""How `Float8BlockMixedPrecision` rounds inputs, along the dimension that a product sums over."""


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
        _check_bools(self)
        if self.stochastic_rounding not in (None, True, False):
            raise TypeError(
                f"stochastic_rounding must be True, False or None, got {self.stochastic_rounding!r}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be 0 to 2**31 - 1, got {self.seed}")

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
        in_high_precision = len(shape) > 2 and (self.one_scale or self.in_blocks)
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
        if self.one_scale or self.in_blocks:
            kind = "one a tensor" if self.one_scale else "one a block"
            return f"grouped products take a scale a row, and the scheme {kind}"
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
        if self.beside is not None:
            self._check_beside(self.beside)

    def _check_beside(self, beside: float) -> None:
        if isinstance(beside, bool) or not isinstance(beside, int | float):
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
    forward_format = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stochastic_rounding:
            raise ValueError(
                "Float8BlockMixedPrecision rounds gradients to nearest, and takes no stochastic_rounding=True; "
                "accepted: False, or another scheme, such as Float8MixedPrecision"
            )

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
        return is_float8 and weight.spec == BLOCK_WEIGHT and not weight.transposed

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
        if self.stochastic_rounding:
            raise ValueError(
                "MXFP8MixedPrecision rounds to nearest, and takes no stochastic_rounding=True; accepted: False, or "
                "another scheme, such as Float8MixedPrecision"
            )
        _ = self.spec  # checks the mapping

    @property
    def spec(self) -> Spec:
        """How every operand is rounded, along its last dimension."""
        return MXFP8WeightOnly(self.mapping).weight  # type: ignore[arg-type]

    @property
    def in_blocks(self) -> bool:
        return True

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


@dataclass(frozen=True)
class LowbitWeight(Int8Products):
    """The weight itself is in low bits, without a high-precision copy. By default no product runs int8 x int8: the
    weight is dequantized for each, which is exact. See `LowbitProducts` for the arguments.

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
    `lowbit.tensor.trained.int8_weight`.

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

    Use it with `weight_correction="momentum"` of lowbit's optimizers: a step moves a weight by far less than the
    distance of two codes, and stochastic rounding alone adds much noise. State dicts, FSDP2 and DistributedDataParallel
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
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int):
            raise TypeError(f"group_size must be an int, got {self.group_size!r}")
        if self.group_size < 2 or self.group_size % 2:
            raise ValueError(f"group_size must be an even number from 2, got {self.group_size}")

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
        _check_bools(self)

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


def _check_bools(scheme: Any) -> None:
    for each in fields(scheme):
        value = getattr(scheme, each.name)
        if each.type == "bool" and not isinstance(value, bool):
            raise TypeError(f"{each.name} must be True or False, got {value!r}")


# The effect of torch.compiler.assume_constant_result, whose call would import the compiler along with lowbit.
missing_units._dynamo_marked_constant = True  # type: ignore[attr-defined]
missing_block_products._dynamo_marked_constant = True  # type: ignore[attr-defined]
