"""The operators ``torch.ops.flashcore.*``: what torch.compile, export, autograd and dispatch modes see.

Shapes are (batch, heads, length, head_dim). ``attention`` takes its mask as numbers, ``attention_masked`` as a
tensor whose values are read when it runs, ``attention_varlen`` takes packed sequences. Each has a fake kernel
and a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from . import _arguments, _native, _prepare
from ._blocks import backward, forward, scale_of, visible_of
from ._errors import ContractError, UnsupportedError
from ._torch import as_list, empty_lse, empty_output, lse_dtype, native_lengths, no_forward_mode, no_second_derivative

# torch has no types for these.
_torch_library: Any = torch.library
_library = _torch_library.Library("flashcore", "DEF")
# Strides must reach the operator unchanged: the kernels read any order without a copy, as long as rows are contiguous.
_strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)

#: Results of an operator.
Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def define(schema: str) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, _strides))


def implement(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for key in ("CPU", "CUDA"):
        _library.impl(name, real, key)
    torch.library.register_fake(f"flashcore::{name}", fake, lib=_library)


def _differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Gives an operator its gradient, also under torch.func, and makes it refuse forward mode.

    torch.library.register_autograd would do neither: torch.func refuses its gradients, and it silently drops the
    derivatives of forward mode. So the kernel for autograd is written out here. torch.func calls it once per level,
    so the function is a single-level one.
    """
    operator = getattr(torch.ops.flashcore, name).default

    def compute(*args: Any) -> Any:
        # Outer levels must record what happens here, which a function's forward pass would hide from them.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    def refuse(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode()

    methods = {"forward": compute, "setup_context": setup_context, "backward": backward, "jvp": refuse}
    function: Any = type(
        f"Gradient_of_{name}",
        (_SingleLevelFunction,),
        {method: staticmethod(body) for method, body in methods.items()},
    )

    def kernel(*args: Any) -> Any:
        with enable_single_level_autograd_function():
            return function.apply(*args)

    _library.impl(name, kernel, "Autograd")


def _no_second_gradient(name: str) -> None:
    def refuse(ctx: Any, *grads: Any) -> Any:
        raise no_second_derivative()

    _differentiate(name, refuse, lambda ctx, inputs, output: None)


def _vectorise(name: str) -> None:
    """Lets vmap fold its dimension into the batch. All tensors of the operator begin with the batch."""
    operator = getattr(torch.ops.flashcore, name).default

    def fold(x: Any, dim: int | None, count: int) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        count = info.batch_size
        outputs = operator(*(fold(x, dim, count) for x, dim in zip(args, in_dims, strict=True)))
        # Every tensor has the same batch within.
        batch = args[0].size(0 if in_dims[0] is None or in_dims[0] > 0 else 1)
        return tuple(x.unflatten(0, (count, batch)) for x in outputs), 0

    torch.library.register_vmap(f"flashcore::{name}", rule, lib=_library)


