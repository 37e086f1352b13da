"""``scaled_dot_product_attention`` with torch's signature and semantics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _arguments, _native
from ._errors import ContractError, UnsupportedError
from ._options import number
from ._torch import cast, check_gradient, check_whole, dispatch

#: torch has no types for it.
_broadcast_shapes: Any = torch.broadcast_shapes


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by FlashCore.

    Shapes are (..., heads, length, head_dim). ``is_causal`` is aligned top-left, as in torch. ``attn_mask`` may be
    bool or additive. It must describe padding, causality or a window, which is checked when the call runs; any other
    mask raises ``UnsupportedError``, as does dropout. A query that sees no key gives zeros.
    """
    plain = attn_mask is None and dropout_p == 0.0 and (scale is None or (type(scale) is float and scale > 0.0))
    if plain and not is_dynamo_compiling():
        mask = "causal-top-left" if is_causal else "none"
        done = _native.torch_attention(
            query, key, value, mask, None, None, None, scale, 0.0, "bhsd", False, bool(enable_gqa)
        )  # fmt: skip
        if done is not NotImplemented:
            o: Tensor = done
            return o
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _general(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Everything that torch allows in shapes, brought to four dimensions and given to the operators."""
    _arguments.tensors(query=query, key=key, value=value)
    if number("dropout_p", dropout_p) != 0.0:
        raise UnsupportedError(
            f"dropout_p is {dropout_p}, possible is 0: FlashCore has no dropout. Use torch's attention for it, and "
            "model.eval() where it is not meant"
        )
    if attn_mask is not None and is_causal:
        raise ContractError("attn_mask and is_causal were both given. Put causality into the mask, or leave one out")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ContractError(f"{name} has {x.dim()} dimensions, possible are 2 and more: (..., length, head_dim)")
    query, key, value = cast(query, key, value)
    _arguments.together(query=query, key=key, value=value)
    if scale is not None:
        query, scale = _positive(query, number("scale", scale))
    q, k, v, lead = _four(query, key, value, enable_gqa)
    if attn_mask is None:
        mask = "causal-top-left" if is_causal else "none"
        o = dispatch(q, k, v, mask, None, None, None, None, scale, 0.0, "bhsd")[0]
    else:
        _arguments.tensors(attn_mask=attn_mask)
        o = masked(q, k, v, _mask_of(attn_mask, lead, q, k), scale)
    return o if lead is None else o.reshape(*lead, *o.shape[-2:])


def _positive(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a scale above 0, which is what the kernels take."""
    if scale < 0.0:
        return -query, -scale
    return (query * 0.0, 1.0) if scale == 0.0 else (query, scale)


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float | None, softcap: float = 0.0) -> Tensor:
    """Attention with a mask that broadcasts to (batch, heads, queries, keys)."""
    from . import _ops  # noqa: F401  (registers the operators)

    if attn_mask.dtype not in (torch.bool, q.dtype, torch.float32):
        raise ContractError(f"attn_mask is {attn_mask.dtype}, possible are bool and the dtype of query")
    if attn_mask.device != q.device:
        raise ContractError(f"attn_mask lies on {attn_mask.device}, but query on {q.device}. Copy it there")
    scale, softcap = _arguments.options(scale, softcap)
    _arguments.fit(q, k, v)
    check_whole()
    check_gradient(q, k, v)
    o: Tensor = torch.ops.flashcore.attention_masked(q, k, v, attn_mask, scale, softcap)[0]
    return o


def _four(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:  # fmt: skip
    """The tensors as (batch, heads, length, head_dim), and the leading sizes of the result if it had others."""
    same_batch = query.dim() == key.dim() == value.dim() == 4 and query.size(0) == key.size(0) == value.size(0)
    if same_batch and key.size(1) == value.size(1) and (enable_gqa or query.size(1) == key.size(1)):
        return query, key, value, None
    # With enable_gqa heads are not broadcast: each head of key and value serves a group of query heads.
    last = 3 if enable_gqa else 2
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3:
        raise ContractError("enable_gqa takes 3 dimensions and more: (..., heads, length, head_dim)")
    try:
        lead: tuple[int, ...] = tuple(_broadcast_shapes(*(x.shape[:-last] for x in (query, key, value))))
    except RuntimeError:
        raise ContractError(
            f"query, key and value have leading sizes {tuple(query.shape[:-2])}, {tuple(key.shape[:-2])} and "
            f"{tuple(value.shape[:-2])}, which do not broadcast. For fewer key than query heads give enable_gqa=True"
        ) from None
    if enable_gqa and key.size(-3) != value.size(-3):
        heads = query.size(-3)
        key, value = (x.repeat_interleave(_served(heads, x.size(-3)), -3) for x in (key, value))
    batch = lead if enable_gqa else lead[:-1]

    def four(x: Tensor) -> Tensor:
        # The last of the leading sizes is the heads; without any there is one.
        x = x.expand(*lead, *x.shape[-last:])
        x = x if x.dim() > 2 else x.unsqueeze(0)
        return x.reshape(math.prod(batch), *x.shape[-3:])

    result = (*batch, query.size(-3)) if enable_gqa else lead
    return four(query), four(key), four(value), result


def _served(heads: int, heads_kv: int) -> int:
    """How many query heads a kv head serves."""
    if heads_kv == 0 or heads % heads_kv != 0:
        raise ContractError(f"query has {heads} heads, but they must be a multiple of key's and value's {heads_kv}")
    return heads // heads_kv


def _mask_of(attn_mask: Tensor, lead: tuple[int, ...] | None, q: Tensor, k: Tensor) -> Tensor:
    """The mask as it broadcasts to (batch, heads, queries, keys), still unexpanded where it can be."""
    sizes = tuple(q.shape[:2]) if lead is None else lead
    whole = (*sizes, q.size(2), k.size(2))
    over = [x for x in zip(reversed(attn_mask.shape), reversed(whole), strict=False) if x[0] not in (1, x[1])]
    if over or attn_mask.dim() > len(whole):
        raise ContractError(f"attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {whole}")
    if attn_mask.dim() < 2:
        attn_mask = attn_mask.expand(q.size(2), k.size(2))
    if attn_mask.size(-1) != k.size(2):
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], k.size(2))
    if lead is not None and attn_mask.dim() > 2:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:]).reshape(q.size(0), q.size(1), *attn_mask.shape[-2:])
    return attn_mask
