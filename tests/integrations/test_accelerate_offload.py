"""accelerate's offloading of models with low-bit weights to host memory and to disk, and its ways to move weights."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
import lowbit.accelerate
from lowbit.interop import own_offloads
from tests.integrations.models import TOKENS, gpt_oss, is_inner_linear, llama, logits, mixtral
from tests.tensor.cases import same_bits

accelerate = pytest.importorskip("accelerate")

SCHEMES = {
    "int4": lb.Int4WeightOnly(32),
    "int4 asymmetric": lb.Int4WeightOnly(32, "asymmetric"),
    "int8": lb.Int8WeightOnly(),
    "int8_int8": lb.Int8DynamicActivationInt8Weight(),
    "float8": lb.Float8WeightOnly(),
    "nf4 double": lb.NF4WeightOnly(32, double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def is_expert(module: nn.Module, name: str) -> bool:
    return is_inner_linear(module, name) or type(module).__name__.endswith("Experts")


def offload(model: nn.Module, where: str, folder: Path) -> None:
    if where == "cpu":
        lowbit.accelerate.cpu_offload(model)
    else:
        lowbit.accelerate.disk_offload(model, folder)


def assert_all_on_meta(model: nn.Module) -> None:
    assert {p.device.type for p in model.parameters()} == {"meta"}


both = pytest.mark.parametrize("where", ["cpu", "disk"])


@both
@every_scheme
def test_an_offloaded_model_gives_the_same_bits(where: str, scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = llama().bfloat16()
    lb.quantize_(model, SCHEMES[scheme], is_inner_linear)
    expected = logits(model)
    offload(model, where, tmp_path / "weights")
    assert_all_on_meta(model)
    for _ in range(2):
        assert torch.equal(logits(model), expected)
        assert_all_on_meta(model)
    found = model.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False)
    assert found.shape == (2, 15)


@both
@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_experts(make: Any, where: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make()
    lb.quantize_(model, lb.Int4WeightOnly(32), is_expert)
    expected = logits(model)
    offload(model, where, tmp_path / "weights")
    assert_all_on_meta(model)
    assert torch.equal(logits(model), expected)


@both
def test_tied_weights(where: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = llama(tie_word_embeddings=True)
    lb.quantize_(model, lb.Int8WeightOnly(), lambda m, n: isinstance(m, nn.Linear | nn.Embedding))
    expected = logits(model)
    offload(model, where, tmp_path / "weights")
    assert torch.equal(logits(model), expected)


@both
def test_a_model_that_is_prepared_for_training(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    lb.qat.prepare_(model, lb.Int4WeightOnly(32))
    x = torch.randn(3, 64)
    expected = model(x).detach()
    offload(model, where, tmp_path / "weights")
    assert same_bits(model(x), expected)


def quantized() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    lb.quantize_(model, lb.Int4WeightOnly(32))
    return model


def test_the_files_are_the_parts_and_are_read_again(tmp_path: Path) -> None:
    model, x = quantized(), torch.randn(3, 64)
    expected = model(x)
    folder = tmp_path / "weights"
    lowbit.accelerate.disk_offload(model, folder)
    names = {p.name for p in folder.iterdir()}
    assert {"0.weight.codes.dat", "0.weight.scale.dat", "0.bias.dat", "index.json"} <= names
    other = quantized()
    with torch.no_grad():
        other[0].weight.codes.zero_()  # the files count
    lowbit.accelerate.disk_offload(other, folder)
    assert torch.equal(other(x), expected)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    lowbit.accelerate.disk_offload(quantized(), tmp_path / "weights")
    other = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))
    lb.quantize_(other, lb.Int4WeightOnly(32))
    with pytest.raises(ValueError, match=r"does not hold 0\.weight.*give a new folder"):
        lowbit.accelerate.disk_offload(other, tmp_path / "weights")
    assert not any(p.is_meta for p in other.parameters())


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_folder_with_another_plain_tensor_is_refused(change: str, tmp_path: Path) -> None:
    lowbit.accelerate.disk_offload(quantized(), tmp_path / "weights")
    other = quantized()
    bias = torch.ones(16) if change == "shape" else other[0].bias.detach().bfloat16()
    other[0].bias = nn.Parameter(bias)
    with pytest.raises(ValueError, match=r"does not hold 0\.bias.*give a new folder"):
        lowbit.accelerate.disk_offload(other, tmp_path / "weights")


def test_a_model_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight is sharded or on meta"):
        lowbit.accelerate.cpu_offload(quantized().to("meta"))


def test_hooks_are_removed_and_weights_come_back() -> None:
    model, x = quantized(), torch.randn(3, 64)
    expected = model(x)
    lowbit.accelerate.cpu_offload(model)
    model(x)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert isinstance(model[0].weight, lb.LowbitTensor) and not model[0].weight.is_meta
    assert torch.equal(model(x), expected)


def test_weights_that_accelerate_moves_stay_apart() -> None:
    """It knows tied weights by their addresses, which low-bit tensors must not share."""
    model = quantized()
    first, second = model[0].weight, model[2].weight
    assert first.data_ptr() == first.codes.data_ptr() != second.data_ptr()
    moved = copy.deepcopy(model)
    tied: dict[int, Any] = {second.data_ptr(): {torch.device("cpu"): second}}
    for name in ("0.weight", "2.weight"):
        accelerate.utils.set_module_tensor_to_device(
            moved,
            name,
            torch.device("cpu"),
            value=model.get_parameter(name),
            tied_params_map=tied,
        )
    assert torch.equal(moved[0].weight.dequantize(), first.dequantize())
    assert moved[2].weight is second


SHARED = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
WAITING = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "quantized", [False, True], ids=["quantized while loading", "read in int4"]
)
@pytest.mark.parametrize("make", [llama, mixtral])
@pytest.mark.parametrize(
    "device",
    [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
def test_device_map_of_transformers(
    make: Any, quantized: bool, device: Any, tmp_path: Path
) -> None:
    """accelerate offloads what the map places on "cpu", if another module has another device. For it,
    `torch.device("cpu")` is another one."""
    transformers = pytest.importorskip("transformers")
    from lowbit.hf import LowbitConfig

    read = transformers.AutoModelForCausalLM.from_pretrained
    make().save_pretrained(tmp_path / "plain", max_shard_size="40KB")
    given: dict[str, Any] = {"quantization_config": LowbitConfig("int4", group_size=32)}
    folder = tmp_path / "plain"
    whole = read(folder, **given)
    if quantized:
        whole.save_pretrained(tmp_path / "low")
        folder, given = tmp_path / "low", {}
    found = read(
        folder,
        device_map={**SHARED, "model.embed_tokens": device, "model.rotary_emb": device},
        **given,
    )
    assert found.get_parameter(WAITING).is_meta
    assert [*whole.state_dict()] == [*found.state_dict()]
    with torch.no_grad():
        got = found(TOKENS.to(device)).logits.cpu()
        assert torch.equal(got, whole.to(device)(TOKENS.to(device)).logits.cpu())
    assert found.get_parameter(WAITING).is_meta


@pytest.mark.parametrize("by", ["cpu_offload", "disk_offload", "dispatch_model"])
@pytest.mark.parametrize("holder", [accelerate, accelerate.big_modeling], ids=["", "module"])
def test_accelerates_own_functions_take_weights_by_name(holder, by: str, tmp_path: Path) -> None:
    model, x = quantized(), torch.randn(3, 64)
    expected = model(x)
    device = torch.device("cpu")  # another one than "cpu", as above
    arguments: dict[str, tuple[Any, ...]] = {
        "cpu_offload": (device, False, None),
        "disk_offload": (tmp_path / "weights", device),
        "dispatch_model": ({"0": device, "1": device, "2": "cpu"}, device),
    }
    getattr(holder, by)(model, *arguments[by])
    assert model[2].weight.is_meta
    assert torch.equal(model(x), expected) and model[2].weight.is_meta


def test_modules_that_imported_the_functions_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers and PEFT do. A release of accelerate may lack one of the functions."""

    def cpu_offload(model: Any, execution_device: Any = None, state_dict: Any = None) -> Any:
        return state_dict

    module, earlier, other = (ModuleType(f"offloads_{i}") for i in range(3))
    module.cpu_offload = earlier.cpu_offload = cpu_offload
    other.cpu_offload = kept = lambda model: None
    for one in (module, earlier, other):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    own_offloads._wrap(module)
    model = quantized()
    assert module.cpu_offload is earlier.cpu_offload and other.cpu_offload is kept
    assert isinstance(earlier.cpu_offload(model)["2.weight"], lb.LowbitTensor)


