"""The MXFP4 experts of gpt-oss, "mxfp4".

    layer.experts.gate_up_proj_blocks    uint8 [E, N, K/32, 16], even k in the low nibble; down_proj alike
    layer.experts.gate_up_proj_scales    uint8 [E, N, K/32]

    value[e, k, n] = E2M1[code] · 2^(scales[e, n, k // 32] − 127)

    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": […]}

The model has these weights as [E, K, N]. The file has them transposed, so that blocks run along the inputs. A weight
from a file stays in that order, as a transposed `TableTensor`, and so does one that lowbit quantizes. QAT trains in the
order of the model, with `PerBlock(32, 1)` and the same values. Only experts are in low bits in this format.

Source: OpenAI, gpt-oss model card, 2025; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import Format, FormatError, Parts, check_plain_inputs
from lowbit.numerics.granularity import PerBlock, PerGroup
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.table_tensor import TableTensor
from lowbit.tensor.frozen.turned import in_order_of_linears

GROUP = 32
SPEC = Spec(E2M1, PerGroup(GROUP), "symmetric_no_clipping_err", scale_format="e8m0")
TURNED = replace(SPEC, granularity=PerBlock(GROUP, 1))
"""The spec of a weight in the order of the model."""
_BLOCKS, _SCALES = "_blocks", "_scales"


class Mxfp4(Format):
    name = "mxfp4"
    holds_stacks = True
    after_modules = False

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == self.name

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return _BLOCKS, _SCALES

    def stored_name(self, weight: str, part: str) -> str:
        if ".experts." not in f".{weight}" or weight.endswith(".weight"):
            raise FormatError(
                f"{self.name} holds stacks of experts, named ….experts.gate_up_proj and down_proj"
            )
        return weight + part

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        blocks, scales = parts[_BLOCKS], parts[_SCALES]
        if blocks.dtype is not torch.uint8 or blocks.ndim != 4 or blocks.shape[-1] != GROUP // 2:
            raise FormatError(
                f"its blocks are {blocks.dtype} {tuple(blocks.shape)}; accepted: uint8 [E, N, K/{GROUP}, {GROUP // 2}]"
            )
        if scales.dtype is not torch.uint8 or scales.shape != blocks.shape[:-1]:
            raise FormatError(
                f"its scales are {scales.dtype} {tuple(scales.shape)} for blocks {tuple(blocks.shape)}"
            )
        experts, rows, groups, _ = blocks.shape
        made = TableTensor(
            blocks.flatten(2).contiguous(),
            {"scale": scales.contiguous()},
            SPEC,
            (experts, rows, groups * GROUP),
            dtype or torch.bfloat16,
        )
        return made._transposed()

    def encode(self, weight: LowbitTensor) -> Parts:
        self._check(weight)
        assert isinstance(weight, TableTensor)
        stored = (
            weight._transposed() if weight.transposed else in_order_of_linears(weight)._transposed()
        )
        blocks = stored.codes.unflatten(-1, (-1, GROUP // 2)).contiguous()
        return {_BLOCKS: blocks, _SCALES: stored.scale.contiguous()}

    def _check(self, weight: LowbitTensor) -> None:
        spec = getattr(weight, "spec", None)
        if spec is not None and SPEC.same_values(spec) and not getattr(weight, "transposed", False):
            raise FormatError(
                f"{self.name} holds stacks of experts that the model has as [E, K, N], in groups along K: quantize or "
                f"train by lowbit.formats.grid({self.name!r}, scheme), got {weight!r}"
            )
        known = SPEC if getattr(weight, "transposed", False) else TURNED
        if type(weight) is not TableTensor or spec is None or not known.same_values(spec):
            raise FormatError(
                f"{self.name} holds E2M1 with e8m0 scales of groups of {GROUP}, got {spec or type(weight).__name__}"
            )
        if weight.ndim != 3 or weight.flat_from is not None:
            raise FormatError(
                f"{self.name} holds stacks of experts that the model has as [E, K, N], got {weight!r}"
            )
        if weight.shape[1] % GROUP:
            raise FormatError(f"its {weight.shape[1]} inputs are not a multiple of {GROUP}")
        check_plain_inputs(weight, self.name)

    def grid(self, scheme: Scheme) -> Scheme:
        """Groups along the inputs, the second dimension of the model's weights."""
        spec = scheme.weight
        if spec.granularity == SPEC.granularity and SPEC.same_values(spec):
            return replace(scheme, weight=replace(spec, granularity=TURNED.granularity))
        return scheme

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        return {"quant_method": self.name, "modules_to_not_convert": sorted(plain)}

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        is_stack = weight.ndim == 3 and getattr(weight, "transposed", False)
        return Scheme(SPEC) if is_stack and weight.shape[1] % GROUP == 0 else None

    def rounded(self, values: Tensor, scheme: Scheme) -> LowbitTensor:
        """`values` in groups along the inputs, their second dimension."""
        made = AffineTensor.from_float(values.mT.contiguous(), scheme)
        return made._transposed()
