"""compressed-tensors, the format of llm-compressor and vLLM: "pack-quantized", "int-quantized", "float-quantized",
"mxfp8-quantized", and the two of `lowbit.formats.compressed_tensors_fp4`.

| weights                     | format          | tensors beside each `layer.`                                 |
|-----------------------------|-----------------|--------------------------------------------------------------|
| integers of 1 to 8 bits     | pack-quantized  | `weight_packed` int32 [N, ⌈K·b/32⌉], `weight_scale` [N, G],  |
|                             |                 | `weight_shape` int64 (N, K), and where asymmetric            |
|                             |                 | `weight_zero_point` int32 [⌈N·b/32⌉, G]                      |
| int8 with int8 inputs       | int-quantized   | `weight` int8 [N, K], `weight_scale`, `weight_zero_point`    |
| float8_e4m3fn               | float-quantized | `weight` float8 [N, K], `weight_scale`                       |
| MXFP8                       | mxfp8-quantized | `weight` float8 [N, K], `weight_scale` uint8 [N, K/32], e8m0 |

`weight_scale` is [N, G] for groups, [N, 1] for rows ("channel"), [1] for a whole tensor, and a scale for each block of
float8. `weight_packed` is lowbit's bit stream (`lowbit.numerics.packing`), each row padded to whole words of 32 bits.
Zero points are packed the same way along N; the zero point of a whole tensor is int8 [1]. Codes are stored with 2^(b−1)
added. Folders of compressed-tensors before 0.18.0 pack 3, 5, 6 and 7 bits in other words
(`lowbit.formats.compressed_tensors_words`). lowbit reads both, and states in a new folder which release reads it. A
static scale of the inputs is `input_scale` [1]. Those of keys and values in a cache are `k_scale` and `v_scale` [1] of
the attention layer, and "kv_cache_scheme" describes them.

"half_integer" weights of b bits, whose zero points are half a scale, are stored as b + 1 bits with the same values:
(c + ½)·s = (2c + 1)·(s/2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.convert import patterns
from lowbit.convert.siblings import MERGED
from lowbit.formats import compressed_tensors_fp4 as fp4
from lowbit.formats.base import Format, FormatError, Parts, check_matrix, layer_of
from lowbit.formats.compressed_tensors_words import DENSE_SINCE, crosses_words, in_dense_words
from lowbit.formats.integers import (
    bytes_of,
    codes_of,
    in_range,
    signed,
    unsigned,
    whole_groups,
    words_of,
)
from lowbit.formats.layer_names import is_embedding, is_listed
from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import Granularity, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from lowbit.numerics.lookup_table import E2M1, LookupTable
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.packing import pack, unpack
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.float8_tensor import E4M3, Float8Tensor, is_mxfp8
from lowbit.tensor.frozen.table_tensor import TableTensor

PACKED, INTEGERS, FLOATS, MXFP8, MIXED = (
    *("pack-quantized", "int-quantized", "float-quantized", "mxfp8-quantized"),
    "mixed-precision",
)
_PARTS = (
    *("weight_scale", "weight_packed", "weight", "weight_shape", "weight_zero_point"),
    *("weight_global_scale", "weight_g_idx"),
    *("input_scale", "input_zero_point", "input_global_scale"),
)


class CompressedTensors(Format):
    name = "compressed-tensors"
    holds_experts = True
    holds_cache_scales = True

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == self.name

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return _PARTS

    # ---- reading -------------------------------------------------------------------------------------------------

    def skips(self, config: Mapping[str, Any], layer: str) -> bool:
        if is_listed(layer, config.get("ignore")):
            return True
        group = _group_for(config, layer)
        return group is None or group.get("weights") is None

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        _check_plain_weights(config)
        group = _group_of(config, layer_of(weight))
        if group.get("output_activations") is not None:
            raise FormatError("its outputs are rounded too, which lowbit does not do")
        arguments, given = group.get("weights"), group.get("input_activations")
        if of_fp4 := fp4.is_fp4(given):
            fp4.warn_of_fp4_inputs()
        activation = None if given is None or of_fp4 else _spec_from(given, "input_activations")
        of_input = _input_parts(parts, activation)
        of_scale = parts["weight_scale"].dtype
        own_dtype = dtype or (of_scale if of_scale.itemsize > 1 else torch.bfloat16)
        if fp4.is_fp4(arguments):
            return fp4.from_parts(parts, fp4.kind_of(arguments), own_dtype, activation)
        spec = _spec_from(arguments, "weights")
        if extra := sorted({"weight_g_idx", "weight_global_scale"} & parts.keys()):
            raise FormatError(f"lowbit cannot represent its {', '.join(extra)}")
        if isinstance(spec.format, Float8):
            return _floats(parts, spec, own_dtype, activation, of_input)
        in_dense_words(parts, spec.format.bits, config.get("version"))
        return _integers(parts, spec, own_dtype, activation, of_input)

    # ---- writing -------------------------------------------------------------------------------------------------

    def encode(self, weight: LowbitTensor) -> Parts:
        if type(weight) not in (AffineTensor, Float8Tensor, TableTensor):
            raise FormatError(
                f"compressed-tensors holds integers and floats, got a {type(weight).__name__}"
            )
        assert isinstance(weight, AffineTensor)
        check_matrix(weight, self.name)
        settings = _settings(weight)  # raises for a weight that no settings describe
        of_input = {
            name: part.flatten()
            for name in ("input_scale", "input_zero_point")
            if (part := getattr(weight, name)) is not None
        }
        return {**self._weight_parts(weight, settings), **of_input}

    def _weight_parts(self, weight: AffineTensor, settings: Mapping[str, Any]) -> Parts:
        if isinstance(weight, TableTensor):
            return fp4.parts_of(weight)
        rows, columns = weight.shape
        bits, is_one = settings["weights"]["num_bits"], settings["weights"]["strategy"] == "tensor"
        found: Parts = {}
        if settings["format"] in (FLOATS, MXFP8):
            found["weight"], scale = weight.codes[:rows, :columns].contiguous(), weight.scale
        else:
            codes, scale, zero_point = codes_of(weight)
            if settings["format"] == INTEGERS:
                found["weight"] = codes
                if zero_point is not None:
                    found["weight_zero_point"] = zero_point
            else:
                found["weight_packed"] = words_of(pack(unsigned(codes, bits), bits))
                found["weight_shape"] = torch.tensor([rows, columns])
                if zero_point is not None and is_one:
                    found["weight_zero_point"] = zero_point.flatten()
                elif zero_point is not None:
                    stream = pack(unsigned(zero_point, bits).T.contiguous(), bits)
                    found["weight_zero_point"] = words_of(stream).T.contiguous()
        found["weight_scale"] = scale.flatten() if is_one else scale
        return found

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for name, weight in weights.items():
            settings = _settings(weight)
            key = json.dumps(settings, sort_keys=True)
            groups.setdefault(key, (settings, []))[1].append(layer_of(name))
        formats = {settings["format"] for settings, _ in groups.values()}
        is_one = len(groups) == 1
        least = {"version": DENSE_SINCE} if self._dense_bits(weights.values()) else {}
        return {
            "quant_method": self.name,
            **least,
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "config_groups": {
                f"group_{i}": {
                    "targets": ["Linear"] if is_one else sorted(layers),
                    **settings,
                    "output_activations": None,
                }
                for i, (settings, layers) in enumerate(groups.values())
            },
            "ignore": sorted({*plain, *_merged(plain)}),
        }

    def notes(self, weights: Mapping[str, LowbitTensor]) -> list[str]:
        if not (bits := self._dense_bits(weights.values())):
            return []
        return [
            f"codes of {' and '.join(map(str, bits))} bits: compressed-tensors >= {DENSE_SINCE} reads them, and "
            "earlier releases read other values or none"
        ]

    def _dense_bits(self, weights: Iterable[LowbitTensor]) -> list[int]:
        """The numbers of bits whose words changed in `DENSE_SINCE`."""
        settings = [_settings(weight) for weight in weights]
        bits = {own["weights"]["num_bits"] for own in settings if own["format"] == PACKED}
        return sorted(filter(crosses_words, bits))

    def joint(self, weight: AffineTensor) -> dict[str, Tensor]:
        """See `Format.joint`: vLLM keeps the largest of each."""
        own = {n: getattr(weight, n) for n in ("input_scale", "input_zero_point")}
        if isinstance(weight, TableTensor):
            own["weight_global_scale"] = weight.global_scale
        elif weight.spec.joins:
            own["weight_scale"] = weight.scale
        return {name: t for name, t in own.items() if t is not None}

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        """Rows of the same number of bits, with zero points if the weight has any; float8 stays float8."""
        spec, activation = getattr(weight, "spec", None), getattr(weight, "activation", None)
        if not isinstance(spec, Spec) or weight.ndim != 2:
            return None
        if activation is not None and _is_clipping(activation):
            activation = replace(activation, mapping=_SYMMETRIC_INPUT)
        if activation is not None and (activation.static or _why_no_activation(activation)):
            activation = None
        if isinstance(spec.format, Float8):
            return Scheme(Spec(Float8(), PerRow()), activation)
        if spec.format == E2M1 and (found := fp4.nearest_scheme(weight, activation)):
            return found
        mapping: MappingName = "asymmetric" if spec.has_zero_point else spec.mapping
        if isinstance(spec.format, LookupTable):
            mapping = "symmetric"
        return Scheme(Spec(Int(spec.format.bits), whole_groups(weight), mapping), activation)

    def rounded(self, values: Tensor, scheme: Scheme) -> LowbitTensor:
        """Searched scales. A search needs scales that take any value, which those of FP4 do not."""
        is_table = isinstance(scheme.weight.format, LookupTable)
        return (AffineTensor.from_float if is_table else AffineTensor.searched)(values, scheme)


# ---- settings of a group <-> specs ---------------------------------------------------------------------------------


def _check_plain_weights(config: Mapping[str, Any]) -> None:
    """Raise FormatError for settings that change the meaning of all weights."""
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise FormatError(
            f"the folder is sparse ({sparsity['format']}), which lowbit does not read"
        )
    if config.get("transform_config"):
        raise FormatError(
            "its weights are transformed (transform_config), which lowbit does not undo"
        )


def _group_of(config: Mapping[str, Any], layer: str) -> Mapping[str, Any]:
    """The settings of a layer. Raises FormatError if no group has the layer among its targets."""
    if (group := _group_for(config, layer)) is None:
        raise FormatError("no group of quantization_config has it among its targets")
    return group


def _group_for(config: Mapping[str, Any], layer: str) -> Mapping[str, Any] | None:
    """The first group of a layer. Exact names go before expressions, and both before the class of its module."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise FormatError(f"config_groups is {groups!r:.60}; accepted: a dict of groups by name")
    targets = [(group.get("targets") or (), group) for group in groups.values()]
    for own, group in targets:
        if layer in own:
            return group
    for own, group in targets:
        if any(target[:3] == "re:" and patterns.matches(target[3:], layer) for target in own):
            return group
    kinds = ("Embedding", "Linear") if is_embedding(layer) else ("Linear",)
    return next((group for kind in kinds for own, group in targets if kind in own), None)


