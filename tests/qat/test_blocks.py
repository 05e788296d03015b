"""qat.train_blocks: each block learns the output of its plain self, and a stopped run goes on where it was."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowbit as lb
from lowbit import qat
from lowbit.tracing.block_inputs import capture
from recipes.llama import Llama, LlamaConfig

INT2 = lb.IntxWeightOnly(2, 32)
ARGUMENTS: Any = {"lr": 1e-3, "epochs": 3}


def llama(layers: int = 2, **changes: Any) -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "dim": 32, "heads": 2, "kv_heads": 1, "hidden": 64, "context": 32}
    model = Llama(LlamaConfig(layers=layers, **{**sizes, **changes}))
    with torch.no_grad():
        for p in model.parameters():  # larger than at the start, so that every block matters
            p.mul_(4 if p.ndim > 1 else 1)
    return model


def data(count: int = 3, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (rows, 16), generator=generator) for _ in range(count)]


def prepared(model: nn.Module, scheme: Any = INT2, scales: Any = "learned", **chosen: Any) -> Any:
    qat.prepare_(model, scheme, scales=scales, **chosen)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def divergence(model: nn.Module, plain: nn.Module, batches: list[Tensor]) -> float:
    """Mean KL of the plain model's predictions to this model's, in nats a token."""
    with torch.no_grad():
        pairs = [(plain(b).log_softmax(-1), model(b).log_softmax(-1)) for b in batches]
    kls = [F.kl_div(q, p, reduction="sum", log_target=True) / p[..., 0].numel() for p, q in pairs]
    return sum(kls).item() / len(kls)


@pytest.mark.cover("values")
@pytest.mark.parametrize("targets", ["high", "rounded"])
@pytest.mark.parametrize("scales", ["present", "learned"])
def test_errors_fall_and_the_converted_model_is_better_than_rounding(targets, scales) -> None:
    plain = llama(2, tied=False).eval()
    rounded = copy.deepcopy(plain)
    lb.quantize_(rounded, INT2, scales="minmax" if scales == "present" else "searched")
    model = prepared(copy.deepcopy(plain), scales=scales)
    report = qat.train_blocks(model, model.blocks, data(8), targets=targets, lr=2e-3, epochs=4)
    assert [b.name for b in report.blocks] == ["blocks.0", "blocks.1"]
    assert all(b.after < 0.7 * b.before and b.steps == 32 for b in report.blocks)
    qat.convert_(model)
    new = data(12)[8:]
    bound = 0.8 if targets == "high" else 0.95
    assert divergence(model, plain, new) < bound * divergence(rounded, plain, new)


def test_errors_are_those_of_the_formula() -> None:
    """Of rounding alone, of the streams in high precision and rounded, and after training."""
    plain, batches = llama(2).eval(), data(2)
    model = prepared(copy.deepcopy(plain))
    start = copy.deepcopy(model).eval()
    report = qat.train_blocks(model, model.blocks, batches, **ARGUMENTS)
    model.eval()

    @torch.no_grad()
    def run(of: Any, index: int, x: Tensor) -> Tensor:
        return of.blocks[index](x, plain.cos[:16], plain.sin[:16], None, 0)

    def error(found: list[Tensor], expected: list[Tensor]) -> float:
        f, y = torch.cat(found), torch.cat(expected)
        return ((f - y).square().sum() / y.square().sum()).item()

    x = [plain.embedding(b).detach() for b in batches]
    rounded = [start.embedding(b).detach() for b in batches]  # tied to the head, so rounded too
    for index, block in enumerate(report.blocks):
        y = [run(plain, index, one) for one in x]
        before = error([run(start, index, one) for one in rounded], y)
        after = [run(model, index, one) for one in rounded]
        assert block.before == pytest.approx(before, rel=1e-5)
        assert block.after == pytest.approx(error(after, y), rel=1e-5)
        x, rounded = y, after


@pytest.mark.parametrize("bf16", [False, True])
def test_layers_in_high_precision_train_on_present_values_under_autocast(bf16: bool) -> None:
    """Autocast keeps its first bfloat16 copy of a float32 weight. With these, errors rose."""
    found = []
    for cached in (True, False):
        model = prepared(llama(), filter_fn=lambda _, name: name.endswith("mlp.down"))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            model(data()[0])  # fills the cache
            report = qat.train_blocks(model, model.blocks, data(), bf16=bf16, **ARGUMENTS)
            output = model(data()[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(output, model(data()[0]))
        assert report.blocks[0].after < report.blocks[0].before
        found.append(state(model))
    assert same(*found)


def test_only_blocks_change_and_flags_and_modes_return() -> None:
    model = llama(3).train()
    model.blocks[1].eval()
    qat.prepare_(model, INT2, scales="learned")
    model.blocks[0].mlp_norm.weight.requires_grad_(False)
    before, parameters = state(model), dict(model.named_parameters())
    flags = {name: p.requires_grad for name, p in parameters.items()}
    kinds = [type(module) for module in model.modules()]
    qat.train_blocks(model, model.blocks, data(2), **ARGUMENTS)
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {n for n in before if n.startswith("blocks.")} - {"blocks.0.mlp_norm.weight"}
    assert changed == expected
    now = dict(model.named_parameters())
    assert list(now) == list(parameters) and all(now[n] is p for n, p in parameters.items())
    assert {name: p.requires_grad for name, p in now.items()} == flags
    assert all(p.grad is None for p in now.values())
    assert [type(module) for module in model.modules()] == kinds
    assert model.training and not model.blocks[1].training and model.blocks[2].training
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_learning_rates_choose_what_trains() -> None:
    model = prepared(llama(2))
    before = state(model)
    qat.train_blocks(model, model.blocks, data(2), lr=0.0, scale_lr=1e-3, epochs=1)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {n for n in before if n.startswith("blocks.") and n.endswith("_scale")}
    before = state(model)
    qat.train_blocks(model, model.blocks, data(2), lr=1e-3, scale_lr=0.0, epochs=1)
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {
        n for n in before if n.startswith("blocks.") and not n.endswith("weight_scale")
    }
    before = state(model)
    report = qat.train_blocks(model, model.blocks, data(2), epochs=0)
    assert same(state(model), before)
    assert all(b.before == b.after and b.steps == 0 for b in report.blocks)


def test_a_run_is_a_function_of_its_arguments() -> None:
    found = []
    for seed in (0, 0, 1):
        model = prepared(llama(2))
        torch.manual_seed(len(found))
        qat.train_blocks(model, model.blocks, iter(data(4)), seed=seed, **ARGUMENTS)
        found.append(state(model))
    assert same(found[0], found[1]) and not same(found[0], found[2])


@pytest.mark.cover("values")
@pytest.mark.parametrize("targets", ["high", "rounded"])
@pytest.mark.parametrize("done", [1, 2])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, targets, done) -> None:
    options = {**ARGUMENTS, "epochs": 2, "targets": targets}
    whole = prepared(llama(3))
    expected = qat.train_blocks(whole, whole.blocks, data(), **options)

    def stop(progress: qat.BlockProgress) -> None:
        if progress.block > done:
            raise KeyboardInterrupt

    model = prepared(llama(3))
    with pytest.raises(KeyboardInterrupt):
        qat.train_blocks(
            model, model.blocks, data(), folder=tmp_path / "run", progress=stop, **options
        )
    assert len(list((tmp_path / "run").iterdir())) == done
    model, trained = prepared(llama(3)), []
    found = qat.train_blocks(
        model, model.blocks, data(), folder=tmp_path / "run", progress=trained.append, **options
    )
    assert found == expected and same(state(model), state(whole))
    assert {p.block for p in trained} == set(range(done + 1, 4))
    model = prepared(llama(3))
    assert (
        qat.train_blocks(model, model.blocks, data(), folder=tmp_path / "run", **options) == found
    )
    assert same(state(model), state(whole))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    model = prepared(llama(2))
    with pytest.raises(ValueError, match="is a file; give the name of a folder"):
        qat.train_blocks(model, model.blocks, data(2), folder=tmp_path / "file", **ARGUMENTS)


def test_a_folder_of_another_run_is_refused(tmp_path) -> None:
    model = prepared(llama(2))
    qat.train_blocks(model, model.blocks, data(2), folder=tmp_path, **ARGUMENTS)
    with pytest.raises(ValueError, match="its parameters before training differ"):
        qat.train_blocks(model, model.blocks, data(2), folder=tmp_path, **ARGUMENTS)
    model = prepared(llama(2))
    with pytest.raises(ValueError, match=r"its arguments differ: .*lr=0\.001.* now .*lr=0\.01"):
        qat.train_blocks(model, model.blocks, data(2), folder=tmp_path, lr=1e-2, epochs=3)
    with pytest.raises(ValueError, match="its inputs of the first block differ"):
        qat.train_blocks(model, model.blocks, data(3), folder=tmp_path, **ARGUMENTS)


class LiveBytes(TorchDispatchMode):
    """The most bytes that storages made inside of it take at one time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        own = (getattr(p, "weight", p) for p in model.parameters())
        self.known = {p.untyped_storage()._cdata for p in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if type(t) is Tensor and t.device.type != "meta":
                self._add(t.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def peak(layers: int, run: Any) -> int:
    model = prepared(llama(layers, dim=64, hidden=160))
    with LiveBytes(model) as live:
        run(model)
    return live.most


def test_memory_is_that_of_one_block() -> None:
    """Independent of their number: gradients, optimizer states and activations are those of one block."""

    def blockwise(model: Any) -> None:
        qat.train_blocks(model, model.blocks, data(1), lr=1e-3, epochs=1)

    def end_to_end(model: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(*data(1)).square().mean().backward()
        optimizer.step()

    few, many = peak(2, blockwise), peak(8, blockwise)
    assert many < 1.1 * few
    assert peak(8, end_to_end) > 2.5 * many


def test_parts_before_the_blocks_may_be_rounded() -> None:
    """An embedding of few bits: blocks learn to undo its error."""
    plain = llama(2, tied=False).eval()
    model = prepared(
        copy.deepcopy(plain),
        lb.IntxWeightOnly(3, 32),
        filter_fn=lambda m, name: isinstance(m, nn.Linear | nn.Embedding),
    )
    report = qat.train_blocks(model, model.blocks, data(8), lr=1e-3, epochs=4)
    assert report.blocks[0].after < 0.9 * report.blocks[0].before
    with torch.no_grad():
        assert not torch.equal(model.embedding(data(1)[0]), plain.embedding(data(1)[0]))


def test_blocks_without_prepared_weights_stay() -> None:
    model = prepared(llama(3), {"blocks.1.*": None, "blocks.*": INT2})
    before = state(model.blocks[1])
    report = qat.train_blocks(model, model.blocks, data(2), **ARGUMENTS)
    assert same(state(model.blocks[1]), before)
    assert report.blocks[1].steps == 0 and report.blocks[1].after > 0
    assert "blocks.1" in str(report)


@pytest.mark.parametrize(
    ("scheme", "lr"),
    [(lb.Int8DynamicActivationInt4Weight(32), 1e-4), (lb.Float8WeightOnly(), 1e-6)],
    ids=["int8xint4", "float8"],
)
def test_other_schemes(scheme, lr) -> None:
    model = prepared(llama(), scheme)
    report = qat.train_blocks(model, model.blocks, data(), lr=lr, epochs=2)
    assert report.blocks[0].after < report.blocks[0].before
    qat.convert_(model)


def test_bf16_autocast_and_bf16_models() -> None:
    model = prepared(llama(2))
    report = qat.train_blocks(model, model.blocks, data(4), bf16=True, **ARGUMENTS)
    assert all(b.after < b.before for b in report.blocks)
    model = prepared(llama(2).bfloat16())
    rounding = functools.partial(lb.optim.AdamW, bf16_stochastic_round=True)
    report = qat.train_blocks(model, model.blocks, data(4), optimizer=rounding, **ARGUMENTS)
    assert all(b.after < b.before for b in report.blocks)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_steps_of_several_batches() -> None:
    """A step of all batches takes the mean gradient, as one batch of all rows does."""
    one, several = prepared(llama(2)), prepared(llama(2))
    options = {"lr": 1e-3, "epochs": 4, "optimizer": torch.optim.SGD}
    batches = data(4)
    qat.train_blocks(several, several.blocks, batches, batches_per_step=4, **options)
    report = qat.train_blocks(one, one.blocks, [torch.cat(batches)], **options)
    assert [b.steps for b in report.blocks] == [4, 4]
    for name, t in one.state_dict().items():
        torch.testing.assert_close(several.state_dict()[name], t, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A block that gets its number, writes into its input, and returns a tuple."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, number: int, mask: Tensor) -> tuple[Tensor, Tensor]:
        assert number == self.number
        out = self.up(hidden_states.add_(1)) * mask
        return out + hidden_states, mask


class Stack(nn.Module):
    def __init__(self, between: float = 0.0, backwards: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(Block, range(3)))
        self.between, self.backwards = between, backwards

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x, _ = block(hidden_states=x, number=number, mask=mask)
            if self.between:
                x = x + self.between
        return x.sum()


def test_arguments_of_each_block() -> None:
    """By name, in tuples, and a mask that all blocks share is stored once."""
    model, x = prepared(Stack()), torch.randn(2, 5, 32)
    (found,) = capture(model, list(model.blocks), [(x, torch.ones(5, 1))], None)
    assert [a.kwargs["number"] for a in found.arguments] == [0, 1, 2]
    assert len({id(a.kwargs["mask"]) for a in found.arguments}) == 1
    batches = [{"x": x.clone(), "mask": torch.ones(5, 1)}, {"x": -x, "mask": torch.zeros(5, 1)}]
    report = qat.train_blocks(model, model.blocks, batches, **ARGUMENTS)
    assert all(b.after < b.before for b in report.blocks)


def test_errors() -> None:
    model = llama(2)
    with pytest.raises(ValueError, match="no weight of the blocks is prepared"):
        qat.train_blocks(model, model.blocks, data())
    prepared(model)
    with pytest.raises(ValueError, match="no batches"):
        qat.train_blocks(model, model.blocks, [])
    with pytest.raises(TypeError, match="not a module of the model"):
        qat.train_blocks(model, llama(2).blocks, data())
    with pytest.raises(ValueError, match="0 blocks; accepted"):
        qat.train_blocks(model, [], data())
    with pytest.raises(ValueError, match="order in which the model calls them"):
        qat.train_blocks(model, list(model.blocks)[::-1], data())
    with pytest.raises(ValueError, match="targets must be 'high' or 'rounded', got 'low'"):
        qat.train_blocks(model, model.blocks, data(), targets="low")
    with pytest.raises(TypeError, match=r"epochs must be an int, got 1\.5"):
        qat.train_blocks(model, model.blocks, data(), epochs=1.5)
    with pytest.raises(ValueError, match="lr must be finite"):
        qat.train_blocks(model, model.blocks, data(), lr=-1.0)
    with pytest.raises(ValueError, match=r"error of blocks\.0 is .*in epoch 1; accepted: smaller"):
        qat.train_blocks(model, model.blocks, data(), lr=1e38, optimizer=torch.optim.SGD)
    x = (torch.randn(2, 5, 32), torch.ones(5, 1))
    changing = prepared(Stack(between=1.0))
    with pytest.raises(ValueError, match="changes the hidden state between blocks 0 and 1"):
        qat.train_blocks(changing, changing.blocks, [x])
    tied = Stack()
    tied.blocks[2].up.weight = tied.blocks[0].up.weight
    prepared(tied)
    with pytest.raises(ValueError, match=r"blocks\.0\.up\.weight and .*blocks\.2\.up\.weight"):
        qat.train_blocks(tied, tied.blocks, [x])


def test_the_model_runs_after_an_error() -> None:
    model = prepared(llama(2)).train()
    tokens = data(1)[0]
    expected = model(tokens)
    with pytest.raises(ValueError, match="order in which"):
        qat.train_blocks(model, list(model.blocks)[::-1], data())
    assert torch.equal(model(tokens), expected) and model.training


@pytest.mark.gpu
def test_blocks_move_to_the_device_one_at_a_time() -> None:
    """From host memory, with activations in host memory, as on the device."""
    model, whole = prepared(llama(2)), prepared(llama(2)).cuda()
    report = qat.train_blocks(model, model.blocks, data(), device="cuda", **ARGUMENTS)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    batches = [b.cuda() for b in data()]
    on_device = qat.train_blocks(whole, whole.blocks, batches, cache=None, **ARGUMENTS)
    for one, other in zip(report.blocks, on_device.blocks, strict=True):
        assert one.after < 0.8 * one.before
        assert one.after == pytest.approx(other.after, rel=0.05)


def test_what_is_off_or_static_is_refused() -> None:
    blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
    model = nn.Sequential(*blocks)
    qat.prepare_(model, lb.Int4WeightOnly(32), scales="learned")
    qat.disable_(model)
    with pytest.raises(ValueError, match="weight is off"):
        qat.train_blocks(model, list(blocks), [torch.randn(4, 32)])
    qat.enable_(model)
    qat.train_blocks(model, list(blocks), [torch.randn(4, 32)])
    qat.undo_(model)
    scheme = lb.Int8StaticActivationInt8Weight()
    qat.prepare_(model, scheme)
    with pytest.raises(NotImplementedError, match="weight has a static activation"):
        qat.train_blocks(model, list(blocks), [torch.randn(4, 32)])
