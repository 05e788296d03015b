"""Full fine-tuning of a language model on one card: all weights of 8B parameters on 24 GB, on 16 GB with int4 weights.

    python -m recipes.one_card --model FOLDER --data TEXT --out RUN [--set weights=int4]
    python -m recipes.one_card --model 8b --measure --set steps=20 --set memory_gib=24     random weights, nothing kept

What takes memory, and what keeps it small:

    weights        int8 or int4 alone, embedding and head too (`lowbit.train.Int8Weight`, `Int4Weight`): no copy in
                   high precision; updates round stochastically
    states         AdamW's in 4 bits
    gradients      of one parameter at a time: each is stepped in backward and freed (`step_in_backward`)
    activations    of one block at a time: the others keep their inputs alone (checkpoints), in int8 (`save_in_int8`)
    logits         of `vocabulary_rows` entries of the vocabulary at a time (`ChunkedCrossEntropy`)

Gradients are gone before the norm of all of them is known, so nothing clips by it. Each parameter's gradient is clipped
by its own history instead (`ClipByHistory`).

RUN/checkpoint.pt holds weights, states and step. The same command goes on from it, to the same bits.
RUN/model is the trained model in bfloat16, with the tokenizer. The last lines printed are a row of the table in
docs/training.md.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

import lowbit
from recipes import text
from recipes.chunked_loss import ChunkedCrossEntropy
from recipes.command_line import UserError, exit_status, override
from recipes.device import choose_device, device_name
from recipes.graphed_step import GraphedStep, way_out
from recipes.pages import peak_memory
from recipes.runs import load_checkpoint, save_checkpoint
from recipes.training import rise_and_fall

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300},
}  # fmt: skip
"""Llamas with random weights, untied. Their tokens are the bytes of the text."""
WITHOUT_MASKS = "causal_sdpa"
"""The name of torch's attention for which transformers makes no masks."""
AttentionInterface.register(WITHOUT_MASKS, sdpa_attention_forward)
MAY_CHANGE = ("save_every", "memory_gib", "compiled", "graph")
"""Settings that may differ from those of the checkpoint. Those of the step change its last bits at most."""
SCHEMES: dict[str, lowbit.Int8Weight | lowbit.Int4Weight] = {
    "int8": lowbit.Int8Weight(),
    "int4": lowbit.Int4Weight(group_size=64),
}
LOOKED_AT = 65
"""Tokens of which the model's own loss is compared."""
SETTLED = 5
"""The first step that is timed. The ones before compile, make the states and capture a graph."""


@dataclass(frozen=True)
class Config:
    """Settings. A step sees `batch_size` sequences of `context` tokens."""

    steps: int = 200
    batch_size: int = 1
    context: int = 2048
    lr: float = 1e-5
    warmup_steps: int = 20
    """Steps in which the learning rate rises; it then falls linearly to 0."""
    weight_decay: float = 0.0
    weights: str = "int8"
    """Or "int4"."""
    state: str = "4bit"
    """AdamW's states: also "8bit", which `correction` prefers, at one more byte a parameter."""
    correction: str = "none"
    """Or "momentum": what rounding takes from a weight goes into its momentum, and moves the weight later."""
    clip: float = 3.0
    """The norm of a parameter's gradient, as a multiple of its mean norm so far; 0 clips nothing."""
    vocabulary_rows: int = 4096
    """Entries of the vocabulary whose logits are in memory together."""
    int8_products: bool = False
    """Products of linears in int8 too, where they are faster."""
    compiled: bool = True
    """On a GPU: torch.compile fuses the small operations of a block and of the loss."""
    graph: bool = True
    """On a GPU, where the model has no dropout: replay a CUDA graph of the step. The host needs several times as
    long to launch it."""
    memory_gib: float = 0.0
    """The most that PyTorch may reserve on the GPU; 0 sets no limit."""
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "vocabulary_rows", "save_every")
        checks = [
            *((name, getattr(self, name) >= 1, "at least 1") for name in counts),
            ("context", self.context >= 2, "at least 2"),
            *((name, getattr(self, name) >= 0, "0 or more") for name in
              ("warmup_steps", "weight_decay", "clip", "memory_gib", "seed")),
            ("lr", 0 < self.lr < math.inf, "finite and above 0"),
            ("weights", self.weights in SCHEMES, " or ".join(SCHEMES)),
            ("state", self.state in ("4bit", "8bit", "float8"), "4bit, 8bit or float8"),
            ("correction", self.correction in ("none", "momentum"), "none or momentum"),
        ]  # fmt: skip
        for name, holds, accepted in checks:
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)}; accepted: {accepted}")

    def rate(self, step: int) -> float:
        """The learning rate of this step."""
        return self.lr * rise_and_fall(step, self.steps, self.warmup_steps)


