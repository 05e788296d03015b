"""The float8 blocks of DeepSeek-V3 (arXiv 2412.19437), "fp8", and the float8 tensors of AutoFP8 and vLLM.

    layer.weight             float8_e4m3fn [N, K]
    layer.weight_scale_inv   float32 [N/128, K/128]; despite its name it multiplies:
                             value[n, k] = weight[n, k] · weight_scale_inv[n // 128, k // 128]

    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128], "modules_to_not_convert": […]}

Scales as float8_e8m0fnu, or as uint8 with its bits, are read too. With "scale_fmt": "ue8m0" (DeepSeek-V3.1) all scales
are powers of two, and those of the inputs too, as in DeepSeek's own inference code. Weights of both have the
`scale_format` "e8m0": whatever gives them new values chooses powers of two again.

Engines of this format round the input of every product to float8, with a scale for each 128 elements of a token, even
if the weight was not made for that. transformers computes the size of a block as N / rows of the scale, so it would
read wrong weights of a ragged N without an error: `encode` takes whole blocks only. A published ragged weight is
written back as it was (`encode_back`).

Without "weight_block_size" a weight has one scale, or one a row. Such weights are read, and written back:

    layer.weight         float8_e4m3fn [N, K]
    layer.weight_scale   float32, one element, or [N, 1]; it multiplies
    layer.input_scale    float32, one element, if activation_scheme is "static": the scale of inputs.
                         "dynamic": inputs have a scale for each token

These are the names of AutoFP8 and vLLM. transformers calls the scales weight_scale_inv and activation_scale.

DeepSeek-V4 has experts in MXFP4 beside such blocks, and names all scales `layer.scale`. They are read, and written:

    layer.weight   int8 [N, K/2], even k in the low nibble
    layer.scale    float8_e8m0fnu [N, K/32]

lowbit rounds no inputs of these experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import (
    Format,
    FormatError,
    Parts,
    check_matrix,
    check_plain_inputs,
    weight_of,
)
from lowbit.formats.compressed_tensors_fp4 import MXFP4, from_parts
from lowbit.numerics.granularity import PerBlock, PerRow, PerTensor, PerToken
from lowbit.numerics.number_format import Float8
from lowbit.numerics.scale_format import E8M0, is_power_of_two
from lowbit.numerics.spec import Spec
from lowbit.schemes.mixed_precision import (
    BLOCK,
    BLOCK_ACTIVATION,
    BLOCK_WEIGHT,
    UE8M0_BLOCK_ACTIVATION,
    UE8M0_BLOCK_WEIGHT,
)
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.float8_tensor import E4M3, SCALE_OF_BLOCKS, Float8Tensor
from lowbit.tensor.frozen.table_tensor import TableTensor

_NAMES = {
    **{name: name for name in ("weight_scale", "weight", "input_scale")},
    "weight_scale_inv": "weight_scale",
    "activation_scale": "input_scale",
}
"""The part of a weight without blocks for each name of a tensor."""
_SCHEMES = {
    "dynamic": Spec(Float8(), PerToken()),
    "static": Spec(Float8(), PerTensor(), static=True),
}
"""How inputs of weights without blocks are rounded, by activation_scheme."""
_INPUTS = {
    BLOCK_WEIGHT: (BLOCK_ACTIVATION,),
    UE8M0_BLOCK_WEIGHT: (UE8M0_BLOCK_ACTIVATION, BLOCK_ACTIVATION),
}
"""How inputs beside each kind of block may be rounded."""


class Float8Blocks(Format):
    name = "fp8"
    holds_experts = True

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "fp8"

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return (
            (SCALE_OF_BLOCKS, "weight")
            if _in_blocks(config)
            else ("weight_scale", "weight", "input_scale")
        )

    def find(self, names: Collection[str], config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        if _in_blocks(config):
            found, every = super().find(names, config), {*names}
            for name in () if found else names:  # the names of DeepSeek-V4
                codes = f"{name.removesuffix('scale')}weight"
                if name.endswith(".scale") and codes in every:
                    found[codes] = {SCALE_OF_BLOCKS: name, "weight": codes}
            return found
        known: dict[str, dict[str, str]] = {}
        for name in names:
            layer, _, last = name.rpartition(".")
            if (
                last in _NAMES
                and known.setdefault(layer, {}).setdefault(_NAMES[last], name) != name
            ):
                raise FormatError(
                    f"{known[layer][_NAMES[last]]} and {name} are one part; rename one"
                )
        for parts in known.values():
            alone = sorted({"weight_scale", "input_scale"} & parts.keys())
            if alone and not {"weight", "weight_scale"} <= parts.keys():
                raise FormatError(
                    f"config.json says {self.name}, and {parts[alone[0]]} has no weight and weight_scale beside it"
                )
        return {weight_of(layer): p for layer, p in known.items() if "weight_scale" in p}

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        block, rounds = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
        codes = parts["weight"]
        if codes.dtype is torch.int8 and block is not None:
            return _mxfp4(parts, dtype or torch.bfloat16)
        if codes.dtype is not E4M3:
            raise FormatError(f"its codes are {codes.dtype}, not {E4M3}")
        if rounds not in _SCHEMES:
            raise FormatError(f"activation_scheme is {rounds!r}; accepted: {', '.join(_SCHEMES)}")
        if block is None:
            return whole_weight(parts, rounds, dtype or torch.bfloat16)
        if not isinstance(block, list | tuple) or len(block) != 2:
            raise FormatError(
                f"weight_block_size is {block!r}; lowbit reads two sizes, such as [128, 128], and none"
            )
        if rounds != "dynamic":
            raise FormatError(f"activation_scheme is {rounds!r}; accepted with blocks: 'dynamic'")
        if not all(type(size) is int for size in block):
            raise FormatError(f"weight_block_size is {block!r}; accepted: whole numbers")
        scale = parts[SCALE_OF_BLOCKS]
        activation = BLOCK_ACTIVATION
        if config.get("scale_fmt") == "ue8m0":
            scale, activation = _as_powers(scale), UE8M0_BLOCK_ACTIVATION
        return Float8Tensor.from_blocks(
            codes, scale, (block[0], block[1]), dtype or torch.bfloat16, activation
        )

    def encode(self, weight: LowbitTensor) -> Parts:
        accepted = _INPUTS.get(weight.spec) if type(weight) is Float8Tensor else None
        if accepted is None:
            spec = getattr(weight, "spec", type(weight).__name__)
            raise FormatError(f"fp8 holds float8_e4m3fn in blocks of {BLOCK} x {BLOCK}, got {spec}")
        check_matrix(weight, self.name)
        if any(size % BLOCK for size in weight.shape):
            raise FormatError(
                f"its shape {tuple(weight.shape)} is not a multiple of {BLOCK}: transformers would misread its blocks"
            )
        assert isinstance(weight, Float8Tensor)
        if weight.activation not in (None, *accepted):
            raise FormatError(
                f"fp8 rounds inputs as {accepted[0]}, and the weight was made for {weight.activation}"
            )
        return self.encode_back(weight)

    def encode_back(self, weight: LowbitTensor) -> Parts:
        """Blocks of any size, the last of which may be ragged; and weights with one scale, or one a row."""
        check_matrix(weight, self.name)
        if type(weight) is TableTensor and MXFP4.spec.same_values(weight.spec):
            check_plain_inputs(weight, self.name)
            codes = weight.codes.contiguous().view(torch.int8)
            return {"weight": codes, SCALE_OF_BLOCKS: weight.scale.contiguous()}
        if type(weight) is not Float8Tensor or weight.codes.dtype is not E4M3:
            raise FormatError(f"fp8 holds {E4M3}, got {weight.stored_format()}")
        found = whole_parts(weight)
        if isinstance(weight.spec.granularity, PerBlock):
            return {"weight": found["weight"], SCALE_OF_BLOCKS: found["weight_scale"]}
        return found

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        every: list[Any] = [*weights.values()]
        rounded = {w.activation for w in every}
        are_powers = (
            all(w.spec == UE8M0_BLOCK_WEIGHT for w in every) and BLOCK_ACTIVATION not in rounded
        )
        if UE8M0_BLOCK_ACTIVATION in rounded and not are_powers:
            raise FormatError(
                "fp8 rounds the inputs of all weights by powers of two, as scale_fmt says, or of none; some of these "
                "were made for one and some for the other"
            )
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            **({"scale_fmt": "ue8m0"} if every and are_powers else {}),
            "modules_to_not_convert": sorted(plain),
        }

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        if weight.ndim != 2 or any(size % BLOCK for size in weight.shape):
            return None
        return Scheme(Spec(Float8(), PerBlock(BLOCK, BLOCK)), BLOCK_ACTIVATION)


def _check_floating(scale: Tensor, name: str) -> None:
    if not scale.is_floating_point():
        raise FormatError(f"its {name} is {scale.dtype}; accepted: floating-point numbers")


def _as_powers(scale: Tensor) -> Tensor:
    """The bytes of scales that are powers of two, as "scale_fmt" says. Raises FormatError for others."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scale
    _check_floating(scale, SCALE_OF_BLOCKS)
    if not bool(is_power_of_two(scale.float()).all()):
        raise FormatError(
            f"scale_fmt is 'ue8m0', and its {SCALE_OF_BLOCKS} has scales that are not powers of two from 2^-126 to "
            "2^127; accepted: such scales, or a config.json without scale_fmt"
        )
    return E8M0.bytes_of(scale)


