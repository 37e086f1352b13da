"""Caches in pages as FlashInfer has them: tables as compressed rows, pages in either order, and lse in base 2.

    from flashcore_attn import flashinfer
    o = flashinfer.decode(q, (k_pages, v_pages), kv_indptr, kv_indices, kv_last_page_len)
    o, lse = flashinfer.prefill(q, kv_pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, return_lse=True)

Sequence i has the pages ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``, the last of which holds ``kv_last_page_len[i]``
tokens; without that all pages are full. A cache is two tensors (pages, page, heads, head_dim), or (pages, heads, page,
head_dim) with ``kv_layout="HND"``, or one of both, (pages, 2, …).

There is no plan beforehand. On a GPU the host reads none of the integers, so that a CUDA graph reads them again at
every replay.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, overload

import torch
from torch import Tensor

from . import _arguments, _placed
from ._errors import ContractError
from ._options import Mask, mask_of

#: The order of a page's dimensions: tokens around heads, or heads around tokens.
KvLayout = Literal["NHD", "HND"]
#: Pages of keys and of values, or of both in one tensor.
Cache = Tensor | tuple[Tensor, Tensor]

__all__ = ["decode", "page_table", "prefill"]


def page_table(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor | None, page_size: int, *,
    max_pages: int | None = None, check_tables: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The table of pages, int32 (sequences, max_pages), and the key lengths, as ``flash_attn_with_kvcache`` takes them.

    ``max_pages`` bounds the pages of a sequence: as many are in a row of the table. Without it these are all that there
    are.
    """
    given = {"kv_indptr": kv_indptr, "kv_indices": kv_indices}
    given |= {} if kv_last_page_len is None else {"kv_last_page_len": kv_last_page_len}
    _arguments.tensors(**given)
    for name, x in given.items():
        if x.dim() != 1 or x.dtype not in (torch.int32, torch.int64) or x.device != kv_indptr.device:
            raise ContractError(
                f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}, possible are integers of one dimension "
                f"on {kv_indptr.device}"
            )
    sequences = kv_indptr.numel() - 1
    if sequences < 0 or (kv_last_page_len is not None and kv_last_page_len.numel() != sequences):
        raise ContractError(
            f"kv_indptr has {sequences + 1} elements, possible is one more than sequences, and kv_last_page_len one "
            "for each"
        )
    width = kv_indices.numel() if max_pages is None else _placed.bound("max_pages", max_pages)
    if (check_tables or not kv_indptr.is_cuda) and not torch.compiler.is_compiling():
        _check(kv_indptr, kv_indices, kv_last_page_len, page_size, width)
    counts = kv_indptr.diff()
    lengths = counts * page_size
    if kv_last_page_len is not None:
        lengths = torch.where(counts > 0, lengths - page_size + kv_last_page_len, 0)
    if kv_indices.numel() == 0:
        return kv_indices.new_zeros((sequences, width), dtype=torch.int32), lengths.to(torch.int32)
    at = kv_indptr[:-1].unsqueeze(1) + torch.arange(width, device=kv_indptr.device)
    table = kv_indices[at.clamp(0, kv_indices.numel() - 1)]
    return table.to(torch.int32), lengths.to(torch.int32)


def _check(indptr: Tensor, indices: Tensor, last: Tensor | None, page: int, width: int) -> None:
    """Raises unless rows of pages lie one behind the other, and last pages are neither empty nor more than full."""
    ends = indptr.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if not 0 <= start <= end <= indices.numel():
            raise ContractError(
                f"kv_indptr gives sequence {i} the pages from {start} to {end}, possible are those from 0 to "
                f"{indices.numel()}"
            )
        if end - start > width:
            raise ContractError(f"sequence {i} has {end - start} pages, and max_pages is {width}")
        if last is not None and end > start and not 1 <= int(last[i]) <= page:
            raise ContractError(f"kv_last_page_len of sequence {i} is {int(last[i])}, possible are 1 to {page}")


