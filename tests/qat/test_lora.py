"""QAT of the merged weight of LoRA layers: the same bits before and after conversion, gradients, memory, refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit import qat
from lowbit.layers.frozen import shown_class
from lowbit.linear.frozen.dequantized import plain_linear
from lowbit.tensor.trained.adapted import is_merged
from lowbit_kernels.composed.add_low_rank import add_low_rank
from tests.qat.lora_layers import LoraEmbedding, LoraLayer, Net
from tests.qat.test_training import straight_through
from tests.schemes import (
    SCHEMES,
    WEIGHT_ONLY,
    over,
    relative_error,
    weight_specs,
)

INT4 = lb.Int4WeightOnly(32)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


def net(scheme: Any = INT4, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net(dtype)
    qat.prepare_(model, scheme)
    return model


def steps(model: nn.Module, count: int = 3) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(count):
        dtype = next(model.parameters()).dtype
        loss = (model(torch.randn(16, 64).to(dtype)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def merged(layer: LoraLayer) -> Tensor:
    """The merged weight, computed apart from lowbit's layers."""
    base: Any = layer.base_layer
    names = layer.active_adapters
    a, b = ([getattr(layer, f)[n].weight.detach() for n in names] for f in ("lora_A", "lora_B"))
    return add_low_rank(base.weight.weight, a, b, [layer.scaling[n] for n in names])


# ---- the same bits -----------------------------------------------------------------------------------------------


INT8_INT8 = SCHEMES["int8xint8"]


