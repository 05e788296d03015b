"""What pruning costs in nats: 2:4 in the quick start's tiny model, or experts of a small mixture.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.pruning runs/recovery/seed0 [--schemes int8,int4,float8] [--tokens 60000]
    python -m benchmarks.pruning --experts 0,1,2

With a folder: linears of the blocks are pruned and rounded; the tied embedding is rounded by the same scheme, and stays
dense. Calibrated by 16 batches of 8 x 256 tokens.

With `--experts` and seeds: a Qwen3-MoE of transformers with three layers of 16 experts, of which a byte takes two,
trains on the bytes of `benchmarks.small_models`. Then 12 or 8 experts of each layer are kept, by 16 batches of 16 x 64
bytes. The table has the held-out loss a byte above that of all experts in high precision; int4 is by GPTQ.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.qat_start import interval
from benchmarks.small_models import BYTES, batches, docstrings
from lowbit.inference import GPTQ, LearnedRounding, Prune24, PruneExperts, Search, Step
from lowbit.inference.calibration.batches import usable_batches
from recipes.calibration import batches_of, open_run
from recipes.phases import high_precision_model
from recipes.training import window_losses

SCHEMES = {
    "int8": lowbit.Int8WeightOnly(),
    "int4": lowbit.IntxWeightOnly(4, 32, "symmetric"),
    "float8": lowbit.Float8WeightOnly(),
    "int3": lowbit.IntxWeightOnly(3, 32, "symmetric"),
}
PRUNED = {name: Prune24(name) for name in ("magnitude", "wanda", "sparsegpt")}
STEPS: dict[str, list[Step]] = {
    "dense, GPTQ()": [GPTQ()],
    **{f"{name}, Search()": [step, Search()] for name, step in PRUNED.items()},
    **{f"{name}, GPTQ()": [step, GPTQ()] for name, step in PRUNED.items()},
    "sparsegpt, GPTQ(), learned over the model": [
        *(PRUNED["sparsegpt"], GPTQ()),
        LearnedRounding(over="model", reach=1.0),
    ],
}
EXPERTS, STEPS_OF_MIXTURE, WINDOWS = 16, 600, (16, 64)
"""Experts of a layer; steps of training; windows of a batch, and the bytes of one."""


@dataclass(frozen=True)
class AtRandom(PruneExperts):
    """Keeps experts that `torch.rand` chooses."""

    def _scores(self, total: Tensor, tokens: Tensor) -> Tensor:
        return torch.rand(len(tokens))


KEPT: dict[str, Callable[[float], PruneExperts]] = {
    "the largest sums": PruneExperts,
    "REAP": lambda keep: PruneExperts(keep, "reap"),
    "the most frequent": lambda keep: PruneExperts(keep, "frequency"),
    "at random": AtRandom,
}


def trained_mixture(text: Tensor, seed: int) -> nn.Module:
    """In high precision, at a rate that falls linearly from 2e-3 to zero."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(
        vocab_size=BYTES,
        hidden_size=64,
        num_hidden_layers=3,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        **heads,
        **experts,
    )
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    inputs, _ = batches(text, "mixture of experts", STEPS_OF_MIXTURE, *WINDOWS, seed)
    for i, ids in enumerate(inputs):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - i / STEPS_OF_MIXTURE)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.output_router_logits = False  # the loss without that of the router's balance
    return model.eval()


def losses_of_mixture(text: Tensor, seed: int) -> dict[str, float]:
    """Row → nats above the trained model's, of one seed."""
    plain = trained_mixture(text, seed)
    heldout, _ = batches(text, "mixture of experts", 32, *WINDOWS, 10_000, heldout=True)
    seen = [*batches(text, "mixture of experts", 16, *WINDOWS, 20_000 + seed)[0]]

    @torch.no_grad()
    def loss(model: nn.Module) -> float:
        return float(torch.stack([model(input_ids=x, labels=x).loss for x in heldout]).mean())

    def rounded(model: nn.Module) -> float:
        lowbit.calibrate(model, SCHEMES["int4"], seen, steps=[GPTQ()], held_out=[])
        return loss(model)

    high = loss(plain)
    found = {"": high, "all, int4": rounded(copy.deepcopy(plain)) - high}
    for share in (0.75, 0.5):
        for name, step in KEPT.items():
            model, row = copy.deepcopy(plain), f"{EXPERTS * share:.0f}, {name}"
            torch.manual_seed(seed)
            step(share).fold(model, [], usable_batches(model, seen))
            found[row] = loss(model) - high
            found[f"{row}, int4"] = rounded(model) - high
    print(f"seed {seed}: {found}", flush=True)
    return found


def experts_table(text: Tensor, seeds: list[int]) -> str:
    found = [losses_of_mixture(text, seed) for seed in seeds]
    lines = [f"high precision: {interval([f[''] for f in found])} nats"]
    lines += ["| kept of 16 | high precision | int4 |", "|---|--:|--:|"]
    rows = ["all", *(r for r in found[0] if r and not r.endswith("int4"))]
    for row in rows:
        cells = [
            interval([1e3 * f[key] for f in found]) if key in found[0] else "0"
            for key in (row, f"{row}, int4")
        ]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.pruning", description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, nargs="?", help="the run folder of a seed of recipes.recovery"
    )
    parser.add_argument("--experts", default="", metavar="SEEDS", help="prune experts instead")
    parser.add_argument("--schemes", default="int8,int4,float8", help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--steps", default=";".join(STEPS), help="names, with semicolons")
    parser.add_argument("--tokens", type=int, default=60_000, help="held out (%(default)s)")
    options = parser.parse_args(arguments)
    if (options.folder is None) == (not options.experts):
        parser.error("give a folder, or --experts and seeds")
    if options.experts:
        seeds = [int(s) for s in options.experts.split(",")]
        print(experts_table(docstrings(), seeds))
        return 0
    run = open_run(options.folder)
    windows = run.heldout_windows(options.tokens)

    def loss(scheme: lowbit.Scheme | None, steps: list[Step]) -> float:
        model = high_precision_model(run)
        if scheme is not None:
            lowbit.calibrate(model, scheme, batches_of(run, 0, 16), steps=steps, held_out=[])
        return float(window_losses(model, windows, run.config.bf16).mean())

    high = loss(None, [])
    print(f"high precision {high:.4f} nats", flush=True)
    for name in options.steps.split(";"):
        for scheme in options.schemes.split(","):
            print(
                f"{scheme:<7} {name:<42} {loss(SCHEMES[scheme], STEPS[name]) - high:+.4f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
