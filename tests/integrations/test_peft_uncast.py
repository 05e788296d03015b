"""LoRA layers over frozen weights leave out the casts that autocast undoes, where PEFT's forward serves.

It serves here because hooks see the base layers (`tests.integrations.test_peft_fused` has the other layers).
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.layers.fused_lora import FewerPasses
from lowbit.layers.stand_in import take
from tests.integrations.models import TOKENS, fill_adapters, is_inner_linear, llama

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes to which PEFT casts inputs."""
    seen, cast = [], BaseTunerLayer._cast_input_dtype

    def noting(self: Any, x: Any, dtype: torch.dtype) -> Any:
        seen.append(dtype)
        return cast(self, x, dtype)

    monkeypatch.setattr(BaseTunerLayer, "_cast_input_dtype", noting)
    return seen


def adapted(checkpointed: bool = False, **changes: Any) -> Any:
    model = llama(num_hidden_layers=1).to(torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lb.quantize_(model, lb.NF4WeightOnly(32), is_inner_linear)
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_alpha=5, **changes)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    fill_adapters(model, 0.1)
    for module in model.modules():
        if isinstance(module, FewerPasses):
            module.get_base_layer().register_forward_hook(nothing)
    return model.train()


def nothing(*_: Any) -> None:
    """A hook."""


def as_peft_runs(model: Any) -> Any:
    model = copy.deepcopy(model)
    for module in model.modules():
        take(module, FewerPasses)
    return model


def outcome(model: Any, enabled: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_bits_and_casts(casts: list[torch.dtype], dropout: float, checkpointed: bool) -> None:
    model = adapted(checkpointed, lora_dropout=dropout)
    expected, usual = outcome(as_peft_runs(model)), 14 if checkpointed else 7
    assert len(casts) == usual
    casts.clear()
    # hooks of checkpoints cannot be pickled
    found = outcome(model if checkpointed else pickle.loads(pickle.dumps(model)))
    assert len(casts) == (usual if dropout else 0)
    assert all(map(torch.equal, found, expected)) and len(found) == 15


def test_bits_of_two_adapters(casts: list[torch.dtype]) -> None:
    """Without casts, their gradients would be added in 16 bits."""
    model = adapted(init_lora_weights=False)
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    expected = outcome(as_peft_runs(model))
    assert all(map(torch.equal, outcome(model), expected)) and len(casts) == 28


def test_bits_of_float16_adapters(casts: list[torch.dtype]) -> None:
    model = adapted()
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.half()
    expected = outcome(as_peft_runs(model))
    assert all(map(torch.equal, outcome(model), expected)) and len(casts) == 14


def test_other_calls_are_peft_s(casts: list[torch.dtype]) -> None:
    model = adapted()
    outcome(model, enabled=False)  # in the adapters' dtype
    assert casts == [torch.float32] * 7
    layer = next(m for m in model.modules() if isinstance(m, FewerPasses))
    seen: list[torch.dtype] = []
    layer.lora_A["default"].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    casts.clear()
    outcome(model)
    assert len(casts) == 1 and seen == [torch.float32]


def test_other_tuners_and_plain_bases_are_left_alone() -> None:
    model = llama(num_hidden_layers=1)
    plain = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert not any(isinstance(m, FewerPasses) for m in plain.modules())
    for config in (
        peft.LoHaConfig(r=4, target_modules=["q_proj"]),
        peft.AdaLoraConfig(total_step=9),
    ):
        config.target_modules = {"q_proj"}
        model = llama(num_hidden_layers=1).to(torch.bfloat16)
        lb.quantize_(model, lb.NF4WeightOnly(32), is_inner_linear)
        found = outcome(peft.get_peft_model(model, config).train())
        assert all(t.isfinite().all() for t in found)
