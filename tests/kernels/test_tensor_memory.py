"""What is read about tensors' memory, by the compiled form and in Python, and which changes of states are noticed."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from lowbit.tensor.frozen.codebook_tensor import CodebookTensor
from lowbit_kernels.runtime import host_compiler, tensor_memory
from lowbit_kernels.runtime.tensor_memory import MemoryWatch

pytestmark = pytest.mark.skipif(not host_compiler.compiler(), reason="needs a C++ compiler")

TENSORS = {
    "vector": lambda: torch.ones(6),
    "another vector": lambda: torch.ones(6),
    "bfloat16": lambda: torch.ones(6, dtype=torch.bfloat16),
    "float16": lambda: torch.ones(6, dtype=torch.float16),
    "float8": lambda: torch.ones(6).to(torch.float8_e4m3fn),
    "uint8": lambda: torch.ones(6, dtype=torch.uint8),
    "scalar": lambda: torch.ones((), dtype=torch.float64),
    "matrix": lambda: torch.ones(2, 3),
    "matrix of the other shape": lambda: torch.ones(3, 2),
    "transposed": lambda: torch.ones(3, 2).t(),
    "one column": lambda: torch.ones(4, 3)[:, :1],
    "one row": lambda: torch.ones(4, 3)[1:2],
    "part of a vector": lambda: torch.ones(8)[2:],
    "every other element": lambda: torch.ones(12)[::2],
    "empty": lambda: torch.ones(0, 3),
    "empty, transposed": lambda: torch.ones(0, 3).t(),
    "eight dimensions": lambda: torch.ones(1, 2, 1, 1, 3, 1, 1, 1),
    "parameter": lambda: nn.Parameter(torch.ones(6)),
    "sign turned": lambda: torch._neg_view(torch.ones(6)),
}
UNREADABLE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "nothing": lambda: None,
    "a number": lambda: 1.0,
}


@pytest.fixture(params=["compiled", "in Python"])
def form(request, monkeypatch):
    if request.param == "in Python":
        monkeypatch.setattr(tensor_memory, "_compiled", lambda: None)
    else:
        assert tensor_memory._compiled() is not None


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_read_of_a_tensor(form, name):
    tensor = TENSORS[name]()
    for tensors in ([tensor], [torch.ones(2, 2), tensor], [tensor] * 9):
        found = tensor_memory.read(tensors)
        assert found.numbers().tolist() == [t.data_ptr() for t in tensors]
        assert found.are_contiguous == tensor.is_contiguous()
        assert found == tensor_memory.read(list(tensors))


def test_layouts_differ_by_shape_and_dtype(form):
    made = [make() for make in TENSORS.values()]
    for a, b in itertools.combinations(made, 2):
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (tensor_memory.read([a]).layouts == tensor_memory.read([b]).layouts) == alike


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_has_no_address(form, name):
    assert tensor_memory.read([torch.ones(3), UNREADABLE[name]()]) is None


def test_no_tensors(form):
    assert tensor_memory.read([]).numbers().tolist() == []


def test_a_compiler_that_fails_is_run_once(monkeypatch):
    """Each new plan of a step makes a `MemoryWatch`, and a compiler may take a second to fail."""
    runs = []

    def fail(source):
        runs.append(source)
        raise RuntimeError("the compiler fails")

    cached = [f for f in vars(tensor_memory).values() if hasattr(f, "cache_clear")]
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(host_compiler, "library", fail)
    try:
        for _ in range(3):
            assert tensor_memory.read([torch.ones(3)]) is not None
            with pytest.raises(RuntimeError, match="the compiler fails"):
                MemoryWatch({}, [], (CodebookTensor, CodebookTensor.tensor_attrs))
    finally:
        for function in cached:
            function.cache_clear()
    assert len(runs) == 1


# ---- states ------------------------------------------------------------------------------------------------


def made_state() -> dict:
    return {
        i: {
            "step": torch.zeros((), dtype=torch.float64),
            "momentum": CodebookTensor.zeros((64, 64), "8bit", signed=True),
            "plain": torch.zeros(64, 64),
            "number": 1e9,
        }
        for i in range(3)
    }


def watched(state, is_watched=(True, True, True)):
    around = CodebookTensor, CodebookTensor.tensor_attrs
    made = MemoryWatch(state, list(is_watched), around)
    assert made.holds(state)
    return made


CHANGES = {
    "another tensor": lambda s: s[1].update(plain=torch.zeros(64, 64)),
    "another tensor with codes": lambda s: s[1].update(momentum=s[1]["momentum"].clone()),
    "other codes": lambda s: setattr(s[1]["momentum"], "codes", s[1]["momentum"].codes.clone()),
    "no codes": lambda s: delattr(s[1]["momentum"], "codes"),
    "other memory": lambda s: setattr(s[1]["step"], "data", torch.zeros((), dtype=torch.float64)),
    "other memory of scales": lambda s: s[2]["momentum"].scale.set_(torch.zeros(64, 1)),
    "no memory": lambda s: s[1]["plain"].untyped_storage().resize_(0),
    "one more": lambda s: s[2].update(more=torch.zeros(1)),
    "one less": lambda s: s[2].pop("number"),
    "exchanged": lambda s: s[0].update(plain=s[1]["plain"]),
    "another number": lambda s: s[0].update(number=float("2e9")),
    "no dict": lambda s: s.update({1: None}),
    "more parameters": lambda s: s.update({3: {}}),
    "fewer parameters": lambda s: s.pop(2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_states_is_noticed(name):
    state = made_state()
    kept = dict(state), [dict(own) for own in state.values()], state[1]["momentum"].codes
    watch = watched(state)
    CHANGES[name](state)
    assert not watch.holds(state) and kept


def test_changes_that_do_not_matter():
    state = made_state()
    watch = watched(state, (True, False, True))
    state[1]["plain"] = torch.zeros(3)
    state[0]["step"].add_(1)
    state[0]["momentum"].copy_(torch.ones(64, 64))
    state[2] = dict(state[2])
    assert watch.holds(state)


def test_a_state_that_died_is_noticed_although_its_memory_and_id_may_be_taken_again():
    state = made_state()
    watch = watched(state)
    for own in state.values():
        own["plain"] = None
        own["plain"] = torch.zeros(64, 64)
    assert not watch.holds(state)


def test_nothing_is_kept_alive():
    state = made_state()
    watch = watched(state)
    values = [v for own in state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    gone = [weakref.ref(v) for v in values] + [
        weakref.ref(own["momentum"].codes) for own in state.values()
    ]
    del values
    state.clear()
    gc.collect()
    assert all(ref() is None for ref in gone) and not watch.holds(state)


def test_one_watch_after_another():
    state = made_state()
    for _ in range(3):
        first = watched(state)
        state[0]["step"] = torch.zeros((), dtype=torch.float64)
        assert not first.holds(state)