# ---- clipping without the norm of all gradients ----------------------------------------------------------------------


class ClipByHistory:
    """Clips each parameter's gradient to `most` times the running mean of its norms, as AdaGC does (arXiv 2502.11034).

    AdamW divides by the size of past gradients, so only a gradient that is large beside those of its own parameter
    needs a bound. The host waits for no norm. Nothing writes the gradient again: the step divides it by
    `optimizer.grad_scale`. So each parameter is stepped by itself (`step_in_backward(optimizer, bucket_mib=BUCKET)`),
    after this object is made: hooks run in the order in which they are registered. Set `grad_scale` to None before
    `optimizer.step()`, which raises RuntimeError otherwise.

    `norms`, float32 [parameters], has the means; save it in checkpoints. A mean is 0 until the first gradient other
    than 0, which is not clipped.
    """

    DECAY = 0.98
    BUCKET = 1e-6

    def __init__(self, optimizer: Any, most: float, device: torch.device) -> None:
        self.optimizer = optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.norms = torch.zeros(len(params), device=device)
        for i, param in enumerate(params):
            param.register_post_accumulate_grad_hook(partial(self._clip, i, most))

    @torch.no_grad()
    def _clip(self, i: int, most: float, param: Tensor) -> None:
        assert param.grad is not None
        norm = torch.linalg.vector_norm(param.grad, dtype=torch.float32)
        mean = torch.where(self.norms[i] > 0, self.norms[i], norm)
        bounded = torch.minimum(norm, most * mean)
        self.norms[i] = torch.where(
            norm.isfinite(), mean.lerp(bounded, 1 - self.DECAY), self.norms[i]
        )
        self.optimizer.grad_scale = torch.where(norm > 0, norm / bounded, 1)


# ---- the model, its text, the loop -----------------------------------------------------------------------------------


def shape_of(name: str, config: Config) -> Any:
    """The configuration of a folder's model, or of one of `SHAPES`. UserError for other names."""
    if name in SHAPES:
        positions = max(config.context, 2048)
        return LlamaConfig(
            **SHAPES[name], max_position_embeddings=positions, tie_word_embeddings=False
        )
    if not Path(name, "config.json").is_file():
        raise UserError(
            f"--model {name}: accepted: a folder with config.json, or random weights in the shape {', '.join(SHAPES)}"
        )
    return AutoConfig.from_pretrained(name)


def prepared_model(name: str, config: Config, device: torch.device) -> Any:
    """The model of a folder or of `SHAPES`, with low-bit weights. It is made on the CPU in bfloat16, which takes about
    20 GB of host memory for 8B, and each weight moves to the device before it is rounded."""
    torch.manual_seed(config.seed)
    if name in SHAPES:
        model = AutoModelForCausalLM.from_config(shape_of(name, config), dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    return prepare(model, config, device)


def prepare(model: Any, config: Config, device: torch.device) -> Any:
    """Round all matrices of a model in bfloat16. Embedding and head have one scheme, as a tied weight needs. Neither
    runs int8 products: rows are looked up, and `ChunkedCrossEntropy` multiplies the head's values."""
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    scheme = SCHEMES[config.weights]
    if config.int8_products:
        scheme = replace(scheme, output=True, grad_input=True, grad_weight=True)
    report = lowbit.train.prepare_(model, {embedding: scheme, "*": scheme}, device=device)
    print(str(report).splitlines()[0])
    return model.train()


def blocks_of(model: Any) -> list[nn.Module]:
    """The layers that transformers can checkpoint. UserError for a model without them."""
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no block that transformers can checkpoint; accepted: models whose blocks are "
            "GradientCheckpointingLayers, as those of Llama. Train it by lowbit.train.prepare_ and a loop of your own "
            "(docs/training.md)"
        )
    return blocks


def checkpoint_blocks(model: Any, draws: bool, compiled: bool = False) -> None:
    """Keep the inputs of blocks alone for backward, which computes each block again.

    `draws`: a forward pass draws random numbers, and backward draws them again. A CUDA graph can't read their state.
    `compiled`: blocks are compiled one by one, within their checkpoints. Blocks of one form share their code.
    """
    for block in blocks_of(model):
        forward = torch.compile(block.forward) if compiled else block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=draws)


