"""The parameters that a layer of vLLM needs for a weight in lowbit's format, and the weights that they make.

vLLM merges layers (q, k and v; gate and up) into one, and each of its processes holds a part of the outputs or of the
inputs. vLLM first makes empty parameters, and then fills them from the parts in the folder. So each parameter declares
its layout:

| part                                      | shape here        | cut along                                  |
|-------------------------------------------|-------------------|--------------------------------------------|
| `codes`                                   | [N, bytes of K]   | outputs and inputs                         |
| `scale`, `zero_point` of groups           | [N, G]            | outputs and inputs                         |
| these, one for a row                      | [N, 1]            | outputs                                    |
| these, one for a x b of the weight        | [⌈N/a⌉, ⌈K/b⌉]    | outputs and inputs, a outputs at a time    |
| `global_scale`, `scale_offset`, `input_…` | [merged, 1]       | nothing: one for each merged layer         |

N are the outputs of all merged layers in this process, K their inputs. Merged weights with a part of the last kind stay
separate, with a product each. Other merged weights become one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.affine_tensor import AffineTensor


@dataclass(frozen=True)
class Stored:
    """How a folder stores a weight: the class, its metadata, and the dtype of its values."""

    kind: type[AffineTensor]
    meta: Mapping[str, Any]
    dtype: torch.dtype

    @property
    def spec(self) -> Spec:
        return self.meta["spec"]


@dataclass(frozen=True)
class PartLayout:
    """An empty parameter of a layer, as the table of the module says.

    Args:
        name: of the part.
        shape: in this process, of all merged layers together.
        per_layer: True if the parameter has one entry for each merged layer.
        cuts_inputs: True if a process with a part of the inputs holds a part of the parameter.
        codes_per_byte: of packed codes; 1 otherwise.
        rows: outputs that share an entry.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_layer: bool = False
    cuts_inputs: bool = False
    codes_per_byte: float = 1
    rows: int = 1


