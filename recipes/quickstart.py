"""The quick start: text in, a trained, fine-tuned and converted low-bit language model and a report out.

    python -m recipes.quickstart [--preset tiny|small|gpu] [--data FILE_OR_FOLDER] [--out DIR] [--resume [DIR]]
    python -m recipes.quickstart --evaluate RUN

The program reads from top to bottom: presets, training, saved models, measurement, the whole run, the command line. It
trains with AdamW4bit, in branches that differ in their precision only:

    steps 0 … trunk_steps          "trunk"  high precision
    trunk_steps … steps            "high"   high precision
                                   "int4"   the same steps with the weights rounded to 4 bits in every product (QAT),
                                            by scales that are trained too, mostly towards "high"
                                   "int3", "int2"   …to 3 and 2 bits

Each branch starts from the trunk's weights. It sees the same batches in the same order at the same learning rate. So a
QAT model that is better than the rounded "high" model does not owe this to more training. The branch in high precision
goes on with the trunk's optimizer states, which is a little better for it than new ones. QAT starts with new ones,
which is much better for QAT (benchmarks/LOG.md).

Every step is a function of the seed, the step number and the checkpoint. So a run that was interrupted and resumed
equals one that was not: on a CPU, to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

# OpenMP reads this when torch is first imported. Threads that wait actively slow each other down on a busy machine:
# one busy core of two made a step 5 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LambdaLR
    from tqdm import tqdm

    import lowbit
    from recipes import figures, pages, runs, text
    from recipes.command_line import EXIT_INTERRUPTED, UserError, exit_status
    from recipes.device import choose_device, median_seconds
    from recipes.llama import Llama, LlamaConfig
    from recipes.quickstart_report import report, slowness
    from recipes.training import (
        TrainingConfig,
        batch_rows,
        learning_rate_factor,
        override,
        parameter_groups,
        perplexity,
        step_loss,
        window_losses,
    )
except ImportError as error:
    if __name__ != "__main__":
        raise
    install = 'install all that the recipes need with: pip install -e ".[recipes]"'
    print(f"error: a package is missing ({error}); {install}", file=sys.stderr)
    sys.exit(2)

RUNS = Path("runs")

# ---- presets -----------------------------------------------------------------------------------------------


def tiny() -> TrainingConfig:
    """0.4M parameters, a few minutes on two CPU cores. Rounding hurts a model that has seen many tokens for each of
    its weights, so the model is small on purpose."""
    return TrainingConfig(
        preset="tiny",
        model=LlamaConfig(
            vocab_size=512, dim=128, layers=2, heads=4, kv_heads=2, hidden=320, context=256
        ),
        batch_size=8,
        steps=1200,
        branch_steps=360,
        warmup_steps=40,
        decay_steps=440,
        lr=2.5e-3,
        probe_sequences=32,
        save_every=200,
    )


def small() -> TrainingConfig:
    """3M parameters, under an hour on a few CPU cores or a few minutes on a GPU."""
    return TrainingConfig(
        preset="small",
        model=LlamaConfig(
            vocab_size=2048, dim=256, layers=4, heads=8, kv_heads=4, hidden=640, context=256
        ),
        batch_size=16,
        steps=1800,
        branch_steps=540,
        warmup_steps=80,
        decay_steps=650,
        lr=2e-3,
    )


def gpu() -> TrainingConfig:
    """99M parameters in bfloat16 autocast, a few minutes on one datacentre GPU."""
    model = LlamaConfig(
        vocab_size=8192, dim=1024, layers=8, heads=16, kv_heads=4, hidden=2816, context=1024
    )
    return TrainingConfig(
        preset="gpu",
        model=dataclasses.replace(model, dropout=0.1),
        batch_size=32,
        steps=1000,
        branch_steps=250,
        warmup_steps=50,
        decay_steps=375,
        lr=1.5e-3,
        corpus="stdlib+torch",
        heldout_tokens=1_000_000,
        probe_sequences=32,
        bf16=True,
    )


PRESETS = {"tiny": tiny, "small": small, "gpu": gpu}


# ---- training ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The inputs that every part of a run needs."""

    config: TrainingConfig
    folder: runs.RunFolder
    data: text.Data
    tracker: runs.Tracker
    device: torch.device

    def heldout_windows(self, at_most_tokens: int) -> Tensor:
        return text.windows_of(self.data.heldout, self.config.model.context, at_most_tokens)


