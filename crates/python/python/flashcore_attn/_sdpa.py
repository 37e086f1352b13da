"""``scaled_dot_product_attention`` with torch's signature and meaning."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _native
from ._errors import ContractError, UnsupportedError
from ._torch import cast, check_gradient, dispatch


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
    bool or additive where it says padding, causal or a window, which is looked at when the call runs; any other
    mask raises ``UnsupportedError``, as does dropout. A query that sees no key gives zeros.
    """
    if attn_mask is None and dropout_p == 0.0 and not is_dynamo_compiling():
        mask = "causal-top-left" if is_causal else "none"
        done = _native.torch_attention(
            query, key, value, mask, None, None, None, scale, 0.0, "bhsd", False, enable_gqa
        )  # fmt: skip
        if done is not NotImplemented:
            return done
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Everything that torch allows in shapes, brought to four dimensions and through the operators."""
    if dropout_p != 0.0:
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
    q, k, v, lead = _four(query, key, value, enable_gqa)
    q, k, v = (x if x.stride(3) == 1 or x.size(3) <= 1 else x.contiguous() for x in (q, k, v))
    if attn_mask is None:
        mask = "causal-top-left" if is_causal else "none"
        o = dispatch(q, k, v, mask, None, None, None, None, scale, 0.0, "bhsd", False)
    else:
        o = masked(q, k, v, _mask_of(attn_mask, lead, q, k), scale)
    return o if lead is None else o.reshape(*lead, *o.shape[-2:])


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float | None, softcap: float = 0.0) -> Tensor:
    """Attention with a mask that broadcasts to (batch, heads, queries, keys)."""
    from . import _ops  # noqa: F401  (registers the operators)

    if attn_mask.dtype not in (torch.bool, q.dtype, torch.float32):
        raise ContractError(f"attn_mask is {attn_mask.dtype}, possible are bool and the dtype of query")
    check_gradient(q, k, v)
    return torch.ops.flashcore.attention_masked(q, k, v, attn_mask, scale, softcap)[0]


def _four(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool):
    """The tensors as (batch, heads, length, head_dim), and the leading sizes of the result if it had others."""
    same_batch = query.dim() == key.dim() == value.dim() == 4 and query.size(0) == key.size(0) == value.size(0)
    if same_batch and (enable_gqa or query.size(1) == key.size(1) == value.size(1)):
        return query, key, value, None
    if enable_gqa:
        if query.dim() != 4:
            raise ContractError("enable_gqa takes 4 dimensions: (batch, heads, length, head_dim)")
        lead = torch.broadcast_shapes(query.shape[:1], key.shape[:1], value.shape[:1])
        return (*(x.expand(*lead, *x.shape[1:]) for x in (query, key, value)), None)
    try:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ContractError(
            f"query, key and value have leading sizes {tuple(query.shape[:-2])}, {tuple(key.shape[:-2])} and "
            f"{tuple(value.shape[:-2])}, which do not broadcast. For fewer key than query heads give enable_gqa=True"
        ) from None
    heads = lead[-1] if lead else 1

    def four(x: Tensor) -> Tensor:
        return x.expand(*lead, *x.shape[-2:]).reshape(-1, heads, *x.shape[-2:])

    return four(query), four(key), four(value), lead


def _mask_of(attn_mask: Tensor, lead, q: Tensor, k: Tensor) -> Tensor:
    """The mask as it broadcasts to (batch, heads, queries, keys), still unexpanded where it can be."""
    if attn_mask.dim() < 2:
        attn_mask = attn_mask.expand(q.size(2), k.size(2))
    if attn_mask.size(-1) != k.size(2):
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], k.size(2))
    if lead is not None and attn_mask.dim() > 2:
        attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:]).reshape(q.size(0), q.size(1), *attn_mask.shape[-2:])
    return attn_mask
