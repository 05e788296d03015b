"""calibrate: quantize a trained model, with scales and codes that fit the inputs of its layers.

    report = lowbit.calibrate(model, Int4WeightOnly(32), batches, steps=[GPTQ()])

Each weight is replaced by the ordinary quantized tensor, as `lowbit.quantize_` makes it: the codes and scales are
better, and all else, such as kernels and checkpoints, is the same. A step is an algorithm: `Search`, `GPTQ`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from lowbit import calibration as observed
from lowbit.convert import Filter, Schemes, check_module
from lowbit.inference.calibration.batches import Batches, usable_batches
from lowbit.inference.calibration.gptq import GPTQ
from lowbit.inference.calibration.kv_cache import CacheFormat
from lowbit.inference.calibration.ranks import Ranks
from lowbit.inference.calibration.report import CalibrationReport
from lowbit.inference.calibration.run import Run, holding_out
from lowbit.inference.calibration.states import Cache
from lowbit.inference.calibration.step import Step
from lowbit.numerics.settings import check_flag
from lowbit.tracing.observer import Method, check_method

_OF_EXPORT = ("format", "lossy", "overwrite", "max_shard_size")
"""The options of `lowbit.export` that a folder's calibration takes. The first two are for a module, too."""
_FOLDER = (
    "a folder is calibrated by batches, or without them by steps: calibrate(folder, scheme, batches, out=…), "
    "calibrate(folder, scheme, steps=[GPTQ()], out=…)"
)

Ranges = AbstractContextManager[dict[str, tuple[float, float]]]


