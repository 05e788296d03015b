"""One run of `lowbit.calibrate`: the steps on each weight, in the order of `walk`, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit import calibration as observed
from lowbit.convert import (
    Choice,
    Filter,
    Schemes,
    Target,
    find_targets,
    is_conv,
    joint_parts,
    replace_weights,
    watch_joined,
)
from lowbit.inference.calibration.batches import MASK, Batches, mask_of
from lowbit.inference.calibration.held_out import HeldOutLosses, MinMax
from lowbit.inference.calibration.inputs import Moments
from lowbit.inference.calibration.kv_cache import (
    CacheFormat,
    check_cache,
    no_cache,
    observing_caches,
)
from lowbit.inference.calibration.learned_rounding import Block, LearnedRounding, Losses
from lowbit.inference.calibration.learned_weight import Weight, originals
from lowbit.inference.calibration.places import Group, Needs
from lowbit.inference.calibration.pruning import Prune24
from lowbit.inference.calibration.report import (
    CalibrationReport,
    LayerResult,
    held_out_note,
    some_names,
)
from lowbit.inference.calibration.rotation import LEFT, Rotate
from lowbit.inference.calibration.rounded_weight import (
    affine,
    by_minmax,
    in_place_of,
    is_divisible,
    joined,
    layer_of,
    made,
    some_experts,
)
from lowbit.inference.calibration.search import Search
from lowbit.inference.calibration.stages import (
    Entered,
    HeldOut,
    Left,
    Stage,
    StageMemory,
    block_of,
    walk,
)
from lowbit.inference.calibration.states import Cache
from lowbit.inference.calibration.step import Layer, Start, Step
from lowbit.layers.cache_scales import KEY, held_in
from lowbit.layers.static_input import take_input
from lowbit.progress import progress
from lowbit.tensor.core.checks import check_weight
from lowbit.tracing.batches import call, eval_mode, output_tensor, uncached_autocast
from lowbit.tracing.block_inputs import forward_of
from lowbit.tracing.observer import Method

if TYPE_CHECKING:
    from lowbit.formats.folder import Folder


class Run:
    """One calibration of a model.

    Args:
        model, scheme, filter_fn: those of `find_targets`.
        steps: in their order.
        batches: those of this process.
        method: how static ranges are chosen.
        memory: brings weights into memory.
        starts: by name, the low-bit weights whose new values stand in the model; they get the results.
        reference: gives the outputs for a batch, by its number, that learning over the model aims at; None: those of
            the model in high precision.
        kv_cache: that of `lowbit.calibrate`.

    Raises what `find_targets` raises, and ValueError for steps in another order, schemes that no step searches, a
    `method` without static activations, steps that do not run in several processes, and processes that differ in more
    than batches.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: Schemes,
        filter_fn: Filter | Choice | None,
        steps: Sequence[Step],
        batches: Batches,
        method: Method,
        memory: StageMemory | None = None,
        starts: Mapping[str, Start] | None = None,
        reference: Callable[[int], Any] | None = None,
        kv_cache: CacheFormat | None = None,
    ) -> None:
        self.model, self.batches, self.method = model, batches, method
        self.starts, self.reference = starts or {}, reference
        self.memory = StageMemory() if memory is None else memory
        self.steps = [s for s in steps if not isinstance(s, LearnedRounding)]
        learned = [s for s in steps if isinstance(s, LearnedRounding)]
        self.over_blocks = [s for s in learned if s.over == "blocks"]
        self.over_model = [s for s in learned if s.over == "model"]
        if list(steps) != [*self.steps, *self.over_blocks, *self.over_model]:
            raise ValueError(
                "steps that learn the rounding come last, over blocks before over the model, got "
                f"{', '.join(step.method for step in steps)}"
            )
        _check_folds(steps)
        if batches.ranks.group is not None:
            _check_in_ranks(steps)
        check_cache(kv_cache, model, in_blocks=memory is not None)
        self.kv_cache = kv_cache
        self.began = time.perf_counter()
        if learned and not self.steps and not self.starts:
            self.steps = [Search()]
        self.waiting: list[Weight] = []
        """Rounded weights whose parameters are plain, since steps may still change them."""
        self.targets, found = find_targets(model, scheme, filter_fn)
        for target in self.targets:
            if target.fqn not in self.starts:
                _check_scales(target)
        new = [t for t in self.targets if t.fqn not in self.starts]
        self.begun = [(step, step.begin(new)) for step in (*self.steps, *learned)]
        """The steps on layers and those that learn, each with its notes by the id of a module."""
        listed = [(t.fqn, tuple(t.weight.shape), str(t.scheme)) for t in self.targets]
        given = {"weights or schemes": listed, "steps": [str(step) for step in steps]}
        in_memory = model if memory is None else None
        batches.ranks.begin(in_memory, given | {"choice of ranges": method, "kv_cache": kv_cache})
        self._check_read(bool(learned))
        self.report = CalibrationReport(entries=found.entries)
        self.total = len(self.targets)
        self.methods: dict[str, list[str]] = {}
        """The steps of each weight, as the report names them."""
        self.joint: dict[str, Tensor] = {}
        """What the scales of siblings share, by the name of each weight."""
        self.varied: list[str] = []
        """Weights that some batch multiplies more often than was foreseen."""
        self.held: set[str] = set()
        self.minmax = MinMax(keeps=not self.memory.streams)
        self.advance: Callable[[int], None] = lambda count: None

    def _check_read(self, learns: bool) -> None:
        """Raise ValueError for a choice of ranges without any, and for batches held out that no step is held to."""
        has_static = self.kv_cache is not None or any(t.scheme.is_static for t in self.targets)
        if self.method != "squared_error" and not has_static:
            raise ValueError(
                "method: for static activations, which no weight's scheme has; accepted: none, or e.g. "
                "lowbit.Int8StaticActivationInt8Weight(), or kv_cache='float8'"
            )
        if self.batches.held_out and (learns or not self.steps):
            raise ValueError(
                "held_out is for steps on layers, such as Search() and GPTQ(): LearnedRounding holds out one sequence "
                "in eight itself, and rounding to nearest, steps=[], is what they are compared with; leave out held_out"
            )

    def check_without_data(self) -> None:
        """Raise ValueError for a step or scheme that needs batches."""
        static = [t.fqn for t in self.targets if t.scheme.is_static]
        steps = [s for s in self.steps if s.folds]
        found = [s.method for s in (*steps, *self.over_blocks, *self.over_model)]
        found += [f"the static input of {name}" for name in static[:1]]
        found += [f"kv_cache={self.kv_cache!r}"] if self.kv_cache else []
        if found:
            raise ValueError(
                f"{', '.join(found)}: needs batches, calibrate(model, scheme, batches, steps=…); without them "
                "calibrate takes the steps GPTQ, Prune24, Rotate(folded=False) and Search, and dynamic inputs"
            )

    def quantize(self, blocks: Sequence[nn.Module] | None, cache: Cache) -> CalibrationReport:
        """Quantize all weights. Args: those of `lowbit.calibrate`."""
        modules = {owner.module for target in self.targets for owner in target.owners}
        shown = progress("calibrating", self.total, unit="layers")
        eager = torch.compiler.set_stance("force_eager")
        with uncached_autocast(), eager, shown as self.advance:
            if not self.memory.streams:
                self.memory.bring(None)
                seen = Batches(self.batches[: self.batches.seen], self.batches.ranks)
                self._fold(self.targets, seen)
                self._find_static(self.targets, seen)
            self._quantize(blocks, cache)
        take_input(modules)
        if self.kv_cache and not held_in(self.model):
            raise no_cache(self.model)
        self.report.notes = self.notes()
        self.report.seconds = time.perf_counter() - self.began
        watch_joined(self.model)
        return self.report.count(self.model)

    def _quantize(self, blocks: Sequence[nn.Module] | None, cache: Cache) -> None:
        vectors = [(p, p.data) for p in self.model.parameters() if p.ndim < 2]
        with eval_mode(self.model), torch.no_grad():
            try:
                for stage in walk(
                    *(self.model, self.targets, self.batches, self._needs(cache), blocks, cache),
                    self.memory,
                ):
                    self._take(stage)
                for step in self.over_model:
                    whole = block_of(self.model, self.batches)
                    whole.vectors = vectors
                    whole.high = self.reference or whole.high
                    self.report.learned.append((whole.name, step.learn(whole, self.waiting)))
                self._replace()
                if self.over_model:
                    self.memory.finish("after")
            except BaseException:
                # Weights whose rounding is to be learned look plain, and would keep rounded values.
                for weight in self.waiting:
                    weight.target.weight.data = weight.original
                raise

    def notes(self) -> list[str]:
        """What a reader of the report should know of many layers together."""
        layers, found = self.report.layers.values(), []
        if alone := [layer.name for layer in layers if LEFT in layer.method]:
            found.append(f"Rotate left the inputs of {some_names(alone)} as they are")
        if pruned := [layer.name for layer in layers if layer.zeros]:
            dense = len(layers) - len(pruned)
            found.append(f"pruned to 2 of 4 inputs: {some_names(pruned)}; left dense: {dense}")
        if self.kv_cache:
            cached = [n.rpartition(".")[0] for n in held_in(self.model) if n.endswith(KEY)]
            found.append(
                f"{self.kv_cache} scales of the keys and values that {some_names(cached, 'layers')} cache"
            )
        if self.varied:
            found.append(
                f"{some_names(self.varied)}: a batch multiplies them another number of times than the block before "
                "did, so that not all of their inputs were counted; blocks=[] and GPTQ(asymmetric=0) count all"
            )
        if self.report.held_out:
            found.append(
                held_out_note(self.report.held_out, self.batches.held_out, self.batches.total)
            )
        if self.batches.held_out and not (self.memory.streams or "the model" in self.held):
            rest = "its blocks alone were" if self.held else "nothing was"
            found.append(
                f"the model's outputs hold no floats, so that {rest} compared on the batches held out; held_out=[] "
                "lets the steps see all batches"
            )
        short = [layer.name for layer in layers if layer.has_few_rows]
        if short and any(step.needs == "full" for step in self.steps):
            found.append(
                f"{some_names(short)} saw fewer tokens than inputs, so that no Hessian of theirs has full rank: "
                "give more or longer batches"
            )
        return found

    def _needs(self, cache: Cache) -> Needs:
        entered = self.memory.streams and (
            self.kv_cache is not None
            or any(target.scheme.is_static for target in self.targets)
            or any(step.folds for step in self.steps)
        )
        return Needs(
            any(s.needs == "full" for s in self.steps),
            bool(self.batches.total) and any(s.pairs for s in self.steps),
            bool(self.over_blocks),
            entered,
            self.batches.held_out > 0,
            cache if isinstance(cache, Path) else None,
        )

    def _take(self, stage: Stage) -> None:
        if isinstance(stage, Entered):
            self._enter(stage)
        elif isinstance(stage, Block):
            self._learn(stage)
        elif isinstance(stage, HeldOut):
            self.held.add(stage.block.name)
            self._hold(stage)
        elif isinstance(stage, Left):
            self.minmax.weights = []  # of a place whose outputs hold nothing to compare
            self.varied += sorted(set().union(*self.batches.ranks.gathered(set(stage.varied))))
            if not self.over_model:
                self._replace()
                self.memory.finish(stage.place)
        else:
            self._check_finite(stage)
            while stage.targets:
                target, moments = stage.targets.pop(0), stage.moments.pop(0)
                # The model may run under autocast. The steps compute in float32.
                with torch.autocast(target.weight.device.type, enabled=False):
                    self._round(target, moments, self.joint.get(target.fqn))
                del target
                self.advance(1)

    def _enter(self, place: Entered) -> None:
        """See the weights of a place in high precision. Without the whole model in memory, fold and observe here."""
        self.joint |= joint_parts(place.targets)
        if not self.memory.streams:
            return
        for target in place.targets:
            check_weight(target.weight, target.fqn)
        seen = self.batches[: self.batches.seen]
        numbers = [{"number": i, MASK: mask_of(batch)} for i, batch in enumerate(seen)]

        plain = self.model.forward

        def forward(number: int, attention_mask: Tensor | None = None) -> Any:
            with forward_of(self.model, plain):  # what follows the blocks runs the model
                return place.run(number)

        with forward_of(self.model, forward):
            ranks = self.batches.ranks
            self._fold(place.targets, Batches(numbers if place.folds else (), ranks))
            if not place.is_finished:
                self._find_static(place.targets, Batches(numbers, ranks), place.block)

    def _fold(self, targets: Sequence[Target], batches: Batches) -> None:
        """Let the steps change the model in high precision. No batches: name the steps of these weights alone."""
        for step, begun in self.begun:
            folds = step.folds and batches.total
            changed = step.fold(self.model, targets, batches) if folds else {}
            for target in targets:
                ids = [id(owner.module) for owner in target.owners]
                own = [notes[i] for notes in (changed, begun) for i in ids if i in notes]
                method = f"{step.method} {own[0]}" if own else step.method
                self.methods.setdefault(target.fqn, []).append(method)

    def _find_static(
        self, targets: Sequence[Target], batches: Batches, block: nn.Module | None = None
    ) -> None:
        """Find the static scales of inputs, where the scheme has them, and those of keys and values, if they are
        wanted. `block`: what runs; None: the model, or what lies outside of its blocks."""
        found, ranks = observed.layers_of(targets), batches.ranks
        caches = self.kv_cache is not None and (block is not None or not self.memory.streams)
        if not found and not caches:
            return
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))
            stack.enter_context(torch.no_grad())
            run: Callable[[Any], Any] = partial(call, self.model)
            if caches:
                run = stack.enter_context(observing_caches(self.model, block, self.method, ranks))
            if found:
                seen = observed.observing(self.model, found, self.method, ranks.group)
                stack.enter_context(seen)
            for batch in batches:
                run(batch)
            ranks.gathered(None)

    def _check_finite(self, group: Group) -> None:
        for target, moments in zip(group.targets, group.moments, strict=True):
            if not moments.is_finite:
                done = len(self.report.layers) - len(self.waiting)
                narrow = ""
                if target.weight.dtype is torch.float16:
                    narrow = (
                        "In float16, products beyond 65504 are infinite; in bfloat16 they are not. "
                    )
                raise ValueError(
                    f"the inputs of {target.fqn} have NaN or infinite values, or too large ones to square. {narrow}"
                    f"{done} of {self.total} weights are quantized already, the others are plain. "
                    f"{self.memory.way_out}"
                )

    def _round(self, target: Target, moments: Moments, joint: Tensor | None) -> None:
        """Run the steps on this weight, and replace it, or leave its values to those that learn."""
        start = self.starts.get(target.fqn)
        began = time.perf_counter()
        learns = bool(self.over_blocks or self.over_model)
        by_experts = start is None and not learns and joint is None and is_divisible(target)
        if by_experts and not any(isinstance(step, Prune24) for step in self.steps):
            self._round_experts(target, moments, began)
            return
        layer = layer_of(target, moments, joint, start)
        found, sums = self._stepped(target, layer, joint, start)
        zeros = [0.0 if layer.mask is None else _zeros(weight.values) for weight in found]
        results = self._results(target, moments, sums, zeros, began)
        self.report.layers[layer.name] = results[0]
        others = [made(other, target) for other in found[1:]]
        self.minmax.weights += [(target, *pair) for pair in zip(others, results[1:], strict=True)]
        self.waiting.append(found[0])
        if learns:
            found[0].show(found[0].values)
        else:
            self._replace()

    def _round_experts(self, target: Target, moments: Moments, began: float) -> None:
        """Run the steps on a few experts of a stack at a time, and replace it."""
        parts: list[list[Any]] = []
        sums: Any = 0
        for layer in some_experts(target, moments):
            found, own = self._stepped(target, layer, None)
            parts.append([affine(weight, target) for weight in found])
            sums = sums + own
            del layer, found  # before the next ones are made
        stacks = [in_place_of(joined(own, target), target) for own in zip(*parts, strict=True)]
        results = self._results(target, moments, sums, [0.0] * len(stacks), began)
        self.report.layers[target.fqn] = results[0]
        pairs = zip(stacks[1:], results[1:], strict=True)
        self.minmax.weights += [(target, *pair) for pair in pairs]
        self._put(target, lambda _: stacks[0])

    def _stepped(
        self, target: Target, layer: Layer, joint: Tensor | None, start: Start | None = None
    ) -> tuple[list[Weight], Tensor]:
        """Run the steps on a layer. `joint`: what siblings share.

        Returns the weight, and where batches are held out, that of min-max rounding after what the steps prune and
        rotate. Beside them the sums of `Layer.errors`, float64: the error by min-max before the steps, what all errors
        are divided by, and the error of each weight."""
        is_read = [isinstance(owner.module, nn.Embedding) for owner in target.owners]
        layer.is_embedding = any(is_read)
        if layer.moments.full and not self.batches.total and not all(is_read):
            groups: Any = target.owners[0].module.groups if is_conv(target) else 1
            layer.moments = Moments.of_weight(layer.weight, groups)
        before, whole = layer.errors(layer.rounded(layer.qparams or layer.minmax()))
        for step in self.steps:
            step.apply(layer)
        weight = Weight(target, layer, start)
        self.batches.ranks.alike(weight.values, *(t for t in weight.qparams if t is not None))
        found = [weight]
        if self.batches.held_out:
            found.append(by_minmax(target, layer, joint))
        errors = [layer.errors(weight.values)[0] for weight in found]
        return found, torch.tensor([before, whole, *errors], dtype=torch.float64)

    def _results(
        self,
        target: Target,
        moments: Moments,
        sums: Tensor,
        zeros: Sequence[float],
        began: float,
    ) -> list[LayerResult]:
        """What the report says of the weights that `_stepped` gives.

        Args:
            target, moments: of the weight.
            sums: those of `_stepped`.
            zeros: the shares of zeros of each, if it was pruned.
            began: when the steps on it did.
        """
        _, whole, *_ = sums.tolist()
        before, _, *after = (sums / whole if whole else sums.zero_()).tolist()
        rows = moments.total + moments.looked_up
        few = not moments.stack and 0 < moments.total < moments.size
        unreached = moments.rows.count(0) if moments.stack and rows else 0
        method = ", ".join(self.methods.get(target.fqn, ["to nearest"]))
        seconds, had_batches = time.perf_counter() - began, bool(self.batches.total)
        methods = [method, f"{method}, then min-max"][: len(after)]
        return [
            LayerResult(
                *(target.fqn, own, seconds, before, error, rows, unreached, few, share, had_batches)
            )
            for own, error, share in zip(methods, after, zeros, strict=True)
        ]

    def _hold(self, place: HeldOut) -> None:
        """Round weights by min-max where that is better for the batches held out."""
        if self.minmax.weights:
            losses, results = self.minmax.chosen(place)
        elif self.minmax.places:
            losses, results = self.minmax.chosen_together(place)
        else:
            return
        self.report.held_out.append((place.block.name, losses))
        entries = {entry.fqn: i for i, entry in enumerate(self.report.entries)}
        for new in results:
            old, at = self.report.layers[new.name], entries[new.name]
            self.report.layers[new.name] = new
            note = self.report.entries[at].note.replace(str(old), str(new))
            self.report.entries[at] = replace(self.report.entries[at], note=note)

    def _learn(self, block: Block) -> None:
        """Learn the rounding of a block, whose weights are rounded."""
        inside = {id(p) for p in block.module.parameters()}
        own = [w for w in self.waiting if id(w.target.weight) in inside]
        with originals(own):
            if block.keep is None:
                block.vectors = [(p, p.data) for p in block.module.parameters() if p.ndim < 2]
            elif block.targets is None:
                found = (output_tensor(block.high(i)) for i in range(block.count))
                block.targets = block.keep(found)
        if own:
            for step in self.over_blocks:
                self.report.learned.append((block.name, step.learn(block, own)))

    def _replace(self) -> None:
        """Replace the weights that wait by quantized ones."""
        while self.waiting:
            weight = self.waiting.pop(0)
            weight.show_wanted()  # what the report compares the new weight with
            self._put(weight.target, partial(made, weight))

    def check_export(self, format: str, lossy: bool, folder: Folder | None = None) -> None:
        """Raise the FormatError that writing the result will raise. Args: those of
        `lowbit.formats.foreseen.check_export`."""
        from lowbit.formats.foreseen import FormatError, check_export  # they import all formats
        from lowbit.formats.registry import target

        if self.kv_cache and not getattr(target(format), "holds_cache_scales", False):
            raise FormatError(
                f"{format} has no place for scales of a KV cache: leave out kv_cache, or take format="
                "'compressed-tensors', or 'lowbit'"
            )
        if format != "lowbit" and any(isinstance(s, Rotate) and s.online for s in self.steps):
            raise FormatError(
                f"{format} holds no weights whose products rotate their inputs: take Rotate(online=False), which folds "
                "rotations alone, or format='lowbit'"
            )
        if format != "lowbit" and any(isinstance(s, Prune24) and s.compressed for s in self.steps):
            raise FormatError(
                f"{format} holds no compressed 2:4 weights: take Prune24(compressed=False), whose zeros are codes, or "
                "format='lowbit'"
            )
        check_export(self.model, self.targets, format, lossy, folder)

    def put_back(
        self, targets: list[Target], weights: Mapping[str, Tensor], results: Mapping[str, Any]
    ) -> None:
        """Replace weights by those of an earlier run. `results`: what the report says of them, as `Finished` reads it.
        `targets` is emptied."""
        self.report.layers |= {one["name"]: LayerResult(**one) for one in results["layers"]}
        self.varied += results["varied"]
        for name, losses in results["learned"]:
            held_out = losses["held_out"] and tuple(losses["held_out"])
            learned = Losses(**(losses | {"held_out": held_out}))
            self.report.learned.append((name, learned))
        for name, losses in results["held_out"]:
            back = tuple(losses["back"])
            self.report.held_out.append((name, HeldOutLosses(**(losses | {"back": back}))))
        while targets:
            target = targets.pop(0)
            # A tied weight has the name that the folder gives it.
            self._put(target, lambda t: next(weights[o.fqn] for o in t.owners if o.fqn in weights))
            self.advance(1)

    def _put(self, target: Target, make: Callable[[Target], Tensor]) -> None:
        name, entries = target.fqn, len(self.report.entries)
        replace_weights([target], self.report, make, trainable=False)
        first = self.report.entries[entries]
        note = f"{first.note}; {self.report.layers[name]}"
        self.report.entries[entries] = replace(first, note=note)


