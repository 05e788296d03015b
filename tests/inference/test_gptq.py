"""GPTQ against its textbook form in float64, column by column, and at its edges."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.inference import GPTQ, Rotate, Search
from lowbit.inference.calibration.columns import COLUMNS, Factor
from lowbit.inference.calibration.inputs import Moments, product
from lowbit.inference.calibration.step import Layer
from lowbit.tensor.frozen.rotated_tensor import rotated_blocks
from tests.schemes import SCHEMES, over

SIZES = (24, 96)
"""N and K of the weight."""


def uneven(rows: int, size: int) -> Tensor:
    """Inputs whose channels are correlated and differ in size."""
    torch.manual_seed(1)
    mixed = torch.randn(rows, size) @ (torch.randn(size, size) / size**0.5)
    return mixed * torch.logspace(-1, 0.5, size)[torch.randperm(size)]


def textbook(
    weight: Tensor, hessian: Tensor, made: lb.AffineTensor, step: GPTQ
) -> tuple[Tensor, Tensor]:
    """The rounded weight, by elimination of one column after another from the inverse, and the order of columns."""
    w, h = weight.double().clone(), hessian.double()
    size = len(h)
    inverse = torch.linalg.inv(h + step.damping * h.diagonal().mean() * torch.eye(size))
    order = h.diagonal().argsort(descending=True, stable=True)
    if not step.act_order:
        order = torch.arange(size)
    spec, shape = made.spec, made.shape
    for j in order.tolist():
        column = w.clone().float()
        scales = (made.scale_values(), made.zero_point)
        codes, scale, zero = spec.quantize(column, torch.float32, scales)
        q = spec.dequantize(codes, scale, zero, shape, torch.float32)[:, j].double()
        error = (w[:, j] - q) / inverse[j, j]
        w -= torch.outer(error, inverse[j])
        w[:, j] = q
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j], inverse[:, j] = 0, 0
        inverse[j, j] = 1
    return w, order


@pytest.mark.parametrize(
    "scheme",
    [
        lb.IntxWeightOnly(4, 32, "symmetric"),
        lb.IntxWeightOnly(3, 32, "asymmetric"),
        lb.IntxWeightOnly(2, 32, "float_zero_point"),
        lb.Int2WeightOnly(32),
        lb.Int4WeightOnly(96),
        lb.NVFP4WeightOnly(),
        lb.MXFP4WeightOnly(),
        lb.Float8WeightOnly(),
    ],
    ids=str,
)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.usefixtures("least_squares")
def test_equals_the_textbook(scheme: lb.Scheme, act_order: bool) -> None:
    check_textbook(scheme, act_order, SIZES[1])


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.usefixtures("least_squares")
def test_errors_reach_the_columns_of_later_chunks(act_order: bool) -> None:
    check_textbook(lb.IntxWeightOnly(3, 32, "symmetric"), act_order, 2 * COLUMNS + 32)


def check_textbook(scheme: lb.Scheme, act_order: bool, size: int) -> None:
    x = uneven(4 * size + 16, size)
    plain = nn.Linear(size, SIZES[0], bias=False)
    model, step = nn.Sequential(plain), GPTQ(act_order=act_order)
    weight = plain.weight.detach().clone()
    lb.calibrate(model, scheme, [x], steps=[step])
    expected, _ = textbook(weight, x.double().T @ x.double(), model[0].weight, step)
    found = model[0].weight.dequantize().double()
    wrong = (found - expected).abs() > 1e-4 * expected.abs().max()
    assert float(wrong.double().mean()) < 2e-3


def error(found: Tensor, plain: Tensor, x: Tensor) -> float:
    return float((x @ (found - plain.detach()).T).norm() / (x @ plain.detach().T).norm())


@over(SCHEMES)
def test_loses_less_than_rounding_for_every_scheme(scheme: lb.Scheme) -> None:
    """And the search, which GPTQ starts from, no more."""
    x = uneven(300, SIZES[1])
    plain = nn.Linear(SIZES[1], SIZES[0])
    models = [nn.Sequential(nn.Linear(SIZES[1], SIZES[0])) for _ in range(3)]
    for model in models:
        model.load_state_dict({f"0.{k}": v for k, v in plain.state_dict().items()})
    lb.quantize_(models[0], scheme, scales="minmax")
    if scheme.weight.scale_format == "double":
        with pytest.raises(ValueError, match="no calibration chooses"):
            lb.calibrate(models[1], scheme, [x])
        return
    lb.calibrate(models[1], scheme, [x], steps=[GPTQ()])
    lb.calibrate(models[2], scheme, [x], steps=[Search()])
    errors = [error(m[0].weight.dequantize(), plain.weight, x) for m in models]
    assert all(e < errors[0] * 1.001 for e in errors[1:]), errors
    assert errors[1] < errors[0] * 0.999
    for model in models[1:]:
        assert model[0].weight.spec == models[0][0].weight.spec
        assert type(model[0].weight) is type(models[0][0].weight)
        for name, t in models[0][0].weight.inner_tensors().items():
            own = model[0].weight.inner_tensors()[name]
            assert (own.dtype, own.shape) == (t.dtype, t.shape)


def test_a_hessian_without_full_rank() -> None:
    """Fewer rows than inputs, and inputs that are always zero: finite, and such columns are rounded to nearest."""
    x = uneven(7, 96)
    x[:, 10:20] = 0
    factor = Factor(x.T @ x, 0.0, act_order=True)
    assert factor.upper.isfinite().all() and factor.damping > 0
    model = nn.Sequential(nn.Linear(96, 24))
    plain = model[0].weight.detach().clone()
    report = lb.calibrate(model, lb.Int4WeightOnly(32), [x], steps=[GPTQ(scales="minmax")])
    found = model[0].weight
    rounded = lb.AffineTensor.from_float(plain, lb.Int4WeightOnly(32)).dequantize()
    assert torch.equal(found.dequantize()[:, 10:20], rounded[:, 10:20])
    (layer,) = report.layers.values()
    assert layer.after < layer.before


def test_inputs_of_zeros_round_to_nearest() -> None:
    model = nn.Sequential(nn.Linear(96, 24))
    plain = model[0].weight.detach().clone()
    lb.calibrate(model, lb.Int4WeightOnly(32), [torch.zeros(5, 96)], steps=[GPTQ(scales="minmax")])
    rounded = lb.AffineTensor.from_float(plain, lb.Int4WeightOnly(32)).dequantize()
    assert torch.equal(model[0].weight.dequantize(), rounded)


def test_asymmetric_aims_at_the_outputs_in_high_precision() -> None:
    torch.manual_seed(0)
    x = uneven(600, 64)

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    with torch.no_grad():
        expected = build()(x)
        errors = []
        for share in (0.0, 1.0):
            model = build()
            scheme = lb.IntxWeightOnly(2, 32)
            lb.calibrate(model, scheme, x.split(100), steps=[GPTQ(asymmetric=share)])
            errors.append(float((model(x) - expected).norm()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"damping": -0.1}, "damping must be finite and from 0"),
        ({"damping": float("nan")}, "damping must be finite"),
        ({"damping": "auto"}, "damping must be finite and from 0 to inf, got 'auto'"),
        ({"asymmetric": 1.5}, "asymmetric must be finite and from 0 to 1, got 1.5"),
        ({"scales": "best"}, "scales must be 'searched' or 'minmax', got 'best'"),
    ],
)
def test_bad_settings_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTQ(**arguments)


# ---- the steps on one layer, against float64 ---------------------------------------------------------------------


def layer_of(
    weight: Tensor,
    scheme: lb.Scheme,
    inputs: list[tuple[int, Tensor, Tensor | None]],
    **options: bool,
) -> Layer:
    by_weight = options.pop("by_weight", False)
    moments = Moments(weight.shape, torch.device("cpu"), True, **{"pairs": False, **options})
    moments.weight = weight if by_weight else None
    for index, x, high in inputs:
        moments.add(index, x, high, len(weight) if weight.ndim == 3 else 1)
    return Layer("weight", weight, scheme.weight, torch.float32, moments)


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("rows", "by_weight"), [(300, False), (20, False), (300, True)])
@pytest.mark.usefixtures("least_squares")
def test_asymmetric_equals_least_squares_column_by_column(
    share: float, act_order: bool, rows: int, by_weight: bool
) -> None:
    """The objective of GPTAQ: after each column that is rounded, the free ones are those with the least Σ ‖Q x̂ − W x‖²
    + λ ‖Q − W‖², by the normal equations in float64. With 20 rows the Hessian has no full rank."""
    x = uneven(rows, SIZES[1])
    moved = x + 0.2 * uneven(rows, SIZES[1]).roll(1, 0)
    torch.manual_seed(2)
    weight, scheme = torch.randn(SIZES) / 10, lb.IntxWeightOnly(3, 32, "symmetric")
    layer = layer_of(weight, scheme, [(0, moved, x)], pairs=True, by_weight=by_weight)
    step = GPTQ(act_order=act_order, asymmetric=share)
    step.apply(layer)
    own, hat, w = x.double(), moved.double(), weight.double()
    h = hat.T @ hat
    order = (
        h.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(h))
    )
    damped = h + step.damping * h.diagonal().mean() * torch.eye(len(h))
    wanted = w @ (damped + share * (own - hat).T @ hat)
    q, done = w.clone(), torch.zeros(len(h), dtype=torch.bool)
    assert layer.qparams is not None and layer.values is not None
    for j in order.tolist():
        free = ~done
        rest = wanted[:, free] - q[:, done] @ damped[done][:, free]
        q[:, free] = torch.linalg.solve(damped[free][:, free], rest.T).T
        codes = layer.spec.quantize(q.float(), torch.float32, layer.qparams)
        q[:, j] = layer.spec.dequantize(*codes, SIZES, torch.float32)[:, j].double()
        done[j] = True
    wrong = (layer.values - q).abs() > 1e-4 * q.abs().max()
    assert float(wrong.double().mean()) < 3e-3
    rounded = layer.rounded(layer.qparams).double()
    lost = [float((hat @ t.T - own @ w.T).norm()) for t in (layer.values.double(), rounded)]
    assert lost[0] < lost[1]
    whole = float((hat @ w.T).norm())
    assert layer.error(layer.values) == pytest.approx((lost[0] / whole) ** 2, rel=1e-3)


@pytest.mark.usefixtures("least_squares")
def test_the_hessian_of_a_tied_embedding() -> None:
    """H / mean(diag H) + I, in the moments and in what GPTQ rounds by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 50, bias=False))
    model[2].weight = model[0].weight
    ids, weight = torch.randint(50, (8, 40)), model[0].weight.detach().clone()
    x = model[:2](ids).detach().flatten(0, 1).double()
    h = x.T @ x
    h = h / h.diagonal().mean() + torch.eye(64)
    moments = Moments(weight.shape, torch.device("cpu"), True, False)
    moments.add(0, x.float())
    moments.looked_up = ids.numel()
    torch.testing.assert_close(moments.hessian(0).double(), h, rtol=1e-5, atol=1e-5)
    step, scheme = GPTQ(asymmetric=0), lb.IntxWeightOnly(3, 32)
    lb.calibrate(model, scheme, [ids], steps=[step], blocks=[])
    expected, _ = textbook(weight, h, model[0].weight, step)
    wrong = (model[0].weight.dequantize() - expected).abs() > 1e-4
    assert model[2].weight is model[0].weight and float(wrong.double().mean()) < 5e-3


