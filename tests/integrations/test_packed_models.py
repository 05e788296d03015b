"""Published folders opened packed, trained and written back: the same names, dtypes, shards and config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import LowbitTensor, qat, sync
from lowbit.formats import FormatError
from lowbit.formats.folder import Folder
from lowbit.formats.shards import equal_bits
from lowbit.schemes.mixed_precision import UE8M0_BLOCK_WEIGHT
from tests.integrations import models
from tests.integrations.models import TOKENS, fill_adapters, logits, train
from tests.integrations.packed_models import (
    KINDS,
    is_read_by_transformers,
    publish,
    rewrite,
    stored,
    sums,
    unpacked,
)
from tests.schemes import relative_error

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*takes new values, rounded to its own codes"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),
]

every_kind = pytest.mark.parametrize("kind", KINDS)


def is_masked(kind: str) -> bool:
    """True for formats whose scales are not learned."""
    return any(name in kind for name in ("MXFP4", "MXFP8", "NVFP4"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: Any) -> Callable[[str], Path]:
    """The folder of each kind, made once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = publish(kind, tmp_path_factory.mktemp("packed") / "published")
        return made[kind]

    return of


def packed_weights(model: Any) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, LowbitTensor)}


def prepare(kind: str, model: Any) -> Any:
    """For QAT with scales that learn, where the format has such."""
    # the class of o_a_proj has products of its own
    report = qat.prepare_(
        model, filter_fn=lambda module, name: not name.endswith("o_a_proj"), scales="learned"
    )
    notes = [entry.note for entry in report.entries if entry.converted]
    assert all("present scales, as it stores them" in note for note in notes) == is_masked(kind)
    return report


