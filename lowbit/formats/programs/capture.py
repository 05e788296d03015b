"""Trace a model, with its low-bit weights as they are or replaced by modules that a runtime understands.

To replace low-bit weights, a copy of the model gets plain weights of the same shape in their place, without values.
torch.export shows each use of a weight: as the weight of a linear, as the table of an embedding, or for its values. A
module takes the place of each use, and torch.export traces the result again. This also finds functional calls, tied
weights and weights in modules of the user's own.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from lowbit.formats.base import FormatError
from lowbit.formats.programs.base import Call
from lowbit.layers.exchange import Held, exchanged
from lowbit.layers.frozen import shown_class
from lowbit.tensor.core.base import LowbitTensor

Use = Literal["linear", "embedding", "values"]
Replace = Callable[[str, LowbitTensor, Use], nn.Module]
"""(name, weight, use) -> a module: (x, bias or None) -> y, (indices) -> rows, or () -> values; or FormatError."""

_aten = torch.ops.aten


def traced(call: Call, model: nn.Module | None = None) -> ExportedProgram:
    """The program of the call. Raises FormatError, on one line, if torch.export cannot trace it."""
    model = call.model if model is None else model
    shapes = call.dynamic_shapes
    try:
        with torch.no_grad(), quiet(), exchanged(_aliases(model)):
            return torch.export.export(model, call.args, call.kwargs, dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises errors of many kinds
        raise FormatError(
            f"torch.export cannot trace the model with these inputs: {first_line(error)}"
        ) from error


def _aliases(model: nn.Module) -> list[Held]:
    """The modules of the model with aliases of their low-bit weights. torch.export keeps weak references to what it
    traces, and `model.to` swaps no tensor that has one."""
    aliases: dict[int, nn.Parameter] = {}
    found = []
    for module in model.modules():
        held: dict[str, Any] = module._parameters
        own = {name: p for name, p in held.items() if isinstance(p, LowbitTensor)}
        for weight in own.values():
            alias = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
            aliases.setdefault(id(weight), alias)
        if own:
            by_name = {name: aliases[id(weight)] for name, weight in own.items()}
            found.append(Held(module, shown_class(module), by_name))
    return found


def first_line(error: BaseException) -> str:
    """The first line of a message that has text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def root_cause(error: BaseException) -> BaseException:
    """The error at the end of the chain of causes: exporters wrap the error that says what they cannot do."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of exporters about their own packages."""
    names = "torch.onnx", "torch.export", "onnx_ir", "executorch"
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def traced_with(call: Call, replace: Replace) -> ExportedProgram:
    """The program of the call, with a module of `replace` in place of each use of a low-bit weight.

    Raises FormatError as `traced` does, and if `replace` raises it: the message gives the reasons for three weights.
    """
    known = {id(weight): (name, weight) for name, weight in call.weights.items()}
    stand_ins: dict[int, nn.Parameter] = {}
    for key, (_, weight) in known.items():
        values = torch.empty(weight.shape, dtype=weight.dtype)  # no page is ever touched
        stand_ins[key] = nn.Parameter(values, requires_grad=False)
    names = {
        name: known[id(t)]
        for name, t in call.model.state_dict(keep_vars=True).items()
        if id(t) in known
    }
    plain = copy.deepcopy(call.model, _memo(call.model, stand_ins))
    with quiet():
        graph = traced(call, plain).module(check_guards=False)
    _Replacing(graph, names, replace).run()
    return traced(call, graph)


def _memo(model: nn.Module, stand_ins: dict[int, nn.Parameter]) -> dict[int, Any]:
    """The tensors that a copy of the model shares: plain ones, and stand-ins for the low-bit weights."""
    tensors = (*model.parameters(), *model.buffers())
    return {id(t): t for t in tensors} | stand_ins


class _Replacing:
    """Replaces the uses of the stand-ins: the attributes of `graph` with these names."""

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        names: dict[str, tuple[str, LowbitTensor]],
        replace: Replace,
    ) -> None:
        self._graph, self._names, self._replace = graph, names, replace
        self._modules: dict[tuple[str, Use], str] = {}
        self._refused: dict[str, str] = {}

    def run(self) -> None:
        for node in list(self._graph.graph.nodes):
            if node.op != "get_attr" or node.target not in self._names:
                continue
            for user in list(node.users):
                self._replace_use(node, user)
            if not node.users:
                self._graph.graph.erase_node(node)
        if self._refused:
            shown = [f"{name}: {why}" for name, why in self._refused.items()]
            more = f"; and {len(shown) - 3} more" if len(shown) > 3 else ""
            raise FormatError("; ".join(shown[:3]) + more)
        self._graph.graph.lint()
        self._graph.recompile()

    def _replace_use(self, node: torch.fx.Node, user: torch.fx.Node) -> None:
        use, args = _use_of(node, user)
        name, weight = self._names[str(node.target)]
        key = name, use
        if key not in self._modules and name not in self._refused:
            try:
                module = self._replace(name, weight, use)
            except FormatError as error:
                self._refused[name] = str(error)
                return
            self._modules[key] = f"lowbit_{len(self._modules)}"
            self._graph.add_submodule(self._modules[key], module)
        if name in self._refused:
            return
        graph = self._graph.graph
        with graph.inserting_before(user):
            new = graph.call_module(self._modules[key], args)
        if use == "values":
            user.replace_input_with(node, new)
        else:
            user.replace_all_uses_with(new)
            graph.erase_node(user)


def _use_of(node: torch.fx.Node, user: torch.fx.Node) -> tuple[Use, tuple[Any, ...]]:
    """How `user` uses a weight, and the arguments of the module that takes its place."""
    args = user.args
    if user.target is _aten.linear.default and args[1] is node and args[0] is not node:
        return "linear", (args[0], args[2] if len(args) > 2 else None)
    if user.target is _aten.embedding.default and args[0] is node:
        return "embedding", (args[1],)
    return "values", ()
