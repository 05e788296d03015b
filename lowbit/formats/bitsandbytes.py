"""LLM.int8() of bitsandbytes, "bitsandbytes-int8": rows of int8 with the largest magnitude of each row.

    layer.weight          int8 [N, K]
    layer.SCB             float32 [N]
    layer.weight_format   uint8, 0: row-major

    value[n, k] = weight[n, k] · SCB[n] / 127

    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true, "llm_int8_threshold": 6.0, …}

bitsandbytes multiplies by float32(1/127) after the scale. `encode` takes weights for which this product gives the same
values, such as those with scales of bfloat16. `decode` takes SCB / 127 in float32 as the scale. The package then rounds
twice and lowbit once, so few values differ in the last bit.

The package rounds inputs to int8, a scale a token, except columns that have a value above `llm_int8_threshold`. A
threshold of 0 rounds all columns, which is the activation of `Int8DynamicActivationInt8Weight`. With any other
threshold lowbit reads the weights only.

Source: Dettmers et al., arXiv 2208.07339.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lowbit.formats.base import Format, FormatError, Parts, ScalesError, with_qparams
from lowbit.formats.integers import IntegerLayout, from_integers, integers_of, layout_of
from lowbit.numerics.granularity import PerRow, PerToken
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor

INVERSE = 7.874015718698502e-3
"""float32(1/127), the constant of the package."""
ROUNDED_INPUT = Spec(Int(8), PerToken(), "symmetric_no_clipping_err")
_LAYOUT = IntegerLayout(8, None, False)


class BitsandbytesInt8(Format):
    name = "bitsandbytes-int8"
    holds_float32 = False
    scale_dtype = torch.bfloat16  # the constant of the package does not change its values

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "bitsandbytes" and bool(config.get("load_in_8bit"))

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return "SCB", "weight", "weight_format"

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        codes, largest = parts["weight"], parts["SCB"]
        if codes.dtype is not torch.int8 or codes.ndim != 2:
            got = f"{codes.dtype} {tuple(codes.shape)}"
            raise FormatError(f"its codes are {got}; accepted: int8 [N, K]")
        if largest.numel() != len(codes):
            raise FormatError(f"its SCB has {largest.numel()} values for {len(codes)} rows")
        if "weight_format" in parts and (order := int(parts["weight_format"])):
            raise FormatError(f"its weight_format is {order}; accepted: 0, row-major")
        scale = (largest.double().view(-1, 1) / 127).float()
        activation = ROUNDED_INPUT if config.get("llm_int8_threshold", 6.0) == 0 else None
        return from_integers(_LAYOUT, codes, scale, None, dtype or torch.float16, activation)

    def encode(self, weight: LowbitTensor) -> Parts:
        self._check(weight)
        assert isinstance(weight, AffineTensor)
        codes, scale, _ = integers_of(weight, _LAYOUT)
        largest = (scale.double() * 127).float()
        theirs = (codes * largest * INVERSE).to(weight.dtype)
        if changed := int((theirs != weight.dequantize()).sum()):
            raise ScalesError(
                f"bitsandbytes would compute other values of {changed} of its elements: its scales, {scale.dtype}, are "
                "not multiples of 1/127"
            )
        order = torch.tensor(0, dtype=torch.uint8)
        return {"weight": codes, "SCB": largest.flatten(), "weight_format": order}

    def _check(self, weight: LowbitTensor) -> None:
        layout = layout_of(weight, self.name)
        assert isinstance(weight, AffineTensor)
        if layout != _LAYOUT:
            raise FormatError(f"{self.name} holds symmetric rows of 8 bits, got {weight.spec}")
        if weight.activation not in (None, ROUNDED_INPUT):
            raise FormatError(
                f"{self.name} rounds inputs as {ROUNDED_INPUT}, and not as {weight.activation}"
            )

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        rounds = {getattr(weight, "activation", None) is not None for weight in weights.values()}
        if len(rounds) > 1:
            raise FormatError(
                f"{self.name} has one threshold for a model, and some weights have an activation and some have none"
            )
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": 0.0 if rounds == {True} else 6.0,
            "llm_int8_skip_modules": sorted(plain),
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        if weight.ndim != 2:
            return None
        given = getattr(weight, "activation", None)
        activation = given if given == ROUNDED_INPUT else None
        return Scheme(Spec(Int(8), PerRow(), "symmetric_no_clipping_err"), activation)

    def rounded(self, values: torch.Tensor, scheme: Scheme) -> LowbitTensor:
        scale, _ = scheme.weight.choose_qparams(values, self.scale_dtype)
        return with_qparams(values, scheme, (scale, None))