@dataclass(frozen=True)
class Phase:
    """Steps `start` to `end` of one model."""

    name: str
    start: int
    end: int
    scheme: lowbit.Scheme | None = None
    """None: training in high precision."""
    scales: Literal["learned", "present"] = "learned"
    rank: int | None = None
    """Rank of adapters that train in place of the blocks' weights; None trains the weights."""
    teacher: str = "high"
    """The phase in high precision whose finished model teaches in QAT. It has the adapters that this phase has."""


def phases(config: TrainingConfig) -> list[Phase]:
    trunk, end = config.trunk_steps, config.steps
    qat = [Phase(f"int{bits}", trunk, end, scheme(config, bits)) for bits in config.bits]
    return [Phase("trunk", 0, trunk), Phase("high", trunk, end), *qat]


def scheme(config: TrainingConfig, bits: int) -> lowbit.Scheme:
    """The one scheme that QAT trains with, that rounding uses, and that the saved model has."""
    if bits == 2:  # the grid without a zero
        return lowbit.Int2WeightOnly(config.group_size)
    return lowbit.IntxWeightOnly(bits, group_size=config.group_size)


@dataclass
class Training:
    """A model with its optimizer and scheduler, and the steps that it has taken."""

    phase: Phase
    model: Llama
    optimizer: lowbit.optim.AdamW4bit
    scheduler: LambdaLR
    step: int
    fresh: bool
    """The phase itself has taken no step yet."""
    teacher: Llama | None = None
    """The finished high-precision model, for QAT."""
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        random = {"cpu": torch.get_rng_state()}
        if self.model.cos.is_cuda:
            random["cuda"] = torch.cuda.get_rng_state()
        return {
            "phase": self.phase.name,
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": random,
        }


def start_or_resume(run: Run, phase: Phase) -> Training:
    """The training of `phase` from its own checkpoint, else from the trunk's, else from scratch."""
    config = run.config
    torch.manual_seed(config.seed)
    own, trunk = run.folder.checkpoint(phase.name), run.folder.checkpoint("trunk")
    resumed = own.exists()
    saved = None
    if resumed or phase.start:
        saved = runs.load_checkpoint(own if resumed else trunk)
    model = Llama(config.model).to(run.device)
    if saved is not None and not resumed:
        model.load_state_dict(saved["model"])
    if phase.rank is not None:
        model = with_adapters(model, phase.rank)
    if phase.scheme is not None:
        lowbit.qat.prepare_(model, phase.scheme, scales=phase.scales)
    if saved is not None and resumed:
        model.load_state_dict(saved["model"])
    of_trunk = None
    if saved is not None and not resumed and phase.scheme is None:
        of_trunk = saved["optimizer"]
    optimizer = optimizer_of(config, model, of_trunk)
    last = -1 if saved is None or resumed else phase.start - 1
    factor = learning_rate_factor(config, qat=phase.scheme is not None)
    scheduler = LambdaLR(optimizer, factor, last_epoch=last)
    distils = phase.scheme is not None and config.kl_weight > 0
    teacher = high_precision_model(run, phase.teacher, phase.rank) if distils else None
    training = Training(phase, model, optimizer, scheduler, phase.start, not resumed, teacher)
    if saved is None:
        return training
    if resumed:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"]["cpu"])
    if run.device.type == "cuda" and "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"])
    if resumed:
        training.step, training.seconds = saved["step"], saved["seconds"]
    return training


def high_precision_model(run: Run, name: str = "high", rank: int | None = None) -> Llama:
    """The model at the end of a phase in high precision, its adapters merged."""
    model = Llama(run.config.model).to(run.device)
    if rank is not None:
        model = with_adapters(model, rank)
    model.load_state_dict(runs.load_checkpoint(run.folder.checkpoint(name))["model"])
    for parent in list(model.modules()) if rank is not None else ():
        for child_name, layer in list(parent.named_children()):
            if hasattr(layer, "base_layer"):
                cast(Any, layer).merge()
                setattr(parent, child_name, layer.base_layer)
    return model.eval().requires_grad_(False)


