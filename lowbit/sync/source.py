"""A model in training as a source of `lowbit.export`: plain, prepared, quantized, whole or sharded by FSDP2.

Each weight is made when its turn comes, and nothing of the model changes:

| parameter                    | what the server gets                                                                 |
|------------------------------|--------------------------------------------------------------------------------------|
| prepared for QAT             | the weight that `lowbit.qat.convert_` would make, to the bit                         |
| `BitNet`, `Int8Weight`, …    | the weight that `lowbit.train.convert_` would make, to the bit                       |
| of mixed precision           | the high-precision weight, as it is                                                  |
| plain, or quantized          | itself                                                                               |

All ranks that share the model walk it together, and each gets every whole tensor. Where the rows of a weight have
scales of their own, each rank rounds its rows, and codes travel between ranks. Else the high-precision weight does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import Owner, Target, check_module, find_owners, joined_name
from lowbit.formats.base import FormatError
from lowbit.formats.module import ModelSource, check_stored, refuse_adapters
from lowbit.formats.sources import Item
from lowbit.layers.prepared import Prepared, named_inputs
from lowbit.layers.static_input import inputs_of
from lowbit.numerics.learned_scales import qparams
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.qat.exchange import prepared_targets
from lowbit.qat.weights import converted_weight, in_order_of_linears, rounding_owner
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.core.dtensor import by_rows, largest_over_ranks, local, placed, placed_as
from lowbit.tensor.core.parts import split
from lowbit.tensor.core.regather import reshard
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor, Qparams
from lowbit.tensor.trained.joint import is_joint, joint_of
from lowbit.tensor.trained.learned_scales import named_scales
from lowbit.tensor.trained.quantizers import NO_SCALES, Scales
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.train.sharded import WRAPPERS


class TrainedModel(ModelSource):
    """See the module.

    Args:
        model: under FSDP2 every rank makes one, and walks it as the others do. It reshards the model.
        tokenizer: as for `ModelSource`.

    Raises FormatError for a model with adapters of PEFT, and as `ModelSource` does.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None) -> None:
        check_module(model)
        reshard(model)
        refuse_adapters(
            model,
            "and servers have other names for them: send a merged copy, lowbit.qat.convert_(copy.deepcopy(model)) "
            "where QAT merges them or merge_and_unload, or give the server the adapter's own folder",
        )
        for name, module in model.named_modules():
            if isinstance(module, Prepared):
                module.check_computed(name)
        self._targets = {
            _plain_name(target.fqn): in_order_of_linears(target)
            for target in prepared_targets(model, if_sharded=None)
        }
        super().__init__(model, tokenizer)
        within = {_plain_name(name) for name in _in_the_weights(model)}
        self.tensors = {
            _plain_name(name): value
            for name, value in self.tensors.items()
            if _plain_name(name) not in within
        }
        names = {_plain_name(name): _plain_name(first) for name, first in self.first.items()}
        self.first = {name: first for name, first in names.items() if first in self.tensors}
        self.is_shared = any(map(is_dtensor, self.tensors.values()))
        self._begun, self._failed = 0, False

    def taken(self, name: str, value: Any) -> Tensor:
        check_stored(name, value)
        own: Tensor = value
        return own

    @functools.cached_property
    def _owners(self) -> dict[str, list[Owner]]:
        return {_plain_name(owners[0].fqn): owners for owners in find_owners(self.model).values()}

    def linears(self) -> set[str]:
        return {_plain_name(f"{name}.").removesuffix(".") for name in super().linears()}

    @property
    def leads(self) -> bool:
        """True on the first of the ranks that share the model, and where it is not sharded."""
        shards = (t for t in self.tensors.values() if is_dtensor(t))
        first = next(shards, None)
        if first is None:
            return True
        return int(first.device_mesh.mesh.flatten()[0]) == torch.distributed.get_rank()

    def items(self) -> Iterator[Item]:
        self._begun, self._failed = 0, False
        yield from super().items()

    def take_part_in_the_rest(self) -> None:
        """Gather what is left of an interrupted walk, which other ranks go on with. Not after an error of the model,
        which all ranks have alike."""
        if not self._failed:
            for name in [*self.tensors][self._begun :]:
                self.value(name)

    @torch.no_grad()
    def value(self, name: str) -> Tensor:
        self._begun += 1
        try:
            if name in self._targets:
                return _converted(name, self._targets[name])
            return _as_served(name, self.tensors[name]).detach()
        except Exception:
            self._failed = True
            raise


def _plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _in_the_weights(model: nn.Module) -> Iterator[str]:
    """The entries of the state dict that conversion puts into a weight: learned scales, and static ones of inputs."""
    yield from named_scales(model)
    yield from named_inputs(model)
    for prefix, module in model.named_modules():
        if isinstance(module, Prepared) and module.has_static_input:
            held = {id(t) for t in inputs_of(module) if t is not None}
            found = {**module._parameters, **module._buffers}
            yield from (joined_name(prefix, n) for n, t in found.items() if id(t) in held)


