"""Fine-tune a transformers model with QAT, whole or by LoRA, convert it, and report what QAT won back.

    python -m recipes.finetune_qat [--model NAME_OR_FOLDER] [--data FILE_OR_FOLDER] [--out DIR] [--bits 4]
                                   [--methods full lora lora-keep] [--set NAME=VALUE ...]

    full         trains all weights, which every product rounds
    lora         trains PEFT's adapters; products round the merged weight, and conversion merges the adapters
    lora-keep    trains PEFT's adapters beside the rounded base weight, and conversion keeps them there

Each method trains twice from the same start, on the same batches in the same order: once in high precision, to be
rounded afterwards, and once with QAT, which trains scales too. So QAT owes nothing to more training:

    recovered = (loss of the rounded model − loss after QAT) / (loss of the rounded model − loss in high precision)

all in nats a token on held-out text. Without --model, the program builds a small Llama of transformers and trains it
first. Without --data, it reads the Python standard library. So it needs no network. It writes DIR/report.json, and the
models after QAT as DIR/METHOD.safetensors, which lowbit.load reads.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

# OpenMP reads this when torch is first imported: threads that wait actively slow each other down on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import torch
    import torch.nn.functional as F
    from peft import LoraConfig, get_peft_model
    from torch import Tensor, nn
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import lowbit
    from recipes import text
    from recipes.command_line import UserError, exit_status, override
    from recipes.device import choose_device
except ImportError as error:
    if __name__ != "__main__":
        raise
    install = 'install all that this recipe needs with: pip install -e ".[finetune]"'
    print(f"error: a package is missing ({error}); {install}", file=sys.stderr)
    sys.exit(2)

METHODS = ("full", "lora", "lora-keep")
Adapters = Literal["merge", "keep"]


@dataclass(frozen=True)
class Config:
    """Lengths in steps of `batch_size * context` tokens."""

    group_size: int = 32
    """Inputs that share a scale."""
    steps: int = 200
    """Steps of each fine-tuning."""
    batch_size: int = 8
    context: int = 128
    lr: float = 1e-3
    """Learning rate of weights; it rises over the first 5% of the steps and falls to zero."""
    lora_lr: float = 2e-3
    """Learning rate of adapters."""
    rank: int = 64
    """Adapters of a higher rank win more back: the change that rounding asks of a weight has no low rank."""
    lora_alpha: int = 64
    weight_decay: float = 0.0
    heldout_tokens: int = 100_000
    pretrain_steps: int = 1000
    """Steps of the model that is built where none is given."""
    pretrain_lr: float = 3e-3
    hidden: int = 128
    layers: int = 2
    vocab_size: int = 512
    bf16: bool = False
    """bfloat16 autocast over the weights' dtype."""
    seed: int = 0


# ---- a model and its text ------------------------------------------------------------------------------------------


def start_of(name: str | None, source: Path | None, config: Config) -> tuple[Any, text.Data]:
    """The model that fine-tuning starts from, and the text as its tokens."""
    if name is None:
        data = text.prepare(source, "stdlib", 0.03, config.vocab_size, config.context)
        return pretrained(config, data), data
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    return model, text.by_tokenizer(tokenizer, source, "stdlib", 0.03)


def pretrained(config: Config, data: text.Data) -> Any:
    """A small Llama of transformers, trained in high precision."""
    torch.manual_seed(config.seed)
    architecture = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.hidden * 5 // 2,
        num_hidden_layers=config.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=config.context,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(architecture)
    train(model, data.train, config, config.pretrain_steps, config.pretrain_lr, "pretraining")
    return model


# ---- training and measuring ------------------------------------------------------------------------------------------


def train(model: Any, tokens: Tensor, config: Config, steps: int, lr: float, name: str) -> None:
    """Train what requires gradients, in place.

    Args:
        model: a causal language model of transformers.
        tokens: the text to train on.
        config: batch size, context and weight decay.
        steps: number of optimizer steps.
        lr: the highest learning rate of weights.
        name: shown beside the progress bar.
    """
    device = choose_device()
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = lowbit.optim.AdamW8bit(trained, lr=lr, weight_decay=config.weight_decay)
    warmup = max(steps // 20, 1)
    for step in tqdm(range(steps), desc=name, leave=False):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))
        loss = loss_of(model, *batch(tokens, step, config), config)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def batch(tokens: Tensor, step: int, config: Config) -> tuple[Tensor, Tensor]:
    return text.batch(
        tokens, step, batch_size=config.batch_size, context=config.context, seed=config.seed
    )


def loss_of(model: Any, inputs: Tensor, targets: Tensor, config: Config) -> Tensor:
    """Mean cross entropy in nats a token.

    Args:
        model: a causal language model of transformers.
        inputs: token ids [B, T].
        targets: the tokens that follow, [B, T].
        config: the precision to compute in.
    """
    device = choose_device()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
        logits = model(input_ids=inputs.to(device), use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())


