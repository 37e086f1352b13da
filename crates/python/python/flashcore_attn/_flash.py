"""flash-attn's functions, with its signatures and semantics, as far as the kernels support them.

Shapes are (batch, length, heads, head_dim), packed sequences (token, heads, head_dim). Causal masks and windows are
aligned bottom-right. The arguments are flash-attn 2's; those of flash-attn 3 can be given by name. What the kernels do
not support (dropout, ALiBi, …) raises ``UnsupportedError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from . import _arguments, _placed
from ._errors import ContractError, UnsupportedError
from ._options import mask_of, number
from ._torch import attend, cast, check_gradient, check_whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: How far a window reaches to the left and to the right; -1 is no limit.
Window = tuple[int, int]


class Fa3Common(TypedDict, total=False):
    # Accepted as hints and ignored: FlashCore plans the work itself.
    pack_gqa: bool | None
    sm_margin: int
    # Refused unless None or 0; flash_attn_func takes descales for float8_e4m3fn, and a cache those of k and v.
    qv: Tensor | None
    q_descale: float | Tensor | None
    k_descale: float | Tensor | None
    v_descale: float | Tensor | None
    attention_chunk: int


class Fa3(Fa3Common, total=False):
    """What flash-attn 3 takes in addition to the arguments of flash-attn 2."""

    num_splits: int


class Fa3Varlen(Fa3, total=False):
    """The same for packed sequences, and a check of ours."""

    check_tables: bool


_HINTS = ("num_splits", "pack_gqa", "sm_margin")
_ELSE = "FlashCore does not do that. Leave {name} out, or use flash-attn"
_FLOAT8 = "it goes with float8_e4m3fn, in flash_attn_func or a cache. Scale wider types before, and leave {name} out"
DESCALES = ("q_descale", "k_descale", "v_descale")

#: What is refused unless it is None or 0, and what to do instead.
_REFUSED = {
    "qv": _ELSE,
    "q_descale": _FLOAT8,
    "k_descale": _FLOAT8,
    "v_descale": _FLOAT8,
    "attention_chunk": "attention in chunks is not done. Use window_size, or one call per chunk, and leave {name} out",
    "dropout_p": "there is no dropout here. Leave {name} out, or use flash-attn",
    "alibi_slopes": "a bias is not fused. Leave {name} out, or use flash-attn",
}
FA3 = (*_HINTS, "qv", "q_descale", "k_descale", "v_descale", "attention_chunk")


def refuse(**given: object) -> None:
    """Raises for the first option that is neither None nor 0."""
    for name, value in given.items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor or (value is not None and value != 0):
            shown = "a tensor" if is_tensor else repr(value)
            raise UnsupportedError(f"{name} is {shown}: {_REFUSED[name].format(name=name)}")


def check_fa3(function: str, known: tuple[str, ...], given: dict[str, Any]) -> None:
    """Raises for options that flash-attn 3 has and FlashCore does not, and for unknown ones."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
        if name in _REFUSED:
            refuse(**{name: value})


