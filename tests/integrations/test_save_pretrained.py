"""What transformers writes of models that lowbit's flows changed in memory, and what `from_pretrained` makes of it."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from tests import forked
from tests.formats.programs import LINEARS
from tests.integrations.models import gpt2, is_inner_linear, llama, logits, mixtral

transformers = pytest.importorskip("transformers")

INT4 = lb.Int4WeightOnly(32)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def by_trainer(model: Any, folder: Path) -> None:
    args = transformers.TrainingArguments(str(folder / "run"), report_to="none", use_cpu=True)
    transformers.Trainer(model, args).save_model(str(folder))


def by_accelerate(model: Any, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).save_model(model, folder)
    model.config.save_pretrained(folder)


SAVED: dict[str, Callable[[Any, Path], None]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="20kB"),
    "state_dict": lambda model, folder: model.save_pretrained(
        folder, state_dict=model.state_dict()
    ),
    "trainer": by_trainer,
    "accelerate": by_accelerate,
}
over_savers = pytest.mark.parametrize("save", SAVED.values(), ids=SAVED)


def loaded(folder: Path, **options: Any) -> Any:
    """The model of a folder, all of whose weights were found."""
    kind = transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


def quantized(scheme: Any = INT4, make: Any = llama, chosen: Any = is_inner_linear) -> Any:
    model = make()
    if getattr(scheme, "is_static", False):
        with lb.calibrate(model, scheme, chosen):
            logits(model)
    lb.quantize_(model, scheme, chosen)
    return model


def converted_qat() -> Any:
    model = llama()
    lb.qat.prepare_(model, INT4, is_inner_linear)
    lb.qat.convert_(model)
    return model


def converted_bitnet() -> Any:
    model = llama()
    lb.train.prepare_(model, lb.BitNet(), is_inner_linear)
    lb.train.convert_(model)
    return model


def trained(scheme: Any) -> Any:
    model = llama()
    lb.train.prepare_(model, scheme, is_inner_linear)
    return model


def assigned(inside: bool = False) -> Any:
    """A plain model, alone or inside of another module, that takes the weights of a quantized one."""
    model = llama()
    holder, found = model, lb.tensor.joined(quantized().state_dict())
    if inside:
        holder, found = nn.ModuleDict({"inner": model}), {f"inner.{k}": v for k, v in found.items()}
    holder.load_state_dict(found, assign=True)
    return model


def tied() -> Any:
    return quantized(make=lambda: llama(tie_word_embeddings=True), chosen=lambda module, name: True)


def merged() -> Any:
    """LoRA over a quantized base, merged into it."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(quantized(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return model.merge_and_unload()


def by_layers() -> Any:
    model = llama(num_hidden_layers=2)
    for layer in model.model.layers:
        lb.quantize_(layer, INT4)
    return model


def decoder_quantized() -> Any:
    model = llama()
    lb.quantize_(model.model, INT4)
    return model


def one_linear() -> Any:
    model = llama()
    lb.quantize_(model.lm_head, INT4)
    return model


def set_by_hand() -> Any:
    model = llama()
    held = model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(lb.AffineTensor.quantized(held, INT4), requires_grad=False)
    return model


def experts_alone() -> Any:
    model = mixtral()
    for layer in model.model.layers:
        lb.quantize_(layer.mlp.experts, INT4)
    return model


