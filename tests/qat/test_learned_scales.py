"""QAT with learned scales: what is trained is what is converted, and gradients are those of the formulas."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowbit import Int8DynamicActivationInt4Weight, IntxWeightOnly, dequantize_, qat
from lowbit.layers.frozen import shown_class
from lowbit.numerics import learned_scales
from lowbit.numerics.granularity import (
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
)
from lowbit.numerics.learned_scales import (
    RATE,
    learned_fake_quantize,
    learns_zero,
    parameters_for,
    qparams,
    rate_of,
)
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor import AffineTensor, FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import (
    LearnedScales,
    is_learned,
)

SPECS = {
    "int4-g32": Spec(Int(4), PerGroup(32)),
    "int4-row": Spec(Int(4), PerRow()),
    "int4-tensor": Spec(Int(4), PerTensor()),
    "int4-blocks": Spec(Int(4), PerBlock(8, 32)),
    "int4-unsigned": Spec(Int(4, signed=False), PerGroup(32)),
    "int4-no-clipping": Spec(Int(4), PerGroup(32), "symmetric_no_clipping_err"),
    "int3-asymmetric": Spec(Int(3), PerGroup(32), "asymmetric"),
    "int2-float-zero": Spec(Int(2), PerGroup(32), "float_zero_point"),
    "int8-row": Spec(Int(8), PerRow()),
    "int8-asymmetric": Spec(Int(8), PerRow(), "asymmetric"),
    "int2-half": Spec(Int(2), PerGroup(32), "half_integer"),
    "int1-half": Spec(Int(1), PerGroup(32), "half_integer"),
    "int4-float16-scales": Spec(Int(4), PerGroup(32), scale_dtype=torch.float16),
    "int4-bfloat16-scales": Spec(Int(4), PerGroup(32), scale_dtype=torch.bfloat16),
    "int4-float16-minimum": Spec(
        Int(4), PerGroup(32), "float_zero_point", scale_dtype=torch.float16
    ),
    "int1-asymmetric": Spec(Int(1), PerGroup(32), "asymmetric"),
    "float8-row": Spec(Float8(), PerRow()),
    "e5m2-tensor": Spec(Float8(torch.float8_e5m2), PerTensor()),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHOSEN = lambda module, name: isinstance(module, nn.Linear | nn.Embedding)  # noqa: E731


@pytest.fixture(params=SPECS, ids=str)
def spec(request):
    return SPECS[request.param]


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(parameters, seed):
    """Parameters as training may leave them: other magnitudes, some negative, one zero."""
    scale, zero = parameters
    scale = scale * values(*scale.shape, seed=seed, dtype=scale.dtype)
    scale.view(-1)[0] = 0
    return scale, None if zero is None else zero + values(*zero.shape, seed=seed, dtype=zero.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_smallest_scales_that_a_search_finds_are_kept(dtype):
    """In float16 they are below its smallest normal number."""
    spec = SPECS["int4-g32"]
    weight = (values(4, 64) * 1e-5).to(dtype)
    found, _ = spec.search_qparams(weight, dtype)
    assert found.abs().min() < 2.0**-14
    assert torch.equal(qparams(spec, *parameters_for(weight, spec, dtype, searched=True))[0], found)


def model(tied=False):
    torch.manual_seed(0)
    found = nn.Sequential(
        nn.Embedding(50, 64), nn.Linear(64, 97), nn.GELU(), nn.Linear(97, 64), nn.Linear(64, 50)
    )
    if tied:
        found[4].weight = found[0].weight
    return found


def tokens(count=7):
    return torch.randint(50, (3, count), generator=torch.Generator().manual_seed(1))


def trained(scheme, tied=False, dtype=torch.float32, steps=4):
    found = model(tied).to(dtype)
    qat.prepare_(found, scheme, CHOSEN, scales="learned")
    optimizer = torch.optim.AdamW(found.parameters(), lr=3e-3, eps=1e-3)
    for _ in range(steps):
        found(tokens()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found.eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("searched", [False, True])
def test_training_starts_at_present_or_searched_scales(spec, dtype, searched):
    w = values(24, 96, dtype=dtype)
    parameters = parameters_for(w, spec, dtype, searched)
    scale, zero_point = qparams(spec, *parameters)
    expected = (
        spec.search_qparams(w, dtype) if searched else spec.choose_qparams(spec.pad(w), dtype)
    )
    if not searched and spec.format.bits <= 3 and spec.mapping.startswith("symmetric"):
        assert not torch.equal(scale, expected[0])  # the next test has those
        return
    if spec.scale_dtype is not None and dtype is torch.bfloat16:
        assert (scale - expected[0]).abs().max() <= expected[0].abs().max() * 2**-8
        return  # the parameters have the dtype of the weight
    assert torch.equal(scale, expected[0])
    if zero_point is not None and not (spec.format.bits == 8 and dtype is not torch.float32):
        assert torch.equal(zero_point, expected[1])
        rounded = spec.dequantize(*spec.quantize(w, qparams=expected), w.shape, dtype)
        assert torch.equal(learned_fake_quantize(w, *parameters, spec), rounded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mapping", ["symmetric", "symmetric_no_clipping_err"])
@pytest.mark.parametrize("fmt", [Int(3), Int(3, signed=False), Int(2)], ids=str)
@pytest.mark.parametrize("size", [96, 67])
def test_training_starts_with_no_value_over_half_a_step_beyond_the_codes(fmt, mapping, dtype, size):
    """Against float64. Groups of which the largest value is negative, positive, and on both sides, and of zeros."""
    spec, w = Spec(fmt, PerGroup(32), mapping), values(9, size, dtype=dtype)
    w[0, :32], w[1, :32] = 0, values(32, dtype=dtype).abs()
    w[2, :2], w[3, :2] = (
        torch.tensor([5.0, -5.0], dtype=dtype),
        torch.tensor([-5.0, 5.0], dtype=dtype),
    )
    scale, zero_point = qparams(spec, *parameters_for(w, spec, dtype, searched=False))
    groups = spec.pad(w).double().view(9, -1, 32)
    ends = groups.amin(2), groups.amax(2)
    largest = torch.where(ends[1] > -ends[0], ends[1], ends[0])  # the negative one of two alike
    low = -(2 ** (fmt.bits - 1))
    other, high = torch.minimum(-ends[0], ends[1]).clamp(min=0), -low - 0.5
    step = torch.maximum(largest.abs() / -low, other / high)
    exact = torch.where(largest > 0, -step, step)
    error = (scale.double() - exact).abs() / step.clamp(min=1e-30)
    eps = torch.finfo(dtype).eps
    assert error[largest != 0].max() <= eps and scale[0, 0] > 0
    steps = groups / scale.double()[..., None]
    assert steps.min() >= low - 0.5 and steps.max() <= high * (1 + eps)
    codes, *_ = spec.quantize(w, qparams=(scale, zero_point))
    codes = codes.int().view(9, -1, 32) - (0 if fmt.signed else -low)
    plain = other * -low < high * largest.abs() * (1 - 4 * eps)  # the largest value gives the step
    own = (groups == largest[..., None]) & plain[..., None]
    assert (codes[own] == low).all() and own.any() and not plain[groups.any(2)].all()
    if size == 96 and dtype is torch.float32:  # a finer step than that of the present scales
        wrong = [
            (spec.dequantize(*spec.quantize(w, qparams=q), w.shape, dtype) - w)[4:].square().sum()
            for q in ((scale, zero_point), spec.choose_qparams(w, dtype))
        ]
        assert wrong[0] < wrong[1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_group_with_nan_or_infinity_starts_at_no_number(bad):
    w = values(2, 64)
    w[0, 3] = bad
    scale, _ = parameters_for(w, Spec(Int(4), PerGroup(32)), torch.float32, searched=False)
    assert not scale[0, 0].isfinite() and scale.flatten()[1:].isfinite().all()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31), name=st.sampled_from(sorted(SPECS)), dtype=st.sampled_from(DTYPES)
)
def test_trained_values_equal_converted_ones(seed, name, dtype):
    """For scales of any sign and size, to the bit; a third of the weights are experts."""
    spec = SPECS[name]
    shape = (3, 8, 70) if seed % 3 == 0 else (8, 70)
    w = values(*shape, seed=seed, dtype=dtype)
    if seed % 5 == 0:
        w[..., 3, :] = 0
    parameters = moved(parameters_for(w, spec, dtype), seed)
    quantizer = LearnedScales(absolute=seed % 2 == 0)
    weight = FakeQuantizedTensor(w, Scheme(spec), quantizer=quantizer)
    converted = weight.frozen_by((*parameters, None))
    assert isinstance(converted, AffineTensor)
    assert torch.equal(weight.quantized_by(*parameters), converted.dequantize())
    assert learned_fake_quantize(w, *parameters, spec).isfinite().all()


def reference_gradients(w, scale, zero, spec, grad):
    """The formulas of `lowbit.numerics.learned_scales`, in float64."""
    low, high = spec.format.quant_min, spec.format.quant_max
    scales, zero_points = qparams(spec, scale, zero)
    sizes = spec.block_size(w.shape)
    n, k = (torch.arange(size) // step for size, step in zip(w.shape, sizes, strict=True))
    block = (n[:, None], k[None, :])  # of each element
    x, s = w.double(), scales.double()
    size = s[block]
    point = torch.zeros(()) if zero_points is None else zero_points.double()[block]
    middle = (int(low) + int(high) + 1) // 2
    if spec.mapping in ("float_zero_point", "half_integer"):
        start = point - (middle - low) * size
        code = torch.round((x - start) / size) + low
        value = start + (code.clamp(low, high) - low) * size
        base = middle - 0.5 if spec.mapping == "half_integer" else middle
    else:
        code = torch.round(x / size) + point
        value = (code.clamp(low, high) - point) * size
        base = 0 if spec.mapping == "asymmetric" else point
    kept = (low <= code) & (code <= high)
    of_scale = grad * torch.where(kept, (value - x) / size, code.clamp(low, high) - base)
    of_zero = torch.where(kept, 0.0, grad)
    sums = [
        torch.zeros_like(s).index_put(block, part.double(), accumulate=True)
        for part in (of_scale, of_zero)
    ]
    return torch.where(kept, grad, 0.0).double(), sums[0] * rate_of(spec), sums[1] * RATE


OF_INTEGERS = [n for n, s in SPECS.items() if isinstance(s.format, Int) and s.scale_dtype is None]


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_gradients(name):
    """Of weight, scale and zero point, within the range and outside of it. They pass the rounding to a `scale_dtype`
    straight through, which the reference does not know."""
    spec = SPECS[name]
    w, grad = values(8, 64, seed=3).requires_grad_(), values(8, 64, seed=4)
    scale, zero = parameters_for(w, spec, torch.float32, searched=True)
    scale, zero = (None if p is None else p * 0.6 for p in (scale, zero))
    expected = reference_gradients(w.detach(), scale, zero, spec, grad.double())
    for p in (scale, zero):
        if p is not None:
            p.requires_grad_()
    assert (zero is not None) == learns_zero(spec)
    learned_fake_quantize(w, scale, zero, spec).backward(grad)
    assert 0 < (expected[0] == 0).sum() < w.numel(), "some clip, some do not"
    for found, right in zip((w, scale, zero), expected, strict=True):
        if found is not None:
            assert (found.grad - right).norm() <= 1e-5 * right.norm().clamp(min=1e-30)


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("plain_path")  # compiled kernels are in test_fast_kernels_are_within_…
def test_a_model_converts_to_what_was_trained(spec, dtype):
    prepared = trained(Scheme(spec), dtype=dtype)
    if spec.shares_rows and spec.granularity != PerTensor():
        assert type(prepared[0].weight) is nn.Parameter  # its rows are looked up singly
    before = prepared(tokens())
    names = [name for name, _ in prepared.named_parameters()]
    assert "1.weight_scale" in names and ("1.weight_zero" in names) == learns_zero(spec)
    qat.convert_(prepared)
    assert shown_class(prepared[1]) is nn.Linear and shown_class(prepared[0]) is nn.Embedding
    assert not any("_scale" in name for name, _ in prepared.named_parameters())
    assert torch.equal(prepared(tokens()), before)


def test_experts_are_rounded_in_parts(spec, monkeypatch):
    """With the same bits, forward and backward, for parts of one expert or of two."""
    found = []
    for part in (2**24, 1, 2 * 24 * 96):
        monkeypatch.setattr(learned_scales, "PART", part)
        w = values(5, 24, 96, seed=3).requires_grad_()
        own = parameters_for(w.detach(), spec, torch.float32)
        own = [None if p is None else (0.6 * p).requires_grad_() for p in own]
        rounded = learned_fake_quantize(w, *own, spec)
        rounded.backward(values(5, 24, 96, seed=4))
        found.append([rounded, w.grad, *(p.grad for p in own if p is not None)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_scales_move_and_stay_exact():
    """Training changes the factors, and by about the learning rate a step."""
    start = model()
    qat.prepare_(start, IntxWeightOnly(4, 32), CHOSEN, scales="learned")
    after = trained(IntxWeightOnly(4, 32), steps=1)
    for name, p in after.named_parameters():
        if name.endswith("_scale"):
            change = (p - dict(start.named_parameters())[name]).abs().max()
            assert 0 < change <= 3.1e-3 + 1e-5 * p.abs().max()


@pytest.mark.parametrize("name", SPECS)
def test_the_end_of_a_range_moves_by_the_learning_rate_at_most(name):
    """By that of weights, whatever the largest code; an input's scale moves by an eighth of it."""
    spec = SPECS[name]
    largest = (spec.format.quant_max - spec.format.quant_min) / 2
    end = rate_of(spec) * largest
    assert (0.7 if largest > 4 else 0) < end < 1.5
    of_input = Spec(Int(8), PerTensor(), static=True)
    assert rate_of(of_input) == RATE == rate_of(SPECS["int4-g32"]) == 1 / 8


