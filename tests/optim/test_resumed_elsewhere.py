"""A run that resumes with another implementation of the step, which rounds differently, warns."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer, dequantize_state_dict
from lowbit_kernels.runtime import host_compiler, warned
from tests.optim.conftest import needs_compiler
from tests.optim.problems import parameters, run, set_grads

SHAPES = (64, 130), (33,)
CLASSES = {
    "AdamW": (optim.AdamW, {}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
    "Lion": (optim.Lion, {}),
    "AdEMAMix": (optim.AdEMAMix, {}),
    "offloaded": (CPUOffloadOptimizer, {"base_class": optim.AdamW}),
}
every_class = pytest.mark.parametrize("cls,options", CLASSES.values(), ids=CLASSES)
pytestmark = needs_compiler
WARNS = r"the optimizer's step of {} parameters \({}.* is 'eager' now and was 'fused cpu'"


def made(cls=optim.AdamW, **options):
    params = parameters(*SHAPES)
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    return params, cls(named, lr=0.01, **options)


def checkpoint(cls=optim.AdamW, steps=2, **options):
    """The state dict, saved and loaded."""
    params, optimizer = made(cls, **options)
    run(optimizer, params, steps)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def remove_compiler(patch):
    patch.setattr(host_compiler, "compiler", tuple)
    patch.setattr(warned, "_REASONS", {"optimizer: no compiler"})


def silent(optimizer, params, steps=1):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(optimizer, params, steps)


@every_class
def test_a_resume_without_a_compiler_warns_once(cls, options, monkeypatch):
    saved = checkpoint(cls, **options)
    remove_compiler(monkeypatch)
    assert saved._metadata == {"stepped_by": {0: "fused cpu", 1: "fused cpu"}}
    params, optimizer = made(cls, **options)
    optimizer.load_state_dict(saved)
    first = r"layer\.[01]"  # offloaded parameters are updated from the last to the first
    with pytest.warns(UserWarning, match=WARNS.format(2, first)):
        run(optimizer, params, 1)
    silent(optimizer, params, 2)
    now = optimizer.state_dict()._metadata
    assert now == {"stepped_by": {0: "eager", 1: "eager"}}


def test_an_eager_run_that_goes_on_compiled_warns():
    params, optimizer = made()
    optimizer.load_state_dict(checkpoint(fused=False))
    with pytest.warns(UserWarning, match="is 'fused cpu' now and was 'eager'"):
        run(optimizer, params, 1)
    silent(optimizer, params, 2)


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "eager"])
@every_class
def test_a_resume_in_the_same_implementation_is_silent(cls, options, fused):
    params, optimizer = made(cls, fused=fused, **options)
    optimizer.load_state_dict(checkpoint(cls, fused=fused, **options))
    silent(optimizer, params, 2)


def test_a_weight_that_is_not_contiguous_any_more_warns():
    """In the run itself, and after a resume."""
    params, optimizer = made()
    run(optimizer, params, 1)
    params[0].data = params[0].data.t().contiguous().t()
    with pytest.warns(UserWarning, match=WARNS.format(1, r"layer\.0")):
        run(optimizer, params, 1)
    silent(optimizer, params)

    params, optimizer = made()
    params[0].data = params[0].data.t().contiguous().t()
    optimizer.load_state_dict(checkpoint())
    with pytest.warns(UserWarning, match=WARNS.format(1, r"layer\.0")):
        run(optimizer, params, 1)


def test_parameters_that_step_later_are_compared_then():
    params, optimizer = made()
    optimizer.load_state_dict(checkpoint())
    params[0].data = params[0].data.t().contiguous().t()
    set_grads(params, 0)
    params[0].grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    with pytest.warns(UserWarning, match=WARNS.format(1, r"layer\.0")):
        run(optimizer, params, 1)


def test_muons_matrices_have_kernels():
    saved = checkpoint(optim.Muon)
    assert saved._metadata == {"stepped_by": {0: "fused cpu", 1: "fused cpu"}}
    params, optimizer = made(optim.Muon)
    optimizer.load_state_dict(saved)
    silent(optimizer, params, 2)


@pytest.mark.parametrize("metadata", [None, {}, {"stepped_by": 3}, {"stepped_by": {0: 7}}, 5])
def test_state_dicts_without_a_record_load(metadata):
    saved = checkpoint()
    if metadata is None:
        saved = dict(saved)
    else:
        saved._metadata = metadata
    params, optimizer = made(fused=False)
    optimizer.load_state_dict(saved)
    silent(optimizer, params)


def test_the_keys_of_a_state_dict_stay_those_of_torch():
    """torch.optim, older versions and torch.distributed.checkpoint must be able to read it."""
    saved = checkpoint(state="fp32")
    assert set(saved) == {"state", "param_groups"}
    assert "stepped_by" not in saved["param_groups"][0]
    theirs = torch.optim.AdamW(parameters(*SHAPES))
    theirs.load_state_dict(dequantize_state_dict(saved))
    theirs.load_state_dict(saved)
    params, optimizer = made(fused=False)
    optimizer.load_state_dict(theirs.state_dict())
    silent(optimizer, params)


def test_a_copied_state_dict_keeps_the_record():
    _, optimizer = made()
    optimizer.load_state_dict(copy.deepcopy(checkpoint()))
    assert optimizer.state_dict()._metadata == {"stepped_by": {0: "fused cpu", 1: "fused cpu"}}


def test_a_refused_state_dict_keeps_the_record():
    params, optimizer = made()
    run(optimizer, params, 1)
    saved = checkpoint(fused=False)
    saved["state"][0]["step"] = -1
    with pytest.raises(ValueError, match="step must be"):
        optimizer.load_state_dict(saved)
    silent(optimizer, params, 1)


def test_a_parameter_without_gradient_has_no_record():
    params, optimizer = made()
    set_grads(params, 0)
    params[1].grad = None
    optimizer.step()
    assert optimizer.state_dict()._metadata == {"stepped_by": {0: "fused cpu"}}


@pytest.mark.gpu
def test_a_run_from_a_gpu_that_goes_on_elsewhere_warns():
    model = nn.Linear(130, 64, device="cuda")
    optimizer = optim.AdamW8bit(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    saved = optimizer.state_dict()
    assert set(saved._metadata["stepped_by"].values()) == {"fused cuda"}
    other = nn.Linear(130, 64)
    resumed = optim.AdamW8bit(other.parameters())
    resumed.load_state_dict(saved)
    with pytest.warns(UserWarning, match="is 'fused cpu' now and was 'fused cuda'"):
        run(resumed, list(other.parameters()), 1)