def adapted(model: Any) -> Any:
    """LoRA on the attention, whose gradients pass all packed weights above."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    layers = ["q_proj", "q_b_proj", "o_proj"]
    if model.config.model_type == "deepseek_v4":  # float8 blocks, and plain layers
        layers = ["self_attn.q_b_proj", "o_b_proj", "compressor.kv_proj"]
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers))
    fill_adapters(made, 0.02)
    return made


def trainable(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_written_like(
    out: Path, folder: Path, changed: Callable[[str], bool], may: tuple[str, ...] = ()
) -> None:
    """Names, shards, dtypes, shapes and config.json are those of the folder, and SHA-256 sums too, except of all
    `changed` tensors, and of those that end in one of `may`."""
    own, theirs = sums(out), sums(folder)
    assert {n: s[:3] for n, s in own.items()} == {n: s[:3] for n, s in theirs.items()}
    others = {name for name in own if own[name] != theirs[name]}
    assert {n for n in others if not n.endswith(may)} == {
        n for n in own if changed(n) and not n.endswith(may)
    }
    for name in {p.name for p in folder.iterdir() if p.suffix == ".json"}:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    assert {p.name for p in out.iterdir()} == {p.name for p in folder.iterdir()}


def assert_transformers_computes_the_same(out: Path, model: Any) -> None:
    """Equal logits to the bit. Its own classes dequantize such a folder on a CPU, so the model is dequantized too."""
    theirs = out if is_read_by_transformers(out) else unpacked(out, out.with_name("unpacked"))
    found = models.loaded(theirs, torch.bfloat16)
    lowbit.dequantize_(model)
    assert torch.equal(logits(found), logits(model))


# ---- open, train, write back -----------------------------------------------------------------------------------------


@every_kind
def test_what_is_not_trained_keeps_its_bytes(kind: str, published: Any, tmp_path: Path) -> None:
    folder = published(kind)
    model = lowbit.load_pretrained(folder)
    assert packed_weights(model)
    report = lowbit.export(model, tmp_path / "out", like=folder)
    assert_written_like(tmp_path / "out", folder, lambda name: False)
    assert report.notes == [
        f"{len(sums(folder))} of {len(sums(folder))} stored tensors have the bytes of {folder}"
    ]
    assert report.converted and not report.snr
    prepare(kind, model)
    qat.convert_(model)
    lowbit.export(model, tmp_path / "prepared", like=folder)
    assert_written_like(tmp_path / "prepared", folder, lambda name: False)


def lora(kind: str, folder: Path, out: Path) -> list[float]:
    """The base keeps its bytes under adapters, and only what they are merged into changes."""
    model = adapted(lowbit.load_pretrained(folder))
    losses = train(model, lowbit.optim.AdamW8bit(trainable(model), lr=1e-2))
    assert losses[-1] < losses[0]
    with pytest.raises(FormatError, match=r"layers have adapters of PEFT.*merge_and_unload"):
        lowbit.export(model, out, like=folder)
    merged = model.merge_and_unload()
    # siblings of one global scale, of which adapters changed some, are rounded by that scale
    lowbit.export(merged, out, like=folder, lossy=kind.endswith("NVFP4"))
    layers = ("q_proj", "q_b_proj", "o_proj", "attn.wq_b", "attn.wo_b", "attn.compressor.wkv")
    ends = tuple(f".{layer}.{part}" for layer in layers for part in ("weight", "weight_packed"))
    # a block keeps its scale where that is nearer
    scales = tuple(
        f".{n}.{end}" for n in layers for end in ("weight_scale", "weight_scale_inv", "scale")
    )
    assert_written_like(out, folder, lambda n: n.endswith(ends), may=scales)
    own = lowbit.load_pretrained(out)
    assert relative_error(logits(own), logits(merged)) < (0.1 if kind.endswith("NVFP4") else 1e-9)
    assert_transformers_computes_the_same(out, own)
    return losses


FIXED = re.compile(r"weight_shape$|e_score|input_scale$|tid2eid$|gate\.bias$|wo_a\.|indexer")
"""Stored tensors that no training changes: shapes, scales of inputs, what chooses experts and tokens and has no
gradient; and what stays packed in DeepSeek-V4."""
MAY = (".scale",)
"""Powers of two of DeepSeek-V4, which a step changes or not."""


def full(kind: str, folder: Path, out: Path) -> list[float]:
    """Every kind of tensor changes: packed ones on their grid, norms, routers, biases, embeddings and the head."""
    model = lowbit.load_pretrained(folder)
    names = packed_weights(model).keys()
    report = prepare(kind, model)
    assert {*report.converted} <= {*names}
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, weight_decay=0.0), lr=2e-2)
    losses = train(model, optimizer, steps=4)
    assert losses[-1] < losses[0]
    prepared = logits(model)
    qat.convert_(model)
    lowbit.export(model, out, like=folder)
    assert_written_like(out, folder, lambda name: FIXED.search(name) is None, may=MAY)
    own = lowbit.load_pretrained(out)
    assert torch.equal(logits(own), logits(model))
    # sums of bfloat16 in another order; float8 also rounds the inputs of products that differ by them
    assert relative_error(logits(own), prepared) < (0.1 if kind.endswith("float8") else 0.03)
    assert_transformers_computes_the_same(out, own)
    return losses


def of_packed_weights(kind: str, folder: Path, out: Path) -> list[float]:
    """QAT of the packed weights alone."""
    model = lowbit.load_pretrained(folder).requires_grad_(False)
    packed = [name for name in packed_weights(model) if "o_a_proj" not in name]
    prepare(kind, model)
    assert len(trainable(model)) == len(packed) * (1 if is_masked(kind) else 2)
    losses = train(model, lowbit.optim.AdamW8bit(trainable(model), lr=2e-2), steps=4)
    assert losses[-1] < losses[0]
    qat.convert_(model)
    lowbit.export(model, out, like=folder)
    parts = {name for own in Folder(folder).weights.values() for name in own.values()}
    assert_written_like(
        out, folder, lambda name: name in parts and FIXED.search(name) is None, may=MAY
    )
    own = lowbit.load_pretrained(out)
    assert_transformers_computes_the_same(out, own)
    return losses


WAYS = {"LoRA": lora, "full": full, "QAT": of_packed_weights}


@pytest.mark.cover("values")
@pytest.mark.parametrize("way", WAYS)
@every_kind
def test_train_and_write_back(kind: str, way: str, published: Any, tmp_path: Path) -> None:
    """Prints a row of the table of docs/packed.md. `-m "exhaustive or not exhaustive"` runs all of them."""
    folder, out = published(kind), tmp_path / "out"
    losses = WAYS[way](kind, folder, out)
    own, theirs = sums(out), sums(folder)
    kept = sum(own[name] == theirs[name] for name in own)
    print(f"\n| {kind} | {way} | {losses[0]:.2f} → {losses[-1]:.2f} | {kept} of {len(own)} | yes |")


def test_the_page_has_a_row_for_each() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/packed.md").read_text(encoding="utf-8")
    assert [
        f"| {kind} | {way} |" for kind in KINDS for way in WAYS if f"| {kind} | {way} |" not in page
    ] == []


def test_an_expert_that_no_token_reached_keeps_its_bytes(published: Any, tmp_path: Path) -> None:
    """A stack is one parameter in the model and a matrix for each expert in the folder."""
    folder = published("Kimi K2 int4")
    model = lowbit.load_pretrained(folder).requires_grad_(False)
    experts, gate = model.model.layers[1].mlp.experts, model.model.layers[1].mlp.gate
    gate.e_score_correction_bias[2] = -1e9  # never among the chosen ones
    qat.prepare_(model, scales="learned")
    groups = qat.parameter_groups(model, weight_decay=0.0)
    train(model, torch.optim.AdamW(groups, lr=2e-2), steps=3)
    assert experts.gate_up_proj.grad is None and experts.gate_up_proj.requires_grad
    qat.convert_(model)
    lowbit.export(model, tmp_path / "out", like=folder)
    own, theirs = sums(tmp_path / "out"), sums(folder)
    changed = {name for name in own if own[name] != theirs[name]}
    assert {n.split("experts.")[1][0] for n in changed if "experts." in n} == {"0", "1", "3"}


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt-oss MXFP4", "Kimi K2 int4", "Qwen3-MoE int4"])
def test_gradients_through_packed_experts(kind: str, tmp_path: Path) -> None:
    """Of the adapters and of the input: those over the dequantized model."""
    folder = publish(kind, tmp_path / "published", torch.float32)
    found = []
    for plain in (False, True):
        model = lowbit.load_pretrained(folder)
        if plain:
            lowbit.dequantize_(model)
        model = adapted(model.requires_grad_(False))
        x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        model(inputs_embeds=x, labels=TOKENS).loss.backward()
        own = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        found.append({**own, "input": x.grad})
    for name, grad in found[1].items():
        assert grad.norm() > 0, name
        assert relative_error(found[0][name], grad) < 1e-4, name


# ---- what folders have besides ---------------------------------------------------------------------------------------


def trained_norm(folder: Path) -> Any:
    model = lowbit.load_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    return model


def test_layers_that_the_class_does_not_use_are_copied(tmp_path: Path) -> None:
    """DeepSeek-V3 has a layer 61 for multi-token prediction, Kimi K2 a model_type of its own."""
    folder = publish("Kimi K2 int4", tmp_path / "published")

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.1.")]:
            tensors[name.replace(".layers.1.", ".layers.61.")] = tensors[name].clone()
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)

    rewrite(folder, add, config={"model_type": "kimi_k2"})
    with pytest.warns(UserWarning, match=r"tensors, such as model.layers.61.*no place for them"):
        model = trained_norm(folder)
    report = lowbit.export(model, tmp_path / "out", like=folder)
    assert_written_like(tmp_path / "out", folder, lambda name: name == "model.norm.weight")
    assert any(note.startswith("copied: ") and "layers.61" in note for note in report.notes)
    assert any(note.startswith("copied: ") and "KV cache" in note for note in report.notes)


def test_ragged_blocks(tmp_path: Path) -> None:
    """kv_a_proj_with_mqa of DeepSeek-V3 has 576 outputs: four and a half blocks."""
    folder = publish("DeepSeek-V3 float8", tmp_path / "published")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa"

    def cut(tensors: dict[str, Tensor]) -> None:
        for n in [n for n in tensors if "kv_a_proj_with_mqa.weight" in n]:
            tensors[n] = tensors[n][: 192 if n.endswith("weight") else 2].clone()

    rewrite(folder, cut, config={"qk_rope_head_dim": 64, "head_dim": 64, "qk_head_dim": 96})
    shape = {"model.layers.0.self_attn.q_b_proj": 4 * 96}
    rewrite(folder, lambda ts: _cut_heads(ts, shape["model.layers.0.self_attn.q_b_proj"]))
    model = lowbit.load_pretrained(folder)
    assert model.get_submodule(name).weight.shape == (192, 128)
    qat.prepare_(model, scales="learned")
    train(model, lowbit.optim.AdamW8bit(trainable(model), lr=1e-2), steps=2)
    qat.convert_(model)
    lowbit.export(model, tmp_path / "out", like=folder)
    assert sums(tmp_path / "out")[f"{name}.weight"] != sums(folder)[f"{name}.weight"]
    own = lowbit.load_pretrained(tmp_path / "out")
    assert torch.equal(logits(own), logits(model))


def _cut_heads(tensors: dict[str, Tensor], rows: int) -> None:
    for n in [n for n in tensors if "q_b_proj.weight" in n]:
        tensors[n] = tensors[n][: rows if n.endswith("weight") else rows // 128].clone()


def with_powers_of_two(folder: Path, stored_as: torch.dtype) -> Path:
    """The published folder as DeepSeek-V3.1 is: scales rounded up, some further than they must be."""

    def powers(tensors: dict[str, Tensor]) -> None:
        for i, name in enumerate(n for n in sorted(tensors) if n.endswith("weight_scale_inv")):
            exact = (tensors[name].log2().ceil() + i % 2).exp2()
            values = tensors[name].repeat_interleave(128, 0).repeat_interleave(128, 1)
            weight = name.removesuffix("_scale_inv")
            values = tensors[weight].float() * values
            codes = values / exact.repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensors[weight], tensors[name] = codes.to(torch.float8_e4m3fn), exact.to(stored_as)

    return rewrite(folder, powers, scale_fmt="ue8m0")


@pytest.mark.parametrize("stored_as", [torch.float8_e8m0fnu, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["LoRA", "learned LoRA", "QAT"])
def test_scales_that_are_powers_of_two(way: str, stored_as: torch.dtype, tmp_path: Path) -> None:
    """DeepSeek-V3.1. Merges and QAT give powers of two again; the published values are the start."""
    folder = publish("Qwen3-MoE float8", tmp_path / "published")
    with_powers_of_two(folder, stored_as)
    model, out = lowbit.load_pretrained(folder), tmp_path / "out"
    assert {w.spec for w in packed_weights(model).values()} == {UE8M0_BLOCK_WEIGHT}
    expected = logits(model)
    if way == "QAT":
        model.requires_grad_(False)
        qat.prepare_(model)
        assert torch.equal(logits(model), expected)
        train(model, torch.optim.AdamW(trainable(model), lr=1e-2), steps=2)
        qat.convert_(model)
    else:
        from lowbit.peft import merge_

        model = adapted(model)
        batches = [TOKENS.repeat(4, 1)] if way.startswith("learned") else None
        steps = None if batches is None else [lowbit.inference.GPTQ()]
        merge_(model, batches=batches, steps=steps, keep_base=False)
        model = model.merge_and_unload()
    assert not torch.equal(logits(model), expected)
    lowbit.export(model, out, like=folder)
    own, theirs = sums(out), sums(folder)
    assert {n: s[:3] for n, s in own.items()} == {n: s[:3] for n, s in theirs.items()}
    changed = {n for n in own if own[n] != theirs[n]}
    parts = ("_proj.weight", "_proj.weight_scale_inv")
    assert changed and all(name.endswith(parts) for name in changed)
    again = lowbit.load_pretrained(out)
    assert torch.equal(logits(again), logits(model))
    assert_transformers_computes_the_same(out, again)


def test_scales_that_are_no_powers_of_two_are_refused(tmp_path: Path) -> None:
    folder = publish("Qwen3-MoE float8", tmp_path / "published")
    rewrite(folder, lambda tensors: None, scale_fmt="ue8m0")
    with pytest.raises(FormatError, match=r"scale_fmt is 'ue8m0'.*not powers of two"):
        lowbit.load_pretrained(folder)


def test_scales_of_inputs_stay(tmp_path: Path) -> None:
    """NVFP4 with FP4 inputs: lowbit reads the weights, and writes the scales of inputs back."""
    folder = publish("Qwen3 NVFP4", tmp_path / "published")

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("weight_global_scale")]:
            tensors[name.replace("weight_g", "input_g")] = torch.full((1,), 3.0)

    rewrite(folder, add)
    model = trained_norm(folder)
    qat.prepare_(model)
    qat.convert_(model)
    lowbit.export(model, tmp_path / "out", like=folder)
    own = {name for name in sums(folder) if name.endswith("input_global_scale")}
    assert own and own <= {n for n, s in sums(tmp_path / "out").items() if s == sums(folder)[n]}


def test_a_head_that_is_stored_twice(tmp_path: Path) -> None:
    folder = publish("Qwen3-MoE int4", tmp_path / "published", tie_word_embeddings=True)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, add)
    model = lowbit.load_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    lowbit.export(model, tmp_path / "out", like=folder)
    both = "lm_head.weight", "model.embed_tokens.weight"
    assert_written_like(tmp_path / "out", folder, lambda name: name in both)
    assert_transformers_computes_the_same(tmp_path / "out", model)


# ---- to servers ------------------------------------------------------------------------------------------------------

TAKEN = {
    "gpt-oss MXFP4": r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales|bias)",
    "Qwen3-MoE int4": r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight_(packed|scale|shape)",
    "DeepSeek-V3 float8": r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight(_scale_inv)?",
    "DeepSeek-V4 MXFP4 and float8": r"layers\.\d+\.ffn\.experts\.\d+\.w[123]\.(weight|scale)",
}
"""The names of experts for which vLLM 0.33's `load_weights` of these models look."""


