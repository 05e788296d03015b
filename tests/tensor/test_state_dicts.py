"""What state dicts hand out of every weight, and what loads from them: plain tensors, of the same memory."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn import functional as F

import lowbit as lb
from lowbit.tensor import LowbitTensor, joined
from lowbit.tensor.core.state_dict import is_ours
from lowbit.testing.serialization import Net, check_equal
from tests.tensor.cases import (
    BY_NAME,
    by_class,
    each_structure,
    every_frozen_weight,
    every_master,
    every_weight,
    named,
    over,
    same,
    same_bits,
    values,
)

pytestmark = each_structure

STORED = [c for c in BY_NAME.values() if c.is_weight and not c.has_master]
"""Those whose state is their inner tensors."""
every_stored = over(STORED)


def names_of(case):
    if case.has_master:
        return ["weight"]
    return [f"weight.{part}" for part in case.make((24, 100)).inner_tensors()]


@every_weight
def test_plain_tensors_of_the_same_memory(case):
    model = Net(case)
    state = model.state_dict()
    names = names_of(case)
    expected = [f"{owner}.{name}" for owner in ("body.up", "tied") for name in names]
    assert list(state) == [*expected[: len(names)], "body.up.bias", *expected[len(names) :]]
    inner = model.stored().inner_tensors()
    for name in names:
        value, tied = state[f"body.up.{name}"], state[f"tied.{name}"]
        part = inner[name.split(".")[-1]]
        assert type(value) is torch.Tensor and same_bits(value, part)
        assert value.data_ptr() == tied.data_ptr() == part.data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert kept["body.up.weight"] is kept["tied.weight"] is model.tied.weight


@every_weight
def test_a_module_that_is_the_root(case):
    layer, other = nn.Linear(100, 24), nn.Linear(100, 24)
    layer.weight = nn.Parameter(case.make((24, 100)))
    other.weight = nn.Parameter(case.make((24, 100), seed=1))
    state = layer.state_dict()
    assert set(state) == {"bias", *names_of(case)}
    other.load_state_dict(state)
    assert same(other.weight.detach(), layer.weight.detach())


@every_stored
def test_described_in_json_and_joined_again(case):
    model = Net(case)
    state = model.state_dict()
    entry = state._metadata["body.up"]["lowbit"]["weight"]
    assert json.loads(json.dumps(entry)) == entry
    assert (entry["kind"], entry["shape"]) == (case.kind.__name__, [24, 100])
    whole = joined(state)
    assert [*whole] == [*(n for n in model.state_dict(keep_vars=True))]
    assert same(whole["tied.weight"], model.stored())
    fresh = nn.Linear(100, 24, bias=False)
    fresh.load_state_dict({"weight": whole["tied.weight"]}, assign=True)
    assert same(fresh.weight.detach(), model.stored())


@pytest.mark.cover("values")
@every_weight
def test_lowbit_save_describes_what_a_state_dict_describes(case, tmp_path):
    model, files = Net(case), [tmp_path / f"{name}.safetensors" for name in ("model", "state")]
    lb.save(model, files[0])
    lb.save(model.state_dict(), files[1])
    first, second = (lb.load(file) for file in files)
    assert [*first] == [*second] and first["tied.weight"] is first["body.up.weight"]
    if case.kind.is_described:
        assert same(first["tied.weight"], model.stored())
        assert same(second["tied.weight"], model.stored())
    else:
        assert same_bits(second["tied.weight"], model.stored().master())


@every_stored
def test_what_does_not_fit_is_told_by_name_and_changes_nothing(case):
    model, source = (nn.Sequential(nn.Linear(100, 24)) for _ in range(2))
    for seed, m in enumerate((source, model)):
        m[0].weight = nn.Parameter(case.make((24, 100), seed))
    before = copy.deepcopy(model[0].weight.detach())

    def refused(state, match, **options):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=match):
                model.load_state_dict(dict(state), assign=assign, **options)
            assert same(model[0].weight.detach(), before)

    state = source.state_dict()
    codes, scale = state["0.weight.codes"], state["0.weight.scale"]
    lacking = {name: t for name, t in state.items() if name != "0.weight.codes"}
    for strict in (True, False):
        refused(lacking, r"0\.weight has scale.* and lacks codes", strict=strict)
    mismatch = r"size mismatch for 0\.weight\.codes: it is .*, expected .*the model has"
    refused({**state, "0.weight.codes": codes[:, 1:]}, mismatch)
    refused({**state, "0.weight.codes": codes.float()}, r"0\.weight\.codes: it is .*torch\.float32")
    refused({**state, "0.weight.scale": scale.long()}, r"0\.weight\.scale: it is .*torch\.int64")
    refused({**state, "0.weight.scale": 1.0}, r"0\.weight\.scale is 1\.0; accepted: a plain tensor")
    refused({**state, "0.weight.codes": codes.to("meta")}, r"scale is on cpu, .*codes on meta")
    whole = {**state, "0.weight": torch.zeros(24, 100)}
    refused(whole, r"0\.weight is given whole and in parts")


@by_class
@every_weight
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_functions_of_torch_give_and_take_the_same(case, full, strict):
    source, model = Net(case), Net(case, seed=1)
    for offloaded in (False, True):
        options = StateDictOptions(full_state_dict=full, strict=strict, cpu_offload=offloaded)
        state = get_model_state_dict(source, options=options)
        assert list(state) == list(source.state_dict())
        assert all(same_bits(t, state[name]) for name, t in source.state_dict().items())
        found = set_model_state_dict(model, state, options=options)
        assert not found.missing_keys and not found.unexpected_keys
        check_equal(model, source)
        model = Net(case, seed=2)
        parameters = source.named_parameters(remove_duplicate=False)
        set_model_state_dict(model, dict(parameters), options=options)
        assert same(model.stored(), source.stored())
        model = Net(case, seed=3)


@pytest.mark.cover("values")
@every_weight
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_a_compiled_model_loads_what_torch_names_for_it(case, wrapped_first):
    source = Net(case)
    model = nn.ModuleDict({"up": nn.Linear(100, 24)})
    compiled = torch.compile(model) if wrapped_first else None
    model["up"].weight = nn.Parameter(case.make((24, 100), 1))
    compiled = compiled or torch.compile(model)
    state = source.body.state_dict()
    set_model_state_dict(compiled, dict(state), options=StateDictOptions(strict=False))
    assert all(same_bits(t, state[name]) for name, t in model.state_dict().items())


@every_stored
def test_keys_without_the_wrappers_name_are_not_loaded_by_half(case):
    model = nn.ModuleDict({"up": nn.Linear(100, 24)})
    model["up"].weight = nn.Parameter(case.make((24, 100), 1))
    before = copy.deepcopy(model.state_dict())
    found = torch.compile(model).load_state_dict(Net(case).body.state_dict(), strict=False)
    assert set(before) <= {name.removeprefix("_orig_mod.") for name in found.missing_keys}
    assert all(same_bits(t, before[name]) for name, t in model.state_dict().items())


def test_only_a_state_dict_is_joined():
    with pytest.raises(TypeError, match="joined takes a module's state dict, got NoneType"):
        lb.tensor.joined(None)


@every_stored
def test_scales_of_another_dtype_are_not_rounded_in_silence(case):
    if case.make((2, 96), dtype=torch.bfloat16).scale.dtype is case.make((2, 96)).scale.dtype:
        return  # always in one dtype
    model, state = nn.Linear(100, 24, bias=False), {}
    model.weight = nn.Parameter(case.make((24, 100), seed=1).detach())
    other = nn.Linear(100, 24, bias=False)
    other.weight = nn.Parameter(case.make((24, 100), dtype=torch.bfloat16))
    state = dict(other.state_dict())
    with pytest.raises(
        RuntimeError, match=r"weight\.scale: it is .*torch\.bfloat16, expected .*torch\.float32"
    ):
        model.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    assert same_bits(model.weight.scale, other.weight.scale)


@every_stored
def test_what_is_missing_is_named_as_it_would_be_handed_out(case):
    model = Net(case, seed=1)
    before, parameter = copy.deepcopy(model.stored()), model.tied.weight
    names = {f"{owner}.{name}" for owner in ("body.up", "tied") for name in names_of(case)}
    with pytest.raises(RuntimeError, match=r"Missing key.*tied\.weight\.codes"):
        model.load_state_dict({})
    for assign in (False, True):
        state = {"body.up.bias": torch.ones(24)}
        found = model.load_state_dict(state, strict=False, assign=assign)
        assert set(found.missing_keys) == names and not found.unexpected_keys
        assert same(model.stored(), before) and model.tied.weight is parameter
    assert torch.equal(model.body["up"].bias, torch.ones(24))


@every_stored
def test_a_model_that_was_not_prepared_says_so(case):
    plain = nn.Linear(100, 24, bias=False)
    before = plain.weight.detach().clone()
    layer = nn.Linear(100, 24, bias=False)
    layer.weight = nn.Parameter(case.make((24, 100)))
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"weight".*Unexpected.*"weight\.codes"'):
        plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, before)


def test_another_scheme_is_refused_by_what_the_state_dict_says_of_itself():
    """Where the parts alone would fit: only the activation differs, which the model's own scheme decides."""
    models = [nn.Sequential(nn.Linear(64, 8)) for _ in range(2)]
    for model, scheme in zip(
        models, (lb.Int8WeightOnly(), lb.Int8DynamicActivationInt8Weight()), strict=True
    ):
        lb.quantize_(model, scheme)
    before = copy.deepcopy(models[1][0].weight)
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"0\.weight is .* stored differently"):
            models[1].load_state_dict(models[0].state_dict(), assign=assign)
        assert torch.equal(models[1][0].weight, before)
    models[1].load_state_dict(joined(models[0].state_dict()), assign=True)
    assert models[1][0].weight.activation is None


