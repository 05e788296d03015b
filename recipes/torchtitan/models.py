"""The models of the recipes, registered for torchtitan 0.2 by `--experimental.custom_import recipes.torchtitan.models`.

`llama3_tokens` and `deepseek_v3_tokens` are torchtitan's models of these names with two additions: the dataset "tokens"
(`recipes.torchtitan.tokens`), and small flavors with the vocabularies that a tokenizer of little text has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

import lowbit.torchtitan  # noqa: F401  registers lowbit's part of the models
from recipes.torchtitan import tokens

FLAVORS: dict[str, dict[str, Any]] = {
    "llama3": {
        "tiny": TransformerModelArgs(
            dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=64
        ),
        "300M": TransformerModelArgs(
            dim=1024, n_layers=24, n_heads=16, n_kv_heads=8, vocab_size=16_384
        ),
    },
    "deepseek_v3": {
        "tiny": DeepSeekV3ModelArgs(
            vocab_size=512,
            dim=64,
            inter_dim=192,
            moe_inter_dim=64,
            n_layers=2,
            n_dense_layers=1,
            n_heads=4,
            moe_args=MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, score_func="softmax"),
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
        ),
    },
}


def register(name: str) -> None:
    """Register torchtitan's model `name` as NAME_tokens."""
    spec = get_train_spec(name)
    own = spec.build_dataloader_fn

    def build(*, job_config: Any, **given: Any) -> Any:
        chosen = tokens.build_dataloader if job_config.training.dataset == tokens.NAME else own
        return chosen(job_config=job_config, **given)

    flavors = {**spec.model_args, **FLAVORS[name]}
    made = dataclasses.replace(spec, model_args=flavors, build_dataloader_fn=build)
    register_train_spec(f"{name}_tokens", made)


for known in FLAVORS:
    register(known)
