"""AWQ and SmoothQuant: scales that move between layers without a change of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import lowbit as lb
from lowbit.convert import find_targets
from lowbit.inference import AWQ, GPTQ, Search, SmoothQuant, Step
from lowbit.inference.calibration.batches import Batches
from lowbit.inference.calibration.folding import foldings
from lowbit.testing.comparison import relative_error
from recipes.llama import Llama, LlamaConfig

INT4 = lb.IntxWeightOnly(4, 32, "symmetric")


def llama(kv_heads: int = 2) -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 4, "hidden": 96, "context": 32}
    return Llama(LlamaConfig(**sizes, kv_heads=kv_heads)).eval()


class Encoder(nn.Module):
    """Post-norm, with biases: its norms feed the residual stream as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(96, 64), nn.Linear(64, 96)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.first, self.last = nn.LayerNorm(64), nn.LayerNorm(64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        return self.head(self.last(x + self.down(self.up(x).relu())))


class OffsetNorm(nn.Module):
    """Multiplies by 1 + weight, as that of Gemma does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (64,)) * (1 + self.weight)


class Offset(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(96, 64), OffsetNorm(), nn.Linear(64, 32))


def tokens(seed: int) -> Tensor:
    return torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(seed))


BATCHES = [tokens(0), tokens(1)]
EXPECTED: dict[Callable[[], nn.Module], dict[str, str]] = {
    llama: {
        "blocks.0.attention.query": "blocks.0.attention_norm",
        "blocks.0.mlp.gate": "blocks.0.mlp_norm",
        "blocks.0.mlp.down": "blocks.0.mlp.up",
        "blocks.1.attention.query": "blocks.1.attention_norm",
        "blocks.1.mlp.gate": "blocks.1.mlp_norm",
        "blocks.1.mlp.down": "blocks.1.mlp.up",
    },
    Encoder: {"down": "up", "head": "last"},
    Offset: {"2": "1"},
}


def with_outliers(model: Llama, factor: float = 60.0, shrink: bool = True) -> Llama:
    """Two channels of each norm are large, and with `shrink` the weights that multiply them small."""
    with torch.no_grad():
        for block in model.blocks:
            for norm, linears in (
                (block.attention_norm, (block.attention.query, block.attention.key, block.attention.value)),
                (block.mlp_norm, (block.mlp.gate, block.mlp.up)),
            ):  # fmt: skip
                norm.weight[[3, 40]] *= factor
                for linear in linears:
                    linear.weight[:, [3, 40]] /= factor if shrink else 1.0
    return model


def kl(plain: nn.Module, model: nn.Module) -> float:
    with torch.no_grad():
        p, q = (m(tokens(9)).log_softmax(-1) for m in (plain, model))
    return float(F.kl_div(q, p, reduction="sum", log_target=True))


@pytest.mark.parametrize("build", EXPECTED, ids=["llama", "post-norm", "offset"])
def test_foldings_are_found_by_trial(build: Callable[[], nn.Module]) -> None:
    model = build()
    names = {id(m): name for name, m in model.named_modules()}
    before = copy.deepcopy(model.state_dict())
    targets, _ = find_targets(model, INT4, None)
    found = foldings(model, targets, Batches(BATCHES))
    assert {names[id(f.linears[0])]: f.name for f in found} == EXPECTED[build]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_values_fold_into_the_output_projection_without_groups_of_heads() -> None:
    model = llama(kv_heads=4)
    found = foldings(model, find_targets(model, INT4, None)[0], Batches(BATCHES))
    assert {f.name for f in found if f.linears[0] is model.blocks[0].attention.out} == {
        "blocks.0.attention.value"
    }


def test_awq_keeps_the_rows_that_it_measures_alone() -> None:
    """Not the activations of all batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    inputs: list[StorageWeakRef] = []
    kept: list[int] = []

    def see(module: nn.Module, args: tuple[Tensor]) -> None:
        kept.append(sum(not storage.expired() for storage in inputs))
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    model[1].register_forward_pre_hook(see)
    batches = [torch.randn(2048, 64) for _ in range(6)]
    report = lb.calibrate(model, lb.Int4WeightOnly(32), batches, steps=[AWQ()])
    assert "AWQ into 0" in str(report) and len(kept) > 6 and max(kept) <= 1


@pytest.mark.parametrize("step", [AWQ(), SmoothQuant(), SmoothQuant(0.8)], ids=str)
@pytest.mark.parametrize("build", EXPECTED, ids=["llama", "post-norm", "offset"])
def test_folding_is_exact_in_float64(build: Callable[[], nn.Module], step: Step) -> None:
    model = build().double()
    plain = copy.deepcopy(model)
    targets, _ = find_targets(model, INT4, None)
    notes = step.fold(model, targets, Batches(BATCHES))
    assert len(notes) >= len(EXPECTED[build])
    changed = any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert changed or isinstance(step, AWQ)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(5)), plain(tokens(5)), rtol=1e-11, atol=1e-11)