_GRANULARITIES: dict[str, Callable[[Mapping[str, Any]], Granularity]] = {
    "group": lambda args: PerGroup(args["group_size"]),
    "channel": lambda args: PerRow(),
    "tensor": lambda args: PerTensor(),
    "block": lambda args: PerBlock(*args["block_structure"]),
    "token": lambda args: PerToken(),
}
"""The granularity that a "strategy" means."""

_SYMMETRIC_INPUT: MappingName = "symmetric_no_clipping_err"
"""How kernels choose the scale of a dynamic symmetric input of integers or in MXFP8, which the file does not say."""
_E8M0 = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
"""The arguments of MXFP8 beside those of floats in groups."""


def _spec_from(args: Any, what: str) -> Spec:
    """The spec that the arguments of weights or activations describe."""
    if not isinstance(args, Mapping):
        raise FormatError(f"{what} of its group is {args!r}; accepted: a dict")
    bits, kind = args.get("num_bits"), args.get("type", "int")
    strategy, symmetric = args.get("strategy"), args.get("symmetric", True)
    if (kind != "int" or bits not in range(1, 9)) and (kind, bits) != ("float", 8):
        raise FormatError(
            f"{what} are {kind} of {bits} bits; lowbit reads int of 1 to 8 bits and float of 4 and 8 bits here"
        )
    if args.get("actorder") == "group":
        raise FormatError(f"{what} have actorder 'group', which mixes the groups of a row")
    dynamic = args.get("dynamic", False)
    of_input = what != "weights"
    try:
        granularity = _GRANULARITIES[str(strategy)](args)
        if of_input and dynamic not in (True, False):
            raise ValueError(f"dynamic={dynamic!r}")
        format = Float8(E4M3) if kind == "float" else Int(int(bits or 0))
        mapping: MappingName = "symmetric" if symmetric or kind == "float" else "asymmetric"
        if of_input and kind == "int" and symmetric:
            mapping = _SYMMETRIC_INPUT
        if kind == "float" and args.get("scale_dtype") == _E8M0["scale_dtype"]:
            return Spec(format, granularity, _SYMMETRIC_INPUT, scale_format="e8m0")
        return Spec(format, granularity, mapping, static=of_input and not dynamic)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{what} {dict(args)} are not settings that lowbit represents: {error}"
        ) from error


