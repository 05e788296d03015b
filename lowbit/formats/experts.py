"""Experts: stacks in memory, a matrix for each expert in the names of published checkpoints.

transformers keeps the experts of a layer as two parameters. Published checkpoints of these models have three matrices
for each expert, and vLLM and the programs that quantize checkpoints go by their names:

    mlp.experts.gate_up_proj [E, 2I, H]     mlp.experts.0.gate_proj.weight, mlp.experts.0.up_proj.weight [I, H], …
    mlp.experts.down_proj    [E, H, I]      mlp.experts.0.down_proj.weight [H, I], …

`Published` is a source that splits stacks while they are written. `joined` gives a folder in the names of a model, and
puts stacks together while they are read. `Gathered` puts stacks together for a format that holds them. All three move
codes and scales as they are. Mixtral has other names: `block_sparse_moe` for `mlp`, and w1, w3 and w2 for the three
matrices.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files.memory import is_short_memory
from lowbit.formats.base import FormatError, damage_of
from lowbit.formats.folder import Folder
from lowbit.formats.sources import Item, Source
from lowbit.tensor.core.base import LowbitTensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_STACK = re.compile(rf"(.*\.experts)\.({GATE_UP}|{DOWN})")
_CONVOLUTION = re.compile(r"(.*\.self_attn)\.([qkv])_(conv1d\.weight)")
"""Convolutions of queries, keys and values, which Kimi Linear has as one parameter."""
_MATRIX = re.compile(r"(.*\.experts)\.(\d+)\.([a-z0-9_]+)\.weight")
_CPU = torch.device("cpu")


Matrix = tuple[int, int]
"""The number of an expert, and of a part: 1 for `up`, else 0. For a convolution 0, and 0, 1 or 2 for q, k or v."""


@dataclass(frozen=True)
class Names:
    """The names of a family of models: those of the three matrices of an expert, and another part of names that
    differs, as (published, in memory)."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    module: tuple[str, str] | None = None

    def published(self, name: str) -> str:
        """The name of a tensor that is not a stack in a published checkpoint."""
        if self.module is None:
            return name
        published, in_memory = self.module
        return name.replace(in_memory, published)

    def in_memory(self, name: str) -> tuple[str, Matrix | None]:
        """The name in memory of a tensor of a published checkpoint, and None; for a matrix of an expert the name of its
        stack, and which matrix it is."""
        own = name if self.module is None else name.replace(*self.module)
        if found := _CONVOLUTION.fullmatch(own):
            return f"{found[1]}.{found[3]}", (0, "qkv".index(found[2]))
        found = _MATRIX.fullmatch(own)
        kinds = {self.gate: (GATE_UP, 0), self.up: (GATE_UP, 1), self.down: (DOWN, 0)}
        if found is None or found[3] not in kinds:
            return own, None
        stack, part = kinds[found[3]]
        return f"{found[1]}.{stack}", (int(found[2]), part)


MIXTRAL = Names("w1", "w3", "w2", (".block_sparse_moe.", ".mlp."))
QWEN = Names()
FAMILIES = {
    **dict.fromkeys(("mixtral", "minimax"), MIXTRAL),
    **dict.fromkeys(
        (
            *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "deepseek_v2"),
            *("deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm4v_moe"),
            *("glm_moe_dsa", "longcat_flash", "solar_open", "hunyuan_v1_moe", "flex_olmo"),
            *("olmoe", "afmoe", "cohere2_moe"),
        ),
        QWEN,
    ),
}
"""The families by the "model_type" of config.json: only those that transformers converts in this way."""
TRANSPOSED = {"gpt_oss"}
"""Models whose published checkpoints also have stacks, [E, K, N] with the inputs before the outputs."""


def is_transposed_stack(config: Mapping[str, Any], name: str, shape: Sequence[int]) -> bool:
    """True if this tensor of a folder with this config.json is a stack [E, K, N]."""
    is_stack = len(shape) == 3 and _STACK.fullmatch(name) is not None
    return is_stack and config.get("model_type") in TRANSPOSED


# ---- writing -------------------------------------------------------------------------------------------------------