def test_smoothquant_serves_static_activations_with_outliers() -> None:
    plain = with_outliers(llama())
    static, dynamic = lb.Int8StaticActivationInt8Weight(), lb.Int8DynamicActivationInt8Weight()
    lost, choices = {}, (
        ("dynamic", dynamic, []), ("smooth", static, [SmoothQuant()]), ("static", static, [Search()])
    )  # fmt: skip
    for name, scheme, steps in choices:
        model = copy.deepcopy(plain)
        if not steps:
            lb.quantize_(model, scheme)
        else:
            lb.calibrate(model, scheme, BATCHES, steps=steps, method="minmax")
        lost[name] = kl(plain, model)
    assert lost["smooth"] <= 1.1 * lost["dynamic"] < lost["static"], lost


def test_awq_loses_less_than_rounding() -> None:
    plain = with_outliers(llama(), 8.0, shrink=False)
    rounded, model = copy.deepcopy(plain), copy.deepcopy(plain)
    of_blocks = {"blocks.*": INT4}
    lb.quantize_(rounded, of_blocks)
    report = lb.calibrate(model, of_blocks, BATCHES, steps=[AWQ()])
    assert kl(plain, model) < 0.9 * kl(plain, rounded)
    methods = {name: layer.method for name, layer in report.layers.items()}
    assert methods["blocks.0.mlp.up.weight"].startswith("AWQ into blocks.0.mlp_norm, α 0.")
    assert methods["blocks.0.attention.out.weight"] == "AWQ"


def test_steps_follow_each_other() -> None:
    model = llama()
    report = lb.calibrate(model, INT4, BATCHES, steps=[AWQ(), GPTQ()])
    method = report.layers["blocks.0.mlp.down.weight"].method
    assert method.startswith("AWQ into blocks.0.mlp.up") and method.endswith(", GPTQ")


@pytest.mark.parametrize("make", [lambda: SmoothQuant(1.5), lambda: AWQ(0), lambda: AWQ(grid=2.5)])
def test_options_out_of_range_are_refused(make: Callable[[], Step]) -> None:
    with pytest.raises(ValueError, match=r"alpha must be|grid must be"):
        make()


