"""FlashCore as an attention implementation of Hugging Face transformers.

    import flashcore_attn.transformers
    flashcore_attn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fcore")

Padding on either side, packed sequences, caches, grouped heads, sliding windows and softcap are computed as with
``"eager"``, except for the queries of padding, whose outputs mean nothing. What the kernels cannot express raises
``UnsupportedError`` instead of being left out; so does a model that computes attention by itself.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._errors import ContractError, UnsupportedError
from ._flash import flash_attn_varlen_func
from ._fused_mask import FusedMask, Pattern, seen_of
from ._ops import define, implement, recognise
from ._sdpa import masked
from ._torch import attend

#: transformers takes every name with "flash" in it for one of flash-attn's.
NAME = "fcore"

#: Arguments of a call that do not change what attention computes.
_HARMLESS = frozenset(
    (
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "num_items_in_batch",
        "position_ids", "seq_idx",
    )
)  # fmt: skip

_names: set[str] = set()


def register(name: str = NAME) -> None:
    """Registers FlashCore with transformers under this name, for ``attn_implementation=name``."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    if "flash" in name:
        raise ContractError(f"the name is '{name}', but transformers looks for flash-attn where it reads 'flash'")

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    if not _names:
        models: Any = PreTrainedModel
        models.get_correct_attn_implementation = _checked(models.get_correct_attn_implementation)
    _names.add(name)


def _checked(choose: Callable[..., str]) -> Callable[..., str]:
    """The method by which a model sets its implementation; models that would never call it refuse it."""

    @functools.wraps(choose)
    def chosen(self: Any, *args: Any, **options: Any) -> str:
        name = choose(self, *args, **options)
        if name in _names and not _comes_here(type(self)):
            raise UnsupportedError(
                f"{type(self).__name__} computes attention by itself, not through transformers' AttentionInterface: "
                f"'{name}' would never be called. Use attn_implementation='sdpa' or 'eager'. If it is one part of a "
                f"model, choose for each part: attn_implementation={{'text_config': '{name}', …}}"
            )
        return name

    return chosen


def _comes_here(model: Any) -> bool:
    """Whether the layers of a model class get attention from the interface, judged by its source.

    This is the check that transformers makes before it changes an implementation, and one more: whether layers are
    chosen by the implementation's name, which works only for transformers' own names.
    """
    if not model._can_set_attn_implementation():
        return False
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (KeyError, OSError, TypeError):
        return True
    return re.search(r"_CLASSES\[(self\.)?config\._attn_implementation\]", source) is None


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
    if others.get("output_attentions"):
        raise UnsupportedError("output_attentions: probabilities are never made. Use 'eager' to see them")
    for option, given in others.items():
        unknown = isinstance(given, Tensor) and option not in _HARMLESS
        if unknown or (option == "cache" and given is not None):
            raise UnsupportedError(f"this model gives {option} to attention, which is not fused. Use 'sdpa' or 'eager'")
    softcap = softcap or 0.0
    if others.get("cu_seq_lens_q") is not None:
        o = _between(query, key, value, attention_mask, module, is_causal, scaling, softcap, others)
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = "causal-top-left" if causal and query.size(2) > 1 else "none"
        o = attend(query, key, value, mask, scale=scaling, softcap=softcap)
    else:
        o = _under(attention_mask, query, key, value, is_causal, scaling, softcap)
    return o.transpose(1, 2).contiguous(), None