ROWS = (5, 200, 0, 63)


def experts() -> tuple[Tensor, list[tuple[int, Tensor, Tensor | None]]]:
    torch.manual_seed(0)
    inputs = [(e, torch.randn(rows, 64) * (e + 1), None) for e, rows in enumerate(ROWS) if rows]
    return torch.randn(len(ROWS), 24, 64) / 8, inputs


def test_hessians_of_experts_with_few_rows() -> None:
    """H + (K − T) · H̄ with the mean H̄ over all rows, from float64; summed once for all experts."""
    weight, inputs = experts()
    layer = layer_of(weight, lb.Int4WeightOnly(32), inputs)
    products = torch.zeros(len(ROWS), 64, 64, dtype=torch.float64)
    for e, x, _ in inputs:
        products[e] = x.double().T @ x.double()
    mean = products.sum(0) / sum(ROWS)
    for _ in range(2):
        for e, rows in enumerate(ROWS):
            found = layer.moments.hessian(e)
            assert found is not None
            expected = products[e] + max(64 - rows, 0) * mean
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        for e, x, _ in inputs:
            layer.moments.add(e, x[:0])
    layer.moments.add(2, inputs[0][1])
    assert layer.moments.hessian(2).isfinite().all() and not torch.equal(
        layer.moments.hessian(2), products[2].float()
    )


