"""Small models of five kinds, and text for them: what `benchmarks.qat_start` trains.

All read bytes. The decoders, the convolutions and the mixture predict the next byte, the encoder masked bytes. The text
is the docstrings of the Python standard library and of parts of PyTorch, so it is on every machine.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.llama import Llama, LlamaConfig

BYTES, MASK = 256, 255
"""Bytes of the vocabulary, and the one that stands for a masked byte: no UTF-8 text has it."""
IGNORED = -100
"""The label of positions that do not count."""


def text_in(folder: Path) -> Tensor:
    """`docstrings()`, which the first call for a folder keeps there."""
    path = folder / "text.bin"
    if not path.exists():
        path.write_bytes(docstrings().numpy().tobytes())
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def docstrings() -> Tensor:
    """The bytes of all docstrings of at least 200 characters, file by file in the order of names. uint8."""
    found: list[str] = []
    parts = [Path(torch.__file__).parent / name for name in ("nn", "optim", "distributions")]
    for root in (Path(sysconfig.get_path("stdlib")), *parts):
        for path in sorted(root.rglob("*.py")):
            if {"site-packages", "test", "tests"} & {*path.parts[len(root.parts) :]}:
                continue
            source = path.read_text(encoding="utf-8", errors="ignore")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a source's escapes
                    tree = ast.parse(source)
            except (SyntaxError, ValueError):
                continue
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            own = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds)]
            found += [text for text in dict.fromkeys(own) if len(text) >= 200]
    raw = "\n\n".join(dict.fromkeys(found)).encode()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Attention(nn.Module):
    """Multi-head attention with biases, of four linears."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """`count` experts of two matrices. Each token takes the mean of two, weighted by its router."""

    def __init__(self, dim: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.up = nn.Parameter(torch.randn(count, hidden, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(count, dim, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        best, chosen = self.router(rows).topk(2, dim=-1)
        share = torch.zeros_like(rows[:, :1].expand(-1, len(self.up))).scatter(
            1, chosen, best.softmax(-1)
        )
        every = rows.expand(len(self.up), *rows.shape)
        hidden = F.gelu(torch.bmm(every, self.up.transpose(1, 2)))
        outputs = torch.bmm(hidden, self.down.transpose(1, 2))
        return torch.einsum("end,ne->nd", outputs, share).view(x.shape)


class CausalConvolutions(nn.Module):
    """A wide convolution over this and two earlier positions, and one of width 1 back."""

    def __init__(self, dim: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.wide = nn.Conv1d(dim, hidden, 3, dilation=dilation)
        self.back = nn.Conv1d(hidden, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (2 * self.wide.dilation[0], 0))
        return self.back(F.gelu(self.wide(padded))).transpose(1, 2)


def mlp(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class Residual(nn.Module):
    """x + layer(norm(x)) for each layer."""

    def __init__(self, dim: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in layers)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class Bytes(nn.Module):
    """Embeddings of bytes and positions, blocks, and a head with a bias."""

    def __init__(self, dim: int, context: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, dim), nn.Embedding(context, dim)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)
        self.blocks = Residual(dim, layers)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def transformer(dim: int, context: int, causal: bool) -> nn.Module:
    pairs = [(Attention(dim, 4, causal), mlp(dim, 4 * dim)) for _ in range(3)]
    return Bytes(dim, context, [layer for pair in pairs for layer in pair])


def convolutional(dim: int, context: int) -> nn.Module:
    return Bytes(dim, context, [CausalConvolutions(dim, 2 * dim, 2**i) for i in range(4)])


def mixture(dim: int, context: int) -> nn.Module:
    pairs = [(Attention(dim, 4, True), Experts(dim, 3 * dim // 2, 4)) for _ in range(2)]
    return Bytes(dim, context, [layer for pair in pairs for layer in pair])


def llama(dim: int, context: int) -> nn.Module:
    hidden = 32 * round(11 * dim / 128)
    return Llama(LlamaConfig(BYTES, dim, 3, 4, 4, hidden, context, tied=False))


def llama_100m(dim: int, context: int) -> nn.Module:
    """99M parameters, whatever `dim`."""
    return Llama(LlamaConfig(BYTES, 768, 14, 12, 12, 2048, context, tied=False))


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "decoder, RMSNorm": llama,
    "decoder, LayerNorm and biases": partial(transformer, causal=True),
    "encoder": partial(transformer, causal=False),
    "convolutional": convolutional,
    "mixture of experts": mixture,
    "decoder of 99M parameters": llama_100m,
}
"""A model of a width and a context by its kind."""


def batches(
    text: Tensor, kind: str, steps: int, size: int, context: int, seed: int, heldout: bool = False
) -> tuple[Tensor, Tensor]:
    """Inputs and labels, each int64 [steps, size, context]. The last 5% of the text are held out.

    The encoder's inputs have 15% of the bytes masked, and these are its labels.
    """
    cut = int(0.95 * len(text))
    text = text[cut:] if heldout else text[:cut]
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (steps, size, 1), generator=random)
    rows = text[starts + torch.arange(context + 1)].long()
    if kind != "encoder":
        return rows[..., :-1].contiguous(), rows[..., 1:].contiguous()
    inputs = rows[..., :-1].contiguous()
    masked = torch.rand(inputs.shape, generator=random) < 0.15
    return inputs.masked_fill(masked, MASK), inputs.masked_fill(~masked, IGNORED)
