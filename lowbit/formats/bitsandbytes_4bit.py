"""The 4-bit tables of bitsandbytes, "bitsandbytes-4bit": NF4 and FP4 in blocks, with plain or double quantized scales.

    layer.weight                                  uint8 [N·K/2, 1], the flattened codes, even ones in the high nibble
    layer.weight.absmax                           float32 [N·K/B], or uint8 with double quantization
    layer.weight.quant_map                        float32 [16], the table
    layer.weight.quant_state.bitsandbytes__nf4    uint8, the bytes of a JSON: quant_type, blocksize B, dtype, shape
    layer.weight.nested_absmax                    float32 [N·K/B/256], only with double quantization, as the next one
    layer.weight.nested_quant_map                 float32 [256]

    value[i] = quant_map[code[i]] · absmax[i // B]
    absmax[b] = nested_quant_map[absmax[b]] · nested_absmax[b // 256] + nested_offset       with double quantization

    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
                            "bnb_4bit_use_double_quant": false, …}

The name of quant_state ends in "bitsandbytes__fp4" for FP4. nested_offset stands in the JSON. Only weights whose K is a
multiple of B are held: blocks of the flattened weight are then those of lowbit. The package can store the codes as
another dtype with the same bytes (bnb_4bit_quant_storage), which is read too.

Source: Dettmers et al., QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.base import Format, FormatError, Parts, check_matrix
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.lookup_table import DYNAMIC8, NF4, LookupTable
from lowbit.numerics.scale_format import Double, absmax_of_rows, flat_absmax
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.table_tensor import TableTensor

_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = LookupTable((*(m / 12 for m in _MAGNITUDES), *(-m / 12 for m in _MAGNITUDES)))
"""FP4 as bitsandbytes defines it, in [-1, 1], which is not E2M1. Code 8 is zero, in this table with a sign."""
TABLES = {"nf4": NF4, "fp4": FP4}
BLOCK = 64
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that the package takes."""
STATE = "weight.quant_state.bitsandbytes__"
_PARTS = (
    *("weight", "weight.absmax", "weight.quant_map"),
    *("weight.nested_absmax", "weight.nested_quant_map"),
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bitsandbytes4bit(Format):
    name = "bitsandbytes-4bit"
    holds_float32 = False
    marks = len(TABLES)

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "bitsandbytes" and bool(config.get("load_in_4bit"))

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return *(STATE + name for name in TABLES), *_PARTS

    # ---- reading -------------------------------------------------------------------------------------------------

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        state = _state_of(parts)
        shape, block, own = _checked(state)
        table = TABLES[state["quant_type"]]
        _check_table(parts["weight.quant_map"], table, "quant_map")
        rows, groups = shape[0], shape[1] // block
        codes = _swapped(parts["weight"].contiguous().flatten().view(torch.uint8))
        if codes.numel() != rows * shape[1] // 2:
            raise FormatError(f"it has {codes.numel()} bytes of codes for the shape {shape}")
        scales = {"scale": parts["weight.absmax"]}
        is_double = "weight.nested_absmax" in parts
        if is_double:
            scales |= _nested(parts, state, rows, groups)
        spec = _spec(table, block, is_double)
        if scales["scale"].numel() != rows * groups:
            raise FormatError(f"it has {scales['scale'].numel()} scales for the shape {shape}")
        scales["scale"] = scales["scale"].reshape(rows, groups).contiguous()
        return TableTensor(codes.view(rows, -1), scales, spec, shape, dtype or own)

    # ---- writing -------------------------------------------------------------------------------------------------

    def encode(self, weight: LowbitTensor) -> Parts:
        kind, block = self._kind(weight)
        assert isinstance(weight, TableTensor)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
        }
        found = {
            "weight": _swapped(weight.codes.contiguous().flatten())[:, None],
            "weight.absmax": weight.scale.flatten(),
            "weight.quant_map": torch.tensor(TABLES[kind].values, dtype=torch.float32),
        }
        if weight.scale_absmax is not None and weight.scale_offset is not None:
            state |= {
                "nested_blocksize": Double.block,
                "nested_dtype": "float32",
                "nested_offset": weight.scale_offset.item(),
            }
            try:
                found["weight.nested_absmax"] = flat_absmax(
                    weight.scale_absmax, weight.scale.shape[-1]
                )
            except ValueError as error:
                raise FormatError(str(error)) from error
            found["weight.nested_quant_map"] = torch.tensor(DYNAMIC8.values, dtype=torch.float32)
        text = json.dumps(state).encode()
        found[STATE + kind] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return found

    def _kind(self, weight: LowbitTensor) -> tuple[str, int]:
        """ "nf4" or "fp4", and the size of a block."""
        if type(weight) is not TableTensor or weight.spec.scale_format not in ("float", "double"):
            spec = getattr(weight, "spec", type(weight).__name__)
            raise FormatError(
                f"{self.name} holds NF4 and its FP4 with scales of float32, got {spec}"
            )
        check_matrix(weight, self.name, rounds_inputs=False)
        kind = next((name for name, table in TABLES.items() if table == weight.spec.format), None)
        if kind is None:
            raise FormatError(f"{self.name} holds the tables of NF4 and its FP4, got {weight.spec}")
        granularity, columns = weight.spec.granularity, weight.shape[1]
        block = granularity.group_size if isinstance(granularity, PerGroup) else 0
        if block not in BLOCKS or columns % block:
            raise FormatError(
                f"{self.name} holds blocks of {', '.join(map(str, BLOCKS))} elements that divide the {columns} inputs, "
                f"got {granularity}"
            )
        if weight.dtype not in _DTYPES:
            raise FormatError(f"{self.name} computes in {_DTYPES}, got {weight.dtype}")
        return kind, block

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        kinds = {self._kind(weight)[0] for weight in weights.values()}
        dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights.values()}
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "fp4" if kinds == {"fp4"} else "nf4",
            "bnb_4bit_use_double_quant": any(
                getattr(weight, "scale_absmax", None) is not None for weight in weights.values()
            ),
            "bnb_4bit_compute_dtype": dtypes.pop() if len(dtypes) == 1 else "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": sorted(plain),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,
        }

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        """NF4 in the blocks of the weight, or in blocks of 64."""
        if weight.ndim != 2:
            return None
        granularity = getattr(getattr(weight, "spec", None), "granularity", None)
        own = granularity.group_size if isinstance(granularity, PerGroup) else BLOCK
        block = own if own in BLOCKS else BLOCK
        return None if weight.shape[1] % block else Scheme(_spec(NF4, block, False))

    def rounded(self, values: Tensor, scheme: Scheme) -> LowbitTensor:
        """`values` with the largest magnitude of each block as its scale, as in the package."""
        return AffineTensor.from_float(values, scheme)