@overload
def calibrate(
    model: nn.Module,
    scheme: Schemes | None = None,
    batches: Filter | None = None,
    filter_fn: Filter | None = None,
    *,
    method: Method = ...,
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
    cache: torch.device | str | os.PathLike[str] | None = ...,
    method: Method = ...,
    kv_cache: CacheFormat | None = ...,
    held_out: Iterable[Any] | None = ...,
    group: dist.ProcessGroup | None = ...,
    format: str = ...,
    lossy: bool = ...,
) -> CalibrationReport: ...
@overload
def calibrate(
    model: nn.Module,
    scheme: Schemes,
    batches: None = None,
    filter_fn: Filter | None = None,
    *,
    steps: Sequence[Step],
    format: str = ...,
    lossy: bool = ...,
) -> CalibrationReport: ...
@overload
def calibrate(
    model: str | os.PathLike[str],
    scheme: Schemes,
    batches: Iterable[Any] | None = None,
    filter_fn: Filter | None = None,
    *,
    out: str | os.PathLike[str],
    device: torch.device | str = ...,
    steps: Sequence[Step] | None = ...,
    cache: torch.device | str | os.PathLike[str] | None = ...,
    method: Method = ...,
    kv_cache: CacheFormat | None = ...,
    held_out: Iterable[Any] | None = ...,
    group: dist.ProcessGroup | None = ...,
    **writing: Any,
) -> CalibrationReport: ...
def calibrate(
    model: nn.Module | str | os.PathLike[str],
    scheme: Schemes | None = None,
    batches: Iterable[Any] | Filter | None = None,
    filter_fn: Filter | None = None,
    *,
    steps: Sequence[Step] | None = None,
    blocks: Iterable[nn.Module] | None = None,
    cache: torch.device | str | os.PathLike[str] | None = "cpu",
    method: Method = "squared_error",
    kv_cache: CacheFormat | None = None,
    held_out: Iterable[Any] | None = None,
    group: dist.ProcessGroup | None = None,
    out: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    **writing: Any,
) -> Ranges | CalibrationReport:
    """Quantize `model` in place by data; or, without `batches`, find the static scales of activations in a context.

        report = lowbit.calibrate(model, scheme, batches, steps=[GPTQ()])   # all is done when it returns

        report = lowbit.calibrate(model, scheme, steps=[GPTQ()])            # without data

        with lowbit.calibrate(model, scheme):                               # then quantize_ or qat.prepare_
            for batch in batches:
                model(batch)

        lowbit.calibrate("model", scheme, batches, out="model-int4")        # a folder, one block at a time in memory

    With batches: `scheme` and `filter_fn` choose weights as in `lowbit.quantize_`. The steps run on one weight after
    another, in the order in which the model calls them, so that each sees the inputs that the weights before it,
    rounded already, give. Static scales of activations are found first, by the same batches. The model runs in eval
    mode. Beside the model it holds the hidden states of all batches at one block, the Hessians of a few weights, and,
    where a step compares with the model in high precision (`GPTQ`), these states twice.

    A folder, with config.json and *.safetensors, is calibrated block by block: in memory there are one block, or the
    embeddings and the head. `lowbit.export` writes the result. Finished blocks wait in `.OUT.lowbit-calibration` beside
    `out`. After a kill, the same call goes on from there, to the same bits. Embeddings and the head stay plain unless a
    pattern names them, as in `lowbit.export`.

    With steps and without batches: WᵀW / mean(diag WᵀW) + I takes the place of the sums over the inputs of a weight W.
    For `GPTQ`, `Prune24` and `Search`. A folder's model is then whole in memory. A language model can draw batches
    itself, which wins more: `lowbit.inference.sampled_batches`.

    In the context: see `lowbit.calibration`. A filter may also be the third argument there.

    Args:
        model: a plain model; in the context also a prepared one; or the folder of a model of transformers.
        scheme, filter_fn: those of `lowbit.quantize_`. For a folder, scales have the dtype that the format stores.
        batches: each is a mapping of keyword arguments, a tuple or list of arguments, or one argument of the model, on
            any device. They may differ in shape. Tokens whose `attention_mask` is 0 don't count, except for a decoder's
            `decoder_input_ids` of the same shape with another mask, where all do. Read once, and kept.
        steps: algorithms, in this order; None: [GPTQ()] with batches; []: weights are rounded to nearest.
        blocks: modules that follow each other, e.g. `model.model.layers`. None finds the largest chain; [] takes the
            model as one block. A folder's are always found.
        cache: where hidden states are kept: a device; a folder, as a `Path`, on whose disk they lie; None: where the
            model makes them. On a CPU that disk also holds the sums of stacked experts, and the experts of a folder in
            high precision.
        method: how static ranges are chosen (`lowbit.calibration.calibrate`).
        kv_cache: "float8": find a static scale (e4m3) of the keys and one of the values that each attention layer of a
            model of transformers caches, by the same batches. They become its buffers `k_scale` and `v_scale`, float32
            [1], which `lowbit.export` writes for servers. None: none.
        held_out: batches like `batches` that the steps don't see. Where a block's output for these is further from that
            in high precision than by min-max rounding, its weights are rounded by min-max, and `report.held_out` says
            so. At the end a model in memory is compared with itself in min-max rounding. While it loses more, the
            half of its blocks that gained least by the steps takes min-max too. None: from eight batches on, the last
            eighth of `batches`, unless `steps` is [] or has `LearnedRounding`, which holds out sequences itself. []:
            nothing is compared.
        group: the process group whose ranks each give their own batches, any number of them. All its ranks call, with
            the model in the memory of each, or with one folder and one `out` that all of them see, and get the same
            model. None: this process alone, also where torch.distributed is initialized; in the context the default
            group.
        out: for a folder alone: the folder to make, or a file for "gguf".
        device: for a folder alone: where its blocks are calibrated.
        writing: options of `lowbit.export`. For a folder: format, lossy, overwrite, max_shard_size. For a module format
            and lossy, if it will be written: scales then have the dtype that the format stores, and what the format
            cannot hold is refused before the first batch.

    Returns:
        The report of the conversion, with each layer's method, time and error before and after; in the context form a
        context, whose value is the dict of ranges by name.

    Raises:
        TypeError: batches or steps of another kind; no module; no scheme; `out` or `device` beside a module, or a
            folder without `out`, or with neither batches nor steps; other options for a folder; options that the form
            of the call, or what else it is given, does not read.
        RuntimeError: another rank of `group` failed, with what it said.
        ValueError: what `quantize_` refuses; an empty list of batches, on all ranks; ranks that differ in more than
            batches; with `group` a step that needs all batches, such as `Rotate`; steps and schemes that need
            batches, without any; `held_out` without steps on layers, or beside `LearnedRounding`; `kv_cache` of a model
            that writes no keys and values to a cache of transformers, or caches a latent, or has NaN or infinite ones;
            NaN or infinite inputs of a layer, which is named. Weights that were calibrated before that layer are then
            quantized, and the others plain, as the message says.
        FormatError, a ValueError: what `lowbit.load_pretrained` and `lowbit.export` refuse of a folder, or of a module
            with `format`, as far as names, shapes, schemes and config tell, before the first batch; finished blocks
            beside `out` of a call with other arguments.
    """
    check_method(method)
    without_data = batches is None and steps is not None
    if (batches is None and not without_data) or callable(batches):
        if isinstance(model, str | os.PathLike):
            raise TypeError(_FOLDER)
        _check_context(batches, filter_fn, steps, blocks)
        _check_read(out, device, cache, kv_cache, held_out, writing)
        own = filter_fn if batches is None else batches
        return observed.calibrate(model, scheme, own, method=method, group=group)
    if group is not None and without_data:
        raise ValueError(
            "group is for batches that the processes share; accepted: calibrate(model, scheme, batches, group=…), or "
            "one process without batches"
        )
    ranks = Ranks(group)
    if scheme is None:
        raise TypeError("scheme must be a Scheme or a dict of patterns, got None")
    chosen = checked_steps([GPTQ()] if steps is None else steps)
    place = _cache(cache)
    if isinstance(model, str | os.PathLike):
        out = _checked_out(out, blocks, writing)
        _check_of_data(without_data, blocks, cache, method, held_out)
        from lowbit.inference.calibration.large import calibrate_folder  # imports all formats

        with ranks.together():
            return calibrate_folder(
                *(model, scheme, batches, filter_fn, chosen, method, place, device, out, writing),
                *(ranks, kv_cache, held_out),
            )
    check_module(model)
    _check_writing(out, device, writing)
    blocks = blocks if blocks is None else _modules(blocks)
    _check_of_data(without_data, blocks, cache, method, held_out)
    with ranks.together():
        usable = Batches()
        if batches is not None:
            usable = usable_batches(model, batches, ranks, holding_out(held_out, chosen))
        run = _run(model, scheme, filter_fn, chosen, usable, method, kv_cache, **writing)
        if without_data:
            run.check_without_data()
        return run.quantize([] if without_data else blocks, place)


