"""Batches for a calibration without data: tokens that a language model itself draws.

A trained model has seen text, and says what follows it: token t + 1 is a draw from softmax(y_t), where y_t are its
logits at token t (LLM-QAT, arXiv 2305.17888, calibrates by such tokens). One token after another takes a pass a token.
Here all tokens of a sequence are drawn at once, round after round. With exponential random numbers e that stay the same

    x_{t+1} = argmax_v softmax(y_t)_v / e_{t+1, v}

is a draw from softmax(y_t), and a function of the tokens before it. A round computes it for all t from the tokens of
the round before, which at first are drawn evenly (Jacobi's iteration; arXiv 2002.03629 runs it for deterministic
models). After r rounds the first r tokens after the first one are those that drawing one after another gives. The later
ones are draws too, but what comes before them has changed since.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.convert import check_module
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.settings import check_whole
from lowbit.progress import progress
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tracing.batches import call, entry, eval_mode, output_tensor
from lowbit.tracing.block_inputs import without_cache

_SAME = 1e-3
"""The share of the largest logit by which logits may change with a later token, where two units in the last place of
their dtype are not more: float rounding in other kernels."""

_OTHERS = "accepted: a causal language model, which maps ids [B, T] to logits [B, T, V]; calibrate others by batches "
_OTHERS += "of their own"


@torch.no_grad()
def sampled_batches(
    model: nn.Module,
    sequences: int = 128,
    length: int = 512,
    *,
    batch_size: int = 8,
    rounds: int = 16,
    first: int | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Token ids that the language model `model` draws, in place of batches of text.

        lowbit.calibrate(model, scheme, lowbit.inference.sampled_batches(model))

    It takes `rounds` forward passes of all sequences. The logits of one batch are in memory, and float32 copies of
    those of one sequence.

    Args:
        model: in high precision. It maps ids [B, T] to logits [B, T, V] of the next token, as a tensor or as `logits`.
        sequences: how many are drawn.
        length: T, tokens of each, the first one included.
        batch_size: B, sequences of a batch; the last batch may have fewer.
        rounds: passes, as the module describes. At most `length` - 1 are made, after which more change nothing.
        first: the id with which sequences begin. None: `model.config.bos_token_id` if there is one, else the first
            token is drawn evenly.
        seed: of all draws. The same seed gives the same tokens on the same device.

    Returns:
        int64 [B, T] each, on the device of the model's first parameter.

    Raises:
        TypeError: `model` is not a module.
        ValueError: numbers that are not whole or too small; a `first` that is not a token; a `length` beyond
            `model.config.max_position_embeddings`; a model that does not take ids alone or gives something else than
            logits, or whose logits depend on later tokens.
    """
    check_module(model)
    sequences = check_whole("sequences", sequences)
    batch_size, rounds = check_whole("batch_size", batch_size), check_whole("rounds", rounds)
    length = check_whole("length", length, least=2)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and 2 <= longest < length:
        raise ValueError(f"length is {length}; {type(model).__name__} takes 2 to {longest} tokens")
    seed = check_whole("seed", seed, least=0)
    rounds = min(rounds, length - 1)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    own = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (sequences,), generator=own).tolist()
    found = []
    with eval_mode(model), without_cache(model):
        vocabulary = _vocabulary(model, device)
        ids = torch.randint(vocabulary, (sequences, length), generator=own)
        first = _first(model, vocabulary, first)
        if first is not None:
            ids[:, 0] = first
        batches = ids.split(batch_size)
        with progress("sampling", len(batches) * rounds, unit="passes") as advance:
            for number, batch in enumerate(batches):
                tokens = batch.to(device)
                mine = seeds[number * batch_size :]
                for _ in range(rounds):
                    logits = output_tensor(call(model, tokens))
                    drawn = [_drawn(y[:-1], s) for y, s in zip(logits, mine, strict=False)]
                    tokens = torch.cat([tokens[:, :1], torch.stack(drawn)], 1)
                    advance(1)
                found.append(tokens)
    return found


def _drawn(logits: Tensor, seed: int) -> Tensor:
    """A draw for each row of logits [T, V], with the numbers that belong to this seed: int64 [T]."""
    shares = logits.float().softmax(-1)
    generator = torch.Generator(shares.device).manual_seed(seed)
    # A number may be 0 on a GPU, and 0 / 0 is NaN, which argmax would take.
    waits = torch.empty_like(shares).exponential_(generator=generator).clamp_(min=1e-30)
    return shares.div_(waits).argmax(-1)


def _vocabulary(model: nn.Module, device: torch.device) -> int:
    """How many tokens the model knows. Raises ValueError for a model that does not predict the next one."""
    name = type(model).__name__
    pairs = torch.tensor([[0, 0], [0, 1]], device=device)
    try:
        output = call(model, pairs)
        logits = output_tensor(output)
    except Exception as error:
        raise ValueError(f"{name} gives no logits for ids alone ({error}); {_OTHERS}") from error
    if entry(output, "logits") is None and entry(output, "last_hidden_state") is not None:
        raise ValueError(f"{name} gives hidden states, for it has no output head; {_OTHERS}")
    if logits.ndim != 3 or logits.shape[:2] != pairs.shape or not logits.is_floating_point():
        raise ValueError(
            f"{name} gives {logits.dtype} of shape {tuple(logits.shape)} for ids of shape {tuple(pairs.shape)}; "
            f"{_OTHERS}"
        )
    one, other = logits[:, 0].float()
    if not bool(logits.isfinite().all()):
        plain = {n: t for n, t in model.named_parameters() if not isinstance(t, LowbitTensor)}
        bad = [n for n, t in plain.items() if count_nonfinite(t.detach())]
        where = (
            f"of which there are some in {', '.join(bad[:3])}"
            if bad
            else "and its weights have none"
        )
        raise ValueError(
            f"{name} gives logits with NaN or infinite values, {where}; load or repair its weights first"
        )
    same = max(_SAME, 2 * torch.finfo(logits.dtype).eps)
    if float((one - other).abs().max()) > same * float(one.abs().max()):
        raise ValueError(
            f"the logits of {name} depend on later tokens, so it does not predict the next one; {_OTHERS}"
        )
    return int(logits.shape[-1])


def _first(model: nn.Module, vocabulary: int, first: int | None) -> int | None:
    if first is not None:
        return check_whole("first", first, least=0, most=vocabulary - 1)
    found = getattr(getattr(model, "config", None), "bos_token_id", None)
    return found if isinstance(found, int) and 0 <= found < vocabulary else None
