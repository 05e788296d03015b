"""Packed folders under FSDP2 on two gloo processes: trained, and written back with the bytes of one process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import lowbit
from lowbit import qat, sync
from lowbit.formats import FormatError
from lowbit.formats.shards import equal_bits
from lowbit.testing.launch import launch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from tests.integrations.models import TOKENS
from tests.integrations.packed_models import publish, stored, sums


class Case(NamedTuple):
    """Which folder, how it is trained, and with learned scales that train or not."""

    kind: str
    way: str
    scales: str = "learned"
    scales_train: bool = True


CASES = [
    Case("Kimi K2 int4", "QAT"),
    Case("Kimi K2 int4", "full"),
    Case("Kimi K2 int4", "LoRA"),
    Case("Qwen3-MoE float8", "full", scales_train=False),  # FSDP2 takes one dtype of trained ones
    Case("gpt-oss MXFP4", "QAT", "present"),
    Case("gpt-oss MXFP4", "LoRA"),
    Case("Qwen3 NVFP4", "QAT", "present"),
    Case("Qwen3-MoE int4", "int8"),
    Case("gpt-oss MXFP4", "int8"),
]


def shard(model: nn.Module) -> None:
    """Layer by layer, and the rest, over all processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [m for n, m in model.named_modules() if n.endswith(("layers.0", "layers.1"))]
    assert len(layers) == 2
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average


def trained(case: Case, folder: Path, sharded: bool) -> Any:
    """After two steps on the same tokens in each process, so that the mean of the gradients is that of one."""
    torch.manual_seed(0)
    model: Any = lowbit.load_pretrained(folder).requires_grad_(False)
    if case.way == "LoRA":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["q_proj", "q_b_proj", "o_proj"])
        model = get_peft_model(model, config)
    elif case.way == "int8":
        packed = {"*.mlp.experts.*": lowbit.Int8Weight(), "*": None}
        lowbit.train.prepare_(model, packed)
    else:
        qat.prepare_(model, scales=case.scales)
        if case.way == "full":
            model.requires_grad_(True)
        if not case.scales_train:
            for group in qat.parameter_groups(model, 0.0)[1:]:
                for p in group["params"]:
                    p.requires_grad_(False)
    if sharded:
        shard(model)
        experts = [p for n, p in model.named_parameters() if "experts" in n and p.ndim == 3]
        assert all(isinstance(p, DTensor) for p in experts)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def names(case: Case) -> str:
    return f"{case.kind} {case.way}".replace(" ", "-")


def check_written(rank: int, world_size: int, place: Path) -> list[str]:
    """The names of streamed tensors that differ from written ones."""
    found: list[str] = []
    for case in CASES:
        folder, out = place / case.kind, place / f"{names(case)}-sharded"
        model = trained(case, folder, sharded=True)
        if case.way == "LoRA":
            with pytest.raises(FormatError, match="have adapters of PEFT"):
                sync.write(model, out, like=folder)
            dcp.save(adapters(model), checkpoint_id=out)
            continue
        lossy = case.way == "int8"
        report = sync.write(model, out, like=folder, lossy=lossy)
        assert (report is None) == (rank == 1)
        with pytest.raises(FormatError, match="exists already") if rank == 0 else nullcontext():
            sync.write(model, out, like=folder, lossy=lossy)
        if case.kind == "gpt-oss MXFP4" and not lossy:  # both ranks get what one of them wrote
            dist.barrier()
            streamed = dict(sync.stream(model, like=folder))
            written = {name: t for name, (_, t) in stored(out).items()}
            assert streamed.keys() == written.keys()
            found += [name for name, t in written.items() if not equal_bits(t, streamed[name])]
    return found


def test_two_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    """Trained weights are gathered while they are written. Adapters go through a distributed checkpoint."""
    for kind in {case.kind for case in CASES}:
        publish(kind, tmp_path / kind)
    assert launch(check_written, 2, tmp_path) == [[], []]
    for case in CASES:
        folder = tmp_path / case.kind
        out, whole = (tmp_path / f"{names(case)}-{end}" for end in ("sharded", "whole"))
        model = trained(case, folder, sharded=False)
        if case.way == "LoRA":
            wanted = {n: p.clone() for n, p in adapters(model).items()}
            for p in adapters(model).values():
                p.zero_()
            dcp.load(adapters(model), checkpoint_id=out)
            assert all(torch.equal(p, wanted[n]) for n, p in adapters(model).items()), case
            lowbit.export(model.merge_and_unload(), whole, like=folder)
            assert sums(whole) != sums(folder)
            continue
        lossy = case.way == "int8"
        (lowbit.train if lossy else qat).convert_(model)
        lowbit.export(model, whole, like=folder, lossy=lossy)
        own, theirs = sums(out), sums(whole)
        assert [n for n in own if own[n] != theirs[n]] == [], case
        assert own != sums(folder)
