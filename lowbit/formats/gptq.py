"""GPTQ, "gptq" and "gptq_v2", as AutoGPTQ and GPTQModel write it: integers of 2, 3, 4 or 8 bits.

| tensor beside `layer.` | shape                  | holds                                                        |
|------------------------|------------------------|--------------------------------------------------------------|
| `qweight`              | int32 [⌈K·b/32⌉, N]    | unsigned codes, a little-endian bit stream along K           |
| `qzeros`               | int32 [G, ⌈N·b/32⌉]    | unsigned zero points, likewise along N; "gptq": less one     |
| `scales`               | float16 [G, N]         |                                                              |
| `g_idx`                | int32 [K]              | the group of each input                                      |

    value[n, k] = (q[n, k] − z[g_idx[k], n]) · scales[g_idx[k], n]

G is ⌈K/g⌉ for groups of g inputs. GPTQModel also writes last groups with fewer inputs; vLLM refuses such a folder.

"gptq" stores z − 1 with b bits, and loaders add one to all fields of a word at once. A zero point of 0 would be stored
with all bits set and carry into its neighbour, so "gptq" does not hold it; "gptq_v2" stores z itself.

`desc_act` sorts inputs by their importance before they are grouped. Then `g_idx` is any map of inputs to groups of one
size. Such a weight is read as an `OrderedTensor`: its codes are sorted by groups, and a product first gathers the
columns of its input. Reading and writing keep every value. vLLM runs such a folder only if a group is a whole row.

Folders of AutoRound hold the same words, without g_idx, of 5, 6 and 7 bits too (`lowbit.formats.auto_round`).

vLLM takes symmetric weights of 4 and 8 bits in these formats. Write asymmetric weights for vLLM as "awq" or
"compressed-tensors".

Source: Frantar et al., arXiv 2210.17323.
"""

from __future__ import annotations

import re
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
from lowbit.numerics.affine import MappingName
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import pack, unpack
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.ordered_tensor import OrderedTensor

BITS = (2, 3, 4, 8)


