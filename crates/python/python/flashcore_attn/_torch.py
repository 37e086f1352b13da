"""Calls on torch tensors: the thin path for plain eager calls, the registered operator for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _native
from ._errors import ContractError, UnsupportedError


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Memory for the output: q's shape with v's head_dim, in the order that q has in memory."""
    if q.size(3) == v.size(3):
        return torch.empty_like(q)
    first, second, third, last = q.size(0), q.size(1), q.size(2), v.size(3)
    if q.stride(1) < q.stride(2):
        return q.new_empty((first, third, second, last)).transpose(1, 2)
    return q.new_empty((first, second, third, last))


def empty_lse(q: Tensor, layout: str = "bhsd") -> Tensor:
    """Memory for lse, (batch, heads, length)."""
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    return q.new_empty((q.size(0), q.size(heads), q.size(length)), dtype=torch.float32)


def _watchers() -> list:
    """Questions that are answered with something true where an operator must not be bypassed."""
    names = ("_len_torch_dispatch_stack", "_is_any_autocast_enabled", "_is_tracing")
    watchers = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
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
    """How gradients are made: ``"recompute"`` (the default) runs attention's backward pass in plain torch operations,
    block by block; ``"error"`` raises when a call would need them, for those who want only what is fast."""
    global _gradients
    if mode not in ("recompute", "error"):
        raise ContractError(f"gradients are '{mode}', possible are 'recompute' and 'error'")
    _gradients = mode


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check_gradient(*tensors: Tensor) -> None:
    """Raises if a gradient is needed that the user does not want to pay for."""
    if _gradients == "error" and _wants_gradient(*tensors):
        raise UnsupportedError(
            "a gradient is asked for, and set_gradients('error') is on. Call under torch.no_grad(), or allow "
            "'recompute'"
        )


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The dtype that autocast asks for, where it is on, as torch's own attention does it."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _as_tensor(lengths: Sequence[int] | Tensor | None) -> Tensor | None:
    if lengths is None or isinstance(lengths, Tensor):
        return lengths
    return torch.tensor([int(length) for length in lengths], dtype=torch.int64)


def as_list(lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    """Lengths on the host. Those on a GPU are copied, and waited for."""
    if lengths is None or isinstance(lengths, list):
        return lengths
    return lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)


def native_lengths(lengths: Sequence[int] | Tensor | None, len_k: int) -> list[int] | Tensor | None:
    """Lengths as the engine takes them. Those on a GPU stay there: they are not looked at, but cut to what there is,
    so that no number leads outside of the keys."""
    if isinstance(lengths, Tensor) and lengths.is_cuda:
        return lengths.clamp(0, len_k).to(torch.int32).contiguous()
    return as_list(lengths)


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
) -> Any:
    """Attention on torch tensors; batch entry b has the keys from key_starts[b] to key_ends[b]. The output, or with
    ``return_lse`` (output, lse)."""
    if out is not None:
        if _wants_gradient(q, k, v):
            raise UnsupportedError("out= has no gradient. Leave it out, or call under torch.no_grad()")
        lse = empty_lse(q, layout) if return_lse else None
        lengths = native_lengths(key_ends, k.size(2 if layout == "bhsd" else 1))
        _native.run(q, k, v, out, lse, lengths, mask, left, right, scale, softcap, layout)
        return (out, lse) if return_lse else out
    if key_starts is None and not is_dynamo_compiling():
        lengths = None if key_ends is None else native_lengths(key_ends, k.size(2 if layout == "bhsd" else 1))
        done = _native.torch_attention(
            q, k, v, mask, left, right, lengths, scale, softcap, layout, return_lse, True
        )  # fmt: skip
        if done is not NotImplemented:
            return done
    return dispatch(q, k, v, mask, left, right, key_starts, key_ends, scale, softcap, layout, return_lse)


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
    return_lse: bool,
) -> Any:
    """Attention through torch's dispatcher, which sees to gradients, tracing and the like."""
    from . import _ops  # noqa: F401  (registers the operators)

    check_gradient(q, k, v)
    q, k, v = cast(q, k, v)
    if layout not in ("bhsd", "bshd"):
        raise ContractError(f"layout is '{layout}', possible are 'bhsd' and 'bshd'")
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = torch.ops.flashcore.attention(
        q, k, v, _as_tensor(key_starts), _as_tensor(key_ends), mask, left, right, scale, softcap
    )
    o = o.transpose(1, 2) if layout == "bshd" else o
    return (o, lse) if return_lse else o
