"""Prune24: masks and values against textbook forms in float64, with every scheme, step and kind of weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.cli.calibrated import steps_of
from lowbit.formats import FormatError
from lowbit.inference import GPTQ, Layer, LearnedRounding, Prune24, Rotate, Search
from lowbit.inference.calibration.inputs import Moments
from lowbit.tensor.frozen.sparse24_tensor import Sparse24Tensor
from tests.inference.test_gptq import error, uneven
from tests.schemes import SCHEMES, over, relative_error

METHODS = ("magnitude", "wanda", "sparsegpt")
INT4, INT8 = lb.IntxWeightOnly(4, 32, "symmetric"), lb.Int8WeightOnly()


def layer_of(weight: Tensor, x: Tensor, scheme: lb.Scheme = INT8) -> Layer:
    moments = Moments(weight.shape, weight.device, True, False)
    if len(x):
        moments.add(0, x)
    return Layer("w", weight, scheme.weight, torch.float32, moments)


def two_of(scores: Tensor) -> Tensor:
    """bool [N, K]: the two largest of each four, by a loop."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row, own in zip(scores.tolist(), kept, strict=True):
        for start in range(0, len(row), 4):
            best = sorted(range(start, start + 4), key=lambda j: -row[j])[:2]
            own[best] = True
    return kept