class Branches(nn.Module):
    """A norm whose output goes to one of two linears, by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        with torch.no_grad():
            self.norm.weight[:4] *= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.head(self.a(h) if float(x.mean()) > 0 else self.b(h))


@pytest.mark.parametrize("step", [AWQ(), SmoothQuant()])
def test_a_branch_that_another_batch_takes_keeps_its_input(step: Step) -> None:
    model = Branches()
    batches = [torch.randn(32, 32) + 1, torch.randn(32, 32) - 1]
    expected = [model(x) for x in batches]
    lb.calibrate(model, lb.Int8WeightOnly(), batches, steps=[step])
    for x, y in zip(batches, expected, strict=True):
        assert relative_error(model(x), y) < 0.02


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 50)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.embedding(input_ids))).relu())


@pytest.mark.parametrize("step", [AWQ(), SmoothQuant()])
def test_padding_does_not_count(step: Step) -> None:
    torch.manual_seed(0)
    model = Padded()
    ids = torch.randint(50, (4, 16))
    mask = torch.ones_like(ids)
    mask[:2, 9:] = 0
    found = []
    for pad in (0, 7):
        own = copy.deepcopy(model)
        batch = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
        lb.calibrate(own, lb.Int8WeightOnly(), [batch], steps=[step])
        found.append(own.norm.weight.detach())
    assert not torch.equal(found[0], model.norm.weight)
    assert torch.equal(found[0], found[1])


# ---- the trial is exact ------------------------------------------------------------------------------------------


class Between(nn.Module):
    """`norm` or `first`, then a function, then `last`, and what else reads the first."""

    def __init__(self, function: Callable[[Tensor], Tensor], leak: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.function, self.leak = function, leak

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.function(h)) + self.leak * h


NEAR = {
    "leak": (lambda x: x, 2e-3),
    "tanh": (torch.tanh, 0.0),
    "clamp": (lambda x: x.clamp(-3, 3), 0.0),
    "curve": (lambda x: x + 1e-2 * x * x, 0.0),
    "swapped": (lambda x: x[..., [1, 0, *range(2, 64)]], 0.0),
}


def folds(model: nn.Module, batches: list[Tensor]) -> bool:
    return bool(
        foldings(model, find_targets(model, lb.Int8WeightOnly(), None)[0], Batches(batches))
    )


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)


@DTYPES
@pytest.mark.parametrize("kind", NEAR)
def test_what_nearly_folds_is_refused(kind: str, dtype: torch.dtype) -> None:
    """The leak and the curve change the output by less than bfloat16 rounds."""
    model = Between(*NEAR[kind]).to(dtype)
    assert not folds(model, [torch.randn(32, 64).to(dtype)])


@DTYPES
@pytest.mark.parametrize("size", [1.0, 1e-5, 1e3])
def test_what_folds_is_taken_in_every_dtype(dtype: torch.dtype, size: float) -> None:
    """In float16 also where halves are rounded, as the smallest numbers have few digits."""
    x = torch.randn(32, 64) * size
    model = Between(torch.relu).to(dtype)
    with torch.no_grad():
        model.first.weight[:8] *= 1e-4
    assert folds(model, [x.to(dtype)])


@DTYPES
def test_a_decoder_folds_alike_in_every_dtype(dtype: torch.dtype) -> None:
    model = with_outliers(llama(kv_heads=4)).to(dtype)
    model.cos, model.sin = model.cos.to(dtype), model.sin.to(dtype)
    found = foldings(model, find_targets(model, INT4, None)[0], Batches(BATCHES))
    values = {f"blocks.{i}.attention.out": f"blocks.{i}.attention.value" for i in range(2)}
    names = {id(m): name for name, m in model.named_modules()}
    assert {names[id(f.linears[0])]: f.name for f in found} == EXPECTED[llama] | values


class Writes(nn.Module):
    """Writes to what it is given, and to what it made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.down(self.up(h).relu_())
        h.zero_()
        return x.add_(y)


class Chain(nn.Module):
    """Blocks that follow each other, of which the second begins with a linear that the first ends before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 64), nn.Linear(64, 8)
        self.layers = nn.ModuleList([Writes(), nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_blocks_that_write_to_their_inputs_and_pairs_across_blocks() -> None:
    model = Chain()
    names = {id(m): name for name, m in model.named_modules()}
    found = foldings(model, find_targets(model, INT4, None)[0], Batches(BATCHES))
    assert {names[id(f.linears[0])]: f.name for f in found} == {
        "layers.0.up": "layers.0.norm",
        "layers.0.down": "layers.0.up",
        "layers.2": "layers.1",
        "head": "layers.2",
    }


def test_a_tied_weight_does_not_fold() -> None:
    model = Between(torch.relu)
    other = nn.Linear(64, 64)
    other.weight = model.last.weight
    assert not folds(nn.Sequential(model, other), [torch.randn(8, 64)])


def test_the_cost_of_trials_does_not_grow_with_depth() -> None:
    """In runs of a model: its blocks are tried one by one."""
    runs = []
    for layers in (2, 6):
        torch.manual_seed(0)
        sizes = {"vocab_size": 96, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 96}
        model = Llama(LlamaConfig(**sizes, layers=layers, context=32)).eval()
        calls = [0]
        for block in model.blocks:
            block.attention_norm.register_forward_pre_hook(
                lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1)
            )
        assert (
            len(foldings(model, find_targets(model, INT4, None)[0], Batches(BATCHES))) == 3 * layers
        )
        runs.append(calls[0] / layers)
    assert runs[1] <= runs[0] < 20, runs
