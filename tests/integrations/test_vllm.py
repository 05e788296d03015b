"""The plug-in of vLLM against vLLM's own layers, parameters and loader, on the CPU, in one process and in two.

No model is served here: `test_vllm_engine.py` does that, where vLLM runs. Its Python code imports on the CPU where its
dependencies are installed; where they are not, these tests are skipped and say so. `tests/test_vllm_parts.py` needs no
vLLM.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.testing import launch
from tests.integrations.vllm_layers import Plain, check, filled, read, served

pytest.importorskip("safetensors")
pytest.importorskip("vllm.model_executor.models.llama", exc_type=ImportError)

SCHEMES: dict[str, Any] = {
    "int4": lb.Int4WeightOnly(32),
    "int4 asymmetric": lb.Int4WeightOnly(64, "asymmetric"),
    "int4 float zeros": lb.Int4WeightOnly(64, "float_zero_point"),
    "int3": lb.IntxWeightOnly(3, 64),
    "int2": lb.Int2WeightOnly(32),
    "int8": lb.Int8WeightOnly(),
    "int8 groups": lb.Int8WeightOnly(64),
    "int8 tensor": lb.Scheme(lb.Spec(lb.Int(8), lb.PerTensor())),
    "int8_int8": lb.Int8DynamicActivationInt8Weight(),
    "int8_int4": lb.Int8DynamicActivationInt4Weight(32),
    "float8": lb.Float8WeightOnly(),
    "float8 blocks": {"lm_head": None, "*": lb.Float8WeightOnly(lb.PerBlock(16, 32))},
    "nf4": lb.NF4WeightOnly(64),
    "nf4 double": lb.NF4WeightOnly(32, double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
    "int8 static": lb.Int8StaticActivationInt8Weight(),
}


def written(folder: Path, scheme: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    model = Plain(dtype)
    if isinstance(scheme, lb.Scheme) and scheme.is_static:
        with lb.calibrate(model, scheme):
            for layer in [*model.layer.children(), model.lm_head]:
                layer(torch.randn(8, layer.in_features).to(dtype))
    lb.quantize_(model, scheme)
    lb.export(model, folder, format="lowbit")
    return folder


FLOAT32 = "int4 with float32 scales"


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], str]:
    """The error of each scheme in one process and in two. vLLM's process group is made once for all schemes."""
    root = tmp_path_factory.mktemp("served")
    names = [*SCHEMES, FLOAT32]
    for i, name in enumerate(names):
        if name == FLOAT32:
            written(root / str(i), lb.Int4WeightOnly(32), torch.float32)
        else:
            written(root / str(i), SCHEMES[name])
    folders = [str(root / str(i)) for i in range(len(names))]
    found = {}
    for world in (1, 2):
        own = launch(check, world, folders, str(root / f"store{world}"), fresh=True, timeout=250)
        for i, name in enumerate(names):
            found[name, world] = "\n".join(one[i] for one in own)
    return found


@pytest.mark.parametrize("name", [*SCHEMES, FLOAT32])
@pytest.mark.parametrize("world", [1, 2])
def test_layers_hold_and_multiply_the_weights_of_the_folder(name, world, errors) -> None:
    assert errors[name, world].strip() == ""


# ---- what the plug-in refuses ------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """vLLM's process group of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from lowbit.vllm import register

    register()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


INT4, INT8 = lb.Int4WeightOnly(32), lb.Int8WeightOnly()
REFUSED: dict[str, Any] = {
    "merged layers of two schemes": ({"*v_proj": INT8, "*": INT4}, "qkv_proj from layers.*differ"),
    "merged with a plain one": ({"*up_proj": None, "*": INT4}, "gate_up_proj from layers.*plain"),
    "a head in blocks": (
        lb.Float8WeightOnly(lb.PerBlock(16, 32)),
        "lm_head.*leave the output head",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_vllm_has_no_place_for(name: str, alone: None, tmp_path: Path) -> None:
    scheme, says = REFUSED[name]
    settings, _ = read(written(tmp_path / "low", scheme))
    with pytest.raises(ValueError, match=says):
        served(settings, torch.bfloat16)


def test_embeddings_and_experts_are_refused(alone: None, tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(96, 64)})
    lb.quantize_(model, INT4, lambda module, name: True)
    lb.export(model, tmp_path / "low", format="lowbit")
    config = get_quantization_config("lowbit").from_config(read(tmp_path / "low")[0])
    with pytest.raises(ValueError, match=r"embed\.weight is in low bits.*VocabParallelEmbedding"):
        VocabParallelEmbedding(96, 64, quant_config=config, prefix="embed")


def test_layers_that_stay_plain_are_vllms_own(alone: None, tmp_path: Path) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    settings, tensors = read(
        written(tmp_path / "low", {"*o_proj": None, "lm_head": None, "*": INT4})
    )
    model = served(settings, torch.bfloat16)
    assert isinstance(model.layer.o_proj.quant_method, UnquantizedLinearMethod)
    filled(model, tensors)
    # vLLM's CPU build repacks the weight, so its product is compared.
    layer, weight = model.layer.o_proj, tensors["layer.o_proj.weight"]
    x = torch.randn(3, weight.shape[1]).bfloat16()
    found = layer.quant_method.apply(layer, x, None)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), atol=0.02, rtol=0.02)


def test_a_damaged_or_newer_config_is_refused(tmp_path: Path) -> None:
    from lowbit.formats.base import FormatError
    from lowbit.interop.vllm.config import LowbitServing

    settings, _ = read(written(tmp_path / "low", INT4))
    for bad in ({**settings, "format_version": 99}, {**settings, "kinds": []}):
        with pytest.raises(FormatError, match=r"format_version 99|q_proj"):
            LowbitServing.from_config(bad)


def test_the_config_travels_to_other_processes(tmp_path: Path) -> None:
    from lowbit.interop.vllm.config import LowbitServing

    config = LowbitServing.from_config(read(written(tmp_path / "low", INT4))[0])
    assert pickle.loads(pickle.dumps(config)).weights == config.weights


def test_vllm_finds_the_plug_in() -> None:
    """By the entry point of the installed package."""
    from importlib.metadata import entry_points

    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "lowbit"]
    if not found:
        pytest.skip("lowbit is not installed, or was before it had the entry point")
    assert found[0].value == "lowbit.vllm:register"
    found[0].load()()