@pytest.mark.parametrize("kind", TAKEN)
def test_the_stream_has_the_folders_names_and_bytes(
    kind: str, published: Any, tmp_path: Path
) -> None:
    """And gives what changed alone to a receiver that has the rest."""
    folder = published(kind)
    model = lowbit.load_pretrained(folder)
    known: dict[str, dict[str, Any]] = {}
    found = dict(sync.stream(model, like=folder, known=known))
    theirs = {name: t for name, (_, t) in stored(folder).items()}
    assert found.keys() == theirs.keys()
    assert all(equal_bits(t, theirs[name]) for name, t in found.items())
    experts = [name for name in found if ".experts." in name]
    assert experts and all(re.fullmatch(TAKEN[kind], name) for name in experts)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    (name, t), *more = sync.stream(model, like=folder, known=known)
    assert name.endswith("norm.weight") and torch.equal(t, model.model.norm.weight) and not more
    with pytest.raises(FormatError, match=r"and takes no format="):
        dict(sync.stream(model, "fp8", like=folder))


# ---- refusals, and lossy=True ----------------------------------------------------------------------------------------


def test_what_the_folder_cannot_hold(published: Any, tmp_path: Path) -> None:
    """Nothing is left of `out` after an error. lossy=True rounds to the folder's schemes, and states the loss."""
    folder, out = published("Qwen3-MoE int4"), tmp_path / "out"
    model = lowbit.load_pretrained(folder)
    plain, other = (model.model.layers[i].self_attn for i in (0, 1))
    lowbit.dequantize_(model, lambda m, _: m in (plain.q_proj, other.v_proj))
    with torch.no_grad():
        plain.q_proj.weight.mul_(1.01)
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.float() + 1 / 3)
    lowbit.quantize_(model, lowbit.Int8WeightOnly(), lambda m, _: m is other.v_proj)
    with pytest.raises(FormatError, match="cannot hold") as refused:
        lowbit.export(model, out, like=folder)
    assert not out.exists()
    for words in (
        "q_proj.weight: it is plain bfloat16 in the model and int4",
        "v_proj.weight: the folder stores it as int4",
        "norm.weight: its values of torch.float32 are not all of torch.bfloat16",
    ):
        assert words in str(refused.value), str(refused.value)
    report = lowbit.export(model, out, like=folder, lossy=True)
    first, second = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
    )
    assert report.snr.keys() == {first, second, "model.norm.weight"}
    assert (
        report.snr[first] > 15 and report.snr[second] > 40 and report.snr["model.norm.weight"] > 40
    )
    stems = tuple(name.removesuffix("weight") for name in report.snr)
    own, theirs = sums(out), sums(folder)
    assert {n: s[:3] for n, s in own.items()} == {n: s[:3] for n, s in theirs.items()}
    assert all(name.startswith(stems) for name in own if own[name] != theirs[name])


