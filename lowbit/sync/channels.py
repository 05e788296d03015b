"""Channels between one sender and its receivers: a message of JSON, and after it bytes.

| channel                        | between                      | the bytes                                 |
|--------------------------------|------------------------------|-------------------------------------------|
| a process group                | ranks of gloo or NCCL        | the first rank broadcasts them            |
| a `multiprocessing` connection | two processes of one machine | torch.multiprocessing shares their memory |
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.tensor.core.collectives import released

Message = Mapping[str, Any]
"""What JSON holds."""


class Channel(Protocol):
    """One end. The sender calls `hear` and `put`, a receiver `say` and `get`."""

    shares_memory: bool
    """True if a receiver sees the memory that the sender puts."""
    rank: int | None
    """0 for the sender; None if the channel has no ranks."""

    def say(self, message: Message) -> None:
        """Tell the sender something, once before each transfer."""
        ...

    def hear(self) -> list[Message]:
        """What each receiver says."""
        ...

    def put(self, message: Message, payload: Tensor | None = None) -> None:
        """Send a message, and bytes, uint8 [n], whose number is its "nbytes". Returns once nobody reads them."""
        ...

    def get(self) -> tuple[Message, Tensor | None]:
        """The next message, and its bytes."""
        ...


class GroupChannel:
    """Over a process group, whose first rank sends. Bytes travel from and to GPUs if its backend is NCCL."""

    shares_memory = False

    def __init__(self, group: Any) -> None:
        self.group, self.rank = group, group.rank()
        self.device = torch.device("cuda" if group.name() == "nccl" else "cpu")

    def say(self, message: Message) -> None:
        for rank in range(1, self.group.size()):
            self._message(rank, message if rank == self.rank else None)

    def hear(self) -> list[Message]:
        return [self._message(rank, None) for rank in range(1, self.group.size())]

    def put(self, message: Message, payload: Tensor | None = None) -> None:
        self._message(0, message)
        if payload is not None and len(payload):
            self._broadcast(payload.to(self.device), 0)

    def get(self) -> tuple[Message, Tensor | None]:
        message = self._message(0, None)
        if not message.get("nbytes"):
            return message, None
        payload = torch.empty(message["nbytes"], dtype=torch.uint8, device=self.device)
        self._broadcast(payload, 0)
        return message, payload

    def _message(self, rank: int, message: Message | None) -> Message:
        text = b"" if message is None else json.dumps(message).encode()
        size = torch.tensor([len(text)], device=self.device)
        self._broadcast(size, rank)
        own = bytearray(text or int(size))
        sent = torch.frombuffer(own, dtype=torch.uint8).to(self.device)
        self._broadcast(sent, rank)
        return message if message is not None else json.loads(bytes(sent.cpu().numpy()))

    def _broadcast(self, t: Tensor, rank: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        with released(t):
            self.group.broadcast([t], options).wait()


class ConnectionChannel:
    """Over a `multiprocessing.connection.Connection` between the sender and one receiver, which trust each other.

    torch.multiprocessing hands the memory over: on the CPU shared memory, and on a GPU CUDA's handles.
    """

    shares_memory = True
    rank: int | None = None

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._owes = False

    def say(self, message: Message) -> None:
        self.connection.send(dict(message))

    def hear(self) -> list[Message]:
        return [self.connection.recv()]

    def put(self, message: Message, payload: Tensor | None = None) -> None:
        self.connection.send_bytes(ForkingPickler.dumps((dict(message), payload)))
        if payload is not None:
            self.connection.recv()  # the receiver is done with the memory

    def get(self) -> tuple[Message, Tensor | None]:
        if self._owes:
            self.connection.send({})
        message, payload = pickle.loads(self.connection.recv_bytes())
        self._owes = payload is not None
        return message, payload


def channel(through: Any) -> Channel:
    """The channel through a process group or a connection. Raises TypeError for anything else."""
    if isinstance(through, Connection):
        return ConnectionChannel(through)
    if isinstance(through, dist.ProcessGroup) or hasattr(through, "broadcast"):
        if through.size() < 2:
            raise ValueError("the group has one rank, the sender; give a group with a receiver")
        return GroupChannel(through)
    raise TypeError(
        f"tensors travel through a torch.distributed process group or a multiprocessing Connection, got {through!r:.80}"
    )


def connect(
    address: str, rank: int, size: int, *, backend: str = "gloo", timeout: float = 600.0
) -> Any:
    """A process group of a trainer and its servers, which need no torch.distributed world in common.

    Args:
        address: "host:port", on which rank 0 listens.
        rank: 0 for the trainer, 1 and more for its receivers.
        size: of the group.
        backend: "gloo", or "nccl" for tensors on GPUs, of which each rank has made its own the current one.
        timeout: seconds that a rank waits for another one.

    Raises ValueError for another address, rank or backend, and torch's `DistError`, a RuntimeError, if the others don't
    come.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address is {address!r}; accepted: 'host:port', such as '10.0.0.1:29600'")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; accepted: 0 to {size - 1}, size - 1")
    limit = timedelta(seconds=timeout)
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; accepted: 'gloo', 'nccl'")
    # rank 0 serves the others from here on, also those that connect after it
    store = dist.PrefixStore(
        "lowbit.sync", dist.TCPStore(host, int(port), is_master=rank == 0, timeout=limit)
    )
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)