@pytest.mark.cover("values")
@over(SCHEMES)
@DTYPES
def test_converted_weights_are_those_of_training(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    model = net(scheme, dtype)
    steps(model)
    seen = {n: merged(layer) for n, layer in model.named_children() if isinstance(layer, LoraLayer)}
    x = torch.randn(5, 64).to(dtype)
    expected = x + 0
    for name in ("up", "down"):
        layer = getattr(model, name)
        rounded = scheme.weight.fake_quantize(seen[name], dtype)
        xs = expected if scheme.activation is None else scheme.activation.fake_quantize(expected)
        y = layer(expected)
        if scheme is not INT8_INT8:  # a product of codes, which is compared with the converted one
            assert torch.equal(y, F.linear(xs, rounded, layer.base_layer.bias))
        expected = F.silu(y) if name == "up" else y
        seen[name] = rounded
    y = model(x)
    qat.convert_(model)
    assert scheme is not INT8_INT8 or torch.equal(model(x), y)
    for name, rounded in seen.items():
        layer = getattr(model, name)
        assert shown_class(layer) is nn.Linear and not layer.weight.requires_grad
        assert torch.equal(layer.weight.dequantize(), rounded), name


@over(WEIGHT_ONLY)
def test_outputs_in_float32_are_equal(scheme: lb.Scheme) -> None:
    lb.register_linear(lambda x, w, b: True, plain := lambda x, w, b: plain_linear(x, w, b))
    try:
        model = net(scheme)
        steps(model)
        x = torch.randn(5, 64)
        before = model(x)
        qat.convert_(model)
        assert torch.equal(model(x), before)
    finally:
        lb.unregister_linear(plain)


@settings(max_examples=60, deadline=None)
@given(
    weight_specs(2),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
    st.floats(-3, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_prepared_equals_converted(spec, n, k, rank, factor, dtype, adapters, seed) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        LoraLayer(nn.Linear(k, n, bias=False, dtype=dtype), {"default": (rank, factor)})
    )
    for part in (model[0].lora_A, model[0].lora_B):
        part.to(adapters)
    qat.prepare_(model, lb.Scheme(spec))
    x = torch.randn(3, k).to(dtype)
    y = model(x)
    qat.convert_(model)
    assert torch.equal(plain_linear(x, model[0].weight, None), y)


def test_every_adapter_in_use_is_merged_and_no_other() -> None:
    model = net()
    for used in (["two"], ["one"], ["two", "one"], [], ["absent"]):
        model.down.active_adapters = used
        final = copy.deepcopy(model)
        qat.convert_(final)
        layer, x = model.down, torch.randn(3, 96)
        names = [n for n in used if n in layer.lora_A]
        assert torch.equal(final.down(x), layer(x)), used
        expected = layer.base_layer.weight.master().double()
        for n in names:
            delta = layer.lora_B[n].weight.double() @ layer.lora_A[n].weight.double()
            expected = expected + layer.scaling[n] * delta
        rounded = INT4.weight.fake_quantize(expected.float(), torch.float32)
        assert relative_error(final.down.weight.dequantize(), rounded) < 0.02


@over(WEIGHT_ONLY)
def test_embeddings(scheme: lb.Scheme) -> None:
    model = nn.Sequential(LoraEmbedding(nn.Embedding(21, 40)))
    if scheme.weight.granularity == lb.PerBlock(4, 8):
        with pytest.raises(ValueError, match="rows would share scales"):
            qat.prepare_(model, scheme, lambda m, name: isinstance(m, nn.Embedding))
        return
    qat.prepare_(model, scheme, lambda m, name: isinstance(m, nn.Embedding))
    tokens = torch.tensor([[3, 20], [3, 0]])
    y = model(tokens)
    y.square().sum().backward()
    layer = model[0]
    base = layer.base_layer.weight
    assert base.grad is None
    leaves = [p.detach().requires_grad_() for p in (layer.lora_embedding_A["default"],)]
    leaves += [layer.lora_embedding_B["default"].detach().requires_grad_()]
    whole = base.master() + 0.5 * (leaves[1] @ leaves[0]).t()
    scheme.weight.fake_quantize(whole, whole.dtype)[tokens].square().sum().backward()
    for found, wanted in zip(
        (layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]), leaves, strict=True
    ):
        assert relative_error(found.grad, wanted.grad) < 0.02
    qat.convert_(model)
    assert shown_class(model[0]) is nn.Embedding and torch.equal(model(tokens), y)


# ---- gradients and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("k", [64, 67])
def test_gradients_by_name(mapping: Any, k: int) -> None:
    """Against float64, with the rounded weight and the clipped elements from the formula written with autograd."""
    scheme = lb.Int4WeightOnly(16, mapping)
    base = nn.Linear(k, 24)
    factors = {"one": (3, 2.0), "two": (5, 0.25)}
    layer = LoraLayer(base, factors)
    base.bias.requires_grad_(True)
    qat.prepare_(nn.Sequential(layer), scheme)
    x, grad = torch.randn(9, k, requires_grad=True), torch.randn(9, 24)
    layer(x).backward(grad)

    leaf = merged(layer).requires_grad_()
    seen = straight_through(leaf, scheme.weight)
    seen.sum().backward()
    inside = leaf.grad.double()
    assert inside.mean() > 0 and (mapping != "symmetric" or inside.mean() < 1)
    grad64 = grad.double()
    grad_merged = (grad64.t() @ x.detach().double()) * inside
    expected = {"x": grad64 @ seen.detach().double(), "bias": grad64.sum(0)}
    found = {"x": x.grad, "bias": base.bias.grad}
    for name, (_, s) in factors.items():
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        expected[f"A of {name}"] = s * b.detach().double().t() @ grad_merged
        expected[f"B of {name}"] = s * grad_merged @ a.detach().double().t()
        found |= {f"A of {name}": a.grad, f"B of {name}": b.grad}
    for name, wanted in expected.items():
        assert relative_error(found[name], wanted) < 2e-6, name
    assert layer.base_layer.weight.grad is None


def test_an_unfrozen_base_trains_too() -> None:
    model = net()
    weight = model.up.base_layer.weight.requires_grad_(True)
    model(torch.randn(7, 64)).square().sum().backward()
    assert weight.grad.shape == weight.shape and weight.grad.any()


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps, besides the parameters' own memory."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters() if type(p) is nn.Parameter}
    own |= {w.weight.untyped_storage().data_ptr() for w in weights(model)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    del y
    return sum(kept.values())


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if is_merged(p)]


@pytest.mark.parametrize("name", ["int4-g32", "int8-row-dynamic"])
def test_backward_keeps_no_more_than_lora_without_rounding(name: str) -> None:
    scheme = {"int4-g32": INT4}.get(name, lb.Int8DynamicActivationInt8Weight())
    plain = Net()
    x = torch.randn(8, 64)
    expected = saved_bytes(plain, x)
    qat.prepare_(plain, {"head": None, "*": scheme})
    assert len(weights(plain)) == 2
    assert saved_bytes(plain, x) <= expected < 96 * 64 * 4


# ---- training loops ----------------------------------------------------------------------------------------------


def test_adapters_train_and_nothing_else() -> None:
    model = net()

    def values() -> dict[str, Tensor]:
        return {
            n: (p.master() if isinstance(p, lb.LowbitTensor) else p).detach().clone()
            for n, p in model.named_parameters()
        }

    before = values()
    losses = steps(model, 20)
    assert losses[-1] < losses[0]
    changed = {n for n, p in values().items() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_" in n}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", torch.float32),
        pytest.param("aot_eager", torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
)
def test_compiled(backend: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    model = net(INT4, dtype)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=backend)
    x = torch.randn(16, 64).to(dtype)
    for m in (model, compiled):
        m(x).square().sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (model, compiled._orig_mod)]
    bound = 1e-5 if dtype is torch.float32 else 0.03
    for n, found in grads[1].items():
        if "lora" in n:
            assert relative_error(found, grads[0][n]) < bound, n
    torch._dynamo.reset()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_weights_are_the_converted_ones(device: str) -> None:
    """In bfloat16, where a compiler keeps more bits between the operations that it fuses."""
    torch._dynamo.reset()
    base = nn.Linear(256, 192, bias=False, dtype=torch.bfloat16)
    model = nn.Sequential(LoraLayer(base)).to(device)
    qat.prepare_(model, INT4)
    compiled = torch.compile(model, fullgraph=True)
    found = compiled(torch.eye(256, dtype=torch.bfloat16, device=device)).t()
    qat.convert_(model)
    assert torch.equal(found, model[0].weight.dequantize())
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    model = net(INT4, dtype).cuda()
    model(torch.randn(16, 64, device="cuda").to(dtype)).square().sum().backward()
    assert all(p.grad.any() for n, p in model.named_parameters() if "lora" in n)
    seen = {n: getattr(model, n) for n in ("up", "down")}
    rounded = {n: INT4.weight.fake_quantize(merged(m), dtype) for n, m in seen.items()}
    qat.convert_(model)
    for n, expected in rounded.items():
        assert torch.equal(getattr(model, n).weight.dequantize(), expected), n


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model = net()
    x = torch.randn(8, 64, requires_grad=True)
    model(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for n, p in model.named_parameters():
        assert p.grad is None if expected[n] is None else torch.equal(p.grad, expected[n]), n


def test_autocast() -> None:
    model = net()
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16
    assert all(p.grad.any() for n, p in model.named_parameters() if "lora" in n)
    final = copy.deepcopy(model)
    qat.convert_(final)
    for name in ("up", "down"):
        rounded = INT4.weight.fake_quantize(merged(getattr(model, name)), torch.float32)
        assert torch.equal(getattr(final, name).weight.dequantize(), rounded)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(final(x), y) < 1e-2


def test_gradients_accumulate_and_adapters_may_change_before_backward() -> None:
    model = net()
    x = torch.randn(8, 64)
    model(x).sum().backward()
    first = model.down.lora_A["one"].weight.grad.clone()
    y = model(x)
    model.down.active_adapters = ["two"]
    model.down.disable_adapters = True
    y.sum().backward()
    assert torch.equal(model.down.lora_A["one"].weight.grad, 2 * first)


def test_moved_and_cast_while_an_output_is_alive() -> None:
    model = net()
    y = model(torch.randn(8, 64))
    model.to(torch.bfloat16)
    assert model(torch.randn(8, 64).bfloat16()).dtype is torch.bfloat16 and y.requires_grad


def test_copied_and_pickled() -> None:
    model = net()
    x = torch.randn(8, 64)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x)) and type(other.up) is type(model.up)
        qat.convert_(other)
        assert shown_class(other.up) is nn.Linear


