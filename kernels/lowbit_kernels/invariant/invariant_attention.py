"""Attention with the same bits on every device, for any batch, padding, chunk of the prompt and split of the keys.

    q, k, v       int8 codes of a token and head, with scales t_q, t_k, t_v, as `quantize_rowcol` rounds rows
    a[t, s]       = (float(q[t] · k[s]) · t_k[s]) · (t_q[t] · (scale · log2 e))         exact int32 sums
    m[t]          = max_s a[t, s];   E[t] = ceil(max_s (a[t, s] + ceil2(t_v[s])) - m[t])
    u[t, s]       = 2^max(a[t, s] - m[t], -40)
    d[t]          = sum_s round(2^22 · u[t, s])                                          exact in int64
    p[t, s]       = min(round((u[t, s] · t_v[s]) · (2^-E[t] · 127 · 128)), 127 · 128)
    y[t]          = float(128 · sum_s (p >> 7) v[s]  +  sum_s (p & 127) v[s]) · f[t]     exact int32 sums
    f[t]          = 2^(22 + E[t]) / (float(d[t]) · 127 · 128)

Sums over s run over the tokens that t sees. ceil2 is the exponent of the next power of two above. A maximum and a sum
of integers are the same in any order, so nothing else of a row depends on which keys share a tile or a launch, and
tokens that are not seen leave no trace. All else is float32, each operation rounded on its own.

    query   float [B, H, T, D], H a multiple of K
    key     float [B, K, S, D], D <= 1024
    value   float [B, K, S, E], S <= 131,071
    mask    bool [1 or B, 1 or H, T, S], True where a query sees a key; None: it sees all
    causal  query t sees key s only where s <= t + S - T
    y       query's dtype [B, T, H, E]; 0 where a query sees nothing, NaN where what it sees holds a NaN or an infinity

The weights p have 14 bits below the largest contribution of a row, and d has 22: a token whose weight times its
largest value is below 2^-15 of the largest one adds to d alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit_kernels.invariant import invariant_attention_triton
from lowbit_kernels.invariant.arithmetic import exp2, in_float32, rounded
from lowbit_kernels.quantize import quantize_rowcol
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on

MOST_KEYS = (2**31 - 1) // 2**14
MOST_WIDTH = 1024
LEAST_SCALE = 2.0**-100
"""Scales of values below it count as this one, so that no product of a weight and a scale is denormal."""
LARGEST = 127.0 * 128.0


@op(
    "empty(query.dtype, B, T, H, E)",
    flops="2 * B * H * T * S * (D + E)",
    query="float [B, H, T, D]",
    key="float [B, K, S, D]",
    value="float [B, K, S, E]",
    mask="bool [...]",
    rules={
        "H % K == 0": "heads must be a multiple of the key/value heads, got {H} and {K}",
        "0 < D <= MOST_WIDTH and 0 < E <= MOST_WIDTH": (
            "heads have 1 to {MOST_WIDTH} channels, got {D} and {E}"
        ),
        "S <= MOST_KEYS": "int32 sums hold {MOST_KEYS} keys, got {S}; cut the context",
        "mask is None or (mask.dim() == 4 and mask.shape[0] in (1, B) and mask.shape[1] in (1, H) "
        "and tuple(mask.shape[2:]) == (T, S))": (
            "mask must be [1 or {B}, 1 or {H}, {T}, {S}], got {tuple(mask.shape)}"
        ),
    },
)
def invariant_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention [B, T, H, E] of query [B, H, T, D]; see the module's docstring."""
    (batch, heads, tokens, _), (_, kv_heads, keys, width) = query.shape, value.shape
    shape = batch, kv_heads, heads // kv_heads, tokens
    if query.numel() == 0 or keys == 0:
        return query.new_zeros((batch, tokens, heads, width))
    q, t_q = (part.view(*shape, -1) for part in _coded(query))
    k, t_k = (part.unsqueeze(2) for part in _coded(key))
    v, t_v = (part.unsqueeze(2) for part in _coded(value))
    sees = _seen(query, keys, mask, causal).view(-1, kv_heads, shape[2], tokens, keys)
    a = ((q @ k.mT) * t_k.mT) * (t_q * in_float32(scale * math.log2(math.e)))
    a = torch.where(a.isnan(), 0.0, a)
    is_bad = ((t_k + t_v).isfinite().logical_not_().mT | (a == torch.inf)) & sees
    is_bad = is_bad.any(-1, keepdim=True) | ~t_q.isfinite()
    t_v = t_v.nan_to_num(1.0, 1.0).clamp(min=LEAST_SCALE)
    power = ((t_v.view(torch.int32) >> 23) - 126).float()  # of two, above
    a = a.masked_fill(~sees, -torch.inf)
    m = a.amax(-1, keepdim=True)
    top = torch.where(m.isfinite(), (a + power.mT).amax(-1, keepdim=True) - m, 0.0).clamp(-100, 100)
    m = torch.where(m.isfinite(), m, 0.0)
    e = rounded(top)
    e = e + (e.float() < top)
    u = exp2((a - m).clamp(min=-40.0)).masked_fill(~sees, 0.0)
    d = rounded(u * 2.0**22).sum(-1, keepdim=True, dtype=torch.int64)
    shrink = ((127 - e) << 23).view(torch.float32) * LARGEST
    p = rounded(((u * t_v.mT) * shrink).clamp(max=LARGEST))
    high, low = (((part.double() @ v.double()).float()) for part in (p >> 7, p & 127))
    f = ((127 + e) << 23).view(torch.float32) * 2.0**22 / (d.double().float() * LARGEST)
    y = torch.where(d == 0, 0.0, (high * 128.0 + low) * f)
    y = torch.where(is_bad & sees.any(-1, keepdim=True), torch.nan, y)
    return y.reshape(batch, heads, tokens, width).transpose(1, 2).to(query.dtype).contiguous()


reference = invariant_attention.reference


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, H, S, D] as float32 codes of this shape, and their scales [B, H, S, 1]."""
    rows = x.reshape(-1, x.shape[-1])
    codes, scale, _, _ = quantize_rowcol.reference(rows, "int8", True, False, False)
    return codes[:, : x.shape[-1]].float().view(x.shape), scale.view(*x.shape[:-1], 1)


def _seen(query: Tensor, keys: int, mask: Tensor | None, causal: bool) -> Tensor:
    """The keys that each query sees: bool [B, H, T, S]."""
    batch, heads, tokens, _ = query.shape
    sees = torch.ones((tokens, keys), dtype=torch.bool, device=query.device)
    sees = sees.tril(keys - tokens) if causal else sees
    sees = sees if mask is None else sees & mask
    return sees.expand(batch, heads, tokens, keys)


@invariant_attention.kernel
def _launch(query, key, value, mask, scale, causal) -> Tensor | None:
    """The Triton kernels where they run, else the reference."""
    if not runs_on(query.device) or query.numel() == 0 or 0 in key.shape or 0 in value.shape:
        return None
    ran("invariant_attention", "triton")
    return invariant_attention_triton.attend(query, key, value, mask, scale, causal)
