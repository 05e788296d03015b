"""Prepared linears that multiply codes: the bits of the converted model, and gradients against float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import Int, PerRow, PerTensor, PerToken, Scheme, Spec, qat
from lowbit.linear.frozen.codes_product import CodesProduct
from lowbit.numerics.learned_scales import learned_fake_quantize
from lowbit.tensor.trained import fake_quantized
from lowbit.testing.launch import launch
from lowbit.train import Float8BlockMixedPrecision, Float8MixedPrecision, Int8MixedPrecision
from lowbit_kernels.runtime import launches
from tests.distributed.test_train_fsdp import shard
from tests.kernels.interpreted import interpreted
from tests.qat.lora_layers import LoraLayer
from tests.qat.test_factors import rounded_by_factors
from tests.train.problems import linear, outcome, peak_of_a_step, relative, snr, values

INT8 = lowbit.Int8DynamicActivationInt8Weight()
STATIC = lowbit.Int8StaticActivationInt8Weight()
ROW8 = Spec(Int(8), PerRow(), "symmetric")
CLIPPING = Scheme(ROW8, Spec(Int(8), PerToken(), "symmetric"))
SCHEMES = {
    "dynamic": INT8,
    "static": STATIC,
    "clipping": CLIPPING,
    "clipping-static": Scheme(ROW8, Spec(Int(8), PerTensor(), "symmetric", static=True)),
    "int4-activation": Scheme(INT8.weight, Spec(Int(4), PerTensor(), static=True)),
}
LOW = Int8MixedPrecision(always=True, stochastic_rounding=False)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
SCALES = pytest.mark.parametrize("scales", ["present", "learned"])
PARTITIONED = "aot_eager_decomp_partition"
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


class Products(TorchDispatchMode):
    """Counts torch's products by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in ("mm", "addmm", "_int_mm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def prepared(
    scheme: Scheme, scales: Any = "present", gradients: Any = None, n: int = 48, k: int = 67
) -> nn.Module:
    """A calibrated linear of float32."""
    model = nn.Sequential(linear(n, k))
    qat.prepare_(model, scheme, scales=scales, gradients=gradients)
    if scheme.is_static:
        with lowbit.calibrate(model):
            model(values(64, k, seed=4))
    return model


