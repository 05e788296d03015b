"""LearnedScalesTensor: a FakeQuantizedTensor whose scales and zero points are trained, as parameters of its module.

A module has its scales in the parameter `weight_scale` beside `weight`, and zero points that the mapping chooses in
`weight_zero`; `lowbit.learned_scales` defines both. An optimizer, a state dict, FSDP2 and a checkpoint treat them as
any other parameter. A product needs the weight and the scales. `F.linear(x, module.weight)` has the weight alone, so
here the module multiplies: `give_scales` makes each `nn.Linear` a `Linear` and each `nn.Embedding` an `Embedding`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.learned_scales import learned_fake_quantize, parameters_for, qparams
from lowbit.tensor import sharded_linear
from lowbit.tensor.affine_tensor import AffineTensor, representation_of
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.row_chunks import count_nonfinite
from lowbit.tensor.trainable import Values

SCALE, ZERO = "weight_scale", "weight_zero"
"""The names of the parameters beside `weight`."""


class LearnedScalesTensor(FakeQuantizedTensor):
    """A trainable weight that its module quantizes by trained scales in every product."""

    def quantized_by(self, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The weight as its products see it: plain, equal to the converted weight's values, differentiable in the
        weight and in the parameters `scale` and `zero`."""
        spec, weight = self.scheme.weight, Values.apply(self)
        return learned_fake_quantize(weight, scale, zero, spec)

    def frozen_by(self, scale: Tensor, zero: Tensor | None) -> LowbitTensor:
        """The weight for inference, in this tensor's dtype."""
        spec = self.scheme.weight
        found = AffineTensor.from_float(self.weight, self.scheme, qparams(spec, scale, zero))
        return found.to(self.dtype)  # type: ignore[return-value]

    def starting_parameters(self) -> tuple[Tensor, Tensor | None]:
        """The values that its scales and zero points start from."""
        spec = self.scheme.weight
        dtype = representation_of(spec).scale_dtype(spec, self.weight.dtype)
        return parameters_for(self.weight, spec, dtype)

    def _without_scales(self, what: str) -> NotImplementedError:
        return self._unsupported(
            f"{what} without its scales, which are parameters of its module; call the module, or make it a weight for "
            "inference by lowbit.qat.convert_(model)"
        )

    def fake_quantized(self) -> Tensor:
        raise self._without_scales("a product")

    def dequantize(self) -> Tensor:
        raise self._without_scales("dequantization")

    def frozen(self) -> LowbitTensor:
        raise self._without_scales("conversion")

    def _look_up(self, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise self._without_scales("a lookup")

    def check_placement(self, param: Any) -> None:
        raise NotImplementedError(
            f"tensor parallelism of a weight {tuple(param.shape)} with learned scales, which would have to be split "
            "with it; prepare the model with scales='present'"
        )

    def _takes_meta_of(self, other: Tensor) -> bool:
        return False


class Linear(sharded_linear.Linear):
    """nn.Linear whose weight is quantized by scales of its own."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        return FakeQuantizedTensor.product(
            input, weight, weight.quantized_by(*scales_of(self)), self.bias
        )


class Embedding(nn.Embedding):
    """nn.Embedding whose weight is quantized by scales of its own."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        spec = weight.scheme.weight
        options = (self.padding_idx, None, self.norm_type, self.scale_grad_by_freq)
        if spec.shares_rows:
            values = weight.quantized_by(*scales_of(self))
            return F.embedding(input, values.to(weight.dtype), *options)
        index = input.reshape(-1)
        rows, scale, zero = (
            None if table is None else F.embedding(index, table, *options)
            for table in (Values.apply(weight), *scales_of(self))
        )
        assert rows is not None and scale is not None
        found = learned_fake_quantize(rows, scale, zero, spec)
        return found.view(*input.shape, -1).to(weight.dtype)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear, nn.Embedding: Embedding}


def can_hold(modules: Iterable[nn.Module]) -> bool:
    """Whether these modules, all those that hold one weight, can multiply by it with learned scales."""
    return all(type(module) in _KINDS for module in modules)


def give_scales(weight: LearnedScalesTensor, modules: Iterable[nn.Module]) -> None:
    """Register the scales and zero points of `weight` in the modules that hold it, which share them."""
    scale, zero = weight.starting_parameters()
    made = {SCALE: nn.Parameter(scale), ZERO: None if zero is None else nn.Parameter(zero)}
    for module in modules:
        for name, parameter in made.items():
            module.register_parameter(name, parameter)
        module.__class__ = next(k for plain, k in _KINDS.items() if isinstance(module, plain))


def scales_of(module: nn.Module) -> tuple[Any, Any]:
    """The parameters of scales and zero points; None for zero points that the mapping does not choose."""
    return module._parameters[SCALE], module._parameters[ZERO]


def check_scales(module: nn.Module, fqn: str) -> None:
    """Raise ValueError for scales or zero points that are NaN or infinite. `fqn`: the name of the weight."""
    for name, parameter in zip((SCALE, ZERO), scales_of(module), strict=True):
        if parameter is not None and (bad := count_nonfinite(parameter.detach())):
            raise ValueError(
                f"{fqn.removesuffix('weight')}{name} has {bad} NaN or infinite values of {parameter.numel()}; go back "
                "to a checkpoint before they came, and train on with a lower learning rate"
            )


def drop_scales(module: nn.Module) -> None:
    """Undo `give_scales` for a module, if it was called for it."""
    for plain, kind in _KINDS.items():
        if type(module) is kind:
            for name in (SCALE, ZERO):
                del module._parameters[name]
            module.__class__ = plain