def _dropout(dropout_p: float) -> None:
    """Raises unless it is 0. What is not a number is an argument of flash-attn 3 in the place of flash-attn 2's."""
    number("dropout_p", dropout_p)
    refuse(dropout_p=dropout_p)


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
    refuse(alibi_slopes=alibi_slopes)
    given: dict[str, Any] = {**fa3}
    eight = isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn
    descales = tuple(given.pop(name, None) for name in DESCALES) if eight else None
    if given:
        check_fa3("flash_attn_func", FA3, given)
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
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ...,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ...,
    *, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ..., **fa3: Unpack[Fa3Varlen],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ...,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], block_table: Tensor | None = ...,
    seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ..., **fa3: Unpack[Fa3Varlen],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ...,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., block_table: Tensor | None = ...,
    *, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ..., **fa3: Unpack[Fa3Varlen],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    *, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, **fa3: Unpack[Fa3Varlen],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Attention of packed sequences, (token, heads, head_dim): sequence i has the tokens from cu_seqlens[i] to
    cu_seqlens[i + 1], and uses the first seqused[i] of them. lse is (heads, token). Tokens that belong to no sequence,
    or are not used, give zeros and lse -inf.

    All sequences are one call. On a GPU the host does not read ``cu_seqlens`` there, as long as ``max_seqlen`` bound
    how long sequences are, and a CUDA graph reads them again at every replay. Where a GPU has no kernel for packed
    sequences (float32, head dims above 256), neighbours of the same lengths are a call, and the host reads the lengths.

    With ``block_table``, int32 (sequence, pages), k and v are a cache in pages, (page, token, heads, head_dim), and
    ``seqused_k``, or else cu_seqlens_k, say how many keys each sequence has; there is no gradient. On a GPU, with
    ``check_tables`` the call waits, and refuses starts, lengths and tables that lead nowhere.
    """
    from . import _ops  # noqa: F401  (registers the operators)

    _dropout(dropout_p)
    refuse(alibi_slopes=alibi_slopes)
    given: dict[str, Any] = {**fa3}
    checked = bool(given.pop("check_tables", False))
    if given:
        check_fa3("flash_attn_varlen_func", FA3, given)
    _arguments.tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    mask, left, right = mask_of(causal, False, window_size)
    if block_table is not None:
        options = (mask, left, right, softmax_scale, softcap)
        ends_k, used = cu_seqlens_k, (seqused_q, seqused_k)
        o, lse = _varlen_paged(
            q, k, v, (cu_seqlens_q, ends_k), used, (max_seqlen_q, max_seqlen_k), block_table, options, checked
        )
        return (o, lse, None) if return_attn_probs else o
    if cu_seqlens_k is None:
        raise ContractError("cu_seqlens_k is None. Give it, or a cache in pages with block_table and seqused_k")
    _arguments.tensors(cu_seqlens_k=cu_seqlens_k)
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k)
    sequences = cu_seqlens_q.numel() - 1
    for name, used_of in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used_of is not None:
            _arguments.tensors(**{name: used_of})
            _arguments.lengths(name, used_of, sequences, q.device)
    check_whole()
    check_gradient(q, k, v)
    scale, softcap = _arguments.options(softmax_scale, softcap)
    q, k, v = cast(q, k, v)
    _arguments.together(q=q, k=k, v=v)
    longest = [
        None if most is None else _placed.bound(name, most)
        for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    ]
    o, lse = torch.ops.flashcore.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, mask, left, right, scale, softcap, *longest, checked
    )
    return (o, lse, None) if return_attn_probs else o


def _varlen_paged(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor | None], used: tuple[Tensor | None, Tensor | None],
    most: tuple[int | None, int | None], table: Tensor, options: tuple[str, int | None, int | None, Any, Any],
    checked: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Packed queries (token, heads, head_dim) and a cache in pages."""
    (ends_q, ends_k), (used_q, used_k) = ends, used
    _arguments.dimensions("(token, heads, head_dim)", q=q)
    starts = _placed.starts_of("cu_seqlens_q", ends_q, q.device)
    sequences = starts.numel() - 1
    _placed.check_table(q, k, v, table, sequences, "(pages, page, heads, head_dim)")
    if used_k is not None:
        _arguments.tensors(seqused_k=used_k)
        _arguments.lengths("seqused_k", used_k, sequences, q.device)
        lengths = used_k
    elif ends_k is None:
        raise ContractError("cu_seqlens_k and seqused_k are None. One of them must say how many keys there are")
    else:
        lengths = _placed.starts_of("cu_seqlens_k", ends_k, q.device).diff()
        if lengths.numel() != sequences:
            given = f"{sequences + 1} and {lengths.numel() + 1}"
            raise ContractError(
                f"cu_seqlens_q and cu_seqlens_k have {given} elements. Give both one more than sequences"
            )
    if used_q is not None:
        from ._ops import with_none, with_unused

        _arguments.tensors(seqused_q=used_q)
        _arguments.lengths("seqused_q", used_q, sequences, q.device)
        starts, lengths = with_unused(starts, used_q.to(starts)), with_none(lengths)
        table = table.repeat_interleave(2, 0)
    longest_q = _placed.longest_of("max_seqlen_q", most[0], ends_q, q.size(0))
    longest_k = None if most[1] is None else _placed.bound("max_seqlen_k", most[1])
    o, lse = _placed.attend(
        q.transpose(0, 1).unsqueeze(0), k.transpose(1, 2), v.transpose(1, 2), lengths, options, q_starts=starts,
        longest_q=longest_q, pages=table, longest_k=longest_k, checked=checked,
    )  # fmt: skip
    return o[0].transpose(0, 1), lse[0]


def check_packed(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> None:
    """Raises unless these can be packed sequences."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ContractError(f"{name} has {x.dim()} dimensions, packed sequences have 3: (token, heads, head_dim)")
    _placed.check_ends("cu_seqlens_q", ends_q, q.device)
    _placed.check_ends("cu_seqlens_k", ends_k, q.device)
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
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3Varlen],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3Varlen],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3Varlen],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3Varlen],
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
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., **fa3: Unpack[Fa3Varlen],
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], **fa3: Unpack[Fa3Varlen],
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., **fa3: Unpack[Fa3Varlen],
) -> Tensor | tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **fa3: Unpack[Fa3Varlen],
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """``flash_attn_varlen_func`` with k and v in one tensor (token, 2, heads, head_dim), read in place."""
    k, v = _unpacked("kv", kv, 1, 2, "(token, 2, heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **fa3
    )  # fmt: skip
