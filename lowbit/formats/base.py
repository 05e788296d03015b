"""A checkpoint format: how it stores one weight, and how its config.json says so.

The folder of a checkpoint holds *.safetensors shards and a config.json, whose "quantization_config" describes the
weights. A `Format` translates between these and lowbit's tensors, one weight at a time, so that a folder is read and
written in the memory of a few tensors. `lowbit.formats.registry` lists the formats.

A weight has a full name, `model.layers.0.mlp.up_proj.weight`. The parts of a weight have short names, such as
"weight_packed", and `stored_name` gives the name of a part in the shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.convert.patterns import PatternError
from lowbit.files.memory import is_short_memory
from lowbit.formats.layer_names import is_listed
from lowbit.numerics.granularity import PerBlock
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor

Parts = dict[str, Tensor]
"""The tensors that stand for one weight, by their short names."""


class _Stored(Parts):
    """The parts that a folder has of one weight. Any other raises FormatError."""

    def __missing__(self, part: str) -> Tensor:
        raise FormatError(f"it has no {part}")


class FormatError(ValueError):
    """A weight or a checkpoint that a format cannot hold, read or write, and the way out."""


class ScalesError(FormatError):
    """Scales that a format does not represent. A scheme from `lowbit.formats.grid` has scales that it does."""


@contextmanager
def damage_of(what: str) -> Iterator[None]:
    """Raise a FormatError that begins with `what`, on one line, for the errors of code that reads a damaged file.

    Formats check what they read. But values of JSON may have any type and tensors any shape, so Python or PyTorch may
    raise first. Errors of short memory pass as they are.
    """
    try:
        yield
    except (FormatError, PatternError) as error:
        # PyTorch's own messages, which some formats pass on, may list frames of C++ below.
        first, _, _ = str(error).partition("\n")
        raise FormatError(f"{what}: {first}") from error
    except _ERRORS_OF_DAMAGE as error:
        if is_short_memory(error):
            raise
        raise FormatError(f"{what}: it is damaged, or config.json is ({brief(error)})") from error


def brief(error: Exception) -> str:
    """The class and the text of an error of other code, on one line, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


_ERRORS_OF_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def with_scales(scheme: Scheme, dtype: torch.dtype | None) -> Scheme:
    """`scheme` with scales of `dtype`, unless `scheme` names a dtype itself or its format fixes the dtype of scales."""
    spec = scheme.weight
    in_blocks = isinstance(spec.format, Float8) and isinstance(spec.granularity, PerBlock)
    is_named = spec.scale_dtype is not None or spec.scale_format != "float"
    if is_named or isinstance(spec.format, LookupTable) or in_blocks:
        return scheme
    return replace(scheme, weight=replace(spec, scale_dtype=dtype))


def with_qparams(
    values: Tensor, scheme: Scheme, qparams: tuple[Tensor, Tensor | None]
) -> AffineTensor:
    """`values` in the scheme with this scale and zero point. Raises FormatError for scales that cannot be used."""
    try:
        return AffineTensor.from_float(values, scheme, qparams)
    except ValueError as error:
        raise FormatError(str(error)) from error


def check_matrix(weight: LowbitTensor, format: str, rounds_inputs: bool = True) -> None:
    """Raise FormatError, in the name of `format`, for other weights than matrices [N, K] as they are stored, and for
    weights whose inputs are rounded if `format` does not round any."""
    if getattr(weight, "stored_as", None) == "sparse24":
        raise FormatError(
            f"{format} holds no compressed 2:4 weights, got a {type(weight).__name__}: take Prune24(compressed=False), "
            "or put the weight's .dense in its place"
        )
    if weight.ndim != 2 or weight.transposed or weight.flat_from is not None:
        raise FormatError(f"{format} holds matrices [N, K], got {weight!r}")
    if not rounds_inputs:
        check_plain_inputs(weight, format)