def _merged(plain: Collection[str]) -> Iterator[str]:
    """The names of merged layers of which all parts are among these. SGLang knows the parts for some models, and for
    others, such as DeepSeek's and Kimi's, it looks for the merged name; published folders of Kimi K2 list it too."""
    for name in plain:
        around, dot, own = name.rpartition(".")
        for merged, parts in MERGED.items():
            if own == parts[0] and all(f"{around}{dot}{part}" in plain for part in parts):
                yield f"{around}{dot}{merged}"


def _settings(weight: LowbitTensor) -> dict[str, Any]:
    """The format, weights and input activations of a group for this weight. Raises FormatError if none can hold it."""
    assert isinstance(weight, AffineTensor)
    spec, activation = weight.spec, weight.activation
    if activation is not None and (why := _why_no_activation(activation)):
        raise FormatError(why)
    given = None if activation is None else _activation_settings(activation)
    if isinstance(weight, TableTensor):
        kind = fp4.kind_for(weight)
        return {"format": kind.format, "weights": kind.arguments, "input_activations": given}
    args = _number_settings(spec)
    args |= _strategy(spec, args["type"], weight.shape[-1])
    if args["num_bits"] > 8:
        raise FormatError(f"{spec.mapping} of {spec.format.bits} bits takes 9 bits there")
    args["dynamic"] = False
    written = FLOATS if args["type"] == "float" else PACKED
    written = MXFP8 if is_mxfp8(spec) else written
    if written is PACKED and args["num_bits"] == 8 and activation is not None:
        written = INTEGERS
    return {"format": written, "weights": args, "input_activations": given}


