"""Models of transformers: quantized, reported on, trained by its Trainer, generating."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.tensor.core.base import LowbitTensor
from lowbit_kernels.runtime import launches
from tests.integrations.models import (
    TOKENS,
    gpt2,
    is_inner_linear,
    llama,
    logits,
    mixtral,
    qwen3_moe,
)
from tests.schemes import relative_error
from tests.train.test_grouped import calls_of

transformers = pytest.importorskip("transformers")

SCHEMES = {
    "int4": (lb.Int4WeightOnly(32), 0.3),
    "int8": (lb.Int8WeightOnly(), 0.03),
    "float8": (lb.Float8WeightOnly(), 0.1),
    "int8xint8": (lb.Int8DynamicActivationInt8Weight(), 0.05),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def generated(model: nn.Module) -> torch.Tensor:
    return model.generate(input_ids=TOKENS, max_new_tokens=8, do_sample=False)


@every_scheme
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_llama_quantized(name, tied) -> None:
    scheme, bound = SCHEMES[name]
    model = llama(tie_word_embeddings=tied)
    expected = logits(model)
    lb.quantize_(model, scheme)
    assert relative_error(logits(model), expected) < bound
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    if scheme.activation is None:
        assert torch.equal(generated(model), generated(plain))


def test_gpt2s_conv1d_is_in_the_report_and_can_be_chosen() -> None:
    from transformers.pytorch_utils import Conv1D

    model = gpt2()
    expected = logits(model)
    report = lb.quantize_(model, {"lm_head": lb.Int8WeightOnly()})
    layers = {name: why for name, why in report.left.items() if ".h." in name}
    assert len(layers) == 4 and all("of a Conv1D" in why for why in layers.values())
    share = sum(e.nbytes for e in report.entries if ".h." in e.fqn) / report.nbytes
    assert share > 0.7 and "% of bytes  a parameter of a Conv1D" in str(report)
    report = lb.quantize_(model, lb.Int8WeightOnly(32), lambda m, name: isinstance(m, Conv1D))
    assert set(report.converted) == set(layers)
    assert relative_error(logits(model), expected) < 0.03
    assert generated(model).shape == (2, 20)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe], ids=["mixtral", "qwen3-moe"])
def test_experts_are_in_the_report_with_their_share(make) -> None:
    model = make()
    report = lb.quantize_(model, lb.Int8WeightOnly())
    experts = [e for e in report.entries if ".experts." in e.fqn]
    assert len(experts) == 2 and all(e.converted for e in experts)
    assert report.left["model.layers.0.mlp.gate.weight"].startswith("a router")
    assert sum(e.nbytes for e in experts) > 0.3 * report.nbytes
    low = report.low_bits / report.parameters
    assert low > 0.8 and f"; {100 * low:.1f}% of {report.parameters:,} parameters" in str(report)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe], ids=["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["int4", "int8", "float8"])
def test_chosen_experts_compute_what_their_values_do(make, implementation, name) -> None:
    scheme, bound = SCHEMES[name]
    model = make()
    model.set_experts_implementation(implementation)
    expected = logits(model)
    report = lb.quantize_(model, scheme, lambda m, name: name.endswith("experts"))
    assert len(report.converted) == 2
    assert relative_error(logits(model), expected) < bound
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    grads = []
    for run in (model, plain):
        x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        y = run(inputs_embeds=x).logits
        y.square().sum().backward()
        grads.append((y.detach(), x.grad))
    for found, wanted in zip(*grads, strict=True):
        assert relative_error(found, wanted) < 1e-5


def test_experts_whose_inputs_are_quantized() -> None:
    """Grouped products round the inputs as the linear of one expert does."""
    model = mixtral()
    plain = logits(model)
    scheme = lb.Int8DynamicActivationInt8Weight()
    lb.quantize_(model, scheme, lambda m, name: name.endswith("experts"))
    model.set_experts_implementation("eager")
    eager = logits(model)
    model.set_experts_implementation("grouped_mm")
    grouped = logits(model)
    assert relative_error(grouped, eager) < 1e-3
    assert 1e-4 < relative_error(grouped, plain) < 0.05


TRAINED = {
    "int8": (lb.train.Int8MixedPrecision(always=True), 0.05),
    "float8": (lb.train.Float8MixedPrecision(always=True), 0.15),
    "blocks": (lb.train.Float8BlockMixedPrecision(always=True), 0.15),
    "int8-weight": (lb.Int8Weight(True, True, True, always=True), 0.05),
    "qat": (lb.Int8WeightOnly(), 1e-5),
}


@pytest.mark.parametrize("make", [mixtral, qwen3_moe], ids=["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("name", TRAINED)
def test_experts_train_through_grouped_products(make, name) -> None:
    """The stock model: its experts' output and gradients are near those of the values that they have."""
    scheme, bound = TRAINED[name]
    model = make().train()
    model.set_experts_implementation("grouped_mm")
    is_experts = lambda module, name: name.endswith("experts")  # noqa: E731
    prepare = lb.qat.prepare_ if name == "qat" else lb.train.prepare_
    report = prepare(model, scheme, is_experts)
    assert len(report.converted) == 2
    plain = make().train()
    plain.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.copy_(own.dequantize() if isinstance(own, LowbitTensor) else own)
    with launches.counted() as calls:
        losses = [run(input_ids=TOKENS, labels=TOKENS).loss for run in (model, plain)]
        for loss in losses:
            loss.backward()
    assert relative_error(losses[0], losses[1]) < bound
    kinds = {"float8": "float8 torch", "blocks": "torch"}
    assert calls_of(calls) == ({} if name == "qat" else {kinds.get(name, "int8 torch"): 6})
    wanted = dict(plain.named_parameters())
    for fqn, p in model.named_parameters():
        if name == "qat" and ".experts." in fqn:
            continue  # no gradient where values clip
        if wanted[fqn].grad.norm() > 0:
            assert relative_error(p.grad, wanted[fqn].grad) < 3 * bound, fqn
    found = lb.trace(model, TOKENS)
    products = [p for p in found.products if ".experts." in p.layer]
    assert {p.layer.rpartition(".")[2] for p in products} == {"gate_up_proj", "down_proj"}
    assert len(products) == 6 and all(p.in_low_bits == (name != "qat") for p in products)