def test_tied_weights_share_their_scales():
    prepared = trained(IntxWeightOnly(4, 32), tied=True)
    assert prepared[0].weight is prepared[4].weight
    assert prepared[0].weight_scale is prepared[4].weight_scale
    before = prepared(tokens())
    report = qat.convert_(prepared)
    assert prepared[0].weight is prepared[4].weight and "tied to 0.weight" in str(report)
    assert torch.equal(prepared(tokens()), before)


def test_a_lookup_quantizes_the_same_as_the_whole():
    for name in ("int4-g32", "int3-asymmetric", "int4-row"):
        layer = nn.Embedding(50, 96, padding_idx=3)
        qat.prepare_(
            layer_model := nn.Sequential(layer), Scheme(SPECS[name]), CHOSEN, scales="learned"
        )
        index = torch.tensor([[3, 7, 7], [49, 0, 3]])
        own = layer(index)
        whole = layer.weight.quantized_by(
            *(layer._parameters.get(n) for n in ("weight_scale", "weight_zero"))
        )
        assert torch.equal(own, whole[index])
        grad = values(*own.shape, seed=5)
        names = [n for n, _ in layer_model.named_parameters()]
        found = torch.autograd.grad(own, layer_model.parameters(), grad)
        expected = torch.autograd.grad(whole[index], layer_model.parameters(), grad)
        for n, a, b in zip(names, found, expected, strict=True):
            b = b.clone()
            b[3] = 0  # padding
            torch.testing.assert_close(a, b, msg=n)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        pytest.param(torch.float32, "aot_eager", id="float32"),
        pytest.param(torch.bfloat16, "inductor", id="bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled(dtype, backend):
    prepared = trained(Int8DynamicActivationInt4Weight(32), dtype=dtype)[:2]
    compiled = torch.compile(prepared, fullgraph=True, backend=backend)
    results = []
    for run in (prepared, compiled):
        prepared.zero_grad()
        y = run(tokens())
        y.float().square().mean().backward()
        results.append((y, {n: p.grad for n, p in prepared.named_parameters()}))
    (y, grads), (own, own_grads) = results
    bound = (
        1e-5 if dtype is torch.float32 else 4e-2
    )  # int8 activations: a tie may fall to either side
    assert (own - y).norm() <= bound * y.norm()
    for name, grad in grads.items():
        assert (own_grads[name] - grad).norm() <= 2 * bound * grad.norm().clamp(min=1e-6), name


def test_copies_and_files():
    prepared = trained(Scheme(SPECS["int3-asymmetric"]), tied=True)
    y = prepared(tokens())
    assert torch.equal(copy.deepcopy(prepared)(tokens()), y)
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(tokens()), y)
    with torch.device("meta"):
        empty = model(tied=True)
    qat.prepare_(empty, Scheme(SPECS["int3-asymmetric"]), CHOSEN, scales="learned")
    empty.to_empty(device="cpu")
    empty.load_state_dict(prepared.state_dict())
    empty[4].weight, empty[4].weight_scale, empty[4].weight_zero = (
        getattr(empty[0], n) for n in ("weight", "weight_scale", "weight_zero")
    )
    assert torch.equal(empty.eval()(tokens()), y)


