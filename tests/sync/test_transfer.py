"""send and receive: what travels, what is left out, errors on either side, and a receiver that restarts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowbit
from lowbit import qat, sync
from lowbit.formats import FormatError
from lowbit.formats.shards import equal_bits
from lowbit.sync import transfer
from lowbit.sync.channels import GroupChannel
from lowbit.testing import forked
from lowbit.testing.launch import launch
from tests.formats.models import build

INT4 = lowbit.Int4WeightOnly(32)


def trained() -> nn.Module:
    model = build()
    qat.prepare_(model, {"*_proj": INT4, "*": None})
    return model


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not equal_bits(a[name].cpu(), b[name].cpu())]


def change(model: Any, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(0.5)


# ---- what travels ----------------------------------------------------------------------------------------------------


def check_skipping(rank: int, world_size: int, device: str, port: int) -> list[Any]:
    """Every step is a transfer after which the receiver holds what the trainer streams."""
    group: Any = dist.group.WORLD
    if device == "cuda":
        group = sync.connect(f"127.0.0.1:{port}", rank, world_size, backend="nccl")
    model, found = trained().to(device), []
    known: dict[str, Any] | None = {}
    held: dict[str, Tensor] = {}
    for step in ("first", "nothing new", "one weight", "restarted", "without digests"):
        if step == "one weight":
            change(model, "up_proj.weight")
        if step == "restarted":
            held, known = {}, {}
        if step == "without digests":
            known = None
        if rank == 0:
            found.append(sync.send(model, group)[:1] + sync.send(model, group)[3:])
            continue
        got = dict(sync.receive(group, known=known))
        again = dict(sync.receive(group, known=known))
        held |= got
        assert all(t.device.type == device for t in got.values())
        assert known is not None or again.keys() == got.keys()
        assert not differing(held, dict(sync.stream(model)))
        found.append((len(got), 0 if known is None else len(known)))
    return found


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multigpu])]
)
def test_unchanged_weights_stay_at_home(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; torch.cuda.device_count() is {torch.cuda.device_count()} here")
    on_gpus = device == "cuda"
    sender, receiver = launch(check_skipping, 2, device, free_port(), nccl=on_gpus)
    # (tensors of the first transfer, tensors that the second one leaves out)
    assert sender == [(11, 11), (0, 11), (3, 11), (11, 11), (11, 0)]
    assert receiver == [(11, 11), (0, 11), (3, 11), (11, 11), (11, 0)]


def check_two_receivers(rank: int, world_size: int) -> int:
    """A weight stays at home only if all receivers have it."""
    group, model = dist.group.WORLD, trained()
    if rank == 0:
        sync.send(model, group)
        return sync.send(model, group).tensors
    known: dict[str, Any] = {}
    first = dict(sync.receive(group, known=known))
    if rank == 2:
        known.pop("norm.weight")
    second = dict(sync.receive(group, known=known))
    assert not differing(first, dict(sync.stream(model)))
    return len(second)


def test_two_receivers_get_the_same() -> None:
    assert launch(check_two_receivers, 3) == [1, 1, 1]


TENSORS = {
    "empty": torch.empty(0, 3),
    "odd": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "shape": torch.tensor([2**40, -1]),
    "float8": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "nan": torch.tensor([0x7F81], dtype=torch.int16).view(torch.bfloat16),
    "double": torch.randn(3, dtype=torch.float64),
}


def check_buckets(rank: int, world_size: int, largest: int) -> int:
    way = GroupChannel(dist.group.WORLD)
    if rank == 1:
        got = dict(transfer._received(way, None))
        assert not differing(got, TENSORS) and [*got] == [*TENSORS]
        return len(got)
    way.hear()
    found = [({name: t}, None, True) for name, t in TENSORS.items()]
    sent = transfer._send_all(found, way, largest)
    way.put({"end": True})
    assert sent.nbytes == sum(t.nbytes for t in TENSORS.values())
    return sent.buckets


@pytest.mark.parametrize(("largest", "buckets"), [(1, 8), (24, 4), (10**6, 1)])
def test_tensors_of_every_kind_travel_in_buckets(largest: int, buckets: int) -> None:
    assert launch(check_buckets, 2, largest) == [buckets, len(TENSORS)]


# ---- errors ----------------------------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_errors(rank: int, world_size: int) -> list[str]:
    """A transfer that fails on one side ends on both, and the next one works."""
    group, model, found = dist.group.WORLD, trained(), []
    if rank == 0:
        held: Any = model.get_parameter("down_proj.weight")
        kept = held.weight[0, 0].clone()
        held.weight[0, 0] = torch.nan
        found.append(raised(lambda: sync.send(model, group)))
        held.weight[0, 0] = kept
        found.append(raised(lambda: sync.send(model, group, "fp8")))
        found.append(raised(lambda: sync.send(model, group)))
        found.append(raised(lambda: dict(sync.receive(group))))
        return [*found, raised(lambda: sync.send(model, group))]
    known: dict[str, Any] = {}
    found += [raised(lambda: dict(sync.receive(group, known=known))) for _ in range(2)]
    for name, _ in sync.receive(group, known=known):
        if name == "norm.weight":
            break
    assert "norm.weight" not in known
    found.append(raised(lambda: sync.send(model, group)))
    rest = dict(sync.receive(group, known=known))
    assert rest.keys() < dict(sync.stream(model)).keys() and "norm.weight" in rest
    assert known.keys() == dict(sync.stream(model)).keys()
    return found


def test_an_error_ends_the_transfer_on_both_sides() -> None:
    sender, receiver = launch(check_errors, 2)
    nan, refused, early, as_receiver, rest = sender
    assert nan.startswith("ValueError: down_proj.weight, or a scale of it, has 1 NaN")
    assert refused.startswith("FormatError: fp8 cannot hold up_proj.weight")
    assert early == rest == ""
    assert (
        as_receiver
        == "ValueError: this is rank 0 of the group, which sends; receivers have the other ranks"
    )
    assert receiver[0] == f"SyncError: the sender stopped: {nan}"
    assert receiver[1] == f"SyncError: the sender stopped: {refused}"
    assert receiver[2].startswith("ValueError: this is rank 1 of the group; rank 0 sends")


def test_bad_arguments_are_named() -> None:
    model = trained()
    for wrong in ("localhost:1", object()):
        with pytest.raises(TypeError, match=r"process group or a multiprocessing Connection, got"):
            sync.send(model, wrong)
    with pytest.raises(
        FormatError, match=r"gguf is one file.*accepted: lowbit, compressed-tensors"
    ):
        sync.send(model, None, "gguf")
    with pytest.raises(FormatError, match=r"bucket is 'much'; accepted"):
        sync.send(model, None, bucket="much")
    for address in ("host", ":1", "host:port"):
        with pytest.raises(ValueError, match=r"accepted: 'host:port'"):
            sync.connect(address, 0, 2)
    with pytest.raises(ValueError, match=r"rank is 2; accepted: 0 to 1"):
        sync.connect("localhost:1", 2, 2)
    with pytest.raises(ValueError, match=r"backend is 'mpi'; accepted: 'gloo', 'nccl'"):
        sync.connect("localhost:1", 0, 2, backend="mpi")


# ---- processes without a world in common -----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _die_while_receiving(port: int) -> None:
    group = sync.connect(f"127.0.0.1:{port}", 1, 2, timeout=60)
    for _ in sync.receive(group, known={}):
        os._exit(1)


def _serve_again(pipe: Any, port: int) -> None:
    group, known = sync.connect(f"127.0.0.1:{port}", 1, 2, timeout=60), {}
    counts = [len(dict(sync.receive(group, known=known))) for _ in range(2)]
    pipe.send(counts)


def test_a_server_that_restarts_gets_everything() -> None:
    """The trainer and the server are processes of their own, and the first server is killed in a transfer."""
    model, ports = trained(), [free_port(), free_port()]
    ours, theirs = multiprocessing.Pipe()
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    first = forked.start(_die_while_receiving, ports[0], variables=variables)
    group = sync.connect(f"127.0.0.1:{ports[0]}", 0, 2, timeout=60)
    with pytest.raises(RuntimeError):
        sync.send(model, group, bucket=1)
    first.join(30)
    second = forked.start(_serve_again, theirs, ports[1], variables=variables)
    group = sync.connect(f"127.0.0.1:{ports[1]}", 0, 2, timeout=60)
    assert sync.send(model, group).tensors == 11
    change(model, "norm.weight")
    assert sync.send(model, group).tensors == 1
    assert ours.recv() == [11, 1]
    second.join(30)


def _serve_through(pipe: Any, count: int) -> None:
    """Copy what lies in the sender's memory, and say whether it does."""
    known: dict[str, Any] = {}
    for _ in range(count):
        got = {}
        for name, t in sync.receive(pipe, known=known):
            got[name] = t.clone()
            assert t.untyped_storage().is_shared()
        pipe.send({name: t.float().sum().item() for name, t in got.items()})


