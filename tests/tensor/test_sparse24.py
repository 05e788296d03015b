"""Sparse24Tensor: two of four inputs and their positions, in products, slices, copies and files."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import AffineTensor, Int4WeightOnly, IntxWeightOnly
from lowbit.formats import FormatError
from lowbit.inference.calibration.columns import two_of_four
from lowbit.tensor.frozen.sparse24_tensor import Sparse24Float8, Sparse24Tensor
from tests.schemes import relative_error
from tests.tensor.cases import FrozenContract, linear_of

SCHEMES = {
    "int8": lb.Int8WeightOnly(),
    "int4": IntxWeightOnly(4, 32, "symmetric"),
    "int3": IntxWeightOnly(3, None, "symmetric"),
    "int2": IntxWeightOnly(2, 64, "symmetric"),
    "float8": lb.Float8WeightOnly(),
    "e5m2": lb.Scheme(lb.Spec(lb.Float8(torch.float8_e5m2), lb.PerTensor())),
    "w8a8": lb.Int8DynamicActivationInt8Weight(),
    "f8f8": lb.Float8DynamicActivationFloat8Weight(),
}
ROWS, COLUMNS = 24, 128


def pruned(weight: Tensor) -> Tensor:
    """Two of each four inputs of [..., N, K], the others 0; rows of zeros, and fours with one value alone."""
    padded = F.pad(weight, (0, -weight.shape[-1] % 4))
    kept = two_of_four(padded.abs().flatten(0, -2).T).T.view(padded.shape)
    return padded.where(kept, 0.0)[..., : weight.shape[-1]]


def quantized(weight: Tensor, scheme: lb.Scheme | None = None) -> Sparse24Tensor:
    return Sparse24Tensor.of_dense(
        AffineTensor.from_float(pruned(weight), scheme or SCHEMES["int8"])
    )


def make(
    rows: int = ROWS,
    columns: int = COLUMNS,
    dtype: torch.dtype = torch.float32,
    scheme: lb.Scheme | None = None,
    seed: int = 0,
) -> Sparse24Tensor:
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns).to(dtype)
    weight[rows // 2 :, : columns // 2] = 0
    weight[:, 1::4] = 0
    return quantized(weight, scheme)


def by_hand(w: Sparse24Tensor) -> Tensor:
    """The values, from the bits of the stored rows one by one."""
    bits, columns = w.spec.format.bits, w.spec.padded_shape(w.shape)[-1]
    cut = -(-columns // 4) * bits // 4
    cut += -(-columns // 4) * bits % 4 > 0
    values = torch.zeros(w.shape[0], columns + 3)
    for n, row in enumerate(w.codes):
        stream = int.from_bytes(bytes(row[:cut].tolist()), "little")
        places = int.from_bytes(bytes(row[cut:].tolist()), "little")
        for c in range(2 * -(-columns // 4)):
            four, which = divmod(c, 2)
            position = places >> (4 * four + 2 * which) & 3
            code = torch.tensor([stream >> (c * bits) & (2**bits - 1)], dtype=torch.uint8)
            as_float = code.view(w.spec.format.dtype) if bits == 8 else code + 0.0
            least = 0 if bits == 8 else w.spec.format.quant_min
            values[n, 4 * four + position] = float(as_float) + least
    scale = w.scale.expand(w.shape[0], -1)
    scale = scale.repeat_interleave(columns // scale.shape[1], 1)
    return (values[:, :columns] * scale)[:, : w.shape[1]]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_bits_and_bytes(scheme: lb.Scheme) -> None:
    w = make(6, 72, scheme=scheme)
    ordinary = w.dense
    assert torch.equal(w.dequantize(), by_hand(w)) and torch.equal(
        w.dequantize(), ordinary.dequantize()
    )
    kind = Sparse24Float8 if isinstance(scheme.weight.format, lb.Float8) else Sparse24Tensor
    assert type(w) is kind and type(ordinary) is kind._plain
    bits, columns = scheme.weight.format.bits, scheme.weight.padded_shape((6, 72))[-1]
    assert w.codes.shape == (6, -(-columns // 2 * bits // 8) - (-columns // 8))
    again = Sparse24Tensor.of_dense(ordinary)
    assert torch.equal(again.codes, w.codes)
    if kind is Sparse24Tensor:
        plain = AffineTensor.from_float(w.dequantize(), scheme, (w.scale, None))
        assert torch.equal(plain.codes, ordinary.codes)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (7, 37), (1, 2), (0, 64)], ids=str)
def test_products_are_those_of_the_ordinary_weight(
    shape: tuple[int, int], scheme: lb.Scheme, dtype: torch.dtype
) -> None:
    w = make(*shape, dtype, scheme)
    x = torch.randn(2, 3, shape[1], dtype=dtype, requires_grad=True)
    bias = torch.randn(shape[0], dtype=dtype)
    results = []
    for weight in (w, w.dense):
        y = F.linear(x, weight, bias)
        results.append((y, *torch.autograd.grad(y, [x], torch.ones_like(y))))
    for a, b in zip(*results, strict=True):
        assert a.dtype is dtype and torch.equal(a, b)
    if shape[0]:
        assert "sparse_linear" in str(lb.trace(linear_of(w), x.detach()))


@pytest.mark.parametrize("name", ["int8", "int4", "float8"])
def test_rows_transposes_and_copies(name: str) -> None:
    w = make(scheme=SCHEMES[name])
    values = w.dequantize()
    assert torch.equal(w[3:11].dequantize(), values[3:11]) and isinstance(w[3:11], Sparse24Tensor)
    assert torch.equal(w[5], values[5]) and torch.equal(w.T.dequantize(), values.T)
    x = torch.randn(3, ROWS)
    torch.testing.assert_close(x @ w, x @ values)
    assert torch.equal(torch.cat([w[:8], w[8:]]).dequantize(), values)
    index = torch.tensor([[0, 3], [5, 5]])
    assert torch.equal(F.embedding(index, w), values[index])
    for same in (w.clone(), w.detach(), copy.deepcopy(w), w[:, :], w.T.T):
        assert type(same) is type(w) and torch.equal(same.dequantize(), values)
    assert "2 of 4 inputs" in w.stored_format()
    again = w.clone()
    again.requantize_(values)
    assert torch.equal(again.dequantize(), values)


def test_a_stack_of_experts() -> None:
    torch.manual_seed(0)
    w = quantized(torch.randn(3, 16, 64))
    values = w.dequantize()
    assert torch.equal(w[1].dequantize() if isinstance(w[1], lb.LowbitTensor) else w[1], values[1])
    x = torch.randn(3, 5, 64)
    assert relative_error(torch.bmm(x, w.mT), x.double() @ values.double().mT) < 1e-6


def test_what_is_refused(tmp_path) -> None:
    w = make()
    for part in (lambda: w[:, :32], lambda: w.T[:32], lambda: torch.cat([w, w], 1)):
        with pytest.raises(NotImplementedError, match="values and positions lie apart"):
            part()
    dense = torch.ones(4, 8)
    with pytest.raises(ValueError, match="8 of 8 groups of four inputs hold more than two values"):
        Sparse24Tensor.of_dense(AffineTensor.from_float(dense, IntxWeightOnly(4, 8, "symmetric")))
    again = w.clone()
    with pytest.raises(ValueError, match="more than two"):
        again.requantize_(torch.randn(w.shape))
    assert torch.equal(again.dequantize(), w.dequantize())
    zeros = torch.zeros(4, 32)
    for weight, message in (
        (AffineTensor.from_float(zeros, Int4WeightOnly(32, "asymmetric")), "no zero points"),
        (AffineTensor.from_float(zeros, lb.NVFP4WeightOnly()), "accepted: an AffineTensor"),
        (AffineTensor.from_float(zeros, lb.Int8WeightOnly()).T, "accepted: an AffineTensor"),
    ):
        with pytest.raises(ValueError, match=message):
            Sparse24Tensor.of_dense(weight)
    for name in ("gptq", "compressed-tensors", "awq"):
        with pytest.raises(FormatError, match="Sparse24"):
            lb.export(nn.Sequential(linear_of(make(64, 128))), tmp_path / name, format=name)
    for name, scheme in (
        ("torchao", lb.Float8WeightOnly()),
        ("torchao", lb.MXFP8DynamicActivationMXFP8Weight()),
        ("modelopt", lb.MXFP8DynamicActivationMXFP8Weight()),
    ):
        model = nn.Sequential(linear_of(make(64, 128, scheme=scheme)))
        with pytest.raises(FormatError, match=f"{name} holds no compressed 2:4 weights.*Prune24"):
            lb.export(model, tmp_path / name, format=name)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_files_and_state_dicts(scheme: lb.Scheme, tmp_path) -> None:
    layer = linear_of(make(64, 128, scheme=scheme))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = linear_of(make(64, 128, scheme=scheme, seed=1))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh.weight.dequantize(), layer.weight.dequantize())
    lb.save(layer, tmp_path / "model.safetensors")
    found = lb.load(tmp_path / "model.safetensors")["weight"]
    assert type(found) is type(layer.weight.data)
    x = torch.randn(3, 128)
    assert torch.equal(F.linear(x, found), layer(x))
    ordinary = nn.Sequential(layer)
    lb.dequantize_(ordinary)
    assert torch.equal(ordinary[0].weight, found.dequantize())


class TestContract(FrozenContract):
    def encode(self, weight: Tensor) -> Sparse24Tensor:
        return quantized(weight)
