"""flash-attn's functions, with its shapes and semantics."""

import pytest
import torch
from flashcore_attn import (
    ContractError,
    UnsupportedError,
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from torch_problem import DEVICES, check, draw


def swapped(*tensors):
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({}, {}),
        ({"causal": True}, {"mask": "causal"}),
        ({"causal": True, "window_size": (5, -1)}, {"mask": "window", "left": 5, "right": 0}),
        ({"window_size": (5, 2)}, {"mask": "window", "left": 5, "right": 2}),
        ({"softcap": 3.0, "softmax_scale": 0.2}, {"softcap": 3.0, "scale": 0.2}),
        ({"deterministic": True}, {}),
    ],
)
def test_flash_attn_func(options, meant, device):
    q, k, v = draw(0, (2, 9, 6, 64), (2, 14, 2, 64), (2, 14, 2, 64), dtype="bfloat16", device=device)
    o, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert o.shape == q.shape and lse.shape == (2, 6, 9) and probabilities is None
    check(*swapped(q, k, v, o), lse, **meant)
    assert torch.equal(flash_attn_func(q, k, v, **options), o)


def test_qkvpacked_is_read_where_it_lies():
    (qkv,) = draw(0, (2, 9, 3, 4, 16))
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), flash_attn_func(*qkv.unbind(2), causal=True))
    with pytest.raises(ContractError, match="qkv has shape"):
        flash_attn_qkvpacked_func(qkv[:, :, :2])


def test_kvpacked_is_read_where_it_lies():
    q, kv = draw(0, (2, 5, 4, 16), (2, 9, 2, 2, 16))
    ours = flash_attn_kvpacked_func(q, kv, causal=True, return_attn_probs=True)
    for ours, expected in zip(ours, flash_attn_func(q, *kv.unbind(2), causal=True, return_attn_probs=True)):
        assert ours is expected is None or torch.equal(ours, expected)
    with pytest.raises(ContractError, match="kv has shape"):
        flash_attn_kvpacked_func(q, kv[:, :, :1])


def test_packed_sequences_may_be_packed_twice():
    ends, ends_q = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    qkv, q = draw(0, (9, 3, 4, 16), (5, 4, 16))
    ours = flash_attn_varlen_qkvpacked_func(qkv, ends, 6, causal=True)
    assert torch.equal(ours, flash_attn_varlen_func(*qkv.unbind(1), ends, ends, 6, 6, causal=True))
    ours = flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], ends_q, ends, 3, 6, causal=True)
    assert torch.equal(ours, flash_attn_varlen_func(q, *qkv[:, 1:].unbind(1), ends_q, ends, 3, 6, causal=True))
    with pytest.raises(ContractError, match="qkv has shape"):
        flash_attn_varlen_qkvpacked_func(qkv[:, 1:], ends, 6)
    with pytest.raises(ContractError, match="kv has shape"):
        flash_attn_varlen_kvpacked_func(q, qkv, ends_q, ends, 3, 6)


