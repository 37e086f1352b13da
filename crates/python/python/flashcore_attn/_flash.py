"""flash-attn's functions, with its signatures and its meaning, as far as the kernels reach.

Shapes are (batch, length, heads, head_dim), packed sequences (token, heads, head_dim). Causal masks and windows are
aligned bottom-right. What the kernels do not do (dropout, ALiBi, paged caches, …) raises ``UnsupportedError``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._errors import ContractError, UnsupportedError
from ._options import mask_of
from ._torch import attend, cast, check_gradient


def _refuse(**given: object) -> None:
    """Raises for the first option that asks for something."""
    for name, value in given.items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor or (value is not None and value != 0.0):
            shown = "a tensor" if is_tensor else value
            raise UnsupportedError(
                f"{name} is {shown}: FlashCore does not do that. Leave {name} out, or use flash-attn"
            )


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of q (batch, length, heads, head_dim) to k and v with as many or fewer heads.

    With ``return_attn_probs``, also lse (batch, heads, length) and None: probabilities are never made. The result
    is always deterministic.
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    mask, left, right = mask_of(causal, False, window_size)
    result = attend(
        q, k, v, mask, left, right, scale=softmax_scale, softcap=softcap, layout="bshd", return_lse=return_attn_probs
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """The same with q, k and v in one tensor (batch, length, 3, heads, head_dim), read where they lie."""
    if qkv.dim() != 5 or qkv.size(2) != 3:
        raise ContractError(f"qkv has shape {tuple(qkv.shape)}, possible is (batch, length, 3, heads, head_dim)")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of packed sequences, (token, heads, head_dim): sequence i has the tokens from cu_seqlens[i] to
    cu_seqlens[i + 1]. One kernel call a run of sequences of the same lengths; lse is (heads, token).

    ``cu_seqlens`` is read on the host, so on a GPU the call waits for it and cannot be captured in a CUDA graph.
    """
    from . import _ops  # noqa: F401  (registers the operators)

    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ContractError(f"{name} has {x.dim()} dimensions, packed sequences have 3: (token, heads, head_dim)")
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if ends.dim() != 1 or ends.numel() < 1:
            raise ContractError(f"{name} has shape {tuple(ends.shape)}, possible is (sequences + 1,)")
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        given = f"{cu_seqlens_q.numel()} and {cu_seqlens_k.numel()}"
        raise ContractError(f"cu_seqlens_q and cu_seqlens_k have {given} elements. Give both one more than sequences")
    check_gradient(q, k, v)
    mask, left, right = mask_of(causal, False, window_size)
    o, lse = torch.ops.flashcore.attention_varlen(
        *cast(q, k, v), cu_seqlens_q, cu_seqlens_k, mask, left, right, softmax_scale, softcap
    )
    return (o, lse, None) if return_attn_probs else o


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, length, heads, head_dim) to a cache (batch, cache length, heads, head_dim) of which
    entry b holds ``cache_seqlens[b]`` tokens; ``cache_leftpad[b]`` of them, at its start, are padding.

    k and v, if given, are new tokens that are first written into the cache behind those. There is no gradient.
    """
    _refuse(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
    )
    if (k is None) != (v is None):
        raise ContractError("of k and v only one was given. Give both new keys and values, or neither")
    if k is not None and cache_seqlens is None:
        raise ContractError("k and v were given without cache_seqlens, which says where in the cache they belong")
    ends = cache_seqlens
    if isinstance(ends, int):
        ends = torch.full((q.size(0),), ends, dtype=torch.int32)
    mask, left, right = mask_of(causal, False, window_size)
    with torch.no_grad():
        if k is not None and v is not None and ends is not None:
            ends = _append(k_cache, v_cache, k, v, ends)
        return attend(
            q, k_cache, v_cache, mask, left, right, cache_leftpad, ends, softmax_scale, softcap, "bshd",
            return_softmax_lse,
        )  # fmt: skip


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Writes new tokens behind those that the cache holds. Returns how many it holds then.

    Lengths on the host are checked. On a GPU torch checks them where it writes, without the host having to wait.
    """
    if not ends.is_cuda and not torch.compiler.is_compiling():
        for b, end in enumerate(ends.tolist()):
            if not 0 <= end <= k_cache.size(1) - k.size(1):
                raise ContractError(
                    f"batch entry {b} holds {end} tokens and {k.size(1)} more do not fit its cache of {k_cache.size(1)}"
                )
    entries = torch.arange(k.size(0), device=k_cache.device).unsqueeze(1)
    places = ends.to(k_cache.device, torch.int64).unsqueeze(1) + torch.arange(k.size(1), device=k_cache.device)
    k_cache[entries, places], v_cache[entries, places] = k, v
    return ends + k.size(1)
