"""lowbit's own format, "lowbit": the parts of every low-bit tensor under its name, and descriptions in config.json.

    layer.weight.codes, layer.weight.scale, layer.weight.zero_point, …       as `lowbit.save` stores them

    "quantization_config": {
        "quant_method": "lowbit", "format_version": 1,
        "kinds": [{"kind": "AffineTensor", "dtype": "bfloat16", "scheme": {…}}, …],
        "tensors": {"layer.weight": {"kind": 0, "shape": [N, K]}, …}}

An entry with "transposed": true describes a weight whose last two dimensions are swapped in the model, such as experts
of shape [E, K, N] whose groups run along K. The parts and the "shape" are those of [E, N, K].

A "kind" is an index of "kinds", so that thousands of weights do not repeat their scheme. The format holds every
representation that a state dict describes without loss, also those of embeddings, convolutions and stacks of experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lowbit.checkpoint import FORMAT_VERSION
from lowbit.files.memory import is_short_memory
from lowbit.formats.base import Format, FormatError, Parts
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.state_dict import describe, read_description


class Own(Format):
    name = "lowbit"
    holds_embeddings = True
    holds_custom = True
    holds_stacks = True
    holds_cache_scales = True
    holds_training = True

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("quant_method") == "lowbit"

    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        kinds = LowbitTensor.kinds.values()
        return tuple(
            dict.fromkeys(["codes", *(part for kind in kinds for part in kind.tensor_attrs)])
        )

    def stored_name(self, weight: str, part: str) -> str:
        return f"{weight}.{part}"

    def find(self, names: Collection[str], config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for weight in stored_tensors(config):
            stored = {part: f"{weight}.{part}" for part in self.suffixes(config)}
            found[weight] = {part: name for part, name in stored.items() if name in names}
            if not found[weight]:
                raise FormatError(f"config.json describes {weight}, and no shard holds its parts")
        parts = {name for own in found.values() for name in own.values()}
        if lost := sorted(n for n in names if n not in parts and n.endswith(".codes")):
            raise FormatError(f"config.json describes no tensor for {', '.join(lost[:3])}")
        return found

    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        try:
            kind, meta, shape, own_dtype = stored_as(config, weight)
            if unknown := sorted(parts.keys() - {*kind.tensor_attrs}):
                raise FormatError(f"{kind.__name__} has no {', '.join(unknown)}")
            if not parts:
                raise FormatError("it has no parts")
            made = kind.from_inner(parts, meta, shape, own_dtype)
            made.check_parts()
            if stored_tensors(config)[weight].get("transposed", False):
                made = made._transposed()
        except FormatError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if is_short_memory(error):
                raise
            raise FormatError(f"its parts do not fit its description: {error}") from error
        return made

    def encode(self, weight: LowbitTensor) -> Parts:
        if not weight.is_describable:
            raise FormatError(f"a {type(weight).__name__} has no description that can be read back")
        if weight.flat_from is not None:
            raise FormatError("it is a flattened view; export the original")
        weight = weight._transposed() if weight.transposed else weight
        return {name: t.detach().contiguous() for name, t in weight.inner_tensors().items()}

    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = []
        tensors: dict[str, Any] = {}
        for name, weight in weights.items():
            described = describe(weight._transposed() if weight.transposed else weight)
            shape = described.pop("shape")
            if described not in kinds:
                kinds.append(described)
            tensors[name] = {"kind": kinds.index(described), "shape": shape}
            if weight.transposed:
                tensors[name]["transposed"] = True
        head = {"quant_method": "lowbit", "format_version": FORMAT_VERSION}
        return {**head, "kinds": kinds, "tensors": tensors}

    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        return None


def stored_as(
    config: Mapping[str, Any], weight: str
) -> tuple[type[LowbitTensor], dict[str, Any], tuple[int, ...], torch.dtype]:
    """Kind, metadata, shape and dtype of a weight that "quantization_config" describes.

    Raises FormatError as `stored_tensors` does, and LookupError, TypeError or ValueError for a damaged description.
    """
    entry = stored_tensors(config)[weight]
    if type(entry["kind"]) is not int or entry["kind"] < 0:
        raise ValueError(f"its kind is {entry['kind']!r}; accepted: an index of kinds")
    described = {**config["kinds"][entry["kind"]], "shape": entry["shape"]}
    return read_description(weight, described)


def stored_tensors(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of all weights that "quantization_config" describes, by name. Raises FormatError for a config of a
    newer lowbit, or without descriptions."""
    version, tensors = config.get("format_version"), config.get("tensors")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"quantization_config has format_version {version!r}; this lowbit reads 1 to {FORMAT_VERSION}: upgrade it"
        )
    if not isinstance(tensors, dict) or not isinstance(config.get("kinds"), list):
        raise FormatError(
            "quantization_config describes no tensors; write the folder by lowbit.export(…, format='lowbit')"
        )
    return tensors
