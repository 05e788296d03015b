"""calibrate: find the static scales of activations from batches that pass through the model.

    with lowbit.calibrate(model, scheme):        # a plain model, then quantize_ or qat.prepare_ with the same scheme
        for batch in batches:
            model(batch)

    with lowbit.calibrate(model):                # a model of qat.prepare_, before or during training
        ...

Inside, an `Observer` in each layer counts its inputs, which products take as they are. At the end the ranks sum their
statistics once, and each layer has a scale that then stays, or is learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowbit.convert import Filter, Schemes, check_module, find_targets, rounding_owners
from lowbit.learned_scales import learns_zero
from lowbit.observer import Method, Observer, sum_over_ranks
from lowbit.progress import progress
from lowbit.scheme import Scheme, Spec
from lowbit.tensor import static_input
from lowbit.tensor.conv_tensor import CONVOLUTIONS


class _Watched(NamedTuple):
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
    percentile: float = 99.99,
    group: dist.ProcessGroup | None = None,
) -> Iterator[dict[str, tuple[float, float]]]:
    """Inside the context, count the inputs of all layers with a static activation; at its end, set their scales.

    `with … as ranges` gives a dict, filled at the end: the name of each layer to its range (low, high). A batch counts
    in the mode, train or eval, that the model has at the start: an evaluation in the midst of training changes nothing.
    Inside, products of a prepared model round its weights and not its inputs. If the context ends by an exception the
    scales stay as they were. An earlier calibration is replaced.

    Args:
        model: a plain model, or one of `lowbit.qat.prepare_`, sharded or not. To compile it, call `compile` afterwards.
        scheme, filter_fn: for a plain model, those that `quantize_` or `prepare_` will get. For a prepared one: None.
        method: how the range is chosen, "minmax", "moving_average", "percentile" or "squared_error"
            (`lowbit.observer`).
        percentile: for "percentile", the share of values in % below the upper end, and above the lower.
        group: the process group whose ranks see different batches. None: the default group, if there is one. All ranks
            take part, with the same layers, and get the same scales.

    Raises:
        TypeError: no module, no scheme; as `quantize_`.
        ValueError: no layer has a static activation; at the end, a layer saw no batch, or NaN or infinite values. The
            scales of all layers are then as they were.
    """
    check_module(model)
    found = _prepared(model) if scheme is None else _plain(model, scheme, filter_fn)
    if any(
        static_input.OBSERVER in module._modules for _, modules, _ in found for module in modules
    ):
        raise ValueError(
            f"{type(model).__name__} is being calibrated already: leave that context first"
        )
    watched = []
    for names, modules, spec in found:
        device = getattr(modules[0].weight, "device", None)
        observer = Observer(spec, method, percentile, device)
        observer.begin(modules[0].training)
        watched.append(_Watched(names, modules, spec, observer))
    hooks = [hook for each in watched for hook in _watch(each)]
    ranges: dict[str, tuple[float, float]] = {}
    try:
        yield ranges
        ranges.update(_finish(watched, group))
    finally:
        for hook in hooks:
            hook.remove()
        for each in watched:
            for module in each.modules:
                del module._modules[static_input.OBSERVER]


def _prepared(model: nn.Module) -> list[tuple[list[str], list[nn.Module], Spec]]:
    """Names, modules and activation of each prepared weight with a static scale of its input."""
    found: dict[int, tuple[list[str], list[nn.Module], Spec]] = {}
    for name, module in model.named_modules():
        if isinstance(module, static_input.RoundsInput):
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


def _plain(
    model: nn.Module, scheme: Schemes, filter_fn: Filter | None
) -> list[tuple[list[str], list[nn.Module], Spec]]:
    targets, _ = find_targets(model, scheme, filter_fn)
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
    if not found:
        raise ValueError(
            f"{scheme} has no static activation to calibrate; accepted: e.g. "
            "lowbit.Int8StaticActivationInt8Weight(), or an activation Spec(…, PerTensor(), static=True)"
        )
    return found


def _check_forward(module: nn.Module, fqn: str) -> None:
    """Raise ValueError for a linear or convolution that may multiply something else than its input."""
    plain = {kind.forward for kind in (nn.Linear, *CONVOLUTIONS)}
    if type(module).forward not in plain:
        raise ValueError(
            f"{fqn} belongs to a {type(module).__name__}, whose forward() may change its input before the product: "
            "leave it out by filter_fn or a pattern, or give it a scheme with a dynamic activation"
        )


def _watch(each: _Watched) -> Iterator[RemovableHandle]:
    """Put the observer into its modules. Plain ones call it by a hook, prepared ones themselves."""
    for module in each.modules:
        module.add_module(static_input.OBSERVER, each.observer)
        if not isinstance(module, static_input.RoundsInput):
            yield module.register_forward_pre_hook(_observe, with_kwargs=True)


def _observe(module: nn.Module, args: Any, kwargs: Any) -> None:
    observer: Any = module._modules[static_input.OBSERVER]
    observer.observe(args[0] if args else kwargs["input"])


def _finish(
    watched: list[_Watched], group: dist.ProcessGroup | None
) -> dict[str, tuple[float, float]]:
    """Sum the statistics of the ranks, and set the scales. Returns the ranges by name."""
    if dist.is_available() and dist.is_initialized():
        sum_over_ranks([each.observer for each in watched], group)
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


def _set_scale(each: _Watched) -> tuple[float, float]:
    """Choose the range of a layer's input from its statistics, and set it in all modules. Returns it."""
    values = each.observer.range()
    if not isinstance(each.modules[0], static_input.RoundsInput):
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