def check_plain_inputs(weight: Any, format: str) -> None:
    """Raise FormatError, in the name of `format`, for a weight whose inputs are rounded."""
    if weight.activation is not None:
        raise FormatError(f"{format} rounds no inputs, got {weight.activation}")


def layer_of(weight: str) -> str:
    """The name of the module that holds the weight of this name: all before the last dot."""
    return weight.rpartition(".")[0]


def weight_of(layer: str) -> str:
    """The name of the weight of the module `layer`."""
    return f"{layer}.weight" if layer else "weight"


class Format(ABC):
    """A format of quantized weights in a folder of safetensors.

    A format of your own is a subclass in one file, and one line in `lowbit.formats.registry`.
    """

    name: ClassVar[str]
    """The name that `lowbit.export(…, format=name)` takes."""
    holds_embeddings: ClassVar[bool] = False
    """True if loaders of this format take a quantized embedding."""
    holds_custom: ClassVar[bool] = False
    """True if loaders of this format take quantized weights of modules of transformers besides nn.Linear. Most loaders
    replace each nn.Linear, and leave the random start values in such a weight."""
    holds_float32: ClassVar[bool] = True
    """False if transformers' loader of this format takes layers that a model keeps in float32, such as T5's `wo`, in
    high precision."""
    holds_stacks: ClassVar[bool] = False
    """True if loaders of this format take the weights of all experts of a layer as one tensor."""
    holds_experts: ClassVar[bool] = False
    """True if loaders of this format take a matrix for each expert, in the names of published checkpoints. Then
    `lowbit.formats.experts` splits the stacks that models have in memory."""
    holds_cache_scales: ClassVar[bool] = False
    """True if loaders of this format take static scales of keys and values, which "kv_cache_scheme" describes."""
    holds_training: ClassVar[bool] = False
    """True if codes that train, such as those of `Int8Weight`, are stored as such. Others get the weight that
    `lowbit.train.convert_` makes of them."""
    marks: ClassVar[int] = 1
    """How many of the `suffixes` mark a quantized weight."""
    after_modules: ClassVar[bool] = True
    """True if parts have the name of the module before theirs; False: that of the weight, without a dot."""
    scale_dtype: ClassVar[torch.dtype | None] = None
    """The dtype in which this format stores scales; None: any dtype."""

    # ---- reading -------------------------------------------------------------------------------------------------

    @abstractmethod
    def reads(self, config: Mapping[str, Any]) -> bool:
        """True if this "quantization_config" of a config.json describes the format."""

    @abstractmethod
    def suffixes(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The short names of the parts. The first one marks a quantized weight: a layer without this part is plain. See
        `marks` for several."""

    def stored_name(self, weight: str, part: str) -> str:
        """The name in a shard of a part of `weight`. Raises FormatError for a weight that is not named "weight"."""
        layer, _, last = weight.rpartition(".")
        if last != "weight":
            raise FormatError(f"{self.name} names parts after a module's `weight`, got {last!r}")
        return f"{layer}.{part}" if layer else part

    def find(self, names: Collection[str], config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The weights that are stored under `names`: for each weight, the stored name of each part by its short name.

        Raises FormatError for parts that belong to no weight.
        """
        known, suffixes = {*names}, self.suffixes(config)
        marks, others = suffixes[: self.marks], suffixes[self.marks :]
        found: dict[str, dict[str, str]] = {}
        for name in names:
            for mark in marks:
                if (stem := self._stem(name, mark)) is not None:
                    stored = {part: stem + part for part in (mark, *others)}
                    weight = f"{stem}weight" if self.after_modules else stem
                    found[weight] = {p: own for p, own in stored.items() if own in known}
        held = {name for parts in found.values() for name in parts.values()}
        ends = [part for part in others if part not in ("weight", "bias")]
        if lost := sorted(
            n for n in known - held if any(self._stem(n, e) is not None for e in ends)
        ):
            raise FormatError(
                f"{', '.join(lost[:3])}: parts of {self.name} weights that have no {' or '.join(marks)} beside them"
            )
        return found

    def _stem(self, name: str, part: str) -> str | None:
        """What precedes `part` at the end of a stored name; None if the name is not that of such a part."""
        stem = name.removesuffix(part)
        ends = not self.after_modules or stem == "" or stem[-1] == "."
        return stem if stem != name and ends else None

    def read(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        """The weight that `decode` makes. Raises FormatError for a missing part, and for a ValueError of `decode`."""
        try:
            return self.decode(_Stored(parts), config, weight, dtype)
        except FormatError:
            raise
        except ValueError as error:
            raise FormatError(str(error)) from error

    @abstractmethod
    def decode(
        self, parts: Parts, config: Mapping[str, Any], weight: str, dtype: torch.dtype | None
    ) -> LowbitTensor:
        """The weight of this name.

        Args:
            parts: from the folder, by their short names; one that is missing raises FormatError when it is taken.
            config: the "quantization_config".
            weight: its full name.
            dtype: of the model's weights; None: config.json names no dtype.

        Raises ValueError for parts that do not fit each other, and for settings that lowbit cannot represent.
        """

    def skips(self, config: Mapping[str, Any], layer: str) -> bool:
        """True if the "quantization_config" says that the linear `layer` is stored plainly.

        Tensors decide how a weight is read. This method distinguishes a folder whose layers were all skipped from one
        with another folder's config.json.
        """
        keys = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
        return any(is_listed(layer, config.get(key)) for key in keys)

    def settings(self, config: Mapping[str, Any], metadata: Mapping[str, str]) -> Mapping[str, Any]:
        """The `config` of the other methods: the "quantization_config", and what a format takes from `metadata`, the
        text that the shards have beside their tensors."""
        return config

    # ---- writing -------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, weight: LowbitTensor) -> Parts:
        """The parts of `weight`, with dequantized values equal to the bit.

        Raises FormatError, with the reason, for a weight that the format cannot hold.
        """

    def encode_back(self, weight: LowbitTensor) -> Parts:
        """`encode` for a weight of a folder of this format that is written back to its place. Its readers take its
        shape and its scheme, also where `encode` refuses them."""
        return self.encode(weight)

    @abstractmethod
    def config(self, weights: Mapping[str, LowbitTensor], plain: Collection[str]) -> dict[str, Any]:
        """The "quantization_config" of these weights, by name, and of the modules `plain` with plain weights.

        The weights may be meta tensors. Raises FormatError for weights that one config cannot describe together.
        """

    def notes(self, weights: Mapping[str, LowbitTensor]) -> list[str]:
        """Lines for the report about the readers of these weights, which may be on meta."""
        return []

    @abstractmethod
    def nearest(self, weight: LowbitTensor) -> Scheme | None:
        """For a weight that the format cannot hold as it is, the scheme with the smallest loss among those that the
        format holds. None: the weight stays in high precision."""

    def rounded(self, values: Tensor, scheme: Scheme) -> LowbitTensor:
        """`values` in the scheme that `nearest` names, with searched scales that the format holds.

        Raises FormatError for values that have no such scales.
        """
        try:
            return AffineTensor.searched(values, with_scales(scheme, self.scale_dtype))
        except ValueError as error:
            raise FormatError(str(error)) from error

    def joint(self, weight: AffineTensor) -> dict[str, Tensor]:
        """The tensors, by name, of which readers of this format keep one for all siblings that they merge. Siblings
        must agree in them (`lowbit.formats.merged`)."""
        return {}

    def grid(self, scheme: Scheme) -> Scheme:
        """`scheme` with the scales that the format stores, if the scheme leaves them open; see
        `lowbit.formats.grid`."""
        return with_scales(scheme, self.scale_dtype)

    def metadata(
        self, weights: Mapping[str, LowbitTensor], plain: Collection[str]
    ) -> dict[str, str]:
        """The text that a shard has beside its tensors. `weights` and `plain` are those of this shard and of all
        earlier shards, since transformers keeps the text of the last shard."""
        return {"format": "pt"}