def test_tokens_behind_the_last_sequence_give_zeros():
    ends = torch.tensor([0, 3, 9], dtype=torch.int32)
    q, k, v = (x.requires_grad_() for x in draw(0, (12, 4, 16), (15, 2, 16), (15, 2, 16)))
    o, lse, _ = flash_attn_varlen_func(q, k, v, ends, ends, 6, 6, causal=True, return_attn_probs=True)
    exact = flash_attn_varlen_func(*(x[:9] for x in (q, k, v)), ends, ends, 6, 6, causal=True)
    assert torch.equal(o[:9], exact) and (o[9:] == 0).all() and (lse[:, 9:] == -torch.inf).all()
    grads = torch.autograd.grad(o.square().sum(), (q, k, v))
    for ours, expected in zip(grads, torch.autograd.grad(exact.square().sum(), (q, k, v))):
        assert torch.equal(ours, expected)
    assert all((grad[9:] == 0).all() for grad in grads)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_may_use_only_some_of_their_tokens(causal):
    ends_q, ends_k = torch.tensor([0, 4, 8, 11]), torch.tensor([0, 6, 12, 17])
    used_q, used_k = torch.tensor([2, 2, 0]), torch.tensor([5, 5, 3])
    q, k, v = (x.requires_grad_() for x in draw(0, (11, 4, 16), (17, 2, 16), (17, 2, 16)))
    o, lse, _ = flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, 4, 6, causal=causal, return_attn_probs=True, seqused_q=used_q, seqused_k=used_k
    )
    grads = torch.autograd.grad(o.square().sum(), (q, k, v))
    expected = torch.zeros_like(o)
    for i in range(3):
        of_q = slice(ends_q[i], ends_q[i] + used_q[i])
        of_k = slice(ends_k[i], ends_k[i] + used_k[i])
        if used_q[i]:
            alone = attention(q[None, of_q], k[None, of_k], v[None, of_k], causal=causal, layout="bshd")
            expected = torch.cat([expected[: ends_q[i]], alone[0], expected[ends_q[i] + used_q[i] :]])
    torch.testing.assert_close(o, expected, atol=1e-6, rtol=1e-6)
    assert (lse[:, 2:4] == -torch.inf).all()
    for ours, truth in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v))):
        torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    with pytest.raises(ContractError, match="seqused_k says that sequence 1 uses 7 tokens, but it has 6"):
        flash_attn_varlen_func(q, k, v, ends_q, ends_k, 4, 6, seqused_k=torch.tensor([5, 7, 3]))


def test_hints_of_flash_attn_3_change_nothing():
    q, k, v = draw(0, *[(1, 9, 4, 16)] * 3)
    expected, ends = flash_attn_func(q, k, v), torch.tensor([0, 9])
    hints = {"num_splits": 4, "pack_gqa": True, "sm_margin": 8}
    assert torch.equal(flash_attn_func(q, k, v, **hints, q_descale=None, attention_chunk=0, qv=None), expected)
    assert torch.equal(flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 9, 9, **hints), expected[0])
    assert torch.equal(flash_attn_with_kvcache(q, k, v, **hints, scheduler_metadata=None, page_table=None), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5, 5], [3, 0, 8, 8], [1], [4, 9, 0]])
