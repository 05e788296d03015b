"""Generate text with a low-bit language model: train on a sentence, convert to int4, decode.

    python examples/decode.py

A recurrent network of linear layers reads one character after another. `python -m recipes.decode` decodes a Llama.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from lowbit import Int4WeightOnly

TEXT = "the kernel loads a tile, the tensor core multiplies it, and the sum stays in registers. "
LETTERS = sorted(set(TEXT))
CODES = torch.tensor([LETTERS.index(c) for c in TEXT * 2])


class Reader(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.step = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(scores of the next character, the new state) after one character."""
        state = torch.tanh(self.step(torch.cat([self.embedding(token), state], dim=-1)))
        return self.head(state), state


def generate(model: Reader, length: int) -> str:
    token, state, out = CODES[:1], torch.zeros(1, 128), LETTERS[int(CODES[0])]
    with torch.no_grad():
        for _ in range(length - 1):
            scores, state = model(token, state)
            token = scores.argmax(dim=-1)
            out += LETTERS[int(token)]
    return out


torch.manual_seed(0)
model = Reader()
optimizer = lowbit.optim.AdamW4bit(model.parameters(), lr=2e-3)
for _ in range(120):
    scores, state = [], torch.zeros(1, 128)
    for token in CODES[:-1].split(1):
        one, state = model(token, state)
        scores.append(one)
    F.cross_entropy(torch.cat(scores), CODES[1:]).backward()
    optimizer.step()
    optimizer.zero_grad()

print(lowbit.quantize_(model, Int4WeightOnly(group_size=32)))
print(text := generate(model, len(TEXT)))
assert text == TEXT
