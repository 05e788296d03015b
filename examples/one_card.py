"""Train all weights of a model in a fraction of the memory: int8 weights, 4-bit states, one gradient at a time.

    python examples/one_card.py

There is no high-precision copy of a weight. `python -m recipes.one_card` trains 8B parameters on a card of 24 GB.
"""

import torch
from torch import nn

import lowbit
from lowbit import Int8Weight

torch.manual_seed(0)
WORDS, WIDTH = 500, 256
model = nn.Sequential(
    nn.Embedding(WORDS, WIDTH),
    nn.Linear(WIDTH, 4 * WIDTH),
    nn.GELU(),
    nn.Linear(4 * WIDTH, WIDTH),
    nn.Linear(WIDTH, WORDS),
)
lowbit.train.prepare_(model, {name: Int8Weight() for name in ("0", "1", "3", "4")})
weights = [w for w in model.parameters() if isinstance(w, lowbit.LowbitTensor)]
stored = sum(part.nbytes for weight in weights for part in weight.inner_tensors().values())
count = sum(weight.numel() for weight in weights)

optimizer = lowbit.optim.AdamW4bit(model.parameters(), lr=2e-3, bf16_stochastic_round=True)
lowbit.optim.step_in_backward(optimizer)  # each gradient is stepped and freed inside of backward()
tokens = torch.randint(WORDS, (256,))
losses = []
for _ in range(40):
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(-1))
    loss.backward()
    losses.append(loss.item())

print(
    f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; {stored / count:.2f} bytes a weight, 4 in float32"
)
assert losses[-1] < losses[0] / 2
assert all(parameter.grad is None for parameter in model.parameters())