# ---- states of the layers ------------------------------------------------------------------------------------------


def test_disabled_adapters_leave_the_rounded_base() -> None:
    model = net()
    model.up.disable_adapters = True
    x = torch.randn(3, 64)
    base = model.up.base_layer
    assert torch.equal(model.up(x), F.linear(x, base.weight.dequantize(), base.bias))
    with pytest.raises(ValueError, match=r"adapters of up are disabled.*disable_adapter"):
        qat.convert_(model)
    assert isinstance(model.up, LoraLayer) and is_merged(base.weight)


def test_dequantized_after_conversion() -> None:
    """Before it, the values of the base weight alone would not be those of its products."""
    model = net()
    x = torch.randn(3, 64)
    expected = model(x)
    with pytest.raises(ValueError, match=r"up.base_layer.weight .*adapters merged.*qat.convert_"):
        lb.dequantize_(model)
    assert torch.equal(model(x), expected)
    qat.convert_(model)
    lb.dequantize_(model)
    assert torch.equal(model(x), expected) and type(model.up.weight) is nn.Parameter


def test_a_layer_whose_base_is_plain_again_is_pefts() -> None:
    model = net()
    layer, x = model.up, torch.randn(3, 64)
    layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.master())
    down, up = layer.lora_A["default"], layer.lora_B["default"]
    assert torch.equal(layer(x), layer.base_layer(x) + up(down(x)) * 0.5)


