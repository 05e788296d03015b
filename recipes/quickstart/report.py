"""report.md and report.html from one list of blocks, so that they can't say different things."""

from __future__ import annotations

import base64
import html
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import lowbit
from recipes.quickstart.config import QuickstartConfig
from recipes.quickstart.data import DataInfo
from recipes.quickstart.evaluate import SAMPLE_PROMPT
from recipes.quickstart.folder import RunFolder, write_text
from recipes.quickstart.measure import Measurements, Recovery


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Table:
    """First column to the left, the others to the right."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    path: Path
    caption: str


@dataclass(frozen=True)
class Code:
    title: str
    text: str


Block = Heading | Text | Table | Figure | Code


def write(
    config: QuickstartConfig,
    folder: RunFolder,
    info: DataInfo,
    found: Measurements,
    figures: list[Path],
    device: torch.device,
) -> None:
    """Write `report.md` (figures beside it) and `report.html` (figures inside)."""
    blocks = compose(config, info, found, figures, device)
    write_text(folder.path / "report.md", to_markdown(blocks))
    write_text(folder.path / "report.html", to_html(blocks))


def compose(
    config: QuickstartConfig,
    info: DataInfo,
    found: Measurements,
    figures: list[Path],
    device: torch.device,
) -> list[Block]:
    loss, bars = figures
    return [
        Heading("A language model trained, fine-tuned and converted in low bits", 1),
        Text(headline(config, found)),
        *model_table(found),
        Figure(bars, "Held-out perplexity of each model, and how far each is from high precision."),
        Heading("Does QAT win back what rounding loses?"),
        Text(definition(config)),
        *recovery_table(config, found),
        Figure(loss, "Loss along the way. The branches share their batches and learning rate."),
        Heading("Memory of the optimizer"),
        *optimizer_table(found),
        Heading("Loaded again"),
        *reload_table(found),
        Heading("Generated code"),
        Text(
            f"Each model continues the same prompt, {SAMPLE_PROMPT!r}, with the same random draws "
            "(temperature 0.7, the 40 likeliest tokens)."
        ),
        *(Code(r.label, r.sample) for r in found.results),
        Heading("What was run"),
        setting_table(config, info, found, device),
    ]


def headline(config: QuickstartConfig, found: Measurements) -> str:
    high, slow = found.by_name("high"), slowness(found)
    parts = [] if slow is None else [slow]
    for recovery in found.recoveries:
        rounded = found.by_name(f"int{recovery.bits}-rtn")
        qat = found.by_name(f"int{recovery.bits}-qat")
        parts.append(
            f"At {recovery.bits} bits rounding takes the held-out perplexity from {high.perplexity:.2f} "
            f"to {rounded.perplexity:.2f}; trained with QAT it is {qat.perplexity:.2f}"
            + f" ({recovered(recovery)})."
        )
    first = found.by_name(f"int{config.bits[0]}-qat")
    fp32, low = found.optimizer_bytes.values()
    parts.append(
        f"The int{config.bits[0]} file takes {size(first.file_bytes)} where float32 takes "
        f"{size(high.file_bytes)} and bfloat16 {size(found.bf16_file_bytes)}; AdamW4bit's states "
        f"take {size(low)} where AdamW's take {size(fp32)}."
    )
    return " ".join(parts)


def model_table(found: Measurements) -> list[Block]:
    high = found.by_name("high")
    rows = [
        [
            result.label,
            f"{result.perplexity:.3f}",
            "" if result is high else f"{result.perplexity / high.perplexity - 1:+.2%}",
            size(result.file_bytes),
            f"{result.forward_tokens_per_s:,.0f}",
            f"{result.generate_tokens_per_s:,.0f}",
        ]
        for result in found.results
    ]
    header = ["model", "perplexity", "to high precision", "size on disk", "forward tokens/s",
              "generated tokens/s"]  # fmt: skip
    note = (
        f"{found.quantized_parameters:,} of {found.parameters:,} parameters are quantized; the others are "
        "the gains of RMSNorm. The high-precision file holds float32; in bfloat16 it takes "
        f"{size(found.bf16_file_bytes)}. Forward: batches of held-out text, the median of five; generated: one "
        f"sequence with a key/value cache, the median of nine. In low bits this machine generates at {shares(found)} "
        "of the speed in high precision."
    )
    return [Table(header, rows), Text(note)]


SLOW = 0.9
"""The share of high precision's speed below which the report, and the terminal, begin with it."""


