"""The shapes of a model's weights, without their values: from shards, or from the model that transformers builds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowbit import optional
from lowbit.convert import routers_among
from lowbit.convert.experts import COUNTS
from lowbit.formats.base import FormatError, layer_of
from lowbit.formats.building import EmptyOnMeta, check_config
from lowbit.formats.folder import Folder, of_the_hub, read_json
from lowbit.formats.gguf.file import GgufFile
from lowbit.formats.layer_names import is_embedding, is_head

Shape = tuple[int, ...]


_MOST_WEIGHTS = 10**5
"""Weights of a model that is built."""
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_FIELDS = (
    *_NEEDED,
    *COUNTS,
    "num_experts_per_tok",
    "moe_intermediate_size",
    "intermediate_size",
    "num_key_value_heads",
    *("num_kv_heads", "multi_query", "new_decoder_architecture"),
    "head_dim",
    "type_vocab_size",
    "is_decoder",
    "is_encoder_decoder",
)
"""The fields of config.json that `DecoderSizes` is made of."""


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes on which activations and the cache of keys and values depend.

    Attributes:
        hidden: width of the residual stream.
        query, key_value: outputs of the query projection, and of the key projection.
        inner: width between up and down; with experts, the sum over the experts that one token visits.
    """

    layers: int
    hidden: int
    query: int
    key_value: int
    inner: int
    vocabulary: int


@dataclass(frozen=True)
class ModelShapes:
    """`weights`: every tensor once, by name. `source`: where the shapes come from, for the report."""

    weights: Mapping[str, Shape]
    sizes: DecoderSizes
    source: str

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights.values())

    def matrices(self) -> Iterator[str]:
        """The weights that schemes convert: not embeddings, heads, routers, norms or biases."""
        routers = routers_among(self.weights)
        for name, shape in self.weights.items():
            layer = layer_of(name) if name.endswith(".weight") else name
            plain = is_embedding(layer) or is_head(layer) or name in routers
            if not plain and len(shape) in (2, 3) and not name.endswith("bias"):
                yield name


def read(path: Path) -> ModelShapes:
    """The model of a folder, or of a config.json.

    Raises FormatError: no such file, not JSON, an encoder, or shapes that neither shards nor transformers give.
    """
    file = path / "config.json" if path.is_dir() else path
    written = _config(file)
    check_config(written)
    made, text, why = _made_by_transformers(written)
    config = _of_decoder(written, text)
    _check_decoder(config, file)
    sizes = _sizes(config, file, why)
    if path.is_dir() and any(path.glob("*.safetensors")):
        folder = Folder(path)
        if folder.format is None:
            weights = {name: folder.plain_shape(name) for name in folder.plain}
            return _measured(ModelShapes(weights, sizes, "the shards"), file)
    weights, why = ({}, why) if made is None else _built_by_transformers(made)
    if why:
        kind = config.get("model_type")
        raise FormatError(
            f"{file}: no shapes of a {kind!r}: {why}; or give a folder with its plain weights"
        )
    return _measured(ModelShapes(weights, sizes, "transformers"), file)


def _measured(model: ModelShapes, file: Path) -> ModelShapes:
    """`model` with the width between up and down where its config names none, as GPT-2's, BLOOM's and OPT's: the widest
    input of a product that gives the residual stream. Raises FormatError: no such product."""
    hidden = model.sizes.hidden
    if model.sizes.inner:
        return model
    shapes = [model.weights[name] for name in model.matrices()]
    inner = max((shape[-1] for shape in shapes if shape[-2] == hidden), default=0)
    if not inner:
        raise FormatError(f"{file} has no intermediate_size, and no weight has {hidden} outputs")
    return replace(model, sizes=replace(model.sizes, inner=inner))


def _config(file: Path) -> dict[str, Any]:
    if file.suffix == ".gguf":
        return GgufFile(file).config
    if not file.exists():
        raise FormatError(
            f"{file} does not exist; give a folder with config.json, or that file{of_the_hub(file)}"
        )
    try:
        return read_json(file)
    except FormatError as error:
        raise FormatError(
            f"{error}; give a config.json, a folder that has one, or a GGUF file"
        ) from error