# ---- Trainer -----------------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = TOKENS[index % 2]
        return {"input_ids": ids, "labels": ids}


CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)
"""The argument's name. transformers before 5.23 has only the second; later ones warn of it."""


def trainer(model: nn.Module, folder: Any, steps: int = 4, **changes: Any) -> Any:
    options = {
        **{"output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 2},
        **{"learning_rate": 1e-2, "report_to": "none", "save_strategy": "no", "use_cpu": True},
        **{"disable_tqdm": True, "logging_steps": 1, "seed": 1},
    }
    given = {
        key: changes.pop(key)
        for key in ("optimizers", "optimizer_cls_and_kwargs")
        if key in changes
    }
    arguments = transformers.TrainingArguments(**{**options, **changes})
    return transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), **given)


def losses(run: Any) -> list[float]:
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_qat_with_the_trainer_and_converted(tmp_path) -> None:
    model = llama()
    report = lb.qat.prepare_(model, lb.Int4WeightOnly(32), is_inner_linear)
    assert len(report.converted) == 7
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    before = model.model.layers[0].self_attn.q_proj.weight.master().clone()
    found = losses(trainer(model, tmp_path, optimizers=(optimizer, None)))
    assert found[-1] < found[0]
    assert not torch.equal(model.model.layers[0].self_attn.q_proj.weight.master(), before)
    model.eval()
    prepared, tokens = logits(model), generated(model)
    lb.qat.convert_(model)
    assert torch.equal(logits(model), prepared) and torch.equal(generated(model), tokens)


@pytest.mark.parametrize(
    ("scheme", "undo"),
    [
        (lb.Int8Weight(), lb.train.convert_),
        (lb.BitNet(), lb.train.convert_),
        (lb.Int8MixedPrecision(always=True), lb.train.restore_),
    ],
    ids=["int8 weight", "bitnet", "int8 products"],
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_low_bit_training_with_the_trainer(scheme, undo, checkpointing, tmp_path) -> None:
    model = llama()
    lb.train.prepare_(model, scheme, is_inner_linear)
    optimizer = (lb.optim.AdamW8bit, {"lr": 1e-2})
    options = {CHECKPOINTING: checkpointing, "max_grad_norm": 1.0}
    found = losses(trainer(model, tmp_path, optimizer_cls_and_kwargs=optimizer, **options))
    assert found[-1] < found[0]
    undo(model)
    assert logits(model.eval()).isfinite().all()


@pytest.mark.parametrize("optimizer", ["AdamW4bit", "AdamW8bit", "AdamWFp8", "Lion8bit"])
def test_the_trainer_in_bf16_with_accumulation(optimizer, tmp_path) -> None:
    model = llama()
    chosen = (getattr(lb.optim, optimizer), {"lr": 1e-3 if "Lion" in optimizer else 1e-2})
    options = {"bf16": True, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    found = losses(trainer(model, tmp_path, optimizer_cls_and_kwargs=chosen, **options))
    assert len(found) == 4 and found[-1] < found[0]


def test_a_dequantized_model_is_saved_as_any(tmp_path) -> None:
    model = llama()
    lb.quantize_(model, lb.Int8WeightOnly())
    expected = logits(model)
    lb.dequantize_(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative_error(logits(loaded), expected) < 1e-5


@pytest.mark.parametrize("prepare", [lb.qat.prepare_, lb.quantize_], ids=["qat", "quantize"])
def test_a_head_of_another_size_is_prepared_again(prepare) -> None:
    """transformers puts a new layer in its place, which is plain."""
    scheme = lb.Int4WeightOnly(32)
    model = llama()
    prepare(model, {"lm_head": scheme, "*": scheme})
    kind = type(model.lm_head.weight)
    model.resize_token_embeddings(136, mean_resizing=False)
    assert type(model.lm_head.weight) is nn.Parameter
    assert list(prepare(model, {"lm_head": scheme}).converted) == ["lm_head.weight"]
    assert type(model.lm_head.weight) is kind and model(TOKENS).logits.shape[-1] == 136
