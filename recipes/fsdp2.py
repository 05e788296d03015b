"""Pretrain a Llama in low bits on several GPUs, or CPU processes, with PyTorch's own FSDP2.

    torchrun --nproc-per-node 8 -m recipes.fsdp2 --preset 8b --low-bits int8 --optimizer AdamW8bit --out runs/8b
    torchrun --nproc-per-node 4 -m recipes.fsdp2 --resume runs/8b      goes on, here with fewer processes
    torchrun --nproc-per-node 2 -m recipes.fsdp2 --preset tiny         half a minute on a CPU

The file reads from top to bottom as a run goes: settings, model, steps, checkpoints. lowbit comes in in `build` and in
`step`. A batch depends on the seed and the step alone, and each process takes its share of it, so a run that is
killed goes on from its last checkpoint with the same losses, digit for digit, on as many processes.

RUN/config.json, RUN/data/       the settings, the tokenizer and the tokens
RUN/checkpoints/step-N/          weights and states by torch.distributed.checkpoint; the last two stay
RUN/metrics.jsonl                loss, tokens a second and peak memory
RUN/models/final.safetensors     the trained weights for `lowbit.load`: int8 weights in int8, others as trained
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowbit
from lowbit.files import new_path
from recipes import text
from recipes.command_line import UserError, exit_status, override
from recipes.llama import Llama, LlamaConfig
from recipes.runs import RunFolder, Tracker
from recipes.training import parameter_groups, perplexity, rise_and_fall, window_losses

# ---- settings ----------------------------------------------------------------------------------------------------

OPTIMIZERS = ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8", "Lion8bit", "Muon8bit", "torch")
LOW_BITS = ("none", "int8", "float8", "int8-weights", "bitnet", "qat-int4")


@dataclass(frozen=True)
class Config:
    """The settings of a run."""

    preset: str
    model: LlamaConfig
    batch_size: int
    """Sequences a step, over all processes."""
    steps: int
    warmup_steps: int
    lr: float
    low_bits: str = "none"
    """What the blocks train in: none, int8 or float8 products, int8-weights, bitnet, qat-int4."""
    optimizer: str = "AdamW8bit"
    in_backward: bool = False
    """Step parameters in backward and free their gradients at once; nothing is clipped then."""
    always: bool = False
    """Low-bit products also where a layer is too small to gain by them."""
    compile: bool = True
    compress: bool = False
    """Gradients are reduced in 8 bits, and QAT's weights gathered in their own bits."""
    grad_clip: float = 1.0
    weight_decay: float = 0.1
    corpus: str = "stdlib+torch"
    save_every: int = 500
    log_every: int = 10
    seed: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The inverse of `dataclasses.asdict`. UserError for a file of another program."""
        try:
            return cls(**{**values, "model": LlamaConfig(**values["model"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"config.json is not a configuration of recipes.fsdp2 ({error}); start a new run"
            ) from error

    def check(self, world_size: int) -> None:
        """UserError for a setting that a run cannot have."""
        counts = ("batch_size", "steps", "warmup_steps", "save_every", "log_every")
        wrong = [name for name in counts if getattr(self, name) < 1]
        if wrong:
            raise UserError(f"{wrong[0]} is {getattr(self, wrong[0])}; accepted: 1 or more")
        if not self.lr > 0 or self.grad_clip < 0:
            raise UserError(f"lr={self.lr} must be above 0, grad_clip={self.grad_clip} at least 0")
        for name, known in (("low_bits", LOW_BITS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise UserError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(known)}")
        if self.batch_size % world_size:
            raise UserError(
                f"batch_size={self.batch_size} sequences do not divide among {world_size} processes; give a multiple: "
                f"--set batch_size={world_size * max(self.batch_size // world_size, 1)}"
            )
        if self.in_backward and self.optimizer in ("torch", "Muon8bit"):
            raise UserError(
                f"in_backward takes an elementwise optimizer of lowbit, not {self.optimizer}"
            )


def tiny() -> Config:
    """0.1M parameters on CPU processes: to try the program."""
    model = LlamaConfig(512, dim=64, layers=2, heads=4, kv_heads=2, hidden=192, context=64)
    return Config(
        "tiny", model, 8, 60, 10, 3e-3, always=True, compile=False, corpus="stdlib", save_every=20
    )


def small() -> Config:
    """0.3B parameters."""
    model = LlamaConfig(
        32_768, dim=1024, layers=16, heads=16, kv_heads=8, hidden=4096, context=2048
    )
    return Config("small", model, 64, 5_000, 200, 6e-4)


def llama_8b() -> Config:
    """The shape of Llama 3.1 8B with a smaller vocabulary, for 8 GPUs. Every process builds it in host memory first, in
    30 GB."""
    model = LlamaConfig(*(32_768, 4096, 32, 32, 8, 14_336, 4096), tied=False, rope_theta=500_000.0)
    return Config("8b", model, 16, 10_000, 500, 3e-4)


PRESETS = {"tiny": tiny, "small": small, "8b": llama_8b}


# ---- the model and the optimizer ---------------------------------------------------------------------------------


def build(config: Config, device: torch.device) -> tuple[Llama, torch.optim.Optimizer]:
    """The sharded model and its optimizer: prepare, then shard, then make the optimizer."""
    torch.manual_seed(config.seed)  # all processes make the same weights, and keep their shards
    model = Llama(config.model)
    always = config.always
    schemes: dict[str, Any] = {
        "int8": lowbit.Int8MixedPrecision(always=always),
        "float8": lowbit.Float8MixedPrecision(always=always),
        "int8-weights": lowbit.Int8Weight(),
        "bitnet": lowbit.BitNet(),
    }
    if config.low_bits in schemes:
        lowbit.train.prepare_(model.blocks, schemes[config.low_bits])
    elif config.low_bits == "qat-int4":
        lowbit.qat.prepare_(model.blocks, lowbit.Int4WeightOnly(group_size=32))

    on_gpu = device.type == "cuda"
    compute = (torch.bfloat16, torch.float32) if on_gpu else ()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        if config.compile and module is not model:
            module.compile()
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(*compute))
        if not on_gpu:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    if config.compress:
        lowbit.train.compress_collectives_(model)
    model.to(device)  # the tables of the rotary embedding

    groups = parameter_groups(list(model.parameters()))
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "torch":
        return model, torch.optim.AdamW(groups, fused=True, **options)
    clip = None if config.in_backward or config.grad_clip == 0 else config.grad_clip
    made = getattr(lowbit.optim, config.optimizer)(groups, max_grad_norm=clip, **options)
    if config.in_backward:
        lowbit.optim.step_in_backward(made)
    return model, made


# ---- training ----------------------------------------------------------------------------------------------------


class Training:
    """One run on this process."""

    def __init__(self, config: Config, folder: RunFolder, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data = text.load(folder.data)
        self.model, self.optimizer = build(config, device)
        self.done = 0

    def step(self) -> torch.Tensor:
        """One step; the loss of this process's share of the batch."""
        config, share = self.config, self.config.batch_size // self.world_size
        inputs, targets = (
            part[self.rank * share : (self.rank + 1) * share].to(self.device)
            for part in text.batch(
                self.data.train,
                self.done,
                batch_size=config.batch_size,
                context=config.model.context,
                seed=config.seed,
            )
        )
        factor = rise_and_fall(self.done, config.steps, config.warmup_steps, least=0.1)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * factor
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        if config.optimizer == "torch" and config.grad_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if config.low_bits == "bitnet":
            lowbit.train.precompute_bitnet_scale(self.model)
        self.done += 1
        return loss.detach()

    def run(self, tracker: Tracker | None) -> None:
        """Steps up to the last one, with logs and checkpoints."""
        config, began, before = self.config, time.perf_counter(), self.done
        while self.done < config.steps:
            loss = self.step()
            if self.done % config.log_every == 0 or self.done == config.steps:
                dist.all_reduce(loss)
                seconds = time.perf_counter() - began
                tokens = (self.done - before) * config.batch_size * config.model.context
                found = {"loss": loss.item() / self.world_size, "tokens_s": tokens / seconds}
                if self.device.type == "cuda":
                    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                if tracker is not None:
                    tracker.log("train", step=self.done, **found)
                    shown = "  ".join(f"{name} {value:.4g}" for name, value in found.items())
                    print(f"step {self.done:>6}  {shown}", flush=True)
                began, before = time.perf_counter(), self.done
            if self.done % config.save_every == 0 or self.done == config.steps:
                if tracker is not None:
                    tracker.flush()
                self.save()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states}

    def save(self) -> None:
        """Write a checkpoint, which appears whole or not at all, and remove all but the last two."""
        parent = self.folder.path / "checkpoints"
        partial, whole = parent / "partial", parent / f"step-{self.done}"
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        dcp.save(self.state(), checkpoint_id=str(partial))
        dist.barrier()
        if self.rank == 0:
            new_path.put_folder(partial, whole)
            shutil.rmtree(partial, ignore_errors=True)  # an earlier one of this step
            for old in checkpoints(self.folder)[:-2]:
                shutil.rmtree(old)
        dist.barrier()

    def load_latest(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        found = checkpoints(self.folder)
        if found:
            state = self.state()
            dcp.load(state, checkpoint_id=str(found[-1]))
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            self.done = step_of(found[-1])

    def finish(self, tracker: Tracker | None) -> None:
        """Measure the held-out text, and write the model for one process."""
        windows = text.windows_of(self.data.heldout, self.config.model.context, 20_000)
        loss = perplexity(window_losses(self.model, windows, bf16=False))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if tracker is not None:
            lowbit.save(lowbit.tensor.joined(weights, self.model), self.folder.model("final"))
            tracker.log("heldout", perplexity=loss)
            print(f"held-out perplexity {loss:.3f}; {self.folder.model('final')}", flush=True)
        dist.barrier()  # or gloo may abort the processes that leave before the first one


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(folder: RunFolder) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((folder.path / "checkpoints").glob("step-*"), key=step_of)


# ---- the program -------------------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m recipes.fsdp2",
        description=str(__doc__).split("\n\n", 1)[0],
    )
    parser.add_argument("--preset", choices=PRESETS, help="sizes and settings (default: tiny)")
    parser.add_argument("--low-bits", choices=LOW_BITS, help="what the blocks train in")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="by its name in lowbit.optim")
    parser.add_argument("--data", type=Path, metavar="DIR", help="text to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"), metavar="RUN")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--wandb", choices=("disabled", "offline", "online"), default="disabled")
    return parser