def _zeros(values: Tensor) -> float:
    """The share of zeros."""
    return 1 - int(values.count_nonzero()) / max(values.numel(), 1)


def _check_folds(steps: Sequence[Step]) -> None:
    """Raise ValueError for a step that changes the model in high precision and comes after one that does not."""
    order = sorted(steps, key=lambda step: not step.comes_first)
    if order != list(steps):
        late = next(a for a, b in zip(order, steps, strict=True) if a is not b)
        raise ValueError(
            f"{late.method} changes the model in high precision, which comes before any weight is rounded, got steps "
            f"{', '.join(step.method for step in steps)}; give them as {', '.join(step.method for step in order)}"
        )


def _check_in_ranks(steps: Sequence[Step]) -> None:
    """Raise ValueError for a step that needs all batches in one process."""
    if alone := [step for step in steps if not step.in_ranks]:
        raise ValueError(
            f"{alone[0]} needs all batches in one process, got a process group; accepted with group=…: steps that read "
            "sums over batches, such as GPTQ, Search, LearnedRounding, AWQ, SmoothQuant, Prune24 and "
            "Rotate(folded=False)"
        )


def holding_out(held_out: Iterable[Any] | None, steps: Sequence[Step]) -> Iterable[Any] | None:
    """`held_out` of `usable_batches`, from that of `lowbit.calibrate`: without any, steps on layers are compared with
    rounding to nearest on a share of the batches, unless learning compares its own result."""
    is_compared = bool(steps) and not any(isinstance(step, LearnedRounding) for step in steps)
    return held_out if held_out is not None or is_compared else ()


def _check_scales(target: Target) -> None:
    """Raise ValueError for scales that follow from the weight alone."""
    spec = target.scheme.weight
    if not spec.is_searchable:
        raise ValueError(
            f"{target.fqn}: {spec} stores scales as {spec.scale_format!r}, which no calibration chooses; "
            "take scale_format='float', e.g. NF4WeightOnly(double_quantization=False), or lowbit.quantize_"
        )
