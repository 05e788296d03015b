"""The decode recipe: the same tokens as the plain model's, one compilation for all blocks, attention, the page."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from recipes.decode import next_position
from recipes.decode.__main__ import main
from recipes.decode.capture import captured
from recipes.decode.config import PRESETS, Row, llama_8b, rows, tiny
from recipes.decode.decoder import Decoder
from recipes.decode.fold_norms import fold_norms_
from recipes.decode.measure import build, convert_, stored_bytes, trace
from recipes.decode.tinygemm import TinygemmLinear
from recipes.llama import Llama
from tests.inference.weight_ops import counted
from tests.schemes import relative_error

CONFIG = tiny()
ROWS = rows(CONFIG)
CPU = torch.device("cpu")
LOW_BIT = [row for row in ROWS.values() if row.scheme is not None]
over_rows = pytest.mark.parametrize("row", LOW_BIT, ids=[row.name for row in LOW_BIT])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plain() -> Llama:
    """Weights large enough that attention is far from uniform and tokens differ."""
    model = build(CONFIG, CPU)
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(256, (batch, length), generator=generator)


def folded(model: Llama) -> Llama:
    model = copy.deepcopy(model)
    fold_norms_(model)
    return model


def converted(model: Llama, row: Row) -> tuple[Llama, Llama]:
    """Quantized, with separate linears and with fused ones."""
    separate, fused = folded(model), copy.deepcopy(model)
    lb.quantize_(separate, row.scheme)
    convert_(fused, row, CONFIG.group_size)
    return separate, fused


@torch.no_grad()
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_tokens_of_the_plain_model(plain: Llama, backend: str | None) -> None:
    found = Decoder(folded(plain), 2, 20, backend).generate(prompt(), 9)
    assert torch.equal(found, plain.generate(prompt(), 9, temperature=0))
    assert len(set(found[0].tolist())) > 5


@torch.no_grad()
def test_folded_norms_have_no_weights_and_change_nothing_else(plain: Llama) -> None:
    model = folded(plain)
    names = {name for name, _ in plain.named_parameters()} - dict(model.named_parameters()).keys()
    blocks = range(CONFIG.model.layers)
    assert names == {f"blocks.{i}.{n}_norm.weight" for i in blocks for n in ("attention", "mlp")}
    expected, tokens = plain(prompt()), model(prompt())
    assert relative_error(tokens, expected) < 1e-5
    fold_norms_(model)
    assert torch.equal(model(prompt()), tokens)
    with pytest.raises(ValueError, match="norms have weights; fold_norms_"):
        Decoder(plain, 2, 20)


@torch.no_grad()
@over_rows
def test_low_bit_rows_decode_what_their_model_does(plain: Llama, row: Row) -> None:
    separate, fused = converted(plain, row)
    expected = separate.generate(prompt(), 9, temperature=0)
    assert torch.equal(Decoder(fused, 2, 20).generate(prompt(), 9), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_blocks_are_compiled_once_and_whole(plain: Llama, name: str) -> None:
    model = copy.deepcopy(plain)
    convert_(model, ROWS[name], CONFIG.group_size)
    torch._dynamo.utils.counters.clear()
    Decoder(model, 2, 20, "aot_eager").generate(prompt(), 4)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 6, "embedding, block and head, for the prompt and for one token"


def test_a_step_calls_four_kernels_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the residual in those that end in it."""
    ops = counted(monkeypatch)
    config = dataclasses.replace(CONFIG, dtype=torch.bfloat16)
    model = build(config, CPU)
    convert_(model, ROWS["int4-int8-head"], 32)
    decoder = Decoder(model, 3, 20)
    with torch.no_grad():
        decoder.step()
    block = [
        ("int4_linear", 3, 128, 64, 32, ""),
        ("int4_linear", 3, 64, 64, 32, "residual"),
        ("int4_linear", 3, 320, 64, 32, ""),
        ("int4_linear", 3, 64, 160, 32, "residual"),
    ]
    assert ops.calls == [*block * 3, ("int8_linear", 3, 256, 64, 64, "")]
    assert decoder.position.item() == 1


@torch.no_grad()
def test_captured_steps_go_on_from_each_other(plain: Llama) -> None:
    decoder = Decoder(folded(plain), 2, 20)
    expected = decoder.generate(prompt(), 6)
    decoder.prefill(prompt())
    step = captured(decoder.step, CPU)  # which runs it three times
    step()
    assert torch.equal(decoder.token_B1, expected[:, -2:-1])
    assert decoder.position.item() == 11


