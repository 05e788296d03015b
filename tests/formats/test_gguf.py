"""GGUF: blocks against the package's own values, and whole files."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit import (
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    LowbitTensor,
    quantize_,
)
from lowbit.formats import FormatError
from lowbit.formats.gguf import tokenizer as gguf_tokenizer
from lowbit.formats.gguf.blocks import TYPES, decode, encode
from lowbit.formats.gguf.llama import (
    halved,
    in_transformers,
    interleaved,
    settings_of,
)
from lowbit.formats.gguf.rope import factors_of
from lowbit.formats.gguf.tokenizer import SPACE
from tests.formats.codec_case import assert_same, weight
from tests.formats.models import plain_folder

gguf = pytest.importorskip("gguf")
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The bytes of a block where float16 numbers begin; of other types the first two, and those after for Q4_1 and Q5_1."""
HELD = {
    "Q4_0": (Int4WeightOnly(32), IntxWeightOnly(4), Int4WeightOnly(64)),
    "Q8_0": (Int8WeightOnly(), Int8WeightOnly(64)),
}
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def reference(kind: str, rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


FILLED = {
    "Q2_K": {"attn_q": "Q4_0"},
    "Q4_K_M": {"attn_q": "Q5_0", "attn_v": "Q8_0", "ffn_down": "Q8_0", "token_embd": "Q5_0"},
    "Q5_K_M": {"attn_q": "Q5_1", "attn_v": "Q8_0", "ffn_down": "Q8_0", "token_embd": "Q5_1"},
    "IQ4_XS": {"attn_q": "IQ4_NL", "attn_v": "Q5_0", "token_embd": "IQ4_NL"},
}
"""The types of a file's tensors whose rows are not a multiple of 256. "attn_q" stands for all that have no own."""


def package_rows(kind: str, values: Any) -> Any:
    """Float32 values [N, K] in a type. The package writes no IQ4_NL: each value takes the nearest of the table."""
    if kind != "IQ4_NL":
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = torch.from_numpy(values).unflatten(1, (-1, 32))
    table = torch.tensor(gguf.quants.IQ4_NL.kvalues, dtype=torch.float32)
    d = (blocks.abs().amax(-1, keepdim=True) / 113).half()
    codes = (blocks / d.float()).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([d.view(torch.uint8), packed], -1).flatten(1).numpy()


def in_other_types(path: Path, out: Path, kinds: dict[str, str]) -> dict[str, torch.Tensor]:
    """A copy of a file with its matrices in the types of `FILLED`. Returns their values, by the package."""
    read, values = gguf.GGUFReader(path), {}
    fields = {n: f.contents() for n, f in read.fields.items()}
    writer = gguf.GGUFWriter(out, fields["general.architecture"])
    for name, field in read.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, fields[name], field.types[0], sub_type=sub)
    for t in read.tensors:
        data = gguf.quants.dequantize(t.data, t.tensor_type)
        raw = None
        if data.ndim == 2:
            kind = next((k for part, k in kinds.items() if part in t.name), kinds["attn_q"])
            data, raw = package_rows(kind, data), gguf.GGMLQuantizationType[kind]
            values[t.name] = torch.from_numpy(gguf.quants.dequantize(data, raw))
        writer.add_tensor(t.name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", TYPES)
def test_blocks_by_the_package(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (8, 3, TYPES[kind][1]), dtype=torch.uint8)
    for at in HALVES.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)):
        blocks[..., at : at + 2] = (torch.rand(8, 3, 1) * 0.01).half().view(torch.uint8)
    if kind == "MXFP4":
        # 255 is NaN, and float16 ends at 65504; float16 and bfloat16 round the same values
        blocks[..., 0] = torch.randint(0, 140 if dtype is torch.float16 else 254, (8, 3))
    rows = blocks.flatten(1)
    found = decode(kind, rows, dtype)
    values = found.dequantize() if isinstance(found, LowbitTensor) else found
    assert torch.equal(values, reference(kind, rows).to(dtype))


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K"])
def test_blocks_of_usual_scales_stay_in_low_bits(kind: str) -> None:
    """The zero point of a minimum is exact where d and dmin are of similar size."""
    blocks = torch.randint(0, 256, (4, 2, TYPES[kind][1]), dtype=torch.uint8)
    for at, number in zip(HALVES[kind], (0.01, 0.02), strict=True):
        blocks[..., at : at + 2] = torch.full((4, 2, 1), number).half().view(torch.uint8)
    found = decode(kind, blocks.flatten(1), torch.bfloat16)
    assert isinstance(found, LowbitTensor)
    assert torch.equal(found.dequantize(), reference(kind, blocks.flatten(1)).bfloat16())


@pytest.mark.parametrize(
    ("kind", "scheme"), [(kind, scheme) for kind, all_ in HELD.items() for scheme in all_]
)
def test_written_blocks(kind: str, scheme: Any) -> None:
    w = weight(scheme)
    found, rows = encode(w)
    assert found == kind
    assert torch.equal(reference(kind, rows).bfloat16(), w.dequantize())
    assert_same(decode(kind, rows, w.dtype), w)