def test_another_group_size_is_refused_by_name():
    models = [nn.Sequential(nn.Linear(64, 8)) for _ in range(2)]
    for model, group in zip(models, (16, 32), strict=True):
        lb.quantize_(model, lb.Int4WeightOnly(group))
    state = models[0].state_dict()
    with pytest.raises(
        RuntimeError, match=r"PerGroup\(.*16.*\).*PerGroup\(.*32.*stored differently"
    ):
        models[1].load_state_dict(state)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for 0\.weight\.scale: .*\(8, 4\).*\(8, 2\)"
    ):
        models[1].load_state_dict(dict(state))  # which no longer says what it is


@pytest.mark.parametrize("entry", [{"kind": "Foo"}, {"kind": "AffineTensor"}, {}], ids=str)
def test_a_description_that_cannot_be_read(entry):
    model = nn.Linear(64, 8)
    lb.quantize_(model, lb.Int8WeightOnly())
    state = model.state_dict()
    state._metadata[""]["lowbit"]["weight"] = entry
    with pytest.raises(RuntimeError, match=r"weight is described as .*cannot read"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match="weight is described as"):
        joined(state)


@every_stored
def test_whole_tensors_still_load(case):
    model, source = Net(case, seed=1), Net(case)
    state = joined(source.state_dict())
    assert isinstance(state["tied.weight"], LowbitTensor)
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        assert same(model.stored(), source.stored())


