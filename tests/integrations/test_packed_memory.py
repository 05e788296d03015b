"""No high-precision copy of packed weights: the peak of allocated bytes while a folder is opened, trained, written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lowbit
from lowbit import LowbitTensor
from lowbit.files import digests

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.integrations.models import TOKENS
from tests.integrations.packed_models import publish

SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss MXFP4": {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8},
    "Kimi K2 int4": {"hidden_size": 128, "moe_intermediate_size": 256, "n_routed_experts": 8},
    "Qwen3-MoE float8": {"moe_intermediate_size": 256, "num_experts": 8},
    "DeepSeek-V4 MXFP4 and float8": {"moe_intermediate_size": 256, "n_routed_experts": 8},
    "ModelOpt NVFP4": {"hidden_size": 256, "intermediate_size": 512},
    "DeepSeek-V3 float8": {"moe_intermediate_size": 256, "n_routed_experts": 8},
    "Qwen3-MoE int4": {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 8},
    "Qwen3 NVFP4": {"hidden_size": 256, "intermediate_size": 512},
    "Kimi K3 MXFP4": {"hidden_size": 128, "moe_intermediate_size": 256, "num_local_experts": 8},
}
"""Sizes at which a weight has far more elements than an activation."""


def allocated(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """What a call returns, the most bytes that it has allocated at once, and those that stay. The allocator of the CPU
    reports each tensor, also inside of kernels; tensors that view a mapped file are none of its own."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        found = call()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return found, most, held


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = r".*(q_proj|o_proj|q_a_proj|o_b_proj)"
    return get_peft_model(model, LoraConfig(r=4, target_modules=layers))


def step(model: Any) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for _ in range(2):
        model(input_ids=TOKENS[:1], labels=TOKENS[:1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written in copies of 4 MiB, which is more than these weights."""
    monkeypatch.setattr(digests, "PIECE", 2**12)
    monkeypatch.setattr(digests, "threads", lambda: 1)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.filterwarnings("ignore:other programs round the inputs")
def test_no_high_precision_copy_of_packed_weights(kind: str, tmp_path: Path) -> None:
    """Opened: the packed size, and the parts of one weight while it is made. A step with adapters: what it takes over a
    plain model, and one weight. Written back: less than one weight. Mapped files count as allocated. Prints the
    figures of docs/packed.md."""
    folder = publish(kind, tmp_path / "published", **SIZES[kind])
    mapped = 2 * max(file.stat().st_size for file in folder.glob("*.safetensors"))
    model, most, held = allocated(lambda: lowbit.load_pretrained(folder))
    weights = [p for p in model.parameters() if isinstance(p, LowbitTensor)]
    packed = max(p.nbytes_stored() for p in weights)
    values = max(p.numel() for p in weights) * model.dtype.itemsize
    plain = sum(p.nbytes for p in model.parameters() if not isinstance(p, LowbitTensor))
    assert held < sum(p.nbytes_stored() for p in weights) + plain + mapped
    assert most - held < 1.75 * packed  # the matrices of a stack, and the stack
    _, all_values, _ = allocated(lambda: [p.dequantize() for p in weights])
    assert all_values > 1.4 * values  # copies of all weights are seen

    high = lowbit.load_pretrained(folder)
    lowbit.dequantize_(high)
    models = adapted(model), adapted(high.requires_grad_(False))
    for each in models:  # makes what kernels keep
        step(each)
    own, theirs = (allocated(lambda each=each: step(each))[1] for each in models)
    assert own - theirs < 1.05 * values, (own, theirs, values)
    merged = models[0].unload()
    _, written, _ = allocated(lambda: lowbit.export(merged, tmp_path / "out", like=folder))
    assert written < values + mapped
    shares = (most - held) / packed, (own - theirs) / values, max(written - mapped, 0) / values
    stored = sum(p.nbytes_stored() for p in weights) / sum(p.numel() for p in weights)
    print(f"\n| {kind} | {stored:.2f} |", " | ".join(f"{share:.2f}" for share in shares), "|")
