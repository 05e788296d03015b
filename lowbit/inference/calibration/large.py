"""calibrate, for a model that lies in a folder and is never whole in memory.

One block at a time comes into memory, as `lowbit.inference.calibration.stages` walks. What a place has become is
written to `.out.lowbit-calibration` beside the result (`Finished`) before the next one begins. A later call with the
same arguments goes on from there, with the same bits: it takes the finished blocks from their files, and runs them on
the batches again. At the end `lowbit.export` writes the result in any format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lowbit.convert import Filter, Schemes, Target, has_static
from lowbit.files import digests, new_path
from lowbit.formats.base import FormatError
from lowbit.formats.folder_choice import FolderChoice
from lowbit.formats.streamed import StreamedModel
from lowbit.formats.writing import check_writing, default_format, export
from lowbit.inference.calibration.batches import Batches, usable_batches
from lowbit.inference.calibration.expert_pruning import PruneExperts
from lowbit.inference.calibration.finished import Finished
from lowbit.inference.calibration.kv_cache import CacheFormat
from lowbit.inference.calibration.ranks import Ranks
from lowbit.inference.calibration.report import CalibrationReport
from lowbit.inference.calibration.run import Run, holding_out
from lowbit.inference.calibration.stages import StageMemory, chain_of, first_of_each_class
from lowbit.inference.calibration.states import Cache
from lowbit.inference.calibration.step import Step
from lowbit.layers import cache_scales
from lowbit.optional import version
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tracing.observer import Method


def calibrate_folder(
    path: str | PathLike[str],
    scheme: Schemes,
    batches: Any,
    filter_fn: Filter | None,
    steps: Sequence[Step],
    method: Method,
    cache: Cache,
    device: str | torch.device,
    out: str | PathLike[str],
    writing: Mapping[str, Any],
    ranks: Ranks,
    kv_cache: CacheFormat | None,
    held_out: Any,
) -> CalibrationReport:
    """Calibrate the model of a folder, and write it to `out`. Args: those of `lowbit.calibrate`; `ranks`: the processes
    that do so together, of which the first one writes.

    Raises what `lowbit.calibrate` says."""
    if any(isinstance(step, PruneExperts) for step in steps):
        raise ValueError(
            "PruneExperts changes config.json, too, and takes a model in memory: calibrate(lowbit.load_pretrained("
            "folder), …), then lowbit.export(model, out)"
        )
    out = Path(out)
    on_grid = check_writing(path, out, scheme, **writing)
    source = StreamedModel(path, device)
    choice = FolderChoice(source.model, not has_static(scheme)) if filter_fn is None else filter_fn
    usable = Batches()
    if batches is not None:
        usable = usable_batches(source.model, batches, ranks, holding_out(held_out, steps))
    folds = any(step.folds for step in steps)
    memory = Streamed(source, cache if isinstance(cache, Path) and not folds else None)
    run = Run(source.model, on_grid, choice, steps, usable, method, memory, kv_cache=kv_cache)
    format = writing.get("format") or default_format(path)
    run.check_export(format, writing.get("lossy", False), source.folder)
    chain = chain_of(source.model, run.targets)
    if batches is None:
        run.check_without_data()
    if why := _why_whole(chain, run.targets, usable, steps):
        chain = []
    try:
        key, is_first = _key(source, run, steps), ranks.rank == 0
        with new_path.kept(out, "calibration", locks=is_first) as place:
            memory.begin(run, chain, Finished(place, key, writes=is_first))
            report = memory.all_finished() or run.quantize(chain, cache)
            ranks.gathered(None)  # all have read what the first one removes
            written = export(memory.completed(), out, **writing) if is_first else None
            report.written = ranks.gathered(written)[0]
            assert report.written is not None
            report.written.notes += [f"the model was whole in memory: {why}"] if why else []
            report.written.notes += report.notes
    except BlockingIOError as error:
        raise FormatError(
            f"another process calibrates to {out}; wait, or give another out"
        ) from error
    except OSError as error:
        raise FormatError(f"{error.filename or out}: {error.strerror or error}") from error
    return report


class Streamed(StageMemory):
    """The memory of one block of a folder's model.

    Embeddings, the head and other weights outside the blocks are there before and after the blocks alone, on the CPU as
    views of their files. The first block of each class stays, in low bits once it is rounded: it runs to show what a
    block gives beside the hidden state.

    Args:
        disk: the folder on whose disk the stacked experts of a block lie, in the file of the model or in another one;
            None: in memory.
    """

    def __init__(self, source: StreamedModel, disk: Path | None = None) -> None:
        self.source, self._disk = source, disk
        self._here: set[int] = set()
        """The blocks that were brought into memory, and None for what lies outside of them, by their ids."""
        self._before: set[str] = set()
        """The names of weights that are rounded before the blocks."""
        self._told = 0, 0, 0, 0
        """How many layers, learned and held-out losses, and names of weights that vary, of the report are written."""
        self._scales: Collection[str] = ()
        """The names of the scales of keys and values that are written."""

    def begin(self, run: Run, chain: Sequence[nn.Module], finished: Finished) -> None:
        """`chain`: the blocks; [] for a model that is whole in memory."""
        self._run, self._chain, self._finished = run, chain, finished
        self.streams = bool(chain)
        self._first = {id(block) for block in first_of_each_class(chain)}
        inside = {name for block in chain for name in self.source.names_in(block)}
        self._outside = [name for name in self.source.names() if name not in inside]
        self.way_out = (
            f"Find the batch that gives them, delete {finished.place}, and leave that batch out"
        )

    def bring(self, block: nn.Module | None) -> None:
        if (key := id(block)) in self._here:
            return
        self._here.add(key)
        if block is None:
            self.source.bring(self._plain(), copies=not self.streams)
        else:
            self.source.bring(self.source.names_in(block), disk=self._disk)

    def drop(self, block: nn.Module | None) -> None:
        if (key := id(block)) in self._first:
            return
        self._here.discard(key)
        self.source.drop(self._plain() if block is None else self.source.names_in(block))

    def _plain(self) -> list[str]:
        """The names of the tensors in high precision outside the blocks."""
        return [n for n in self._outside if not isinstance(self.source.value(n), LowbitTensor)]

    def is_finished(self, place: str) -> bool:
        return self._run.batches.ranks.gathered(self._finished.has(place))[0]

    def restore(self, place: str, targets: list[Target]) -> None:
        tensors, results = self._finished.read(place)
        weights: dict[str, Tensor] = {}
        for name, value in tensors.items():
            if isinstance(value, LowbitTensor):
                weights[name] = value._map(lambda t: t.to(self.source.device))
            elif not self._put_scale(name, value):
                self.source.put(name, value)
        if place == "before":
            self._before = {*weights}
        self._run.put_back(targets, weights, results)
        self._tell()

    def _put_scale(self, name: str, value: Tensor) -> bool:
        """Put back a scale of keys or values. False: it is another tensor."""
        layer, _, own = name.rpartition(".")
        is_one = self._run.kv_cache is not None and cache_scales.is_named_so(name)
        if is_one:
            cache_scales.hold(self.source.model.get_submodule(layer), {own: value})
        return is_one

    def finish(self, place: str) -> None:
        if place == "before":
            low = [n for n in self._outside if isinstance(self.source.value(n), LowbitTensor)]
            self._before = {*low}
            names = low
        elif place == "after":
            names = [name for name in self._outside if name not in self._before]
        else:
            names = self.source.names_in(self._chain[int(place)])
        report = self._run.report
        layers, learned, held_out, varied = self._told
        results = {
            "layers": [asdict(one) for one in list(report.layers.values())[layers:]],
            "learned": [(name, losses._asdict()) for name, losses in report.learned[learned:]],
            "held_out": [(name, losses._asdict()) for name, losses in report.held_out[held_out:]],
            "varied": self._run.varied[varied:],
        }
        values = {name: self.source.value(name) for name in names}
        scales = cache_scales.held_in(self.source.model)
        values |= {n: t for n, t in scales.items() if n not in self._scales}
        self._finished.write(place, values, results)
        self._tell()

    def _tell(self) -> None:
        run = self._run
        losses = len(run.report.learned), len(run.report.held_out)
        self._told = len(run.report.layers), *losses, len(run.varied)
        self._scales = cache_scales.held_in(self.source.model).keys()

    def all_finished(self) -> CalibrationReport | None:
        """The report, if an earlier process has finished all places."""
        if not self.is_finished("after"):
            return None
        for place in ("before", *map(str, range(len(self._chain))), "after"):
            if self.is_finished(place):
                tensors, results = self._finished.read(place)
                for name, value in tensors.items():
                    self._put_scale(name, value)
                low = {n: t for n, t in tensors.items() if isinstance(t, LowbitTensor)}
                meta = {n: t._map(lambda part: part.to("meta")) for n, t in low.items()}
                own = [t for t in self._run.targets if any(o.fqn in meta for o in t.owners)]
                self._run.put_back(own, meta, results)
        self._run.report.notes = self._run.notes()
        return self._run.report.count(self.source.model)

    def completed(self) -> Path:
        """The folder with all that is finished, in lowbit's format."""
        values = {name: self.source.value(name) for name in self.source.names()}
        low = {n: t for n, t in values.items() if isinstance(t, LowbitTensor)}
        settings = cache_scales.settings_for(cache_scales.held_in(self.source.model))
        folder = self._finished.complete(self.source.folder.config, low, settings)
        self.source.folder.copy_files(folder)
        return folder


