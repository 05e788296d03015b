"""Settings of lowbit.torchtitan: what a line means, and clear errors for those that cannot be."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowbit
from lowbit import optim
from lowbit.interop import config_lines
from tests import forked
from tests.integrations.titan import ROOT
from tests.test_readme import blocks

RECIPES = sorted((ROOT / "recipes/torchtitan").glob("*.toml"))


def imported(version: str | None) -> str:
    """The last line of an error of `import lowbit.torchtitan`, with this version of torchtitan installed."""
    raised = (
        "raise metadata.PackageNotFoundError(name)" if version is None else f"return {version!r}"
    )
    code = f"""
from importlib import metadata
found = metadata.version
def version(name):
    if name != "torchtitan":
        return found(name)
    {raised}
metadata.version = version
import lowbit.torchtitan
"""
    done = forked.run(code, folder=ROOT)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_without_torchtitan():
    message = imported(None)
    assert "needs torchtitan >= 0.2.2, < 0.3, which is not installed" in message
    assert "pip install 'lowbit[torchtitan]'" in message


@pytest.mark.parametrize("version", ["0.1.0", "0.4.0", "1.0.0"])
def test_another_version(version):
    message = imported(version)
    assert f"needs torchtitan >= 0.2.2, < 0.3, and {version} is installed" in message
    assert "pip install --upgrade 'lowbit[torchtitan]'" in message


pytest.importorskip("torchtitan")
if not importlib.metadata.version("torchtitan").startswith("0.2."):
    pytest.skip("torchtitan of another release", allow_module_level=True)

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from lowbit.interop.torchtitan import optimizers, release_0_2, settings  # noqa: E402
from lowbit.interop.torchtitan.metrics import MeasuredSteps, Measurement  # noqa: E402
from lowbit.interop.torchtitan.settings import qat_scheme  # noqa: E402
from lowbit.torchtitan import Lowbit, LowbitConverter  # noqa: E402
from lowbit.tracing import tracer  # noqa: E402
from recipes.torchtitan import export  # noqa: E402

CPU = torch.device("cpu")
QAT = ["--lowbit.qat", "int4"]


# ---- lines -----------------------------------------------------------------------------------------------------


def test_lines():
    assert config_lines.optimizer("AdamW8bit") == (optim.AdamW8bit, {})
    assert config_lines.optimizer(" lowbit.AdamW(state='bf16', seed=2) ") == (
        optim.AdamW,
        {"state": "bf16", "seed": 2},
    )
    assert config_lines.training_scheme("int8") == lowbit.Int8MixedPrecision()
    assert config_lines.training_scheme("float8(backward='e5m2')") == lowbit.Float8MixedPrecision(
        backward="e5m2"
    )
    assert config_lines.training_scheme("Int8Weight(seed=1)") == lowbit.Int8Weight(seed=1)
    assert qat_scheme("int4(group_size=32)") == lowbit.Int4WeightOnly(group_size=32)
    assert qat_scheme("IntxWeightOnly(bits=3)") == lowbit.IntxWeightOnly(3)


@pytest.mark.parametrize(
    ("resolve", "line", "message"),
    [
        (
            config_lines.optimizer,
            "AdamW3bit",
            r"no optimizer 'AdamW3bit'; accepted: .*AdamW8bit.*Muon8bit",
        ),
        (config_lines.optimizer, "CommonOptions", r"no optimizer 'CommonOptions'"),
        (
            config_lines.optimizer,
            "AdamW8bit(",
            r"names no optimizer .*; accepted: a name, or a name with",
        ),
        (config_lines.optimizer, "AdamW8bit(1)", r"only keyword arguments are accepted"),
        (config_lines.optimizer, "AdamW8bit(seed=__import__('os'))", r"names no optimizer"),
        (
            config_lines.training_scheme,
            "int4",
            r"no training scheme 'int4'; accepted: int8, float8, int8_w",
        ),
        (config_lines.training_scheme, "int8(groups=2)", r"int8\(groups=2\): .*unexpected keyword"),
        (
            config_lines.training_scheme,
            "float8(backward='e4')",
            r"backward must be 'e4m3' or 'e5m2'",
        ),
        (config_lines.training_scheme, "MixedPrecision", r"no training scheme 'MixedPrecision'"),
        (qat_scheme, "bitnet", r"no scheme 'bitnet'; accepted: int4, int8, float8"),
        (qat_scheme, "int4(group_size=0)", r"int4\(group_size=0\): "),
        (qat_scheme, "int8_int8_static", "static activations need steps that observe them"),
    ],
)
def test_lines_that_name_nothing(resolve, line, message):
    with pytest.raises(ValueError, match=message):
        resolve(line)


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            Lowbit(train="int8", qat="int4"),
            r"lowbit.train='int8' and lowbit.qat='int4' both change",
        ),
        (Lowbit(metrics_freq=-1), r"metrics_freq must be 0 \(never\) or more, got -1"),
        (Lowbit(qat_start=3), r"lowbit.qat_start=3 without QAT"),
        (Lowbit(qat="int4", qat_scales="fixed"), r"qat_scales='fixed'; accepted: 'present', 'l"),
        (Lowbit(qat="int4", qat_start=-1), r"qat_start=-1; accepted: a number of steps"),
        (Lowbit(qat="int4", qat_freeze_observers=5), r"int4 has no static activation to observe"),
    ],
)
def test_settings_that_contradict_each_other(chosen, message):
    with pytest.raises(ValueError, match=message):
        settings.scheme_of(chosen, CPU)


def test_schedules_of_qat():
    assert settings.schedule_of(Lowbit(qat="int4", qat_start=5)) == {"start": 5}
    chosen = Lowbit(qat="int8_int8_static", qat_freeze_observers=2)
    assert settings.schedule_of(chosen) == {"freeze_observers": 2}


def test_checkpoints_of_others_have_no_learned_scales():
    class Adapter:
        def to_hf(self, state_dict):
            return state_dict

    model = nn.ModuleDict({"a": nn.Linear(32, 4), "b": nn.Linear(32, 4, bias=False)})
    wanted = list(model.state_dict())
    model["b"].other_scale = nn.Parameter(torch.ones(3))
    lowbit.qat.prepare_(model, lowbit.Int8StaticActivationInt8Weight(), scales="learned")
    found = release_0_2.without_scales(Adapter)().to_hf(dict(model.state_dict()))
    assert [key for key in found if key != "b.other_scale"] == wanted and len(found) == 4
    assert release_0_2.without_scales(None) is None


def test_a_scheme_that_the_device_cannot_run(monkeypatch):
    """As on an A100, which has no float8 units."""
    monkeypatch.setattr(
        lowbit.schemes.training, "missing_units", lambda device, capability: "its compute capability is 8.0, below 8.9"
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"compute capability is 8.0, below 8.9.*always=True"):
        settings.scheme_of(Lowbit(train="float8"), CPU)


def test_layers_that_stay_as_they_are():
    model = nn.ModuleDict({"wq": nn.Linear(32, 32), "output": nn.Linear(32, 64)})
    chosen = Lowbit(train="int8_weights")
    scheme = settings.scheme_of(chosen, CPU)
    report = settings.prepare(model, scheme, chosen)
    assert report.converted == ["wq.weight"]
    made = settings.summary(report, scheme, CPU)
    assert made.endswith("1 left alone: not selected by the filter")
    idle = settings.summary(report, config_lines.training_scheme("int8"), CPU)
    assert idle.endswith("on a CPU their products run in high precision, unless always=True")


@pytest.mark.parametrize(
    ("train", "kind"),
    [
        ("int8_weights", lowbit.AffineTensor),
        ("int4_weights", lowbit.AffineTensor),
        ("bitnet", lowbit.TernaryTensor),
        ("int8", nn.Parameter),
    ],
)
def test_low_bit_weights_are_exported_in_low_bits(train, kind):
    chosen = SimpleNamespace(lowbit=Lowbit(train=train))
    model = nn.ModuleDict({"wq": nn.Linear(512, 512)})
    settings.prepare(model, settings.scheme_of(chosen.lowbit, CPU), chosen.lowbit)
    export.convert(model, chosen)
    assert type(model.wq.weight) is kind


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipes_are_read_and_their_models_prepared(path, monkeypatch):
    """Every configuration of the recipes, on meta, at its full size."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(release_0_2, "device_type", "cpu")
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    __import__("recipes.torchtitan.models")
    spec = get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    before = sum(p.numel() for p in model.parameters())
    LowbitConverter(config, None).convert(model)
    assert sum(p.numel() for p in model.parameters()) == before
    low = [n for n, p in model.named_parameters() if isinstance(p, lowbit.LowbitTensor)]
    asks = bool(config.lowbit.train or config.lowbit.qat)
    assert bool(low) == asks
    assert not any("output" in name or "gate" in name for name in low)
    assert any("experts" in name for name in low) == config.lowbit.experts
    assert ("lowbit" in tomllib.loads(path.read_text())) == (config.lowbit != Lowbit())


