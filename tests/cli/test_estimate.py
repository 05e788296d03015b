"""`lowbit estimate` beside what real tensors take: weights and states to the byte."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowbit import Int4WeightOnly, Int8Weight, Int8WeightOnly, optim, quantize_, train
from lowbit.cli.errors import one_line
from lowbit.formats.base import FormatError
from tests.cli.command import CONFIG, MATRICES, make_model, weights

SHAPES = {name: tuple(t.shape) for name, t in weights().items()}


def build() -> nn.Module:
    """A module that holds the weights of the model: its matrices as linears, named by their order."""
    model = nn.ModuleDict()
    for i, (name, t) in enumerate(weights().items()):
        plain = t.ndim == 1 or "embed" in name or "lm_head" in name
        if plain:
            holder: nn.Module = nn.Module()
            holder.weight = nn.Parameter(t)
        else:
            holder = nn.Linear(t.shape[1], t.shape[0], bias=False, dtype=t.dtype)
            holder.weight = nn.Parameter(t)
        model[str(i)] = holder
    return model


@pytest.fixture
def counted(tmp_path: Path):  # type: ignore[no-untyped-def]
    from lowbit.cli import shapes

    return shapes.read(make_model(tmp_path / "model"))


def test_shapes_of_the_shards(counted) -> None:  # type: ignore[no-untyped-def]
    assert counted.weights == SHAPES and counted.source == "the shards"
    assert len([*counted.matrices()]) == MATRICES


def test_shapes_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    import lowbit
    from lowbit.cli import shapes
    from tests.formats.test_gguf import llama, tokenizer

    model, path = llama(Int4WeightOnly(32)), tmp_path / "model.gguf"
    lowbit.export(model, path, "gguf", tokenizer=tokenizer(tmp_path / "words"))
    found = shapes.read(path)
    assert found.weights == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "inner", "key_value"),
    [("gpt2", 3072, 768), ("opt", 3072, 768), ("falcon", 18176, 64), ("qwen2_vl", 29568, 1024)],
)
def test_a_config_without_the_names_of_llama(
    kind: str, inner: int, key_value: int, tmp_path: Path
) -> None:
    """The width that a config does not name is that of the model which transformers builds."""
    transformers = pytest.importorskip("transformers")
    from lowbit.cli import memory, shapes

    path = tmp_path / "config.json"
    path.write_text(f'{{"model_type": "{kind}"}}')
    found = shapes.read(path)
    config = transformers.AutoConfig.for_model(kind).get_text_config()
    assert (found.sizes.layers, found.sizes.hidden) == (
        config.num_hidden_layers,
        config.hidden_size,
    )
    assert (found.sizes.inner, found.sizes.key_value) == (inner, key_value)
    ways = memory.serving(found, memory.Run(1, 512))
    assert ways["inference int4"].total < ways["inference bf16"].total


@pytest.mark.parametrize("make", [Int4WeightOnly, Int8WeightOnly])
def test_bytes_of_quantized_weights(make, counted) -> None:  # type: ignore[no-untyped-def]
    from lowbit.cli import memory

    report = quantize_(build(), make())
    assert memory.quantized_bytes(counted, make()) == report.nbytes


def test_bytes_of_int8_weights(counted) -> None:  # type: ignore[no-untyped-def]
    from lowbit.cli import memory

    report = train.prepare_(build(), Int8Weight())
    assert memory.int8_weight_bytes(counted) == report.nbytes


@pytest.mark.parametrize("kind", [optim.AdamW8bit, optim.AdamW4bit])
def test_bytes_of_states(kind: type[optim.AdamW]) -> None:
    from lowbit.cli import memory

    model = build()
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert memory.lowbit_states(SHAPES, kind) == optimizer.state_bytes()


def test_bytes_of_torchs_states() -> None:
    from lowbit.cli import memory

    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = (t for state in optimizer.state.values() for t in state.values())
    assert memory.torch_states(SHAPES) == sum(t.nbytes for t in tensors)


def test_parts_and_options_point_the_right_way(counted) -> None:  # type: ignore[no-untyped-def]
    from lowbit.cli import memory

    run = memory.Run(2, 512)
    ways = memory.training(counted, run)
    plain = ways["bf16, torch AdamW"]
    assert plain.weights == plain.gradients == 2 * sum(math.prod(s) for s in SHAPES.values())
    assert ways["bf16, AdamW4bit"].states < ways["bf16, AdamW8bit"].states < plain.states
    assert ways["int8 products, AdamW8bit"].activations < plain.activations
    lora = ways["LoRA rank 16 over int4"]
    assert lora.gradients < plain.gradients / 4 and lora.weights < plain.weights
    again = memory.training(counted, replace(run, recompute=True))["bf16, torch AdamW"]
    assert again.activations < plain.activations
    served = memory.serving(counted, run)
    totals = [served[f"inference {name}"].total for name in ("int4", "int8", "bf16")]
    assert totals == sorted(totals) and totals[-1] < plain.total


def test_the_smallest_gpu() -> None:
    from lowbit.cli.gpus import CONTEXT, GIB, GPUS, smallest

    assert [gpu.gib for gpu in GPUS] == sorted(gpu.gib for gpu in GPUS)
    first = smallest(0)
    assert first is GPUS[0]
    assert smallest(GPUS[0].gib * GIB - CONTEXT) is GPUS[0]
    assert smallest(GPUS[0].gib * GIB - CONTEXT + 1) is GPUS[1]
    assert smallest(1000 * GIB) is None


def test_an_unknown_model_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json
    import sys

    from lowbit.cli import shapes

    monkeypatch.setitem(sys.modules, "transformers", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "rwkv"}))
    with pytest.raises(FormatError, match="'rwkv': transformers is not installed") as raised:
        shapes.read(path)
    assert "\n" not in one_line(raised.value)


@pytest.mark.parametrize(
    "part", [{"type_vocab_size": 2}, {"architectures": ["EncoderForMaskedLM"]}], ids=str
)
def test_an_encoder_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    """It has the fields of a decoder, and neither its cache nor its activations."""
    import json

    from lowbit.cli import shapes

    folder = make_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **part}))
    with pytest.raises(FormatError, match=r"describes an encoder, .*lowbit inspect"):
        shapes.read(folder)
    (folder / "config.json").write_text(json.dumps({**config, **part, "is_decoder": True}))
    assert shapes.read(folder).parameters


def test_an_encoder_and_its_decoder_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from lowbit.cli import shapes

    path = tmp_path / "config.json"
    path.write_text('{"model_type": "t5"}')
    with pytest.raises(FormatError, match=r"describes an encoder and a decoder, t5, .*inspect"):
        shapes.read(path)


def test_a_line_of_the_table_is_in_gib() -> None:
    from lowbit.cli.estimate import _row
    from lowbit.cli.memory import MemoryUse

    part = MemoryUse(weights=3 * 2**30, gradients=0, states=2**29, activations=2**28)
    assert _row("int8", part)[:6] == ("int8", "3.00 GiB", "-", "0.50 GiB", "0.25 GiB", "3.75 GiB")