def _in_blocks(config: Mapping[str, Any]) -> bool:
    """True if weights have scales of blocks. They also have them in a folder without settings."""
    return not config or config.get("weight_block_size") is not None


def _mxfp4(parts: Parts, dtype: torch.dtype) -> LowbitTensor:
    """A matrix of an expert whose bytes are two numbers of FP4."""
    scale = parts[SCALE_OF_BLOCKS]
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise FormatError(
            f"its scales are {scale.dtype}; accepted beside FP4: {torch.float8_e8m0fnu}"
        )
    packed = {"weight_packed": parts["weight"].view(torch.uint8), "weight_scale": scale}
    return from_parts(packed, MXFP4, dtype, None)


def whole_parts(weight: Float8Tensor) -> Parts:
    """The parts of a weight with one scale, or one a row."""
    rows, columns = weight.shape
    found = {
        "weight": weight.codes[:rows, :columns].contiguous(),
        "weight_scale": weight.scale_values().float(),
    }
    return found if weight.input_scale is None else {**found, "input_scale": weight.input_scale}


def whole_weight(parts: Parts, rounds: str, dtype: torch.dtype) -> LowbitTensor:
    """A weight with one scale, or one a row. `rounds`: "dynamic" or "static"."""
    activation = _SCHEMES[rounds]
    _check_floating(parts["weight_scale"], "weight_scale")
    codes, scale = parts["weight"], parts["weight_scale"].float()
    if codes.ndim != 2:
        raise FormatError(f"its codes have the shape {tuple(codes.shape)}; accepted: [N, K]")
    is_one = scale.numel() == 1
    if not is_one and (scale.numel() != len(codes) or scale.ndim > 2):
        raise FormatError(
            f"its weight_scale has the shape {tuple(scale.shape)} for codes {tuple(codes.shape)}; accepted: one "
            "element, or one a row"
        )
    inner: dict[str, Tensor] = {"codes": codes, "scale": scale.reshape(-1, 1)}
    if activation.static != ("input_scale" in parts):
        has = "no" if activation.static else "an"
        raise FormatError(
            f"it has {has} input_scale, and activation_scheme is {'static' if activation.static else 'dynamic'!r}"
        )
    if activation.static:
        _check_floating(parts["input_scale"], "input_scale")
        given = parts["input_scale"].float()
        if given.numel() != 1 or not (torch.isfinite(given).all() and (given > 0).all()):
            raise FormatError(
                f"its input_scale is {given.flatten().tolist()!r:.60}; accepted: one number > 0"
            )
        inner["input_scale"] = given.reshape(1, 1)
    spec = Spec(Float8(E4M3), PerTensor() if is_one and len(codes) != 1 else PerRow())
    return Float8Tensor.of_parts(inner, spec, codes.shape, dtype, activation)
