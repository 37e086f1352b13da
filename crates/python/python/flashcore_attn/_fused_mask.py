"""The mask that transformers models pass from layer to layer.

A model asks for a mask before it is known what will read it: FlashCore, or the model's own attention. So the mask is a
tensor that both understand. FlashCore reads a few numbers from it; any other operation gets the mask of ``"eager"`` in
full, which is made only then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from ._blocks import visible_of


class Pattern(NamedTuple):
    """What queries see, as the numbers that a call takes. None means the first key or the end of all keys.

    Numbers that change from pass to pass are tensors: a compiled model neither reads them nor is compiled for them.
    """

    mask: str
    left: int | None = None
    right: int | None = None
    key_starts: Tensor | None = None
    key_ends: Tensor | None = None
    #: Where packed sequences begin and end, counted through all batch entries; a query sees keys of its own only.
    sequences: Tensor | None = None


def _without_values() -> frozenset[Callable[..., Any]]:
    """What a tensor answers without reading its elements."""
    with_values = ("T", "mT", "H", "mH", "data", "real", "imag")
    properties = {
        getattr(Tensor, name).__get__
        for name in dir(Tensor)
        if type(getattr(Tensor, name)).__name__ in ("getset_descriptor", "property") and name not in with_values
    }
    names = (
        "size stride dim ndimension numel nelement element_size storage_offset untyped_storage is_contiguous "
        "is_floating_point is_complex is_signed is_conj is_neg is_inference is_shared _is_view __len__ get_device"
    )
    return frozenset(properties | {getattr(Tensor, name) for name in names.split()})


_WITHOUT_VALUES = _without_values()


class FusedMask(Tensor):
    """A mask of shape (batch, 1, queries, keys): 0 where a query sees a key, the lowest number where it does not.

    Its memory holds a single NaN, so that code which bypasses ``__torch_function__`` cannot miss it.
    """

    #: A pattern, or what queries see as booleans where no pattern is known.
    seen: Pattern | Tensor
    _full: Tensor | None
    _version_made: int

    @staticmethod
    def of(seen: Pattern | Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A mask of this shape."""
        if is_compiling() and not is_dynamo_compiling():
            # torch.export has its own tensor class. There the mask has all its elements, and carries its pattern.
            full = _with_elements(seen, shape, dtype, device)
            noted: Any = full
            noted._flashcore_seen = seen, full._version
            return full
        mask = torch.full((), float("nan"), dtype=dtype, device=device).expand(shape).as_subclass(FusedMask)
        mask.seen, mask._full = seen, None
        return mask

    def full(self) -> Tensor:
        """The mask with all its elements, made once."""
        if self._full is not None:
            return self._full
        made = self.seen, tuple(self.shape), self.dtype, self.device
        if is_compiling():
            self._full = _with_elements(*made)
            return self._full
        # A tensor made in inference mode would not count its changes.
        with torch.inference_mode(False):
            full = _with_elements(*made)
        self._full, self._version_made = full, full._version
        return full

    def unchanged(self) -> bool:
        """Whether ``seen`` still describes the mask. A graph cannot tell once the full mask was made."""
        if self._full is None:
            return True
        return not is_compiling() and self._full._version == self._version_made

    def _moved(self, *args: Any, **options: Any) -> Tensor:
        """``Tensor.to``, which keeps the pattern as long as the result is floating-point."""
        to = torch.empty((), dtype=self.dtype, device=self.device).to(*args, **options)
        if not to.is_floating_point() or not self.unchanged():
            return self.full().to(*args, **options)
        seen: Pattern | Tensor = self.seen
        if isinstance(seen, Tensor):
            seen = seen.to(to.device)
        elif seen.key_starts is None and seen.key_ends is not None:
            seen = seen._replace(key_ends=seen.key_ends.to(to.device))
        return FusedMask.of(seen, tuple(self.shape), to.dtype, to.device)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.to and isinstance(args[0], FusedMask):
            return args[0]._moved(*args[1:], **kwargs)
        if func is Tensor.contiguous or func is Tensor.detach:
            # A full mask is contiguous, and has no gradient.
            return args[0]
        args, kwargs = tree_map_only(FusedMask, FusedMask.full, (args, kwargs))
        return func(*args, **kwargs)


def seen_of(mask: Tensor) -> Pattern | Tensor | None:
    """The pattern of one of our masks; None for any other mask, and for one that was changed since."""
    if isinstance(mask, FusedMask):
        return mask.seen if mask.unchanged() else None
    if is_compiling() and not is_dynamo_compiling():
        seen, version = getattr(mask, "_flashcore_seen", (None, None))
        return seen if mask._version == version else None
    return None


def _with_elements(seen: Pattern | Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask that "eager" has."""
    visible: Tensor | None
    if isinstance(seen, Tensor):
        visible = seen
    else:
        queries = torch.empty((), device=device).expand(shape)
        keys = queries.transpose(2, 3)
        visible_to = visible_of(queries, keys, seen.key_starts, seen.key_ends, seen.mask, seen.left, seen.right)
        visible = visible_to(0, queries.size(2))
        if seen.sequences is not None:
            tokens = torch.arange(shape[0] * shape[2], device=device).view(shape[0], 1, shape[2], 1)
            numbers = torch.bucketize(tokens, seen.sequences.to(device), right=True)
            same = numbers == numbers.mT
            visible = same if visible is None else visible & same
    zero = torch.zeros((), dtype=dtype, device=device)
    mask = zero if visible is None else torch.where(visible, zero, torch.finfo(dtype).min)
    # Expanded elements would share memory, which breaks in-place operations.
    return mask.expand(shape).contiguous()
