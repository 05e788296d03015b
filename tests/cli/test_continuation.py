"""The text that `lowbit generate` adds to a prompt: a space only where the model made one."""

from __future__ import annotations

import pytest
import torch

from lowbit.cli.generate import continuation

WORDS = ["un", "likely", "\u2581the", "\u2581end", "\u00e9"]


class Stripping:
    """As SentencePiece: a token may begin with a space, and the first one that is decoded loses it."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(WORDS[i] for i in ids.tolist()).replace("\u2581", " ").removeprefix(" ")


class Joining(Stripping):
    """Decodes a token otherwise where another one follows, so that the head is not a beginning of the whole."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return f"{len(ids)}:" + super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    ("tokens", "text"), [([0, 1], "likely"), ([2, 3], " end"), ([2, 3, 1], " endlikely"), ([3], "")]
)
def test_the_space_before_a_word_is_that_of_the_model(tokens: list[int], text: str) -> None:
    assert continuation(Stripping(), torch.tensor(tokens), 1) == text


def test_a_tokenizer_that_decodes_the_prompt_otherwise() -> None:
    assert continuation(Joining(), torch.tensor([2, 3]), 1) == "1:end"