def test_the_lines_of_the_page_are_read(tmp_path):
    """The TOML of docs/torchtitan.md, and the same options in its command."""
    (block,) = blocks(ROOT / "docs/torchtitan.md", "toml")
    path = tmp_path / "page.toml"
    path.write_text(block, encoding="utf-8")
    lines = ConfigManager().parse_args(["--job.config_file", str(path)])
    assert lines.optimizer.name == "AdamW8bit"
    assert (lines.lowbit.train, lines.lowbit.metrics_freq) == ("int8", 10)

    command = blocks(ROOT / "docs/torchtitan.md", "bash")[0].replace("\\\n", " ")
    words = shlex.split(command.replace("llama3_8b.toml", str(path)))
    given = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    assert (given.optimizer.name, given.lowbit.train) == ("AdamW4bit", "float8")


def parsed(*options: str):
    return ConfigManager().parse_args(["--job.custom_config_module", "lowbit.torchtitan", *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer.name", "AdamW3bit"], r"no optimizer 'AdamW3bit'"),
        (["--optimizer.name", "AdamW8bit(lr=1.0)"], r"lr has a place of its own"),
        (["--optimizer.name", "AdamW8bit(eps=1e-6)"], r"eps has a place of its own"),
        (["--lowbit.train", "int5"], r"no training scheme 'int5'"),
        (
            ["--lowbit.train", "int8_weights", "--checkpoint.last_save_in_hf"],
            r"checkpoint.last_save_in_hf: weights of Int8Weight have no form in Hugging Face's",
        ),
        (
            ["--lowbit.train", "int4_weights", "--checkpoint.last_save_in_hf"],
            r"checkpoint.last_save_in_hf: weights of Int4Weight have no form in Hugging Face's",
        ),
        (
            [*QAT, "--lowbit.qat_scales", "learned", "--checkpoint.last_save_in_hf"],
            r"checkpoint.last_save_in_hf: learned scales have no form in Hugging Face's",
        ),
    ],
)
def test_configurations_that_cannot_run(options, message, monkeypatch):
    monkeypatch.setattr(release_0_2, "device_type", "cpu")
    with pytest.raises(ValueError, match=message):
        LowbitConverter(parsed(*options), None)