def _under(
    mask: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention under a mask."""
    seen = seen_of(mask)
    if isinstance(seen, Pattern) and mask.shape != (query.size(0), 1, query.size(2), key.size(2)):
        # The numbers are only valid for the keys that they were made for.
        seen = mask == 0
    if not isinstance(seen, Pattern):
        # A mask that was made by hand or changed, or that is only known when a compiled graph runs.
        given = (mask if seen is None else seen)[..., : key.size(2)]
        if given.size(-1) == 1:
            # "eager" adds one number for all keys.
            given = given.expand(*given.shape[:-1], key.size(2))
        return masked(query, key, value, given, scaling, softcap)
    if seen.sequences is not None:
        return _packed(query, key, value, seen, scaling, softcap)
    name = seen.mask
    if is_causal is False and seen == _CAUSAL and query.size(2) == key.size(2):
        # is_causal=False with a purely causal mask turns causality off, as with "sdpa".
        name = "none"
    o: Tensor = attend(
        query, key, value, name, seen.left, seen.right, seen.key_starts, seen.key_ends, scaling, softcap
    )  # fmt: skip
    return o


def _packed(query: Tensor, key: Tensor, value: Tensor, seen: Pattern, scaling: float | None, softcap: float) -> Tensor:
    """Attention of packed sequences, whose tokens lie one behind the other through all batch entries."""
    ends = seen.sequences
    assert ends is not None
    # A graph is not compiled for a length; eagerly, the ends are on the host.
    longest = query.size(2) if is_compiling() else None
    return _flat(query, key, value, (ends, ends), (longest, longest), seen, scaling, softcap)


def _flat(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], longest: tuple[int | None, int | None],
    seen: Pattern, scaling: float | None, softcap: float,
) -> Tensor:  # fmt: skip
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    left, right = (-1 if side is None else side for side in (seen.left, seen.right))
    o = flash_attn_varlen_func(
        q, k, v, *ends, *longest, softmax_scale=scaling, causal=seen.mask in ("causal", "causal-top-left"),
        window_size=(left, right), softcap=softcap,
    )  # fmt: skip
    return o.view(query.size(0), query.size(2), *o.shape[1:]).transpose(1, 2)


def _between(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, module: torch.nn.Module, is_causal: bool | None,
    scaling: float | None, softcap: float, given: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention of packed sequences whose ends the caller gives, as ``cu_seq_lens_q`` and ``cu_seq_lens_k``."""
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = given.get("sliding_window")
        left = None if window is None else window - 1
        seen = Pattern("causal") if causal and left is None else Pattern("window", left, 0 if causal else left)
        seen = Pattern("none") if not causal and left is None else seen
    else:
        found = seen_of(mask)
        if not isinstance(found, Pattern) or found.key_starts is not None or found.key_ends is not None:
            raise UnsupportedError(
                "cu_seq_lens_q with a mask for padding: packed sequences have none. Give one of them"
            )
        seen = found._replace(mask="none") if is_causal is False and found == _CAUSAL else found
    ends_q = given["cu_seq_lens_q"]
    ends_k = ends_q if given.get("cu_seq_lens_k") is None else given["cu_seq_lens_k"]
    longest_q, longest_k = given.get("max_length_q"), given.get("max_length_k")
    if is_compiling():
        # Numbers in tensors are not read for a graph.
        longest_q = query.size(0) * query.size(2) if isinstance(longest_q, Tensor) else longest_q
        longest_k = key.size(0) * key.size(2) if isinstance(longest_k, Tensor) else longest_k
    return _flat(query, key, value, (ends_q, ends_k), (longest_q, longest_k), seen, scaling, softcap)


#: The pattern of ``is_causal`` alone.
_CAUSAL = Pattern("causal-top-left")


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """What a model calls once per pass, before its layers: a mask that FlashCore reads as numbers and other code as the
    mask of "eager". None where "eager" has none: without causality and padding.

    Padding is read from the two-dimensional mask; nothing of the size queries × keys is made for it. Other patterns
    (windows, blocks, …) are made as ``"sdpa"`` has them and recognised.
    """
    # The package loads its modules lazily, which torch.compile cannot trace.
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    function = causal_mask_function if mask_function is None else mask_function
    shape, device = (batch_size, 1, q_length, kv_length), torch.device(device)

    def as_sdpa(padding: Tensor | None, function: Callable[..., Any] = function) -> Tensor | None:
        where: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "device": device, "dtype": dtype}
        mask: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, mask_function=function, attention_mask=padding, **where, **options
        )  # fmt: skip
        return mask

    def fused(seen: Pattern | Tensor) -> Tensor:
        return FusedMask.of(seen, shape, dtype, device)

    if is_compiling():
        if isinstance(q_offset, Tensor) and function is causal_mask_function and attention_mask is None:
            # A cache of fixed size, whose length the graph reads on the device.
            end = (q_offset - kv_offset + q_length).to(torch.int32)
            return fused(Pattern("causal", key_ends=end.expand(batch_size).contiguous()))
        of_one, numbers = _unpacked(function)
        if numbers is not None and attention_mask is None and not isinstance(q_offset, Tensor):
            known, left = _causal_window(of_one)
            if known and q_offset == kv_offset and q_length == kv_length:
                ends = torch.ops.flashcore.sequence_ends(numbers.expand(batch_size, q_length))
                name = "causal" if left is None else "window"
                return fused(Pattern(name, left, None if left is None else 0, sequences=ends))
        seen = as_sdpa(attention_mask)
        if seen is not None:
            return fused(seen)
        return (
            fused(_CAUSAL if q_length > 1 else Pattern("none")) if options.get("allow_is_causal_skip", True) else None
        )

    offset, fixed_cache = int(q_offset) - kv_offset, isinstance(q_offset, Tensor)
    of_one, numbers = _unpacked(function)
    if numbers is not None and attention_mask is None and offset == 0 and q_length == kv_length:
        pattern = _in_sequences(of_one, numbers.expand(batch_size, q_length), as_sdpa)
        if pattern is not None:
            return fused(pattern)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    spans = _spans(padding, batch_size, kv_length)
    causal_if_none = bool(options.get("allow_is_causal_skip", True))
    found: _Numbers | None = None
    if spans is not None:
        if function is bidirectional_mask_function:
            found = _Numbers(*spans, None, None)
        elif function is causal_mask_function:
            found = _padded(*spans, q_length, offset, None, 0)
        else:
            found = _other(as_sdpa(None), *spans, q_length, kv_length, offset, causal_if_none)
    if found is None:
        seen = as_sdpa(attention_mask)
        if seen is None:
            return fused(_CAUSAL if q_length > 1 else Pattern("none")) if causal_if_none else None
        try:
            found = _Numbers.recognised(seen, batch_size, q_length)
        except UnsupportedError:
            # Refused when FlashCore has to compute it, not when a model asks for it.
            return fused(seen)
    if options.get("allow_is_bidirectional_skip") and found.whole(kv_length):
        return None
    return fused(found.pattern(q_length, kv_length, device, fixed_cache))


