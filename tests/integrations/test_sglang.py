"""The stream of `lowbit.sync` through SGLang's own models and loaders, on a CPU, where SGLang's Python code imports.

Nothing is computed: SGLang's layers multiply on GPUs. Every byte of the parameters of SGLang's model is 77 before, so
a parameter that stays so was left out by the loader.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.testing import launch
from tests.integrations.models import llama
from tests.integrations.packed_models import publish

pytest.importorskip("safetensors")
pytest.importorskip("sglang.srt.models.llama", exc_type=ImportError)

LLAMA: dict[str, Any] = {
    "int4": lowbit.Int4WeightOnly(32),
    "int8 x int8": lowbit.Int8DynamicActivationInt8Weight(),
    "float8": lowbit.Float8DynamicActivationFloat8Weight(),
    "NVFP4": lowbit.NVFP4WeightOnly(),
}
"""Schemes of a Llama in QAT, sent as compressed-tensors."""
PUBLISHED = {
    "gpt-oss MXFP4": "gpt_oss",
    "DeepSeek-V3 float8": "deepseek_v2",
    "Qwen3-MoE float8": "qwen3_moe",
    "Qwen3-MoE int4": "qwen3_moe",
    "Qwen3 NVFP4": "qwen3",
}
"""The module of SGLang's class for folders of `packed_models`."""
SETTINGS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Entries of the config.json that DeepSeek publishes and transformers does not write."""
NOT_STORED = re.compile(r"g_idx|attn\w*\.[kv]_scale")
"""Parameters for act-order and for the cache, which these folders do not have."""


def begin(folder: Path) -> None:
    """SGLang's process group of one process, and its code for a GPU of compute capability 9.0 as far as it loads."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import quantization, rotary_embedding
    from sglang.srt.models import deepseek_v2
    from sglang.srt.server_args import ServerArgs

    own = {"attention_backend": "torch_native", "disable_cuda_graph": True}
    arguments = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True, **own)
    runtime_context.publish(arguments, role="scheduler")
    store = f"file://{folder.parent}/store"
    parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    ranks = ("tp_rank", "pp_rank", "moe_ep_rank", "moe_tp_rank", "attn_tp_rank", "attn_dp_rank")
    runtime_context.get_parallel().override_permanently(**dict.fromkeys(ranks, 0))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    mxfp4 = importlib.import_module("sglang.srt.layers.quantization.mxfp4").Mxfp4Config
    for table in vars(quantization).values():
        if isinstance(table, dict) and "compressed-tensors" in table:
            table.setdefault("mxfp4", mxfp4)
    deepseek_v2.get_rope_wrapper = lambda *args, device=None, **options: rotary_embedding.get_rope(
        *args, **options
    )


@contextmanager
def in_bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def loaded(folder: Path, module: str, tensors: Any) -> dict[str, Tensor]:
    """The bytes of each parameter of SGLang's model for a folder, after it has loaded these tensors."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    config = ModelConfig(str(folder), dtype="bfloat16")
    kind = config.hf_config.architectures[0]
    made = getattr(importlib.import_module(f"sglang.srt.models.{module}"), kind)
    settings = None
    if config.quantization is not None:
        settings = get_quant_config(
            config, LoadConfig(), getattr(made, "packed_modules_mapping", {})
        )
    with in_bfloat16():
        model = made(config.hf_config, quant_config=settings)
    held = {name: p.detach().reshape(-1) for name, p in model.named_parameters()}
    for t in held.values():
        t.view(torch.uint8).fill_(77)
    model.load_weights(tensors)
    return {name: p.detach().reshape(-1).view(torch.uint8) for name, p in model.named_parameters()}


def of_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def check(rank: int, world_size: int, place: Path) -> dict[str, tuple[list[str], list[str]]]:
    """For each case: parameters that the stream leaves as they are, and those that differ from the folder's."""
    found = {}
    for name in (*LLAMA, *PUBLISHED):
        folder, out, module = place / name, place / f"{name}-out", PUBLISHED.get(name, "llama")
        if name in LLAMA:
            trained = llama(hidden_size=128, intermediate_size=256).bfloat16()
            lowbit.qat.prepare_(trained, {"lm_head": None, "*": LLAMA[name]})
            how: dict[str, Any] = {"format": "compressed-tensors"}
            lowbit.sync.write(trained, folder, **how)
        else:
            publish(name, folder)
            file = folder / "config.json"
            config = json.loads(file.read_text())
            file.write_text(json.dumps(config | (SETTINGS if module == "deepseek_v2" else {})))
            trained, how = lowbit.load_pretrained(folder), {"like": folder}
        if not found:
            begin(folder)
        with torch.no_grad():  # a step
            trained.model.norm.weight.add_(0.1)
        mine = loaded(folder, module, lowbit.sync.stream(trained, **how))
        lowbit.sync.write(trained, out, **how)
        theirs = loaded(out, module, of_folder(out))
        left_out = [n for n, t in mine.items() if len(t) and bool((t == 77).all())]
        differ = [n for n, t in mine.items() if not torch.equal(t, theirs[n])]
        found[name] = ([n for n in left_out if not NOT_STORED.search(n)], differ)
    return found


def test_sglang_loads_the_stream_as_it_loads_the_folder(tmp_path: Path) -> None:
    (found,) = launch(check, 1, tmp_path, fresh=True, timeout=250)
    assert found == dict.fromkeys([*LLAMA, *PUBLISHED], ([], []))
