"""FlashInfer's layouts, against each sequence alone."""

import math

import pytest
import torch
from flashcore_attn import ContractError, attention, flashinfer
from torch_problem import DEVICES, draw

#: Keys of each sequence, and its queries. One has no keys, one no queries.
LENGTHS, QUERIES = [21, 0, 16, 5], [3, 2, 0, 5]
KINDS = [("cpu", "float32")] + [(device, "bfloat16") for device in DEVICES]


def problem(kind, page, layout, together):
    """A cache in shuffled pages, NaN where there is nothing, as FlashInfer has it, and the keys and values of each
    sequence."""
    device, dtype = kind
    sequences = draw(0, *[(length, 2, 2, 64) for length in LENGTHS], dtype=dtype)
    counts = [-(-length // page) for length in LENGTHS]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3))[: sum(counts)]
    pool = torch.full((sum(counts) + 2, 2, page, 2, 64), torch.nan).to(sequences[0].dtype)
    indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    for i, both in enumerate(sequences):
        for place in range(LENGTHS[i]):
            pool[order[indptr[i] + place // page], :, place % page] = both[place]
    last = torch.tensor([(length - 1) % page + 1 if length else 0 for length in LENGTHS], dtype=torch.int32)
    pool = pool if layout == "NHD" else pool.transpose(2, 3).contiguous()
    pool = pool.to(device)
    cache = pool if together else (pool[:, 0], pool[:, 1])
    table = [x.to(device) for x in (indptr, order.to(torch.int32), last)]
    return cache, table, [both.to(device).unbind(1) for both in sequences]


def alone(q, k, v, **options):
    """One sequence: o (token, heads, head_dim), and lse (token, heads) in base 2."""
    o, lse = attention(q[None], k[None], v[None], layout="bshd", return_lse=True, **options)
    return o[0], lse[0].T * math.log2(math.e)


@pytest.mark.parametrize("options", [{}, {"window_left": 4, "logits_soft_cap": 3.0, "sm_scale": 0.2}])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_what_each_sequence_gives_alone(kind, page, layout, together, options):
    cache, (indptr, indices, last), sequences = problem(kind, page, layout, together)
    (q,) = draw(1, (sum(QUERIES), 4, 64), dtype=kind[1], device=kind[0])
    starts = torch.tensor([0, *QUERIES], device=kind[0]).cumsum(0).to(torch.int32)
    off = {"atol": 1e-5, "rtol": 1e-5} if kind[1] == "float32" else {"atol": 2e-2, "rtol": 2e-2}
    meant = {"softcap": options["logits_soft_cap"], "scale": options["sm_scale"]} if options else {}
    for causal in (False, True):
        o, lse = flashinfer.prefill(
            q, cache, starts, indptr, indices, last, causal=causal, kv_layout=layout, return_lse=True,
            max_qo_len=max(QUERIES), **options,
        )  # fmt: skip
        window = (4, 0 if causal else None) if options else None
        for i, (k, v) in enumerate(sequences):
            some = slice(int(starts[i]), int(starts[i + 1]))
            expected, sums = alone(q[some], k, v, causal=causal and not options, window=window, **meant)
            torch.testing.assert_close(o[some], expected, **off)
            torch.testing.assert_close(lse[some], sums, **off)
    count = max(-(-length // page) for length in LENGTHS)
    for bound in (None, count):
        o, lse = flashinfer.decode(
            q[:4], cache, indptr, indices, last, kv_layout=layout, max_pages=bound, return_lse=True, **options
        )  # fmt: skip
        assert o.shape == (4, 4, 64) and lse.shape == (4, 4) and lse.dtype == torch.float32
        for i, (k, v) in enumerate(sequences):
            expected, sums = alone(q[i : i + 1], k, v, window=(4, None) if options else None, **meant)
            torch.testing.assert_close(o[i : i + 1], expected, **off)
            torch.testing.assert_close(lse[i : i + 1], sums, **off)
        assert (o[1] == 0).all() and (lse[1] == -torch.inf).all()


def test_pages_are_full_where_no_last_length_is_given():
    cache, (indptr, indices, _), sequences = problem(("cpu", "float32"), 1, "NHD", False)
    (q,) = draw(1, (4, 4, 64))
    o = flashinfer.decode(q, cache, indptr, indices)
    for i, (k, v) in enumerate(sequences):
        torch.testing.assert_close(o[i : i + 1], alone(q[i : i + 1], k, v)[0], atol=1e-5, rtol=1e-5)


def test_a_decode_of_pages_compiles_without_a_break():
    torch.compiler.reset()
    cache, table, _ = problem(("cpu", "float32"), 5, "HND", True)
    (q,) = draw(1, (4, 4, 64))
    call = lambda q, *table: flashinfer.decode(q, cache, *table, kv_layout="HND", return_lse=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(q, *table), call(q, *table)):
        torch.testing.assert_close(ours, expected)


def test_tables_that_lead_nowhere_are_named():
    cache, (indptr, indices, last), _ = problem(("cpu", "float32"), 5, "NHD", True)
    (q,) = draw(1, (4, 4, 64))

    def changed(x, at, value):
        x = x.clone()
        x[at] = value
        return x

    for wrong, what in (
        ((indptr, changed(indices, 6, 99), last), "page 1 of sequence 2 is 99, but the pool has pages"),
        ((changed(indptr, 2, 0), indices, last), "gives sequence 1 the pages from 5 to 0"),
        ((changed(indptr, 4, 99), indices, last), "gives sequence 3 the pages from 9 to 99, possible are those from 0"),
        ((indptr, indices, changed(last, 2, 6)), "kv_last_page_len of sequence 2 is 6, possible are 1 to 5"),
        ((indptr, indices, last[:3]), "kv_indptr has 5 elements"),
        ((indptr.float(), indices, last), "kv_indptr is torch.float32"),
    ):
        with pytest.raises(ContractError, match=what):
            flashinfer.decode(q, cache, *wrong)
    with pytest.raises(ContractError, match="sequence 0 has 5 pages, and max_pages is 4"):
        flashinfer.decode(q, cache, indptr, indices, last, max_pages=4)
    with pytest.raises(ContractError, match=r"kv_cache has shape .*, possible is \(pages, 2, page, heads, head_dim\)"):
        flashinfer.decode(q, cache[:, 0], indptr, indices, last)
    with pytest.raises(ContractError, match="kv_layout is 'DHN', possible are 'NHD' and 'HND'"):
        flashinfer.decode(q, cache, indptr, indices, last, kv_layout="DHN")
    empty = torch.zeros(5, dtype=torch.int32)
    assert (flashinfer.decode(q, cache, empty, indices[:0], last) == 0).all()
