"""A sequence that is split among processes, each with a part of it.

    torchrun --nproc-per-node 4 ring_attention.py

Where every process can have a GPU, NCCL passes keys and values on; elsewhere gloo does, on the CPU.
"""

import os

import torch
import torch.distributed as dist
from flashcore_attn import attention
from flashcore_attn.distributed import gather, ring_attention, shard

gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
dist.init_process_group("nccl" if gpus else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)

# Every process draws the same sequence here, to compare; a real one would read only its own part.
torch.manual_seed(0)
shape = (1, 8, 256 * size, 64)
q, k, v = (torch.randn(shape).to(device, torch.bfloat16) for _ in range(3))

o = ring_attention(*(shard(x, 2) for x in (q, k, v)), causal=True)
print(f"process {rank} of {size}: {o.shape[2]} of {shape[2]} queries on {device}")

whole = gather(o, 2)
if rank == 0:
    difference = (whole - attention(q, k, v, causal=True)).abs().max().item()
    print(f"largest difference from attention in one process: {difference:.1e}")
    assert difference < 0.05
dist.destroy_process_group()
