"""train_blocks: QAT of one block of a model after another, in the memory of one block and cached activations.

    lowbit.qat.prepare_(model, IntxWeightOnly(2, 64), scales="learned")
    print(lowbit.qat.train_blocks(model, model.model.layers, batches))

Two streams of activations pass through the model, of all batches: x in high precision, and x̂ through the blocks that
are trained and rounded. For each block f, in order:

1. targets y = f(x) in high precision, which are the next x;
2. train the rounded block f̂ to min Σ ‖f̂(x̂) − y‖² / Σ ‖y‖²: its scales, weights and other parameters;
3. the next x̂ = f̂(x̂).

So each block learns to undo the error of those before it, and no gradient passes from one block to another. This is the
first phase of EfficientQAT (arXiv 2407.11062). Its second phase trains scales alone, end to end, on the model's loss.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lowbit.convert import check_module, find_owners
from lowbit.layers.exchange import exchanged
from lowbit.numerics.snr import Energies
from lowbit.progress import progress as bar
from lowbit.qat.exchange import check_dynamic, in_high_precision, prepared_targets
from lowbit.qat.tools.block_state import BlockFolder, fingerprint
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import named_scales
from lowbit.tracing.batches import eval_mode, uncached_autocast
from lowbit.tracing.block_inputs import Arguments, capture

LAST_RATE = 0.05
"""The learning rate at the end of a block's training, as a share of that at its start."""
Optimize = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class BlockProgress:
    """An epoch of a block is done.

    Attributes:
        block, blocks: number of the block, from 1 on, and how many there are.
        epoch, epochs: number of the epoch, from 1 on, and how many there are.
        error: its mean over the epoch, as `before` in `BlockResult`.
    """

    block: int
    blocks: int
    epoch: int
    epochs: int
    error: float


@dataclass(frozen=True)
class BlockResult:
    """One block.

    Attributes:
        name: of the block in the model.
        before, after: Σ ‖f̂(x̂) − y‖² / Σ ‖y‖² over all batches, rounded only and after training.
        steps: of the optimizer.
    """

    name: str
    before: float
    after: float
    steps: int


@dataclass(frozen=True)
class BlocksReport:
    """The result of `train_blocks`: `print` it, or read `blocks`, in their order."""

    blocks: tuple[BlockResult, ...]

    def __str__(self) -> str:
        width = max(len(b.name) for b in self.blocks)
        lines = [
            f"{b.name:<{width}}  error {b.before:.3e} -> {b.after:.3e}  {b.steps} steps"
            for b in self.blocks
        ]
        return "\n".join([f"{len(lines)} blocks: relative squared error of the output", *lines])


@dataclass(frozen=True)
class _Settings:
    """The arguments of `train_blocks` on which the result depends."""

    lr: float
    scale_lr: float
    epochs: int
    batches_per_step: int
    targets: str
    bf16: bool
    seed: int

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        for name in ("epochs", "batches_per_step"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name} must be an int, got {getattr(self, name)!r}")
        if self.epochs < 0 or self.batches_per_step < 1:
            raise ValueError(
                f"epochs={self.epochs}, batches_per_step={self.batches_per_step}; accepted: at least 0 and at least 1"
            )
        if self.targets not in ("high", "rounded"):
            raise ValueError(f"targets must be 'high' or 'rounded', got {self.targets!r}")


