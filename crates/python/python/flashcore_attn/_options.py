"""The options of a call, as people say them, turned into what the kernels know."""

from __future__ import annotations

from ._errors import ContractError

#: A mask's name with the sides of its window.
Mask = tuple[str, int | None, int | None]


_NONE: Mask = ("none", None, None)
_CAUSAL: Mask = ("causal", None, None)
_TOP_LEFT: Mask = ("causal-top-left", None, None)


def mask_of(causal: bool, top_left: bool, window: tuple[int | None, int | None] | None) -> Mask:
    """The mask that these options ask for together; -1 and None are a window's side without limit."""
    if top_left:
        if not causal:
            raise ContractError("top_left is how causal is aligned. Give causal=True with it")
        if window is not None:
            raise ContractError("a window is aligned bottom-right only. Leave out top_left, or the window")
        return _TOP_LEFT
    if window is None or window == (-1, -1):
        return _CAUSAL if causal else _NONE
    left, right = (None if side == -1 else side for side in window)
    for side in (left, right):
        if side is not None and side < 0:
            raise ContractError(f"a side of the window is {side}, possible are 0 and more, and -1 or None for no limit")
    if left is None and right is None:
        return _CAUSAL if causal else _NONE
    return ("window", left, 0 if causal else right)
