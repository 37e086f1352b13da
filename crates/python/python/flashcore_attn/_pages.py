"""Caches in pages: (pages, page, heads, head_dim), with a table that says which pages each batch entry has."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _arguments, _native, _prepare
from ._errors import ContractError, UnsupportedError


def check(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, batch: int) -> None:
    """Raises unless these can be a cache in pages and its table."""
    _arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache, block_table=table)
    _arguments.dimensions("(pages, page, heads, head_dim)", k_cache=k_cache, v_cache=v_cache)
    _arguments.dimensions("(batch, pages)", block_table=table)
    if table.dtype != torch.int32 or table.size(0) != batch:
        given = f"{table.dtype} of shape {tuple(table.shape)}"
        raise ContractError(f"block_table is {given}, possible is int32 of shape ({batch}, pages)")
    if q.device.type != "cpu" or q.dtype == torch.float64:
        raise UnsupportedError(
            "block_table is a tensor: caches in pages are read on the CPU so far, in float16, bfloat16 and float32. "
            "Give the cache as (batch, length, heads, head_dim), and leave block_table out"
        )
    _arguments.together(q=q, k_cache=k_cache, v_cache=v_cache)


def slots(table: Tensor, page: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """The page and the row in it of some tokens of each batch entry."""
    wide = places.to(torch.int64)
    if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < table.size(1) * page:
        raise ContractError(f"a batch entry needs more than the {table.size(1)} pages of {page} tokens in block_table")
    return table.to(torch.int64).gather(1, wide // page), wide % page


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: list[int] | None,
    starts: tuple[Tensor, int] | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse of queries (batch, heads, length, head_dim), or packed ones with their starts."""
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    o = q.new_zeros((*q.shape[:3], v.size(3)))
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32)
    # Rows of a table lie together, whatever it was cut from.
    most = table.size(1) * k.size(2)
    places: _native.Places = (starts, None, (table.contiguous(), most))
    _prepare.run(q, k, v, o, lse, lengths, mask, left, right, scale, softcap, places)
    return o, lse
