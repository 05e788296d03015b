"""LearnedScalesTensor: a FakeQuantizedTensor whose scales and zero points are trained, as parameters of its module.

Beside the parameter `weight` a module has its scales in the parameter `weight_scale`, and zero points that the mapping
chooses in `weight_zero`; `lowbit.numerics.learned_scales` defines both. Those of experts in a parameter `up` are
`up_scale` and `up_zero`. An optimizer, a state dict, FSDP2 and a checkpoint treat them as any other parameter.

A product needs the weight and the scales. `F.linear(x, module.weight)` has the weight alone, so here the module
multiplies (`lowbit.layers.prepared`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lowbit.linear.coded_linear import CodedWeight
from lowbit.linear.dequantized import Values
from lowbit.linear.frozen.checks import refuse_transforms
from lowbit.linear.fused_rounding import learned_fake_quantize
from lowbit.numerics.learned_scales import (
    codes_and_residual,
    gradients,
    parameters_for,
    qparams,
    rate_of,
    with_gradients_of,
)
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.sharded import is_dtensor
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core import (
    Gather,
    LowbitTensor,
    Wire,
    held_locally,
    local,
    rounding_inputs,
    split_as,
)
from lowbit.tensor.trained.fake_quantized import (
    CodesBeforeClamp,
    FakeQuantizedTensor,
    Qparams,
    frozen_as,
)
from lowbit.tracing import tracer

_CONSTANT = "constant_codes"
"""The key in the description of a weight whose codes are constant."""
SCALE, ZERO = "_scale", "_zero"
"""The ends of the names of the parameters beside a weight, after the weight's own name."""
_RATE = "scale_rate"
"""The key of `rate_of` in the description of a weight."""
RESIDUAL_STEPS = 254
"""Steps of the residual of a code, from −1/2 to 1/2, that one byte holds."""


