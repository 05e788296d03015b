"""Operations that torch runs on any tensor: flatten, copy, move, pickle, save, compare, print."""

from __future__ import annotations

import io
import pickle
import re

import pytest
import torch
from torch import nn

from lowbit.numerics.code_range import FLOAT8_DTYPES
from lowbit.tensor import BitNetTensor, MixedPrecisionTensor, joined
from tests import forked
from tests.tensor.cases import (
    BY_NAME,
    CASES,
    SHAPES,
    each_structure,
    every_case,
    every_trainable,
    every_weight,
    same,
    same_bits,
    values,
)

pytestmark = each_structure


@every_case
def test_moved_to_shared_memory(case):
    t = case.make(SHAPES[0])
    before = t.clone()
    assert not t.is_shared()
    assert t.share_memory_() is t and t.is_shared() and same_bits(t, before)
    assert all(part.is_shared() for part in t.inner_tensors().values())
    module = nn.Module()
    module.weight = nn.Parameter(before, requires_grad=False)
    module.share_memory()
    assert module.weight.is_shared() and same_bits(module.weight.detach(), t)


@every_case
def test_to_an_integer_dtype_is_refused(case):
    with pytest.raises(NotImplementedError, match=r"torch\.int32.*floating.*dequantize"):
        case.make((7, 101)).to(torch.int32)


@every_case
def test_a_flattened_view_survives_flattening_into_parts(case):
    """As torch.compile takes tensors apart and makes them again."""
    t = case.make((4, 96))
    flat = t.detach().view(-1)
    names, context = flat.__tensor_flatten__()
    parts = {name: getattr(flat, name) for name in names}
    again = type(flat).__tensor_unflatten__(parts, context, flat.shape, flat.stride())
    assert again.flat_from == flat.flat_from
    assert torch.equal(again.dequantize(), t.dequantize().view(-1))


@every_case
def test_copy_from_values_encodes_them(case):
    for shape in SHAPES:
        t = case.make(shape)
        pointers = [part.data_ptr() for part in t.inner_tensors().values()]
        x = values(shape, 5)
        new = case.encode(x)
        source = x if getattr(t, "signed", True) else x.square()
        for plain in (source, source.double(), source.t().contiguous().t()):
            t.copy_(case.make(shape, seed=3))
            assert t.copy_(plain) is t
            assert same(t, new)
        assert [part.data_ptr() for part in t.inner_tensors().values()] == pointers, "in place"


@every_case
def test_copy_refuses_other_kinds_and_shapes_and_leaves_the_target(case):
    t = case.make((8, 96))
    before = t.clone()
    for stranger in (*case.others, *(c for c in CASES if c.kind is not case.kind)):
        with pytest.raises(ValueError, match=r"stored differently.*dequantize"):
            t.copy_(stranger.make((8, 96)))
    for shape in ((8, 95), (1, 96), (96,)):
        with pytest.raises(ValueError, match="cannot copy shape"):
            t.copy_(torch.zeros(shape))
    assert same(t, before)


@every_case
def test_equal_compares_all_that_is_stored(case):
    t = case.make((8, 96))
    assert torch.equal(t, t.clone())
    assert not torch.equal(t, case.make((8, 96), seed=1))
    assert not torch.equal(t, t[:0]) and not torch.equal(t, t.bfloat16())
    for other in case.others:
        assert not torch.equal(t, other.make((8, 96)))
    stranger = next(c for c in CASES if c.kind is not case.kind).make((8, 96))
    assert torch.equal(t, stranger) is torch.equal(t.dequantize(), stranger.dequantize())


@every_case
def test_equal_compares_values_with_another_class(case):
    t = case.make((8, 96))
    plain = t.dequantize().clone()
    assert torch.equal(t, plain) and torch.equal(plain, t)
    changed = plain.clone()
    changed[-1, -1] += 1
    stranger = next(c for c in CASES if c.kind is not case.kind).make((8, 96), seed=1)
    for other in (changed, plain[:0], plain.bfloat16(), stranger):
        assert not torch.equal(t, other) and not torch.equal(other, t)


@every_case
def test_repr_says_what_it_is_and_shows_no_values(case):
    t = case.make((7, 101))
    text = repr(t)
    assert text.startswith(f"{case.kind.__name__}(shape=(7, 101), dtype=float32, device='cpu'")
    assert "tensor(" not in text and "\n" not in text and len(text) < 400
    for value in t.meta().values():
        assert value is None or repr(value) in text
    assert str(t) == f"{t}" == text
    parameter = nn.Parameter(t, requires_grad=case.is_trainable)
    assert case.kind.__name__ in repr(parameter)
    assert ("requires_grad=True" in repr(parameter)) == case.is_trainable
    assert case.kind.__name__ in repr(t.to("meta"))


