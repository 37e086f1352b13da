"""flash-attn's functions, with its signatures and semantics, as far as the kernels support them.

Shapes are (batch, length, heads, head_dim), packed sequences (token, heads, head_dim). Causal masks and windows are
aligned bottom-right. The arguments are flash-attn 2's; those of flash-attn 3 can be given by name. What the kernels do
not support (dropout, ALiBi, …) raises ``UnsupportedError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from . import _arguments, _pages
from ._errors import ContractError, UnsupportedError
from ._options import mask_of, number
from ._torch import attend, cast, check, check_gradient, check_whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: How far a window reaches to the left and to the right; -1 is no limit.
Window = tuple[int, int]


class _Fa3(TypedDict, total=False):
    # Accepted as hints and ignored: FlashCore plans the work itself.
    pack_gqa: bool | None
    sm_margin: int
    # Refused unless None or 0; flash_attn_func takes descales for tensors of float8_e4m3fn.
    qv: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    attention_chunk: int


class Fa3(_Fa3, total=False):
    """What flash-attn 3 takes in addition to the arguments of flash-attn 2."""

    num_splits: int


class Fa3Cache(_Fa3, total=False):
    """What flash-attn 3's cache takes in addition to the arguments of flash-attn 2's."""

    scheduler_metadata: Tensor | None
    max_seqlen_q: int | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None


_HINTS = ("num_splits", "pack_gqa", "sm_margin")
_ELSE = "FlashCore does not do that. Leave {name} out, or use flash-attn"
_FLOAT8 = "it goes with float8_e4m3fn, in flash_attn_func. Scale wider types before the call, and leave {name} out"
_DESCALES = ("q_descale", "k_descale", "v_descale")
_PACKED_CACHE = "packed tokens do not go to a cache here. Give q, k and v as (batch, length, heads, head_dim)"
_ROTATE = "positions are not rotated here. Rotate q and k before the call, and leave {name} out"

#: What is refused unless it is None or 0, and what to do instead.
_REFUSED = {
    "qv": _ELSE,
    "q_descale": _FLOAT8,
    "k_descale": _FLOAT8,
    "v_descale": _FLOAT8,
    "attention_chunk": "attention in chunks is not done. Use window_size, or one call per chunk, and leave {name} out",
    "dropout_p": "there is no dropout here. Leave {name} out, or use flash-attn",
    "alibi_slopes": "a bias is not fused. Leave {name} out, or use flash-attn",
    "cu_seqlens_q": _PACKED_CACHE,
    "cu_seqlens_k_new": _PACKED_CACHE,
    "rotary_cos": _ROTATE,
    "rotary_sin": _ROTATE,
    "rotary_seqlens": _ROTATE,
    "cache_batch_idx": "entries are not looked up. Index the cache before the call, and leave {name} out",
}
_FA3 = (*_HINTS, "qv", "q_descale", "k_descale", "v_descale", "attention_chunk")
_FA3_CACHE = (
    *_FA3,
    "scheduler_metadata",
    "max_seqlen_q",
    "page_table",
    "cu_seqlens_q",
    "cu_seqlens_k_new",
    "rotary_seqlens",
)


def _refuse(**given: object) -> None:
    """Raises for the first option that is neither None nor 0."""
    for name, value in given.items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor or (value is not None and value != 0):
            shown = "a tensor" if is_tensor else repr(value)
            raise UnsupportedError(f"{name} is {shown}: {_REFUSED[name].format(name=name)}")


def _fa3(function: str, known: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raises for options that flash-attn 3 has and FlashCore does not, and for unknown ones."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
        if name in _REFUSED:
            _refuse(**{name: value})


def _dropout(dropout_p: float) -> None:
    """Raises unless it is 0. What is not a number is an argument of flash-attn 3 in the place of flash-attn 2's."""
    number("dropout_p", dropout_p)
    _refuse(dropout_p=dropout_p)


