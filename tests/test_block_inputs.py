"""capture: the arguments of a model's blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowbit.tracing.block_inputs import NotAChain, capture


class Block(nn.Module):
    """A block that gets its number, writes into its input, and returns a tuple."""

    def forward(self, hidden_states: Tensor, number: int, mask: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states.add_(number) * mask, mask


class Stack(nn.Module):
    def __init__(self, between: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.between = between

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x, _ = block(hidden_states=x, number=number, mask=mask)
            if self.between:
                x = x + self.between
        return x.sum()


BATCH = torch.ones(2, 5, 32), torch.ones(5, 1)


def test_arguments_of_each_block() -> None:
    """By name, in tuples, and a mask that all blocks share is stored once."""
    model = Stack()
    (found,) = capture(model, list(model.blocks), [BATCH], None)
    assert [a.kwargs["number"] for a in found.arguments] == [0, 1, 2]
    assert len({id(a.kwargs["mask"]) for a in found.arguments}) == 1


def test_what_is_no_chain() -> None:
    """The model runs as before afterwards."""
    model = Stack()
    with pytest.raises(NotAChain, match="order in which the model calls them"):
        list(capture(model, list(model.blocks)[::-1], [BATCH], None))
    model.between = 1.0
    with pytest.raises(NotAChain, match="changes the hidden state between blocks 0 and 1"):
        list(capture(model, list(model.blocks), [BATCH], None))
    assert not any("forward" in vars(block) for block in model.blocks)
