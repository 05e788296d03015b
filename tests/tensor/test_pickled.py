"""Pickles of low-bit tensors, also old ones: they load onto any device, and their parts are checked."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

import lowbit as lb
from lowbit.tensor import AffineTensor, TernaryTensor
from lowbit.tensor.core import pickled
from lowbit.tensor.core.pickled import rebuild
from lowbit.tensor.trained.int8_weight import Columns
from tests.tensor.cases import (
    BY_NAME,
    by_class,
    every_case,
    every_trainable,
    same,
)


def saved(content: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return buffer


def loaded(content: Any, **options: Any) -> Any:
    return torch.load(saved(content), weights_only=True, **options)


# ---- map_location ----------------------------------------------------------------------------------------------

LOCATIONS: dict[str, tuple[Any, str]] = {
    "none": (None, "cpu"),
    "str": ("cpu", "cpu"),
    "device": (torch.device("cpu"), "cpu"),
    "meta": ("meta", "meta"),
    "meta device": (torch.device("meta"), "meta"),
    "dict": ({"cpu": "meta"}, "meta"),
    "dict of another": ({"cuda:0": "meta"}, "cpu"),
    "function": (lambda storage, location: storage, "cpu"),
    "function that leaves it": (lambda storage, location: None, "cpu"),
    "function to meta": (
        lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"),
        "meta",
    ),
}


@by_class
@pytest.mark.parametrize("name", LOCATIONS)
@every_case
def test_loaded_with_any_map_location(case, name):
    location, device = LOCATIONS[name]
    t = case.make((7, 101))
    parameter = nn.Parameter(t, requires_grad=case.is_trainable)
    found = loaded({"tensor": t, "parameter": parameter}, map_location=location)
    for one in found.values():
        assert type(one) is case.kind and one.shape == t.shape and one.meta() == t.meta()
        assert one.device.type == device
        assert {part.device.type for part in one.inner_tensors().values()} == {device}
        assert device == "meta" or same(one.detach(), t)
    assert isinstance(found["parameter"], nn.Parameter)
    assert found["parameter"].requires_grad == case.is_trainable


@pytest.mark.parametrize("name", LOCATIONS)
@pytest.mark.parametrize("kind", ["AdamW4bit", "AdamW8bit", "AdamWFp8"])
def test_optimizer_states_loaded_with_any_map_location(kind, name):
    location, device = LOCATIONS[name]
    param = nn.Parameter(torch.randn(64, 128))
    optimizer = getattr(lb.optim, kind)([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = loaded(optimizer.state_dict(), map_location=location)
    for key, value in state["state"][0].items():
        own = optimizer.state[param][key]
        assert type(value) is type(own) and value.device.type == device
        assert device == "meta" or torch.equal(value, own)
    if device == "cpu":
        other = getattr(lb.optim, kind)([param])
        other.load_state_dict(state)
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


@pytest.mark.gpu
@every_case
def test_loaded_onto_a_gpu(case):
    t = case.make((7, 101))
    for location in ("cuda", {"cpu": "cuda:0"}, lambda storage, _: storage.cuda()):
        found = loaded(t, map_location=location)
        assert found.is_cuda and same(found.cpu(), t)
        assert same(loaded(found, map_location=lambda storage, _: storage), t), "as it was read"


def test_parts_that_a_function_sends_to_several_devices_are_refused():
    count = iter(range(10))

    def alternate(storage, location):
        return storage if next(count) % 2 else torch.UntypedStorage(storage.nbytes(), device="meta")

    t = BY_NAME["int4-g32"].make((8, 96))
    with pytest.raises(
        ValueError,
        match=r"scale of the AffineTensor .*is on cpu; expected meta, where the tensor is",
    ):
        loaded(t, map_location=alternate)


# ---- what a pickle keeps ---------------------------------------------------------------------------------------


@every_case
def test_views_attributes_and_shared_memory_are_kept(case):
    t = case.make((24, 96))
    t.note = {"written by": "a user", "step": 3}
    t.extra = torch.arange(3)
    flat = t.view(-1)
    content = {"whole": t, "again": t, "rows": t[8:16], "flat": flat}
    if case.is_transposable:
        content["transposed"] = t.t()
    found = loaded(content)
    for name, view in content.items():
        assert same(found[name], view), name
    assert found["whole"] is found["again"]
    assert found["whole"].note == t.note and torch.equal(found["whole"].extra, t.extra)
    codes = case.kind.tensor_attrs[0]
    start = [getattr(found[name], codes).data_ptr() for name in ("whole", "rows")]
    own = [getattr(content[name], codes).data_ptr() for name in ("whole", "rows")]
    assert start[1] - start[0] == own[1] - own[0], "views go on sharing memory"
    assert same(copy.copy(t), t) and copy.copy(t).note == t.note


@every_trainable
def test_models_pickle_whole(case):
    model = nn.Linear(96, 24)
    model.weight = nn.Parameter(case.make((24, 96)))
    model.tied = model.weight
    for found in (
        torch.load(saved(model), weights_only=False),
        pickle.loads(pickle.dumps(model)),
    ):
        assert [n for n, _ in found.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert found.tied is found.weight and found.weight.requires_grad
        assert same(found.weight.detach(), model.weight.detach())
        x = torch.randn(3, 96)
        assert torch.equal(found(x), model(x))


def cache_key(tensor: Tensor) -> bytes:
    """As torch 2.11 makes the key of a compiled graph: plain tensors by their metadata, others by their pickles."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {FakeTensor: lambda t: (str, (f"{t.shape}{t.dtype}",))}
    pickler.dump(tensor)
    return buffer.getvalue()


