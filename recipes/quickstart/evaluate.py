"""Measure the models of a run on its held-out text.

    python -m recipes.quickstart.evaluate RUN [--model NAME] [--json]

reads `RUN/models/*.safetensors` as anyone would, in a process that has never seen the models being made,
and prints their perplexities. The quick start runs this command itself and compares.

Perplexity is exp(mean cross entropy in nats a token) over windows of `context` tokens that tile the held-out
text, each read from its own start. The sums are taken in float64.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from recipes.llama import Llama, LlamaConfig
from recipes.quickstart import data as quickstart_data
from recipes.quickstart.config import QuickstartConfig, UserError
from recipes.quickstart.folder import RunFolder

BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}
"""Tokens a batch. Fixed, so that every process does the same sums in the same order."""
SAMPLE_PROMPT = "class Queue:\n    def __init__(self"


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_rows(windows: Tensor, device: torch.device) -> int:
    return max(1, BATCH_TOKENS[device.type] // (windows.shape[1] - 1))


@torch.no_grad()
def window_losses(
    model: nn.Module,
    windows: Tensor,
    device: torch.device,
    bf16: bool,
    after_batch: Callable[[], None] | None = None,
) -> Tensor:
    """Mean cross entropy of each window [count, context + 1], in nats a token: float64 [count]."""
    was_training = model.training
    model.eval()
    losses = []
    for part in windows.split(batch_rows(windows, device)):
        tokens = part.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = model(tokens[:, :-1])
        each = F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
        losses.append(each.double().mean(1).cpu())
        if after_batch is not None:
            after_batch()
    model.train(was_training)
    return torch.cat(losses)


def perplexity(losses: Tensor) -> float:
    """exp of the mean of `window_losses`."""
    return math.exp(losses.mean().item())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def forward_speed(model: nn.Module, windows: Tensor, device: torch.device, bf16: bool) -> float:
    """Tokens a second of the forward pass over one batch: the median of five after two to warm up."""
    tokens = windows[: batch_rows(windows, device), :-1].to(device)
    speeds = []
    for _ in range(7):
        synchronize(device)
        started = time.perf_counter()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            model(tokens)
        synchronize(device)
        speeds.append(tokens.numel() / (time.perf_counter() - started))
    return statistics.median(speeds[2:])


def sample(
    model: Llama, data: quickstart_data.Data, config: QuickstartConfig, device: torch.device
) -> tuple[str, float]:
    """(text that continues SAMPLE_PROMPT, the same draws for every model; tokens a second, the median of
    nine, or of as many as three seconds hold)."""
    prompt = data.encode(SAMPLE_PROMPT)
    room = config.model.context - config.sample_tokens
    prompt = prompt[:room] if room < len(prompt) else prompt
    tokens = torch.tensor([prompt], device=device)

    def generate(count: int) -> Tensor:
        generator = torch.Generator().manual_seed(config.seed)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
            return model.generate(tokens, count, temperature=0.7, top_k=40, generator=generator)

    generate(min(8, config.sample_tokens))
    speeds: list[float] = []
    began = time.perf_counter()
    while len(speeds) < 9 and time.perf_counter() - began < 3.0:
        synchronize(device)
        started = time.perf_counter()
        generated = generate(config.sample_tokens)
        synchronize(device)
        speeds.append(config.sample_tokens / (time.perf_counter() - started))
    return data.decode(generated[0].tolist()), statistics.median(speeds)


def save_model(model: Llama, path: Path, name: str) -> None:
    """Write the weights and, as metadata, the sizes that `load_model` builds the model from."""
    lowbit.save(model, path, metadata={"name": name, "model": asdict(model.config)})


def load_model(path: Path, device: torch.device) -> Llama:
    """The model in `path`, quantized as it was saved. UserError when the file can't be read."""
    try:
        config = LlamaConfig(**lowbit.load_metadata(path)["model"])
        model = Llama(config)
        model.load_state_dict(lowbit.load(path), assign=True)
    except (
        OSError,
        lowbit.CheckpointError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a model that the quick start saved: {reason}") from error
    if config.tied:
        model.head.weight = model.embedding.weight
    return model.to(device).eval()


def evaluate_saved(folder: RunFolder, only: str | None = None) -> dict[str, float]:
    """Perplexity by name of the models in `folder`, each loaded from its file.

    UserError when the folder holds no run, the run no such model, or a file can't be read.
    """
    config = folder.config()
    names = sorted(path.stem for path in (folder.path / "models").glob("*.safetensors"))
    if not names or (only is not None and only not in names):
        wanted = f"no model named {only}" if names else "no models yet"
        raise UserError(
            f"{folder.path} has {wanted}; "
            + (f"it has {', '.join(names)}" if names else "finish its run first")
        )
    tokens = quickstart_data.load(folder.data).heldout
    limit = config.heldout_tokens // config.model.context
    windows = quickstart_data.heldout_windows(config, tokens, limit)
    device = choose_device()
    return {
        name: perplexity(
            window_losses(load_model(folder.model(name), device), windows, device, config.bf16)
        )
        for name in ([only] if only is not None else names)
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.quickstart.evaluate",
        description="Load the saved models of a quick start run and measure them on its held-out text.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    parser.add_argument("--model", help="only this one, e.g. int4-qat (default: all)")
    parser.add_argument("--json", action="store_true", help="print {name: perplexity} as JSON")
    options = parser.parse_args(arguments)
    try:
        found = evaluate_saved(RunFolder(options.run), options.model)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:<12} perplexity {value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
