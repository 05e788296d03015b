"""`lowbit.calibrate` with batches: what it walks, what it reports, and its edges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import AWQ, GPTQ, LearnedRounding, Search, SmoothQuant, Step
from lowbit.tracing.batches import uncached_autocast
from recipes.llama import Llama, LlamaConfig

INT4 = lb.Int4WeightOnly(32)
CONFIG = LlamaConfig(vocab_size=96, dim=64, layers=2, heads=4, kv_heads=2, hidden=96, context=32)


def llama(**changes: object) -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**{**CONFIG.__dict__, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.ndim > 1 else 1)
    return model.eval()


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(seed))


BATCHES = [tokens(0, 4, 32), tokens(1, 2, 17), tokens(2, 1, 5)]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}


def same(a: nn.Module, b: nn.Module) -> bool:
    found, expected = state(a), state(b)
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], expected[k]) for k in found
    )


def damage(model: nn.Module, plain: nn.Module, batch: Tensor) -> float:
    with torch.no_grad():
        expected = plain(batch).float().log_softmax(-1)
        found = model(batch).float().log_softmax(-1)
        return float(F.kl_div(found, expected, reduction="sum", log_target=True))


@pytest.mark.parametrize(
    "steps",
    [[AWQ(), GPTQ()], [LearnedRounding(3)], [LearnedRounding(3, over="model")]],
    ids=["fold", "blocks", "model"],
)
def test_steps_run_on_the_present_values_under_autocast(steps: list[Step]) -> None:
    """Autocast keeps its first bfloat16 copy of a float32 weight, which these steps change."""
    models = [llama(), llama()]
    for model, cached in zip(models, (True, False), strict=True):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            model(BATCHES[0])
            lb.calibrate(model, lb.IntxWeightOnly(3, 32), BATCHES, steps=steps)
            assert torch.is_autocast_cache_enabled() == cached
            found = model(BATCHES[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(found, model(BATCHES[0]))
    assert same(*models)


def test_a_forward_with_an_autocast_of_its_own_sees_the_present_values() -> None:
    """A decorator, as accelerate puts around a forward, was made while the cache of copies was on."""
    layer = nn.Linear(4, 4, bias=False)
    forward = torch.autocast("cpu", torch.bfloat16)(layer)
    with torch.autocast("cpu", torch.bfloat16):
        forward(torch.ones(4))
        with uncached_autocast():
            for value in (0.0, 1.0):
                layer.weight.data = torch.full((4, 4), value)
                assert torch.equal(forward(torch.ones(4)).float(), torch.full((4,), 4 * value))
        assert torch.is_autocast_cache_enabled()
        layer(torch.ones(4))
        layer.weight.data = torch.zeros(4, 4)
        assert layer(torch.ones(4)).max() == 4, "autocast keeps copies again"
    assert layer(torch.ones(4)).max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_fold_under_autocast_to_float16(dtype: torch.dtype) -> None:
    plain = llama().to(dtype)
    models = [copy.deepcopy(plain) for _ in range(2)]
    scheme = lb.IntxWeightOnly(3, 32)
    expected = lb.calibrate(models[0], scheme, BATCHES, steps=[AWQ()])
    with torch.autocast("cpu", torch.float16):
        found = lb.calibrate(models[1], scheme, BATCHES, steps=[AWQ()])
    assert found.layers.keys() == expected.layers.keys()
    held_out = tokens(7, 8, 32)
    damages = [damage(model, plain, held_out) for model in models]
    assert damages[1] < 1.1 * damages[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pairs", [0.0, 1.0])
def test_a_decoder_loses_less_than_rounded(tied: bool, pairs: float) -> None:
    plain = llama(tied=tied)
    rounded, model = copy.deepcopy(plain), copy.deepcopy(plain)
    scheme = lb.IntxWeightOnly(3, 32)
    lb.quantize_(rounded, scheme)
    report = lb.calibrate(model, scheme, BATCHES, steps=[GPTQ(asymmetric=pairs)])
    held_out = tokens(7, 8, 32)
    assert damage(model, plain, held_out) < damage(rounded, plain, held_out)
    assert set(report.layers) <= set(report.converted)
    assert len(report.layers) == 2 * 7 + 1
    for layer in report.layers.values():
        assert layer.after < layer.before and layer.method == "GPTQ" and layer.rows > 0
    assert (model.head.weight is model.embedding.weight) == tied
    assert "GPTQ, " in str(report) and " -> " in str(report)
    assert model.training is False


def test_the_result_is_an_ordinary_model() -> None:
    """It has the state dict of a rounded one, which loads it."""
    model, rounded = llama(), llama()
    lb.calibrate(model, INT4, BATCHES)
    lb.quantize_(rounded, INT4)
    rounded.load_state_dict(model.state_dict())
    assert same(model, rounded)
    assert torch.equal(model(BATCHES[0]), rounded(BATCHES[0]))


def test_two_runs_are_equal_to_the_bit() -> None:
    models = [llama(), llama()]
    for model in models:
        lb.calibrate(model, INT4, BATCHES, steps=[GPTQ(asymmetric=0.5)])
    assert same(*models)


def test_blocks_give_what_the_whole_model_gives() -> None:
    """Block by block, and by running all of the model for each group of weights."""
    chain, whole = llama(tied=False), llama(tied=False)
    lb.calibrate(chain, INT4, BATCHES, blocks=chain.blocks)
    lb.calibrate(whole, INT4, BATCHES, blocks=[])
    for a, b in zip(chain.parameters(), whole.parameters(), strict=True):
        if isinstance(a, lb.AffineTensor):
            assert float((a.dequantize() != b.dequantize()).float().mean()) < 0.01


def test_blocks_that_are_no_chain_are_refused() -> None:
    model = llama()
    before = state(model)
    with pytest.raises(ValueError, match="order in which the model calls them"):
        lb.calibrate(model, INT4, BATCHES, blocks=list(model.blocks)[::-1])
    assert all(torch.equal(v, before[k]) for k, v in state(model).items())


def test_what_multiplies_one_tensor_shares_its_hessian() -> None:
    model = llama()
    report = lb.calibrate(model, INT4, BATCHES)
    rows = {name: layer.rows for name, layer in report.layers.items()}
    count = sum(b.numel() for b in BATCHES)
    assert rows.pop("embedding.weight") == 2 * count
    assert set(rows.values()) == {count}


# ---- batches ----------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A layer that no batch reaches, and a shape that each batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) if x.shape[-1] else self.unused(x)


def test_a_layer_that_no_batch_reaches() -> None:
    model = Branches()
    plain = model.unused.weight.detach().clone()
    report = lb.calibrate(model, INT4, [torch.randn(40, 64)])
    layer = report.layers["unused.weight"]
    assert layer.rows == 0 and "no batch reached it" in str(report)
    assert torch.equal(
        model.unused.weight.dequantize(), lb.AffineTensor.searched(plain, INT4).dequantize()
    )
    assert report.layers["used.weight"].rows == 40


class Experts(nn.Module):
    """Stacked experts, of which each token takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 96, 64) / 8)
        self.down = nn.Parameter(torch.randn(4, 64, 96) / 8)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            at = chosen == e
            out[at] = F.linear(F.gelu(F.linear(x[at], self.up[e])), self.down[e])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(64, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, self.router(x).argmax(-1))


