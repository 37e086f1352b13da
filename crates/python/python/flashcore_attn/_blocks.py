"""Attention and its gradient in plain torch operations, for what the engine does not compute.

That is float64, and on a GPU the gradients of float32 and of head dims over 256.

The gradient computes scores again from q and k, a block of queries at a time, so memory stays bounded however long the
sequences are; the saved lse makes the second softmax a single exp. Sums are float32, and float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: The most scores that are held at once.
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


def scale_of(scale: float | None, head_dim: int) -> float:
    """The default scale. With a head_dim of 0 all scores are 0 whatever it is."""
    return float(max(head_dim, 1)) ** -0.5 if scale is None else scale


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    visible: Visible,
    scale: float | None,
    softcap: float,
) -> None:
    """Attention into `o` and `lse`. A query that sees nothing gives zeros and -inf."""
    group = _Group(q, k)
    if lse.numel() == 0:
        return
    keys, values = group.wide(k), group.wide(v)
    for rows in group.blocks():
        scores, _ = group.scores(q[:, :, rows], keys, scale, softcap)
        seen = visible(rows.start, rows.stop)
        if seen is not None:
            scores = torch.where(_per_group(seen), scores, -torch.inf)
        part = torch.logsumexp(scores, -1, keepdim=True)
        # Where no key is seen, every weight is exp(-inf - 0).
        weights = torch.exp(scores - torch.where(part == -torch.inf, 0.0, part))
        o[:, :, rows] = (weights @ values).flatten(1, 2).to(o.dtype)
        lse[:, :, rows] = part.flatten(1, 2).squeeze(-1)


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
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    group = _Group(q, k)
    if lse.numel() == 0 or k.size(2) == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    factor = scale_of(scale, q.size(3))
    keys, values = group.wide(k), group.wide(v)
    dk_sum, dv_sum = torch.zeros_like(keys), torch.zeros_like(values)
    delta = (grad_o.to(group.dtype) * o.to(group.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    for rows in group.blocks():
        grads = group.split(grad_o[:, :, rows])
        scores, bent = group.scores(q[:, :, rows], keys, scale, softcap)
        p = torch.exp(scores - group.split(lse[:, :, rows, None]))
        seen = visible(rows.start, rows.stop)
        if seen is not None:
            # A query that sees nothing has lse = -inf, and exp of anything above it is not zero.
            p = torch.where(_per_group(seen), p, 0.0)
        dv_sum += (p.mT @ grads).sum(2, keepdim=True)
        ds = p * (grads @ values.mT - group.split(delta[:, :, rows, None]))
        if bent is not None:
            ds = ds * (1 - bent * bent)
        dq[:, :, rows] = (ds @ keys * factor).flatten(1, 2).to(q.dtype)
        dk_sum += (ds.mT @ group.split(q[:, :, rows]) * factor).sum(2, keepdim=True)
    return dq, dk.copy_(dk_sum.squeeze(2)), dv.copy_(dv_sum.squeeze(2))


class _Group:
    """Query heads grouped by kv head: (batch, kv heads, query heads per kv head, length, head_dim)."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.heads_kv, self.len_q = k.size(1), q.size(2)
        self.each = q.size(1) // max(k.size(1), 1)
        self.row = q.size(0) * q.size(1) * k.size(2)
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def split(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).view(x.size(0), self.heads_kv, self.each, *x.shape[2:])

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).unsqueeze(2)

    def blocks(self) -> Iterator[slice]:
        """Blocks of queries, as many at once as may be held."""
        step = max(1, _BLOCK_ELEMENTS // max(self.row, 1))
        for first in range(0, self.len_q, step):
            yield slice(first, min(first + step, self.len_q))

    def scores(self, q: Tensor, keys: Tensor, scale: float | None, softcap: float) -> tuple[Tensor, Tensor | None]:
        """Scores of queries, and their tanh if there is a softcap."""
        scores = self.split(q) @ keys.mT * scale_of(scale, q.size(3))
        if not softcap:
            return scores, None
        bent = torch.tanh(scores / softcap)
        return softcap * bent, bent


def _per_group(seen: Tensor) -> Tensor:
    """(batch, 1, queries, keys) as (batch, 1, 1, queries, keys)."""
    return seen.unsqueeze(2) if seen.dim() == 4 else seen