def settings(options: argparse.Namespace) -> Config:
    """The configuration that the command line asks for. UserError for one that contradicts itself."""
    if options.resume is not None:
        given = [n for n in ("preset", "low_bits", "optimizer", "data") if getattr(options, n)]
        if given or options.set:
            name = f"--{given[0].replace('_', '-')}" if given else "--set"
            raise UserError(f"{name} with --resume: a run keeps its settings; leave it out")
        return Config.from_dict(RunFolder(options.resume).settings())
    chosen = {n: getattr(options, n) for n in ("low_bits", "optimizer") if getattr(options, n)}
    config = dataclasses.replace(PRESETS[options.preset or "tiny"](), **chosen)
    return override(config, options.set)


def train(options: argparse.Namespace) -> None:
    if "RANK" not in os.environ:
        raise UserError("start it with torchrun --nproc-per-node N -m recipes.fsdp2")
    config = settings(options)
    config.check(int(os.environ["WORLD_SIZE"]))
    folder = RunFolder(options.resume or options.out)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    is_first = int(os.environ["RANK"]) == 0
    if is_first and options.resume is None:
        folder.check_free()
        data = text.prepare(
            options.data, config.corpus, 0.03, config.model.vocab_size, config.model.context
        )
        folder.create(dataclasses.asdict(config), data)
    dist.init_process_group(device_id=device if on_gpu else None)
    try:
        run_all(config, folder, device, options.wandb if is_first else None)
    finally:
        gc.collect()  # gloo aborts some processes while tensors are left, and models are in reference cycles
        dist.destroy_process_group()


def run_all(config: Config, folder: RunFolder, device: torch.device, wandb: str | None) -> None:
    """The run from its last checkpoint to its end.

    Args:
        config: settings of the run.
        folder: its run folder.
        device: this process's device.
        wandb: mode of Weights & Biases on the first process, which keeps records; None on the others.
    """
    training = Training(config, folder, device)
    training.load_latest()
    tracker = None
    if wandb is not None:
        tracker = Tracker(folder, dataclasses.asdict(config), wandb)
        tracker.drop("train", after_step=training.done)
    training.run(tracker)
    training.finish(tracker)
    if tracker is not None:
        tracker.close(0)


def main() -> int:
    return exit_status(lambda: train(arguments().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
