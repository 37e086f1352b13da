"""The operators ``torch.ops.flashcore.*``: what torch.compile, export, autograd and dispatch modes see.

Shapes are (batch, heads, length, head_dim). ``attention`` takes its mask as numbers, ``attention_masked`` as a
tensor whose values are looked at when it runs, ``attention_varlen`` takes packed sequences. Each has a fake kernel
and a gradient.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from . import _native
from ._backward import backward, visible_of
from ._errors import ContractError, UnsupportedError
from ._torch import as_list, empty_lse, empty_output, native_lengths

_library = torch.library.Library("flashcore", "DEF")
# Strides are part of what was asked for: the kernels read any order without a copy, as long as rows are whole.
_strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


def _define(schema: str) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, _strides))


def _implement(name: str, real, fake) -> None:
    for key in ("CPU", "CUDA"):
        _library.impl(name, real, key)
    torch.library.register_fake(f"flashcore::{name}", fake, lib=_library)


def _differentiate(name: str, backward, setup_context) -> None:
    torch.library.register_autograd(f"flashcore::{name}", backward, setup_context=setup_context, lib=_library)


def _no_second_gradient(name: str) -> None:
    def refuse(ctx, *grads):
        raise UnsupportedError("attention has no second derivative here. Use torch's math backend for it")

    _differentiate(name, refuse, lambda ctx, inputs, output: None)


def into(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, starts: list[int] | None, ends: list[int] | Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> None:  # fmt: skip
    """Runs attention where batch entry b has the keys from starts[b] to ends[b]: one call for all entries that
    start at the same key."""
    if starts is None:
        _native.run(q, k, v, o, lse, native_lengths(ends, k.size(2)), mask, left, right, scale, softcap, "bhsd")
        return
    stops = as_list(ends) or [k.size(2)] * q.size(0)
    first = 0
    while first < q.size(0):
        start = starts[first]
        end = next((b for b in range(first, q.size(0)) if starts[b] != start), q.size(0))
        lengths = [max(stops[b] - start, 0) for b in range(first, end)]
        some, keys = slice(first, end), slice(start, start + max(lengths))
        same = None if min(lengths) == max(lengths) else lengths
        _native.run(
            q[some], k[some, :, keys], v[some, :, keys], o[some], lse[some], same, mask, left, right, scale, softcap,
            "bhsd",
        )  # fmt: skip
        first = end


# -- attention --------------------------------------------------------------------------------------------------

_OPTIONS = "Tensor? key_starts, Tensor? key_ends, str mask, int? left, int? right, float? scale, float softcap"

_define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_define(
    "attention_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _attention(q, k, v, key_starts, key_ends, mask, left, right, scale, softcap):
    o, lse = empty_output(q, v), empty_lse(q)
    into(q, k, v, o, lse, as_list(key_starts), key_ends, mask, left, right, scale, softcap)
    return o, lse


def _attention_fake(q, k, v, key_starts, key_ends, mask, left, right, scale, softcap):
    return empty_output(q, v), empty_lse(q)


def _attention_backward(
    grad_o, grad_lse, q, k, v, o, lse, key_starts, key_ends, mask, left, right, scale, softcap
):  # fmt: skip
    visible = visible_of(q, k, key_starts, key_ends, mask, left, right)
    return backward(grad_o, grad_lse, q, k, v, o, lse, visible, scale, softcap)


def _gradients_fake(grad_o, grad_lse, q, k, v, *rest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attention_setup(ctx, inputs, output):
    q, k, v, key_starts, key_ends, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, key_starts, key_ends, *output)


def _attention_gradient(ctx, grad_o, grad_lse):
    q, k, v, key_starts, key_ends, o, lse = ctx.saved_tensors
    grads = torch.ops.flashcore.attention_backward(
        grad_o, grad_lse, q, k, v, o, lse, key_starts, key_ends, *ctx.options
    )
    return (*grads, None, None, *(None for _ in ctx.options))


_implement("attention", _attention, _attention_fake)
_implement("attention_backward", _attention_backward, _gradients_fake)
_differentiate("attention", _attention_gradient, _attention_setup)
_no_second_gradient("attention_backward")


def _register_flops() -> None:
    """Lets torch's FlopCounterMode count the operators as it counts its own attention: without a mask."""
    from torch.utils.flop_counter import register_flop_formula

    def forward(q, k, v, *args, **options) -> int:
        return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

    def backwards(grad_o, grad_lse, q, k, v, *args, **options) -> int:
        # The scores again, and one product each for dv, the probabilities' gradient, dq and dk.
        return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])

    register_flop_formula([ops.attention, ops.attention_masked])(forward)
    register_flop_formula([ops.attention_backward, ops.attention_masked_backward])(backwards)