def train_blocks(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    batches: Iterable[Any],
    *,
    lr: float = 1e-4,
    scale_lr: float | None = None,
    epochs: int = 2,
    batches_per_step: int = 1,
    targets: Literal["high", "rounded"] = "high",
    optimizer: Optimize = torch.optim.AdamW,
    bf16: bool = False,
    device: torch.device | str | None = None,
    cache: torch.device | str | None = "cpu",
    folder: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: Callable[[BlockProgress], None] | None = None,
) -> BlocksReport:
    """Train the blocks of a prepared model one after another, in place, each to the output of its plain self.

    Beside the model it holds gradients and optimizer states of one block, and for each batch two hidden states (x and
    x̂), of the dtype that the first block gets, and what blocks get beside them, such as masks. The model runs in eval
    mode, without dropout. Afterwards its modules have their modes again, and no parameter has a gradient.

    Args:
        model: prepared by `lowbit.qat.prepare_`, best with `scales="learned"`; not sharded.
        blocks: modules of the model in the order in which it calls them, e.g. `model.model.layers`. The hidden state
            passes from one to the next unchanged. A block with no prepared weight stays as it is.
        batches: each is a mapping of keyword arguments, a tuple or list of arguments, or one argument of the model, on
            its device. Read once, and not kept.
        lr: learning rate of weights and of the block's other parameters that require a gradient; 0 keeps them. It falls
            to a twentieth by a cosine.
        scale_lr: that of learned scales and zero points; None: `lr`. (A step moves a scale by an eighth of it, see
            `lowbit.numerics.learned_scales`.)
        epochs: passes over the batches for each block.
        batches_per_step: batches whose mean gradient makes a step.
        targets: "high": y = f(x). "rounded": y = f(x̂), the block's own error alone; needs no second stream.
        optimizer: called with groups of parameters with learning rates. For a bfloat16 model, in which small steps get
            lost, e.g. `functools.partial(lowbit.optim.AdamW, bf16_stochastic_round=True)`.
        bf16: run the blocks under `torch.autocast` to bfloat16.
        device: where a block is while it is trained, e.g. "cuda" for a model in host memory; None: where it is.
        cache: where hidden states and other arguments are kept; None: where the model makes them.
        folder: keeps each finished block, one file each. A call with the same arguments, on the model as it was before,
            goes on after the last one, and gives the same result to the bit (on a GPU, as far as its kernels are
            deterministic).
        seed: of the order of batches.
        progress: called after each epoch. None: a bar on a terminal.

    Raises:
        NotImplementedError: a scheme with a static activation.
        TypeError: blocks that are not modules or get no hidden state; a cache of keys and values among the arguments.
        ValueError: nothing prepared in the blocks, or switched off; no blocks or batches; blocks that the model does
            not call one after another; a parameter that two blocks, or a block and the rest of the model, share; a loss
            that is not finite; a folder of another run, or a file in its place.
    """
    settings = _Settings(
        lr, lr if scale_lr is None else scale_lr, epochs, batches_per_step, targets, bf16, seed
    )
    check_module(model)
    blocks = list(blocks)
    _check_blocks(model, blocks)
    if folder is not None and Path(folder).is_file():
        raise ValueError(f"folder={str(folder)!r} is a file; give the name of a folder")
    found = _Streams.captured(
        model, blocks, batches, None if cache is None else torch.device(cache)
    )
    place = None if device is None else torch.device(device)
    run = _Run(settings, found, optimizer, place, progress)
    kept = None if folder is None else BlockFolder(Path(folder), repr(settings), found.fingerprint)
    names = {id(module): name for name, module in model.named_modules()}
    results = []
    shown = bar("training blocks", len(blocks), unit="blocks", hidden=progress is not None)
    with uncached_autocast(), eval_mode(model), shown as advance:
        for index, block in enumerate(blocks):
            saved = None if kept is None else kept.load(index, block)
            result = run.block(index, block, names[id(block)], saved)
            if kept is not None and saved is None:
                kept.save(index, block, (result.before, result.after, result.steps))
            results.append(result)
            advance(1)
    return BlocksReport(tuple(results))