class _Numbers(NamedTuple):
    """A pattern on the host: the keys of each batch entry, the window's sides, and the corner it is aligned to."""

    starts: list[int]
    ends: list[int]
    left: int | None
    right: int | None
    top_left: bool = False

    @staticmethod
    def recognised(mask: Tensor, batch: int, q_length: int) -> _Numbers:
        """The numbers behind a mask, or ``UnsupportedError``."""
        starts, ends, name, left, right = recognise(mask, batch, q_length)
        if name in ("causal", "causal-top-left"):
            left, right = None, 0
        return _Numbers(starts, ends, left, right, name == "causal-top-left")

    def whole(self, kv_length: int) -> bool:
        """Whether every query sees every key."""
        sides = self.left is None and self.right is None
        return sides and not any(self.starts) and all(end == kv_length for end in self.ends)

    def pattern(self, q_length: int, kv_length: int, device: torch.device, fixed_cache: bool) -> Pattern:
        """The numbers as a mask carries them. A cache of fixed size keeps its ends even where they are those of all
        keys, so that one compiled graph serves every step."""
        left, right, all_keys = self.left, self.right, kv_length
        if self.top_left:
            # Queries see no key after the last query.
            name, left, right, all_keys = "causal-top-left", None, None, min(q_length, kv_length)
        elif left is None and (right is None or (right == 0 and q_length == 1)):
            name, right = "none", None
        else:
            name = "causal" if left is None and right == 0 else "window"
        if any(self.starts):
            # Batches are split by where sequences begin, which takes numbers on the host.
            starts, ends = (torch.tensor(x, dtype=torch.int32) for x in (self.starts, self.ends))
            return Pattern(name, left, right, starts, ends)
        if all(end >= all_keys for end in self.ends) and (self.top_left or not fixed_cache):
            return Pattern(name, left, right)
        return Pattern(name, left, right, None, torch.tensor(self.ends, dtype=torch.int32).to(device))


def _unpacked(function: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor | None]:
    """What a mask function says of one sequence, and the number of the sequence of each token, (batch, length), where
    transformers has found that several are packed."""
    parts: Any = _closed_over(function)
    if isinstance(parts, tuple) and len(parts) == 2:
        first, second = parts
        numbers = _closed_over(second)
        # What closes over something is a function, which has this name; torch.compile does not find it by getattr.
        if isinstance(numbers, Tensor) and "packed_sequence_mask_function." in second.__qualname__:
            return first, numbers
    return function, None


def _closed_over(function: Any) -> Any:
    """What a mask function was made of, if that is one thing."""
    cells: Any = getattr(function, "__closure__", None) or ()
    return cells[0].cell_contents if len(cells) == 1 else None


