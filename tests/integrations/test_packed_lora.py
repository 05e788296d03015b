"""A packed checkpoint loads as it is and trains with LoRA on top: PEFT's, and one of a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    IntxWeightOnly,
    LowbitTensor,
    MXFP4WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
)
from lowbit.tensor.frozen.ordered_tensor import OrderedTensor
from tests.integrations.models import TOKENS, fill_adapters, train
from tests.integrations.test_formats import error, low_bit
from tests.integrations.test_four_bit_folders import low_bit_gpt_oss, low_bit_mixture

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

TARGETS = ("q_proj", "v_proj", "down_proj")
FOLDERS = {
    "float8 blocks": ("fp8", Float8DynamicActivationFloat8Weight(PerBlock(128, 128))),
    "mxfp4": ("compressed-tensors", MXFP4WeightOnly()),
    "nvfp4": ("compressed-tensors", NVFP4WeightOnly()),
    "nf4": ("bitsandbytes-4bit", NF4WeightOnly()),
    "nf4 double": ("bitsandbytes-4bit", NF4WeightOnly(double_quantization=True)),
    "int4": ("compressed-tensors", Int4WeightOnly(64)),
    "int4 awq": ("awq", IntxWeightOnly(4, 64, "asymmetric")),
    "act-order": ("gptq", Int4WeightOnly(64)),
}
every_folder = pytest.mark.parametrize("name", FOLDERS)


def packed(name: str, tmp_path: Path) -> Any:
    """A model read from a folder, float32 beside its low-bit weights, so that gradients can be compared."""
    format, scheme = FOLDERS[name]
    out = tmp_path / "out"
    lowbit.export(low_bit(scheme, torch.float32), out, format, lossy=True)
    if name == "act-order":
        sort_inputs(out)
    model = lowbit.load_pretrained(out)
    kinds = {type(p.data) for p in model.parameters() if isinstance(p, LowbitTensor)}
    assert len(kinds) == 1 and (name != "act-order" or kinds == {OrderedTensor})
    return model


def sort_inputs(folder: Path) -> None:
    """Groups of random inputs, as GPTQ makes them with desc_act."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors, config = load_file(path), json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    for stored in [n for n in tensors if n.endswith("g_idx")]:
        order = torch.randperm(len(tensors[stored]), generator=generator)
        tensors[stored] = tensors[stored][order].contiguous()
    config["quantization_config"]["desc_act"] = True
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


class Adapted(nn.Module):
    """LoRA in a few lines of PyTorch."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 10)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def by_hand(model: Any) -> Any:
    torch.manual_seed(0)
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if path.endswith(TARGETS):
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, Adapted(module))
    return model


def by_peft(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*TARGETS]))
    fill_adapters(made, 0.1)
    return made


def gradients(model: Any) -> dict[str, Tensor]:
    """Those of the adapters by name, and that of the embedded tokens."""
    x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    model(inputs_embeds=x, labels=TOKENS).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return {**found, "input": x.grad}


@every_folder
@pytest.mark.parametrize("adapt", [by_peft, by_hand])
@pytest.mark.filterwarnings("ignore:requires_grad_")
def test_gradients_are_those_over_the_dequantized_model(
    name: str, adapt: Any, tmp_path: Path
) -> None:
    """Of A, of B and of the input, over frozen codes. float8 blocks round the input of each product too."""
    model = adapt(packed(name, tmp_path))
    plain = lowbit.load_pretrained(tmp_path / "out")
    lowbit.dequantize_(plain)
    plain = adapt(plain.requires_grad_(False))
    own, wanted = gradients(model), gradients(plain)
    assert own.keys() == wanted.keys() and len(own) == 2 * 6 + 1
    for key, grad in wanted.items():
        assert grad.norm() > 0, key
        assert error(own[key], grad) < (0.1 if name == "float8 blocks" else 1e-3), key


@every_folder
@pytest.mark.parametrize("adapt", [by_peft, by_hand])
@pytest.mark.filterwarnings("ignore:requires_grad_")
def test_training_leaves_the_codes_as_they_are(name: str, adapt: Any, tmp_path: Path) -> None:
    model = adapt(packed(name, tmp_path))
    base = {n: p for n, p in model.named_parameters() if isinstance(p, LowbitTensor)}
    before = {n: p.dequantize() for n, p in base.items()}
    weights = [p for p in model.parameters() if p.requires_grad]
    assert len(base) == 14 and len(weights) == 12
    losses = train(model, lowbit.optim.AdamW8bit(weights, lr=1e-2))
    assert losses[-1] < losses[0]
    assert all(torch.equal(p.dequantize(), before[n]) for n, p in base.items())


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_experts_stay_packed_below_adapters_of_attention(kind: str, tmp_path: Path) -> None:
    """Gradients pass the low-bit experts on their way to the adapters and the input."""
    peft = pytest.importorskip("peft")
    if kind == "gpt_oss":
        lowbit.export(low_bit_gpt_oss(tmp_path), tmp_path / "out", "mxfp4")
    else:
        lowbit.export(low_bit_mixture(kind, MXFP4WeightOnly()), tmp_path / "out")
    model = lowbit.load_pretrained(tmp_path / "out")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, config)
    assert any(n.endswith("experts.down_proj") for n, p in model.named_parameters() if p.ndim == 3)
    found = gradients(model)
    assert float(found["input"].norm()) > 0
    assert all(float(g.norm()) > 0 for n, g in found.items() if "lora_B" in n)
    weights = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, torch.optim.AdamW(weights, lr=1e-2))
    assert losses[-1] < losses[0]