class Published:
    """`source`, a model or a folder with stacks, as a source in the names of published checkpoints.

    A plain stack stays as it is: beside packed weights, transformers takes every matrix of an expert for a packed one.
    """

    def __init__(self, source: Source, names: Names) -> None:
        self.config, self.nbytes, self.left_out = source.config, source.nbytes, source.left_out
        self._source, self._names = source, names

    def items(self) -> Iterator[Item]:
        """See `lowbit.formats.sources.Source`. Raises FormatError for a stack that cannot be split."""
        for item in self._source.items():
            found = _STACK.fullmatch(item.name)
            is_stack = found is not None and item.value.ndim == 3
            is_matrix = _MATRIX.fullmatch(item.name) is not None
            if (is_stack or is_matrix) and getattr(item.value, "global_scale", None) is not None:
                warnings.warn(
                    "transformers 5.23 leaves out the global scales of NVFP4 experts, so it reads wrong weights "
                    "without an error; MXFP4 has no such scales, and lowbit reads both",
                    stacklevel=2,
                )
            if found is None or not is_stack:
                yield replace(item, name=self._names.published(item.name))
                continue
            if not isinstance(item.value, LowbitTensor):
                yield item
                continue
            for expert, matrix, value in self._matrices(item, found[2]):
                name = f"{self._names.published(f'{found[1]}.')}{expert}.{matrix}.weight"
                yield Item(name, value, "linear", item.note, item.snr)

    def _matrices(self, item: Item, stack: str) -> Iterator[tuple[int, str, Tensor]]:
        names = self._names
        parts = (names.down,) if stack == DOWN else (names.gate, names.up)
        for expert in range(item.value.shape[0]):
            for part, matrix in enumerate(parts):
                yield expert, matrix, matrix_of(item.value, item.name, (expert, part))

    def names(self) -> list[str]:
        return [self._names.published(name) for name in self._source.names()]

    def linears(self) -> set[str]:
        return {self._names.published(name) for name in self._source.linears()}

    def copy_files(self, folder: Path) -> None:
        self._source.copy_files(folder)


def published(source: Source) -> Source:
    """The source in the names of the published checkpoint of its model, if lowbit knows these names."""
    names = FAMILIES.get(str(source.config.get("model_type")))
    return source if names is None else Published(source, names)


class Gathered:
    """`source`, a folder in the names of a published checkpoint, as a source with stacks, in the names of the model.

    The matrices of a stack are in memory together. The SNR of a stack is the lowest of those of its matrices.
    """

    def __init__(self, source: Source, stored: Collection[str], names: Names) -> None:
        self.config, self.nbytes, self.left_out = source.config, source.nbytes, source.left_out
        self._source, self._names = source, names
        self._sizes = Counter(names.in_memory(name)[0] for name in stored)

    def items(self) -> Iterator[Item]:
        """See `lowbit.formats.sources.Source`. Raises FormatError for matrices that make no stack."""
        waiting: dict[str, dict[Matrix, Item]] = {}
        for item in self._source.items():
            place, matrix = self._names.in_memory(item.name)
            if matrix is None:
                yield replace(item, name=place)
                continue
            own = waiting.setdefault(place, {})
            if matrix in own:
                raise FormatError(
                    f"{own[matrix].name} and {item.name} are one matrix of {place}; rename one"
                )
            own[matrix] = item
            if len(own) == self._sizes[place]:
                del waiting[place]
                yield _gathered(place, own)

    def names(self) -> list[str]:
        return list(self._sizes)

    def linears(self) -> set[str]:
        return {self._names.in_memory(name)[0] for name in self._source.linears()}

    def copy_files(self, folder: Path) -> None:
        self._source.copy_files(folder)


def _gathered(stack: str, matrices: dict[Matrix, Item]) -> Item:
    items = [matrices[key] for key in sorted(matrices)]
    ratios = [item.snr for item in items if item.snr is not None]
    check_whole(stack, matrices)
    with damage_of(f"the matrices of {stack} make no stack"):
        value = stack_of({key: item.value for key, item in matrices.items()})
    return Item(stack, value, "other", items[0].note, min(ratios, default=None))


def gathered(source: Source, stored: Collection[str]) -> Source:
    """A folder with the tensors `stored`, in the names of its model, if lowbit knows these names."""
    names = FAMILIES.get(str(source.config.get("model_type")))
    return source if names is None else Gathered(source, stored, names)


# ---- reading -------------------------------------------------------------------------------------------------------


Renamed = Callable[[str], list[str]]
"""For the name of a tensor of a published checkpoint, other names that it may have in the model."""


