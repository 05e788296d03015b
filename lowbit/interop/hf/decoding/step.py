"""One new token of each sequence: the model's forward over the cache and the choice, in one CUDA graph.

The forward of transformers' model is traced once by ``make_fx``: its operations on the device as one list, without its
Python. `folding` replaces chains of them by kernels. The list runs while the graph is captured, with the choice after
it, and never again. On a CPU nothing is traced: each step calls the model.

A short prompt takes the host longer than the GPU, so its forward is captured too. There are graphs for a few lengths; a
prompt between two gets more padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lowbit.interop.hf.decoding.cache import CACHE, SlotCache, SlotLayer, Slots
from lowbit.interop.hf.decoding.choice import TokenChoice
from lowbit.interop.hf.decoding.folding import fold
from lowbit.interop.hf.decoding.refused import refused
from lowbit.interop.hf.decoding.tables import tabulate

MOST_CHOICES = 4
"""Captured graphs of a token that a decoder keeps, one a way of choosing."""
SHORT = (16, 32, 64, 128, 192, 256)
"""Lengths of prompts that have graphs."""
MOST_ROWS = 1024
"""The most tokens of all sequences in such a graph."""
MOST_APART = 2**-4
"""The most by which the logits of a trace and those of the model may differ, relative. They are equal, unless a sum has
no order, which may send a token to another expert. A layer that a trace does not see makes them differ by a half."""
DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of operations whose results the host needs."""