def _number_settings(spec: Spec) -> dict[str, Any]:
    args: dict[str, Any] = {"num_bits": spec.format.bits, "type": "int", "symmetric": True}
    if isinstance(spec.format, Float8):
        args["type"] = "float"
        if spec.format.dtype is not E4M3 or (spec.scales is not None and not is_mxfp8(spec)):
            raise FormatError(
                f"compressed-tensors holds {E4M3}, and MXFP8 in groups of 32, got {spec}"
            )
    elif spec.mapping == "half_integer":
        args["num_bits"] += 1
    elif spec.zero_point_is_value:
        raise FormatError(
            f"its zero points are values (mapping {spec.mapping!r}); compressed-tensors holds codes"
        )
    else:
        args["symmetric"] = not spec.has_zero_point
    return args


def _strategy(spec: Spec, kind: str, columns: int) -> dict[str, Any]:
    granularity = spec.granularity
    if isinstance(granularity, PerGroup) and (kind == "int" or is_mxfp8(spec)):
        group = granularity.group_size
        if columns % group:
            raise FormatError(f"its {columns} inputs are not a multiple of the group size {group}")
        return {"strategy": "group", "group_size": group, **(_E8M0 if is_mxfp8(spec) else {})}
    if isinstance(granularity, PerRow):
        return {"strategy": "channel"}
    if isinstance(granularity, PerTensor):
        return {"strategy": "tensor"}
    if isinstance(granularity, PerBlock) and kind == "float" and len(granularity.shape) == 2:
        return {"strategy": "block", "block_structure": list(granularity.shape)}
    raise FormatError(f"compressed-tensors holds no {kind} weights with {granularity}")


