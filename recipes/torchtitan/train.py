"""torchtitan's training program with the models and data of these recipes, on GPUs, or on CPU processes to try it.

    torchrun --nproc-per-node 8 -m recipes.torchtitan.train --job.config_file recipes/torchtitan/llama3_8b.toml
    torchrun --nproc-per-node 2 -m recipes.torchtitan.train --job.config_file recipes/torchtitan/debug.toml

Options are torchtitan's: each setting of a configuration is one, as in `--optimizer.name AdamW4bit`. Weights & Biases
keeps its records in the run's folder, unless WANDB_MODE says otherwise.
"""

from __future__ import annotations

import gc
import os

import torch

from recipes.torchtitan import on_cpu


def main() -> None:
    os.environ.setdefault("WANDB_MODE", "offline")
    if not torch.accelerator.is_available():
        on_cpu.stand_in()
    # torchtitan looks for the device when it is imported.
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    class Released(Trainer):
        """A Trainer that lets go of the model before torchtitan destroys the process group. gloo aborts some processes
        while tensors are left, and models are in reference cycles."""

        def close(self) -> None:
            super().close()
            self.__dict__.clear()
            gc.collect()

    train(Released)


if __name__ == "__main__":
    main()
