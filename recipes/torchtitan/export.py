"""Convert what torchtitan trained into a file for `lowbit.load`, on one process without a GPU.

    python -m recipes.torchtitan.export --job.config_file recipes/torchtitan/debug.toml --out model.safetensors

The options are those of the run, so that the model is prepared as it was in training. The last checkpoint is converted,
or the one of `--checkpoint.load_step`: QAT to exactly the quantized weights that it trained, int8, int4 and ternary
weights to those for inference. Weights that were trained in high precision stay in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit
from recipes.command_line import UserError, exit_status
from recipes.torchtitan import on_cpu


def checkpoint_of(config: Any) -> Path:
    """The folder of the checkpoint to convert. UserError when there is none."""
    parent = Path(config.job.dump_folder, config.checkpoint.folder)
    steps = {int(p.parent.name.removeprefix("step-")): p.parent for p in parent.glob("*/.metadata")}
    chosen = (
        config.checkpoint.load_step if config.checkpoint.load_step >= 0 else max(steps, default=-1)
    )
    if chosen not in steps:
        found = ", ".join(map(str, sorted(steps))) or "none"
        raise UserError(
            f"{parent} has no checkpoint of step {chosen}; there are: {found}"
            if chosen >= 0
            else f"{parent} has no checkpoint; train with --checkpoint.enable"
        )
    return steps[chosen]


def prepared(config: Any) -> nn.Module:
    """The model of a run, prepared as in training, with memory but without values."""
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools.utils import set_default_dtype

    from lowbit.torchtitan import LowbitConverter

    spec = get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model: Any = spec.model_cls(arguments)
    LowbitConverter(config, None).convert(model)
    model.to_empty(device="cpu")
    lowbit.train.locate_(model)
    return model


def convert(model: nn.Module, config: Any) -> lowbit.Report | None:
    """Give a trained model the weights for inference. None where they stay as they are."""
    from lowbit.interop.torchtitan.settings import scheme_of

    scheme = scheme_of(config.lowbit, torch.device("cpu"))
    if scheme is None:
        return None
    if config.lowbit.qat:
        return lowbit.qat.convert_(model)
    if isinstance(scheme, lowbit.Int8Weight | lowbit.Int4Weight | lowbit.BitNet):
        return lowbit.train.convert_(model)
    return lowbit.train.restore_(model)


def export(options: list[str], out: Path) -> None:
    if not torch.accelerator.is_available():
        on_cpu.stand_in()
    from importlib import import_module

    from torchtitan.config import ConfigManager

    config: Any = ConfigManager().parse_args(options)
    if config.experimental.custom_import:
        import_module(config.experimental.custom_import)
    folder = checkpoint_of(config)
    model = prepared(config)
    dcp.load(model.state_dict(), checkpoint_id=str(folder), no_dist=True)  # into the model's memory
    report = convert(model, config)
    if report is not None:
        print(report)
    lowbit.save(model, out)
    print(f"{folder} -> {out}: {out.stat().st_size / 1e6:,.1f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.torchtitan.export",
        description=str(__doc__).split("\n\n", 1)[0],
        epilog="all other options are torchtitan's",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    given, options = parser.parse_known_args()
    return exit_status(lambda: export(options, given.out))


if __name__ == "__main__":
    sys.exit(main())
