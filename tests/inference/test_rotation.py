"""Rotate: rotations that fold into a model, found by trial, and rotations as products run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.convert import find_targets
from lowbit.granularity import PerToken
from lowbit.inference import AWQ, GPTQ, LearnedRounding, Rotate, Search
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.tensor.frozen.rotated_tensor import RotatedTensor, rotated_blocks
from lowbit.testing.comparison import relative_error
from recipes.llama import Llama, LlamaConfig
from tests.inference.test_folding import Encoder, OffsetNorm

INT4 = lb.IntxWeightOnly(4, 32, "symmetric")
W4A4 = lb.Scheme(INT4.weight, Spec(Int(4), PerToken(), "symmetric_no_clipping_err"))


def llama(tied: bool = False) -> Llama:
    sizes = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 2, "hidden": 96, "context": 32}
    return Llama(LlamaConfig(**sizes, kv_heads=1, tied=tied))


class Block(nn.Module):
    """Pre-norm with biases; attention and MLP one after the other, or in parallel."""

    def __init__(self, width: int, in_parallel: bool, scaled: bool = False) -> None:
        super().__init__()
        self.in_parallel = in_parallel
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5) if scaled else 1.0

    def attention(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)) * self.scale

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_parallel:
            normed = self.attention_norm(x)
            return x + self.attention(normed) + self.mlp(normed)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """LayerNorm, biases, learned positions, and a head."""

    def __init__(self, in_parallel: bool = False, width: int = 64, scaled: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(96, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width, in_parallel, scaled) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 96)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Routed(Decoder):
    """With a linear that no batch reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) if bool((ids >= 0).all()) else self.other(self.tokens(-ids))


class Conv1D(nn.Module):
    """A linear that stores [inputs, outputs], as that of GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Turned(Decoder):
    """With a writer of another class in its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].down = Conv1D(128, 64)


class Gemma(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(96, 64), OffsetNorm(), nn.Linear(64, 32))


def tokens(seed: int, length: int = 32) -> Tensor:
    return torch.randint(96, (4, length), generator=torch.Generator().manual_seed(seed))


BATCHES = [tokens(0), tokens(1), tokens(2, 11)]


def built(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build().to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p) * (1.0 if p.ndim == 1 else p.std())
    return model


def folded(model: nn.Module, **options: Any) -> dict[str, str]:
    """The notes of the report, by module."""
    targets, _ = find_targets(model, INT4, None)
    step = Rotate(**options)
    notes = step.begin(targets)
    notes |= step.fold(model, targets, BATCHES) if step.folds else {}
    return {name: notes[id(m)] for name, m in model.named_modules() if id(m) in notes}


