"""What torch does to tensors before and after a call, where the kernels cannot read them as they are, or not fast.

On a GPU the fast kernels take head dims that are multiples of 8: others are padded with zeros, which adds nothing to a
score, and results are cut. That costs a copy of each. A tensor with a memory layout that the kernels do not
read is copied, with one warning per reason.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _arguments, _native
from ._blocks import scale_of

#: Reasons for copies that were already warned about.
_said: set[str] = set()


def ready(name: str | None, x: Tensor) -> Tensor:
    """A tensor (batch, heads, length, head_dim) as the kernels read it: itself, padded, or copied. Without a name it is
    copied without a warning."""
    step = _step(x)
    if step is None:
        return x
    size, why = step
    if size is not None:
        return F.pad(x, (0, size - x.size(3)))
    if name is not None and why is not None and why not in _said:
        _said.add(why)
        warnings.warn(
            f"{name} is copied, because {why}; this costs time at every call. Give it contiguous to save that. Later "
            "calls with the same reason are copied without a warning",
            stacklevel=2,
        )
    return x.clone(memory_format=torch.contiguous_format)


def stand_in(x: Tensor) -> Tensor:
    """A tensor with the memory layout that `x` has when the kernels read it. For float64, which they do not read, it is
    float32 on the CPU; for a tensor without memory it is on the CPU too."""
    on_host = x.device.type not in ("cpu", "cuda") or x.dtype == torch.float64
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    if on_host:
        return torch.empty((*x.shape[:3], max(x.size(3), 1)), dtype=dtype)
    step = _step(x)
    if step is None:
        return x
    return x.new_empty((*x.shape[:3], x.size(3) if step[0] is None else step[0]))


def _step(x: Tensor) -> tuple[int | None, str | None] | None:
    return _native.preparation(x.is_cuda, x.element_size(), tuple(x.shape), x.stride(), x.data_ptr())


def as_they_are(q: Tensor, *others: Tensor) -> bool:
    """Whether the kernels read q, once it is copied, and other tensors where they lie."""
    step = _step(q)
    return (step is None or step[0] is None) and all(_step(x) is None for x in others)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None,
    key_lengths: list[int] | Tensor | None,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    places: _native.Places | None = None,
    checked: bool = False,
) -> None:
    """Attention into `o` and `lse` on tensors (batch, heads, length, head_dim) of any memory layout. What `places`
    leave out stays as it was. With ``checked``, places and lengths on a GPU are looked at first."""
    head_dim, head_dim_v = q.size(3), v.size(3)
    q, k, v = ready("q", q), ready("k", k), ready("v", v)
    if q.size(3) != head_dim:
        scale = scale_of(scale, head_dim)
    # Where the kernels cannot write the output in place, they write to other memory that is then copied to it.
    direct = o.size(3) != head_dim_v or (v.size(3) == head_dim_v and _step(o) is None)
    if not direct:
        _arguments.writable("out", o)
    out = o if direct else o.new_zeros((*o.shape[:3], v.size(3)))
    _native.run(
        q, k, v, out, lse, key_lengths, mask, left, right, scale, softcap, "bhsd", places=places, checked=checked
    )  # fmt: skip
    if not direct:
        o.copy_(out[..., :head_dim_v])


def run_backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    key_lengths: list[int] | Tensor | None,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    places: _native.Places | None = None,
) -> None:
    """The gradients of q, k and v, of which `saved` are the tensors, o and lse among them, into `grads`: all of them
    (batch, heads, length, head_dim) of any memory layout."""
    *tensors, lse = saved
    factor = scale_of(scale, tensors[0].size(3))
    # Autograd's tensors lie as they come, such as one element for all after a sum.
    q, k, v, o = (ready(name, x) for name, x in zip(("q", "k", "v", None), tensors, strict=True))
    of_o = ready(None, grad_o.to(q.dtype))
    of_lse = None if grad_lse is None else grad_lse.to(lse.dtype)
    dq, dk, dv = (
        x if _step(x) is None else x.new_zeros((*x.shape[:3], like.size(3)))
        for x, like in zip(grads, (q, k, v), strict=True)
    )
    given = (q, k, v, o, lse)
    _native.run_backward(given, of_o, of_lse, (dq, dk, dv), key_lengths, mask, left, right, factor, softcap, places)
    for grad, place in zip(grads, (dq, dk, dv), strict=True):
        if place is not grad:
            grad.copy_(place[..., : grad.size(3)])