def _pools(cache: Cache, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values as (pages, heads, page, head_dim)."""
    if layout not in ("NHD", "HND"):
        raise ContractError(f"kv_layout is {layout!r}, possible are 'NHD' and 'HND'")
    shape = "(pages, page, heads, head_dim)" if layout == "NHD" else "(pages, heads, page, head_dim)"
    if isinstance(cache, Tensor):
        _arguments.tensors(kv_cache=cache)
        if cache.dim() != 5 or cache.size(1) != 2:
            both = shape.replace("(pages, ", "(pages, 2, ")
            raise ContractError(f"kv_cache has shape {tuple(cache.shape)}, possible is {both}, or a pair of {shape}")
        k, v = cache.unbind(1)
    else:
        k, v = cache
    _arguments.tensors(k_cache=k, v_cache=v)
    _arguments.dimensions(shape, k_cache=k, v_cache=v)
    return (k.transpose(1, 2), v.transpose(1, 2)) if layout == "NHD" else (k, v)


def _binary(lse: Tensor) -> Tensor:
    return lse * math.log2(math.e)


@overload
def decode(
    q: Tensor, kv_cache: Cache, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor | None = ..., *,
    kv_layout: KvLayout = ..., sm_scale: float | None = ..., window_left: int = ..., logits_soft_cap: float | None =
    ..., max_pages: int | None = ..., check_tables: bool = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    q: Tensor, kv_cache: Cache, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor | None = ..., *,
    kv_layout: KvLayout = ..., sm_scale: float | None = ..., window_left: int = ..., logits_soft_cap: float | None =
    ..., max_pages: int | None = ..., check_tables: bool = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def decode(
    q: Tensor, kv_cache: Cache, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor | None = ..., *,
    kv_layout: KvLayout = ..., sm_scale: float | None = ..., window_left: int = ..., logits_soft_cap: float | None =
    ..., max_pages: int | None = ..., check_tables: bool = ..., return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def decode(
    q: Tensor, kv_cache: Cache, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor | None = None, *,
    kv_layout: KvLayout = "NHD", sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, max_pages: int | None = None, check_tables: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one query of each sequence, (sequence, heads, head_dim); lse is (sequence, heads), in base 2.

    ``window_left`` is how many keys a query sees before the last one; -1 is all. A sequence without keys gives zeros
    and lse -inf. ``max_pages`` bounds the pages of a sequence, which sizes what runs on a GPU. On a GPU, with
    ``check_tables`` the call waits, and refuses a table that leads nowhere. There is no gradient.
    """
    _arguments.tensors(q=q)
    _arguments.dimensions("(sequence, heads, head_dim)", q=q)
    queries, mask = q.unsqueeze(2), mask_of(False, False, (window_left, -1))
    o, lse = _attend(
        queries, kv_cache, kv_indptr, kv_indices, kv_last_page_len, kv_layout, mask, sm_scale, logits_soft_cap,
        max_pages, check_tables, None, 0, q.size(0),
    )  # fmt: skip
    return (o.squeeze(2), _binary(lse.squeeze(2))) if return_lse else o.squeeze(2)


@overload
def prefill(
    q: Tensor, kv_cache: Cache, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_len: Tensor | None = ..., *, causal: bool = ..., kv_layout: KvLayout = ...,
    sm_scale: float | None = ..., window_left: int = ..., logits_soft_cap: float | None = ...,
    max_qo_len: int | None = ..., max_pages: int | None = ..., check_tables: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def prefill(
    q: Tensor, kv_cache: Cache, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_len: Tensor | None = ..., *, causal: bool = ..., kv_layout: KvLayout = ...,
    sm_scale: float | None = ..., window_left: int = ..., logits_soft_cap: float | None = ...,
    max_qo_len: int | None = ..., max_pages: int | None = ..., check_tables: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def prefill(
    q: Tensor, kv_cache: Cache, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_len: Tensor | None = ..., *, causal: bool = ..., kv_layout: KvLayout = ...,
    sm_scale: float | None = ..., window_left: int = ..., logits_soft_cap: float | None = ...,
    max_qo_len: int | None = ..., max_pages: int | None = ..., check_tables: bool = ...,
    return_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def prefill(
    q: Tensor, kv_cache: Cache, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    kv_last_page_len: Tensor | None = None, *, causal: bool = False, kv_layout: KvLayout = "NHD",
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    max_qo_len: int | None = None, max_pages: int | None = None, check_tables: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed queries, (token, heads, head_dim), of which sequence i has those from ``qo_indptr[i]`` to
    ``qo_indptr[i + 1]``; lse is (token, heads), in base 2. Masks are aligned with the last query and key.

    ``max_qo_len`` bounds the queries of a sequence; without it the host looks, which waits for a GPU. The rest is as
    for ``decode``. Tokens of no sequence give zeros and lse -inf.
    """
    _arguments.tensors(q=q)
    _arguments.dimensions("(token, heads, head_dim)", q=q)
    starts = _placed.starts_of("qo_indptr", qo_indptr, q.device)
    longest = _placed.longest_of("max_qo_len", max_qo_len, qo_indptr, q.size(0))
    queries, mask = q.transpose(0, 1).unsqueeze(0), mask_of(causal, False, (window_left, -1))
    o, lse = _attend(
        queries, kv_cache, kv_indptr, kv_indices, kv_last_page_len, kv_layout, mask, sm_scale, logits_soft_cap,
        max_pages, check_tables, starts, longest, starts.numel() - 1,
    )  # fmt: skip
    o = o[0].transpose(0, 1)
    return (o, _binary(lse[0].transpose(0, 1))) if return_lse else o


def _attend(
    queries: Tensor, cache: Cache, indptr: Tensor, indices: Tensor, last: Tensor | None, layout: str, mask: Mask,
    scale: float | None, softcap: float | None, max_pages: int | None, checked: bool, starts: Tensor | None,
    longest: int, sequences: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, v = _pools(cache, layout)
    _arguments.beside("kv_indptr", indptr, queries.device)
    table, lengths = page_table(indptr, indices, last, k.size(2), max_pages=max_pages, check_tables=checked)
    shape = "(pages, heads, page, head_dim)"
    _placed.check_table(queries, k, v, table.to(queries.device), sequences, shape)
    options = (*mask, scale, 0.0 if softcap is None else softcap)
    return _placed.attend(
        queries, k, v, lengths, options, q_starts=starts, longest_q=longest, pages=table.to(queries.device),
        checked=checked,
    )  # fmt: skip
