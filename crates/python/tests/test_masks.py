"""Masks given as tensors are recognised, or refused with the reason."""

import numpy as np
import pytest
import rule
from flashcore_attn import UnsupportedError
from flashcore_attn._native import recognise_mask


def mask_of(batch, len_q, len_k, spans, mask, left=None, right=None):
    """(batch, 1, queries, keys): entry b sees the keys of spans[b], cut by a mask."""
    out = np.zeros((batch, 1, len_q, len_k), bool)
    for b, (start, end) in enumerate(spans):
        out[b, 0, :, start:end] = rule.visible(len_q, end - start, mask, left, right)
    return out


def redrawn(found, batch, len_q, len_k):
    """The mask that recognised numbers stand for."""
    starts, ends, mask, left, right = found
    return mask_of(batch, len_q, len_k, list(zip(starts, ends)), mask, left, right)


PATTERNS = [
    ("none", None, None),
    ("causal", None, None),
    ("causal-top-left", None, None),
    ("window", 3, 2),
    ("window", 3, 0),
    ("window", 0, 0),
    ("window", None, 2),
    ("window", 2, None),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5), (1, 9), (9, 1)])
@pytest.mark.parametrize("padded", ["no", "right", "left", "both"])
def test_every_pattern_of_the_kernels_is_recognised(pattern, lengths, padded):
    len_q, len_k = lengths
    cut = {"no": (0, 0), "right": (0, 2), "left": (2, 0), "both": (1, 1)}[padded]
    spans = [(0, len_k), (min(cut[0], len_k), max(len_k - cut[1], min(cut[0], len_k)))]
    given = mask_of(2, len_q, len_k, spans, *pattern)
    np.testing.assert_array_equal(redrawn(recognise_mask(given, len_q), 2, len_q, len_k), given)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_additive_mask_of_zero_and_minus_infinity_is_the_same(dtype):
    seen = mask_of(2, 6, 9, [(0, 9), (2, 9)], "causal")
    added = np.where(seen, 0.0, -np.inf).astype(dtype)
    assert recognise_mask(added, 6) == recognise_mask(seen, 6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_lowest_number_hides_as_minus_infinity_does_where_something_is_seen(dtype):
    seen = mask_of(1, 6, 9, [(0, 9)], "causal")
    lowest = np.where(seen, 0.0, np.finfo(dtype).min).astype(dtype)
    assert recognise_mask(lowest, 6) == recognise_mask(seen, 6)
    with pytest.raises(UnsupportedError, match="query 0 sees no key, and a finite number hides none"):
        recognise_mask(np.full((1, 1, 2, 3), np.finfo(dtype).min, dtype), 2)


@pytest.mark.parametrize("low", [-1e4, -1e9, -500.0])
def test_a_low_number_hides_if_it_reaches_below_every_score(low):
    seen = mask_of(1, 6, 9, [(0, 9)], "causal")
    added = np.where(seen, 0.0, low).astype(np.float32)
    assert recognise_mask(added, 6, lambda: -low) == recognise_mask(seen, 6)
    for reach in (1.001 * -low, float("nan"), float("inf")):
        with pytest.raises(UnsupportedError, match="is sure to hide any key"):
            recognise_mask(added, 6, lambda reach=reach: reach)
    with pytest.raises(UnsupportedError, match="is sure to hide any key"):
        recognise_mask(added, 6)


def test_the_weakest_of_several_low_numbers_decides():
    added = np.array([[0.0, -1e9, -2e3, -1e30]], np.float32)
    assert recognise_mask(added, 1, lambda: 2e3) == ([0], [1], "none", None, None)
    with pytest.raises(UnsupportedError, match="it adds -2000 to a score"):
        recognise_mask(added, 1, lambda: 1e4)


def test_how_far_scores_reach_is_asked_only_where_it_matters():
    def never():
        raise AssertionError("asked")

    seen = mask_of(1, 6, 9, [(0, 9)], "causal")
    for mask in (seen, np.where(seen, 0.0, -np.inf).astype(np.float32)):
        recognise_mask(mask, 6, never)


def test_one_row_for_all_queries_is_padding():
    row = np.array([[[[True] * 5 + [False] * 2]], [[[True] * 7]]])
    assert recognise_mask(row, 4) == ([0, 0], [5, 7], "none", None, None)


def test_an_expanded_mask_is_read_once():
    one = mask_of(1, 6, 9, [(0, 9)], "causal")
    assert recognise_mask(np.broadcast_to(one, (64, 32, 6, 9)), 6) == recognise_mask(one, 6)


def test_two_dimensions_are_queries_and_keys():
    one = mask_of(1, 6, 9, [(0, 9)], "causal")
    assert recognise_mask(one[0, 0], 6) == recognise_mask(one, 6)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (np.array([[True, False, True]]), "query 0 sees keys that do not lie side by side"),
        (np.eye(4, dtype=bool)[[0, 3, 1, 2]], "what it hides is neither padding nor causal nor a window"),
        (np.array([[0.0, 0.5]], np.float32), "it adds 0.5 to a score, possible are 0 and -inf"),
        (np.array([[0.0, -100.0]], np.float32), "a bias is not fused"),
        (np.array([[0.0, np.nan]], np.float32), "it adds NaN to a score"),
        (np.ones((1, 1, 1, 4), np.int64), "it is neither bool nor of the type of q"),
        (np.ones((3, 4), bool), "it has 3 queries, but q has 4"),
        (np.ones(4, bool), "it has 1 dimensions, possible are 2 to 4"),
        (np.stack([np.tri(4, dtype=bool), np.ones((4, 4), bool)])[None], "it differs from head to head"),
    ],
)
def test_what_is_not_fused_is_refused_with_the_reason(mask, reason):
    with pytest.raises(UnsupportedError) as raised:
        recognise_mask(mask, 1 if mask.shape[-2:-1] == (1,) and mask.ndim == 2 else 4)
    assert reason in str(raised.value)
    assert "torch's own attention" in str(raised.value)
