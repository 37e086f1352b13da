"""Ring attention: sequences that are longer than one device's memory.

Every process of a group holds a part of the sequence. Keys and values go round the ring while each process computes
with those that it has. Partial results are merged by their lse, so the result is exact attention over the whole
sequence. Works on ``torch.distributed`` with NCCL (GPUs) and gloo (CPU), forward and backward.

    local = [shard(x, 2) for x in (q, k, v)]          # or read only your part to begin with
    o = ring_attention(*local, causal=True)           # this process's part of the output
    whole = gather(o, 2)

A causal mask would leave the first processes idle and the last ones with all the work. So the sequence is split in
a zig-zag: of 2n pieces, process i holds pieces i and 2n-1-i, and all have the same work. ``shard`` and ``gather``
split and join in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from . import _arguments
from ._errors import ContractError
from ._ops import ops
from ._torch import attend, check, check_gradient

Group = dist.ProcessGroup | None


def shard(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This process's part of a tensor that every process has whole, in the order of the zig-zag."""
    _arguments.tensors(x=x)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if x.size(dim) % (2 * size) != 0:
        raise ContractError(
            f"the sequence has length {x.size(dim)}, but {size} processes can share multiples of {2 * size}. Pad it"
        )
    pieces = x.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


def gather(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """The whole tensor, of which every process has the part that ``shard`` gave it."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, causal: bool = ..., scale: float | None = ...,
    softcap: float = ..., layout: str = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, causal: bool = ..., scale: float | None = ...,
    softcap: float = ..., layout: str = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, causal: bool = ..., scale: float | None = ...,
    softcap: float = ..., layout: str = ..., return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence of which this process holds a part: this process's part of the output.

    Parts have the same length in all processes. Without ``causal`` any order of the sequence works; with it the parts
    are those of ``shard``. Gradients go round the same ring.
    """
    check(q, k, v, layout)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if causal and (q.size(2) != k.size(2) or q.size(2) % 2 != 0):
        raise ContractError(
            f"this process has {q.size(2)} queries and {k.size(2)} keys; causal, it holds as many of both, an even "
            "number: two pieces of the zig-zag"
        )
    check_gradient(q, k, v)
    o, lse = _Ring.apply(q, k, v, group, causal, scale, softcap)
    o = o.transpose(1, 2) if layout == "bshd" else o
    return (o, lse) if return_lse else o


def _blocks(rank: int, owner: int, length: int, causal: bool) -> tuple[slice, slice, str]:
    """Which queries meet which keys when the keys are those of another process, and under which mask."""
    whole, half = slice(None), length // 2
    if not causal:
        return whole, whole, "none"
    if owner == rank:
        return whole, whole, "causal"
    # All queries see the first piece of an earlier process; the second piece of queries sees all keys of a later one.
    return (whole, slice(0, half), "none") if owner < rank else (slice(half, None), whole, "none")


def _round(tensors: list[Tensor], group: Group) -> Iterator[tuple[int, list[Tensor]]]:
    """The tensors of every process, this one's first, with the rank of their owner. The next ones are in flight while
    the caller computes."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in range(size):
        pending: list[Any] = []
        incoming = tensors
        if step + 1 < size:
            incoming, pending = _pass_on(tensors, group)
        yield (rank - step) % size, tensors
        for request in pending:
            request.wait()
        tensors = incoming


def _pass_on(tensors: list[Tensor], group: Group) -> tuple[list[Tensor], list[Any]]:
    """Starts sending tensors to the next process and receiving those of the one before."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    after, before = (((rank + step) % size) for step in (1, -1))
    if group is not None:
        after, before = (dist.get_global_rank(group, peer) for peer in (after, before))
    incoming = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, after, group) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, before, group) for x in incoming]
    return incoming, dist.batch_isend_irecv(sends + receives)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, causal: bool, scale: float | None, softcap: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rank = dist.get_rank(group)
        o = q.new_zeros((*q.shape[:3], v.size(3)), dtype=torch.float32)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for owner, (keys, values) in _round([k.contiguous(), v.contiguous()], group):
            rows, cols, mask = _blocks(rank, owner, k.size(2), causal)
            part, part_lse = attend(
                q[:, :, rows], keys[:, :, cols], values[:, :, cols], mask, scale=scale, softcap=softcap, return_lse=True
            )
            _merge(o[:, :, rows], lse[:, :, rows], part, part_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.group, ctx.causal, ctx.options = group, causal, (scale, softcap)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_o, grad_lse = grad_outputs
        q, k, v, o, lse = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
        for owner, (keys, values) in _round([k.contiguous(), v.contiguous()], ctx.group):
            rows, cols, mask = _blocks(rank, owner, k.size(2), ctx.causal)
            some, block = (slice(None), slice(None), rows), (slice(None), slice(None), cols)
            inputs = (q[some], keys[block], values[block], o[some], lse[some])
            parts = ops.attention_backward(
                grad_o[some], grad_lse[some], *inputs, None, None, mask, None, None, *ctx.options
            )  # fmt: skip
            dq[some] += parts[0]
            for total, part in zip(sums, parts[1:], strict=True):
                total[block] += part
            # The sums travel with their keys and values, and are back home after the last step.
            if size > 1:
                sums, pending = _pass_on(sums, ctx.group)
                for request in pending:
                    request.wait()
        return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None, None, None, None


def _merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a partial result to those before it, in place."""
    both = torch.logaddexp(lse, part_lse)
    # Where neither has seen a key, both weights are 0.
    weight = torch.where(both == -torch.inf, 0.0, torch.exp(lse - both))
    part_weight = torch.where(both == -torch.inf, 0.0, torch.exp(part_lse - both))
    o.mul_(weight.unsqueeze(-1)).addcmul_(part.float(), part_weight.unsqueeze(-1))
    lse.copy_(both)
