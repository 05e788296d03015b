"""A class of weights that names a codec travels by it under FSDP2. It needs three methods and no other file."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowbit.tensor.core import Wire
from lowbit.tensor.trained.gathered import GatheredTensor
from lowbit.tensor.trained.master_weight import MasterWeightTensor
from lowbit.testing.launch import launch
from tests.as_sent import as_sent
from tests.distributed.test_tensor_fsdp import recorded_gathers
from tests.tensor.cases import values


class Halves:
    """The codec: the weight in 16 bits."""

    tensor_attrs = ("half",)

    @staticmethod
    def encode(shard, gather):
        return Wire(shard.gathered, {"half": shard.weight.half()})

    def inner_shapes(self, shape):
        return {"half": (tuple(shape), torch.float16)}

    def decoded_values(self):
        return self.half


class HalfTensor(MasterWeightTensor, codec=Halves):
    """A weight in float32 that products see in float16."""

    def dequantize(self):
        return self.weight.half().to(self.dtype)

    def values(self):
        return self.dequantize()


def layer(rows):
    made = nn.Linear(24, rows, bias=False)
    made.weight = nn.Parameter(HalfTensor(values((rows, 24)), None))
    return made


def check_as_one_process(rank, world_size):
    for rows in (8, 7):
        whole = layer(rows)
        model = copy.deepcopy(whole)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        model.set_force_sum_reduction_for_comms(True)
        x, xs = (values((4 * world_size, 24)).requires_grad_() for _ in range(2))
        own = slice(4 * rank, 4 * rank + 4)
        with recorded_gathers() as seen:
            y, expected = model(xs[own]), whole(x)
            assert torch.equal(y, expected[own])
            y.square().sum().backward()
            expected.square().sum().backward()
        sent = -(-rows // world_size) * 24 * 2
        assert [sum(t.nbytes for t in inputs) for _, inputs in seen] == [sent]
        assert torch.equal(xs.grad[own], x.grad[own])
        found = model.weight.grad.full_tensor() * world_size
        torch.testing.assert_close(found, whole.weight.grad)
        model.unshard()
        assert type(model.weight) is HalfTensor.gathered
        with pytest.raises(NotImplementedError, match="write to the sharded parameter"):
            model.weight.detach().copy_(values((rows, 24)))
    return True


def test_two_processes():
    assert launch(check_as_one_process, 2) == [True, True]


def test_the_gathered_class():
    """It is found where pickles look for it, and is a class of the weight's."""
    kind = HalfTensor.gathered
    assert issubclass(kind, GatheredTensor) and issubclass(kind, HalfTensor)
    assert pickle.loads(pickle.dumps(kind)) is kind and kind.__name__ == "GatheredHalf"


def test_a_base_without_its_codec():
    """A subclass is gathered as its base is, unless it says otherwise."""

    class Same(HalfTensor):
        pass

    class Itself(HalfTensor, codec=None):
        pass

    weight = values((8, 24))
    assert type(as_sent(Same(weight, None))) is HalfTensor.gathered
    itself = Itself(weight, None)
    assert as_sent(itself) is itself


class GatheredThird:
    """Holds the name that the form of a `ThirdTensor` would take."""


def test_a_form_takes_no_name_that_its_module_has():
    with pytest.raises(TypeError, match=r"has a GatheredThird, .* of ThirdTensor takes; rename it"):
        type("ThirdTensor", (MasterWeightTensor,), {"__module__": __name__}, codec=Halves)
