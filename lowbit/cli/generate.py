"""`lowbit generate`: text from a folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

from lowbit.cli.language_model import check, load, tokenizer_of
from lowbit.cli.output import print_json
from lowbit.progress import progress


def generate(
    model: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    json: bool,
) -> None:
    """The command `generate`. Args: those of `lowbit.cli.app.generate`."""
    check(model)
    tokenizer = tokenizer_of(model)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise ValueError("--prompt has no tokens; give at least one word")
    loaded: Any = load(model, device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    if tokenizer.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id
    given = torch.as_tensor(ids, device=device)
    start = time.monotonic()
    with torch.no_grad(), progress("generating", max_new_tokens, unit="tokens") as advance:
        if (loaded.generation_config.num_beams or 1) == 1:  # a search over beams takes no streamer
            options["streamer"] = _Counter(advance)
        made = loaded.generate(given, attention_mask=torch.ones_like(given), **options)
    seconds = time.monotonic() - start
    text = continuation(tokenizer, made[0], given.shape[1])
    count = made.shape[1] - given.shape[1]
    if json:
        print_json({"prompt": prompt, "text": text, "tokens": count, "seconds": seconds})
        return
    typer.echo(f"{prompt}{text}")
    typer.echo(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", err=True)


class _Counter:
    """A streamer for transformers: it gets the prompt first, then each new token."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance, self._had_prompt = advance, False

    def put(self, tokens: torch.Tensor) -> None:
        if self._had_prompt:
            self._advance(tokens.numel())
        self._had_prompt = True

    def end(self) -> None:
        pass


def continuation(tokenizer: Any, tokens: torch.Tensor, start: int) -> str:
    """The text of tokens [T] from `start` on, as it continues the text before.

    Tokenizers of SentencePiece strip the space before the first token, so all tokens are decoded too.
    """
    head, whole, tail = (
        str(tokenizer.decode(ids, skip_special_tokens=True))
        for ids in (tokens[:start], tokens, tokens[start:])
    )
    return whole[len(head) :] if whole.startswith(head) else tail
