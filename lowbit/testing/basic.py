"""The contract of every tensor subclass: it is made, printed, copied, moved, and sliced."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lowbit.testing.comparison import inner_tensors, same, same_bits, shares_memory, values
from lowbit.testing.subject import Subject


class BasicContract(Subject):
    """Construction, repr, flattening, detach, clone, deepcopy, dtypes, devices, `copy_`, slices of rows and columns."""

    def test_it_has_the_shape_and_dtype_of_its_values(self) -> None:
        for shape in self.shapes:
            for dtype in self.dtypes:
                t = self.make(shape, dtype=dtype)
                self.check(t)
                assert type(t) is not torch.Tensor and isinstance(t, torch.Tensor)
                assert tuple(t.shape) == shape and t.dtype is dtype and t.is_contiguous()
                plain = t.dequantize()
                assert type(plain) is torch.Tensor, "dequantize() gives a plain tensor"
                assert tuple(plain.shape) == shape and plain.dtype is dtype
                assert bool(plain.isfinite().all())

    def test_repr_names_the_class(self) -> None:
        t = self.make((7, 101))
        for shown in (t, nn.Parameter(t, requires_grad=self.trainable), t.to("meta")):
            assert type(t).__name__ in repr(shown)
            assert str(t) == repr(t)

    def test_flattened_and_put_together_again(self) -> None:
        for shape in self.shapes:
            t = self.make(shape)
            names, context = t.__tensor_flatten__()
            hash(context)  # torch.compile guards on it
            inner = inner_tensors(t)
            assert all(type(part) is torch.Tensor for part in inner.values())
            again = type(t).__tensor_unflatten__(inner, context, t.shape, t.stride())
            assert same(again, t)
            other = self.make(shape, seed=1).__tensor_flatten__()
            assert other == (names, context), "the context must not depend on the values"

    def test_detach_shares_memory_and_clone_does_not(self) -> None:
        for shape in self.shapes:
            t = self.make(shape)
            for alias in (t.detach(), torch.ops.aten.alias(t), t.contiguous()):
                assert same(alias, t) and shares_memory(alias, t)
            clone = t.clone()
            assert same(clone, t) and (t.numel() == 0 or not shares_memory(clone, t))
            assert same(t.clone(memory_format=torch.contiguous_format), t)

    def test_deepcopy_of_a_tensor_and_of_a_parameter(self) -> None:
        t = self.make((7, 101))
        assert same(copy.deepcopy(t), t) and not shares_memory(copy.deepcopy(t), t)
        p = nn.Parameter(t, requires_grad=self.trainable)
        twin = copy.deepcopy(nn.ParameterDict({"a": p, "b": p}))
        assert isinstance(twin["a"], nn.Parameter) and twin["a"] is twin["b"]
        assert same(twin["a"].detach(), t) and twin["a"].requires_grad == self.trainable

    def test_to_another_dtype_changes_the_values_and_no_stored_bit(self) -> None:
        t = self.make((7, 101))
        assert t.to(t.dtype) is t and t.to("cpu") is t
        assert not shares_memory(t.to(t.dtype, copy=True), t)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            low = t.to(dtype)
            assert type(low) is type(t) and low.dtype is dtype and low.dequantize().dtype is dtype
            assert not shares_memory(t.to(dtype, copy=True), t)
            if not self.casts_values:
                continue
            for name, part in inner_tensors(t).items():
                assert same_bits(part, getattr(low, name)), f"{name} changed with the dtype"
            assert same_bits(low.dequantize(), t.dequantize().to(dtype)), "round once, at the end"
            assert same(low.float(), t)

    def test_moved_to_other_devices_and_back(self) -> None:
        """The meta device, and the accelerator where there is one."""
        t = self.make((7, 101))
        meta = t.to("meta")
        assert type(meta) is type(t) and meta.device.type == "meta" and meta.shape == t.shape
        assert all(part.is_meta for part in inner_tensors(meta).values())
        assert meta.__tensor_flatten__() == t.__tensor_flatten__() and meta.dtype == t.dtype
        empty = torch.empty_like(meta, device="cpu")
        assert type(empty) is type(t) and same(empty.copy_(t), t)
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(meta, requires_grad=False))
        module.to_empty(device="cpu")
        weight: Any = module.weight
        assert type(weight.detach()) is type(t) and weight.device.type == "cpu"
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            moved = t.to(device)
            assert moved.device.type == device.type and same(moved.cpu(), t)

    def test_a_copy_from_its_own_kind_is_in_place(self) -> None:
        for shape in self.shapes:
            t, other = self.make(shape), self.make(shape, seed=1)
            addresses = [part.data_ptr() for part in inner_tensors(t).values()]
            assert t.copy_(other) is t and same(t, other)
            assert [part.data_ptr() for part in inner_tensors(t).values()] == addresses

    def test_rows_by_every_call_that_cuts_them(self) -> None:
        t, step = self.make((24, 100)), 8
        full = self.values_of(t)
        pairs = [
            (t.chunk(3), full.chunk(3)),
            (t.split(step), full.split(step)),
            (t.split([step, 0, 24 - step]), full.split([step, 0, 24 - step])),
            (torch.tensor_split(t, (step, 16)), torch.tensor_split(full, (step, 16))),
            ([t[:step], t[-step:], t[24:]], [full[:step], full[-step:], full[24:]]),
            ([t[40:50], t[:], t[0:24, :]], [full[40:50], full, full]),
        ]
        for pieces, expected in pairs:
            for piece, plain in zip(pieces, expected, strict=True):
                self.check(piece)
                assert type(piece) is type(t) and same_bits(self.values_of(piece), plain)

    def test_pieces_of_rows_that_do_not_divide(self) -> None:
        """FSDP2's chunks of 33 rows for 2 processes, of 1 row for 2."""
        for rows in (33, 1) if self.row_step == 1 else ():
            t = self.make((rows, 100))
            for piece, plain in zip(t.chunk(2), self.values_of(t).chunk(2), strict=True):
                assert same_bits(self.values_of(piece), plain)

    def test_a_slice_of_rows_shares_memory(self) -> None:
        """FSDP2 and DCP copy into slices."""
        t = self.make((24, 100))
        assert shares_memory(t[:8], t)
        t[8:16].copy_(self.make((8, 100), seed=1))

    def test_slices_of_columns(self) -> None:
        if not self.column_step:
            return
        t = self.make((24, 4 * self.column_step))
        full = self.values_of(t)
        for start, end in ((0, 1), (1, 3), (3, 4), (0, 4)):
            start, end = start * self.column_step, end * self.column_step
            piece = t[:, start:end]
            self.check(piece)
            assert same_bits(self.values_of(piece), full[:, start:end].contiguous())

    def test_rows_are_joined_again(self) -> None:
        t = self.make((24, 100))
        assert same(torch.cat(t.split([8, 0, 16])), t) and same(torch.cat([t]), t)

    def test_the_source_may_be_strided(self) -> None:
        source = values((101, 24)).t()
        assert not source.is_contiguous()
        assert same(self.encode(source), self.encode(source.contiguous()))