def _unpacked(name: str, packed: Tensor, dim: int, count: int, shape: str) -> tuple[Tensor, ...]:
    """The tensors that are packed into one."""
    _arguments.tensors(**{name: packed})
    if packed.dim() != shape.count(",") + 1 or packed.size(dim) != count:
        raise ContractError(f"{name} has shape {tuple(packed.shape)}, possible is {shape}")
    return packed.unbind(dim)


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Attention of q (batch, length, heads, head_dim) to k and v with as many or fewer heads.

    With ``return_attn_probs``, also lse (batch, heads, length) and None: probabilities are never stored. The result
    is always deterministic.
    """
    _dropout(dropout_p)
    _refuse(alibi_slopes=alibi_slopes)
    given: dict[str, Any] = {**fa3}
    eight = isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn
    descales = tuple(given.pop(name, None) for name in _DESCALES) if eight else None
    if given:
        _fa3("flash_attn_func", _FA3, given)
    mask, left, right = mask_of(causal, False, window_size)
    if descales is not None:
        from ._float8 import attend as attend_float8

        o, lse = attend_float8(
            q, k, v, mask, left, right, None, softmax_scale, softcap, "bshd", True, None, descales
        )  # fmt: skip
        return (o, lse, None) if return_attn_probs else o
    if not return_attn_probs:
        return attend(q, k, v, mask, left, right, None, None, softmax_scale, softcap, "bshd")
    o, lse = attend(q, k, v, mask, left, right, None, None, softmax_scale, softcap, "bshd", return_lse=True)
    return o, lse, None


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """The same with q, k and v in one tensor (batch, length, 3, heads, head_dim), read in place."""
    q, k, v = _unpacked("qkv", qkv, 2, 3, "(batch, length, 3, heads, head_dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **fa3
    )  # fmt: skip


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """The same with k and v in one tensor (batch, length, 2, heads, head_dim), read in place."""
    k, v = _unpacked("kv", kv, 2, 2, "(batch, length, 2, heads, head_dim)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **fa3
    )  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ...,
    *, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ..., **fa3: Unpack[Fa3],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], block_table: Tensor | None = ...,
    seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ..., **fa3: Unpack[Fa3],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., block_table: Tensor | None = ...,
    *, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ..., **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    *, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Attention of packed sequences, (token, heads, head_dim): sequence i has the tokens from cu_seqlens[i] to
    cu_seqlens[i + 1], and uses the first seqused[i] of them. One kernel call for each run of sequences of the same
    lengths; lse is (heads, token). Tokens that belong to no sequence, or are not used, give zeros and lse -inf.

    ``cu_seqlens`` is read on the host, so on a GPU the call waits for it and cannot be captured in a CUDA graph. On the
    CPU all sequences are one call. With ``block_table``, k and v are a cache in pages, (page, token, heads, head_dim),
    and cu_seqlens_k says how many keys each sequence has; on the CPU, and without a gradient.
    """
    from . import _ops  # noqa: F401  (registers the operators)

    _dropout(dropout_p)
    _refuse(alibi_slopes=alibi_slopes)
    if fa3:
        _fa3("flash_attn_varlen_func", _FA3, {**fa3})
    _arguments.tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is not None:
        if seqused_q is not None:
            raise UnsupportedError("seqused_q goes with packed keys. Leave it out, or leave block_table out")
        mask, left, right = mask_of(causal, False, window_size)
        o, lse = _varlen_paged(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, (mask, left, right, softmax_scale, softcap)
        )
        return (o, lse, None) if return_attn_probs else o
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    sequences = cu_seqlens_q.numel() - 1
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            _arguments.tensors(**{name: used})
            _arguments.lengths(name, used, sequences)
    check_whole()
    check_gradient(q, k, v)
    mask, left, right = mask_of(causal, False, window_size)
    scale, softcap = _arguments.options(softmax_scale, softcap)
    q, k, v = cast(q, k, v)
    _arguments.together(q=q, k=k, v=v)
    o, lse = torch.ops.flashcore.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, mask, left, right, scale, softcap
    )
    return (o, lse, None) if return_attn_probs else o


