"""Each command of `lowbit` on a small model: what it writes and what it reports. Most run in this process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import lowbit
from lowbit import optional
from lowbit.cli import main
from lowbit.numerics.snr import snr
from lowbit.tensor.core.base import LowbitTensor
from tests.cli.command import MATRICES, weights
from tests.cli.command import lowbit as command
from tests.formats.models import plain_folder

Capture = pytest.CaptureFixture[str]


def printed(*arguments: str, capfd: Capture) -> str:
    """What a command prints; nothing of it on stderr."""
    capfd.readouterr()
    assert main([*arguments]) == 0
    found = capfd.readouterr()
    assert found.err == ""
    return found.out


def reported(*arguments: str, capfd: Capture) -> Any:
    return json.loads(printed(*arguments, "--json", capfd=capfd))


def test_quantize_writes_what_export_writes(home: Path, capfd: Capture) -> None:
    options = ("--scheme", "int4", "--group-size", "64", "--format", "lowbit", "--out", "q")
    report = reported("quantize", "model", *options, capfd=capfd)
    expected = lowbit.export("model", "p", "lowbit", scheme=lowbit.Int4WeightOnly(64))
    assert len(report["snr_db"]) == MATRICES == len(expected.converted)
    assert report["bytes_after"] == expected.nbytes < report["bytes_before"]
    assert report["low_bit_bytes"] == expected.low_bit_nbytes
    assert report["low_bit_parameters"] == expected.low_bits
    both = zip(lowbit.formats.tensors("q"), lowbit.formats.tensors("p"), strict=True)
    for (name, made), (_, wanted) in both:
        assert type(made) is type(wanted), name
        low = isinstance(made, LowbitTensor)
        parts = made.inner_tensors() if low else {"": made}
        others = wanted.inner_tensors() if low else {"": wanted}
        assert all(torch.equal(parts[key], others[key]) for key in others), name


def test_a_model_of_diffusers_is_written_in_the_format_that_diffusers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vae").mkdir()
    Path("vae/config.json").write_text('{"_class_name": "AutoencoderKL"}')
    name = "diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file({"to_q.weight": torch.randn(64, 128)}, f"vae/{name}")
    reported("quantize", "vae", "--out", "q", "--scheme", "int8", capfd=capfd)
    reported(
        "export",
        "vae",
        "--out",
        "c",
        "--scheme",
        "int8",
        "--format",
        "gptq",
        "--lossy",
        capfd=capfd,
    )
    given = [json.loads(Path(folder, "config.json").read_text()) for folder in "qc"]
    methods = [config["quantization_config"]["quant_method"] for config in given]
    assert methods == ["lowbit", "gptq"] and Path("q", name).is_file()


def test_quantize_says_what_it_wrote(home: Path) -> None:
    """In a process of its own."""
    done = command("quantize", "model", "--out", "q", cwd=home)
    assert done.returncode == 0 and done.stderr == ""
    assert "compressed-tensors" in done.stdout
    assert "% of the bytes are in low bits" in done.stdout
    assert "in high precision: lm_head.weight, model.embed_tokens.weight" in done.stdout
    assert done.stdout.count(" dB") == 5, "the worst layers"


def test_layers_choose_schemes(home: Path) -> None:
    patterns = ("--layers", "lm_head=int8", "--layers", "*.0.*=none")
    arguments = ["quantize", "model", *patterns, "--format", "lowbit", "--out", "q"]
    assert main(arguments) == 0
    kinds = {
        name: t.stored_format() if isinstance(t, LowbitTensor) else "plain"
        for name, t in lowbit.formats.tensors("q")
    }
    assert kinds["lm_head.weight"] == "int8-row"
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "plain"
    assert kinds["model.layers.1.mlp.up_proj.weight"] == "int4-g128"


def test_a_plan_chooses_schemes(home: Path) -> None:
    assert (
        main(["quantize", "model", "--plan", "plan.json", "--format", "lowbit", "--out", "q"]) == 0
    )
    kinds = {
        name: t.stored_format()
        for name, t in lowbit.formats.tensors("q")
        if isinstance(t, LowbitTensor)
    }
    assert kinds["lm_head.weight"] == "int8-row"
    assert kinds["model.layers.1.mlp.up_proj.weight"] == "int4-g64"


def test_blocks_of_float8_have_a_name(home: Path) -> None:
    """As DeepSeek publishes them, for --format fp8."""
    plain_folder(home / "wide", {f"{n}.weight": torch.randn(256, 384).bfloat16() for n in "ab"})
    line = "quantize wide --scheme float8_float8_blocks --format fp8 --out blocks"
    assert main(line.split()) == 0
    for _, weight in lowbit.formats.tensors("blocks"):
        assert isinstance(weight, lowbit.AffineTensor)
        assert weight.spec == lowbit.Spec(lowbit.Float8(), lowbit.PerBlock(128, 128))
        assert weight.activation is not None


def test_export_keeps_the_values(home: Path, capfd: Capture) -> None:
    assert main(["quantize", "model", "--out", "q"]) == 0
    report = reported("export", "q", "--format", "lowbit", "--out", "own", capfd=capfd)
    assert report["snr_db"] == {}, "nothing was rounded"
    first, second = (dict(lowbit.formats.tensors(name)) for name in ("q", "own"))
    for name, weight in first.items():
        other = second[name]
        if isinstance(weight, LowbitTensor):
            assert isinstance(other, LowbitTensor)
            weight, other = weight.dequantize(), other.dequantize()
        assert torch.equal(weight, other), name


def test_inspect_measures_against_the_original(home: Path, capfd: Capture) -> None:
    assert main(["quantize", "model", "--out", "q"]) == 0
    report = reported("inspect", "q", "--against", "model", capfd=capfd)
    stored, plain = dict(lowbit.formats.tensors("q")), weights()
    assert report["format"] == "compressed-tensors"
    assert report["parameters"] == sum(t.numel() for t in plain.values())
    assert report["schemes"]["int4-g128"]["weights"] == MATRICES
    for row in report["weights"]:
        expected = snr(plain[row["name"]], stored[row["name"]])
        if math.isinf(expected):
            assert row["snr_db"] is None and not row["low_bit"]
        else:
            assert row["snr_db"] == pytest.approx(expected) and row["low_bit"]
    table = printed("inspect", "q", "--against", "model", capfd=capfd)
    assert table.count(" dB\n") == MATRICES and "int4-g128" in table


def test_inspect_numbers_all_weights(home: Path, capfd: Capture) -> None:
    """Those in high precision count too."""
    arguments = ["--layers", "lm_head=int8", "--layers", "*.0.*=none"]
    assert main(["quantize", "model", *arguments, "--out", "q"]) == 0
    table = printed("inspect", "q", "--against", "model", capfd=capfd)
    rows = [line.split() for line in table.splitlines() if ".weight " in line]
    assert [row[0] for row in rows] == [str(n) for n in range(1, len(weights()) + 1)]


def test_inspect_of_a_plain_folder_has_no_low_bits(home: Path, capfd: Capture) -> None:
    report = reported("inspect", "model", capfd=capfd)
    assert report["format"] is None and report["low_bit_nbytes"] == 0
    assert list(report["schemes"]) == ["bfloat16"]
    order = [row["name"] for row in report["weights"]]
    assert order.index("model.layers.0.mlp.up_proj.weight") < order.index(
        "model.layers.1.mlp.up_proj.weight"
    )


def test_inspect_shows_tensors_without_elements(home: Path, capfd: Capture) -> None:
    from safetensors.torch import save_file

    (home / "empty").mkdir()
    (home / "empty/config.json").write_text("{}")
    tensors = {"none": torch.empty(0, 4, dtype=torch.float16), "one": torch.tensor(1.0)}
    save_file(tensors, home / "empty/model.safetensors")
    assert "0x4" in printed("inspect", "empty", "--against", "empty", capfd=capfd)


def test_estimate_reports_every_choice(home: Path, capfd: Capture) -> None:
    report = reported("estimate", "model", "--batch", "2", capfd=capfd)
    assert report["parameters"] == sum(t.numel() for t in weights().values())
    assert {"bf16, torch AdamW", "int8 weights, AdamW8bit", "inference int4"} <= {
        *report["choices"]
    }
    assert "smallest GPU" in printed("estimate", "model", capfd=capfd)


def test_bench_measures(home: Path, capfd: Capture) -> None:
    arguments = ("bench", "--quick", "--device", "cpu")
    report = reported(*arguments, capfd=capfd)
    groups: dict[str, list[str]] = {}
    for row in report["rows"]:
        assert row["milliseconds"] > 0
        groups.setdefault(row["group"], []).append(row["name"])
    assert report["width"] == 2048  # smaller layers gain nothing on a CPU, whatever the kernel
    assert groups["optimizer step"] == ["torch AdamW, fused, bf16", "AdamW8bit", "AdamW4bit"]
    assert groups["linear, 16 tokens"] == ["bf16", "int8", "int4"]


@pytest.mark.gpu
def test_bench_and_quantize_run_on_the_gpu(home: Path) -> None:
    assert main(["bench", "--quick", "--device", "cuda"]) == 0
    assert main(["quantize", "model", "--device", "cuda", "--out", "gpu"]) == 0
    assert main(["quantize", "model", "--out", "cpu"]) == 0
    for (name, made), (_, wanted) in zip(
        lowbit.formats.tensors("gpu"), lowbit.formats.tensors("cpu"), strict=True
    ):
        if isinstance(made, LowbitTensor) and isinstance(wanted, LowbitTensor):
            made, wanted = made.dequantize(), wanted.dequantize()
        assert torch.equal(made, wanted), name


def test_doctor_gives_a_reason_for_what_is_missing(home: Path, capfd: Capture) -> None:
    findings = reported("doctor", capfd=capfd)["findings"]
    assert {f["section"] for f in findings} == {
        "versions",
        "GPUs",
        "compilers",
        "kernels",
        "extras",
    }
    assert all(f["detail"] for f in findings)
    versions = {f["name"]: f["detail"] for f in findings if f["section"] == "versions"}
    assert versions["lowbit"] == lowbit.__version__
    assert versions["torch"].startswith(torch.__version__)
    if not torch.cuda.is_available():
        assert any(f["usable"] is False for f in findings if f["section"] == "GPUs")


@pytest.mark.parametrize("version", ["12.3.3", None])
def test_doctor_names_releases_that_do_not_fit(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.cli import doctor

    found = optional.version
    monkeypatch.setattr(
        optional, "version", lambda name: version if name == "rich" else found(name)
    )
    (own,) = (finding for finding in doctor._extras() if finding.name == "cli")
    what = "rich 12.3.3 is installed, and rich >= 13 is needed" if version else "without rich"
    assert own.usable is False and own.detail.startswith(what)
    assert own.detail.endswith("pip install --upgrade 'lowbit[cli]'")


def test_version_and_help(capfd: Capture) -> None:
    assert printed("--version", capfd=capfd).strip() == lowbit.__version__
    shown = printed("--help", capfd=capfd)
    names = ("quantize", "export", "inspect", "eval", "generate", "estimate", "bench", "doctor")
    assert all(f"\n  {name} " in shown for name in names)
    assert "..." not in shown.partition("Commands:")[2]  # whole sentences
