"""One changed line makes a model use FlashCore's attention.

    python sdpa_swap.py

The first way replaces the function where it is called, the second goes under torch's own, for code that is not yours.
"""

import flashcore_attn
import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 8, 512, 64, device=device, dtype=torch.float16) for _ in range(3))

# Before: o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
o = flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True)

theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
print(f"on {flashcore_attn.can_use(q, k, v)[1]}")
print(f"largest difference from torch: {(o - theirs).abs().max().item():.1e}")
print(flashcore_attn.explain(q, k, v, causal=True))

if hasattr(torch.nn.attention, "activate_flash_attention_impl"):
    flashcore_attn.register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    under = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.nn.attention.restore_flash_attention_impl()
    print(f"under torch's function the same bits: {torch.equal(under, o)}")
