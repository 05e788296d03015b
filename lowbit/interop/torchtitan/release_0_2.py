"""The adapter for torchtitan 0.2: a section of its configuration, a model converter, optimizers and metrics.

`--job.custom_config_module lowbit.torchtitan` imports this module, which

- adds the section `lowbit` (`settings.Lowbit`), and puts the converter "lowbit" into `model.converters`;
- registers the language models of torchtitan again under their own names, with `with_lowbit`. torchtitan looks up
  registered models before its own ones.

torchtitan first builds its own optimizers, with the hooks and checks that a model adds. lowbit's then replace them.
"""

# torchtitan reads the types of JobConfig's fields, so annotations must not become strings here.
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig as TitanConfig
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from lowbit import qat, train
from lowbit.interop.torchtitan import optimizers, settings
from lowbit.interop.torchtitan.metrics import MeasuredSteps, shown
from lowbit.interop.torchtitan.settings import Lowbit
from lowbit.layers.prepared import forget_inputs
from lowbit.layers.static_input import SCALE as INPUT_SCALE
from lowbit.layers.static_input import ZERO as INPUT_ZERO
from lowbit.numerics.sharded import held_locally
from lowbit.optim import LowbitOptimizer, step_in_backward
from lowbit.qat.scales import learned_parameters, start_scales_
from lowbit.schemes.low_bit_weights import BitNet, Int4Weight, Int8Weight
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import SCALE, ZERO, named_scales

CONVERTER = "lowbit"
MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")
OWN_OPTIMIZERS = ("Adam", "AdamW")
"""The names that keep torchtitan's meaning; "lowbit.AdamW" is lowbit's."""
BUILT_BY_TITAN = "AdamW"


# ---- configuration ---------------------------------------------------------------------------------------------


@dataclass
class ModelSection:
    """The section `model`, with lowbit's converter on."""

    converters: list[str] = field(default_factory=lambda: [CONVERTER])


@dataclass
class JobConfig:
    """The part that torchtitan merges into its own configuration.

    Args:
        model: the section `model`, with lowbit's converter on.
        lowbit: `lowbit.torchtitan.Lowbit`.
    """

    model: ModelSection = field(default_factory=ModelSection)
    lowbit: Lowbit = field(default_factory=Lowbit)


def check(config: TitanConfig, parallel_dims: Any) -> None:
    """Raise ValueError for settings of lowbit that this run cannot have. `parallel_dims`: None outside of a run."""
    if config.optimizer.name not in OWN_OPTIMIZERS:
        optimizers.check_line(config.optimizer.name, _given(config.optimizer))
        if config.optimizer.early_step_in_backward and parallel_dims is not None:
            _check_one_backward(config.training, parallel_dims)
    built = get_train_spec(config.model.name).build_metrics_processor_fn
    if config.lowbit.metrics_freq and built is not build_metrics_processor:
        raise ValueError(
            f"lowbit.metrics_freq={config.lowbit.metrics_freq}: the model {config.model.name} is not registered with "
            "lowbit.torchtitan.with_lowbit, or brings metrics of its own; set it to 0"
        )
    if config.lowbit.compress and parallel_dims is not None and not parallel_dims.fsdp_enabled:
        raise ValueError(
            "lowbit.compress without FSDP2: set parallelism.data_parallel_shard_degree above 1, or leave compress out"
        )
    if (
        config.lowbit.save_in_int8
        and config.compile.enable
        and config.activation_checkpoint.mode != "none"
    ):
        raise ValueError(
            "lowbit.save_in_int8 with compile.enable and activation_checkpoint.mode="
            f"{config.activation_checkpoint.mode!r}: torch.compile fails on a checkpoint whose tensors are saved by "
            "hooks; leave one of the three out"
        )
    scheme = settings.scheme_of(config.lowbit, torch.device(device_type))
    hf = [n for n in ("initial_load_in_hf", "last_save_in_hf") if getattr(config.checkpoint, n)]
    if config.checkpoint.last_save_in_hf and config.lowbit.qat_scales == "learned":
        raise ValueError(
            "checkpoint.last_save_in_hf: learned scales have no form in Hugging Face's checkpoints; save DCP "
            "checkpoints, and convert one afterwards by lowbit.qat.convert_, as recipes.torchtitan.export does"
        )
    if hf and isinstance(scheme, (Int4Weight, Int8Weight)):
        raise ValueError(
            f"checkpoint.{hf[0]}: weights of {type(scheme).__name__} have no form in Hugging Face's checkpoints; "
            "load and save DCP checkpoints, and convert one afterwards by lowbit.train.restore_"
        )


def _check_one_backward(training: Any, parallel_dims: Any) -> None:
    """Raise ValueError if gradients are accumulated over several backwards."""
    at_once = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    if training.global_batch_size > at_once:
        raise ValueError(
            f"optimizer.early_step_in_backward makes each backward a step, and training.global_batch_size="
            f"{training.global_batch_size} takes several of {at_once} sequences; set it to {at_once}, or step after "
            "backward"
        )