@torch.no_grad()
def first_pass(model: Any, tokens: Tensor, config: Config) -> tuple[Tensor, bool]:
    """A pass in training over tokens [T]: its hidden states [1, T, D], and whether it drew random numbers, as dropout
    does. Their state stays as it was.

    UserError where the model's own loss of the first tokens is another one than that of their hidden states: its head
    does more than multiply.
    """
    head, seen = model.get_output_embeddings(), []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(output[0])

    def keep_and_cut(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(inputs[0])  # it is the first where a model calls a part of its base model
        return (inputs[0][:, :LOOKED_AT],)

    hooks = [
        model.base_model.register_forward_hook(keep),
        head.register_forward_pre_hook(keep_and_cut),
    ]
    device = tokens.device
    state = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = state()
        labels = tokens[None, :LOOKED_AT].long()
        own = model(input_ids=tokens[None], labels=labels, use_cache=False).loss.item()
        draws = not torch.equal(before, state())
    for hook in hooks:
        hook.remove()
    first, rows = seen[0][0, : labels.shape[1] - 1], config.vocabulary_rows
    loss: Any = ChunkedCrossEntropy.apply(first, head.weight, labels[0, 1:], rows)
    if not math.isfinite(own):
        raise UserError(
            f"the loss of the model as it was loaded is {own}: its weights have NaN or infinite values, or its "
            "activations leave bfloat16; load or save it again"
        )
    if not abs(own - loss.item()) <= 0.01 * abs(own):
        raise UserError(
            f"the model's own loss is {own:.4f}, and that of its hidden states times its head's weight "
            f"{loss.item():.4f}: it scales or caps logits, or its head has a bias, which this recipe would leave out. "
            "Train it by lowbit.train.prepare_ and the model's own loss, with all logits in memory (docs/training.md)"
        )
    return seen[0], draws


@torch.no_grad()
def leave_out_masks(model: Any, tokens: Tensor, hidden: Tensor) -> None:
    """Give attention no mask where tokens [T], the context, have the same hidden states [1, T, D] to the bit without
    one. Prints which it is.

    transformers leaves out the mask of attention that is causal and nothing else. But 5.17 makes one while a CUDA graph
    is captured, and kernels that read a mask take 2.6 times as long. For the name `WITHOUT_MASKS` transformers makes
    none.
    """
    own = model.config._attn_implementation
    why = f"its implementation is {own}, and sdpa alone does without"
    if own == "sdpa":
        model.set_attn_implementation(WITHOUT_MASKS)
        found = model.base_model(input_ids=tokens[None], use_cache=False)[0]
        if torch.equal(found, hidden):
            print("attention runs without masks")
            return
        model.set_attn_implementation(own)
        why = f"{len(tokens)} tokens have other hidden states without, as with a sliding window"
    print(f"attention keeps its masks, which take time: {why}")


def check_reach(model: Any, tokens: Tensor, config: Config) -> None:
    """UserError for a context or tokens beyond the model's tables, where a GPU would end in a device-side assertion."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and config.context > positions:
        raise UserError(
            f"context is {config.context}; accepted: up to {positions}, max_position_embeddings in the model's "
            f"config.json: --set context={positions}"
        )
    entries, largest = len(model.get_input_embeddings().weight), int(tokens.max())
    if largest >= entries:
        raise UserError(
            f"the tokenizer gives token {largest}, but the model has embeddings of {entries} tokens; give the "
            "tokenizer of the model, or resize its embeddings (resize_token_embeddings) and save it again"
        )


def tokens_of(name: str, source: Path | None) -> Tensor:
    """The text as int32 tokens: of the folder's tokenizer, or the bytes of UTF-8 for a shape."""
    if name not in SHAPES:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--model {name}: its tokenizer can't be loaded: {reason}") from error
        return text.by_tokenizer(tokenizer, source, "stdlib", 0.05).train
    texts, _, _ = text.read_split(source, "stdlib", 0.05)
    return torch.frombuffer(bytearray("".join(texts).encode()), dtype=torch.uint8).int()


def check_length(tokens: Tensor, context: int) -> None:
    """UserError for a text of fewer than two sequences."""
    if len(tokens) < 2 * (context + 1):
        longest = len(tokens) // 2 - 1
        shorter = f", or a shorter context: --set context={longest}" if longest >= 2 else ""
        raise UserError(
            f"{len(tokens)} tokens are too few for sequences of {context}; give --data more text{shorter}"
        )


def make_optimizer(params: list[nn.Parameter], config: Config) -> lowbit.optim.AdamW:
    return lowbit.optim.AdamW(
        params,
        lr=config.lr,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        state=config.state,
        bf16_stochastic_round=True,  # for the weights of norms, which stay in bfloat16
        weight_correction=False if config.correction == "none" else config.correction,
    )


def step_in_backward(
    optimizer: lowbit.optim.AdamW, config: Config, device: torch.device
) -> ClipByHistory | None:
    """Step each parameter once its gradient is there, clipped if `config.clip` says so."""
    if not config.clip:
        lowbit.optim.step_in_backward(optimizer)
        return None
    clipping = ClipByHistory(optimizer, config.clip, device)
    lowbit.optim.step_in_backward(optimizer, bucket_mib=clipping.BUCKET)
    return clipping


def set_rate(optimizer: lowbit.optim.AdamW, rate: float, on_device: bool) -> None:
    """Set the learning rate. A graph reads it on the device at each replay, always at the same address."""
    for group in optimizer.param_groups:
        if not on_device:
            group["lr"] = rate
        elif isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
            group["lr"].fill_(rate)
        else:
            # The first rate, or that of a checkpoint, which lies on the CPU.
            group["lr"] = torch.tensor(rate, dtype=torch.float64, device="cuda")


def loss_of(model: Any, inputs: Tensor, targets: Tensor, config: Config) -> Tensor:
    """The mean cross entropy of tokens [B, T]."""
    with lowbit.train.save_in_int8(model):
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    head = model.get_output_embeddings().weight
    rows, compiled = config.vocabulary_rows, config.compiled and hidden.is_cuda
    loss: Any = ChunkedCrossEntropy.apply(
        hidden.flatten(0, 1), head, targets.flatten(), rows, compiled
    )
    return loss


def train_step(model: Any, inputs: Tensor, targets: Tensor, config: Config) -> Tensor:
    """The loss of tokens [B, T]. Every parameter is stepped when this returns."""
    loss = loss_of(model, inputs, targets, config)
    loss.backward()
    return loss.detach()


def train(options: argparse.Namespace) -> None:
    config, device = override(Config(), options.set), choose_device()
    shape = shape_of(options.model, config)
    tokens = tokens_of(options.model, options.data)
    check_length(tokens, config.context)
    with torch.device("meta"):  # before minutes of loading and rounding
        empty = AutoModelForCausalLM.from_config(shape)
    blocks_of(empty)
    check_reach(empty, tokens, config)
    limit_memory(config, device)
    model = prepared_model(options.model, config, device)
    some = tokens[: config.context].to(device)
    hidden, draws = first_pass(model, some, config)
    replays = config.graph and device.type == "cuda" and not draws
    if replays:
        leave_out_masks(model, some, hidden)
    del hidden
    checkpoint_blocks(model, draws, config.compiled and device.type == "cuda")
    print(f"{'a CUDA graph replays' if replays else 'the host launches'} each step")
    optimizer = make_optimizer(list(model.parameters()), config)
    clipping = step_in_backward(optimizer, config, device)
    path, start = None, 0
    source = source_of(options.model, tokens)
    if not options.measure:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "checkpoint.pt"
        if path.exists():
            start = resume(path, config, source, model, optimizer, clipping)
    run: Any = partial(train_step, model, config=config)
    run = GraphedStep(run) if replays else run
    sizes = {"batch_size": config.batch_size, "context": config.context, "seed": config.seed}
    seconds = []
    for step in range(start, config.steps):
        began = time.perf_counter()
        set_rate(optimizer, config.rate(step), replays)
        inputs, targets = text.batch(tokens, step, **sizes)
        try:
            loss = run(inputs.to(device), targets.to(device)).item()
        except RuntimeError as error:
            if (told := way_out(error)) is None:
                raise
            raise told from error
        seconds.append(time.perf_counter() - began)
        speed = inputs.numel() / seconds[-1]
        print(f"step {step + 1:5}  loss {loss:.4f}  {speed:8.1f} tokens/s  {peak(device)}")
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step + 1}; lower the rate: --set lr={config.lr / 3:.1e}"
            )
        if path and ((step + 1) % config.save_every == 0 or step + 1 == config.steps):
            save(path, step + 1, config, source, model, optimizer, clipping)
            print(f"wrote {path}")
    if seconds:
        given = dict(setting.split("=", 1) for setting in options.set)  # the last of a name counts
        name = " ".join(f"{key}={value}" for key, value in given.items())
        print_figures(name, seconds, config.batch_size * config.context, device)
    if path:
        write_model(model, options)