def _varlen_paged(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, used_k: Tensor | None, table: Tensor,
    options: tuple[str, int | None, int | None, float | None, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Packed queries (token, heads, head_dim) and a cache in pages."""
    mask, left, right, scale, softcap = options
    scale, softcap = _arguments.options(scale, softcap)
    if q.dim() != 3:
        raise ContractError(f"q has {q.dim()} dimensions, packed sequences have 3: (token, heads, head_dim)")
    sequences = ends_q.numel() - 1
    if ends_k.numel() != sequences + 1:
        given = f"{ends_q.numel()} and {ends_k.numel()}"
        raise ContractError(f"cu_seqlens_q and cu_seqlens_k have {given} elements. Give both one more than sequences")
    _pages.check(q, k, v, table, sequences)
    lengths = (ends_k.diff() if used_k is None else used_k).tolist()
    starts = ends_q.to(torch.int32)
    longest = int(starts.diff().max()) if sequences > 0 else 0
    with torch.no_grad():
        o, lse = _pages.attend(
            q.transpose(0, 1).unsqueeze(0), k, v, table, lengths, (starts, max(longest, 0)),
            mask, left, right, scale, softcap,
        )  # fmt: skip
    return o[0].transpose(0, 1).contiguous(), lse[0]


def check_packed(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> None:
    """Raises unless these can be packed sequences."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ContractError(f"{name} has {x.dim()} dimensions, packed sequences have 3: (token, heads, head_dim)")
    for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k)):
        if ends.dim() != 1 or ends.numel() < 1:
            raise ContractError(f"{name} has shape {tuple(ends.shape)}, possible is (sequences + 1,)")
        if ends.is_floating_point() or ends.is_complex() or ends.dtype == torch.bool:
            raise TypeError(f"{name} is {ends.dtype}, possible are integers")
    if ends_q.numel() != ends_k.numel():
        given = f"{ends_q.numel()} and {ends_k.numel()}"
        raise ContractError(f"cu_seqlens_q and cu_seqlens_k have {given} elements. Give both one more than sequences")
    # Taken as one sequence, the tokens have four dimensions.
    _arguments.fit(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """``flash_attn_varlen_func`` with q, k and v in one tensor (token, 3, heads, head_dim), read in place."""
    q, k, v = _unpacked("qkv", qkv, 1, 3, "(token, 3, heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **fa3
    )  # fmt: skip


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """``flash_attn_varlen_func`` with k and v in one tensor (token, 2, heads, head_dim), read in place."""
    k, v = _unpacked("kv", kv, 1, 2, "(token, 2, heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **fa3
    )  # fmt: skip


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
    entry b holds ``cache_seqlens[b]`` tokens; ``cache_leftpad[b]`` of them, at its start, are padding. With
    ``block_table``, int32 (batch, pages), the cache is (pages, page, heads, head_dim), on the CPU.

    k and v, if given, are new tokens that are first written into the cache after those. There is no gradient.
    """
    _refuse(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        alibi_slopes=alibi_slopes,
    )
    given: dict[str, Any] = {**fa3}
    # flash-attn 3's name for it.
    table = given.pop("page_table", None)
    block_table = table if block_table is None else block_table
    if given:
        _fa3("flash_attn_with_kvcache", _FA3_CACHE, given)
    if block_table is None:
        check(q, k_cache, v_cache, "bshd")
    else:
        _arguments.tensors(q=q)
        _arguments.dimensions("(batch, length, heads, head_dim)", q=q)
        _pages.check(q, k_cache, v_cache, block_table, q.size(0))
    if (k is None) != (v is None):
        raise ContractError("of k and v only one was given. Give both new keys and values, or neither")
    if k is not None and cache_seqlens is None:
        raise ContractError("k and v were given without cache_seqlens, which says where in the cache they belong")
    ends = _held(cache_seqlens, q.size(0))
    mask, left, right = mask_of(causal, False, window_size)
    with torch.no_grad():
        if k is not None and v is not None and ends is not None:
            ends = _append(k_cache, v_cache, k, v, ends, block_table)
        if block_table is not None:
            if cache_leftpad is not None:
                raise UnsupportedError("cache_leftpad goes with a cache that is not in pages. Leave one of them out")
            scale, softcap = _arguments.options(softmax_scale, softcap)
            o, lse = _pages.attend(
                q.transpose(1, 2), k_cache, v_cache, block_table, None if ends is None else ends.tolist(), None,
                mask, left, right, scale, softcap,
            )  # fmt: skip
            o = o.transpose(1, 2)
            return (o, lse) if return_softmax_lse else o
        return attend(
            q, k_cache, v_cache, mask, left, right, cache_leftpad, ends, softmax_scale, softcap, "bshd",
            return_softmax_lse,
        )  # fmt: skip


def _held(cache_seqlens: object, batch: int) -> Tensor | None:
    """How many tokens each entry of a cache holds."""
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens < 1 << 31:
            raise ContractError(f"cache_seqlens is {cache_seqlens}, possible are integers from 0 on")
        return torch.full((batch,), cache_seqlens, dtype=torch.int32)
    given = _arguments.lengths("cache_seqlens", cache_seqlens, batch)
    return given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, ends: Tensor, table: Tensor | None
) -> Tensor:  # fmt: skip
    """Writes new tokens after those that the cache holds. Returns how many it holds then.

    Lengths on the host are checked. On a GPU torch checks them where it writes, without the host having to wait.
    """
    _arguments.tensors(k=k, v=v)
    batch = k_cache.size(0) if table is None else table.size(0)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        shape = (batch, k.size(1) if k.dim() == 4 else "length", cache.size(2), cache.size(3))
        if tuple(new.shape) != shape:
            raise ContractError(f"{name} has shape {tuple(new.shape)}, possible for its cache is {shape}")
    _arguments.together(k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    if table is not None:
        new = ends.to(torch.int64).unsqueeze(1) + torch.arange(k.size(1))
        at = _pages.slots(table, k_cache.size(1), new)
        k_cache[at], v_cache[at] = k, v
        return ends + k.size(1)
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