def shares(found: Measurements) -> str:
    """The speeds of low-bit models at generating text, as shares of high precision's, in words."""
    low, high = (f"{share:.2f}" for share in (min(found.generating()), max(found.generating())))
    return low if low == high else f"{low} to {high}"


def slowness(found: Measurements) -> str | None:
    """That low-bit models generate text more slowly, where one does."""
    if min(found.generating()) >= SLOW:
        return None
    return (
        f"Slow: on this machine the low-bit models generate text at {shares(found)} of the speed in high precision. "
        "They save memory here, not time: in a model this small each product takes a few microseconds, which "
        "dequantizing its weight adds to."
    )


def definition(config: QuickstartConfig) -> str:
    per = "row" if config.group_size is None else f"group of {config.group_size} inputs"
    return (
        f"All models share their first {config.trunk_steps:,} steps. Then the same {config.branch_steps:,} "
        "steps, with the same batches in the same order, the same learning rate and the same optimizer, run once "
        "in high precision and once with QAT for each bit width. So every model has had the same training, and "
        "the one that is rounded is the one trained for the full length in high precision. "
        f"Every matrix is quantized, the embedding that is also the head included, symmetric, one scale a {per}. "
        "Recovered = (perplexity rounded − perplexity after QAT) / (perplexity rounded − perplexity in high "
        "precision); 100% would be as good as high precision. The interval is a 95% bootstrap over "
        "windows of held-out text; it does not cover the choice of the training seed."
    )


def recovery_table(config: QuickstartConfig, found: Measurements) -> list[Block]:
    header = [
        "bits",
        "high precision",
        "rounded",
        "after QAT",
        "lost by rounding",
        "by QAT",
        "95% interval",
    ]
    rows = []
    for recovery in found.recoveries:
        names = ("high", f"int{recovery.bits}-rtn", f"int{recovery.bits}-qat")
        values = [f"{found.by_name(name).perplexity:.3f}" for name in names]
        interval = f"{recovery.low:.0%} to {recovery.high:.0%}" if recovery.lost > 0 else ""
        rows.append(
            [str(recovery.bits), *values, f"{recovery.lost:+.3f}", recovered(recovery), interval]
        )
    return [Table(header, rows)]


def recovered(recovery: Recovery) -> str:
    """The share in words that also fit where rounding lost nothing or QAT gained nothing."""
    if recovery.lost <= 0:
        return "rounding lost nothing"
    return f"{recovery.share:.0%} recovered" if recovery.share > 0 else "nothing recovered"


def optimizer_table(found: Measurements) -> list[Block]:
    rows = [
        [name, f"{count:,}", f"{count / found.parameters:.2f}"]
        for name, count in found.optimizer_bytes.items()
    ]
    fp32, low = found.optimizer_bytes.values()
    return [
        Table(["optimizer", "bytes of state", "bytes a parameter"], rows),
        Text(
            f"Counted in the state tensors themselves: {fp32 / low:.1f} times less. The run was trained with "
            "AdamW4bit throughout; small and one-dimensional tensors keep float32 states."
        ),
    ]


def reload_table(found: Measurements) -> list[Block]:
    rows = [
        [
            result.label,
            repr(result.perplexity),
            repr(result.reloaded_perplexity),
            "yes" if result.perplexity == result.reloaded_perplexity else "NO",
        ]
        for result in found.results
    ]
    return [
        Text(
            "Each model was measured when it was made, and once more from its file by "
            "`python -m recipes.quickstart.evaluate`, in a process of its own. All digits shown:"
        ),
        Table(["model", "when made", "from the file, in a fresh process", "equal"], rows),
    ]


