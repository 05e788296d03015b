"""Static scales in copies, state dicts and compiled code, and beside other parts of QAT."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import lowbit
from lowbit import (
    Int8StaticActivationInt8Weight,
    Spec,
    qat,
)
from lowbit.linear.frozen.dequantized import plain_linear
from lowbit.numerics.learned_scales import as_parameters, qparams
from tests.qat.lora_layers import LoraLayer
from tests.qat.test_static import (
    ACTIVATIONS,
    INT4,
    calibrated,
    model,
    over_activations,
    over_scales,
    scheme_of,
    train,
    values,
)


@over_scales
def test_state_dicts_bring_the_scales_back(scales):
    found = calibrated(INT4, scales)
    x = values(5, 64)
    expected = found(x)
    other = model()
    qat.prepare_(other, INT4, scales="learned")  # either form loads into the other
    state = {n: t for n, t in found.state_dict().items() if "weight_" not in n}
    other.load_state_dict(state, strict=False)
    assert other(x).isfinite().all()
    for name in ("0.input_scale", "0.input_zero", "2.input_scale", "2.input_zero"):
        assert torch.equal(other.state_dict()[name], state[name])
    with torch.device("meta"):
        empty = model()
    qat.prepare_(empty, INT4, scales=scales)
    empty.to_empty(device="cpu")
    empty.load_state_dict(found.state_dict())
    assert torch.equal(empty(x), expected)


@over_scales
def test_copies_and_pickles(scales):
    found = calibrated(INT4, scales)
    x = values(5, 64)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(found), read):
        assert torch.equal(other(x), found(x))
        qat.convert_(other)
        assert torch.equal(other(x), found(x))


def test_a_copy_in_the_midst_of_a_calibration():
    """The observer's buffers are in the state dict, so a job that was stopped can go on."""
    found = model()
    qat.prepare_(found, INT4)
    again = copy.deepcopy(found)
    with lowbit.calibrate(found) as ranges:
        found(values(5, 64))
        state = copy.deepcopy(found.state_dict())
        assert state["0.input_observer.batches"] == 1
        found(values(5, 64, seed=1))
    with lowbit.calibrate(again) as others:
        again.load_state_dict(state)
        again(values(5, 64, seed=1))
    assert others == ranges


@over_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_in_other_dtypes(scales, dtype):
    found = train(calibrated(Int8StaticActivationInt8Weight(), scales, dtype)).eval()
    x = values(9, 64, dtype=dtype)
    expected = found(x).float()
    qat.convert_(found)
    y = found(x)
    assert y.dtype is dtype
    bound = 1e-6 if dtype is torch.float32 else 3e-2  # training rounds values to bfloat16
    assert (y.float() - expected).norm() / expected.norm() < bound


@over_scales
@over_activations
def test_a_model_that_is_cast_after_the_calibration(activation, scales):
    """The cast rounds the scale. The converted weight stores the rounded one."""
    found = calibrated(scheme_of(activation), scales).to(torch.bfloat16)[:1]
    x = values(9, 64, dtype=torch.bfloat16)
    expected = found(x)
    qat.convert_(found)
    assert found[0].weight.input_scale.dtype is torch.float32
    assert torch.equal(plain_linear(x, found[0].weight, found[0].bias), expected)


def test_under_autocast():
    found = calibrated(INT4, "learned")
    with torch.autocast("cpu", torch.bfloat16):
        y = found(values(5, 64))
    y.float().square().mean().backward()
    assert y.dtype is torch.bfloat16
    assert found[0].input_scale.grad.isfinite().all()


@pytest.mark.parametrize(
    ("scales", "backend"),
    [
        ("learned", "aot_eager"),
        ("present", "aot_eager"),
        pytest.param("learned", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled(scales, backend):
    """Without a graph break, forward and backward, also during a calibration."""
    found = calibrated(INT4, scales)[:1]
    x = values(6, 64, seed=2)
    plain = copy.deepcopy(found)
    torch._dynamo.reset()
    compiled = torch.compile(found, fullgraph=True, backend=backend)
    y, expected = compiled(x), plain(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(found.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
    with lowbit.calibrate(found) as ranges:
        compiled(x)
    with lowbit.calibrate(plain) as others:
        plain(x)
    assert ranges["0"] == others["0"]
    assert torch.equal(compiled(values(0, 64)), plain(values(0, 64)))


@over_scales
def test_a_call_in_eager_mode_compiles_nothing_anew(scales):
    torch._dynamo.reset()
    m, x = model(), values(8, 64)
    qat.prepare_(m, INT4, scales=scales)
    with lowbit.calibrate(m):
        m(x)
    graphs = CompileCounter()
    compiled = torch.compile(m, backend=graphs)
    compiled(x)
    m(x)
    compiled(x)
    assert graphs.frame_count == 1


def test_no_tokens():
    found = calibrated(INT4, "learned")
    found(values(0, 64)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in found.parameters())


def test_parameters_start_at_the_range():
    """A range gives the scale that the mapping gives a tensor of these values."""
    for spec in ACTIVATIONS.values():
        dynamic = Spec(spec.format, spec.granularity, spec.mapping)
        ends = torch.tensor([-1.7, 2.3])
        expected = dynamic.choose_qparams(ends, torch.float32)
        found = qparams(spec, *as_parameters(spec, *expected))
        assert torch.equal(found[0], expected[0])
        if found[1] is not None:
            assert torch.equal(found[1], expected[1])


# ---- beside the other parts of QAT --------------------------------------------------------------------------------


@over_scales
def test_switched_off_and_undone(scales):
    """Off, outputs are those of the plain model to the bit; undone, it is the plain model."""
    found, plain, x = calibrated(INT4, scales), model(), values(5, 64)
    rounded = found(x)
    with qat.high_precision(found):
        assert torch.equal(found(x), plain(x))
    assert torch.equal(found(x), rounded)
    qat.enable_(found, activations=False)
    assert not torch.equal(found(x), rounded)
    qat.undo_(found)
    assert type(found[0]) is nn.Linear
    assert found.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(found(x), plain(x))


def test_beside_adapters():
    """An input scale belongs to the base layer, so that adapters may stay beside it, and not be merged into it."""
    found = nn.Sequential(LoraLayer(nn.Linear(64, 33)))
    with pytest.raises(NotImplementedError, match=r'static activation.*adapters="keep"'):
        qat.prepare_(found, INT4)
    qat.prepare_(found, INT4, adapters="keep")
    with lowbit.calibrate(found) as ranges:
        found(values(5, 64))
    assert [*ranges] == ["0.base_layer"]
    expected = found(values(5, 64))
    qat.convert_(found)
    assert torch.equal(found(values(5, 64)), expected)
