"""torchao's safetensors, "torchao": Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor and MXTensor.

| class                      | weights                                | tensors beside `layer.`                      |
|----------------------------|----------------------------------------|----------------------------------------------|
| `Int8Tensor`               | int8 in rows, inputs int8 or not       | `_weight_qdata` int8, `_weight_scale`        |
| `IntxUnpackedToInt8Tensor` | integers of 1 to 8 bits, rows or       | these, and `_weight_zero_point` int8;        |
|                            | groups, inputs int8 asymmetric or not  | a byte a code                                |
| `Float8Tensor`             | float8_e4m3fn, rows, tensors or blocks | `_weight_qdata` float8, `_weight_scale`      |
|                            |                                        | float32                                      |
| `MXTensor`                 | MXFP8, inputs MXFP8 or not             | `lowbit.formats.torchao_mxfp8`               |

    value = (qdata − zero_point) · scale, with a scale for each `block_size`

The class and attributes of each weight are JSON beside the tensors of the shard: {"layer.weight": {"_type": …, "_data":
{…}, "_tensor_data_names": […]}, "tensor_names": […]}. config.json names one configuration for the model, which
transformers takes for the class of its linears, so a folder holds one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import torchao_mxfp8 as mxfp8
from lowbit.formats.base import Format, FormatError, Parts, check_matrix
from lowbit.formats.integers import (
    IntegerLayout,
    from_integers,
    in_range,
    integers_of,
    layout_of,
    whole_groups,
)
from lowbit.formats.torchao_mxfp8 import typed
from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import Granularity, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.float8_tensor import E4M3, Float8Tensor, is_mxfp8

QDATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_PREFIX = "_weight_"
_UNREAD = tuple(f"{_PREFIX}act_{name}" for name in ("quant_scale", "quant_zero_point", "pre_scale"))
"""Static scales of inputs, and factors of inputs: without these a layer computes something else."""
INT8_INPUT = Spec(Int(8), PerToken(), "symmetric_no_clipping_err")
INTX_INPUT = Spec(Int(8), PerToken(), "asymmetric")
FLOAT8_INPUT = Spec(Float8(), PerToken())
_NAMED = "tensor_names"
_INTS = {f"int{bits}" for bits in range(1, 9)}


class TorchAo(Format):
    name = "torchao"

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "torchao"

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return QDATA, SCALE, ZERO, *_UNREAD

    # ---- reading -------------------------------------------------------------------------------------------------

    def settings(self, config: Mapping[str, Any], metadata: Mapping[str, str]) -> Mapping[str, Any]:
        """`config` with "tensors": the class and attributes of each weight."""
        described: dict[str, Any] = {}
        for name, text in metadata.items():
            if name in (_NAMED, "format"):
                continue
            try:
                entry = json.loads(text)
                if entry["_type"] != "Tensor":
                    described[name] = {"_type": entry["_type"], **_plain_json(entry["_data"])}
            except (LookupError, TypeError, ValueError) as error:
                raise FormatError(f"its shards describe {name} as {text:.80}") from error
        return {**config, "tensors": described}

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        described = config.get("tensors", {}).get(weight)
        if described is None:
            raise FormatError("no shard describes it: its header has no entry of this name")
        if unread := [part for part in _UNREAD if part in parts]:
            raise FormatError(f"lowbit cannot represent its {', '.join(unread)}")
        codes, own = parts[QDATA], getattr(torch, str(described.get("dtype")), None)
        own = own if isinstance(own, torch.dtype) else dtype or torch.bfloat16
        block, kind = described.get("block_size"), described["_type"]
        if kind == mxfp8.KIND:
            return mxfp8.from_parts(codes, parts[SCALE], described)
        if codes.ndim != 2 or not (isinstance(block, list) and len(block) == 2):
            raise FormatError(
                f"its codes are {tuple(codes.shape)} in blocks of {block}; accepted: [N, K]"
            )
        if kind == "Float8Tensor":
            return _float8(codes, parts[SCALE], block, own, described)
        bits, activation = _integers_as(described)
        if block[0] != 1 or codes.dtype is not torch.int8:
            raise FormatError(
                f"its codes are {codes.dtype} in blocks of {block}; accepted: int8 in rows or groups"
            )
        zeros = parts.get(ZERO)
        if zeros is not None and zeros.dtype is not torch.int8:
            raise FormatError(f"its zero points are {zeros.dtype}; accepted: int8")
        scale = parts[SCALE]
        zeros = torch.zeros_like(scale, dtype=torch.int8) if zeros is None else zeros
        has_zero = bits == 1 or bool(zeros.any())  # no symmetric mapping has codes of one bit
        codes = in_range(codes, bits, "its codes")
        zeros = in_range(zeros, bits, "its zero points")
        layout = IntegerLayout(bits, None if block[1] == codes.shape[1] else block[1], has_zero)
        if scale.shape != layout.spec.blocks(codes.shape):
            raise FormatError(f"its scales are {tuple(scale.shape)} for blocks of {block}")
        return from_integers(layout, codes, scale, zeros if has_zero else None, own, activation)

    # ---- writing -------------------------------------------------------------------------------------------------

    def encode(self, weight: LowbitTensor) -> Parts:
        described = _described(weight)
        assert isinstance(weight, AffineTensor)
        if described["_type"] == mxfp8.KIND:
            return {_PREFIX + name: part for name, part in mxfp8.parts_of(weight).items()}
        if described["_type"] == "Float8Tensor":
            rows, columns = weight.shape
            codes = weight.codes[:rows, :columns].contiguous()
            return {QDATA: codes, SCALE: weight.scale.float()}
        layout = layout_of(weight, self.name)
        codes, scale, zeros = integers_of(weight, layout)
        found = {QDATA: codes, SCALE: scale.contiguous()}
        if described["_type"] != "Int8Tensor":
            zeros = torch.zeros_like(scale, dtype=torch.int8) if zeros is None else zeros
            found[ZERO] = zeros.contiguous()
        return found

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        wanted = {json.dumps(_config_of(weight), sort_keys=True) for weight in weights.values()}
        if len(wanted) > 1:
            raise FormatError(
                f"{self.name} has one configuration for a model, got {sorted(wanted)}"
            )
        return {
            "quant_method": self.name,
            "quant_type": {"default": json.loads(wanted.pop())},
            "modules_to_not_convert": sorted(plain) or None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def metadata(
        self, weights: Mapping[str, LowbitTensor], plain: Collection[str]
    ) -> dict[str, str]:
        # Its reader splits each name at a dot, so a plain `final_logits_bias` of BART is not listed.
        named = [*weights, *(name for name in plain if "." in name)]
        found = {"format": "pt", _NAMED: json.dumps(named)}
        found |= dict.fromkeys(plain, json.dumps({"_type": "Tensor"}))
        for name, weight in weights.items():
            attributes = _described(weight)
            kind = attributes.pop("_type")
            names = [part.removeprefix(_PREFIX) for part in (QDATA, SCALE, ZERO)]
            has_zero = kind == "IntxUnpackedToInt8Tensor"
            entry = {
                "_type": kind,
                "_data": attributes,
                "_tensor_data_names": names[: 2 + has_zero],
            }
            found[name] = json.dumps(entry)
        return found

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        spec = getattr(weight, "spec", None)
        if weight.ndim != 2 or not isinstance(spec, Spec):
            return None
        if isinstance(spec.format, Float8):
            return Scheme(Spec(Float8(), PerRow()))
        zero = spec.has_zero_point
        mapping: MappingName = "asymmetric" if zero else "symmetric"
        return Scheme(Spec(Int(spec.format.bits), whole_groups(weight), mapping))


# ---- weights <-> the JSON of their attributes ------------------------------------------------------------------------


def _plain_json(data: Any) -> Any:
    """{"_type": …, "_data": x} as x, everywhere inside."""
    if isinstance(data, dict):
        inner = data["_data"] if data.keys() >= {"_type", "_data"} else data
        if inner is not data:
            return _plain_json(inner)
        return {key: _plain_json(value) for key, value in data.items()}
    return [_plain_json(value) for value in data] if isinstance(data, list) else data


def _dtype_json(dtype: torch.dtype) -> dict[str, Any]:
    return typed("torch.dtype", str(dtype).removeprefix("torch."))


_ROW = typed("PerRow", {"dim": -1})


def _described(weight: LowbitTensor) -> dict[str, Any]:
    """The class and attributes of a weight, which may be on meta. Raises FormatError if torchao has no class."""
    if isinstance(weight, Float8Tensor):
        return _described_float8(weight)
    layout = layout_of(weight, "torchao")
    assert isinstance(weight, AffineTensor)
    activation, columns = weight.activation, weight.shape[1]
    block = [1, layout.group_size or columns]
    head = {"block_size": block, "dtype": _dtype_json(weight.dtype)}
    rows_of_8 = layout == IntegerLayout(8, None, False)
    if rows_of_8 and activation in (None, INT8_INPUT):
        symmetric = {"mapping_type": typed("MappingType", "SYMMETRIC"), "reduce_range": False}
        rounds = typed("QuantizeTensorToInt8Kwargs", {"granularity": _ROW, **symmetric})
        inputs = None if activation is None else rounds
        return {"_type": "Int8Tensor", "act_quant_kwargs": inputs, "reduce_range": False, **head}
    if activation not in (None, INTX_INPUT):
        raise FormatError(
            f"torchao rounds the inputs of such weights as {INTX_INPUT}, got {activation}"
        )
    return {
        "_type": "IntxUnpackedToInt8Tensor",
        "target_dtype": typed("torch.dtype", f"int{layout.bits}"),
        **head,
        "activation_quantization": None if activation is None else "int8_asym_per_token",
    }


def _described_float8(weight: Float8Tensor) -> dict[str, Any]:
    check_matrix(weight, "torchao")
    if is_mxfp8(weight.spec):
        return {"_type": mxfp8.KIND, **mxfp8.attributes_of(weight)}
    spec, activation = weight.spec, weight.activation
    if spec.format != Float8() or spec.scales is not None:
        raise FormatError(f"torchao holds {E4M3}, and MXFP8 in groups of 32, got {spec}")
    if activation is not None:
        raise FormatError(
            "the inputs of a Float8Tensor are rounded by torchao's kernel for one GPU or another, not by a rule of the "
            f"file; accepted: a weight-only scheme, got {activation}"
        )
    if spec.padded_shape(weight.shape) != tuple(weight.shape):
        raise FormatError(
            f"its shape {tuple(weight.shape)} has no whole blocks of {spec.granularity}"
        )
    return {
        "_type": "Float8Tensor",
        "block_size": list(spec.block_size(weight.shape)),
        "mm_config": None,
        "act_quant_kwargs": None,
        "kernel_preference": typed("KernelPreference", "AUTO"),
        "dtype": _dtype_json(weight.dtype),
    }


def _config_of(weight: LowbitTensor) -> dict[str, Any]:
    """The configuration, for transformers, whose weights are of this class."""
    kind = _described(weight)["_type"]
    assert isinstance(weight, AffineTensor)
    rounds = weight.activation is not None
    row = {**_ROW, "_version": 1}
    if kind == mxfp8.KIND:
        return {**mxfp8.config_of(weight), "_version": 1}
    if kind == "Float8Tensor":
        name, data = "Float8WeightOnlyConfig", {"weight_dtype": _dtype_json(E4M3)}
    elif kind == "Int8Tensor":
        name = "Int8DynamicActivationInt8WeightConfig" if rounds else "Int8WeightOnlyConfig"
        data = {"granularity": row}
    else:
        group = layout_of(weight, "torchao").group_size
        kind, sizes = ("PerGroup", {"group_size": group}) if group else ("PerAxis", {"axis": 0})
        granularity = {**typed(kind, sizes), "_version": 1}
        name = "Int8DynamicActivationIntxWeightConfig" if rounds else "IntxWeightOnlyConfig"
        prefix = "weight_" if rounds else ""
        data = {
            "weight_dtype": typed("torch.dtype", f"int{layout_of(weight, 'torchao').bits}"),
            f"{prefix}granularity": granularity,
        }
    return {**typed(name, data), "_version": 2}


def _integers_as(described: Mapping[str, Any]) -> tuple[int, Spec | None]:
    """Bits and activation of a weight of integers."""
    if described["_type"] == "Int8Tensor":
        inputs = described.get("act_quant_kwargs")
        if inputs is None:
            return 8, None
        # PerRow is {"dim": -1}; PerTensor has no attributes
        if inputs.get("granularity") == {"dim": -1} and inputs.get("mapping_type") == "SYMMETRIC":
            return 8, INT8_INPUT
        raise FormatError(f"its inputs are rounded as {inputs}; accepted: symmetric rows")
    target, inputs = str(described.get("target_dtype")), described.get("activation_quantization")
    is_known = described["_type"] == "IntxUnpackedToInt8Tensor" and target in _INTS
    if not is_known or inputs not in (None, "int8_asym_per_token"):
        raise FormatError(
            f"it is a {described['_type']} of {target} with inputs {inputs}; lowbit reads Int8Tensor, "
            "IntxUnpackedToInt8Tensor, Float8Tensor and MXTensor"
        )
    return int(target[3:]), INTX_INPUT if inputs else None


def _float8(
    codes: Tensor, scale: Tensor, block: list[int], dtype: torch.dtype, described: Mapping[str, Any]
) -> LowbitTensor:
    granularity: Granularity
    if described.get("act_quant_kwargs") is not None:
        inputs = described["act_quant_kwargs"].get("granularity")
        if inputs != {"dim": -1}:
            raise FormatError(f"its inputs are rounded as {inputs}; accepted: rows")
    activation = FLOAT8_INPUT if described.get("act_quant_kwargs") is not None else None
    rows, columns = codes.shape
    if block == [1, columns]:
        granularity = PerRow()
    elif block == [rows, columns]:
        granularity = PerTensor()
    elif block[0] == 1:
        granularity = PerGroup(block[1])
    else:
        granularity = PerBlock(block[0], block[1])
    spec = Spec(Float8(codes.dtype), granularity) if codes.dtype is E4M3 else None
    if spec is None:
        raise FormatError(f"its codes are {codes.dtype}; accepted: {E4M3}")
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    codes, scale = codes.contiguous(), scale.contiguous()
    return Float8Tensor(codes, scale, None, spec, codes.shape, dtype, activation)
