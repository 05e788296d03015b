"""The loop over tokens. The device runs ahead: the host looks at what it did a few tokens later."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lowbit.interop.hf.decoding.choice import TokenChoice
from lowbit.interop.hf.decoding.step import Decoder

LOOK = 8
"""Tokens between two looks at the sequences that have ended; with a streamer, 1."""
BEHIND = 2
"""Looks that the host stays behind the device."""


def decode(
    model: Any,
    decoder: Decoder,
    prompt: Tensor,
    new_tokens: int,
    choice: TokenChoice,
    chunk: int,
    streamer: Any = None,
) -> Tensor:
    """The prompts and up to `new_tokens` after them, int64 [batch, length]: up to the last sequence's end.

    Args:
        model: a model of transformers.
        decoder: that has begun with the prompts.
        prompt: int64 [batch, length].
        new_tokens: at least 1.
        choice: how tokens are chosen.
        chunk: tokens of the prompt that the model reads at a time.
        streamer: gets the tokens of each step, int64 [batch] on the CPU.

    Raises RuntimeError where the model's logits were NaN.
    """
    length = decoder.length
    decoder.choose(choice, decoder.read_prompt(model, chunk))
    watch = _TokenWatch(decoder, choice, length, streamer)
    count, stops = 1, watch.after(1)
    step = decoder.step(model, choice) if new_tokens > 1 and not stops else None
    while step is not None and count < new_tokens and not stops:
        step()
        count += 1
        stops = watch.after(count)
    watch.finish()
    decoder.check()
    end = length + _used(decoder.ids[:, length : length + count], choice)
    return torch.cat([prompt, decoder.ids[:, length:end]], dim=1)


def _used(tokens: Tensor, choice: TokenChoice) -> int:
    """The columns of the new tokens up to the one in which the last sequence ended."""
    if not choice.ends:
        return tokens.shape[1]
    is_end = torch.isin(tokens, torch.tensor(choice.ends, device=tokens.device))
    last = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, tokens.shape[1])
    return int(last.max())


class _TokenWatch:
    """Copies what the device did to the host, and reads it `BEHIND` looks later, so that the device never waits."""

    def __init__(self, decoder: Decoder, choice: TokenChoice, length: int, streamer: Any) -> None:
        self.decoder, self.length, self.streamer = decoder, length, streamer
        self.is_needed = bool(choice.ends) or streamer is not None
        on_gpu = decoder.device.type == "cuda"
        self.every = LOOK if on_gpu and streamer is None else 1
        self.behind = BEHIND if on_gpu else 0
        self.looks: deque[tuple[Tensor, Any]] = deque()
        self.has_ended = False

    def after(self, count: int) -> bool:
        """Call it after each token. True once all sequences are known to have ended."""
        if not self.is_needed or count % self.every:
            return False
        decoder = self.decoder
        now = torch.cat([decoder.ids[:, self.length + count - 1], decoder.done.all()[None]])
        self.looks.append(_copied(now))
        while len(self.looks) > self.behind and not self.has_ended:
            self._look()
        return self.has_ended

    def _look(self) -> None:
        found, copied = self.looks.popleft()
        if copied is not None:
            copied.synchronize()
        if self.streamer is not None:
            self.streamer.put(found[:-1].clone())
        self.has_ended = bool(found[-1])

    def finish(self) -> None:
        """Give the streamer the tokens that it has not got."""
        if self.streamer is None:
            return
        while self.looks and not self.has_ended:
            self._look()
        self.streamer.end()


def _copied(t: Tensor) -> tuple[Tensor, Any]:
    """t on the CPU, and the event after which it is there."""
    if t.device.type != "cuda":
        return t.cpu(), None
    there = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    there.copy_(t, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return there, event
