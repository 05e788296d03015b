"""Folders of NF4, FP4, MXFP4 and NVFP4, and of experts, against transformers, bitsandbytes and compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    IntxWeightOnly,
    LowbitTensor,
    MXFP4WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
    TableTensor,
    quantize_,
)
from lowbit.formats.bitsandbytes_4bit import FP4
from lowbit.formats.experts import FAMILIES, MIXTRAL
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from tests.integrations.models import SIZES as SMALL
from tests.integrations.test_formats import assert_same_weights, error, llama, logits, low_bit

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def loaded(folder: Path, **options: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


# ---- bitsandbytes ----------------------------------------------------------------------------------------------------

OF_BNB = {
    "nf4": NF4WeightOnly(),
    "nf4 g128": NF4WeightOnly(128),
    "nf4 double": NF4WeightOnly(double_quantization=True),
    "fp4": Scheme(Spec(FP4, PerGroup(64))),
    "fp4 double": Scheme(Spec(FP4, PerGroup(64), scale_format="double")),
}


def of_bitsandbytes(module: Any) -> torch.Tensor:
    functional = pytest.importorskip("bitsandbytes").functional
    return functional.dequantize_4bit(module.weight.data, module.weight.quant_state)


def assert_values_of_bitsandbytes(found: nn.Module, model: nn.Module) -> None:
    modules = dict(found.named_modules())
    count = 0
    for name, t in model.named_parameters():
        module = modules[name.rpartition(".")[0]]
        if isinstance(t, LowbitTensor):
            assert torch.equal(of_bitsandbytes(module), t.dequantize()), name
            count += 1
        else:
            assert torch.equal(module.weight, t), name
    assert count == 14


@pytest.mark.parametrize("name", OF_BNB)
def test_bitsandbytes_4bit_by_from_pretrained(name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = low_bit(OF_BNB[name])
    lowbit.export(model, tmp_path / "out", "bitsandbytes-4bit", max_shard_size="100KB")
    found = loaded(tmp_path / "out", device_map="cpu")
    assert_values_of_bitsandbytes(found, model)
    assert error(logits(found), logits(model)) < 0.02
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_folder_that_bitsandbytes_makes(kind: str, double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "plain")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    theirs = loaded(tmp_path / "plain", quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "out")
    found = lowbit.load_pretrained(tmp_path / "out")
    assert_values_of_bitsandbytes(theirs, found)
    lowbit.export(tmp_path / "out", tmp_path / "again", "bitsandbytes-4bit")
    assert_values_of_bitsandbytes(loaded(tmp_path / "again", device_map="cpu"), found)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def decompressed(folder: Path) -> Any:
    pytest.importorskip("compressed_tensors")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    return loaded(folder, quantization_config=config)


OF_CT = {
    "mxfp4": MXFP4WeightOnly(),
    "mxfp4 floor": MXFP4WeightOnly("symmetric"),
    "mxfp4 x int8": Scheme(MXFP4WeightOnly().weight, Int8DynamicActivationInt8Weight().activation),
    "nvfp4": NVFP4WeightOnly(),
}


@pytest.mark.parametrize("name", OF_CT)
def test_fp4_by_from_pretrained(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = low_bit(OF_CT[name])
    lowbit.export(model, tmp_path / "out", max_shard_size="100KB")
    found = decompressed(tmp_path / "out")
    assert_same_weights(found, model)
    assert error(logits(found), logits(model)) < 0.03
    as_it_is = loaded(tmp_path / "out")
    assert error(logits(as_it_is), logits(model)) < 0.03
    assert_same_weights(as_it_is, model)
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16", "NVFP4"])
@pytest.mark.filterwarnings("ignore:other programs round the inputs")
def test_fp4_that_the_package_compresses(preset: str) -> None:
    """Tensors that compressed-tensors itself makes, decoded as it decodes them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    kind = "mxfp4-pack-quantized" if preset[:2] == "MX" else "nvfp4-pack-quantized"
    torch.manual_seed(0)
    w = torch.randn(48, 128, dtype=torch.bfloat16)
    groups = w.float().unflatten(1, (-1, args.group_size))
    state = {"weight": w}
    if kind[:2] == "nv":
        state["weight_global_scale"] = generate_gparam(w.min().float(), w.max().float())
    whole = state.get("weight_global_scale")
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, whole)
    compressor = BaseCompressor.get_value_from_registry(kind)
    parts = compressor.compress({**state, "weight_scale": scale}, scheme)
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"all": {**scheme.model_dump(mode="json"), "targets": ["Linear"]}},
    }
    own = lowbit.formats.registry.by_name("compressed-tensors")
    found = own.read(dict(parts), settings, "a.weight", torch.bfloat16)
    assert type(found) is TableTensor
    theirs = compressor.decompress(parts, scheme)["weight"]
    assert torch.equal(found.dequantize(), theirs)
    again = own.encode(found)
    for name, t in parts.items():
        if name in again:
            assert torch.equal(again[name].view(torch.uint8), t.view(torch.uint8)), name