# ---- the model -------------------------------------------------------------------------------------------------

_SETTINGS = "lowbit_settings"
"""The attribute of a model with the section `lowbit`, from the converter."""


class LowbitConverter:
    """torchtitan's model converter "lowbit": prepares the model on meta, before it is sharded.

    Args:
        job_config: torchtitan's configuration, with the section `lowbit`.
        parallel_dims: torchtitan's.
    """

    def __init__(self, job_config: TitanConfig, parallel_dims: Any) -> None:
        check(job_config, parallel_dims)
        self.settings = job_config.lowbit
        self.device = torch.device(device_type)
        self.scheme = settings.scheme_of(self.settings, self.device)

    def convert(self, model: nn.Module) -> None:
        if self.scheme is not None:
            report = settings.prepare(model, self.scheme, self.settings)
            logger.info(f"lowbit: {settings.summary(report, self.scheme, self.device)}")
        setattr(model, _SETTINGS, self.settings)
        if isinstance(self.scheme, Scheme):
            setattr(model, _SCHEDULE, settings.schedule_of(self.settings))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        models = [model] if isinstance(model, nn.Module) else model
        for follow in (getattr(model, _SCHEDULE, None) for model in models):
            if isinstance(follow, _Following):
                follow.stepped()
        if isinstance(self.scheme, BitNet):
            settings.precompute_scales(models)


def with_lowbit(spec: TrainSpec) -> TrainSpec:
    """The model of `spec` with lowbit's optimizers, weights and metrics; register it by `register_train_spec`."""

    class Located(spec.model_cls):
        def init_weights(self, *args: Any, **kwargs: Any) -> None:
            """int8 weights take values only once they know where their parts lie. Learned scales follow from the
            weights. The memory of static scales, which has no values, becomes NaN. By then the model is sharded."""
            train.locate_(self)
            super().init_weights(*args, **kwargs)
            if named_scales(self):
                start_scales_(self)
            forget_inputs(self)
            if getattr(self, _SETTINGS, Lowbit()).compress:
                train.compress_collectives_(self)
                logger.info("lowbit: gradients are reduced in 8 bits")

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self, _SETTINGS, Lowbit()).save_in_int8:
                return super().forward(*args, **kwargs)
            with train.save_in_int8(self):
                return super().forward(*args, **kwargs)

    Located.__name__, Located.__qualname__ = spec.model_cls.__name__, spec.model_cls.__qualname__
    return dataclasses.replace(
        spec,
        model_cls=Located,
        build_optimizers_fn=optimizers_builder(spec.build_optimizers_fn),
        build_lr_schedulers_fn=lr_schedulers_builder(spec.build_lr_schedulers_fn),
        state_dict_adapter=without_scales(spec.state_dict_adapter),
        build_metrics_processor_fn=spec.build_metrics_processor_fn or build_metrics_processor,
    )


# ---- optimizers ------------------------------------------------------------------------------------------------


def _given(config: Any) -> dict[str, Any]:
    """torchtitan's options of optimizers, by the names in torch."""
    return {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
    }


def _optimizer(model: nn.Module, config: Any) -> LowbitOptimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    name_of = {id(p): name for name, p in model.named_parameters()}
    return optimizers.made(config.name, [{"params": params, **_given(config)}], name_of)


def optimizers_builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """torchtitan's `build_optimizers_fn` of a model, for the names of lowbit's optimizers too."""

    def build(
        model_parts: list[nn.Module], config: Any, parallel_dims: Any, ft_manager: Any = None
    ) -> OptimizersContainer:
        if config.name in OWN_OPTIMIZERS:
            return original(model_parts, config, parallel_dims, ft_manager)
        if ft_manager is not None and ft_manager.enabled:
            raise NotImplementedError(
                f"optimizer.name={config.name!r} with TorchFT; accepted with it: {', '.join(OWN_OPTIMIZERS)}"
            )
        in_backward = config.early_step_in_backward
        if in_backward and (parallel_dims.pp_enabled or parallel_dims.ep_enabled):
            raise NotImplementedError(
                "optimizer.early_step_in_backward with pipeline or expert parallelism, where a step has several "
                "backwards, or gradients that are reduced later"
            )
        plain = dataclasses.replace(config, name=BUILT_BY_TITAN, early_step_in_backward=False)
        container = original(model_parts, plain, parallel_dims, ft_manager)
        container.optimizers = [_optimizer(model, config) for model in model_parts]
        if in_backward:
            for optimizer in container.optimizers:
                step_in_backward(optimizer)
            logger.warning(
                "lowbit: gradients are freed in backward, so training.max_norm clips none"
            )
        logger.info(f"lowbit: optimizer {config.name}")
        return container

    return build


# ---- schedules of QAT ------------------------------------------------------------------------------------------

_SCHEDULE = "lowbit_schedule"
"""The attribute of a model with the arguments of its `lowbit.qat.Schedule`, from the converter; later `_Following`."""