def into(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, starts: list[int] | None, ends: list[int] | Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> None:  # fmt: skip
    """Runs attention where batch entry b has the keys from starts[b] to ends[b]."""
    if starts is None:
        one_call(q, k, v, o, lse, native_lengths(ends, k.size(2)), mask, left, right, scale, softcap)
        return
    for some, keys, lengths in _calls(q.size(0), k.size(2), starts, as_list(ends)):
        of_k, of_v = k[some, :, keys], v[some, :, keys]
        one_call(q[some], of_k, of_v, o[some], lse[some], lengths, mask, left, right, scale, softcap)


def _calls(
    batch: int, len_k: int, starts: list[int], ends: list[int] | None
) -> Iterator[tuple[slice, slice, list[int] | None]]:  # fmt: skip
    """One call for all batch entries that start at the same key: the entries, their keys, and how many each has where
    that differs."""
    stops = ends or [len_k] * batch
    for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        if start < 0 or not 0 <= stop <= len_k:
            raise ContractError(
                f"batch entry {b} has the keys from {start} to {stop}, possible are those from 0 to {len_k}"
            )
    first = 0
    while first < batch:
        start = starts[first]
        end = next((b for b in range(first, batch) if starts[b] != start), batch)
        lengths = [max(stops[b] - start, 0) for b in range(first, end)]
        same = None if min(lengths) == max(lengths) else lengths
        yield slice(first, end), slice(start, start + max(lengths)), same
        first = end


def is_native(q: Tensor, v: Tensor) -> bool:
    """Whether the engine computes gradients of such tensors: of all but float64 on the CPU, of 16 bits on a GPU."""
    dims = (q.size(-1), v.size(-1))
    if q.is_cuda:
        return q.element_size() == 2 and min(dims) > 0 and max(dims) <= 256
    return q.dtype != torch.float64 and min(dims) > 0


def gradients(
    grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    starts: list[int] | None, ends: list[int] | Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> Gradients:  # fmt: skip
    """The engine's gradients where batch entry b has the keys from starts[b] to ends[b]."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = (mask, left, right, scale, softcap)
    if starts is None:
        lengths = native_lengths(ends, k.size(2))
        _prepare.run_backward(grad_o, grad_lse, (q, k, v, o, lse), (dq, dk, dv), lengths, *options)
        return dq, dk, dv
    dk.zero_()
    dv.zero_()
    for some, keys, of_each in _calls(q.size(0), k.size(2), starts, as_list(ends)):
        saved = (q[some], k[some, :, keys], v[some, :, keys], o[some], lse[some])
        grads = (dq[some], dk[some, :, keys], dv[some, :, keys])
        of_lse = None if grad_lse is None else grad_lse[some]
        _prepare.run_backward(grad_o[some], of_lse, saved, grads, of_each, *options)
    return dq, dk, dv


def one_call(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lengths: list[int] | Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> None:  # fmt: skip
    """One call: of the engine, or for float64 in torch's operations."""
    if q.dtype != torch.float64:
        _prepare.run(q, k, v, o, lse, lengths, mask, left, right, scale, softcap)
        return
    _arguments.writable("out", o, q=q, k=k, v=v)
    # The engine reports what is wrong with the shapes and options of a call.
    like_q, like_k, like_v = (_prepare.stand_in(x) for x in (q, k, v))
    on_host = as_list(lengths)
    factor = scale_of(scale, q.size(3))
    _native.check(like_q, like_k, like_v, on_host, mask, left, right, factor, softcap, "bhsd")
    ends = None if on_host is None else torch.tensor(on_host, dtype=torch.int64, device=q.device)
    if ends is not None:
        # What lies behind the last key may be anything, and is multiplied by 0.
        behind = torch.arange(k.size(2), device=q.device) >= ends.view(-1, 1)
        k, v = (x.masked_fill(behind[:, None, :, None], 0) for x in (k, v))
    forward(q, k, v, o, lse, visible_of(q, k, None, ends, mask, left, right), scale, softcap)


# -- attention --------------------------------------------------------------------------------------------------

_OPTIONS = "Tensor? key_starts, Tensor? key_ends, str mask, int? left, int? right, float? scale, float softcap"

define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
define(
    "attention_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, key_starts: Tensor | None, key_ends: Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> Pair:  # fmt: skip
    o, lse = empty_output(q, v), empty_lse(q)
    into(q, k, v, o, lse, as_list(key_starts), key_ends, mask, left, right, scale, softcap)
    return o, lse


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Pair:
    _arguments.fit(q, k, v)
    return empty_output(q, v), empty_lse(q)


def _attention_backward(
    grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    key_starts: Tensor | None, key_ends: Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
) -> Gradients:  # fmt: skip
    if is_native(q, v):
        starts = as_list(key_starts)
        return gradients(grad_o, grad_lse, q, k, v, o, lse, starts, key_ends, mask, left, right, scale, softcap)
    visible = visible_of(q, k, key_starts, key_ends, mask, left, right)
    return backward(grad_o, grad_lse, q, k, v, o, lse, visible, scale, softcap)


def _gradients_fake(
    grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Gradients:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, key_starts, key_ends, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, key_starts, key_ends, *output)


def _attention_gradient(ctx: Any, grad_o: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, key_starts, key_ends, o, lse = ctx.saved_tensors
    grads = torch.ops.flashcore.attention_backward(
        grad_o, grad_lse, q, k, v, o, lse, key_starts, key_ends, *ctx.options
    )
    return (*grads, None, None, *(None for _ in ctx.options))


implement("attention", _attention, _attention_fake)
implement("attention_backward", _attention_backward, _gradients_fake)
_differentiate("attention", _attention_gradient, _attention_setup)
_no_second_gradient("attention_backward")
_vectorise("attention")
_vectorise("attention_backward")


def _register_flops() -> None:
    """Lets torch's FlopCounterMode count the operators as it counts its own attention: without a mask."""
    from torch.utils.flop_counter import register_flop_formula

    def forwards(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

    def backwards(grad_o: Any, grad_lse: Any, q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        # The scores again, and one product each for dv, the probabilities' gradient, dq and dk.
        return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])

    register_flop_formula([ops.attention, ops.attention_masked])(forwards)
    register_flop_formula([ops.attention_backward, ops.attention_masked_backward])(backwards)


# -- attention_masked -------------------------------------------------------------------------------------------

_MASKED = "Tensor attn_mask, float? scale, float softcap"

define(f"attention_masked(Tensor q, Tensor k, Tensor v, {_MASKED}) -> (Tensor, Tensor)")
define(
    "attention_masked_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_MASKED}) -> (Tensor, Tensor, Tensor)"
)


def recognise(
    attn_mask: Tensor, batch: int, len_q: int, reach: Callable[[], float] | None = None
) -> tuple[list[int], list[int], str, int | None, int | None]:
    """The numbers behind a mask, per batch entry. For a mask on a GPU this waits for a copy to the host.

    `reach` says how low a finite number must be to hide a key; without it only the lowest of all does.
    """
    if attn_mask.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "attn_mask cannot be looked at while a CUDA graph is captured. Use is_causal, or attention() with "
                "window and key_lengths"
            )
        # Repeated elements need not be copied.
        for dim in range(attn_mask.dim() - 1):
            if attn_mask.stride(dim) == 0:
                attn_mask = attn_mask.narrow(dim, 0, min(1, attn_mask.size(dim)))
        attn_mask = attn_mask.cpu()
    starts, ends, mask, left, right = _native.recognise_mask(attn_mask.detach(), len_q, reach)
    if len(starts) == 1:
        starts, ends = starts * batch, ends * batch
    if len(starts) != batch:
        raise ContractError(f"attn_mask is for a batch of {len(starts)}, but q has one of {batch}")
    return starts, ends, mask, left, right


def _reach(q: Tensor, k: Tensor, scale: float | None, softcap: float) -> float:
    """How low a number must be to hide any key of this call: a key to whose score it is added has a weight of 0 next
    to that of any key that is seen."""
    norms = (torch.linalg.vector_norm(x.detach(), dim=-1, dtype=lse_dtype(q)) for x in (q, k))
    longest = [float(x.max()) if x.numel() else 0.0 for x in norms]
    # The product of the norms bounds a score; a hundredth is far more than rounding adds.
    bound = 1.01 * abs(scale_of(scale, q.size(3))) * longest[0] * longest[1]
    bound = min(bound, softcap) if softcap else bound
    # The exponential of such a difference is 0, in float64 and in float32.
    return 2 * bound + (746.0 if q.dtype == torch.float64 else 104.0)


def _masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float | None, softcap: float) -> Pair:
    o, lse = empty_output(q, v), empty_lse(q)
    if attn_mask.size(-1) != k.size(2):
        raise ContractError(f"attn_mask is for {attn_mask.size(-1)} keys, but k has {k.size(2)}")
    reach = lambda: _reach(q, k, scale, softcap)
    starts, ends, mask, left, right = recognise(attn_mask, q.size(0), q.size(2), reach)
    into(q, k, v, o, lse, starts, ends, mask, left, right, scale, softcap)
    return o, lse


def _masked_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Pair:
    _arguments.fit(q, k, v)
    return empty_output(q, v), empty_lse(q)


def _masked_backward(
    grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    attn_mask: Tensor, scale: float | None, softcap: float,
) -> Gradients:  # fmt: skip
    if is_native(q, v):
        reach = lambda: _reach(q, k, scale, softcap)
        starts, ends, mask, left, right = recognise(attn_mask, q.size(0), q.size(2), reach)
        return gradients(grad_o, grad_lse, q, k, v, o, lse, starts, ends, mask, left, right, scale, softcap)
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
    seen = seen.expand(*seen.shape[:-2], q.size(2), k.size(2))
    seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)[:, :1]

    def visible(first: int, end: int) -> Tensor:
        return seen[:, :, first:end]

    return backward(grad_o, grad_lse, q, k, v, o, lse, visible, scale, softcap)


def _masked_setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, attn_mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, attn_mask, *output)


