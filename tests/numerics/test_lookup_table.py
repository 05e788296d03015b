"""Lookup tables and their scale formats: against tables written by hand, and the formulas of their sources."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import qat
from lowbit.numerics.affine import quantize_affine
from lowbit.numerics.lookup_table import DYNAMIC8
from lowbit.numerics.packing import unpack
from lowbit.numerics.scale_format import SCALE_FORMATS, absmax_of_rows, flat_absmax
from tests.schemes import relative_error

INF = math.inf
PRESETS = {
    "nf4": lb.NF4WeightOnly(),
    "nf4-double": lb.NF4WeightOnly(double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
}
every_preset = pytest.mark.parametrize("scheme", list(PRESETS.values()), ids=list(PRESETS))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- tables -----------------------------------------------------------------------------------------------------


def test_nf4_values_are_quantiles() -> None:
    """Eight positive and seven negative quantiles of a normal distribution around 0 (QLoRA, section 3), to 1e-6.
    tests/integrations compares the bits with those of bitsandbytes."""

    def quantiles(count: int) -> Tensor:
        return torch.special.ndtri(torch.linspace(0.9677083, 0.5, count, dtype=torch.float64)[:-1])

    expected = torch.cat([quantiles(9), torch.zeros(1), -quantiles(8)]).sort().values
    expected = expected / expected.max()
    assert torch.allclose(torch.tensor(lb.NF4.values).double(), expected, rtol=0, atol=1e-6)


def test_e2m1_by_its_fields() -> None:
    """Sign, two bits of exponent with bias 1, one bit of mantissa (OCP Microscaling Formats v1.0)."""
    for code, value in enumerate(lb.E2M1.values):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert value == (-1) ** sign * magnitude
        assert math.copysign(1, value) == (-1) ** sign


def test_e2m1_rounds_to_nearest_even_and_keeps_the_sign_of_zero() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(lb.E2M1.nearest(ties), even)
    assert torch.equal(lb.E2M1.nearest(-ties), -even)
    up, down = torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)
    assert torch.equal(lb.E2M1.nearest(up), torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]))
    assert torch.equal(lb.E2M1.nearest(down), torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]))
    small = lb.E2M1.nearest(torch.tensor([-0.1, 0.1, -0.0, 0.0]))
    assert small.signbit().tolist() == [True, False, True, False]
    assert lb.E2M1.codes(small).tolist() == [8, 0, 8, 0]
    assert lb.E2M1.nearest(torch.tensor([-INF, 1e9])).tolist() == [-6.0, 6.0]


def test_a_tie_of_nf4_takes_the_smaller_value() -> None:
    table = lb.LookupTable((-1.0, -0.5, 0.0, 1.0))
    assert table.nearest(torch.tensor([-0.75, -0.25, 0.5])).tolist() == [-1.0, -0.5, 0.0]


@pytest.mark.parametrize("table", [lb.NF4, lb.E2M1, DYNAMIC8], ids=repr)
def test_every_value_is_its_own_nearest_and_has_its_code(table: lb.LookupTable) -> None:
    own = torch.tensor(table.values)
    assert torch.equal(table.nearest(own).view(torch.int32), own.view(torch.int32))
    codes = table.codes(own)
    assert torch.equal(codes, torch.arange(len(own), dtype=torch.uint8))
    x = normal(1000) * table.largest / 2
    expected = (x.double()[:, None] - own.double()).abs().amin(1)
    assert torch.equal((table.nearest(x).double() - x.double()).abs(), expected)


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32, 128, 256])
@pytest.mark.parametrize("columns", [1, 7, 32])
def test_tables_of_any_width(count: int, columns: int) -> None:
    table = lb.LookupTable(tuple(math.sin(i * 1.7) for i in range(count)))
    scheme = lb.Scheme(lb.Spec(table, lb.PerRow()))
    w = normal(3, columns)
    t = lb.AffineTensor.from_float(w, scheme)
    values = torch.tensor(table.values)
    scale = w.abs().amax(1, keepdim=True) / table.largest
    distance = ((w / scale).unsqueeze(-1) - values).abs()
    assert torch.allclose(t.dequantize(), values[distance.argmin(-1)] * scale)
    assert lb.Scheme.from_dict(scheme.to_dict()) == scheme


@pytest.mark.parametrize(
    "values, message",
    [
        ((1.0, 2.0, -1.0), "2, 4, 8, … or 256 values, got 3"),
        ((0.0, 0.0), "differ in float32"),
        ((0.0, math.nan), "finite"),
        ((0.0, INF), "finite"),
        ((1.0, 1.0 + 1e-12), "differ in float32"),
        ((1.0, 2.0), "above zero and others"),
        ((-1.0, -2.0), "above zero and others"),
    ],
)
def test_impossible_tables_are_refused(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        lb.LookupTable(values)


def test_the_operators() -> None:
    x, values = normal(5, 8), list(lb.E2M1.values)
    torch.library.opcheck(torch.ops.lowbit.table_nearest, (x, values, True))
    torch.library.opcheck(torch.ops.lowbit.table_codes, (lb.E2M1.nearest(x), values))
    packed = torch.arange(20, dtype=torch.uint8).view(5, 4)
    torch.library.opcheck(torch.ops.lowbit.table_values, (packed, values, 7))


# ---- scale formats ------------------------------------------------------------------------------------------------


def test_codes_are_packed_with_even_k_in_the_low_nibble() -> None:
    w = torch.tensor([[6.0, -6.0, 0.5, -0.5] * 8])
    t = lb.AffineTensor.from_float(w, lb.MXFP4WeightOnly())
    assert t.codes.tolist() == [[0xF7, 0x91] * 8] and t.scale.tolist() == [[127]]
    assert torch.equal(t.dequantize(), w)


@pytest.mark.parametrize(
    "largest, floor, unclipped",
    [
        *((4.0, 0, 0), (6.0, 0, 0), (6.99, 0, 0), (7.0, 0, 1), (7.99, 0, 1), (8.0, 1, 1)),
        *((1.0, -2, -2), (3.0 * 2.0**-60, -61, -61), (2.0**127, 125, 125)),
        *((0.0, -126, -126), (2.0**-130, -126, -126)),
    ],
)
def test_e8m0_exponents(largest: float, floor: int, unclipped: int) -> None:
    w = torch.zeros(1, 32)
    w[0, 3] = -largest
    for mapping, exponent in (("symmetric", floor), ("symmetric_no_clipping_err", unclipped)):
        t = lb.AffineTensor.from_float(w, lb.MXFP4WeightOnly(mapping))
        assert t.scale.item() == exponent + 127
        assert t.scale_values().item() == 2.0**exponent
        assert t.dequantize().isfinite().all()


def test_every_e8m0_byte_is_decoded() -> None:
    codes = torch.arange(256).to(torch.uint8)
    scale = SCALE_FORMATS["e8m0"].decode({"scale": codes})
    expected = torch.tensor([2.0 ** (i - 127) for i in range(255)], dtype=torch.float64)
    assert torch.equal(scale[:255].double(), expected) and scale[255].isnan()
    assert torch.equal(SCALE_FORMATS["e8m0"].bytes_of(scale), codes)


def test_nvfp4_by_hand() -> None:
    w = torch.zeros(2, 32)
    w[0, :16], w[0, 16:], w[1, :16] = 12.0, -0.75, 3.0
    t = lb.AffineTensor.from_float(w, lb.NVFP4WeightOnly())
    assert t.global_scale.item() == 448 * 6 / 12
    assert t.scale.float().tolist() == [[448.0, 28.0], [112.0, 2.0**-9]]
    assert torch.equal(t.dequantize(), w)


def test_a_matrix_of_zeros_has_a_global_scale_of_one() -> None:
    t = lb.AffineTensor.from_float(torch.zeros(4, 32), lb.NVFP4WeightOnly())
    assert t.global_scale.item() == 1 and not t.dequantize().any()


@every_preset
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zeros_huge_and_tiny_values(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    assert (
        not lb.AffineTensor.from_float(torch.zeros(4, 64, dtype=dtype), scheme).dequantize().any()
    )
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for size in (largest / 4, largest / 2**10, 1e-4, 1e-3):
        w = torch.linspace(-1, 1, 256).view(4, 64).to(dtype) * size
        found = lb.AffineTensor.from_float(w, scheme).dequantize()
        assert found.isfinite().all(), size
        assert relative_error(found, w) < 0.15, size


@every_preset
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_block_with_nan_or_infinity_is_not_made_finite(scheme: lb.Scheme, bad: float) -> None:
    w = normal(4, 128)
    w[1, 5] = bad
    found = scheme.weight.fake_quantize(w)
    assert not found[1, 5].isfinite()
    if not scheme.weight.shares_rows:
        assert found[[0, 2, 3]].isfinite().all()


@every_preset
def test_bits_a_weight(scheme: lb.Scheme) -> None:
    expected = {"float": 4.5, "e8m0": 4.25, "e4m3": 4.5, "double": 4.125}[
        scheme.weight.scale_format
    ]
    t = lb.AffineTensor.from_float(torch.zeros(256, 16384), scheme)
    assert 8 * t.nbytes_stored() / t.numel() == pytest.approx(expected, abs=0.003)


@every_preset
def test_chunks_of_rows_change_nothing(scheme: lb.Scheme, monkeypatch) -> None:
    w = normal(3, 41, 130)
    whole = lb.AffineTensor.from_float(w, scheme)
    values = whole.dequantize()
    monkeypatch.setattr("lowbit.numerics.row_chunks.CHUNK_ELEMENTS", 1000)
    parts = lb.AffineTensor.from_float(w, scheme)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.dequantize(), values)


@every_preset
def test_experts_have_their_own_scales(scheme: lb.Scheme) -> None:
    w = normal(3, 8, 96) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    t = lb.AffineTensor.from_float(w, scheme)
    for expert in range(3):
        own = lb.AffineTensor.from_float(w[expert], scheme)
        assert torch.equal(t[expert].dequantize(), own.dequantize())
        assert torch.equal(t.dequantize()[expert], own.dequantize())
    assert torch.equal(t[1:].dequantize(), t.dequantize()[1:])
    x = normal(5, 96)
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    y = lb.inference.grouped_linear(x, t, offsets)
    assert torch.allclose(y[:2], x[:2] @ t.dequantize()[0].T, atol=1e-5)


def test_double_quantization_is_sliced_along_k() -> None:
    t = lb.AffineTensor.from_float(normal(6, 64 * 172), lb.NF4WeightOnly(double_quantization=True))
    values = t.dequantize()
    assert t.scale_absmax.shape == (6, 43)
    for start, end in ((0, 64 * 86), (64 * 86, 64 * 172), (64, 64 * 3)):
        part = t[:, start:end]
        part.check_parts()
        assert torch.equal(part.dequantize(), values[:, start:end])


def test_signal_to_noise_of_normal_weights() -> None:
    """Figures of docs/inference.md, in dB."""
    w = normal(256, 4096).bfloat16()
    schemes = {**PRESETS, "ocp": lb.MXFP4WeightOnly("symmetric"), "g32": lb.Int4WeightOnly(32)}
    expected = {
        "nf4": 20.7,
        "nf4-double": 20.7,
        "mxfp4": 19.0,
        "nvfp4": 20.4,
        "ocp": 18.8,
        "g32": 20.7,
    }
    for name, scheme in schemes.items():
        values = lb.AffineTensor.from_float(w, scheme).dequantize()
        assert -20 * math.log10(relative_error(values, w)) == pytest.approx(expected[name], abs=0.1)


def test_absmax_values_of_rows_and_in_one_list() -> None:
    for rows, groups in ((4, 64), (7, 172), (40, 45), (2, 600), (1, 3), (3, 256)):
        flat = torch.arange(-(-rows * groups // 256)).float()
        of_rows = absmax_of_rows(flat, rows, groups)
        each = of_rows.repeat_interleave(groups // of_rows.shape[-1], -1).flatten()
        assert torch.equal(each, flat[torch.arange(rows * groups) // 256])
        assert torch.equal(flat_absmax(of_rows, groups), flat)
    with pytest.raises(ValueError, match="quantize the whole weight anew"):
        flat_absmax(absmax_of_rows(torch.arange(2.0), 8, 64)[1:], 64)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: lb.Spec(lb.NF4, lb.PerRow(), "asymmetric"), "no zero point.*'symmetric', got"),
        (
            lambda: lb.Spec(lb.E2M1, lb.PerRow(), "symmetric_no_clipping_err", scale_format="e4m3"),
            "must be 'symmetric'",
        ),
        (lambda: lb.Spec(lb.Int(4), lb.PerRow(), scale_format="e8m0"), "is for a LookupTable"),
        (
            lambda: lb.Spec(lb.NF4, lb.PerRow(), scale_format="e5m2"),
            "float, e8m0, e4m3, e4m3_inverse, double",
        ),
        (
            lambda: lb.Scheme(lb.Spec(lb.NF4, lb.PerRow()), lb.Spec(lb.NF4, lb.PerToken())),
            "is for weights.*Int",
        ),
        (lambda: lb.NVFP4WeightOnly().weight.quantize(torch.ones(32)), "for matrices"),
    ],
)
def test_impossible_specs_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_e8m0_takes_given_powers_of_two_and_refuses_other_scales() -> None:
    w, scheme = normal(2, 64), lb.MXFP4WeightOnly()
    given = torch.tensor([[1.0, 0.5], [2.0, 0.25]])
    t = lb.AffineTensor.from_float(w, scheme, (given, None))
    assert torch.equal(t.scale_values(), given)
    codes = quantize_affine(w, (1, 32), given, None, lb.E2M1)
    assert torch.equal(t.dequantize(), (codes.view(2, 2, 32) * given[..., None]).view(2, 64))
    for bad in (-0.5, 0.75, 3.0):
        with pytest.raises(
            ValueError, match=f"e8m0 stores powers of two, without a sign, got.*{bad}"
        ):
            lb.AffineTensor.from_float(w, scheme, (given.clone().fill_(bad), None))


@pytest.mark.parametrize("name", ["nf4-double", "nvfp4"])
def test_scales_of_scales_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=r"chosen from the weight.*scale_format='float'"):
        qparams = (torch.ones(2, 128 // PRESETS[name].weight.granularity.group_size), None)
        lb.AffineTensor.from_float(normal(2, 128), PRESETS[name], qparams)


@pytest.mark.parametrize("name", ["nf4-double", "mxfp4", "nvfp4"])
def test_learned_scales_are_refused_by_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    before = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight: scales='learned'.*scales='present'"):
        qat.prepare_(model, PRESETS[name], scales="learned")
    assert model[0].weight is before


def test_searched_scales_of_scales_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    before = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight: scales='searched'.*minmax"):
        lb.quantize_(model, PRESETS["nf4-double"], scales="searched")
    assert model[0].weight is before


@pytest.mark.parametrize(
    ("scheme", "normal_db", "heavy_db"),
    [
        (lb.NVFP4WeightOnly(), 21.8, 21.7),
        (lb.MXFP4WeightOnly("symmetric"), 19.0, 18.2),
        (lb.MXFP4WeightOnly(), 19.0, 18.2),
    ],
    ids=str,
)
def test_searched_scales_of_fp4(scheme: lb.Scheme, normal_db: float, heavy_db: float) -> None:
    """Signal to noise of normal and Student-t values (5 degrees of freedom), and no block is worse than before, by the
    squared error alone."""
    torch.manual_seed(0)
    spec = scheme.weight
    heavy = torch.distributions.StudentT(5.0).sample((512, 1024))
    for x, least in ((torch.randn(512, 1024), normal_db), (heavy, heavy_db)):
        start = lb.AffineTensor.from_float(x, scheme).dequantize()
        joint = spec.joint_part([x], torch.float32) if spec.scales.joint else None
        qparams = spec.search_qparams(x, torch.float32, joint=joint)
        found = lb.AffineTensor.from_float(x, scheme, qparams, joint=joint)
        group = scheme.weight.granularity.group_size
        errors = [
            (t - x).double().square().unflatten(-1, (-1, group)).sum(-1)
            for t in (found.dequantize(), start)
        ]
        assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
        noise = errors[0].sum() / x.double().square().sum()
        assert float(-10 * noise.log10()) > least - 0.05


def test_searched_scales_of_fp4_see_an_importance() -> None:
    torch.manual_seed(0)
    x, h = torch.randn(64, 256), torch.rand(256) ** 4
    for scheme in (lb.NVFP4WeightOnly(), lb.MXFP4WeightOnly()):
        errors = [
            float(((lb.AffineTensor.searched(x, scheme, i).dequantize() - x) ** 2 * h).sum())
            for i in (None, h)
        ]
        assert errors[1] < errors[0]


@every_preset
def test_a_convolution_is_refused_by_name(scheme: lb.Scheme) -> None:
    with pytest.raises(ValueError, match="no convolution of a weight that a TableTensor stores"):
        lb.quantize_(nn.Conv1d(8, 8, 3), scheme, lambda module, name: True)


def test_parts_that_do_not_fit_are_refused() -> None:
    t = lb.AffineTensor.from_float(normal(4, 32), lb.NVFP4WeightOnly())
    parts = {"scale": t.scale, "global_scale": t.global_scale}
    assert torch.equal(
        lb.TableTensor(t.codes, parts, t.spec, t.shape, t.dtype).dequantize(), t.dequantize()
    )
    with pytest.raises(ValueError, match="global_scale"):
        lb.TableTensor(t.codes, {"scale": t.scale}, t.spec, t.shape, t.dtype)
    with pytest.raises(ValueError, match="scale of shape"):
        parts["scale"] = t.scale.float()
        lb.TableTensor(t.codes, parts, t.spec, t.shape, t.dtype)


# ---- training -------------------------------------------------------------------------------------------------------


@every_preset
def test_gradients_of_fake_quantization(scheme: lb.Scheme) -> None:
    """Straight through, but for values that clip: those beyond half a step of the last value."""
    w = normal(8, 128).requires_grad_()
    grad = normal(8, 128, seed=1)
    scheme.weight.fake_quantize(w).backward(grad)
    scale, _ = scheme.weight.choose_qparams(w.detach(), torch.float32)
    block = scheme.weight.granularity.group_size
    code = (w.detach().view(8, -1, block) / scale[..., None]).view(8, 128)
    values = sorted(scheme.weight.format.values)
    inside = code <= values[-1] + (values[-1] - values[-2]) / 2
    inside &= code >= values[0] - (values[1] - values[0]) / 2
    assert torch.equal(w.grad, torch.where(inside, grad, 0.0))


def test_the_floor_rule_of_e8m0_clips() -> None:
    w = torch.full((1, 32), 7.5, requires_grad=True)
    lb.MXFP4WeightOnly("symmetric").weight.fake_quantize(w).sum().backward()
    assert not w.grad.any()
    w.grad = None
    lb.MXFP4WeightOnly().weight.fake_quantize(w).sum().backward()
    assert (w.grad == 1).all()


def trained(model: nn.Module, x: Tensor, target: Tensor, lr: float, steps: int) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = (model(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_learned_scales_of_nf4() -> None:
    """The gradients of scales by their formula, and the converted weight to the bit."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(96, 16, bias=False)), normal(32, 96)
    target = F.linear(x, model[0].weight.detach())
    qat.prepare_(model, lb.NF4WeightOnly(32), scales="learned")
    losses = trained(model, x, target, lr=2e-4, steps=20)
    assert losses[-1] < losses[0]
    y = model(x)
    qat.convert_(model)
    assert isinstance(model[0].weight, lb.TableTensor) and torch.equal(model[0](x), y)


