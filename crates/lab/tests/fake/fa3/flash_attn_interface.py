"""FlashAttention-3's module, as far as it is called: it insists on its own layout, and has what a build may have."""

import os

import torch


def compute(name, q, k, v, softmax_scale, causal):
    with open(os.environ["FA3_LOG"], "a") as log:
        print(name, *q.shape, file=log)
    assert not (q.is_view or k.is_view or v.is_view), "its users have tensors of this layout"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    offset = k.shape[2] - q.shape[2] if causal else None
    return torch.attention(q, k, v, softmax_scale, offset).transpose(1, 2)


def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    if q.shape[3] not in (64, 128, 256):
        raise NotImplementedError(f"this build has no head_dim {q.shape[3]}")
    return compute("flash_attn_func", q, k, v, softmax_scale, causal)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False):
    assert q.shape[3] == 128 and q.dtype == torch.bfloat16
    return compute("flash_attn_with_kvcache", q, k_cache, v_cache, softmax_scale, causal), None