def _of_decoder(written: Mapping[str, Any], text: Any) -> dict[str, Any]:
    """The fields of the language model: those of the file, and the others as transformers fills them in (`text`)."""
    inner = written.get("text_config")
    config = {**written, **inner} if isinstance(inner, dict) else {**written}
    for name in _FIELDS:
        if config.get(name) is None and (found := getattr(text, name, None)) is not None:
            config[name] = found
    return config


def _check_decoder(config: Mapping[str, Any], file: Path) -> None:
    """Raise FormatError for an encoder, such as BERT or the one of T5: its activations are others, and it has no
    cache."""
    fills_in = any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ())
    is_encoder = (fills_in or config.get("type_vocab_size")) and not config.get("is_decoder")
    if is_encoder or config.get("is_encoder_decoder"):
        and_decoder = " and a decoder" if config.get("is_encoder_decoder") else ""
        raise FormatError(
            f"{file} describes an encoder{and_decoder}, {config.get('model_type')}, and the estimate is one of "
            "decoders, as Llama; lowbit inspect gives the bytes of its weights"
        )


def _sizes(config: Mapping[str, Any], file: Path, why: str) -> DecoderSizes:
    """`inner` is 0 where transformers knows the model and its config names no such width."""
    wrong = [name for name in _NEEDED if not _is_size(config.get(name))]
    width_name = "moe_intermediate_size"
    if not config.get(width_name):
        width_name = "intermediate_size"
    inner = config.get(width_name)
    is_measured = inner is None and not why
    if not (is_measured or _is_size(inner)):
        wrong.append(width_name)
    if absent := [name for name in wrong if config.get(name) is None]:
        raise FormatError(
            f"{file} has no {', '.join(absent)}; the estimate needs a decoder's config.json, as Llama's"
            + (f". Its defaults are not known: {why}" if why else "")
        )
    if wrong:
        found = ", ".join(f"{name} is {config[name]!r}" for name in wrong)
        raise FormatError(f"{file}: {found}; accepted: whole numbers above 0")
    layers, hidden, heads, vocabulary = (int(config[name]) for name in _NEEDED)
    head = int(config.get("head_dim") or hidden // heads)
    groups = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        groups = 1  # Falcon 7B, whose config counts 71, and GPT-BigCode
    visited = int(config.get("num_experts_per_tok") or 1) if _experts(config) else 1
    width = int(inner or 0) * visited
    return DecoderSizes(layers, hidden, heads * head, groups * head, width, vocabulary)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _experts(config: Mapping[str, Any]) -> int:
    return next((int(config[n]) for n in COUNTS if _is_size(config.get(n))), 0)


def _made_by_transformers(written: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """transformers' config, the part of it for the language model, and "". None, None and the reason, a sentence, if
    transformers is missing or refuses the fields."""
    if not optional.is_importable("transformers"):
        return None, None, f"transformers is not installed: {optional.install('hf')}"
    import transformers

    own = {k: v for k, v in written.items() if k != "quantization_config"}
    try:
        made = transformers.AutoConfig.for_model(**own)
        return made, made.get_text_config(decoder=True), ""
    except Exception as error:  # a model type that this release lacks, or a field that it refuses
        return None, None, _refused(transformers.__version__, error)


def _built_by_transformers(made: Any) -> tuple[dict[str, Shape], str]:
    """The parameters of the model that transformers builds on meta, and ""; none and the reason if it does not."""
    import transformers

    of_text = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    kind = next((auto for auto in of_text if type(made) in auto._model_mapping), of_text[0])
    try:
        with torch.device("meta"), EmptyOnMeta(_MOST_WEIGHTS):
            # Otherwise transformers asks whether it may run code of the folder.
            model = kind.from_config(made, trust_remote_code=False)
    except Exception as error:
        return {}, _refused(transformers.__version__, error)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}, ""


def _refused(version: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].split(". ")[0] if lines else type(error).__name__
    return f"transformers {version} does not know this model ({reason})"
