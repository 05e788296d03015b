"""The quantizer that transformers calls while it loads and saves a model.

Loading plain weights: transformers builds the model on meta and reads one weight after another. Each weight that
`lowbit.interop.hf.plan` chose becomes low-bit as soon as it is read, so that high precision takes the memory of one
weight. transformers itself first stacks the matrices of experts.

Loading a folder in lowbit's format, and saving: `lowbit.formats.own` decodes and encodes the parts, so the folder is
that of `lowbit.export(…, format="lowbit")`, with the names of the model's own state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from lowbit.convert import Entry, Report, has_static, underflow, watch_joined
from lowbit.convert.side_by_side import lay_side_by_side
from lowbit.dequantize import dequantize_
from lowbit.formats.base import Format, FormatError
from lowbit.formats.folder import open_shard
from lowbit.formats.folder_choice import FolderChoice
from lowbit.formats.module import ModelSource
from lowbit.formats.reading import renamed_by
from lowbit.formats.registry import by_name
from lowbit.inference import calibrate
from lowbit.interop.hf import experts as experts  # registers what stock experts need
from lowbit.interop.hf.config import METHOD, LowbitConfig
from lowbit.interop.hf.plan import WeightChoice, plan
from lowbit.layers.cache_scales import (
    KEY,
    VALUE,
    describes,
    held_in,
    is_named_so,
    make_room,
    settings_for,
)
from lowbit.layers.frozen import show_frozen
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.siblings import quantized_together

logger = logging.get_logger("transformers.lowbit")


@register_quantizer(METHOD)
class LowbitQuantizer(HfQuantizer):
    """`model.hf_quantizer` of a model that was loaded with lowbit.

    Args:
        quantization_config: the `lowbit.hf.LowbitConfig` that `from_pretrained` was given or read.
        kwargs: what transformers gives its quantizers.

    Attributes:
        report: what is in low bits and what is not, with the share of the model's bytes; `print(report)`. The report is
            complete once the model is loaded.
    """

    requires_calibration = False
    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report = Report()
        self.errors: dict[str, Exception] = {}
        """The error of the first weight that cannot be converted, by the name of the weight."""
        self._lost: dict[str, str] = {}
        """What the report says of groups that became 0, by the name of the weight."""
        self._plan: WeightChoice | None = None
        self._sizes: dict[str, int] = {}
        """Bytes of each low-bit weight, by its name."""
        self._conversions: Any = None
        """The conversions that gave the weights the names of the model. A plain model reverts them when it is saved."""
        self._waiting: dict[tuple[str, ...], _LoadedSiblings] = {}
        """Weights that wait for their siblings, by the names of all of them."""
        self._published: dict[str, str] | None = None
        """The name in the folder of each weight that has another one in the model; None until one is asked for."""
        self._whole: Any = None
        """The handle of the hook `_whole`, until the weights are on their devices."""

    @property
    def own_format(self) -> Format:
        return by_name(METHOD)

    # ---- what transformers may do ----------------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters beside the weights train, since gradients reach the inputs."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a device_map with "disk", and one with several devices for a calibration."""
        devices = kwargs.get("device_map")
        is_spread = isinstance(devices, dict) and len(set(devices.values())) > 1
        if is_spread and self.quantization_config.calibrates:
            raise ValueError(
                "device_map spreads the model, and LowbitConfig with batches or steps calibrates it on one device; "
                "accepted: one device, or lowbit.calibrate(folder, …, out=…), which holds one block in memory"
            )
        if isinstance(devices, dict) and "disk" in devices.values():
            raise ValueError(
                'device_map places modules on "disk", from where lowbit\'s weights are not read back; accepted: '
                'devices and "cpu", or load the model with device_map="cpu" and call '
                "lowbit.accelerate.disk_offload(model, folder, device)"
            )

    # ---- loading ---------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: list[str] | None = None,
        device_map: Any = None,
        **kwargs: Any,
    ) -> None:
        config = self.quantization_config
        if isinstance(device_map, dict) and len(set(device_map.values())) > 1:
            self._whole = model.register_state_dict_post_hook(_whole)
        if self.pre_quantized:
            if config.stored is None:
                raise FormatError(
                    "config.json names schemes of lowbit and no weights that are stored in them; write the folder by "
                    "save_pretrained or lowbit.export(…, format='lowbit')"
                )
            self._sizes = self._stored_sizes(checkpoint_files or [])
            self._make_room(model, checkpoint_files or [])
            return
        if config.calibrates:
            return
        self._plan = plan(model, config.patterns, config.experts)
        for name in self._plan.schemes:
            like = model.get_parameter(name).detach().to("meta")
            self._sizes[name] = self.quantized(name, like, "minmax").nbytes_stored()

    def _stored_sizes(self, files: list[str]) -> dict[str, int]:
        """Bytes of each weight in `files`. Raises FormatError for a damaged file, and for missing parts."""
        sizes: dict[str, int] = {}
        for file in files:
            sizes |= {name: stored.nbytes for name, stored in open_shard(file).entries.items()}
        if not files:
            return {}
        found = self.own_format.find(sizes.keys(), self._stored)
        return {weight: sum(sizes[n] for n in parts.values()) for weight, parts in found.items()}

    def _make_room(self, model: Any, files: list[str]) -> None:
        """Give the attention layers of the model buffers for the scales of keys and values in `files`."""
        if describes(self._stored):
            renamed = renamed_by(model)
            model._keep_in_fp32_modules_strict |= {KEY, VALUE}
            for name in {n for file in files for n in open_shard(file).entries}:
                if is_named_so(name):
                    make_room(model, [name, *renamed(name)])

    @property
    def _stored(self) -> dict[str, Any]:
        return self.quantization_config.stored or {}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._plan is not None and param_name in self._plan.schemes

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of an element, by which transformers distributes a model over devices and reserves memory."""
        name = self.stored_name(model, param_name) if self.pre_quantized else param_name
        size = self._sizes.get(name or "")
        return param.element_size() if size is None else size / max(1, param.numel())

    def stored_name(self, model: Any, name: str) -> str | None:
        """The name in the folder of a weight of `model`, which may be the base model of the saved one.

        A folder that was made of a published one has its names. transformers renames some of them while it reads.
        """
        base = f"{model.base_model_prefix}."
        known = self._stored.get("tensors", {})
        for own in (name, base + name, name.removeprefix(base)):
            if own in known:
                return own
        if self._published is None:
            others = renamed_by(model)
            self._published = {other: stored for stored in known for other in others(stored)}
        return self._published.get(name)

    def quantized(
        self,
        name: str,
        value: Tensor,
        scales: str | None = None,
        made: AffineTensor | None = None,
    ) -> LowbitTensor:
        """`value` in the scheme that was chosen for the weight `name`. `scales`: None takes those of the config.
        `made`: what `together` gave for it."""
        assert self._plan is not None
        scheme, scales = self._plan.schemes[name], scales or self.quantization_config.scales
        value = self._rows(name, value)
        if made is None:
            made = AffineTensor.quantized(value, scheme, scales)
        if lost := underflow(value, made):
            logger.warning("%s: %s", name, lost)
            self._lost[name] = f"; {lost}"
        return made._transposed() if name in self._plan.transposed else made

    def together(self, values: Mapping[str, Tensor]) -> dict[str, AffineTensor]:
        """The weights of siblings by their names, as rows. Raises ValueError for what cannot be quantized."""
        assert self._plan is not None
        rows = {name: self._rows(name, value) for name, value in values.items()}
        schemes = [self._plan.schemes[name] for name in values]
        return quantized_together(rows, schemes, self.quantization_config.scales)

    def _rows(self, name: str, value: Tensor) -> Tensor:
        """The weight `name` as [..., N, K]."""
        assert self._plan is not None
        return value.mT.contiguous() if name in self._plan.transposed else value

    def waiting_with(self, name: str) -> _LoadedSiblings | None:
        """The siblings for which the weight of this name waits; None if it shares nothing with others."""
        assert self._plan is not None
        names = self._plan.siblings.get(name)
        return None if names is None else self._waiting.setdefault(names, _LoadedSiblings(names))

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """A folder of lowbit has the names and tensors of the model as they are, so no conversion is left.

        `model`: releases of transformers before 5.21 do not pass it.
        """
        if not self.pre_quantized:
            return weight_conversions
        renamings = [one for one in weight_conversions if isinstance(one, WeightRenaming)]
        return [*renamings, *self.get_weight_conversions()]

    def get_weight_conversions(self) -> list[Any]:
        """For each last name of a weight ("weight", "gate_up_proj"), the operation that joins its parts."""
        if not self.pre_quantized:
            return []
        parts = self.own_format.suffixes(self._stored)
        attributes = sorted({n.rpartition(".")[2] for n in self._stored.get("tensors", {})})
        return [
            # By keyword: releases of transformers order these arguments in several ways.
            WeightConverter(
                source_patterns=[_pattern(attribute, part) for part in parts],
                target_patterns=f".{attribute}",
                operations=[_Decode(self)],
            )
            for attribute in attributes
        ]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self._whole is not None:
            self._whole.remove()
            self._whole = None
        for waiting in self._waiting.values():  # for siblings that the checkpoint lacks
            for name, weight in _Quantize(self).together(model, waiting).items():
                layer, _, attribute = name.rpartition(".")
                model.get_submodule(layer).register_parameter(attribute, weight)
        for name, error in self.errors.items():
            raise FormatError(f"{name}: {error}") from error
        show_frozen(model.modules())
        lay_side_by_side(model)
        watch_joined(model)
        self._conversions = None if self.pre_quantized else model._weight_conversions
        model._weight_conversions = []
        calibrates = self.quantization_config.calibrates and not self.pre_quantized
        if self._plan is not None or calibrates:
            self.report = self._calibrated(model) if calibrates else self._quantized(model)
            weights = {n: p for n, p in model.named_parameters() if isinstance(p, LowbitTensor)}
            stored = self.own_format.config(weights, ())
            self._describe(model, stored | settings_for(held_in(model)))
        else:
            self.report.entries = list(_entries(model))
        logger.info("%s", self.report.count(model))

    def _calibrated(self, model: Any) -> Report:
        """Calibrate the model, whose weights were read plain."""
        config = self.quantization_config
        choice = FolderChoice(model, config.experts and not has_static(config.scheme))
        chosen: Any = choice  # which `find_targets` takes for a filter
        given: Any = {"steps": config.steps, "kv_cache": config.kv_cache}
        given["format"] = METHOD  # which save_pretrained writes
        return calibrate(model, config.patterns, config.batches, chosen, **given)

    def _quantized(self, model: Any) -> Report:
        assert self._plan is not None
        self._plan.report.entries += list(self._converted(model, self._plan))
        return self._plan.report

    def _converted(self, model: Any, plan: WeightChoice) -> Iterator[Entry]:
        seen: dict[int, str] = {}
        for name, scheme in plan.schemes.items():
            weight = model.get_parameter(name)
            first = seen.setdefault(id(weight), name)
            is_low = isinstance(weight, LowbitTensor)
            shape = weight.mT.shape if name in plan.transposed else weight.shape
            note = "not in the checkpoint, so plain"
            if is_low:
                note = scheme.describe(shape) + self._lost.get(name, "")
            note = note if first == name else f"tied to {first}"
            yield Entry(name, tuple(weight.shape), is_low, note)

    def _describe(self, model: Any, stored: dict[str, Any]) -> None:
        """Let a config of this model describe its weights. The config that the user gave stays as it is."""
        self.quantization_config = self.quantization_config.with_stored(stored)
        model.config.quantization_config = self.quantization_config

    # ---- saving, and the way back ----------------------------------------------------------------------------------

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        """The tensors of the folder. Raises FormatError for weights that are still trained or sharded."""
        if getattr(model, "_hf_peft_config_loaded", False):  # only adapters are saved
            return None, {}
        own = map(held_locally, model.parameters())
        if not any(isinstance(w, LowbitTensor) and not w.is_stored_plain for w in own):
            self.remove_quantization_config(model)  # a flow got the part of the model that had them
            return None, {}
        state, stored = _state(model, self.own_format)
        self._describe(model, stored)
        return state, {}

    def remove_quantization_config(self, model: Any) -> None:
        """Let `model`, whose weights are plain now, be a model that was never in low bits."""
        super().remove_quantization_config(model)
        model._weight_conversions = self._conversions

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """See `lowbit.dequantize_`. The weights that were in low bits get `dtype`."""
        report = dequantize_(model)
        names = set(report.converted)
        if isinstance(dtype, torch.dtype):
            for name, param in model.named_parameters():
                if name in names:
                    param.data = param.data.to(dtype)
        return model


def _pattern(attribute: str, part: str) -> str:
    return rf"\.{attribute}\.{part}$"


def check_saved_name(name: str) -> None:
    """Raise FormatError for a weight in a layer of PEFT, in a base model that is being saved."""
    if ".base_layer." in f".{name}":
        raise FormatError(
            f"{name} lies in a layer of PEFT, and save_pretrained of the base model would write it under a name that "
            "no model has: save the PeftModel for the adapters, and merge_and_unload() or unload() gives a model to "
            "save; in diffusers save_lora_adapter() writes them, and unload_lora() gives a model to save"
        )


def _state(model: Any, own: Format) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, and the "quantization_config", of a folder in lowbit's format."""
    state: dict[str, Tensor] = {}
    weights: dict[str, LowbitTensor] = {}
    for item in ModelSource(model).items():
        if isinstance(item.value, LowbitTensor):
            check_saved_name(item.name)
            weights[item.name] = item.value
            parts = own.encode(item.value)
            state |= {own.stored_name(item.name, part): t for part, t in parts.items()}
        else:
            state[item.name] = item.value
    return state, own.config(weights, ()) | settings_for(held_in(model))


