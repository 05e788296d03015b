"""From one trainer to its servers: buckets of tensors, each after a message that describes it.

    receiver → sender    {"known": {name: {dtype, shape, digest}, …} or null}
    sender → receivers   {"tensors": [{name, dtype, shape, digest}, …], "nbytes": n}, and n bytes        for each bucket
                         {"end": true}, or {"error": "…"}

A bucket is one weight, or as many as fit into `bucket` bytes. Weights that all receivers know are left out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.files import digests
from lowbit.formats.shards import size_in_bytes
from lowbit.numerics.settings import check_flag
from lowbit.sync.channels import Channel, Message, channel
from lowbit.sync.source import TrainedModel
from lowbit.sync.streaming import Known, Stored, changed, check_known, chosen, weights

_ALIGNMENT = 16
"""Bytes: each tensor of a bucket begins at a multiple of them, so that the receiver views it in its dtype."""


class SyncError(RuntimeError):
    """The sender failed, or is gone."""


class Sent(NamedTuple):
    """What a transfer sent.

    Attributes:
        tensors: how many, of all receivers.
        nbytes: bytes of these tensors; each receiver got them once.
        buckets: how many messages with tensors.
        skipped: tensors that all receivers had.
    """

    tensors: int = 0
    nbytes: int = 0
    buckets: int = 0
    skipped: int = 0


def send(
    model: nn.Module,
    through: Any,
    format: str | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    lossy: bool = False,
    bucket: int | str = "64MB",
) -> Sent:
    """Send a model in training to the servers that call `receive`.

        group = lowbit.sync.connect("10.0.0.1:29600", rank=0, size=2)
        lowbit.sync.send(model, group)                          # after each optimizer step

    The tensors are those of `lowbit.sync.stream`. Memory: those of one weight and two buckets, beside the model. Under
    FSDP2 every rank calls it. The one in the group sends, and the others take part in the gathers.

    Args:
        model, format, like, lossy: as for `lowbit.sync.stream`.
        through: a process group whose rank 0 is this one and whose others receive, or a multiprocessing Connection to
            one receiver on this machine. None, or what `torch.distributed.new_group` gives ranks outside of the group:
            this rank sends nothing.
        bucket: bytes that travel at once, or as "64MB". A larger weight travels alone.

    Raises:
        FormatError and ValueError: as `stream` does. Receivers then raise SyncError.
        TypeError, ValueError: another `through`, or a group in which this rank is not the first.
    """
    check_flag("lossy", lossy)
    written, largest = chosen(format, like), size_in_bytes(bucket, "bucket")
    source = TrainedModel(model)
    found = weights(source, written, lossy)

    def take_part_in_the_rest() -> None:
        if like is None:
            source.take_part_in_the_rest()
        else:
            deque(found, maxlen=0)

    if through is None or isinstance(through, int):
        take_part_in_the_rest()
        return Sent()
    way = channel(through)
    if rank := way.rank:
        raise ValueError(f"this is rank {rank} of the group; rank 0 sends, and the others receive")
    try:
        known = _common([message["known"] for message in way.hear()])
        sent = _send_all(changed(found, known), way, largest)
    except Exception as error:
        with suppress(Exception):  # the receivers may be gone
            way.put({"error": f"{type(error).__name__}: {error}"})
        if source.is_shared:
            with suppress(Exception):  # the first error is the one to report
                take_part_in_the_rest()
        raise
    way.put({"end": True})
    return sent


def _common(all_known: list[Known | None]) -> Known | None:
    """What every receiver holds; None if none of them asks for digests."""
    if all(known is None for known in all_known):
        return None
    first, *others = (known or {} for known in all_known)
    return {n: e for n, e in first.items() if all(other.get(n) == e for other in others)}


Found = tuple[Stored, Known | None, bool]


def _send_all(found: Iterable[Found], way: Channel, largest: int) -> Sent:
    """Send the weights that differ. `largest`: bytes of a bucket."""
    tensors: Stored = {}
    entries: Known = {}
    counts = dict.fromkeys(Sent._fields, 0)

    def put() -> None:
        if not tensors:
            return
        places, size = _places(tensors.values())
        layouts = [{"name": name, **entry} for name, entry in entries.items()]
        sent = [*tensors.values()]
        # A connection moves the CPU tensor that it hands over into shared memory, so this is not the model's own.
        flat = _flat(sent, places, size, copy=way.shares_memory and not sent[0].is_cuda)
        way.put({"tensors": layouts, "nbytes": size}, flat)
        counts["tensors"] += len(tensors)
        counts["nbytes"] += sum(t.nbytes for t in tensors.values())
        counts["buckets"] += 1
        tensors.clear()
        entries.clear()

    for stored, own, differs in found:
        if not differs:
            counts["skipped"] += len(stored)
            continue
        if sum(t.nbytes for t in (*tensors.values(), *stored.values())) > largest:
            put()
        tensors |= stored
        entries |= digests.entries(stored, {}) if own is None else own
    put()
    return Sent(**counts)


def _places(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """The byte at which each tensor of a bucket begins, and the bytes of all."""
    places, end = [], 0
    for t in tensors:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + t.nbytes
    return places, end


def _flat(tensors: list[Tensor], places: list[int], size: int, copy: bool) -> Tensor:
    """The bytes of a bucket, uint8 [size]. `copy`: in memory of its own, also those of a single tensor."""
    as_bytes = [t.reshape(-1).view(torch.uint8) for t in tensors]
    if len(tensors) == 1 and not copy:
        return as_bytes[0]
    flat = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device)
    for begin, t in zip(places, as_bytes, strict=True):
        flat[begin : begin + len(t)].copy_(t)
    return flat


# ---- receiving -------------------------------------------------------------------------------------------------------


def receive(through: Any, *, known: Known | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `send` sends, one after another, in the names of the server: (name, tensor).

        group, known = lowbit.sync.connect("10.0.0.1:29600", rank=1, size=2), {}
        llm_model.load_weights(lowbit.sync.receive(group, known=known))     # vLLM, SGLang
        lowbit.sync.load_(model, lowbit.sync.receive(group, known=known))   # any module

    Tensors that stand for one weight follow each other. They stay valid after the loop, on the CPU, or on the GPU with
    NCCL. A tensor through a Connection lies in the sender's memory: copy it before the next one is asked for. After a
    loop that stops early the sender still finishes, and the rest is not loaded.

    Args:
        through: a process group, in which this rank is not the first; or a multiprocessing Connection to the sender.
        known: what the model holds, which the sender leaves out: an empty dict at first, and then the same dict, as
            each transfer leaves it. A tensor leaves it while it is loaded, so it is right after an error too. A server
            that restarts begins with an empty one. None: the sender sends everything, and hashes nothing.

    Raises:
        SyncError: the sender raised an error, which the message states. The tensors before it are loaded already.
        TypeError, ValueError: another `through`, or a group in which this rank is the first.
    """
    check_known(known)
    way = channel(through)
    if way.rank == 0:
        raise ValueError("this is rank 0 of the group, which sends; receivers have the other ranks")
    return _received(way, known)


