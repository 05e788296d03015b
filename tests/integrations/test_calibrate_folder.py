"""`lowbit.calibrate` of a folder: the bits that it gives in memory, block by block, also after a kill."""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit as lb
from lowbit.formats import FormatError
from lowbit.inference import AWQ, GPTQ, LearnedRounding, Prune24, Rotate, Search, Step
from lowbit.inference.calibration import large
from lowbit.inference.calibration.finished import Finished
from lowbit.inference.calibration.run import Run
from lowbit.inference.calibration.states import StatesInMemory, StatesOnDisk
from tests import forked

transformers = pytest.importorskip("transformers")
from lowbit.hf import LowbitConfig  # noqa: E402  # it imports transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
INT3 = lb.IntxWeightOnly(3, 32, "symmetric")
INT4 = lb.Int4WeightOnly(32)
STATIC = lb.Int8StaticActivationInt8Weight()


def save(folder: Path, kind: str = "Llama", nan: str = "", **changes: Any) -> Path:
    """The folder of a model in several shards, with an outlier in each norm. `nan`: a norm that has a NaN."""
    architecture = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    model = architecture(architecture.config_class(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(4 if p.ndim > 1 else 1)
            if name.endswith("layernorm.weight"):
                p[3] = 20.0 if name != nan else torch.nan
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def batches(seed: int = 0) -> list[dict[str, Tensor]]:
    made = []
    for length in (24, 24, 11):
        generator = torch.Generator().manual_seed(seed + length)
        ids = torch.randint(96, (3, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, length - 4 :] = 0
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def without_head(module: nn.Module, name: str) -> bool:
    return (isinstance(module, nn.Linear) and name != "lm_head") or name.endswith("experts")


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    own, other = state(found), state(wanted)
    assert own.keys() == other.keys()
    assert [name for name in own if not torch.equal(own[name], other[name])] == []


def left_beside(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.glob(f".{out.name}.*"))


KINDS: dict[str, tuple[str, dict[str, Any], Any, list[Step]]] = {
    "llama": ("Llama", {}, INT3, [GPTQ()]),
    "tied": (
        "Qwen2",
        {"tie_word_embeddings": True},
        {"*embed_tokens": INT3, "*": INT3},
        [Search(), LearnedRounding(steps=3)],
    ),
    "mixture": ("Qwen3Moe", EXPERTS, INT3, [GPTQ(asymmetric=0)]),
    "head, nvfp4": ("Llama", {}, {"lm_head": INT3, "*": lb.NVFP4WeightOnly()}, [Search(), GPTQ()]),
    "static": ("Llama", {}, {"lm_head": STATIC, "*": STATIC}, []),
    "over the model": (
        *("Llama", {"num_hidden_layers": 2}, INT3),
        [Search(), LearnedRounding(steps=3, over="model")],
    ),
    "one block": ("Llama", {"num_hidden_layers": 1}, INT3, [GPTQ()]),
    "pruned": (
        *("Qwen3Moe", EXPERTS, INT3),
        [Prune24(compressed=True), GPTQ(asymmetric=0)],
    ),
    "rotated": ("Llama", {}, lb.MXFP4WeightOnly(), [Rotate(folded=False), GPTQ()]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_bits_of_memory(kind: str, tmp_path: Path) -> None:
    name, changes, scheme, steps = KINDS[kind]
    folder, out = save(tmp_path / "model", name, **changes), tmp_path / "out"
    on_disk = {"cache": tmp_path} if kind == "llama" else {}
    options = {"format": "lowbit", "max_shard_size": "30KB", **on_disk}
    report = lb.calibrate(folder, scheme, batches(), steps=steps, out=out, **options)  # type: ignore[call-overload]
    model = lb.load_pretrained(folder)
    own = None if isinstance(scheme, dict) else without_head
    expected = lb.calibrate(model, scheme, batches(), own, steps=steps)
    assert_same(lb.load_pretrained(out), model)
    assert list(report.layers) == list(expected.layers)
    for layer, other in zip(report.layers.values(), expected.layers.values(), strict=True):
        assert (layer.after, layer.before, layer.rows) == (other.after, other.before, other.rows)
    assert report.learned == expected.learned
    assert report.left == expected.left or isinstance(scheme, lb.Scheme)
    assert report.low_bit_nbytes == expected.low_bit_nbytes and report.nbytes == expected.nbytes
    notes = report.written.notes  # type: ignore[union-attr]
    whole = [note for note in notes if "the model was whole in memory" in note]
    assert len(whole) == (kind in ("one block", "over the model"))
    assert left_beside(out) == [] and sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_formats(tmp_path: Path) -> None:
    """vLLM's format stores bfloat16 scales of this float32 model; gptq float16."""
    folder = save(tmp_path / "model")
    scheme = lb.Int4WeightOnly(32)
    for format in ("compressed-tensors", "gptq"):
        lb.calibrate(folder, scheme, batches(), out=tmp_path / format, format=format)
        model = lb.load_pretrained(folder)
        lb.calibrate(model, lb.formats.grid(format, scheme), batches(), without_head)
        found = lb.load_pretrained(tmp_path / format)
        for (name, a), (_, b) in zip(
            found.named_parameters(), model.named_parameters(), strict=True
        ):
            if isinstance(b, lb.AffineTensor):
                assert torch.equal(a.dequantize(), b.dequantize()), name


def test_the_head_is_reached_where_steps_fold(tmp_path: Path) -> None:
    folder, out = save(tmp_path / "model"), tmp_path / "out"
    scheme = {"lm_head": lb.Int8WeightOnly(), "*": INT3}
    report = lb.calibrate(folder, scheme, batches(), steps=[AWQ(grid=2)], out=out, format="lowbit")
    assert report.layers["lm_head.weight"].rows > 0
    assert isinstance(lb.load_pretrained(out).lm_head.weight, lb.AffineTensor)


def test_folding_in_a_block(tmp_path: Path) -> None:
    """The same pairs and α as in memory, and outputs that differ by rounding alone."""
    folder, out = save(tmp_path / "model"), tmp_path / "out"
    steps = [
        AWQ(grid=4),
        Search(),
    ]  # whose scales, unlike those of the largest values, make no ties
    report = lb.calibrate(folder, INT3, batches(), steps=steps, out=out, format="lowbit")
    model = lb.load_pretrained(folder)
    expected = lb.calibrate(model, INT3, batches(), without_head, steps=steps)
    methods = [layer.method for layer in report.layers.values()]
    assert methods == [layer.method for layer in expected.layers.values()]
    assert sum("into model.layers." in method for method in methods) >= 15
    batch = batches()[0]
    with torch.no_grad():
        found, wanted = (m(**batch).logits for m in (lb.load_pretrained(out), model))
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.parametrize("kind", ["tied", "static", "pruned"])
def test_a_config_calibrates_at_load_time(kind: str, tmp_path: Path) -> None:
    """The model of `calibrate` in memory; and what it writes is read without batches."""
    name, changes, scheme, steps = KINDS[kind]
    folder = save(tmp_path / "model", name, **changes)
    config = LowbitConfig(scheme, batches=batches(), steps=steps)
    architecture = getattr(transformers, f"{name}ForCausalLM")
    found = architecture.from_pretrained(folder, quantization_config=config)
    model = lb.load_pretrained(folder)
    own = None if isinstance(scheme, dict) else without_head
    expected = lb.calibrate(model, scheme, batches(), own, steps=steps)
    assert_same(found, model)
    report = found.hf_quantizer.report
    assert report.converted == expected.converted and "error" in str(report)
    assert "batches" not in config.to_dict() and "batches" not in str(found.config.to_dict())
    found.save_pretrained(tmp_path / "saved")
    assert_same(architecture.from_pretrained(tmp_path / "saved"), model)


@pytest.mark.parametrize("kind", ["tied", "mixture", "head, nvfp4"])
def test_without_batches(kind: str, tmp_path: Path) -> None:
    """A folder, a model at load time and one in memory get the same bits."""
    name, changes, scheme, _ = KINDS[kind]
    folder, out, steps = save(tmp_path / "model", name, **changes), tmp_path / "out", [GPTQ()]
    written: Any = {"format": "lowbit", "overwrite": True}
    report = lb.calibrate(folder, scheme, steps=steps, out=out, **written)
    assert "whole in memory: there are no batches" in str(report.written)
    assert all(layer.method.startswith("GPTQ") for layer in report.layers.values())
    model = lb.load_pretrained(folder)
    lb.calibrate(
        model, scheme, None, None if isinstance(scheme, dict) else without_head, steps=steps
    )
    assert_same(lb.load_pretrained(out), model)
    architecture = getattr(transformers, f"{name}ForCausalLM")
    config = LowbitConfig(scheme, steps=steps)
    assert_same(architecture.from_pretrained(folder, quantization_config=config), model)
    with pytest.raises(ValueError, match="LearnedRounding: needs batches"):
        lb.calibrate(folder, scheme, steps=[LearnedRounding()], out=out, **written)
    with pytest.raises(TypeError, match="not read without batches"):
        lb.calibrate(folder, scheme, steps=steps, out=out, cache=tmp_path)


def test_what_a_config_refuses() -> None:
    for given, kind, message in (
        ({"steps": [GPTQ()], "scales": "searched"}, ValueError, "beside batches or steps"),
        ({"batches": batches(), "scales": "searched"}, ValueError, "beside batches"),
        ({"batches": batches()[0]}, TypeError, "a list of batches, got one dict"),
        ({"batches": batches(), "steps": GPTQ()}, TypeError, "steps must be a list"),
    ):
        with pytest.raises(kind, match=message):
            LowbitConfig("int4", **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="or give batches="):
        LowbitConfig(STATIC)


def test_tensors_on_disk(tmp_path: Path) -> None:
    """Odd shapes and dtypes, an empty one, and one that grows."""
    first = [torch.randn(3, 5).bfloat16(), torch.empty(0, 4), torch.tensor(torch.nan)]
    held = StatesOnDisk(tmp_path, first)
    assert list(tmp_path.iterdir()) == []  # the file has no name, so a kill leaves nothing
    held[0] = larger = torch.randn(2, 7, 3).mT
    held.append(last := torch.arange(5))
    assert [held.shape(i) for i in range(4)] == [larger.shape, *(t.shape for t in first[1:]), (5,)]
    for found, wanted in zip(held, [larger, *first[1:], last], strict=True):
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_tensors_in_memory() -> None:
    """A tensor that somebody else has is never written to; a copy is, by the next one of its shape and dtype."""
    given = torch.randn(3, 5)
    before = given.clone()
    for copies in (False, True):
        held = StatesInMemory(torch.device("cpu"), [given], copies)
        place = held[0].data_ptr()
        held[0] = first = torch.randn(3, 5)
        assert torch.equal(held[0], first) and (held[0].data_ptr() == place) == copies
        kept = first.clone()
        held[0] = torch.randn(3, 5)
        assert torch.equal(first, kept) and torch.equal(given, before)
        held[0] = larger = torch.randn(4, 5).bfloat16()
        assert held[0].dtype is torch.bfloat16 and torch.equal(held[0], larger)


@pytest.mark.gpu
def test_tensors_of_a_gpu_in_host_memory() -> None:
    """In locked pages, which the next tensor takes."""
    first, second = (torch.randn(300, 70, device="cuda").mT for _ in range(2))
    held = StatesInMemory(torch.device("cpu"), [first])
    place = held[0].data_ptr()
    assert held[0].is_pinned() and torch.equal(held[0], first.cpu())
    assert held[0].stride() == first.stride()
    held[0] = second
    assert held[0].data_ptr() == place and torch.equal(held[0].cuda(), second)
    large, wanted = torch.zeros(2**26, device="cuda"), torch.ones(2**26)
    held.append(large)
    for _ in range(2):  # the GPU is still at work when the host goes on
        held[1] = large + torch.eye(3000, device="cuda").matrix_power(2**20)[0, 0]
        assert torch.equal(held[1], wanted)
    other = StatesInMemory(torch.device("cpu"), held, copy=True)
    assert other[0].is_pinned() and other[0].data_ptr() != place


# ---- memory -------------------------------------------------------------------------------------------------------


def held_bytes() -> int:
    """Bytes of all tensors that are alive on the CPU, without views of files."""
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if found.device.type == "cpu" and found.layout is torch.strided:
                    storage = found.untyped_storage()
                    if storage.resizable():
                        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("asymmetric", "most"), [(0.0, 1.6), (1.0, 1.8)])
def test_one_block_is_in_memory(
    asymmetric: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are large beside all else: one, and a copy of it where a step compares."""
    changes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 5}
    folder = save(tmp_path / "model", **changes)
    block = 4 * (3 * 128 * 512 + 3 * 128 * 128)
    gc.collect()  # what earlier tests left would be freed meanwhile
    before, peaks, rounds = held_bytes(), [0], Run._round

    def counted(run: Run, *arguments: Any) -> None:
        peaks.append(held_bytes() - before)
        rounds(run, *arguments)

    monkeypatch.setattr(Run, "_round", counted)
    steps = [Search()] if not asymmetric else [GPTQ(asymmetric=asymmetric)]
    short = [{"input_ids": batch["input_ids"][:1, :8]} for batch in batches()]
    lb.calibrate(folder, INT3, short, steps=steps, out=tmp_path / "out", cache=tmp_path)
    # a Hessian of down_proj and what GPTQ makes of it are larger than a block here
    beside = 4 * 512**2 * 3 if asymmetric else 0
    assert len(peaks) == 5 * 7 + 1
    assert 0.5 * block < max(peaks) < most * block + beside


# ---- kills and resumes ---------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
import lowbit as lb
from lowbit.files import tensor_file
from lowbit.inference.calibration.finished import Finished
from lowbit.inference.calibration.large import Streamed
from tests.integrations import test_calibrate_folder as test

folder, out, kind, at, where = sys.argv[1:]
write, file, count = Finished.write, tensor_file.write, 0

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def counted(self, name, tensors, results):
    global count
    count += 1
    if count == int(at) and where == "in a write":
        def half(path, tensors, describe):
            file(path, tensors, describe)
            os.truncate(path, path.stat().st_size // 2)
            kill()
        tensor_file.write = half
    write(self, name, tensors, results)
    if count == int(at):
        kill()

Finished.write = counted
_, _, scheme, steps = test.KINDS[kind]
lb.calibrate(folder, scheme, test.batches(), steps=steps, out=out, format="lowbit")
"""


def kill_at(folder: Path, out: Path, kind: str, at: int, where: str) -> None:
    done = forked.run(CHILD, folder, out, kind, at, where, folder=Path.cwd())
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the weights that are rounded."""
    names: list[str] = []
    rounds = Run._round

    def counted(run: Run, target: Any, *arguments: Any) -> None:
        names.append(target.owners[0].fqn)
        rounds(run, target, *arguments)

    monkeypatch.setattr(Run, "_round", counted)
    yield names


@pytest.mark.parametrize(
    ("kind", "at", "where"), [("llama", 2, "in a write"), ("tied", 2, "after a block")]
)
def test_a_killed_calibration_goes_on_to_the_same_bits(
    kind: str, at: int, where: str, tmp_path: Path, rounded: list[str]
) -> None:
    name, changes, scheme, steps = KINDS[kind]
    folder, out, whole = save(tmp_path / "model", name, **changes), tmp_path / "a", tmp_path / "b"
    kill_at(folder, out, kind, at, where)
    finished = at if where == "after a block" else at - 1
    assert len(list((tmp_path / ".a.lowbit-calibration/model").iterdir())) == finished
    options: dict[str, Any] = {"steps": steps, "format": "lowbit"}
    report = lb.calibrate(folder, scheme, batches(), out=out, **options)
    again = list(rounded)
    expected = lb.calibrate(folder, scheme, batches(), out=whole, **options)
    first = len(rounded) - 2 * len(again)
    assert first == {"llama": 7, "tied": 8}[kind]  # the tied embedding comes before its blocks
    assert_same(lb.load_pretrained(out), lb.load_pretrained(whole))
    assert list(report.layers) == list(expected.layers) and report.learned == expected.learned
    assert {n: x.after for n, x in report.layers.items()} == {
        n: x.after for n, x in expected.layers.items()
    }
    assert report.low_bit_nbytes == expected.low_bit_nbytes and report.left == expected.left
    assert left_beside(out) == []


def test_a_tied_weight_with_the_name_of_the_head_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "model", tie_word_embeddings=True)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
            save_file(tensors, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.embed_tokens.weight", "lm_head.weight"))
    scheme = {"*embed_tokens": INT3, "*": INT3}
    call: dict[str, Any] = {"steps": [Search()], "format": "lowbit"}
    lb.calibrate(folder, scheme, batches(), out=tmp_path / "whole", **call)
    real = Finished.write
    for last in ("before", "after"):
        out = tmp_path / last

        def write(finished: Finished, name: str, *given: Any, last: str = last) -> None:
            real(finished, name, *given)
            if name == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Finished, "write", write)
            lb.calibrate(folder, scheme, batches(), out=out, **call)
        lb.calibrate(folder, scheme, batches(), out=out, **call)
        assert_same(lb.load_pretrained(out), lb.load_pretrained(tmp_path / "whole"))


def test_what_is_calibrated_is_only_written(
    tmp_path: Path, rounded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an end during the export, and in another format than before."""
    folder, out = save(tmp_path / "model"), tmp_path / "out"

    def export(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(large, "export", export)
        lb.calibrate(folder, INT3, batches(), steps=[Search()], out=out)
    assert len(rounded) == 21
    report = lb.calibrate(folder, INT3, batches(), steps=[Search()], out=out, format="lowbit")
    assert len(rounded) == 21 == len(report.layers) == len(report.converted)
    model = lb.load_pretrained(folder)
    expected = lb.calibrate(model, INT3, batches(), without_head, steps=[Search()])
    assert_same(lb.load_pretrained(out), model)
    assert report.low_bit_nbytes == expected.low_bit_nbytes


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose calibration ended after its first block."""
    folder = save(tmp_path / "model")

    def write(finished: Finished, name: str, tensors: Any, results: Any) -> None:
        real(finished, name, tensors, results)
        raise KeyboardInterrupt

    real = Finished.write
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Finished, "write", write)
        lb.calibrate(folder, INT3, batches(), steps=[Search()], out=tmp_path / "out")
    return folder


def test_another_call_does_not_go_on(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = interrupted.parent / "out"
    for given, steps, seed, what in (
        (INT3, [Search()], 1, "another list of batches:"),
        (INT3, [GPTQ(damping=0.02)], 0, "another list of steps:"),
        (lb.Int4WeightOnly(32), [GPTQ()], 0, "another scheme and another list of steps:"),
    ):
        with pytest.raises(FormatError, match=what):
            lb.calibrate(interrupted, given, batches(seed), steps=steps, out=out)
    with monkeypatch.context() as patched:
        patched.setattr(large, "version", lambda name: "0.0")
        with pytest.raises(FormatError, match="another set of releases:"):
            lb.calibrate(interrupted, INT3, batches(), steps=[Search()], out=out)
    with pytest.raises(TypeError, match="takes no scales; accepted for a folder: format"):
        lb.calibrate(interrupted, INT3, batches(), out=out, scales="searched")  # type: ignore[call-overload]
    save(interrupted, vocab_size=97)
    with pytest.raises(FormatError, match="another folder:"):
        lb.calibrate(interrupted, INT3, batches(), steps=[Search()], out=out)
    assert not out.exists()


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    from lowbit.files import new_path

    folder, out = save(tmp_path / "model"), tmp_path / "out"
    with (
        new_path.kept(out, "calibration"),
        pytest.raises(FormatError, match="another process calibrates to"),
    ):
        lb.calibrate(folder, INT3, batches(), out=out)


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_the_layer_with_nan_inputs_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", nan="model.layers.1.input_layernorm.weight")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight have NaN.*delete"):
        lb.calibrate(folder, INT3, batches(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_part_is_refused(interrupted: Path) -> None:
    out = interrupted.parent / "out"
    part = out.parent / ".out.lowbit-calibration/model/model-0.safetensors"
    part.write_bytes(part.read_bytes()[:-7])
    with pytest.raises(FormatError, match=r"model-0\.safetensors cannot be read"):
        lb.calibrate(interrupted, INT3, batches(), steps=[Search()], out=out)


def test_what_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder, out = save(tmp_path / "model"), tmp_path / "out"
    turned, file = [Rotate(folded=False)], tmp_path / "out.gguf"
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, TypeError, "takes out="),
        ({"out": out, "blocks": []}, TypeError, "no blocks="),
        ({"out": out, "format": "awk"}, FormatError, "awk"),
        ({"out": out, "format": "onnx"}, FormatError, "a program"),
        ({"out": out, "max_shard_size": "much"}, FormatError, "much"),
        ({"out": folder}, FormatError, "is the folder that is read"),
        ({"out": tmp_path / "no/out"}, FormatError, "make it first"),
        ({"out": out, "cache": tmp_path / "no"}, ValueError, "a folder that exists"),
        ({"out": out, "format": "gptq", "scheme": STATIC}, FormatError, "cannot hold"),
        ({"out": out, "tokenizer": None}, TypeError, "tokenizer"),
        ({"out": out, "steps": [Rotate(), GPTQ()]}, FormatError, r"Rotate\(online=False\)"),
        ({"out": out, "batches": batches()[0]}, TypeError, "a list of batches, got one dict"),
        (
            {"out": out, "scheme": {"*embed_tokens": INT3}},
            FormatError,
            "the weight of an embedding",
        ),
        ({"out": file, "format": "gguf"}, FormatError, "cannot hold"),
        ({"out": file, "format": "gguf", "scheme": INT4}, FormatError, "needs a tokenizer"),
        (
            {"out": out, "scheme": lb.Int4WeightOnly(64)},
            FormatError,
            "96 inputs are not a multiple",
        ),
        ({"out": out, "scheme": lb.Float8WeightOnly(), "steps": turned}, ValueError, "integers or"),
    ]
    for given, kind, message in refused:
        with pytest.raises(kind, match=message):
            lb.calibrate(folder, **{"scheme": INT3, "batches": batches(), **given})
    with pytest.raises(TypeError, match="out: for a folder"):
        lb.calibrate(nn.Linear(32, 32), INT3, [torch.ones(1, 32)], out=out, format="lowbit")
    with pytest.raises(TypeError, match="is calibrated by batches"):
        lb.calibrate(folder, INT3)
    lb.calibrate(folder, INT3, batches(), steps=[Search()], out=out)
    with pytest.raises(FormatError, match="in low bits already"):
        lb.calibrate(out, INT3, batches(), out=tmp_path / "twice")
    with pytest.raises(FormatError, match="exists already"):
        lb.calibrate(folder, INT3, batches(), out=out)
    assert left_beside(out) == []
