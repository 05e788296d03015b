"""A DiT, a Flux transformer and a VAE of diffusers, tiny and random. Runs where diffusers is installed, by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

import lowbit  # noqa: E402
from benchmarks.train_diffusion import with_copies  # noqa: E402
from lowbit.formats import FormatError  # noqa: E402
from lowbit.hf import LowbitConfig  # noqa: E402
from lowbit.train import Float8MixedPrecision, Int8MixedPrecision  # noqa: E402
from tests.integrations.test_launchers import FENCE, PAGE, of_page  # noqa: E402
from tests.train.problems import relative  # noqa: E402

INT8, INT4 = lowbit.Int8WeightOnly(), lowbit.Int4WeightOnly(32)
CONVOLUTIONS = {"*conv[12]": INT4, "*": INT4}
SHAPES = {"dit": (2, 4, 8, 8), "flux": (2, 16, 16), "vae": (2, 3, 32, 32)}
TARGETS = {
    "dit": ["to_q", "to_v", "norm1.linear"],
    "flux": ["to_q", "to_v", "norm1.linear"],
    "vae": ["to_q", "to_v", "conv1"],
}


def dit() -> Any:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2}
    planes = {"in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2}
    return diffusers.DiTTransformer2DModel(**sizes, **planes, num_embeds_ada_norm=20)


def flux(**changes: Any) -> Any:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64}
    sizes |= {"in_channels": 16, "axes_dims_rope": (8, 12, 12)}
    return diffusers.FluxTransformer2DModel(**sizes, **changes)


def vae() -> Any:
    blocks = {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2}
    blocks |= {"up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8}
    return diffusers.AutoencoderKL(**blocks, latent_channels=4, sample_size=32)


MODELS: dict[str, Callable[[], Any]] = {"dit": dit, "flux": flux, "vae": vae}
KINDS = pytest.mark.parametrize("kind", MODELS)


def built(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().eval()


def output(kind: str, model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(SHAPES[kind])
    times = torch.tensor([3, 11])
    if kind == "dit":
        return model(x, timestep=times, class_labels=times).sample
    if kind == "vae":
        return model(x).sample
    text = {
        "encoder_hidden_states": torch.randn(2, 6, 64),
        "pooled_projections": torch.randn(2, 64),
    }
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
    return model(hidden_states=x, timestep=times / 20, **text, **places).sample


def still(kind: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return output(kind, model)


def losses(kind: str, model: nn.Module, learning_rate: float, run: Any = None) -> list[float]:
    """Of four steps of AdamW8bit towards the inputs."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = lowbit.optim.AdamW8bit(trained, lr=learning_rate)
    found = []
    for _ in range(4):
        loss = (output(kind, model if run is None else run) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_groups_that_became_zero_are_warned_of(tmp_path: Path) -> None:
    model = built("dit")
    name = "transformer_blocks.0.attn1.to_q.weight"
    model.get_parameter(name).data[:3] *= 1e-12
    model.save_pretrained(tmp_path)
    config = LowbitConfig(lowbit.IntxWeightOnly(4, 32, scale_dtype=torch.float16))
    with pytest.warns(UserWarning, match=f"{name}: 6 of 128 groups became 0"):
        type(model).from_pretrained(tmp_path, quantization_config=config)


@KINDS
@pytest.mark.parametrize("scheme", [Int8MixedPrecision, Float8MixedPrecision])
def test_all_weights_train_with_low_bit_products(kind: str, scheme: Any, tmp_path: Path) -> None:
    """As the plain model does, but for rounding. The folder holds the plain weights."""
    plain, model = built(kind), built(kind)
    report = lowbit.train.prepare_(model, scheme(always=True))
    assert len(report.converted) > 7
    expected, found = losses(kind, plain, 1e-3), losses(kind, model, 1e-3)
    assert found[-1] < found[0] and found != expected  # 1.2 to 0.1
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0.02)
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    lowbit.train.restore_(model)
    assert torch.equal(still(kind, saved), still(kind, model))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", [Int8MixedPrecision, Float8MixedPrecision])
def test_compiled(scheme: Any) -> None:
    """The step of a DiT, within the rounding of other fused sums."""
    found = []
    for compiled in (False, True):
        model = built("dit")
        lowbit.train.prepare_(model, scheme(always=True))
        run = torch.compile(model) if compiled else None
        found.append(losses("dit", model, 1e-3, run))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=0.01, atol=0)


@pytest.mark.parametrize("adapted", [True, False], ids=["LoRA", "all weights"])
def test_compiled_blocks_of_flux(adapted: bool) -> None:
    """Single-stream blocks return views of one tensor, which torch compiles beside plain weights alone."""
    found = []
    for compiled in (False, True):
        model = built("flux")
        if adapted:
            model.requires_grad_(False).add_adapter(peft.LoraConfig(r=4, target_modules=["to_q"]))
        lowbit.train.prepare_(model, Int8MixedPrecision(stochastic_rounding=False, always=True))
        for block in model.single_transformer_blocks:
            block.forward = with_copies(block.forward)
        for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
            if compiled:
                block.compile(backend="aot_eager")
        found.append(losses("flux", model, 1e-3))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=0.01, atol=0)


