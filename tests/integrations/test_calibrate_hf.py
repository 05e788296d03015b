"""`lowbit.calibrate` on models of transformers: decoders, a tied one, mixtures of experts, an encoder, padding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.inference import GPTQ, PruneExperts, Rotate

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_local_experts": 4,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", {**EXPERTS, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 8}),
    "bert": ("BertForMaskedLM", {}),
}


def build(kind: str) -> Any:
    name, changes = KINDS[kind]
    architecture = getattr(transformers, name)
    torch.manual_seed(0)
    config = architecture.config_class(**SIZES, **changes)
    model = architecture(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4)
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    made = []
    for seed, length in enumerate((24, 24, 11)):
        ids = torch.randint(96, (3, length), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[0, length - 4 :] = 0
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_it_loses_less_than_rounded(kind: str) -> None:
    plain = build(kind)
    model, rounded = copy.deepcopy(plain), copy.deepcopy(plain)
    scheme = lb.IntxWeightOnly(3, 32, "symmetric")
    report = lb.calibrate(model, scheme, batches(), steps=[GPTQ()])
    lb.quantize_(rounded, scheme)
    reached = [layer for layer in report.layers.values() if layer.rows]
    assert len(reached) == len(report.layers), str(report)
    assert all(layer.after < layer.before for layer in reached), str(report)
    tokens = sum(int(b["attention_mask"].sum()) for b in batches())
    first = next(
        layer for name, layer in report.layers.items() if "q_proj" in name or "query" in name
    )
    assert first.rows == tokens
    batch = batches()[0]
    counts = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = plain(**batch).logits[counts]
        errors = [float((m(**batch).logits[counts] - expected).norm()) for m in (model, rounded)]
    assert errors[0] < errors[1]


def test_rotations_come_back_from_folders(tmp_path) -> None:
    """Folded ones in every format, those of products in lowbit's own."""
    plain = build("llama")
    batch = batches()[0]
    for format, online in (("lowbit", True), ("compressed-tensors", False)):
        model = copy.deepcopy(plain)
        steps = [Rotate(online=online), GPTQ()]
        report = lb.calibrate(model, lb.MXFP4WeightOnly(), batches(), steps=steps)
        methods = {name: layer.method for name, layer in report.layers.items()}
        assert methods["model.layers.1.self_attn.k_proj.weight"].startswith(
            "Rotate in the residual"
        )
        down = methods["model.layers.1.mlp.down_proj.weight"]
        assert down.startswith("Rotate online by 32" if online else "Rotate left alone")
        lb.export(model, tmp_path / format, format)
        if not online:  # transformers runs MXFP4 of this format in bfloat16 alone
            assert (tmp_path / format / "model.safetensors").exists()
            continue
        with pytest.raises(lb.formats.FormatError, match="Rotated"):
            lb.export(model, tmp_path / "refused", "compressed-tensors")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / format).eval()
        with torch.no_grad():
            found, expected = again(**batch).logits, model(**batch).logits
            assert float((found - expected).norm() / expected.norm()) < 1e-3, format


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_pruned_experts(kind: str, tmp_path: Path) -> None:
    """Those that stay give what they gave; the folder has their number, and its model the same logits."""
    plain, scheme = build(kind), {"*experts*": lb.Int8WeightOnly(), "*": None}
    model = copy.deepcopy(plain)
    report = lb.calibrate(model, scheme, batches(), steps=[PruneExperts(3), GPTQ()])
    names = [n for n in report.layers if "experts" in n]
    assert len(names) == 4 and all(report.layers[n].rows for n in names)
    for old, new in zip(plain.model.layers, model.model.layers, strict=True):
        routers = [
            next(m for n, m in layer.mlp.named_children() if n != "experts") for layer in (old, new)
        ]
        same = (routers[0].weight[:, None] == routers[1].weight).all(-1).nonzero()[:, 0]
        assert len(same) == 3
        x, ones = torch.randn(6, 64), torch.ones(6, 1)
        with torch.no_grad():
            for own, number in enumerate(same.tolist()):
                outputs = [
                    layer.mlp.experts(x, torch.full((6, 1), index), ones)
                    for layer, index in ((old, number), (new, own))
                ]
                assert (outputs[1] - outputs[0]).norm() < 0.05 * outputs[0].norm()
    config = model.config.to_dict()
    assert 3 in (config.get("num_experts"), config.get("num_local_experts"))
    lb.export(model, tmp_path / "out", format="lowbit")
    loaded = lb.load_pretrained(tmp_path / "out")
    ids = batches()[0]
    with torch.no_grad():
        assert torch.equal(loaded(**ids).logits, model(**ids).logits)
    assert loaded.model.layers[0].mlp.experts.num_experts == 3


def test_experts_in_groups_are_not_pruned() -> None:
    heads = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    experts = {"moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    config = transformers.DeepseekV3Config(
        **SIZES, **heads, **experts, num_experts_per_tok=2, v_head_dim=16, first_k_dense_replace=0
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"in one group, got DeepseekV3.*groups: 4"):
        lb.calibrate(model, lb.Int8WeightOnly(), batches(), steps=[PruneExperts(4)])
