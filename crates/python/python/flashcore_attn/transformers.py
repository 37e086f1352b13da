"""FlashCore as an attention implementation of Hugging Face transformers.

    import flashcore_attn.transformers
    flashcore_attn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fcore")

Padding on either side, caches, grouped heads, sliding windows and softcap are computed as with ``"sdpa"``, but for
the queries of padding, whose outputs mean nothing. What the kernels cannot express raises ``UnsupportedError``
instead of being left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._errors import ContractError, UnsupportedError
from ._ops import recognise
from ._sdpa import masked
from ._torch import attend

#: transformers takes every name with "flash" in it for one of flash-attn's own.
NAME = "fcore"

#: A batch entry's row of a pattern: its first key, the end of its keys, the window's sides (-1 is no limit), and
#: whether the window is aligned top-left.
_COLUMNS = 5


def register(name: str = NAME) -> None:
    """Registers FlashCore with transformers under this name, for ``attn_implementation=name``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if "flash" in name:
        raise ContractError(f"the name is '{name}', but transformers looks for flash-attn where it reads 'flash'")

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's layers call: (batch, heads, length, head_dim) in, (batch, length, heads, head_dim) out."""
    if dropout != 0.0:
        raise UnsupportedError(f"dropout is {dropout}: FlashCore has none. Set attention_dropout to 0, or model.eval()")
    for option in ("position_bias", "s_aux", "cache"):
        if others.get(option) is not None:
            raise UnsupportedError(f"this model gives {option} to attention, which is not fused. Use 'sdpa' or 'eager'")
    if others.get("output_attentions"):
        raise UnsupportedError("output_attentions: probabilities are never made. Use 'eager' to see them")
    softcap = softcap or 0.0
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = "causal-top-left" if causal and query.size(2) > 1 else "none"
        o = attend(query, key, value, mask, scale=scaling, softcap=softcap)
    elif attention_mask.dtype == torch.int32 and attention_mask.size(-1) == _COLUMNS:
        starts, ends, mask, left, right = _decode(attention_mask)
        o = attend(query, key, value, mask, left, right, starts, ends, scaling, softcap)
    else:
        # A mask that somebody made by hand, or one that is only known when a compiled graph runs.
        o = masked(query, key, value, attention_mask[..., : key.size(2)], scaling, softcap)
    return o.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """What a model calls once a pass, before its layers: None if ``is_causal`` says it all, else a pattern as numbers.

    Padding is read from the two-dimensional mask; nothing of the size queries × keys is made for it. Other patterns
    (windows, blocks, …) are made as ``"sdpa"`` has them and recognised.
    """
    # The package itself is a lazy one, which torch.compile does not see through.
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    mask_function = causal_mask_function if mask_function is None else mask_function

    def as_sdpa(padding: Tensor | None) -> Tensor | None:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, padding, **options
        )  # fmt: skip

    if is_compiling() or isinstance(q_offset, Tensor):
        return as_sdpa(attention_mask)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    spans = _spans(padding, batch_size, kv_length)
    if spans is not None:
        causal = mask_function is causal_mask_function
        if causal or mask_function is bidirectional_mask_function:
            found = _padded(*spans, q_length, kv_length, q_offset - kv_offset, None, 0 if causal else None)
        else:
            found = _other(as_sdpa(None), *spans, q_length, kv_length, q_offset - kv_offset, options)
        if found is not None:
            return found.mask
    mask = as_sdpa(attention_mask)
    return None if mask is None else _recognised(mask, batch_size, q_length)


class _Found:
    """A pattern that was found; None is one, too."""

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask


def _spans(padding: Tensor | None, batch: int, kv_length: int) -> tuple[list[int], list[int]] | None:
    """The first key and the end of the keys of each batch entry, or None if padding lies between tokens."""
    if padding is None or kv_length == 0:
        return [0] * batch, [kv_length] * batch
    keys = torch.arange(kv_length, device=padding.device)
    first = torch.where(padding, keys, kv_length).amin(-1)
    end = torch.where(padding, keys + 1, 0).amax(-1)
    # One copy to the host, which waits, a pass.
    firsts, ends, counts = torch.stack([first, end, padding.sum(-1)]).tolist()
    if any(count and end - first != count for first, end, count in zip(firsts, ends, counts, strict=True)):
        return None
    return [first if count else 0 for first, count in zip(firsts, counts, strict=True)], ends


def _padded(
    starts: list[int], ends: list[int], q_length: int, kv_length: int, offset: int, left: int | None, right: int | None
) -> _Found | None:  # fmt: skip
    """The pattern of padded sequences under a window whose query i stands at key i + offset."""
    if left is None and right is None:
        whole = not any(starts) and all(end == kv_length for end in ends)
        return _Found(None if whole else _encode(starts, ends, None, None, False))
    # The window stands right if the last query has the last key; keys after it are never seen.
    last = offset + q_length
    if right == 0:
        ends = [min(end, last) for end in ends]
    if all(end == last for end in ends):
        plain = left is None and not any(starts) and last == kv_length and (q_length == 1 or offset == 0)
        return _Found(None if plain else _encode(starts, ends, left, right, False))
    if right == 0 and offset == 0 and not any(starts):
        # Padding on the right, which only queries of padding could see.
        if left is None:
            return _Found(_encode(starts, ends, None, 0, True))
        return _Found(_encode(starts, [last] * len(ends), left, 0, False))
    return None


def _other(
    mask: Tensor | None, starts: list[int], ends: list[int], q_length: int, kv_length: int, offset: int, options: dict
) -> _Found | None:  # fmt: skip
    """The pattern of padded sequences under a mask that was made without the padding."""
    if mask is None:
        right = 0 if options.get("allow_is_causal_skip", True) else None
        return _padded(starts, ends, q_length, kv_length, offset, None, right)
    firsts, lasts, name, left, right = recognise(mask, len(starts), q_length)
    if any(firsts) or len(set(lasts)) > 1:
        return None
    if name == "causal-top-left" or name == "causal":
        left, right = None, 0
    return _padded(starts, ends, q_length, kv_length, offset, left, right)


def _recognised(mask: Tensor, batch: int, q_length: int) -> Tensor:
    starts, ends, name, left, right = recognise(mask, batch, q_length)
    if name in ("causal", "causal-top-left"):
        left, right = None, 0
    return _encode(starts, ends, left, right, name == "causal-top-left")


def _encode(starts: list[int], ends: list[int], left: int | None, right: int | None, top_left: bool) -> Tensor:
    """A pattern as a tensor of four dimensions, which models pass on as they pass a mask."""
    sides = (-1 if left is None else left, -1 if right is None else right, int(top_left))
    rows = [(start, end, *sides) for start, end in zip(starts, ends, strict=True)]
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), 1, 1, _COLUMNS)


def _decode(pattern: Tensor) -> tuple[list[int] | None, list[int], str, int | None, int | None]:
    rows = pattern.view(-1, _COLUMNS).tolist()
    starts, ends = [row[0] for row in rows], [row[1] for row in rows]
    left, right, top_left = rows[0][2:] if rows else (-1, -1, 0)
    left, right = (None if side == -1 else side for side in (left, right))
    if top_left:
        mask = "causal-top-left"
    elif left is None and right is None:
        mask = "none"
    else:
        mask = "causal" if left is None and right == 0 else "window"
    return (starts if any(starts) else None), ends, mask, left, right