def with_adapters(kind: str, model: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=TARGETS[kind])
    if kind == "dit":  # the class has no add_adapter
        return peft.get_peft_model(model, config)
    model.requires_grad_(False).add_adapter(config)
    return model


@KINDS
@pytest.mark.parametrize("way", ["int8", "int4", "int8 products", "float8 products"])
def test_adapters(kind: str, way: str, tmp_path: Path) -> None:
    """Train over low-bit weights or beside low-bit products, with checkpoints or without to the bit; come back from
    their file; leave the base as it was."""

    def base() -> Any:
        model = built(kind)
        if "products" in way:
            scheme = Int8MixedPrecision if "int8" in way else Float8MixedPrecision
            lowbit.train.prepare_(model, scheme(always=True))
        else:
            lowbit.quantize_(model, INT8 if way == "int8" else INT4)
        return model

    torch.manual_seed(2)
    start = base()
    before = still(kind, start)
    model = with_adapters(kind, start)
    other = copy.deepcopy(model)
    found = losses(kind, model, 1e-2)
    assert found[-1] < found[0]
    other.enable_gradient_checkpointing()
    assert losses(kind, other, 1e-2) == found
    if kind == "dit":
        assert torch.equal(still(kind, model.unload()), before)
        return
    model.save_lora_adapter(tmp_path)
    again = base()
    again.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    assert torch.equal(still(kind, again), still(kind, model))
    model.delete_adapters("default")
    assert torch.equal(still(kind, model), before)


SCHEMES = {
    "int8": INT8,
    "int4": INT4,
    "int8 x int8": lowbit.Int8DynamicActivationInt8Weight(),
    "nvfp4": lowbit.NVFP4WeightOnly(),  # q, k and v share a scale
    "nf4": lowbit.NF4WeightOnly(64, double_quantization=True),
}
CASES = [(kind, "nvfp4") for kind in MODELS] + [
    ("flux", name) for name in SCHEMES if name != "nvfp4"
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_from_pretrained_reads_what_save_pretrained_writes(
    kind: str, name: str, tmp_path: Path
) -> None:
    """In one file and in several, where the parts of a weight may lie in two of them."""
    model = built(kind)
    lowbit.quantize_(model, SCHEMES[name])
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="40KB")
    assert len([*(tmp_path / "several").glob("*.safetensors")]) > 3
    for place in ("one", "several"):
        saved = type(model).from_pretrained(tmp_path / place)
        assert torch.equal(still(kind, saved), still(kind, model)), place
    half = type(model).from_pretrained(tmp_path / "one", torch_dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_from_pretrained_quantizes_what_it_reads(kind: str, name: str, tmp_path: Path) -> None:
    """As `quantize_` does, to the bit; and the model is saved, copied and dequantized."""
    model = built(kind)
    model.save_pretrained(tmp_path / "plain")
    lowbit.quantize_(model, SCHEMES[name])
    config = LowbitConfig(SCHEMES[name])
    read = type(model).from_pretrained(tmp_path / "plain", quantization_config=config)
    expected = still(kind, model)
    assert torch.equal(still(kind, read), expected)
    plain = copy.deepcopy(read).dequantize()
    plain.save_pretrained(tmp_path / "dequantized")
    assert "codes" not in json.dumps([*plain.state_dict()])
    again = type(model).from_pretrained(tmp_path / "dequantized")
    assert torch.equal(still(kind, again), still(kind, plain))
    read.save_pretrained(tmp_path / "low")
    other = copy.deepcopy(read)
    lowbit.dequantize_(other)
    other.save_pretrained(tmp_path / "plain again")
    for made in (plain, other):
        assert "quantization_config" not in made.config
    for name in ("dequantized", "plain again"):
        assert "quantization_config" not in (tmp_path / name / "config.json").read_text()
    assert torch.equal(still(kind, type(model).from_pretrained(tmp_path / "low")), expected)


@pytest.mark.parametrize("kind", ["flux", "vae"])
def test_from_pretrained_reads_what_export_writes(kind: str, tmp_path: Path) -> None:
    """From memory and from a folder, in one file and in several, with the config and the names of diffusers."""
    model = built(kind)
    model.save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    lowbit.quantize_(model, INT8)
    lowbit.export(model, tmp_path / "one")
    lowbit.export(model, tmp_path / "several", max_shard_size=100_000)
    lowbit.export(tmp_path / "several", tmp_path / "again")
    assert (tmp_path / "several/diffusion_pytorch_model.safetensors.index.json").is_file()
    schemes = dict.fromkeys(lowbit.quantize_(built(kind), INT8).converted, INT8)
    lowbit.export(tmp_path / "plain", tmp_path / "folder", scheme=schemes)
    for place in ("one", "several", "again", "folder"):
        saved = type(model).from_pretrained(tmp_path / place)
        assert torch.equal(still(kind, saved), still(kind, model)), place
    assert "dtype" not in json.loads((tmp_path / "one/config.json").read_text())


def test_a_part_that_became_low_bit_alone_is_described(tmp_path: Path) -> None:
    model = built("flux")
    lowbit.quantize_(model.transformer_blocks, INT8)
    model.save_pretrained(tmp_path / "one")
    lowbit.quantize_(model.proj_out, INT8)
    model.save_pretrained(tmp_path / "two")
    saved = type(model).from_pretrained(tmp_path / "two")
    assert torch.equal(still("flux", saved), still("flux", model))
    low = [isinstance(m.proj_out.weight, lowbit.LowbitTensor) for m in (model, saved)]
    assert low == [True, True]
    one = type(model).from_pretrained(tmp_path / "one")
    assert isinstance(one.transformer_blocks[0].attn.to_q.weight, lowbit.LowbitTensor)
    assert type(one.proj_out.weight) is nn.Parameter


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_fused_adapters_keep_the_scale_that_siblings_share(scale: float) -> None:
    """q, k and v in NVFP4: `fuse_lora` and `unfuse_lora` change them together, each once."""
    model = built("flux")
    lowbit.quantize_(model, {"*.to_[qkv]": lowbit.NVFP4WeightOnly()})
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "proj_out"])
    model.add_adapter(config)
    torch.manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.7)
    attention = model.transformer_blocks[0].attn
    q, k = attention.to_q, attention.to_k
    expected = q.get_base_layer().weight.dequantize() + scale * q.get_delta_weight("default")
    plain = copy.deepcopy(model.proj_out.get_base_layer().weight)
    plain = plain + scale * model.proj_out.get_delta_weight("default")
    for change, is_merged in (
        (lambda: model.fuse_lora(lora_scale=scale), True),
        (model.unfuse_lora, False),
    ):
        change()
        assert q.merged is k.merged is is_merged
        scales = {
            float(getattr(layer, "base_layer", layer).weight.global_scale)
            for layer in (q, k, attention.to_v)
        }
        assert len(scales) == 1
        if is_merged:
            assert relative(q.get_base_layer().weight.dequantize(), expected) < 0.15
            torch.testing.assert_close(model.proj_out.get_base_layer().weight, plain)


