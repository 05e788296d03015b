"""The decode recipe: the same tokens as the plain model's, one compilation for all blocks, the page."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.convert import side_by_side
from lowbit_kernels.runtime import launches
from recipes.decode.__main__ import (
    PRESETS,
    Row,
    build,
    convert_,
    llama_8b,
    main,
    rows,
    stored_bytes,
    tiny,
    trace,
)
from recipes.decode.decoder import Decoder, captured, fold_norms_
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
    """A model with weights large enough that attention is far from uniform and tokens differ."""
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


def converted(model: Llama, row: Row) -> Llama:
    made = copy.deepcopy(model)
    convert_(made, row, CONFIG.group_size)
    return made


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
def test_norms_are_folded_into_plain_linears_or_not_at_all(plain: Llama) -> None:
    quantized, half = (copy.deepcopy(plain) for _ in range(2))
    lb.quantize_(quantized, {"*value": lb.Int8WeightOnly(), "*up": lb.Int8WeightOnly()})
    for model, match in (
        (quantized, "Linear of AffineTensor; fold first, then quantize"),
        (half.half(), "overflow float16; take the model in bfloat16 or float32"),
    ):
        before = {name: p.clone() for name, p in model.named_parameters() if "value" not in name}
        with pytest.raises(ValueError, match=match):
            fold_norms_(model)
        assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in before.items())


@torch.no_grad()
def test_prompts_that_do_not_fit_are_refused(plain: Llama) -> None:
    model = folded(plain)
    for batch, positions in ((0, 20), (2, 0), (2, 65)):
        with pytest.raises(ValueError, match=f"the model's context; got {batch} and {positions}"):
            Decoder(model, batch, positions)
    decoder = Decoder(model, 2, 10)
    for tokens in (prompt(3), prompt()[0], prompt()[:, :0]):
        with pytest.raises(ValueError, match=r"prompts are \[2, 1 or more\], got"):
            decoder.generate(tokens, 1)
    for new in (0, -3, 5):
        with pytest.raises(ValueError, match=f"room for 1 to 4 new tokens, got {new}"):
            decoder.generate(prompt(), new)
    assert not decoder.keys[0].any()
    assert torch.equal(decoder.generate(prompt(), 4), plain.generate(prompt(), 4, temperature=0))


@torch.no_grad()
@over_rows
def test_low_bit_rows_decode_what_their_model_does(plain: Llama, row: Row) -> None:
    model = converted(plain, row)
    expected = model.generate(prompt(), 9, temperature=0)
    assert torch.equal(Decoder(model, 2, 20).generate(prompt(), 9), expected)


@torch.no_grad()
@over_rows
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gate_and_up_that_lie_side_by_side_are_one_product(
    plain: Llama, row: Row, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do on a GPU."""
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    model = converted(plain, row)
    expected = model.generate(prompt(), 9, temperature=0)
    decoder = Decoder(model, 2, 20, backend)
    assert all(decoder.joint)
    with launches.counted() as calls:
        found = decoder.generate(prompt(), 9)
    assert torch.equal(found, expected)
    assert calls["gated_linear", "composed"] == 8 * len(model.blocks)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_blocks_are_compiled_once_and_whole(plain: Llama, name: str) -> None:
    model = copy.deepcopy(plain)
    convert_(model, ROWS[name], CONFIG.group_size)
    torch._dynamo.utils.counters.clear()
    Decoder(model, 2, 20, "aot_eager").generate(prompt(), 4)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 6, "embedding, block and head, for the prompt and for one token"


