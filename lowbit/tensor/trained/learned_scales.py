"""LearnedScales: scales and zero points of a fake-quantized weight that are trained, as parameters of its module.

Beside the parameter `weight` a module has the parameter `weight_scale`, a factor of the present scale of each block,
and `weight_zero`, an offset of the zero points that the mapping chooses; `lowbit.numerics.learned_scales` defines both.
Those of experts in a parameter `up` are `up_scale` and `up_zero`. An optimizer, a state dict, FSDP2 and a checkpoint
treat them as any other parameter.

A product needs the weight and the scales, so the module multiplies (`lowbit.layers.prepared`). Other operations have
the weight alone: it knows its module as long as it is a parameter of it (`hold`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit.linear.coded_linear import CodedWeight
from lowbit.linear.fused_rounding import learned_fake_quantize, present_parameters
from lowbit.numerics.learned_scales import (
    RESIDUAL_STEPS,
    codes_and_residual,
    following,
    parameters_for,
    qparams,
    relative,
    with_gradients_of,
)
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.opaque import for_subclasses
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core import Gather, LowbitTensor, Wire, local, rounding_inputs, split_as
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import PRESENT, Quantizer, Scales

_ABSOLUTE = "absolute_scales"
"""The key of `absolute` in the description of a weight."""
SCALE, ZERO = "_scale", "_zero"
"""The ends of the names of the parameters beside a weight, after the weight's own name."""


