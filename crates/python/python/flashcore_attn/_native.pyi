"""The extension module behind the package. Its functions are not public and may change at any time."""

from collections.abc import Callable
from typing import Any

__version__: str

#: Where sequences are: the starts of queries, those of keys, and a table of pages, each an array of int32 and the most
#: rows that a sequence has, or None. Behind those of keys comes whether they begin anywhere, and end where lengths say.
Places = tuple[tuple[Any, int] | None, tuple[Any, int, bool] | None, tuple[Any, int] | None]

def run(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any | None,
    key_lengths: list[int] | Any | None,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    layout: str,
    descales: tuple[Any | None, Any | None, Any | None] | None = None,
    quantise: str | None = None,
    block: int | None = None,
    places: Places | None = None,
    checked: bool = False,
) -> None: ...
def append(
    q: Any,
    caches: tuple[Any, Any],
    new: tuple[Any, Any],
    new_starts: tuple[Any, int] | None,
    rotary: tuple[Any, Any, bool, Any | None] | None,
    o: Any,
    lse: Any,
    key_lengths: list[int] | Any,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    places: Places,
    checked: bool,
    descales: tuple[Any | None, Any | None] | None = None,
) -> None: ...
def run_backward(
    saved: tuple[Any, Any, Any, Any, Any],
    grad_o: Any,
    grad_lse: Any | None,
    outputs: tuple[Any, Any, Any],
    key_lengths: list[int] | Any | None,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    places: Places | None = None,
) -> None: ...
def check(
    q: Any,
    k: Any,
    v: Any,
    key_lengths: list[int] | Any | None,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    layout: str,
    quantise: str | None = None,
) -> str: ...
def explain(
    q: Any,
    k: Any,
    v: Any,
    key_lengths: list[int] | Any | None,
    mask: str,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float,
    layout: str,
    target: str | None,
    quantise: str | None = None,
) -> str: ...
def machine() -> dict[str, Any]: ...
def recognise_mask(
    mask: Any, len_q: int, reach: Callable[[], float] | None = None
) -> tuple[list[int], list[int], str, int | None, int | None]: ...
def preparation(
    gpu: bool, element_bytes: int, sizes: tuple[int, ...], strides: tuple[int, ...], address: int
) -> tuple[int | None, str | None] | None: ...
def bind_torch(
    plain: list[type[Any]],
    is_grad_enabled: Callable[[], bool],
    watchers: list[Callable[[], Any]],
    empty_like: Callable[[Any], Any],
    empty_output: Callable[[Any, Any], Any],
    empty_lse: Callable[[Any, str], Any],
) -> bool: ...
def torch_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: str,
    left: int | None,
    right: int | None,
    key_lengths: list[int] | Any | None,
    scale: float | None,
    softcap: float,
    layout: str,
    with_lse: bool,
    grouped: bool,
) -> Any: ...
def after_fork() -> None: ...