def with_adapters(model: Llama, rank: int) -> Llama:
    """PEFT's LoRA on every linear layer of the blocks. The adapters train, and so do the norms and the embedding, which
    is the head too and is rounded as well. UserError without PEFT."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f'LoRA needs PEFT ({error}): pip install -e ".[finetune]", or leave these runs out'
        ) from error
    layers = "|".join(("query", "key", "value", "out", "gate", "up", "down"))
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=rf".*\.({layers})")
    inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".base_layer." not in name)
    return model


def optimizer_of(
    config: TrainingConfig, model: Llama, of_trunk: dict[str, Any] | None
) -> lowbit.optim.AdamW4bit:
    """The optimizer of all that trains, with the trunk's states where `of_trunk` has them and the weights train."""
    weights, adapters, scales = trained_parameters(model)
    groups = parameter_groups(weights)
    if adapters:
        groups.append({"params": adapters, "lr": LORA_LR * config.lr, "weight_decay": 0.0})
    optimizer = lowbit.optim.AdamW4bit(
        groups, lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay
    )
    if of_trunk is not None and not adapters:
        optimizer.load_state_dict(of_trunk)
    if scales:
        optimizer.add_param_group({"params": scales, "weight_decay": 0.0, "lr": config.lr})
    for group in optimizer.param_groups:  # which a schedule that starts late expects
        group.setdefault("initial_lr", group["lr"])
    return optimizer


LORA_LR = 10.0
"""Learning rate of adapters, as a multiple of that of weights."""


def trained_parameters(model: Llama) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, adapters, and the scales that QAT trains beside them."""
    weights: list[Tensor] = []
    adapters: list[Tensor] = []
    scales: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale"):
            scales.append(parameter)
        elif ".lora_" in name:
            adapters.append(parameter)
        elif parameter.requires_grad:
            weights.append(parameter)
    return weights, adapters, scales


def train_phase(run: Run, phase: Phase) -> None:
    """Train `phase` to its end from its last checkpoint. On Ctrl-C save a checkpoint and raise KeyboardInterrupt."""
    config, tracker = run.config, run.tracker
    training = start_or_resume(run, phase)
    tracker.drop(phase.name, after_step=-1 if training.fresh else training.step)
    if training.step == phase.end:
        return
    windows = run.heldout_windows(config.probe_sequences * config.model.context)

    def probe() -> None:
        with torch.compiler.set_stance("force_eager"):  # other shapes, hence other graphs
            losses = window_losses(training.model, windows, config.bf16)
        tracker.log(phase.name, step=training.step, heldout_loss=losses.mean().item())

    if training.fresh:
        probe()
    if config.compile:
        compile_blocks(training)
    training.model.train()
    every = 0.5 if sys.stderr.isatty() else 20  # seconds
    bar = tqdm(total=phase.end, initial=training.step, desc=f"{phase.name:>5}", mininterval=every)
    with bar, runs.DelayedInterrupt() as interrupt:
        while training.step < phase.end:
            started = time.perf_counter()
            values = train_step(run, training)
            seconds = time.perf_counter() - started
            training.seconds += seconds
            training.step += 1
            speed = config.step_tokens / seconds
            tracker.log(phase.name, step=training.step, **values, tokens_per_s=round(speed, 1))
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            done, stop = training.step == phase.end, interrupt.requested
            if done or training.step % config.probe_every == 0:
                probe()
            if done or stop or training.step % config.save_every == 0:
                tracker.flush()
                runs.save_checkpoint(run.folder.checkpoint(phase.name), training.state())
            if stop:
                raise KeyboardInterrupt


def compile_blocks(training: Training) -> None:
    """Compile the blocks of the model and of its teacher. All blocks of a model share one graph, so this takes seconds,
    where the whole model as one graph takes a minute."""
    torch.compiler.reset()  # each phase has graphs of its own, and torch keeps only a few a function
    for model in (training.model, training.teacher):
        for block in () if model is None else model.blocks:
            block.compile()


def train_step(run: Run, training: Training) -> dict[str, float]:
    """One optimizer step: its {"loss", "lr", "grad_norm"}. UserError when the loss is not finite."""
    config = run.config
    lr = training.scheduler.get_last_lr()[0]
    model, teacher = training.model, training.teacher
    loss = step_loss(config, model, run.data.train, training.step, run.device, teacher)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    if not math.isfinite(loss.item()):
        raise UserError(
            f"the loss is {loss.item()} at step {training.step} of {training.phase.name}; "
            f"start again with a smaller learning rate than {config.lr}: --set lr={config.lr / 2:g}"
        )
    return {"loss": loss.item(), "lr": float(lr), "grad_norm": grad_norm.item()}


# ---- saved models ------------------------------------------------------------------------------------------

SAMPLE_PROMPT = "class Queue:\n    def __init__(self"


def save_model(model: Llama, path: Path, name: str) -> None:
    """Write the weights and, as metadata, the sizes from which `load_model` builds the model."""
    metadata = {"name": name, "model": dataclasses.asdict(model.config)}
    lowbit.save(model, path, metadata=metadata)


def load_model(path: Path, device: torch.device) -> Llama:
    """The model in `path`, quantized as it was saved. UserError when the file is damaged."""
    try:
        config = LlamaConfig(**lowbit.load_metadata(path)["model"])
        model = Llama(config)
        model.load_state_dict(lowbit.load(path), assign=True)
    except (OSError, lowbit.CheckpointError, LookupError, TypeError, ValueError, RuntimeError) as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise UserError(f"{path} is not a model that the quick start saved: {reason}") from e
    if config.tied:
        model.head.weight = model.embedding.weight
    return model.to(device).eval()


def evaluate_saved(folder: runs.RunFolder) -> dict[str, float]:
    """Perplexity by name of the models in `folder`, each loaded from its file."""
    config = TrainingConfig.from_dict(folder.settings())
    paths = sorted((folder.path / "models").glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder.path} has no models yet; finish its run first")
    data, device = text.load(folder.data), choose_device()
    windows = text.windows_of(data.heldout, config.model.context, config.heldout_tokens)
    return {
        path.stem: perplexity(window_losses(load_model(path, device), windows, config.bf16))
        for path in paths
    }


def evaluate_in_fresh_process(folder: runs.RunFolder) -> dict[str, float]:
    """The perplexities that `python -m recipes.quickstart --evaluate RUN` prints."""
    command = [sys.executable, "-m", "recipes.quickstart", "--evaluate", str(folder.path.resolve())]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise UserError(f"the saved models could not be measured in a fresh process: {reason}")
    return json.loads(done.stdout)


# ---- measurement -------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Measurements of one model. `losses`: of each held-out window, nats a token."""

    name: str
    label: str
    bits: int | None
    losses: Tensor
    perplexity: float
    file_bytes: int
    forward_tokens_per_s: float
    generate_tokens_per_s: float
    sample: str
    reloaded_perplexity: float = float("nan")