def test_kept_adapters() -> None:
    torch.manual_seed(0)
    model = Net()
    report = qat.prepare_(model, INT4, adapters="keep")
    assert "of an adapter, which stays beside" in str(report)
    steps(model)
    x = torch.randn(3, 64)
    before = model(x)
    qat.convert_(model)
    assert type(model.up) is LoraLayer and torch.equal(model(x), before)
    assert isinstance(model.up.base_layer.weight, lb.AffineTensor)


def test_report_names_every_weight_once() -> None:
    torch.manual_seed(0)
    model = Net()
    report = qat.prepare_(model, INT4)
    assert sorted(report.converted) == [
        "down.base_layer.weight",
        "head.weight",
        "up.base_layer.weight",
    ]
    assert set(report.left.values()) == {
        "of an adapter, which is added to the weight before it is rounded"
    }
    assert len(report.left) == 6
    final = qat.convert_(model)
    assert sorted(final.converted) == ["down.weight", "head.weight", "up.weight"]
    assert all(e.nbytes for e in final.entries)


def test_prepared_twice_and_converted_without() -> None:
    model = net()
    with pytest.raises(ValueError, match="prepared for QAT already"):
        qat.prepare_(model, INT4)
    with pytest.raises(ValueError, match="has no prepared weights"):
        qat.convert_(Net())


def test_meta_then_loaded() -> None:
    source = net()
    with torch.device("meta"):
        model = Net()
    qat.prepare_(model, INT4)
    model.to_empty(device="cpu")
    model.load_state_dict({n: p.detach() for n, p in Net().state_dict().items()})
    model.load_state_dict(source.state_dict())
    x = torch.randn(3, 64)
    assert torch.equal(model(x), source(x))


# ---- refusals ------------------------------------------------------------------------------------------------------


def refused(change: Any, match: str, kind: type[Exception] = NotImplementedError) -> None:
    model = Net()
    change(model)
    before = dict(model.named_parameters())
    with pytest.raises(kind, match=match):
        qat.prepare_(model, INT4)
    assert all(p is before[n] for n, p in model.named_parameters())
    assert type(model.up) is LoraLayer


def test_refusals_name_the_layer_and_a_way_out() -> None:
    def dora(model: Net) -> None:
        model.up.use_dora["default"] = True

    def variant(model: Net) -> None:
        model.up.lora_variant["default"] = object()

    def dropout(model: Net) -> None:
        model.up.lora_dropout["default"] = nn.Dropout(0.1)

    def bias(model: Net) -> None:
        model.up.lora_bias["default"] = True

    def turned(model: Net) -> None:
        model.up.fan_in_fan_out = True

    def parameter(model: Net) -> None:
        model.up.parameter_name = "weight"  # type: ignore[assignment]

    def tied(model: Net) -> None:
        model.other = nn.Linear(64, 96)
        model.other.weight = model.up.base_layer.weight  # type: ignore[assignment]

    def other_kind(model: Net) -> None:
        del model.up.lora_A

    for change, match in [
        (dora, r"up: QAT does not merge DoRA \(adapter 'default'\).*adapters=\"keep\""),
        (variant, "up: QAT does not merge object"),
        (dropout, r"lora_dropout=0.1.*set lora_dropout=0"),
        (bias, "a bias of its own"),
        (turned, "fan_in_fan_out"),
        (parameter, r"parameter 'weight' \(target_parameters\)"),
        (tied, r"share a weight \(up.base_layer.weight and other.weight\)"),
        (other_kind, "which is not LoRA"),
    ]:
        refused(change, match)
    model = Net()
    model.up.use_dora["not in use"] = True
    qat.prepare_(model, INT4)
    model(torch.randn(3, 64))


def test_a_layer_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="the model is itself a LoraLayer"):
        qat.prepare_(LoraLayer(nn.Linear(32, 8)), INT4)
    with pytest.raises(ValueError, match=r'adapters must be "merge" or "keep", got \'both\''):
        qat.prepare_(Net(), INT4, adapters="both")  # type: ignore[arg-type]


def test_rows_with_adapters_of_their_own_are_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"\['adapter_names'\].*all rows of a batch share"
    ):
        net().up(torch.randn(2, 64), adapter_names=["default", "__base__"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_adapter_that_diverged_is_not_converted(bad: float) -> None:
    model = net()
    with torch.no_grad():
        model.down.lora_B["two"].weight[3, 1] = bad
    with pytest.raises(ValueError, match="adapters of down have NaN or infinite values"):
        qat.convert_(model)
    assert isinstance(model.up, LoraLayer) and isinstance(model.head.weight, lb.FakeQuantizedTensor)
