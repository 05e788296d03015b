"""Translates the settings of AutoRound, quant_method "auto-round", to those of the format whose tensors it writes.

| packing_format                                       | tensors            | zero points  |
|------------------------------------------------------|--------------------|--------------|
| auto_round:auto_gptq, auto_round:gptq, auto, none    | GPTQ               | less one     |
| auto_round, auto_round:gptqmodel, and other kernels  | GPTQ               | as they are  |
| auto_round:auto_awq, auto_round:awq                  | AWQ                | as they are  |
| auto_round:llm_compressor                            | compressed-tensors | none         |

The last holds MXFP4, MXFP8 and NVFP4, by "data_type" and "bits", and the same for inputs, by "act_bits".

AutoRound writes no `g_idx`. Symmetric scales have the sign of the value that goes to the lowest code, so half of them
are negative. "extra_config" has the settings of single layers, by name or by an expression; 16 bits or more: plain.

Source: Cheng et al., arXiv 2309.05516; folders that AutoRound 0.16.1 wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lowbit.formats.base import FormatError

METHODS = ("auto-round", "intel/auto-round")
_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq", "auto", None)
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_KERNELS = ("gptqmodel", "exllamav2", "tritonv2", "triton", "torch", "marlin", "humming", "ark")
_AS_THEY_ARE = ("auto_round", *(f"auto_round:{kernel}" for kernel in _KERNELS))
_FLOATS = "auto_round:llm_compressor"
_KINDS = {
    **dict.fromkeys(("mx_fp", "mx_fp4", "mx_fp8", "mx_fp_rceil"), ("group", 32, "torch.uint8")),
    **dict.fromkeys(
        ("nv_fp", "nv_fp4", "nv_fp4_with_static_gs"), ("tensor_group", 16, "torch.float8_e4m3fn")
    ),
}
"""For each data_type of floats the strategy, the group size and the dtype of the scales in compressed-tensors."""
_ROTATIONS = ("rotation_config", "spinquant_config")


def translated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A "quantization_config" of AutoRound as one of GPTQ, AWQ or compressed-tensors; any other config as it is.

    Raises FormatError for weights that AutoRound packs in other words, and for rotated weights.
    """
    if config.get("quant_method") not in METHODS:
        return config
    packing = config.get("packing_format")
    if packing not in (*_LESS_ONE, *_AWQ, *_AS_THEY_ARE, _FLOATS):
        raise FormatError(
            f"packing_format is {packing!r}; lowbit reads those of GPTQ and AWQ, such as 'auto_round:auto_gptq', and "
            f"{_FLOATS!r}"
        )
    if rotated := [key for key in _ROTATIONS if config.get(key)]:
        raise FormatError(f"its weights are rotated ({rotated[0]}), which lowbit does not undo")
    layers = config.get("extra_config") or {}
    if packing == _FLOATS:
        return _of_floats(config, layers)
    for settings in (config, *layers.values()):
        _check(settings)
    found = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    ordered = sorted(layers, key=_is_expression)  # exact names first
    found["dynamic"] = dict(_entry(name, layers[name]) for name in ordered)
    if packing in _AWQ:
        return {**found, "quant_method": "awq", "version": "gemm", "zero_point": not found["sym"]}
    version = "gptq" if packing in _LESS_ONE else "gptq_v2"
    return {**found, "quant_method": "gptq", "checkpoint_format": version, "dense_words": True}


def _of_floats(
    config: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The settings as those of compressed-tensors, a group for all layers and one for each that differs."""
    targets = {name: f"re:{name}" if _is_expression(name) else name for name in layers}
    plain = [targets[name] for name, own in layers.items() if _is_plain(own)]
    if not any(name.rpartition(".")[2] == "lm_head" for name in layers):
        plain.append("lm_head")
    groups = {"group_0": _group(config, "Linear")}
    for name, own in layers.items():
        if not _is_plain(own):
            given = {key: value for key, value in own.items() if value is not None}
            groups[f"group_{len(groups)}"] = _group({**config, **given}, targets[name])
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": plain}


def _group(settings: Mapping[str, Any], target: str) -> dict[str, Any]:
    weights = _arguments(settings.get("data_type"), settings.get("bits"))
    inputs, bits = None, settings.get("act_bits")
    if bits is not None and bits < 16:
        kind = settings.get("act_data_type") or settings.get("data_type")
        inputs = {**_arguments(kind, bits), "dynamic": True}
    return {"targets": [target], "weights": weights, "input_activations": inputs}


def _arguments(kind: Any, bits: Any) -> dict[str, Any]:
    """The arguments of weights or inputs in these floats. Raises FormatError for others."""
    strategy, size, scales = _KINDS.get(str(kind), ("", 0, ""))
    if not strategy or bits not in ((4, 8) if size == 32 else (4,)):
        raise FormatError(
            f"data_type is {kind!r} with {bits!r} bits; lowbit reads 'mx_fp' with 4 and 8 bits and 'nv_fp' with 4 bits "
            f"in {_FLOATS!r}"
        )
    found = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return {**found, "group_size": size, "scale_dtype": scales, "dynamic": False}


_DEFAULTS = {"bits": 4, "group_size": 128, "sym": True}


def _check(settings: Mapping[str, Any]) -> None:
    """Raise FormatError for numbers other than integers, and for rounded inputs, whose tensors have other names."""
    if _is_plain(settings):
        return
    kind, inputs = settings.get("data_type") or "int", settings.get("act_bits") or 16
    if not str(kind).startswith("int") or inputs < 16:
        raise FormatError(
            f"data_type is {kind!r} and act_bits {inputs!r}; lowbit reads the integers of AutoRound whose inputs are "
            "not rounded"
        )


def _is_plain(settings: Mapping[str, Any]) -> bool:
    bits = settings.get("bits")
    return bits is not None and bits >= 16


def _is_expression(name: str) -> bool:
    return re.fullmatch(r"[\w.\-]+", name) is None


def _entry(name: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The entry of GPTQModel's "dynamic" for a layer."""
    expression = name if _is_expression(name) else f"^{re.escape(name)}$"
    if _is_plain(settings):
        return f"-:{expression}", {}
    own = {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
    return f"+:{expression}", {**own, **({"zero_point": not own["sym"]} if "sym" in own else {})}
