"""calibrate: find the static scales of activations from batches that pass through the model.

    with lowbit.calibrate(model, scheme):        # a plain model, then quantize_ or qat.prepare_ with the same scheme
        for batch in batches:
            model(batch)

    with lowbit.calibrate(model):                # a model of qat.prepare_, before or during training
        ...

Inside the context, an `Observer` in each layer counts its inputs, and products do not round inputs. At the end the
ranks sum their statistics once, and each layer gets a scale, which stays or is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowbit.convert import Filter, Schemes, Target, check_module, find_targets, rounding_owners
from lowbit.layers import static_input
from lowbit.layers.frozen import shown_class
from lowbit.layers.prepared import rounds_input
from lowbit.numerics.learned_scales import learns_zero
from lowbit.numerics.spec import Spec
from lowbit.progress import progress
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.conv_tensor import CONVOLUTIONS
from lowbit.tracing.observer import Method, Observer, all_ranks, sum_over_ranks

_LEFT_ALONE = "_ddp_params_and_buffers_to_ignore"
"""Where DistributedDataParallel finds the names of buffers that it leaves alone. Otherwise each forward pass would
overwrite the statistics of all ranks by those of the first."""


class _Calibrated(NamedTuple):
    """The modules that share a weight, by their names, and the observer of their inputs."""

    names: list[str]
    modules: list[nn.Module]
    spec: Spec
    observer: Observer


@contextmanager
def calibrate(
    model: nn.Module,
    scheme: Schemes | None = None,
    filter_fn: Filter | None = None,
    *,
    method: Method = "squared_error",
    group: dist.ProcessGroup | None = None,
) -> Iterator[dict[str, tuple[float, float]]]:
    """Inside the context, count the inputs of all layers with a static activation; at its end, set their scales.

    `with … as ranges` gives a dict, filled at the end: the name of each layer to its range (low, high). A batch counts
    in the mode, train or eval, that the model has at the start: an evaluation in the midst of training changes nothing.
    Inside, products of a prepared model round weights but not inputs. If the context ends by an exception, the scales
    stay as they were. A calibration replaces an earlier one.

    Args:
        model: a plain model, or one of `lowbit.qat.prepare_`, sharded or not. To compile it, call `compile` afterwards.
        scheme, filter_fn: for a plain model, those that `quantize_` or `prepare_` will get. For a prepared model: None.
        method: how the range is chosen, "minmax" or "squared_error" (`lowbit.tracing.observer`).
        group: the process group whose ranks see different batches. None: the default group, if there is one. All ranks
            take part, with the same layers, and get the same scales.

    Raises:
        TypeError: not a module or not a scheme, as in `quantize_`; a filter without a scheme.
        ValueError: no layer has a static activation; at the end, a layer saw no batch, or NaN or infinite values. The
            scales of all layers are then as they were.
    """
    check_module(model)
    if scheme is None and filter_fn is not None:
        raise TypeError(
            f"filter_fn={filter_fn!r} without a scheme: a prepared model has its schemes, and all its layers are "
            "calibrated; leave it out"
        )
    found = prepared_layers(model) if scheme is None else _plain(model, scheme, filter_fn)
    with observing(model, found, method, group or all_ranks()) as ranges:
        yield ranges


Found = list[tuple[list[str], list[nn.Module], Spec]]
"""Names, modules and activation of each weight."""


@contextmanager
def observing(
    model: nn.Module,
    found: Found,
    method: Method,
    group: dist.ProcessGroup | None = None,
) -> Iterator[dict[str, tuple[float, float]]]:
    """The context of `calibrate` for layers that were found before. `group`: None for this process alone."""
    calibration = Calibration(model, found, method)
    ranges: dict[str, tuple[float, float]] = {}
    try:
        yield ranges
        ranges.update(calibration.finish(group))
    finally:
        calibration.remove()


class Calibration:
    """Observers in the layers of a model: what `calibrate` does, in steps.

    Args:
        model: the model, for error messages and DistributedDataParallel.
        found: names, modules and activation of each weight.
        method: that of `calibrate`.
        training: the mode whose batches count; None: the present mode of each layer.

    Raises ValueError if one of the layers has an observer already.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        method: Method,
        training: bool | None = None,
    ) -> None:
        if any(
            static_input.OBSERVER in module._modules
            for _, modules, _ in found
            for module in modules
        ):
            raise ValueError(
                f"{type(model).__name__} is being calibrated already: leave that context first, or call "
                "finish_observers() of its schedule"
            )
        self.watched = []
        for names, modules, spec in found:
            device = getattr(modules[0].weight, "device", None)
            observer = Observer(spec, method, device)
            mode = modules[0].training
            observer.begin(mode if training is None else training)
            observer.train(mode)
            self.watched.append(_Calibrated(names, modules, spec, observer))
        self.hooks = [hook for each in self.watched for hook in _watch(each)]
        self.model, self.left_alone = model, getattr(model, _LEFT_ALONE, None)
        names = [n for n, _ in model.named_buffers() if f"{static_input.OBSERVER}." in n]
        compiled = [f"_orig_mod.{name}" for name in names]
        setattr(model, _LEFT_ALONE, [*(self.left_alone or ()), *names, *compiled])

    @classmethod
    def of_training(cls, model: nn.Module, method: Method) -> Calibration:
        """The calibration of a prepared model on batches in train mode. Raises ValueError as `calibrate` does."""
        return cls(model, prepared_layers(model), method, training=True)

    def finish(
        self, group: dist.ProcessGroup | None = None, keep: bool = False
    ) -> dict[str, tuple[float, float]]:
        """Sum the statistics of the ranks, and set the scales. Returns the ranges by name.

        `group`: that of the ranks; None: this process alone.
        `keep`: known scales, such as loaded ones, stay if no rank saw a batch.

        Raises ValueError as `calibrate` does at its end.
        """
        observers = [each.observer for each in self.watched]
        if group is not None:
            sum_over_ranks(observers, group)
        modules = (module for each in self.watched for module in each.modules)
        saw_none = keep and not any(int(observer.batches) for observer in observers)
        if saw_none and all(static_input.is_known(module) for module in modules):
            return {}
        return _set_scales(self.watched)

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self.left_alone is None:
            self.model.__dict__.pop(_LEFT_ALONE, None)
        else:
            setattr(self.model, _LEFT_ALONE, self.left_alone)
        for each in self.watched:
            for module in each.modules:
                module._modules.pop(static_input.OBSERVER, None)


