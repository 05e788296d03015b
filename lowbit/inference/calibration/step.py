"""A step of a calibration, and the layer that it works on.

Steps run in the order of the list, on one layer after another. A step reads what the steps before it left in the
`Layer`, and leaves its own result there: scales in `qparams`, or values of the grid in `values`. What no step decided
is done as `lowbit.quantize_` does it: scales from the smallest and largest value, rounding to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert import Target
from lowbit.inference.calibration.batches import Batches
from lowbit.inference.calibration.inputs import Moments, energy, product
from lowbit.numerics.blocks import for_elements
from lowbit.numerics.gain import takes_any_scale, with_scales_times
from lowbit.numerics.spec import Spec
from lowbit.tensor.frozen.rotated_tensor import rotated_blocks

QParams = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Start:
    """A low-bit weight whose new values are calibrated in its own scheme.

    Attributes:
        held: an AffineTensor, the new values rounded to nearest. Its scales are where the rounding starts, and the
            result is written into its memory.
        values: float32, of the shape of `held`; the values to round.
    """

    held: Any
    values: Tensor


class Part(NamedTuple):
    """A matrix of a layer with a Hessian of its own.

    Attributes:
        at: its place among the layer's rows: an expert of a stack, or the rows of one group of a convolution.
        hessian: float32 [K, K], or its diagonal [K]; None if no input reached the matrix.
        cross: W Σ (x − x̂) x̂ᵀ, float32 [N, K], of the original weight, its inputs x in the model in high precision and x̂
            in the rounded model; None without pairs.
        drift: Σ ‖W (x − x̂)‖².
    """

    at: int | slice
    hessian: Tensor | None
    cross: Tensor | None
    drift: float


@dataclass
class Layer:
    """A weight on its way into low bits.

    Attributes:
        name: fully qualified.
        weight: float32 [N, K], or [E, N, K] of stacked experts, as its groups run; the values to round.
        spec: how it is quantized.
        scale_dtype: of new scales.
        moments: sums over its inputs.
        joint: what the scales of siblings share (`Spec.joint_part`), or None.
        is_embedding: whether an embedding reads rows of it, alone or beside a head that is tied to it.
        qparams: scale and zero point of each block; None: from the smallest and largest value.
        values: float32 values of the grid, which `qparams` codes exactly; None: round to nearest.
        rotation: inputs of a block that the product rotates; `weight` and `moments` are those of rotated inputs. 1: no
            rotation.
        mask: bool, of the shape of the weight, True for what pruning keeps; all else is 0 in every result. None: all.
        is_compressed: whether what the mask keeps is stored alone (`Sparse24Tensor`).
        original: the weight before it was pruned, whose outputs a step aims at.
    """

    name: str
    weight: Tensor
    spec: Spec
    scale_dtype: torch.dtype
    moments: Moments
    joint: Tensor | None = None
    qparams: QParams | None = None
    values: Tensor | None = None
    rotation: int = 1
    mask: Tensor | None = None
    is_compressed: bool = False
    is_embedding: bool = False
    original: Tensor = field(init=False, repr=False)
    _pairs: dict[int, tuple[Tensor, float] | None] = field(
        default_factory=dict, init=False, repr=False
    )
    """`Moments.pair` of each matrix."""
    _energy: float | None = field(default=None, init=False, repr=False)
    """Σ ‖W x̂‖²."""

    def __post_init__(self) -> None:
        self.original = self.weight

    def rotate(self, size: int) -> None:
        """Round the weight for inputs that are rotated in blocks of `size`.

        Raises ValueError where an earlier step has rounded or pruned it."""
        self._check_new("rotation", "Rotate()")
        self.weight = self.original = rotated_blocks(self.weight, size)
        self.moments = self.moments.rotated(size)
        self.rotation = size
        self._energy = None
        self._pairs.clear()
        if self.joint is not None:
            self.joint = self.spec.joint_part([self.weight], torch.float32)

    def prune(self, mask: Tensor, weight: Tensor) -> None:
        """Keep only these values. Args: `mask` as the attribute; `weight`: what is rounded, 0 where the mask is False.

        Raises ValueError where an earlier step has rounded or pruned it."""
        self._check_new("pruning", "Prune24()")
        self.mask, self.weight = mask, weight

    def _check_new(self, what: str, step: str) -> None:
        is_rotated = self.rotation != 1 and what == "rotation"
        if (
            self.qparams is not None
            or self.values is not None
            or self.mask is not None
            or is_rotated
        ):
            raise ValueError(
                f"{self.name} is rounded, rotated or pruned already; {what} comes before steps that round, as in "
                f"steps=[{step}, GPTQ()], and rotation before pruning"
            )

    def parts(self) -> Iterator[Part]:
        """The matrices, each with its Hessian."""
        moments, count = self.moments, self.moments.matrices
        for i in range(count):
            index: int | slice = i
            if self.weight.ndim == 2:
                rows = self.weight.shape[0] // count
                index = slice(i * rows, (i + 1) * rows)
            if i not in self._pairs:
                self._pairs[i] = moments.pair(i, self.original[index])
            yield Part(index, moments.hessian(i), *(self._pairs[i] or (None, 0.0)))

    def importance(self) -> Tensor | None:
        """The diagonal of each Hessian, broadcastable to the weight; None if no input reached the layer."""
        found = [
            None if h is None else h.diagonal() if h.ndim == 2 else h for _, h, *_ in self.parts()
        ]
        if all(h is None for h in found):
            return None
        ones = self.weight.new_ones(self.weight.shape[-1])
        return of_parts(self, [ones if h is None else h for h in found])

    def minmax(self) -> QParams:
        """Scale and zero point of each block from its smallest and largest value."""
        return self.spec.choose_qparams(self.spec.pad(self.weight), self.scale_dtype, self.joint)

    def rounded(self, qparams: QParams) -> Tensor:
        """The weight rounded to nearest by these scales: float32."""
        codes, scale, zero = self.spec.quantize(self.weight, self.scale_dtype, qparams)
        return self.spec.dequantize(codes, scale, zero, self.weight.shape, torch.float32)

    def grow(self) -> None:
        """Make the scales of each row w larger by Σ (w x̂)² / Σ (w x̂) (q x̂), so that its rounded outputs q x̂ are not
        too small (`lowbit.numerics.gain`). x̂ are independent where no inputs were seen. Scales that cannot take any
        value, belong to several rows or siblings, or to a pruned weight, stay as they are."""
        spec, shape = self.spec, tuple(self.weight.shape)
        is_free = takes_any_scale(spec) and set(spec.block_size(shape)[:-1]) <= {1}
        if not is_free or self.joint is not None or self.mask is not None:
            return
        qparams = self.minmax() if self.qparams is None else self.qparams
        values = self.rounded(qparams) if self.values is None else self.values
        factor = values.new_ones((*shape[:-1], 1))
        for at, hessian, *_ in self.parts():
            w, q = self.original[at], values[at]
            if hessian is not None:
                own = w
                if self.moments.of_inputs:
                    own = w * hessian if hessian.ndim == 1 else product(w, hessian)
                sums = [(own.double() * t).sum(-1, keepdim=True) for t in (w, q)]
                factor[at] = (sums[0] / sums[1]).float()
        codes, *_ = spec.quantize(values, qparams=qparams)
        self.values, self.qparams = with_scales_times(spec, codes, qparams, factor, shape)

    def error(self, values: Tensor) -> float:
        """Σ ‖Q x̂ − W x‖² / Σ ‖W x̂‖² over the inputs x̂ of the rounded model, where x = x̂ without pairs. Over
        independent inputs where none was seen."""
        wrong, whole = self.errors(values)
        return wrong / whole if whole else 0.0

    def errors(self, values: Tensor) -> tuple[float, float]:
        """What `error` divides, and by what."""
        if self._energy is None:
            self._energy = sum(energy(self.original[p.at], p.hessian) for p in self.parts())
        wrong = 0.0
        for part in self.parts():
            moved = values[part.at] - self.original[part.at]
            wrong += part.drift + energy(moved, part.hessian)
            if part.cross is not None:
                wrong -= 2 * float((part.cross * moved).sum(dtype=torch.float64))
        return max(wrong, 0.0), self._energy


def of_parts(layer: Layer, each: Sequence[Tensor]) -> Tensor:
    """[K] of each matrix of a layer, broadcastable to its weight."""
    found = torch.stack(list(each))
    if layer.weight.ndim == 3:
        return found.unsqueeze(1)
    return found.repeat_interleave(layer.weight.shape[0] // len(found), 0)


def by_rows(t: Tensor, spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """Scales or zero points [blocks along each dimension] with one entry for each row: [..., N, blocks along K]."""
    return for_elements(t, (*spec.block_size(shape)[:-1], 1), shape)


class Step:
    """One algorithm. A subclass is one file.

    Attributes:
        needs: the sums over inputs that it reads: "diagonal" or "full" of the Hessian.
        pairs: True if it also reads Σ (x − x̂) x̂ᵀ, for which the blocks run in high precision too.
        whole: True if it changes layers of several blocks together, so that the whole model has to be in memory.
        kinds: all steps by the name of their class; of two with one name the first.
    """

    needs: ClassVar[Literal["diagonal", "full"]] = "diagonal"
    pairs: bool = False
    whole: bool = False
    kinds: ClassVar[dict[str, type[Step]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Step.kinds.setdefault(cls.__name__, cls)

    def begin(self, targets: Sequence[Target]) -> dict[int, str]:
        """Called with all weights before the first batch. Returns notes as `fold` does. Where both have a note on a
        module, that of `fold` counts. Raises ValueError for a weight that the step does not take."""
        return {}

    def fold(self, model: nn.Module, targets: Sequence[Target], batches: Batches) -> dict[int, str]:
        """Change the model in high precision before its weights are calibrated, without a change of what it computes
        unless the step prunes. Returns a note for the report by the id of each module that was changed.

        `batches`: a `Batches`, whose `ranks` add up what each process with a share of them sees."""
        return {}

    def apply(self, layer: Layer) -> None:
        """Set `qparams` or `values` of the layer. A step that folds need not."""
        if not self.folds:
            raise NotImplementedError

    @property
    def method(self) -> str:
        """The name in reports."""
        return type(self).__name__

    @property
    def folds(self) -> bool:
        """True if `fold` does anything."""
        return type(self).fold is not Step.fold

    @property
    def in_ranks(self) -> bool:
        """True if it may run in processes with a share of the batches each. The sums of a `Layer` are those of all."""
        return not self.folds

    @property
    def comes_first(self) -> bool:
        """True if steps that round come after it."""
        return self.folds

    def __str__(self) -> str:
        """The class and the options, the same in each process."""
        options = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__qualname__}({options})"


def check_share(name: str, value: float, most: float = math.inf) -> None:
    """Raise ValueError unless 0 <= value <= most."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most or not math.isfinite(value):
        raise ValueError(f"{name} must be finite and from 0 to {most:g}, got {value!r}")