class Joined:
    """A folder in the names of a model; see `joined`. The attributes are those of `Folder`."""

    def __init__(
        self, folder: Folder, wanted: Collection[str], renamed: Renamed, device: torch.device = _CPU
    ) -> None:
        self.path, self.config, self.nbytes = folder.path, folder.config, folder.nbytes
        self._folder, self.tied, self._device = folder, folder.tied, device
        self._stacks: dict[str, dict[Matrix, str]] = {}
        """For each stack of the model, the names of its matrices in the folder."""
        self._names: dict[str, str] = {}
        """The name in the model of each tensor of the folder; for a matrix, the name of its stack."""
        for name in folder.names():
            self._names[name] = self._place(name, wanted, renamed)
        self._stored: dict[str, str] = {}
        """The name in the folder of each tensor of the model that is not a stack."""
        for name, place in self._names.items():
            first = self._stored.setdefault(place, name)
            if first != name and place not in self._stacks:
                raise FormatError(
                    f"{self.path}: {first} and {name} are one tensor of the model, {place}; rename one"
                )
        for stack, matrices in self._stacks.items():
            with damage_of(f"{self.path}"):
                check_whole(stack, matrices)

    def _place(self, name: str, wanted: Collection[str], renamed: Renamed) -> str:
        for own in (name, *([] if name in wanted else renamed(name))):
            if own in wanted:
                return own
            for names in (QWEN, MIXTRAL):
                place, matrix = names.in_memory(own)
                if place in wanted:
                    if matrix is not None:
                        self._add(place, matrix, name)
                    return place
        return name

    def _add(self, stack: str, matrix: Matrix, name: str) -> None:
        first = self._stacks.setdefault(stack, {}).setdefault(matrix, name)
        if first != name:
            raise FormatError(
                f"{self.path}: {first} and {name} are one matrix of {stack}; rename one"
            )

    def names(self) -> list[str]:
        return list(dict.fromkeys(self._names.values()))

    def places(self) -> dict[str, tuple[str, Matrix | None]]:
        """For each tensor of the folder its name in the model, and None; for a matrix, the name of its stack, and
        which matrix it is."""
        found: dict[str, tuple[str, Matrix | None]] = {n: (p, None) for n, p in self._names.items()}
        for stack, matrices in self._stacks.items():
            found |= {name: (stack, key) for key, name in matrices.items()}
        return found

    def items(self) -> Iterator[Item]:
        """See `lowbit.formats.sources.Source`."""
        done = set()
        for name in self._folder.in_order():
            place = self._names[name]
            if place not in done:
                done.add(place)
                yield Item(place, self.read(place), "other")

    def read(self, name: str) -> Tensor:
        """The tensor that has this name in the model. The matrices of a stack are together in the memory of the device,
        where the stack is made. Other tensors are on the CPU."""
        if name in self._stacks:
            return self._stack(name)
        return self._folder.read(self._stored[name])

    def is_stack(self, name: str) -> bool:
        """True for a stack of experts, whose matrices the folder has one by one."""
        return name in self._stacks and _STACK.fullmatch(name) is not None

    def fill(self, stack: str, into: Tensor) -> None:
        """Write the matrices of a plain stack, as `read` puts them together, into a tensor, one after another. Raises
        FormatError for shapes that do not fit."""
        keys = {name: key for key, name in self._stacks[stack].items()}
        parts = 1 + max(part for _, part in keys.values())
        for name in self._folder.verified(keys):
            (expert, part), matrix = keys[name], self._folder.read(name)
            place = into[expert].chunk(parts)[part] if expert < len(into) else into[:0]
            if place.shape != matrix.shape:
                raise FormatError(
                    f"{self.path}: {name} has the shape {tuple(matrix.shape)}, and its place in {stack} "
                    f"{tuple(place.shape)}"
                )
            place.copy_(matrix)

    def plain_dtype(self, name: str) -> torch.dtype:
        """The dtype of a plain tensor that has this name in the model, from the header."""
        first = next(iter(self._stacks[name].values())) if name in self._stacks else None
        return self._folder.plain_dtype(first or self._stored[name])

    def _stack(self, stack: str) -> Tensor:
        keys = {name: key for key, name in self._stacks[stack].items()}
        names = self._folder.verified(keys)  # on all cores, and not one matrix after another
        matrices = {keys[name]: moved(self._folder.read(name), self._device) for name in names}
        with damage_of(f"{self.path}: the matrices of {stack} make no stack"):
            return stack_of(matrices, is_single=not _STACK.fullmatch(stack))


