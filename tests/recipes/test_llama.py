"""The recipes' model: causal masks, an exact cache, attention and rotary embedding as in the papers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from recipes.llama import KVCache, Llama, LlamaConfig, rotary_angles, rotate

CONFIG = LlamaConfig(
    vocab_size=61, dim=24, layers=2, heads=6, kv_heads=2, hidden=40, context=32, tied=True
)
VARIANTS = {
    "grouped": CONFIG,
    "one-kv-head": dataclasses.replace(CONFIG, kv_heads=1),
    "multi-head": dataclasses.replace(CONFIG, kv_heads=6),
    "untied": dataclasses.replace(CONFIG, tied=False),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def make(config: LlamaConfig, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    model = Llama(config).eval()
    for parameter in model.parameters():  # large enough that attention is far from uniform
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@variants
def test_a_position_never_sees_later_ones(config: LlamaConfig) -> None:
    model, text = make(config), tokens(2, 17)
    before = model(text)
    text[:, 9] = (text[:, 9] + 1) % 61
    after = model(text)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@variants
@pytest.mark.parametrize("parts", [(1,) * 13, (13,), (5, 1, 4, 3), (1, 12)], ids=str)
def test_with_a_cache_equals_the_whole_forward(config: LlamaConfig, parts: tuple[int, ...]) -> None:
    model, text = make(config).double(), tokens(3, 13)
    model.cos, model.sin = (t.double() for t in rotary_angles(config))
    cache = KVCache(config, 3)
    found = torch.cat([model(part, cache) for part in text.split(parts, dim=1)], dim=1)
    assert cache.length == 13
    assert relative(found, model(text)) < 1e-12


@variants
def test_attention_equals_its_formula(config: LlamaConfig) -> None:
    attention = make(config).blocks[0].attention
    x = torch.randn(2, 11, config.dim, generator=torch.Generator().manual_seed(2))
    cos, sin = (t[:11] for t in rotary_angles(config))
    width, shared = config.head_dim, config.heads // config.kv_heads

    def heads(weight: torch.Tensor, rotated: bool) -> torch.Tensor:
        out = (x.double() @ weight.double().t()).unflatten(-1, (-1, width)).transpose(1, 2)
        return rotate(out, cos, sin) if rotated else out

    query = heads(attention.query.weight, True)
    key = heads(attention.key.weight, True).repeat_interleave(shared, dim=1)
    value = heads(attention.value.weight, False).repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    expected = mixed @ attention.out.weight.double().t()
    assert relative(attention(x, cos, sin, None, 0), expected) < 1e-5


def test_rotation_keeps_norms_and_depends_on_distance_only() -> None:
    config = dataclasses.replace(CONFIG, context=64)
    cos, sin = (t.double() for t in rotary_angles(config))
    q, k = torch.randn(2, config.head_dim, dtype=torch.float64)
    rotated_q, rotated_k = (rotate(v.expand(1, 1, 64, -1), cos, sin)[0, 0] for v in (q, k))
    assert torch.allclose(rotated_q.norm(dim=-1), q.norm().expand(64))
    products = rotated_q @ rotated_k.t()
    for distance in (0, 1, 7, 31):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), atol=1e-6)
    assert torch.equal(rotated_q[0], q)


def test_rotary_angle_of_each_pair() -> None:
    cos, sin = rotary_angles(CONFIG)
    angle = torch.tensor(
        [[p * CONFIG.rope_theta ** (-2 * i / 4) for i in range(2)] for p in range(32)]
    )
    assert torch.allclose(cos, angle.cos(), atol=1e-5)
    assert torch.allclose(sin, angle.sin(), atol=1e-5)


def test_tied_head_is_the_embedding() -> None:
    tied, untied = Llama(CONFIG), Llama(VARIANTS["untied"])
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == 61 * 24


def test_generation_is_greedy_at_temperature_zero() -> None:
    model, prompt = make(CONFIG), tokens(2, 4)
    expected = prompt
    for _ in range(6):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(prompt, 6, temperature=0), expected)


def test_generation_repeats_with_its_seed_and_leaves_the_mode_alone() -> None:
    model, prompt = make(CONFIG).train(), tokens(1, 3)
    seeds = [5, 5, 6]
    found = [model.generate(prompt, 12, generator=torch.Generator().manual_seed(s)) for s in seeds]
    assert model.training
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(found[0][:, :3], prompt)


def test_top_one_is_greedy() -> None:
    model, prompt = make(CONFIG), tokens(1, 3)
    assert torch.equal(model.generate(prompt, 8, top_k=1), model.generate(prompt, 8, temperature=0))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_heads": 4}, "kv_heads=4"),
        ({"dim": 27}, "dim=27"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
    ids=str,
)
def test_invalid_sizes(change: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(CONFIG, **change)


def test_positions_past_the_context_or_the_cache() -> None:
    model = make(CONFIG)
    with pytest.raises(ValueError, match="position 33 is past the 32"):
        model(tokens(1, 33))
    with pytest.raises(ValueError, match="position 6 is past the 5"):
        model(tokens(1, 6), KVCache(CONFIG, 1, 5))
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(tokens(1, 0), 3)
