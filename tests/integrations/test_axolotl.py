"""The plug-in for Axolotl, by its own command on a tiny model. Runs where Axolotl is installed, by hand.

Axolotl 0.19 pins releases of transformers, PEFT, accelerate and datasets that are not those of constraints.txt, so it
needs an environment of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

axolotl = pytest.importorskip("axolotl")
yaml = pytest.importorskip("yaml")
import transformers  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import lowbit  # noqa: E402
from lowbit.axolotl import LowbitPlugin, LowbitSettings  # noqa: E402
from lowbit.tensor.core import LowbitTensor  # noqa: E402
from recipes import text  # noqa: E402
from tests.integrations.models import is_inner_linear  # noqa: E402

TEXTS = [f"line {i} of {i * i}, and {i + 1} follows" for i in range(300)]
LORA = {
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": ["q_proj", "down_proj"],
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, its tokenizer and data."""
    folder = tmp_path_factory.mktemp("start")
    made = text.train_tokenizer(TEXTS, 320)
    own = {"bos_token": text.END, "eos_token": text.END, "pad_token": text.END}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **own).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, vocab_size=320)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return folder


def trained(start: Path, folder: Path, lowbit_settings: dict[str, Any], **settings: Any) -> str:
    """Train by Axolotl's command; what it printed."""
    data = {"path": str(start / "data.jsonl"), "ds_type": "json", "type": "completion"}
    chosen = {
        "base_model": str(start),
        "plugins": ["lowbit.axolotl.LowbitPlugin"],
        "lowbit": lowbit_settings,
        "datasets": [data],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "val_set_size": 0,
        "sequence_len": 64,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 5,
        "logging_steps": 1,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "bf16": False,
        "tf32": False,
        **settings,
    }
    (folder / "config.yml").write_text(yaml.safe_dump(chosen))
    offline = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", str(folder / "config.yml")],
        env={**os.environ, **offline, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"'loss': '?([\d.]+)", printed)]


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_qat_writes_what_trained_and_the_model_in_low_bits(
    adapter: dict[str, Any], start: Path, tmp_path: Path
) -> None:
    own = {"qat": "int4(group_size=32)", "optimizer": "AdamW8bit"}
    found = losses(trained(start, tmp_path, own, **adapter))
    assert len(found) == 5 and found[-1] < found[0]
    out = tmp_path / "out"
    saved = load_file(out / ("adapter_model.safetensors" if adapter else "model.safetensors"))
    assert len(saved) == (8 if adapter else 21)
    assert all(t.dtype == torch.float32 for t in saved.values())
    low = lowbit.load_pretrained(out / "compressed-tensors")
    assert isinstance(low.model.layers[1].mlp.up_proj.weight, lowbit.AffineTensor)
    expected = transformers.AutoModelForCausalLM.from_pretrained(start)
    if adapter:
        peft = pytest.importorskip("peft")
        expected = peft.PeftModel.from_pretrained(expected, out).merge_and_unload()
    else:
        expected.load_state_dict(saved)
    lowbit.quantize_(expected, lowbit.Int4WeightOnly(32), is_inner_linear)
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(low(tokens).logits, expected(tokens).logits, rtol=1e-5, atol=1e-5)


def test_products_in_int8_and_an_optimizer_in_four_bits(start: Path, tmp_path: Path) -> None:
    printed = trained(start, tmp_path, {"train": "int8", "optimizer": "AdamW4bit"}, max_steps=4)
    found = losses(printed)
    assert len(found) == 4 and found[-1] < found[0]
    states = torch.load(tmp_path / "out/checkpoint-4/optimizer.pt", weights_only=True)["state"]
    assert any(isinstance(t, LowbitTensor) for s in states.values() for t in s.values())


def test_the_settings_of_the_page_are_right() -> None:
    page = (Path(__file__).parents[2] / "docs/integrations.md").read_text(encoding="utf-8")
    (block,) = re.findall("^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    LowbitSettings(**yaml.safe_load(block)["lowbit"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qatt": "int4"}, "qatt"),
        ({"qat": "int5"}, "there is no scheme 'int5'; accepted: "),
        ({"train": "int5"}, "there is no training scheme 'int5'; accepted: "),
        ({"optimizer": "Adam3bit"}, "there is no optimizer 'Adam3bit'; accepted: "),
        ({"qat": "int4", "train": "int8"}, "leave one of them out"),
        ({"qat": "int4", "format": "zip"}, "zip"),
        ({"targets": ["*"]}, "neither is given"),
        ({"targets": [], "qat": "int4"}, "targets is empty"),
        ({"qat": "int4", "format": "onnx"}, "unknown format 'onnx'; accepted: "),
        ({"qat": "nf4"}, "compressed-tensors cannot hold|compressed-tensors holds"),
        ({"train": "int8", "format": "lowbit"}, "give `qat`, or leave 'format' out"),
        ({"qat_scales": "learned"}, "give `qat`, or leave 'qat_scales' out"),
        ({"optimizer": "AdamW4bit(foo=1)"}, "unexpected keyword argument 'foo'; accepted: lr"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LowbitSettings(**settings)


@pytest.mark.parametrize("other", ["qat", "fsdp_config", "deepspeed"])
def test_settings_that_exclude_each_other(other: str) -> None:
    with pytest.raises(ValueError, match=f"'int4' does not go with Axolotl's setting '{other}'"):
        LowbitPlugin().pre_model_load({"lowbit": {"qat": "int4"}, other: {"some": "thing"}})
