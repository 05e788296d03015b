"""Packed experts under transformers' expert parallelism, on two processes: gloo on a CPU, NCCL on two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import lowbit
from lowbit.tensor.core.base import LowbitTensor
from lowbit.testing.launch import launch

pytest.importorskip("safetensors")
pytest.importorskip("transformers", minversion="5.23")

from tests.integrations.models import TOKENS
from tests.integrations.packed_models import publish, sums

KINDS = ["gpt-oss MXFP4", "Qwen3-MoE int4", "Qwen3-MoE float8"]


def opened(folder: Path, device: str) -> Any:
    """In float32, where sums in another order hardly differ."""
    return lowbit.load_pretrained(folder).float().to(device)


def parallel(model: Any, device: str) -> Any:
    """The experts split over all processes, which take the same batch."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    experts = [n for n, m in model.named_modules() if n.endswith(".experts")]
    stacks = [n for n, _ in model.named_parameters() if n.rpartition(".")[0] in experts]
    plan = dict.fromkeys(stacks, "grouped_gemm") | dict.fromkeys(experts, "ep_dispatch_experts")
    mesh = init_device_mesh(device, (2,))
    return apply_expert_parallelism(model, mesh, mesh, plan)


def stored_bytes(weight: Tensor) -> int:
    """Of the memory behind the parts of a low-bit weight."""
    assert isinstance(weight, LowbitTensor)
    return sum(part.untyped_storage().nbytes() for part in weight.inner_tensors().values())


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def check(rank: int, world_size: int, place: Path, device: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    tokens = TOKENS.to(device)
    for kind in KINDS:
        folder = place / kind
        whole, model = opened(folder, device), parallel(opened(folder, device), device)
        low = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor) and p.ndim == 3}
        assert len(low) == 4
        own = sum(stored_bytes(p.to_local()) for p in low.values())
        share = own / sum(stored_bytes(whole.get_parameter(name)) for name in low)
        with torch.no_grad():
            forward = error(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)
        for one in (whole, model):
            one(input_ids=tokens, labels=tokens).loss.backward()
        name = "model.embed_tokens.weight"
        gradient = error(model.get_parameter(name).grad, whole.get_parameter(name).grad)
        found[kind] = {"share": share, "forward": forward, "gradient": gradient}
        for one in (whole, model):  # a step that changes one parameter
            one.model.norm.weight.data.mul_(2)
        lowbit.sync.write(model, place / f"{kind}-parallel", like=folder)
        if rank == 0:
            lowbit.export(whole, place / f"{kind}-whole", like=folder)
    return found


def check_qat(rank: int, world_size: int, place: Path, device: str) -> dict[str, list[float]]:
    """The losses of one process, and of two that split the experts, after steps of QAT."""
    found: dict[str, list[float]] = {}
    tokens = TOKENS.to(device)
    for kind in KINDS:
        folder = place / kind
        with pytest.raises(ValueError, match="is a DTensor: convert the model before"):
            lowbit.qat.prepare_(parallel(opened(folder, device), device))
        for way in ("whole", "parallel"):
            model = opened(folder, device).requires_grad_(False)
            lowbit.qat.prepare_(model, scales="learned")
            model = model if way == "whole" else parallel(model, device)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.5)
            for _ in range(2):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.setdefault(kind, []).append(loss.item())
            if way == "parallel" or rank == 0:
                lowbit.sync.write(model, place / f"{kind}-{way}", like=folder)
    return found


def by_two_ranks(check: Callable[..., Any], folder: Path, device: str) -> list[dict[str, Any]]:
    """What `check` finds in folders of all kinds, by ranks. Skips the test where it lacks GPUs."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; torch.cuda.device_count() is {torch.cuda.device_count()} here")
    for kind in KINDS:
        publish(kind, folder / kind)
    return launch(check, 2, folder, device, nccl=device == "cuda")


devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multigpu])]
)


@devices
def test_experts_that_two_processes_split_train_by_qat(tmp_path: Path, device: str) -> None:
    """With the losses of one process. On a CPU the written folder has its bytes."""
    for ranks in by_two_ranks(check_qat, tmp_path, device):
        for kind, (*whole, first, second) in ranks.items():
            assert [first, second] == pytest.approx(whole, rel=1e-5), kind
            assert second < first
    for kind in KINDS:
        written, whole = sums(tmp_path / f"{kind}-parallel"), sums(tmp_path / f"{kind}-whole")
        assert written.keys() == whole.keys()
        assert device == "cuda" or written == whole
        assert written != sums(tmp_path / kind)


@devices
def test_two_processes_hold_half_the_experts_each(tmp_path: Path, device: str) -> None:
    """With the logits and gradients of one process, and written back with its bytes."""
    for ranks in by_two_ranks(check, tmp_path, device):
        for kind, found in ranks.items():
            assert found["share"] == 0.5, kind
            assert found["forward"] < 1e-6 and found["gradient"] < 1e-6, (kind, found)
    for kind in KINDS:
        written = sums(tmp_path / f"{kind}-parallel")
        assert written == sums(tmp_path / f"{kind}-whole")
        before = sums(tmp_path / kind)
        assert [n for n in before if written[n] != before[n]] == ["model.norm.weight"]
