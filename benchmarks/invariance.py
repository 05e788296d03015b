"""The invariant mode of int8 models on a GPU: are the bits those of a CPU, and what does a step cost?

    python -m benchmarks.invariance                                # on a GPU
    python -m benchmarks.invariance --pairs 40 --ops 9 --no-cost    # also on a CPU

1. Each op on the device and on a CPU, over random shapes.
2. Pairs: the logits of a sequence alone on a CPU, in one pass, beside those of the same sequence on a random device, in
   a random batch, with padding on a random side, and in random chunks with a cache. All must be `torch.equal`.
3. The time of a forward pass of 4 layers of an 8B shape, with a head of 1/8 of the vocabulary, for the ordinary int8
   model of transformers with SDPA, and for the invariant one: in a CUDA graph, and launched by Python. While a graph is
   captured, transformers builds a mask for every prompt, so only prefill without a graph runs both attentions without
   masks.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
import lowbit_kernels as kernels
from lowbit.inference import invariant_

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- ops -------------------------------------------------------------------------------------------------------------


def op_calls(rng: random.Random) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A random call of each op on the CPU: the op and its arguments by position."""
    dtype = rng.choice(DTYPES)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape) * 10.0 ** rng.uniform(-3, 3)
        return x.to(dtype)

    width, tokens = rng.choice((64, 128, 1000, 4096, 9000)), rng.choice((1, 2, 5, 16, 17, 40))
    n, k = rng.choice((48, 256, 1000)), rng.choice((64, 96, 1000, 4096))
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, 1) * 0.01).to(dtype)
    bias = normal(n) if rng.random() < 0.5 else None
    heads, group, d = rng.choice((1, 2)), rng.choice((1, 4)), rng.choice((64, 80, 128))
    queries = rng.choice((1, 1, 3, 33, 130))
    keys = queries + rng.choice((0, 1, 37, 400))
    shape = (2, heads * group, queries, d), (2, heads, keys, d)
    mask = torch.rand(2, 1, queries, keys) > 0.3 if rng.random() < 0.5 else None
    spread = 10.0 ** rng.uniform(-1, 1)
    attention = (torch.randn(shape[0]) * spread, torch.randn(shape[1]), torch.randn(shape[1]))
    position = torch.randint(0, 2 ** rng.randint(4, 18), (3, 7))
    inv_freq = 1.0 / (1e4 ** (torch.arange(0, d, 2) / d))
    ops = kernels
    return {
        "norm": (ops.invariant_norm, (normal(tokens, width), normal(width), 1e-6, 0.0)),
        "silu": (ops.invariant_activation, (normal(tokens, width), "silu")),
        "gelu": (ops.invariant_activation, (normal(tokens, width), "gelu_tanh")),
        "rotary": (ops.invariant_rotary, (position, inv_freq, 1.1, dtype)),
        "linear": (ops.invariant_linear, (normal(tokens, k), codes, scale, bias)),
        "attention": (
            ops.invariant_attention,
            (*(x.to(dtype) for x in attention), mask, d**-0.5, rng.random() < 0.5),
        ),
    }


def moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def check_ops(seconds: float, device: str) -> None:
    rng, start = random.Random(0), time.perf_counter()
    equal: dict[str, list[bool]] = {}
    worst: dict[str, str] = {}
    while time.perf_counter() - start < seconds:
        for name, (op, args) in op_calls(rng).items():
            schema = getattr(torch.ops.lowbit, op.__name__.split(".")[-1])
            own, other = op.reference(*args), schema(*(moved(a, device) for a in args))
            pairs = (
                zip((own,), (other,), strict=True)
                if isinstance(own, Tensor)
                else zip(own, other, strict=True)
            )
            same = all(torch.equal(a, b.cpu()) for a, b in pairs)
            equal.setdefault(name, []).append(same)
            if not same and name not in worst:
                shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
                a, b = (own, other.cpu()) if isinstance(own, Tensor) else (own[0], other[0].cpu())
                off = (a != b).float().mean().item()
                worst[name] = (
                    f"  first: {shapes} {args[0].dtype}, {off:.2%} of elements, max {(a - b).abs().max().item():.3g}"
                )
    for name, found in equal.items():
        print(
            f"op {name:10} {sum(found):4} of {len(found)} equal on {device} and cpu{worst.get(name, '')}"
        )


# ---- pairs -----------------------------------------------------------------------------------------------------------