@torch.no_grad()
def heldout_loss(model: Any, data: text.Data, config: Config) -> float:
    model.eval()
    windows = text.windows_of(data.heldout, config.context, config.heldout_tokens)
    parts = windows.split(32)
    losses = [loss_of(model, p[:, :-1], p[:, 1:], config).item() * len(p) for p in parts]
    return sum(losses) / len(windows)


# ---- the methods -----------------------------------------------------------------------------------------------------


def is_rounded(module: nn.Module, name: str) -> bool:
    """Every linear but the head."""
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def with_adapters(model: Any, method: str, config: Config) -> Any:
    if method == "full":
        return model
    lora = LoraConfig(r=config.rank, lora_alpha=config.lora_alpha, target_modules="all-linear")
    return get_peft_model(model, lora)


def finetuned(start: Any, method: str, scheme: Any, data: text.Data, config: Config) -> Any:
    """A copy of `start` that was trained by `method`, prepared for `scheme` unless that is None.

    Args:
        start: the model before fine-tuning.
        method: one of METHODS.
        scheme: None trains in high precision.
        data: text to train on, and held-out text.
        config: settings of the fine-tuning.
    """
    torch.manual_seed(config.seed)  # the adapters' values
    model = with_adapters(copy.deepcopy(start), method, config)
    if scheme is not None:
        adapters: Adapters = "keep" if method == "lora-keep" else "merge"
        lowbit.qat.prepare_(model, scheme, is_rounded, scales="learned", adapters=adapters)
    name = f"{method}, {'high precision' if scheme is None else 'QAT'}"
    lr = config.lr if method == "full" else config.lora_lr
    train(model, data.train, config, config.steps, lr, name)
    return model


def rounded(model: Any, method: str, scheme: Any) -> Any:
    """The high-precision model, rounded after training as QAT's model is converted."""
    if method == "lora":
        model = model.merge_and_unload()
    if method == "lora-keep":
        return rounded_beside_adapters(model, scheme)
    lowbit.quantize_(model, scheme, is_rounded, scales="minmax")
    return model


def rounded_beside_adapters(model: Any, scheme: Any) -> Any:
    lowbit.qat.prepare_(model, scheme, is_rounded, adapters="keep")
    lowbit.qat.convert_(model)
    return model


def measure(start: Any, method: str, scheme: Any, data: text.Data, config: Config) -> Any:
    """(QAT's converted model, its losses).

    Args:
        start: the model before fine-tuning.
        method: one of METHODS.
        scheme: what QAT trains with.
        data: text to train on, and held-out text.
        config: settings of the fine-tuning.
    """
    model = finetuned(start, method, None, data, config)
    losses = {"high": heldout_loss(model, data, config)}
    losses["rounded"] = heldout_loss(rounded(model, method, scheme), data, config)
    del model
    began = time.perf_counter()
    model = finetuned(start, method, scheme, data, config)
    losses["qat_seconds"] = time.perf_counter() - began
    losses["prepared"] = heldout_loss(model, data, config)
    lowbit.qat.convert_(model)
    losses["converted"] = heldout_loss(model, data, config)
    cost = losses["rounded"] - losses["high"]
    losses["recovered"] = (losses["rounded"] - losses["converted"]) / cost if cost > 0 else 0.0
    return model, losses


def run(options: argparse.Namespace) -> None:
    config = override(Config(), options.set)
    out = Path(options.out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} holds files already; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    scheme = lowbit.IntxWeightOnly(options.bits, config.group_size)
    start, data = start_of(options.model, options.data, config)
    start.to(choose_device())
    before = heldout_loss(start, data, config)
    report: dict[str, Any] = {"bits": options.bits, "config": asdict(config), "start": before}
    print(f"held-out loss at the start: {before:.4f} nats a token")
    print("method     high     rounded  QAT      converted  recovered")
    for method in options.methods:
        model, losses = measure(start, method, scheme, data, config)
        report[method] = losses
        shown = "  ".join(f"{losses[n]:.4f} " for n in ("high", "rounded", "prepared", "converted"))
        print(f"{method:<9}  {shown}    {losses['recovered']:.0%}")
        lowbit.save(model, out / f"{method}.safetensors")
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"models and report.json: {out}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.finetune_qat")
    parser.add_argument("--model", help="of transformers, by name or folder; default: a small one")
    parser.add_argument("--data", type=Path, help="text; default: the Python standard library")
    parser.add_argument("--out", default="runs/finetune_qat", help="folder of the results")
    parser.add_argument("--bits", type=int, default=4, choices=range(1, 9))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["full", "lora"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    options = parse(arguments)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
