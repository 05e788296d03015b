"""calibrate: quantize a trained model, with scales and codes that fit the inputs of its layers.

    report = lowbit.calibrate(model, Int4WeightOnly(32), batches, steps=[GPTQ()])

Each weight is replaced by the ordinary quantized tensor, as `lowbit.quantize_` makes it: the codes and scales are
better, and all else, such as kernels and checkpoints, is the same. A step is an algorithm: `Search`, `GPTQ`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit import calibration as observed
from lowbit.convert import (
    Filter,
    Schemes,
    Target,
    check_module,
    find_targets,
    is_conv,
    is_turned,
    joint_parts,
    replace_weights,
    rounding_owners,
    shape_of_blocks,
)
from lowbit.inference.calibration.gptq import GPTQ
from lowbit.inference.calibration.inputs import Moments
from lowbit.inference.calibration.learned_rounding import Block, LearnedRounding, Weight, originals
from lowbit.inference.calibration.report import CalibrationReport, LayerResult
from lowbit.inference.calibration.search import Search
from lowbit.inference.calibration.stages import Group, Needs, block_of, walk
from lowbit.inference.calibration.step import Layer, Step
from lowbit.layers.static_input import input_qparams, take_input
from lowbit.progress import progress
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor
from lowbit.tensor.frozen.rotated_tensor import RotatedTensor
from lowbit.tracing.batches import call, eval_mode, on_device_of, output_tensor
from lowbit.tracing.observer import Method

Ranges = AbstractContextManager[dict[str, tuple[float, float]]]


@overload
def calibrate(
    model: nn.Module,
    scheme: Schemes | None = None,
    batches: Filter | None = None,
    filter_fn: Filter | None = None,
    *,
    method: Method = ...,
    percentile: float = ...,
    group: dist.ProcessGroup | None = ...,
) -> Ranges: ...
@overload
def calibrate(
    model: nn.Module,
    scheme: Schemes,
    batches: Iterable[Any],
    filter_fn: Filter | None = None,
    *,
    steps: Sequence[Step] | None = ...,
    blocks: Iterable[nn.Module] | None = ...,
    cache: torch.device | str | None = ...,
    method: Method = ...,
    percentile: float = ...,
) -> CalibrationReport: ...
def calibrate(
    model: nn.Module,
    scheme: Schemes | None = None,
    batches: Iterable[Any] | Filter | None = None,
    filter_fn: Filter | None = None,
    *,
    steps: Sequence[Step] | None = None,
    blocks: Iterable[nn.Module] | None = None,
    cache: torch.device | str | None = "cpu",
    method: Method = "squared_error",
    percentile: float = 99.99,
    group: dist.ProcessGroup | None = None,
) -> Ranges | CalibrationReport:
    """Quantize `model` in place by data; or, without `batches`, find the static scales of activations in a context.

        report = lowbit.calibrate(model, scheme, batches, steps=[GPTQ()])   # all is done when it returns

        with lowbit.calibrate(model, scheme):                               # then quantize_ or qat.prepare_
            for batch in batches:
                model(batch)

    With batches: `scheme` and `filter_fn` choose weights as in `lowbit.quantize_`. The steps run on one weight after
    another, in the order in which the model calls them, so that each sees the inputs that the weights before it,
    rounded already, give. Static scales of activations are found first, by the same batches. The model runs in eval
    mode. Beside the model it holds the hidden states of all batches at one block, the Hessians of a few weights, and,
    where a step compares with the model in high precision (`GPTQ`), these states twice and a copy of one block.

    In the context: see `lowbit.calibration`. A filter may also be the third argument there.

    Args:
        model: a plain model; in the context also a prepared one.
        scheme, filter_fn: those of `lowbit.quantize_`.
        batches: each is a mapping of keyword arguments, a tuple or list of arguments, or one argument of the model, on
            any device. They may differ in shape. Tokens whose `attention_mask` is 0 don't count. Read once, and kept.
        steps: algorithms, in this order; None: [GPTQ()].
        blocks: modules that follow each other, e.g. `model.model.layers`. None finds the largest chain; [] takes the
            model as one block.
        cache: where hidden states are kept; None: where the model makes them.
        method, percentile: how static ranges are chosen (`lowbit.calibration.calibrate`).
        group: for the context alone: the process group whose ranks see different batches.

    Returns:
        The report of the conversion, with each layer's method, time and error before and after; in the context form a
        context, whose value is the dict of ranges by name.

    Raises:
        TypeError: batches or steps of another kind; no module; no scheme.
        ValueError: what `quantize_` refuses; no batches; NaN or infinite inputs of a layer, which is named. Weights
            that were calibrated before that layer are then quantized, and the others plain, as the message says.
    """
    if batches is None or callable(batches):
        return _context(model, scheme, batches, filter_fn, steps, blocks, method, percentile, group)
    check_module(model)
    if group is not None:
        raise ValueError(
            "group is for `with lowbit.calibrate(model, scheme):`; a call with batches runs on one process"
        )
    if scheme is None:
        raise TypeError("scheme must be a Scheme or a dict of patterns, got None")
    given: Any = [GPTQ()] if steps is None else steps
    chosen: list[Step] = list(given) if isinstance(given, Iterable) else []
    if not chosen or not all(isinstance(step, Step) for step in chosen):
        raise TypeError(
            f"steps must be a list of steps, such as [lowbit.inference.GPTQ()], got {steps!r}"
        )
    run = _Run(model, scheme, filter_fn, chosen, _on_device_of(model, batches))
    run.fold()
    run.find_static(method, percentile)
    return run.quantize(
        None if blocks is None else list(blocks), None if cache is None else torch.device(cache)
    )


def _context(
    model: nn.Module,
    scheme: Schemes | None,
    batches: Filter | None,
    filter_fn: Filter | None,
    steps: Any,
    blocks: Any,
    method: Method,
    percentile: float,
    group: dist.ProcessGroup | None,
) -> Ranges:
    """The context of `lowbit.calibration`, for a call without batches."""
    if steps is not None or blocks is not None:
        raise TypeError("steps and blocks need batches: calibrate(model, scheme, batches, steps=…)")
    own = filter_fn if batches is None else batches
    return observed.calibrate(model, scheme, own, method=method, percentile=percentile, group=group)


def _on_device_of(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """The batches, on the device of the model's first parameter. Raises ValueError if there is none."""
    moved = [on_device_of(model, batch) for batch in batches]
    kept = [batch for batch in moved if not _is_empty(batch)]
    if not kept:
        raise ValueError(
            f"calibrate was given {len(moved)} batches, none of which has elements; accepted: one or more, a few "
            "thousand tokens in all"
        )
    return kept