def test_stacked_experts_with_few_or_no_tokens() -> None:
    model = Mixture()
    with torch.no_grad():
        model.router.bias[1] = 1.0  # few tokens
        model.router.bias[3] = -1e9  # none
    plain = copy.deepcopy(model)
    rounded = copy.deepcopy(model)
    lb.quantize_(rounded, lb.IntxWeightOnly(3, 32))
    x = torch.randn(300, 64)
    report = lb.calibrate(model, lb.IntxWeightOnly(3, 32), [x])
    assert report.layers["experts.up"].unreached == 1
    without = copy.deepcopy(plain)  # pairs of inputs would mix tokens
    lb.calibrate(without, lb.IntxWeightOnly(3, 32), [x], steps=[GPTQ(asymmetric=0)])
    for name in ("up", "down"):
        own, other = (getattr(m.experts, name) for m in (model, without))
        assert torch.equal(own.codes, other.codes)
    assert "1 experts saw no token" in str(report)
    with torch.no_grad():
        held_out = torch.randn(300, 64)
        errors = [(m(held_out) - plain(held_out)).norm() for m in (model, rounded)]
    assert errors[0] < errors[1]
    assert all(layer.after < layer.before for layer in report.layers.values())


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, groups=groups),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, stride=2, padding="valid"),
        nn.Flatten(2),
        nn.Conv1d(8, 8, 3, padding="same", dilation=2),
    )
    plain, rounded = copy.deepcopy(model), copy.deepcopy(model)
    scheme = lb.IntxWeightOnly(3)
    lb.quantize_(rounded, scheme, lambda module, name: True, scales="minmax")
    images = [torch.randn(4, 8, 9, 9).cumsum(-1) for _ in range(3)]
    report = lb.calibrate(model, scheme, images, lambda module, name: True)
    assert all(layer.after < layer.before and layer.rows for layer in report.layers.values())
    x = torch.randn(4, 8, 9, 9).cumsum(-1)
    with torch.no_grad():
        errors = [(m(x) - plain(x)).norm() for m in (model, rounded)]
    assert errors[0] < errors[1]