@pytest.mark.parametrize("sequences", [8, 16])
def test_gradients_cannot_accumulate_and_be_stepped_in_backward(sequences, monkeypatch):
    """Two processes of four sequences each: 8 are one backward, 16 are two."""
    monkeypatch.setattr(release_0_2, "device_type", "cpu")
    options = ["--optimizer.name", "AdamW8bit", "--optimizer.early_step_in_backward"]
    options += ["--training.local_batch_size", "4", "--training.global_batch_size", str(sequences)]
    dims = SimpleNamespace(dp_replicate=1, dp_shard=2)
    if sequences == 8:
        LowbitConverter(parsed(*options), dims)
    else:
        with pytest.raises(ValueError, match=r"global_batch_size=16 takes several of 8 sequences"):
            LowbitConverter(parsed(*options), dims)


def test_collectives_of_a_model_that_is_not_sharded_cannot_be_compressed(monkeypatch):
    monkeypatch.setattr(release_0_2, "device_type", "cpu")
    config = parsed("--lowbit.compress")
    LowbitConverter(config, SimpleNamespace(fsdp_enabled=True))
    with pytest.raises(ValueError, match=r"lowbit.compress without FSDP2: set parallelism"):
        LowbitConverter(config, SimpleNamespace(fsdp_enabled=False))


