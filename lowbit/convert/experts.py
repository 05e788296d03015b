"""The stacked experts of a mixture, how they lie in memory, and the routers that choose among them.

Stacked experts are parameters of three dimensions, a matrix for each expert, of a module whose class or name says so:
`Qwen3MoeExperts`, `GroupedExperts`, `mlp.experts`. Other parameters of three dimensions, such as the position
embeddings of a vision transformer, are none.

Most are stored as [experts, outputs, inputs], as linears are. gpt-oss and Llama 4 store [experts, inputs, outputs].
Those are quantized as [experts, outputs, inputs], so that groups run along the inputs, and held transposed.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from lowbit.convert.owners import Owner

_ROUTERS, _GATE = ("router", "shared_expert_gate"), "gate"
_UP, _DOWN = "gate_up_proj", "down_proj"
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Where configs and modules say how many experts a layer has."""


def stacked(module: nn.Module, name: str) -> tuple[str, ...]:
    """The attributes of a module that are stacked experts. `name`: that of the module."""
    says = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    if "expert" not in says or type(module).__module__.startswith("torch.nn"):
        return ()
    return tuple(
        attribute
        for attribute, p in module._parameters.items()
        if _is_stack(p) and min(p.shape[1:]) > 1  # type: ignore[union-attr]
    )


def is_bias(owner: Owner) -> bool:
    """True for the biases [experts, outputs] of stacked experts, as gpt-oss has them: `gate_up_proj_bias`."""
    module, attribute, fqn = owner
    param = module._parameters.get(attribute)
    if not attribute.endswith("bias") or isinstance(param, nn.UninitializedParameter | None):
        return False
    return param.ndim == 2 and bool(stacked(module, fqn.removesuffix(attribute).removesuffix(".")))


def stores_inputs_first(owner: Owner) -> bool:
    """True if these are stacked experts [experts, inputs, outputs], as their module says, or as the shapes of
    `gate_up_proj` and `down_proj` show."""
    module, attribute, fqn = owner
    if attribute not in stacked(module, fqn.removesuffix(attribute).removesuffix(".")):
        return False
    marked = getattr(module, "is_transposed", None)
    if isinstance(marked, bool):
        return marked
    up, down = (module._parameters.get(n) for n in (_UP, _DOWN))
    if not (_is_stack(up) and _is_stack(down)):
        return False
    return up.shape[1:] == (down.shape[2], 2 * down.shape[1])  # type: ignore[union-attr]


def _is_stack(param: Tensor | None) -> bool:
    if param is None or isinstance(param, nn.UninitializedParameter):
        return False
    return param.ndim == 3


def routers_of(model: nn.Module) -> set[str]:
    """`routers_among` the modules of `model`."""
    modules = dict(model.named_modules())
    blocks = [name.rpartition(".")[0] for name, module in modules.items() if stacked(module, name)]
    return routers_among(modules, blocks)


def routers_among(names: Iterable[str], blocks: Iterable[str] = ()) -> set[str]:
    """The names of routers, and of all inside of them: "router", "shared_expert_gate", and a "gate" beside experts.

    Args:
        names: of all modules, or of all tensors, of a model.
        blocks: the modules that hold experts whose names do not say so.
    """
    paths = {name: name.split(".") for name in names}
    found = {*blocks}
    for path in paths.values():
        found |= {".".join(path[:i]) for i, part in enumerate(path) if _is_of_experts(part)}

    def routes(path: list[str]) -> bool:
        return any(
            part in _ROUTERS or (part == _GATE and ".".join(path[:i]) in found)
            for i, part in enumerate(path)
        )

    return {name for name, path in paths.items() if routes(path)}


def _is_of_experts(name: str) -> bool:
    return "expert" in name and "shared" not in name