def test_searched_nf4_scales_lose_less() -> None:
    w, scheme = normal(32, 256), lb.NF4WeightOnly()
    plain, searched = lb.AffineTensor.from_float(w, scheme), lb.AffineTensor.searched(w, scheme)
    assert relative_error(searched.dequantize(), w) < relative_error(plain.dequantize(), w)


class Adapted(nn.Module):
    """y = W x + B A x, as PEFT adds an adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@every_preset
def test_qlora(scheme: lb.Scheme) -> None:
    """Adapters below a frozen 4-bit layer train, so gradients pass its products to their input."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    lb.quantize_(base, scheme)
    model = nn.Sequential(Adapted(base[0], 4), base[1], Adapted(base[2], 4))
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    x, target = normal(128, 64), normal(128, 64, seed=1)
    for m in (model, plain):
        (m(x) - target).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == isinstance(p, lb.TableTensor), name
        if p.grad is not None:
            assert relative_error(p.grad, q.grad) < 1e-5 or not q.grad.any(), name
    losses = trained(model, x, target, lr=1e-2, steps=30)
    assert losses[-1] < 0.9 * losses[0]


@every_preset
def test_files(scheme: lb.Scheme, tmp_path) -> None:
    model, x = nn.Sequential(nn.Linear(100, 24), nn.Linear(24, 8)), normal(3, 100)
    fresh = copy.deepcopy(model)
    lb.quantize_(model, scheme)
    lb.save(model, tmp_path / "model.safetensors")
    state = lb.load(tmp_path / "model.safetensors")
    fresh.load_state_dict(state, assign=True)
    assert torch.equal(fresh(x), model(x)) and fresh[0].weight.spec == scheme.weight


