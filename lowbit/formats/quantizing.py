"""A folder of plain weights as a source whose weights are quantized on the way, one after another.

No module says here which tensor is the weight of a linear, so names and shapes do. Under a scheme for all, or under the
pattern "*", every matrix named `….weight` is quantized but embeddings, the output head and the routers of experts. A
pattern that names one of these quantizes it: {"lm_head": Int8WeightOnly(), "*": Int4WeightOnly()}. The stacked experts
of gpt-oss are quantized too where the format to write holds stacks, in groups along their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert import check_pattern, matches
from lowbit.formats.base import Format, FormatError
from lowbit.formats.experts import is_transposed_stack
from lowbit.formats.folder import Folder
from lowbit.formats.layer_names import is_embedding, why_left_alone
from lowbit.formats.report import snr
from lowbit.formats.sources import Item
from lowbit.scheme import Scheme
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor

SCALES = ("minmax", "searched")
_TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
"""Models that store their weights as [K, N], so that groups would run along the outputs."""


class Quantizing:
    """See the module.

    Args:
        scheme: a Scheme, or a dict of patterns to a Scheme or None, as `lowbit.quantize_` takes them.
        scales: "minmax", "searched" or None, as there.
        device: where weights are quantized.
        target: the format to write, which says what scales are, and whether stacks of experts are quantized.

    Raises FormatError: weights that are quantized already, a pattern that chooses nothing, nothing to quantize, a
    scheme with a static activation, which needs a calibration.
    """

    def __init__(
        self,
        folder: Folder,
        scheme: Scheme | Mapping[str, Scheme | None],
        scales: str | None = None,
        device: str | torch.device = "cpu",
        target: Format | None = None,
    ) -> None:
        if scales is not None and scales not in SCALES:
            raise FormatError(f"unknown scales {scales!r}; accepted: {', '.join(SCALES)} or None")
        if folder.weights:
            raise FormatError(
                f"{folder.path} is in low bits already ({folder.format.name if folder.format else ''}); scheme= "
                "takes a folder of plain weights"
            )
        if (kind := folder.config.get("model_type")) in _TRANSPOSED:
            raise FormatError(
                f"a {kind} stores its weights transposed: load the model, call lowbit.quantize_ and export that"
            )
        self.config, self.nbytes = folder.config, folder.nbytes
        self.left_out = folder.left_out
        self._folder, self._scales, self._device = folder, scales, torch.device(device)
        patterns = scheme if isinstance(scheme, Mapping) else {"*": scheme}
        _check_schemes(patterns)
        if target is not None and not target.holds_stacks:  # stacks are turned here
            patterns = {p: None if s is None else target.grid(s) for p, s in patterns.items()}
        shapes = {name: folder.plain_shape(name) for name in folder.plain}
        self._stacks = {n for n, s in shapes.items() if is_transposed_stack(self.config, n, s)}
        kept = self._stacks if target is not None and target.holds_stacks else set()
        self._plan = {n: _choose(n, shape, patterns, n in kept) for n, shape in shapes.items()}
        used = {pattern for _, _, pattern in self._plan.values()}
        if unused := [p for p in patterns if p not in used]:
            some = [name for name, shape in shapes.items() if len(shape) > 1][:3]
            raise FormatError(
                f"the patterns {unused} choose no weight of {folder.path} (a pattern before them may match first, and "
                f"a tied head is stored as its embedding); accepted: names such as {some}"
            )
        if not any(scheme for scheme, _, _ in self._plan.values()):
            raise FormatError(f"{folder.path} has no matrix named ….weight that the scheme chooses")

    def items(self) -> Iterator[Item]:
        """See `lowbit.formats.sources.Source`."""
        for item in self._folder.items():
            scheme, note, _ = self._plan[item.name]
            if scheme is None:
                yield Item(item.name, item.value, item.holder, note)
                continue
            is_stack = item.name in self._stacks
            values = item.value.to(self._device)
            own = values.mT.contiguous() if is_stack else values
            weight = quantized(item.name, own, scheme, self._scales)
            weight = weight._transposed() if is_stack else weight
            ratio = snr(values, weight)
            weight = weight._map(lambda t: t.cpu())
            yield Item(item.name, weight, item.holder, scheme.describe(weight.shape), ratio)

    def names(self) -> list[str]:
        """Those of the folder."""
        return self._folder.names()

    def linears(self) -> set[str]:
        """See `lowbit.formats.sources.Source`."""
        return self._folder.linears()

    def copy_files(self, folder: Path) -> None:
        """Those of the folder."""
        self._folder.copy_files(folder)


def _check_schemes(patterns: Mapping[str, Any]) -> None:
    for pattern, scheme in patterns.items():
        check_pattern(pattern)
        if not isinstance(scheme, Scheme | None):
            raise TypeError(
                f"unknown scheme {scheme!r}; accepted: a Scheme, e.g. lowbit.Int4WeightOnly(), or a dict of name "
                "patterns to a Scheme or None"
            )
        if scheme is not None and scheme.is_static:
            raise FormatError(
                "a static activation needs a calibration: load the model, call lowbit.calibrate and lowbit.quantize_, "
                "and export that"
            )


def _choose(
    name: str, shape: tuple[int, ...], patterns: Mapping[str, Scheme | None], is_stack: bool
) -> tuple[Scheme | None, str, str | None]:
    """The scheme of a tensor, or None and the reason; and the pattern that decided."""
    layer, _, last = name.rpartition(".")
    if not is_stack and (last != "weight" or len(shape) != 2):
        return None, "no matrix named ….weight", None
    pattern = next((p for p in patterns if matches(p, layer) or matches(p, name)), None)
    scheme = None if pattern is None else patterns[pattern]
    if scheme is None:
        return None, "no scheme for this name", pattern
    if (why := why_left_alone(layer, pattern)) is not None:
        return None, why, None
    uses = {"embedding" if is_embedding(layer) else "linear"}
    if is_stack:
        shape, uses = (shape[0], shape[2], shape[1]), {"other"}
    obstacle = scheme.obstacle(shape, uses)
    return (scheme, "", pattern) if obstacle is None else (None, obstacle, pattern)


def quantized(name: str, values: Tensor, scheme: Scheme, scales: str | None) -> LowbitTensor:
    """`values` in the scheme, on their device. Raises FormatError for values that cannot be quantized."""
    try:
        return AffineTensor.quantized(values, scheme, scales)
    except ValueError as error:
        raise FormatError(f"{name}: {error}") from error