def _why_no_activation(spec: Spec) -> str | None:
    """Why a group cannot describe this rounding of inputs, or None."""
    if isinstance(spec.format, Float8) and spec.format.dtype is not E4M3:
        return f"compressed-tensors rounds inputs to {E4M3}, got {spec.format.dtype}"
    if spec.scales is not None and not is_mxfp8(spec):
        return f"compressed-tensors rounds inputs by powers of two in groups of 32, got {spec}"
    if spec.zero_point_is_value or (isinstance(spec.format, Int) and not spec.format.signed):
        return f"compressed-tensors rounds inputs to signed integers or float8, got {spec}"
    if isinstance(spec.granularity, PerTensor) != spec.static:
        return f"compressed-tensors rounds inputs with {spec.granularity} otherwise: static={not spec.static}"
    if _is_clipping(spec):
        return (
            f"its dynamic inputs have mapping {spec.mapping!r}; compressed-tensors rounds symmetric ones by "
            f"{_SYMMETRIC_INPUT!r}"
        )
    return None


def _is_clipping(spec: Spec) -> bool:
    """True for dynamic inputs of integers or in MXFP8 whose scale other readers choose in another way."""
    is_chosen = isinstance(spec.format, Int) or spec.scales is not None
    return is_chosen and spec.mapping == "symmetric" and not spec.static


def _activation_settings(spec: Spec) -> dict[str, Any]:
    is_float = isinstance(spec.format, Float8)
    symmetric = is_float or not spec.has_zero_point
    args: dict[str, Any] = {"num_bits": spec.format.bits, "type": "float" if is_float else "int"}
    args |= {"symmetric": symmetric, "dynamic": not spec.static}
    if isinstance(spec.granularity, PerGroup):
        of_scale = {} if spec.scales is None else _E8M0
        return {**args, "strategy": "group", "group_size": spec.granularity.group_size, **of_scale}
    return {**args, "strategy": "tensor" if spec.static else "token"}


# ---- tensors -------------------------------------------------------------------------------------------------------


def _input_parts(parts: Parts, activation: Spec | None) -> dict[str, Tensor]:
    if activation is None or not activation.static:
        return {}
    if not activation.has_zero_point and parts.get("input_zero_point", torch.zeros(1)).any():
        raise FormatError("its inputs are symmetric, and its input_zero_point is not 0")
    found: Parts = {}
    for name in ("input_scale", "input_zero_point"):
        if name in parts and (name == "input_scale" or activation.has_zero_point):
            part = parts[name]
            if part.numel() != 1:
                raise FormatError(f"its {name} has the shape {tuple(part.shape)}; accepted: (1,)")
            is_scale = name == "input_scale"
            own = part.float() if is_scale else in_range(part, 8, f"its {name}")
            found[name] = own.reshape(1, 1)
    return found