def test_modules_that_multiply_by_themselves_keep_present_scales():
    class Own(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight) * 2

    found = nn.Sequential(Own(32, 32), nn.Linear(32, 32))
    report = qat.prepare_(found, IntxWeightOnly(4, 32), scales="learned")
    assert type(found[0].weight) is FakeQuantizedTensor
    assert is_learned(found[1].weight)
    assert "0.weight" in str(report) and "present scales, as Own multiplies by itself" in str(
        report
    )
    before = found(torch.ones(2, 32))
    qat.convert_(found)
    assert torch.equal(found(torch.ones(2, 32)), before)


def test_errors():
    found = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"scales must be 'present' or 'learned'.*got 'lerned'"):
        qat.prepare_(found, IntxWeightOnly(4, 32), scales="lerned")
    qat.prepare_(found, IntxWeightOnly(4, 32), scales="learned")
    with pytest.raises(ValueError, match="prepared for QAT already"):
        qat.prepare_(found, IntxWeightOnly(4, 32), scales="learned")
    scheme = found[0].weight.scheme
    alone = FakeQuantizedTensor(torch.ones(32, 32), scheme, quantizer=LearnedScales())
    with pytest.raises(NotImplementedError, match="parameters of its module"):
        nn.functional.linear(torch.ones(2, 32), alone)
    with pytest.raises(NotImplementedError, match="parameters of its module"):
        alone.dequantize()
    with torch.no_grad():
        found[0].weight_scale[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"0\.weight_scale has 1 NaN or infinite values of 32"):
        qat.convert_(found)
    assert is_learned(found[0].weight)  # as it was