@every_preset
def test_undo_and_dequantize(scheme: lb.Scheme) -> None:
    model, x = nn.Sequential(nn.Linear(96, 24)), normal(3, 96)
    plain = copy.deepcopy(model)
    qat.prepare_(model, scheme)
    y = model(x)
    qat.undo_(model)
    assert torch.equal(model(x), plain(x)) and type(model[0].weight.data) is Tensor
    report = lb.quantize_(model, scheme)
    assert repr(scheme.weight.format) in str(report)
    assert torch.equal(model(x), y)
    lb.dequantize_(model)
    assert torch.equal(model(x), y)


@pytest.mark.gpu
@every_preset
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_stores_and_reads_the_same_bits(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    w = normal(48, 200).to(dtype)
    own = lb.AffineTensor.from_float(w, scheme)
    t = lb.AffineTensor.from_float(w.cuda(), scheme)
    for name, part in own.inner_tensors().items():
        assert torch.equal(part.view(torch.uint8), getattr(t, name).cpu().view(torch.uint8)), name
    assert torch.equal(t.dequantize().cpu(), own.dequantize())
    x = normal(4, 200).to(dtype).cuda().requires_grad_()
    y = F.linear(x, t)
    y.sum().backward()
    assert (
        relative_error(y.cpu(), F.linear(x.detach().cpu().double(), own.dequantize().double()))
        < 1e-2
    )
    assert relative_error(x.grad.cpu(), own.dequantize().double().sum(0).expand(4, -1)) < 1e-2


def test_codes_unpack_to_the_nearest_values() -> None:
    w = normal(5, 64)
    t = lb.AffineTensor.from_float(w, lb.NF4WeightOnly())
    codes = unpack(t.codes, 4, 64).long()
    steps = w / w.abs().amax(1, keepdim=True)
    distance = (steps.unsqueeze(-1) - torch.tensor(lb.NF4.values)).abs()
    assert torch.equal(codes, distance.argmin(-1))


def test_tables_that_are_made_under_a_default_device_are_on_their_own() -> None:
    """As transformers reads folders under `torch.device("meta")`. Codes are looked up without an op, in the context."""
    from lowbit.numerics import lookup_table

    x = torch.tensor([[-0.5, 0.25, 1.0]])
    codes = DYNAMIC8.codes(DYNAMIC8.nearest(x))
    lookup_table._on_device.cache_clear()
    with torch.device("meta"):
        DYNAMIC8.look_up(codes, 3)
    assert torch.equal(DYNAMIC8.codes(DYNAMIC8.nearest(x)), codes)
