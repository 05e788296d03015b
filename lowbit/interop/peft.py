"""Merge the adapters of PEFT into low-bit weights, and report the loss.

    report = lowbit.peft.merge_(model)                      # W' = round(W + s · B · A), in the scheme of W
    report = lowbit.peft.merge_(model, batches=batches)     # the rounding is learned from a few batches
    print(report)                                           # what both lose
    report.unmerge_()                                       # W again, to the bit
    model = model.merge_and_unload()                        # or: the model without adapters, in low bits

PEFT's own `merge_adapter` works too, but rounds once for each adapter, and `unmerge_adapter` once more, so W does not
come back. `merge_` dequantizes the base to float32, lets PEFT add all adapters by its own formula of LoRA, DoRA, LoHa,
IA3 and the others, and rounds the sum once. A block keeps its scale if that scale is nearer, and siblings keep what
they share of their scales.

Most changes by an adapter are smaller than half a step of the codes, and to nearest they vanish. With `batches`
`lowbit.inference.LearnedRounding` chooses which weights take the step: its start is the sum rounded to nearest, and its
loss the divergence from the base with its adapters beside it. Only weights that an adapter changes get other bits.

`lowbit.dequantize_(model)` before merging loses nothing. QAT of adapters (`lowbit.qat`) trains the rounded weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import check_module, is_tuner
from lowbit.convert.owners import find_owners
from lowbit.convert.siblings import family_of
from lowbit.inference.calibration.batches import usable_batches
from lowbit.inference.calibration.call import checked_steps
from lowbit.inference.calibration.learned_rounding import (
    LearnedRounding,
    mean_losses,
    originals,
)
from lowbit.inference.calibration.report import CalibrationReport
from lowbit.inference.calibration.run import Run
from lowbit.inference.calibration.stages import block_of
from lowbit.inference.calibration.step import Start, Step
from lowbit.linear.frozen.kinds import representation_of
from lowbit.numerics.snr import snr
from lowbit.progress import progress
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.requantize import requantize, write
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.tracing.batches import call, eval_mode

STEPS: tuple[Step, ...] = (
    LearnedRounding(steps=100, over="model", reach=1.0, scale_rate=0, vector_rate=0),
)
"""The steps of a merge by batches, unless it gets others."""


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
    _kept: list[_Kept] = field(default_factory=list, repr=False)

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


def merge_(
    model: nn.Module,
    adapter_names: Sequence[str] | None = None,
    *,
    batches: Iterable[Any] | None = None,
    steps: Sequence[Step] | None = None,
    keep_base: bool = True,
) -> MergeReport:
    """Merge adapters of PEFT into the weights of their base layers, in place.

    Args:
        model: with layers of PEFT; a layer whose weight is not in low bits is merged as by `merge_adapter`.
        adapter_names: the adapters to merge, in this order; None: those in use.
        batches: those of `lowbit.calibrate`. None: sums are rounded to nearest. With batches the steps round them, and
            the report says what both lose. Where the steps do not lower the loss, the sums stay rounded to nearest.
        steps: those of `lowbit.calibrate` that leave the model in high precision as it is. They start from the scales
            of the sums rounded to nearest. None: [LearnedRounding(steps=100, over="model", reach=1.0,
            scale_rate=0, vector_rate=0)], which changes codes alone.
        keep_base: keep a copy of each low-bit weight in the report, for `unmerge_`. Without copies, a merge that PEFT
            refuses in one layer leaves the layers before it merged, unless there are batches.

    Raises:
        TypeError: `model` is not a module; batches or steps of another kind; steps without batches.
        ValueError: no layer of PEFT; adapters that are merged already; NaN or infinite adapters; no batches, or empty
            ones; steps that change the model in high precision, such as AWQ. The model is then as it was.
        NotImplementedError: a base weight that trains in low bits, as `lowbit.train.prepare_` makes them from
            `Int8Weight`; with batches, weights that no step rounds: of convolutions, act-order, rotated, tied or
            sharded ones. The model then stays unchanged.
    """
    check_module(model)
    layers = {name: m for name, m in model.named_modules() if is_tuner(m) and hasattr(m, "merge")}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers of PEFT; make them by peft.get_peft_model(model, config)"
        )
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(f"the adapters of {merged[0]} are merged already; call unmerge_ first")
    if steps is not None and batches is None:
        raise TypeError("steps need batches: merge_(model, batches=…, steps=…)")
    for name, layer in layers.items():
        _check_base(name, layer, batches is not None)
        _check_finite(name, layer)
    if batches is not None:
        _check_shared(model, layers)
    learn = None if batches is None else _Learn(model, batches, steps)
    report, names = MergeReport(), None if adapter_names is None else list(adapter_names)
    done: list[_Kept] = [] if learn is None else learn.vectors()
    keeps = keep_base or learn is not None
    sums: list[_Sum] = []
    try:
        with progress("merging adapters", len(layers), unit="layers") as advance:
            for name, layer in layers.items():
                kept = _Kept.of_layer(layer) if keeps else None
                done += [] if kept is None else [kept]
                found = _merge(name, layer, names, report)
                if found is not None and kept is not None and learn is not None:
                    found.before = kept
                    sums.append(found)
                advance(1)
        if learn is not None and sums:
            learn.run(sums, report)
    except BaseException:
        while done:
            done.pop().restore()
        raise
    report._kept = done if keep_base else []
    return report


def _attribute(layer: Any) -> str:
    """The name of the parameter that the adapters of this layer change."""
    return str(getattr(layer, "parameter_name", "weight"))


@dataclass
class _Sum:
    """A low-bit weight, rounded to nearest, and the sum that it stands for.

    Attributes:
        layer: of PEFT.
        held: the parameter of its base layer.
        values: float32, the sum.
        at: the place of the weight in the report.
        before: the parameters of the base layer before.
    """

    layer: Any
    held: Any
    values: Tensor
    at: int
    before: _Kept | None = None

    def put(self, weight: Any) -> None:
        setattr(self.layer.get_base_layer(), _attribute(self.layer), weight)


def _merge(
    name: str, layer: Any, adapter_names: list[str] | None, report: MergeReport
) -> _Sum | None:
    """Merge the adapters of one layer. Returns the sum where a low-bit weight takes a change."""
    base, attribute = layer.get_base_layer(), _attribute(layer)
    weight = getattr(base, attribute, None)
    if not isinstance(weight, AffineTensor):
        layer.merge(safe_merge=True, adapter_names=adapter_names)
        report.plain.append(name)
        return None
    before = _values(weight)
    setattr(base, attribute, nn.Parameter(before.clone(), requires_grad=False))
    try:
        layer.merge(safe_merge=True, adapter_names=adapter_names)
        merged = getattr(base, attribute).detach()
    finally:
        setattr(base, attribute, weight)
    if not layer.merged:  # no adapter of these names
        return None
    own = name if attribute == "weight" else f"{name}.{attribute}"
    changes = not torch.equal(merged, before)  # else -0 + 0 would give other codes in FP4
    if changes:
        with torch.no_grad():
            _round(own, weight, merged)
    report.layers.append(_result(own, weight, merged, before))
    return _Sum(layer, weight, merged, len(report.layers) - 1) if changes else None


def _result(name: str, weight: AffineTensor, merged: Tensor, before: Tensor) -> Merged:
    update = snr(merged - before, _values(weight) - before)
    return Merged(name, snr(merged, weight.dequantize()), update)


def _round(name: str, weight: AffineTensor, values: Tensor) -> None:
    """Round to nearest, in place. A weight with siblings keeps the part of its scales that they share."""
    if family_of(name) is None or not weight.spec.joins:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*takes new values")
            weight.requantize_(values)
        return
    turned = weight.transposed
    stored, own = (weight._transposed(), values.mT) if turned else (weight, values)
    (write if weight.spec.scales is None else requantize)(stored, own)


class _Learn:
    """The rounding of the sums by batches.

    Raises TypeError and ValueError for batches and steps, as `merge_` says."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], steps: Any) -> None:
        self.model, self.batches = model, usable_batches(model, batches)
        self.steps = checked_steps(STEPS if steps is None else steps)
        if changing := [step.method for step in self.steps if step.comes_first]:
            raise ValueError(
                f"{changing[0]} changes the model in high precision, and a merge rounds into the scheme that the base "
                "has; accepted: steps that round, such as [GPTQ(), LearnedRounding(over='model')]"
            )
        self.sums: list[_Sum] = []

    def vectors(self) -> list[_Kept]:
        """The norms and biases, where a step learns them."""
        learns = any(isinstance(s, LearnedRounding) and s.vector_rate for s in self.steps)
        return [_Kept([p for p in self.model.parameters() if p.ndim < 2])] if learns else []

    def run(self, sums: list[_Sum], report: MergeReport) -> None:
        """Give the weights the values that the steps find, if these lose less than those rounded to nearest."""
        self.sums = sums
        vectors = self.vectors()
        nearest = [s.held.detach().clone() for s in sums]
        own = [s.loss for s in self.steps if isinstance(s, LearnedRounding) and s.over == "model"]
        loss = own[-1] if own else None
        with torch.compiler.set_stance("force_eager"), eval_mode(self.model):
            with self._base():
                without = self._measured(loss)
            requantized = self._measured(loss)
            report.calibration = self._calibrated()
            learned = self._measured(loss)
        kept = learned < requantized
        report.losses = MergeLosses(without, requantized, learned, kept)
        if not kept:
            with torch.no_grad():
                for s, values in zip(sums, nearest, strict=True):
                    s.held.copy_(values)
            for each in vectors:
                each.restore()
        for s in sums:
            assert s.before is not None
            one, before = report.layers[s.at], _values(s.before.weight(s))
            report.layers[s.at] = _result(one.name, s.held, s.values, before)

    def _calibrated(self) -> CalibrationReport:
        found = {id(m): name for name, m in self.model.named_modules()}
        starts: dict[str, Start] = {}
        schemes: dict[str, Scheme] = {}
        try:
            for s in self.sums:
                name = f"{found[id(s.layer.get_base_layer())]}.{_attribute(s.layer)}"
                starts[name] = Start(s.held, s.values)
                schemes[name] = Scheme(s.held.spec)
                plain = s.values.to(s.held.dtype)
                s.put(nn.Parameter(plain, requires_grad=False))
            run = Run(
                *(self.model, schemes, None, self.steps, self.batches, ("squared_error", 99.99)),
                starts=starts,
                reference=self._reference,
            )
            return run.quantize(None, torch.device("cpu"))
        finally:
            for s in self.sums:
                s.put(s.held)

    def _measured(self, loss: Any) -> float:
        block = block_of(self.model, self.batches)
        block.high = self._reference
        seen, held_out = mean_losses(block, loss)
        return seen if held_out is None else held_out

    def _reference(self, number: int) -> Any:
        """The output of the base with its adapters beside it."""
        with ExitStack() as stack:
            for s in self.sums:
                stack.enter_context(_apart(s.layer))
            stack.enter_context(self._base())
            return call(self.model, self.batches[number])

    @contextmanager
    def _base(self) -> Iterator[None]:
        """The context in which the base layers have their weights and biases from before the merge."""
        kept = [(s, s.before) for s in self.sums if s.before is not None]
        held = [getattr(s.layer.get_base_layer(), _attribute(s.layer)) for s, _ in kept]
        try:
            for s, before in kept:
                s.put(before.weight(s))
            with originals((), [pair for s, before in kept for pair in before.biases(s)]):
                yield
        finally:
            for (s, _), weight in zip(kept, held, strict=True):
                s.put(weight)