def _causal_window(function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Whether a mask function is known to be causal, and how many keys before its own a query sees then."""
    from transformers.masking_utils import causal_mask_function

    if function is causal_mask_function:
        return True, None
    parts: Any = _closed_over(function)
    if isinstance(parts, tuple) and len(parts) == 2:
        first, second = parts
        window = _closed_over(first)
        if (
            second is causal_mask_function
            and isinstance(window, int)
            and "sliding_window_overlay." in first.__qualname__
        ):
            return True, window - 1
    return False, None


def _begins(numbers: Tensor) -> Tensor:
    """Which tokens, through all batch entries, are the first of their sequence."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins.flatten()


define("sequence_ends(Tensor numbers) -> Tensor")


def _sequence_ends(numbers: Tensor) -> Tensor:
    """Where sequences begin and end, on the host, for a graph that does not know how many there are: as many as tokens,
    of which the last ones are empty."""
    tokens = numbers.numel()
    starts = _begins(numbers).nonzero().flatten().to("cpu", torch.int32)
    ends = torch.full((tokens + 1,), tokens, dtype=torch.int32)
    ends[: starts.numel()] = starts
    return ends


implement("sequence_ends", _sequence_ends, lambda numbers: torch.empty(numbers.numel() + 1, dtype=torch.int32))


def _in_sequences(
    function: Callable[..., Any], numbers: Tensor, as_sdpa: Callable[[Tensor | None, Callable[..., Any]], Tensor | None]
) -> Pattern | None:
    """The pattern of packed sequences under a causal mask or a window."""
    from transformers.masking_utils import causal_mask_function

    batch, length = numbers.shape
    left: int | None = None
    right: int | None = 0
    if function is not causal_mask_function:
        mask = as_sdpa(None, function)
        if mask is None:
            return None
        try:
            found = _Numbers.recognised(mask[:1], 1, length)
        except UnsupportedError:
            return None
        if found.starts != [0] or found.ends != [length]:
            return None
        left, right = found.left, found.right
    # One blocking copy to the host per pass; calls read the ends there.
    starts = _begins(numbers).nonzero().flatten().cpu()
    ends = torch.cat([starts, starts.new_tensor([batch * length])])
    if (left, right) == (None, 0):
        return Pattern("causal", sequences=ends)
    return Pattern("window", left, right, sequences=ends)


def _spans(padding: Tensor | None, batch: int, kv_length: int) -> tuple[list[int], list[int]] | None:
    """The first key and the end of the keys of each batch entry, or None if padding lies between tokens."""
    if padding is None or kv_length == 0:
        return [0] * batch, [kv_length] * batch
    keys = torch.arange(kv_length, device=padding.device)
    first = torch.where(padding, keys, kv_length).amin(-1)
    end = torch.where(padding, keys + 1, 0).amax(-1)
    # One blocking copy to the host per pass.
    firsts, ends, counts = torch.stack([first, end, padding.sum(-1)]).tolist()
    if any(count and end - first != count for first, end, count in zip(firsts, ends, counts, strict=True)):
        return None
    return [first if count else 0 for first, count in zip(firsts, counts, strict=True)], ends


def _padded(
    starts: list[int], ends: list[int], q_length: int, offset: int, left: int | None, right: int | None
) -> _Numbers | None:  # fmt: skip
    """The pattern of padded sequences under a window whose query i is at key i + offset."""
    # The alignment is right if the last query is at the last key; keys after it are never seen.
    last = offset + q_length
    if right == 0:
        ends = [min(end, last) for end in ends]
    from_first = right == 0 and offset == 0 and not any(starts)
    if all(end == last for end in ends):
        return _Numbers(starts, ends, left, right, from_first and left is None)
    if from_first:
        # Padding on the right, which only queries of padding could see.
        if left is None:
            return _Numbers(starts, ends, None, 0, True)
        return _Numbers(starts, [last] * len(ends), left, 0)
    return None


def _other(
    mask: Tensor | None,
    starts: list[int],
    ends: list[int],
    q_length: int,
    kv_length: int,
    offset: int,
    causal_if_none: bool,
) -> _Numbers | None:
    """The pattern of padded sequences under a mask that does not include the padding."""
    left, right = None, 0 if causal_if_none else None
    if mask is not None:
        try:
            found = _Numbers.recognised(mask[:1] if mask.stride(0) == 0 else mask, len(starts), q_length)
        except UnsupportedError:
            return None
        left, right = found.left, found.right
        if q_length == 1 and left is None:
            right = 0
        # The window must cover the same keys, and only the padding may hide others.
        end = min(offset + q_length, kv_length) if right == 0 else kv_length
        if any(found.starts) or any(last != end for last in found.ends):
            return None
    if left is None and right is None:
        return _Numbers(starts, ends, None, None)
    return _padded(starts, ends, q_length, offset, left, right)
