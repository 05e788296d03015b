#!/usr/bin/env bash
# lightning 2.6.6, torch 2.13.0 (CPU): Trainer(precision="bf16-true") casts every floating-point tensor of a batch to bfloat16,
# targets, weights of a loss and float64 times included. A target of 1001 arrives in training_step as 1000, and a time of
# 1,700,000,123 s as 1,702,887,424. Nothing warns. "bf16-mixed" and "32-true" leave the batch as the loader gave it.
#
# One would guess that the setting is about the model: its parameters and its products. A step that computes its loss in
# float32, as one does in 16 bits, compares a float32 output with a target that was rounded before the step began: a
# regression is trained on, and validated with, other numbers than those of the data set.
#
# Exits non-zero if the targets arrive as they were.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'lightning==2.6.6' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, index):
        inputs, targets, times = batch
        self.seen = [targets.dtype, targets[0, 0].item(), times.dtype, times[0, 0].item()]
        return torch.nn.functional.mse_loss(self.layer(inputs).float(), targets.float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


for precision in ("32-true", "bf16-mixed", "bf16-true"):
    model = Regression()
    data = TensorDataset(
        torch.randn(4, 4),
        torch.full((4, 1), 1001.0),
        torch.full((4, 1), 1_700_000_123.0, dtype=torch.float64),
    )
    trainer = lightning.Trainer(
        precision=precision,
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(data, batch_size=4))
    told = [str(w.message) for w in caught if "bfloat16" in str(w.message) or "precision" in str(w.message)]
    print(precision, model.seen, told)
    if precision == "bf16-true":
        assert model.seen[:2] == [torch.bfloat16, 1000.0] and model.seen[3] == 1_702_887_424.0 and not told
    else:
        assert model.seen == [torch.float32, 1001.0, torch.float64, 1_700_000_123.0]
PYTHON