@every_weight
def test_on_meta(case):
    source = Net(case)
    model = copy.deepcopy(source).to("meta")
    model.load_state_dict(source.state_dict(), assign=True)
    assert same(model.stored(), source.stored())


@every_master
@pytest.mark.parametrize("assign", [False, True])
def test_high_precision_weights_pass_between_prepared_and_plain(case, assign):
    model, plain = Net(case), nn.Linear(100, 24, bias=False)
    plain.load_state_dict({"weight": model.state_dict()["tied.weight"]}, assign=assign)
    assert type(plain.weight) is nn.Parameter and same_bits(
        plain.weight.detach(), model.stored().master()
    )
    model.tied.load_state_dict({"weight": values((24, 100), 9)}, assign=assign)
    assert type(model.tied.weight.detach()) is case.kind
    assert same_bits(model.tied.weight.detach().master(), values((24, 100), 9))


@every_frozen_weight
def test_hooks_come_and_go_with_the_parameter(case):
    layer = nn.Linear(100, 24)
    assert not layer._state_dict_hooks
    layer.weight = nn.Parameter(case.make((24, 100)))
    layer.weight = nn.Parameter(case.make((24, 100), 1))
    assert len(layer._state_dict_hooks) == len(layer._load_state_dict_pre_hooks) == 1
    assert all(is_ours(hook) for hook in layer._state_dict_hooks.values())
    layer.bias = nn.Parameter(torch.zeros(24))
    assert layer._state_dict_hooks
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert set(twin.state_dict()) == set(layer.state_dict()) != {"weight", "bias"}
        twin.load_state_dict(layer.state_dict())
    layer.weight = nn.Parameter(torch.zeros(24, 100))
    assert not layer._state_dict_hooks and not layer._load_state_dict_pre_hooks
    assert set(layer.state_dict()) == {"weight", "bias"}


