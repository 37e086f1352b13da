"""Calls on torch tensors: the thin path for plain eager calls, the registered operator for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import _arguments, _native
from ._errors import ContractError, UnsupportedError


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the output: q's shape with v's head_dim, in the order that q has in memory, and contiguous rows."""
    if q.size(3) == v.size(3) and (q.stride(3) == 1 or q.size(3) == 1):
        o = torch.empty_like(q)
        # Where elements of q share memory, torch may put another dimension inside.
        if o.stride(3) == 1 or o.size(3) == 1:
            return o
    first, second, third, last = q.size(0), q.size(1), q.size(2), v.size(3)
    if q.stride(1) < q.stride(2):
        return q.new_empty((first, third, second, last)).transpose(1, 2)
    return q.new_empty((first, second, third, last))


def empty_lse(q: Tensor, layout: str = "bhsd") -> Tensor:
    """Memory for lse, (batch, heads, length)."""
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    return q.new_empty((q.size(0), q.size(heads), q.size(length)), dtype=lse_dtype(q))


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of lse: float64 for float64, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


#: torch's function when it was last looked at, and torch's context_parallel had not replaced it.
_known: object = F.scaled_dot_product_attention


def _cut() -> bool:
    """Whether torch's context_parallel is active, under which every process has a part of the sequence."""
    global _known
    now = F.scaled_dot_product_attention
    if "_distribute_function.<locals>" in getattr(now, "__qualname__", ""):
        return True
    _known = now
    return False


def check_whole() -> None:
    """Raises where attention would miss the parts of the sequence that other processes have."""
    if not is_dynamo_compiling() and F.scaled_dot_product_attention is not _known and _cut():
        raise UnsupportedError(
            "torch's context_parallel is active: this process has a part of the sequence, and only "
            "torch.nn.functional.scaled_dot_product_attention knows of the others. Call that function, on a GPU after "
            "torch.nn.attention.activate_flash_attention_impl('FlashCore'), or use "
            "flashcore_attn.distributed.ring_attention without context_parallel"
        )


def _watchers() -> list[Callable[[], object]]:
    """Functions that return true where an operator must not be bypassed."""
    names = ("_len_torch_dispatch_stack", "_is_any_autocast_enabled", "_is_tracing")
    watchers: list[Callable[[], object]] = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
    # Tensors that look plain may carry derivatives of forward mode, or be a part of a sequence.
    watchers.append(lambda: forward_ad._current_level >= 0 or (F.scaled_dot_product_attention is not _known and _cut()))
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is not None and hasattr(functorch, "maybe_current_level"):
        watchers.append(functorch.maybe_current_level)
    return watchers


#: Whether tensors are read without going through Python.
DIRECT: bool = _native.bind_torch(
    [Tensor, torch.nn.Parameter], torch.is_grad_enabled, _watchers(), torch.empty_like, empty_output, empty_lse
)

_gradients = "recompute"


def set_gradients(mode: str) -> None:
    """How gradients are computed: ``"recompute"`` (the default) runs attention's backward pass, which computes
    probabilities again from lse; ``"error"`` raises when a call would need them, so that nothing runs unnoticed.

    The same inputs give the same bits. Gradients of float64, and on a GPU those of float32 and of head dims over 256,
    are computed in torch's operations, block by block."""
    global _gradients
    if mode not in ("recompute", "error"):
        raise ContractError(f"gradients are '{mode}', possible are 'recompute' and 'error'")
    _gradients = mode


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of these carries a derivative of forward mode."""
    if forward_ad._current_level < 0:
        return False
    unpack: Any = forward_ad.unpack_dual  # torch has no types for it.
    return any(unpack(x).tangent is not None for x in tensors)


def check_gradient(*tensors: Tensor) -> None:
    """Raises if a gradient is needed and the user has turned gradients off."""
    if _gradients == "error" and _wants_gradient(*tensors):
        raise UnsupportedError(
            "a gradient is asked for, and set_gradients('error') is on. Call under torch.no_grad(), or allow "
            "'recompute'"
        )


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The dtype that autocast asks for, where it is on, as torch's own attention does it."""
    kind = q.device.type
    # torch does not know autocast for devices such as "meta".
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _as_tensor(name: str, lengths: Sequence[int] | Tensor | None, q: Tensor) -> Tensor | None:
    if lengths is None:
        return None
    given = _arguments.lengths(name, lengths, q.size(0), q.device)
    return given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)


