"""The options of a call, turned into what the kernels take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat

from ._errors import ContractError

#: A mask's name with the sides of its window.
Mask = tuple[str, int | None, int | None]


_NONE: Mask = ("none", None, None)
_CAUSAL: Mask = ("causal", None, None)
_TOP_LEFT: Mask = ("causal-top-left", None, None)

#: A window's side of this size is no limit: no sequence is that long.
_ENDLESS = 1 << 40


def mask_of(causal: bool, top_left: bool, window: Iterable[int | None] | None) -> Mask:
    """The mask that these options ask for together; -1 and None mean no limit on a window's side."""
    for name, flag in (("causal", causal), ("top_left", top_left)):
        if type(flag) is not bool and flag not in (0, 1):
            raise TypeError(f"{name} is a {type(flag).__name__}, possible are True and False")
    if top_left:
        if not causal:
            raise ContractError("top_left is how causal is aligned. Give causal=True with it")
        if window is not None:
            raise ContractError("a window is aligned bottom-right only. Leave out top_left, or the window")
        return _TOP_LEFT
    if window is None or (isinstance(window, tuple) and window == (-1, -1)):
        return _CAUSAL if causal else _NONE
    left, right = _sides(window)
    if left is None and right is None:
        return _CAUSAL if causal else _NONE
    return ("window", left, 0 if causal else right)


def _sides(window: Any) -> tuple[int | None, int | None]:
    if getattr(window, "ndim", 0) == 1:
        # flash-attn takes a tensor too.
        window = window.tolist()
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"the window is {window!r}, possible is a pair (left, right), where -1 or None is no limit")
    found: list[int | None] = []
    for side in window:
        if side is None:
            found.append(None)
        elif isinstance(side, bool) or not hasattr(side, "__index__"):
            raise TypeError(f"a side of the window is {side!r}, possible are integers, and -1 or None for no limit")
        elif side < -1:
            raise ContractError(f"a side of the window is {side}, possible are 0 and more, and -1 or None for no limit")
        else:
            found.append(None if side == -1 or side >= _ENDLESS else int(side))
    return found[0], found[1]


def number(name: str, value: object) -> float:
    """A number as a float. A bool is refused: it is an argument in the wrong place."""
    if isinstance(value, float):
        return value
    # NumPy's arrays of several elements have the method, too.
    several = getattr(value, "ndim", 0) != 0
    if isinstance(value, (bool, str, bytes)) or not isinstance(value, SupportsFloat) or several:
        raise TypeError(f"{name} is a {type(value).__name__}, possible is a number")
    try:
        return float(value)
    except OverflowError:
        raise ContractError(f"{name} is beyond the largest number, possible is a finite one") from None


def integers(name: str, given: Any) -> list[int]:
    """Integers of any kind as a list."""
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise TypeError(f"{name} is a {type(given).__name__}, possible is a list of integers, one per batch entry")
    found = list(found)
    for entry in found:
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise TypeError(f"{name} is {found}, possible is a list of integers, one per batch entry")
    return [int(entry) for entry in found]


def block_of(block: object) -> int | None:
    """The keys that share a descale of k and one of v; None where all of a head do."""
    if block is None:
        return None
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block is a {type(block).__name__}, possible is a number of keys, an integer")
    if not 1 <= block < _ENDLESS:
        raise ContractError(f"block is {block}, possible is a number of keys, such as 128")
    return block


def quantiser_of(precision: object, smooth: object, rotate: object, block: int | None) -> str | None:
    """How arrays become 8-bit floats, as the engine reads it; None where they do not."""
    if precision not in (None, "fp8"):
        raise ContractError(f"precision is {precision!r}, possible are 'fp8' and None")
    if not isinstance(smooth, bool):
        raise TypeError(f"smooth is a {type(smooth).__name__}, possible is a bool")
    if rotate is not None:
        if isinstance(rotate, bool) or not isinstance(rotate, int):
            raise TypeError(f"rotate is a {type(rotate).__name__}, possible is a seed, an integer")
        if not 0 <= rotate < 1 << 32:
            raise ContractError(f"rotate is {rotate}, possible is a seed from 0 to 2**32 - 1")
    if precision is None:
        if smooth or rotate is not None:
            raise ContractError('smooth and rotate are for 8-bit floats. Add precision="fp8"')
        return None
    ways = ["smooth"] * smooth + ([] if rotate is None else [f"rotate:{rotate}"])
    ways += [] if block is None else [f"block:{block}"]
    return f"quantise={','.join(ways)}" if ways else "quantise"