def prepared_layers(model: nn.Module) -> Found:
    """Names, modules and activation of each prepared weight with a static scale of its input."""
    found: dict[int, tuple[list[str], list[nn.Module], Spec]] = {}
    for name, module in model.named_modules():
        if rounds_input(module):
            spec: Any = module.input_spec
            names, modules, _ = found.setdefault(id(module.weight), ([], [], spec))
            names.append(name)
            modules.append(module)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no prepared weight with a static activation; for a plain model give the "
            "scheme that quantize_ or qat.prepare_ will get, e.g. lowbit.Int8StaticActivationInt8Weight()"
        )
    return list(found.values())


def _plain(model: nn.Module, scheme: Schemes, filter_fn: Filter | None) -> Found:
    targets, _ = find_targets(model, scheme, filter_fn)
    found = layers_of(targets)
    if not found:
        raise ValueError(
            f"{scheme} has no static activation to calibrate; accepted: e.g. "
            "lowbit.Int8StaticActivationInt8Weight(), or an activation Spec(…, PerTensor(), static=True)"
        )
    return found


def layers_of(targets: Sequence[Target]) -> Found:
    """The targets with a static activation. Raises ValueError for a module that may not multiply its input as it is."""
    found = []
    for target in targets:
        if isinstance(target.scheme, Scheme) and target.scheme.is_static:
            owners = rounding_owners(target)
            for owner in owners:
                _check_forward(owner.module, owner.fqn)
            names = [owner.fqn.removesuffix(f".{owner.attribute}") for owner in owners]
            modules = [owner.module for owner in owners]
            assert target.scheme.activation is not None
            found.append((names, modules, target.scheme.activation))
    return found


def _check_forward(module: nn.Module, fqn: str) -> None:
    """Raise ValueError for a linear or convolution that may not multiply its input as it is."""
    plain = {kind.forward for kind in (nn.Linear, *CONVOLUTIONS)}
    if shown_class(module).forward not in plain:
        raise ValueError(
            f"{fqn} belongs to a {type(module).__name__}, whose forward() may change its input before the product: "
            "leave it out by filter_fn or a pattern, or give it a scheme with a dynamic activation"
        )


def _watch(each: _Calibrated) -> Iterator[RemovableHandle]:
    """Put the observer into its modules. A hook calls the observer in a plain module; a prepared module calls it."""
    for module in each.modules:
        module.add_module(static_input.OBSERVER, each.observer)
        if not rounds_input(module):
            yield module.register_forward_pre_hook(_observe, with_kwargs=True)


def _observe(module: nn.Module, args: Any, kwargs: Any) -> None:
    observer: Any = module._modules[static_input.OBSERVER]
    observer.observe(args[0] if args else kwargs["input"])


def _set_scales(watched: list[_Calibrated]) -> dict[str, tuple[float, float]]:
    """Set the scales from the statistics. Returns the ranges by name."""
    for count, what in (("batches", "saw no batch"), ("nonfinite", "saw NaN or infinite values")):
        bad = [
            name
            for each in watched
            for name in each.names
            if (int(getattr(each.observer, count)) == 0) == (count == "batches")
        ]
        if bad:
            raise ValueError(
                f"the inputs of {', '.join(bad[:4])}{' …' if len(bad) > 4 else ''} ({len(bad)} of "
                f"{sum(len(each.names) for each in watched)} layers) cannot be calibrated: they {what}. {_WAYS[count]}"
            )
    ranges = {}
    with progress("calibrating", len(watched), unit="layers") as advance:
        for each in watched:
            ranges.update(dict.fromkeys(each.names, _set_scale(each)))
            advance(1)
    return ranges


def _set_scale(each: _Calibrated) -> tuple[float, float]:
    """Choose the range of a layer's input from the statistics, set it in all modules, and return it."""
    values = each.observer.range()
    if not rounds_input(each.modules[0]):
        unknown = values.new_full((1,), torch.nan)
        zero: Tensor | None = unknown.clone() if learns_zero(each.spec) else None
        static_input.hold_input(each.modules, each.spec, (unknown, zero), learned=False)
    for module in each.modules:
        static_input.set_range(module, each.spec, values)
    low, high = values.tolist()
    return low, high


_WAYS = {
    "batches": (
        "Run batches that reach them inside the context, in the mode (train or eval) that the model has at its start, "
        "and compile the model afterwards; or leave them out by filter_fn or a pattern"
    ),
    "nonfinite": "Find the batch that gives them, and calibrate without it",
}