def _whole(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook that puts low-bit weights into the state dict whole: accelerate takes weights that wait on the CPU from
    there, by the names of parameters."""
    for name, param in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if isinstance(param, LowbitTensor):
            for part in param.tensor_attrs:
                state.pop(f"{name}.{part}", None)
            state[name] = param  # a parameter, by whose address accelerate knows tied weights


def _entries(model: nn.Module) -> Iterator[Entry]:
    """The weights of a model that was read in low bits."""
    for name, param in model.named_parameters():
        if param.ndim >= 2:
            weight: Tensor = param
            is_low = isinstance(weight, LowbitTensor)
            note = (
                weight.stored_format()
                if isinstance(weight, LowbitTensor)
                else "plain in the folder"
            )
            yield Entry(name, tuple(param.shape), is_low, note)


# ---- operations of the loader --------------------------------------------------------------------------------------


class _Operation(ConversionOps):
    """Converts weights and keeps their errors: transformers would print stack traces, and raise a general error."""

    def __init__(self, hf_quantizer: LowbitQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """transformers copies an operation for each weight. A copy of the quantizer would keep its own errors, and copy
        the description of all weights."""
        return self

    def _made(self, model: Any, name: str, make: Callable[[Tensor], LowbitTensor]) -> Any:
        """The low-bit parameter that `make` gives for the parameter of the skeleton. After an error, which ends the
        load, a placeholder that takes no memory."""
        held, errors = model.get_parameter(name), self.hf_quantizer.errors
        if not errors:
            try:
                if is_dtensor(held):
                    raise ValueError(
                        "it is sharded while it loads, and lowbit quantizes whole weights: load the model without "
                        "tp_plan, and shard it afterwards"
                    )
                return nn.Parameter(make(held), requires_grad=False)
            except (ValueError, TypeError, NotImplementedError) as error:
                errors[name] = error
        return _placeholder(model, name)


def _placeholder(model: Any, name: str) -> Tensor:
    """A tensor for the parameter `name` that takes no memory."""
    held = model.get_parameter(name)
    return torch.zeros((), dtype=held.dtype).expand(held.shape)


@dataclass
class _LoadedSiblings:
    """Plain weights that wait for their siblings, with which they share a part of their scales.

    Attributes:
        names: of all siblings.
        values: the weights that have been read, by name.
    """

    names: tuple[str, ...]
    values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.values) == len(self.names)


class _Quantize(_Operation):
    """Converts plain weights, as they are read, to low-bit weights."""

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            if not self.hf_quantizer.param_needs_quantization(model, name):
                made[name] = value
            elif (waiting := self.hf_quantizer.waiting_with(name)) is None:
                made[name] = self._made(model, name, partial(self._quantized, name, value))
            else:
                waiting.values[name] = value
                made |= (
                    self.together(model, waiting)
                    if waiting.is_complete
                    else {name: _placeholder(model, name)}
                )
        return made

    def together(self, model: Any, waiting: _LoadedSiblings) -> dict[str, Any]:
        """The low-bit weights of siblings, once all have been read."""
        values = {n: waiting.values[n] for n in waiting.names if n in waiting.values}
        waiting.values = {}
        if not values:
            return {}
        made: dict[str, AffineTensor] = {}
        try:
            made = self.hf_quantizer.together(values)
        except (ValueError, RuntimeError) as error:
            self.hf_quantizer.errors.setdefault(", ".join(values), error)
        return {
            name: self._made(
                model, name, partial(self._quantized, name, value, made=made.get(name))
            )
            for name, value in values.items()
        }

    def _quantized(
        self, name: str, value: Tensor, held: Tensor, made: AffineTensor | None = None
    ) -> LowbitTensor:
        """Raises ValueError for values that cannot be quantized, and for a shape that differs from the model's."""
        if held.shape != value.shape:
            raise ValueError(
                f"it has the shape {tuple(value.shape)} in the checkpoint, and the model takes {tuple(held.shape)}"
            )
        check_weight(value, "it")
        return self.hf_quantizer.quantized(name, value, made=made)


class _Decode(_Operation):
    """Joins the parts of a weight in lowbit's format to the weight."""

    def convert(
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        parts = {
            pattern.split(r"\.")[-1].removesuffix("$"): t[0] if isinstance(t, list) else t
            for pattern, t in input_dict.items()
        }
        make = partial(self._decoded, model, full_layer_name, parts)
        return {full_layer_name: self._made(model, full_layer_name, make)}

    def _decoded(
        self, model: Any, name: str, parts: dict[str, Tensor], held: Tensor
    ) -> LowbitTensor:
        """Raises FormatError for parts that do not fit their description, or have no description."""
        stored = self.hf_quantizer.stored_name(model, name)
        if stored is None:
            raise FormatError("config.json does not describe it")
        settings = self.hf_quantizer.quantization_config.stored or {}
        weight = self.hf_quantizer.own_format.read(parts, settings, stored, None)
        if weight.shape != held.shape:
            raise FormatError(
                f"it has the shape {tuple(weight.shape)} in the folder, and the model takes {tuple(held.shape)}"
            )
        return weight if weight.dtype == held.dtype else weight.to(held.dtype)  # type: ignore[return-value]