def print_figures(name: str, seconds: list[float], tokens: int, device: torch.device) -> None:
    """A Markdown row of the run `name`, with the median of its steps of `tokens` tokens, and what a GPU's memory holds
    besides."""
    settled = seconds[SETTLED:] or seconds[-1:]
    step, memory = statistics.median(settled), peak(device).removesuffix(" GiB at most")
    count = f"{len(settled)} step{'s' if len(settled) > 1 else ''}"
    print(f"{device_name(device)}, {count} timed\n")
    print("| settings | GiB | ms | tokens/s |\n|---|--:|--:|--:|")
    print(f"| {name} | {memory} | {1000 * step:,.1f} | {tokens / step:,.0f} |\n")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        besides = (total - free - torch.cuda.memory_reserved(device)) / 2**30
        print(f"CUDA's context, and other programs on this GPU, take {besides:.2f} GiB more")


def limit_memory(config: Config, device: torch.device) -> None:
    if not config.memory_gib:
        return
    if device.type != "cuda":
        raise UserError(f"memory_gib={config.memory_gib:g} limits a GPU; leave it out on a CPU")
    share = config.memory_gib * 2**30 / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0))


def source_of(name: str, tokens: Tensor) -> dict[str, str]:
    """Besides the settings, what a run must share with its checkpoint: the shape's name, or the digest of the folder's
    config; and the digest of the tokens."""
    config = Path(name, "config.json")
    model = name if name in SHAPES else hashlib.sha256(config.read_bytes()).hexdigest()
    return {"model": model, "data": hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}


