"""Training in low bits with torchao: functions that convert the linears of a model, as `lowbit.train.prepare_` does.

They import torchao when they are called. If it is missing, only their rows of the report are empty.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def is_chosen(module: nn.Module, name: str) -> bool:
    """All linears except the head, which torchao's own recipes leave in bfloat16."""
    return isinstance(module, nn.Linear) and name != "head"


def float8(recipe: str, model: nn.Module) -> None:
    """float8 products, forward and backward, by a recipe of torchao: "rowwise" or "tensorwise"."""
    torchao = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=is_chosen)


def int8(model: nn.Module) -> None:
    """int8 products, forward and backward, by new modules: the tensor subclass runs in bfloat16 (torchao 0.18)."""
    quantize_ = importlib.import_module("torchao.quantization").quantize_
    training = importlib.import_module("torchao.prototype.quantized_training")
    quantize_(model, training.int8_mixed_precision_training(module_swap=True), is_chosen)


PEERS: dict[str, Callable[[nn.Module], None]] = {
    "torchao float8 rowwise": partial(float8, "rowwise"),
    "torchao float8 tensorwise": partial(float8, "tensorwise"),
    "torchao int8": int8,
}


def as_function(
    convert: Callable[[nn.Module], Any], n: int, k: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The function (x [..., k], weight [n, k]) -> [..., n] that a peer makes of a plain linear."""
    holder = nn.Sequential(nn.Linear(k, n, bias=False, device="meta"))
    convert(holder)
    (linear,) = holder
    return lambda x, weight: functional_call(linear, {"weight": weight}, (x,))
