"""What a merge of adapters did, and what it lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lowbit.inference.calibration.report import CalibrationReport
from lowbit.interop.peft.sums import Kept, values_of
from lowbit.numerics.snr import snr
from lowbit.tensor.frozen.affine_tensor import AffineTensor


@dataclass(frozen=True)
class Merged:
    """One weight whose adapters are in its codes.

    Args:
        name: of the layer; of stacked experts that of the parameter.
        snr: 10 · log10(Σ m² / Σ (m − m̂)²) in dB, of the merged weight m and its rounded form m̂.
        update_snr: as `snr`, with Σ (m − W)², the change by the adapters, in place of Σ m². Below 0 the rounding error
            is larger than the change.
    """

    name: str
    snr: float
    update_snr: float


def measured(name: str, weight: AffineTensor, merged: Tensor, before: Tensor) -> Merged:
    """What rounding loses of a `weight` that was `before` and stands for `merged`."""
    update = snr(merged - before, values_of(weight) - before)
    return Merged(name, snr(merged, weight.dequantize()), update)


@dataclass(frozen=True)
class MergeLosses:
    """The mean divergence KL(base + adapters ‖ model), in nats a token, over the sequences from which learned rounding
    takes no gradient: one in eight, or all where there is a single one. The mean squared error for a model that gives
    hidden states.

    Attributes:
        without: of the base, its low-bit weights without adapters.
        requantized: with the merged weights rounded to nearest.
        learned: with the weights that the steps gave.
        kept: False if the weights are rounded to nearest, since the steps did not lower the loss.
    """

    without: float
    requantized: float
    learned: float
    kept: bool

    def __str__(self) -> str:
        text = (
            f"divergence from the base with adapters, held out: {self.without:.3e} without adapters, "
            f"{self.requantized:.3e} rounded to nearest, {self.learned:.3e} learned"
        )
        return text if self.kept else f"{text}; dropped"


@dataclass
class MergeReport:
    """What `merge_` did; `print(report)`.

    Attributes:
        layers: the layers with low-bit weights.
        plain: the names of layers with other weights, which PEFT merges without rounding.
        losses: of plain and of learned rounding; None without batches, and where no adapter changes a low-bit weight.
        calibration: what the steps did to each weight; None as `losses`.
    """

    layers: list[Merged] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    losses: MergeLosses | None = None
    calibration: CalibrationReport | None = None
    _kept: list[Kept] = field(default_factory=list, repr=False)

    def unmerge_(self) -> None:
        """Give each layer the weight that it had before, to the bit, with the adapters beside it. Norms and biases that
        were learned have their values again.

        Raises ValueError after `merge_(keep_base=False)`, which kept no weights, and after a first call.
        """
        if not self._kept:
            raise ValueError(
                "no base weights are kept: this was called before, or merge_ with keep_base=False; PEFT's "
                "unmerge_adapter() subtracts the adapters and rounds"
            )
        while self._kept:
            self._kept.pop().restore()

    def __str__(self) -> str:
        if not self.layers:
            return f"no low-bit weight has adapters; PEFT merged {len(self.plain)} layers without rounding"
        width = max(len(layer.name) for layer in self.layers)
        worst = min(self.layers, key=lambda layer: layer.update_snr)
        lines = [
            f"{len(self.layers)} low-bit weights were rounded once more, {len(self.plain)} others were not; the worst "
            f"change has an SNR of {worst.update_snr:.1f} dB"
        ]
        lines += [] if self.losses is None else [f"  {self.losses}"]
        lines += [
            f"  {layer.name:<{width}}  merged weight {layer.snr:5.1f} dB, "
            f"change by the adapters {layer.update_snr:5.1f} dB"
            for layer in self.layers
        ]
        return "\n".join(lines)
