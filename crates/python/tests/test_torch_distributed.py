"""Ring attention of several processes is attention of one."""

import os
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)


def _process(rank: int, size: int, file: str) -> None:
    """What each process of the ring does."""
    sys.path.insert(0, os.path.dirname(__file__))
    from flashcore_attn import ContractError, attention
    from flashcore_attn.distributed import gather, ring_attention, shard
    from torch_problem import check, draw

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    try:
        length = 48
        whole = torch.arange(length)
        assert torch.equal(gather(shard(whole, 0), 0), whole), "splitting and joining gives the whole"

        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                q, k, v = draw(0, (2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 8), dtype=dtype)
                options = {"causal": causal, "softcap": 4.0}
                parts = [shard(x, 2) for x in (q, k, v)]
                o, lse = ring_attention(*parts, return_lse=True, **options)
                assert o.shape == (2, 4, length // size, 8) and o.dtype == q.dtype
                mask = "causal" if causal else "none"
                check(q, k, v, gather(o, 2), gather(lse, 2), mask=mask, softcap=4.0)

        # The other layout gives the same bits, and a group of its own works as well.
        group = dist.new_group(list(range(size)))
        swapped = [x.transpose(1, 2) for x in parts]
        assert torch.equal(ring_attention(*swapped, group, layout="bshd", **options).transpose(1, 2), o)

        # Gradients are those of attention over the whole.
        for causal in (False, True):
            q, k, v, *weights = draw(1, (1, 4, length, 16), *[(1, 2, length, 16)] * 3, (1, 2, length))
            weights = [weights[0].repeat(1, 2, 1, 1), weights[1].repeat(1, 2, 1)]

            def gradients(results, inputs, weights):
                return torch.autograd.grad(sum((x * weight).sum() for x, weight in zip(results, weights)), inputs)

            parts = [shard(x, 2).requires_grad_() for x in (q, k, v)]
            results = ring_attention(*parts, causal=causal, return_lse=True)
            ours = gradients(results, parts, [shard(x, 2) for x in weights])
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            expected = gradients(attention(q, k, v, causal=causal, return_lse=True), (q, k, v), weights)
            for ours, expected in zip(ours, expected):
                torch.testing.assert_close(ours, shard(expected, 2), atol=2e-6, rtol=1e-5)

        # What cannot be shared is refused in every process alike.
        for wrong in (
            lambda: shard(torch.ones(2 * size + 1), 0),
            lambda: ring_attention(*(x[:, :, :1] for x in parts), causal=True),
        ):
            try:
                wrong()
            except ContractError:
                continue
            raise AssertionError("nothing was refused")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_ring_computes_what_one_process_would(size):
    with tempfile.TemporaryDirectory() as folder:
        # Raises with the traceback of the first process that fails.
        multiprocessing.spawn(_process, (size, os.path.join(folder, "meeting")), nprocs=size)