def joined(
    folder: Folder, wanted: Collection[str], renamed: Renamed, device: torch.device = _CPU
) -> Folder | Joined:
    """`folder` in the names `wanted` of the tensors of a model, if its own names differ.

    Args:
        folder: the checkpoint.
        wanted: the names in the model.
        renamed: other names that a tensor of the folder may have there.
        device: where stacks are made.

    Raises FormatError if the folder lacks a matrix of a stack.
    """
    found = Joined(folder, wanted, renamed, device)
    return folder if found.names() == folder.names() else found


def moved(t: Tensor, device: torch.device) -> Tensor:
    """A plain or low-bit tensor on `device`."""
    if device.type == "cpu":
        return t
    own: Any = t
    return own._map(lambda part: part.to(device)) if isinstance(t, LowbitTensor) else t.to(device)


# ---- stacks --------------------------------------------------------------------------------------------------------


def matrix_of(stack: Tensor, name: str, matrix: Matrix) -> Tensor:
    """A matrix of a stack with this name. Raises FormatError for a stack that cannot be split."""
    expert, part = matrix
    if not _STACK.fullmatch(name):
        return stack.chunk(len("qkv"))[part]
    try:
        own = stack[expert]
        if name.endswith(DOWN):
            return own
        half = own.shape[0] // 2
        return own[half:] if part else own[:half]
    except NotImplementedError as error:
        raise FormatError(
            f"{name} cannot be split into the matrices of its experts: {error}"
        ) from error


def check_whole(stack: str, matrices: Collection[Matrix]) -> None:
    """Raise FormatError if a matrix of the experts is missing."""
    count = 1 + max(expert for expert, _ in matrices)
    parts = 2 if stack.endswith(GATE_UP) else 1 if _STACK.fullmatch(stack) else len("qkv")
    if lost := count * parts - len(matrices):
        # A name may have any number, so the message does not list all.
        every = ((e, p) for e in range(count) for p in range(parts))
        first, _ = next(key for key in every if key not in matrices)
        raise FormatError(
            f"it lacks {lost} of the {count * parts} matrices of {stack}, such as one of expert {first}"
        )


def stack_of(matrices: dict[Matrix, Tensor], is_single: bool = False) -> Tensor:
    """The stack of all experts, each with gate above up. `is_single`: the matrix of the only expert, without a stack.
    Empties `matrices`, so that they are in memory twice at most. Raises FormatError as `stacked` does."""
    experts: dict[int, list[Matrix]] = {}
    for key in sorted(matrices):
        experts.setdefault(key[0], []).append(key)
    rows = []
    try:
        for keys in experts.values():
            own = [matrices.pop(key) for key in keys]
            rows.append(own[0] if len(own) == 1 else torch.cat(_alike(own)))
    except (NotImplementedError, RuntimeError) as error:
        if is_short_memory(error):
            raise
        raise FormatError(str(error)) from error
    return rows[0] if is_single else stacked(rows)


def stacked(experts: list[Tensor]) -> Tensor:
    """One tensor [E, N, K] of matrices [N, K], with their codes and scales.

    Raises FormatError for matrices in different schemes or shapes, or with parts that a stack does not have.
    """
    low: list[Any] = _alike(experts)
    if not isinstance(low[0], LowbitTensor):
        return torch.stack(low)
    if any(name.startswith("input_") for name in low[0].inner_tensors()):
        raise FormatError("they round inputs by static scales, and a stack has one for all experts")
    parts = {name: torch.stack([getattr(t, name) for t in low]) for name in low[0].inner_tensors()}
    made: Any = low[0]._with(parts, (len(experts), *low[0].shape))
    try:
        made.check_parts()
    except ValueError as error:
        raise FormatError(str(error)) from error
    return made


def _alike(tensors: list[Tensor]) -> list[Any]:
    """The tensors with scales of one dtype. Raises FormatError for different schemes or shapes."""
    low: list[Any] = [t for t in tensors if isinstance(t, LowbitTensor)]
    same_shape = all(t.shape == tensors[0].shape for t in tensors)
    alike = len(low) in (0, len(tensors)) and all(low[0]._is_stored_like(t) for t in low)
    if not (same_shape and alike):
        raise FormatError("some are stored in another scheme, or have another shape")
    if len({t.scale.dtype for t in low}) <= 1:
        return tensors
    wide = torch.float32  # exact: one expert's scales need it
    return [t._with({**t.inner_tensors(), "scale": t.scale.to(wide)}) for t in low]
