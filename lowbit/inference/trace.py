"""trace_linears: which linears a model runs, how large they are, and what serves each.

Written as JSON, the list is what the kernel benchmark takes its shapes from:

    {"linears": [{"name": "layers.0.mlp.down_proj", "m": 1, "n": 4096, "k": 14336, "scheme": "int4-g128",
                  "implementation": "int4_linear", "calls": 1}, …]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowbit.granularity import PerBlock, PerGroup
from lowbit.products import Implementation, watch_linears
from lowbit.scheme import Int, Spec
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor


@dataclass(frozen=True)
class TracedLinear:
    """One linear at one number of rows: [m, k] by [n, k] transposed."""

    name: str
    """The module's, or the parameter's where it is not called `weight`; "" for a weight that is no parameter."""
    m: int
    n: int
    k: int
    scheme: str
    """Such as "int4-g128", "int8-row-int8" with the activation's format last, or the dtype of a plain weight."""
    implementation: str
    calls: int


@dataclass(frozen=True)
class LinearReport:
    """What `trace_linears` saw, in the order of first calls: `print(report)` shows it as a table."""

    linears: tuple[TracedLinear, ...]

    def __str__(self) -> str:
        head = ("name", "M", "N", "K", "weight", "implementation", "calls")
        rows = [head, *(tuple(str(v) for v in asdict(line).values()) for line in self.linears)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = {0, 4, 5}
        lines = [
            "  ".join(
                f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def write(self, path: str | os.PathLike[str]) -> None:
        """As JSON; see the module. `python -m benchmarks weight_linear --shapes PATH` times these shapes."""
        text = json.dumps({"linears": [asdict(line) for line in self.linears]}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")


def _spec_name(spec: Spec) -> str:
    fmt, granularity = spec.format, spec.granularity
    name = (
        f"{'' if fmt.signed else 'u'}int{fmt.bits}"
        if isinstance(fmt, Int)
        else str(fmt.dtype).removeprefix("torch.")
    )
    if isinstance(granularity, PerGroup):
        name += f"-g{granularity.group_size}"
    elif isinstance(granularity, PerBlock):
        name += "-block" + "x".join(map(str, granularity.shape))
    else:
        name += "-" + type(granularity).__name__.removeprefix("Per").lower()
    return name if spec.mapping.startswith("symmetric") else f"{name}-{spec.mapping}"


def scheme_name(weight: Tensor) -> str:
    """How a weight is stored, and its activation quantized, in a word."""
    spec = getattr(weight, "spec", None)
    if not isinstance(spec, Spec):
        plain = str(weight.dtype).removeprefix("torch.")
        return type(weight).__name__ if isinstance(weight, LowbitTensor) else plain
    activation = getattr(weight, "activation", None)
    return _spec_name(spec) + (f"-{_spec_name(activation)}" if activation is not None else "")


class _Recorder(TorchFunctionMode):
    """Counts the products of plain weights as they are called, and of quantized ones as they are dispatched."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: dict[Any, str] = {}
        for name, p in model.named_parameters():
            self.names.setdefault(_key(p), name.removesuffix(".weight"))
        self.calls: dict[tuple[str, int, int, int, str, str], int] = {}
        self.within = False
        """A quantized product, which may itself call F.linear."""

    def add(self, x: Tensor, weight: Tensor, implementation: str) -> None:
        n, k = weight.shape
        m = x.shape[:-1].numel()
        name = self.names.get(_key(weight), "")
        line = (name, m, n, k, scheme_name(weight), implementation)
        self.calls[line] = self.calls.get(line, 0) + 1

    @contextmanager
    def watch(self, x: Tensor, weight: LowbitTensor, impl: Implementation) -> Iterator[None]:
        self.add(x, weight, getattr(impl, "__name__", type(impl).__name__))
        self.within = True
        try:
            yield
        finally:
            self.within = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not self.within:
            x = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            local = _local(weight)
            if not isinstance(local, AffineTensor) and weight.ndim == 2:  # those are watched
                self.add(
                    x, weight, type(local).__name__ if isinstance(local, LowbitTensor) else "torch"
                )
        return func(*args, **kwargs)


def _local(weight: Tensor) -> Tensor:
    return getattr(weight, "_local_tensor", weight)


def _key(weight: Tensor) -> Any:
    """Of the memory, which detached copies and DTensors' local parts share with the parameter."""
    local = _local(weight)
    inner = local.inner_tensors() if isinstance(local, LowbitTensor) else {"": local}
    first = next(iter(inner.values()))
    return first.data_ptr() if first.numel() and not first.is_meta else id(weight)


def trace_linears(model: nn.Module, *inputs: Any, **named_inputs: Any) -> LinearReport:
    """Run `model(*inputs, **named_inputs)` once, without gradients, and list every linear in it.

        report = lowbit.inference.trace_linears(model, tokens)
        print(report)
        report.write("shapes.json")        # python -m benchmarks weight_linear --shapes shapes.json

    Compiled parts run eagerly for it: what a compiled graph calls is chosen by the same table. The model keeps its
    mode (train or eval); call `model.eval()` first, where that matters.

    Raises:
        TypeError: the model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"trace_linears takes an nn.Module and its inputs, got {type(model).__name__}"
        )
    recorder = _Recorder(model)
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        watch_linears(recorder.watch),
        recorder,
    ):
        model(*inputs, **named_inputs)
    return LinearReport(tuple(TracedLinear(*line, calls=n) for line, n in recorder.calls.items()))
