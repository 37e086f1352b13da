"""Outputs for arrays that are not torch's: made by numpy, or by the array's own library."""

from __future__ import annotations

import importlib
from typing import Any

from ._errors import UnsupportedError


def outputs(q: Any, v: Any, layout: str, with_out: bool, with_lse: bool) -> tuple[Any | None, Any | None]:
    """An output and memory for lse like q, as far as they are wanted."""
    if not (with_out or with_lse):
        return None, None
    if not (hasattr(q, "shape") and len(q.shape) == 4 and hasattr(v, "shape") and len(v.shape) == 4):
        # The call reports what is wrong before it uses the outputs.
        return None, None
    namespace = _namespace(q)
    on_device = {} if namespace.__name__ == "numpy" else {"device": q.device}
    batch, heads, length, _ = q.shape if layout == "bhsd" else (q.shape[i] for i in (0, 2, 1, 3))
    out = lse = None
    if with_out:
        out = namespace.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, **on_device)
        if _heads_inside(q):
            swapped = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
            out = namespace.swapaxes(namespace.empty(swapped, dtype=q.dtype, **on_device), 1, 2)
    if with_lse:
        lse = namespace.empty((batch, heads, length), dtype=namespace.float32, **on_device)
    return out, lse


def _heads_inside(q: Any) -> bool:
    """Whether q's second dimension is inside its third in memory, as it will be in the output."""
    strides = getattr(q, "strides", None)
    return strides is not None and q.shape[1] > 1 and q.shape[2] > 1 and 0 < strides[1] < strides[2]


def _namespace(q: Any) -> Any:
    """The library that makes writable arrays like q."""
    kind = type(q).__module__.partition(".")[0]
    if kind == "numpy":
        import numpy

        return numpy
    if kind == "cupy":
        return importlib.import_module("cupy")
    raise UnsupportedError(
        f"outputs for a {type(q).__module__}.{type(q).__qualname__} are not made here, possible are torch, numpy and "
        "cupy. Give out= (and leave out return_lse), an array that shares its memory through DLPack"
    )