@over(named("int4-g32", "qat-int4-g32", "train-int8-weight"))
def test_by_assignment_into_a_float_model_and_back(case):
    layer = nn.Linear(100, 24, bias=False)
    layer.load_state_dict({"weight": case.make((24, 100))}, assign=True)
    assert set(layer.state_dict()) == set(names_of(case))
    other = nn.Linear(100, 24, bias=False)
    other.weight = nn.Parameter(case.make((24, 100), 1))
    other.load_state_dict(layer.state_dict())
    assert same(other.weight.detach(), layer.weight.detach())


@over(named("int4-g32", "qat-int4-g32", "train-int8-weight"))
def test_compiled_and_swapped_modules(case):
    model, source = Net(case, 1), Net(case)
    compiled = torch.compile(model)
    assert all(name.startswith("_orig_mod.") for name in compiled.state_dict())
    compiled.load_state_dict(torch.compile(source).state_dict())
    check_equal(model, source)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        other = Net(case, 1)
        other.load_state_dict(source.state_dict())
        assert same(other.stored(), source.stored())
        found = other.load_state_dict({}, strict=False)
        assert len(found.missing_keys) == len(source.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_functional_calls_take_the_parameters():
    model = Net(BY_NAME["int8-row"])
    x = values((3, 100), 1)
    found = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    assert same_bits(found, model(x))
    y = F.linear(x, joined(model.state_dict())["tied.weight"])
    assert same_bits(y, model.tied(x))


def test_plain_values_that_replace_low_bit_weights_are_told_of():
    model = nn.Sequential(nn.Linear(64, 32))
    lb.quantize_(model, lb.Int8WeightOnly())
    with pytest.warns(
        UserWarning, match=r"plain tensors in place of low-bit weights, such as 0\.weight"
    ):
        model.load_state_dict(nn.Sequential(nn.Linear(64, 32)).state_dict(), assign=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_would_spoil_a_block_are_refused(bad):
    model, plain = (nn.Sequential(nn.Linear(64, 32)) for _ in range(2))
    lb.quantize_(model, lb.Int4WeightOnly(32))
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        plain[0].weight[0, 0] = bad
    with pytest.raises(RuntimeError, match="1 NaN or infinite values of 2048 cannot be written"):
        model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight.detach(), before)
