"""FlashCore behind torch's own ``scaled_dot_product_attention``.

torch lets libraries register an implementation of its flash attention, which the user then activates. From then on
every call that torch would give to its flash kernels comes here, forward and backward. Calls that FlashCore does not
support go to the kernel that was there before; output and lse mean the same in both, so the two passes of a call need
not go to the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._errors import ContractError, UnsupportedError
from ._ops import Gradients, gradients, into, is_native, recognise
from ._torch import empty_lse, empty_output

NAME = "FlashCore"

#: The operators of torch that are taken over, and where.
_DENSE_CUDA = "_scaled_dot_product_flash_attention"
_DENSE_CPU = "_scaled_dot_product_flash_attention_for_cpu"


def register_flash_attention_impl() -> None:
    """Makes ``torch.nn.attention.activate_flash_attention_impl("FlashCore")`` possible. Activates nothing."""
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no register_flash_attention_impl, as later ones have. Call "
            "flashcore_attn.scaled_dot_product_attention instead"
        )
    register(NAME, register_fn=_activate)


class _Handle:
    """What torch keeps while the implementation is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        """Gives torch its kernels back."""
        self.library = None


def _activate() -> _Handle:
    torch_library: Any = torch.library  # torch has no types for it.
    library = torch_library.Library("aten", "IMPL")
    for name, key, ours in (
        (_DENSE_CUDA, "CUDA", _dense_cuda),
        (f"{_DENSE_CUDA}_backward", "CUDA", _dense_cuda_backward),
        (_DENSE_CPU, "CPU", _dense_cpu),
        (f"{_DENSE_CPU}_backward", "CPU", _dense_cpu_backward),
    ):
        library.impl(name, _or_before(name, key, ours), key, with_keyset=True)
    return _Handle(library)


def _or_before(name: str, key: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel, with the one that was there before for what ours declines."""
    before = torch.library.get_kernel(f"aten::{name}", key)

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        try:
            return ours(*args, **options)
        except (ContractError, UnsupportedError):
            return before.call_boxed(keyset, *args, **options)

    return kernel


def _dense_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if dropout_p != 0.0:
        raise UnsupportedError("dropout")
    o = empty_output(query, value)
    # torch's backward pass on the CPU expects lse with heads inside.
    lse = query.new_empty((query.size(0), query.size(2), query.size(1)), dtype=torch.float32).transpose(1, 2)
    if attn_mask is None:
        mask = "causal-top-left" if is_causal else "none"
        _native.run(query, key, value, o, lse, None, mask, None, None, scale, 0.0, "bhsd")
    else:
        starts, ends, mask, left, right = recognise(attn_mask, query.size(0), query.size(2))
        into(query, key, value, o, lse, starts, ends, mask, left, right, scale, 0.0)
    return o, lse


def _dense_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    tensors = (query, key, value, out, logsumexp)
    if attn_mask is None:
        return _gradients(grad_out, tensors, "causal-top-left" if is_causal else "none", dropout_p, scale)
    starts, ends, mask, left, right = recognise(attn_mask, query.size(0), query.size(2))
    return _gradients(grad_out, tensors, mask, dropout_p, scale, starts, ends, left, right)


def _gradients(
    grad_out: Tensor, tensors: tuple[Tensor, ...], mask: str, dropout_p: float, scale: float | None,
    starts: list[int] | None = None, ends: list[int] | None = None, left: int | None = None, right: int | None = None,
) -> Gradients:  # fmt: skip
    q, k, v, o, lse = tensors
    if dropout_p != 0.0 or not is_native(q, v):
        raise UnsupportedError("dropout, or a dtype whose gradients the engine does not compute")
    return gradients(grad_out, None, q, k, v, o, lse, starts, ends, mask, left, right, scale, 0.0)


def _dense_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if dropout_p != 0.0 or return_debug_mask:
        raise UnsupportedError("dropout")
    o, lse = empty_output(query, value), empty_lse(query)
    # torch's flash kernels align causal masks bottom-right.
    mask = "causal" if is_causal else "none"
    _native.run(query, key, value, o, lse, None, mask, None, None, scale, 0.0, "bhsd")
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return o, lse, None, None, query.size(2), key.size(2), seed, offset, query.new_empty(0)


def _dense_cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    tensors = (query, key, value, out, logsumexp)
    return _gradients(grad_out, tensors, "causal" if is_causal else "none", dropout_p, scale)
