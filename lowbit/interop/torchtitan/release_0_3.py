"""The adapter for torchtitan 0.3, whose configurations are Python functions: `with_lowbit` changes one.

    from lowbit.torchtitan import Lowbit, with_lowbit
    from torchtitan.models.llama3.config_registry import llama3_8b

    def llama3_8b_int8():
        return with_lowbit(llama3_8b(), Lowbit(train="int8"), optimizer="AdamW8bit")

The model is a subclass that prepares its weights once it is built, on meta. The optimizers are a subclass of
torchtitan's container that also resolves names of lowbit, after torchtitan's own names.

The release needs a later torch than 2.13: docs/torchtitan.md says what was tried, and what was not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from lowbit import train
from lowbit.interop.torchtitan import optimizers, settings
from lowbit.interop.torchtitan.metrics import MeasuredSteps, shown
from lowbit.interop.torchtitan.settings import Lowbit

FUSED = "wqkv"
"""The fused projection of queries, keys and values stays as it is: torchtitan assembles its first values, and its
entries in checkpoints, from plain tensors."""


def with_lowbit(config: Any, lowbit: Lowbit | None = None, optimizer: str = "") -> Any:
    """Change `config`, a `Trainer.Config`, and return it.

    Args:
        config: of torchtitan.
        lowbit: how weights train, and which metrics are logged.
        optimizer: the line of an optimizer of lowbit, for all parameter groups of `config`, which keep their options.
            "" leaves the optimizers as they are.

    Raises ValueError for settings that contradict each other, and unknown names.
    """
    lowbit = Lowbit() if lowbit is None else lowbit
    if lowbit.metrics_freq and not config.training.disable_cuda_graphs:
        raise ValueError(
            f"lowbit.metrics_freq={lowbit.metrics_freq}: a step in a CUDA graph cannot be measured; set it to 0, or "
            "training.disable_cuda_graphs to True"
        )
    config.optimizer = _extended(config.optimizer, LowbitOptimizers.Config)
    if optimizer:
        optimizers.check_line(optimizer, ())
        for group in config.optimizer.param_groups:
            group.optimizer_name = optimizer
    of_0_2 = ("qat_", "compress", "save_in_int8")
    only_0_2 = [f.name for f in dataclasses.fields(Lowbit) if f.name.startswith(of_0_2)]
    if given := [n for n in only_0_2 if getattr(lowbit, n) != getattr(Lowbit, n)]:
        raise ValueError(
            f"{given[0]}={getattr(lowbit, given[0])!r} with torchtitan 0.3; leave it out, or use torchtitan 0.2.2, "
            "whose adapter has learned scales, schedules of QAT, compressed collectives and activations in int8"
        )
    if lowbit.train or lowbit.qat:
        converter = LowbitConverter.Config(lowbit=lowbit).build()
        config.model_spec.model = converter.convert(config.model_spec.model)
    every = lowbit.metrics_freq * config.metrics.log_freq
    config.metrics = _extended(config.metrics, LowbitMetrics.Config, lowbit_every=every)
    return config


def _extended(config: Any, kind: Any, **more: Any) -> Any:
    """A configuration of `kind`, a subclass of the class of `config`, with the same values and more."""
    return kind(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}, **more)


# ---- the model -------------------------------------------------------------------------------------------------


class LowbitConverter(ModelConfigConverter):
    """torchtitan's converter of model configurations, also for the list `converters` of a model's registry.

    Args:
        config: `LowbitConverter.Config`, which holds a `lowbit.torchtitan.Lowbit`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        lowbit: Lowbit = field(default_factory=Lowbit)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        made = _prepared_class(type(model_config)._owner)
        return _extended(model_config, made.Config, lowbit=self.config.lowbit)


def _prepared_class(parent: Any) -> Any:
    """A subclass of a model whose weights are prepared as its configuration says."""

    class Prepared(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(parent.Config):
            lowbit: Lowbit = field(default_factory=Lowbit)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            device = torch.device(device_type)
            scheme = settings.scheme_of(config.lowbit, device)
            if scheme is not None:
                left_out = [*config.lowbit.filter_fqns, FUSED]
                lowbit = dataclasses.replace(config.lowbit, filter_fqns=left_out)
                report = settings.prepare(self, scheme, lowbit)
                logger.info(f"lowbit: {settings.summary(report, scheme, device)}")

        def init_states(self, **kwargs: Any) -> None:
            train.locate_(self)  # before that, int8 weights do not take values
            super().init_states(**kwargs)

    Prepared.__name__, Prepared.__qualname__ = parent.__name__, parent.__qualname__
    return Prepared


# ---- optimizers ------------------------------------------------------------------------------------------------


class LowbitOptimizers(OptimizersContainer):
    """torchtitan's container, for the names of lowbit's optimizers too."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        if settings.has_bitnet(model_parts):
            self.register_step_post_hook(lambda *args: settings.precompute_scales(model_parts))

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        try:
            return OptimizersContainer._resolve_optimizer_factory(name)
        except NotImplementedError:
            return lambda groups: optimizers.made(name, groups, names_in(groups))


def names_in(groups: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Names of the parameters of torchtitan's groups, by id."""
    return {
        id(param): name
        for group in groups
        for param, name in zip(group["params"], group["param_names"], strict=True)
    }


# ---- metrics ---------------------------------------------------------------------------------------------------


class LowbitMetrics(MetricsProcessor):
    """torchtitan's metrics, and lowbit's at the steps that divide by `lowbit_every`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        lowbit_every: int = 0

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.measured = MeasuredSteps(config.lowbit_every)

    def should_log(self, step: int) -> bool:
        """torchtitan calls this method before each step."""
        self.measured.watch(self.model_parts, self.optimizers)
        self.measured.begin(step)
        return super().should_log(step)

    def log(self, step: int, *args: Any, extra_metrics: Any = None, **kwargs: Any) -> None:
        found = self.measured.end(step)
        super().log(step, *args, extra_metrics={**(extra_metrics or {}), **found}, **kwargs)
        if found:
            logger.info(f"lowbit: step {step}: {shown(found)}")
