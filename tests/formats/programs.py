"""A model with a layer of every preset, for the tests of exported programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import Scheme, Spec
from lowbit.numerics.granularity import PerBlock, PerToken
from lowbit.numerics.number_format import Int

FEATURES = 128
LINEARS: dict[str, Scheme] = {
    "int4": lowbit.Int4WeightOnly(group_size=32),
    "int4_row": lowbit.IntxWeightOnly(4),
    "int4_asymmetric": lowbit.Int4WeightOnly(group_size=64, mapping="asymmetric"),
    "int8": lowbit.Int8WeightOnly(),
    "int8_groups": lowbit.Int8WeightOnly(group_size=32),
    "int3": lowbit.IntxWeightOnly(3, 32),
    "int2": lowbit.Int2WeightOnly(),
    "int1": lowbit.Int1WeightOnly(),
    "float8": lowbit.Float8WeightOnly(),
    "int8xint4": lowbit.Int8DynamicActivationInt4Weight(),
    "int8xint8": lowbit.Int8DynamicActivationInt8Weight(),
    "int8xint8_static": lowbit.Int8StaticActivationInt8Weight(),
    "float8xfloat8": lowbit.Float8DynamicActivationFloat8Weight(),
    "float8xfloat8_blocks": lowbit.Float8DynamicActivationFloat8Weight(PerBlock(128, 128)),
    "float8xfloat8_static": lowbit.Float8StaticActivationFloat8Weight(),
    "nf4": lowbit.NF4WeightOnly(),
    "nf4_double": lowbit.NF4WeightOnly(double_quantization=True),
    "mxfp4": lowbit.MXFP4WeightOnly(),
    "nvfp4": lowbit.NVFP4WeightOnly(),
}
"""Every preset of linears, by a name without dots."""
ASYMMETRIC_INPUT = Spec(Int(8), PerToken(), "asymmetric")
"""How XNNPACK rounds the input of a product."""


class EveryPreset(nn.Module):
    """A linear of each preset, an embedding and convolutions in several, and a plain linear that takes sequences. Each
    gives an output of its own."""

    def __init__(
        self,
        linears: Sequence[str],
        embeddings: Sequence[str],
        convolutions: Sequence[str],
        features: int,
        rows: int,
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({name: nn.Linear(features, rows) for name in linears})
        self.embeddings = nn.ModuleDict({n: nn.Embedding(40, features // 2) for n in embeddings})
        self.convolutions = nn.ModuleDict({n: nn.Conv2d(3, 8, 3) for n in convolutions})
        self.plain = nn.Linear(features, 32, bias=False)

    def forward(self, x: Tensor, tokens: Tensor, image: Tensor) -> dict[str, Tensor]:
        found = {name: layer(x) for name, layer in self.linears.items()}
        found |= {f"embedding_{name}": e(tokens) for name, e in self.embeddings.items()}
        found |= {f"conv_{name}": c(image) for name, c in self.convolutions.items()}
        return {**found, "plain": self.plain(x.unsqueeze(1))}


class Beside(nn.Module):
    """A quantized linear, and plain layers that exporters transpose, fold or lay out in ways of their own. Each gives
    an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized = nn.Linear(FEATURES, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.swapped = nn.Parameter(torch.randn(64, 48).t())
        self.other = nn.Parameter(torch.randn(48, 64))
        self.table = nn.Embedding(32, 64)
        self.table.weight = self.head.weight
        self.conv = nn.Conv1d(64, 8, 3, padding=1)
        self.image = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.up = nn.ConvTranspose1d(64, 8, 3, bias=False)

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """x [B, T, FEATURES], tokens [B, T]."""
        y = self.quantized(x)
        columns = y.transpose(1, 2)
        return {
            "head": self.head(y),
            "functional": F.linear(y, self.swapped),
            "product": y @ self.other.T,
            "embedding": self.table(tokens),
            "conv": self.conv(columns),
            "image": self.image(y.unflatten(2, (8, 8)).narrow(1, 0, 4)),
            "up": self.up(columns),
        }


def beside(scheme: Scheme) -> tuple[Beside, tuple[Tensor, Tensor]]:
    """The model, whose first linear is quantized, and inputs of it."""
    torch.manual_seed(0)
    model = Beside().eval()
    lowbit.quantize_(model, {"quantized": scheme})
    return model, (torch.randn(2, 4, FEATURES), torch.randint(0, 32, (2, 4)))


def inputs(
    dtype: torch.dtype, batch: int = 4, features: int = FEATURES
) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded inputs of `EveryPreset`; all have the same batch."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, features, generator=generator).to(dtype)
    tokens = torch.randint(0, 40, (batch, 5), generator=generator)
    return x, tokens, torch.randn(batch, 3, 9, 9, generator=generator).to(dtype)


def every_preset(
    dtype: torch.dtype,
    linears: Sequence[str] = tuple(LINEARS),
    features: int = FEATURES,
    rows: int = 48,
    embeddings: Sequence[str] = ("int4", "int8", "nf4"),
    convolutions: Sequence[str] = ("int8", "float8"),
) -> EveryPreset:
    """The model, quantized; its linears have weights [rows, features]."""
    torch.manual_seed(0)
    model = EveryPreset(linears, embeddings, convolutions, features, rows).to(dtype).eval()
    schemes = {f"linears.{name}": LINEARS[name] for name in linears}
    if static := {key: s for key, s in schemes.items() if key.endswith("_static")}:
        with lowbit.calibrate(model, static):
            model(*inputs(dtype, features=features))
    schemes |= {f"embeddings.{n}": LINEARS[n] for n in model.embeddings}
    schemes |= {f"convolutions.{n}": LINEARS[n] for n in model.convolutions}
    report = lowbit.quantize_(model, schemes, filter_fn=lambda module, name: True)
    assert list(report.left) == ["plain.weight"]
    return model


def batch_of(names: int = 3) -> tuple[dict[int, object], ...]:
    """dynamic_shapes with one batch for all inputs."""
    batch = torch.export.Dim("batch", min=1, max=512)
    return tuple({0: batch} for _ in range(names))


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