def _run(
    model: nn.Module,
    scheme: Schemes,
    filter_fn: Filter | None,
    steps: list[Step],
    batches: Batches,
    method: Method,
    kv_cache: CacheFormat | None,
    format: str | None = None,
    lossy: bool = False,
) -> Run:
    """The calibration of a module, which will be written in `format` unless that is None."""
    if format is None:
        return Run(model, scheme, filter_fn, steps, batches, method, kv_cache=kv_cache)
    from lowbit.formats.writing import on_grid  # imports all formats

    fitting = on_grid(format, scheme, lossy)
    run = Run(model, fitting, filter_fn, steps, batches, method, kv_cache=kv_cache)
    run.check_export(format, lossy)
    return run


def checked_steps(steps: Any) -> list[Step]:
    """`steps` as a list. Raises TypeError for anything but steps."""
    if isinstance(steps, Iterable):
        chosen = list(steps)
        if all(isinstance(step, Step) for step in chosen):
            return chosen
    raise TypeError(
        f"steps must be a list of steps, such as [lowbit.inference.GPTQ()], got {steps!r}"
    )


def _cache(cache: torch.device | str | os.PathLike[str] | None) -> Cache:
    if cache is None:
        return None
    if not isinstance(cache, os.PathLike):
        with suppress(RuntimeError, TypeError):
            return torch.device(cache)
    elif Path(cache).is_dir():
        return Path(cache)
    raise ValueError(
        f"cache is {cache!r}; accepted: a device, None, or a folder that exists, as a pathlib.Path"
    )