def test_a_forced_map_of_one_device_with_another_main_device() -> None:
    model, x = quantized(), torch.randn(3, 64)
    expected = model(x)
    accelerate.dispatch_model(model, {"": "cpu"}, torch.device("cpu"), force_hooks=True)
    assert model[2].weight.is_meta and torch.equal(model(x), expected)


def test_a_device_map_with_a_disk_is_refused(tmp_path: Path) -> None:
    places = {"0": torch.device("cpu"), "1": torch.device("cpu"), "2": "disk"}
    with pytest.raises(NotImplementedError, match=r"lowbit\.accelerate\.disk_offload"):
        accelerate.dispatch_model(quantized(), places, offload_dir=tmp_path)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: lb.quantize_(m, lb.Int4WeightOnly(32), is_inner_linear),
        lambda m: lb.qat.prepare_(m, lb.Int4WeightOnly(32), is_inner_linear),
        lambda m: lb.train.prepare_(m, lb.train.Int8Weight(), is_inner_linear),
        lb.dequantize_,
    ],
    ids=["quantize_", "qat.prepare_", "train.prepare_", "dequantize_"],
)
def test_an_offloaded_model_is_not_converted(convert: Any) -> None:
    pytest.importorskip("transformers")
    model = llama()
    if convert is lb.dequantize_:
        lb.quantize_(model, lb.Int4WeightOnly(32), is_inner_linear)
    expected = logits(model)
    accelerate.cpu_offload(model, "cpu")
    with pytest.raises(ValueError, match=r"is offloaded by accelerate.*remove_hook_from_module"):
        convert(model)
    assert torch.equal(logits(model), expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert convert(model).converted


@pytest.mark.parametrize(
    ("prepare", "convert"),
    [
        (lambda m: lb.qat.prepare_(m, lb.Int4WeightOnly(32), is_inner_linear), lb.qat.convert_),
        (lambda m: lb.qat.prepare_(m, lb.Int4WeightOnly(32), is_inner_linear), lb.qat.undo_),
        (lambda m: lb.train.prepare_(m, lb.train.Int8Weight(), is_inner_linear), lb.train.convert_),
        (lambda m: lb.train.prepare_(m, lb.train.Int8Weight(), is_inner_linear), lb.train.restore_),
    ],
    ids=["qat.convert_", "qat.undo_", "train.convert_", "train.restore_"],
)
def test_an_offloaded_model_in_training_is_not_converted(prepare: Any, convert: Any) -> None:
    pytest.importorskip("transformers")
    model = llama()
    prepare(model)
    accelerate.cpu_offload(model, "cpu")
    expected = logits(model)
    with pytest.raises(ValueError, match=r"is offloaded by accelerate.*remove_hook_from_module"):
        convert(model)
    assert torch.equal(logits(model), expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert convert(model).converted


def test_adapters_of_an_offloaded_model_are_not_merged() -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    merge_ = pytest.importorskip("lowbit.peft").merge_
    model = llama()
    lb.quantize_(model, lb.Int4WeightOnly(32), is_inner_linear)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    accelerate.cpu_offload(model, "cpu")
    with pytest.raises(ValueError, match=r"q_proj.weight is offloaded by accelerate"):
        merge_(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert merge_(model).layers


def test_plain_models_are_offloaded_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    x = torch.randn(3, 64)
    expected = model(x)
    assert torch.equal(accelerate.cpu_offload(model)(x), expected)


@pytest.mark.gpu
@both
def test_layers_run_on_a_gpu(where: str, tmp_path: Path) -> None:
    model = quantized().bfloat16()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = copy.deepcopy(model).cuda()(x.cuda()).cpu()
    if where == "cpu":
        lowbit.accelerate.cpu_offload(model, "cuda")
    else:
        lowbit.accelerate.disk_offload(model, tmp_path / "weights", "cuda")
    assert torch.equal(model(x).cpu(), expected)
    assert_all_on_meta(model)


@both
def test_saving_an_offloaded_model(where: str, tmp_path: Path) -> None:
    """transformers writes a model whose weights are on meta by a state dict with values alone."""
    transformers = pytest.importorskip("transformers")
    model = llama()
    lb.quantize_(model, lb.Int8WeightOnly(), is_inner_linear)
    expected = logits(model)
    offload(model, where, tmp_path / "weights")
    out = tmp_path / "out"
    way_out = r"remove_hook_from_module\(model, recurse=True\)"
    with pytest.raises(ValueError, match=rf"q_proj.weight is on meta.*{way_out}.*state_dict="):
        model.save_pretrained(out)
    with pytest.raises(ValueError, match=way_out):
        lb.export(model, out, "lowbit")
    with pytest.raises(ValueError, match=way_out):
        lb.save(model, tmp_path / "model.safetensors")
    whole = accelerate.utils.modeling.get_state_dict_offloaded_model(model)
    model.save_pretrained(out, state_dict=whole)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model.save_pretrained(tmp_path / "again")
    for folder in (out, tmp_path / "again"):
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(logits(read), expected)