# ---- one weight ------------------------------------------------------------------------------------------------------


def _as_served(name: str, held: Tensor) -> Tensor:
    """The value of an entry that is not prepared for QAT."""
    own = held_locally(held)
    if not isinstance(own, TrainableTensor):
        return whole(held, name)
    plain = own.updated_in_place()
    if plain is not None and own.stays:
        return whole(placed_as(held, plain.detach()), name)
    trained = whole(held, name)
    assert isinstance(trained, TrainableTensor)
    check_weight(trained.master(), name)
    return trained if trained.stays else trained.frozen()


def _converted(name: str, target: Target) -> Tensor:
    """What `lowbit.qat.convert_` makes of a weight, whole on every rank."""
    held, (module, attribute, _) = target.weight, target.owners[0]
    weight: FakeQuantizedTensor = held_locally(held)
    shared = joint_of(module) if is_joint(weight) else None
    own = weight.quantizer.scales_in(module, attribute) if shared is None else NO_SCALES
    scales: Scales = (own[0], own[1], shared)
    apart = is_dtensor(held) and _rounds_apart(held, weight, scales)
    if apart:
        scales = (local(scales[0]), local(scales[1]), scales[2])
    else:
        weight = whole(held, name)  # type: ignore[assignment]
        scales = (_gathered(scales[0]), _gathered(scales[1]), scales[2])
    _check_finite(name, [weight.weight, *scales], held if apart else None)
    made = converted_weight(target, weight, scales, _input_qparams(name, target))
    return whole(placed_as(held, made), name) if apart else made


def _rounds_apart(held: Any, weight: FakeQuantizedTensor, scales: Scales) -> bool:
    """True if each rank can round its own rows as they are rounded in the whole weight."""
    spec = weight.scheme.weight
    # what siblings share is known; any other scale of several rows is not
    shares = spec.granularity.shares_rows if is_joint(weight) else spec.shares_rows
    if shares or weight.role != "matrix" or not by_rows(held.placements):
        return False
    return all(
        t is None or (is_dtensor(t) and t.placements == held.placements and len(t) == len(held))
        for t in scales[:2]
    )


def _check_finite(name: str, tensors: list[Tensor | None], held: Any) -> None:
    """Raise ValueError for NaN and infinite values: on all ranks of `held`, a DTensor of which each has a part."""
    count = sum(count_nonfinite(t.detach()) for t in tensors if t is not None)
    if held is not None:
        found = torch.tensor(float(count), dtype=torch.float32, device=held_locally(held).device)
        count = int(largest_over_ranks(found, held.device_mesh))
    if count:
        raise ValueError(
            f"{name}, or a scale of it, has {count} NaN or infinite values; go back to a checkpoint before they came"
        )


def _input_qparams(name: str, target: Target) -> Qparams | None:
    if not target.scheme.is_static:
        return None
    scale, zero = map(_gathered, inputs_of(rounding_owner(target).module))
    if scale is None or not bool(torch.isfinite(scale).all()):
        raise ValueError(
            f"the input of {name} has no finite static scale: run lowbit.calibrate(model) over some batches first"
        )
    return qparams(target.scheme.activation, scale.float(), None if zero is None else zero.float())


# ---- gathering -------------------------------------------------------------------------------------------------------


def _gathered(value: Any) -> Tensor | None:
    """`whole` of a plain tensor, or None."""
    return None if value is None else whole(value, "")


def whole(value: Tensor, name: str) -> Tensor:
    """All of a tensor of which this rank may hold a part: then a collective of all ranks of its mesh.

    Raises FormatError, with the `name`, for a low-bit tensor whose parts share scales.
    """
    if not is_dtensor(value):
        return value
    own = held_locally(value)
    if not isinstance(own, LowbitTensor):
        as_it_travels = placed_as(value, as_bytes(own.detach()))
        return as_it_travels.full_tensor().view(own.dtype)  # type: ignore[attr-defined]
    is_turned = own.transposed and own.ndim == 3
    if is_turned:
        own = own._transposed()
        experts, inputs, outputs = value.shape
        value = placed(value, own, value.placements, (experts, outputs, inputs))
    if own.is_stored_plain and (plain := own.updated_in_place()) is not None:
        parts: dict[str, Any] | None = {"weight": placed_as(value, plain.detach())}
    else:
        parts = split(value)
    if parts is None:
        raise FormatError(
            f"{name} is a sharded {type(own).__name__}, and parts on several ranks share scales; accepted: shards of "
            "whole rows (fully_shard), or the model on one process"
        )
    made = own._with({part: whole(t, name) for part, t in parts.items()}, tuple(value.shape))
    return made._transposed() if is_turned else made
