"""The float8 blocks of DeepSeek-V3 (arXiv 2412.19437), "fp8".

    layer.weight             float8_e4m3fn [N, K]
    layer.weight_scale_inv   float32 [N/128, K/128]; despite its name it multiplies:
                             value[n, k] = weight[n, k] · weight_scale_inv[n // 128, k // 128]

    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128], "modules_to_not_convert": […]}

Scales as float8_e8m0fnu, or as uint8 with its bits, are read too. Engines of this format round the input of every
product to float8, with a scale for each 128 elements of a token, whether or not the weight was made for it.
transformers computes the size of a block as N / rows of the scale, so a ragged N would give wrong weights there without
an error: `encode` takes whole blocks only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lowbit.formats.base import Format, FormatError, Parts
from lowbit.granularity import PerBlock
from lowbit.scheme import Float8, Scheme, Spec
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.float8_tensor import Float8Tensor
from lowbit.train_scheme import BLOCK, BLOCK_ACTIVATION, BLOCK_WEIGHT

E4M3 = torch.float8_e4m3fn
SCALE = "weight_scale_inv"


class Float8Blocks(Format):
    """The format "fp8"; see the module."""

    name = "fp8"
    holds_experts = True

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "fp8"

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return SCALE, "weight"

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        block = config.get("weight_block_size")
        if not isinstance(block, list | tuple) or len(block) != 2:
            raise FormatError(
                f"weight_block_size is {block!r}; lowbit reads this format with two sizes, such as [128, 128]"
            )
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise FormatError(
                f"activation_scheme is {config['activation_scheme']!r}; accepted: 'dynamic'"
            )
        codes, scale = parts.get("weight"), parts[SCALE]
        if codes is None or codes.dtype is not E4M3:
            raise FormatError(
                f"its codes are {codes if codes is None else codes.dtype}, not {E4M3}"
            )
        if scale.dtype is torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        try:
            return Float8Tensor.from_blocks(
                codes, scale, (block[0], block[1]), dtype or torch.bfloat16, BLOCK_ACTIVATION
            )
        except (TypeError, ValueError) as error:
            raise FormatError(str(error)) from error

    def encode(self, weight: LowbitTensor) -> Parts:
        if type(weight) is not Float8Tensor or weight.spec != BLOCK_WEIGHT:
            spec = getattr(weight, "spec", type(weight).__name__)
            raise FormatError(f"fp8 holds float8_e4m3fn in blocks of {BLOCK} x {BLOCK}, got {spec}")
        if weight.ndim != 2 or weight.transposed or weight.flat_from is not None:
            raise FormatError(f"fp8 holds matrices [N, K], got {weight!r}")
        if any(size % BLOCK for size in weight.shape):
            raise FormatError(
                f"its shape {tuple(weight.shape)} is no multiple of {BLOCK}: transformers would read its blocks wrongly"
            )
        if weight.activation not in (None, BLOCK_ACTIVATION):
            raise FormatError(
                f"fp8 rounds inputs as {BLOCK_ACTIVATION}, and the weight was made for {weight.activation}"
            )
        return {"weight": weight.codes, SCALE: weight.scale.float()}

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(plain),
        }

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        if weight.ndim != 2 or any(size % BLOCK for size in weight.shape):
            return None
        return Scheme(Spec(Float8(), PerBlock(BLOCK, BLOCK)), BLOCK_ACTIVATION)