def test_activations_are_saved_in_int8(monkeypatch):
    """The outputs stay, and gradients come from rounded inputs of layers."""
    monkeypatch.setattr(release_0_2, "device_type", "cpu")
    spec, tokens, found = get_train_spec("llama3"), torch.arange(256)[None], []
    for options in ([], ["--lowbit.save_in_int8"]):
        torch.manual_seed(0)
        args = dataclasses.replace(spec.model_args["debugmodel"], n_layers=1, vocab_size=256)
        model = spec.model_cls(args)
        LowbitConverter(parsed(*options), None).convert(model)
        with torch.no_grad():
            model.init_weights()
        y = model(tokens)
        y.square().mean().backward()
        found.append((y, model.layers["0"].attention.wq.weight.grad))
    (y, exact), (same, rounded) = found
    assert torch.equal(y, same)
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.05
    options = ["--lowbit.save_in_int8", "--compile.enable", "--activation_checkpoint.mode", "full"]
    with pytest.raises(ValueError, match=r"lowbit.save_in_int8 with compile.enable and activation"):
        LowbitConverter(parsed(*options), None)


def test_a_configuration_without_the_section():
    with pytest.raises(ValueError, match=r"set job.custom_config_module to lowbit.torchtitan"):
        release_0_2.LowbitMetrics(ConfigManager().parse_args([]), None)


def test_a_list_of_converters_without_lowbit():
    config = parsed("--model.converters", "quantize.linear.float8", "--lowbit.train", "int8")
    with pytest.raises(ValueError, match=r"lacks 'lowbit', which carries out the section lowbit"):
        release_0_2.LowbitMetrics(config, None)


def test_optimizers_that_a_run_cannot_have():
    build = release_0_2.optimizers_builder(lambda *args: None)
    config = parsed("--optimizer.name", "AdamW8bit", "--optimizer.early_step_in_backward").optimizer
    dims = SimpleNamespace(pp_enabled=True, ep_enabled=False)
    with pytest.raises(NotImplementedError, match=r"early_step_in_backward with pipeline"):
        build([], config, dims)
    with pytest.raises(NotImplementedError, match=r"'AdamW8bit' with TorchFT; accepted with it"):
        build([], config, dims, SimpleNamespace(enabled=True))


# ---- optimizers ----------------------------------------------------------------------------------------------------


def group(model: nn.Module) -> dict:
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    return {"params": list(model.parameters()), **options, "foreach": False}


