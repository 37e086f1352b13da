"""Attention on torch tensors of 8-bit floats, ``torch.float8_e4m3fn``, with descales, and on wider ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _arguments, _native
from ._errors import ContractError, UnsupportedError
from ._options import number

#: What q, k and v are made of.
DTYPE: torch.dtype = torch.float8_e4m3fn

Descale = float | Tensor | None


def descale_of(name: str, given: Descale, q: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """A descale as the engine takes it: float32, (batch, kv heads), or with blocks of keys behind, where q lies. A
    number is for all heads."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        number(name, given)
        given = torch.tensor(given, dtype=torch.float32, device=q.device)
    if given.dtype != torch.float32:
        kind = str(given.dtype).removeprefix("torch.")
        raise ContractError(f"{name} is {kind}, possible is float32. Convert {name}")
    if given.device != q.device:
        raise ContractError(f"{name} lies on {given.device}, but q on {q.device}. Copy {name} there")
    if given.numel() == 1:
        return given.reshape((1,) * len(shape)).expand(shape)
    if tuple(given.shape) != shape:
        what = ", ".join(("batch", "kv heads", "blocks of keys")[: len(shape)])
        raise ContractError(f"{name} has shape {tuple(given.shape)}, possible is ({what}), {shape}, or one number")
    return given


def check_types(q: Tensor, q_descale: Descale, **of_keys: Tensor) -> bool:
    """Raises unless these go together, of which keys or values are codes. Whether q is wider, as for a cache."""
    names = " and ".join(of_keys)
    for name, x in of_keys.items():
        if x.dtype != DTYPE:
            kind = str(x.dtype).removeprefix("torch.")
            raise ContractError(f"{name} is {kind}, but another is float8_e4m3fn: {names} share one dtype. Convert one")
        if x.device != q.device:
            raise ContractError(f"{name} lies on {x.device}, but q on {q.device}. Copy {name} there")
    cache = q.dtype in (torch.float16, torch.bfloat16)
    if not cache and q.dtype != DTYPE:
        kind = str(q.dtype).removeprefix("torch.")
        raise ContractError(
            f"q is {kind}, but {names} are float8_e4m3fn: q is that too, or float16 or bfloat16. Convert q"
        )
    if cache and q_descale is not None:
        raise ContractError("q_descale is for q of float8_e4m3fn. Leave it out, and multiply the scale by it")
    return cache


def _refuse_gradient(*tensors: Tensor) -> None:
    from ._torch import has_tangent, no_forward_mode

    if has_tangent(*tensors):
        raise no_forward_mode()
    if _arguments.wrapped(*tensors):
        raise UnsupportedError("float8 does not go with torch.func. Call it with plain tensors, such as whole batches")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError("a gradient of float8 is asked for, possible are gradients of wider types")


def _outputs(
    q: Tensor, v: Tensor, dtype: torch.dtype, layout: str, out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The output, made where it is not given, and memory for lse where that is wanted."""
    if out is not None:
        _arguments.tensors(out=out)
        _refuse_gradient(out)
        if out.device != q.device:
            raise ContractError(f"out lies on {out.device}, but q on {q.device}. Copy out there")
    else:
        first, second, third, last = q.size(0), q.size(1), q.size(2), v.size(3)
        if q.stride(1) < q.stride(2):
            out = q.new_empty((first, third, second, last), dtype=dtype).transpose(1, 2)
        else:
            out = q.new_empty((first, second, third, last), dtype=dtype)
    length, heads = (2, 1) if layout == "bhsd" else (1, 2)
    lse = q.new_empty((q.size(0), q.size(heads), q.size(length)), dtype=torch.float32) if return_lse else None
    return out, lse


def _attend_quantised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    left: int | None,
    right: int | None,
    key_lengths: Sequence[int] | Tensor | None,
    scale: float | None,
    softcap: float,
    layout: str,
    return_lse: bool,
    out: Tensor | None,
    quantise: str,
) -> Any:
    """The output, float16 where q is and else bfloat16, or with ``return_lse`` (output, lse), of tensors that become
    8-bit floats within the call."""
    from ._torch import check, native_lengths

    check(q, k, v, layout)
    _arguments.together((torch.float16, torch.bfloat16, torch.float32), q=q, k=k, v=v)
    _refuse_gradient(q, k, v)
    lengths = None
    if key_lengths is not None:
        length = 2 if layout == "bhsd" else 1
        lengths = native_lengths(_arguments.lengths("key_lengths", key_lengths, k.size(0), q.device), k.size(length))
    dtype = torch.float16 if q.dtype == torch.float16 else torch.bfloat16
    out, lse = _outputs(q, v, dtype, layout, out, return_lse)
    q, k, v = (x.detach() for x in (q, k, v))
    _native.run(q, k, v, out, lse, lengths, mask, left, right, scale, softcap, layout, None, quantise)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    left: int | None,
    right: int | None,
    key_lengths: Sequence[int] | Tensor | None,
    scale: float | None,
    softcap: float,
    layout: str,
    return_lse: bool,
    out: Tensor | None,
    descales: tuple[Descale, Descale, Descale],
    block: int | None = None,
) -> Any:
    """The output, bfloat16 unless ``out`` is float16, or with ``return_lse`` (output, lse). Stored numbers are
    multiplied by their descales; one that is None is 1. Where q is wider, the output is of its dtype."""
    from ._torch import check, native_lengths

    check(q, k, v, layout)
    cache = check_types(q, descales[0], k=k, v=v)
    _refuse_gradient(q, k, v)
    length, heads = (2, 1) if layout == "bhsd" else (1, 2)
    batch, heads_kv = k.size(0), k.size(heads)
    of_q, of_k, of_v = descales
    of_keys = (batch, heads_kv) if block is None else (batch, heads_kv, -(-k.size(length) // block))
    numbers = (
        descale_of("q_descale", of_q, q, (batch, heads_kv)),
        descale_of("k_descale", of_k, q, of_keys),
        descale_of("v_descale", of_v, q, of_keys),
    )
    lengths = None
    if key_lengths is not None:
        lengths = native_lengths(_arguments.lengths("key_lengths", key_lengths, batch, q.device), k.size(length))
    out, lse = _outputs(q, v, q.dtype if cache else torch.bfloat16, layout, out, return_lse)
    # The bytes: not every version of torch hands out tensors of this type.
    q = q.detach() if cache else q.detach().view(torch.uint8)
    k, v = (x.detach().view(torch.uint8) for x in (k, v))
    _native.run(q, k, v, out, lse, lengths, mask, left, right, scale, softcap, layout, numbers, None, block)
    return (out, lse) if return_lse else out


_uncompiled: Any = torch.compiler.disable  # torch has no types for it.
#: Runs as it is in code that torch compiles.
attend: Callable[..., Any] = _uncompiled(_attend)
#: Likewise.
attend_quantised: Callable[..., Any] = _uncompiled(_attend_quantised)