def setting_table(
    config: QuickstartConfig, info: DataInfo, found: Measurements, device: torch.device
) -> Table:
    model = config.model
    times = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in found.seconds.items())
    if device.type == "cuda":
        place = torch.cuda.get_device_name()
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of GPU memory at most"
    else:
        place = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        memory = peak_memory()
    rows = [
        ["preset", config.preset],
        ["model", f"Llama, {found.parameters:,} parameters: {model.layers} layers, width {model.dim}, "
         f"{model.heads} query and {model.kv_heads} key/value heads, SwiGLU {model.hidden}, context {model.context}"],
        ["data", f"{info.source}: {info.files:,} files, split by {info.split_by}; {info.train_tokens:,} tokens to "
         f"learn from, {info.heldout_tokens:,} held out; skipped {info.not_utf8} not UTF-8, {info.unreadable} "
         f"unreadable, {info.empty} empty, {info.copies} copies"],
        ["tokenizer", f"byte-pair, {model.vocab_size:,} entries, "
         f"{info.train_bytes / info.train_tokens:.2f} bytes a token"],
        ["training", f"{config.steps:,} steps of {config.step_tokens:,} tokens, the last {config.branch_steps:,} in "
         f"branches; AdamW4bit, lr {config.lr:g}, weight decay {config.weight_decay:g}, seed {config.seed}"],
        ["arithmetic", "bfloat16 autocast over float32 weights" if config.bf16 else "float32"],
        ["training time", times],
        ["machine", f"{place}; {memory}"],
        ["software", f"lowbit {lowbit.__version__}, torch {torch.__version__}, Python {platform.python_version()}"],
    ]  # fmt: skip
    return Table(["setting", "value"], rows)


def peak_memory() -> str:
    """The most memory this process has held, in words."""
    if sys.platform == "win32":
        return "memory not measured on Windows"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{peak / 2**30:.2f} GiB at most"


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


def to_markdown(blocks: list[Block]) -> str:
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append("#" * block.level + " " + block.text)
        elif isinstance(block, Text):
            parts.append(block.text)
        elif isinstance(block, Table):
            rows = [block.header, ["---"] + ["---:"] * (len(block.header) - 1), *block.rows]
            if len(block.header) == 2:
                rows[1] = ["---", "---"]
            parts.append(
                "\n".join(
                    "| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows
                )
            )
        elif isinstance(block, Figure):
            parts.append(f"![{block.caption}]({block.path.name})")
        else:
            fence = "```" if "```" not in block.text else "~~~~~~"
            parts.append(f"**{block.title}**\n\n{fence}python\n{block.text}\n{fence}")
    return "\n\n".join(parts) + "\n"


STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem;
       color: #1c2229; background: #fff; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { margin-top: 2.4rem; font-size: 1.25rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; margin: .8rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #dfe3e8; text-align: right; vertical-align: top;
         font-variant-numeric: tabular-nums; }
th { color: #4a5562; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
table.pairs td { text-align: left; } table.pairs th { text-align: left; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #4a5562; font-size: .9rem; }
pre { background: #f5f7f9; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.4; }
.note { color: #39424d; }
"""


def to_html(blocks: list[Block]) -> str:
    """One file with everything in it."""
    title = next(b.text for b in blocks if isinstance(b, Heading))
    body = "\n".join(_block_to_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _block_to_html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f'<p class="note">{html.escape(block.text)}</p>'
    if isinstance(block, Figure):
        image = base64.b64encode(block.path.read_bytes()).decode()
        caption = html.escape(block.caption)
        return (
            f'<figure><img alt="{caption}" src="data:image/png;base64,{image}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    if isinstance(block, Code):
        return f"<p><b>{html.escape(block.title)}</b></p><pre>{html.escape(block.text)}</pre>"
    cells = [("th", block.header), *(("td", row) for row in block.rows)]
    rows = "\n".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in cells
    )
    kind = ' class="pairs"' if len(block.header) == 2 else ""
    return f'<div class="scroll"><table{kind}>{rows}</table></div>'
