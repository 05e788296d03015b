"""What QAT trained is what each format stores and what other programs compute with: the same values, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    LowbitTensor,
    MXFP4WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
    qat,
)
from tests.integrations import models
from tests.integrations.models import TOKENS
from tests.integrations.test_formats import error, llama, logits
from tests.integrations.test_four_bit_folders import mixture, of_bitsandbytes
from tests.schemes import relative_error

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
Values = dict[str, Tensor]


def _linears(model: nn.Module, dequantize: Callable[[Any], Tensor]) -> Values:
    names = {n for n, m in model.named_modules() if n.endswith("_proj")}
    return {f"{n}.weight": dequantize(model.get_submodule(n)) for n in names}


def _loaded(folder: Path, **options: Any) -> Any:
    return models.loaded(folder, torch.bfloat16, **options)


def by_compressed_tensors(folder: Path) -> Values:
    dtype = models.dtype_of_exact_blocks()
    return dict(models.by_compressed_tensors(folder, dtype).named_parameters())


def by_transformers(folder: Path) -> Values:
    """Its own loader of float8 blocks and of MXFP4, which dequantizes on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU the weights stay in float8")
    return dict(_loaded(folder).named_parameters())


def by_torchao(folder: Path) -> Values:
    pytest.importorskip("torchao")
    return _linears(_loaded(folder, device_map="cpu"), lambda m: m.weight.dequantize())


def by_bitsandbytes(folder: Path) -> Values:
    pytest.importorskip("bitsandbytes")
    return _linears(_loaded(folder, device_map="cpu"), of_bitsandbytes)


def by_llm_int8(folder: Path) -> Values:
    functional = pytest.importorskip("bitsandbytes").functional

    def values(module: Any) -> Tensor:
        largest = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        return functional.int8_vectorwise_dequant(module.weight.data, largest).bfloat16()

    return _linears(_loaded(folder, device_map="cpu"), values)


def by_gptqmodel(folder: Path) -> Values:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    is_awq = (folder / "config.json").read_text().count('"awq"')
    settings = transformers.AwqConfig if is_awq else transformers.GPTQConfig
    chosen = settings(bits=4, backend="torch_awq" if is_awq else "gptq_torch")
    kind = transformers.AutoModelForCausalLM
    found = kind.from_pretrained(
        folder, dtype=torch.float16, device_map="cpu", quantization_config=chosen
    )

    @torch.no_grad()
    def values(module: Any) -> Tensor:
        return module(torch.eye(module.in_features, dtype=torch.float16)).T

    return _linears(found, values)


ON_THE_GRID = [
    ("gptq", "int4"),
    ("awq", "int4 asymmetric"),
    ("bitsandbytes-int8", "int8"),
]
"""Formats with scales of their own, for models that train in float32."""
CASES = {
    "compressed-tensors": (
        by_compressed_tensors,
        {
            "int4": Int4WeightOnly(64),
            "int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric"),
            "int2": lowbit.Int2WeightOnly(),
            "int8": Int8WeightOnly(),
            "int8 x int8": Int8DynamicActivationInt8Weight(),
            "int8 x int4": Int8DynamicActivationInt4Weight(),
            "float8": Float8WeightOnly(),
            "float8 x float8": Float8DynamicActivationFloat8Weight(),
            "float8 blocks": BLOCKS,
            "mxfp4": MXFP4WeightOnly(),
            "nvfp4": NVFP4WeightOnly(),
        },
    ),
    "fp8": (by_transformers, {"float8 blocks": BLOCKS}),
    "bitsandbytes-int8": (
        by_llm_int8,
        {"int8": Int8WeightOnly(), "int8 x int8": Int8DynamicActivationInt8Weight()},
    ),
    "bitsandbytes-4bit": (
        by_bitsandbytes,
        {"nf4": NF4WeightOnly(), "nf4 double": NF4WeightOnly(double_quantization=True)},
    ),
    "torchao": (
        by_torchao,
        {"int8": Int8WeightOnly(), "int4": Int4WeightOnly(64), "float8": Float8WeightOnly()},
    ),
    "gptq": (by_gptqmodel, {"int4": Int4WeightOnly(64)}),
    "gptq_v2": (by_gptqmodel, {"int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric")}),
    "awq": (by_gptqmodel, {"int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric")}),
}
ALL = [(format, name) for format, (_, schemes) in CASES.items() for name in schemes]