def _masked_gradient(ctx: Any, grad_o: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, attn_mask, o, lse = ctx.saved_tensors
    if ctx.needs_input_grad[3]:
        raise UnsupportedError("attn_mask has no gradient here: only masks of 0 and -inf are fused. Detach it")
    grads = torch.ops.flashcore.attention_masked_backward(grad_o, grad_lse, q, k, v, o, lse, attn_mask, *ctx.options)
    return (*grads, None, None, None)


implement("attention_masked", _masked, _masked_fake)
implement("attention_masked_backward", _masked_backward, _gradients_fake)
_differentiate("attention_masked", _masked_gradient, _masked_setup)
_no_second_gradient("attention_masked_backward")

# -- attention_varlen -------------------------------------------------------------------------------------------

_VARLEN = (
    "Tensor ends_q, Tensor ends_k, Tensor? used_q, Tensor? used_k, str mask, int? left, int? right, float? scale, "
    "float softcap, SymInt? longest_q=None, SymInt? longest_k=None, bool checked=False"
)

define(f"attention_varlen(Tensor q, Tensor k, Tensor v, {_VARLEN}) -> (Tensor, Tensor)")
define(
    "attention_varlen_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_VARLEN}) -> (Tensor, Tensor, Tensor)"
)


def _ends(given: Tensor, tokens: int, name: str) -> list[int]:
    ends: list[int] = given.tolist()
    if ends[0] != 0 or any(end < start for start, end in itertools.pairwise(ends)):
        raise ContractError(f"{name} must begin with 0 and never fall, but it is {ends}")
    if ends[-1] > tokens:
        raise ContractError(f"{name} ends at {ends[-1]}, but there are {tokens} tokens")
    return ends


def _spans(ends: list[int], used: Tensor | None, name: str) -> Iterable[tuple[int, int, int]]:
    """Each sequence's first token, how many tokens it has, and how many of them are used."""
    sizes = [end - start for start, end in itertools.pairwise(ends)]
    counts: list[int] = sizes if used is None else used.tolist()
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        if not 0 <= count <= size:
            raise ContractError(f"{name} says that sequence {i} uses {count} tokens, but it has {size}")
    return zip(ends[:-1], sizes, counts, strict=True)


#: Neighbouring sequences of the same sizes: how many there are, and for queries and for keys the first token, the
#: tokens per sequence, and how many of these are used.
Run = tuple[int, tuple[int, int, int], tuple[int, int, int]]


def _sequences(
    q: Tensor, k: Tensor, ends_q: Tensor, ends_k: Tensor, used_q: Tensor | None, used_k: Tensor | None
) -> list[Run]:  # fmt: skip
    of_q = _spans(_ends(ends_q, q.size(0), "cu_seqlens_q"), used_q, "seqused_q")
    of_k = _spans(_ends(ends_k, k.size(0), "cu_seqlens_k"), used_k, "seqused_k")
    runs: list[Run] = []
    for queries, keys in zip(of_q, of_k, strict=True):
        if runs and runs[-1][1][1:] == queries[1:] and runs[-1][2][1:] == keys[1:]:
            count, *first = runs.pop()
            runs.append((count + 1, first[0], first[1]))
        else:
            runs.append((1, queries, keys))
    return runs


def _packed(x: Tensor, count: int, span: tuple[int, int, int]) -> Tensor:
    """`count` sequences of packed tokens (token, heads, head_dim) as (sequence, heads, token, head_dim)."""
    first, size, used = span
    return x[first : first + count * size].view(count, size, *x.shape[1:])[:, :used].transpose(1, 2)


def _packed_lse(x: Tensor, count: int, span: tuple[int, int, int]) -> Tensor:
    """`count` sequences of (heads, token) as (sequence, heads, token)."""
    first, size, used = span
    return x[:, first : first + count * size].view(x.size(0), count, size)[:, :, :used].transpose(0, 1)


def _apart(q: Tensor) -> bool:
    """Whether runs of sequences can be calls of their own where no kernel takes packed sequences as they are: on a GPU,
    where the host may read where they are."""
    return q.is_cuda and not torch.cuda.is_current_stream_capturing()


def longest(starts: Tensor) -> int:
    """The most tokens of a sequence, read on the host."""
    return max(int(starts.diff().max()), 0) if starts.numel() > 1 else 0


def integers_on(device: torch.device, x: Tensor) -> Tensor:
    """Integers as the engine takes them. Those on the host go to a GPU without that this waits for it."""
    return x.to(device, torch.int32, non_blocking=device.type == "cuda").contiguous()


def with_unused(starts: Tensor, used: Tensor) -> Tensor:
    """The starts of twice as many sequences: what each uses, and what it has besides."""
    begins = starts[:-1]
    return torch.cat([torch.stack([begins, begins + used.to(begins)], 1).flatten(), starts[-1:]])


def with_none(counts: Tensor) -> Tensor:
    """Numbers of sequences, with a 0 behind each."""
    return torch.stack([counts, torch.zeros_like(counts)], 1).flatten()


def _where(
    q: Tensor, k: Tensor, ends_q: Tensor, ends_k: Tensor, used_q: Tensor | None, used_k: Tensor | None,
    longest_q: int | None, longest_k: int | None,
) -> tuple[_native.Places, list[int] | Tensor | None]:  # fmt: skip
    """Where packed sequences are, and how many keys each has, where that is not what there is room for. What a sequence
    has and does not use is a sequence of its own, without keys. On the CPU all of it is checked; on a GPU the host
    reads it only where it is not told how long sequences are."""
    on_host = not q.is_cuda
    if used_q is None and used_k is None and not ends_q.is_cuda and not ends_k.is_cuda:
        # A compiled graph gives as many as there could be, the last of which are empty.
        full = ((ends_q[:-1] < ends_q[-1]) | (ends_k[:-1] < ends_k[-1])).nonzero()
        count = int(full[-1]) + 1 if full.numel() else 0
        ends_q, ends_k = ends_q[: count + 1], ends_k[: count + 1]
    if on_host:
        _spans(_ends(ends_q, q.size(0), "cu_seqlens_q"), used_q, "seqused_q")
        _spans(_ends(ends_k, k.size(0), "cu_seqlens_k"), used_k, "seqused_k")
    bounds = [
        longest(ends) if on_host or given is None else given
        for ends, given in ((ends_q, longest_q), (ends_k, longest_k))
    ]  # fmt: skip
    starts_q, starts_k = (integers_on(q.device, ends) for ends in (ends_q, ends_k))
    counts = None
    if used_q is not None or used_k is not None:
        counts = starts_k.diff()
        if used_k is not None:
            counts = torch.minimum(used_k.to(counts).clamp(min=0), counts)
    if used_q is not None and counts is not None:
        starts_q = with_unused(starts_q, used_q.to(starts_q).clamp(min=0))
        starts_k, counts = with_unused(starts_k, counts), with_none(counts)
    held = counts.tolist() if counts is not None and on_host else counts
    return ((starts_q, bounds[0]), (starts_k, bounds[1], False), None), held


def _as_one(*packed: Tensor) -> Iterator[Tensor]:
    """Packed tokens (token, heads, head_dim) as (1, heads, token, head_dim)."""
    return (x.transpose(0, 1).unsqueeze(0) for x in packed)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, used_q: Tensor | None, used_k: Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
    longest_q: int | None = None, longest_k: int | None = None, checked: bool = False,
) -> Pair:  # fmt: skip
    o, lse = _varlen_fake(q, k, v)
    # Tokens of no sequence see nothing.
    o.zero_()
    lse.fill_(-torch.inf)
    if q.dtype != torch.float64:
        places, lengths = _where(q, k, ends_q, ends_k, used_q, used_k, longest_q, longest_k)
        queries, keys, values, out = _as_one(q, k, v, o)
        sums, options = lse.unsqueeze(0), (mask, left, right, scale, softcap)
        try:
            _prepare.run(queries, keys, values, out, sums, lengths, *options, places, checked)
            return o, lse
        except UnsupportedError:
            if not _apart(q):
                raise
    for count, of_q, of_k in _sequences(q, k, ends_q, ends_k, used_q, used_k):
        if of_q[2] == 0:
            continue
        queries, out = (_packed(x, count, of_q) for x in (q, o))
        keys, values = (_packed(x, count, of_k) for x in (k, v))
        one_call(queries, keys, values, out, _packed_lse(lse, count, of_q), None, mask, left, right, scale, softcap)
    return o, lse


