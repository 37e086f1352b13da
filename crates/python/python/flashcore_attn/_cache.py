"""flash-attn's function for a cache: new keys and values are appended in place, positions are turned, and queries
attend.

Nothing here reads on the host what lies on a GPU, so that all of it can be captured in a CUDA graph, which reads
lengths, tables and entries again at every replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _arguments, _placed
from ._errors import ContractError, UnsupportedError
from ._flash import FA3, Fa3Common, Window, check_fa3, refuse
from ._ops import define, implement
from ._options import mask_of
from ._torch import attend, check, check_whole

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Fa3Cache(Fa3Common, total=False):
    """What flash-attn 3's cache takes in addition to the arguments of flash-attn 2's, and a check of ours."""

    scheduler_metadata: Tensor | None
    max_seqlen_q: int | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None
    check_tables: bool


_FA3_CACHE = (*FA3, "scheduler_metadata", "cu_seqlens_k_new")


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: Literal[False] = ..., **fa3: Unpack[Fa3Cache],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    *, return_softmax_lse: Literal[True], **fa3: Unpack[Fa3Cache],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: bool = ..., **fa3: Unpack[Fa3Cache],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, **fa3: Unpack[Fa3Cache],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q (batch, length, heads, head_dim) to a cache (batch, cache length, heads, head_dim) of which
    entry b holds ``cache_seqlens[b]`` tokens; ``cache_leftpad[b]`` of them, at its start, are padding. Entry b of the
    batch is entry ``cache_batch_idx[b]`` of the cache. With ``block_table``, int32 (batch, pages), the cache is (pages,
    page, heads, head_dim). With ``cu_seqlens_q`` queries are packed, (token, heads, head_dim), and lse is (heads,
    token).

    k and v, if given, are new tokens that are first written into the cache after those. ``rotary_cos`` and
    ``rotary_sin``, (positions, rotary dim / 2), turn them first: new key n by the position cache_seqlens + n, and query
    i by cache_seqlens + i, or under no mask by cache_seqlens. There is no gradient.

    On a GPU, with ``check_tables`` the call waits, and refuses lengths, entries and tables that lead nowhere.
    """
    given: dict[str, Any] = {**fa3}
    refuse(alibi_slopes=alibi_slopes)
    # flash-attn 3's name for it.
    table = given.pop("page_table", None)
    table = table if block_table is None else block_table
    ends_q, longest_q = given.pop("cu_seqlens_q", None), given.pop("max_seqlen_q", None)
    turned_at, checked = given.pop("rotary_seqlens", None), bool(given.pop("check_tables", False))
    if given:
        check_fa3("flash_attn_with_kvcache", _FA3_CACHE, given)
    check_whole()
    _arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    starts = None if ends_q is None else _placed.starts_of("cu_seqlens_q", ends_q, q.device)
    _arguments.dimensions("(token, heads, head_dim)" if starts is not None else "(batch, length, heads, head_dim)", q=q)
    batch = q.size(0) if starts is None else starts.numel() - 1
    if table is not None:
        _placed.check_table(q, k_cache, v_cache, table, batch, "(pages, page, heads, head_dim)")
        for name, other in (("cache_leftpad", cache_leftpad), ("cache_batch_idx", cache_batch_idx)):
            if other is not None:
                raise UnsupportedError(f"{name} goes with a cache that is not in pages. Leave one of them out")
    else:
        check(k_cache, k_cache, v_cache, "bshd")
        _arguments.together(q=q, k_cache=k_cache, v_cache=v_cache)
        rows = k_cache.size(0) if cache_batch_idx is None else batch
        if type(rows) is int and type(batch) is int and rows != batch:
            raise ContractError(f"k_cache has batch {rows}, but q asks for {batch}. Give both the same batch")
    for name, cut in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if cut is not None:
            _arguments.lengths(name, cut, batch)
    held = _held(cache_seqlens, batch, q.device)
    mask = mask_of(causal, False, window_size)
    with torch.no_grad():
        at = held if turned_at is None else _held(turned_at, batch, q.device)
        q, k = _turned(q, k, rotary_cos, rotary_sin, at, starts, mask[0] != "none", rotary_interleaved)
        ends = held
        if (k is None) != (v is None):
            raise ContractError("of k and v only one was given. Give both new keys and values, or neither")
        if k is not None and v is not None:
            if held is None:
                raise ContractError(
                    "k and v were given without cache_seqlens, which says where in the cache they belong"
                )
            _check_new(k_cache, v_cache, k, v, batch)
            entries = None if cache_batch_idx is None else cache_batch_idx.to(q.device)
            torch.ops.flashcore.cache_append(k_cache, v_cache, k, v, held, table, entries, checked)
            ends = held + k.size(1)
        plain = table is None and cache_batch_idx is None and starts is None
        if plain and cache_leftpad is None:
            return attend(
                q, k_cache, v_cache, *mask, None, ends, softmax_scale, softcap, "bshd", return_softmax_lse
            )  # fmt: skip
        o, lse = _attend(
            q, k_cache, v_cache, ends, table, cache_batch_idx, cache_leftpad, starts,
            0 if ends_q is None else _placed.longest_of("max_seqlen_q", longest_q, ends_q, q.size(0)),
            (*mask, softmax_scale, softcap), checked,
        )  # fmt: skip
    return (o, lse) if return_softmax_lse else o


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, ends: Tensor | None, table: Tensor | None, entries: Tensor | None,
    pads: Tensor | None, starts: Tensor | None, longest_q: int,
    options: tuple[str, int | None, int | None, Any, Any], checked: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse of a call whose keys are not each the first of a batch entry."""
    queries = q.transpose(1, 2) if starts is None else q.transpose(0, 1).unsqueeze(0)
    k, v, k_starts, most = k_cache.transpose(1, 2), v_cache.transpose(1, 2), None, None
    if pads is not None:
        if entries is not None:
            k_cache, v_cache = (x.index_select(0, entries.to(x.device)) for x in (k_cache, v_cache))
        # Rows of the cache one behind the other, of which a sequence has some in the middle.
        count, rows = k_cache.shape[:2]
        k, v = (x.flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (k_cache, v_cache))
        firsts = torch.arange(count + 1, device=q.device, dtype=torch.int32) * rows
        pads = pads.to(firsts)
        held = firsts.new_full((count,), rows) if ends is None else ends.to(firsts)
        if not q.is_cuda and not torch.compiler.is_compiling():
            _check_pads(pads, held, rows)
        k_starts = firsts.clone()
        k_starts[:-1] += pads
        # From one start to the next there may be more rows than a sequence has, which are those that are checked.
        ends, most = (held.clamp(max=rows) - pads).clamp(min=0), rows if q.is_cuda else 2 * rows
        # What lies between the sequences' keys is nothing that a check could look at.
        checked = False
    elif entries is not None:
        # Whole entries are pages, of which each sequence has one.
        table = entries.to(q.device, torch.int32).unsqueeze(1)
    o, lse = _placed.attend(
        queries, k, v, ends, options, q_starts=starts, longest_q=longest_q, k_starts=k_starts, pages=table,
        longest_k=most, checked=checked,
    )  # fmt: skip
    return (o.transpose(1, 2), lse) if starts is None else (o[0].transpose(0, 1), lse[0])


def _check_pads(pads: Tensor, ends: Tensor, rows: int) -> None:
    for b, (pad, end) in enumerate(zip(pads.tolist(), ends.tolist(), strict=True)):
        if pad < 0 or not 0 <= end <= rows:
            raise ContractError(
                f"batch entry {b} has the keys from {pad} to {end}, possible are those from 0 to {rows}"
            )


def _held(cache_seqlens: object, batch: int, device: torch.device) -> Tensor | None:
    """How many tokens each entry of a cache holds."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens < 1 << 31:
            raise ContractError(f"cache_seqlens is {cache_seqlens}, possible are integers from 0 on")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    given = _arguments.lengths("cache_seqlens", cache_seqlens, batch)
    return given.to(device) if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64, device=device)


