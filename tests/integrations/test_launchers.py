"""The files that docs/integrations.md gives for TRL, unsloth, LLaMA-Factory and ms-swift, on a tiny model.

Each runs where its package is installed, by hand: they pin releases that are not those of constraints.txt.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

import lowbit  # noqa: E402
from lowbit.tensor.core.base import LowbitTensor  # noqa: E402
from recipes import text  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/integrations.md"
FENCE = "```py\n"
"""Of Python that needs packages which `.ci/run` does not install, or several processes."""
LINES = [(f"line {i}", f"line {i} of {i * i}, and {i + 1} follows") for i in range(200)]
OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, its tokenizer, and data for both programs."""
    folder = tmp_path_factory.mktemp("start")
    made = text.train_tokenizer([answer for _, answer in LINES], 320)
    own = {"bos_token": text.END, "eos_token": text.END, "pad_token": text.END}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **own).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, vocab_size=320)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alpaca = [{"instruction": q, "input": "", "output": a} for q, a in LINES]
    (folder / "lines.json").write_text(json.dumps(alpaca))
    (folder / "dataset_info.json").write_text(json.dumps({"lines": {"file_name": "lines.json"}}))
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in LINES
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


def of_page(section: str) -> str:
    """The Python of a section."""
    part = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return part.partition(FENCE)[2].partition("```\n")[0]


def losses(command: list[str], folder: Path) -> list[float]:
    ran = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [float(x) for x in re.findall(r"'loss': '?([\d.]+)", ran.stdout + ran.stderr)]


def low_bit_states(folder: Path) -> int:
    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return sum(isinstance(t, LowbitTensor) for s in states.values() for t in s.values())


def by_llamafactory(folder: Path, start: Path, program: str, **changes: Any) -> list[float]:
    settings = {
        "model_name_or_path": str(start),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "lines",
        "dataset_dir": str(start),
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        **changes,
    }
    (folder / "lowbit_train.py").write_text(program)
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML too
    return losses(["lowbit_train.py", "config.yaml"], folder)


def test_trl(start: Path, tmp_path: Path) -> None:
    """The reward rises, and the folder has the model that sampled, in int4."""
    pytest.importorskip("trl")
    (tmp_path / "start").symlink_to(start)
    program = of_page("TRL").replace(
        'report_to="none"', 'report_to="none", use_cpu=True, bf16=False'
    )
    program += """
rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
torch.save((rewards, model(torch.arange(24)[None]).logits), "found.pt")
"""
    (tmp_path / "grpo.py").write_text(program)
    assert losses(["grpo.py"], tmp_path)
    rewards, logits = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(rewards) == 30 and sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    low = lowbit.load_pretrained(tmp_path / "grpo-int4").float()
    assert torch.equal(low(torch.arange(24)[None]).logits, logits)


def test_unsloth(start: Path, tmp_path: Path) -> None:
    """QAT of all weights with states in four bits, by unsloth's path without a GPU. The folder computes what the model
    does."""
    pytest.importorskip("trl")
    if find_spec("unsloth") is None:  # its import changes the Trainer
        pytest.skip("unsloth is not installed")
    (tmp_path / "start").symlink_to(start)
    program = of_page("unsloth").replace("max_steps=12", "max_steps=12, use_cpu=True, bf16=False")
    program += """
states = trainer.optimizer.state.values()
low = sum(isinstance(t, lowbit.tensor.LowbitTensor) for s in states for t in s.values())
torch.save((low, model.eval()(torch.arange(24)[None]).logits), "found.pt")
"""
    (tmp_path / "train.py").write_text(program)
    found = losses(["train.py"], tmp_path)
    assert len(found) == 12 and found[-1] < 0.8 * found[0]
    low_bit, logits = torch.load(tmp_path / "found.pt", weights_only=True)
    assert low_bit > 0
    low = lowbit.load_pretrained(tmp_path / "unsloth-int4").float()
    assert isinstance(low.model.layers[1].mlp.up_proj.weight, lowbit.AffineTensor)
    assert torch.equal(low(torch.arange(24)[None]).logits, logits)


def test_llamafactory(start: Path, tmp_path: Path) -> None:
    """QAT of all weights with states in four bits. Then adapters train over the int4 folder that it saved."""
    pytest.importorskip("llamafactory")
    whole, adapted = tmp_path / "whole", tmp_path / "adapted"
    for folder in (whole, adapted):
        folder.mkdir()
    program = of_page("LLaMA-Factory")
    found = by_llamafactory(whole, start, program)
    assert len(found) == 4 and found[-1] < found[0]
    assert low_bit_states(whole / "out/checkpoint-4") > 0
    low = transformers.AutoModelForCausalLM.from_pretrained(whole / "out")
    assert isinstance(low.model.layers[1].mlp.up_proj.weight, lowbit.AffineTensor)
    without = re.sub(r"^scheme = .*\n", "", program, flags=re.MULTILINE)
    without = re.sub(r"run_exp\(.*\)", "run_exp()", without)
    changes = {"model_name_or_path": str(whole / "out"), "finetuning_type": "lora"}
    assert len(by_llamafactory(adapted, start, without, **changes)) == 4
    assert (adapted / "out/adapter_model.safetensors").exists()


def test_ms_swift(start: Path, tmp_path: Path) -> None:
    """QAT of all weights with states in four bits; the checkpoint has the weights in high precision."""
    swift = pytest.importorskip("swift")
    if not hasattr(swift, "optimizers_map"):
        pytest.skip("the package swift is not ms-swift 4")
    (tmp_path / "lowbit_plugin.py").write_text(of_page("ms-swift"))
    options = {
        "model": str(start),
        "model_type": "llama",
        "template": "default",
        "tuner_type": "full",
        "dataset": str(start / "chats.jsonl"),
        "external_plugins": "lowbit_plugin.py",
        "optimizer": "lowbit",
        "callbacks": "lowbit_qat",
        "torch_dtype": "float32",
        "max_steps": "4",
        "save_steps": "4",
        "logging_steps": "1",
        "per_device_train_batch_size": "4",
        "gradient_accumulation_steps": "1",
        "learning_rate": "1e-2",
        "output_dir": str(tmp_path / "out"),
        "add_version": "false",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    found = losses(["-m", "swift.cli.sft", *words], tmp_path)
    assert len(found) == 4 and found[-1] < found[0]
    (saved,) = tmp_path.glob("out/**/checkpoint-4")
    assert low_bit_states(saved) > 0
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(isinstance(p, LowbitTensor) for p in model.parameters())
