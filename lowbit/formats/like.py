"""`lowbit.export(model, out, like=folder)`: a model in the names, dtypes, shards and config.json of a published folder.

A shard of the folder is written again with each tensor in its place:

| the model's tensor | is written as                                                                                   |
|--------------------|-------------------------------------------------------------------------------------------------|
| equal              | the folder's bytes                                                                              |
| plain, changed     | in the folder's dtype, if that dtype holds its values                                           |
| low-bit, changed   | the parts that the folder's format gives, in the dtypes and shapes of the folder's; they are    |
|                    | decoded again by the folder's config.json, and compared                                         |
| anything else      | refused; with lossy=True rounded to the scheme of the folder's tensor, whose blocks keep their  |
|                    | scales where these are nearer. The folder's bytes, if it is the folder's tensor rounded to      |
|                    | another scheme, as for training in int8                                                         |

A matrix of an expert is compared by itself, also where the model has a stack: an expert that no token reached keeps its
bytes. Tensors that the model has no place for are copied, such as the layers for multi-token prediction of DeepSeek-V3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.siblings import family_of
from lowbit.files import digests, tensor_file
from lowbit.files.tensor_file import TensorFile
from lowbit.formats.base import Format, FormatError, Parts, damage_of, layer_of
from lowbit.formats.experts import Joined, matrix_of
from lowbit.formats.folder import Folder, copy_beside_weights, copy_settings
from lowbit.formats.module import ModelSource
from lowbit.formats.reading import renamed_by, unused_by, zeros_beside_codes
from lowbit.formats.report import ExportReport
from lowbit.formats.shards import equal_bits, same_values
from lowbit.formats.sources import Item
from lowbit.numerics.number_format import Int
from lowbit.numerics.snr import snr
from lowbit.progress import progress
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.requantize import is_nearest, requantize

MOST_REFUSED = 3
"""An export ends after so many refused tensors, and the message names them."""
KEPT = "the bytes of the folder"
"""The report's note on a tensor that is equal to the folder's."""


class Likeness:
    """The tensors of `folder` with the values of `model`, by their stored names.

    Args:
        folder: with low-bit weights.
        source: a model whose names are those of a model that `lowbit.load_pretrained` makes of the folder. If its
            weights are sharded, all ranks make the same calls.
        lossy: round what the folder cannot hold.
        report: gets an entry for each tensor.

    Raises FormatError for a model with other names than the folder has.
    """

    def __init__(
        self, folder: Folder, source: ModelSource, lossy: bool, report: ExportReport
    ) -> None:
        assert folder.format is not None and folder.settings is not None
        self.folder, self._source = folder, source
        self._format: Format = folder.format
        self._settings = folder.settings
        self._lossy, self.report = lossy, report
        first = self._source.first
        folder.keep(first)
        renamed = renamed_by(source.model)
        folder.leave_out(unused_by(source.model, folder.names(), first))
        folder.leave_out(zeros_beside_codes(folder, first, renamed))
        self._places = Joined(folder, first, renamed).places()
        self._check_names()
        self._owners: dict[str, tuple[str, str]] = {}
        """For each stored tensor that the model has, the tensor whose part it is, and the short name of the part."""
        for name in folder.names():
            for part, stored in folder.stored_names(name).items():
                self._owners[stored] = name, part
        for second, parts in folder.seconds.items():
            for part, stored in parts.items():
                self._owners[stored] = folder.tied[second], part
        self._uses = Counter(name for name, _ in self._owners.values())
        self._families: dict[str, list[str]] = {}
        """The low-bit weights that a server merges, by the name of their family."""
        for name in folder.weights:
            if family := family_of(name):
                self._families.setdefault(family, []).append(name)
        self._made: dict[str, Parts] = {}
        """The parts of changed tensors that some shard still lacks; {} for an equal tensor."""
        self._values: tuple[str, dict[str, Tensor]] = "", {}
        """A module, and the tensors of its layers that were made last: an expert is a part of a stack."""
        self.kept = 0
        """The stored tensors that have the folder's bytes."""

    def _check_names(self) -> None:
        folder, first = self.folder, self._source.first
        kind = type(self._source.model).__name__
        placed = {first[place] for place, _ in self._places.values() if place in first}
        lost = sorted(name for name, (place, _) in self._places.items() if place not in first)
        more = sorted({*first.values()} - placed)
        for second, held in folder.tied.items():
            if first.get(second, first.get(held)) != first.get(held):
                raise FormatError(
                    f"{folder.path} stores one tensor as {held} and {second}, and {kind} has two: tie them, or write "
                    "the model by format="
                )
        for what, names in (("lacks", lost), ("has", more)):
            if names:
                raise FormatError(
                    f"{kind} {what} {len(names)} tensors that {folder.path} {'has' if what == 'lacks' else 'lacks'}, "
                    f"such as {', '.join(names[:3])}; accepted: the model that lowbit.load_pretrained made of this "
                    "folder, with adapters merged (merge_and_unload of PEFT) or taken away (unload)"
                )

    def shards(self) -> Iterator[tuple[TensorFile, dict[str, Tensor]]]:
        """Each shard of the folder, and its tensors. Raises FormatError for tensors that the folder cannot hold, and
        then gives no shard after the first of them."""
        refused: list[str] = []
        count = 0
        for file, names in self.folder.files().items():
            tensors = self._taken(names, refused)
            if len(refused) >= MOST_REFUSED:
                break
            count += len(names)
            if not refused:
                yield file, tensors
        if refused:
            raise FormatError(f"{self.folder.path} cannot hold {'; '.join(refused)}")
        self.report.notes += [
            f"{self.kept} of {count} stored tensors have the bytes of {self.folder.path}",
            *(f"copied: {note}" for note in self.folder.left_out),
        ]

    def _taken(self, names: Iterable[str], refused: list[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            try:
                found[name] = self.tensor(name)
            except FormatError as error:
                refused.append(str(error))
                if len(refused) >= MOST_REFUSED:
                    break
        return found

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """The tensors that stand for one weight, by their stored names, one weight after another. Raises FormatError
        for the first that the folder cannot hold."""
        together: dict[str, list[str]] = {}
        for stored in (name for names in self.folder.files().values() for name in names):
            together.setdefault(self._owners.get(stored, (stored, ""))[0], []).append(stored)
        for names in together.values():
            yield {stored: self.tensor(stored) for stored in names}

    def tensor(self, stored: str) -> Tensor:
        """The tensor of this stored name. Raises FormatError for one that the folder cannot hold."""
        if stored not in self._owners:
            self.kept += 1
            return self.folder.stored(stored)
        name, part = self._owners[stored]
        if name not in self._made:
            self._made[name] = {}  # an error comes once, and not again for each part
            with damage_of(name):
                self._made[name] = self._parts_of(name)
        found = self._made[name].get(part)
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._made[name]
        old = self.folder.stored(stored)
        if found is None:
            self.kept += 1
            return old
        if equal_bits(found, old):
            self.kept += 1
        if (fitting := _fitted(found, old)) is None:
            raise FormatError(f"{stored} is {_layout(old)} in the folder, got {_layout(found)}")
        return fitting

    def _parts_of(self, name: str) -> Parts:
        """The changed parts of a tensor; {} if it is equal to the folder's."""
        value, old = self._value(name), self.folder.read(name)
        if value.shape != old.shape:
            raise FormatError(
                f"it has the shape {tuple(value.shape)}, and the folder has {tuple(old.shape)}"
            )
        new, reason = value, ""
        try:
            parts = self._encoded(name, value, old)
            if parts and isinstance(value, LowbitTensor):
                self._check_siblings(name)
        except FormatError as error:
            if not self._lossy:
                raise _with_way_out(error) from error
            reason = f"rounded, as {error}"
            new = old if _is_rounding_of(value, old) else _rounded(value, old)
            parts = self._encoded(name, new, old)
        ratio = snr(_values(value), _values(new)) if reason else None
        held = self.folder.stored_names(name)
        if all(equal_bits(t, self.folder.stored(held[part])) for part, t in parts.items()):
            new, reason, parts = old, f"{KEPT}; {reason}" if reason else KEPT, {}
        self.report.enter(Item(name, new, "other", reason, ratio), self._size(name))
        if ratio is not None:  # also of vectors, of which the report has no line
            self.report.snr[name] = ratio
        return parts

    def _value(self, name: str) -> Tensor:
        """The model's tensor for one of the folder, on the CPU."""
        place, matrix = self._places[name]
        module, first = layer_of(layer_of(place)), self._source.first[place]
        if module != self._values[0]:
            self._values = module, {}
        values = self._values[1]
        if first not in values:
            values[first] = self._source.value(first)
        value = values[first]
        return _on_cpu(value if matrix is None else matrix_of(value, place, matrix))

    def _check_siblings(self, name: str) -> None:
        """Raise FormatError for a weight that differs from its siblings in a quantity that servers have once for all of
        them."""
        names = self._families.get(family_of(name) or "", [])
        weights = [v for v in map(self._value, names) if isinstance(v, AffineTensor)]
        joint = [self._format.joint(weight) for weight in weights]
        for key in {key for own in joint for key in own}:
            first, *others = (own[key].flatten() for own in joint if key in own)
            # A sibling may have another form, which lossy=True rounds.
            is_missing = 1 + len(others) < len(names)
            if is_missing or any(not torch.equal(first, t) for t in others):
                raise FormatError(
                    f"servers merge {', '.join(map(layer_of, names))} into one layer with one {key}, and theirs "
                    "differ; lossy=True rounds them by that of the folder, and states the loss"
                )

    def _size(self, name: str) -> int:
        return sum(self.folder.stored(s).nbytes for s in self.folder.stored_names(name).values())

    def _encoded(self, name: str, value: Tensor, old: Tensor) -> Parts:
        """The parts of a tensor in the layouts of the folder's, after they were decoded again and compared. {}: it is
        equal to the folder's."""
        if _is_equal(value, old):
            return {}
        is_low = isinstance(value, LowbitTensor)
        if is_low != isinstance(old, LowbitTensor):
            raise FormatError(
                f"it is {_form(value)} in the model and {_form(old)} in the folder; "
                "lossy=True writes it as the folder has it, and states the loss"
            )
        if not isinstance(value, LowbitTensor):
            if (cast := _fitted(value, old)) is None:
                raise FormatError(
                    f"its values of {value.dtype} are not all of {old.dtype}, as the folder has them; lossy=True "
                    "rounds them, and states the loss"
                )
            return {"": cast}
        parts: Parts = {}
        given = self._format.encode_back(value)
        held = {p: self.folder.stored(s) for p, s in self.folder.weights[name].items()}
        misfits = ""
        for part, t in held.items():
            fitting = _fitted(given[part], t) if part in given else None
            # a part that the weight does not decide, such as a shape, a scale of inputs or a text
            parts[part] = t if fitting is None else fitting
            if fitting is None and part in given and given[part].dtype is not t.dtype:
                misfits += f": not all of its {part} are {t.dtype}"
        again = self._format.read({**parts}, self._settings, name, value.dtype)
        if not _is_equal(value, again):
            raise FormatError(
                f"the folder stores it as {_form(old)}, in which the model's {_form(value)} has other values{misfits}; "
                "lossy=True rounds it, and states the loss"
            )
        return parts


def _with_way_out(error: FormatError) -> FormatError:
    """The error of a format that has no place for a weight, and that `lossy=True` writes it."""
    text = str(error)
    rest = "" if "lossy=True" in text else "; lossy=True rounds it, and states the loss"
    return FormatError(f"{text}{rest}")


def _form(t: Tensor) -> str:
    if not isinstance(t, LowbitTensor):
        return f"plain {str(t.dtype).removeprefix('torch.')}"
    scale = getattr(t, "scale", None)
    about = "" if scale is None else f" with scales of {str(scale.dtype).removeprefix('torch.')}"
    return t.stored_format() + about


def _layout(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def _on_cpu(t: Tensor) -> Tensor:
    return t._map(lambda part: part.cpu()) if isinstance(t, LowbitTensor) else t.cpu()


def _values(t: Tensor) -> Tensor:
    return t.dequantize() if isinstance(t, LowbitTensor) else t


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """True if both are plain with the same bits, or low-bit with the same parts or the same bits of values."""
    if not isinstance(a, LowbitTensor) or not isinstance(b, LowbitTensor):
        return type(a) is type(b) and equal_bits(a, b)
    return same_values(a, b)


def _rounded(value: Tensor, old: Tensor) -> Tensor:
    """The values of a tensor in the dtype or the scheme of the folder's."""
    if not isinstance(old, LowbitTensor):
        return _values(value).to(old.dtype)
    new: Any = old._map(lambda t: t.clone())
    values = _values(value).to(new.dtype)
    check_weight(values, "its value")
    if isinstance(new, AffineTensor):  # without a warning, and what siblings share stays
        turned = new.transposed
        requantize(new._transposed() if turned else new, values.mT if turned else values)
    else:
        new.copy_(values)
    return new


def _is_rounding_of(value: Tensor, old: Tensor) -> bool:
    """True if `value` was rounded from `old` to integers, and did not change since."""
    if not isinstance(value, AffineTensor) or not isinstance(value.spec.format, Int):
        return False
    held = _values(old).to(value.dtype)
    own: Any = value._transposed() if value.transposed else value
    return own.zero_point is None and is_nearest(own, held.mT if value.transposed else held)


def _fitted(t: Tensor, old: Tensor) -> Tensor | None:
    """`t` in the dtype and shape of `old`; None if that would change a value."""
    if t.numel() != old.numel():
        return None
    t = t.reshape(old.shape).contiguous()
    if t.dtype is old.dtype:
        return t
    bytes_of_scales = {torch.uint8, torch.float8_e8m0fnu}
    if {t.dtype, old.dtype} == bytes_of_scales:
        return t.view(old.dtype)
    cast = t.to(old.dtype)
    return cast if equal_bits(cast.to(t.dtype), t) else None


# ---- the folder ----------------------------------------------------------------------------------------------------


Shards = Iterator[tuple[TensorFile, dict[str, Tensor]]]


def write_like(likeness: Likeness, shards: Shards, place: Path) -> None:
    """Write the `shards` of a likeness, and config.json and all files of its folder, to the folder `place`.

    Memory: the changed tensors of a shard. Raises FormatError as `lowbit.export` does.
    """
    folder, report = likeness.folder, likeness.report
    with progress(f"writing like {folder.path.name}", folder.nbytes) as advance:
        for file, tensors in shards:
            beside = dict(file.metadata)
            digests.taken(beside)
            tensor_file.write(place / file.path.name, tensors, partial(_described, beside))
            report.nbytes += sum(t.nbytes for t in tensors.values())
            advance(file.path.stat().st_size)
    copy_settings(folder.path, place)
    copy_beside_weights(folder.path, place)


def _described(beside: dict[str, str], entries: digests.Entries) -> dict[str, str]:
    return {**beside, **digests.texts(entries)}