@dataclass
class Recovery:
    """The share of the perplexity lost by rounding to `bits` that QAT wins back, with its 95% interval."""

    bits: int
    lost: float
    share: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.lost <= 0:
            return "rounding lost nothing"
        return f"{self.share:.0%} recovered" if self.share > 0 else "nothing recovered"


@dataclass
class Measurements:
    """Everything that the report shows."""

    results: list[Result]
    recoveries: list[Recovery]
    optimizer_bytes: dict[str, int]
    parameters: int
    quantized_parameters: int
    seconds: dict[str, float]

    def by_name(self, name: str) -> Result:
        return next(r for r in self.results if r.name == name)


def measured_models(run: Run) -> Iterator[tuple[str, str, int | None, Llama]]:
    """(name, label, bits, model) of each model in the report, in its order."""
    by_name = {phase.name: phase for phase in phases(run.config)}

    def trained(name: str) -> Llama:
        return start_or_resume(run, by_name[name]).model.eval()

    yield "high", "high precision", None, trained("high")
    for bits in run.config.bits:
        rounded = trained("high")
        lowbit.quantize_(rounded, scheme(run.config, bits), scales="minmax")
        yield f"int{bits}-rtn", f"int{bits}, rounded after training", bits, rounded
        converted = trained(f"int{bits}")
        lowbit.qat.convert_(converted)
        yield f"int{bits}-qat", f"int{bits}, after QAT", bits, converted


def measure(run: Run) -> Measurements:
    """Make the models, measure each in memory, save it, and measure the files in a fresh process."""
    config, folder = run.config, run.folder
    results = []
    quantized = 0
    for name, label, bits, model in measured_models(run):
        print(f"measuring {label}")
        results.append(measure_model(run, name, label, bits, model))
        low_bit = (p.numel() for p in model.parameters() if isinstance(p, lowbit.LowbitTensor))
        quantized = max(quantized, sum(low_bit))
    print("loading the saved models in a fresh process")
    reloaded = evaluate_in_fresh_process(folder)
    logged = [
        *("perplexity", "reloaded_perplexity", "file_bytes"),
        *("forward_tokens_per_s", "generate_tokens_per_s"),
    ]
    for result in results:
        result.reloaded_perplexity = reloaded[result.name]
        values = {name: getattr(result, name) for name in logged}
        run.tracker.log("result", model=result.name, **values)
    found = Measurements(
        results=results,
        recoveries=recoveries(config, results),
        optimizer_bytes=optimizer_bytes(run),
        parameters=sum(p.numel() for p in Llama(config.model).parameters()),
        quantized_parameters=quantized,
        seconds={
            p.name: runs.load_checkpoint(folder.checkpoint(p.name))["seconds"]
            for p in phases(config)
        },
    )
    for recovery in found.recoveries:
        run.tracker.log("recovery", **vars(recovery))
    return found