def trained(model: nn.Module) -> Values:
    """Two steps of training, and the values that the products then round to."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    found = {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, LowbitTensor)}
    assert found
    return found


@pytest.mark.parametrize(("format", "name"), ALL)
def test_prepared_is_exported_is_what_others_dequantize(
    format: str, name: str, tmp_path: Path
) -> None:
    by_others, schemes = CASES[format]
    model = llama(torch.float16 if by_others is by_gptqmodel else torch.bfloat16)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    qat.prepare_(model, {"lm_head": None, "*": schemes[name]})
    wanted = trained(model)
    prepared = logits(model)
    qat.convert_(model)
    lowbit.export(model, tmp_path / "out", format, max_shard_size="100KB")
    own = lowbit.load_pretrained(tmp_path / "out")
    held = dict(own.named_parameters())
    assert len(wanted) == 14
    for weight, values in wanted.items():
        assert not torch.equal(values, start[weight])
        assert torch.equal(held[weight].dequantize(), values), weight
    assert error(logits(own), prepared) < 0.02
    theirs = by_others(tmp_path / "out")
    for weight, values in wanted.items():
        assert torch.equal(theirs[weight].to(values.dtype), values), weight


CALIBRATED = [
    *(("compressed-tensors", n) for n in ("int4", "int4 asymmetric", "int2", "nvfp4", "mxfp4")),
    ("torchao", "int4"),
    ("gptq", "int4"),
]


@pytest.mark.parametrize(("format", "name"), CALIBRATED)
def test_calibrated_is_exported_is_what_others_dequantize(
    format: str, name: str, tmp_path: Path
) -> None:
    """GGUF is in tests/formats/test_gguf_k_quants.py."""
    by_others, schemes = CASES[format]
    model = llama(torch.float16 if by_others is by_gptqmodel else torch.bfloat16)
    batches = [{"input_ids": TOKENS}]
    steps = [lowbit.inference.AWQ(), lowbit.inference.GPTQ()]
    lowbit.calibrate(model, {"lm_head": None, "*": schemes[name]}, batches, steps=steps)
    low = {n: p for n, p in model.named_parameters() if isinstance(p, LowbitTensor)}
    lowbit.export(model, tmp_path / "out", format)
    theirs = by_others(tmp_path / "out")
    assert len(low) == 14
    for weight, own in low.items():
        values = own.dequantize()
        assert torch.equal(theirs[weight].to(values.dtype), values), weight


@pytest.mark.parametrize(("format", "name"), ON_THE_GRID)
def test_a_float32_model_on_the_grid_of_a_format(format: str, name: str, tmp_path: Path) -> None:
    """Others load the weights in float16, whose values follow from the stored codes and scales."""
    by_others, schemes = CASES[format]
    model = llama(torch.float32)
    qat.prepare_(model, lowbit.formats.grid(format, {"lm_head": None, "*": schemes[name]}))
    wanted = trained(model)
    qat.convert_(model)
    report = lowbit.export(model, tmp_path / "out", format)
    assert len(report.converted) == 14 and not report.snr
    own = dict(lowbit.load_pretrained(tmp_path / "out").named_parameters())
    for weight, values in wanted.items():
        assert torch.equal(own[weight].dequantize(), values), weight
    narrow = torch.float16 if by_others is by_gptqmodel else torch.bfloat16
    theirs = by_others(tmp_path / "out")
    for weight, values in wanted.items():
        assert torch.equal(theirs[weight].to(narrow), values.to(narrow)), weight


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_a_model_prepared_for_a_format(format: str, scales: str, tmp_path: Path) -> None:
    """In float32, whose scales these formats do not hold."""
    model = llama(torch.float32)
    scheme = {"lm_head": None, "*": Int4WeightOnly(32)}
    qat.prepare_(model, scheme, scales=scales, format=format)
    wanted = trained(model)
    qat.convert_(model)
    assert len(lowbit.export(model, tmp_path / "out", format).converted) == 14
    own = dict(lowbit.load_pretrained(tmp_path / "out").named_parameters())
    for weight, values in wanted.items():
        assert torch.equal(own[weight].dequantize(), values), weight


@pytest.mark.parametrize(
    ("scheme", "format", "message"),
    [
        (NF4WeightOnly(), "gptq", "gptq"),
        ({"lm_head": None, "*": IntxWeightOnly(3, 32)}, "awq", "awq"),
        (Int4WeightOnly(32), "onnx", "leave out format="),
        (Int4WeightOnly(32), "gptq5", "gptq5"),
        (None, "gptq", "without one each weight keeps the scheme that it has"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_the_training(
    scheme: Any, format: str, message: str
) -> None:
    model = llama(torch.float32)
    before = dict(model.named_parameters())
    if scheme is None:
        lowbit.quantize_(model, Int4WeightOnly(32))
        before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        qat.prepare_(model, scheme, format=format)
    assert all(p is before[n] for n, p in model.named_parameters())


@pytest.mark.parametrize("name", ["int4", "float8", "mxfp4"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts(model_type: str, name: str, tmp_path: Path) -> None:
    """Stacks in training, a matrix for each expert in the folder."""
    scheme = {"int4": Int4WeightOnly(32), "float8": Float8WeightOnly(), "mxfp4": MXFP4WeightOnly()}
    model = mixture(model_type)
    qat.prepare_(model, scheme[name], filter_fn=lambda _, fqn: fqn.endswith("experts"))
    wanted = trained(model)
    qat.convert_(model)
    lowbit.export(model, tmp_path / "out")
    theirs = by_compressed_tensors(tmp_path / "out")
    assert len(wanted) == 2
    for weight, values in wanted.items():
        assert torch.equal(theirs[weight], values), weight


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """The model has them as [experts, inputs, outputs], and the groups of the file run along the inputs."""
    model = mixture("gpt_oss")
    qat.prepare_(model, {"*.experts": MXFP4WeightOnly()}, format="mxfp4")
    wanted = trained(model)
    prepared = logits(model)
    qat.convert_(model)
    # the values are equal, as below; without gradients a CPU's kernel adds products up in another order
    assert len(wanted) == 2 and relative_error(logits(model), prepared) < 1e-2
    lowbit.export(model, tmp_path / "out", "mxfp4")
    own = dict(lowbit.load_pretrained(tmp_path / "out").named_parameters())
    theirs = by_transformers(tmp_path / "out")
    for weight, values in wanted.items():
        assert torch.equal(own[weight].dequantize(), values), weight
        assert torch.equal(theirs[weight], values), weight


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        (Int4WeightOnly(32), torch.bfloat16),
        (Int8WeightOnly(32), torch.bfloat16),
        (Int4WeightOnly(32), torch.float32),
        (IntxWeightOnly(4, 32, "asymmetric"), torch.float32),
    ],
    ids=["int4", "int8", "int4 of float32", "Q4_1 of float32"],
)
def test_gguf(scheme: lowbit.Scheme, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.formats.test_gguf import llama as small
    from tests.formats.test_gguf import tokenizer

    model = small({"*": Int8WeightOnly()}, dtype)
    lowbit.dequantize_(model)
    model.requires_grad_(True)
    qat.prepare_(model, lowbit.formats.grid("gguf", {"lm_head": None, "*": scheme}))
    wanted = trained(model)
    qat.convert_(model)
    words = tokenizer(tmp_path / "tokenizer")
    lowbit.export(model, tmp_path / "model.gguf", "gguf", tokenizer=words)
    kind = transformers.AutoModelForCausalLM
    found = kind.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=dtype)
    theirs = dict(found.named_parameters())
    for weight, values in wanted.items():
        assert torch.equal(theirs[weight], values), weight