class Gptq(Format):
    """The format "gptq", also called v1; see the module."""

    name = "gptq"
    holds_experts = True
    scale_dtype = torch.float16
    less = 1
    """The file stores zero points minus this number."""

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "gptq" and _version(config) != "gptq_v2"

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx"

    # ---- reading -------------------------------------------------------------------------------------------------

    def skips(self, config: Mapping[str, Any], layer: str) -> bool:
        inside = config.get("modules_in_block_to_quantize")
        names = [
            name for some in inside or () for name in ([some] if isinstance(some, str) else some)
        ]
        if inside is not None and not any(layer.endswith(name) for name in names):
            return True
        return left_out_by(config, layer) or super().skips(config, layer)

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        if (version := _version(config)) != self.name:
            raise FormatError(f"checkpoint_format is {version!r}; accepted: 'gptq', 'gptq_v2'")
        if rotation := config.get("rotation"):
            raise FormatError(f"its weights are rotated ({rotation}), which lowbit does not undo")
        settings = settings_of(config, layer_of(weight))
        bits, group = _sizes(settings)
        qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        if settings.get("desc_act") and group != -1 and "g_idx" not in parts:
            raise FormatError(
                "desc_act is true, and it has no g_idx, which says the group of each input"
            )
        if qweight.ndim != 2 or scales.ndim != 2 or qweight.shape[1] != scales.shape[1]:
            raise FormatError(
                f"its qweight {tuple(qweight.shape)} and scales {tuple(scales.shape)} have different outputs"
            )
        columns = _inputs(qweight, parts.get("g_idx"), bits)
        codes = unpack(bytes_of(qweight.T.contiguous(), columns, bits), bits, columns)
        zeros = self._zeros(qzeros, scales.shape[1], bits)
        order = _order(parts.get("g_idx"), columns, columns if group == -1 else group)
        codes = codes if order is None else codes.index_select(1, order)
        symmetric = settings.get("sym", True) and bool((zeros == 0).all())
        if settings.get("sym") is True and not symmetric:
            raise FormatError(
                f"sym is true, and its zero points are not all {2 ** (bits - 1)}: checkpoint_format is another one "
                f"than {self.name!r}, or sym is false"
            )
        layout = IntegerLayout(bits, None if group == -1 else group, not symmetric)
        zero_point = None if symmetric else zeros.T
        made = from_integers(
            layout, signed(codes, bits), scales.T, zero_point, dtype or scales.dtype
        )
        return made if order is None else OrderedTensor.of_sorted(made, order)

    def _zeros(self, qzeros: Tensor, rows: int, bits: int) -> Tensor:
        """int8 [G, N]."""
        zeros = unpack(bytes_of(qzeros.contiguous(), rows, bits), bits, rows)
        if self.less and (zeros == 2**bits - 1).any():
            raise FormatError(
                "it has zero points of 0, stored as -1, which other programs carry into the neighbours: the file is "
                "damaged, or needs checkpoint_format 'gptq_v2'"
            )
        return signed(zeros + self.less, bits)

    # ---- writing -------------------------------------------------------------------------------------------------

    def encode(self, weight: LowbitTensor) -> Parts:
        layout = self._layout(weight)
        order, weight = _unordered(weight)
        assert isinstance(weight, AffineTensor)
        codes, scale, zero_point = integers_of(weight, layout)
        columns = weight.shape[1]
        groups = torch.arange(columns, dtype=torch.int32) // (layout.group_size or columns)
        if order is not None:
            back = order.argsort()
            codes, groups = codes.index_select(1, back), groups.index_select(0, back)
        zeros = torch.zeros_like(scale, dtype=torch.int8) if zero_point is None else zero_point
        stored = unsigned(zeros.T, layout.bits)
        if self.less and (count := int((stored == 0).sum())):
            raise FormatError(
                f"{count} of its zero points are -{layout.middle}, which {self.name} stores as -1 and other programs "
                "carry into the neighbours; write format='gptq_v2'"
            )
        return {
            "qweight": words_of(pack(unsigned(codes, layout.bits), layout.bits)).T.contiguous(),
            "qzeros": words_of(pack(stored - self.less, layout.bits)),
            "scales": exact_scales(scale, torch.float16, self.name).T.contiguous(),
            "g_idx": groups,
        }

    def _layout(self, weight: LowbitTensor) -> IntegerLayout:
        _, weight = _unordered(weight)
        layout = layout_of(weight, self.name, ragged=True)
        assert isinstance(weight, AffineTensor)
        if layout.bits not in BITS:
            raise FormatError(f"{self.name} holds {BITS} bits, got {layout.bits}")
        check_plain_inputs(weight, self.name)
        if any(size * layout.bits % 32 for size in weight.shape):
            raise FormatError(
                f"its shape {tuple(weight.shape)} does not fill whole words of 32 bits with {layout.bits}-bit codes"
            )
        return layout

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        layouts = {name: self._layout(weight) for name, weight in weights.items()}
        kinds = {(layout.bits, layout.group_size) for layout in layouts.values()}
        if len(kinds) > 1:
            raise FormatError(
                f"{self.name} has one number of bits and one group size for a model, got {sorted(kinds, key=str)}"
            )
        bits, group = kinds.pop() if kinds else (4, None)
        layers = [layer_of(name) for name in weights]
        return {
            "quant_method": "gptq",
            "checkpoint_format": self.name,
            "bits": bits,
            "group_size": group or -1,
            "desc_act": any(type(weight) is OrderedTensor for weight in weights.values()),
            "sym": not any(layout.has_zero_point for layout in layouts.values()),
            "lm_head": "lm_head" in layers,
            **_left_out(layers, plain),
        }

    def notes(self, weights: Mapping[str, LowbitTensor]) -> list[str]:
        sizes = {name: (self._layout(w).group_size, w.shape[1]) for name, w in weights.items()}
        ragged = [name for name, (group, columns) in sizes.items() if columns % (group or 1)]
        if not ragged:
            return []
        return [
            f"the last group of {ragged[0]} has fewer inputs than the others: GPTQModel and transformers read such a "
            "folder, and vLLM refuses it"
        ]

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        """The number of bits of the weight if the format holds it, otherwise the next larger number; symmetric for
        "gptq".

        Half-integers take one bit more, as `layout_of` writes them: no scale of as many bits fits their values.
        """
        spec = getattr(weight, "spec", None)
        if not isinstance(spec, Spec) or weight.ndim != 2:
            return None
        halves = spec.mapping == "half_integer"
        bits = next(b for b in BITS if b >= min(spec.format.bits + halves, 8))
        if any(size * bits % 32 for size in weight.shape):
            return None
        keeps = spec.has_zero_point and not self.less and not halves
        mapping: MappingName = "asymmetric" if keeps else "symmetric"
        return Scheme(Spec(Int(bits), whole_groups(weight), mapping))