@contextmanager
def _apart(layer: Any) -> Iterator[None]:
    """The context in which the adapters of a merged layer are beside its weight."""
    merged = list(layer.merged_adapters)
    layer.merged_adapters.clear()
    try:
        yield
    finally:
        layer.merged_adapters.extend(merged)


def _check_base(name: str, layer: Any, learns: bool) -> None:
    weight = getattr(layer.get_base_layer(), _attribute(layer), None)
    own: Any = local(weight)
    if isinstance(own, TrainableTensor) and own.updated_in_place() is None:
        raise NotImplementedError(
            f"{name} holds {type(own).__name__}, which trains in low bits, and PEFT would add the adapters to it by "
            "a rounding that no report states; call lowbit.train.convert_(model) for a weight that merge_ rounds, or "
            "lowbit.train.restore_(model) for a plain one, before merging"
        )
    if not learns or not isinstance(own, AffineTensor):
        return
    in_shards = weight is not own
    if in_shards or type(own) is not representation_of(own.spec):
        raise NotImplementedError(
            f"{name} holds {type(own).__name__}{' in shards' if in_shards else ''}, whose rounding no step "
            "learns; accepted: weights of linears and stacked experts as lowbit.quantize_ makes them, without "
            "act-order and rotations. Merge without batches, which rounds to nearest"
        )


