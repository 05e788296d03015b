"""The quantizer that diffusers calls while it loads and saves a model.

A folder is that of `lowbit.export(…, format="lowbit")` with the names of the model's own state dict, as in
transformers. diffusers reads a file at a time, and a weight's parts may lie in two files: the parts wait until all of
them have been read. Plain weights become low-bit one after another.

Written against diffusers 0.42.
"""

from __future__ import annotations

import warnings
from typing import Any

from diffusers import ModelMixin
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from lowbit.convert import underflow, watch_joined
from lowbit.dequantize import dequantize_
from lowbit.formats.base import FormatError
from lowbit.formats.registry import by_name
from lowbit.inference import quantize_
from lowbit.interop.hf.config import METHOD, LowbitConfig
from lowbit.interop.hf.in_memory import InMemory, in_parts, models_in
from lowbit.interop.hf.plan import WeightChoice, plan
from lowbit.layers.frozen import show_frozen
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.frozen.affine_tensor import AffineTensor


class LowbitDiffusersQuantizer(DiffusersQuantizer):
    """`model.hf_quantizer` of a model of diffusers with low-bit weights.

    Args:
        quantization_config: the `lowbit.hf.LowbitConfig` that `from_pretrained` was given or read.
        kwargs: what diffusers gives its quantizers.
    """

    is_serializable = True
    is_trainable = True
    is_compileable = True
    supports_parallel_loading = False  # parts wait for those of other files
    use_keep_in_fp32_modules = True
    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._plan: WeightChoice | None = None
        self._found: dict[str, dict[str, str]] = {}
        """For each weight of the folder, the stored name of each part."""
        self._waiting: dict[str, Tensor] = {}
        """Parts of weights that are not complete, by their stored names."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a calibration, and for a device_map with "disk"."""
        if self.quantization_config.batches is not None:
            raise ValueError(
                "LowbitConfig(…, batches=…) calibrates models of transformers; load this model plain, and call "
                "lowbit.calibrate(model, scheme, batches)"
            )
        devices = kwargs.get("device_map")
        if isinstance(devices, dict) and "disk" in devices.values():
            raise ValueError(
                'device_map places modules on "disk", from where lowbit\'s weights are not read back; accepted: '
                'devices and "cpu"'
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        if not self.pre_quantized:
            self._plan = plan(model, config.patterns, config.experts)
        elif config.stored is None:
            raise FormatError(
                "config.json names schemes of lowbit and no weights that are stored in them; write the folder by "
                "save_pretrained"
            )

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        if not self.pre_quantized:
            return loaded_keys
        self._found = by_name(METHOD).find(loaded_keys, self.quantization_config.stored or {})
        parts = {name for stored in self._found.values() for name in stored.values()}
        return [name for name in loaded_keys if name not in parts] + [*self._found]

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a file, with the low-bit weights whose last part it holds."""
        own, stored = by_name(METHOD), self.quantization_config.stored or {}
        state = {**self._waiting, **state_dict}
        made = {}
        for weight, parts in self._found.items():
            if state.keys() >= set(parts.values()):
                read = {part: state.pop(name) for part, name in parts.items()}
                try:
                    made[weight] = own.read(read, stored, weight, None)
                except FormatError as error:
                    raise FormatError(f"{weight}: {error}") from error
        names = {name for parts in self._found.values() for name in parts.values()}
        self._waiting = {name: state.pop(name) for name in names & state.keys()}
        return state | made

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, state_dict: Any, **kwargs: Any
    ) -> bool:
        if self._plan is not None:
            return param_name in self._plan.schemes and param_name not in _later(self._plan)
        return isinstance(param_value, LowbitTensor)

    def create_quantized_param(
        self,
        model: Any,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        value = param_value.to(target_device)
        if self._plan is not None:
            check_weight(value, param_name)
            scheme = self._plan.schemes[param_name]
            plain = value
            value = AffineTensor.quantized(plain, scheme, self.quantization_config.scales)
            if lost := underflow(plain, value):
                warnings.warn(f"{param_name}: {lost}", stacklevel=2)
        layer, _, attribute = param_name.rpartition(".")
        frozen = nn.Parameter(value, requires_grad=False)
        model.get_submodule(layer).register_parameter(attribute, frozen)

    def check_quantized_param_shape(self, name: str, held: Tensor, value: Tensor) -> None:
        """Raise FormatError: the shapes differ."""
        raise FormatError(
            f"{name} has the shape {tuple(value.shape)} in the folder, and the model takes {tuple(held.shape)}"
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        chosen, self._plan, self._found = self._plan, None, {}
        if self._waiting:
            raise FormatError(
                f"the folder lacks parts of the weights of {', '.join([*self._waiting][:3])}"
            )
        if chosen is not None and (later := _later(chosen)):
            schemes: Any = {name: chosen.schemes[name] for name in later}
            quantize_(model, schemes, scales=self.quantization_config.scales)
        show_frozen(model.modules())
        watch_joined(model)
        _describe(model, self)
        return model

    def _dequantize(self, model: Any) -> Any:
        dequantize_(model)  # which `describe` follows
        model.hf_quantizer = self  # diffusers removes it
        return model


def _later(chosen: WeightChoice) -> set[str]:
    """Weights that become low-bit once all are read: they share scales, or are stored turned."""
    return {*chosen.siblings, *chosen.transposed}


def describe(model: nn.Module) -> None:
    """Let the models of diffusers in `model` write and describe their low-bit weights. If a model has none, remove the
    description."""
    for top in models_in(model, ModelMixin):
        held = getattr(top, "hf_quantizer", None)
        own = held if isinstance(held, LowbitDiffusersQuantizer) else None
        if any(in_parts(top, False)):
            if held is None or (own is not None and own.quantization_config.model is not top):
                top.hf_quantizer = LowbitDiffusersQuantizer(InMemory(top))
                _describe(top, top.hf_quantizer)
        elif own is not None:
            del top.hf_quantizer
            plain = {k: v for k, v in top.config.items() if k != "quantization_config"}
            top._internal_dict = FrozenDict(plain)


def _describe(model: Any, quantizer: LowbitDiffusersQuantizer) -> None:
    """Let the config of `model` describe the weights that it has when it is saved."""
    quantizer.quantization_config = InMemory(model)
    model.is_quantized = False  # else diffusers refuses `.to(dtype)`, also where it saves adapters
    model.register_to_config(quantization_config=quantizer.quantization_config)
