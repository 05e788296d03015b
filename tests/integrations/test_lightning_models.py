"""Lightning with low-bit weights: every way to train, clipping by norm and by value, resume, QAT, the end of a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from tests.tensor.cases import same_bits

lightning = pytest.importorskip("lightning")
from lowbit.lightning import QATCallback  # noqa: E402
from tests.integrations.test_lightning import Module, data, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

INT4 = lb.Int4WeightOnly(32)
WAYS: dict[str, Any] = {
    "qat": lambda m: lb.qat.prepare_(m, INT4),
    "int8 weight": lambda m: lb.train.prepare_(m, lb.Int8Weight()),
    "int8 products": lambda m: lb.train.prepare_(m, lb.Int8MixedPrecision(always=True)),
    "bitnet": lambda m: lb.train.prepare_(m, lb.BitNet()),
    "frozen": lambda m: lb.quantize_(m, {"0": INT4, "*": None}),
}
every_way = pytest.mark.parametrize("way", WAYS)
PRECISIONS = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])


class LowBit(Module):
    """The regression of the other tests, prepared in one of the ways."""

    def __init__(self, way: str = "", seed: int = 0) -> None:
        super().__init__(lb.optim.AdamW8bit, {})
        if seed:
            with torch.no_grad():
                for p in self.net.parameters():
                    p.normal_(std=0.1)
        if way:
            WAYS[way](self.net)
        self.largest: list[float] = []

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return self.cls(trained, lr=1e-2)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_before_zero_grad(optimizer)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.largest.append(max((g.abs().max().item() for g in grads), default=0.0))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def assert_same(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = module.state_dict()
    assert [*found] == [*expected]
    for name, value in expected.items():
        assert same_bits(found[name], value), name


@every_way
@PRECISIONS
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_training_with_clipping(way: str, precision: str, algorithm: str, tmp_path: Path) -> None:
    module = LowBit(way)
    before = state(module)
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    trainer(tmp_path, precision, max_epochs=1, **clip).fit(module, data())
    after = state(module)
    changed = {name for name in before if not same_bits(before[name], after[name])}
    assert changed and all(t.float().isfinite().all() for t in after.values())
    if way == "frozen":
        assert not any(name.startswith("net.0.weight") for name in changed)
    else:
        assert any(name.startswith("net.0.weight") for name in changed)
    # The first batch has no gradients when Lightning asks.
    clipped = module.norms if algorithm == "norm" else module.largest
    assert 0 < max(clipped) < 0.0101


def test_weights_in_bfloat16(tmp_path: Path) -> None:
    """precision="bf16-true" converts the module itself."""
    module = LowBit("qat")
    trainer(tmp_path, "bf16-true", max_epochs=1).fit(module, data())
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert isinstance(module.net[0].weight, lb.FakeQuantizedTensor)


@every_way
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_resumed_run_gives_the_same_bits(way: str, precision: str, tmp_path: Path) -> None:
    whole = LowBit(way)
    trainer(tmp_path, precision, max_epochs=2).fit(whole, data())
    first = LowBit(way)
    stopped = trainer(tmp_path, precision, max_epochs=1)
    stopped.fit(first, data())
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    resumed = LowBit(way, seed=1)
    again = trainer(tmp_path, precision, max_epochs=2)
    again.fit(resumed, data(), ckpt_path=str(tmp_path / "half.ckpt"), weights_only=False)
    assert again.global_step == 12
    assert_same(resumed, state(whole))


def test_the_end_of_a_run_leaves_states_and_weights_usable(tmp_path: Path) -> None:
    """Lightning's teardown moves the states of optimizers to the CPU."""
    module = LowBit("int8 weight")
    runner = trainer(tmp_path, "32-true", max_epochs=1)
    runner.fit(module, data())
    (optimizer,) = runner.optimizers
    kinds = {type(s["exp_avg"]) for s in optimizer.state.values()}
    assert lb.tensor.CodebookTensor in kinds
    x = torch.randn(4, 64)
    module.net(x).square().mean().backward()
    before = module.net[0].weight.codes.clone()
    optimizer.step()
    assert not torch.equal(module.net[0].weight.codes, before)
    runner.validate(module, data(), verbose=False)
    copy.deepcopy(module)


# ---- QAT -----------------------------------------------------------------------------------------------------------


class Watched(QATCallback):
    """Notes in each step whether the weights are rounded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[int | None] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        weight = pl_module.net[0].weight
        self.seen.append(weight.rounds_weight)


SETTINGS: dict[str, Any] = {"start": 8}
STAGES = [False] * 8 + [True] * 4


def test_the_callback_prepares_trains_and_converts(tmp_path: Path) -> None:
    module, callback = LowBit(), Watched(INT4, **SETTINGS)
    runner = trainer(tmp_path, "bf16-mixed", max_epochs=2, callbacks=[callback])
    runner.fit(module, data())
    assert callback.seen == STAGES
    assert all(isinstance(m.weight, lb.AffineTensor) for m in module.net if hasattr(m, "weight"))
    assert callback.report is not None and len(callback.report.converted) == 2
    runner.validate(module, data(), verbose=False)


def test_the_converted_module_is_the_one_that_was_trained(tmp_path: Path) -> None:
    module, callback = LowBit(), QATCallback(INT4, convert=False)
    runner = trainer(tmp_path, "32-true", max_epochs=1, callbacks=[callback])
    runner.fit(module, data())
    x = torch.randn(4, 64)
    expected = module.net(x)
    lb.qat.convert_(module)
    assert torch.equal(module.net(x), expected)


def test_a_resumed_run_continues_the_schedule(tmp_path: Path) -> None:
    whole = LowBit()
    trainer(tmp_path, "32-true", max_epochs=2, callbacks=[QATCallback(INT4, **SETTINGS)]).fit(
        whole, data()
    )
    first, stopped = LowBit(), QATCallback(INT4, convert=False, **SETTINGS)
    runner = trainer(tmp_path, "32-true", max_epochs=1, callbacks=[stopped])
    runner.fit(first, data())
    runner.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"]
    assert not any(isinstance(t, lb.LowbitTensor) for t in saved.values())
    resumed, callback = LowBit(seed=1), Watched(INT4, **SETTINGS)
    trainer(tmp_path, "32-true", max_epochs=2, callbacks=[callback]).fit(
        resumed, data(), ckpt_path=str(tmp_path / "half.ckpt"), weights_only=False
    )
    assert callback.seen == STAGES[6:]
    assert_same(resumed, state(whole))


def test_accumulated_batches_count_once(tmp_path: Path) -> None:
    module, callback = LowBit(), Watched(INT4, start=2)
    runner = trainer(
        tmp_path, "32-true", max_epochs=1, accumulate_grad_batches=2, callbacks=[callback]
    )
    runner.fit(module, data())
    assert runner.global_step == 3 and callback.seen == [False] * 4 + [True] * 2