def test_an_encoder_of_torch() -> None:
    """The output projection of its attention is calibrated as well."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    report = lb.calibrate(model, INT4, [torch.randn(8, 12, 64) for _ in range(3)])
    rows = {name: found.rows for name, found in report.layers.items()}
    assert set(rows.values()) == {3 * 8 * 12}, rows
    assert "layers.0.self_attn.out_proj.weight" in rows


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_layer_with_nan_inputs_is_named(value: float) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    with torch.no_grad():
        model[0].bias[3] = value
    with pytest.raises(
        ValueError, match=r"inputs of 2\.weight have NaN or infinite values.*1 of 2"
    ):
        lb.calibrate(model, INT4, [torch.randn(40, 64)])
    assert isinstance(model[0].weight, lb.AffineTensor)
    assert type(model[2].weight) is nn.Parameter


@pytest.mark.parametrize("step", [AWQ(), SmoothQuant()], ids=str)
@pytest.mark.parametrize("channel", [0.5, 1e-4])
def test_what_folds_stays_finite_in_float16(step: Step, channel: float) -> None:
    """A large weight takes no more of the scale than its dtype holds, and the module before gives no less."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)).half()
    with torch.no_grad():
        model[0].weight[5], model[0].weight[9] = channel * 20, 1000
        model[1].weight[3, 5], model[1].weight[:, 9] = 6e4, 1e-6
    x = torch.randn(80, 64).half() * 1e-3
    plain = model(x)
    lb.calibrate(model, lb.NF4WeightOnly(32), [x], steps=[step])
    assert all(p.dequantize().isfinite().all() for p in model.parameters())
    assert model(x).isfinite().all() and plain.isfinite().all()


def test_a_weight_that_rounds_to_infinity_in_its_dtype_is_named() -> None:
    for steps in ([GPTQ()], [Search()]):
        model = nn.Sequential(nn.Linear(64, 32, bias=False).half())
        with torch.no_grad():
            model[0].weight[3, 5] = 6e4  # 65536 in MXFP4
        with pytest.raises(ValueError, match=r"0\.weight: 1 values of 2048 round to infinity"):
            lb.calibrate(model, lb.MXFP4WeightOnly(), [torch.zeros(40, 64).half()], steps=steps)


