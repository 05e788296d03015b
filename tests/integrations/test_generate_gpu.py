"""`lowbit.hf.generate` on a GPU: graphs, options and the tokens of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit as lb

transformers = pytest.importorskip("transformers")

from lowbit import hf  # noqa: E402
from lowbit.interop.hf.decoding import called, held, loop, options, step  # noqa: E402
from lowbit.interop.hf.decoding.choice import TokenChoice  # noqa: E402
from lowbit.interop.hf.decoding.step import Decoder  # noqa: E402
from lowbit_kernels.runtime import launches  # noqa: E402
from tests.integrations.test_generate import (  # noqa: E402
    MIXTURES,
    WARPED,
    Heard,
    fresh,
    over_families,
    prompts,
)

BOUND = 2**-5
"""Where bfloat16 tokens differ from transformers', their logits differ by this share of the largest one at most."""


def check_parting(model: Any, inputs: dict[str, Tensor], found: Tensor, expected: Tensor) -> None:
    """Where the tokens part first, transformers' logits of both tokens are nearly equal."""
    length = min(found.shape[1], expected.shape[1])
    for row in range(found.shape[0]):
        apart = (found[row, :length] != expected[row, :length]).nonzero()
        if not len(apart):
            continue
        at = int(apart[0])
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, at), value=1)[
            row : row + 1, :at
        ]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        own = model(expected[row : row + 1, :at], attention_mask=mask, position_ids=positions)
        logits = own.logits[0, -1].float()
        gap = (logits[expected[row, at]] - logits[found[row, at]]).abs()
        assert gap <= BOUND * logits.abs().max(), f"row {row}, column {at}: {gap}"


@pytest.mark.gpu
def test_a_graph_runs_without_python_and_is_captured_once() -> None:
    """200 tokens and prompts of two lengths: one graph of a token; its ops are not called again."""
    torch._dynamo.utils.counters.clear()
    model = fresh().cuda().bfloat16()
    lb.quantize_(model, {"lm_head": None, "*": lb.Int4WeightOnly(32)})
    settings = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None}
    outs = []
    for length in (300, 11, 300, 11):
        inputs = {k: t.cuda() for k, t in prompts(2, length).items()}
        with launches.counted() as calls:
            outs.append(hf.generate(model, **inputs, **settings))
    assert calls == {("argmax_rows", "triton"): 1}, "after a captured prompt only the choice runs"
    (decoder,) = held._held[model][1].values()
    assert len(decoder._steps) == 1 and list(decoder._prompts) == [16]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert not torch._dynamo.utils.counters["frames"]
    with launches.counted() as calls, torch.no_grad():
        decoder._one(decoder._forward, TokenChoice((), False, (), 0))
    layers = 2
    assert calls["decode_attention", "triton"] == layers
    assert calls["gated_linear", "decode"] == layers
    assert calls["rms_norm", "triton"] == 2 * layers + 1
    assert calls["argmax_rows", "triton"] == 1
    assert sum(n for (op, _), n in calls.items() if op == "weight_linear") == 3 * layers


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.cover("values")
@pytest.mark.parametrize("batch", [3, 1])
@pytest.mark.parametrize("kind", ["float32", "int4", "bfloat16"])
@over_families
def test_graphs_generate_what_transformers_does(family: str, kind: str, batch: int) -> None:
    """float32: the same tokens. bfloat16 and int4: the same, or the two logits are within the bound."""
    model = fresh(family).cuda()
    model = model if kind == "float32" else model.bfloat16()
    if kind == "int4":
        lb.quantize_(model, {"lm_head": None, "*": lb.Int4WeightOnly(32)})
    inputs = {k: t.cuda() for k, t in prompts(batch).items()}
    settings = {**inputs, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**settings)
    found = hf.generate(model, **settings)
    if kind == "float32":
        assert torch.equal(found, expected)
    check_parting(model, inputs, found, expected)
    assert torch.equal(hf.generate(model, **settings), found)
    decoder = held._held[model][1][batch]
    assert len(decoder._steps) == 1
    if family not in MIXTURES:  # the host may wait where experts multiply several tokens
        assert decoder._prompts[16] is not None


def test_padding_of_our_own_changes_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU pads short prompts to lengths that have graphs. The draws are those of the caller's columns."""
    inputs = prompts(3)
    settings = {**inputs, "max_new_tokens": 12, "do_sample": True, "eos_token_id": None}
    seed = functools.partial(torch.Generator().manual_seed, 5)
    expected = hf.generate(fresh(), **settings, generator=seed())
    for module in (step, called):
        monkeypatch.setattr(module, "padded_length", lambda device, batch, length: length + 5)
    assert torch.equal(hf.generate(fresh(), **settings, generator=seed()), expected)


@pytest.mark.gpu
def test_options_on_a_gpu() -> None:
    model = fresh().cuda()
    inputs = {k: t.cuda() for k, t in prompts(3).items()}
    settings: dict[str, Any] = {**inputs, "max_new_tokens": 40, "do_sample": False}
    plain = model.generate(**settings, eos_token_id=None)[:, 11:]
    ends = [int(plain[0, 3]), int(plain[1, 9]), int(plain[2, 14])]
    own = {**settings, "eos_token_id": ends, "pad_token_id": 77, "repetition_penalty": 1.3}
    assert torch.equal(hf.generate(model, **own), model.generate(**own))
    heard = [Heard(), Heard()]
    alone = {**settings, **{k: t[:1] for k, t in inputs.items()}, "eos_token_id": ends}
    model.generate(**alone, streamer=heard[0])
    model.generate(**alone, streamer=heard[1], custom_generate=hf.generate)
    assert heard[0].tokens == heard[1].tokens and heard[1].ended
    drawn = [sampled(model, inputs, warped) for warped in (*WARPED, *WARPED[-1:])]
    assert torch.equal(drawn[-1], drawn[-2])
    model.cpu()
    for one, warped in zip(drawn, WARPED, strict=False):
        other = sampled(model, {k: t.cpu() for k, t in inputs.items()}, warped)
        assert torch.equal(one[:, :12].cpu(), other[:, :12])
        assert (one.cpu() == other).float().mean() > 0.6, "float32 logits round differently"
    assert loop.LOOK > 1 and options.CHUNK >= 256


@pytest.mark.gpu
def test_where_the_host_waits_nothing_is_captured() -> None:
    """torch's generators go on."""
    model = fresh().cuda()
    act = model.model.layers[1].mlp.act_fn

    class Waits(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return act(x) if bool(torch.isfinite(x).all()) else x

    model.model.layers[1].mlp.act_fn = Waits()
    inputs = {k: t.cuda() for k, t in prompts(1).items()}
    settings = {**inputs, "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=r"the host waits|its forward is not a graph"):
        hf.generate(model, **settings)
    decoder = Decoder(model, 1, 256, torch.device("cuda"))
    with pytest.raises(ValueError, match="the host waits for the device in it"):
        decoder._captured(lambda: decoder.ids.sum().item())
    torch.randn(3, device="cuda")


def sampled(model: Any, inputs: dict[str, Tensor], warped: dict[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    own = {**inputs, **warped, "max_new_tokens": 20, "do_sample": True, "eos_token_id": None}
    return hf.generate(model, **own, generator=generator)