@pytest.mark.cover("values")
@every_case
@pytest.mark.parametrize(
    "op",
    [torch.sin, lambda t: t.sort(), lambda t: torch.fft.fft(t), lambda t: torch.cumsum(t, 0)],
    ids=["sin", "sort", "fft", "cumsum"],
)
def test_an_operation_that_is_missing_names_class_operation_and_way_out(case, op):
    """Weights that train lack views alone."""
    with pytest.raises(NotImplementedError) as error:
        (torch.diagonal if case.is_trainable else op)(case.make((8, 96)))
    message = str(error.value)
    assert case.kind.__name__ in message and ".dequantize()" in message
    assert re.search(r"aten\.\w+", message)


@every_trainable
def test_likes_of_a_trainable_weight_are_plain(case):
    """Optimizers make their states, and autograd its gradients, in the image of the weight."""
    t = case.make((7, 101))
    for like in (
        torch.zeros_like(t),
        torch.ones_like(t),
        torch.full_like(t, 2),
    ):
        assert type(like) is torch.Tensor and like.shape == t.shape and like.dtype == t.dtype


@every_case
def test_saved_and_loaded_with_weights_only(case):
    t = case.make((7, 101))
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(t, requires_grad=case.is_trainable))
    saved = {
        "tensor": t,
        "parameter": module.weight,
        "dict": module.state_dict(),
        "view": case.make((24, 100))[8:16],
    }
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert same(loaded["tensor"], t) and same(loaded["view"], saved["view"])
    found = joined(loaded["dict"])["weight"]
    has_plain_state = issubclass(case.kind, MixedPrecisionTensor | BitNetTensor)
    assert same_bits(found, t.master()) if has_plain_state else same(found, t)
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert loaded["parameter"].requires_grad == case.is_trainable
    buffer.seek(0)
    on_meta = torch.load(buffer, weights_only=True, map_location="meta")["tensor"]
    assert on_meta.device.type == "meta" and on_meta.shape == t.shape


def torch_pickles_float8() -> bool:
    """torch 2.13 writes a pickle of a plain float8 tensor that it cannot read (torch.save is fine)."""
    try:
        pickle.loads(pickle.dumps(torch.zeros(1, dtype=torch.float8_e4m3fn)))
    except AttributeError:
        return False
    return True


@every_case
def test_pickled(case):
    parts = case.make((7, 101)).inner_tensors().values()
    if any(t.dtype in FLOAT8_DTYPES for t in parts) and not torch_pickles_float8():
        return
    for t in (case.make((7, 101)), case.make((0, 96)), case.make((7, 101)).bfloat16()):
        assert same(pickle.loads(pickle.dumps(t)), t)


def test_loaded_in_a_fresh_process(tmp_path):
    """In a process that imports no class before torch.load(weights_only=True); test_importing has a bare import."""
    tensors = {name: case.make((7, 101)) for name, case in BY_NAME.items()}
    torch.save(tensors, tmp_path / "tensors.pt")
    code = (
        "import sys, torch, lowbit\n"
        "tensors = torch.load(sys.argv[1], weights_only=True)\n"
        "torch.save({name: t.dequantize() for name, t in tensors.items()}, sys.argv[2])\n"
    )
    files = (tmp_path / "tensors.pt", tmp_path / "values.pt")
    done = forked.run(code, *files, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "values.pt", weights_only=True)
    for name, t in tensors.items():
        assert same_bits(found[name], t.dequantize()), name


@every_weight
def test_concatenated_parameters_read_as_values(case):
    """As `torch.nn.utils.parameters_to_vector` does, for a norm or a flat copy."""
    first, second = (nn.Parameter(case.make((16, 96), seed), False) for seed in (0, 1))
    vector = torch.nn.utils.parameters_to_vector([first, second])
    expected = torch.cat([t.detach().master().reshape(-1) for t in (first, second)])
    assert torch.equal(vector + 0, expected) and torch.equal(vector.norm(), expected.norm())
    assert torch.equal(vector[5:2000] * 1, expected[5:2000])
    with pytest.raises(NotImplementedError, match="which are a copy"):
        vector.zero_()