def measure_model(run: Run, name: str, label: str, bits: int | None, model: Llama) -> Result:
    config, device = run.config, run.device
    windows = run.heldout_windows(config.heldout_tokens)
    losses = window_losses(model, windows, config.bf16)
    save_model(model, run.folder.model(name), name)

    tokens = windows[: batch_rows(windows, device), :-1].to(device)
    room = config.model.context - config.sample_tokens
    prompt = torch.tensor([run.data.tokenizer.encode(SAMPLE_PROMPT).ids[:room]], device=device)
    generated = prompt

    def generate() -> None:
        nonlocal generated
        draws = torch.Generator().manual_seed(config.seed)  # the same for every model
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
            generated = model.generate(
                prompt, config.sample_tokens, temperature=0.7, top_k=40, generator=draws
            )

    def forward() -> None:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
            model(tokens)

    forward_s = median_seconds(forward, device, repeats=5)
    generate_s = median_seconds(generate, device, repeats=9, at_most_s=3.0)
    return Result(
        name=name,
        label=label,
        bits=bits,
        losses=losses,
        perplexity=perplexity(losses),
        file_bytes=run.folder.model(name).stat().st_size,
        forward_tokens_per_s=round(tokens.numel() / forward_s, 1),
        generate_tokens_per_s=round(config.sample_tokens / generate_s, 1),
        sample=run.data.tokenizer.decode(generated[0].tolist()),
    )


def recoveries(config: TrainingConfig, results: list[Result]) -> list[Recovery]:
    """(rounded − QAT) / (rounded − high), in perplexity, for each bit width.

    The interval is a bootstrap over held-out windows; each draw takes the same windows for all three models.
    """
    losses = {r.name: r.losses.numpy() for r in results}
    count = len(losses["high"])
    draws = np.random.default_rng(config.seed).integers(count, size=(2000, count))
    found = []
    for bits in config.bits:
        names = ("high", f"int{bits}-rtn", f"int{bits}-qat")
        high, rounded, qat = (np.exp(losses[n].mean()) for n in names)
        high_D, rounded_D, qat_D = (np.exp(losses[n][draws].mean(1)) for n in names)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares_D = (rounded_D - qat_D) / (rounded_D - high_D)
            share = (rounded - qat) / (rounded - high)
        low, up = np.percentile(shares_D, [2.5, 97.5])
        found.append(Recovery(bits, float(rounded - high), float(share), float(low), float(up)))
    return found