def is_conv1d(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == "Conv1D"


LOW: dict[str, Callable[[], Any]] = {
    "quantized": quantized,
    "converted qat": converted_qat,
    "converted bitnet": converted_bitnet,
    "int8 weights in training": lambda: trained(lb.Int8Weight()),
    "tied": tied,
    "merged": merged,
    "by layers": by_layers,
    "conv1d": lambda: quantized(make=gpt2, chosen=is_conv1d),
    "experts": lambda: quantized(
        make=mixtral, chosen=lambda m, n: is_inner_linear(m, n) or n.endswith("experts")
    ),
    "copied": lambda: copy.deepcopy(quantized()),
    "decoder": decoder_quantized,
    "one linear": one_linear,
    "set by hand": set_by_hand,
    "experts alone": experts_alone,
    "assigned": assigned,
    "assigned inside": lambda: assigned(inside=True),
}


@over_savers
@pytest.mark.parametrize("make", LOW.values(), ids=LOW)
def test_low_bit_weights_load_exactly(make: Any, save: Any, tmp_path: Path) -> None:
    model = make()
    expected = logits(model)
    save(model, tmp_path)
    again = loaded(tmp_path)
    assert torch.equal(logits(again), expected)
    low = {n for n, p in model.named_parameters() if isinstance(p, lb.LowbitTensor)}
    assert low == {n for n, p in again.named_parameters() if isinstance(p, lb.LowbitTensor)}
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again")), expected)


@pytest.mark.parametrize("scheme", LINEARS.values(), ids=LINEARS)
def test_every_preset_loads_exactly(scheme: lb.Scheme, tmp_path: Path) -> None:
    model = quantized(scheme, lambda: llama(hidden_size=128, intermediate_size=128))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


def prepared(**options: Any) -> Any:
    model = llama()
    lb.qat.prepare_(model, INT4, is_inner_linear, **options)
    return model


def dequantized(make: Callable[[], Any]) -> Any:
    model = make()
    assert model.config.to_dict()["quantization_config"]["quant_method"] == "lowbit"
    lb.dequantize_(model)
    return model


def restored() -> Any:
    model = trained(lb.Int8Weight())
    lb.train.restore_(model)
    return model


HIGH: dict[str, Callable[[], Any]] = {
    "qat": prepared,
    "learned scales": lambda: prepared(scales="learned"),
    "bitnet": lambda: trained(lb.BitNet()),
    "int8 products": lambda: trained(lb.Int8MixedPrecision()),
    "dequantized": lambda: dequantized(quantized),
    "dequantized experts": lambda: dequantized(LOW["experts"]),
    "restored": restored,
}


@over_savers
@pytest.mark.parametrize("make", HIGH.values(), ids=HIGH)
def test_weights_in_training_are_saved_in_high_precision(
    make: Any, save: Any, tmp_path: Path
) -> None:
    """As checkpoints of a training hold them; `prepare_` on the model that was read continues."""
    model = make()
    save(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    kind = transformers.AutoModelForCausalLM
    again, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(name.endswith("weight_scale") for name in info["unexpected_keys"])
    for name, held in again.named_parameters():
        own = model.get_parameter(name)
        assert type(held) is nn.Parameter
        assert torch.equal(held, own.master() if isinstance(own, lb.LowbitTensor) else own), name


def test_plain_experts_get_their_published_names_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain, model = mixtral(), LOW["experts"]()
    plain.save_pretrained(tmp_path / "before")
    model.save_pretrained(tmp_path / "low")
    lb.dequantize_(model)
    model.save_pretrained(tmp_path / "after")
    names = [load_file(tmp_path / n / "model.safetensors").keys() for n in ("before", "after")]
    assert names[0] == names[1] and any("experts.0.w1" in name for name in names[0])
    assert torch.equal(logits(loaded(tmp_path / "after")), logits(model))


# ---- which model a config describes --------------------------------------------------------------------------------


def test_models_that_share_a_config_are_told_apart(tmp_path: Path) -> None:
    student = llama()
    teacher = type(student)(student.config).eval()
    lb.quantize_(student, INT4, is_inner_linear)
    for name, model in {"student": student, "teacher": teacher}.items():
        model.save_pretrained(tmp_path / name)
        assert torch.equal(logits(loaded(tmp_path / name)), logits(model))


def test_a_copied_config_describes_nothing(tmp_path: Path) -> None:
    model = quantized()
    plain = type(model)(copy.deepcopy(model.config)).eval()
    assert plain.config.to_dict()["quantization_config"] is None
    plain.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(plain))


def test_a_pickled_model_is_described(tmp_path: Path) -> None:
    model, file = quantized(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again.save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


def test_a_model_inside_another_module(tmp_path: Path) -> None:
    outer = nn.ModuleDict({"language": llama(), "vision": nn.Linear(8, 8)})
    lb.quantize_(outer, INT4, is_inner_linear)
    outer["language"].save_pretrained(tmp_path)
    assert torch.equal(logits(loaded(tmp_path)), logits(outer["language"]))


def test_a_model_of_lowbit_config_and_of_load_pretrained(tmp_path: Path) -> None:
    from lowbit.hf import LowbitConfig

    llama().save_pretrained(tmp_path / "plain")
    model = loaded(tmp_path / "plain", quantization_config=LowbitConfig(INT4))
    lb.export(quantized(), tmp_path / "int4")
    for name, held in {"config": model, "folder": lb.load_pretrained(tmp_path / "int4")}.items():
        by_accelerate(held, tmp_path / name)
        assert torch.equal(logits(loaded(tmp_path / name)), logits(held))
        lb.dequantize_(held)
        held.save_pretrained(tmp_path / f"{name} plain")
        assert torch.equal(logits(loaded(tmp_path / f"{name} plain")), logits(held))


def test_a_model_with_a_method_of_its_own(tmp_path: Path) -> None:
    class Own(transformers.LlamaForCausalLM):
        def save_pretrained(self, folder: Path, **options: Any) -> None:
            super().save_pretrained(folder, **options)

    model = one_linear()
    model.__class__ = Own
    model.save_pretrained(tmp_path)
    model.__class__ = transformers.LlamaForCausalLM
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


@pytest.mark.parametrize("part", ["all", "decoder"])
@pytest.mark.parametrize("make", [lb.dequantize_, lb.qat.prepare_])
def test_weights_of_a_folder_that_become_plain(make: Any, part: str, tmp_path: Path) -> None:
    """The config and the folder no longer say "lowbit", which programs without it cannot read."""
    quantized().save_pretrained(tmp_path / "low")
    model = loaded(tmp_path / "low")
    make(model if part == "all" else model.model)
    model.save_pretrained(tmp_path / "plain")
    assert not hasattr(model.config, "quantization_config") and not model.is_quantized
    assert "quantization_config" not in (tmp_path / "plain/config.json").read_text()
    if make is lb.qat.prepare_:
        lb.qat.convert_(model)
        model.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(loaded(tmp_path / "again")), logits(model))
    else:
        assert torch.equal(logits(loaded(tmp_path / "plain")), logits(model))


def test_the_base_of_adapters_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(quantized(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapters")
    expected = logits(model)
    again = peft.PeftModel.from_pretrained(quantized(), tmp_path / "adapters")
    assert torch.equal(logits(again), expected)
    with pytest.raises(ValueError, match=r"layer of PEFT.*merge_and_unload\(\)"):
        model.get_base_model().save_pretrained(tmp_path / "base")
    assert not (tmp_path / "base" / "model.safetensors").exists()
    for wrapped in (model, model.get_base_model()):
        with pytest.raises(ValueError, match=r"q_proj and .* have adapters of PEFT.*unload\(\)"):
            lb.export(wrapped, tmp_path / "base")
    base = model.unload()
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(logits(loaded(tmp_path / "base")), logits(base))


@pytest.mark.parametrize("first", ["lowbit", "transformers"])
def test_importing_lowbit_is_enough_to_read(first: str, tmp_path: Path) -> None:
    """In either order, and `import lowbit` itself imports no transformers."""
    model = quantized()
    model.save_pretrained(tmp_path)
    torch.save(logits(model), tmp_path / "expected.pt")
    imports = ["import lowbit; assert 'transformers' not in sys.modules"]
    imports += ["import importlib.util", "importlib.util.find_spec('transformers.quantizers.auto')"]
    code = f"""
import sys, torch
{"; ".join(imports if first == "lowbit" else ["import transformers.quantizers.auto", "import lowbit"])}
assert "lowbit.hf" not in sys.modules
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval()
with torch.no_grad():
    found = model(torch.arange(24).view(2, 12) * 5 % 128).logits
assert torch.equal(found, torch.load({str(tmp_path / "expected.pt")!r}))
import lowbit.hf
assert isinstance(model.hf_quantizer, lowbit.hf.LowbitQuantizer)
"""
    if first == "lowbit":  # which the server of forks has imported, and no transformers
        done = forked.run(code, folder=tmp_path)
    else:
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
