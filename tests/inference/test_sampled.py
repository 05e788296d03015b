"""Batches that a language model draws itself, against chains of known probabilities and draws one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import GPTQ, sampled_batches


class Chain(nn.Module):
    """The next token depends on this one alone, by a table of probabilities [V, V]."""

    def __init__(self, chances: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(chances.log())

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits[ids]


class Decoder(nn.Module):
    """The next token depends on all before it, by a linear of the mean of their embeddings."""

    def __init__(self, tokens: int = 24, dim: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, dim)
        self.up, self.head = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, tokens)
        nn.init.normal_(self.embedding.weight[:, : dim // 4], std=4.0)
        nn.init.normal_(self.head.weight, std=0.3)
        self.modes: list[bool] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.modes.append(self.training)
        x = self.embedding(ids)
        mean = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(F.gelu(self.up(x + mean)))


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder()


def test_tokens_follow_each_other_as_often_as_the_model_says() -> None:
    torch.manual_seed(0)
    chances = torch.softmax(2 * torch.randn(5, 5), 1)
    batches = sampled_batches(Chain(chances), 400, 21, batch_size=128, rounds=20)
    assert [len(b) for b in batches] == [128, 128, 128, 16]
    ids = torch.cat(batches)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    counts.index_put_((ids[:, :-1].flatten(), ids[:, 1:].flatten()), torch.ones(()).double(), True)
    rows = counts.sum(1, keepdim=True)
    spread = (chances.double() * (1 - chances.double()) / rows).sqrt()
    assert ((counts / rows - chances).abs() < 4.5 * spread + 1e-9).all()


def test_as_many_rounds_as_tokens_draw_one_after_another(decoder: Decoder) -> None:
    length = 13
    (ids,) = sampled_batches(decoder, 3, length, rounds=99)
    own = torch.Generator().manual_seed(0)
    for row, seed in zip(ids, torch.randint(2**62, (3,), generator=own).tolist(), strict=True):
        waits = torch.empty(length - 1, 24)
        waits.exponential_(generator=torch.Generator().manual_seed(seed))
        found = row[:1]
        for t in range(length - 1):
            shares = decoder(found[None])[0, -1].double().softmax(-1)
            found = torch.cat([found, (shares / waits[t]).argmax()[None]])
        assert torch.equal(row, found)


def test_rounds_settle_the_first_tokens(decoder: Decoder) -> None:
    (whole,) = sampled_batches(decoder, 4, 33, rounds=32)
    (few,) = sampled_batches(decoder, 4, 33, rounds=6)
    assert torch.equal(few[:, :7], whole[:, :7])
    assert not torch.equal(few, whole)


def test_tokens_depend_on_the_seed_and_not_on_the_batch(decoder: Decoder) -> None:
    decoder.train()
    ids = torch.cat(sampled_batches(decoder, 7, 9, batch_size=3))
    assert ids.dtype is torch.int64 and ids.shape == (7, 9)
    assert len(ids.unique(dim=0)) == 7
    assert torch.equal(ids, torch.cat(sampled_batches(decoder, 7, 9, batch_size=7)))
    assert not torch.equal(ids, torch.cat(sampled_batches(decoder, 7, 9, seed=1)))
    assert decoder.training and not any(decoder.modes)


def test_sequences_begin_with_a_token_that_is_given(decoder: Decoder) -> None:
    (ids,) = sampled_batches(decoder, 5, 4, first=11)
    assert ids[:, 0].tolist() == [11] * 5
    config: Any = type("Config", (), {"bos_token_id": 7})()
    decoder.config = config
    assert sampled_batches(decoder, 2, 4)[0][:, 0].tolist() == [7, 7]
    config.bos_token_id = 24  # a tokenizer's, which the model does not know
    assert len(sampled_batches(decoder, 8, 4)[0][:, 0].unique()) > 1


def test_calibration_on_them_loses_less_than_without_data(decoder: Decoder) -> None:
    held_out = sampled_batches(decoder, 64, 32, batch_size=64, seed=5)
    losses = []
    for batches in (None, sampled_batches(decoder, 32, 32)):
        low = Decoder()
        low.load_state_dict(decoder.state_dict())
        lb.calibrate(low, lb.IntxWeightOnly(2, 16), batches, steps=[GPTQ(asymmetric=0)])
        losses.append(lb.evaluate({"low": low}, decoder, held_out).models[0].kl)
    assert losses[1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"sequences": 0}, "sequences"),
        ({"length": 1}, "length"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"rounds": 0}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"first": 24}, "first must be a whole number from 0 to 23, got 24"),
    ],
)
def test_other_numbers_are_refused(decoder: Decoder, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sampled_batches(decoder, **{"sequences": 2, "length": 4} | options)


class Encoder(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.up(self.embedding(ids).mean(1, keepdim=True)))).expand(
            -1, 2, -1
        )


class Classifier(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[:, -1]


def test_models_that_do_not_predict_the_next_token_are_refused(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match=r"Encoder depend on later tokens.*batches of their own"):
        sampled_batches(Encoder())
    with pytest.raises(ValueError, match=r"Classifier gives torch.float32 of shape \(2, 24\)"):
        sampled_batches(Classifier())
    decoder.head.bias.data[3] = torch.nan
    with pytest.raises(
        ValueError, match=r"NaN or infinite values, of which there are some in head\.bias; load"
    ):
        sampled_batches(decoder)
    with pytest.raises(TypeError, match="module"):
        sampled_batches("model")  # type: ignore[arg-type]


class Seq2Seq(Decoder):
    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        raise RuntimeError("give targets")


class Headless(Decoder):
    def forward(self, ids: Tensor) -> Any:
        return {"last_hidden_state": self.embedding(ids)}


class Glance(Decoder):
    """Logits that depend on the last token by less than a hundredth, as at the start of training."""

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        return y + 0.004 * y.abs().max() * ids[:, -1:, None].clamp(max=1)


def test_models_without_logits_for_ids_are_refused_by_the_reason() -> None:
    with pytest.raises(ValueError, match=r"Seq2Seq gives no logits for ids alone \(give targets\)"):
        sampled_batches(Seq2Seq())
    with pytest.raises(ValueError, match=r"Headless gives hidden states.*no output head"):
        sampled_batches(Headless())


def test_a_small_share_of_later_tokens_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="Glance depend on later tokens"):
        sampled_batches(Glance())


def test_more_tokens_than_positions_are_refused(decoder: Decoder) -> None:
    config: Any = type("Config", (), {"max_position_embeddings": 64})()
    decoder.config = config
    assert sampled_batches(decoder, 2, 64)[0].shape == (2, 64)
    with pytest.raises(ValueError, match="length is 512; Decoder takes 2 to 64 tokens"):
        sampled_batches(decoder, 2)