def _is_empty(batch: Any) -> bool:
    """True if the batch's first tensor has no element, or the batch no entry."""
    entries = list(batch.values()) if isinstance(batch, dict) else batch
    if isinstance(entries, Tensor):
        return entries.numel() == 0
    if not isinstance(entries, list | tuple):
        return False
    return not entries or (isinstance(entries[0], Tensor) and entries[0].numel() == 0)


class _Run:
    """One calibration of a model."""

    def __init__(
        self,
        model: nn.Module,
        scheme: Schemes,
        filter_fn: Filter | None,
        steps: list[Step],
        batches: list[Any],
    ) -> None:
        self.model, self.scheme, self.filter_fn = model, scheme, filter_fn
        self.batches = batches
        self.steps = [s for s in steps if not isinstance(s, LearnedRounding)]
        learned = [s for s in steps if isinstance(s, LearnedRounding)]
        self.over_blocks = [s for s in learned if s.over == "blocks"]
        self.over_model = [s for s in learned if s.over == "model"]
        if steps != [*self.steps, *self.over_blocks, *self.over_model]:
            raise ValueError(
                "steps that learn the rounding come last, over blocks before over the model, got "
                f"{', '.join(step.method for step in steps)}"
            )
        self.began = time.perf_counter()
        self.needs = Needs(
            any(s.needs == "full" for s in self.steps),
            any(s.pairs for s in self.steps),
            bool(self.over_blocks),
        )
        if learned and not self.steps:
            self.steps = [Search()]
        self.learned = learned
        self.waiting: list[Weight] = []
        """Rounded weights whose parameters are plain, since steps may still change them."""
        self.targets, found = find_targets(model, scheme, filter_fn)
        for target in self.targets:
            _check_scales(target, learned)
        self.report = CalibrationReport(entries=found.entries)
        self.total = len(self.targets)
        self.methods: dict[str, list[str]] = {}
        """The steps of each weight, as the report names them."""

    def fold(self) -> None:
        """Let the steps change the model in high precision."""
        for step in [*self.steps, *self.learned]:
            notes = step.fold(self.model, self.targets, self.batches)
            for target in self.targets:
                own = [notes[id(o.module)] for o in target.owners if id(o.module) in notes]
                method = f"{step.method} {own[0]}" if own else step.method
                self.methods.setdefault(target.owners[0].fqn, []).append(method)

    def find_static(self, method: Method, percentile: float) -> None:
        """Find the static scales of inputs, where the scheme has them."""
        if not any(target.scheme.is_static for target in self.targets):
            return
        with eval_mode(self.model), torch.no_grad():
            context = observed.calibrate(
                self.model, self.scheme, self.filter_fn, method=method, percentile=percentile
            )
            with context:
                for batch in self.batches:
                    call(self.model, batch)

    def quantize(
        self, blocks: list[nn.Module] | None, cache: torch.device | None
    ) -> CalibrationReport:
        modules = {owner.module for target in self.targets for owner in target.owners}
        joint = joint_parts(self.targets)
        vectors = [(p, p.data) for p in self.model.parameters() if p.ndim < 2]
        eager = torch.compiler.set_stance("force_eager")
        shown = progress("calibrating", self.total, unit="layers")
        with eval_mode(self.model), eager, torch.no_grad(), shown as advance:
            try:
                for place in walk(
                    self.model, self.targets, self.batches, self.needs, blocks, cache
                ):
                    if isinstance(place, Block):
                        self._learn(place)
                        continue
                    self._check_finite(place)
                    while place.targets:
                        target, moments = place.targets.pop(0), place.moments.pop(0)
                        self._round(target, moments, joint.get(target.owners[0].fqn))
                        del target
                        advance(1)
                for step in self.over_model:
                    whole = block_of(self.model, self.batches)
                    whole.vectors = vectors
                    self.report.learned.append((whole.name, step.learn(whole, self.waiting)))
                self._replace()
            except BaseException:
                # Weights whose rounding is to be learned look plain, and would keep rounded values.
                for weight in self.waiting:
                    weight.target.weight.data = weight.original
                raise
        take_input(modules)
        self.report.seconds = time.perf_counter() - self.began
        return self.report.count(self.model)

    def _check_finite(self, group: Group) -> None:
        for target, moments in zip(group.targets, group.moments, strict=True):
            if not moments.is_finite:
                done = len(self.report.layers) - len(self.waiting)
                raise ValueError(
                    f"the inputs of {target.owners[0].fqn} have NaN or infinite values, or too large ones to square. "
                    f"{done} of {self.total} weights are quantized already, the others are plain. "
                    "Find the batch that gives them, and load the model again"
                )

    def _round(self, target: Target, moments: Moments, joint: Tensor | None) -> None:
        """Run the steps on this weight, and replace it, or leave its values to those that learn."""
        layer = _layer(target, moments, joint)
        began = time.perf_counter()
        before = layer.error(layer.rounded(layer.minmax()))
        for step in self.steps:
            step.apply(layer)
        weight = Weight(target, layer)
        seconds = time.perf_counter() - began
        rows = moments.total + moments.looked_up
        unreached = moments.rows.count(0) if moments.stack and rows else 0
        after = layer.error(weight.values)
        method = ", ".join(self.methods[layer.name])
        self.report.layers[layer.name] = LayerResult(
            layer.name, method, seconds, before, after, rows, unreached
        )
        self.waiting.append(weight)
        if not self.over_blocks and not self.over_model:
            self._replace()
        else:
            weight.show(weight.values)

    def _learn(self, block: Block) -> None:
        """Learn the rounding of a block, whose weights are rounded."""
        inside = {id(p) for p in block.module.parameters()}
        own = [w for w in self.waiting if id(w.target.weight) in inside]
        with originals(own):
            block.targets = [output_tensor(block.high(i)) for i in range(block.count)]
        if own:
            for step in self.over_blocks:
                self.report.learned.append((block.name, step.learn(block, own)))
        if not self.over_model:
            self._replace()

    def _replace(self) -> None:
        """Replace the weights that wait by quantized ones."""
        while self.waiting:
            weight = self.waiting.pop(0)
            entries = len(self.report.entries)
            make = partial(_made, weight)
            replace_weights([weight.target], self.report, make, trainable=False)
            first = self.report.entries[entries]
            note = f"{first.note}; {self.report.layers[weight.name]}"
            self.report.entries[entries] = replace(first, note=note)


