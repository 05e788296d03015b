"""A trainer and a server: two processes, of which the second holds the model by the classes of transformers.

The server starts from a folder that `lowbit.sync.write` wrote, takes two transfers after training steps, and its logits
are those of the trainer's model, to the bit.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lowbit
from lowbit import qat, sync
from lowbit.testing import forked
from tests.integrations.models import SIZES, TOKENS, llama, loaded
from tests.sync.test_transfer import free_port

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")


class Case(NamedTuple):
    """How the trainer's model is made and prepared, and the format of the folder and of the stream."""

    format: str
    scheme: Any
    scales: str = "present"
    tied: bool = False
    experts: bool = False


CASES = {
    "compressed-tensors int4": Case("compressed-tensors", lowbit.Int4WeightOnly(32)),
    "compressed-tensors int8, tied": Case("compressed-tensors", lowbit.Int8WeightOnly(), tied=True),
    "compressed-tensors float8, learned": Case(
        "compressed-tensors", lowbit.Float8WeightOnly(), "learned"
    ),
    "lowbit int4": Case("lowbit", lowbit.Int4WeightOnly(32)),
    "lowbit nf4": Case("lowbit", lowbit.NF4WeightOnly(32), tied=True),
    "lowbit experts": Case("lowbit", lowbit.Int4WeightOnly(32), "learned", experts=True),
}


def model_of(case: Case) -> Any:
    if not case.experts:
        return llama(tie_word_embeddings=case.tied)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def step(model: Any) -> None:
    model.zero_grad()
    model(TOKENS, labels=TOKENS).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)


def packed_again(model: Any) -> None:
    """compressed-tensors unpacks a model at the first call."""
    quantizer = getattr(model, "hf_quantizer", None)
    if hasattr(quantizer, "compressor"):
        quantizer.compressor.compress_model(model)


def _serve(pipe: Any) -> None:
    """The server, which has no torch.distributed world: compressed-tensors would wait for its other ranks."""
    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        folder, port = request
        model, known = loaded(folder, torch.float32), {}
        group = sync.connect(f"127.0.0.1:{port}", 1, 2, timeout=100)
        for _ in range(2):
            assert sync.load_(model, sync.receive(group, known=known)) == len(known)
            with torch.no_grad():
                pipe.send(model(TOKENS).logits.numpy())
            packed_again(model)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """The pipe to the server, which imports transformers once for all cases."""
    ours, theirs = multiprocessing.Pipe()
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = forked.start(_serve, theirs, variables=variables)
    yield ours
    process.terminate()
    process.join(10)


@pytest.mark.parametrize("name", CASES)
def test_the_server_computes_the_logits_of_the_trainer(
    name: str, tmp_path: Path, server: Any
) -> None:
    case, folder, port = CASES[name], tmp_path / "served", free_port()
    if case.format == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    model = model_of(case)
    qat.prepare_(model, {"lm_head": None, "*": case.scheme}, scales=case.scales)
    sync.write(model, folder, case.format)
    server.send((folder, port))
    group = sync.connect(f"127.0.0.1:{port}", 0, 2, timeout=100)
    found = []
    for _ in range(2):
        step(model)
        assert sync.send(model, group, case.format).tensors > 10
        converted = copy.deepcopy(model)
        qat.convert_(converted)
        with torch.no_grad():
            found.append(converted(TOKENS).logits)
        assert server.poll(60)
        assert torch.equal(torch.from_numpy(server.recv()), found[-1])
    assert found[0].isfinite().all() and not torch.equal(*found)