def test_a_step_calls_a_kernel_a_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them add the residual. Compiled for a GPU, siblings share a kernel."""
    ops = counted(monkeypatch)
    config = dataclasses.replace(CONFIG, dtype=torch.bfloat16)
    model = build(config, CPU)
    convert_(model, ROWS["int4-int8-head"], 32)
    decoder = Decoder(model.requires_grad_(False), 3, 20)
    decoder.step()
    block = [
        *(("int4", 3, n, 64, 32, "") for n in (64, 32, 32)),
        ("int4", 3, 64, 64, 32, "residual"),
        *[("int4", 3, 160, 64, 32, "")] * 2,
        ("int4", 3, 64, 160, 32, "residual"),
    ]
    assert ops.calls == [*block * 3, ("int8", 3, 256, 64, 64, "")]
    assert decoder.position.item() == 1


@torch.no_grad()
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_low_bit_embedding_decodes_what_its_model_does(plain: Llama, backend: str | None) -> None:
    """A bare scheme takes an embedding along with the head that is tied to it."""
    tied = Llama(dataclasses.replace(CONFIG.model, tied=True)).eval()
    tied.load_state_dict({**plain.state_dict(), "head.weight": plain.embedding.weight})
    fold_norms_(tied)
    lb.quantize_(tied, lb.Int8WeightOnly())
    assert isinstance(tied.embedding.weight, lb.LowbitTensor)
    found = Decoder(tied, 2, 20, backend).generate(prompt(), 9)
    assert torch.equal(found, tied.generate(prompt(), 9, temperature=0))
    assert len(set(found[0].tolist())) > 5


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
        turned = d.model.cos[position], d.model.sin[position]
        outs.append(d._block(d.model.blocks[0], x, *turned, position, d.keys[0], d.values[0]))
    assert 1e-3 < relative_error(*outs) < 0.2


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


@pytest.mark.parametrize(
    "shown",
    [("bf16", "int4-int8-head", "tinygemm"), pytest.param([*ROWS], marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_the_page(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shown: Sequence[str],
) -> None:
    brief = dataclasses.replace(CONFIG, tokens=2, repeats=1)
    monkeypatch.setitem(PRESETS, "tiny", lambda: brief)
    out = tmp_path / "pages" / "decode.md"
    assert main(["--preset", "tiny", "--rows", ",".join(shown), "--out", str(out)]) == 0
    page = out.read_text()
    assert page in capsys.readouterr().out
    for name in shown:
        row = ROWS[name]
        assert f"| {name} | {row.about} |" in page
        assert page.count(f"\n| {name} | ") == 3
        cells = re.findall(rf"^\| {name} \| (\d.*) \|$", page, re.M)[-1].split(" | ")
        assert (cells[4] == "") == (name == "tinygemm"), "no prefill of three sequences by it"
    assert "python -m recipes.decode --preset tiny" in page and "| batch 3 | decode tok/s" in page


def test_the_shapes_for_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    assert main(["--preset", "tiny", "--rows", "int4", "--shapes", str(path)]) == 0
    products = json.loads(path.read_text())["products"]
    assert len(products) == 3 * 7 + 1
    assert products[0] == {
        **{"layer": "blocks.0.attention.query", "product": "output", "m": 1, "n": 64, "k": 64},
        **{"weight": "int4-g32", "ran_in": "float32", "implementation": "cpu_linear"},
        **{"calls": 1, "why": "its scheme quantizes the weight only"},
    }
    assert trace(CONFIG, ROWS["bf16"], 3, CPU).products[0].m == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "int4,int5,"], "no row named 'int5', ''; there are: bf16, int8"),
        (["--shapes", "x.json"], "--shapes takes one row"),
        (["--out", "."], "error: . is a folder; give the name of a file in it"),
        (["--rows", "int4", "--shapes", "."], "error: . is a folder"),
        (["--out", "/dev/null/page.md"], "error: no folder for /dev/null/page.md"),
    ],
    ids=["row", "shapes", "folder", "folder-for-shapes", "no-folder"],
)
def test_mistakes_are_one_line(arguments, said, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_invalid_settings(change: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **change)


def test_the_large_preset_is_an_8b_model() -> None:
    with torch.device("meta"):
        model = Llama(llama_8b().model)
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248
    assert set(PRESETS) == {"8b", "tiny"}
