"""The choice of the next tokens from the logits, on the device: nothing here waits for it or reads it.

    scores = processors(logits in float32)                  transformers' own objects, in their order
    token  = argmax(scores), or argmax(scores − log E)      E exponential: softmax(scores) is the distribution of this
                                                            argmax ("Gumbel-max")
    token  = pad for sequences that have ended

E = −log1p(−(bits + ½) / 2³²), with 32 bits that are a function of (seed, column of the token, sequence, token). So a
seed gives the same tokens on every device up to rounding of the logits, inside CUDA graphs and outside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from lowbit.interop.hf.decoding.refused import refused
from lowbit_kernels.decoding.argmax_rows import argmax_rows
from lowbit_kernels.elementwise.random_bits import keys, random_bits

PROCESSORS: dict[str, str] = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "LogitNormalization": "renormalize_logits",
}
"""The processors that are functions of the scores of a row and of the tokens in it, in any order and number."""


@dataclass(frozen=True)
class TokenChoice:
    """How a call chooses tokens. ``ends``: the tokens that end a sequence, which then goes on with ``pad``."""

    processors: tuple[Any, ...]
    samples: bool
    ends: tuple[int, ...]
    pad: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for choices that compute the same."""
        each = [(type(p).__name__, *sorted(_simple(p).items())) for p in self.processors]
        return (*each, self.samples, self.ends, self.pad)

    @property
    def replaces_nan(self) -> bool:
        """True if a processor gives NaNs a number."""
        return any(type(p).__name__ == "InfNanRemoveLogitsProcessor" for p in self.processors)

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The processed logits [B, V], float32; `ids` [B, any]: the tokens so far, some of them several times."""
        found = logits.float()
        for processor in self.processors:
            found = processor(ids, found)
        return found

    def tokens(
        self, ids: Tensor, logits: Tensor, seed: Tensor, position: Tensor, shift: Tensor
    ) -> Tensor:
        """The next tokens, int64 [B], of sequences that have not ended.

        Args:
            ids: as in `scores`.
            logits: [B, V].
            seed: int64 [1].
            position: int64 [1]: the slot before the tokens.
            shift: int64 [1]: slots before the caller's first column, so that a draw is the same without padding.
        """
        scores = self.scores(ids, logits) if self.processors else logits
        if self.samples:
            column = position + 1 - shift
            scores = scores.float() - _exponential(scores.shape, seed, column).log()
        return argmax_rows(scores)


def checked_processors(processors: Iterable[Any], start: list[int]) -> tuple[Any, ...]:
    """The processors, if all are among `PROCESSORS`; ValueError otherwise.

    Where the repetition penalty leaves out padding, which it is told by the first column of each sequence, the one
    returned does not: a decoder then keeps padding out of its tokens. See `hides_padding`.
    """
    found = []
    for one in processors:
        name = type(one).__name__
        if name not in PROCESSORS or type(one) is not getattr(logits_process, name, None):
            taken = ", ".join(PROCESSORS.values())
            raise refused(f"the logits processor {name}", f"it takes {taken}")
        left_out = getattr(one, "prompt_ignore_length", None)
        if left_out is not None:
            if not isinstance(left_out, Tensor) or left_out.tolist() != start:
                raise refused(f"prompt_ignore_length={left_out}", "only padding is left out")
            one = copy.copy(one)
            one.prompt_ignore_length = None
        found.append(one)
    return tuple(found)


def hides_padding(processors: Iterable[Any]) -> bool:
    """True if a processor leaves out padding."""
    return any(getattr(one, "prompt_ignore_length", None) is not None for one in processors)


def _simple(processor: Any) -> dict[str, Any]:
    """The attributes of a processor, tensors as numbers."""
    return {
        k: tuple(v.flatten().tolist()) if isinstance(v, Tensor) else v
        for k, v in vars(processor).items()
    }


def _exponential(shape: torch.Size, seed: Tensor, column: Tensor) -> Tensor:
    """Independent draws of the exponential distribution, float32 [B, V]."""
    rows, width = shape
    index = torch.arange(rows * width, device=seed.device).view(rows, width)
    bits = random_bits(index + column * (rows * width), *keys(seed)).long() & 0xFFFFFFFF
    return -torch.log1p(-((bits.float() + 0.5) * 2.0**-32))