def _check_blocks(model: nn.Module, blocks: list[nn.Module]) -> None:
    known = {id(module) for module in model.modules()}
    strange = [b for b in blocks if not isinstance(b, nn.Module) or id(b) not in known]
    if strange:
        raise TypeError(
            f"{strange[0]!r} is not a module of the model; accepted: e.g. model.model.layers"
        )
    if not blocks or len({id(b) for b in blocks}) < len(blocks):
        raise ValueError(f"{len(blocks)} blocks; accepted: one or more different ones")
    targets = [target for block in blocks for target in prepared_targets(block)]
    if not targets:
        raise ValueError(
            "no weight of the blocks is prepared; call lowbit.qat.prepare_(model, scheme, scales='learned') first"
        )
    check_dynamic(targets)
    off = [t.fqn for t in targets if cast(FakeQuantizedTensor, t.weight).off is not None]
    if off:
        raise ValueError(
            f"fake quantization of {off[0]} is off, so no rounding to train for; call lowbit.qat.enable_(model)"
        )
    inside = {id(m): i for i, block in enumerate(blocks) for m in block.modules()}
    for owners in find_owners(model).values():
        where = {inside.get(id(owner.module)) for owner in owners}
        if len(where) > 1:
            raise ValueError(
                f"{owners[0].fqn} and {owners[-1].fqn} are one parameter, which training one block would change in "
                "another place too; accepted: blocks that share none"
            )


# ---- the streams ----------------------------------------------------------------------------------------------


@dataclass
class _Streams:
    """For each batch: x, x̂, the targets y while a block is trained, and the other arguments of each block."""

    high: list[Tensor]
    rounded: list[Tensor]
    arguments: list[tuple[Arguments, ...]]
    fingerprint: str

    @classmethod
    def captured(
        cls,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        batches: Iterable[Any],
        device: torch.device | None,
    ) -> _Streams:
        """The inputs of the first block. Layers before it, such as an embedding, may be rounded too."""
        inside = {id(module) for block in blocks for module in block.modules()}
        every = prepared_targets(model)
        before = any(id(o.module) not in inside for target in every for o in target.owners)
        made = cls([], [], [], "")
        plain = in_high_precision(every)
        with eval_mode(model), torch.no_grad():
            for batch in batches:
                with exchanged(plain):
                    (one,) = capture(model, blocks, [batch], device)
                made.high.append(one.hidden)
                made.arguments.append(one.arguments)
                if before:
                    (one,) = capture(model, blocks, [batch], device)
                made.rounded.append(one.hidden)
        if not made.high:
            raise ValueError("train_blocks was given no batches; accepted: at least one")
        made.fingerprint = fingerprint([*made.high, *made.rounded])
        return made