@dataclass(frozen=True, repr=False)
class LearnedScales(Quantizer):
    """Scales that are parameters beside the weight.

    Args:
        absolute: True where the parameters are those of the scales themselves (`as_parameters`), and do not follow the
            weight: it started from scales that are stored, which a factor would give back to about the last bit only.
        attribute: the name of the weight in its module, where FSDP2 looks for the scales.
    """

    name: ClassVar[str] = "learned"
    has_scales_beside: ClassVar[bool] = True
    rounds_parts: ClassVar[bool] = False
    rounds_again: ClassVar[bool] = True
    attribute: str = "weight"

    # ---- scales ----------------------------------------------------------------------------------------------

    def scales_in(self, module: nn.Module, attribute: str = "weight") -> Scales:
        return *scales_of(module, attribute), None

    def scales_alone(self, weight: Any, what: str) -> Scales:
        """Raises NotImplementedError for a part of a weight, and for one that no module holds."""
        module = None if weight.holder is None else weight.holder()
        scale, zero = (None, None) if module is None else scales_of(module, self.attribute)
        blocks = weight.scheme.weight.blocks(weight.matrix_shape)
        if scale is None or is_dtensor(scale) or tuple(scale.shape) != tuple(blocks):
            raise weight._unsupported(
                f"{what} without its scales, which are parameters of its module; call the module, whose forward has "
                "both, prepare this weight with scales='present', or make it one for inference by "
                "lowbit.qat.convert_(model)"
            )
        return scale, zero, None

    def scales_at(self, values: Tensor, spec: Spec, scales: Scales) -> Scales:
        factor, offset, same_extremes = scales
        if self.absolute or factor is None:
            return factor, offset, None
        own = values if same_extremes is None else same_extremes
        return *following(factor, offset, present_parameters(own, spec, factor.dtype)), None

    # ---- rounding --------------------------------------------------------------------------------------------

    def rounded(self, values: Tensor, spec: Spec, scales: Scales) -> Tensor:
        scale, zero, _ = self.scales_at(values, spec, scales)
        return learned_fake_quantize(values, scale, zero, spec)  # type: ignore[arg-type]

    def coded(self, values: Tensor, spec: Spec, scales: Scales) -> CodedWeight:
        scale, zero, _ = self.scales_at(values, spec, scales)
        assert scale is not None
        own = values.detach()
        by, _ = qparams(spec, scale, zero)
        codes, _, _ = spec.quantize(own, qparams=(by, None))
        handle = with_gradients_of(values, scale, zero, spec)
        return CodedWeight(codes, by, handle, own)

    def frozen_options(self, values: Tensor, spec: Spec, scales: Scales) -> dict[str, Any]:
        scale, zero, _ = self.scales_at(values, spec, scales)
        assert scale is not None
        return {"qparams": qparams(spec, scale, zero)}

    # ---- parts, and the weight as an operand of other operations -----------------------------------------------

    def settled(self, weight: Any) -> Tensor:
        scale, zero, _ = self.scales_alone(weight, "reading its values")
        return settled_by(weight, scale, zero)  # type: ignore[arg-type]

    def factor(self, weight: Any) -> Tensor:
        return weight.settled()

    def like(self, other: Quantizer) -> bool:
        """Whatever the names of both."""
        return isinstance(other, LearnedScales) and replace(other, attribute=self.attribute) == self

    def splits_rows(self, spec: Spec) -> bool:
        """Parts of a row may share its scale, which is given."""
        return spec.granularity.spans(1, 2) and not spec.shares_rows

    # ---- state dicts -----------------------------------------------------------------------------------------

    def entries_beside(
        self,
        weight: Any,
        module: nn.Module,
        name: str,
        state_dict: Mapping[str, Any],
        prefix: str,
        entry: Any,
        assign: bool,
    ) -> dict[str, Tensor]:
        """Starting scales and zero points, for a state dict of a plain model, which has this weight and no scales.

        Args:
            weight: of the module.
            module: the one that is loaded, whose attribute of this `name` the weight is.
            state_dict: what is loaded; keys begin with `prefix`.
            entry: the description of the scales in it, or None.
            assign: True if the module gets the loaded tensors themselves.

        Raises:
            ValueError: the description is of another scheme or form.
        """
        value = state_dict.get(prefix + name)
        plain = isinstance(value, Tensor) and not isinstance(local(value), LowbitTensor)
        own = scales_of(module, name)
        keys = [prefix + name + end for end in (SCALE, ZERO)]
        # torch's set_model_state_dict gives the model's own parameters for entries that are not there
        entries = [state_dict.get(key) for key in keys]
        given = [e is not None and e is not p for e, p in zip(entries, own, strict=True)]
        spec = weight.scheme.weight
        if any(given):
            self._check_described(spec, prefix + name, entry)
        if not plain or any(given):
            return {}
        assert isinstance(value, Tensor)
        if value.is_meta or value.shape != module._parameters[name].shape:  # type: ignore[union-attr]
            return {}  # load_state_dict reports the shape
        whole = value.full_tensor() if is_dtensor(value) else value
        found = starting_parameters(weight, whole if assign else whole.to(weight.weight.dtype))
        return {
            key: split_as(old, new)
            for key, new, old in zip(keys, found, own, strict=True)
            if new is not None
        }

    def to_json(self, spec: Spec) -> dict[str, Any]:
        return {"quantizer": self.name, **({_ABSOLUTE: True} if self.absolute else {})}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Quantizer:
        absolute = data.get(_ABSOLUTE, False)
        if not isinstance(absolute, bool):
            raise ValueError(f"{_ABSOLUTE} is true or false, got {absolute!r}")
        return cls(absolute=absolute)

    def _check_described(self, spec: Spec, key: str, entry: Any) -> None:
        """Raise ValueError unless the parameters of the weight `key`, with the description `entry`, mean the same
        scales here."""
        if not isinstance(entry, Mapping) or "scheme" not in entry:
            return
        found, absolute = Scheme.from_dict(entry["scheme"]).weight, entry.get(_ABSOLUTE, False)
        fits = spec.same_values(found) and (absolute or spec.mapping == found.mapping)
        if fits and absolute == self.absolute:
            return
        form = {True: "that do not follow the weight", False: "that follow the weight"}
        raise ValueError(
            f"{key} has learned scales of {found} {form[absolute]} in the state dict, and of {spec} "
            f"{form[self.absolute]} in the model; prepare the model by the same scheme, from a weight that is packed, "
            f"or plain, as that one was, or leave out the entries {key}{SCALE} and {key}{ZERO}, which then start anew"
        )

    # ---- FSDP2 -----------------------------------------------------------------------------------------------

    def encode(self, shard: Any, gather: Gather) -> Wire | None:
        """Codes before the clamp, their residuals and scales."""
        if shard.scheme.is_static and gather.policy.param_dtype not in (None, torch.float32):
            raise NotImplementedError(
                f"a learned scale of the input, gathered as {gather.policy.param_dtype}, which would round it, so that "
                "convert_ stores another; accepted: autocast instead of the policy's param_dtype, or prepare_ with "
                "scales='present'"
            )
        shard.holder = weakref.ref(gather.module)
        if not shard.rounds_weight:
            return None
        weight, spec = shard.weight.detach(), shard.scheme.weight
        of_rows = isinstance(spec.format, Int) and not spec.shares_rows
        travels = shard.role != "matrix" or weight.dtype is not torch.float32
        if travels or not of_rows:
            self.check_exact(shard, gather)
            return None
        factor, offset = map(local, scales_of(gather.module, self.attribute))
        by: Any = self.scales_at(weight, spec, (factor, offset, None))
        scale, zero_point = qparams(spec, *by[:2])
        codes, residual = codes_and_residual(weight, spec, scale, zero_point)
        residual = (residual * RESIDUAL_STEPS).round().clamp(-127, 127).to(torch.int8)
        tensors = {"codes": spec.narrowed(codes), "residual": residual, "scale": scale}
        if zero_point is not None:
            tensors["zero_point"] = zero_point
        return Wire(shard.gathered, tensors)

    def check_exact(self, shard: Any, gather: Gather) -> None:
        """Raise NotImplementedError where FSDP2 would round the scales before the product sees them."""
        (scale, _), dtype = scales_of(gather.module, self.attribute), gather.policy.param_dtype
        if dtype not in (None, scale.dtype):
            raise NotImplementedError(
                f"a weight of {shard.weight.dtype} with learned scales of {shard.scheme.weight}, gathered as "
                f"{dtype}, which would round its scales, so that convert_ stores others; accepted: "
                "autocast instead of the policy's param_dtype, or prepare_ with scales='present'"
            )


