"""What the graph of a token computes from the position alone, as tables: one look-up for a dozen launches.

The cosines and sines of rotary angles are functions of `position_ids` and of constants. They are computed for all
positions before the capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten: Any = torch.ops.aten
VIEWS = {aten.unsqueeze.default, aten.view.default, aten.alias.default, aten.transpose.int}
VIEWS |= {aten.expand.default, aten.slice.Tensor, aten.permute.default}


def tabulate(module: fx.GraphModule, position_ids: Tensor, capacity: int) -> int:
    """Replace what depends on the positions alone by look-ups, in place. Returns how many results.

    Args:
        module: the graph of a token; its second argument is `position_ids`.
        position_ids: int64 [batch, 1].
        capacity: positions are below it.
    """
    given = [node for node in module.graph.nodes if node.op == "placeholder"][1]
    outputs = _outputs(module.graph, given, position_ids.shape[0])
    if not outputs:
        return 0
    computed = _computing(module, given, outputs)
    tables = _tables(computed, position_ids, capacity)
    if tables is None:
        return 0
    alike: dict[Any, list[int]] = {}
    for i, table in enumerate(tables):
        alike.setdefault((table.shape, table.dtype), []).append(i)
    graph = module.graph
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        flat = graph.call_function(aten.view.default, (given, [-1]))
        for number, members in enumerate(alike.values()):
            name = f"_table_{number}"
            module.register_buffer(name, torch.stack([tables[i] for i in members]))
            rows = (graph.get_attr(name), [None, flat])  # index_select takes the rows one by one
            found = graph.call_function(aten.index.Tensor, rows)
            for at, i in enumerate(members):
                one = graph.call_function(aten.select.int, (found, 0, at))
                one.meta = dict(outputs[i].meta)
                outputs[i].replace_all_uses_with(one)
    graph.eliminate_dead_code()
    module.recompile()
    return len(outputs)


def _outputs(graph: fx.Graph, given: Any, batch: int) -> list[Any]:
    """The results with a row for each sequence that depend on the positions alone and that other nodes read."""
    known = {given: True}  # True: depends on the positions; False: on constants alone
    for node in graph.nodes:
        if node.op == "get_attr":
            known[node] = False
        elif node.op == "call_function" and _is_pure(node):
            inputs = node.all_input_nodes
            if inputs and all(one in known for one in inputs):
                known[node] = any(known[one] for one in inputs)
    ends = [n for n, depends in known.items() if depends and n is not given]
    ends = [_viewed(n) for n in ends if any(reader not in known for reader in n.users)]
    ends = [n for n in dict.fromkeys(ends) if known[n] and n is not given]
    values = [n.meta.get("val") for n in ends]
    fit = (isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1 for t in values)
    return [n for n, t, fits in zip(ends, values, fit, strict=True) if fits and len(t) == batch]


def _viewed(node: Any) -> Any:
    """The result of which this is a view: each layer may make one of its own."""
    while node.target in VIEWS:
        node = node.args[0]
    return node


def _is_pure(node: Any) -> bool:
    is_op = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"
    tags = (torch.Tag.nondeterministic_seeded,)
    return is_op and not node.target._schema.is_mutable and not set(tags) & set(node.target.tags)


def _computing(module: fx.GraphModule, given: Any, outputs: list[Any]) -> fx.GraphModule:
    """The part of the graph that computes the outputs."""
    wanted, left = set(), list(outputs)
    while left:
        node = left.pop()
        if node not in wanted:
            wanted.add(node)
            left += node.all_input_nodes
    graph, copies = fx.Graph(), {}
    copies[given] = graph.placeholder("position_ids")
    for node in module.graph.nodes:
        if node in wanted and node is not given:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(module, graph)


def _tables(computed: Any, position_ids: Tensor, capacity: int) -> list[Tensor] | None:
    """The outputs for the positions below `capacity`, each [capacity, ...]; None where rows depend on each other."""
    batch, device = position_ids.shape[0], position_ids.device
    calls = -(-capacity // batch)
    positions = torch.arange(calls * batch, device=device).view(calls, batch, 1)
    try:
        found = torch.vmap(computed)(positions)
    except (RuntimeError, NotImplementedError):
        return None
    tables = [t.flatten(0, 1)[:capacity].contiguous() for t in found]
    for shift in (1, capacity // 2):
        rows = (torch.arange(batch, device=device) * 7 + shift) % capacity
        expected = computed(rows[:, None])
        if not all(torch.equal(t[rows], one) for t, one in zip(tables, expected, strict=True)):
            return None
    return tables
