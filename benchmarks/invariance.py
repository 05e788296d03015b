"""The invariant mode of int8 models: are the bits the same everywhere, and what does a step cost?

    python -m benchmarks.invariance                         # on a GPU: CPU against GPU, and the cost
    python -m benchmarks.invariance --no-cost               # on a CPU

1. Pairs: the logits of a sequence alone on a CPU, in one pass and one process, beside those of the same sequence on a
   random device, in a random batch, with padding on a random side, in random chunks with a cache, and with its linears
   split over 1, 2 or 4 processes. All must be `torch.equal`. Processes that share a GPU communicate over gloo, those
   with a GPU each over NCCL.
2. The time of a forward pass of 4 layers of an 8B shape, with a head of 1/8 of the vocabulary, for the ordinary int8
   model of transformers with SDPA, and for the invariant one: in a CUDA graph, and launched by Python. While a graph is
   captured, transformers builds a mask for every prompt, so only prefill without a graph runs both attentions without
   masks.

The program ends with status 1 if a pair of the invariant model differs. Digests of the logits alone tell whether two
machines agree. `pytest -m gpu tests/kernels/test_invariant_ops.py` compares each op.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowbit
from lowbit.inference import invariant_
from lowbit.testing.launch import launch

# ---- pairs -----------------------------------------------------------------------------------------------------------


def small_model(kind: str, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 503,
        "hidden_size": 256,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config, make = cast("Any", kinds[kind])
    model = make(config(**shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(dtype)  # draws of bfloat16 depend on the processor
    lowbit.quantize_(model, lowbit.Int8DynamicActivationInt8Weight())
    return model


@torch.no_grad()
def logits_of(
    model: Any, sequences: list[Tensor], padding: int, is_left: bool, cuts: list[int]
) -> Tensor:
    """The logits of the first sequence [L, V], run in a batch with the others, in chunks that end at `cuts`."""
    from transformers import DynamicCache

    device = next(model.parameters()).device
    width = max(map(len, sequences)) + padding
    ids = torch.zeros((len(sequences), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(sequences):
        where = slice(width - len(own), width) if is_left else slice(0, len(own))
        ids[row, where], mask[row, where] = own, 1
    position = (mask.cumsum(1) - 1).clamp(min=0)
    ids, mask, position = (x.to(device) for x in (ids, mask, position))
    cache = DynamicCache(config=model.config)
    found, begin = [], 0
    for end in [*cuts, width]:
        part = slice(begin, end)
        y = model(
            ids[:, part],
            attention_mask=mask[:, :end],
            position_ids=position[:, part],
            past_key_values=cache,
        )
        found.append(y.logits[0])
        begin = end
    return torch.cat(found)[mask[0] == 1].cpu()


MODELS = {
    "llama-float32": torch.float32,
    "llama-bfloat16": torch.bfloat16,
    "qwen3-bfloat16": torch.bfloat16,
}
WIDTHS = (1, 2, 4)
POOL = 16
"""Sequences of each model."""


@dataclass(frozen=True)
class Pair:
    """A sequence of the pool of a model, and the way in which it runs. `width`: of tensor parallelism."""

    model: str
    own: int
    others: tuple[int, ...]
    padding: int
    is_left: bool
    cuts: tuple[int, ...]
    device: str
    width: int

    def logits(self, model: Any, pool: Sequence[Tensor]) -> Tensor:
        batch = [pool[i] for i in (self.own, *self.others)]
        return logits_of(model, batch, self.padding, self.is_left, [*self.cuts])


def pool_of(name: str) -> list[Tensor]:
    rng, generator = random.Random(name), torch.Generator().manual_seed(1)
    return [torch.randint(0, 503, (rng.randint(4, 180),), generator=generator) for _ in range(POOL)]


def drawn(names: Sequence[str], count: int, devices: Sequence[str]) -> list[Pair]:
    """`count` different random pairs. One in eight runs on the first device, the others on the last one."""
    rng = random.Random(0)
    pools = {name: pool_of(name) for name in names}
    pairs: dict[Pair, None] = {}
    for at in itertools.count():
        if len(pairs) == count:
            break
        name = names[at % len(names)]
        own, *others = (rng.randrange(POOL) for _ in range(1 + rng.choice((0, 1, 3, 7))))
        padding = rng.choice((0, 0, 1, 13, 40))
        longest = max(len(pools[name][i]) for i in (own, *others)) + padding
        cuts = rng.sample(range(1, longest), min(rng.choice((0, 1, 2, 4)), longest - 1))
        pair = Pair(
            *(name, own, tuple(others), padding, rng.random() < 0.5, tuple(sorted(cuts))),
            device=devices[-1] if rng.randrange(8) else devices[0],
            width=rng.choice(WIDTHS),
        )
        pairs[pair] = None
    return [*pairs]


def split(model: Any, device: str) -> None:
    """Split the linears of all blocks over the processes, as tensor parallelism does."""
    columns = (*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    parallelize_module(model, mesh, plan, src_data_rank=None)  # every process has the whole model


def run_pairs(
    rank: int, width: int, pairs: Sequence[Pair], alone: dict[str, list[Tensor]]
) -> list[bool]:
    """True for each pair, all of one device and width, whose logits are those of the sequence alone."""
    torch.set_num_threads(1)
    device, equal = pairs[0].device, {}
    for name in alone:
        pool, model = pool_of(name), small_model(name.split("-")[0], MODELS[name]).to(device)
        invariant_(model)
        if width > 1:
            split(model, device)
        for pair in pairs:
            if pair.model == name:
                equal[pair] = torch.equal(pair.logits(model, pool), alone[name][pair.own])
    return [equal[pair] for pair in pairs]


def counted(found: Sequence[bool]) -> str:
    return f"{sum(found)} of {len(found)} torch.equal"


def check_pairs(names: Sequence[str], count: int, devices: Sequence[str]) -> bool:
    """Print how many pairs are equal; True if all of them are, of the invariant model."""
    pairs = drawn(names, count, devices)
    alone: dict[str, list[Tensor]] = {}
    ordinary = []
    for name in names:
        pool, plain = pool_of(name), small_model(name.split("-")[0], MODELS[name])
        model = copy.deepcopy(plain)
        invariant_(model)
        alone[name] = [logits_of(model, [s], 0, True, []) for s in pool]
        sha256 = hashlib.sha256(
            b"".join(t.view(torch.uint8).numpy().tobytes() for t in alone[name])
        )
        print(f"{name}: {POOL} sequences alone on a CPU, SHA-256 {sha256.hexdigest()[:16]}")
        plain = plain.to(devices[-1])
        expected = [logits_of(plain, [s], 0, True, []) for s in pool]
        some = [pair for pair in pairs if pair.model == name][::10]
        ordinary += [torch.equal(p.logits(plain, pool), expected[p.own]) for p in some]
    equal = []
    for device in dict.fromkeys(devices):
        for width in WIDTHS:
            own = [pair for pair in pairs if (pair.device, pair.width) == (device, width)]
            if not own:
                continue
            nccl = device == "cuda" and torch.cuda.device_count() >= width > 1
            start = time.perf_counter()
            ranks = launch(run_pairs, width, own, alone, timeout=3600, fresh=True, nccl=nccl)
            took = time.perf_counter() - start
            found = [all(each) for each in zip(*ranks, strict=True)]
            equal += found
            by = "" if width == 1 else f" over {'NCCL' if nccl else 'gloo'}"
            print(f"{device}, width {width}{by}: {counted(found)}, {took:.0f} s", flush=True)
    print(f"all pairs: {counted(equal)} to the sequence alone on a CPU")
    print(f"the ordinary int8 model on {devices[-1]}: {counted(ordinary)} to itself alone")
    return all(equal)


# ---- cost ------------------------------------------------------------------------------------------------------------


def large_model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16032,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(before)
    lowbit.quantize_(model, lowbit.Int8DynamicActivationInt8Weight())
    return model


def step_of(model: Any, batch: int, context: int, tokens: int) -> Callable[[], Any]:
    """A forward pass of `tokens` new tokens of each sequence behind `context` others, which leaves them as they are."""
    from transformers import DynamicCache

    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 16000, (batch, context + tokens), device="cuda", generator=generator)
    if context == 0:
        return lambda: model(ids, logits_to_keep=1, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    for begin in range(0, context, 512):
        model(ids[:, begin : min(begin + 512, context)], past_key_values=cache, logits_to_keep=1)
    kept = [(layer.keys, layer.values) for layer in cache.layers]

    def step() -> Any:
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
        return model(ids[:, context:], past_key_values=cache, logits_to_keep=1).logits

    return step


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return 1e3 * min(times)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(), call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def cost(layers: int) -> None:
    from lowbit.hf import generate

    ordinary = large_model(layers)
    model = copy.deepcopy(ordinary)
    invariant_(model)
    print(f"\n{layers} layers of 8B, bf16, {torch.cuda.get_device_name()}: ms a forward pass")
    print(f"{'':32}{'graph: int8':>12}{'invariant':>11}{'':>8}{'eager: int8':>13}{'invariant':>11}")
    shapes = [("prefill 2048", 1, 0, 2048)]
    shapes += [(f"decode batch {b} after {c}", b, c, 1) for b in (1, 16) for c in (512, 2048)]
    for name, batch, context, tokens in shapes:
        row = [f"{name:32}"]
        for wrap in (graphed, lambda call: call):
            found = []
            for one in (ordinary, model):
                found.append(milliseconds(wrap(step_of(one, batch, context, tokens)), 20))
            row.append(f"{found[0]:12.3f}{found[1]:11.3f}{found[1] / found[0] - 1:+8.1%}")
        print(" ".join(row), flush=True)
    for batch in (1, 16):
        ids = torch.randint(0, 16000, (batch, 512), device="cuda")
        took = []
        for count in (32, 96, 32, 96):
            torch.cuda.synchronize()
            start = time.perf_counter()
            generate(ordinary, ids, max_new_tokens=count, eos_token_id=None, do_sample=False)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        print(
            f"lowbit.hf.generate, int8, batch {batch} after 512: {(took[3] - took[2]) / 64 * 1e3:.3f} ms a token"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="of the pairs"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--no-cost", action="store_true")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    same = True
    if args.pairs:
        same = check_pairs(args.models, args.pairs, ["cpu", "cuda"] if has_gpu else ["cpu"])
    if has_gpu and not args.no_cost:
        cost(args.layers)
    return 0 if same else 1


if __name__ == "__main__":
    from benchmarks import invariance  # the processes find its functions under this name

    sys.exit(invariance.main())
