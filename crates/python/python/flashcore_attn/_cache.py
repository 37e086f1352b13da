"""flash-attn's function for a cache: new keys and values are appended in place, positions are turned, and queries
attend.

Nothing here reads on the host what lies on a GPU, so that all of it can be captured in a CUDA graph, which reads
lengths, tables and entries again at every replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _arguments, _float8, _native, _placed, _prepare
from ._errors import ContractError, UnsupportedError
from ._flash import DESCALES, FA3, Fa3Common, Window, check_fa3, refuse
from ._ops import define, implement, integers_on, longest
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


_FA3_CACHE = (*FA3, "scheduler_metadata")


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

    k and v, if given, are new tokens, as many for each entry or packed with ``cu_seqlens_k_new``, that are first
    written into the cache after those. ``rotary_cos`` and ``rotary_sin``, (positions, rotary dim / 2), turn them first:
    new key n by the position cache_seqlens + n, and query i by cache_seqlens + i, or under no mask by cache_seqlens.
    There is no gradient.

    A cache may be float8_e4m3fn, with q, k and v of float16 or bfloat16. ``k_descale`` and ``v_descale``, float32
    (batch, kv heads) or one number, are then what its codes are to be multiplied by; new tokens are divided by them, in
    float32 and after they were turned, and rounded to the nearest code, or to the largest.

    On a GPU, with ``check_tables`` the call waits, and refuses lengths, entries and tables that lead nowhere.
    """
    given: dict[str, Any] = {**fa3}
    refuse(alibi_slopes=alibi_slopes)
    # flash-attn 3's name for it.
    table = given.pop("page_table", None)
    table = table if block_table is None else block_table
    ends_q, longest_q = given.pop("cu_seqlens_q", None), given.pop("max_seqlen_q", None)
    turned_at, checked = given.pop("rotary_seqlens", None), bool(given.pop("check_tables", False))
    new = given.pop("cu_seqlens_k_new", None)
    eight = isinstance(k_cache, Tensor) and k_cache.dtype == _float8.DTYPE
    descales = [given.pop(name, None) for name in DESCALES] if eight else [None] * 3
    if given:
        check_fa3("flash_attn_with_kvcache", _FA3_CACHE, given)
    check_whole()
    _arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if eight and not _float8.check_types(q, descales[0], k_cache=k_cache, v_cache=v_cache):
        raise UnsupportedError("q is float8_e4m3fn, possible with a cache are float16 and bfloat16. Convert q")
    starts = None if ends_q is None else _placed.starts_of("cu_seqlens_q", ends_q, q.device)
    _arguments.dimensions("(token, heads, head_dim)" if starts is not None else "(batch, length, heads, head_dim)", q=q)
    batch = q.size(0) if starts is None else starts.numel() - 1
    if table is not None:
        _placed.check_table(q, k_cache, v_cache, table, batch, "(pages, page, heads, head_dim)", codes=eight)
        for name, other in (("cache_leftpad", cache_leftpad), ("cache_batch_idx", cache_batch_idx)):
            if other is not None:
                raise UnsupportedError(f"{name} goes with a cache that is not in pages. Leave one of them out")
    else:
        check(k_cache, k_cache, v_cache, "bshd")
        _placed.check_halves(k_cache, v_cache)
        if not eight:
            _arguments.together(q=q, k_cache=k_cache, v_cache=v_cache)
        rows = k_cache.size(0) if cache_batch_idx is None else batch
        if type(rows) is int and type(batch) is int and rows != batch:
            raise ContractError(f"k_cache has batch {rows}, but q asks for {batch}. Give both the same batch")
    for name, cut in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if cut is not None:
            _arguments.lengths(name, cut, batch, q.device)
    held = _held(cache_seqlens, batch, q.device)
    mask = mask_of(causal, False, window_size)
    if (k is None) != (v is None):
        raise ContractError("of k and v only one was given. Give both new keys and values, or neither")
    longest_q = 0 if ends_q is None else _placed.longest_of("max_seqlen_q", longest_q, ends_q, q.size(0))
    options = (*mask, *_arguments.options(softmax_scale, softcap))
    if eight and k is None and rotary_cos is None and rotary_sin is None:
        # To attend to codes is a step without new tokens.
        k, v = (q.new_empty((batch, 0, *x.shape[2:])) for x in (k_cache, v_cache))
        room = k_cache.size(1) if table is None else k_cache.size(1) * table.size(1)
        held = torch.full((batch,), room, dtype=torch.int32, device=q.device) if held is None else held
    with torch.no_grad():
        if k is not None and v is not None:
            if held is None:
                raise ContractError("k and v were given without cache_seqlens, which says where in the cache they go")
            new_starts = None if new is None else _placed.starts_of("cu_seqlens_k_new", new, q.device)
            _check_new(q, k_cache, v_cache, k, v, batch, new_starts)
            angles = _angles(q, rotary_cos, rotary_sin)
            heads = (batch, k_cache.size(2))
            of_k, of_v = (
                _float8.descale_of(name, descale, q, heads)
                for name, descale in zip(DESCALES[1:], descales[1:], strict=True)
            )
            at = None if turned_at is None else _held(turned_at, batch, q.device)
            o, lse = torch.ops.flashcore.cache_step(
                q, k_cache, v_cache, k, v, held, new_starts, *angles, at, rotary_interleaved, starts, longest_q,
                table, cache_batch_idx, cache_leftpad, *options, checked, of_k, of_v,
            )  # fmt: skip
            return (o, lse) if return_softmax_lse else o
        if rotary_cos is not None or rotary_sin is not None:
            raise ContractError("rotary_cos and rotary_sin turn new keys. Give k and v with them, and cache_seqlens")
        if table is None and cache_batch_idx is None and starts is None and cache_leftpad is None:
            return attend(
                q, k_cache, v_cache, *mask, None, held, softmax_scale, softcap, "bshd", return_softmax_lse
            )  # fmt: skip
        o, lse = _attend(
            q, k_cache, v_cache, held, table, cache_batch_idx, cache_leftpad, starts, longest_q, options, checked
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
        k, v, k_starts, ends = _rows(k_cache, v_cache, entries, pads, ends)
        most = k_cache.size(1)
        if not q.is_cuda and not torch.compiler.is_compiling():
            _check_pads(pads, ends, most)
    elif entries is not None:
        # Whole entries are pages, of which each sequence has one.
        table = entries.to(q.device, torch.int32).unsqueeze(1)
    o, lse = _placed.attend(
        queries, k, v, ends, options, q_starts=starts, longest_q=longest_q, k_starts=k_starts, pages=table,
        longest_k=most, checked=checked,
    )  # fmt: skip
    return _as_given(o, lse, starts)


def _rows(
    k_cache: Tensor, v_cache: Tensor, entries: Tensor | None, pads: Tensor | None, ends: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A cache (batch, length, heads, head_dim) as the rows of all its entries, one behind the other; where those of
    each sequence begin, and how many it has."""
    rows = k_cache.size(1)
    k, v = (x.flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (k_cache, v_cache))
    known = next(x for x in (entries, pads, ends) if x is not None)
    count = torch.arange(known.numel(), device=k.device, dtype=torch.int32)
    starts = (count if entries is None else entries.to(count)) * rows
    held = torch.full_like(count, rows) if ends is None else ends.to(count)
    if pads is not None:
        starts, held = starts + pads.to(count), (held - pads.to(count)).clamp(min=0)
    # The number behind the last one is not used.
    return k, v, torch.cat([starts, starts[:1]]), held


def _check_pads(pads: Tensor, lengths: Tensor, rows: int) -> None:
    for b, (pad, length) in enumerate(zip(pads.tolist(), lengths.tolist(), strict=True)):
        if pad < 0 or pad + length > rows:
            possible = f"possible are those from 0 to {rows}"
            raise ContractError(f"batch entry {b} has the keys from {pad} to {pad + length}, {possible}")


def _held(cache_seqlens: object, batch: int, device: torch.device) -> Tensor | None:
    """How many tokens each entry of a cache holds."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens < 1 << 31:
            raise ContractError(f"cache_seqlens is {cache_seqlens}, possible are integers from 0 on")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    given = _arguments.lengths("cache_seqlens", cache_seqlens, batch, device)
    found = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)
    return integers_on(device, found) if device.type == "cuda" else found.to(device)


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, batch: int, starts: Tensor | None
) -> None:  # fmt: skip
    _arguments.tensors(k=k, v=v)
    rows: tuple[object, ...] = (batch, k.size(1) if k.dim() == 4 else "length")
    if starts is not None:
        if starts.numel() != batch + 1:
            raise ContractError(f"cu_seqlens_k_new has {starts.numel()} elements for a batch of {batch}. Give one more")
        rows = (k.size(0) if k.dim() == 3 else "tokens",)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = (*rows, cache.size(2), cache.size(3))
        if tuple(new.shape) != shape:
            raise ContractError(f"{name} has shape {tuple(new.shape)}, possible for its cache is {shape}")
    _arguments.together(q=q, k=k, v=v)


