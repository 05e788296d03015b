"""Optimizers, training schemes and schemes by name, as one line of a configuration gives them.

A line is a name, or a call with literal keyword arguments:

    AdamW8bit    AdamW4bit(bf16_stochastic_round=True)    an optimizer: a class of lowbit.optim
    int8         float8(backward="e5m2")                  a training scheme
    int4         int4(group_size=32)                      a scheme; int4(scale_dtype="float16") gives a dtype
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from lowbit import optim
from lowbit.numerics.granularity import PerBlock
from lowbit.numerics.spec import SCALE_DTYPES
from lowbit.optim import LowbitOptimizer
from lowbit.schemes import presets
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import (
    BitNet,
    Float8MixedPrecision,
    Int8MixedPrecision,
    Int8Weight,
    TrainingScheme,
)

PREFIX = "lowbit."
"""Distinguishes an optimizer of lowbit from one of torch with the same name: "lowbit.AdamW(state='bf16')"."""
OPTIMIZERS: dict[str, type[LowbitOptimizer]] = {
    name: found
    for name, found in vars(optim).items()
    if isinstance(found, type)
    and issubclass(found, LowbitOptimizer)
    and found is not LowbitOptimizer
}
TRAINING: dict[str, type[TrainingScheme]] = {
    "int8": Int8MixedPrecision,
    "float8": Float8MixedPrecision,
    "int8_weights": Int8Weight,
    "bitnet": BitNet,
}
"""Short names. The names of the classes are accepted too."""
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
    "nf4": presets.NF4WeightOnly,
    "mxfp4": presets.MXFP4WeightOnly,
    "nvfp4": presets.NVFP4WeightOnly,
}
"""Short names, in which the format of the activations comes first. The names of all presets are accepted too."""


def optimizer(line: str) -> tuple[type[LowbitOptimizer], dict[str, Any]]:
    """The class and the options of an optimizer. Raises ValueError for an unknown name."""
    name, options = parsed(line, "optimizer", "AdamW8bit(bf16_stochastic_round=True)")
    return _found(name.removeprefix(PREFIX), "optimizer", OPTIMIZERS), options


def training_scheme(line: str) -> TrainingScheme:
    """The training scheme of a line. Raises ValueError for an unknown name, and for options that the scheme refuses."""
    name, options = parsed(line, "training scheme", "int8(grad_weight=False)")
    classes = {kind.__name__: kind for kind in TRAINING.values()}
    own = {n: k for n, k in TrainingScheme.kinds.items() if k.__module__ != BitNet.__module__}
    return _made(_found(name, "training scheme", {**TRAINING, **classes, **own}), options, line)


def scheme(line: str) -> Scheme:
    """The scheme of a line. Raises ValueError for an unknown name, and for options that the scheme refuses."""
    name, options = parsed(line, "scheme", "int4(group_size=32)")
    return scheme_of(name, options)


def scheme_of(name: str, options: Mapping[str, Any]) -> Scheme:
    """The preset of this name with these options; see `scheme`."""
    made = vars(presets).items()
    full = {n: f for n, f in made if isinstance(f, FunctionType) and not n.startswith("_")}
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    own = dict(options)
    if isinstance(dtype := own.get("scale_dtype"), str):
        own["scale_dtype"] = SCALE_DTYPES.get(dtype, dtype)
    return _made(_found(name, "scheme", {**SCHEMES, **full}), own, f"{name}({given})")


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
            f"{line!r} names no {what} ({why}); accepted: a name, or a name with options such as {example}"
        ) from error


def _found(name: str, what: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}; accepted: {', '.join(known)}")
    return known[name]


def _made(kind: Callable[..., Any], options: Mapping[str, Any], line: str) -> Any:
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{line}: {error}") from error