def _floats(
    parts: Parts, spec: Spec, dtype: torch.dtype, activation: Spec | None, of_input: Parts
) -> LowbitTensor:
    codes, scale = parts["weight"], parts["weight_scale"]
    if codes.dtype is not E4M3 or codes.ndim != 2:
        raise ValueError(
            f"its codes are {codes.dtype} {tuple(codes.shape)}; accepted: {E4M3} [N, K]"
        )
    if isinstance(spec.granularity, PerBlock):
        a, b = spec.granularity.shape
        return Float8Tensor.from_blocks(codes, scale, (a, b), dtype, activation)
    if scale.dtype is torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    scale = _for_each_block(scale, "weight_scale", spec, tuple(codes.shape))
    inner = {"codes": codes, "scale": scale, **of_input}
    return Float8Tensor.of_parts(inner, spec, codes.shape, dtype, activation)


def _integers(
    parts: Parts, spec: Spec, dtype: torch.dtype, activation: Spec | None, of_input: Parts
) -> LowbitTensor:
    bits, zero_point = spec.format.bits, parts.get("weight_zero_point")
    if "weight_packed" not in parts:
        codes = parts["weight"]
        if codes.dtype is not torch.int8 or codes.ndim != 2:
            raise ValueError(
                f"its codes are {codes.dtype} {tuple(codes.shape)}; accepted: int8 [N, K]"
            )
        shape = tuple(codes.shape)
        if bits < 8:
            codes = pack(unsigned(in_range(codes, bits, "its codes"), bits), bits)
    else:
        shape = tuple(parts["weight_shape"].flatten().tolist())
        if len(shape) != 2 or min(shape) < 0 or shape[0] != len(parts["weight_packed"]):
            raise ValueError(
                f"its weight_shape is {shape} for codes {tuple(parts['weight_packed'].shape)}; accepted: (N, K)"
            )
        codes = bytes_of(parts["weight_packed"], shape[1], bits)
        codes = (codes ^ 0x80).view(torch.int8) if bits == 8 else codes
    if any(size != padded for size, padded in zip(shape, spec.padded_shape(shape), strict=True)):
        raise ValueError(f"its shape {shape} is not a multiple of its groups, {spec.granularity}")
    scale = _for_each_block(parts["weight_scale"], "weight_scale", spec, shape)
    inner = {"codes": codes, "scale": scale, **of_input}
    if zero_point is not None and zero_point.dtype is torch.int32 and "weight_packed" in parts:
        stream = bytes_of(zero_point.T.contiguous(), shape[0], bits)
        zero_point = signed(unpack(stream, bits, shape[0]).T, bits)
    if not spec.has_zero_point and zero_point is not None and zero_point.any():
        raise ValueError("symmetric is true, and its weight_zero_point is not 0")
    if spec.has_zero_point:
        zero_point = parts["weight_zero_point"] if zero_point is None else zero_point
        zero_point = _for_each_block(zero_point, "weight_zero_point", spec, shape)
        inner["zero_point"] = in_range(zero_point, bits, "its zero points").contiguous()
    return AffineTensor.of_parts(inner, spec, shape, dtype, activation)


def _for_each_block(part: Tensor, name: str, spec: Spec, shape: tuple[int, ...]) -> Tensor:
    blocks = spec.blocks(shape)
    if part.numel() != math.prod(blocks):
        raise ValueError(
            f"its {name} has the shape {tuple(part.shape)}, and {spec.granularity} takes {blocks}: config.json "
            "describes another weight"
        )
    return part.reshape(blocks)