@every_case
def test_keys_of_compiled_graphs_depend_on_lowbits_sources(case, monkeypatch):
    weight = case.make((33, 128))
    fake = FakeTensorMode().from_tensor(weight)
    before = cache_key(fake), fake._stable_hash_for_caching(), pickle.dumps(weight)
    assert before[0] == cache_key(fake)
    monkeypatch.setattr(pickled, "_digest_of_sources", lambda kinds: "another version")
    assert cache_key(fake) != before[0] and fake._stable_hash_for_caching() != before[1]
    assert pickle.dumps(weight) == before[2]


def test_hooks_give_a_warning():
    weight = nn.Parameter(BY_NAME["qat-int4-g32"].make((8, 96)))
    weight.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
        loaded(weight)


def test_a_scale_that_was_precomputed_is_not_kept():
    """It belongs to the version of the weight inside, and a loaded weight starts with another version."""
    weight = BY_NAME["train-bitnet"].make((8, 96))
    weight.remember_scale(weight.own_scale())
    assert loaded(weight).known_scale() is None and same(loaded(weight), weight)


def _echo(queue, answers):
    answers.put({name: t.clone() for name, t in queue.get().items()})
    queue.get()  # keeps the memory alive until the other process has mapped it


def test_sent_to_another_process():
    kinds = ("int4-g32-asymmetric", "state-4bit-signed", "qat-int4-g32", "train-int8-weight")
    tensors = {name: BY_NAME[name].make((24, 96)) for name in kinds}
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_echo, args=(queue, answers))
    process.start()
    queue.put(tensors)
    found = answers.get(timeout=60)
    for name, t in tensors.items():
        assert same(found[name], t), name
        assert t.is_shared(), "as torch does with plain tensors"
    queue.put(None)
    process.join(60)
    assert process.exitcode == 0


def test_of_a_data_loaders_workers():
    rows = [BY_NAME["int8-row"].make((2, 32), seed=i) for i in range(4)]
    context = multiprocessing.get_context("fork")
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, num_workers=1, multiprocessing_context=context
    )
    for found, row in zip(loader, rows, strict=True):
        assert same(found, row)


# ---- damaged ---------------------------------------------------------------------------------------------------

AFFINE, BOOK, INT8 = "int4-g32-asymmetric", "state-4bit-signed", "train-int8-weight"
Change = Callable[[Any], None]