def _check_shared(model: nn.Module, layers: dict[str, Any]) -> None:
    owners = find_owners(model)
    for name, layer in layers.items():
        weight = getattr(layer.get_base_layer(), _attribute(layer), None)
        held = owners.get(id(weight), [])
        if isinstance(weight, AffineTensor) and len(held) > 1:
            raise NotImplementedError(
                f"{name} shares its weight, which is {' and '.join(owner.fqn for owner in held)}, and the adapter is "
                "beside one of them; untie them, or merge without batches, which changes both"
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
    """Parameters before a merge.

    Args:
        parameters: copied.
        layer: of PEFT, whose base layer has them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], layer: Any = None) -> None:
        self.layer = layer
        self.tensors = [(p, p.detach().clone()) for p in parameters]

    @classmethod
    def of_layer(cls, layer: Any) -> _Kept:
        own = layer.get_base_layer()._parameters.items()
        names = (_attribute(layer), "bias")
        return cls([p for name, p in own if p is not None and name in names], layer)

    def weight(self, of: _Sum) -> Any:
        """What the weight of a sum was."""
        found = next(t for p, t in self.tensors if p is of.held)
        return nn.Parameter(found, requires_grad=False)

    def biases(self, of: _Sum) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters beside the weight of a sum, with what they were. LoRA with `lora_bias` and IA3 change them."""
        return [(p, t) for p, t in self.tensors if p is not of.held]

    def restore(self) -> None:
        with torch.no_grad():
            for param, before in self.tensors:
                param.copy_(before)
        if self.layer is not None:
            self.layer.merged_adapters.clear()
