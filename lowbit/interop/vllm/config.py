"""Which layers of a model in vLLM have weights in lowbit's format."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from lowbit.formats.base import FormatError
from lowbit.formats.own import stored_as, stored_tensors
from lowbit.interop.vllm.linear import PREFIX, LowbitLinearMethod
from lowbit.interop.vllm.parts import Stored
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor

METHOD = "lowbit"


@register_quantization_config(METHOD)
class LowbitServing(QuantizationConfig):
    """The "quantization_config" of a folder in lowbit's own format.

    Args:
        settings: the entry of config.json.

    Attributes:
        weights: how the folder stores each weight, by its name in vLLM's model.

    Raises FormatError for settings of a newer lowbit, and for settings that describe no weights.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.weights = {name: _read(settings, name) for name in stored_tensors(settings)}

    def __repr__(self) -> str:
        return f"LowbitServing({len(self.weights)} weights)"

    def get_name(self) -> Any:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json holds everything

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LowbitServing:
        return cls(config)

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """`layer.weight.codes` of the folder is the parameter `layer.weight_codes`."""
        attributes = dict.fromkeys(a for k in LowbitTensor.kinds.values() for a in k.tensor_attrs)
        pattern = re.compile(rf"\.weight\.({'|'.join(attributes)})$")
        return WeightsMapper(orig_to_new_regex={pattern: rf".{PREFIX}\1"})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Take the names that vLLM gives to the modules of this model."""
        self.weights = hf_to_vllm_mapper.apply_dict(self.weights)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How the layer of this name holds its weight; None: vLLM's own way.

        Raises ValueError for low-bit weights that the plug-in does not serve: embeddings, experts, and merged layers
        that are not all stored alike.
        """
        is_linear = isinstance(layer, LinearBase)
        if is_linear or isinstance(layer, ParallelLMHead):
            stored = self._stored(prefix)
            if stored is not None:
                _check_head(prefix, stored, is_linear)
                return LowbitLinearMethod(prefix, stored)
            return UnquantizedLinearMethod() if is_linear else None
        inside = [name for name in self.weights if name.startswith(f"{prefix}.")]
        if inside:
            raise ValueError(
                f"{inside[0]} is in low bits, and lowbit's plug-in of vLLM serves linear layers and the output head "
                f"only, not a {type(layer).__name__}; leave it out when quantizing, as LowbitConfig(…, experts=False) "
                "does, or write another format: lowbit.export(…, format='compressed-tensors')"
            )
        return None

    def _stored(self, prefix: str) -> Stored | None:
        """How the weights that vLLM merges in this layer are stored. Raises ValueError unless all are stored alike."""
        parent, _, last = prefix.rpartition(".")
        names = [prefix]
        if f"{prefix}.weight" not in self.weights:
            merged = self.packed_modules_mapping.get(last, [last])
            names = [f"{parent}.{one}" if parent else one for one in merged]
        found = {name: self.weights.get(f"{name}.weight") for name in names}
        first, *others = found.values()
        if any(other != first for other in others):
            shown = ", ".join(f"{n}: {_shown(s)}" for n, s in found.items())
            raise ValueError(
                f"vLLM merges {prefix} from layers that differ ({shown}); quantize them alike"
            )
        if first is not None and not _is_served(first):
            raise ValueError(
                f"{names[0]}.weight is stored as a {first.kind.__name__}, which lowbit's plug-in of vLLM does not "
                "serve; accepted: weights of lowbit.quantize_ and lowbit.qat.convert_"
            )
        return first


def _check_head(name: str, stored: Stored, is_linear: bool) -> None:
    rows, _ = stored.spec.block_size((1, 1))
    if rows > 1 and not is_linear:
        raise ValueError(
            f"{name} has scales of blocks of {rows} outputs, and vLLM cuts and pads the output head by single outputs; "
            "leave the output head out when quantizing, or take PerRow() or PerGroup()"
        )


def _read(settings: dict[str, Any], name: str) -> Stored:
    """How the folder stores the weight `name`. Raises FormatError for a damaged description."""
    try:
        kind, meta, _, dtype = stored_as(settings, name)
    except (LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{name}: its description in config.json is damaged: {error}") from error
    return Stored(kind, meta, dtype)  # type: ignore[arg-type]


def _is_served(stored: Stored) -> bool:
    return issubclass(stored.kind, AffineTensor) and not issubclass(stored.kind, ConvTensor)


def _shown(stored: Stored | None) -> str:
    return "plain" if stored is None else f"{stored.kind.__name__} {dict(stored.meta)}"
