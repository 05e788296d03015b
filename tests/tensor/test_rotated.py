"""RotatedTensor: weights whose products rotate their inputs, in products, slices, copies and files."""

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
from lowbit.granularity import PerGroup, PerToken
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.tensor.frozen.rotated_tensor import RotatedTable, RotatedTensor, rotated_blocks
from tests.schemes import relative_error
from tests.tensor.cases import FrozenContract, linear_of

ROWS, COLUMNS = 24, 128
_BY_TOKEN = Spec(Int(4), PerToken(), "symmetric_no_clipping_err")
SCHEMES = {
    "int4": Int4WeightOnly(32),
    "int3": IntxWeightOnly(3, 64, "asymmetric"),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
    "w4a4": lb.Scheme(Int4WeightOnly(32).weight, _BY_TOKEN),
    "w4a4-groups": lb.Scheme(
        Int4WeightOnly(32).weight, Spec(Int(4), PerGroup(32), "symmetric_no_clipping_err")
    ),
    "w8a8": lb.Int8DynamicActivationInt8Weight(),
}


def quantized(weight: Tensor, scheme: lb.Scheme | None = None, rotation: int = 64) -> RotatedTensor:
    matrix = AffineTensor.from_float(rotated_blocks(weight, rotation), scheme or Int4WeightOnly(32))
    return RotatedTensor.of_matrix(matrix, rotation)


def make(
    rows: int = ROWS,
    columns: int = COLUMNS,
    dtype: torch.dtype = torch.float32,
    scheme: lb.Scheme | None = None,
    seed: int = 0,
    rotation: int = 64,
) -> RotatedTensor:
    torch.manual_seed(seed)
    return quantized(torch.randn(rows, columns).to(dtype), scheme, rotation)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (7, 192), (1, 64), (0, 64)], ids=str)
def test_values_and_products(shape: tuple[int, int], scheme: lb.Scheme, dtype: torch.dtype) -> None:
    """Against the rotated matrix in float64, and the input that `rounded_input` gives."""
    w = make(*shape, dtype, scheme)
    assert type(w) is (RotatedTable if scheme.weight.format == lb.E2M1 else RotatedTensor)
    bound = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    values = w.dequantize()
    assert values.dtype is dtype
    if shape[0]:
        wide = w.rotated_matrix._with(dtype=torch.float64).dequantize()
        assert relative_error(values, rotated_blocks(wide, 64)) < bound
    x = torch.randn(2, 3, shape[1], dtype=dtype, requires_grad=True)
    bias = torch.randn(shape[0], dtype=dtype, requires_grad=True)
    y = F.linear(x, w, bias)
    wanted = F.linear(w.rounded_input(x.detach()).double(), values.double(), bias.double())
    assert y.shape == wanted.shape
    loose = dtype is torch.bfloat16 and scheme.activation is not None  # a value between two codes
    if shape[0]:
        assert relative_error(y, wanted) < (0.1 if loose else 2 * bound)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, bias], grad)
    assert relative_error(got[0], grad.double() @ values.double()) <= bound or not shape[0]
    torch.testing.assert_close(got[1], grad.sum((0, 1)))


def test_what_the_product_runs() -> None:
    """The rows for the rotated matrix, and one op that rotates and rounds where inputs have fewer than 8 bits."""
    w = make(64, 128, torch.bfloat16)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    assert "rotated_linear" in str(lb.trace(linear_of(w), x))
    ops = torch.ops.lowbit
    assert torch.equal(F.linear(x, w), F.linear(ops.block_hadamard(x, 64), w.rotated_matrix))
    four = make(64, 128, scheme=SCHEMES["w4a4"])
    turned, matrix = four.for_product(x.float())
    assert matrix.activation is None
    assert torch.equal(turned, ops.block_hadamard(x.float(), 64, 4))
    spec = four.activation
    assert spec is not None
    assert torch.equal(turned, spec.fake_quantize(ops.block_hadamard(x.float(), 64)))
    for name in ("w8a8", "w4a4-groups"):
        turned, matrix = make(64, 128, scheme=SCHEMES[name]).for_product(x.float())
        assert matrix.activation is not None
        assert torch.equal(turned, ops.block_hadamard(x.float(), 64))