def optimizer_bytes(run: Run) -> dict[str, int]:
    """Bytes of all state tensors: of torch.optim.AdamW after one step, and of the run's own optimizer."""
    model = Llama(run.config.model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reference = torch.optim.AdamW(model.parameters(), lr=0.0)
    reference.step()
    saved = runs.load_checkpoint(run.folder.checkpoint("high"))["optimizer"]["state"]

    def stored(value: Any) -> int:
        if isinstance(value, lowbit.LowbitTensor):
            return value.nbytes_stored()
        return value.nbytes if isinstance(value, Tensor) else 0

    states = {"torch.optim.AdamW": reference.state, "lowbit.optim.AdamW4bit": saved}
    return {
        name: sum(stored(v) for state in found.values() for v in state.values())
        for name, found in states.items()
    }


def draw_figures(run: Run, found: Measurements) -> None:
    """`loss.png` and `perplexity.png`."""
    curves = []
    records = runs.read_metrics(run.folder)
    for phase in phases(run.config):
        own = [r for r in records if r["phase"] == phase.name]
        label = "high precision" if phase.scheme is None else f"QAT, {phase.name}"
        curves.append(
            figures.Curve(
                "shared steps, high precision" if phase.start == 0 else label,
                [(r["step"], r["heldout_loss"]) for r in own if "heldout_loss" in r],
                [(r["step"], r["loss"]) for r in own if "loss" in r],
            )
        )
    figures.draw_losses(run.folder.path / "loss.png", curves, run.config.step_tokens)
    figures.draw_perplexities(
        run.folder.path / "perplexity.png",
        {r.name: r.perplexity for r in found.results},
        {r.bits: str(r) for r in found.recoveries},
    )


# ---- the whole run -----------------------------------------------------------------------------------------


def train_and_report(run: Run) -> Measurements:
    """Do all that is left of a run, and write its report."""
    config = run.config
    print(
        f"training on {run.device}: {config.steps} steps of {config.step_tokens} tokens, preset {config.preset}"
    )
    for phase in phases(config):
        train_phase(run, phase)
    for kind in ("result", "recovery"):  # records of an earlier measurement
        run.tracker.drop(kind)
    found = measure(run)
    run.tracker.flush()
    draw_figures(run, found)
    pages.write(run.folder.path, report(run, found))
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.quickstart",
        description="Train a small language model with AdamW4bit, fine-tune it with QAT, convert it to int4, "
        "and report what each step costs and gains.",
    )
    add = parser.add_argument
    about_presets = (
        "tiny: minutes on 2 CPU cores; small: under an hour; gpu: minutes on a datacentre GPU "
        "(default: gpu with CUDA, else tiny)"
    )
    wandb_modes = ("offline", "online", "disabled")
    add("--preset", choices=tuple(PRESETS), help=about_presets)
    add("--data", type=Path, metavar="FILE_OR_FOLDER",
        help="your own UTF-8 text (default: the Python standard library's source)")  # fmt: skip
    add("--out", type=Path, metavar="DIR",
        help="the run folder, new or empty (default: runs/PRESET-TIME)")  # fmt: skip
    add("--resume", nargs="?", const="", metavar="DIR",
        help="resume the run in DIR, with its settings and data (default: the latest in runs/)")  # fmt: skip
    add("--wandb", choices=wandb_modes, default="disabled",
        help="log to Weights & Biases as well (default: disabled)")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="change a setting, e.g. --set steps=2000 --set model.dim=192 (see training.py)")  # fmt: skip
    add("--evaluate", type=Path, metavar="RUN",
        help="only load the saved models of RUN and print {name: held-out perplexity} as JSON")  # fmt: skip
    return parser.parse_args(arguments)


def open_run(options: argparse.Namespace) -> Run:
    """A new run, or the one to resume."""
    runs.check_wandb(options.wandb)
    if options.resume is not None:
        for name in ("preset", "out", "data", "assignments"):
            if getattr(options, name):
                option = "--set" if name == "assignments" else f"--{name}"
                raise UserError(
                    f"{option} doesn't go with --resume: a run keeps its settings and data"
                )
        folder = runs.RunFolder(Path(options.resume)) if options.resume else runs.latest(RUNS)
        config = TrainingConfig.from_dict(folder.settings())
        data = text.load(folder.data)
    else:
        preset = options.preset or default_preset()
        config = override(PRESETS[preset](), options.assignments)
        folder = runs.RunFolder(options.out or RUNS / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.check_free()
        model = config.model
        data = text.prepare(
            options.data, config.corpus, config.heldout_share, model.vocab_size, model.context
        )
        folder.create(dataclasses.asdict(config), data)
    tracker = runs.Tracker(folder, dataclasses.asdict(config), options.wandb)
    return Run(config, folder, data, tracker, choose_device())


def default_preset() -> str:
    return "gpu" if choose_device().type == "cuda" else "tiny"


def train_from(options: argparse.Namespace) -> None:
    try:
        run = open_run(options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was written") from None
    status = 1
    try:
        found = train_and_report(run)
        status = 0
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        resume = f"resume with python -m recipes.quickstart --resume {run.folder.path}"
        raise KeyboardInterrupt(resume) from None
    finally:
        run.tracker.close(status)
    if (slow := slowness(found)) is not None:
        print(slow)
    for result in found.results:
        print(
            f"{result.label:<30} perplexity {result.perplexity:8.3f}   {result.file_bytes:>12,} bytes   "
            f"generates {result.generate_tokens_per_s:8,.0f} tokens/s"
        )
    print(f"report: {run.folder.path / 'report.md'} and {run.folder.path / 'report.html'}")


def main(arguments: list[str] | None = None) -> int:
    """0 done, 2 a mistake that the user can correct (in one line), 130 interrupted."""
    options = parse(arguments)
    if options.evaluate is None:
        return exit_status(lambda: train_from(options))
    return exit_status(lambda: print(json.dumps(evaluate_saved(runs.RunFolder(options.evaluate)))))


if __name__ == "__main__":
    sys.exit(main())