def _check_new(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: int) -> None:
    _arguments.tensors(k=k, v=v)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = (batch, k.size(1) if k.dim() == 4 else "length", cache.size(2), cache.size(3))
        if tuple(new.shape) != shape:
            raise ContractError(f"{name} has shape {tuple(new.shape)}, possible for its cache is {shape}")
    _arguments.together(k_cache=k_cache, v_cache=v_cache, k=k, v=v)


define(
    "cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor held, Tensor? block_table, "
    "Tensor? entries, bool checked=False) -> ()"
)


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, held: Tensor, table: Tensor | None,
    entries: Tensor | None, checked: bool = False,
) -> None:  # fmt: skip
    """Writes new tokens (batch, length, heads, head_dim) after those that the cache holds.

    What lies on the host is checked. On a GPU torch checks places where it writes, without the host having to wait.
    """
    new = k.size(1)
    places = held.to(torch.int64).unsqueeze(1) + torch.arange(new, device=held.device)
    if checked or not held.is_cuda:
        _check_places(k_cache, held, new, table, entries)
    rows = torch.arange(held.numel(), device=held.device) if entries is None else entries.to(torch.int64)
    if table is None:
        at = rows.unsqueeze(1), places
    else:
        page = k_cache.size(1)
        at = table.to(torch.int64).gather(1, places // page), places % page
    k_cache[at], v_cache[at] = k, v


def _check_places(cache: Tensor, held: Tensor, new: int, table: Tensor | None, entries: Tensor | None) -> None:
    """Raises where new tokens have no place in a cache."""
    page = cache.size(1)
    room = page if table is None else table.size(1) * page
    for b, end in enumerate(held.tolist()):
        if not 0 <= end <= room - new:
            where = f"its cache of {page}" if table is None else f"the {table.size(1)} pages of {page} in block_table"
            raise ContractError(f"batch entry {b} holds {end} tokens and {new} more do not fit {where}")
        if table is not None and new > 0:
            for place in range(end // page, (end + new - 1) // page + 1):
                at = int(table[b, place])
                if not 0 <= at < cache.size(0):
                    raise ContractError(
                        f"block_table says that page {place} of batch entry {b} is {at}, possible are those from 0 to "
                        f"{cache.size(0) - 1}"
                    )
    for b, entry in enumerate([] if entries is None else entries.tolist()):
        if not 0 <= entry < cache.size(0):
            raise ContractError(
                f"cache_batch_idx says that batch entry {b} is entry {entry} of the cache, possible are those from 0 "
                f"to {cache.size(0) - 1}"
            )


def _append_fake(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *places: Any, **others: Any) -> None:
    return None


implement("cache_append", _append, _append_fake)


def _turned(
    q: Tensor, k: Tensor | None, cos: Tensor | None, sin: Tensor | None, at: Tensor | None, starts: Tensor | None,
    one_by_one: bool, interleaved: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Queries and new keys, turned by their positions."""
    if cos is None and sin is None:
        return q, k
    if cos is None or sin is None:
        raise ContractError("of rotary_cos and rotary_sin only one was given. Give both, or neither")
    if k is None or at is None:
        raise ContractError("rotary_cos and rotary_sin turn new keys. Give k and v with them, and cache_seqlens")
    _arguments.tensors(rotary_cos=cos, rotary_sin=sin, k=k)
    _arguments.dimensions("(positions, rotary dim / 2)", rotary_cos=cos, rotary_sin=sin)
    _arguments.dimensions("(batch, length, heads, head_dim)", k=k)
    _arguments.together(q=q, rotary_cos=cos, rotary_sin=sin)
    if cos.shape != sin.shape or 2 * cos.size(1) > q.size(-1):
        given = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ContractError(
            f"rotary_cos and rotary_sin have shapes {given}, possible is one shape, (positions, rotary dim / 2) with a "
            f"rotary dim up to {q.size(-1)}"
        )
    at = at.to(torch.int64)
    steps = torch.arange(k.size(1), device=q.device)
    turn = torch.ops.flashcore.rotary
    keys = turn(k, cos, sin, at.unsqueeze(1) + steps, interleaved)
    if starts is None:
        steps = torch.arange(q.size(1), device=q.device)
        places = at.unsqueeze(1) + (steps if one_by_one else torch.zeros_like(steps))
        return turn(q, cos, sin, places, interleaved), keys
    tokens = torch.arange(q.size(0), device=q.device)
    of = torch.bucketize(tokens, starts[1:].to(torch.int64), right=True).clamp(max=at.numel() - 1)
    places = at[of] + ((tokens - starts[of]) if one_by_one else torch.zeros_like(tokens))
    # Tokens behind the last sequence turn by any position.
    places = torch.where(tokens < starts[-1], places, 0)
    return turn(q.unsqueeze(0), cos, sin, places.unsqueeze(0), interleaved)[0], keys


define("rotary(Tensor x, Tensor cos, Tensor sin, Tensor at, bool interleaved) -> Tensor")


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """x (batch, length, heads, head_dim) with its first columns turned in pairs, by the rows of cos and sin that ``at``
    names: neighbours, or, where not interleaved, a column of the first half with its like of the second."""
    if not at.is_cuda and at.numel() and not 0 <= int(at.min()) <= int(at.max()) < cos.size(0):
        raise ContractError(
            f"a token is at position {int(at.max())}, but rotary_cos has {cos.size(0)}. Give as many as the cache has "
            "room for"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out, half = torch.empty_like(x, memory_format=torch.contiguous_format), cos.size(1)
    c, s = (table[at].unsqueeze(2).to(wide) for table in (cos, sin))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    a, b = (x[..., columns].to(wide) for columns in pairs)
    out[..., pairs[0]], out[..., pairs[1]] = a * c - b * s, a * s + b * c
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _rotary_fake(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


implement("rotary", _rotary, _rotary_fake)