class GptqV2(Gptq):
    """The format "gptq_v2": "gptq" with the zero points as they are."""

    name = "gptq_v2"
    less = 0

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "gptq" and _version(config) == "gptq_v2"


def _sizes(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Bits and group size; -1: a row. Raises FormatError for sizes that lowbit does not read."""
    bits, group = settings.get("bits"), settings.get("group_size", -1)
    held = tuple(range(2, 9)) if settings.get("dense_words") else BITS
    if (
        type(bits) is not int
        or bits not in held
        or type(group) is not int
        or not (group > 0 or group == -1)
    ):
        raise FormatError(
            f"bits is {bits!r} and group_size {group!r}; accepted: one of {held}, and a size or -1"
        )
    return bits, group


def _inputs(qweight: Tensor, g_idx: Tensor | None, bits: int) -> int:
    """K: the inputs of g_idx, if their codes end in the last word; otherwise as many codes as the words hold."""
    if g_idx is not None and -(-len(g_idx) * bits // 32) == qweight.shape[0]:
        return len(g_idx)
    return int(qweight.shape[0] * 32 // bits)


def _version(config: Mapping[str, Any]) -> Any:
    """The layout. Newer releases of GPTQModel also call it "format"."""
    if config.get("is_marlin_format"):
        return "marlin"
    return config.get("checkpoint_format") or config.get("format") or "gptq"


def _order(g_idx: Tensor | None, columns: int, group: int) -> Tensor | None:
    """The inputs sorted by their groups, int64 [K]; None if they are sorted already. Raises FormatError for groups of
    different sizes."""
    natural = torch.arange(columns) // group
    if g_idx is None or (g_idx.shape == natural.shape and torch.equal(g_idx.long(), natural)):
        return None
    if g_idx.shape != natural.shape:
        raise FormatError(
            f"its g_idx {tuple(g_idx.shape)} is not a group for each of {columns} inputs"
        )
    order = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[order], natural):
        raise FormatError(f"its g_idx does not give each group {group} inputs")
    return order


def _unordered(weight: LowbitTensor) -> tuple[Tensor | None, LowbitTensor]:
    """The order of an OrderedTensor and its sorted matrix; for any other weight None and the weight itself."""
    is_matrix = weight.ndim == 2 and not weight.transposed and weight.flat_from is None
    if type(weight) is not OrderedTensor or not is_matrix:
        return None, weight
    return weight.order[0].long(), weight.sorted_matrix


def _left_out(layers: Collection[str], plain: Collection[str]) -> dict[str, Any]:
    """The settings by which loaders know plain linears of the blocks: "dynamic" for GPTQModel and vLLM, and for
    transformers the names within a block, if all blocks have the same names."""
    inside = [name for name in sorted(plain) if name.rpartition(".")[2] != "lm_head"]
    if not inside:
        return {}
    found: dict[str, Any] = {"dynamic": {f"-:^{re.escape(name)}$": {} for name in inside}}
    names = [re.sub(r"^.*?\.\d+\.", "", layer) for layer in layers]
    if not {*names} & {re.sub(r"^.*?\.\d+\.", "", name) for name in inside}:
        found["modules_in_block_to_quantize"] = [[name] for name in dict.fromkeys(names)]
    return found