# ---- experts ---------------------------------------------------------------------------------------------------------


def mixture(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    kinds = {
        "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
        "qwen3_moe": (transformers.Qwen3MoeConfig, {**EXPERTS, "moe_intermediate_size": 32}),
        "gpt_oss": (
            transformers.GptOssConfig,
            {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"]},
        ),
    }
    config, own = kinds[name]
    made = config(**{**SMALL, **own, **changes})
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()


def low_bit_mixture(name: str, scheme: Any, **changes: Any) -> Any:
    model = mixture(name, **changes)

    def chosen(module: nn.Module, fqn: str) -> bool:
        is_linear = isinstance(module, nn.Linear) and fqn != "lm_head"
        return is_linear or fqn.endswith("experts")

    quantize_(model, scheme, chosen)
    return model


def test_the_names_are_those_of_transformers() -> None:
    """Every model type that lowbit names is converted by transformers so, and in no other way. Releases before the
    newest do not know all of them."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    unknown = []
    for model_type, names in FAMILIES.items():
        found = get_checkpoint_conversion_mapping(model_type)
        if found is None:
            unknown.append(model_type)
            continue
        experts = {tuple(c.target_patterns): c.source_patterns for c in found}
        prefix = ".experts" if names is MIXTRAL else "mlp.experts"
        wanted = {
            (f"{prefix}.gate_up_proj",): [
                f"{prefix}.*.{matrix}.weight" for matrix in (names.gate, names.up)
            ],
            (f"{prefix}.down_proj",): [f"{prefix}.*.{names.down}.weight"],
        }
        if names.module is not None:
            wanted[(names.module[1],)] = [names.module[0]]
        assert experts == wanted, model_type
    assert unknown in ([], ["qwen3_omni_moe_text"])


OF_EXPERTS = {
    "int4": Int4WeightOnly(32),
    "int8": lowbit.Int8WeightOnly(),
    "int3": IntxWeightOnly(3, 32, "symmetric"),
    "float8": lowbit.Float8WeightOnly(),
    "mxfp4": MXFP4WeightOnly(),
}


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_by_from_pretrained(name: str, model_type: str, tmp_path: Path) -> None:
    model = low_bit_mixture(model_type, OF_EXPERTS[name])
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, LowbitTensor)
    lowbit.export(model, tmp_path / "out", max_shard_size="20KB")
    found = decompressed(tmp_path / "out")
    assert_same_weights(found, model)
    assert error(logits(found), logits(model)) < 0.02
    own = lowbit.load_pretrained(tmp_path / "out")
    assert type(own.model.layers[0].mlp.experts.down_proj) is type(
        model.model.layers[0].mlp.experts.down_proj
    )
    assert torch.equal(logits(own), logits(model))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", ["int4", "float8"])
def test_plain_experts_beside_low_bit_linears(name: str, model_type: str, tmp_path: Path) -> None:
    model = mixture(model_type)
    quantize_(model, {"lm_head": None, "*_proj": OF_EXPERTS[name]})
    lowbit.export(model, tmp_path / "out")
    for found in (decompressed(tmp_path / "out"), loaded(tmp_path / "out")):
        assert error(logits(found), logits(model)) < 0.02
        assert_same_weights(found, model)
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))


def test_experts_of_float8_blocks_by_from_pretrained(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}
    scheme = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
    model = low_bit_mixture("mixtral", scheme, **sizes)
    lowbit.export(model, tmp_path / "out", "fp8")
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model))
    assert_same_weights(loaded(tmp_path / "out"), model)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_published_folder_of_experts(model_type: str, tmp_path: Path) -> None:
    """As transformers saves it: read with its names, and quantized while writing. The router stays plain."""
    model = mixture(model_type)
    model.save_pretrained(tmp_path / "plain", max_shard_size="50KB")
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "plain")), logits(model))
    report = lowbit.export(
        tmp_path / "plain", tmp_path / "out", scheme={"model.layers.*": Int4WeightOnly(32)}
    )
    assert len(report.converted) == 4 + 3 * 4
    router = next(n for n in report.left if n.endswith(".gate.weight"))
    assert report.left[router].startswith("a router")
    wanted = low_bit_mixture(model_type, Int4WeightOnly(32))
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(wanted))
    assert_same_weights(decompressed(tmp_path / "out"), wanted)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_published_folder_becomes_one_of_stacks(model_type: str, tmp_path: Path) -> None:
    """In lowbit's format, which transformers reads by the names in memory."""
    import lowbit.hf

    mixture(model_type).save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    scheme = {"model.layers.*": Int4WeightOnly(32)}
    report = lowbit.export(tmp_path / "plain", tmp_path / "own", "lowbit", scheme=scheme)
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert stack in report.converted and report.snr[stack] > 15
    wanted = low_bit_mixture(model_type, Int4WeightOnly(32))
    for found in (loaded(tmp_path / "own"), lowbit.load_pretrained(tmp_path / "own")):
        assert torch.equal(logits(found), logits(wanted))
    lowbit.export(wanted, tmp_path / "ct")
    lowbit.export(tmp_path / "ct", tmp_path / "again", "lowbit")
    assert torch.equal(logits(loaded(tmp_path / "again")), logits(wanted))


@pytest.mark.parametrize("pattern", ["model.layers.*", "*", r"re:model\.layers\..*"])
def test_routers_stay_plain_while_loading(pattern: str, tmp_path: Path) -> None:
    from lowbit.hf import LowbitConfig

    mixture("qwen3_moe").save_pretrained(tmp_path / "plain")
    config = LowbitConfig({pattern: "int8"})
    report = loaded(tmp_path / "plain", quantization_config=config).hf_quantizer.report
    router = "model.layers.0.mlp.gate.weight"
    assert report.left[router].startswith("a router") and len(report.converted) == 6
    config = LowbitConfig({"*.mlp.gate": "int8", pattern: "int8"})
    report = loaded(tmp_path / "plain", quantization_config=config).hf_quantizer.report
    assert router in report.converted


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------


def low_bit_gpt_oss(tmp_path: Path, scheme: Any = None) -> Any:
    """Its experts, which it stores as [E, K, N], quantized while it loads."""
    from lowbit.hf import LowbitConfig

    mixture("gpt_oss").save_pretrained(tmp_path / "plain")
    config = LowbitConfig({"*.experts*": scheme or MXFP4WeightOnly()})
    return loaded(tmp_path / "plain", quantization_config=config)


def test_gpt_oss_by_from_pretrained(tmp_path: Path) -> None:
    model = low_bit_gpt_oss(tmp_path)
    experts = model.model.layers[0].mlp.experts
    assert type(experts.gate_up_proj.data) is TableTensor and experts.gate_up_proj.transposed
    report = lowbit.export(model, tmp_path / "out", "mxfp4", max_shard_size="20KB")
    assert len(report.converted) == 2
    found = loaded(tmp_path / "out")
    assert_same_weights(found, model)
    assert error(logits(found), logits(model)) < 1e-2  # bfloat16 sums in two orders
    own = lowbit.load_pretrained(tmp_path / "out")
    assert own.model.layers[0].mlp.experts.gate_up_proj.transposed
    assert torch.equal(logits(own), logits(model))
    lowbit.export(tmp_path / "out", tmp_path / "own", "lowbit")
    lowbit.export(tmp_path / "own", tmp_path / "again", "mxfp4")
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "again")), logits(model))


