"""torchao's `MXTensor` of MXFP8, in its safetensors (`lowbit.formats.torchao`).

    `_weight_qdata` float8_e4m3fn [N, K], `_weight_scale` float8_e8m0fnu

    value = qdata · scale, a scale for each 32 inputs

Scales are [N, K/32], or "swizzled" as the matrix units read them: in tiles of 128 rows by 4 scales, padded, of which
row r and scale c stand at (r % 32) · 16 + (r // 32) · 4 + c. torchao's configuration for transformers,
`MXDynamicActivationMXWeightConfig`, makes swizzled ones, and rounds the inputs too; so lowbit writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.formats.base import FormatError, Parts
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Float8
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.float8_tensor import E4M3, MXFP8, Float8Tensor

KIND = "MXTensor"
_MAPPINGS = {"FLOOR": "symmetric", "RCEIL": "symmetric_no_clipping_err"}
"""How torchao names the rules for the powers of two."""
_E4M3 = "float8_e4m3fn"


def from_parts(codes: Tensor, scale: Tensor, described: Mapping[str, Any]) -> LowbitTensor:
    """The weight of these parts and attributes. Raises FormatError for other formats than MXFP8."""
    if (described.get("elem_dtype"), described.get("block_size")) != (_E4M3, 32):
        raise FormatError(
            f"it is an {KIND} of {described.get('elem_dtype')} in blocks of {described.get('block_size')}; accepted: "
            f"{_E4M3} in blocks of 32"
        )
    if codes.dtype is not E4M3 or codes.ndim != 2 or codes.shape[1] % 32:
        raise FormatError(
            f"its codes are {codes.dtype} {tuple(codes.shape)}; accepted: {E4M3} [N, K], K a multiple of 32"
        )
    blocks = codes.shape[0], codes.shape[1] // 32
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise FormatError(f"its scales are {scale.dtype}; accepted: float8_e8m0fnu")
    own = scale.view(torch.uint8)
    if described.get("is_swizzled_scales"):
        own = _from_tiles(own, *blocks)
    dtype = getattr(torch, str(described.get("orig_dtype")), torch.bfloat16)
    activation = _activation(described.get("act_quant_kwargs"))
    scale = own.reshape(blocks).contiguous()
    return Float8Tensor(codes.contiguous(), scale, None, MXFP8, codes.shape, dtype, activation)


def _activation(kwargs: Mapping[str, Any] | None) -> Spec | None:
    if kwargs is None:
        return None
    mapping: Any = _MAPPINGS.get(str(kwargs.get("scaling_mode")))
    if mapping is None or (kwargs.get("elem_dtype"), kwargs.get("block_size")) != (_E4M3, 32):
        raise FormatError(
            f"its inputs are rounded as {dict(kwargs)}; accepted: {_E4M3} in blocks of 32, by {' or '.join(_MAPPINGS)}"
        )
    return Spec(Float8(), PerGroup(32), mapping, scale_format="e8m0")


def _from_tiles(scale: Tensor, rows: int, groups: int) -> Tensor:
    tiles = -(-rows // 128), -(-groups // 4)
    if scale.numel() != 512 * tiles[0] * tiles[1]:
        raise FormatError(f"{scale.numel()} swizzled scales do not fit {rows} x {groups}")
    each = scale.reshape(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return each.reshape(128 * tiles[0], 4 * tiles[1])[:rows, :groups]


def _in_tiles(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    padded = F.pad(scale, (0, -groups % 4, 0, -rows % 128))
    each = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
    return each.reshape(32 * each.shape[0], 16 * each.shape[1])


def parts_of(weight: AffineTensor) -> Parts:
    """Codes and swizzled scales, without the names of the layer."""
    scale = _in_tiles(weight.scale).view(torch.float8_e8m0fnu)
    return {"qdata": weight.codes.contiguous(), "scale": scale}


def attributes_of(weight: AffineTensor) -> dict[str, Any]:
    """The attributes of the MXTensor, as JSON. Raises FormatError for a weight that torchao's configuration lacks."""
    names = {mapping: name for name, mapping in _MAPPINGS.items()}
    if weight.activation is None or not MXFP8.same_values(weight.activation):
        raise FormatError(
            "torchao's configuration of MXFP8 rounds the inputs to MXFP8, as MXFP8DynamicActivationMXFP8Weight() does, "
            f"got {weight.activation}"
        )
    if weight.shape[1] % 32:
        raise FormatError(f"its {weight.shape[1]} inputs are not a multiple of 32")
    shared = {
        "elem_dtype": typed("torch.dtype", _E4M3),
        "block_size": 32,
        "kernel_preference": typed("KernelPreference", "AUTO"),
        "is_swizzled_scales": True,
    }
    mode = {"scaling_mode": typed("ScaleCalculationMode", names[weight.activation.mapping])}
    return {
        **shared,
        "orig_dtype": typed("torch.dtype", str(weight.dtype).removeprefix("torch.")),
        "act_quant_kwargs": typed("QuantizeTensorToMXKwargs", {**shared, **mode}),
    }


def config_of(weight: AffineTensor) -> dict[str, Any]:
    """The configuration for transformers, without its version."""
    inputs = attributes_of(weight)["act_quant_kwargs"]["_data"]
    dtypes = dict.fromkeys(("activation_dtype", "weight_dtype"), inputs["elem_dtype"])
    kept = {n: inputs[n] for n in ("block_size", "kernel_preference", "scaling_mode")}
    return typed("MXDynamicActivationMXWeightConfig", {**dtypes, **kept})


def typed(kind: str, data: Any) -> dict[str, Any]:
    """How torchao's JSON holds an object of this class."""
    return {"_type": kind, "_data": data}