def test_convolutions_and_qat(tmp_path: Path) -> None:
    """A VAE in int4 with its convolutions, which QAT trains and the folder keeps."""
    model = built("vae")
    lowbit.qat.prepare_(model, CONVOLUTIONS)
    found = losses("vae", model, 1e-3)
    assert found[-1] < found[0]
    expected = still("vae", model)
    report = lowbit.qat.convert_(model)
    assert sum("conv" in name for name in report.converted) == 20
    assert torch.equal(still("vae", model), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(still("vae", type(model).from_pretrained(tmp_path)), expected)


def test_what_is_refused(tmp_path: Path) -> None:
    model = built("vae")
    model.save_pretrained(tmp_path / "plain")
    read = type(model).from_pretrained
    with pytest.raises(ValueError, match="calibrates models of transformers"):
        read(tmp_path / "plain", quantization_config=LowbitConfig(INT8, batches=[1]))
    with pytest.raises(ValueError, match="chose no weight"):
        read(tmp_path / "plain", quantization_config=LowbitConfig({"*.nothing": INT8}))
    lowbit.quantize_(model, INT8)
    model.save_pretrained(tmp_path / "low")
    config = json.loads((tmp_path / "low/config.json").read_text())
    config["quantization_config"]["tensors"].popitem()
    (tmp_path / "low/config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="describes no tensor for"):
        read(tmp_path / "low")
    model.save_pretrained(tmp_path / "low")
    file = tmp_path / "low/diffusion_pytorch_model.safetensors"
    parts = load_file(file)
    name = next(part for part in parts if part.endswith(".codes")).removesuffix(".codes")
    del parts[f"{name}.codes"]
    save_file(parts, file, {"format": "pt"})
    with pytest.raises(FormatError, match=rf"{name}: its parts do not fit .* has no codes"):
        read(tmp_path / "low")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q"]))
    with pytest.raises(FormatError, match=r"lies in a layer of PEFT.* unload_lora\(\) gives"):
        model.save_pretrained(tmp_path / "adapted")
    model.unload_lora()
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(still("vae", read(tmp_path / "whole")), still("vae", model))


def test_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(of_page("diffusers"), "page", "exec"), {"__name__": "__main__"})
    stored = diffusers.FluxTransformer2DModel.from_pretrained("flux-int8")
    assert isinstance(stored.proj_out.weight, lowbit.LowbitTensor)


def test_the_program_of_the_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flux(guidance_embeds=True).save_pretrained("FLUX.1-dev/transformer")
    page = (PAGE.parent / "wishes/diffusion.md").read_text(encoding="utf-8")
    exec(compile(page.partition(FENCE)[2].partition("```\n")[0], "page", "exec"), {})
    assert Path("flux-lora/pytorch_lora_weights.safetensors").exists()
