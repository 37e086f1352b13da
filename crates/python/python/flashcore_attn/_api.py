"""FlashCore's own functions, for torch tensors, numpy arrays and other arrays that support DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from . import _native
from ._errors import ContractError, FlashCoreError
from ._options import block_of, integers, mask_of, quantiser_of

#: Arrays of one library: torch tensors, numpy arrays, or others that support DLPack.
Array = TypeVar("Array")
#: How many keys a query sees before and after its own position; None or -1 is all of them.
Window = tuple[int | None, int | None]
#: How the shape of arrays is ordered: (batch, heads, length, head_dim) or (batch, length, heads, head_dim).
Layout = Literal["bhsd", "bshd"]

#: What is computed with: the arrays as they are, or 8-bit floats that the call makes of them.
Precision = Literal["fp8"]

#: What stored numbers are to be multiplied by: a float32 tensor, (batch, kv heads), or one number; None is 1.
Descale = Any | None

#: The function for torch tensors, imported at the first call with one.
_attend: Callable[..., Any] | None = None


def _torch_attend() -> Callable[..., Any]:
    global _attend
    from ._torch import attend

    _attend = attend
    return attend


def _torch_tensor(array: object) -> bool:
    # A tensor cannot exist before torch is imported.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _lengths(key_lengths: object) -> list[int] | None:
    """Key lengths of any kind as a list."""
    return None if key_lengths is None else integers("key_lengths", key_lengths)


@overload
def attention(
    q: Array, k: Array, v: Array, *, causal: bool = ..., top_left: bool = ..., window: Window | None = ...,
    key_lengths: Sequence[int] | Any | None = ..., scale: float | None = ..., softcap: float = ...,
    layout: Layout = ..., return_lse: Literal[False] = ..., out: Array | None = ...,
    q_descale: Descale = ..., k_descale: Descale = ..., v_descale: Descale = ...,
    precision: Precision | None = ..., smooth: bool = ..., rotate: int | None = ..., block: int | None = ...,
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *, causal: bool = ..., top_left: bool = ..., window: Window | None = ...,
    key_lengths: Sequence[int] | Any | None = ..., scale: float | None = ..., softcap: float = ...,
    layout: Layout = ..., return_lse: Literal[True], out: Array | None = ...,
    q_descale: Descale = ..., k_descale: Descale = ..., v_descale: Descale = ...,
    precision: Precision | None = ..., smooth: bool = ..., rotate: int | None = ..., block: int | None = ...,
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, *, causal: bool = ..., top_left: bool = ..., window: Window | None = ...,
    key_lengths: Sequence[int] | Any | None = ..., scale: float | None = ..., softcap: float = ...,
    layout: Layout = ..., return_lse: bool, out: Array | None = ...,
    q_descale: Descale = ..., k_descale: Descale = ..., v_descale: Descale = ...,
    precision: Precision | None = ..., smooth: bool = ..., rotate: int | None = ..., block: int | None = ...,
) -> Array | tuple[Array, Array]: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    top_left: bool = False,
    window: Window | None = None,
    key_lengths: Sequence[int] | Any | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: Layout = "bhsd",
    return_lse: bool = False,
    out: Any | None = None,
    q_descale: Descale = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    precision: Precision | None = None,
    smooth: bool = False,
    rotate: int | None = None,
    block: int | None = None,
) -> Any:
    """Exact attention, softmax(scale · q kᵀ) v, in one pass.

    q is (batch, heads, length, head_dim), or (batch, length, heads, head_dim) with ``layout="bshd"``; k and v may
    have another length and fewer heads (each serves as many query heads), v another head_dim. Arrays are read in
    place, with any strides as long as the last is 1; torch tensors with other strides, or that no fast kernel of the
    GPU reads, are copied, with one warning. The result is of q's kind, with its order in memory.

    causal: a query sees the keys up to its own position. The last query sees the last key, or, with ``top_left``, the
        first query the first key.
    window: (left, right), how many keys a query sees before and after its own position; None or -1 is all of them.
    key_lengths: how many keys each batch entry has, one integer each; the rest is never read.
    scale: what scores are multiplied by, by default 1/√head_dim.
    softcap: scores become softcap · tanh(score / softcap); 0 is off.
    return_lse: also return the logarithm of the sum of exponentials, float32, as (batch, heads, length); for float64
        torch tensors it is float64.
    out: an array to write into instead of a new one (not with gradients).
    q_descale, k_descale, v_descale: for torch tensors of float8_e4m3fn, what stored numbers are to be multiplied by:
        float32, (batch, kv heads), or one number; None is 1. The result is bfloat16, or float16 where ``out`` is. k and
        v may be float8_e4m3fn alone, as of a cache: q and the result are then float16 or bfloat16.
    block: how many keys share a descale of k and one of v, where not all of a head do: k_descale and v_descale are then
        (batch, kv heads, blocks). With precision="fp8", blocks get descales of their own. On a GPU for caches alone,
        and in multiples of 16.
    precision: with "fp8", q, k and v become 8-bit floats within the call, each kv head with descales of its own, and
        the result is float16 where q or ``out`` is, and else bfloat16. On a GPU they are float16 or bfloat16.
        ``explain`` says which kernels do it. No gradients.
    smooth: with precision="fp8", the mean over the keys is subtracted from them first, which changes no result but for
        rounding. Not with softcap.
    rotate: with precision="fp8", a seed: q and k are rotated first, which spreads single large numbers. The head_dim is
        then a power of two.
    """
    mask, left, right = mask_of(causal, top_left, window)
    block = block_of(block)
    quantise = quantiser_of(precision, smooth, rotate, block)
    descales = (q_descale, k_descale, v_descale)
    if _torch_tensor(q) and sys.modules["torch"].float8_e4m3fn in (q.dtype, getattr(k, "dtype", None)):
        from ._float8 import attend as attend_float8

        if quantise is not None:
            raise ContractError("k is float8_e4m3fn already. Leave out precision, smooth and rotate")
        return attend_float8(
            q, k, v, mask, left, right, key_lengths, scale, softcap, layout, return_lse, out, descales, block
        )  # fmt: skip
    if block is not None and quantise is None:
        raise ContractError('block is for 8-bit floats: float8_e4m3fn, or wider ones with precision="fp8"')
    if any(descale is not None for descale in descales):
        raise ContractError("descales are for torch tensors of float8_e4m3fn. Leave them out, and scale the result")
    if quantise is not None and _torch_tensor(q):
        from ._float8 import attend_quantised

        return attend_quantised(
            q, k, v, mask, left, right, key_lengths, scale, softcap, layout, return_lse, out, quantise
        )  # fmt: skip
    if _torch_tensor(q):
        attend = _attend or _torch_attend()
        return attend(q, k, v, mask, left, right, None, key_lengths, scale, softcap, layout, return_lse, out)
    from . import _numpy

    lengths = _lengths(key_lengths)
    made, lse = _numpy.outputs(q, v, layout, out is None, return_lse)
    out = made if out is None else out
    _native.run(q, k, v, out, lse, lengths, mask, left, right, scale, softcap, layout, None, quantise)
    return (out, lse) if return_lse else out


def can_use(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    top_left: bool = False,
    window: Window | None = None,
    key_lengths: Sequence[int] | Any | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: Layout = "bhsd",
    precision: Precision | None = None,
    smooth: bool = False,
    rotate: int | None = None,
    block: int | None = None,
) -> tuple[bool, str]:
    """Whether ``attention`` supports this call: (True, the device that would run it) or (False, why not).

    Nothing is computed, and arrays are not read beyond their shapes.
    """
    try:
        mask, left, right = mask_of(causal, top_left, window)
        lengths = _lengths(key_lengths)
        if _torch_tensor(q):
            from ._torch import stand_ins

            q, k, v = stand_ins(q, k, v, layout)
        quantise = quantiser_of(precision, smooth, rotate, block_of(block))
        return True, _native.check(q, k, v, lengths, mask, left, right, scale, softcap, layout, quantise)
    except (FlashCoreError, TypeError) as error:
        return False, str(error)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    top_left: bool = False,
    window: Window | None = None,
    key_lengths: Sequence[int] | Any | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: Layout = "bhsd",
    target: str | None = None,
    precision: Precision | None = None,
    smooth: bool = False,
    rotate: int | None = None,
    block: int | None = None,
) -> str:
    """The plan of a call as text: the problem, the kernel, its schedule, why, and the launch.

    The plan is made for the device that the tensors are on, or for a typical GPU of a target such as ``"sm_80"`` or
    ``"sm_90a"``, which this machine need not have.
    """
    mask, left, right = mask_of(causal, top_left, window)
    if _torch_tensor(q):
        from ._torch import stand_ins

        q, k, v = stand_ins(q, k, v, layout)
    quantise = quantiser_of(precision, smooth, rotate, block_of(block))
    return _native.explain(q, k, v, _lengths(key_lengths), mask, left, right, scale, softcap, layout, target, quantise)


def info() -> dict[str, Any]:
    """What there is to run on: the version, the CPU's instructions and threads, CUDA devices or why there are none,
    and how torch's tensors are read. This looks for GPUs; importing the package does not."""
    found = _native.machine()
    torch = sys.modules.get("torch")
    if torch is not None:
        from . import _torch

        found["torch"] = {"version": torch.__version__, "direct": _torch.DIRECT}
    return found
