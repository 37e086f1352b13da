"""flash-attn's functions, with its shapes and its meaning."""

import pytest
import torch
from flashcore_attn import (
    ContractError,
    UnsupportedError,
    attention,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
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


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda x: flash_attn_func(x, x, x, dropout_p=0.5), "dropout_p is 0.5"),
        (lambda x: flash_attn_func(x, x, x, alibi_slopes=torch.ones(4)), "alibi_slopes is a tensor"),
        (lambda x: flash_attn_with_kvcache(x, x, x, block_table=torch.ones(1, 1)), "block_table is a tensor"),
        (lambda x: flash_attn_with_kvcache(x, x, x, rotary_cos=torch.ones(1, 1)), "rotary_cos is a tensor"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(call, option):
    with pytest.raises(UnsupportedError, match=option):
        call(torch.ones(1, 4, 4, 16))


def test_half_of_a_pair_is_refused():
    x = torch.ones(1, 4, 4, 16)
    with pytest.raises(ContractError, match="only one was given"):
        flash_attn_with_kvcache(x, x, x, k=x)
    with pytest.raises(ContractError, match="without cache_seqlens"):
        flash_attn_with_kvcache(x, x, x, k=x, v=x)