class Decoder:
    """The buffers, the cache and the graphs for `batch` sequences of a model, with room for `capacity` tokens each.

    ``ids`` int64 [batch, capacity + 1]: the tokens. Columns that are not in use repeat the first token of the sequence,
    so that the row has the tokens of the sequence and no others. ``position`` int64 [1]: the slot of the token that the
    model reads next. ``start`` int64 [batch]: the first slot of each sequence.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        capacity: int,
        device: torch.device,
        layer: Callable[[Slots], SlotLayer] = SlotLayer,
    ) -> None:
        self.batch, self.capacity, self.device = batch, capacity, device
        self.cache = SlotCache(model, capacity, layer)
        integers: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.ids = torch.zeros((batch, capacity + 1), **integers)
        self.token = torch.zeros((batch, 1), **integers)
        self.places = torch.zeros(1 + batch, **integers)  # together, for one launch that adds 1
        self.position, self.position_ids = self.places[:1], self.places[1:, None]
        self.seed, self.shift = (torch.zeros(1, **integers) for _ in range(2))
        self.start = torch.zeros(batch, **integers)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.largest = torch.zeros((batch, 1), dtype=torch.float32, device=device)
        """The largest logit of the chosen tokens of each sequence: NaN once logits were NaN."""
        self.folded: dict[str, int] = {}
        self._forward: Callable[..., Tensor] | None = None
        self._steps: dict[Any, torch.cuda.CUDAGraph] = {}
        self._prompts: dict[int, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}

    # ---- the prompt ------------------------------------------------------------------------------------------------

    def begin(
        self, ids: Tensor, start: list[int], seed: int = 0, hides_padding: bool = False
    ) -> None:
        """Start with prompts.

        Args:
            ids: int64 [batch, any].
            start: the first column of each sequence.
            seed: of the draws.
            hides_padding: have the first token of a sequence in place of its padding.
        """
        shift = padded_length(self.device, *ids.shape) - ids.shape[1]
        self.length = ids.shape[1] + shift
        self.start.copy_(torch.tensor(start) + shift)
        first = ids.gather(1, (self.start - shift)[:, None])
        self.ids.copy_(first.expand_as(self.ids))
        if hides_padding:
            columns = torch.arange(ids.shape[1], device=self.device)
            ids = torch.where(columns < self.start[:, None] - shift, first, ids)
        self.ids[:, shift : self.length] = ids
        self.seed.fill_(seed)
        self.shift.fill_(shift)
        self.done.zero_()
        self.largest.zero_()
        self.cache.slots.start = self.start if any(start) or shift else None

    def read_prompt(self, model: Any, chunk: int) -> Tensor:
        """The logits [batch, V] after the prompts, which the model reads `chunk` columns at a time."""
        length, slots = self.length, self.cache.slots
        if length <= chunk and _is_short(self.device, self.batch, length):
            logits = self._of_short(model)
        else:
            for begin in range(0, length, chunk):
                columns = self.ids[:, begin : min(begin + chunk, length)]
                logits = _part_of_prompt(model, self.cache, begin)(columns, slots.start)
        self.cache.is_checked = True
        self.position.fill_(length - 1)
        self.position_ids.copy_((length - 1 - self.start)[:, None])
        return logits

    def _of_short(self, model: Any) -> Tensor:
        """The logits after a prompt that the model reads at once: by a graph, where the forward is one."""
        inputs = (self.ids[:, : self.length], self.start)
        forward = _part_of_prompt(model, self.cache, 0)
        if self.length not in self._prompts:
            try:
                traced = _traced(model, forward, inputs)[0]
                self._prompts[self.length] = self._captured(lambda: traced(*inputs))
            except ValueError:
                self._prompts[self.length] = None
        known = self._prompts[self.length]
        if known is None:
            return forward(*inputs)
        graph, logits = known
        graph.replay()
        return logits

    # ---- a token ---------------------------------------------------------------------------------------------------

    def choose(self, choice: TokenChoice, logits: Tensor) -> None:
        """Write the tokens after `position`, and go on to them. All on the device."""
        tokens = choice.tokens(self.ids, logits, self.seed, self.position, self.shift)
        if choice.ends:
            tokens = torch.where(self.done, choice.pad, tokens)
            for end in choice.ends:
                self.done.logical_or_(tokens == end)
        self.places.add_(1)
        self.token.copy_(tokens[:, None])
        self.ids.index_copy_(1, self.position, self.token)
        if not choice.replaces_nan:
            torch.maximum(self.largest, logits.gather(1, self.token).float(), out=self.largest)

    def check(self) -> None:
        """Raise RuntimeError if the logits of a sequence were NaN since `begin`. It waits for the device."""
        bad = self.largest.isnan().flatten().nonzero().flatten().tolist()
        if bad:
            raise RuntimeError(
                f"the model's logits are NaN, so no token is the next one, in sequence {', '.join(map(str, bad))} of "
                f"{self.batch} (from 0); look for NaN or infinity in weights and inputs, or for 16-bit overflow, or "
                "take what remains with remove_invalid_values=True"
            )

    def step(self, model: Any, choice: TokenChoice) -> Callable[[], None]:
        """What reads the last tokens and chooses the next ones: the replay of a graph, or on a CPU a function."""
        if self.device.type != "cuda":
            return lambda: self._one(_token(model, self.cache), choice)
        graph = self._steps.pop(choice.key, None)
        if graph is None:
            forward = self._forward = self._forward or self.traced(model)
            graph, _ = self._captured(lambda: self._one(forward, choice))
        self._steps[choice.key] = graph  # the latest one last
        while len(self._steps) > MOST_CHOICES:
            del self._steps[next(iter(self._steps))]
        return graph.replay

    def _one(self, forward: Callable[..., Tensor], choice: TokenChoice) -> None:
        self.choose(choice, forward(self.token, self.position_ids, self.position, self.start))

    def traced(self, model: Any) -> Callable[..., Tensor]:
        """The operations of the model for one token, folded."""
        inputs = (self.token, self.position_ids, self.position, self.start)
        with _fast_experts(model):
            module, self.folded = _traced(model, _token(model, self.cache), inputs)
        self.folded["tables"] = tabulate(module, self.position_ids, self.capacity)
        return module

    def _captured(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of `run`, and what it returned. The buffers stay as they are, and so do the slots that are in
        use."""
        held = (self.ids, self.token, self.places, self.done)
        before = [t.clone() for t in held]
        here = torch.cuda.current_stream(self.device)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            run()  # compiles kernels
            with _no_waiting():
                run()
        here.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for t, value in zip(held, before, strict=True):
            t.copy_(value)
        return graph, found

    def nbytes(self) -> int:
        """Bytes of the cache and the tokens; the graphs' own memory comes on top."""
        return self.cache.nbytes() + self.ids.nbytes


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise ValueError where the host waits for the device: after a capture that fails at such a place, torch's CUDA
    generators are of no use."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise refused(
            "this model or choice", f"the host waits for the device in it ({error})"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def padded_length(device: torch.device, batch: int, length: int) -> int:
    """The columns that prompts of a length take: those of a graph, where one may serve them."""
    padded = next((n for n in SHORT if n >= length), length)
    return padded if _is_short(device, batch, padded) else length


