"""Ring attention: sequences that are longer than one device's memory.

Every process of a group holds a part of the sequence. Keys and values go round the ring while each process computes
with those that it has. Partial results are merged by their lse, so the result is exact attention over the whole
sequence. Works on ``torch.distributed`` with NCCL (GPUs) and gloo (CPU), forward and backward.

    local = [shard(x, 2) for x in (q, k, v)]          # or read only your part to begin with
    o = ring_attention(*local, causal=True)           # this process's part of the output
    whole = gather(o, 2)

A causal mask would leave the first processes idle and the last ones with all the work. So the sequence is split in
a zig-zag: of 2n pieces, process i holds pieces i and 2n-1-i, and all have the same work. ``shard`` and ``gather``
split and join in that order. Packed sequences, whose ends are in ``cu_seqlens``, are split one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from . import _arguments
from ._errors import ContractError
from ._flash import check_packed
from ._ops import ops
from ._torch import cast, check, check_gradient, lse_dtype, no_second_derivative

Group = dist.ProcessGroup | None


def shard(x: Tensor, dim: int, group: Group = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """This process's part of a tensor that every process has whole, in the order of the zig-zag.

    With ``cu_seqlens``, the cumulative lengths of packed sequences along `dim`, it is a part of each of them.
    """
    _arguments.tensors(x=x)
    places = _places(_ends(x.size(dim), cu_seqlens, group), dist.get_rank(group), group)
    return x.index_select(dim, places.to(x.device))


def gather(x: Tensor, dim: int, group: Group = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """The whole tensor, of which every process has the part that ``shard`` gave it."""
    size = dist.get_world_size(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    ends = _ends(x.size(dim) * size, cu_seqlens, group)
    places = torch.cat([_places(ends, rank, group) for rank in range(size)])
    return torch.cat(parts, dim).index_select(dim, places.argsort().to(x.device))


def _ends(length: int, cu_seqlens: Tensor | None, group: Group) -> list[int]:
    """Where sequences begin and end in the whole, which all processes can share alike."""
    share = 2 * dist.get_world_size(group)
    ends: list[int] = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    for start, end in itertools.pairwise(ends):
        if end < start or (end - start) % share != 0:
            raise ContractError(
                f"a sequence has length {end - start}, but {share // 2} processes can share multiples of {share}. "
                "Pad it"
            )
    if ends[0] != 0 or ends[-1] != length:
        raise ContractError(f"cu_seqlens goes from {ends[0]} to {ends[-1]}, but there are {length} tokens")
    return ends


def _places(ends: list[int], rank: int, group: Group) -> Tensor:
    """The tokens of the whole that a process holds."""
    count = 2 * dist.get_world_size(group)
    pieces = [torch.arange(start, end).chunk(count) for start, end in itertools.pairwise(ends)]
    return torch.cat([piece for of in pieces for piece in (of[rank], of[count - 1 - rank])] or [torch.arange(0)])


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, causal: bool = ..., scale: float | None = ...,
    softcap: float = ..., layout: str = ..., cu_seqlens: Tensor | None = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, causal: bool = ..., scale: float | None = ...,
    softcap: float = ..., layout: str = ..., cu_seqlens: Tensor | None = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = ..., *, causal: bool = ..., scale: float | None = ...,
    softcap: float = ..., layout: str = ..., cu_seqlens: Tensor | None = ..., return_lse: bool,
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
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence of which this process holds a part: this process's part of the output.

    Parts have the same length in all processes. Without ``causal`` any order of the sequence works; with it the parts
    are those of ``shard``. Gradients go round the same ring.

    With ``cu_seqlens`` there are packed sequences, (token, heads, head_dim), of each of which ``shard`` has given this
    process a part; the cumulative lengths are those of the whole sequences, and the same in every process. `layout`
    says nothing then, and lse is (heads, token).
    """
    if cu_seqlens is not None:
        _arguments.tensors(q=q, k=k, v=v, cu_seqlens=cu_seqlens)
        check_packed(q, k, v, cu_seqlens, cu_seqlens)
        if k.size(0) != q.size(0):
            raise ContractError(
                f"this process has {q.size(0)} queries and {k.size(0)} keys; packed, it has as many of both"
            )
        size = dist.get_world_size(group)
        part = _Part.of_packed(causal, [end // size for end in _ends(q.size(0) * size, cu_seqlens, group)], q.device)
        tokens: tuple[int, int] | None = (0, 1)
    else:
        check(q, k, v, layout)
        length, keys = (x.size(2 if layout == "bhsd" else 1) for x in (q, k))
        if causal and (length != keys or length % 2 != 0):
            raise ContractError(
                f"this process has {length} queries and {keys} keys; causal, it holds as many of both, an even "
                "number: two pieces of the zig-zag"
            )
        part = _Part(causal, None, slice(0, length // 2), slice(length // 2, None))
        tokens = None if layout == "bhsd" else (1, 2)
    check_gradient(q, k, v)
    scale, softcap = _arguments.options(scale, softcap)
    q, k, v = cast(q, k, v)
    _arguments.together(q=q, k=k, v=v)
    # Tokens are the last dimension but one in the ring, packed or not.
    if tokens:
        q, k, v = (x.transpose(*tokens) for x in (q, k, v))
    o, lse = _Ring.apply(q, k, v, part, group, scale, softcap)
    o = o.transpose(*tokens) if tokens else o
    return (o, lse) if return_lse else o


#: Some of the tokens.
Some = slice | Tensor


class _Part(NamedTuple):
    """How the tokens of a process lie: as (batch, heads, length, head_dim), or packed, as (heads, token, head_dim)."""

    causal: bool
    #: Where packed sequences begin and end.
    ends: Tensor | None
    #: The tokens of the first piece of the zig-zag, and of the second.
    first: Some
    second: Some

    @staticmethod
    def of_packed(causal: bool, ends: list[int], device: torch.device) -> _Part:
        """Packed sequences, each in two pieces."""
        halves = [torch.arange(start, end).chunk(2) for start, end in itertools.pairwise(ends)]
        first, second = (torch.cat([pieces[i] for pieces in halves] or [torch.arange(0)]).to(device) for i in range(2))
        # The host reads the ends.
        return _Part(causal, torch.tensor(ends), first, second)

    def meeting(self, rank: int, owner: int) -> tuple[Some, Some, str]:
        """Which queries meet which keys of another process, and under which mask."""
        whole = slice(None)
        if not self.causal or owner == rank:
            return whole, whole, "causal" if self.causal else "none"
        # All queries see the first piece of an earlier process; their second piece sees all keys of a later one.
        return (whole, self.first, "none") if owner < rank else (self.second, whole, "none")

    def attend(self, tensors: list[Tensor], rows: Some, cols: Some, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Attention and lse of some queries over some keys."""
        if self.ends is None:
            found: tuple[Tensor, Tensor] = ops.attention(*tensors, None, None, *options)
            return found
        packed = (x.transpose(0, 1) for x in tensors)
        o, lse = ops.attention_varlen(*packed, _of(self.ends, rows), _of(self.ends, cols), None, None, *options)
        return o.transpose(0, 1), lse

    def gradients(
        self, grad_o: Tensor, grad_lse: Tensor, tensors: list[Tensor], lse: Tensor, rows: Some, cols: Some,
        options: tuple[Any, ...],
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of the same queries and keys, from the output and lse over all keys."""
        if self.ends is None:
            return list(ops.attention_backward(grad_o, grad_lse, *tensors, lse, None, None, *options))
        grad_o, *packed = (x.transpose(0, 1) for x in (grad_o, *tensors))
        ends = _of(self.ends, rows), _of(self.ends, cols)
        found = ops.attention_varlen_backward(grad_o, grad_lse, *packed, lse, *ends, None, None, *options)
        return [x.transpose(0, 1) for x in found]


def _of(ends: Tensor, some: Some) -> Tensor:
    """Where sequences begin and end when there are only some of their tokens: all, or one piece of each."""
    return ends // 2 if isinstance(some, Tensor) else ends


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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: _Part, group: Group, scale: float | None, softcap: float
    ) -> tuple[Tensor, Tensor]:
        rank, sums = dist.get_rank(group), lse_dtype(q)
        o = torch.zeros((*q.shape[:-1], v.size(-1)), dtype=sums, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=sums, device=q.device)
        for owner, (keys, values) in _round([k.contiguous(), v.contiguous()], group):
            rows, cols, mask = part.meeting(rank, owner)
            given = [q[..., rows, :], keys[..., cols, :], values[..., cols, :]]
            _merge(o, lse, rows, *part.attend(given, rows, cols, (mask, None, None, scale, softcap)))
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.part, ctx.group, ctx.options = part, group, (scale, softcap)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # What comes from other processes has no graph, so there is none to differentiate again.
        with torch.no_grad():
            grads = _Ring.gradients(ctx, *grad_outputs)
        grads = _Last.apply(*ctx.saved_tensors[:3], *grad_outputs, *grads) if torch.is_grad_enabled() else grads
        return (*grads, None, None, None, None)

    @staticmethod
    def gradients(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, lse = ctx.saved_tensors
        part, rank, size = ctx.part, dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        zeros = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        dq, *moving = zeros
        pending: list[Any] = []
        for owner, (keys, values) in _round([k.contiguous(), v.contiguous()], ctx.group):
            rows, cols, mask = part.meeting(rank, owner)
            given = [q[..., rows, :], keys[..., cols, :], values[..., cols, :], o[..., rows, :]]
            options = (mask, None, None, *ctx.options)
            of_q, *of_keys = part.gradients(
                grad_o[..., rows, :], grad_lse[..., rows], given, lse[..., rows], rows, cols, options
            )
            dq[..., rows, :] += of_q
            # The sums of these keys have been on their way while this process computed.
            for request in pending:
                request.wait()
            sums = moving
            for total, of in zip(sums, of_keys, strict=True):
                total[..., cols, :] += of
            # They travel with their keys and values, and are back home after the last step.
            if size > 1:
                moving, pending = _pass_on(sums, ctx.group)
        for request in pending:
            request.wait()
        dk, dv = moving
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Last(torch.autograd.Function):
    """Gradients that cannot be differentiated again. What they depend on comes before them."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        return given[-3:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise no_second_derivative()


def _merge(o: Tensor, lse: Tensor, rows: Some, part: Tensor, part_lse: Tensor) -> None:
    """Adds a partial result of some queries to those before it, in place."""
    before = lse[..., rows]
    both = torch.logaddexp(before, part_lse)
    # Where neither has seen a key, both weights are 0.
    weight = torch.where(both == -torch.inf, 0.0, torch.exp(before - both)).unsqueeze(-1)
    part_weight = torch.where(both == -torch.inf, 0.0, torch.exp(part_lse - both)).unsqueeze(-1)
    o[..., rows, :] = o[..., rows, :].mul_(weight).addcmul_(part.to(o.dtype), part_weight)
    lse[..., rows] = both