def test_a_quantized_tensor_in_the_place_of_a_plain_one(published: Any, tmp_path: Path) -> None:
    folder = published("gpt-oss MXFP4")
    model = lowbit.load_pretrained(folder)
    lowbit.quantize_(model, lowbit.Int8WeightOnly(), lambda m, n: n.endswith("0.self_attn.q_proj"))
    with pytest.raises(FormatError, match=r"q_proj.weight: it is int8.* in the folder"):
        lowbit.export(model, tmp_path / "out", like=folder)


def test_siblings_of_unequal_global_scales(published: Any, tmp_path: Path) -> None:
    folder = published("Qwen3 NVFP4")
    model = lowbit.load_pretrained(folder)
    query = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        query.global_scale.mul_(0.5)
    with pytest.raises(FormatError, match=r"servers merge .*q_proj.* one weight_global_scale"):
        lowbit.export(model, tmp_path / "out", like=folder)
    lowbit.export(model, tmp_path / "out", like=folder, lossy=True)
    found = stored(tmp_path / "out")
    scales = [found[f"model.layers.0.self_attn.{n}_proj.weight_global_scale"][1] for n in "qkv"]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])


def test_calls_that_are_refused(published: Any, tmp_path: Path) -> None:
    folder, out = published("Qwen3-MoE int4"), tmp_path / "out"
    model = lowbit.load_pretrained(folder)
    for options in (
        {"format": "fp8"},
        {"scheme": lowbit.Int4WeightOnly()},
        {"max_shard_size": "1GB"},
        {"tokenizer": folder},
        {"scales": "searched"},
    ):
        with pytest.raises(FormatError, match=f"takes no {next(iter(options))}="):
            lowbit.export(model, out, like=folder, **options)
    with pytest.raises(FormatError, match="no low-bit weights"):
        lowbit.export(model, out, like=f"{folder}-plain")
    with pytest.raises(TypeError, match=r"writes an nn\.Module"):
        lowbit.export(folder, out, like=folder)
    with pytest.raises(FormatError, match="is the folder that is read"):
        lowbit.export(model, folder, like=folder, overwrite=True)
    other = published("gpt-oss MXFP4")
    with pytest.raises(FormatError, match=r"lacks \d+ tensors that .* has, such as"):
        lowbit.export(model, out, like=other)
    qat.prepare_(model)
    with pytest.raises(FormatError, match=r"still in training; lowbit.qat.convert_"):
        lowbit.export(model, out, like=folder)
    assert not out.exists()


def test_a_model_without_packed_weights_has_no_scheme_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"no weights in low bits.*a plain one takes a scheme"):
        qat.prepare_(models.llama())