def _received(way: Channel, known: Known | None) -> Iterator[tuple[str, Tensor]]:
    message: Message
    message, flat = _next(way, {"known": known})
    try:
        while "tensors" in message:
            layouts = message["tensors"]
            tensors = _views(flat, layouts)
            for layout, t in zip(layouts, tensors, strict=True):
                name = layout.pop("name")
                if known is not None:
                    known.pop(name, None)
                yield name, t
                if known is not None:
                    known[name] = layout
            message = {}  # if the sender is gone, nothing is left to hear
            message, flat = _next(way)
    finally:
        while "tensors" in message:  # of a loop that stopped
            message, flat = _next(way)
    if "error" in message:
        raise SyncError(f"the sender stopped: {message['error']}")


def _next(way: Channel, said: Message | None = None) -> tuple[Message, Tensor | None]:
    """The sender's next message, after saying something if given. Raises SyncError if the sender is gone."""
    try:
        if said is not None:
            way.say(said)
        return way.get()
    except (EOFError, OSError, RuntimeError) as error:
        raise SyncError(f"the sender is gone: {error or type(error).__name__}") from error


def _views(flat: Tensor | None, layouts: list[dict[str, Any]]) -> list[Tensor]:
    """The tensors of a bucket, views of its bytes."""
    like = [
        torch.empty(x["shape"], dtype=getattr(torch, x["dtype"]), device="meta") for x in layouts
    ]
    own = torch.empty(0, dtype=torch.uint8) if flat is None else flat
    return [
        own[begin : begin + t.nbytes].view(t.dtype).view(t.shape)
        for begin, t in zip(_places(like)[0], like, strict=True)
    ]