@pytest.mark.parametrize("k", [64, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tinygemm_multiplies_by_the_quantized_weight(k: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(64, k, dtype=dtype), torch.randn(2, 3, k, dtype=dtype)
    spec = lb.Spec(lb.Int(4, signed=False), lb.PerGroup(32), "float_zero_point")
    exact = lb.AffineTensor.from_float(weight.bfloat16(), spec).dequantize().double()
    y = TinygemmLinear(weight, 32)(x)
    assert y.dtype is dtype and y.shape == (2, 3, 64)
    assert relative_error(y, x.double() @ exact.t()) < 1e-2


@torch.no_grad()
def test_the_tinygemm_row_is_close_to_int4(plain: Llama) -> None:
    model = copy.deepcopy(plain)
    convert_(model, ROWS["tinygemm"], CONFIG.group_size)
    assert not any(isinstance(m, nn.Linear) for m in model.blocks.modules())
    assert stored_bytes(model) < stored_bytes(plain)
    x, position = torch.randn(2, 7, 64), torch.arange(7)
    outs = []
    for d in (Decoder(m, 2, 20) for m in (model, folded(plain))):
        angles, caches = (d.model.cos, d.model.sin), (d.keys[0], d.values[0])
        outs.append(d._block(d.model.blocks[0], x, *angles, position, *caches))
    assert 1e-3 < relative_error(*outs) < 0.2


# ---- attention ---------------------------------------------------------------------------------------------


def case(batch: int, heads: int, kv_heads: int, width: int, positions: int):
    """query, key, value, x, eps, cos, sin, and the two caches; the first three as slices of one tensor."""
    joint = torch.randn(batch, 1, (heads + 2 * kv_heads) * width)
    sizes = (heads * width, kv_heads * width, kv_heads * width)
    new = [t.view(batch, 1, -1, width).transpose(1, 2) for t in joint.split(sizes, -1)]
    angle = torch.rand(positions, width // 2) * 6
    caches = [torch.randn(batch, kv_heads, positions, width) for _ in range(2)]
    x = torch.randn(batch, 1, heads * width + 3) * torch.arange(1, batch + 1)[:, None, None]
    return [*new, x, 1e-5, angle.cos(), angle.sin(), *caches]


def factor(x: Tensor, eps: float) -> Tensor:
    return (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.double().chunk(2, -1)
    cos, sin = cos.to(x.dtype).double(), sin.to(x.dtype).double()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def exact(
    query, key, value, x, eps, cos, sin, keys, values, last: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the two caches, in float64."""
    keys, values = keys.double(), values.double()
    cos, sin, scale = cos[last], sin[last], factor(x, eps)[:, None]
    keys[:, :, last] = (turned(key, cos, sin) * scale)[:, :, 0]
    values[:, :, last] = (value.double() * scale)[:, :, 0]
    shared = query.shape[1] // keys.shape[1]
    seen = [t[:, :, : last + 1].repeat_interleave(shared, 1) for t in (keys, values)]
    scores = turned(query, cos, sin) * scale @ seen[0].transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ seen[1], keys, values


def check_attention(attend: Any, parts: list[Any], last: int, bound: float) -> None:
    """What lies beyond `last`, and at it, is not read."""
    *new, keys, values = parts
    keys, values = keys.clone(), values.clone()
    keys[:, :, last:], values[:, :, last:] = 1e9, 1e9
    y, expected_keys, expected_values = exact(*new, keys, values, last)
    position = torch.tensor([last], device=keys.device)
    if keys.is_cuda:  # what the caches hold is to be older than the launch before
        torch.cuda.synchronize()
    got = attend(*new, position, keys, values)
    assert relative_error(got, y) < bound
    for cache, expected in ((keys, expected_keys), (values, expected_values)):
        assert torch.equal(cache[:, :, :last].double(), expected[:, :, :last])
        assert relative_error(cache[:, :, last], expected[:, :, last]) < bound
        assert bool((cache[:, :, last + 1 :] == 1e9).all())


SIZES = [(1, 4, 2, 16, 48), (2, 6, 2, 32, 300), (1, 8, 8, 16, 130)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_sees_the_positions_so_far(size: tuple[int, ...]) -> None:
    for last in (0, 1, size[-1] // 3, size[-1] - 1):
        check_attention(next_position.attend_next, case(*size), last, 1e-6)


def test_the_attention_op_is_sound() -> None:
    *new, keys, values = case(2, 6, 2, 16, 40)
    torch.library.opcheck(next_position.attend_next, (*new, torch.tensor([17]), keys, values))


def check_between(norm: Any, gate: Any, batch: int, width: int, like: Tensor, bound: float) -> None:
    """Of rows with outliers, a gate and an up that lie beside each other, huge and tiny values, zeros and a NaN."""
    x = torch.randn(batch, 1, width).to(like) * torch.tensor([1e-3, 1.0, 1e3])[
        :batch, None, None
    ].to(like)
    x[0, 0, 0] *= 100
    weight, eps = torch.randn(width).to(like), 1e-5
    exact = x.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    got = norm(x, weight, eps)
    assert got.dtype == x.dtype and got.is_contiguous()
    for row, expected in zip(got, exact, strict=True):
        assert relative_error(row, expected) < bound
    assert not norm(torch.zeros_like(x), weight, eps).any()
    both = torch.cat([x, torch.randn(batch, 1, width).to(like)], -1)
    first, second = both.split(width, -1)
    before = torch.randn(batch, 1, width // 2 + 3).to(like) * 3
    if like.is_cuda:  # it is to be older than the launch before
        torch.cuda.synchronize()
    got = gate(first, second, before, eps)
    assert got.dtype == x.dtype and got.is_contiguous()
    scale = factor(before, eps)
    exact = F.silu(first.double() * scale) * second.double() * scale
    for row, expected in zip(got, exact, strict=True):
        assert relative_error(row, expected) < bound
    x[-1, 0, -1] = torch.nan
    assert norm(x, weight, eps)[-1].isnan().all() and not norm(x, weight, eps)[:-1].isnan().any()
    assert gate(x, x, before, eps).isnan().sum() == 1


BETWEEN = [(1, 64), (3, 1031), (2, 1), (3, 4096)]


@pytest.mark.parametrize("size", BETWEEN, ids=str)
def test_norm_and_gate_of_a_position(size: tuple[int, int]) -> None:
    check_between(next_position.norm_next, next_position.gate_next, *size, torch.empty(0), 1e-6)
    check_between(
        next_position.norm_next, next_position.gate_next, *size, torch.empty(0).bfloat16(), 5e-3
    )
    x, weight = torch.randn(2, 1, 24), torch.randn(24)
    torch.library.opcheck(next_position.norm_next, (x, weight, 1e-5))
    torch.library.opcheck(next_position.gate_next, (x, torch.randn(2, 1, 48)[..., 24:], x, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("size", BETWEEN, ids=str)
def test_norm_and_gate_of_a_position_on_a_gpu(size: tuple[int, int]) -> None:
    check_between(
        next_position.norm_next, next_position.gate_next, *size, torch.empty(0).cuda(), 1e-5
    )
    like = torch.empty(0).cuda().bfloat16()
    check_between(next_position.norm_next, next_position.gate_next, *size, like, 5e-3)


def check_choice(choose: Any, logits: Tensor) -> None:
    """With ties, of which the first counts; what is chosen of NaNs is a token."""
    batch, device = logits.shape[0], logits.device
    token = torch.full((batch, 1), -1, device=device)
    position = torch.tensor([7], device=device)
    choose(logits, token, position)
    assert torch.equal(token, logits.argmax(-1)) and position.item() == 8
    choose(torch.full_like(logits, torch.nan), token, position)
    assert bool(((token >= 0) & (token < logits.shape[-1])).all()) and position.item() == 9


def check_logits(
    logits: Any, batch: int, vocabulary: int, width: int, like: Tensor, bound: float
) -> None:
    x, weight = torch.randn(batch, 1, width).to(like), torch.randn(vocabulary, width).to(like)
    got = logits(x, weight)
    assert got.dtype == x.dtype
    assert relative_error(got, x.double() @ weight.double().t()) < bound


HEADS = [(1, 1, 1), (2, 103, 64), (16, 6, 4096), (1, 150, 1049)]
CHOICES = [1, 100, 1024, 5000]


def test_logits_of_a_position() -> None:
    x, weight = torch.randn(2, 1, 24), torch.randn(50, 24)
    torch.library.opcheck(next_position.logits_next, (x, weight))
    check_logits(next_position.logits_next, 3, 50, 24, torch.empty(0), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("size", HEADS, ids=str)
def test_logits_of_a_position_on_a_gpu(size: tuple[int, ...]) -> None:
    check_logits(next_position.logits_next, *size, torch.empty(0).cuda().bfloat16(), 5e-3)
    check_logits(next_position.logits_next, *size, torch.empty(0).cuda(), 1e-5)


@pytest.mark.parametrize("size", CHOICES)
def test_the_largest_of_a_vocabulary(size: int) -> None:
    check_choice(next_position.choose_next, torch.randint(-9, 9, (3, 1, size)).float())
    token, position = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(next_position.choose_next, (torch.randn(2, 1, size), token, position))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*CHOICES, 128_256])
def test_the_largest_of_a_vocabulary_on_a_gpu(size: int) -> None:
    logits = torch.randint(-9, 9, (3, 1, size), device="cuda").bfloat16()
    check_choice(next_position.choose_next, logits)


INTERPRETED = """
import torch
from recipes.decode.attention import flash_decode
from recipes.decode.kernels import choose_rows, gate_rows, logits_of, norm_rows
from tests.recipes.test_decode import (
    BETWEEN, CHOICES, HEADS, SIZES,
    case, check_attention, check_between, check_choice, check_logits
)

torch.manual_seed(0)
for size in BETWEEN:
    check_between(norm_rows, gate_rows, *size, torch.empty(0), 1e-6)
for size in HEADS:
    check_logits(logits_of, *size, torch.empty(0), 1e-6)
for size in CHOICES:
    check_choice(choose_rows, torch.randint(-9, 9, (3, 1, size)).float())
for size in SIZES:
    for last in (0, 1, 63, 64, size[-1] // 3, size[-1] - 1):
        if last < size[-1]:
            check_attention(flash_decode, case(*size), last, 1e-6)
"""


def test_the_kernels_of_one_position_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the switch when it is imported."""
    pytest.importorskip("triton")
    import os

    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 32, 8, 128, 1024), (16, 32, 8, 128, 2304), (3, 6, 2, 64, 77)])
def test_the_attention_kernels_on_a_gpu(size: tuple[int, ...]) -> None:
    parts = [t if isinstance(t, float) else t.cuda().bfloat16() for t in case(*size)]
    for last in (0, 5, size[-1] // 2, size[-1] - 1):
        check_attention(next_position.attend_next, parts, last, 5e-3)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", list(ROWS))
def test_a_captured_graph_decodes_what_eager_steps_do(name: str) -> None:
    model_config = dataclasses.replace(CONFIG.model, dim=256, hidden=512)
    config = dataclasses.replace(CONFIG, model=model_config, dtype=torch.bfloat16)
    device = torch.device("cuda")
    model = build(config, device)
    convert_(model, ROWS[name], 32)
    text = prompt().to(device)
    decoder = Decoder(model, 2, 40, "inductor")
    expected = decoder.generate(text, 12)
    step = captured(decoder.step, device)
    decoder.prefill(text)
    found = [decoder.token_B1.clone()]
    for _ in range(11):
        step()
        found.append(decoder.token_B1.clone())
    assert torch.equal(torch.cat(found, 1), expected[:, 7:])


# ---- the command line --------------------------------------------------------------------------------------


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pages" / "decode.md"
    assert main(["--preset", "tiny", "--out", str(out)]) == 0
    page = out.read_text()
    assert page in capsys.readouterr().out
    for name, row in ROWS.items():
        assert f"| {name} | {row.about} |" in page
        assert page.count(f"\n| {name} | ") == 3
        cells = re.findall(rf"^\| {name} \| (\d.*) \|$", page, re.M)[-1].split(" | ")
        assert (cells[4] == "") == (name == "tinygemm"), "no prefill of three sequences by it"
    assert "python -m recipes.decode --preset tiny" in page and "| batch 3 | decode tok/s" in page


def test_the_shapes_for_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    assert main(["--preset", "tiny", "--rows", "int4", "--shapes", str(path)]) == 0
    linears = json.loads(path.read_text())["linears"]
    assert len(linears) == 3 * 4 + 1
    assert linears[0] == {
        **{"name": "blocks.0.attention.query", "m": 1, "n": 128, "k": 64, "scheme": "int4-g32"},
        **{"implementation": "plain_linear", "calls": 1},
    }
    assert trace(CONFIG, ROWS["bf16"], 3, CPU).linears[0].m == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "int4,int5"], "no row named int5; there are: bf16, int8"),
        (["--shapes", "x.json"], "--shapes takes one row"),
    ],
    ids=["row", "shapes"],
)
def test_what_is_to_be_put_right(arguments, said, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"positions": 20}, "start=16 and tokens=8 pass the cache of 20"),
        ({"prompt": 65}, "65 positions pass the model's context of 64"),
        ({"start": 2}, "start=2 leaves no 3 positions"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(change: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **change)


def test_the_large_preset_is_an_8b_model() -> None:
    with torch.device("meta"):
        model = Llama(llama_8b().model)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert set(PRESETS) == {"8b", "tiny"}