def model_of_layers() -> nn.Module:
    layer = nn.ModuleDict({"up": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
    return nn.ModuleDict({"embeddings": nn.Embedding(8, 16), "layers": nn.ModuleList([layer])})


@pytest.mark.parametrize("name", config_lines.OPTIMIZERS)
def test_every_optimizer_takes_torchtitans_options(name):
    model = model_of_layers()
    name_of = {id(p): n for n, p in model.named_parameters()}
    made = optimizers.made(name, [group(model)], name_of)
    assert type(made) is config_lines.OPTIMIZERS[name]
    assert {g["weight_decay"] for g in made.param_groups} == {0.1}
    assert {g["betas"][:2] for g in made.param_groups if "betas" in g} <= {(0.9, 0.95)}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    made.step()
    assert optimizers.steps_done([made]) == 1


def test_muon_takes_the_matrices_of_layers():
    model = model_of_layers()
    model["layers"][0].register_parameter("mlp1_bias", nn.Parameter(torch.ones(4, 16)))  # experts'
    name_of = {id(p): n for n, p in model.named_parameters()}
    made = optimizers.made("Muon8bit(adamw_lr=2e-3)", [group(model)], name_of)
    found = {g["use_muon"]: [name_of[id(p)] for p in g["params"]] for g in made.param_groups}
    assert found[True] == ["layers.0.up.weight"]
    assert len(found[False]) == 5
    assert {g["use_muon"]: g["lr"] for g in made.param_groups} == {True: 1e-3, False: 2e-3}


# ---- metrics -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A layer inside of a model, whose hooks are those of torchtitan's blocks."""

    def __init__(self, scheme=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64, bias=False)
        if scheme is not None:
            train = lowbit.qat if isinstance(scheme, lowbit.Scheme) else lowbit.train
            train.prepare_(self, scheme)

    def forward(self, x):
        return self.layer(x)


def measured(model: nn.Module, made: torch.optim.Optimizer) -> dict[str, float]:
    measurement = Measurement([model], [made])
    model(torch.randn(32, 64)).square().sum().backward()
    made.step()
    return measurement.finish()


def test_measured_ratios_are_those_of_the_tensors():
    model = Model(lowbit.Int4WeightOnly(group_size=32))
    made = optim.AdamW8bit(model.parameters(), lr=0.0, weight_decay=0.0)
    found = measured(model, made)
    weight = model.layer.weight
    error = (weight.dequantize() - weight.weight).square().sum()
    expected = 10 * torch.log10(weight.weight.square().sum() / error)
    assert found["lowbit/snr_weights(dB)"] == pytest.approx(expected.item(), abs=1e-3)
    assert "lowbit/snr_activations(dB)" not in found  # weight-only
    assert found["lowbit/updates_lost"] == 1.0  # lr is 0
    assert found["lowbit/products_in_low_bits"] == 0.0


def test_share_of_products():
    """The product for the input's gradient stays in high precision."""
    scheme = lowbit.Int8MixedPrecision(grad_input=False, always=True)
    model = nn.Sequential(Model(scheme), nn.Linear(64, 64))
    found = measured(model, optim.AdamW8bit(model.parameters()))
    # of low bits: output and grad_weight of the first; plain: output, grad_input and grad_weight of the second
    assert found["lowbit/products_in_low_bits"] == pytest.approx(2 / 5)
    assert found["lowbit/updates_lost"] < 0.01


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({}, True),
        ({"weight_correction": "8bit"}, False),
        ({"bf16_stochastic_round": True}, None),
    ],
    ids=["nearest", "corrected", "stochastic"],
)
def test_updates_lost_in_bf16(options, lost):
    """A step of 1e-4 of the weight is below half of the last bit of bfloat16."""
    model = Model().to(torch.bfloat16)
    with torch.no_grad():
        model.layer.weight.fill_(1.0)
    made = optim.AdamW(
        model.parameters(), state="fp32", lr=1e-4, weight_decay=0.0, fused=False, **options
    )
    for _ in range(2):
        made.zero_grad()
        measurement = Measurement([model], [made])
        model(torch.randn(32, 64, dtype=torch.bfloat16)).square().sum().backward()
        made.step()
        found = measurement.finish()
    if lost is None:
        assert "lowbit/updates_lost" not in found
    else:
        assert found["lowbit/updates_lost"] == pytest.approx(1.0 if lost else 0.0, abs=0.05)


def test_only_scheduled_steps_are_measured():
    """Steps 3 and 6; a run that is resumed after step 4 measures step 6 too. Other steps run without hooks."""
    model = Model(lowbit.Int8MixedPrecision(always=True))
    made = optim.AdamW8bit(model.parameters())

    def steps(first: int, last: int) -> list[int]:
        schedule, found = MeasuredSteps(3), []
        schedule.watch([model], [made])
        for step in range(first, last + 1):
            schedule.begin()
            schedule.begin()  # a second batch of the same step
            assert bool(model.layer._forward_hooks) == (step % 3 == 0)
            made.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            made.step()
            if schedule.end(step):
                found.append(step)
        return found

    assert steps(1, 4) == [3]
    assert steps(5, 7) == [6]
    assert not model.layer._forward_hooks and tracer.active is None


def test_nothing_is_measured_without_a_schedule():
    schedule = MeasuredSteps(0)
    schedule.watch([Model()], [])
    schedule.begin()
    schedule.begin(1)
    assert schedule.end(1) == {}


def test_recipes_folder_has_configurations():
    assert {path.stem for path in RECIPES} >= {
        "debug",
        "llama3_8b",
        "llama3_8b_qat",
        "deepseek_moe",
    }
    assert all(Path(path).read_text().startswith("#") for path in RECIPES)