def test_packed_sequences_are_as_if_each_were_alone(lengths, causal):
    lengths_k = [length + 2 for length in lengths]
    ends_q, ends_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths, lengths_k))
    q, k, v = draw(0, (sum(lengths), 4, 16), (sum(lengths_k), 2, 16), (sum(lengths_k), 2, 8))
    o, lse, _ = flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, max(lengths), max(lengths_k), causal=causal, softcap=4.0, return_attn_probs=True
    )
    assert o.shape == (sum(lengths), 4, 8) and lse.shape == (4, sum(lengths))
    for i, length in enumerate(lengths):
        of_q, of_k = slice(*ends_q[i : i + 2].tolist()), slice(*ends_k[i : i + 2].tolist())
        alone, alone_lse = attention(
            q[None, of_q], k[None, of_k], v[None, of_k], causal=causal, softcap=4.0, layout="bshd", return_lse=True
        )
        torch.testing.assert_close(o[of_q], alone[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(lse[:, of_q], alone_lse[0], atol=1e-6, rtol=1e-6)
        assert alone.shape[1] == length


def test_packed_sequences_have_gradients():
    ends = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    q, k, v = (x.requires_grad_() for x in draw(0, *[(9, 2, 16)] * 3))
    flash_attn_varlen_func(q, k, v, ends, ends, 6, 6, causal=True).square().sum().backward()
    packed = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    for part in (slice(0, 3), slice(3, 9)):
        attention(*(x[None, part] for x in (q, k, v)), causal=True, layout="bshd").square().sum().backward()
    for ours, expected in zip(packed, (q, k, v)):
        torch.testing.assert_close(ours, expected.grad, atol=1e-5, rtol=1e-5)


def test_wrong_packed_sequences_are_refused():
    q, ends = torch.ones(4, 2, 16), torch.tensor([0, 4])
    with pytest.raises(ContractError, match="q has 4 dimensions, packed sequences have 3"):
        flash_attn_varlen_func(q[None], q, q, ends, ends, 4, 4)
    with pytest.raises(ContractError, match="have 2 and 3 elements"):
        flash_attn_varlen_func(q, q, q, ends, torch.tensor([0, 1, 4]), 4, 4)
    with pytest.raises(ContractError, match="cu_seqlens_k ends at 5, but there are 4 tokens"):
        flash_attn_varlen_func(q, q, q, ends, torch.tensor([0, 5]), 4, 4)
    with pytest.raises(ContractError, match="cu_seqlens_q must begin with 0 and never fall"):
        flash_attn_varlen_func(q, q, q, torch.tensor([1, 4]), ends, 4, 4)


@pytest.mark.parametrize("seqlens", [[5, 12], 7])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_a_cache_holds_what_its_lengths_say(seqlens, new):
    q, k_cache, v_cache, k, v = draw(
        0, (2, max(new, 1), 4, 16), (2, 16, 2, 16), (2, 16, 2, 16), (2, new, 2, 16), (2, new, 2, 16)
    )
    before = k_cache.clone()
    lengths = [seqlens] * 2 if isinstance(seqlens, int) else seqlens
    given = seqlens if isinstance(seqlens, int) else torch.tensor(seqlens, dtype=torch.int32)
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *((k, v) if new else ()), cache_seqlens=given, causal=True, return_softmax_lse=True
    )
    for b, length in enumerate(lengths):
        assert torch.equal(k_cache[b, length : length + new], k[b])
        assert torch.equal(k_cache[b, :length], before[b, :length])
        assert torch.equal(k_cache[b, length + new :], before[b, length + new :])
    held = [length + new for length in lengths]
    check(*swapped(q, k_cache, v_cache, o), lse, mask="causal", key_lengths=held)


def test_a_cache_may_begin_with_padding():
    q, k_cache, v_cache = draw(0, (3, 1, 4, 16), (3, 16, 2, 16), (3, 16, 2, 16))
    pads, ends = [0, 4, 4], [16, 10, 4]
    o = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(ends), cache_leftpad=torch.tensor(pads), causal=True
    )
    for b, (pad, end) in enumerate(zip(pads, ends)):
        alone = flash_attn_func(q[b : b + 1], k_cache[b : b + 1, pad:end], v_cache[b : b + 1, pad:end])
        torch.testing.assert_close(o[b : b + 1], alone, atol=1e-6, rtol=1e-6)


def test_a_cache_that_overflows_is_refused():
    q, k_cache, k = draw(0, (2, 1, 4, 16), (2, 16, 2, 16), (2, 1, 2, 16))
    with pytest.raises(ContractError, match="batch entry 1 holds 16 tokens and 1 more do not fit its cache of 16"):
        flash_attn_with_kvcache(q, k_cache, k_cache.clone(), k, k, cache_seqlens=torch.tensor([3, 16]))


