"""Metrics of one training step in low bits, measured while the step runs.

| metric                           | meaning                                                                          |
|----------------------------------|----------------------------------------------------------------------------------|
| lowbit/products_in_low_bits      | share of the multiplications by weights that ran in int8 or float8               |
| lowbit/snr_weights(dB)           | 10 log10(Σ w² / Σ (w - ŵ)²) of low-bit weights, ŵ as the products see the weight |
| lowbit/snr_activations(dB)       | that ratio for the inputs of linear layers with low-bit weights                  |
| lowbit/snr_gradients(dB)         | that ratio for the gradients of their outputs                                    |
| lowbit/updates_lost              | share of the weights with a gradient that the step left exactly as they were     |
| lowbit/state_bytes               | bytes of the optimizer states of all ranks together                              |
| lowbit/state_bytes_per_parameter | these bytes for each element of a parameter                                      |

A metric without a meaning is left out: int8 weights have no high-precision values to compare with, weight-only QAT
rounds no activation. Weights that are rounded stochastically lose no update on average, and are not counted.

A measured step runs eagerly, with hooks on all modules. Other steps run as if there were no metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowbit_kernels as kernels
from lowbit.interop.torchtitan.optimizers import steps_done
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.numerics.snr import decibels
from lowbit.optim.options import rounds_bf16_stochastically
from lowbit.optim.state.state import correction_units
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import LowbitProducts
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.trained.bitnet import BitNetTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import is_learned, scales_of
from lowbit.tensor.trained.master_weight import MasterWeightTensor
from lowbit.tensor.trained.mixed_precision import MixedPrecisionTensor
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.tracing.tracer import Notes
from lowbit.tracing.watched import watched

SAMPLES = 2**16
"""The most elements of a parameter in which lost updates are counted."""
RoundingFunction = Callable[[Tensor], Tensor]
_SUMS = (
    *("low_products", "products", "lost", "stepped", "state_bytes", "parameters"),
    *(
        f"{kind}_{part}"
        for kind in ("weights", "activations", "gradients")
        for part in ("signal", "noise")
    ),
)


# ---- when ------------------------------------------------------------------------------------------------------


class MeasuredSteps:
    """Measures the steps whose number divides by `every`, also in a resumed run. 0: none."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.models: Sequence[nn.Module] = ()
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self._next: int | None = None  # the number of the step ahead; None: not known yet
        self._running: Measurement | None = None

    def watch(
        self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Set the models and optimizers of the run."""
        self.models, self.optimizers = list(models), list(optimizers)

    def begin(self, step: int | None = None) -> None:
        """A step begins, or goes on with its next batch. `step`: its number; None: the number after the last step's."""
        if not self.every or self._running is not None or not torch.is_grad_enabled():
            return
        if step is None:
            step = steps_done(self.optimizers) + 1 if self._next is None else self._next
            self._next = step
        if step % self.every == 0:
            self._running = Measurement(self.models, self.optimizers)

    def end(self, step: int) -> dict[str, float]:
        """Step number `step` is done. Returns its metrics; {} if it was not measured."""
        self._next = step + 1
        measured, self._running = self._running, None
        return {} if measured is None else measured.finish()


# ---- a step ----------------------------------------------------------------------------------------------------


class Measurement:
    """Measures everything from now on, until `finish`.

    Args:
        models: the parts of the model that this rank runs.
        optimizers: of the parameters of these parts.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.models, self.optimizers = models, optimizers
        self.sums: dict[str, Tensor | float] = {}
        self._open = ExitStack()
        # The models themselves run already, too late for hooks of their own; their children have yet to run.
        parts = nn.ModuleList(child for model in models for child in model.children())
        self._watch: Notes = self._open.enter_context(watched(parts))
        # Hooks that are added to a compiled module do not run.
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        for model in models:
            for module in model.modules():
                self._hook(module)
        self._before = {p: sample(p, self._state_of(p)) for p in self._rounded_to_nearest()}

    def finish(self) -> dict[str, float]:
        """The metrics of the step over all ranks. All ranks must call this method."""
        self._open.close()
        for product in self._watch.products():
            size = float(product.m * product.n * product.k * product.calls)
            if product.product != "embedding":
                self._add("products", size)
                self._add("low_products", size if product.in_low_bits else 0.0)
        with torch.no_grad():
            for model in self.models:
                scales = scales_of_weights(model)
                for param in model.parameters():
                    self._count(param, *scales.get(param, ()))
        return metrics(self._reduced())

    # ---- sums ------------------------------------------------------------------------------------------------

    def _add(self, name: str, value: Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _compare(self, kind: str, values: Tensor, rounding: RoundingFunction) -> None:
        """Add the energy of `values` and of the errors that `rounding` makes, under `kind`."""
        if values.numel():
            exact = values.detach().float()
            self._add(f"{kind}_signal", exact.square().sum())
            self._add(f"{kind}_noise", (rounding(values.detach()).float() - exact).square().sum())

    def _reduced(self) -> dict[str, float]:
        device = next(p.device for model in self.models for p in model.parameters())
        values = [torch.as_tensor(self.sums.get(n, 0.0), device=device).double() for n in _SUMS]
        total = torch.stack(values)
        if dist.is_initialized():
            dist.all_reduce(total)
        return dict(zip(_SUMS, total.tolist(), strict=True))

    # ---- products --------------------------------------------------------------------------------------------

    def _hook(self, module: nn.Module) -> None:
        """Measure the inputs of the module and the gradients of its outputs, if its weight is in low bits."""
        weight = held_locally(module._parameters.get("weight"))
        if not isinstance(module, nn.Linear) or not isinstance(weight, TrainableTensor):
            return
        for_input, for_gradient = rounding_of_products(weight)
        if for_input is None and for_gradient is None:
            return

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            with torch.no_grad():
                if for_input is not None:
                    self._compare("activations", local(args[0]), for_input)
            if for_gradient is not None and isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(backward)

        @torch.no_grad()
        def backward(grad: Tensor) -> None:
            assert for_gradient is not None
            self._compare("gradients", local(grad), for_gradient)

        self._open.callback(module.register_forward_hook(forward).remove)

    # ---- weights and states ----------------------------------------------------------------------------------

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        return next((o.state[param] for o in self.optimizers if param in o.state), {})

    def _rounded_to_nearest(self) -> list[Tensor]:
        """The parameters whose step loses updates that are too small."""
        stochastic = {
            param
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            if rounds_bf16_stochastically(group) and param.dtype is torch.bfloat16
        }
        return [
            param
            for model in self.models
            for param in model.parameters()
            if param.requires_grad
            and param not in stochastic
            and _holds_its_values(held_locally(param))
        ]

    def _count(self, param: Tensor, *scales: Any) -> None:
        """Add the sums of one parameter after the step. `scales`: its learned scales and zero points."""
        own, state = held_locally(param), self._state_of(param)
        self._add("parameters", float(own.numel()))
        self._add("state_bytes", float(sum(map(nbytes, state.values()))))
        rounding = rounding_of_weight(own, *scales)
        if rounding is not None:
            self._compare("weights", own.weight, rounding)
        before = self._before.get(param)
        if before is None:
            return
        after = sample(param, state)  # the first step may create a correction
        unchanged = torch.stack(
            [a == b for a, b in zip(before, after[: len(before)], strict=True)]
        ).all(0)
        stepped = torch.ones_like(unchanged)
        if param.grad is not None:  # otherwise it was freed in backward
            stepped = strided(own_part(param.grad, param)) != 0
        self._add("stepped", stepped.sum())
        unchanged &= stepped
        self._add("lost", unchanged.sum())


def metrics(sums: dict[str, float]) -> dict[str, float]:
    """The metrics of the module's table from sums over all ranks."""
    found = {}
    for kind in ("weights", "activations", "gradients"):
        signal, noise = sums[f"{kind}_signal"], sums[f"{kind}_noise"]
        if signal > 0 and noise > 0:
            found[f"lowbit/snr_{kind}(dB)"] = decibels(signal, noise)
    for name, part, whole in (
        ("products_in_low_bits", "low_products", "products"),
        ("updates_lost", "lost", "stepped"),
        ("state_bytes_per_parameter", "state_bytes", "parameters"),
    ):
        if sums[whole]:
            found[f"lowbit/{name}"] = sums[part] / sums[whole]
    return {**found, "lowbit/state_bytes": sums["state_bytes"]}


def shown(found: dict[str, float]) -> str:
    """Metrics in a line of a log."""
    return "  ".join(f"{name.removeprefix('lowbit/')} {value:.4g}" for name, value in found.items())


# ---- parameters ------------------------------------------------------------------------------------------------


def strided(values: Tensor) -> Tensor:
    """About `SAMPLES` elements, at equal distances."""
    return values.reshape(-1)[:: max(1, math.ceil(values.numel() / SAMPLES))]


def _holds_its_values(own: Tensor) -> bool:
    """True for a plain weight, and for one with plain values inside; False if it is rounded stochastically, as int8."""
    return isinstance(own, MasterWeightTensor) or not isinstance(own, LowbitTensor)


def own_part(grad: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a gradient, for the elements of its part of the parameter."""
    if is_dtensor(grad) and is_dtensor(param):
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def sample(param: Tensor, state: dict[str, Any]) -> list[Tensor]:
    """Copies of some elements of a weight, and of the byte below each where the optimizer keeps one."""
    own = held_locally(param)
    kept = [own.weight if isinstance(own, MasterWeightTensor) else own]
    correction = state.get("weight_correction")
    if isinstance(correction, Tensor):
        kept.append(correction_units(correction))
    return [strided(t.detach()).clone() for t in kept]


def nbytes(state: Any) -> int:
    """Bytes of this rank's part of an optimizer state."""
    own = held_locally(state)
    if isinstance(own, LowbitTensor):
        return sum(t.nbytes for t in own.inner_tensors().values())
    return own.nbytes if isinstance(own, Tensor) else 0


# ---- what the schemes round ------------------------------------------------------------------------------------


def rounding_of_products(
    weight: TrainableTensor,
) -> tuple[RoundingFunction | None, RoundingFunction | None]:
    """How the products of this weight round their inputs, and the gradients of their outputs. None: not at all."""
    scheme = weight.scheme
    if isinstance(scheme, Scheme):
        activation = scheme.activation
        if activation is None or activation.static:  # a static scale is the module's
            return None, None
        return activation.fake_quantize, None
    if isinstance(weight, BitNetTensor):
        return weight.rounded_input, None
    if not isinstance(scheme, LowbitProducts):
        return None, None
    rounds_input = scheme.output or scheme.grad_weight
    rounds_gradient = scheme.grad_input or scheme.grad_weight
    return (
        _rows(scheme.forward_format, scheme.one_scale) if rounds_input else None,
        _rows(scheme.backward_format, scheme.one_scale) if rounds_gradient else None,
    )


def scales_of_weights(model: nn.Module) -> dict[Tensor, tuple[Any, Any]]:
    """Each weight with learned scales, and this rank's scales and zero points."""
    found: dict[Tensor, tuple[Any, Any]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if is_learned(held_locally(param)):
                assert param is not None
                scale, zero = scales_of(module, name)
                found[param] = local(scale), local(zero)
    return found


def rounding_of_weight(weight: Any, *scales: Any) -> RoundingFunction | None:
    """How products round the high-precision `weight.weight`, by its learned `scales` if it has any. None: the products
    do not round, the weight has no high-precision values, or this rank lacks the scales of its part."""
    if is_learned(weight):
        scale, zero = scales
        blocks = weight.scheme.weight.blocks(weight.rows(weight.weight).shape)
        if scale is None or tuple(scale.shape) != blocks:
            return None
        return lambda values: weight.quantized_by(scale, zero)
    if isinstance(weight, FakeQuantizedTensor):
        return lambda values: weight.dequantize()
    if isinstance(weight, MixedPrecisionTensor):
        return _rows(weight.scheme.forward_format, weight.scheme.one_scale)
    if isinstance(weight, BitNetTensor):
        scale = weight.own_scale() if weight.is_whole else weight.known_scale()
        if scale is not None:
            return lambda values: weight.ternary(scale)[0] * scale
    return None


def _rows(fmt: str, one_scale: bool) -> RoundingFunction:
    """Rounding to codes with a scale a row, or with one scale."""

    def rounded(values: Tensor) -> Tensor:
        k = values.shape[-1]
        codes, scale, _, _ = kernels.quantize_rowcol.quantize_rowcol(
            values.reshape(-1, k).contiguous(), fmt, columns=False, tensorwise=one_scale
        )
        return (codes[:, :k].float() * scale.view(-1, 1)).view(values.shape)

    return rounded