def _check_scales(target: Target, learned: Sequence[LearnedRounding]) -> None:
    """Raise ValueError for scales that follow from the weight alone, and for those that no file would hold."""
    spec = target.scheme.weight
    if spec.scale_format == "super_block" and any(step.scale_rate for step in learned):
        raise ValueError(
            f"{target.owners[0].fqn}: scales of K-quants stand on a grid of their own, which learning leaves; take "
            "LearnedRounding(scale_rate=0)"
        )
    if not spec.is_searchable:
        raise ValueError(
            f"{target.owners[0].fqn}: {spec} stores scales as {spec.scale_format!r}, which no calibration chooses; "
            "take scale_format='float', e.g. NF4WeightOnly(double_quantization=False), or lowbit.quantize_"
        )


def _layer(target: Target, moments: Moments, joint: Tensor | None) -> Layer:
    """The weight as a matrix, or several, for the steps."""
    spec, plain = target.scheme.weight, target.weight.detach()
    matrix = plain.mT if is_turned(target) else plain.reshape(shape_of_blocks(target))
    if joint is None and spec.scales is not None and spec.scales.joint is not None:
        joint = spec.joint_part([matrix], torch.float32)
    dtype = spec.scale_dtype_for(plain.dtype)
    wide = matrix.float().contiguous()
    return Layer(target.owners[0].fqn, wide, spec, dtype, moments, joint)


def _made(weight: Weight, target: Target) -> Tensor:
    """The quantized weight."""
    activation = target.scheme.activation
    of_input = None
    if activation is not None and activation.static:
        of_input = input_qparams(rounding_owners(target)[0].module, activation)
    qparams, joint = weight.qparams, weight.joint
    made = AffineTensor.from_float(weight.values, target.scheme, qparams, of_input, joint)
    made = made._with(dtype=weight.original.dtype)
    if weight.rotation > 1:
        return RotatedTensor.of_matrix(made, weight.rotation)
    if is_conv(target):
        return ConvTensor.of_matrix(made, weight.original.shape)
    return made._transposed() if is_turned(target) else made