def in_pages(*caches, page):
    """Caches (batch, length, heads, head_dim) in shuffled pages, NaN where there is nothing, and their table."""
    batch, length = caches[0].shape[:2]
    most = -(-length // page)
    table = torch.randperm(batch * most + 3, generator=torch.Generator().manual_seed(1))[: batch * most]
    table = table.to(torch.int32).view(batch, most)
    pools = []
    for cache in caches:
        pool = torch.full((batch * most + 3, page, *cache.shape[2:]), torch.nan, dtype=cache.dtype)
        for place in range(length):
            pool[table[:, place // page].long(), place % page] = cache[:, place]
        pools.append(pool)
    return (*pools, table)


@pytest.mark.parametrize("page", [1, 7, 16])
def test_a_cache_in_pages_is_the_same_as_a_dense_one(page):
    q, k_cache, v_cache = draw(0, (3, 2, 6, 16), (3, 40, 2, 16), (3, 40, 2, 16))
    lengths = torch.tensor([33, 1, 40], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    k_pool, v_pool, table = in_pages(k_cache, v_cache, page=page)
    ours = flash_attn_with_kvcache(q, k_pool, v_pool, block_table=table, **options)
    for given, expected in zip(ours, flash_attn_with_kvcache(q, k_cache, v_cache, **options), strict=True):
        torch.testing.assert_close(given, expected)
    assert torch.equal(flash_attn_with_kvcache(q, k_pool, v_pool, page_table=table, **options)[0], ours[0])


def test_new_tokens_go_to_the_pages_that_the_table_names():
    q, k_cache, k, v = draw(0, (2, 3, 6, 16), (2, 40, 2, 16), (2, 3, 2, 16), (2, 3, 2, 16))
    lengths = torch.tensor([15, 30], dtype=torch.int32)
    k_pool, v_pool, table = in_pages(k_cache, k_cache, page=16)
    dense = k_cache.clone(), k_cache.clone()
    ours = flash_attn_with_kvcache(q, k_pool, v_pool, k, v, cache_seqlens=lengths, block_table=table, causal=True)
    expected = flash_attn_with_kvcache(q, *dense, k, v, cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(k_pool[table[0, 0], 15], k[0, 0]) and torch.equal(v_pool[table[0, 1], 1], v[0, 2])
    with pytest.raises(ContractError, match="46 tokens and 3 more do not fit the 3 pages of 16"):
        flash_attn_with_kvcache(q, k_pool, v_pool, k, v, cache_seqlens=lengths + 16, block_table=table)


def test_packed_queries_read_a_cache_in_pages():
    q, k, v = draw(0, (9, 6, 16), (3, 40, 2, 16), (3, 40, 2, 16))
    ends_q, lengths = torch.tensor([0, 4, 4, 9], dtype=torch.int32), [33, 12, 40]
    ends_k = torch.tensor([0, 33, 45, 85], dtype=torch.int32)
    packed = [torch.cat([x[i, :length] for i, length in enumerate(lengths)]) for x in (k, v)]
    expected = flash_attn_varlen_func(q, *packed, ends_q, ends_k, 5, 40, causal=True, return_attn_probs=True)
    k_pool, v_pool, table = in_pages(k, v, page=16)
    ours = flash_attn_varlen_func(
        q, k_pool, v_pool, ends_q, ends_k, 5, 40, causal=True, return_attn_probs=True, block_table=table
    )
    for given, wanted in zip(ours[:2], expected[:2], strict=True):
        torch.testing.assert_close(given, wanted)
    for wrong, what in [(table.long(), "int32"), (table[:2], "shape"), (table + 99, "pool")]:
        with pytest.raises(ContractError, match=what):
            flash_attn_varlen_func(q, k_pool, v_pool, ends_q, ends_k, 5, 40, block_table=wrong)


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda x: flash_attn_func(x, x, x, dropout_p=0.5), "dropout_p is 0.5"),
        (lambda x: flash_attn_func(x, x, x, alibi_slopes=torch.ones(4)), "alibi_slopes is a tensor"),
        (lambda x: flash_attn_with_kvcache(x, x, x, attention_chunk=4), "attention_chunk is 4"),
        (lambda x: flash_attn_func(x, x, x, q_descale=torch.ones(1)), "q_descale is a tensor: it goes with float8"),
        (lambda x: flash_attn_func(x, x, x, attention_chunk=4), "attention_chunk is 4: .* Use window_size"),
        (lambda x: flash_attn_func(x, x, x, qv=x), "qv is a tensor"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(call, option):
    with pytest.raises(UnsupportedError, match=option):
        call(torch.ones(1, 4, 4, 16))


def test_arguments_that_flash_attn_3_has_in_other_places_are_not_mistaken():
    x = torch.ones(1, 4, 4, 16)
    with pytest.raises(UnsupportedError, match="dropout_p is 0.125"):
        flash_attn_func(x, x, x, 0.125, True)
    with pytest.raises(TypeError, match="dropout_p is a NoneType"):
        flash_attn_func(x, x, x, None, True)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'num_split'"):
        flash_attn_func(x, x, x, num_split=3)


def test_half_of_a_pair_is_refused():
    x = torch.ones(1, 4, 4, 16)
    with pytest.raises(ContractError, match="only one was given"):
        flash_attn_with_kvcache(x, x, x, k=x)
    with pytest.raises(ContractError, match="without cache_seqlens"):
        flash_attn_with_kvcache(x, x, x, k=x, v=x)