def converted(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    qat.convert_(model)
    return model


# ---- outputs ---------------------------------------------------------------------------------------------------------


@every_scheme
@DTYPES
@SCALES
def test_outputs_equal_converted_ones(scheme: Scheme, dtype: torch.dtype, scales: Any) -> None:
    model = prepared(scheme, scales).to(dtype)
    final = converted(model)
    for shape in [(3, 7, 67), (1, 67), (67,), (0, 67), (2, 0, 67)]:
        for magnitude in (1.0, 0.0, 2.0**-20, 2.0**12):
            x = values(*shape, seed=5, dtype=dtype) * magnitude
            y = model(x)
            assert y.dtype is dtype and torch.equal(y, final(x)), (shape, magnitude)


@every_scheme
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_under_autocast(scheme: Scheme, autocast: torch.dtype) -> None:
    model = prepared(scheme)
    final, x = converted(model), values(5, 67)
    with torch.autocast("cpu", autocast):
        y = model(x)
        assert y.dtype is autocast and torch.equal(y, final(x))


def test_a_row_of_nan_stays_in_its_row() -> None:
    model, x = prepared(INT8), values(4, 67)
    expected = model(x)
    x[1, 3] = torch.nan
    y = model(x)
    assert y[1].isnan().all() and torch.equal(y[[0, 2, 3]], expected[[0, 2, 3]])


def test_the_product_runs_in_int8() -> None:
    model, x = prepared(INT8), values(5, 67).requires_grad_()
    with Products() as seen:
        model(x).sum().backward()
    assert seen.names == ["_int_mm", "mm", "mm"]
    model = prepared(INT8, gradients=LOW)
    with Products() as seen, launches.counted() as calls:
        model(x).sum().backward()
    assert seen.names == ["_int_mm"] and calls["scaled_mm", "int8 torch"] == 2


@pytest.mark.parametrize("scheme", [lowbit.Int4WeightOnly(32), lowbit.Int8WeightOnly(), "uint8"])
def test_other_schemes_multiply_in_high_precision(scheme: Any) -> None:
    if scheme == "uint8":
        scheme = Scheme(INT8.weight, Spec(Int(8, signed=False), PerToken(), "asymmetric"))
    model = prepared(scheme)
    with Products() as seen:
        model(values(5, 67)).sum().backward()
    assert "_int_mm" not in seen.names


def test_switched_off() -> None:
    model, x = prepared(INT8, gradients=LOW), values(5, 67)
    on = model(x)
    qat.enable_(model, activations=False)
    assert torch.equal(model(x), F.linear(x, model[0].weight.dequantize(), model[0].bias))
    with qat.high_precision(model):
        assert torch.equal(model(x), F.linear(x, model[0].weight.master(), model[0].bias))
    qat.enable_(model)
    assert torch.equal(model(x), on)
    qat.undo_(model)
    assert type(model[0].weight) is nn.Parameter


# ---- gradients -------------------------------------------------------------------------------------------------------


def expected(model: nn.Module, scheme: Scheme, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Gradients by name of the rounded operands' product in float64."""
    layer, x = model[0], x.detach().requires_grad_()
    weight = layer.weight.master().detach().clone().requires_grad_()
    learned = "weight_scale" in layer._parameters
    given: dict[str, Tensor] = {"0.weight": weight, "input": x}
    if learned:
        scale = given["0.weight_scale"] = layer.weight_scale.detach().clone().requires_grad_()
        rounded = rounded_by_factors(weight, scale, None, scheme.weight)
    else:
        rounded = scheme.weight.fake_quantize(weight, weight.dtype)
    spec = scheme.activation
    assert spec is not None
    if not scheme.is_static:
        xs = spec.fake_quantize(x)
    else:
        scale = layer.input_scale.detach().clone().requires_grad_(learned)
        xs = learned_fake_quantize(x, scale.view(1, 1), None, spec)
        given |= {"0.input_scale": scale} if learned else {}
    y = xs.double() @ rounded.double().T + layer.bias.double()
    grads = torch.autograd.grad(y, list(given.values()), upstream.double())
    found = dict(zip(given, grads, strict=True))
    return {"output": y.detach(), "0.bias": upstream.double().sum(0), **found}


@every_scheme
@SCALES
@pytest.mark.parametrize("gradients", [None, LOW], ids=["high", "low"])
def test_gradients_against_float64(scheme: Scheme, scales: Any, gradients: Any) -> None:
    if gradients is not None and scheme is SCHEMES["int4-activation"]:
        pytest.skip("gradients in int8 take int8 activations")
    model = prepared(scheme, scales, gradients)
    x, upstream = values(53, 67, seed=5) * 1.5, values(53, 48, seed=3)
    found = outcome(model, x, upstream)
    wanted = expected(model, scheme, x, upstream)
    assert set(found) == set(wanted)
    if scheme is not INT8:
        clips = wanted["input"] == 0
        assert clips.any() and torch.equal(found["input"] == 0, clips)
    for name, value in wanted.items():
        exact = gradients is None or name in ("output", "0.bias")
        least = 100 if exact else 18 if name.endswith("_scale") else 35
        assert snr(found[name], value) > least, (name, snr(found[name], value))


@SCALES
@pytest.mark.parametrize("gradients", [None, LOW], ids=["high", "low"])
def test_gradients_under_autocast(scales: Any, gradients: Any) -> None:
    """Products of bfloat16 inputs; gradients of float32 parameters."""
    model = prepared(INT8, scales, gradients)
    x, upstream = values(53, 67, seed=5), values(53, 48, seed=3)
    wanted = expected(model, INT8, x, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(model, x, upstream.bfloat16())
    for name, value in wanted.items():
        assert found[name].dtype is (torch.bfloat16 if name == "output" else torch.float32)
        assert snr(found[name], value) > (15 if name.endswith("_scale") else 30), name


@pytest.mark.parametrize("low", [(True, False), (False, True)], ids=["input", "weight"])
def test_one_of_the_gradients_in_int8(low: tuple[bool, bool]) -> None:
    model = prepared(INT8, gradients=replace(LOW, grad_input=low[0], grad_weight=low[1]))
    x, upstream = values(53, 67, seed=5), values(53, 48, seed=3)
    with launches.counted() as calls:
        found = outcome(model, x, upstream)
    assert calls["scaled_mm", "int8 torch"] == 1
    wanted = expected(model, INT8, x, upstream)
    for name, is_low in (("input", low[0]), ("0.weight", low[1])):
        assert (snr(found[name], wanted[name]) < 90) == is_low, name


def test_stochastic_rounding_of_gradients_is_unbiased_and_repeatable() -> None:
    x, upstream = values(53, 67, seed=5), values(53, 48, seed=3)
    found = []
    for seed in (*range(24), 0):
        model = prepared(INT8, gradients=replace(LOW, stochastic_rounding=True, seed=seed))
        found.append(outcome(model, x, upstream)["input"])
    wanted = expected(model, INT8, x, upstream)["input"]
    assert torch.equal(found[0], found[-1]) and not torch.equal(found[0], found[1])
    mean = torch.stack(found[:-1]).double().mean(0)
    assert snr(mean, wanted) > snr(found[0], wanted) + 9


def plain(model: nn.Module) -> list[Tensor]:
    """The memory of the parameters."""
    found = [p for p in model.parameters() if type(p) is nn.Parameter]
    return [*found, model[0].weight.master()]


@contextmanager
def kept_bytes(known: list[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of the memory that is kept for backward, besides that of `known`."""
    kept: dict[int, int] = {}
    own = {t.untyped_storage().data_ptr() for t in known}

    def pack(t: Tensor) -> Tensor:
        if isinstance(t, lowbit.FakeQuantizedTensor):
            pack(t.master())
        elif t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield kept


@pytest.mark.parametrize("gradients", [None, LOW], ids=["high", "low"])
@SCALES
def test_what_backward_keeps(scales: Any, gradients: Any) -> None:
    """Codes of x, one byte an element, and nothing of the weight but the parameter itself."""
    n, k, m = 64, 128, 512
    model = prepared(INT8, scales, gradients, n, k)
    x = values(m, k).requires_grad_()
    with kept_bytes([x, *plain(model)]) as kept:
        y = model(x)
    assert sum(kept.values()) <= m * k + 4 * (m + 2 * n + k), kept
    y.sum().backward()


@pytest.mark.parametrize(
    ("scheme", "scales", "gradients", "backend"),
    [
        (INT8, "present", LOW, PARTITIONED),
        (INT8, "learned", None, PARTITIONED),
        (STATIC, "present", None, PARTITIONED),
        (STATIC, "learned", LOW, PARTITIONED),
        *(
            pytest.param(scheme, *rest, PARTITIONED, marks=pytest.mark.exhaustive)
            for scheme, rest in (
                (INT8, ("present", None)),
                (INT8, ("learned", LOW)),
                (STATIC, ("present", LOW)),
                (STATIC, ("learned", None)),
            )
        ),
        pytest.param(STATIC, "learned", LOW, "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled(scheme: Scheme, scales: Any, gradients: Any, backend: str) -> None:
    """Inductor takes seconds; its partitioner makes the same graphs, which run without its code."""
    torch._dynamo.reset()
    model = prepared(scheme, scales, gradients, 64, 128)
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, backend=backend)
    x, upstream = values(512, 128, seed=5), values(512, 64, seed=3)
    wanted, found = outcome(model, x, upstream), outcome(compiled, x, upstream)
    assert torch.equal(found["output"], wanted["output"]) and set(found) == set(wanted)
    for name, value in wanted.items():
        assert snr(found[name], value) > (90 if gradients is None else 60), name

    x.requires_grad_()
    with kept_bytes([x, *plain(compiled)]) as kept:
        compiled(x)
    masks = 512 * 128 // 8 if scheme.is_static and scales == "present" else 0
    assert sum(kept.values()) <= 512 * 128 + masks + 4 * 2048, kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model, x = prepared(INT8, "learned", LOW), values(5, 67)
    again = copy.deepcopy(model)
    wanted = outcome(model, x)
    run = lambda v: checkpoint(again, v, use_reentrant=reentrant)  # noqa: E731
    x = x.requires_grad_()
    y = run(x)
    y.backward(values(*y.shape, seed=3))
    for name, p in again.named_parameters():
        assert torch.equal(p.grad, wanted[name]), name


def test_layers_of_one_input_share_its_codes() -> None:
    model = nn.ModuleList([linear(48, 64), linear(32, 64)])
    qat.prepare_(model, INT8, gradients=LOW)
    x = values(5, 64).requires_grad_() * 1
    with launches.counted() as calls:
        [layer(x) for layer in model]
    assert sum(calls[op] for op in calls if op[0] == "quantize_rowcol") == 1


def test_second_derivatives_say_what_to_do() -> None:
    model, x = prepared(INT8), values(5, 67).requires_grad_()
    with pytest.raises(NotImplementedError, match="without create_graph=True"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_merged_adapters(scales: Any) -> None:
    """Their sum with the weight is rounded and multiplied as codes; gradients arrive at the adapters."""
    torch.manual_seed(0)
    model = nn.Sequential(LoraLayer(linear(48, 64), {"default": (4, 1.0)}))
    qat.prepare_(model, INT8, scales=scales, gradients=LOW)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2 and p.shape[1] == 4:
                p.normal_(std=0.1)
    x = values(33, 64)
    with Products() as seen, launches.counted() as calls:
        found = outcome(model, x)
    assert seen.names.count("_int_mm") == 2 and calls["scaled_mm", "int8 torch"] == 2
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(found[name].any() for name in names) and any("lora_A" in n for n in names)
    final = converted(model)
    assert torch.equal(final(x), found["output"])


# ---- float8 and Triton on the CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["e4m3", "e5m2"])
@pytest.mark.parametrize("low", [False, True], ids=["high", "low"])
def test_float8_codes(low: bool, backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU that has float8 units, by operations that stand for them."""
    scheme = lowbit.Float8DynamicActivationFloat8Weight()
    gradients = Float8MixedPrecision(always=True, backward=backward) if low else None
    model = prepared(scheme, gradients=gradients, k=64)
    product = CodesProduct(by_kernel=True, quantizes=True)
    monkeypatch.setattr(fake_quantized, "product_of", lambda x, weight: product)
    x, upstream = values(53, 64, seed=5), values(53, 48, seed=3)
    with launches.counted() as calls:
        found = outcome(model, x, upstream)
    assert calls["scaled_mm", "float8 torch"] == (3 if low else 1)
    for name, value in expected(model, scheme, x, upstream).items():
        exact = not low or name in ("output", "0.bias")
        assert snr(found[name], value) > (90 if exact else 22), name


def test_under_the_interpreter_of_triton() -> None:
    found = interpreted(
        "import json; from tests.qat import test_coded as t; print(json.dumps(t.low_bit_snr()))"
    )
    assert found.pop("calls") == {"scaled_mm int8 triton": 2, "quantize_rowcol triton": 2}
    assert min(found.values()) > 35, found


def low_bit_snr() -> dict[str, Any]:
    """In dB, of each result whose products run in int8, and the calls."""
    model, x, upstream = prepared(INT8, gradients=LOW), values(53, 67), values(53, 48, seed=3)
    with launches.counted() as calls:
        found = outcome(model, x, upstream)
    wanted = expected(model, INT8, x, upstream)
    counts = {" ".join(op): n for op, n in calls.items() if op[0] != "transpose_codes"}
    return {"calls": counts, **{name: snr(found[name], wanted[name]) for name in wanted}}


# ---- the argument of prepare_ ----------------------------------------------------------------------------------------


def test_reports_name_the_gradients() -> None:
    model = nn.Sequential(linear(48, 64), linear(32, 48))
    report = qat.prepare_(model, {"0": INT8, "1": lowbit.Int4WeightOnly(16)}, gradients=LOW)
    notes = {entry.fqn: entry.note for entry in report.entries}
    assert "grad_input and grad_weight in int8" in notes["0.weight"]
    assert "gradients in high precision" in notes["1.weight"]
    assert model[0].weight.gradients == LOW and model[1].weight.gradients is None


@pytest.mark.parametrize(
    ("gradients", "error", "says"),
    [
        ("int8", TypeError, "a scheme of mixed precision"),
        (lowbit.Int8Weight(), TypeError, "a scheme of mixed precision"),
        (replace(LOW, output=False), ValueError, "output=False has no effect"),
        (replace(LOW, grad_input=False, grad_weight=False), ValueError, "names neither"),
        (Float8BlockMixedPrecision(always=True), ValueError, "no scale a row"),
        (Float8MixedPrecision(always=True), ValueError, "fits none"),
    ],
    ids=["string", "weight", "output", "none", "blocks", "format"],
)
def test_gradients_that_do_not_fit(gradients: Any, error: type[Exception], says: str) -> None:
    model = nn.Sequential(linear(48, 64))
    with pytest.raises(error, match=says):
        qat.prepare_(model, INT8, gradients=gradients)
    assert type(model[0].weight) is nn.Parameter


def test_small_products_keep_gradients_in_high_precision() -> None:
    model, x = prepared(INT8, gradients=Int8MixedPrecision()), values(5, 67)
    wanted = outcome(prepared(INT8), x)
    found = outcome(model, x)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_state_dicts_do_not_hold_the_gradients() -> None:
    model, other = prepared(INT8, gradients=LOW), prepared(INT8)
    other.load_state_dict(model.state_dict())
    assert other[0].weight.gradients is None
    assert copy.deepcopy(model)[0].weight.gradients == LOW


def test_int8_training_learns() -> None:
    losses = []
    for gradients in (None, LOW):
        torch.manual_seed(0)
        model = nn.Sequential(linear(96, 64), nn.GELU(), linear(32, 96))
        x, target = values(256, 64), values(256, 32, seed=8)
        qat.prepare_(model, INT8, scales="learned", gradients=gradients)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(40):
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert math.isclose(*losses, rel_tol=0.02), losses


# ---- several processes -----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second = linear(rows, 64), linear(64, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.silu(self.first(x)))


def check_sharded(rank: int, world_size: int) -> bool:
    for rows in (48, 33):
        for scales in ("present", "learned"):
            for gradients in (None, LOW):
                for dtype in (torch.float32, torch.bfloat16):
                    alone: Any = Pair(rows).to(dtype)
                    qat.prepare_(alone, INT8, scales=scales, gradients=gradients)
                    model = shard(copy.deepcopy(alone))
                    x = values(16, 64, dtype=dtype)
                    where = (rows, scales, gradients, dtype)
                    wanted, found = alone(x), model(x)
                    assert torch.equal(found, wanted), where
                    wanted.float().square().sum().backward()
                    found.float().square().sum().backward()
                    bound = 2e-2 if dtype is torch.bfloat16 or scales == "learned" else 1e-3
                    for (name, p), own in zip(
                        model.named_parameters(), alone.parameters(), strict=True
                    ):
                        assert relative(p.grad.full_tensor(), own.grad) < bound, (*where, name)
    return True


def check_replicated(rank: int, world_size: int) -> bool:
    """DistributedDataParallel: the mean of both ranks' gradients."""
    for scales in ("present", "learned"):
        alone: Any = Pair(33)
        qat.prepare_(alone, INT8, scales=scales, gradients=LOW)
        model = DistributedDataParallel(copy.deepcopy(alone))
        model(values(16, 64, seed=rank)).square().sum().backward()
        for seed in range(world_size):
            (alone(values(16, 64, seed=seed)).square().sum() / world_size).backward()
        for (name, p), own in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            assert relative(p.grad, own.grad) < 1e-5, (scales, name)
    return True


def test_replicated() -> None:
    assert launch(check_replicated, 2) == [True, True]


def test_sharded() -> None:
    assert launch(check_sharded, 2) == [True, True]


# ---- a GPU -----------------------------------------------------------------------------------------------------------

ON_GPU = {
    "int8": (INT8, Int8MixedPrecision(always=True)),
    "int8-static": (STATIC, Int8MixedPrecision(always=True)),
    "float8": (
        lowbit.Float8DynamicActivationFloat8Weight(),
        Float8MixedPrecision(always=True),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@SCALES
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu(name: str, scales: Any, compiled: bool) -> None:
    """Outputs of many tokens equal the converted model's to the bit. Few tokens take its decode kernel, whose sums are
    of float32: they agree to the rounding of bfloat16."""
    torch._dynamo.reset()
    scheme, gradients = ON_GPU[name]
    model = nn.Sequential(linear(256, 512)).bfloat16().cuda()
    qat.prepare_(model, scheme, scales=scales, gradients=gradients)
    x = values(1024, 512, seed=5, dtype=torch.bfloat16).cuda()
    upstream = values(1024, 256, seed=3, dtype=torch.bfloat16).cuda()
    if scheme.is_static:
        with lowbit.calibrate(model):
            model(x)
    wanted = expected(model, scheme, x, upstream)
    final, few = converted(model), model(x[:8])
    if compiled:
        model.compile(fullgraph=True)
    outcome(model, x, upstream)
    with launches.counted() as calls:
        found = outcome(model, x, upstream)
    assert sum(n for op, n in calls.items() if op[0] == "scaled_mm") == 3
    assert torch.equal(found["output"], final(x))
    assert relative(few, final(x[:8])) < 2.0**-7
    for each, value in wanted.items():
        assert snr(found[each], value) > 20, each


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [None, Int8MixedPrecision()], ids=["high", "low"])
def test_less_memory_than_bfloat16_on_a_gpu(gradients: Any) -> None:
    peaks = []
    for low in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Sequential(linear(4096, 2048), nn.GELU()) for _ in range(2)))
        model = model.append(linear(2048, 4096)).insert(1, linear(2048, 4096)).bfloat16().cuda()
        if low:
            qat.prepare_(model, INT8, gradients=gradients)
        model.compile()
        x = values(4, 4096, 2048, dtype=torch.bfloat16).cuda()
        peaks.append(peak_of_a_step(model, x))
        del model, x
    assert peaks[1] <= peaks[0], [peak / 2**20 for peak in peaks]