class _Run:
    """Takes the streams through one block after another."""

    def __init__(
        self,
        settings: _Settings,
        streams: _Streams,
        optimizer: Optimize,
        device: torch.device | None,
        progress: Callable[[BlockProgress], None] | None,
    ) -> None:
        self.settings, self.streams = settings, streams
        if settings.targets == "rounded":
            streams.high.clear()
        self.optimizer, self.device, self.progress = optimizer, device, progress

    def block(self, index: int, block: nn.Module, name: str, saved: Any) -> BlockResult:
        """Train the block, or take its parameters from `saved`, and advance both streams through it."""
        home = next((p.device for p in block.parameters()), None)
        moves = self.device is not None and home is not None
        if moves:
            block.to(self.device)
        try:
            return self._block(index, block, name, saved, self.device or home)
        finally:
            if moves:
                block.to(home)

    def _block(
        self, index: int, block: nn.Module, name: str, saved: Any, place: torch.device | None
    ) -> BlockResult:
        targets = prepared_targets(block)
        high = self.settings.targets == "high"
        with torch.no_grad(), exchanged(in_high_precision(targets)):
            expected = [
                self._forward(index, block, i, x, place).to(x.device)
                for i, x in self._taken(self.streams.high if high else self.streams.rounded, high)
            ]
        before, steps = 0.0, 0
        if saved is not None:
            before, _, steps = saved.result
            block.load_state_dict(saved.state)
        elif targets:
            before = self._error(index, block, expected, place)
            steps = self._train(index, block, name, expected, place)
        after = self._error(index, block, expected, place, advance=True)
        if high:
            self.streams.high = expected
        return BlockResult(name, before if targets else after, after, steps)

    @staticmethod
    def _taken(stream: list[Tensor], taken: bool) -> Any:
        """The stream's tensors with their numbers. `taken`: each is let go, as nobody needs it afterwards."""
        for i in range(len(stream)):
            x = stream[i]
            if taken:
                stream[i] = x.new_empty(0)
            yield i, x

    def _forward(
        self, index: int, block: nn.Module, batch: int, x: Tensor, place: torch.device | None
    ) -> Tensor:
        """A copy of x goes in, so that a block may write to its input."""
        x = x.to(device=place, copy=True)
        amp: Any = nullcontext()
        if self.settings.bf16:
            amp = torch.autocast(x.device.type, torch.bfloat16)
        with amp:
            return self.streams.arguments[batch][index].run(block, x)

    @torch.no_grad()
    def _error(
        self,
        index: int,
        block: nn.Module,
        expected: list[Tensor],
        place: torch.device | None,
        advance: bool = False,
    ) -> float:
        """Σ ‖f̂(x̂) − y‖² / Σ ‖y‖². `advance`: replace each x̂ by f̂(x̂)."""
        energies, stream = Energies(), self.streams.rounded
        for i, y in enumerate(expected):
            found = self._forward(index, block, i, stream[i], place)
            energies.add(y.to(found.device), found)
            if advance:
                stream[i] = found.to(stream[i].device)
        return energies.relative_error()

    def _train(
        self,
        index: int,
        block: nn.Module,
        name: str,
        expected: list[Tensor],
        place: torch.device | None,
    ) -> int:
        """Steps that were taken."""
        settings, stream = self.settings, self.streams.rounded
        groups = _groups(block, settings)
        if not groups or not settings.epochs:
            return 0
        trained = [p for group in groups for p in group["params"]]
        kept = [p for p in block.parameters() if p.requires_grad and not _holds(trained, p)]
        total = sum(float(y.float().square().sum(dtype=torch.float64)) for y in expected)
        power = total / max(sum(y.numel() for y in expected), 1) or 1.0
        optimizer = self.optimizer(groups)
        steps = math.ceil(len(stream) / settings.batches_per_step) * settings.epochs
        rates, taken = [group["lr"] for group in optimizer.param_groups], 0
        generator = torch.Generator().manual_seed(settings.seed + index)
        for p in kept:
            p.requires_grad_(False)
        try:
            for epoch in range(1, settings.epochs + 1):
                errors = []
                order = torch.randperm(len(stream), generator=generator)
                for own in order.split(settings.batches_per_step):
                    for i in own.tolist():
                        found = self._forward(index, block, i, stream[i], place)
                        y = expected[i].to(found.device)
                        loss = (found.float() - y.float()).square().mean() / power
                        (loss / len(own)).backward()
                        errors.append(loss.detach())
                    # a scheduler would keep the optimizer alive until the garbage collector runs
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate * _share(taken / steps)
                    optimizer.step()
                    optimizer.zero_grad()
                    taken += 1
                self._tell(index, name, epoch, float(torch.stack(errors).mean()))
        finally:
            for p in kept:
                p.requires_grad_(True)
            block.zero_grad(set_to_none=True)
        return steps

    def _tell(self, index: int, name: str, epoch: int, error: float) -> None:
        settings = self.settings
        if not math.isfinite(error):
            raise ValueError(
                f"the error of {name} is {error} in epoch {epoch}; accepted: smaller learning rates than "
                f"lr={settings.lr:g}, scale_lr={settings.scale_lr:g}"
            )
        if self.progress is not None:
            count = len(self.streams.arguments[0])
            self.progress(BlockProgress(index + 1, count, epoch, settings.epochs, error))


def _groups(block: nn.Module, settings: _Settings) -> list[dict[str, Any]]:
    """The parameters to train, by learning rate."""
    rates: dict[float, list[Tensor]] = {}
    scales = named_scales(block).values()
    for p in block.parameters():
        rate = settings.scale_lr if _holds([*scales], p) else settings.lr
        if p.requires_grad and rate > 0:
            rates.setdefault(rate, []).append(p)
    return [{"params": ps, "lr": rate, "weight_decay": 0.0} for rate, ps in rates.items()]


def _holds(parameters: list[Tensor], parameter: Tensor) -> bool:
    return any(p is parameter for p in parameters)


def _share(done: float) -> float:
    """The share of the learning rate when this share of the steps is done."""
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