def test_minimums_that_float16_represents() -> None:
    w = weight(IntxWeightOnly(4, 32, "asymmetric"))
    w.scale = torch.full_like(w.scale, 0.25)
    kind, rows = encode(w)
    assert kind == "Q4_1"
    assert torch.equal(reference(kind, rows).bfloat16(), w.dequantize())
    assert_same(decode(kind, rows, w.dtype), w)
    w.scale = torch.full_like(w.scale, 1 / 3, dtype=torch.float16)
    w.zero_point = torch.full_like(w.zero_point, 5)
    with pytest.raises(FormatError, match="minimums"):
        encode(w)


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (IntxWeightOnly(3), "4 or 5 bits, or 8"),
        (IntxWeightOnly(8, 32, "asymmetric"), "4 or 5 bits, or 8"),
        (Int4WeightOnly(16), "groups of 32"),
        (Int8DynamicActivationInt8Weight(), "rounds no inputs"),
        (Float8WeightOnly(), "holds integers"),
    ],
)
def test_what_blocks_cannot_hold(scheme: Any, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        encode(weight(scheme))


def test_rows_of_heads() -> None:
    rows = torch.arange(16).view(16, 1)
    assert interleaved(rows, 2).flatten().tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(halved(interleaved(rows, 2), 2), rows)
    assert interleaved(rows, 0) is rows


def tokenizer(folder: Path, size: int = 300) -> Path:
    """A byte-level BPE with two merges and one special token. transformers 5.17 misreads a list of one merge."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*letters, "ab", "cd"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "b"), ("c", "d")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def llama(scheme: Any, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    quantize_(model, scheme)
    return model


def sentencepiece(folder: Path) -> Any:
    """A BPE of pieces, with bytes as a fallback, as Llama 2 has it."""
    tokenizers, transformers = (pytest.importorskip(n) for n in ("tokenizers", "transformers"))
    normal, decode = tokenizers.normalizers, tokenizers.decoders
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normal.Sequence([normal.Prepend(SPACE), normal.Replace(" ", SPACE)])
    steps = [decode.Replace(SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    made.decoder = decode.Sequence([*steps, decode.Strip(" ", 1, 0)])
    codes = [f"<0x{i:02X}>" for i in range(256)]
    special = ["<unk>", "<s>", "</s>", *codes]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    plain = json.loads(made.to_str())
    plain["added_tokens"] = [entry for entry in plain["added_tokens"] if entry["id"] < 3]
    made = tokenizers.Tokenizer.from_str(json.dumps(plain))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    found.save_pretrained(folder)
    return found


def test_a_tokenizer_of_sentencepiece(tmp_path: Path) -> None:
    """What llama.cpp needs of it; tests/integrations reads it there."""
    words = sentencepiece(tmp_path / "tokenizer")
    out = tmp_path / "model.gguf"
    model = llama(Int4WeightOnly(32), vocab_size=420)
    lowbit.export(model, out, "gguf", tokenizer=tmp_path / "tokenizer")
    fields = {n: f.contents() for n, f in gguf.GGUFReader(out).fields.items()}
    stored = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    assert stored["model"] == "llama" and stored["add_space_prefix"] is True
    assert stored["bos_token_id"] == 1 and stored["unknown_token_id"] == 0
    assert stored["tokens"][:420] == [*words.convert_ids_to_tokens(range(400)), *PADDING]
    assert stored["token_type"][:5] == [2, 3, 3, 6, 6] and stored["token_type"][-1] == 5
    places = [json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())["model"]]
    first = "".join(places[0]["merges"][0])
    assert max(
        (score, text)
        for score, text in zip(stored["scores"], stored["tokens"], strict=True)
        if len(text) == 2
    ) == (0.0, first)


def test_a_token_that_no_merge_makes_has_the_lowest_score() -> None:
    model = {"merges": ["a b", ["ab", "c"]]}
    assert gguf_tokenizer._scores(model, ["abc", "bc", "ab"]) == [-1.0, -2.0, 0.0]


PADDING = [f"[PAD{i}]" for i in range(400, 420)]
MIXED = {"*down_proj": Int8WeightOnly(), "lm_head": None, "*": Int4WeightOnly(32)}


@pytest.mark.parametrize(("scheme", "count"), [(Int4WeightOnly(32), 15), (MIXED, 14)])
def test_whole_files(scheme: Any, count: int, tmp_path: Path) -> None:
    model = llama(scheme)
    out = tmp_path / "model.gguf"
    report = lowbit.export(model, out, "gguf", tokenizer=tokenizer(tmp_path / "tokenizer"))
    assert len(report.converted) == count and [p.name for p in tmp_path.glob("*.gguf")] == [
        "model.gguf"
    ]
    other = lowbit.load_pretrained(out)
    tokens = torch.arange(10)[None]
    assert torch.equal(other(tokens).logits, model(tokens).logits)
    with pytest.raises(FormatError, match="exists already"):
        lowbit.export(model, out, "gguf", tokenizer=tmp_path / "tokenizer")


@pytest.mark.parametrize("name", FILLED)
def test_files_whose_rows_fill_no_block_of_256(name: str, tmp_path: Path) -> None:
    """As llama.cpp quantizes small models: 576, 896 or 960 channels there, 96 and 160 here."""
    model = llama(Int8WeightOnly(32), hidden_size=96, intermediate_size=160)
    words = tokenizer(tmp_path / "tokenizer")
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    wanted = in_other_types(tmp_path / "model.gguf", tmp_path / "other.gguf", FILLED[name])
    found = dict(lowbit.load_pretrained(tmp_path / "other.gguf").named_parameters())
    for stored, values in wanted.items():
        own = in_transformers(stored)
        heads = {"q_proj": 4, "k_proj": 2}.get(own.rpartition(".")[0].rpartition(".")[2], 0)
        assert isinstance(found[own], LowbitTensor), own
        assert torch.equal(found[own].dequantize().float(), halved(values, heads).half().float())
    report = lowbit.export(tmp_path / "other.gguf", tmp_path / "own", "lowbit")
    again = dict(lowbit.load_pretrained(tmp_path / "own").named_parameters())
    assert len(report.converted) == len(wanted) == 16
    for own in report.converted:
        assert_same(again[own], found[own])


def test_what_no_file_is_written_for(tmp_path: Path) -> None:
    out, words = tmp_path / "model.gguf", tokenizer(tmp_path / "tokenizer")
    with pytest.raises(FormatError, match="byte-level BPE"):
        lowbit.export(llama(Int4WeightOnly(32)), out, "gguf")
    with pytest.raises(FormatError, match="lossy=True"):
        lowbit.export(llama(IntxWeightOnly(3)), out, "gguf", tokenizer=words)
    with pytest.raises(FormatError, match="vocabulary is 250"):
        lowbit.export(llama(Int4WeightOnly(32), vocab_size=250), out, "gguf", tokenizer=words)
    for changes, why in (
        ({"model_type": "gemma"}, "gemma"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "default, linear, llama3, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "have factor None: a number > 0"),
    ):
        with pytest.raises(FormatError, match=why):
            config = {**LLAMA, "model_type": "llama", "rms_norm_eps": 1e-5, **changes}
            settings_of(config)
            factors_of(config, 32)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]
    report = lowbit.export(llama(IntxWeightOnly(3)), out, "gguf", tokenizer=words, lossy=True)
    assert len(report.snr) == 15 and min(report.snr.values()) > 15


@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_folder_whose_settings_lack_one(key: str, tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "llama", "rms_norm_eps": 1e-5}
    tensors = {"lm_head.weight": torch.randn(300, 128), "model.norm.weight": torch.ones(128)}
    folder = plain_folder(tmp_path / "plain", tensors, **config)
    tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
    with pytest.raises(FormatError, match=f"config.json has no {key}"):
        lowbit.export(folder, tmp_path / "out.gguf", "gguf", scheme={"lm_head": Int4WeightOnly(32)})
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]


def test_no_space_left(tmp_path: Path) -> None:
    """The system refuses files above 40 kB, as it does where a disk is full."""
    resource = pytest.importorskip("resource")
    words = tokenizer(tmp_path / "tokenizer")
    model = llama(Int4WeightOnly(32))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
        with pytest.raises(FormatError, match="cannot be written"):
            lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("found", ["0.10.0", None])
def test_another_release_of_the_package(
    found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one, and none."""
    if found is None:
        monkeypatch.setitem(sys.modules, "gguf", None)
    else:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    what = "which is not installed" if found is None else f"and {found} is installed"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=rf"need gguf >= 0\.16, {what}: pip install") as caught:
        lowbit.load_pretrained(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(FormatError, match="there is no file"):
        lowbit.load_pretrained(path)
    path.write_bytes(b"GGUF" + json.dumps({}).encode())
    with pytest.raises(FormatError, match="cannot be read"):
        lowbit.load_pretrained(path)


def test_a_file_as_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = llama(lowbit.Int4WeightOnly(32)), tmp_path / "model.gguf"
    lowbit.export(model, path, "gguf", tokenizer=tokenizer(tmp_path / "tokenizer"))
    for format, options, why in (
        ("lowbit", {"scheme": lowbit.Int8WeightOnly()}, "scheme= takes a folder of plain weights"),
        ("gguf", {"overwrite": True}, "model.gguf is a GGUF file already"),
    ):
        with pytest.raises(FormatError, match=why):
            lowbit.export(path, tmp_path / "out.gguf", format, **options)
    with pytest.raises(FormatError, match="is the file that is read"):
        lowbit.export(path, path, "gguf", overwrite=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.warns(UserWarning, match="its tokenizer is not written"):
        lowbit.export(path, tmp_path / "folder", "lowbit")
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