def _spec(table: LookupTable, block: int, is_double: bool) -> Spec:
    return Spec(table, PerGroup(block), scale_format="double" if is_double else "float")


def _swapped(codes: Tensor) -> Tensor:
    """`codes` with the two nibbles of each byte exchanged."""
    return (codes & 15) << 4 | codes >> 4


def _state_of(parts: Parts) -> dict[str, Any]:
    """The JSON beside the codes."""
    name = next((STATE + kind for kind in TABLES if STATE + kind in parts), None)
    if name is None:
        raise FormatError("it has no quant_state")
    try:
        state = json.loads(bytes(parts[name].tolist()))
    except (TypeError, ValueError) as error:
        raise FormatError(f"its quant_state is not JSON: {error}") from error
    if not isinstance(state, dict) or state.get("quant_type") != name.removeprefix(STATE):
        raise FormatError(
            f"its quant_state is {state!r:.80}; accepted: quant_type as its name says"
        )
    return state


def _checked(state: Mapping[str, Any]) -> tuple[tuple[int, int], int, torch.dtype]:
    """The shape, the size of a block, and the dtype."""
    shape, block = state.get("shape"), state.get("blocksize")
    dtype = getattr(torch, str(state.get("dtype")), None)
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int for n in shape):
        raise FormatError(f"its shape is {shape!r}; accepted: that of a matrix, [N, K]")
    if type(block) is not int or block < 1 or dtype not in _DTYPES:
        raise FormatError(f"its blocksize is {block!r} and its dtype {state.get('dtype')!r}")
    if shape[1] % block:
        raise FormatError(
            f"its blocks of {block} elements cross the ends of its rows of {shape[1]}, which lowbit's blocks do not"
        )
    return (shape[0], shape[1]), block, dtype


def _check_table(given: Tensor, table: LookupTable, what: str) -> None:
    if given.flatten().tolist() != list(table.values):
        raise FormatError(f"its {what} {tuple(given.shape)} is not one that lowbit knows")


def _nested(parts: Parts, state: Mapping[str, Any], rows: int, groups: int) -> dict[str, Tensor]:
    """The scales of scales as lowbit stores them."""
    if "nested_offset" not in state:
        raise FormatError("its quant_state has no nested_offset")
    _check_table(parts["weight.nested_quant_map"], DYNAMIC8, "nested_quant_map")
    flat, block = parts["weight.nested_absmax"].flatten(), state.get("nested_blocksize")
    if block != Double.block or flat.numel() != -(-rows * groups // Double.block):
        raise FormatError(
            f"its nested_blocksize is {block!r} with {flat.numel()} values for {rows * groups} scales; accepted: "
            f"{Double.block}"
        )
    offset = torch.tensor([[float(state["nested_offset"])]], dtype=torch.float32)
    return {"scale_absmax": absmax_of_rows(flat, rows, groups), "scale_offset": offset}
