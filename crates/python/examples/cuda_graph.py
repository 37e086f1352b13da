"""Attention in a CUDA graph: captured once, replayed on new data, with key lengths that change on the GPU.

python cuda_graph.py
"""

import sys

import flashcore_attn
import torch

if not torch.cuda.is_available():
    print("this example needs a GPU")
    sys.exit(0)

batch, heads, cache = 4, 8, 1024
q = torch.randn(batch, 1, heads, 64, device="cuda", dtype=torch.float16)
k_cache, v_cache = (torch.randn(batch, cache, heads, 64, device="cuda", dtype=torch.float16) for _ in range(2))
lengths = torch.full((batch,), 100, device="cuda", dtype=torch.int32)


def step():
    return flashcore_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)


# The first call makes the kernel; a capture would have to wait for it.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    step()
torch.cuda.current_stream().wait_stream(stream)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o = step()

for length in (100, 500, 1024):
    lengths.fill_(length)
    q.normal_()
    graph.replay()
    expected = flashcore_attn.flash_attn_func(q, k_cache[:, :length], v_cache[:, :length])
    print(f"{length:5} keys: largest difference from an eager call {(o - expected).abs().max().item():.1e}")