def test_a_sender_that_is_gone_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(sync.SyncError, match="the sender is gone"):
        list(sync.receive(ours))
    ours, theirs = multiprocessing.Pipe()
    bucket = {"tensors": [{"name": "a", "shape": [0], "dtype": "int8"}]}
    theirs.send_bytes(pickle.dumps((bucket, None)))
    received = sync.receive(ours)
    assert next(received)[0] == "a"
    theirs.close()
    with pytest.raises(sync.SyncError, match="the sender is gone"):
        next(received)


def test_a_connection_shares_memory() -> None:
    model = trained()
    ours, theirs = multiprocessing.Pipe()
    server = forked.start(_serve_through, theirs, 2, variables={"OMP_NUM_THREADS": "1"})
    before = {name: t.untyped_storage().is_shared() for name, t in model.state_dict().items()}
    sent = sync.send(model, ours)
    expected = {name: t.float().sum().item() for name, t in sync.stream(model)}
    assert ours.recv() == expected and sent.tensors == len(expected)
    change(model, "up_proj.weight")
    assert sync.send(model, ours, bucket=1).tensors == 3
    assert ours.recv().keys() == {f"up_proj.weight_{part}" for part in ("packed", "scale", "shape")}
    after = {name: t.untyped_storage().is_shared() for name, t in model.state_dict().items()}
    assert before == after and not any(before.values())
    server.join(30)