# -- attention_masked -------------------------------------------------------------------------------------------

_MASKED = "Tensor attn_mask, float? scale, float softcap"

_define(f"attention_masked(Tensor q, Tensor k, Tensor v, {_MASKED}) -> (Tensor, Tensor)")
_define(
    "attention_masked_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_MASKED}) -> (Tensor, Tensor, Tensor)"
)


def recognise(attn_mask: Tensor, batch: int, len_q: int) -> tuple[list[int], list[int], str, int | None, int | None]:
    """The numbers behind a mask, for each batch entry. A mask on a GPU is copied to the host, and waited for."""
    if attn_mask.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "attn_mask cannot be looked at while a CUDA graph is captured. Use is_causal, or attention() with "
                "window and key_lengths"
            )
        # What is repeated need not be copied.
        for dim in range(attn_mask.dim() - 1):
            if attn_mask.stride(dim) == 0:
                attn_mask = attn_mask.narrow(dim, 0, min(1, attn_mask.size(dim)))
        attn_mask = attn_mask.cpu()
    starts, ends, mask, left, right = _native.recognise_mask(attn_mask.detach(), len_q)
    if len(starts) == 1:
        starts, ends = starts * batch, ends * batch
    return starts, ends, mask, left, right


def _masked(q, k, v, attn_mask, scale, softcap):
    o, lse = empty_output(q, v), empty_lse(q)
    starts, ends, mask, left, right = recognise(attn_mask, q.size(0), q.size(2))
    into(q, k, v, o, lse, starts, ends, mask, left, right, scale, softcap)
    return o, lse


def _masked_fake(q, k, v, attn_mask, scale, softcap):
    return empty_output(q, v), empty_lse(q)


def _masked_backward(grad_o, grad_lse, q, k, v, o, lse, attn_mask, scale, softcap):
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
    seen = seen.expand(*seen.shape[:-2], q.size(2), k.size(2))
    seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)[:, :1]

    def visible(first: int, end: int) -> Tensor:
        return seen[:, :, first:end]

    return backward(grad_o, grad_lse, q, k, v, o, lse, visible, scale, softcap)


def _masked_setup(ctx, inputs, output):
    q, k, v, attn_mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, attn_mask, *output)


def _masked_gradient(ctx, grad_o, grad_lse):
    q, k, v, attn_mask, o, lse = ctx.saved_tensors
    if ctx.needs_input_grad[3]:
        raise UnsupportedError("attn_mask has no gradient here: only masks of 0 and -inf are fused. Detach it")
    grads = torch.ops.flashcore.attention_masked_backward(grad_o, grad_lse, q, k, v, o, lse, attn_mask, *ctx.options)
    return (*grads, None, None, None)


_implement("attention_masked", _masked, _masked_fake)
_implement("attention_masked_backward", _masked_backward, _gradients_fake)
_differentiate("attention_masked", _masked_gradient, _masked_setup)
_no_second_gradient("attention_masked_backward")

# -- attention_varlen -------------------------------------------------------------------------------------------

_VARLEN = "Tensor ends_q, Tensor ends_k, str mask, int? left, int? right, float? scale, float softcap"

_define(f"attention_varlen(Tensor q, Tensor k, Tensor v, {_VARLEN}) -> (Tensor, Tensor)")
_define(
    "attention_varlen_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_VARLEN}) -> (Tensor, Tensor, Tensor)"
)


def _ends(given: Tensor, tokens: int, name: str) -> list[int]:
    ends: list[int] = given.tolist()
    if ends[0] != 0 or any(end < start for start, end in itertools.pairwise(ends)):
        raise ContractError(f"{name} must begin with 0 and never fall, but it is {ends}")
    if ends[-1] != tokens:
        raise ContractError(f"{name} ends at {ends[-1]}, but there are {tokens} tokens")
    return ends


