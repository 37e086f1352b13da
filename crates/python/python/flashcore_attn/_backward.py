"""The gradient of attention in plain torch operations.

Scores are computed again from q and k, a block of queries at a time, so memory stays bounded however long the
sequences are. Everything is in float32; the saved lse makes the second softmax a single exp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Scores that are held at once.
_BLOCK_ELEMENTS = 1 << 24

#: Which keys the queries from `first` to `end` see, broadcastable to (batch, heads, queries, keys); None is all.
Visible = Callable[[int, int], Tensor | None]


def visible_of(
    q: Tensor,
    k: Tensor,
    key_starts: Tensor | None,
    key_ends: Tensor | None,
    mask: str,
    left: int | None,
    right: int | None,
) -> Visible:
    """What the masks of the kernels let a query see."""
    batch, len_q, len_k, device = q.size(0), q.size(2), k.size(2), q.device
    if mask == "none" and key_starts is None and key_ends is None:
        return lambda first, end: None

    def column(lengths: Tensor | None, default: int) -> Tensor:
        if lengths is None:
            return torch.full((1, 1, 1, 1), default, device=device)
        return lengths.to(device=device, dtype=torch.int64).view(batch, 1, 1, 1)

    starts, ends = column(key_starts, 0), column(key_ends, len_k)
    keys = torch.arange(len_k, device=device)
    inside = (keys >= starts) & (keys < ends)
    if mask in ("causal", "causal-top-left"):
        left, right = None, 0

    def visible(first: int, end: int) -> Tensor:
        rows = torch.arange(first, end, device=device).view(-1, 1)
        place = rows + (starts if mask == "causal-top-left" else ends - len_q)
        seen = inside
        if left is not None:
            seen = seen & (keys >= place - left)
        if right is not None:
            seen = seen & (keys <= place + right)
        return seen

    return visible if mask != "none" else lambda first, end: inside


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    visible: Visible,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    batch, heads, len_q, head_dim = q.shape
    heads_kv, len_k = k.size(1), k.size(2)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // heads_kv

    def grouped(x: Tensor) -> Tensor:
        return x.float().unflatten(1, (heads_kv, group))

    keys, values = k.float().unsqueeze(2), v.float().unsqueeze(2)
    dk_sum, dv_sum = torch.zeros_like(keys), torch.zeros_like(values)
    delta = (grad_o.float() * o.float()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    step = max(1, _BLOCK_ELEMENTS // (batch * heads * len_k))
    for first in range(0, len_q, step):
        rows = slice(first, min(first + step, len_q))
        queries, grads = grouped(q[:, :, rows]), grouped(grad_o[:, :, rows])
        scores = queries @ keys.mT * scale
        if softcap:
            bent = torch.tanh(scores / softcap)
            scores = softcap * bent
        p = torch.exp(scores - grouped(lse[:, :, rows, None]))
        seen = visible(rows.start, rows.stop)
        if seen is not None:
            # A query that sees nothing has lse = -inf, and exp of anything above it is not zero.
            p = torch.where(_per_group(seen), p, 0.0)
        dv_sum += (p.mT @ grads).sum(2, keepdim=True)
        ds = p * (grads @ values.mT - grouped(delta[:, :, rows, None]))
        if softcap:
            ds = ds * (1 - bent * bent)
        dq[:, :, rows] = (ds @ keys * scale).flatten(1, 2).to(q.dtype)
        dk_sum += (ds.mT @ queries * scale).sum(2, keepdim=True)
    return dq, dk.copy_(dk_sum.squeeze(2)), dv.copy_(dv_sum.squeeze(2))


def _per_group(seen: Tensor) -> Tensor:
    """(batch, 1, queries, keys) as (batch, 1, 1, queries, keys)."""
    return seen.unsqueeze(2) if seen.dim() == 4 else seen