def _check_context(given: Any, filter_fn: Any, steps: Any, blocks: Any) -> None:
    if given is not None and filter_fn is not None:
        raise TypeError(
            f"two filters, {given!r} and filter_fn={filter_fn!r}; accepted: one of them, and batches as a list"
        )
    if given is not None and steps is not None:
        raise TypeError(
            f"batches must be a list of batches, got the function {given!r}; a filter beside steps is filter_fn=…"
        )
    if steps is not None or blocks is not None:
        raise TypeError("steps and blocks need batches: calibrate(model, scheme, batches, steps=…)")


def _check_read(
    out: Any, device: Any, cache: Any, kv_cache: Any, held_out: Any, writing: dict[str, Any]
) -> None:
    given = {"out": out is not None, "device": str(device) != "cpu", "cache": str(cache) != "cpu"}
    given |= {"kv_cache": kv_cache is not None, "held_out": held_out is not None}
    if unread := [*(name for name, is_given in given.items() if is_given), *sorted(writing)]:
        raise TypeError(
            f"{', '.join(unread)}: not read by `with lowbit.calibrate(model, scheme):`, which takes filter_fn, method "
            "and group; with batches or steps=… the call quantizes the model"
        )


def _check_of_data(
    without_data: bool, blocks: Any, cache: Any, method: Method, held_out: Any
) -> None:
    """Raise TypeError for options on data that are not read."""
    given = {
        "blocks": without_data and blocks is not None,
        "cache": (without_data or blocks == []) and str(cache) != "cpu",
        "method": without_data and method != "squared_error",
        "held_out": without_data and held_out is not None,
    }
    if unread := [name for name, is_given in given.items() if is_given]:
        why = "not read without batches; accepted: calibrate(model, scheme, batches, …)"
        if not without_data:
            why = "for hidden states between blocks, which blocks=[] does not keep"
        raise TypeError(f"{', '.join(unread)}: {why}")


def _checked_out(
    out: str | os.PathLike[str] | None, blocks: Any, writing: dict[str, Any]
) -> str | os.PathLike[str]:
    """`out` of a folder. Raises TypeError for what a folder does not take."""
    if out is None or blocks is not None:
        raise TypeError("a folder takes out=, the folder to make, and no blocks=, which are found")
    if others := sorted(writing.keys() - {*_OF_EXPORT}):
        raise TypeError(
            f"calibrate takes no {', '.join(others)}; accepted for a folder: {', '.join(_OF_EXPORT)}"
        )
    return out


def _modules(blocks: Any) -> list[nn.Module]:
    """`blocks` as a list. Raises TypeError for anything but modules."""
    given = list(blocks) if isinstance(blocks, Iterable) else []
    if not isinstance(blocks, Iterable) or not all(isinstance(block, nn.Module) for block in given):
        raise TypeError(
            f"blocks must be a list of modules of the model, such as model.layers, got {blocks!r:.200}"
        )
    return given


def _check_writing(out: Any, device: Any, writing: dict[str, Any]) -> None:
    if of_folder := [
        *(["out"] if out is not None else []),
        *(["device"] if str(device) != "cpu" else []),
        *sorted({*writing} - {*_OF_EXPORT[:2]}),
    ]:
        raise TypeError(
            f"{', '.join(of_folder)}: for a folder alone; a model in memory is changed in place, and lowbit.export "
            "writes it"
        )
    check_flag("lossy", writing.get("lossy", False))
    if writing.get("lossy") and writing.get("format") is None:
        raise TypeError("lossy says what a format may lose: give format=… too, or leave it out")
