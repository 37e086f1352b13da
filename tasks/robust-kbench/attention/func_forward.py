"""Exact attention as a task: what a kernel has to compute, the module that calls it, and inputs of any size."""

import torch
import torch.nn.functional as F
from torch import nn


def forward_fn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softcap: float,
    scale: float,
) -> torch.Tensor:
    """
    Computes attention, softmax(scale * q k^T) v, for every head.

    Query head h attends to key and value head h // (num_heads / num_kv_heads). With causal, query i sees the keys up
    to i + kv_len - seq_len, so that the last query sees every key. With a softcap that is not 0, a score s becomes
    softcap * tanh(s / softcap) before the softmax.

    Args:
        q (torch.Tensor): Queries of shape (batch_size, num_heads, seq_len, head_dim), float16 or bfloat16
        k (torch.Tensor): Keys of shape (batch_size, num_kv_heads, kv_len, head_dim), of the same dtype
        v (torch.Tensor): Values of the shape of k, of the same dtype
        causal (bool): Whether a query is kept from seeing later keys
        softcap (float): Where scores are capped; 0 is nowhere
        scale (float): What scores are multiplied with

    Returns:
        torch.Tensor: Output of the shape and dtype of q
    """
    seq_len, kv_len = q.size(2), k.size(2)
    if softcap == 0.0:
        # The fastest that torch has for the problem, so that a speed-up over it means something.
        mask = None
        if causal and seq_len != kv_len:
            ones = torch.ones(seq_len, kv_len, dtype=torch.bool, device=q.device)
            mask = ones.tril(diagonal=kv_len - seq_len)
        is_causal = causal and mask is None
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    group = q.size(1) // k.size(1)
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = softcap * torch.tanh(q.float() @ keys.transpose(-2, -1) * (scale / softcap))
    if causal:
        hidden = torch.ones(seq_len, kv_len, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(diagonal=kv_len - seq_len + 1), float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values).to(q.dtype)


class Model(nn.Module):
    """
    Attention without weights: the settings of a call.
    """

    def __init__(self, head_dim: int, causal: bool = False, softcap: float = 0.0):
        """
        Args:
            head_dim (int): Size of a head; scores are scaled by its inverse square root
            causal (bool): Whether a query is kept from seeing later keys
            softcap (float): Where scores are capped; 0 is nowhere
        """
        super().__init__()
        self.causal = causal
        self.softcap = softcap
        self.scale = head_dim**-0.5

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fn=forward_fn) -> torch.Tensor:
        """
        Calls fn with the tensors and the settings.

        Args:
            q (torch.Tensor): Queries
            k (torch.Tensor): Keys
            v (torch.Tensor): Values
            fn: Function to call, forward_fn by default

        Returns:
            torch.Tensor: Output of fn
        """
        return fn(q, k, v, self.causal, self.softcap, self.scale)


def get_inputs(
    batch_size: int = 1,
    num_heads: int = 8,
    num_kv_heads: int = 8,
    seq_len: int = 512,
    kv_len: int = 512,
    head_dim: int = 64,
    dtype: str = "float16",
) -> list[torch.Tensor]:
    q = torch.randn(batch_size, num_heads, seq_len, head_dim)
    k = torch.randn(batch_size, num_kv_heads, kv_len, head_dim)
    v = torch.randn(batch_size, num_kv_heads, kv_len, head_dim)
    return [x.to(getattr(torch, dtype)) for x in (q, k, v)]


input_names = ["q", "k", "v"]
