"""Static scales of keys and values, found where a model writes them to a Cache of transformers.

Whatever a model is named and however it computes them, its attention layers hand keys (after their rotation) and values
to `Cache.update`. Here that method shows them to observers. The attention layer is the innermost module that runs at
that time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lowbit import optional
from lowbit.inference.calibration.batches import counted_rows, mask_of
from lowbit.inference.calibration.ranks import Ranks
from lowbit.layers.cache_scales import KEY, SPEC, VALUE, hold
from lowbit.tracing.batches import call, hooked
from lowbit.tracing.observer import Method, Observer, sum_over_ranks

CacheFormat = Literal["float8"]
_CACHES = "cache", "past_key_values", "layer_past"
"""The arguments by which blocks of transformers take a cache: the first from 5.24 on."""
_USES = "use_cache"


def check_cache(kv_cache: Any, model: nn.Module, in_blocks: bool) -> None:
    """Raise ValueError for a format of a cache that is not "float8", and for a model whose keys and values servers do
    not cache as it computes them. `in_blocks`: only one block of it is in memory."""
    if kv_cache is None:
        return
    if kv_cache != "float8":
        raise ValueError(
            f"kv_cache is {kv_cache!r}; accepted: 'float8'; leave it out for no scales"
        )
    config = _text_config(model)
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"kv_cache={kv_cache!r}: servers cache the latent of {type(model).__name__}, of which keys and values are "
            "computed, and no scale of these fits it; leave out kv_cache"
        )
    if in_blocks and getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"kv_cache={kv_cache!r}: the caches of an encoder-decoder are not found block by block; load it first, "
            "lowbit.calibrate(lowbit.load_pretrained(folder), …)"
        )


@contextmanager
def observing_caches(
    model: nn.Module, block: nn.Module | None, method: Method, ranks: Ranks
) -> Iterator[Callable[[Any], None]]:
    """The context whose value runs the model on a batch, and at whose end each attention layer that wrote to a cache
    has its scales. After an exception the scales stay as they were.

    Args:
        model: of transformers.
        block: the part of it that runs, and gets a cache of its own for each batch; None: the model, which makes one.
        method: how a range is chosen.
        ranks: the processes that have other batches.

    Raises ValueError for NaN or infinite keys or values, a layer without a place for scales, and a model that writes to
    no cache.
    """
    utils: Any = optional.imported("transformers.cache_utils", "kv_cache needs the caches of", "hf")
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, tuple[Observer, Observer]] = {}
    running: list[nn.Module] = []
    mask: Tensor | None = None
    plain = utils.Cache.update

    def update(cache: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(running[-1])) if running else None
        if name is not None:
            pair = found.setdefault(name, _pair(method, keys.device))
            for observer, x in zip(pair, (keys, values), strict=True):
                # [batch, heads, tokens, channels]
                rows = counted_rows(x.transpose(1, 2).flatten(2), mask) if x.ndim == 4 else x
                observer.observe(rows)
        return plain(cache, keys, values, *args, **kwargs)

    def run(batch: Any) -> None:
        nonlocal mask
        mask = mask_of(batch)
        call(model, {**batch, _USES: True} if _says_use(batch) else batch)

    def left(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    hooks = [
        register_module_forward_pre_hook(lambda module, args: running.append(module)),
        register_module_forward_hook(left, always_call=True),
    ]
    if block is not None:
        hooks.append(
            block.register_forward_pre_hook(_giving(model, block, utils), with_kwargs=True)
        )
    utils.Cache.update = update
    try:
        with hooked(*hooks), _using_cache(model if block is None else None):
            yield run
    finally:
        utils.Cache.update = plain
    _finish(model, found, method, ranks, is_whole=block is None)


def _pair(method: Method, device: torch.device) -> tuple[Observer, Observer]:
    return Observer(SPEC, method, device), Observer(SPEC, method, device)


def _finish(
    model: nn.Module,
    found: dict[str, tuple[Observer, Observer]],
    method: Method,
    ranks: Ranks,
    is_whole: bool,
) -> None:
    """Give the layers the scales of what the observers of all ranks saw."""
    names = list(dict.fromkeys(name for own in ranks.gathered([*found]) for name in own))
    if is_whole and not names:
        raise no_cache(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    pairs = [found.get(name) or _pair(method, device) for name in names]
    if ranks.group is not None:
        sum_over_ranks([observer for pair in pairs for observer in pair], ranks.group)
    for name, pair in zip(names, pairs, strict=True):
        if any(int(observer.nonfinite) for observer in pair):
            raise ValueError(
                f"the keys or values of {name} have NaN or infinite values: find the batch that gives them, and "
                "calibrate without it"
            )
    for name, pair in zip(names, pairs, strict=True):
        hold(model.get_submodule(name), dict(zip((KEY, VALUE), map(_scale, pair), strict=True)))


def no_cache(model: nn.Module) -> ValueError:
    """The error for a model that wrote to no cache."""
    return ValueError(
        f"kv_cache: no layer of the {type(model).__name__} wrote keys and values to a Cache of transformers in these "
        "batches; accepted: decoders of transformers, on batches without labels"
    )


def _scale(observer: Observer) -> Tensor:
    """float32 [1]."""
    scale, _ = replace(SPEC, static=False).choose_qparams(observer.range(), torch.float32)
    return scale.reshape(1)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _says_use(batch: Any) -> bool:
    return isinstance(batch, Mapping) and _USES in batch


@contextmanager
def _using_cache(model: nn.Module | None) -> Iterator[None]:
    """The context in which a model of transformers makes a cache, also where its config says not to."""
    configs = [] if model is None else [getattr(model, "config", None), _text_config(model)]
    changed = list({id(c): c for c in configs if getattr(c, _USES, None) is False}.values())
    for config in changed:
        config.use_cache = True
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = False


def _giving(model: nn.Module, block: nn.Module, utils: Any) -> Callable[..., Any]:
    """A hook that gives each call of the block a new cache, where it takes one."""
    signature = inspect.signature(block.forward)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    own = next((name for name in _CACHES if name in signature.parameters), _CACHES[1])

    def give(module: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = {own: utils.DynamicCache(config=getattr(model, "config", None)), _USES: True}
        named = {name: value for name, value in given.items() if name in signature.parameters}
        bound.arguments.update(named)
        others = {name: given[name] for name in given.keys() - named.keys()} if takes_any else {}
        return bound.args, {**bound.kwargs, **others}

    return give
