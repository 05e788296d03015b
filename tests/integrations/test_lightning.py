"""lowbit's optimizers under Lightning: mixed precision with clipping, and a run that is resumed."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from lowbit import optim

lightning = pytest.importorskip("lightning")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = {
    "AdamW8bit": (optim.AdamW8bit, {}),
    "AdamW4bit": (optim.AdamW4bit, {}),
    "AdamW8bit fused": (optim.AdamW8bit, {"fused": True}),
    "AdamW fp32": (optim.AdamW, {"state": "fp32"}),
    "torch AdamW": (torch.optim.AdamW, {}),
    "offloaded": (optim.CPUOffloadOptimizer, {"base_class": optim.AdamW, "state": "fp32"}),
}
every_class = pytest.mark.parametrize("cls,options", CLASSES.values(), ids=CLASSES)


class Module(lightning.LightningModule):
    """A regression; `cls` is its optimizer. With `poison`, the loss of that batch is infinite."""

    def __init__(self, cls, options, poison=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.cls, self.options, self.poison = cls, options, poison
        self.norms, self.poisoned = [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        if index == self.poison:
            loss = loss * torch.inf
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.before = [p.detach().clone() for p in self.parameters()]

    def on_before_zero_grad(self, optimizer):
        norm = torch.stack(
            [p.grad.norm() for p in self.parameters() if p.grad is not None] or [torch.zeros(())]
        )
        self.norms.append(norm.norm().item())

    def on_train_batch_end(self, outputs, batch, index):
        if index == self.poison:
            pairs = zip(self.before, self.parameters(), strict=True)
            self.poisoned.append(all(torch.equal(a, b) for a, b in pairs))

    def configure_optimizers(self):
        optimizer = self.cls(self.parameters(), lr=1e-2, **self.options)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
                "interval": "step",
            },
        }


def data(batches=6):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8 * batches, 64, generator=generator) for _ in range(2))
    dataset = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(dataset, batch_size=8)


def trainer(folder, precision, **options):
    """A Trainer on the CPU. Without an explicit plugin, Lightning replaces float16 by bfloat16 there."""
    if precision == "16-mixed":
        options["plugins"] = [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))]
    else:
        options["precision"] = precision
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **options,
        )


@every_class
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_training_with_clipped_gradients(tmp_path, cls, options, precision):
    module = Module(cls, options)
    start = [p.detach().clone() for p in module.parameters()]
    trainer(tmp_path, precision, gradient_clip_val=0.1, max_epochs=1).fit(module, data())
    for old, new in zip(start, module.parameters(), strict=True):
        assert new.isfinite().all() and not torch.equal(old, new)
    assert len(module.norms) == 6


@every_class
def test_a_step_whose_loss_overflows_is_skipped(tmp_path, cls, options):
    module = Module(cls, options, poison=2)
    runner = trainer(tmp_path, "16-mixed", gradient_clip_val=0.1, max_epochs=1)
    runner.fit(module, data())
    assert module.poisoned == [True]
    assert all(p.isfinite().all() for p in module.parameters())
    assert runner.precision_plugin.scaler.get_scale() < 2**16


@every_class
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_resumed_run_gives_the_same_bits(tmp_path, cls, options, precision):
    whole = Module(cls, options)
    trainer(tmp_path, precision, gradient_clip_val=0.1, max_epochs=2).fit(whole, data())

    first = Module(cls, options)
    stopped = trainer(tmp_path, precision, gradient_clip_val=0.1, max_epochs=1)
    stopped.fit(first, data())
    stopped.save_checkpoint(tmp_path / "half.ckpt")

    resumed = Module(cls, options)
    with torch.no_grad():
        for p in resumed.parameters():
            p.zero_()
    trainer(tmp_path, precision, gradient_clip_val=0.1, max_epochs=2).fit(
        resumed, data(), ckpt_path=str(tmp_path / "half.ckpt"), weights_only=False
    )
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_fabric_clips_gradients(precision):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = nn.Linear(64, 64)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    before = model.weight.detach().clone()
    for _ in range(2):
        fabric.backward(model(torch.randn(8, 64)).float().square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        assert all(p.grad.norm() <= 0.11 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, model.weight)
