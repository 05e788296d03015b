"""Schemes by name, as one line gives them: `int4`, `int4(group_size=32)`, `IntxWeightOnly(bits=3, group_size=32)`.

A line is a name, or a call with literal keyword arguments; int4(scale_dtype="float16") gives a dtype. Configurations,
options of commands and plans hold such lines.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations
from types import FunctionType
from typing import Any

from lowbit.numerics.granularity import PerBlock, PerGroup, PerRow
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec_checks import SCALE_DTYPES
from lowbit.schemes import presets
from lowbit.schemes.scheme import Scheme

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "int4": presets.Int4WeightOnly,
    "int8": presets.Int8WeightOnly,
    "float8": presets.Float8WeightOnly,
    "int8_int4": presets.Int8DynamicActivationInt4Weight,
    "int8_int8": presets.Int8DynamicActivationInt8Weight,
    "float8_float8": presets.Float8DynamicActivationFloat8Weight,
    "float8_float8_blocks": partial(
        presets.Float8DynamicActivationFloat8Weight, PerBlock(128, 128)
    ),
    "int8_int8_static": presets.Int8StaticActivationInt8Weight,
    "float8_float8_static": presets.Float8StaticActivationFloat8Weight,
    "float8_mxfp4": presets.Float8DynamicActivationMXFP4Weight,
    "float8_nvfp4": presets.Float8DynamicActivationNVFP4Weight,
    "mxfp8_mxfp8": presets.MXFP8DynamicActivationMXFP8Weight,
    "nf4": presets.NF4WeightOnly,
    "mxfp4": presets.MXFP4WeightOnly,
    "mxfp8": presets.MXFP8WeightOnly,
    "nvfp4": presets.NVFP4WeightOnly,
}
"""Short names, in which the format of the activations comes first. The names of all presets are accepted too."""
_PRESETS: dict[str, Callable[..., Scheme]] = {
    name: made
    for name, made in vars(presets).items()
    if isinstance(made, FunctionType) and made.__module__ == presets.__name__ and name[0] != "_"
}


def scheme(line: str) -> Scheme:
    """The scheme of a line. Raises ValueError for an unknown name, and for options that the scheme refuses."""
    name, options = parsed(line, "scheme", "int4(group_size=32)")
    return scheme_of(name, options)


def scheme_of(name: str, options: Mapping[str, Any]) -> Scheme:
    """The preset of this name with these options; see `scheme`."""
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    own = dict(options)
    if isinstance(dtype := own.get("scale_dtype"), str):
        own["scale_dtype"] = SCALE_DTYPES.get(dtype, dtype)
    return made(named(name, "scheme", {**SCHEMES, **_PRESETS}), own, f"{name}({given})")


def parsed(line: str, what: str, example: str) -> tuple[str, dict[str, Any]]:
    """The name and the keyword arguments of a line. Raises ValueError for a line that is not a name or a call."""
    try:
        call = ast.parse(line.strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            call = ast.Call(call, [], [])
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("only keyword arguments are accepted")
        options = {str(given.arg): ast.literal_eval(given.value) for given in call.keywords}
        if not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError("it does not begin with a name")
        return ast.unparse(call.func), options
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(
            f"{line!r} names no {what} ({why}); accepted: a name, or a name with options such as {example}, "
            "words in quotes"
        ) from error


def named(name: str, what: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        way = ""
        if "IntxWeightOnly" in known and (bits := re.fullmatch("int([1-8])", name)):
            way = f"; {name} is IntxWeightOnly(bits={bits[1]})"
        raise ValueError(f"there is no {what} {name!r}; accepted: {', '.join(known)}{way}")
    return known[name]


def made(kind: Callable[..., Any], options: Mapping[str, Any], line: str) -> Any:
    known = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    if not takes_any and (unknown := [key for key in options if key not in known]):
        raise ValueError(
            f"{line}: unexpected keyword argument {unknown[0]!r}; accepted: {', '.join(known) or 'no options'}"
        )
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{line}: {error}") from error


def line_of(given: Scheme) -> str | None:
    """A line that `scheme` reads as this scheme, with as few options as it takes; None if no preset makes it."""
    known = _options_of(given)
    for name, preset in {**SCHEMES, **_PRESETS}.items():
        own = [key for key in inspect.signature(preset).parameters if key in known]
        for count in range(len(own) + 1):
            for options in _first_options(own, known, count):
                try:
                    is_it = preset(**options) == given
                except (TypeError, ValueError):
                    continue
                if is_it:
                    shown = {k: _plain(value) for k, value in options.items()}
                    options_line = ", ".join(f"{k}={v!r}" for k, v in shown.items())
                    return f"{name}({options_line})" if options_line else name
    return None


def _options_of(given: Scheme) -> dict[str, Any]:
    """What the options of presets would be."""
    spec = given.weight
    found: dict[str, Any] = {}
    if isinstance(spec.format, Int):
        found["bits"] = spec.format.bits
    if isinstance(spec.granularity, PerGroup):
        found["group_size"] = spec.granularity.group_size
    elif isinstance(spec.granularity, PerRow):
        found["group_size"] = None
    found["double_quantization"] = spec.scale_format == "double"
    found |= {"mapping": spec.mapping, "scale_dtype": spec.scale_dtype}
    return found


def _first_options(
    own: list[str], known: Mapping[str, Any], count: int
) -> Iterator[dict[str, Any]]:
    for keys in combinations(own, count):
        yield {key: known[key] for key in keys}


def _plain(value: Any) -> Any:
    """An option as a literal."""
    names = [name for name, dtype in SCALE_DTYPES.items() if dtype is value]
    return names[0] if names else value
