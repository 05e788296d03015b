"""`LowbitConfig`: what `from_pretrained(…, quantization_config=…)` takes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowbit.convert import NEEDS_CALIBRATION, check_pattern, check_runs, has_static
from lowbit.inference import Step
from lowbit.inference.calibration.batches import as_list
from lowbit.inference.calibration.call import checked_steps
from lowbit.inference.calibration.kv_cache import CacheFormat
from lowbit.numerics.search import Scales, check_scales
from lowbit.numerics.settings import check_flag
from lowbit.schemes import lines
from lowbit.schemes.scheme import Scheme

GivenScheme = str | Scheme | Mapping[str, str | Scheme | None]
METHOD = "lowbit"


class Method(StrEnum):
    """`quant_method` of the config: diffusers asks for the `value` of an enumeration."""

    LOWBIT = METHOD


@register_quantization_config(METHOD)
class LowbitConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantizes weights while it reads them.

        LowbitConfig("int4", group_size=128)
        LowbitConfig(lowbit.Int8DynamicActivationInt8Weight())
        LowbitConfig({"lm_head": "int8", "re:.*layers\\\\.0\\\\..*": None, "*": "int4(group_size=32)"})

    A bare scheme and the pattern "*" take every `nn.Linear` and the stacked weights of experts. They leave the output
    head, routers and embeddings alone, as `lowbit.export(folder, …, scheme=…)` does. Another pattern takes the head and
    the embeddings that it matches. Only a pattern that names a router outright, such as "*.mlp.gate", or a parameter of
    a module of another class takes it. Tied weights stay tied.

    Args:
        scheme: a `Scheme`; a name: "int4", "int8", "float8", "int8_int8", "int8_int4", "float8_float8", "nf4", "mxfp4",
            "nvfp4" or a preset's, also with options, "int4(group_size=32)"; or a dict of patterns to one of these or
            None (leave alone), with the patterns of `lowbit.quantize_`, the first match counts.
        scales: "minmax", "searched" or None, as in `lowbit.quantize_`.
        experts: True lets a bare scheme and patterns take the stacked weights of experts.
        batches: of `lowbit.calibrate`, which then runs once the plain weights are read, with the whole model in memory.
            Static activations need them. The folder that `save_pretrained` writes has none.
        steps: of `lowbit.calibrate`; without `batches` those that need none, such as [GPTQ()].
        kv_cache: of `lowbit.calibrate`: "float8", or None for no scales of keys and values. Needs `batches`.
        options: those of the preset that `scheme` names.

    Attributes:
        stored: the entry "quantization_config" in config.json of a model that is quantized already; otherwise None.

    Raises:
        TypeError: `scheme` is none of these, or options stand beside a scheme that is not a name; batches or steps
            that are not lists of them; `experts` that is not a bool.
        ValueError: an unknown name or scales; scales beside batches or steps; options that the preset refuses; a static
            activation, or kv_cache, without batches.
    """

    batches: list[Any] | None = None
    steps: Sequence[Step] | None = None
    kv_cache: CacheFormat | None = None

    def __init__(
        self,
        scheme: GivenScheme,
        *,
        scales: Scales | None = None,
        experts: bool = True,
        batches: Iterable[Any] | None = None,
        steps: Sequence[Step] | None = None,
        kv_cache: CacheFormat | None = None,
        **options: Any,
    ) -> None:
        self.quant_method = Method.LOWBIT
        check_scales(scales)
        check_flag("experts", experts)
        calibrates = batches is not None or steps is not None
        if calibrates and scales is not None:
            raise ValueError(
                f"scales={scales!r} beside batches or steps, which choose the scales; accepted: e.g. "
                "steps=[lowbit.inference.Search()]"
            )
        self.scales, self.experts = scales, experts
        self.scheme = _schemes(scheme, options)
        if batches is None and has_static(self.scheme):
            raise ValueError(f"{NEEDS_CALIBRATION}; or give batches=")
        if batches is None and kv_cache is not None:
            raise ValueError(f"kv_cache={kv_cache!r} finds scales by batches: give batches=")
        self.kv_cache = kv_cache
        self.batches = None if batches is None else as_list(batches)
        self.steps = None if steps is None else checked_steps(steps)
        self.stored: dict[str, Any] | None = None

    @property
    def calibrates(self) -> bool:
        """True if `lowbit.calibrate` rounds the weights once they are read."""
        return self.batches is not None or self.steps is not None

    @property
    def patterns(self) -> dict[str, Scheme | None]:
        """Pattern → Scheme or None; {} if the config describes stored weights only."""
        return {"*": self.scheme} if isinstance(self.scheme, Scheme) else dict(self.scheme)

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The config that `to_dict` described. Raises ValueError for other settings."""
        given = dict(config_dict)
        given.pop("quant_method", None)
        if "tensors" in given or "kinds" in given:
            made = cls._of_stored({"quant_method": METHOD, **given})
        else:
            try:
                own = given.pop("schemes")
                listed = {p: None if s is None else Scheme.from_dict(s) for p, s in own}
                check_runs(listed, "quantization_config")
                made = cls(listed, **given)
            except (LookupError, TypeError) as error:
                raise ValueError(
                    f"quantization_config {config_dict!r} of lowbit has neither schemes nor tensors; write the folder "
                    "by save_pretrained or lowbit.export(…, format='lowbit')"
                ) from error
        return (made, kwargs) if return_unused_kwargs else made

    @classmethod
    def _of_stored(cls, stored: dict[str, Any]) -> Self:
        made = cls({})
        made.stored = stored
        return made

    def with_stored(self, stored: dict[str, Any]) -> Self:
        """This config for a model whose weights `stored` describes."""
        made = copy.copy(self)
        made.stored, made.batches, made.steps, made.kv_cache = stored, None, None, None
        return made

    def to_dict(self) -> dict[str, Any]:
        """In JSON types: the entry of config.json for stored weights, the schemes otherwise."""
        if self.stored is not None:
            return dict(self.stored)
        schemes = [[p, None if s is None else s.to_dict()] for p, s in self.patterns.items()]
        own = {"scales": self.scales, "experts": self.experts}
        return {"quant_method": METHOD, "schemes": schemes, **own}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowbitConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        stored = "" if self.stored is None else f", {len(self.stored.get('tensors', ()))} weights"
        return f"LowbitConfig({self.scheme!r}, scales={self.scales!r}{stored})"


def _schemes(given: GivenScheme, options: Mapping[str, Any]) -> Scheme | dict[str, Scheme | None]:
    """Names replaced by the schemes that they stand for."""
    if isinstance(given, str):
        return lines.scheme_of(given, options) if options else lines.scheme(given)
    if options:
        raise TypeError(
            f"{', '.join(options)}: options belong to a scheme that is given by name, as in LowbitConfig('int4', "
            f"group_size=32); got {given!r}"
        )
    if isinstance(given, Scheme):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"unknown scheme {given!r}; accepted: a name such as 'int4', a Scheme, e.g. lowbit.Int4WeightOnly(), or a "
            "dict of name patterns to one of these or None"
        )
    for pattern in given:
        check_pattern(pattern)
    return {p: None if one is None else _one(p, one) for p, one in given.items()}


def _one(pattern: str, given: Any) -> Scheme:
    if not isinstance(given, str | Scheme):
        raise TypeError(f"{pattern!r}: {given!r}; accepted: a str, and a name, a Scheme or None")
    return lines.scheme(given) if isinstance(given, str) else given