def lr_schedulers_builder(original: Callable[..., Any]) -> Callable[..., Any]:
    """torchtitan's `build_lr_schedulers_fn` of a model, which also begins the schedules of QAT."""

    def build(optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        container = original(optimizers, *args, **kwargs)
        for model, optimizer in zip(optimizers.model_parts, optimizers.optimizers, strict=True):
            chosen = getattr(model, _SCHEDULE, None)
            own = map(held_locally, model.parameters())
            if chosen and any(isinstance(p, FakeQuantizedTensor) for p in own):
                follow = _Following(chosen, container.schedulers[0], optimizer)
                model.register_forward_pre_hook(follow, prepend=True)  # before FSDP2 gathers
                setattr(model, _SCHEDULE, follow)
        return container

    return build


class _Following:
    """A forward hook of a model, and its schedule. The first forward pass makes the schedule, after a checkpoint was
    loaded: the checkpoints have no observers. The scheduler of the learning rate counts the steps, also those before a
    restart.

    Learned scales that have no effect yet have no gradients. In the first step they get zeros, so that the optimizer
    has states for them: torch's checkpoints need states of all parameters."""

    def __init__(self, chosen: dict[str, Any], counts: Any, optimizer: Any) -> None:
        self.chosen, self.counts, self.optimizer = chosen, counts, optimizer
        self.schedule: qat.Schedule | None = None

    def __call__(self, model: nn.Module, args: Any) -> None:
        if self.schedule is None:
            self.schedule = qat.Schedule(model, **self.chosen)
            for scale in learned_parameters(model).values():
                if scale.requires_grad and not self.optimizer.state.get(scale):
                    scale.grad = torch.zeros_like(scale)
            self.schedule.load_state_dict({"steps": self.counts.last_epoch})

    def stepped(self) -> None:
        """Count an optimizer step, before the checkpoint and the step of the learning rate."""
        if self.schedule is not None:
            self.schedule.load_state_dict({"steps": self.counts.last_epoch + 1})


def without_scales(adapter: Any) -> Any:
    """torchtitan's adapter of Hugging Face's checkpoints, which have no learned scales. A model that loads such a
    checkpoint searches its scales."""
    if adapter is None:
        return None

    class Adapter(adapter):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return super().to_hf(plain_entries(state_dict))

    Adapter.__name__, Adapter.__qualname__ = adapter.__name__, adapter.__qualname__
    return Adapter


def plain_entries(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict without learned scales and zero points, of weights and of inputs."""
    ends = (SCALE, ZERO)

    def is_added(key: str) -> bool:
        prefix, _, last = key.rpartition(".")
        of_weight = any(key.endswith(e) and key.removesuffix(e) in state_dict for e in ends)
        of_input = last in (INPUT_SCALE, INPUT_ZERO) and f"{prefix}.weight" in state_dict
        return of_weight or of_input

    return {key: value for key, value in state_dict.items() if not is_added(key)}


# ---- metrics ---------------------------------------------------------------------------------------------------


class LowbitMetrics(MetricsProcessor):
    """torchtitan's metrics, and lowbit's every `lowbit.metrics_freq` times that it logs."""

    def __init__(self, job_config: TitanConfig, *args: Any, **kwargs: Any) -> None:
        if not hasattr(job_config, "lowbit"):
            raise ValueError(
                "the configuration has no section lowbit: set job.custom_config_module to lowbit.torchtitan"
            )
        if CONVERTER not in job_config.model.converters:
            raise ValueError(
                f"model.converters={job_config.model.converters!r} lacks {CONVERTER!r}, which carries out the section "
                f"lowbit; add it, or leave model.converters out"
            )
        super().__init__(job_config, *args, **kwargs)
        self.measured = MeasuredSteps(job_config.lowbit.metrics_freq * job_config.metrics.log_freq)
        self.found: dict[str, float] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "model_parts" and value is not None:  # set last, before the first step
            self.measured.watch(value, self.optimizers)
            if self.measured.every:
                for model in value:
                    model.register_forward_pre_hook(lambda module, args: self.measured.begin())

    def should_log(self, step: int) -> bool:
        """torchtitan calls this method after each step."""
        self.found = self.measured.end(step)
        return super().should_log(step)

    def log(self, step: int, *args: Any, extra_metrics: Any = None, **kwargs: Any) -> None:
        super().log(step, *args, extra_metrics={**(extra_metrics or {}), **self.found}, **kwargs)
        if self.found:
            logger.info(f"lowbit: step {step}: {shown(self.found)}")


def build_metrics_processor(
    job_config: TitanConfig, parallel_dims: Any, model_args: Any = None, tag: str | None = None
) -> LowbitMetrics:
    return LowbitMetrics(job_config, parallel_dims, tag)


# ---- registration ----------------------------------------------------------------------------------------------


def register() -> None:
    register_model_converter(LowbitConverter, CONVERTER)
    for name in MODELS:
        with suppress(ImportError):  # torchtitan raises it again for a user of that model
            register_train_spec(name, with_lowbit(get_train_spec(name)))


register()