def textbook(
    weight: Tensor, x: Tensor, damping: float, made: lb.AffineTensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """SparseGPT by elimination of one column after another from the inverse: the weight and its mask. With `made` each
    column that stays is rounded by its scales."""
    w, h = weight.double().clone(), x.double().T @ x.double()
    size, rows = len(h), torch.arange(len(w))
    inverse = torch.linalg.inv(h + damping * h.diagonal().mean() * torch.eye(size))
    kept = torch.zeros_like(w, dtype=torch.bool) if mask is None else mask
    for four in h.diagonal().view(-1, 4).sum(1).argsort(descending=True, stable=True).tolist():
        own = list(range(4 * four, 4 * four + 4))
        if mask is None:
            diagonal, left = [], inverse.clone()
            for j in own:  # what U_jj² is once the columns before it are eliminated
                diagonal.append(float(left[j, j]))
                left = left - torch.outer(left[:, j], left[j]) / left[j, j]
            scores = w[:, own].square() / torch.tensor(diagonal)
            best = scores.argsort(1, descending=True)[:, :2] + 4 * four
            kept[rows[:, None], best] = True
        for j in own:
            q = w[:, j]
            if made is not None:
                spec, scales = made.spec, (made.scale_values(), made.zero_point)
                codes, scale, zero = spec.quantize(w.float(), torch.float32, scales)
                q = spec.dequantize(codes, scale, zero, made.shape, torch.float32)[:, j].double()
            q = q * kept[:, j]
            wrong = (w[:, j] - q) / inverse[j, j]
            w -= torch.outer(wrong, inverse[j])
            w[:, j] = q
            inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
            inverse[j], inverse[:, j] = 0, 0
            inverse[j, j] = 1
    return w, kept


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (7, 96), (24, 132), (33, 260)])
def test_sparsegpt_equals_the_textbook(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(rows, columns), uneven(2 * columns, columns)
    layer = layer_of(weight, x)
    Prune24(damping=0.02).apply(layer)
    expected, kept = textbook(weight, x, 0.02, None, None)
    assert layer.mask is not None
    alike = (layer.mask == kept).all(1)  # a tie in float32 changes the rest of a row
    assert float(alike.double().mean()) > 0.95
    assert relative_error(layer.weight[alike], expected[alike]) < 1e-4
    assert torch.equal(layer.original, weight) and (layer.weight[~layer.mask] == 0).all()


@pytest.mark.parametrize(
    "scheme", [INT4, lb.IntxWeightOnly(3, 32, "asymmetric"), lb.NVFP4WeightOnly()], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_gptq_prunes_and_rounds_in_one_loop(scheme: lb.Scheme, method: str) -> None:
    """The two loops of GPTQ, of which each is linear in the errors, against one loop that does both."""
    torch.manual_seed(0)
    plain, x = nn.Linear(96, 24, bias=False), uneven(400, 96)
    weight, model = plain.weight.detach().clone(), nn.Sequential(plain)
    layer = layer_of(weight, x, scheme)
    Prune24(method).apply(layer)
    lb.calibrate(model, scheme, [x], steps=[Prune24(method), GPTQ()])
    expected, _ = textbook(weight, x, 0.01, model[0].weight, layer.mask)
    found = model[0].weight.dequantize().double()
    wrong = (found - expected).abs() > 1e-4 * expected.abs().max()
    assert float(wrong.double().mean()) < 5e-3
    assert (found[~layer.mask] == 0).all()


def test_masks_of_magnitude_and_wanda() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(9, 64), uneven(50, 64)
    weight[0] = 0
    weight[1] = 1  # ties keep the first
    for method, scores in (
        ("magnitude", weight.double().abs()),
        ("wanda", weight.double().abs() * x.double().norm(dim=0)),
    ):
        layer = layer_of(weight, x)
        Prune24(method).apply(layer)
        assert torch.equal(layer.mask, two_of(scores))
        assert torch.equal(layer.weight, weight * layer.mask)
        assert not (layer.weight.signbit() & (layer.weight == 0)).any()


def of_fours(values: Tensor) -> int:
    """The most values that are not 0 of four neighbouring inputs."""
    return int((values.unflatten(-1, (-1, 4)) != 0).sum(-1).max())


@over(SCHEMES)
def test_every_scheme_keeps_two_of_four(scheme: lb.Scheme) -> None:
    """Through every step that rounds; schemes without a 0 in each block are refused before anything changes."""
    spec, x = scheme.weight, uneven(100, 64)
    if spec.scale_format == "double":
        with pytest.raises(ValueError, match="no calibration chooses"):
            lb.calibrate(nn.Sequential(nn.Linear(64, 16)), scheme, [x], steps=[Prune24()])
        return
    for steps in ([], [Search()], [GPTQ()], [GPTQ(), LearnedRounding(2, over="model", reach=2.0)]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(64, 16))
        before = model[0].weight
        given = [Prune24("wanda"), *steps]
        if spec.zero_point_is_value:
            with pytest.raises(ValueError, match=r"0.weight: pruned weights are 0.*'symmetric'"):
                lb.calibrate(model, scheme, [x], steps=given)
            assert model[0].weight is before
            return
        report = lb.calibrate(model, scheme, [x], steps=given)
        assert of_fours(model[0].weight.dequantize()) <= 2
        assert report.layers["0.weight"].zeros >= 0.5
        assert "Prune24 wanda" in str(report) and "pruned to 2 of 4 inputs: 0.weight" in str(report)


@pytest.mark.parametrize(
    "scheme", [INT8, INT4, lb.Float8WeightOnly()], ids=["int8", "int4", "float8"]
)
def test_calibrated_pruning_beats_magnitude_on_correlated_inputs(scheme: lb.Scheme) -> None:
    torch.manual_seed(0)
    plain, x, fresh = nn.Linear(96, 48), *uneven(1200, 96).split(600)
    errors = {}
    for method in METHODS:
        for rounding in (Search(), GPTQ()):
            model = nn.Sequential(nn.Linear(96, 48))
            model[0].load_state_dict(plain.state_dict())
            lb.calibrate(model, scheme, [x], steps=[Prune24(method), rounding])
            errors[method, rounding.method] = error(
                model[0].weight.dequantize(), plain.weight, fresh
            )
    for rounding in ("Search", "GPTQ"):
        magnitude, wanda, sparsegpt = (errors[method, rounding] for method in METHODS)
        assert sparsegpt < 0.95 * wanda and wanda < 0.6 * magnitude, errors
    for method in ("magnitude", "wanda"):  # GPTQ makes up for what they prune
        assert errors[method, "GPTQ"] < 0.9 * errors[method, "Search"]


def test_what_is_refused() -> None:
    x = uneven(20, 30)
    for sizes, scheme, steps, message in (
        ((30, 8), INT8, [Prune24()], r"0.weight: .*its 30 inputs are not a multiple of four.*None"),
        ((32, 8), INT8, [GPTQ(), Prune24()], "give them as Prune24, GPTQ"),
        ((32, 8), INT8, [Prune24(), Prune24()], "rounded, rotated or pruned already"),
        ((32, 8), INT8, [Prune24(), Rotate(folded=False)], "rotation before pruning"),
        (
            (32, 8),
            INT8,
            [Rotate(folded=False), Prune24(compressed=True)],
            "rotated weight compressed",
        ),
        (
            (32, 8),
            lb.Int4WeightOnly(32, "asymmetric"),
            [Prune24(compressed=True)],
            "stored compressed",
        ),
        ((32, 8), lb.NVFP4WeightOnly(), [Prune24(compressed=True)], "stored compressed, got"),
    ):
        model = nn.Sequential(nn.Linear(*sizes))
        before = model[0].weight
        with pytest.raises(ValueError, match=message):
            lb.calibrate(model, scheme, [x if sizes[0] == 30 else uneven(20, 32)], steps=steps)
        assert model[0].weight is before
    conv = nn.Sequential(nn.Conv2d(4, 8, 3))
    with pytest.raises(ValueError, match="convolutions are not stored compressed"):
        lb.calibrate(
            conv, {"0.weight": INT8}, [torch.randn(1, 4, 5, 5)], steps=[Prune24(compressed=True)]
        )
    with pytest.raises(
        ValueError, match="by must be one of magnitude, wanda, sparsegpt, got 'obs'"
    ):
        Prune24("obs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="damping must be finite"):
        Prune24(damping=float("nan"))
    with pytest.raises(TypeError, match="compressed must be True or False, got 'no'"):
        Prune24(compressed="no")  # type: ignore[arg-type]


class Mixed(nn.Module):
    """A tied embedding, a convolution, stacked experts of which one gets no token, and a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 32), nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=2)
        self.experts = nn.Parameter(torch.randn(3, 32, 32) / 6)
        self.never = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.embedding(ids).mT).mT.flatten(0, 1)
        x = torch.cat([part @ self.experts[e].T for e, part in enumerate(x.chunk(2))])
        return self.head(x)


@pytest.mark.parametrize("method", METHODS)
def test_kinds_of_weights(method: str) -> None:
    model = Mixed()
    ids = torch.randint(20, (4, 8))
    scheme = {"conv.weight": INT8, "experts": INT8, "*": INT8}
    report = lb.calibrate(model, scheme, [ids], steps=[Prune24(method), GPTQ()])
    values = {name: p.dequantize() for name, p in model.named_parameters() if p.ndim > 1}
    assert set(report.layers) == set(values)
    assert (
        of_fours(values["embedding.weight"]) == 4 and report.layers["embedding.weight"].zeros == 0
    )
    assert "left dense (an embedding)" in report.layers["embedding.weight"].method
    for name in ("conv.weight", "experts", "never.weight"):
        assert of_fours(values[name].flatten(1) if "conv" in name else values[name]) == 2, name
    plain = dict(Mixed().named_parameters())
    assert torch.equal(values["never.weight"] != 0, two_of(plain["never.weight"].abs()))
    assert "left dense: 1" in str(report)


def test_rotated_weights_are_pruned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16))
    lb.calibrate(model, INT8, [uneven(80, 64)], steps=[Rotate(folded=False), Prune24(), GPTQ()])
    assert of_fours(model[0].weight.rotated_matrix.dequantize()) == 2


@pytest.mark.parametrize(
    "scheme", [INT8, INT4, lb.Float8WeightOnly()], ids=["int8", "int4", "float8"]
)
def test_compressed(scheme: lb.Scheme, tmp_path) -> None:
    """The same values and outputs; formats of other programs refuse it before the first batch."""
    models, x = [], uneven(80, 64)
    for compressed in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
        steps = [Prune24(compressed=compressed), GPTQ()]
        lb.calibrate(models[-1], scheme, [x], steps=steps)
    ordinary, small = models
    assert isinstance(small[0].weight.data, Sparse24Tensor)
    assert torch.equal(ordinary[0].weight.dequantize(), small[0].weight.dequantize())
    assert torch.equal(ordinary(x), small(x))
    for a, b in zip(ordinary[::2], small[::2], strict=True):
        bits = scheme.weight.format.bits
        saved = a.weight.numel() * (bits - (bits / 2 + 1)) / 8
        assert a.weight.nbytes_stored() - b.weight.nbytes_stored() == saved
    with pytest.raises(FormatError, match=r"holds no compressed 2:4 weights.*compressed=False"):
        lb.calibrate(
            nn.Sequential(nn.Linear(64, 32)),
            scheme,
            [x],
            steps=[Prune24(compressed=True)],
            format="compressed-tensors",
        )


def test_training_with_masked_gradients_keeps_the_zeros() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), uneven(80, 64)
    lb.calibrate(model, INT4, [x], steps=[Prune24(), GPTQ()])
    lb.dequantize_(model)
    model.requires_grad_()
    kept = {name: p != 0 for name, p in model.named_parameters() if p.ndim == 2}
    lb.qat.prepare_(model, INT4)
    before = {name: model.get_parameter(name).dequantize() for name in kept}
    for name, mask in kept.items():
        model.get_parameter(name).register_hook(mask.mul)
    optimizer = lb.optim.AdamW8bit(model.parameters(), 1e-2, weight_decay=0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lb.qat.convert_(model)
    for name, mask in kept.items():
        found = model.get_parameter(name).dequantize()
        assert (found[~mask] == 0).all() and not torch.equal(found, before[name])


def test_the_command_line_names_it() -> None:
    assert steps_of("prune24", INT8) == [Prune24()]
    found = steps_of("prune24(by='wanda', compressed=True), gptq", INT8)
    assert found == [Prune24("wanda", compressed=True), GPTQ()]