def _varlen_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any, **others: Any) -> Pair:
    return q.new_empty((q.size(0), q.size(1), v.size(2))), q.new_empty((q.size(1), q.size(0)), dtype=lse_dtype(q))


def _varlen_backward(
    grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    ends_q: Tensor, ends_k: Tensor, used_q: Tensor | None, used_k: Tensor | None,
    mask: str, left: int | None, right: int | None, scale: float | None, softcap: float,
    longest_q: int | None = None, longest_k: int | None = None, checked: bool = False,
) -> Gradients:  # fmt: skip
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if is_native(q, v):
        where, lengths = _where(q, k, ends_q, ends_k, used_q, used_k, longest_q, longest_k)
        (grads_o,) = _as_one(grad_o)
        grads_lse = None if grad_lse is None else grad_lse.unsqueeze(0)
        queries, keys, values, out = _as_one(q, k, v, o)
        into_q, into_k, into_v = _as_one(dq, dk, dv)
        given, into = (queries, keys, values, out, lse.unsqueeze(0)), (into_q, into_k, into_v)
        options = (mask, left, right, scale, softcap)
        try:
            _prepare.run_backward(grads_o, grads_lse, given, into, lengths, *options, where)
            return dq, dk, dv
        except UnsupportedError:
            if not _apart(q):
                raise
    for count, of_q, of_k in _sequences(q, k, ends_q, ends_k, used_q, used_k):
        if of_q[2] == 0 or of_k[2] == 0:
            continue
        grads_o, queries, out, into_q = (_packed(x, count, of_q) for x in (grad_o, q, o, dq))
        keys, values, into_k, into_v = (_packed(x, count, of_k) for x in (k, v, dk, dv))
        grads_lse = None if grad_lse is None else _packed_lse(grad_lse, count, of_q)
        sums = _packed_lse(lse, count, of_q)
        if is_native(q, v):
            saved = (queries, keys, values, out, sums)
            places = (into_q, into_k, into_v)
            _prepare.run_backward(grads_o, grads_lse, saved, places, None, mask, left, right, scale, softcap)
            continue
        visible = visible_of(queries, keys, None, None, mask, left, right)
        grads = backward(grads_o, grads_lse, queries, keys, values, out, sums, visible, scale, softcap)
        for place, grad in zip((into_q, into_k, into_v), grads, strict=True):
            place.copy_(grad)
    return dq, dk, dv


def _varlen_setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    # Options that are what they are by default may be missing.
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output)


def _varlen_gradient(ctx: Any, grad_o: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, ends_q, ends_k, used_q, used_k, o, lse = ctx.saved_tensors
    grads = torch.ops.flashcore.attention_varlen_backward(
        grad_o, grad_lse, q, k, v, o, lse, ends_q, ends_k, used_q, used_k, *ctx.options
    )
    return (*grads, None, None, None, None, *(None for _ in ctx.options))


def _varlen_gradients_fake(
    grad_o: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **others: Any
) -> Gradients:  # fmt: skip
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


implement("attention_varlen", _varlen, _varlen_fake)
implement("attention_varlen_backward", _varlen_backward, _varlen_gradients_fake)
_differentiate("attention_varlen", _varlen_gradient, _varlen_setup)
_no_second_gradient("attention_varlen_backward")

ops = torch.ops.flashcore
_register_flops()