class Switching(nn.Module):
    """Its second linear multiplies the input of the first, or another, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(96, 24, bias=False), nn.Linear(96, 24, bias=False)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        y = self.q(x)
        if kind == "other":
            return y + self.k(x.flip(-1))
        return y + self.k(x) if kind == "same" else y


@pytest.mark.parametrize("kind", ["other", "nothing"])
def test_weights_that_share_an_input_in_some_batches(kind: str) -> None:
    """Batches count the same in any order: the first one alone does not say what the weights share."""
    batches = [{"x": uneven(200, 96), "kind": k} for k in ("same", kind)]
    batches[1]["x"] = batches[1]["x"].flip(0) * 3
    made = []
    for order in (batches, batches[::-1]):
        torch.manual_seed(0)
        model = Switching()
        lb.calibrate(model, lb.IntxWeightOnly(3, 32), order, steps=[Search()])
        made.append(model)
    for name in ("q", "k"):
        a, b = (getattr(m, name).weight.dequantize() for m in made)
        assert torch.equal(a, b), name


def test_sums_that_weights_share_are_factored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, begin = [], Factor.__init__
    monkeypatch.setattr(Factor, "__init__", lambda self, *a: made.append(1) or begin(self, *a))
    for steps, count in (([GPTQ()], 1), ([Rotate(folded=False), GPTQ()], 2)):
        made.clear()
        batches = [{"x": uneven(200, 96), "kind": "same"}]
        lb.calibrate(Switching(), lb.IntxWeightOnly(3, 32), batches, steps=steps)
        assert len(made) == count


@pytest.mark.parametrize("matrices", [1, 2])
def test_what_the_second_stream_adds_is_the_same_by_either_way(matrices: int) -> None:
    """By the weight, and by sums that any weight reads; of rotated inputs too; against float64."""
    torch.manual_seed(0)
    weight, x = torch.randn(6, 64), torch.randn(matrices, 50, 64)
    high = x + torch.randn_like(x) / 8
    ways = [Moments(weight.shape, torch.device("cpu"), True, True) for _ in range(2)]
    ways[1].weight = weight
    for moments in ways:
        for index in range(matrices):
            for rows in (slice(20), slice(20, None)):
                moments.add(index, x[index, rows], high[index, rows], matrices)
    for size in (1, 32):
        turned = rotated_blocks(weight, size).double().chunk(matrices)
        for index, w in enumerate(turned):
            hat, own = (rotated_blocks(t[index], size).double() for t in (x, high))
            moved = (own - hat) @ w.T
            for moments in ways:
                cross, drift = moments.rotated(size).pair(index, w.float())
                torch.testing.assert_close(cross.double(), moved.T @ hat, rtol=1e-5, atol=1e-4)
                assert drift == pytest.approx(float(moved.square().sum()), rel=1e-5)


@pytest.mark.parametrize("scales", ["searched", "minmax"])
def test_one_expert_at_a_time(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One factor is in memory, whatever the number of experts; the result is that of each expert alone."""
    alive: weakref.WeakSet[Factor] = weakref.WeakSet()
    begin = Factor.__init__

    def made(self: Factor, *arguments: Any) -> None:
        assert not alive
        alive.add(self)
        begin(self, *arguments)

    monkeypatch.setattr(Factor, "__init__", made)
    weight, inputs = experts()
    scheme, step = lb.IntxWeightOnly(3, 32), GPTQ(scales=scales)
    layer = layer_of(weight, scheme, inputs)
    step.apply(layer)
    assert not alive and layer.values is not None and layer.qparams is not None
    for e in range(len(ROWS)):
        moments = Moments((24, 64), torch.device("cpu"), True, False)
        hessian = layer.moments.hessian(e)
        monkeypatch.setattr(moments, "hessian", lambda _, hessian=hessian: hessian)
        moments.rows = [1]
        alone = Layer("weight", weight[e], scheme.weight, torch.float32, moments)
        step.apply(alone)
        assert torch.equal(alone.values, layer.values[e])
        assert torch.equal(alone.qparams[0], layer.qparams[0][e])


@pytest.mark.gpu
def test_products_by_matrix_units() -> None:
    """Against float64, of odd shapes, transposed operands and numbers of many sizes."""
    for m, k, n in ((37, 131, 5), (1, 1, 1), (64, 257, 129)):
        a, b = torch.randn(k, m, device="cuda").T, torch.randn(k, n, device="cuda")
        a = a * 10.0 ** torch.randint(-20, 1, (m, 1), device="cuda")
        found, exact = product(a, b).double(), a.double() @ b.double()
        terms = a.double().abs() @ b.double().abs()
        assert ((found - exact).abs() <= 2.0**-15 * terms).all()