def small_model(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 503,
        "hidden_size": 256,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    made: Any = kinds[kind]
    model = made[1](made[0](**shape)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.ndim > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.2
            )
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


def check_pairs(names: list[str], count: int, devices: list[str]) -> None:
    rng = random.Random(str(names))
    ordinary: list[bool] = []
    equal: dict[str, list[bool]] = {}
    for name in names:
        plain = small_model(name.split("-")[0], MODELS[name])
        models = {}
        for device in devices:
            models[device] = copy.deepcopy(plain).to(device)
            invariant_(models[device])
        plain = plain.to(devices[-1])
        pool = [torch.randint(0, 503, (rng.randint(4, 180),)) for _ in range(16)]
        alone = [logits_of(models["cpu"], [s], 0, True, []) for s in pool]
        plain_alone = [logits_of(plain, [s], 0, True, []) for s in pool]
        for at in range(-(-count // len(names))):
            own = rng.randrange(len(pool))
            others = [pool[rng.randrange(len(pool))] for _ in range(rng.choice((0, 1, 3, 7)))]
            padding, is_left = rng.choice((0, 0, 1, 13, 40)), rng.random() < 0.5
            width = max(len(s) for s in (pool[own], *others)) + padding
            cuts = sorted(rng.sample(range(1, width), min(rng.choice((0, 1, 2, 4)), width - 1)))
            device = devices[-1] if at % 8 else devices[0]
            batch = [pool[own], *others]
            got = logits_of(models[device], batch, padding, is_left, cuts)
            equal.setdefault(device, []).append(torch.equal(got, alone[own]))
            if at % 10 == 0:
                got = logits_of(plain, batch, padding, is_left, cuts)
                ordinary.append(torch.equal(got, plain_alone[own]))
    for device, found in equal.items():
        same = f"{sum(found)} of {len(found)} torch.equal"
        print(f"{' '.join(names)}, pairs with {device}: {same} to the sequence alone on a CPU")
    same = f"{sum(ordinary)} of {len(ordinary)} torch.equal"
    print(f"{' '.join(names)}, the ordinary int8 model on {devices[-1]}: {same} to itself alone")


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
                try:
                    found.append(milliseconds(wrap(step_of(one, batch, context, tokens)), 20))
                except Exception as error:
                    found.append(float("nan"))
                    print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
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
    parts()


def parts() -> None:
    """Where the time goes: attention and linears alone, in a CUDA graph."""
    print("\nalone, in a CUDA graph: ms")
    for batch, tokens, keys in (
        (1, 2048, 2048),
        (1, 1, 512),
        (1, 1, 2048),
        (16, 1, 512),
        (16, 1, 2048),
    ):
        attention_alone(batch, tokens, keys)
    for m in (1, 16, 2048):
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)):
            linear_alone(m, n, k)


def attention_alone(batch: int, tokens: int, keys: int) -> None:
    q = torch.randn(batch, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, 8, keys, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    causal = tokens > 1

    def plain() -> Tensor:
        sdpa = nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=causal, enable_gqa=True)

    def exact() -> Tensor:
        return lowbit.inference.invariant_attention(q, k, v, is_causal=causal)

    a, b = (milliseconds(graphed(call), 50) for call in (plain, exact))
    error = ((exact().float() - plain().float()).norm() / plain().float().norm()).item()
    print(
        f"attention {batch}x{tokens} over {keys:5}: sdpa {a:.4f}, invariant {b:.4f}, differs by {error:.4f}"
    )


def linear_alone(m: int, n: int, k: int) -> None:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
    copies = [codes.clone() for _ in range(4)]  # beyond the L2 cache
    scale = torch.rand(n, 1, device="cuda").bfloat16() * 0.01

    def timed(op: Callable[..., Tensor]) -> float:
        return milliseconds(graphed(lambda: [op(x, own, scale) for own in copies]), 20) / 4

    ops: Any = (kernels.dynamic_linear.dynamic_linear, kernels.invariant_linear.invariant_linear)
    a, b = map(timed, ops)
    print(
        f"linear {m}x{n}x{k}: dynamic_linear {a:.4f}, invariant {b:.4f} ({b / a - 1:+.1%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--ops", type=float, default=60, help="seconds for random calls of each op")
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="of the pairs"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--no-cost", action="store_true")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if args.ops:
        check_ops(args.ops, "cuda" if has_gpu else "cpu")
    if args.pairs:
        check_pairs(args.models, args.pairs, ["cpu", "cuda"] if has_gpu else ["cpu"])
    if has_gpu and not args.no_cost:
        cost(args.layers)


if __name__ == "__main__":
    main()