def _sequences(q: Tensor, k: Tensor, ends_q: Tensor, ends_k: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Runs of neighbouring sequences of the same lengths: (first query, first key, how many, queries, keys)."""
    of_q, of_k = _ends(ends_q, q.size(0), "cu_seqlens_q"), _ends(ends_k, k.size(0), "cu_seqlens_k")
    runs: list[tuple[int, int, int, int, int]] = []
    for i in range(len(of_q) - 1):
        len_q, len_k = of_q[i + 1] - of_q[i], of_k[i + 1] - of_k[i]
        if runs and runs[-1][3:] == (len_q, len_k):
            first_q, first_k, count, *_ = runs.pop()
            runs.append((first_q, first_k, count + 1, len_q, len_k))
        else:
            runs.append((of_q[i], of_k[i], 1, len_q, len_k))
    return runs


def _packed(x: Tensor, first: int, count: int, length: int) -> Tensor:
    """`count` sequences of packed tokens (token, heads, head_dim) as (sequence, heads, token, head_dim)."""
    return x[first : first + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _varlen(q, k, v, ends_q, ends_k, mask, left, right, scale, softcap):
    o, lse = q.new_empty((*q.shape[:2], v.size(2))), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)
    for first_q, first_k, count, len_q, len_k in _sequences(q, k, ends_q, ends_k):
        if len_q == 0:
            continue
        queries, out = (_packed(x, first_q, count, len_q) for x in (q, o))
        keys, values = (_packed(x, first_k, count, len_k) for x in (k, v))
        part = lse[:, first_q : first_q + count * len_q].unflatten(1, (count, len_q)).transpose(0, 1)
        _native.run(queries, keys, values, out, part, None, mask, left, right, scale, softcap, "bhsd")
    return o, lse


def _varlen_fake(q, k, v, ends_q, ends_k, mask, left, right, scale, softcap):
    o = q.new_empty((q.size(0), q.size(1), v.size(2)))
    return o, q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)


def _varlen_backward(
    grad_o, grad_lse, q, k, v, o, lse, ends_q, ends_k, mask, left, right, scale, softcap
):  # fmt: skip
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first_q, first_k, count, len_q, len_k in _sequences(q, k, ends_q, ends_k):
        if len_q == 0 or len_k == 0:
            continue
        of_q = [_packed(x, first_q, count, len_q) for x in (grad_o, q, o, dq)]
        of_k = [_packed(x, first_k, count, len_k) for x in (k, v, dk, dv)]
        parts = [
            None if x is None else x[:, first_q : first_q + count * len_q].unflatten(1, (count, len_q)).transpose(0, 1)
            for x in (lse, grad_lse)
        ]
        visible = visible_of(of_q[1], of_k[0], None, None, mask, left, right)
        grads = backward(of_q[0], parts[1], of_q[1], *of_k[:2], of_q[2], parts[0], visible, scale, softcap)
        for into, grad in zip((of_q[3], *of_k[2:]), grads, strict=True):
            into.copy_(grad)
    return dq, dk, dv


def _varlen_setup(ctx, inputs, output):
    q, k, v, ends_q, ends_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, ends_q, ends_k, *output)


def _varlen_gradient(ctx, grad_o, grad_lse):
    q, k, v, ends_q, ends_k, o, lse = ctx.saved_tensors
    grads = torch.ops.flashcore.attention_varlen_backward(
        grad_o, grad_lse, q, k, v, o, lse, ends_q, ends_k, *ctx.options
    )
    return (*grads, None, None, *(None for _ in ctx.options))


def _varlen_gradients_fake(grad_o, grad_lse, q, k, v, *rest):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


_implement("attention_varlen", _varlen, _varlen_fake)
_implement("attention_varlen_backward", _varlen_backward, _varlen_gradients_fake)
_differentiate("attention_varlen", _varlen_gradient, _varlen_setup)
_no_second_gradient("attention_varlen_backward")

ops = torch.ops.flashcore
_register_flops()