def part(name: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda t: setattr(t, name, change(getattr(t, name)))


def attribute(name: str, value: Any) -> Change:
    return lambda t: setattr(t, name, value)


def in_spec(name: str, value: Any, of: str = "format") -> Change:
    """Past the checks of the frozen dataclass, as unpickling goes."""

    def change(t: Any) -> None:
        t.spec = copy.deepcopy(t.spec)
        object.__setattr__(getattr(t.spec, of), name, value)

    return change


def one_row(t: Tensor) -> Tensor:
    return t[:1].clone()


BAD: dict[str, tuple[str, Change, str]] = {
    "codes of one row": (AFFINE, part("codes", one_row), r"codes of shape \(1, 48\), torch.uint8"),
    "codes of a column less": (
        AFFINE,
        part("codes", lambda c: c[:, :-1].clone()),
        r"codes of shape \(8, 47\).* AffineTensor of shape \(8, 96\); expected shape \(8, 48\)",
    ),
    "codes of floats": (AFFINE, part("codes", Tensor.float), r"codes of .*float32.*torch.uint8"),
    "codes with a sign": (AFFINE, part("codes", lambda c: c.view(torch.int8)), "expected .*uint8"),
    "one scale": (AFFINE, part("scale", lambda s: s[:1, :1].clone()), r"scale of shape \(1, 1\)"),
    "scale of integers": (AFFINE, part("scale", Tensor.long), r"scale of torch.int64 .*accepted"),
    "scale of float8": (
        "int4-g32",
        part("scale", lambda s: s.to(torch.float8_e5m2)),
        r"scale of torch.float8_e5m2 does not fit",
    ),
    "no scale": (AFFINE, attribute("scale", None), r"AffineTensor .* has no scale"),
    "no zero point": (AFFINE, attribute("zero_point", None), r"has no zero_point; expected shape"),
    "zero point too many": (
        "int4-g32",
        attribute("zero_point", torch.zeros(8, 3, dtype=torch.int8)),
        r"zero_point of shape \(8, 3\) does not fit .*expected none",
    ),
    "zero point of floats": (AFFINE, part("zero_point", Tensor.float), r"zero_point of .*float32"),
    "codes that are not a tensor": (AFFINE, attribute("codes", [1, 2]), r"codes of .* is a list"),
    "sparse codes": (AFFINE, part("codes", Tensor.to_sparse), r"codes .*sparse_coo.*dense"),
    "expanded codes": (
        AFFINE,
        part("codes", lambda c: c[:1].expand(8, 48)),
        r"codes .*strides \(0, 1\).*memory of its own",
    ),
    "negated scale": (
        AFFINE,
        part("scale", torch._neg_view),
        r"scale .*negated: True",
    ),
    "scale that is a parameter": (AFFINE, part("scale", nn.Parameter), r"scale .*is a Parameter"),
    "codes in low bits": (
        AFFINE,
        part("codes", lambda _: BY_NAME["int8-row"].make((8, 48))),
        r"codes of .* is a AffineTensor",
    ),
    "transposed": (AFFINE, attribute("transposed", 1), r"transposed must be True or False, got 1"),
    "spec": (AFFINE, attribute("spec", "int4"), r"impossible metadata.*must be a Spec"),
    "bits": (AFFINE, in_spec("bits", 99), r"impossible metadata.*1 to 8 bits, got 99"),
    "other bits": (AFFINE, in_spec("bits", 3), r"codes of shape \(8, 48\).*expected shape \(8, 36"),
    "sign": (AFFINE, in_spec("signed", "no"), r"signed must be True or False, got 'no'"),
    "group": (AFFINE, in_spec("group_size", 0, "granularity"), r"group_size .*at least 1, got 0"),
    "another class's format": (
        AFFINE,
        lambda t: setattr(t, "spec", replace(t.spec, format=lb.Float8(), mapping="symmetric")),
        r"does not store Spec.*Float8",
    ),
    "flattened from elsewhere": (
        AFFINE,
        attribute("flat_from", (8, 96)),
        r"was flattened from \(8, 96\), which has other elements",
    ),
    "format of a state": (BOOK, attribute("format", "5bit"), r"'4bit', '8bit', .* got '5bit'"),
    "other format": (BOOK, attribute("format", "8bit"), r"codes of .*expected shape"),
    "signed": (BOOK, attribute("signed", 1), r"signed must be True or False, got 1"),
    "block size": (BOOK, attribute("block_size", 0), r"block_size must be .*got 0"),
    "odd block size": (BOOK, attribute("block_size", 127), r"block_size must be .*got 127"),
    "float block size": (BOOK, attribute("block_size", 128.0), r"block_size .*got 128\.0"),
    "other block size": (BOOK, attribute("block_size", 32), r"CodebookTensor.* scale|scale of"),
    "scale of a state": (BOOK, part("scale", lambda s: s[:1].clone()), r"scale of .*expected"),
    "half a scale": (BOOK, part("scale", Tensor.half), r"scale of .*float16.*float32"),
    "scheme": (INT8, attribute("scheme", lb.BitNet()), r"impossible metadata.*is not Int8Weight"),
    "columns": (INT8, attribute("columns", Columns(0, 50)), r"96 columns that are .*total=50"),
    "columns before the first": (INT8, attribute("columns", Columns(-1, 200)), r"start=-1"),
    "place": (INT8, part("place", one_row), r"place of shape \(1, 1\).*expected shape \(8, 1\)"),
    "weight": ("qat-int4-g32", part("weight", one_row), r"weight of shape \(1, 96\)"),
    "weight of integers": ("qat-int4-g32", part("weight", Tensor.int), r"weight of torch.int32"),
    "scheme of a weight": ("qat-int4-g32", attribute("scheme", None), r"impossible metadata"),
    "matrix": ("train-bitnet", attribute("matrix", ("8", 96)), r"impossible metadata"),
    "codes of ternaries": ("ternary", part("codes", one_row), r"codes of shape \(1, 24\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_parts_that_do_not_fit_are_refused(name):
    which, change, match = BAD[name]
    t = BY_NAME[which].make((8, 96))
    change(t)
    buffer = saved({"w": t})
    with pytest.raises(ValueError, match=match) as error:
        torch.load(buffer, weights_only=True)
    assert type(t).__name__ in str(error.value)


@every_case
def test_every_part_of_every_representation_is_checked(case):
    for name in case.make((8, 96)).inner_tensors():
        for change in (
            lambda p: p[..., :0].clone(),
            lambda p: p[None],
            lambda p: p.to(torch.complex64),
        ):
            t = case.make((8, 96))
            setattr(t, name, change(getattr(t, name)))
            with pytest.raises(ValueError, match=rf"{name} of .*{case.kind.__name__}"):
                loaded(t)


def test_a_pickle_cannot_set_attributes_of_the_class():
    t = BY_NAME[INT8].make((8, 96))
    t.schemes = ()
    with pytest.raises(ValueError, match="the pickled Int8WeightTensor sets 'schemes'"):
        loaded(t)


def test_a_rebuild_of_another_class_is_refused():
    from lowbit.tensor.core.pickled import rebuild

    t = BY_NAME["int8-row"].make((8, 96))
    _, args = t.__reduce_ex__(2)
    assert same(rebuild(*args), t)
    for i, wrong, match in (
        (0, torch.Tensor, "is not a class of low-bit tensors"),
        (0, 3, "is not a class of low-bit tensors"),
        (1, {}, r"has the parts \[\]"),
        (1, {**args[1], "more": t.scale}, r"'more'"),
        (1, {**args[1], "scale": 3}, "scale of the AffineTensor is a int"),
        (2, {"spec": t.spec}, r"the metadata \['spec'\]"),
        (4, "float32", "has the dtype 'float32'"),
        (4, torch.int32, "dtype torch.int32; accepted: floating"),
    ):
        given = list(args)
        given[i] = wrong
        with pytest.raises(ValueError, match=match):
            rebuild(*given)


@pytest.mark.parametrize("name", ["__class__", "data", "grad", "_backward_hooks", "codes", "shape"])
def test_an_attribute_that_changes_the_tensor_is_refused(name):
    t = AffineTensor.from_float(torch.randn(8, 64), lb.Int8WeightOnly())
    others = {name: TernaryTensor if name == "__class__" else torch.ones(2)}
    described = (tuple(t.shape), t.dtype, None, False)
    with pytest.raises(ValueError, match=r"which every such tensor has|does not fit"):
        rebuild(AffineTensor, t.inner_tensors(), t.meta(), *described, others)