class LayerWeight:
    """The weight of one layer of vLLM in one process.

    Args:
        stored: how all merged weights are stored.
        outputs: of each merged layer, in this process.
        inputs: in this process.
        whole_inputs: of all processes together.
        name: of the layer, for errors.

    Raises ValueError for a part of the inputs or outputs that cuts through a block, a group or a byte.
    """

    def __init__(
        self, stored: Stored, outputs: Sequence[int], inputs: int, whole_inputs: int, name: str
    ) -> None:
        self.stored, self.outputs, self.inputs = stored, list(outputs), inputs
        self.whole_inputs, self.name = whole_inputs, name
        spec = stored.spec
        whole = (sum(self.outputs), whole_inputs)
        self.block = spec.block_size(whole)
        self._rows_share = spec.granularity.spans(0, 2)
        self._inputs_share = spec.granularity.spans(1, 2)
        self._check_cut()

    def _check_cut(self) -> None:
        rows, columns = self.block
        bits = 8 * self._example.codes.element_size()
        if self._example.codes.dtype == torch.uint8:
            bits = self.stored.spec.format.bits
        if not self._rows_share and (bad := [n for n in self.outputs if n % rows]):
            raise ValueError(
                f"{self.name}: {bad[0]} outputs of a merged layer in this process cut through blocks of {rows} "
                "that share a scale; serve it with a smaller tensor_parallel_size, or quantize it with PerRow() or "
                "PerGroup()"
            )
        if self.inputs == self.whole_inputs:
            return
        if not self._inputs_share and (self.inputs % columns or self.whole_inputs % columns):
            raise ValueError(
                f"{self.name}: {self.inputs} of {self.whole_inputs} inputs in each process cut through groups of "
                f"{columns} that share a scale; serve it with a smaller tensor_parallel_size, or quantize it with a "
                f"group size that divides {self.inputs}"
            )
        if self.inputs * bits % 8:
            raise ValueError(
                f"{self.name}: {self.inputs} codes of {bits} bits end inside a byte; serve it with a smaller "
                "tensor_parallel_size"
            )

    @cached_property
    def _example(self) -> AffineTensor:
        """A weight on meta with all merged outputs and the inputs of all processes."""
        shape = (max(sum(self.outputs), 1), max(self.whole_inputs, 1))
        like = torch.empty(shape, dtype=self.stored.dtype, device="meta")
        made = AffineTensor.from_float(like, Scheme(self.stored.spec))
        return made._with(**self.stored.meta)

    @cached_property
    def parts(self) -> list[PartLayout]:
        shapes = self._example.inner_shapes(tuple(self._example.shape))
        return [self._part(name, *found) for name, found in shapes.items()]

    def _part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> PartLayout:
        if self._is_per_layer(name):
            shape = (len(self.outputs), 1)
            return PartLayout(name, shape, self._staged(name, dtype), per_layer=True)
        columns, cuts = shape[-1], name == "codes" or not self._inputs_share
        cuts = cuts and not (name == "scale_absmax" and columns == 1)  # of all groups of a row
        if cuts and self.inputs != self.whole_inputs:
            if columns * self.inputs % self.whole_inputs:
                raise ValueError(
                    f"{self.name}: {self.inputs} of {self.whole_inputs} inputs in each process cut through its {name}, "
                    f"{columns} in a row; serve it with a smaller tensor_parallel_size"
                )
            columns = columns * self.inputs // self.whole_inputs
        bits = self.stored.spec.format.bits
        packed = 8 / bits if name == "codes" and dtype == torch.uint8 else 1
        rows = 1 if name == "codes" else self.block[0]
        return PartLayout(
            name,
            (shape[0], columns),
            self._staged(name, dtype),
            cuts_inputs=cuts,
            codes_per_byte=packed,
            rows=rows,
        )

    def _is_per_layer(self, name: str) -> bool:
        scales = self.stored.spec.scales
        shared = () if scales is None else scales.shared
        of_tensor = self._rows_share and name in ("scale", "zero_point")
        return of_tensor or name in shared or name.startswith("input_")

    def _staged(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype to fill: float32 for scales, which a folder may hold in more precision than lowbit makes them."""
        return torch.float32 if self._takes_any_dtype(name) else dtype

    def _takes_any_dtype(self, name: str) -> bool:
        spec = self.stored.spec
        if name == "zero_point":
            return spec.zero_point_is_value
        return spec.scales is None and self._example.is_floating(name)

    def assembled(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[AffineTensor]:
        """The weights [N, K] of `dtype`, made of filled parameters: one for all merged layers, or one for each.

        Raises ValueError for parts that do not fit each other.
        """
        stored, given = self.stored, self._narrowed(tensors)
        separate = any(part.per_layer for part in self.parts)
        made: list[AffineTensor] = []
        start = 0
        for i, rows in enumerate(self.outputs if separate else [sum(self.outputs)]):
            own: dict[str, Tensor | None] = dict.fromkeys(stored.kind.tensor_attrs)
            for part in self.parts:
                end = -(-(start + rows) // part.rows)
                where = slice(i, i + 1) if part.per_layer else slice(start // part.rows, end)
                own[part.name] = given[part.name][where]
            shape = (rows, self.inputs)
            weight = stored.kind.from_inner(own, dict(stored.meta), shape, stored.dtype)
            weight.check_parts()
            made.append(weight if weight.dtype == dtype else weight.to(dtype))  # type: ignore[arg-type]
            start += rows
        return made

    def _narrowed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts, with scales in lowbit's own dtype for them if it holds all of them exactly."""
        plain = {name: t.detach().contiguous() for name, t in tensors.items()}
        dtype = self.stored.spec.scale_dtype_for(self.stored.dtype)
        narrow = {n: t.to(dtype) for n, t in plain.items() if self._takes_any_dtype(n)}
        exact = all(torch.equal(t.to(plain[n].dtype), plain[n]) for n, t in narrow.items())
        return {**plain, **narrow} if exact else plain
