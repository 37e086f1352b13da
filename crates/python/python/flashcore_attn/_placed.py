"""Sequences of a cache: packed queries, and keys in pages or in rows one behind the other.

Where sequences are is said by integers that lie where the tensors do. On a GPU the host does not read them: a call does
not wait, and a captured one reads them again at every replay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _arguments, _native, _prepare
from ._errors import ContractError, UnsupportedError
from ._ops import Pair, define, implement, integers_on, longest, one_call
from ._torch import empty_lse, empty_output

define(
    "attention_placed(Tensor q, Tensor k, Tensor v, Tensor? q_starts, SymInt longest_q, Tensor? k_starts, "
    "Tensor? pages, SymInt longest_k, Tensor? lengths, str mask, int? left, int? right, float? scale, float softcap, "
    "bool checked=False) -> (Tensor, Tensor)"
)


def _placed(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor | None, longest_q: int, k_starts: Tensor | None,
    pages: Tensor | None, longest_k: int, lengths: Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float, checked: bool = False,
) -> Pair:  # fmt: skip
    """o and lse of queries (batch, heads, length, head_dim), or packed ones (1, heads, tokens, head_dim) with their
    starts. Keys are one batch entry each, or packed likewise, or pages (pages, heads, page, head_dim) of a table."""
    o, lse = outputs(q, v, q_starts)
    if q_starts is not None:
        longest_q = longest_q if q.is_cuda else longest(q_starts)
    options = (mask, left, right, scale, softcap)
    if q.dtype != torch.float64:
        places = places_of(q_starts, longest_q, k_starts, pages, longest_k)
        held = lengths if lengths is None or q.is_cuda else lengths.tolist()
        try:
            _prepare.run(q, k, v, o, lse, held, *options, places, checked)
            return o, lse
        except UnsupportedError:
            # No kernel of this GPU takes them where they are.
            if not q.is_cuda:
                raise
    if o.numel() == 0:
        return o, lse
    k, v = (_gathered(x, k_starts, pages, longest_k) for x in (k, v))
    if q_starts is None:
        one_call(q, k, v, o, lse, lengths, *options)
        return o, lse
    # As the last rows of as many as the longest sequence has: masks are aligned with the last query.
    tokens = q.size(2)
    ends = q_starts[1:].to(torch.int64).unsqueeze(1)
    at = ends - longest_q + torch.arange(longest_q, device=q.device)
    at = torch.where(at < q_starts[:-1].unsqueeze(1), tokens, at)
    rows = q[0][:, at.clamp(max=tokens - 1)].transpose(0, 1)
    dense, sums = empty_output(rows, v), empty_lse(rows)
    one_call(rows, k, v, dense, sums, lengths, *options)
    # What was no query goes to a row behind the last.
    for whole, found in ((o, dense), (lse, sums)):
        wider = whole.new_empty((whole.size(1), tokens + 1, *whole.shape[3:]))
        wider[:, :tokens] = whole[0]
        wider[:, at] = found.transpose(0, 1)
        whole[0] = wider[:, :tokens]
    return o, lse


def places_of(
    q_starts: Tensor | None, longest_q: int, k_starts: Tensor | None, pages: Tensor | None, longest_k: int
) -> _native.Places:  # fmt: skip
    """The same as the engine takes it. Rows of a cache begin anywhere, and end where key lengths say."""
    return (
        None if q_starts is None else (q_starts, longest_q),
        None if k_starts is None else (k_starts, longest_k, True),
        None if pages is None else (pages, longest_k),
    )


def outputs(q: Tensor, v: Tensor, q_starts: Tensor | None) -> Pair:
    """Memory for o and lse."""
    o, lse = empty_output(q, v), empty_lse(q)
    if q_starts is not None:
        # Tokens of no sequence see nothing.
        o.zero_()
        lse.fill_(-torch.inf)
    return o, lse


def _placed_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any, **others: Any) -> Pair:
    return empty_output(q, v), empty_lse(q)


def _gathered(x: Tensor, starts: Tensor | None, pages: Tensor | None, most: int) -> Tensor:
    """Keys or values as (batch, heads, length, head_dim)."""
    if pages is not None:
        # Entries that no length reaches may be anything.
        table = pages.to(torch.int64).clamp(0, max(x.size(0) - 1, 0))
        pool = x if x.size(0) > 0 else x.new_zeros((1, *x.shape[1:]))
        return pool[table].transpose(1, 2).flatten(2, 3)[:, :, :most]
    if starts is not None:
        at = starts[:-1].to(torch.int64).unsqueeze(1) + torch.arange(most, device=x.device)
        return x[0][:, at.clamp(max=x.size(2) - 1)].transpose(0, 1)
    return x


implement("attention_placed", _placed, _placed_fake)


def check_halves(k: Tensor, v: Tensor) -> None:
    """Raises unless keys and values of a cache have the same rows."""
    if k.shape[:3] != v.shape[:3]:
        raise ContractError(
            f"v_cache has shape {tuple(v.shape)}, but k_cache {tuple(k.shape)}: only their head_dims may differ"
        )


def check_table(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, batch: int, shape: str, *, codes: bool = False
) -> None:  # fmt: skip
    """Raises unless these can be keys and values in pages of this shape, and their table. The types of ``codes`` of 8
    bits are checked elsewhere."""
    _arguments.tensors(k_cache=k, v_cache=v, block_table=table)
    _arguments.dimensions(shape, k_cache=k, v_cache=v)
    _arguments.dimensions("(batch, pages)", block_table=table)
    if table.dtype != torch.int32 or table.size(0) != batch:
        given = f"{table.dtype} of shape {tuple(table.shape)}"
        raise ContractError(f"block_table is {given}, possible is int32 of shape ({batch}, pages)")
    check_halves(k, v)
    if table.device != k.device:
        raise ContractError(f"block_table lies on {table.device}, but k_cache on {k.device}. Copy it there")
    if not codes:
        _arguments.together(q=q, k_cache=k, v_cache=v)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: tuple[str, int | None, int | None, Any, Any],
    *, q_starts: Tensor | None = None, longest_q: int = 0, k_starts: Tensor | None = None, pages: Tensor | None = None,
    longest_k: int | None = None, checked: bool = False,
) -> Pair:  # fmt: skip
    """o and lse, as the operator has them. ``longest_k`` bounds the keys of a sequence; without it that is what there
    is room for."""
    mask, left, right, scale, softcap = options
    scale, softcap = _arguments.options(scale, softcap)
    room = k.size(2) if pages is None else pages.size(1) * k.size(2)
    most = room if longest_k is None else (longest_k if pages is None else min(longest_k, room))
    if lengths is not None:
        # Those on the host are checked; of others none may lead beyond the keys.
        lengths = integers_on(q.device, lengths)
        lengths = lengths.clamp(0, most) if q.is_cuda and not checked else lengths
    if pages is not None and pages.stride(1) != 1:
        pages = pages.contiguous()
    with torch.no_grad():
        found: Pair = torch.ops.flashcore.attention_placed(
            q, k, v, q_starts, longest_q, k_starts, pages, most, lengths, mask, left, right, scale, softcap, checked
        )
    return found


def starts_of(name: str, ends: Tensor, device: torch.device) -> Tensor:
    """``cu_seqlens`` as the engine takes them."""
    _arguments.tensors(**{name: ends})
    check_ends(name, ends, device)
    return integers_on(device, ends)


def check_ends(name: str, ends: Tensor, device: torch.device) -> None:
    """Raises unless these can be ``cu_seqlens`` of tensors on `device`."""
    if ends.dim() != 1 or ends.numel() < 1:
        raise ContractError(f"{name} has shape {tuple(ends.shape)}, possible is (sequences + 1,)")
    if ends.is_floating_point() or ends.is_complex() or ends.dtype == torch.bool:
        raise TypeError(f"{name} is {ends.dtype}, possible are integers")
    _arguments.beside(name, ends, device)


def longest_of(name: str, given: object, ends: Tensor, tokens: int) -> int:
    """The most tokens of a sequence on a GPU: as is given, or else as ``ends`` say, which waits for a GPU where they
    lie there; in a compiled graph, that of all tokens. What runs on the CPU looks itself."""
    if given is not None:
        return bound(name, given)
    if torch.compiler.is_compiling() or tokens == 0:
        return tokens
    if ends.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ContractError(f"{name} is None while a CUDA graph is captured. Give the most tokens of a sequence")
    return longest(ends)


def bound(name: str, given: Any) -> int:
    """A bound on lengths, as an integer or a symbol of torch.compile."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"{name} is a {type(given).__name__}, possible is an integer")
    if isinstance(given, int) and given < 0:
        raise ContractError(f"{name} is {given}, possible are integers from 0 on")
    found: Any = given if isinstance(given, torch.SymInt) else int(given)
    return found  # type: ignore[no-any-return]