def is_learned(weight: Any) -> bool:
    """True for a fake-quantized weight whose scales are parameters."""
    return isinstance(weight, FakeQuantizedTensor) and isinstance(weight.quantizer, LearnedScales)


def starting_parameters(
    weight: Any, values: Tensor | None = None, searched: bool | None = None
) -> tuple[Tensor, Tensor | None]:
    """What the scales and zero points of `weight` start from, for plain `values` of all of it. None: for its present
    ones. `searched`: as for `parameters_for`."""
    values, spec = weight.weight if values is None else values, weight.scheme.weight
    free = replace(spec, scale_dtype=None)
    dtype, rows = free.scale_dtype_for(values.dtype), weight.rows(values)
    found = parameters_for(rows, spec, dtype, searched)
    if weight.quantizer.absolute or rows.is_meta:
        return found
    return relative(present_parameters(rows, spec, dtype), found)


# ---- a weight that its module reads ----------------------------------------------------------------------------------


def settled_by(weight: Any, scale: Tensor, zero: Tensor | None) -> Tensor:
    """`weight.settled()` by these scales. In codes where the converted weight may multiply codes."""
    values, spec = weight.seen_by(scale, zero).to(weight.dtype), weight.scheme.weight
    if weight.input_spec is None:
        return values
    has_codes = weight.rounds_weight and not spec.shares_rows and weight.dtype is torch.float32
    if not has_codes or isinstance(spec.format, LookupTable):
        return rounding_inputs(weight, values)
    with torch._C.DisableTorchFunctionSubclass():
        return _IN_CODES(weight, values, *weight.codes_on_grid(scale, zero))


_IN_CODES = for_subclasses(
    "in_codes(Tensor weight, Tensor values, Tensor codes, Tensor scale, Tensor? zero_point) -> Tensor"
)


@FakeQuantizedTensor.implements(_IN_CODES)
def _in_codes(func: Any, args: Any, kwargs: Any) -> Tensor:
    """`values` as a weight whose products multiply codes, which lie within the range, so that every gradient passes."""
    weight, _, codes, scale, zero_point = args
    kind: Any = FakeQuantizedTensor.gathered
    inner = {"codes": codes, "scale": scale, "zero_point": zero_point}
    meta = {**weight.meta(), "transposed": False, "quantizer": PRESENT}
    return kind.from_inner(inner, meta, weight.shape, weight.dtype)


# ---- the parameters of a module ------------------------------------------------------------------------------------


def hold(module: nn.Module) -> None:
    """Tell the weights of a module that need it, by their attribute `holder`, that they are here."""
    for name, weight in module._parameters.items():
        is_elsewhere = is_learned(weight) and name + SCALE not in module._parameters
        if isinstance(weight, FakeQuantizedTensor) and not is_elsewhere:
            weight.holder = weakref.ref(module)


def has_scales(module: nn.Module) -> bool:
    """True if `give_scales` was called for the weight of this layer."""
    return "weight" + SCALE in module._parameters


def named_scales(model: nn.Module) -> dict[str, nn.Parameter]:
    """Fully qualified name → learned scales and zero points, those of tied weights once."""

    def scales(module: nn.Module) -> Iterator[tuple[str, nn.Parameter | None]]:
        for name, weight in module._parameters.items():
            if is_learned(held_locally(weight)):
                own = _name_of_scales(module, name)
                yield from ((own + end, module._parameters[own + end]) for end in (SCALE, ZERO))

    return dict(model._named_members(scales))


def weight_scaled_by(module: nn.Module, name: str) -> str | None:
    """The name of the weight whose learned scales or zero points the module's parameter `name` is."""
    for end in (SCALE, ZERO):
        weight = name.removesuffix(end)
        held = held_locally(module._parameters.get(weight))
        if weight != name and is_learned(held):
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
    name = own.quantizer.attribute if is_learned(own) else attribute
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