class CodesAndResiduals(CodesBeforeClamp):
    """The codec of a LearnedScalesTensor: codes before the clamp, their residuals, one byte each, and scales. Products
    and gradients of the weight are the same to the bit. The gradient of a scale takes (ŵ − w)/s to 1/254.

    Values are by the scales that travelled. Those of the module may have been rounded for the forward pass.
    """

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "residual", "scale", "zero_point")

    @staticmethod
    def encode(shard: Any, gather: Gather) -> Wire | None:
        weight, spec = shard.weight.detach(), shard.scheme.weight
        of_rows = isinstance(spec.format, Int) and not spec.shares_rows
        if (
            shard.constant_codes
            or shard.role != "matrix"
            or not (of_rows and shard.rounds_weight and weight.dtype is torch.float32)
        ):
            return None
        scale, zero = map(local, scales_of(gather.module, shard.attribute))
        scale, zero_point = qparams(spec, scale, zero)
        codes, residual = codes_and_residual(weight, spec, scale, zero_point)
        residual = (residual * RESIDUAL_STEPS).round().clamp(-127, 127).to(torch.int8)
        tensors = {"codes": spec.narrowed(codes), "residual": residual, "scale": scale}
        if zero_point is not None:
            tensors["zero_point"] = zero_point
        return Wire(shard.gathered, tensors)

    def dequantize(self: Any) -> Tensor:
        return LearnedScalesTensor.dequantize(self)  # refuses, as for the weight itself

    def gradients_by(
        self: Any, grad: Tensor, scale: Tensor, zero: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the weight and of the parameters `scale` and `zero`, from that of its values."""
        residual = self.residual.float() / RESIDUAL_STEPS
        return gradients(grad, self.codes.float(), residual, self.scheme.weight, scale, zero)

    def quantized_by(self: Any, scale: Tensor, zero: Tensor | None) -> Tensor:
        return self.differentiable_values(scale, zero)

    def _codes_by(self: Any, scale: Tensor, zero: Tensor | None) -> tuple[Tensor | None, ...]:
        return self.clamped(), self.scale, self.zero_point


class LearnedScalesTensor(FakeQuantizedTensor, codec=CodesAndResiduals):
    """A trainable weight that its module quantizes by trained scales in every product."""

    meta_attrs: ClassVar[tuple[str, ...]] = (
        *FakeQuantizedTensor.meta_attrs,
        "attribute",
        "constant_codes",
    )

    caches = ("holder",)

    attribute: str
    """The name of the weight in its module, where FSDP2 looks for the scales."""
    constant_codes: bool
    """True for a frozen weight on the grid of its scales, which train alone. FSDP2 gathers the weight itself."""
    holder: weakref.ref[nn.Module] | None = None
    """The module with the scales, by which operations other than its products read the weight (`hold`)."""

    @classmethod
    def _meta_of(cls, weight: Tensor) -> dict[str, Any]:
        return {**super()._meta_of(weight), "attribute": "weight", "constant_codes": False}

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        constant = data.get(_CONSTANT, False)
        if not isinstance(constant, bool):
            raise ValueError(f"{_CONSTANT} is true or false, got {constant!r}")
        return {**super().meta_from_json(data), "constant_codes": constant}

    def _with(self, *args: Any, **kwargs: Any) -> Self:
        made = super()._with(*args, **kwargs)
        made.holder = self.holder
        return made

    def _take_over(self, other: Any) -> None:
        holder = self.holder  # a cache, which other data would end
        super()._take_over(other)
        self.holder = holder

    def read(self) -> Tensor:
        if self.transposed:
            whole: Any = self.transpose(-2, -1)
            return whole.read().transpose(-2, -1)
        if not self.rounds_weight:
            return self.high_precision()
        return self.seen_by(*self._held_scales())

    def settled(self) -> Tensor:
        if self.transposed or not self.rounds_weight or self.role == "convolution":
            return super().settled()
        return self.settled_by(*self._held_scales())

    def factor(self) -> Tensor:
        return self.settled()

    def settled_by(self, scale: Tensor, zero: Tensor | None) -> Tensor:
        """`settled` by these scales. In codes where the converted weight may multiply codes."""
        values, spec = self.seen_by(scale, zero).to(self.dtype), self.scheme.weight
        if self.input_spec is None:
            return values
        has_codes = self.rounds_weight and not spec.shares_rows and self.dtype is torch.float32
        if not has_codes or isinstance(spec.format, LookupTable):
            return rounding_inputs(self, values)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.ops.lowbit.in_codes(self, values, *self._codes_by(scale, zero))

    def _codes_by(self, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes on the grid of the format, their scales and zero points, without gradient."""
        spec = self.scheme.weight
        found = qparams(spec, scale.detach(), None if zero is None else zero.detach())
        codes, _, _ = spec.quantize(self.weight.detach(), qparams=found)
        return codes, *found

    def _held_scales(self) -> tuple[Tensor, Tensor | None]:
        """The scales and zero points of its module. Raises NotImplementedError for a part of a weight, and for one
        that no module holds."""
        module = None if self.holder is None else self.holder()
        scale, zero = (None, None) if module is None else scales_of(module, self.attribute)
        blocks = self.scheme.weight.blocks(self.matrix_shape)
        if scale is None or is_dtensor(scale) or tuple(scale.shape) != tuple(blocks):
            raise self._without_scales("reading its values")
        return scale, zero

    @property
    def has_rows_alone(self) -> bool:
        return not self.rounds_weight and self.role == "matrix"

    @property
    def has_experts_alone(self) -> bool:
        """A part of it has no scales."""
        return self.ndim == 3 and not self.rounds_weight

    def _is_stored_like(self, other: Tensor) -> bool:
        """Whatever the names of both."""
        if isinstance(other, LearnedScalesTensor):
            other = other._with(attribute=self.attribute)
        return super()._is_stored_like(other)

    def quantized_by(self, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The weight as its products see it: plain, equal to the converted weight's values, differentiable in the
        weight and in the parameters `scale` and `zero`."""
        spec, weight = self.scheme.weight, Values.apply(self)
        rows = self.rows(weight)
        found = learned_fake_quantize(rows, scale, zero, spec, self.constant_codes)
        return found.reshape(weight.shape)

    def seen_by(self, scale: Tensor, zero: Tensor | None) -> Tensor:
        """`quantized_by`, or the high-precision weight while its rounding is off."""
        refuse_transforms(self)
        if not self.rounds_weight:
            return self.high_precision()
        values = self.quantized_by(scale, zero)
        tracer.rounded(values, self)
        return values

    def coded_by(self, scale: Tensor, zero: Tensor | None) -> CodedWeight:
        """`quantized_by` for a product of codes."""
        return self.coded_values(Values.apply(self), scale, zero)

    def coded_values(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> CodedWeight:
        """Plain `values` [N, K] for a product of codes."""
        spec, own = self.scheme.weight, values.detach()
        by, _ = qparams(spec, scale, zero)
        codes, _, _ = spec.quantize(own, qparams=(by, None))
        handle = with_gradients_of(values, scale, zero, spec, self.constant_codes)
        return CodedWeight(codes, by, handle, own)

    @classmethod
    def linear(cls, input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Without scales, only while the rounding of the weight is off."""
        cls.check_operands(input, weight)
        return cls.product(input, weight, weight.operand, None, bias)

    def frozen_by(
        self, scale: Tensor, zero: Tensor | None, input_qparams: Qparams | None = None
    ) -> LowbitTensor:
        """The weight for inference, in this tensor's dtype. `input_qparams`: as of `frozen`."""
        own = qparams(self.scheme.weight, scale, zero)
        found = frozen_as(self).from_float(self.weight, self.scheme, own, input_qparams)
        return found.to(self.dtype)

    def starting_parameters(self, values: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What its scales and zero points start from: those of a search, for plain `values` of all of this weight.
        None: for its present ones."""
        values, spec = self.weight if values is None else values, self.scheme.weight
        free = replace(spec, scale_dtype=None)
        dtype = free.scale_dtype_for(values.dtype)
        return parameters_for(self.rows(values), spec, dtype)

    def entries_beside(
        self,
        module: nn.Module,
        name: str,
        state_dict: Mapping[str, Any],
        prefix: str,
        entry: Any,
        assign: bool,
    ) -> dict[str, Tensor]:
        """Searched scales and zero points, for a state dict of a plain model, which has this weight and no scales. For
        one whose scales were held by another factor, the scale times the quotient.

        Raises ValueError for scales whose description, `entry`, is of another scheme."""
        value = state_dict.get(prefix + name)
        plain = isinstance(value, Tensor) and not isinstance(local(value), LowbitTensor)
        own = scales_of(module, name)
        keys = [prefix + name + end for end in (SCALE, ZERO)]
        # torch's set_model_state_dict gives the model's own parameters for entries that are not there
        entries = [state_dict.get(key) for key in keys]
        given = [e is not None and e is not p for e, p in zip(entries, own, strict=True)]
        if any(given):
            self._check_described(prefix + name, entry)
        if (
            isinstance(entries[0], Tensor)
            and given[0]
            and (factor := self._factor_of(entry)) != 1.0
        ):
            return {keys[0]: entries[0] * factor}
        if self.constant_codes or not plain or any(given):
            return {}
        assert isinstance(value, Tensor)
        if value.is_meta or value.shape != module._parameters[name].shape:  # type: ignore[union-attr]
            return {}  # load_state_dict reports the shape
        whole = value.full_tensor() if is_dtensor(value) else value
        found = self.starting_parameters(whole if assign else whole.to(self.weight.dtype))
        return {
            key: split_as(old, new)
            for key, new, old in zip(keys, found, own, strict=True)
            if new is not None
        }

    def meta_to_json(self) -> dict[str, Any]:
        constant = {_CONSTANT: True} if self.constant_codes else {}
        return {**super().meta_to_json(), _RATE: rate_of(self.scheme.weight), **constant}

    def _factor_of(self, entry: Any) -> float:
        """The factor for the scale parameter of a state dict, whose description is `entry`: of a model with another
        scheme, whose scales are divided by another rate."""
        own = rate_of(self.scheme.weight)
        return entry.get(_RATE, own) / own if isinstance(entry, Mapping) else 1.0

    def _check_described(self, key: str, entry: Any) -> None:
        if not isinstance(entry, Mapping) or "scheme" not in entry:
            return
        spec, found = self.scheme.weight, Scheme.from_dict(entry["scheme"]).weight
        if not spec.same_values(found):
            raise ValueError(
                f"{key} has learned scales of {found} in the state dict, and of {spec} in the model; prepare the model "
                f"by the same scheme, or leave out the entries {key}{SCALE} and {key}{ZERO}, which are then searched"
            )

    def _without_scales(self, what: str) -> NotImplementedError:
        return self._unsupported(
            f"{what} without its scales, which are parameters of its module; call the module, whose forward has both, "
            "prepare this weight with scales='present', or make it one for inference by lowbit.qat.convert_(model)"
        )

    def scales_elsewhere(self, what: str) -> Tensor:
        raise self._without_scales(what)

    def check_placement(self, param: Any) -> None:
        """Parts of a row may share its scale, which is given."""
        spec = self.scheme.weight
        if self.scheme.is_static or spec.shares_rows or not spec.granularity.spans(1, 2):
            super().check_placement(param)

    def _takes_meta_of(self, other: Tensor) -> bool:
        return False

    # ---- FSDP2 -----------------------------------------------------------------------------------------------

    def _on_the_wire(self, gather: Gather) -> Wire | None:
        if self.scheme.is_static and gather.policy.param_dtype not in (None, torch.float32):
            raise NotImplementedError(
                f"a learned scale of the input, gathered as {gather.policy.param_dtype}, which would round it, so that "
                "convert_ stores another; accepted: autocast instead of the policy's param_dtype, or prepare_ with "
                "scales='present'"
            )
        self.holder = weakref.ref(gather.module)
        wire = super()._on_the_wire(gather)
        if wire is None and self.rounds_weight:
            self.check_exact(gather)
        return wire

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        found = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        if found is not None:
            whole: Any = found[0]
            whole.holder = self.holder
        return found

    def check_exact(self, gather: Gather) -> None:
        """Raise NotImplementedError where FSDP2 would round the scales before the product sees them."""
        (scale, _), dtype = scales_of(gather.module, self.attribute), gather.policy.param_dtype
        if dtype not in (None, scale.dtype):
            raise NotImplementedError(
                f"a weight of {self.weight.dtype} with learned scales of {self.scheme.weight}, gathered as "
                f"{dtype}, which would round its scales, so that convert_ stores others; accepted: "
                "autocast instead of the policy's param_dtype, or prepare_ with scales='present'"
            )


_LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
_LIBRARY.define(
    "in_codes(Tensor weight, Tensor values, Tensor codes, Tensor scale, Tensor? zero_point) -> Tensor"
)


@LearnedScalesTensor.implements(torch.ops.lowbit.in_codes.default)
def _in_codes(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`values` as a weight whose products multiply codes, which lie within the range, so that every gradient passes."""
    weight, _, *tensors = args
    kind: Any = FakeQuantizedTensor.gathered
    inner = dict(zip(kind.tensor_attrs, tensors, strict=True))
    meta = {name: getattr(weight, name) for name in kind.meta_attrs}
    meta["transposed"] = False
    return kind.from_inner(inner, meta, weight.shape, weight.dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None, None]:
    return None, grad, None, None, None


torch.library.register_autograd("lowbit::in_codes", _backward, setup_context=_setup, lib=_LIBRARY)


def operands(
    weight: LearnedScalesTensor, scale: Tensor, zero: Tensor | None
) -> tuple[Callable[[], Tensor], Callable[[], CodedWeight]]:
    """What `FakeQuantizedTensor.product` takes of a weight with these scales. No method, as torch.compile takes methods
    of tensors for operations, which return tensors."""
    return partial(weight.seen_by, scale, zero), partial(weight.coded_by, scale, zero)


# ---- the parameters of a module ------------------------------------------------------------------------------------


def hold(module: nn.Module) -> None:
    """Tell the weights of a module that need it, by their attribute `holder`, that they are here."""
    for name, weight in module._parameters.items():
        is_elsewhere = (
            isinstance(weight, LearnedScalesTensor) and name + SCALE not in module._parameters
        )
        if hasattr(type(weight), "holder") and not is_elsewhere:
            weight.holder = weakref.ref(module)  # type: ignore[union-attr]


def has_scales(module: nn.Module) -> bool:
    """True if `give_scales` was called for the weight of this layer."""
    return "weight" + SCALE in module._parameters


def named_scales(model: nn.Module) -> dict[str, nn.Parameter]:
    """Fully qualified name → learned scales and zero points, those of tied weights once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name, weight in module._parameters.items():
            if isinstance(held_locally(weight), LearnedScalesTensor):
                own = _name_of_scales(module, name)
                for end in (SCALE, ZERO):
                    parameter = module._parameters[own + end]
                    if parameter is not None:
                        fqn = f"{prefix}.{own}{end}" if prefix else own + end
                        found.setdefault(id(parameter), (fqn, parameter))
    return dict(found.values())


def weight_scaled_by(module: nn.Module, name: str) -> str | None:
    """The name of the weight whose learned scales or zero points the module's parameter `name` is."""
    for end in (SCALE, ZERO):
        weight = name.removesuffix(end)
        held = held_locally(module._parameters.get(weight))
        if weight != name and isinstance(held, LearnedScalesTensor):
            return weight
    return None


def scales_of(module: nn.Module, attribute: str = "weight") -> tuple[Any, Any]:
    """The parameters of scales and zero points; None for zero points that the mapping does not choose.

    Raises NotImplementedError where another module has them, as for the weight of a parametrization.
    """
    name = _name_of_scales(module, attribute)
    return module._parameters[name + SCALE], module._parameters[name + ZERO]


def _name_of_scales(module: nn.Module, attribute: str) -> str:
    """The name that the scales of a weight are named by: the one that it was prepared under. Pruning and weight_norm
    give the weight another one."""
    if attribute + SCALE in module._parameters:
        return attribute
    own: Any = held_locally(module._parameters.get(attribute))
    name = getattr(own, "attribute", attribute)
    if name + SCALE not in module._parameters:
        raise NotImplementedError(
            f"a weight {attribute} of {type(module).__name__} with learned scales, which are parameters of another "
            "module; accepted: torch.nn.utils.parametrize.remove_parametrizations before, or prepare_ with "
            "scales='present'"
        )
    return name


def check_scales(module: nn.Module, attribute: str, fqn: str) -> None:
    """Raise ValueError for scales or zero points that are NaN or infinite. `fqn`: the name of the weight."""
    for end, parameter in zip((SCALE, ZERO), scales_of(module, attribute), strict=True):
        if parameter is not None and (bad := count_nonfinite(parameter.detach())):
            raise ValueError(
                f"{fqn}{end} has {bad} NaN or infinite values of {parameter.numel()}; go back to a checkpoint before "
                "they came, and train on with a lower learning rate"
            )