STREAM = "in the residual stream by 64"
EXPECTED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "llama": (
        llama,
        {
            "attention.query": STREAM,
            "attention.key": STREAM,
            "attention.value": STREAM,
            "attention.out": "in blocks.0.attention.value by 32",
            "mlp.gate": STREAM,
            "mlp.up": STREAM,
            "mlp.down": "online by 32",
        },
    ),
    "layer-norm": (
        Decoder,
        {"qkv": STREAM, "out": "in blocks.0.qkv by 32", "up": STREAM, "down": "online by 64"},
    ),
    "parallel": (
        lambda: Decoder(in_parallel=True),
        {"qkv": STREAM, "out": "in blocks.0.qkv by 32", "up": STREAM, "down": "online by 64"},
    ),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_folded_rotations_change_nothing_in_float64(kind: str) -> None:
    build, expected = EXPECTED[kind]
    model = built(build)
    plain = copy.deepcopy(model)
    found = folded(model)
    assert {k: found[f"blocks.0.{k}"] for k in expected} == expected
    assert found["head"] == STREAM
    for ids in (*BATCHES, tokens(7, 20)):
        assert relative_error(model(ids), plain(ids)) < 1e-12
    weight = "blocks.0.up.weight" if kind != "llama" else "blocks.0.mlp.up.weight"
    assert relative_error(model.state_dict()[weight], plain.state_dict()[weight]) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Weights of 16 bits are rounded once."""
    model = built(llama, dtype)
    wide = copy.deepcopy(model).double()
    assert folded(model) == folded(wide)
    assert all(p.dtype is dtype for p in model.parameters())
    bound = {torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert relative_error(p, q) < bound


def test_autocast_of_the_user_changes_nothing() -> None:
    """Rotations are compared in float32: in bfloat16 no output stays as it was."""
    models = [built(llama, torch.float32) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        models[0](BATCHES[0])  # fills its cache
        found = folded(models[0])
    assert found == folded(models[1])
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_tf32_of_the_user_changes_nothing() -> None:
    """Rotations are compared in full precision, which the user's setting outlives."""
    model, plain = (built(llama, torch.float32) for _ in range(2))
    multiplies = torch.backends.cuda.matmul

    def in_tf32(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """What a GPU gives by TF32, with 10 bits of each value."""
        return output.half().float() if multiplies.fp32_precision == "tf32" else None

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(in_tf32)
    try:
        torch.set_float32_matmul_precision("high")
        found = folded(model)
        assert multiplies.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found == folded(plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_norm_that_adds_one() -> None:
    model = built(Gemma)
    plain = copy.deepcopy(model)
    assert folded(model) == {"2": STREAM}
    assert not model[1].weight.any()
    assert relative_error(model(BATCHES[0]), plain(BATCHES[0])) < 1e-12


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (lambda: llama(tied=True), "the input of head.*that of embedding.*untie them"),
    "post-norm": (Encoder, "the input of last.*The last to write before it is down, of Linear"),
    "scaled": (
        lambda: Decoder(scaled=True),
        "the input of blocks.0.mlp_norm .*last to write before it is blocks.0.out, of Linear",
    ),
    "another writer": (
        Turned,
        r"input of norm.* is blocks\.1\.down, of Conv1D.*not into blocks\.\*\.down ",
    ),
    "no norm": (lambda: nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 96)), "no norm's gain"),
    "not reached": (Routed, "first batch does not run other"),
    "no block": (lambda: Decoder(width=20), "20 channels has no blocks of 16"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_without_a_stream_to_rotate(kind: str) -> None:
    """The error names the module and the way out, and the model computes what it did."""
    build, match = REFUSED[kind]
    model = built(build)
    plain = copy.deepcopy(model)
    with pytest.raises(ValueError, match=match) as raised:
        folded(model)
    assert "ake Rotate(folded=False)" in str(raised.value)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    half = copy.deepcopy(plain).bfloat16()
    expected = copy.deepcopy(half.state_dict())
    with pytest.raises(ValueError, match=match):
        folded(half)
    assert all(torch.equal(expected[name], t) for name, t in half.state_dict().items())
    for note in folded(model, folded=False).values():
        assert note.startswith("online by") or note.startswith("left alone (")
    assert relative_error(model(BATCHES[0]), plain(BATCHES[0])) < 1e-12


def test_untied_as_the_message_says() -> None:
    model = built(lambda: llama(tied=True))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    plain = copy.deepcopy(model)
    assert folded(model)["head"] == STREAM
    assert relative_error(model(BATCHES[0]), plain(BATCHES[0])) < 1e-12


def test_the_product_that_rotates_is_that_of_a_rotated_layer() -> None:
    """GPTQ finds the codes that it finds for W H and inputs x H."""
    torch.manual_seed(0)
    x = torch.randn(400, 128, dtype=torch.float64)
    x[:, 5] *= 20
    own = nn.Sequential(nn.Linear(128, 24)).double()
    turned = copy.deepcopy(own)
    with torch.no_grad():
        turned[0].weight.copy_(rotated_blocks(own[0].weight, 64))
    gptq = GPTQ(act_order=False)  # the sizes of rotated inputs are nearly alike
    for scheme in (INT4, lb.NVFP4WeightOnly(), W4A4):
        first, second = copy.deepcopy(own), copy.deepcopy(turned)
        report = lb.calibrate(first, scheme, [x], steps=[Rotate(folded=False), gptq])
        lb.calibrate(second, scheme, [rotated_blocks(x, 64)], steps=[gptq])
        weight: Any = first[0].weight
        assert isinstance(weight.data, RotatedTensor) and weight.rotation == 64
        values = weight.rotated_matrix.dequantize()
        other: Any = second[0].weight
        changed = (values - other.dequantize()).abs() > 1e-3 * values.abs().mean()
        assert float(changed.double().mean()) < 0.01  # sums in another order
        assert relative_error(first(x), second(rotated_blocks(x, 64))) < 0.02
        assert report.layers["0.weight"].method == "Rotate online by 64, GPTQ"
        assert report.notes == []


@pytest.mark.parametrize("scheme", [lb.MXFP4WeightOnly(), W4A4], ids=["mxfp4", "w4a4"])
def test_calibrated_models(scheme: lb.Scheme) -> None:
    """Folded and online in one model: its outputs are those of the plain model with the rounded values."""
    model = built(llama, torch.float32)
    report = lb.calibrate(model, {"blocks.*": scheme}, BATCHES, steps=[Rotate(), GPTQ()])
    kinds = {
        n: type(m.weight.data) for n, m in model.blocks.named_modules() if isinstance(m, nn.Linear)
    }
    assert {n for n, kind in kinds.items() if issubclass(kind, RotatedTensor)} == {
        "0.mlp.down",
        "1.mlp.down",
    }
    assert all(layer.after < layer.before for layer in report.layers.values()), str(report)
    if scheme.activation is None:
        values = copy.deepcopy(model)
        lb.dequantize_(values)
        assert relative_error(model(BATCHES[0]), values(BATCHES[0])) < 1e-4


def test_inputs_of_4_bits_with_outliers_lose_less() -> None:
    model = built(Decoder, torch.float32)
    with torch.no_grad():
        for block in model.blocks:  # type: ignore[union-attr]
            block.up.weight[[3, 90]] *= 30
            block.up.bias[[3, 90]] *= 30
    errors = []
    for steps in ([Search()], [Rotate(), Search()], [Rotate(folded=False), Search()]):
        low = copy.deepcopy(model)
        lb.calibrate(low, {"blocks.*": W4A4}, BATCHES, steps=steps)
        errors.append(relative_error(low(BATCHES[0]), model(BATCHES[0])))
    assert max(errors[1:]) < 0.9 * errors[0], errors


def test_the_report_names_what_stays_unrotated() -> None:
    model = built(Turned, torch.float32)
    patterns = {"blocks.1.down.weight": INT4, "blocks.*": INT4}
    report = lb.calibrate(model, patterns, BATCHES, steps=[Rotate(folded=False), Search()])
    assert report.layers["blocks.1.down.weight"].method == "Rotate left alone (of Conv1D), Search"
    assert "Rotate left the inputs of blocks.1.down.weight as they are" in str(report)
    assert "online by" in report.layers["blocks.0.down.weight"].method


def test_other_steps_beside_it() -> None:
    """AWQ before; learned rounding after, which shows the model values that are turned back."""
    model = built(llama, torch.float32)
    plain = copy.deepcopy(model)
    steps = [AWQ(4), Rotate(), GPTQ(), LearnedRounding(steps=4, over="model")]
    report = lb.calibrate(model, {"blocks.*": INT4}, BATCHES, steps=steps)
    (_, losses) = report.learned[0]
    assert losses.kept == (losses.after < losses.before)
    assert relative_error(model(BATCHES[0]), plain(BATCHES[0])) < 0.1
    method = report.layers["blocks.0.mlp.down.weight"].method
    assert "Rotate online by 32" in method and "LearnedRounding" in method


def test_what_is_refused() -> None:
    for options, match in (
        ({"size": 48}, "one of 16, 32, 64, 128, got 48"),
        ({"folded": False, "online": False}, "rotate nothing"),
    ):
        with pytest.raises(ValueError, match=match):
            Rotate(**options)
    for scheme, match in (
        (lb.Float8WeightOnly(), "integers or a table.*online=False"),
        (lb.Int8StaticActivationInt8Weight(), "static.*online=False"),
    ):
        model = built(Decoder, torch.float32)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=match):
            lb.calibrate(model, scheme, BATCHES, steps=[Rotate(), Search()])
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for steps, match in (
        ([GPTQ(), Rotate(folded=False)], "give them as Rotate, GPTQ"),
        ([Rotate(folded=False), Rotate(folded=False)], "rotation comes before steps that round"),
    ):
        with pytest.raises(ValueError, match=match):
            lb.calibrate(built(Decoder, torch.float32), INT4, BATCHES, steps=steps)