def test_inputs_that_float16_made_infinite_are_told_of() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).half()
    with torch.no_grad():
        model[0].weight[3] = 6e4
    with pytest.raises(
        ValueError, match=r"inputs of 1\.weight .*In float16, products beyond 65504"
    ):
        lb.calibrate(model, INT4, [torch.ones(40, 64).half()])


def test_siblings_share_their_global_scale() -> None:
    model = llama()
    lb.calibrate(model, lb.NVFP4WeightOnly(), BATCHES)
    attention = model.blocks[0].attention
    scales = [
        layer.weight.global_scale for layer in (attention.query, attention.key, attention.value)
    ]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])


def test_a_model_in_train_mode_is_calibrated_in_eval_mode() -> None:
    """Its static scales too; the mode stays."""
    scheme, x = lb.Int8StaticActivationInt8Weight(), torch.randn(64, 64)
    models = []
    for mode in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 32)).train(mode)
        lb.calibrate(model, scheme, [x])
        assert model.training is mode
        models.append(model)
    assert same(*models)


@pytest.mark.usefixtures("least_squares")
def test_steps_in_order() -> None:
    """GPTQ takes the scales of the step before it."""
    model = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(200, 64)
    plain = model[0].weight.detach().clone()
    lb.calibrate(model, INT4, [x], steps=[Search(), GPTQ()])
    expected = lb.AffineTensor.searched(plain, INT4, x.square().sum(0))
    torch.testing.assert_close(model[0].weight.scale, expected.scale, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    model.cos, model.sin = model.cos.to(dtype), model.sin.to(dtype)
    rounded = copy.deepcopy(model)
    lb.calibrate(model, INT4, BATCHES)
    lb.quantize_(rounded, INT4)
    for a, b in zip(model.parameters(), rounded.parameters(), strict=True):
        assert a.dtype is dtype
        if isinstance(a, lb.AffineTensor):
            assert a.scale.dtype is b.scale.dtype


@pytest.mark.parametrize("scheme", [INT4, lb.Int8StaticActivationInt8Weight()], ids=str)
def test_a_compiled_model_is_calibrated_eagerly(scheme: lb.Scheme) -> None:
    def fail(graph: object, inputs: object) -> object:
        raise AssertionError("compiled")

    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    models[1].compile(backend=fail)
    models[1][1].compile(backend=fail)
    for model in models:
        lb.calibrate(model, scheme, [torch.ones(4, 64).cumsum(1)], steps=[SmoothQuant(), GPTQ()])
    assert same(*models)


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        ([GPTQ(), AWQ()], "AWQ, GPTQ"),
        ([Search(), SmoothQuant(), GPTQ()], "SmoothQuant, Search, GPTQ"),
        ([AWQ(), GPTQ(), SmoothQuant()], "AWQ, SmoothQuant, GPTQ"),
    ],
)
def test_steps_that_change_the_model_come_first(steps: list, order: str) -> None:
    late = order.split(", ")[1 if steps[0] == AWQ() else 0]
    with pytest.raises(ValueError, match=f"{late} changes the model .*; give them as {order}$"):
        lb.calibrate(nn.Sequential(nn.Linear(64, 8)), INT4, [torch.randn(4, 64)], steps=steps)


class Tail(nn.Module):
    """What follows the blocks writes to the hidden state."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head, self.in_place = nn.Linear(64, 32), in_place

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mul_(2) if self.in_place else x * 2)


def test_a_tail_that_writes_to_its_input() -> None:
    models = [Tail(in_place) for in_place in (True, False)]
    reports = [
        lb.calibrate(m, INT4, [torch.ones(5, 64).cumsum(1)], blocks=m.blocks) for m in models
    ]
    assert same(*models)
    assert reports[0].layers["head.weight"].after == reports[1].layers["head.weight"].after
