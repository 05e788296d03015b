"""Learned rounding: choose for each weight whether it rounds up or down, by the outputs of a block or of the model.

For a weight W with scale s and zero point z (AutoRound, arXiv 2309.05516)

    Q = dequantize(quantize(W + V · d; s, z)),      V = 0 at first, d the distance to the next value of the grid

V, s and z follow the sign of their gradients (`lowbit.inference.calibration.learned_weight`), by a rate that falls to 0
and adds up to half of `reach`. So with a reach of 1 a V stays within ±1/2. Vectors of the same modules, i.e. norms and
biases, follow Adam meanwhile.

- Blocks: each block by itself, once its weights are rounded. The loss is ‖f̂(x̂) − f(x)‖², where x̂ is what the rounded
  model gives it, and f(x) what it gives in the model in high precision.
- Model: all weights at once. The loss is KL(softmax(y) ‖ softmax(ŷ)) of the model's outputs.
- One sequence in `HELD_OUT` gives no gradient. The result stays only if it lowers the loss over the others, and does
  not raise that over the sequences held out.
- Processes of a group share the sequences of a step, hold out one in `HELD_OUT` of their own, and move by the sums of
  their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert import Target, adapter_modules
from lowbit.inference.calibration.batches import HELD_OUT
from lowbit.inference.calibration.learned_weight import Variables, Vectors, Weight, originals
from lowbit.inference.calibration.ranks import Ranks
from lowbit.inference.calibration.step import Layer, Step, check_share
from lowbit.numerics.divergence import distillation_loss
from lowbit.numerics.settings import check_whole
from lowbit.tracing.batches import (
    compared_tensor,
    deterministic,
    entry,
    has_tensor,
    output_tensor,
)
from lowbit.tracing.block_inputs import moved

BETAS = 0.9, 0.99
"""The decay rates of Adam, which learns vectors."""


class Losses(NamedTuple):
    """What the learning of the rounding did to the mean loss.

    Attributes:
        before, after: over the sequences that it learns from.
        held_out: the same over those held out. None: there is one sequence alone.
        kept: False if the weights stay as the steps before left them, since a loss did not fall.
    """

    before: float
    after: float
    held_out: tuple[float, float] | None = None
    kept: bool = True

    def __str__(self) -> str:
        text = f"loss {self.before:.3e} -> {self.after:.3e}"
        if self.held_out is not None:
            text += ", held out {:.3e} -> {:.3e}".format(*self.held_out)
        return text if self.kept else f"{text}; dropped"


@dataclass
class Block:
    """What learned rounding compares with what it gave in high precision.

    Attributes:
        name: for reports.
        module: whose vectors train.
        count: batches.
        rows: sequences of a batch, by its number.
        run: the outputs for a batch, by its number, from the inputs that the rounded model gives.
        high: the same from the inputs of the model in high precision, while the original weights are in place.
        masks: the tokens that count; None: all.
        targets: what `high` gave for each batch. None: it runs again for each loss.
        keep: makes a sequence of targets, where they are to be kept. None: they are not, as those of a head, which are
            many times the hidden states.
        vectors: those of the module, for `high`.
        ranks: the processes that learn together, each from its own batches.
    """

    name: str
    module: nn.Module
    count: int
    rows: Callable[[int], int]
    run: Callable[[int], Any]
    high: Callable[[int], Any]
    masks: Sequence[Tensor | None]
    targets: MutableSequence[Tensor] | None = None
    keep: Callable[[Iterable[Tensor]], MutableSequence[Tensor]] | None = None
    vectors: Vectors = ()
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class LearnedRounding(Step):
    """Learn which way each weight rounds, its scales, and the norms and biases beside it. Comes after other steps.

    One sequence in eight is held out. What was learned is dropped where it raises the loss over these.

    Args:
        steps: of sign descent, for each block or for the model. 0 leaves all as it is.
        batch_size: sequences of a step, of all processes of a group together. Batches of the calibration are taken
            whole, until there are so many.
        over: "blocks" learns block by block, in the memory of one block. "model" learns all weights at once, with the
            activations and gradients of the whole model.
        reach: steps of the grid that a weight may move in all, times two.
        scale_rate: how far scales and zero points move, as a share of how far weights move in steps of the grid. 0:
            they stay.
        vector_rate: the learning rate of norms and biases. 0: they stay.
        loss: "error" or "kl" of the outputs of `over`. None: "error" for blocks; for a model "error" if it gives hidden
            states, or one channel, else "kl".

    Raises ValueError for other values.
    """

    steps: int = 200
    batch_size: int = 8
    over: Literal["blocks", "model"] = "blocks"
    reach: float = 0.3
    scale_rate: float = 0.1
    vector_rate: float = 0.003
    loss: Literal["error", "kl"] | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("batch_size", 1)):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), least=least))
        if self.over not in ("blocks", "model"):
            raise ValueError(f"over must be 'blocks' or 'model', got {self.over!r}")
        if self.loss not in (None, "error", "kl"):
            raise ValueError(f"loss must be 'error', 'kl' or None, got {self.loss!r}")
        for name in ("reach", "scale_rate", "vector_rate"):
            check_share(name, getattr(self, name))

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.over == "model"

    def begin(self, targets: Sequence[Target]) -> dict[int, str]:
        for target in targets:
            if target.scheme.weight.scale_format == "super_block" and self.scale_rate:
                raise ValueError(
                    f"{target.fqn}: scales of K-quants stand on a grid of their own, which learning leaves; "
                    "take LearnedRounding(scale_rate=0)"
                )
        return {}

    def apply(self, layer: Layer) -> None:
        """Nothing: one layer alone has no output to learn from."""

    def learn(self, block: Block, weights: Sequence[Weight]) -> Losses:
        """Learn the rounding of these weights, which the block's outputs depend on.

        Raises ValueError where the loss is not a number."""
        return _Learning(self, block, weights).run()


class _Learning:
    """The descent over one block."""

    def __init__(self, step: LearnedRounding, block: Block, weights: Sequence[Weight]) -> None:
        self.step, self.block, self.weights = step, block, weights
        self.held_out = _held_out([max(block.rows(i), 1) for i in range(block.count)])
        self.variables = [Variables(w, step.scale_rate) for w in weights]
        own = {id(w.target.weight) for w in weights}
        own |= {id(p) for m in adapter_modules(block.module) for p in m._parameters.values()}
        short = [p for p in block.module.parameters() if p.ndim < 2 and p.dtype.is_floating_point]
        self.vectors = [p for p in short if step.vector_rate and id(p) not in own]
        self.before = [v.data for v in self.vectors]
        self.masters = [v.detach().float().clone() for v in self.vectors]
        self.adam = None
        if self.vectors:
            self.adam = torch.optim.Adam(self.masters, lr=step.vector_rate, betas=BETAS)
        self.trained = [*(w.target.weight for w in weights), *self.vectors]
        sharing = sum(count > 0 for count in block.ranks.gathered(block.count))
        self.sequences = -(-step.batch_size // max(sharing, 1)) if block.count else 0
        """Those of a step that this process takes."""

    def run(self) -> Losses:
        step, block, trained = self.step, self.block, self.trained
        with _learning(block.module, trained), ExitStack() as stack:
            device = trained[0].device
            if device.type == "cuda" and trained[0].dtype is torch.float32:
                stack.enter_context(torch.autocast("cuda", torch.bfloat16))
            before, *held_before = self.means()
            batches = _drawn(block.count)
            for number in range(step.steps):
                self._gradients(batches)
                self._add_up()
                self._move(1 - number / step.steps)
            after, *held_after = self.means() if step.steps else [before, *held_before]
        kept = after < before and all(b <= a for a, b in zip(held_before, held_after, strict=True))
        held_out = (held_before[0], held_after[0]) if held_before else None
        losses = Losses(before, after, held_out, kept)
        if kept:
            for variables in self.variables:
                variables.keep()
                found = (variables.weight.values, *variables.weight.qparams)
                block.ranks.alike(*(t for t in found if t is not None))
            block.ranks.alike(*(vector.data for vector in self.vectors))
            return losses
        for w in self.weights:
            w.show(w.values)
        for vector, start in zip(self.vectors, self.before, strict=True):
            vector.data = start
        for value in (before, after, *held_before, *held_after):
            if not math.isfinite(value):
                raise ValueError(
                    f"{block.name}: the loss of learned rounding is {value}. Its weights are as they were, and so are "
                    "those after it; find the batch that gives NaN, and load the model again"
                )
        return losses

    def _gradients(self, batches: Iterator[int]) -> None:
        rows = 0
        while rows < self.sequences:
            number = next(batches)
            sequences = max(self.block.rows(number), 1)
            if self.held_out[number] < sequences:
                with torch.enable_grad():
                    self._losses(number)[0][0].backward()
            rows += sequences - self.held_out[number]

    def _add_up(self) -> None:
        """Give all processes the sums of their gradients. One that no process has stays None."""
        if self.block.ranks.group is None:
            return
        each = self.block.ranks.gathered([p.grad is not None for p in self.trained])
        reached = [p for p, *own in zip(self.trained, *each, strict=True) if any(own)]
        for p in reached:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        self.block.ranks.add_up(*(p.grad for p in reached if p.grad is not None))

    def _move(self, share: float) -> None:
        step = self.step
        for variables in self.variables:
            variables.move(step.reach * share / step.steps)
            variables.weight.target.weight.grad = None
        if self.adam is None:
            return
        for group in self.adam.param_groups:
            group["lr"] = step.vector_rate * share
        for vector, master in zip(self.vectors, self.masters, strict=True):
            master.grad = None if vector.grad is None else vector.grad.float()
            vector.grad = None
        self.adam.step()
        for vector, master in zip(self.vectors, self.masters, strict=True):
            vector.data = master.to(vector.dtype, copy=True)

    def _target(self, number: int) -> Any:
        if self.block.targets is not None:
            return self.block.targets[number]
        plain: Any = nullcontext()
        if self.step.over == "blocks":  # where targets are those that are kept elsewhere
            plain = torch.autocast(self.weights[0].target.weight.device.type, enabled=False)
        with originals(self.weights, self.block.vectors), torch.no_grad(), plain:
            return self.block.high(number)

    def _losses(self, number: int) -> list[tuple[Tensor, int]]:
        """The sum of the loss over the tokens that count, and their number: of the sequences that are learned from, and
        of those held out."""
        expected = self._target(number)
        output = self.block.run(number)
        found = _read(output)
        expected = moved(_read(expected).detach(), found.device)
        kind = self.step.loss
        if kind is None:
            is_hidden = (
                entry(output, "logits") is None and entry(output, "last_hidden_state") is not None
            )
            is_one = found.shape[-1] == 1  # channel, whose softmax is 1
            is_other = is_hidden or is_one or not has_tensor(output)
            kind = "error" if is_other or self.step.over == "blocks" else "kl"
        mask, size = self.block.masks[number], len(found)
        sequences, held_out = max(self.block.rows(number), 1), self.held_out[number]
        each, left = divmod(size, sequences)  # tokens may lie in one dimension
        cut = size * (held_out < sequences) if left else size - each * held_out
        parts = []
        for own in (slice(cut), slice(cut, None)):
            pair = found[own], expected[own]
            if mask is not None and found.shape[:2] == mask.shape:
                counted = mask[own].to(found.device)
                pair = pair[0][counted], pair[1][counted]
            rows = pair[0].numel() // max(found.shape[-1], 1)
            if kind == "kl" and rows:
                parts.append((distillation_loss(*pair, num_items=1), rows))
            else:
                parts.append(((pair[0].float() - pair[1].float()).square().sum(), rows))
        return parts

    def means(self) -> list[float]:
        """The mean losses over all batches: of the sequences that are learned from, and of those held out if there are
        any."""
        losses, counts = self.totals()
        found = [total / max(n, 1) for total, n in zip(losses, counts, strict=True)]
        return found if counts[1] else found[:1]

    def totals(self) -> list[list[float]]:
        """The sums of both losses, and how many tokens each is about."""
        own = [w.values for w in self.weights] or list(self.block.module.parameters())
        device = own[0].device
        totals = torch.zeros(2, 2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for number in range(self.block.count):
                for part, (loss, rows) in enumerate(self._losses(number)):
                    totals[0, part] += loss
                    totals[1, part] += rows
        self.block.ranks.add_up(totals)
        return totals.tolist()


def _read(output: Any) -> Tensor:
    """What a loss reads of an output, with one dimension at least."""
    found = compared_tensor(output)
    return torch.atleast_1d(output_tensor(output) if found is None else found)


def mean_loss(block: Block, over: Literal["blocks", "model"]) -> float:
    """The mean loss of a block as it is, over all its sequences. `over`: that of `LearnedRounding`."""
    losses, counts = _Learning(LearnedRounding(over=over, vector_rate=0), block, ()).totals()
    return sum(losses) / max(sum(counts), 1)


def mean_losses(block: Block, loss: Literal["error", "kl"] | None) -> tuple[float, float | None]:
    """What `LearnedRounding(over="model", loss=loss)` lowers, for a block as it is: the mean over the sequences that it
    learns from, and over those that it holds out, if there are any."""
    step = LearnedRounding(over="model", vector_rate=0, loss=loss)
    seen, *held_out = _Learning(step, block, ()).means()
    return seen, held_out[0] if held_out else None


def _held_out(sequences: Sequence[int]) -> list[int]:
    """How many of the last sequences of each batch are held out: one in `HELD_OUT`, of fewer the last one, and not a
    single one. Whole batches as far as that allows, since a batch with one sequence less makes no step of `batch_size`
    sequences."""
    total, done = sum(sequences), 0
    found = [0] * len(sequences)
    for i, end in enumerate(accumulate(sequences)):
        if end // HELD_OUT - done >= sequences[i]:
            found[i] = sequences[i]
            done += found[i]
    left = total // HELD_OUT - done
    left += total > 1 and not left and not done
    for i in reversed(range(len(found))):
        if not found[i]:
            found[i] = min(left, sequences[i])
            left -= found[i]
    return found


def _drawn(count: int) -> Iterator[int]:
    """The numbers of batches, each as often as the others, in an order that is the same in every run."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


@contextmanager
def _learning(module: nn.Module, trained: Sequence[Tensor]) -> Iterator[None]:
    """The context in which these parameters alone get gradients, by deterministic kernels."""
    parameters = {id(p): p for p in (*module.parameters(), *trained)}
    held = [(p, p.requires_grad, p.grad) for p in parameters.values()]
    own = {id(p) for p in trained}
    try:
        for p, _, _ in held:
            p.grad = None
            p.requires_grad_(id(p) in own)
        with deterministic():
            yield
    finally:
        for p, wanted, grad in held:
            p.requires_grad_(wanted)
            p.grad = grad
