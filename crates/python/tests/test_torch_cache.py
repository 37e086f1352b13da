"""Caches and packed sequences, whole: against attention written out one query at a time."""

import itertools
import math

import pytest
import torch
from flashcore_attn import (
    ContractError,
    UnsupportedError,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch.library import opcheck
from torch_problem import DEVICES, draw

#: float64 goes through torch's operations, as what no kernel of a GPU takes.
KINDS = [(device, dtype) for device in DEVICES for dtype in ("float32", "float64")] + [
    ("cuda", dtype) for dtype in ("float16", "bfloat16") if "cuda" in DEVICES
]
OFF = {"float64": 1e-9, "float32": 5e-6, "float16": 5e-3, "bfloat16": 4e-2}


def made(seed, kind, *shapes):
    device, dtype = kind
    return [x.to(device, getattr(torch, dtype)) for x in draw(seed, *shapes)]


def close(kind, given, expected):
    torch.testing.assert_close(given.double().cpu(), expected, atol=OFF[kind[1]], rtol=OFF[kind[1]], check_stride=False)


def sides(causal, window):
    left, right = window
    return (None if left < 0 else left), (0 if causal else None if right < 0 else right)


def plain(q, k, v, causal=False, window=(-1, -1), softcap=0.0, scale=None):
    """o and lse of one sequence: q (length, heads, head_dim), k and v likewise, in float64."""
    q, k, v = (x.detach().double().cpu() for x in (q, k, v))
    group = q.size(1) // k.size(1)
    left, right = sides(causal, window)
    o, lse = q.new_zeros((*q.shape[:2], v.size(2))), q.new_full((q.size(1), q.size(0)), -torch.inf)
    for i, head in itertools.product(range(q.size(0)), range(q.size(1))):
        place = i + k.size(0) - q.size(0)
        first = 0 if left is None else max(0, place - left)
        end = k.size(0) if right is None else min(k.size(0), place + right + 1)
        if first >= end:
            continue
        scores = k[first:end, head // group] @ q[i, head] * (q.size(2) ** -0.5 if scale is None else scale)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        lse[head, i] = torch.logsumexp(scores, 0)
        o[i, head] = torch.exp(scores - lse[head, i]) @ v[first:end, head // group]
    return o, lse


def turned(x, cos, sin, places, interleaved):
    """Rows of x (length, heads, head_dim) turned by their places, pair by pair."""
    out, half = x.clone(), cos.size(1)
    for row, place in enumerate(places):
        for pair in range(half):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, half + pair)
            a, b, c, s = (y.double() for y in (x[row, :, i], x[row, :, j], cos[place, pair], sin[place, pair]))
            out[row, :, i], out[row, :, j] = a * c - b * s, a * s + b * c
    return out


def in_pages(caches, page, seed=1):
    """Caches (batch, length, heads, head_dim) in shuffled pages, NaN where there is nothing, and their table."""
    batch, length = caches[0].shape[:2]
    most = -(-length // page)
    order = torch.randperm(batch * most + 3, generator=torch.Generator().manual_seed(seed))[: batch * most]
    table = order.to(torch.int32).view(batch, most).to(caches[0].device)
    pools = []
    for cache in caches:
        pool = cache.new_full((batch * most + 3, page, *cache.shape[2:]), torch.nan)
        for place in range(length):
            pool[table[:, place // page].long(), place % page] = cache[:, place]
        pools.append(pool)
    return (*pools, table)


def out_of_pages(pool, table, length):
    return pool[table.long()].flatten(1, 2)[:, :length]


MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (5, -1), "softcap": 3.0},
    {"window_size": (4, 2), "softmax_scale": 0.3},
]
MEANT = {"softmax_scale": "scale", "window_size": "window"}


def as_plain(options):
    return {MEANT.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("page", [None, 1, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_right_also_in_pages_and_partly_used(kind, page, options):
    lens_q, lens_k = [3, 0, 6, 1, 2], [7, 4, 6, 0, 1]
    used_q, used_k = [3, 0, 4, 1, 0], [5, 4, 6, 0, 1]
    ends = lambda lens: torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=kind[0])
    # Two tokens behind the last sequence belong to none.
    q, k, v = made(0, kind, (14, 4, 16), (20, 2, 16), (20, 2, 8))
    table = None
    for unused in (False, True):
        held_q, held_k = (used_q, used_k) if unused else (lens_q, lens_k)
        given = (q, k, v, ends(lens_q), ends(lens_k), max(lens_q), max(lens_k))
        more = {"seqused_q": torch.tensor(used_q), "seqused_k": torch.tensor(used_k)} if unused else {}
        more = {name: x.to(kind[0], torch.int32) for name, x in more.items()}
        if page is not None:
            caches = [x.new_zeros((5, 7, *x.shape[1:])) for x in (k, v)]
            for cache, x in zip(caches, (k, v)):
                for b, (start, length) in enumerate(zip(ends(lens_k).tolist(), lens_k)):
                    cache[b, :length] = x[start : start + length]
            *pools, table = in_pages(caches, page)
            given = (q, *pools, *given[3:])
            more["block_table"] = table
        o, lse, _ = flash_attn_varlen_func(*given, **options, return_attn_probs=True, **more)
        expected, sums = o.new_zeros(o.shape, dtype=torch.float64).cpu(), torch.full((4, 14), -torch.inf).double()
        for b, (start, first) in enumerate(zip(ends(lens_q).tolist()[:-1], ends(lens_k).tolist())):
            some, keys = slice(start, start + held_q[b]), slice(first, first + held_k[b])
            expected[some], sums[:, some] = plain(q[some], k[keys], v[keys], **as_plain(options))
        close(kind, o, expected)
        close(kind, lse, sums)


CACHES = [
    {},
    {"entries": [3, 0, 2]},
    {"pads": [0, 3, 2]},
    {"pads": [1, 0, 2], "entries": [1, 3, 0]},
    {"page": 16},
    {"page": 3},
    {"packed": [2, 0, 3]},
    {"packed": [1, 3, 1], "page": 16},
    {"packed": [3, 0, 2], "entries": [2, 0, 1]},
]


def arguments(case, held, pads, rotary, cos, sin):
    """What says where the tokens of a cache are, and how they are turned."""
    integers = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=cos.device)
    found = {"cache_seqlens": integers(held), "return_softmax_lse": True}
    if rotary:
        found |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"}
    if "entries" in case:
        found["cache_batch_idx"] = integers(case["entries"])
    if "pads" in case:
        found["cache_leftpad"] = integers(pads)
    if "packed" in case:
        ends = [0, *itertools.accumulate(case["packed"])]
        found |= {"cu_seqlens_q": integers(ends), "max_seqlen_q": max(case["packed"])}
    return found


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_appended_turned_and_attended(kind, case, rotary, options):
    """Every way in which a cache may lie, with new tokens, whose queries and keys may be turned first."""
    batch, length, new, held = 3, 16, 2, [9, 0, 14]
    lens = case.get("packed", [2] * batch)
    entries = case.get("entries", list(range(batch)))
    pads = [min(pad, end) for pad, end in zip(case.get("pads", [0] * batch), held)]
    shape = (sum(lens) if "packed" in case else batch, *([] if "packed" in case else [2]), 4, 32)
    q, k, v = made(0, kind, shape, (batch, new, 2, 32), (batch, new, 2, 16))
    many = 4 if "entries" in case else batch
    caches = made(1, kind, (many, length, 2, 32), (many, length, 2, 16))
    # Of rows that nobody wrote, whatever they are, nothing must be seen.
    for cache, (entry, end) in itertools.product(caches, zip(entries, held)):
        cache[entry, end:] = torch.nan
    cos, sin = made(2, kind, (20, 8), (20, 8))
    extra = {**arguments(case, held, pads, rotary, cos, sin), **options}
    given = [cache.clone() for cache in caches]
    if "page" in case:
        *given, extra["block_table"] = in_pages(caches, case["page"])
    o, lse = flash_attn_with_kvcache(q, *given, k, v, **extra)

    host = [x.cpu() for x in (q, k, v, cos, sin)]
    left, right = sides(options.get("causal", False), options.get("window_size", (-1, -1)))
    start = 0
    for b, (end, entry) in enumerate(zip(held, entries)):
        rows = host[0][start : start + lens[b]] if "packed" in case else host[0][b]
        keys = host[1][b]
        if rotary:
            how = (*host[3:], *[[end + i if (left, right) != (None, None) else end for i in range(lens[b])]])
            rows = turned(rows, *how, rotary == "interleaved")
            keys = turned(keys, *host[3:], [end + i for i in range(new)], rotary == "interleaved")
        after = [cache[entry].cpu().clone() for cache in caches]
        after[0][end : end + new], after[1][end : end + new] = keys, host[2][b]
        for cache, wanted in zip(given, after):
            found = out_of_pages(cache, extra["block_table"], length)[b] if "page" in case else cache[entry]
            close(kind, found[: end + new], wanted[: end + new].double())
            assert found[end + new :].isnan().all(), "and nothing else is written"
        expected, sums = plain(rows, *(x[pads[b] : end + new] for x in after), **as_plain(options))
        of_o, of_lse = (o[start : start + lens[b]], lse[:, start : start + lens[b]]) if "packed" in case else (
            o[b], lse[b]
        )  # fmt: skip
        close(kind, of_o, expected)
        close(kind, of_lse, sums)
        start += lens[b]


EIGHT = torch.float8_e4m3fn


def in_codes(x, descale):
    """Rows (length, heads, head_dim) as the codes of a cache, whose heads have these descales."""
    return (x.float() / descale.unsqueeze(-1)).clamp(-448, 448).to(EIGHT)


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_of_float8_gets_codes_of_turned_tokens_under_its_descales(dtype, case, rotary):
    batch, length, new, held = 3, 16, 2, [9, 0, 14]
    kind, lens = ("cpu", dtype), case.get("packed", [2] * batch)
    entries = case.get("entries", list(range(batch)))
    pads = [min(pad, end) for pad, end in zip(case.get("pads", [0] * batch), held)]
    shape = (sum(lens) if "packed" in case else batch, *([] if "packed" in case else [2]), 4, 32)
    q, k, v, cos, sin = made(0, kind, shape, (batch, new, 2, 32), (batch, new, 2, 16), (20, 8), (20, 8))
    # The second new token of each entry is beyond the largest code.
    v[:, 1] *= 3000
    descales = [
        torch.tensor([[0.03, 0.5], [1 / 7, 3.0], [1.0, 0.01]]),
        torch.tensor([[2.0], [0.3], [5.0]]).expand(3, 2),
    ]
    many = 4 if "entries" in case else batch
    caches = [x.to(EIGHT).float() for x in made(1, kind, (many, length, 2, 32), (many, length, 2, 16))]
    for cache, (entry, end) in itertools.product(caches, zip(entries, held)):
        cache[entry, end:] = torch.nan
    extra = {**arguments(case, held, pads, rotary, cos, sin), "causal": True}
    extra |= {"k_descale": descales[0], "v_descale": descales[1]}
    given = [cache.clone() for cache in caches]
    if "page" in case:
        *given, extra["block_table"] = in_pages(caches, case["page"])
    given = [cache.to(EIGHT) for cache in given]
    o, lse = flash_attn_with_kvcache(q, *given, k, v, **extra)
    # Attention alone, to what is there now.
    again, _ = flash_attn_with_kvcache(
        q, *given, **{**extra, "cache_seqlens": extra["cache_seqlens"] + new, "rotary_cos": None, "rotary_sin": None}
    )
    assert rotary or torch.equal(o, again)

    start = 0
    for b, (end, entry) in enumerate(zip(held, entries)):
        rows, keys = q[start : start + lens[b]] if "packed" in case else q[b], k[b].double()
        if rotary:
            rows = turned(rows, cos, sin, [end + i for i in range(lens[b])], rotary == "interleaved")
            keys = turned(keys, cos, sin, [end + i for i in range(new)], rotary == "interleaved")
        after = [cache[entry].clone() for cache in caches]
        for cache, tokens, descale in zip(after, (keys, v[b]), descales):
            cache[end : end + new] = in_codes(tokens, descale[b]).float()
        for cache, wanted in zip(given, after):
            found = cache.float()
            found = out_of_pages(found, extra["block_table"], length)[b] if "page" in case else found[entry]
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        real = [cache.double() * descale[b].double().unsqueeze(-1) for cache, descale in zip(after, descales)]
        expected, sums = plain(rows, *(x[pads[b] : end + new] for x in real), causal=True)
        of_o, of_lse = (o[start : start + lens[b]], lse[:, start : start + lens[b]]) if "packed" in case else (
            o[b], lse[b]
        )  # fmt: skip
        most = max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        close(kind, of_o / most, expected / most)
        close(kind, of_lse, sums)
        start += lens[b]


def test_a_descale_may_be_one_number_and_what_does_not_go_with_float8_is_named():
    q, k, cache = made(0, ("cpu", "bfloat16"), (2, 1, 4, 16), (2, 1, 2, 16), (2, 8, 2, 16))
    held, codes = torch.tensor([3, 7]), cache.to(EIGHT)
    call = lambda q, cache, *new, **options: flash_attn_with_kvcache(
        q, cache, cache.clone(), *new, cache_seqlens=held, **options
    )
    ones = torch.full((2, 2), 0.5)
    given = codes.clone(), codes.clone()
    found = [call(q, cache, k, k, k_descale=by, v_descale=0.5) for cache, by in zip(given, (ones, torch.tensor(0.5)))]
    assert torch.equal(*found) and torch.equal(*(x.view(torch.uint8) for x in given))
    assert torch.equal(given[0][1, 7].float(), (k[1, 0] / 0.5).to(EIGHT).float())
    for args, options, error, what in (
        ((q.float(), codes, k.float(), k.float()), {}, ContractError, "q is float32"),
        ((q.to(EIGHT), codes, k, k), {}, UnsupportedError, "q is float8_e4m3fn"),
        ((q, codes, k.float(), k), {}, ContractError, "k is float32, but q is bfloat16"),
        ((q, codes, k.to(EIGHT), k), {}, ContractError, "k is float8_e4m3fn"),
        ((q, codes, k, k), {"q_descale": ones}, ContractError, "q_descale is for q of float8"),
        ((q, codes, k, k), {"k_descale": torch.ones(2, 3)}, ContractError, "k_descale has shape"),
        ((q, codes, k, k), {"v_descale": 0.0}, ContractError, "v_descale is 0 for batch entry 0"),
        ((q, cache, k, k), {"k_descale": ones}, UnsupportedError, "k_descale is a tensor"),
    ):
        with pytest.raises(error, match=what):
            call(*args, **options)
    wide = torch.zeros(2, 12, 2, 16).to(EIGHT)[:, :8]
    with pytest.raises(UnsupportedError, match="does not lie as the kernels write it"):
        call(q, wide, k, k, cache_batch_idx=torch.tensor([1, 0]))


def test_new_tokens_may_be_packed_and_positions_be_given():
    """As with flash-attn 3: as many new keys for each sequence as it has."""
    counts, held, positions = [2, 0, 3], [4, 7, 1], [10, 0, 3]
    q, k, v, cos, sin = draw(0, (5, 4, 16), (5, 2, 16), (5, 2, 16), (20, 8), (20, 8))
    caches = draw(1, (3, 12, 2, 16), (3, 12, 2, 16))
    given, starts = [cache.clone() for cache in caches], torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    o, lse = flash_attn_with_kvcache(
        q, *given, k, v, cos, sin, torch.tensor(held), cu_seqlens_q=starts, max_seqlen_q=3, cu_seqlens_k_new=starts,
        rotary_seqlens=torch.tensor(positions), causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for b, (start, count) in enumerate(zip(starts.tolist(), counts)):
        some, places = slice(start, start + count), range(positions[b], positions[b] + count)
        after = [cache[b].clone() for cache in caches]
        after[0][held[b] : held[b] + count] = turned(k[some], cos, sin, places, True)
        after[1][held[b] : held[b] + count] = v[some]
        for cache, wanted in zip(given, after):
            close(("cpu", "float32"), cache[b], wanted.double())
        end = held[b] + count
        expected, sums = plain(turned(q[some], cos, sin, places, True), *(x[:end] for x in after), causal=True)
        close(("cpu", "float32"), o[some], expected)
        close(("cpu", "float32"), lse[:, some], sums)


def test_a_cache_whose_entries_do_not_lie_together_is_written_where_it_is():
    q, k, wide = draw(0, (2, 1, 4, 16), (2, 1, 2, 16), (4, 20, 2, 16))
    entries, held = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([9, 0], dtype=torch.int32)
    cache, same = wide.clone()[:, :16], wide[:, :16].contiguous()
    call = lambda cache: flash_attn_with_kvcache(q, cache, cache.clone(), k, k, None, None, held, entries, causal=True)
    torch.testing.assert_close(call(cache), call(same))
    assert torch.equal(cache, same) and torch.equal(cache[3, 9], k[0, 0]) and torch.equal(cache[1, 0], k[1, 0])


def test_a_cache_may_be_read_without_new_tokens_and_with_a_number_for_all():
    q, k_cache, v_cache = draw(0, (2, 3, 4, 16), (4, 16, 2, 16), (4, 16, 2, 16))
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=11, cache_batch_idx=torch.tensor([2, 2]), causal=True, num_splits=3,
        return_softmax_lse=True,
    )  # fmt: skip
    for b in range(2):
        expected, sums = plain(q[b], k_cache[2, :11], v_cache[2, :11], causal=True)
        close(("cpu", "float32"), o[b], expected)
        close(("cpu", "float32"), lse[b], sums)


def test_places_that_are_not_there_are_named():
    q, cache, k = draw(0, (2, 1, 4, 16), (2, 16, 2, 16), (2, 1, 2, 16))
    pools, held = cache.view(4, 8, 2, 16), torch.tensor([3, 9], dtype=torch.int32)
    call = lambda *args, **options: flash_attn_with_kvcache(q, *args, cache_seqlens=held, **options)
    for table in ([[0, 1], [2, 4]], [[0, 1], [2, -1]]):
        table = torch.tensor(table, dtype=torch.int32)
        with pytest.raises(ContractError, match=r"page 1 of sequence 1 is (4|-1), but the pool has pages 0 to 3"):
            call(pools, pools.clone(), k, k, block_table=table)
        with pytest.raises(ContractError, match=r"page 1 of sequence 1 is (4|-1), but the pool has pages 0 to 3"):
            call(pools, pools.clone(), block_table=table)
    with pytest.raises(ContractError, match="batch entry 1 is entry 2 of the cache, possible are those from 0 to 1"):
        call(cache, cache.clone(), k, k, cache_batch_idx=torch.tensor([0, 2]))
    for dtype in (torch.float32, torch.float64):
        # float64 is turned by torch's operations.
        given = [x.to(dtype) for x in (q, cache, cache.clone(), k, k)]
        with pytest.raises(ContractError, match="position 9"):
            flash_attn_with_kvcache(
                *given, cache_seqlens=held, rotary_cos=torch.ones(9, 8, dtype=dtype),
                rotary_sin=torch.ones(9, 8, dtype=dtype),
            )  # fmt: skip
    for wrong, what in (
        ({"rotary_cos": torch.ones(20, 8)}, "only one was given"),
        ({"rotary_cos": torch.ones(20, 8), "rotary_sin": torch.ones(20, 9)}, "have shapes"),
        ({"rotary_cos": torch.ones(20, 16), "rotary_sin": torch.ones(20, 16)}, "a multiple of 16 up to 16"),
        ({"rotary_cos": torch.ones(20, 4), "rotary_sin": torch.ones(20, 4)}, "a multiple of 16 up to 16"),
        ({"cu_seqlens_k_new": torch.tensor([0, 1, 2])}, r"k has shape \(2, 1, 2, 16\), possible for its cache is"),
        ({"cache_leftpad": torch.tensor([0, 10])}, "batch entry 1 holds 9 tokens, of which cache_leftpad says 10"),
    ):
        with pytest.raises(ContractError, match=what):
            call(cache, cache.clone(), k, k, **wrong)
    with pytest.raises(ContractError, match="turn new keys"):
        call(cache, cache.clone(), rotary_cos=torch.ones(20, 8), rotary_sin=torch.ones(20, 8))
    with pytest.raises(UnsupportedError, match="cache_leftpad goes with a cache that is not in pages"):
        call(pools, pools, block_table=torch.zeros(2, 2, dtype=torch.int32), cache_leftpad=held)


def operator_calls():
    ops = torch.ops.flashcore
    q, pool, k = draw(0, (2, 4, 3, 16), (7, 2, 5, 16), (2, 3, 2, 16))
    table, held = torch.tensor([[6, 1], [2, 0]], dtype=torch.int32), torch.tensor([7, 2], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    options = ("causal", None, None, None, 0.0)
    yield ops.attention_placed, (q, pool, pool, None, 0, None, table, 10, held, *options)
    yield ops.attention_placed, (q[:1], pool, pool, starts, 2, None, table, 10, held, *options)
    yield ops.attention_placed, (q, pool[:1], pool[:1], None, 0, starts, None, 5, held.clamp(max=1), *options)
    yield ops.attention_placed, (q.double(), pool.double(), pool.double(), None, 0, None, table, 10, held, *options)
    caches = pool.transpose(1, 2).contiguous(), pool.transpose(1, 2).contiguous()
    queries, angles = q.transpose(1, 2).contiguous(), draw(1, (20, 8), (20, 8))
    places = (None, 0, table, None, None, *options)
    yield ops.cache_step, (queries, *caches, k, k, held, None, *angles, None, True, *places)
    entries = torch.tensor([5, 1])
    places = (None, 0, None, entries, torch.tensor([1, 0]), *options)
    yield ops.cache_step, (queries, *caches, k, k, held.clamp(max=2), None, None, None, None, True, *places)
    tokens = (queries.flatten(0, 1)[:3], *caches, k.flatten(0, 1)[:3], k.flatten(0, 1)[:3], held, starts)
    yield ops.cache_step, (*tokens, *angles, held, False, starts, 2, table, None, None, *options)
    half = [x.half() for x in (queries, k, k, *angles)]
    codes = [x.to(EIGHT) for x in caches]
    places = (None, 0, table, None, None, *options, False, torch.ones(2, 2), None)
    yield ops.cache_step, (half[0], *codes, *half[1:3], held, None, *half[3:], None, True, *places)
    wide = [x.double() for x in (queries, *caches, k, k)]
    places = (None, 0, table, None, None, *options)
    yield ops.cache_step, (*wide, held, None, *(x.double() for x in angles), None, True, *places)


@pytest.mark.parametrize("number", range(9))
def test_operators_of_caches_pass_opcheck(number):
    operator, args = list(operator_calls())[number]
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # This one compares tensors by operations that torch has not for float8.
    checks += [] if any(x.dtype == EIGHT for x in args if isinstance(x, torch.Tensor)) else ["test_schema"]
    assert set(opcheck(operator.default, args, test_utils=checks).values()) == {"SUCCESS"}


def step(q, k_cache, v_cache, k, v, held, table, cos, sin):
    o = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=held, block_table=table, causal=True
    )
    return o * 2


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_step_of_a_cache_compiles_without_a_break_and_writes_in_place(paged, eight):
    torch.compiler.reset()
    q, cache, k, cos, sin = draw(0, (2, 1, 4, 16), (6, 8, 2, 16), (2, 1, 2, 16), (40, 8), (40, 8))
    table = torch.tensor([[5, 1, 2], [3, 4, 0]], dtype=torch.int32) if paged else None
    cache = cache if paged else cache[:2]
    if eight:
        q, k, cos, sin, cache = *(x.half() for x in (q, k, cos, sin)), cache.to(EIGHT)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    eager, found = (cache.clone(), cache.clone()), (cache.clone(), cache.clone())
    for lengths in ([3, 0], [6, 7]):
        held = torch.tensor(lengths, dtype=torch.int32)
        expected = step(q, *eager, k, k, held, table, cos, sin)
        torch.testing.assert_close(compiled(q, *found, k, k, held, table, cos, sin), expected)
        (x, y), (z, w), was = eager, found, cache.float()
        assert torch.equal(x.float(), z.float()) and torch.equal(y.float(), w.float())
        assert not torch.equal(z.float(), was)


@pytest.mark.parametrize("paged", [False, True])
def test_packed_sequences_compile_without_a_break(paged):
    torch.compiler.reset()
    q, k, pool = draw(0, (9, 4, 16), (9, 2, 16), (6, 4, 2, 16))
    table = torch.tensor([[5, 1], [3, 4]], dtype=torch.int32)

    def call(q, ends, most):
        if paged:
            return flash_attn_varlen_func(q, pool, pool, ends, ends, most, most, causal=True, block_table=table)
        return flash_attn_varlen_func(q, k, k, ends, ends, most, most, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for ends in ([0, 4, 9], [0, 8, 9]):
        ends = torch.tensor(ends, dtype=torch.int32)
        most = int(ends.diff().max())
        torch.testing.assert_close(compiled(q, ends, most), call(q, ends, most))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("page", [None, 16])
def test_a_step_is_captured_and_replayed_with_other_lengths(page):
    """Nothing waits for the GPU: a wait would end the capture."""
    kind = ("cuda", "bfloat16")
    q, k, cos, sin = made(0, kind, (3, 1, 8, 64), (3, 1, 2, 64), (64, 32), (64, 32))
    (cache,) = made(1, kind, (3, 64, 2, 64))
    held = torch.tensor([3, 60, 17], dtype=torch.int32, device="cuda")
    pools, table = ((cache.clone(), cache.clone()), None) if page is None else None, None
    if page is None:
        pools, table = (cache.clone(), cache.clone()), None
    else:
        *pools, table = in_pages([cache, cache], page)
    run = lambda: step(q, *pools, k, k, held, table, cos, sin)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for lengths in ([3, 60, 17], [1, 2, 63]):
        held.copy_(torch.tensor(lengths))
        graph.replay()
        captured = found.clone()
        assert torch.equal(run(), captured) and math.isfinite(float(captured.float().sum()))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_tables_on_a_gpu_are_looked_at_where_that_is_asked_for():
    q, pool = made(0, ("cuda", "bfloat16"), (2, 1, 4, 64), (4, 16, 2, 64))
    table = torch.tensor([[0, 1], [2, 4]], dtype=torch.int32, device="cuda")
    held = torch.tensor([3, 20], dtype=torch.int32, device="cuda")
    with pytest.raises(ContractError, match="pages"):
        flash_attn_with_kvcache(q, pool, pool, cache_seqlens=held, block_table=table, check_tables=True)


@pytest.mark.parametrize("entries", [None, [1, 0]])
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_written_is_refused_before_anything_is(kind, entries):
    q, k, v, new = made(0, kind, (2, 3, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (2, 3, 2, 16))
    integers = lambda x: torch.tensor(x, dtype=torch.int32, device=kind[0])
    options = {"cache_seqlens": integers([2, 5])} | ({} if entries is None else {"cache_batch_idx": integers(entries)})
    expanded, before = k[:, :, :1].expand(k.shape), k.clone()
    for caches, news, text in [
        ((expanded, v), (new, new), "two places of .* share memory"),
        ((v, expanded), (new, new), "two places of .* share memory"),
        ((k, k), (new, new), "shares memory with"),
        ((k, v), (k[:, 3:6], new), "shares memory with"),
        ((k, v), (new, v[:, 3:6]), "shares memory with"),
        ((k, v[:, :7]), (new, new), "v_cache has shape .2, 7, 2, 16., but k_cache .2, 9, 2, 16."),
    ]:
        with pytest.raises(ContractError, match=text):
            flash_attn_with_kvcache(q, *caches, *news, **options)
        assert torch.equal(k, before)
    with pytest.raises(ContractError, match="only their head_dims may differ"):
        flash_attn_with_kvcache(q, k, v[:, :7], cache_leftpad=integers([1, 0]), **options)
