"""report: round one weight at a time, and measure what it costs.

    report = lowbit.qat.report(model, batches, [Int4WeightOnly(32), IntxWeightOnly(3, 32)])
    print(report)                                        # a table, the most sensitive weight first
    lowbit.qat.prepare_(model, report.plan(bits=4))      # more bits where they count

The model runs once in high precision, and once for each weight and scheme with this weight rounded as QAT rounds it
(its activations too, where the scheme has them). Rounding exchanges a parameter for a while and copies none. So the
measured model holds one rounded weight more than the plain one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor, nn

from lowbit.convert import Filter, Schemes, Target, check_module, find_targets
from lowbit.layers.exchange import Held, exchanged
from lowbit.numerics.code_range import within_range
from lowbit.numerics.learned_scales import codes_and_residual
from lowbit.numerics.snr import Energies
from lowbit.numerics.spec import Spec, crop
from lowbit.progress import progress as bar
from lowbit.qat.exchange import (
    check_dynamic,
    in_high_precision,
    learned_scales,
    plain_weight,
    prepared_targets,
    without_scales,
)
from lowbit.qat.tools.sensitivity import Sensitivity, SensitivityReport
from lowbit.qat.weights import in_model_order, prepared_weight
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.trained.quantizers import NO_SCALES, PRESENT, Quantizer
from lowbit.tracing.damage import Measure, damages

MOST_DECIBELS = 200.0


def report(
    model: nn.Module,
    batches: Iterable[Any],
    scheme: Schemes | Sequence[Schemes] | None = None,
    filter_fn: Filter | None = None,
    *,
    loss: Measure = None,
    progress: Callable[[int], None] | None = None,
) -> SensitivityReport:
    """Measure what the rounding of each weight alone costs.

    The model runs in eval mode without gradients. Afterwards it is as it was, to the bit: parameters, modes of its
    modules, buffers and random states. A compiled model runs eagerly here. A run costs one forward pass of the batches
    for each weight and scheme; a few batches are enough, as all runs see the same ones.

    Args:
        model: a plain model, or one that `lowbit.qat.prepare_` prepared.
        batches: each is a mapping of keyword arguments, a tuple or list of arguments, or one argument of the model; on
            its device. Read once.
        scheme: a `Scheme` or dict of patterns, as `lowbit.quantize_` takes it; or several, the candidates of
            `SensitivityReport.plan`. Weights of a prepared model are rounded as their plain ones, by present scales.
            None: the schemes, and the learned scales, of the prepared weights.
        filter_fn: that of `lowbit.quantize_`: by default every `nn.Linear`; embeddings, convolutions and experts as it
            chooses.
        loss: a function of model and batch, e.g. `lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])`.
            "kl": the divergence of the output's logits from those in high precision, in nats a row (a token; padding
            counts). "error": ‖y − ŷ‖² / ‖y‖² of the output y. None: the output's `loss` where it has one, else "kl" of
            its `logits`, else "error". The measure is the mean over batches.
        progress: called after each forward pass of a rounded weight, with the number of these so far. None: a bar on a
            terminal.

    Tied weights are rounded together, as one. `SensitivityReport` describes the result.

    Raises:
        NotImplementedError: a scheme with a static activation.
        TypeError: an output without a tensor, where no loss is given, or a loss that is not a number.
        ValueError: no batches; a batch whose measure in high precision is not finite; `scheme=None` for a model that
            is not prepared; errors of `lowbit.quantize_`.
    """
    check_module(model)
    plain = in_high_precision(prepared_targets(model))
    if scheme is not None:
        plain = [without_scales(held) for held in plain]
    with exchanged(plain if scheme is not None else ()):
        targets = _targets(model, scheme, filter_fn)
        check_dynamic(target for own in targets for target in own)
        candidates = [[_Rounding(target) for target in own] for own in targets]
        alone = [rounding for own in candidates for rounding in own]
        passes = [[rounding.held(watched=True)] for rounding in alone]
        passes += [[rounding.held(watched=False) for rounding in own] for own in candidates]
    known = operator.length_hint(batches) * len(passes) or None
    done = 0
    shown = bar("measuring weights", known, unit="passes", hidden=progress is not None)
    with shown as advance:

        def passed() -> None:
            nonlocal done
            done += 1
            advance(1)
            if progress is not None:
                progress(done)

        contexts = [
            partial(exchanged, [held for helds in rounded for held in helds]) for rounded in passes
        ]
        found = damages(
            model, batches, contexts, loss, high=partial(exchanged, plain), passed=passed
        )
    rows = tuple(rounding.row(mean) for rounding, mean in zip(alone, found.values, strict=False))
    return SensitivityReport(
        found.measure, found.baseline, rows=rows, together=found.values[len(alone) :]
    )


def _targets(
    model: nn.Module, scheme: Schemes | Sequence[Schemes] | None, filter_fn: Filter | None
) -> list[list[Target]]:
    """The weights to round, for each candidate scheme."""
    if scheme is not None:
        several = isinstance(scheme, Sequence)
        candidates: Any = scheme if several else [scheme]
        if not len(candidates):
            raise ValueError("report was given no schemes; accepted: one or more")
        return [
            [in_model_order(target) for target in find_targets(model, one, filter_fn)[0]]
            for one in candidates
        ]
    found = prepared_targets(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights; give report a scheme, such as "
            "lowbit.Int4WeightOnly(group_size=32), or call lowbit.qat.prepare_ first"
        )
    return [found]


# ---- one rounded weight ---------------------------------------------------------------------------------------


@dataclass
class _Tally(Energies):
    """The energies of the tensors that a watched spec rounded, and their number."""

    calls: int = 0

    def decibels(self) -> float:
        return max(-MOST_DECIBELS, min(super().decibels(), MOST_DECIBELS))


@dataclass(frozen=True)
class _WatchedSpec(Spec):
    """A Spec that notes when it rounds, and how far, if it is one of activations."""

    tally: _Tally = field(default_factory=_Tally, compare=False, repr=False)
    adds_up: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def of(cls, spec: Spec, tally: _Tally, adds_up: bool) -> _WatchedSpec:
        values = {f.name: getattr(spec, f.name) for f in fields(spec)}
        return cls(**values, tally=tally, adds_up=adds_up)

    def fake_quantize(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = super().fake_quantize(x, *args, **kwargs)
        self.tally.calls += 1
        if self.adds_up:
            self.tally.add(x, found)
        return found

    def quantize(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.tally.calls += 1
        return super().quantize(x, *args, **kwargs)

    def codes_and_values(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.tally.calls += 1
        return super().codes_and_values(x, *args, **kwargs)


class _Rounding:
    """One weight, rounded by one scheme: how modules hold it, and what is known of it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.weight_tally, self.activation_tally = _Tally(), _Tally()
        weight, scheme = plain_weight(target.weight), target.scheme
        if weight.is_meta:
            raise ValueError(f"{target.fqn} is on the meta device; accepted: a model with weights")
        parameters = learned_scales(target)
        self.learned = parameters
        own: Any = target.weight
        self.quantizer: Quantizer = PRESENT if parameters is None else own.quantizer
        tensor = prepared_weight(target, weight, scheme, self.quantizer)
        scales = NO_SCALES if parameters is None else (*parameters, None)
        frozen = tensor.frozen_by(scales)
        frozen_by = self.quantizer.frozen_options(tensor.rows(weight), scheme.weight, scales)
        self.nbytes, self.plain_nbytes = frozen.nbytes_stored(), weight.nbytes
        self.format = tensor.stored_format().removeprefix("QAT ")
        self.clipped = _clipped_share(tensor.rows(weight), scheme.weight, frozen_by)
        errors = _Tally()
        errors.add(weight, frozen.dequantize())
        self.weight_snr = errors.decibels()

    def held(self, watched: bool) -> list[Held]:
        """The modules with the rounded weight. `watched`: its products add to the tallies."""
        target, scheme = self.target, self.target.scheme
        if watched:
            activation = scheme.activation
            if activation is not None:
                activation = _WatchedSpec.of(activation, self.activation_tally, adds_up=True)
            watched_weight = _WatchedSpec.of(scheme.weight, self.weight_tally, adds_up=False)
            scheme = Scheme(watched_weight, activation)
        values = plain_weight(target.weight)
        own = prepared_weight(target, values, scheme, self.quantizer)
        rounded = nn.Parameter(own, requires_grad=False)
        return [
            Held(owner.module, type(owner.module), {owner.attribute: rounded})
            for owner in target.owners
        ]

    def row(self, loss: float) -> Sensitivity:
        first, *others = (owner.fqn for owner in self.target.owners)
        activations = self.activation_tally
        return Sensitivity(
            weight=first,
            tied=tuple(others),
            shape=tuple(self.target.weight.shape),
            scheme=self.target.scheme,
            format=self.format,
            nbytes=self.nbytes,
            plain_nbytes=self.plain_nbytes,
            weight_snr=self.weight_snr,
            activation_snr=activations.decibels() if activations.calls else None,
            clipped=self.clipped,
            loss=loss,
            reached=self.weight_tally.calls > 0,
        )


def _clipped_share(weight: Tensor, spec: Spec, frozen_by: dict[str, Any]) -> float:
    """The share of elements whose code, before the clamp, lies beyond the range. `frozen_by`: what the quantizer
    gives (`Quantizer.frozen_options`)."""
    scale, zero_point = frozen_by.get("qparams") or spec.choose_qparams(
        spec.pad(weight), spec.scale_dtype_for(weight.dtype)
    )
    codes, _ = codes_and_residual(weight, spec, scale, zero_point)
    fmt = spec.format
    inside = crop(within_range(codes, fmt.dtype, fmt.quant_min, fmt.quant_max), weight.shape)
    return 1.0 - float(inside.sum()) / max(inside.numel(), 1)