def test_a_weight_that_its_module_holds_finds_its_scales() -> None:
    layer = nn.Linear(32, 32, bias=False)
    qat.prepare_(model := nn.Sequential(layer), IntxWeightOnly(4, 32), scales="learned")
    x = torch.randn(3, 32)
    y, found = layer(x), nn.functional.linear(x, layer.weight)
    assert torch.equal(found, y)
    assert torch.equal(layer.weight.dequantize(), layer.weight.quantized_by(layer.weight_scale))
    (grad,) = torch.autograd.grad(found.square().sum(), layer.weight_scale)
    (expected,) = torch.autograd.grad(y.square().sum(), layer.weight_scale)
    assert torch.equal(grad, expected)
    values = layer.weight.dequantize()
    dequantize_(model)
    assert torch.equal(layer.weight, values) and not hasattr(layer, "weight_scale")
    assert shown_class(layer) is nn.Linear


def test_switched_off_it_is_the_plain_model():
    plain = model(tied=True)
    prepared = copy.deepcopy(plain)
    qat.prepare_(prepared, Int8DynamicActivationInt4Weight(32), CHOSEN, scales="learned")
    rounded = prepared(tokens())
    with qat.high_precision(prepared):
        y = prepared(tokens())
        y.square().mean().backward()
    expected = plain(tokens())
    expected.square().mean().backward()
    assert torch.equal(y, expected)
    for name, p in plain.named_parameters():
        assert torch.equal(prepared.get_parameter(name).grad, p.grad), name
    qat.enable_(prepared, weights=False)
    assert not torch.equal(prepared(tokens()), rounded)
    qat.enable_(prepared)
    assert torch.equal(prepared(tokens()), rounded)


def test_undone_it_is_plain_again():
    prepared = trained(IntxWeightOnly(4, 32), tied=True)
    weights = {n: p.weight for n, p in prepared.named_parameters() if n.endswith(".weight")}
    qat.undo_(prepared)
    assert shown_class(prepared[1]) is nn.Linear and shown_class(prepared[0]) is nn.Embedding
    assert prepared[0].weight is prepared[4].weight
    names = {n for n, _ in prepared.named_parameters()}
    assert names == {n for n, _ in model(tied=True).named_parameters()}
    for name, expected in weights.items():
        assert torch.equal(prepared.get_parameter(name), expected), name


@pytest.mark.parametrize("shape", [(0,), (), (2, 0), (1,)])
def test_lookups_of_any_shape(shape):
    prepared = nn.Embedding(10, 64)
    qat.prepare_(nn.Sequential(prepared), IntxWeightOnly(2, 32), CHOSEN, scales="learned")
    y = prepared(torch.full(shape, 3))
    assert y.shape == (*shape, 64)
    y.sum().backward()
    assert prepared.weight_scale.grad.shape == (10, 2)
