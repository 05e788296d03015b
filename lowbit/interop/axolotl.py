"""A plug-in for Axolotl: lowbit's optimizers, training in low bits and QAT as settings of a training.

    plugins:
      - lowbit.axolotl.LowbitPlugin
    lowbit:
      optimizer: AdamW4bit(bf16_stochastic_round=True)
      qat: int4(group_size=32)

Written against Axolotl 0.19.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from torch import nn
from transformers import AutoTokenizer

from lowbit import train
from lowbit.formats.registry import by_name
from lowbit.formats.scheme_grid import grid
from lowbit.formats.writing import export
from lowbit.interop import config_lines
from lowbit.interop.hf.training import QATCallback, optimizer
from lowbit.schemes import lines

OTHERS = ("qat", "quantization", "relora")
"""Settings of Axolotl's that change weights in training, which lowbit's `train` and `qat` cannot share."""
SHARDED = ("fsdp", "fsdp_config", "deepspeed")


def _read_optimizer(line: str) -> None:
    kind, options = config_lines.optimizer(line)
    config_lines.check_options(line, kind, {"lr": 1e-3, **options})


_READERS: dict[Any, Callable[[str], Any]] = {
    "optimizer": _read_optimizer,
    "train": config_lines.training_scheme,
    "qat": lines.scheme,
    "format": by_name,
}
"""What reads each line, and raises ValueError for one that names nothing."""


class LowbitSettings(BaseModel):
    """The section `lowbit`. pydantic raises ValidationError for an unknown key and for a line that names nothing.

    Args:
        optimizer: a class of `lowbit.optim`, also with options: "AdamW8bit(bf16_stochastic_round=True)". It takes the
            place of Axolotl's `optimizer`, with its learning rate, betas, epsilon and groups of weight decay.
        train: a training scheme: "int8", "float8(backward='e5m2')", "int8_weights".
        qat: a scheme of inference, to which products round in training: "int4(group_size=32)". Axolotl saves the
            weights or adapters that trained. The plug-in also writes the model in low bits, with adapters merged, to
            `output_dir`/`format`, or to model.gguf there.
        qat_scales: "present", or "learned" ones, which train too.
        format: of the model in low bits; a name of `lowbit.formats.names()` that is not of programs.
        targets: patterns of names of weights that `train` or `qat` takes; without it all linear layers but the head.
    """

    model_config = ConfigDict(extra="forbid")

    optimizer: str | None = None
    train: str | None = None
    qat: str | None = None
    qat_scales: Literal["present", "learned"] = "present"
    format: str = "compressed-tensors"
    targets: list[str] | None = None

    @field_validator("optimizer", "train", "qat", "format")
    @classmethod
    def _known(cls, line: str | None, info: ValidationInfo) -> str | None:
        if line is not None:
            _READERS[info.field_name](line)
        return line

    @model_validator(mode="after")
    def _one_scheme(self) -> LowbitSettings:
        if self.train is not None and self.qat is not None:
            raise ValueError(
                f"train={self.train!r} beside qat={self.qat!r}: a weight trains by one scheme; leave one of them out"
            )
        if self.targets is not None and self.train is None and self.qat is None:
            raise ValueError("targets name weights for `train` or `qat`, and neither is given")
        if self.targets == []:
            raise ValueError(
                "targets is empty; name weights, or leave it out for all linear layers"
            )
        if self.qat is None:
            for name in ("qat_scales", "format"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is of the model that `qat` writes; give `qat`, or leave "
                        f"{name!r} out"
                    )
        else:
            self.qat_scheme()
        return self

    def qat_scheme(self) -> Any:
        """The scheme of `qat`, with the scales that `format` stores. FormatError if that holds no such weights."""
        assert self.qat is not None
        return grid(self.format, lines.scheme(self.qat))

    def filter(self) -> Any:
        """`filter_fn` of `prepare_`."""
        return _is_inner_linear if self.targets is None else None

    def chosen(self, scheme: Any) -> Any:
        """`scheme` for the targets, as `prepare_` takes it."""
        return scheme if self.targets is None else dict.fromkeys(self.targets, scheme)


class LowbitArgs(BaseModel):
    """What Axolotl adds to the settings that it accepts."""

    lowbit: LowbitSettings | None = None


def _is_inner_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


class _ConvertsLater(QATCallback):
    """Axolotl saves what trained after the end of the training, so the model is converted after that."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


class LowbitPlugin(BasePlugin):
    """Axolotl's plug-in; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._qat: _ConvertsLater | None = None
        self._model: Any = None

    def get_input_args(self) -> str:
        return "lowbit.axolotl.LowbitArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Raise ValueError for settings that exclude each other, before a model is loaded."""
        settings = _settings(cfg)
        line = settings.train or settings.qat
        for name in (*OTHERS, *(SHARDED if settings.qat else ())):
            if line is not None and cfg.get(name):
                raise ValueError(
                    f"lowbit: {line!r} does not go with Axolotl's setting {name!r}; leave one of the two out"
                )

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Prepare the weights that `train` takes."""
        settings = _settings(cfg)
        if settings.train is not None:
            scheme = config_lines.training_scheme(settings.train)
            print(train.prepare_(model, settings.chosen(scheme), settings.filter()))

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[Any]:
        """The callback that prepares the weights that `qat` takes."""
        settings = _settings(cfg)
        if settings.qat is None:
            return []
        scheme = settings.chosen(settings.qat_scheme())
        self._qat = _ConvertsLater(scheme, settings.filter(), scales=settings.qat_scales)
        return [self._qat]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the Trainer lowbit's optimizer. Axolotl never calls the hook `create_optimizer` of plug-ins."""
        settings = _settings(cfg)
        if settings.optimizer is not None:
            trainer.optimizer_cls_and_kwargs = optimizer(settings.optimizer, trainer.args)

    def post_train(self, cfg: Any, model: Any) -> None:
        """Keep the model. Axolotl 0.19 calls this twice, the first time before it saves what trained."""
        self._model = model

    def post_train_unload(self, cfg: Any) -> None:
        """Convert the model and write it in low bits, by the first process."""
        model, qat = self._model, self._qat
        self._model = self._qat = None
        if qat is None or model is None or int(os.environ.get("RANK", 0)) > 0:
            return
        settings, folder = _settings(cfg), Path(cfg.output_dir)
        qat.finish(model)
        merged = model.merge_and_unload() if hasattr(model, "peft_config") else model
        tokenizer = AutoTokenizer.from_pretrained(folder)
        out = folder / ("model.gguf" if settings.format == "gguf" else settings.format)
        print(export(merged, out, settings.format, overwrite=True, tokenizer=tokenizer))


def _settings(cfg: Any) -> LowbitSettings:
    return LowbitSettings(**(cfg.get("lowbit") or {}))
