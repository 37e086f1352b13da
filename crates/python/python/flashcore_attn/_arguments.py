"""Checks of arguments: one of the wrong kind is an error that says so, before anything uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._errors import ContractError, UnsupportedError
from ._options import integers, number

#: The supported dtypes: float64 in torch's operations, the others in the engine.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# torch has no types for it.
_c: Any = torch._C
_functorch = _c._functorch


def tensors(**given: object) -> None:
    """Raises unless all of these are torch tensors with memory of their own."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, possible is a torch tensor")
        if x.is_nested or x.layout != torch.strided:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise UnsupportedError(f"{name} is a {kind} tensor, possible are strided ones. Make it a plain tensor")


def together(dtypes: Sequence[torch.dtype] = DTYPES, **given: Tensor) -> None:
    """Raises unless the tensors are of one dtype that is possible, and on one device."""
    (first, x), *others = given.items()
    for name, dtype in ((name, y.dtype) for name, y in given.items()):
        if dtype not in dtypes:
            raise ContractError(
                f"{name} is {_plain(dtype)}, possible are float16, bfloat16, float32 and, in torch's operations, "
                f"float64. Convert {name} to one of them"
            )
    for name, y in others:
        if y.dtype != x.dtype:
            raise ContractError(
                f"{name} is {_plain(y.dtype)}, but {first} is {_plain(x.dtype)}: they share one dtype. Convert one"
            )
        if y.device != x.device:
            raise ContractError(f"{name} lies on {y.device}, but {first} on {x.device}. Copy {name} there")


def dimensions(shape: str, **given: Tensor) -> None:
    """Raises unless the tensors have the dimensions that `shape` names, such as "(batch, length)"."""
    count = shape.count(",") + 1
    for name, x in given.items():
        if x.dim() != count:
            raise ContractError(
                f"{name} has {x.dim()} dimensions, possible are {count}: {shape}. Reshape it, or add the missing "
                "dimensions with size 1"
            )


def fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises where sizes, (batch, heads, length, head_dim), are known not to fit. The engine checks them too; this is
    for tensors without memory, which never get there."""
    pairs = (
        ("k", "batch", k.size(0), "q", q.size(0)),
        ("v", "batch", v.size(0), "q", q.size(0)),
        ("v", "heads", v.size(1), "k", k.size(1)),
        ("v", "length", v.size(2), "k", k.size(2)),
        ("k", "head_dim", k.size(3), "q", q.size(3)),
    )
    for name, what, given, other, asked in pairs:
        # A size that is a symbol of torch.compile is compared when the compiled call runs.
        if type(given) is int and type(asked) is int and given != asked:
            raise ContractError(f"{name} has {what} {given}, but {other} asks for {asked}. Give both the same {what}")
    heads, heads_kv = q.size(1), k.size(1)
    if type(heads) is int and type(heads_kv) is int and (heads % heads_kv if heads_kv else heads):
        raise ContractError(
            f"q has {heads} heads and k has {heads_kv}: every kv head serves the same number of query heads, so q's "
            "heads must be a multiple of k's"
        )


def options(scale: object, softcap: object) -> tuple[float | None, float]:
    """The scale and the softcap, or an error if they are not numbers."""
    return (None if scale is None else number("scale", scale)), number("softcap", softcap)


def wrapped(*given: object) -> bool:
    """Whether one of these is a tensor within torch.func, which has no values of its own."""
    return any(isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x) for x in given)


def writable(name: str, x: Tensor, **read: Tensor) -> None:
    """Raises where two elements share memory, or one does with what is read meanwhile. The engine checks this too; this
    is for what torch's operations write."""
    reached, first, last = 1, x.data_ptr(), _behind(x)
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < reached and x.numel():
            raise ContractError(
                f"two places of {name} share memory (shape {list(x.shape)}, strides {list(x.stride())}), so it cannot "
                "be written. Use a contiguous one"
            )
        reached += (size - 1) * stride
    for other, y in read.items():
        if y.device == x.device and x.numel() and y.numel() and first < _behind(y) and y.data_ptr() < last:
            raise ContractError(
                f"{name} shares memory with {other}; attention reads its inputs while it writes. Give {name} memory of "
                "its own"
            )


def _behind(x: Tensor) -> int:
    """The address behind the last element."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (steps + 1) * x.element_size()


def beside(name: str, x: Tensor, device: torch.device) -> None:
    """Raises for integers without memory that go with tensors that have some."""
    if x.device.type == "meta" and device.type != "meta":
        raise ContractError(f"{name} lies on meta, but q on {device}. Copy {name} there")


def lengths(name: str, given: object, batch: int, device: torch.device) -> Tensor | list[int]:
    """Integers, one per batch entry, for tensors on `device`: a tensor as it is, anything else as a list."""
    found = given if isinstance(given, Tensor) else integers(name, given)
    if isinstance(found, Tensor):
        if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
            raise TypeError(f"{name} is {_plain(found.dtype)}, possible are integers")
        if found.dim() != 1:
            raise ContractError(f"{name} has {found.dim()} dimensions, possible is 1: one integer per batch entry")
        beside(name, found, device)
    count = len(found)
    if type(count) is int and type(batch) is int and count != batch:
        raise ContractError(f"{name} has {count} elements for a batch of {batch}. Give one per batch entry")
    return found


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
