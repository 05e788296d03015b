"""The checkpoints of NVIDIA's ModelOpt, "modelopt": NVFP4, and float8 beside it.

    layer.weight           uint8 [N, K/2], even k in the low nibble
    layer.weight_scale     float8_e4m3fn [N, K/16]
    layer.weight_scale_2   float32, one element; it multiplies
    layer.input_scale      float32, one element, if inputs are rounded to FP4 too

    value = E2M1[code] · (weight_scale / global_scale), where global_scale = 1 / weight_scale_2

    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": …, "ignore": […]}

hf_quant_config.json says the same in other words, and alone in older folders. "W4A16_NVFP4" has no input_scale: so
lowbit writes a new folder. lowbit rounds no inputs to FP4. It reads the weights only, warns, and writes each
input_scale back.

Layers of "MXFP8" have

    layer.weight           float8_e4m3fn [N, K]
    layer.weight_scale     uint8 [N, K/32], e8m0

and inputs that are rounded in the same way, by `MXFP8DynamicActivationMXFP8Weight()`. A folder of these alone is
written as "MXFP8".

Layers of "FP8" have codes in float8_e4m3fn, one weight_scale in float32 and an input_scale; those of
"FP8_PER_CHANNEL_PER_TOKEN" have a weight_scale a row, and a scale of inputs for each token. Both are read and written
back. With "MIXED_PRECISION" a folder has several: the dtypes of codes and scales say which.

Source: nvidia-modelopt 0.47, `modelopt.torch.export`, whose folders of a tiny Qwen3 were read and written back.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import Format, FormatError, Parts, check_matrix
from lowbit.formats.compressed_tensors_fp4 import NVFP4, warn_of_fp4_inputs
from lowbit.formats.fp8 import whole_parts, whole_weight
from lowbit.formats.layer_names import is_listed
from lowbit.numerics.float32 import divide
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.scale_format import E4M3 as E4M3Scales
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.float8_tensor import E4M3, MXFP8, Float8Tensor, is_mxfp8
from lowbit.tensor.frozen.table_tensor import TableTensor

SPEC = replace(NVFP4.spec, scale_format="e4m3_inverse")
ALGORITHMS = (
    *("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
    *("MXFP8", "MIXED_PRECISION"),
)
GROUP = NVFP4.group_size
_UNREAD = "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b"
"""Parts that change the values or the inputs of a weight, as AWQ, SmoothQuant and SVDQuant leave them."""


class ModelOpt(Format):
    name = "modelopt"
    holds_experts = True

    def reads(self, config: Mapping[str, Any]) -> bool:
        return str(config.get("quant_method")).startswith(self.name)

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return "weight_scale", "weight", "weight_scale_2", "input_scale", *_UNREAD

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        algorithm = str(config.get("quant_algo", "NVFP4")).upper()
        if algorithm not in ALGORITHMS:
            raise FormatError(f"quant_algo is {algorithm!r:.60}; accepted: {', '.join(ALGORITHMS)}")
        if unread := [part for part in _UNREAD if part in parts]:
            raise FormatError(
                f"it has a {' and a '.join(unread)}, which lowbit does not apply: export the folder again by a method "
                "without AWQ, SmoothQuant and SVDQuant"
            )
        codes, dtype = parts["weight"], dtype or torch.bfloat16
        if codes.dtype is E4M3 and parts["weight_scale"].dtype is torch.uint8:
            scale = parts["weight_scale"].contiguous()
            return Float8Tensor(codes.contiguous(), scale, None, MXFP8, codes.shape, dtype, MXFP8)
        if codes.dtype is E4M3:
            return whole_weight(parts, "static" if "input_scale" in parts else "dynamic", dtype)
        if codes.dtype is not torch.uint8 or codes.ndim != 2:
            raise FormatError(
                f"its codes are {codes.dtype} {tuple(codes.shape)}; accepted: uint8 [N, K/2] and {E4M3} [N, K]"
            )
        if "input_scale" in parts:
            warn_of_fp4_inputs()
        scale, second = parts["weight_scale"], parts["weight_scale_2"].float()
        shape = (codes.shape[0], 2 * codes.shape[1])
        groups = (shape[0], shape[1] // GROUP)
        if scale.dtype is not E4M3 or scale.shape != groups or shape[1] % GROUP:
            raise FormatError(
                f"its weight_scale is {scale.dtype} {tuple(scale.shape)}; accepted: {E4M3} {groups}"
            )
        if second.numel() != 1 or not (torch.isfinite(second).all() and (second > 0).all()):
            raise FormatError(
                f"its weight_scale_2 is {second.flatten().tolist()!r:.60}; accepted: one number > 0, so export the "
                "folder again, with this layer left in high precision"
            )
        scales = {"scale": scale.contiguous(), "global_scale": _inverse(second.reshape(1, 1))}
        return TableTensor(codes.contiguous(), scales, SPEC, shape, dtype)

    def encode(self, weight: LowbitTensor) -> Parts:
        if isinstance(weight, Float8Tensor) and is_mxfp8(weight.spec):
            return self._mxfp8_parts(weight)
        check_matrix(weight, self.name, rounds_inputs=False)
        if type(weight) is not TableTensor or not SPEC.same_values(weight.spec):
            raise FormatError(f"{self.name} holds NVFP4 and MXFP8, got {weight.stored_format()}")
        if weight.shape[1] % GROUP:
            raise FormatError(f"its {weight.shape[1]} inputs are not a multiple of {GROUP}")
        assert weight.global_scale is not None
        second = _inverse(weight.global_scale)
        if not weight.codes.is_meta and not torch.equal(_inverse(second), weight.global_scale):
            raise FormatError(
                f"{self.name} stores the reciprocal of the global scale, and {weight.global_scale.item()!r} is not the "
                f"reciprocal of a float32 number: quantize or train by lowbit.formats.grid({self.name!r}, scheme)"
            )
        return {
            "weight": weight.codes.contiguous(),
            "weight_scale": weight.scale.contiguous(),
            "weight_scale_2": second.reshape(()),
        }

    def _mxfp8_parts(self, weight: AffineTensor) -> Parts:
        check_matrix(weight, self.name)
        if weight.activation != MXFP8:
            raise FormatError(
                f"{self.name} rounds the inputs of MXFP8 weights to MXFP8, as MXFP8DynamicActivationMXFP8Weight() "
                f"does, got {weight.activation}"
            )
        if weight.shape[1] != weight.codes.shape[1]:
            raise FormatError(f"its {weight.shape[1]} inputs are not a multiple of 32")
        return {"weight": weight.codes.contiguous(), "weight_scale": weight.scale.contiguous()}

    def encode_back(self, weight: LowbitTensor) -> Parts:
        check_matrix(weight, self.name)
        if isinstance(weight, Float8Tensor) and not is_mxfp8(weight.spec):
            return whole_parts(weight)
        return self.encode(weight)

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        kinds = {isinstance(weight, Float8Tensor) for weight in weights.values()}
        if len(kinds) > 1:
            raise FormatError(f"{self.name} is written in NVFP4 or in MXFP8, got both")
        bits, group = (8, 32) if True in kinds else (4, GROUP)
        arguments = {"dynamic": False, "num_bits": bits, "type": "float", "group_size": group}
        rounded = {"input_activations": arguments} if bits == 8 else {}
        return {
            "quant_method": self.name,
            "quant_algo": "MXFP8" if bits == 8 else "W4A16_NVFP4",
            "config_groups": {"group_0": {**rounded, "weights": arguments, "targets": ["Linear"]}},
            "group_size": group,
            "ignore": sorted(plain),
        }

    def notes(self, weights: Mapping[str, LowbitTensor]) -> list[str]:
        if not any(isinstance(weight, Float8Tensor) for weight in weights.values()):
            return []  # transformers ends with an error there, about shapes
        return [
            "transformers 5.23 does not read modelopt: from_pretrained warns and takes the MXFP8 codes for values, "
            'without scales; for transformers write format="compressed-tensors" or "lowbit"'
        ]

    def skips(self, config: Mapping[str, Any], layer: str) -> bool:
        listed = config.get("ignore", config.get("exclude_modules"))
        patterns = listed if isinstance(listed, list) else []
        return is_listed(layer, listed) or any(fnmatch.fnmatch(layer, str(p)) for p in patterns)

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        return None if weight.ndim != 2 or weight.shape[1] % GROUP else Scheme(SPEC)

    def joint(self, weight: AffineTensor) -> dict[str, Tensor]:
        """Servers keep one weight_scale_2 for the layers that they merge."""
        second = getattr(weight, "global_scale", None)
        return {} if second is None else {"weight_scale_2": second}

    def grid(self, scheme: Scheme) -> Scheme:
        spec = scheme.weight
        is_nvfp4 = isinstance(spec.scales, E4M3Scales) and spec.granularity == PerGroup(GROUP)
        return (
            replace(scheme, weight=replace(spec, scale_format=SPEC.scale_format))
            if is_nvfp4
            else scheme
        )


def _inverse(t: Tensor) -> Tensor:
    return divide(torch.ones_like(t), t)
