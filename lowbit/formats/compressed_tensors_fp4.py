"""FP4 in compressed-tensors: "nvfp4-pack-quantized" and "mxfp4-pack-quantized".

| format | tensors beside each `layer.`                                                                              |
|--------|-----------------------------------------------------------------------------------------------------------|
| nvfp4  | `weight_packed` uint8 [N, K/2], `weight_scale` float8_e4m3fn [N, K/16], `weight_global_scale` float32 [1] |
| mxfp4  | `weight_packed` uint8 [N, K/2], `weight_scale` uint8 [N, K/32]                                            |

    nvfp4: value = E2M1[code] · (weight_scale / weight_global_scale)
    mxfp4: value = E2M1[code] · 2^(weight_scale − 127)

These are the parts of a `TableTensor` with scales "e4m3" and "e8m0": even k lies in the low nibble in both.

Many folders also round inputs to FP4, with an `input_global_scale`. lowbit then reads the weights only, and warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowbit.formats.base import FormatError, Parts
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.table_tensor import TableTensor


@dataclass(frozen=True)
class Fp4:
    """One of the two formats: its name, its spec, and the arguments of its weights."""

    format: str
    spec: Spec
    strategy: str
    scale_dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        assert isinstance(self.spec.granularity, PerGroup)
        return self.spec.granularity.group_size

    @property
    def arguments(self) -> dict[str, Any]:
        """The "weights" of a group of config.json."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": self.group_size,
            "dynamic": False,
            "scale_dtype": str(self.scale_dtype),
        }


NVFP4 = Fp4(
    "nvfp4-pack-quantized",
    Spec(E2M1, PerGroup(16), scale_format="e4m3"),
    "tensor_group",
    torch.float8_e4m3fn,
)
MXFP4 = Fp4(
    "mxfp4-pack-quantized",
    Spec(E2M1, PerGroup(32), "symmetric_no_clipping_err", scale_format="e8m0"),
    "group",
    torch.uint8,
)


def is_fp4(arguments: Any) -> bool:
    """True if these arguments, of weights or activations, describe floats of 4 bits."""
    given = arguments if isinstance(arguments, Mapping) else {}
    return (given.get("type"), given.get("num_bits")) == ("float", 4)


def warn_of_fp4_inputs() -> None:
    """Warn that lowbit does not round the inputs."""
    warnings.warn(
        "other programs round the inputs of these layers to FP4, which lowbit does not do: it reads their weights only",
        stacklevel=2,
    )


def kind_of(arguments: Any) -> Fp4:
    """The format of weights with these arguments, for which `is_fp4` is True.

    Raises FormatError for another group size or strategy.
    """
    found = (arguments.get("strategy"), arguments.get("group_size"))
    for kind in (NVFP4, MXFP4):
        if found == (kind.strategy, kind.group_size) and arguments.get("symmetric", True):
            return kind
    raise FormatError(
        f"weights are float of 4 bits with {dict(arguments)}; lowbit reads the strategy 'tensor_group' with a "
        "group_size of 16, and 'group' with 32, symmetric"
    )


def kind_for(weight: LowbitTensor) -> Fp4:
    """The format that holds this weight, which may be on meta. Raises FormatError if none does."""
    spec = getattr(weight, "spec", None)
    kind = next((k for k in (NVFP4, MXFP4) if spec is not None and k.spec.same_values(spec)), None)
    if type(weight) is not TableTensor or kind is None:
        raise FormatError(
            "compressed-tensors holds FP4 with e4m3 scales of groups of 16 or e8m0 scales of groups of 32, got "
            f"{spec or type(weight).__name__}"
        )
    if weight.shape[-1] % kind.group_size:
        raise FormatError(
            f"its {weight.shape[-1]} inputs are not a multiple of the group size {kind.group_size}"
        )
    return kind


def parts_of(weight: TableTensor) -> Parts:
    """The tensors beside the layer."""
    found = {"weight_packed": weight.codes.contiguous(), "weight_scale": weight.scale.contiguous()}
    if weight.global_scale is not None:
        found["weight_global_scale"] = weight.global_scale.flatten()
    return found


def from_parts(
    parts: Parts, kind: Fp4, dtype: torch.dtype, activation: Spec | None
) -> LowbitTensor:
    """The weight of these parts in the format `kind`, with values of `dtype` and the `activation` of its inputs. Raises
    KeyError for a missing part, ValueError for a misfit."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype is not torch.uint8 or packed.ndim != 2:
        raise ValueError(
            f"its codes are {packed.dtype} {tuple(packed.shape)}; accepted: uint8 [N, K/2]"
        )
    if scale.dtype is torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    scales = {"scale": scale.contiguous()}
    if kind is NVFP4:
        scales["global_scale"] = parts["weight_global_scale"].float().reshape(1, 1)
    shape = (packed.shape[0], 2 * packed.shape[1])
    if shape[1] % kind.group_size:
        raise ValueError(f"its {shape[1]} inputs are not a multiple of {kind.group_size}")
    return TableTensor(packed.contiguous(), scales, kind.spec, shape, dtype, activation)


def nearest_scheme(weight: LowbitTensor, activation: Spec | None) -> Scheme | None:
    """NVFP4, or MXFP4 for scales that are powers of two; None if its groups do not divide the inputs."""
    is_mx = weight.spec.scale_format == MXFP4.spec.scale_format  # type: ignore[attr-defined]
    kind = MXFP4 if is_mx else NVFP4
    return None if weight.shape[-1] % kind.group_size else Scheme(kind.spec, activation)
