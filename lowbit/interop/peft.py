"""Merge the adapters of PEFT into low-bit weights with one rounding, and report the loss.

    report = lowbit.peft.merge_(model)      # W' = round(W + s · B · A), in the scheme of W
    print(report)                           # what the rounding of each layer loses, in dB
    report.unmerge_()                       # W again, to the bit
    model = model.merge_and_unload()        # or: the model without adapters, in low bits

PEFT's own `merge_adapter` works too, but rounds once for each adapter, and `unmerge_adapter` once more, so W does not
come back. `merge_` dequantizes the base to float32, lets PEFT add all adapters by its own formula of LoRA, DoRA, LoHa,
IA3 and the others, and rounds the sum once. A block keeps its scale if that scale is nearer.

`lowbit.dequantize_(model)` before merging loses nothing. QAT of adapters (`lowbit.qat`) trains the rounded weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import check_module, is_tuner
from lowbit.numerics.snr import snr
from lowbit.progress import progress
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.trained.trainable import TrainableTensor


@dataclass(frozen=True)
class Merged:
    """One layer whose adapters are in its low-bit weight.

    Args:
        name: of the layer.
        snr: 10 · log10(Σ m² / Σ (m − m̂)²) in dB, of the merged weight m and its rounded form m̂.
        update_snr: as `snr`, with Σ (m − W)², the change by the adapters, in place of Σ m². Below 0 the rounding error
            is larger than the change.
    """

    name: str
    snr: float
    update_snr: float


@dataclass
class MergeReport:
    """What `merge_` did; `print(report)`.

    Attributes:
        layers: the layers with low-bit weights.
        plain: the names of layers with other weights, which PEFT merges without rounding.
    """

    layers: list[Merged] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    _kept: list[_Kept] = field(default_factory=list, repr=False)

    def unmerge_(self) -> None:
        """Give each layer the weight that it had before, to the bit, with the adapters beside it.

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
        lines += [
            f"  {layer.name:<{width}}  merged weight {layer.snr:5.1f} dB, "
            f"change by the adapters {layer.update_snr:5.1f} dB"
            for layer in self.layers
        ]
        return "\n".join(lines)


def merge_(
    model: nn.Module, adapter_names: Sequence[str] | None = None, *, keep_base: bool = True
) -> MergeReport:
    """Merge adapters of PEFT into the weights of their base layers, in place.

    Args:
        model: with layers of PEFT; a layer whose weight is not in low bits is merged as by `merge_adapter`.
        adapter_names: the adapters to merge, in this order; None: those in use.
        keep_base: keep a copy of each low-bit weight in the report, for `unmerge_`. Without copies, a merge that PEFT
            refuses in one layer leaves the layers before it merged.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no layer of PEFT; adapters that are merged already; NaN or infinite adapters. The model is then as
            it was.
        NotImplementedError: a base weight that trains in low bits, as `lowbit.train.prepare_` makes them from
            `Int8Weight`. The model then stays unchanged.
    """
    check_module(model)
    layers = {name: m for name, m in model.named_modules() if is_tuner(m) and hasattr(m, "merge")}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers of PEFT; make them by peft.get_peft_model(model, config)"
        )
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(f"the adapters of {merged[0]} are merged already; call unmerge_ first")
    for name, layer in layers.items():
        _check_base(name, layer)
        _check_finite(name, layer)
    report, names = MergeReport(), None if adapter_names is None else list(adapter_names)
    done: list[_Kept] = []
    try:
        with progress("merging adapters", len(layers), unit="layers") as advance:
            for name, layer in layers.items():
                done += [_Kept(layer)] if keep_base else []
                _merge(name, layer, names, report)
                advance(1)
    except BaseException:
        while done:
            done.pop().restore()
        raise
    report._kept = done
    return report


def _merge(name: str, layer: Any, adapter_names: list[str] | None, report: MergeReport) -> None:
    base = layer.get_base_layer()
    weight = getattr(base, "weight", None)
    if not isinstance(weight, AffineTensor):
        layer.merge(safe_merge=True, adapter_names=adapter_names)
        report.plain.append(name)
        return
    before = _values(weight)
    base.weight = nn.Parameter(before.clone(), requires_grad=False)
    try:
        layer.merge(safe_merge=True, adapter_names=adapter_names)
        merged = base.weight.detach()
    finally:
        base.weight = weight
    if not layer.merged:  # no adapter of these names
        return
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*takes new values")
        weight.requantize_(merged)
    update = snr(merged - before, _values(weight) - before)
    report.layers.append(Merged(name, snr(merged, weight.dequantize()), update))


def _check_base(name: str, layer: Any) -> None:
    weight = local(getattr(layer.get_base_layer(), "weight", None))
    if isinstance(weight, TrainableTensor) and weight.updated_in_place() is None:
        raise NotImplementedError(
            f"{name} holds {type(weight).__name__}, which trains in low bits, and PEFT would add the adapters to it by "
            "a rounding that no report states; call lowbit.train.convert_(model) for a weight that merge_ rounds, or "
            "lowbit.train.restore_(model) for a plain one, before merging"
        )


def _check_finite(name: str, layer: nn.Module) -> None:
    base = {id(p) for p in layer.get_base_layer().parameters()}  # type: ignore[operator]
    for own, param in layer.named_parameters():
        if id(param) not in base and not bool(torch.isfinite(param).all()):
            raise ValueError(
                f"{name}.{own} has NaN or infinite values; repair or reload the adapter before merging it"
            )


def _values(weight: AffineTensor) -> Tensor:
    wide: Any = weight._with(dtype=torch.promote_types(weight.dtype, torch.float32))
    values: Tensor = wide.dequantize()
    return values


class _Kept:
    """The parameters of a base layer before its adapters are merged."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        base = layer.get_base_layer()
        self.tensors = [(p, p.detach().clone()) for p in base._parameters.values() if p is not None]

    def restore(self) -> None:
        with torch.no_grad():
            for param, before in self.tensors:
                param.copy_(before)
        self.layer.merged_adapters.clear()