def as_list(lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    """Lengths on the host. For those on a GPU this waits for a copy."""
    if lengths is None or isinstance(lengths, list):
        return lengths
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def native_lengths(lengths: Sequence[int] | Tensor | None, len_k: int) -> list[int] | Tensor | None:
    """Lengths as the engine takes them. Those on a GPU stay there: the host does not read them, but they are clamped,
    so that none leads beyond the keys."""
    if isinstance(lengths, Tensor) and lengths.is_cuda:
        return lengths.clamp(0, len_k).to(torch.int32).contiguous()
    return as_list(lengths)


def check(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    """Raises unless a call can take these tensors."""
    _arguments.tensors(q=q, k=k, v=v)
    if layout not in ("bhsd", "bshd"):
        raise ContractError(
            f"layout is {layout!r}, possible are 'bhsd' (batch, heads, length, head_dim) and 'bshd' (batch, length, "
            "heads, head_dim)"
        )
    order = "(batch, heads, length, head_dim)" if layout == "bhsd" else "(batch, length, heads, head_dim)"
    _arguments.dimensions(order, q=q, k=k, v=v)


def stand_ins(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors with the shapes and layouts that these have once they are padded or copied; their values are not set."""
    from ._prepare import stand_in

    check(q, k, v, layout)
    _arguments.together((*_arguments.DTYPES, torch.float8_e4m3fn), q=q, k=k, v=v)
    return stand_in(q), stand_in(k), stand_in(v)


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: str, left: int | None = ..., right: int | None = ...,
    key_starts: Sequence[int] | Tensor | None = ..., key_ends: Sequence[int] | Tensor | None = ...,
    scale: float | None = ..., softcap: float = ..., layout: str = ..., return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: str, left: int | None = ..., right: int | None = ...,
    key_starts: Sequence[int] | Tensor | None = ..., key_ends: Sequence[int] | Tensor | None = ...,
    scale: float | None = ..., softcap: float = ..., layout: str = ..., *, return_lse: Literal[True],
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: str, left: int | None = ..., right: int | None = ...,
    key_starts: Sequence[int] | Tensor | None = ..., key_ends: Sequence[int] | Tensor | None = ...,
    scale: float | None = ..., softcap: float = ..., layout: str = ..., return_lse: bool = ...,
    out: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    left: int | None = None,
    right: int | None = None,
    key_starts: Sequence[int] | Tensor | None = None,
    key_ends: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on torch tensors; batch entry b has the keys from key_starts[b] to key_ends[b]. The output, or with
    ``return_lse`` (output, lse)."""
    if out is not None:
        return _into_given(
            q, k, v, mask, left, right, key_starts, key_ends, scale, softcap, layout, return_lse, out
        )  # fmt: skip
    if key_starts is None and not is_dynamo_compiling() and not _arguments.wrapped(key_ends):
        lengths = None
        if key_ends is not None:
            check(q, k, v, layout)
            given = _arguments.lengths("key_lengths", key_ends, q.size(0), q.device)
            lengths = native_lengths(given, k.size(2 if layout == "bhsd" else 1))
        done = _native.torch_attention(
            q, k, v, mask, left, right, lengths, scale, softcap, layout, bool(return_lse), True
        )  # fmt: skip
        if done is not NotImplemented:
            found: Tensor | tuple[Tensor, Tensor] = done
            return found
    o, lse = dispatch(q, k, v, mask, left, right, key_starts, key_ends, scale, softcap, layout)
    return (o, lse) if return_lse else o


def _into_given(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    left: int | None,
    right: int | None,
    key_starts: Sequence[int] | Tensor | None,
    key_ends: Sequence[int] | Tensor | None,
    scale: float | None,
    softcap: float,
    layout: str,
    return_lse: bool,
    out: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention into the caller's memory."""
    from ._ops import into

    check(q, k, v, layout)
    check_whole()
    _arguments.tensors(out=out)
    if _wants_gradient(q, k, v, out):
        raise UnsupportedError("out= has no gradient. Leave it out, or call under torch.no_grad()")
    if has_tangent(q, k, v):
        raise no_forward_mode()
    if _arguments.wrapped(q, k, v, out, key_ends):
        raise UnsupportedError("out= does not go with torch.func. Leave it out there")
    scale, softcap = _arguments.options(scale, softcap)
    _arguments.dimensions("(batch, heads, length, head_dim)", out=out)
    _arguments.together(q=q, k=k, v=v, out=out)
    queries, keys, values, o = (x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v, out))
    _arguments.fit(queries, keys, values)
    shape = (*queries.shape[:3], values.size(3))
    if o.shape != shape:
        raise ContractError(
            f"out has shape {tuple(out.shape)}, possible is q's with v's head_dim, {(*q.shape[:3], v.size(3))}"
        )
    lse = empty_lse(queries)
    starts, ends = (
        None if x is None else _arguments.lengths(name, x, q.size(0), q.device)
        for name, x in (("key_starts", key_starts), ("key_lengths", key_ends))
    )
    into(queries, keys, values, o, lse, as_list(starts), ends, mask, left, right, scale, softcap)
    return (out, lse) if return_lse else out


def no_forward_mode() -> UnsupportedError:
    """The error of a derivative in forward mode."""
    return UnsupportedError(
        "attention has no derivative in forward mode (torch.func.jvp, torch.autograd.forward_ad) here. Use reverse "
        "mode, or torch's math backend"
    )


def no_second_derivative() -> UnsupportedError:
    """The error of a second derivative."""
    return UnsupportedError("attention has no second derivative here. Use torch's math backend for it")


def dispatch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    left: int | None,
    right: int | None,
    key_starts: Sequence[int] | Tensor | None,
    key_ends: Sequence[int] | Tensor | None,
    scale: float | None,
    softcap: float,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Attention and lse through torch's dispatcher, which handles gradients, tracing and so on."""
    from . import _ops  # noqa: F401  (registers the operators)

    check(q, k, v, layout)
    check_whole()
    scale, softcap = _arguments.options(scale, softcap)
    check_gradient(q, k, v)
    q, k, v = cast(q, k, v)
    _arguments.together(q=q, k=k, v=v)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _arguments.fit(q, k, v)
    starts, ends = _as_tensor("key_starts", key_starts, q), _as_tensor("key_lengths", key_ends, q)
    o, lse = torch.ops.flashcore.attention(q, k, v, starts, ends, mask, left, right, scale, softcap)
    return (o.transpose(1, 2) if layout == "bshd" else o), lse