def _why_whole(
    chain: Sequence[nn.Module], targets: Sequence[Target], batches: Batches, steps: Sequence[Step]
) -> str | None:
    """Why the model is not calibrated block by block; None if it is."""
    if not batches.total:
        return "there are no batches to run through its blocks"
    if whole := [step.method for step in steps if step.whole]:
        return f"{whole[0]} works on all blocks together"
    if not chain:
        return "it has no list of two blocks or more"
    where = {id(m): i for i, block in enumerate(chain) for m in block.modules()}
    for target in targets:
        if len({where.get(id(owner.module)) for owner in target.owners}) > 1:
            names = " and ".join(owner.fqn for owner in target.owners[:2])
            return f"{names} are one weight of several blocks"
    return None


def _key(source: StreamedModel, run: Run, steps: Sequence[Step]) -> dict[str, str]:
    """Digests of all that decides the bits of the result."""
    paths = sorted(file.path for file in source.folder.files())
    shards = [(path.name, path.stat()) for path in paths]
    files = [(name, found.st_size, found.st_mtime_ns) for name, found in shards]
    schemes = {target.fqn: target.scheme.to_dict() for target in run.targets}
    leaves, tree = tree_flatten(list(run.batches))
    batches = [str(tree), str(run.batches.seen), *map(_text, leaves)]
    given = {
        "set of releases": [version(name) for name in ("lowbit", "torch", "transformers")],
        "folder": [source.folder.config, files],
        "scheme": schemes,
        "list of steps": [str(step) for step in steps],
        "list of batches": batches,
        "choice of ranges": run.method,
        "kv_cache": run.kv_cache,
        "kind of device": source.device.type,
    }
    ranks = run.batches.ranks
    if ranks.group is not None:
        given["list of batches"] = ranks.gathered(batches)
    key = {name: digests.of_text(json.dumps(value)) for name, value in given.items()}
    for rank, other in enumerate(ranks.gathered(key)):
        if names := [name for name in key if other[name] != key[name]]:
            raise ValueError(
                f"rank {rank} has another {' and another '.join(names)} than rank {ranks.rank}; all ranks of a group "
                "read one folder, and only their batches differ"
            )
    return key


def _text(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"{leaf.dtype} {tuple(leaf.shape)} {digests.of_tensor(leaf)}"
