"""Products with a quantized weight: values, gradients by name, transposes, grad modes, functional transforms.

The reference is plain PyTorch in float64 on the dequantized weight and, where the scheme says so, on the
dequantized activation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit.tensor import BitNetTensor, CodebookTensor, FakeQuantizedTensor
from lowbit.tensor.frozen.op_arguments import values_by_op
from lowbit.testing import relative_error
from lowbit.testing.autograd import PRODUCTS
from lowbit_kernels.runtime.launches import counted
from tests.schemes import WEIGHT_ONLY
from tests.tensor.cases import (
    CASES,
    by_class,
    every_frozen_weight,
    every_qat,
    every_trainable,
    every_weight,
    inside_range,
    over,
    same_bits,
    values,
)

every_transposable = over([case for case in CASES if case.is_transposable])


def activation_of(case, x):
    """x as the product rounds it."""
    spec = case.activation
    return x if spec is None or x.numel() == 0 else spec.fake_quantize(x)


def operands(case, tokens, n, k):
    weight = case.make((n, k))
    x = values((*tokens, k), 1).requires_grad_()
    bias = values((n,), 2).requires_grad_()
    return x, weight, bias


@every_qat
def test_a_converted_weight_gives_the_same_output_to_the_bit(case):
    for tokens, n, k in PRODUCTS:
        x, weight, bias = operands(case, tokens, n, k)
        frozen = next(c for c in CASES if not c.is_trainable and c.is_weight and c.how == case.how)
        converted = frozen.encode(weight.master())
        assert same_bits(weight.dequantize(), converted.dequantize())
        assert same_bits(F.linear(x, weight, bias), F.linear(x, converted, bias))


@by_class
@every_weight
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_linear_in_the_dtype_of_the_weight(case, dtype):
    weight = case.make((24, 100)).to(dtype)
    x = values((6, 100), 1, dtype).requires_grad_()
    y = F.linear(x, weight)
    y.sum().backward()
    assert y.dtype == dtype and x.grad.dtype == dtype
    reference = F.linear(activation_of(case, x).double(), weight.dequantize().double())
    assert relative_error(y, reference) < 2 * torch.finfo(dtype).eps + 2e-6
    with pytest.raises(ValueError, match=r"float32 input with a weight of dtype.*autocast"):
        F.linear(x.float(), weight)


@every_weight
def test_linear_under_autocast(case):
    weight, x = case.make((24, 100)), values((6, 100), 1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight, values((24,), 2))
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad.dtype is torch.float32
    reference = F.linear(
        activation_of(case, x.bfloat16()).double(),
        weight.dequantize().double(),
        values((24,), 2).double(),
    )
    assert relative_error(y, reference) < 0.02


@every_weight
def test_grad_modes(case):
    x, weight, bias = operands(case, (4,), 24, 100)
    expected = F.linear(x, weight, bias).detach()
    near = 1e-6 if x.dtype is torch.float32 else 0.0  # a CPU's kernel sums in another order
    with torch.no_grad():
        y = F.linear(x, weight, bias)
        assert not y.requires_grad and relative_error(y, expected) <= near
    with torch.inference_mode():
        y = F.linear(x, weight, bias)
        assert y.is_inference() and relative_error(y, expected) <= near
        if case.is_transposable:
            assert relative_error(x @ weight.t() + bias, expected) < 1e-2
        inside = case.make((24, 100))
        assert relative_error(F.linear(x, inside, bias), expected) <= near
        assert same_bits(case.values_of(inside[8:]), case.values_of(weight[8:]))
        assert same_bits(case.values_of(inside.clone()), case.values_of(weight))


@every_frozen_weight
def test_a_frozen_weight_never_asks_for_a_gradient(case):
    weight = case.make((24, 100))
    assert weight.requires_grad_() is weight and not weight.requires_grad
    assert not weight.requires_grad_(False).requires_grad
    parameter = nn.Parameter(weight)
    assert isinstance(parameter, nn.Parameter) and not parameter.requires_grad
    linear = nn.Linear(100, 24, bias=False)
    linear.weight = parameter
    linear.requires_grad_(True)
    assert not linear.weight.requires_grad
    x = values((4, 100), 1).requires_grad_()
    linear(x).sum().backward()
    assert linear.weight.grad is None and x.grad is not None


@every_frozen_weight
def test_a_frozen_weight_forced_to_require_a_gradient_says_what_to_do(case):
    weight = case.make((24, 100))
    with pytest.raises(NotImplementedError, match=r"no gradient.*lowbit\.qat\.prepare_"):
        weight.requires_grad = True
    assert not F.linear(values((4, 100), 1), weight).requires_grad


@every_transposable
def test_matrix_products_with_the_transpose(case):
    weight = case.make((24, 100))
    plain = weight.dequantize().double()
    for tokens in ((6,), (2, 3), ()):
        x = values((*tokens, 100), 1).requires_grad_()
        reference = activation_of(case, x).double() @ plain.t()
        spellings = [lambda x: x @ weight.t(), lambda x: torch.matmul(x, weight.T)]
        if len(tokens) == 1:
            spellings += [
                lambda x: torch.mm(x, weight.t()),
                lambda x: torch.addmm(values((24,), 2), x, weight.t()) - values((24,), 2),
            ]
        for product in spellings:
            x.grad = None
            y = product(x)
            y.sum().backward()
            assert type(y) is torch.Tensor and relative_error(y, reference) < 2e-6
            assert relative_error(x.grad, plain.sum(0).expand(x.shape)) < 2e-6


@every_transposable
def test_a_weight_with_its_inputs_first(case):
    """x @ weight [K, N] rounds x as the linear of the transpose does, in all spellings."""
    weight, bias = case.make((24, 100)), values((100,), 2)
    x = values((6, 24), 1).requires_grad_()
    expected = F.linear(x, weight.t())
    assert (
        relative_error(expected, activation_of(case, x).double() @ weight.dequantize().double())
        < 2e-6
    )
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    for product in (
        lambda: (weight.t() @ x.t()).t(),
        lambda: x @ weight,
        lambda: torch.mm(x, weight),
        lambda: x.view(2, 3, 24).matmul(weight).view(6, 100),
        lambda: torch.addmm(bias, x, weight) - bias,
        lambda: torch.einsum("mk,kn->mn", x, weight),
        lambda: torch.stack([row @ weight for row in x]),
    ):
        y = product()
        assert relative_error(y, expected) < 2e-6
        (own,) = torch.autograd.grad(y.sum(), x)
        assert relative_error(own, gradient) < 2e-6


@every_transposable
def test_operands_that_are_stored_by_columns(case):
    """torch computes their gradients by products whose first operand is the weight."""
    weight = case.make((24, 100))
    for spelled, size in (
        (lambda x: x.t() @ weight.t(), 100),
        (lambda x: x.t() @ weight, 24),
        (lambda x: (weight @ x).t(), 100),
        (lambda x: (weight.t() @ x).t(), 24),
    ):
        x = values((size, 6), 1).requires_grad_()
        plain = weight.dequantize().double()
        plain = plain.t() if size == 100 else plain
        y = spelled(x)
        (own,) = torch.autograd.grad(y.square().sum(), x)
        assert relative_error(y, activation_of(case, x.t()).double() @ plain) < 2e-6
        assert relative_error(own, plain @ (2 * y.double()).t()) < 2e-6


def test_a_trained_bitnet_weight_with_its_inputs_first():
    trained = BitNetTensor(values((24, 96)), lowbit.train.BitNet())
    x = values((6, 24), 1)
    assert relative_error(x @ trained, x @ trained.frozen()) < 1e-6


@every_weight
def test_products_that_are_missing_say_so(case):
    weight, x = case.make((24, 96)), values((24, 24), 1)
    of_values = (  # which trained weights give
        lambda: torch.cdist(weight, values((4, 96), 1)),
        lambda: F.bilinear(x, values((24, 96), 1), case.make((3, 24, 96))),
        lambda: torch.einsum("oi,bi->bo", weight, weight),
        lambda: F.linear(weight, weight),
    )
    for product in (
        lambda: F.conv1d(x, weight),
        *(() if case.is_trainable else of_values),
    ):
        with pytest.raises(NotImplementedError, match=r"dequantize|only the weight may be"):
            product()


@every_weight
def test_linear_with_sizes_that_do_not_fit(case):
    with pytest.raises((ValueError, RuntimeError), match=r"100.*96|96.*100"):
        F.linear(values((5, 100), 1), case.make((24, 96)))
    with pytest.raises((ValueError, RuntimeError)):
        F.linear(values((5, 96), 1), case.make((3, 24, 96)))


@over([case for case in CASES if case.is_weight and "tensor" not in case.name])
def test_experts_of_a_3d_weight_in_products(case):
    weight = case.make((3, 16, 100))
    if case.is_trainable:
        weight.requires_grad_()
    x = values((5, 100), 1).requires_grad_()
    upstream = values((5, 16), 3)
    F.linear(x, weight[1]).backward(upstream)
    alone = case.encode(weight.master()[1] if case.is_trainable else values((3, 16, 100))[1])
    if case.is_trainable:
        alone.requires_grad_()
    twin = x.detach().clone().requires_grad_()
    F.linear(twin, alone).backward(upstream)
    assert same_bits(x.grad, twin.grad)
    if case.is_trainable:
        assert weight.grad.shape == weight.shape
        assert same_bits(weight.grad[1], alone.grad)
        assert not weight.grad[0].any() and not weight.grad[2].any()


@every_weight
def test_embedding_gathers_rows(case):
    table, indices = case.make((24, 100)), torch.tensor([[0, 5, 5], [23, 1, 2]])
    if case.is_trainable:
        table.requires_grad_()
    if case.row_step > 1 and not case.is_trainable:
        with pytest.raises(NotImplementedError, match=r"share scales.*dequantize"):
            F.embedding(indices, table)
        return
    if case.kind is BitNetTensor:
        with pytest.raises(NotImplementedError, match=r"embedding.*no ternary product.*lm_head"):
            F.embedding(indices, table)
        return
    rows = F.embedding(indices, table)
    assert same_bits(rows, table.dequantize()[indices])
    assert F.embedding(indices[:0], table).shape == (0, 3, 100)
    if case.is_trainable:
        upstream = values(rows.shape, 3)
        rows.backward(upstream)
        reference = torch.zeros(24, 100).index_put_((indices,), upstream, accumulate=True)
        reference = torch.where(inside_range(table), reference, 0.0)
        assert relative_error(table.grad, reference) < 1e-6


@every_weight
def test_functional_call_and_torch_func_grad(case):
    """functional_call works; grad over the input works or is refused by name."""
    linear = nn.Linear(100, 24)
    weight = case.make((24, 100))
    x = values((4, 100), 1)
    y = torch.func.functional_call(linear, {"weight": weight}, x)
    assert same_bits(y, F.linear(x, weight, linear.bias))

    def loss(x):
        return torch.func.functional_call(linear, {"weight": weight}, x).square().sum()

    try:
        found = torch.func.grad(loss)(x)
    except RuntimeError as error:
        assert "functorch" in str(error) or "vmap" in str(error), error
        return
    twin = x.clone().requires_grad_()
    loss(twin).backward()
    assert relative_error(found, twin.grad) < 1e-6


def test_a_state_is_no_weight():
    state = CodebookTensor.from_float(values((24, 96)), "8bit", signed=True)
    with pytest.raises(NotImplementedError, match=r"CodebookTensor.*dequantize"):
        F.linear(values((5, 96), 1), state)


def test_gradients_of_a_qat_weight_accumulate_and_step():
    weight = nn.Parameter(FakeQuantizedTensor(values((24, 96)), CASES[0].how))
    before, x = weight.master().clone(), values((5, 96), 1)
    F.linear(x, weight).sum().backward()
    first = weight.grad.clone()
    F.linear(x, weight).sum().backward()
    assert same_bits(weight.grad, 2 * first)
    torch.optim.SGD([weight], lr=0.5).step()
    assert same_bits(weight.master(), before - 0.5 * weight.grad)
    assert isinstance(weight, nn.Parameter) and isinstance(weight, FakeQuantizedTensor)


@every_weight
def test_activation_checkpointing_and_second_derivatives(case):
    x, weight, bias = operands(case, (4,), 24, 100)
    F.linear(x, weight, bias).square().sum().backward()
    expected, x.grad = x.grad, None

    def loss(x):
        return F.linear(x, weight, bias).square().sum()

    checkpoint(loss, x, use_reentrant=False).backward()
    assert same_bits(x.grad, expected)
    if case.name == "train-bitnet-products":
        with pytest.raises(NotImplementedError, match=r"second derivatives.*create_graph"):
            torch.autograd.grad(loss(x), x, create_graph=True)
        return
    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (found,) = torch.autograd.grad(grad.sum(), x)
    plain = weight.dequantize().double()
    assert relative_error(found, (2 * plain.t() @ plain).sum(0).expand(x.shape)) < 2e-6


EVERY_LAYOUT = {
    **WEIGHT_ONLY,
    **{
        f"int{bits}-{mapping}-{granularity}": lowbit.Scheme(
            lowbit.Spec(lowbit.Int(bits), granularity, mapping)
        )
        for bits in (4, 8)
        for mapping in ("symmetric", "symmetric_no_clipping_err", "asymmetric")
        for granularity in (lowbit.PerRow(), lowbit.PerGroup(16), lowbit.PerGroup(24))
    },
    "uint8": lowbit.Scheme(
        lowbit.Spec(lowbit.Int(8, signed=False), lowbit.PerGroup(7), "asymmetric")
    ),
    "float8-e5m2-g20": lowbit.Scheme(
        lowbit.Spec(lowbit.Float8(torch.float8_e5m2), lowbit.PerGroup(20))
    ),
    "float8-blocks": lowbit.Float8WeightOnly(lowbit.PerBlock(4, 24)),
    "float8-tensor": lowbit.Float8WeightOnly(lowbit.PerTensor()),
}


def same_by_the_op(weight: lowbit.AffineTensor) -> bool:
    arguments = weight.op_arguments()
    assert arguments is not None
    expected = weight._dequantized(weight.shape)
    found = values_by_op(weight, arguments)
    return found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("scheme", EVERY_LAYOUT.values(), ids=EVERY_LAYOUT)
def test_the_op_that_dequantizes_on_gpus_gives_the_same_bits(scheme):
    """Weights use the op on a GPU; here it runs on a CPU."""
    for shape in ((7, 100), (3, 5, 64)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            values = torch.randn(shape, dtype=dtype)
            assert same_by_the_op(lowbit.AffineTensor.from_float(values, scheme))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", EVERY_LAYOUT.values(), ids=EVERY_LAYOUT)
def test_dequantize_on_a_gpu_gives_the_bits_of_pytorch(scheme):
    for shape in ((7, 100), (3, 5, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(shape, dtype=dtype, device="cuda")
            weight = lowbit.AffineTensor.from_float(values, scheme)
            assert same_by_the_op(weight)
            with counted() as calls:
                found = weight.dequantize()
            assert calls.total() == 1 and torch.equal(found, weight._dequantized(shape))


# ---- updates between forward and backward --------------------------------------------------------------------------

UPDATES = {
    "copy_": lambda w: w.copy_(values((24, 96), 4)),
    "mul_": lambda w: w.mul_(-2.0),
    "rows": lambda w: w[:16].mul_(-2.0),
    "setitem": lambda w: w.__setitem__(slice(0, 16), values((16, 96), 4)),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w], -2.0),
    "_foreach_copy_": lambda w: torch._foreach_copy_([w], [values((24, 96), 4)]),
    "AdamW, foreach": lambda w: torch.optim.AdamW([w], foreach=True).step(),
    "AdamW, fused": lambda w: torch.optim.AdamW([w], fused=True).step(),
    "AdamW8bit": lambda w: lowbit.optim.AdamW8bit([w]).step(),
}


@by_class
@every_trainable
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_backward_after_an_update_is_refused(case, update):
    """As for a plain weight: backward would read other values than the output saw."""
    weight = torch.nn.Parameter(case.make((24, 96)))
    y = F.linear(values((5, 96), 1).requires_grad_(), weight)
    weight.grad = torch.ones(24, 96)
    with torch.no_grad():
        update(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
