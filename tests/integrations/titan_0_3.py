"""torchtitan 0.3's training program on CPU processes with torch 2.13, and configurations with lowbit for it.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.integrations.titan_0_3 \
        --module tests.integrations.titan_0_3 --config int8_weights

TEXT and TOKENIZER in the environment name folders. torch 2.13 has no `torch.distributed.set_timeout`. A stand-in takes
its place, and does nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from recipes.torchtitan import on_cpu


def debug() -> Any:
    """torchtitan's debug model with plain attention, on few tokens."""
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    config.training.seq_len, config.training.local_batch_size = 64, 4
    config.training.steps, config.training.mixed_precision_param = 4, "float32"
    config.hf_assets_path = os.environ["TOKENIZER"]
    config.dataloader = HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path=os.environ["TEXT"]
    )
    config.activation_checkpoint = None
    config.debug.seed = 0
    config.metrics.enable_tensorboard = True
    return config


def prepared(optimizer: str, **settings: Any) -> Any:
    from lowbit.torchtitan import Lowbit, with_lowbit

    return with_lowbit(debug(), Lowbit(metrics_freq=2, **settings), optimizer)


def int8_weights() -> Any:
    return prepared("AdamW4bit", train="int8_weights")


def int8() -> Any:
    return prepared("Muon8bit", train="int8(always=True)")


def bitnet() -> Any:
    return prepared("AdamW8bit", train="bitnet")


def qat() -> Any:
    return prepared("AdamW8bit", qat="int4(group_size=32)")


def in_a_graph() -> Any:
    """Raises: a step in a CUDA graph cannot be measured."""
    from lowbit.torchtitan import Lowbit, with_lowbit

    config = debug()
    config.training.disable_cuda_graphs = False
    return with_lowbit(config, Lowbit(metrics_freq=2))


if __name__ == "__main__":
    on_cpu.stand_in()
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    from torchtitan.train import main

    main()