def test_outliers_of_a_channel_cost_less() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(32, 256), torch.randn(50, 256)
    x[:, 9] *= 60
    exact = x @ weight.T
    errors = []
    for w in (
        AffineTensor.from_float(weight, SCHEMES["w4a4"]),
        quantized(weight, SCHEMES["w4a4"], 128),
    ):
        errors.append(relative_error(F.linear(x, w), exact))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("scheme", [SCHEMES["int4"], SCHEMES["nvfp4"]], ids=["int4", "nvfp4"])
@pytest.mark.filterwarnings("ignore:.* takes new values")
def test_rows_transposes_and_copies(scheme: lb.Scheme) -> None:
    w = make(scheme=scheme)
    values = w.dequantize()
    assert torch.equal(w[3:11].dequantize(), values[3:11]) and isinstance(w[3:11], RotatedTensor)
    torch.testing.assert_close(w[5], values[5])
    assert torch.equal(w.T.dequantize(), values.T)
    x = torch.randn(3, ROWS)
    torch.testing.assert_close(x @ w, x @ values)
    assert torch.equal(torch.cat([w[:8], w[8:]]).dequantize(), values)
    assert torch.equal(w[:, :64].dequantize(), values[:, :64])
    index = torch.tensor([[0, 3], [5, 5]])
    torch.testing.assert_close(F.embedding(index, w), values[index])
    for same in (w.clone(), w.detach(), copy.deepcopy(w), w[:, :]):
        assert type(same) is type(w) and torch.equal(same.dequantize(), values)
    assert w.nbytes_stored() == w.rotated_matrix.nbytes_stored()
    assert "rotated by 64" in w.stored_format()
    again = w.clone()
    again.requantize_(values)
    assert relative_error(again.dequantize(), values) < 1e-6


def test_what_is_refused(tmp_path) -> None:
    w = make()
    for part in (lambda: w[:, :32], lambda: w.T[:32]):
        with pytest.raises(NotImplementedError, match="rotated in blocks of 64"):
            part()
    matrix = w.rotated_matrix
    for rotation in (48, 256, 0, 64.0):
        with pytest.raises(ValueError, match="a power of two that divides the 128 inputs"):
            RotatedTensor.of_matrix(matrix, rotation)
    with pytest.raises(ValueError, match="accepted: an AffineTensor or a TableTensor"):
        RotatedTensor.of_matrix(
            AffineTensor.from_float(torch.randn(8, 64), lb.Float8WeightOnly()), 64
        )
    static = AffineTensor.from_float(
        torch.randn(8, 64), lb.Int8StaticActivationInt8Weight(), None, (torch.ones(1), None)
    )
    with pytest.raises(ValueError, match="no static scale of its rotated input"):
        RotatedTensor.of_matrix(static, 64)
    for name in ("gptq", "compressed-tensors", "awq"):
        with pytest.raises(FormatError, match="Rotated"):
            lb.export(nn.Sequential(linear_of(make(64, 128))), tmp_path / name, format=name)


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
    assert type(found) is type(layer.weight.data) and found.rotation == 64
    x = torch.randn(3, 128)
    assert torch.equal(F.linear(x, found), layer(x))
    other = linear_of(make(64, 128, scheme=scheme, rotation=32))
    with pytest.raises(RuntimeError, match="rotat"):
        other.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("name", ["int4", "mxfp4", "w4a4"])
def test_compiled(name: str) -> None:
    layer = linear_of(make(64, 128, scheme=SCHEMES[name]))
    x = torch.randn(3, 128, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(got, wanted)


class TestContract(FrozenContract):
    def encode(self, weight: Tensor) -> RotatedTensor:
        size = min(weight.shape[1] & -weight.shape[1], 16)
        return quantized(weight, IntxWeightOnly(8, None, "asymmetric"), size)