def _is_short(device: torch.device, batch: int, length: int) -> bool:
    """True for prompts of a length that a graph reads."""
    return device.type == "cuda" and length in SHORT and batch * length <= MOST_ROWS


def _token(model: Any, cache: SlotCache) -> Callable[..., Tensor]:
    """The forward of one token as a function of tensors."""

    def forward(token: Tensor, position_ids: Tensor, position: Tensor, start: Tensor) -> Tensor:
        slots = cache.slots
        slots.position, slots.start = position, start
        with cache.reading():
            return _logits(model, token, position_ids, cache)

    return forward


def _part_of_prompt(model: Any, cache: SlotCache, begin: int) -> Callable[..., Tensor]:
    """The forward of the columns from `begin` on as a function of tensors: the tokens, and `start` or None."""

    def forward(ids: Tensor, start: Tensor | None) -> Tensor:
        slots = cache.slots
        slots.position, slots.start, slots.filled = None, start, begin
        columns = torch.arange(begin, begin + ids.shape[1], device=ids.device).expand(ids.shape)
        if start is not None:
            columns = (columns - start[:, None]).clamp(min=0)
        with cache.reading():
            return _logits(model, ids, columns, cache)

    return forward


def _traced(
    model: Any, forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> tuple[fx.GraphModule, dict[str, int]]:
    """The operations of a forward, folded, and how many chains of each kind were."""
    try:
        module = make_fx(forward)(*inputs)
    except Exception as error:
        raise refused(
            f"this {type(model).__name__}", f"its forward is not a graph ({error})"
        ) from error
    for node in module.graph.nodes:
        if _waits(node):
            raise refused(f"this {type(model).__name__}", f"{node.target} waits for the device")
    if not _computes(module, forward, inputs):
        raise refused(f"this {type(model).__name__}", "it runs kernels that are not ops of torch")
    return module, fold(module)


def _computes(
    module: Callable[..., Tensor], forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> bool:
    """True if the operations compute the forward. They get other tokens than the trace did: what a trace does not see
    would still be in memory."""
    ids, *others = inputs
    ids = torch.where(ids > 0, ids - 1, ids + 1)
    both = (module(ids, *others), forward(ids, *others))
    found, expected = (t.float().nan_to_num() for t in both)
    return bool((found - expected).norm() <= MOST_APART * expected.norm())


def _waits(node: Any) -> bool:
    """True for an operation whose result has a shape that the device computes, or that the host needs."""
    if node.target is torch.ops.aten.index.Tensor:  # only by masks
        indices = [n.meta.get("val") for n in node.args[1] if isinstance(n, fx.Node)]
        return any(t is None or t.dtype in (torch.bool, torch.uint8) for t in indices)
    return bool(set(getattr(node.target, "tags", ())) & DEPENDENT)


def _logits(model: Any, ids: Tensor, position_ids: Tensor, cache: SlotCache) -> Tensor:
    """The logits after the last of these tokens: [batch, V]."""
    only_last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    out = model(
        input_ids=ids,
        position_ids=position_ids,
        use_cache=True,
        return_dict=True,
        **{CACHE: cache},
        **only_last,
    )
    logits: Tensor = out.logits[:, -1]
    return logits


def _fast_experts(model: nn.Module) -> Any:
    """transformers' own choice of how experts multiply one token, where it makes one."""
    made = getattr(model, "_optimize_model_for_decode", None)
    return contextlib.nullcontext() if made is None else made()
