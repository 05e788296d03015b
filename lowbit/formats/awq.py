"""AWQ, "awq", in the layout "gemm" that AutoAWQ writes and vLLM serves: integers of 4 bits.

| tensor beside `layer.` | shape            | holds                                       |
|------------------------|------------------|---------------------------------------------|
| `qweight`              | int32 [K, N/8]   | unsigned codes, along N                     |
| `qzeros`               | int32 [G, N/8]   | unsigned zero points, along N               |
| `scales`               | float16 [G, N]   |                                             |

    value[n, k] = (q[k, n] − z[k // g, n]) · scales[k // g, n]

G is K / g. If the group size g does not divide K, the last group has fewer inputs. Such a weight is read, but not
written: AutoAWQ and vLLM refuse it.

The nibble i of a word, from the lowest, is output 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i] of word j. A symmetric weight has
zero points of 8.

Source: Lin et al., arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import Format, FormatError, Parts, check_plain_inputs, layer_of
from lowbit.formats.integers import (
    IntegerLayout,
    bytes_of,
    exact_scales,
    from_integers,
    integers_of,
    layout_of,
    signed,
    unsigned,
    whole_groups,
    words_of,
)
from lowbit.formats.layer_names import left_out_by, settings_of
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import pack, unpack
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor

WRITTEN, READ = (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7)
"""The order of outputs in a word, and its inverse."""
BITS = 4


class Awq(Format):
    name = "awq"
    holds_experts = True
    scale_dtype = torch.float16

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "awq"

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def skips(self, config: Mapping[str, Any], layer: str) -> bool:
        return left_out_by(config, layer) or super().skips(config, layer)

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        config = settings_of(config, layer_of(weight))
        bits = config.get("bits", config.get("w_bit"))
        group = config.get("group_size", config.get("q_group_size", -1))
        named = (config.get(key) for key in ("version", "checkpoint_format", "format"))
        version = str(next(filter(None, named), "gemm")).lower()
        if (bits, version) != (BITS, "gemm") or type(group) is not int or group < -1 or not group:
            raise FormatError(
                f"bits is {bits!r}, version {version!r} and group_size {group!r}; accepted: 4 bits, 'gemm', and a size "
                "or -1"
            )
        scales = parts["scales"]
        rows = scales.shape[-1]
        codes, zeros = (_unpacked(parts[name], rows) for name in ("qweight", "qzeros"))
        symmetric = not config.get("zero_point", True) and bool((zeros == 0).all())
        layout = IntegerLayout(BITS, None if group == -1 else group, not symmetric)
        zero_point = None if symmetric else zeros.T
        return from_integers(layout, codes.T, scales.T, zero_point, dtype or scales.dtype)

    def encode(self, weight: LowbitTensor) -> Parts:
        layout = self._layout(weight)
        assert isinstance(weight, AffineTensor)
        codes, scale, zero_point = integers_of(weight, layout)
        zeros = torch.zeros_like(scale, dtype=torch.int8) if zero_point is None else zero_point
        return {
            "qweight": _packed(codes.T),
            "qzeros": _packed(zeros.T),
            "scales": exact_scales(scale, torch.float16, self.name).T.contiguous(),
        }

    def _layout(self, weight: LowbitTensor) -> IntegerLayout:
        layout = layout_of(weight, self.name)
        assert isinstance(weight, AffineTensor)
        if layout.bits != BITS:
            raise FormatError(f"{self.name} holds {BITS} bits, got {layout.bits}")
        check_plain_inputs(weight, self.name)
        if weight.shape[0] % 8:
            raise FormatError(f"its {weight.shape[0]} outputs do not fill whole words of 8")
        return layout

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        layouts = [self._layout(weight) for weight in weights.values()]
        groups = {layout.group_size for layout in layouts}
        if len(groups) > 1:
            raise FormatError(
                f"{self.name} has one group size for a model, got {sorted(groups, key=str)}"
            )
        return {
            "quant_method": self.name,
            "version": "gemm",
            "bits": BITS,
            "group_size": (groups.pop() if groups else None) or -1,
            "zero_point": any(layout.has_zero_point for layout in layouts),
            "modules_to_not_convert": sorted(plain) or None,
        }

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        """A weight of four bits without zero points, also half-integers of three bits (`layout_of`), stays symmetric.
        All others get zero points, which cost no bytes in this format."""
        if weight.ndim != 2 or weight.shape[0] % 8:
            return None
        spec = getattr(weight, "spec", None)
        keeps = False
        if isinstance(spec, Spec) and spec.mapping == "half_integer":
            keeps = spec.format == Int(BITS - 1)
        elif isinstance(spec, Spec):
            keeps = spec.format == Int(BITS) and not spec.has_zero_point
        return Scheme(Spec(Int(BITS), whole_groups(weight), "symmetric" if keeps else "asymmetric"))


def _packed(codes: Tensor) -> Tensor:
    """int8 [..., N] as words [..., N/8]."""
    ordered = unsigned(codes, BITS).unflatten(-1, (-1, 8))[..., WRITTEN].flatten(-2)
    return words_of(pack(ordered.contiguous(), BITS))


def _unpacked(words: Tensor, rows: int) -> Tensor:
    """The inverse of `_packed`. Raises FormatError for another number of words."""
    if rows % 8 or words.ndim != 2:
        raise FormatError(f"words {tuple(words.shape)} of {rows} outputs; accepted: [K, N/8]")
    ordered = unpack(bytes_of(words.contiguous(), rows, BITS), BITS, rows)
    return signed(ordered.unflatten(-1, (-1, 8))[..., READ].flatten(-2), BITS)
