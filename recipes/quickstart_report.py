"""The quick start's report: its tables, its text and its figures."""

from __future__ import annotations

import platform

import torch

import lowbit
from recipes import figures, pages, runs
from recipes.device import device_name
from recipes.phases import Run, phases
from recipes.quickstart_measure import Measurements


def slowness(found: Measurements) -> str | None:
    """A sentence that low-bit models generate text more slowly than high precision, where one does (below 0.9)."""
    if min(speed_shares(found)) >= 0.9:
        return None
    return (
        f"Slow: on this machine the low-bit models generate text at {speed_range(found)} of the speed in high "
        "precision. They save memory here, not time: in a model this small each product takes a few microseconds, "
        "and dequantizing its weight adds to them."
    )


def speed_shares(found: Measurements) -> list[float]:
    """The speed of each low-bit model at generating text, as a share of high precision's."""
    high = found.by_name("high").generate_tokens_per_s
    return [r.generate_tokens_per_s / high for r in found.results if r.bits is not None]


def speed_range(found: Measurements) -> str:
    shares = speed_shares(found)
    low, high = (f"{share:.2f}" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def headline(found: Measurements) -> str:
    high, size = found.by_name("high"), pages.size
    slow = slowness(found)
    parts = [] if slow is None else [slow]
    for recovery in found.recoveries:
        rounded, qat = (found.by_name(f"int{recovery.bits}-{kind}") for kind in ("rtn", "qat"))
        parts.append(
            f"At {recovery.bits} bits rounding takes the held-out perplexity from {high.perplexity:.2f} "
            f"to {rounded.perplexity:.2f}; trained with QAT it is {qat.perplexity:.2f} ({recovery})."
        )
    first = found.results[2]
    fp32, low = found.optimizer_bytes.values()
    parts.append(
        f"The int{first.bits} file takes {size(first.file_bytes)}, the float32 file {size(high.file_bytes)}, and "
        f"bfloat16 weights would take {size(2 * found.parameters)}. AdamW4bit's states take {size(low)}, "
        f"AdamW's {size(fp32)}."
    )
    return " ".join(parts)


def model_table(found: Measurements) -> str:
    high = found.by_name("high").perplexity
    header = ["model", "perplexity", "to high precision", "from its file", "size on disk",
              "forward tokens/s", "generated tokens/s"]  # fmt: skip
    rows = [
        [
            r.label,
            f"{r.perplexity:.3f}",
            "" if r.bits is None else f"{r.perplexity / high - 1:+.2%}",
            "equal" if r.reloaded_perplexity == r.perplexity else repr(r.reloaded_perplexity),
            pages.size(r.file_bytes),
            f"{r.forward_tokens_per_s:,.0f}",
            f"{r.generate_tokens_per_s:,.0f}",
        ]
        for r in found.results
    ]
    return pages.table(header, rows)


def recovery_table(found: Measurements) -> str:
    header = ["bits", "high precision", "rounded", "after QAT", "lost by rounding", "by QAT",
              "95% interval"]  # fmt: skip
    rows = []
    for r in found.recoveries:
        names = ("high", f"int{r.bits}-rtn", f"int{r.bits}-qat")
        values = [f"{found.by_name(name).perplexity:.3f}" for name in names]
        interval = f"{r.low:.0%} to {r.high:.0%}" if r.lost > 0 else ""
        rows.append([str(r.bits), *values, f"{r.lost:+.3f}", str(r), interval])
    return pages.table(header, rows)


def optimizer_table(found: Measurements) -> str:
    rows = [
        [name, f"{count:,}", f"{count / found.parameters:.2f}"]
        for name, count in found.optimizer_bytes.items()
    ]
    return pages.table(["optimizer", "bytes of state", "bytes a parameter"], rows)


def setting_table(run: Run, found: Measurements) -> str:
    config, model, data = run.config, run.config.model, run.data
    info, times = data.info, found.seconds.items()
    if run.device.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of GPU memory at most"
    else:
        memory = f"{torch.get_num_threads()} threads; {pages.peak_memory()}"
    rows = [
        ["preset", config.preset],
        ["model", f"Llama, {found.parameters:,} parameters: {model.layers} layers, width {model.dim}, "
         f"{model.heads} query and {model.kv_heads} key/value heads, SwiGLU {model.hidden}, context {model.context}"],
        ["data", f"{info.source}: {info.files:,} files, split by {info.split_by}; {len(data.train):,} tokens to "
         f"train on, {len(data.heldout):,} held out; skipped {info.skipped_text()}"],
        ["tokenizer", f"byte-pair, {model.vocab_size:,} entries, "
         f"{info.train_bytes / len(data.train):.2f} bytes a token"],
        ["training", f"{config.steps:,} steps of {config.step_tokens:,} tokens, the last {config.branch_steps:,} in "
         f"branches; AdamW4bit, lr {config.lr:g}, weight decay {config.weight_decay:g}, seed {config.seed}"],
        ["arithmetic", "bfloat16 autocast over float32 weights" if config.bf16 else "float32"],
        ["training time", ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in times)],
        ["machine", f"{device_name(run.device)}, {memory}"],
        ["software", f"lowbit {lowbit.__version__}, torch {torch.__version__}, Python {platform.python_version()}"],
    ]  # fmt: skip
    return pages.table(["setting", "value"], rows, left=(0, 1))


def report(run: Run, found: Measurements) -> str:
    """The report in Markdown."""
    config = run.config
    fp32, low = found.optimizer_bytes.values()
    per = "row" if config.group_size is None else f"group of {config.group_size} inputs"
    samples = "\n\n".join(f"**{r.label}**\n\n{pages.code(r.sample)}" for r in found.results)
    return f"""# A language model trained, fine-tuned and converted in low bits

{headline(found)}

{model_table(found)}

{found.quantized_parameters:,} of {found.parameters:,} parameters are quantized; the others are the weights of RMSNorm.
The high-precision file holds float32. *From its file*: the perplexity once more, of the saved model, in a fresh process
(`python -m recipes.quickstart --evaluate RUN`); all digits are compared. Forward: batches of held-out text, the median
of five; generated: one sequence with a key/value cache, the median of nine. In low bits this machine generates at
{speed_range(found)} of the speed in high precision.

![Held-out perplexity of each model, and how far each is from high precision.](perplexity.png)

## Does QAT win back what rounding loses?

All models share their first {config.trunk_steps:,} steps. Then the same {config.branch_steps:,} steps, with the same
batches in the same order, the same learning rate and the same optimizer, run once in high precision and once with QAT
for each bit width. So every model has had the same training, and the model that is rounded was trained for the full
length in high precision. Every matrix is quantized, also the embedding, which is the head too: symmetric, one scale a
{per}. Recovered = (perplexity rounded − perplexity after QAT) / (perplexity rounded − perplexity in high precision);
100% is as good as high precision. The interval is a 95% bootstrap over windows of held-out text; it does not cover the
choice of the training seed.

{recovery_table(found)}

![Loss during training. The branches share their batches and learning rate.](loss.png)

## Memory of the optimizer

{optimizer_table(found)}

Counted in the state tensors themselves: {fp32 / low:.1f} times less. The run was trained with AdamW4bit throughout;
small and one-dimensional tensors keep float32 states.

## Generated code

Each model continues the same prompt with the same random draws (temperature 0.7, the 40 likeliest tokens).

{samples}

## Settings

{setting_table(run, found)}
"""


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