def test_another_scheme_becomes_mxfp4_with_its_loss_stated(tmp_path: Path) -> None:
    model = low_bit_gpt_oss(tmp_path, Int4WeightOnly(32))
    with pytest.raises(lowbit.formats.FormatError, match="holds E2M1"):
        lowbit.export(model, tmp_path / "out", "mxfp4")
    report = lowbit.export(model, tmp_path / "out", "mxfp4", lossy=True)
    assert len(report.snr) == 2 and all(ratio > 15 for ratio in report.snr.values())
    assert error(logits(lowbit.load_pretrained(tmp_path / "out")), logits(model)) < 0.3


def test_a_plain_gpt_oss_is_quantized_while_writing(tmp_path: Path) -> None:
    """As it is quantized while loading: groups run along the inputs."""
    wanted = low_bit_gpt_oss(tmp_path)
    scheme = MXFP4WeightOnly()
    report = lowbit.export(
        tmp_path / "plain", tmp_path / "out", "mxfp4", scheme={"*.experts": scheme}
    )
    assert len(report.snr) == len(report.converted) == 2
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "out")), logits(wanted))
    on_grid = {"*.experts": lowbit.formats.grid("mxfp4", scheme)}  # as QAT takes it
    lowbit.export(tmp_path / "plain", tmp_path / "on grid", "mxfp4", scheme=on_grid)
    assert torch.equal(logits(lowbit.load_pretrained(tmp_path / "on grid")), logits(wanted))
    own = lowbit.export(tmp_path / "plain", tmp_path / "own", "lowbit", scheme=Int4WeightOnly(32))
    assert not any("stacks" in note for note in (*report.notes, *own.notes))
    experts = lowbit.load_pretrained(tmp_path / "own").model.layers[0].mlp.experts
    assert type(experts.down_proj.data) is lowbit.AffineTensor and experts.down_proj.transposed
    report = lowbit.export(tmp_path / "plain", tmp_path / "ct", scheme=Int4WeightOnly(32))
    (note,) = [note for note in report.notes if "stacks" in note]
    assert note == (
        "2 stacks of experts, such as model.layers.0.mlp.experts.down_proj, stay in high precision: compressed-tensors "
        "has no form for them, and the format lowbit has"
    )
    experts = lowbit.load_pretrained(tmp_path / "ct").model.layers[0].mlp.experts
    assert not isinstance(experts.down_proj, LowbitTensor)