def _angles(q: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The tables of rotary embeddings, if there are any."""
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None:
        raise ContractError("of rotary_cos and rotary_sin only one was given. Give both, or neither")
    _arguments.tensors(rotary_cos=cos, rotary_sin=sin)
    _arguments.dimensions("(positions, rotary dim / 2)", rotary_cos=cos, rotary_sin=sin)
    _arguments.together(q=q, rotary_cos=cos, rotary_sin=sin)
    dim = 2 * cos.size(1)
    if cos.shape != sin.shape or dim > q.size(-1) or dim % 16 != 0 or dim == 0:
        given = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        raise ContractError(
            f"rotary_cos and rotary_sin have shapes {given}, possible is one shape, (positions, rotary dim / 2) with a "
            f"rotary dim that is a multiple of 16 up to {q.size(-1)}"
        )
    return cos, sin


define(
    "cache_step(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor held, Tensor? new_starts, "
    "Tensor? cos, Tensor? sin, Tensor? positions, bool interleaved, Tensor? q_starts, SymInt longest_q, Tensor? table, "
    "Tensor? entries, Tensor? pads, str mask, int? left, int? right, float? scale, float softcap, bool checked=False, "
    "Tensor? k_descale=None, Tensor? v_descale=None) "
    "-> (Tensor, Tensor)"
)


def _step(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, held: Tensor, new_starts: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, interleaved: bool, q_starts: Tensor | None,
    longest_q: int, table: Tensor | None, entries: Tensor | None, pads: Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float, checked: bool = False,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes new tokens, turned, behind those that a cache holds, and attends to all of them."""
    eight = k_cache.dtype == _float8.DTYPE
    options = (mask, left, right, scale, softcap)
    if checked or not held.is_cuda:
        counts = [k.size(1)] * held.numel() if new_starts is None else new_starts.diff().tolist()
        _check_places(k_cache, held, counts, table, entries, pads)
    # Rows of all entries are one tensor where nothing lies between them.
    flat = all(x.stride(0) == x.size(1) * x.stride(1) for x in (k_cache, v_cache))
    rotary = None
    if cos is not None and sin is not None:
        at = positions if positions is not None or pads is None else held
        at = None if at is None else at.to(torch.int32).contiguous()
        rotary = (_prepare.ready(None, cos[None, None]), _prepare.ready(None, sin[None, None]), interleaved, at)
    if q.dtype != torch.float64 and (flat or (entries is None and pads is None)):
        queries, keys, values = (
            x.transpose(1, 2) if starts is None else x.transpose(0, 1).unsqueeze(0)
            for x, starts in ((q, q_starts), (k, new_starts), (v, new_starts))
        )
        o, lse = _placed.outputs(queries, v_cache, q_starts)
        k_rows, v_rows, k_starts, lengths = k_cache.transpose(1, 2), v_cache.transpose(1, 2), None, held
        most = k_cache.size(1) if table is None else table.size(1) * k_cache.size(1)
        if entries is not None or pads is not None:
            k_rows, v_rows, k_starts, lengths = _rows(k_cache, v_cache, entries, pads, held)
        if _prepare.as_they_are(queries, k_rows, v_rows):
            if eight:
                # The bytes: not every version of torch hands out tensors of this type.
                k_rows, v_rows = (x.view(torch.uint8) for x in (k_rows, v_rows))
            lengths = lengths.to(torch.int32).contiguous()
            on_gpu = lengths if checked else lengths.clamp(0, most)
            longest_q = longest_q if q.is_cuda or q_starts is None else longest(q_starts)
            pages = None if table is None else table if table.stride(1) == 1 else table.contiguous()
            new = None
            if new_starts is not None:
                new = (new_starts, k.size(0) if q.is_cuda else longest(new_starts))
            try:
                _native.append(
                    _prepare.ready("q", queries), (k_rows, v_rows),
                    (_prepare.ready("k", keys), _prepare.ready("v", values)), new, rotary, o, lse,
                    on_gpu if q.is_cuda else lengths.tolist(), *options,
                    _placed.places_of(q_starts, longest_q, k_starts, pages, most), checked,
                    (k_descale, v_descale) if eight else None,
                )  # fmt: skip
                return _as_given(o, lse, q_starts)
            except UnsupportedError:
                # No kernel of this GPU appends to such a cache.
                if not q.is_cuda or eight:
                    raise
    if eight:
        raise UnsupportedError(
            "k_cache is float8_e4m3fn and does not lie as the kernels write it. Give one whose entries lie one behind "
            "the other, its last dimension without gaps, with q of a head_dim that is a multiple of 16"
        )
    return _in_torch(
        q, (k_cache, v_cache), (k, v), held, new_starts, rotary, q_starts, longest_q, (table, entries, pads), options,
        checked,
    )  # fmt: skip


def _as_given(o: Tensor, lse: Tensor, q_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse of (batch, heads, length, …) tensors as flash-attn has them."""
    return (o.transpose(1, 2), lse) if q_starts is None else (o[0].transpose(0, 1), lse[0])


def _step_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any, **others: Any) -> tuple[Tensor, Tensor]:
    packed = q.dim() == 3
    queries = q.transpose(0, 1).unsqueeze(0) if packed else q.transpose(1, 2)
    o, lse = _placed.outputs(queries, v_cache, None)
    return _as_given(o, lse, q if packed else None)


def _step_under_vmap(*args: Any) -> tuple[tuple[Tensor, ...], int]:
    raise UnsupportedError("new tokens of a cache do not go with vmap. Fold its dimension into the batch")


implement("cache_step", _step, _step_fake)
torch.library.register_vmap("flashcore::cache_step", _step_under_vmap)


def _check_places(
    cache: Tensor, held: Tensor, new: list[int], table: Tensor | None, entries: Tensor | None, pads: Tensor | None
) -> None:  # fmt: skip
    """Raises where new tokens have no place in a cache."""
    page = cache.size(1)
    room = page if table is None else table.size(1) * page
    padded = [0] * len(new) if pads is None else pads.tolist()
    for b, (end, count, pad) in enumerate(zip(held.tolist(), new, padded, strict=True)):
        if not 0 <= end <= room - count or count < 0:
            where = f"its cache of {page}" if table is None else f"the {table.size(1)} pages of {page} in block_table"
            raise ContractError(f"batch entry {b} holds {end} tokens and {count} more do not fit {where}")
        if not 0 <= pad <= end:
            raise ContractError(f"batch entry {b} holds {end} tokens, of which cache_leftpad says {pad} are padding")
    for b, entry in enumerate([] if entries is None else entries.tolist()):
        if not 0 <= entry < cache.size(0):
            raise ContractError(
                f"cache_batch_idx says that batch entry {b} is entry {entry} of the cache, possible are those from 0 "
                f"to {cache.size(0) - 1}"
            )


def _in_torch(
    q: Tensor, caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], held: Tensor, new_starts: Tensor | None,
    rotary: tuple[Tensor, Tensor, bool, Tensor | None] | None, starts: Tensor | None, longest_q: int,
    places: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: tuple[str, int | None, int | None, float | None, float], checked: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by torch's operations, up to attention. These check places where they write."""
    (k_cache, v_cache), (k, v), (table, entries, pads) = caches, new, places
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _arguments.writable(name, cache, k=k, v=v)
    if k_cache.data_ptr() == v_cache.data_ptr() and k_cache.numel():
        raise ContractError("k_cache shares memory with v_cache. Give each memory of its own, or halves of one cache")
    if new_starts is not None:
        raise UnsupportedError(
            f"cu_seqlens_k_new does not go with {q.dtype} on {q.device}. Give as many new keys for each sequence"
        )
    steps = torch.arange(k.size(1), device=q.device)
    if rotary is not None:
        cos, sin, interleaved, at = rotary
        first = (held if at is None else at).to(torch.int64)
        k = _turned(k, cos, sin, first.unsqueeze(1) + steps, interleaved)
        one_by_one = options[0] != "none"
        if starts is None:
            ahead = torch.arange(q.size(1), device=q.device) * one_by_one
            q = _turned(q, cos, sin, first.unsqueeze(1) + ahead, interleaved)
        else:
            tokens = torch.arange(q.size(0), device=q.device)
            of = torch.bucketize(tokens, starts[1:].to(torch.int64), right=True).clamp(max=held.numel() - 1)
            # Tokens behind the last sequence turn by any position.
            ahead = torch.where(tokens < starts[-1], first[of] + (tokens - starts[of]) * one_by_one, 0)
            q = _turned(q.unsqueeze(0), cos, sin, ahead.unsqueeze(0), interleaved)[0]
    at_rows = held.to(torch.int64).unsqueeze(1) + steps
    if table is None:
        rows = torch.arange(held.numel(), device=held.device) if entries is None else entries.to(torch.int64)
        where = rows.unsqueeze(1), at_rows
    else:
        page = k_cache.size(1)
        where = table.to(torch.int64).gather(1, at_rows // page), at_rows % page
    k_cache[where], v_cache[where] = k, v
    ends = held + k.size(1)
    if table is None and entries is None and pads is None and starts is None:
        o, lse = attend(q, k_cache, v_cache, *options[:3], None, ends, *options[3:], "bshd", return_lse=True)
        return o, lse
    return _attend(q, k_cache, v_cache, ends, table, entries, pads, starts, longest_q, options, checked)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """x (batch, length, heads, head_dim) with its first columns turned in pairs, by the rows of the tables that ``at``
    names: neighbours, or, where not interleaved, a column of the first half with its like of the second."""
    cos, sin = cos[0, 0], sin[0, 0]
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