def save(
    path: Path,
    step: int,
    config: Config,
    source: dict[str, str],
    model: Any,
    optimizer: Any,
    clipping: ClipByHistory | None,
) -> None:
    content = {"phase": "one_card", "step": step, "config": asdict(config), "source": source}
    content |= {"norms": clipping and clipping.norms, "model": model.state_dict()}
    save_checkpoint(path, {**content, "optimizer": optimizer.state_dict()})


def resume(
    path: Path,
    config: Config,
    source: dict[str, str],
    model: Any,
    optimizer: Any,
    clipping: ClipByHistory | None,
) -> int:
    """Load the checkpoint, and return the number of steps that it has seen. UserError for other settings, another model
    or text."""
    saved = load_checkpoint(path)
    for name, value in asdict(config).items():
        if name not in MAY_CHANGE and saved["config"][name] != value:
            raise UserError(
                f"{path} was trained with {name}={saved['config'][name]}, not {value}; give the same settings, or "
                "another --out"
            )
    for name, digest in source.items():
        if saved["source"][name] != digest:
            raise UserError(
                f"{path} was trained from another --{name}; give the same one, or another --out"
            )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if clipping:
        clipping.norms.copy_(saved["norms"])
    print(f"resumed after step {saved['step']}")
    return saved["step"]


def peak(device: torch.device) -> str:
    """What PyTorch has reserved at most on a GPU; on a CPU, what the process has held."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_reserved(device) / 2**30:.2f} GiB at most"
    return peak_memory()


def write_model(model: Any, options: argparse.Namespace) -> None:
    model.cpu()
    lowbit.train.restore_(model)
    model.save_pretrained(options.out / "model")
    if options.model not in SHAPES:
        AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out / "model")
    print(f"wrote {options.out / 'model'}")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when done, 2 after a mistake that the user can correct (in one line), 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.one_card", description="Fine-tune all weights on one card."
    )
    add = parser.add_argument
    add("--model", required=True, help=f"a folder of transformers, or {', '.join(SHAPES)}")
    add("--data", type=Path, help="text; default: the Python standard library")
    kept = parser.add_mutually_exclusive_group(required=True)
    kept.add_argument("--out", type=Path, help="folder of the run; goes on from its checkpoint")
    kept.add_argument("--measure", action="store_true", help="time the steps and keep nothing")
    settings = ", ".join(f"{name}={value}" for name, value in asdict(Config()).items())
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=f"one of {settings}")
    options = parser.parse_args(arguments)
    return exit_status(lambda: train(options))


if __name__ == "__main__":
    sys.exit(main())
