"""Ring attention of several processes is attention of one."""

import os
import sys
import tempfile
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)


def _process(rank: int, size: int, file: str) -> None:
    """What each process of the ring does."""
    sys.path.insert(0, os.path.dirname(__file__))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    try:
        _parts_join()
        _results_are_right()
        _gradients_are_right(None)
        _second_derivatives_are_refused()
        _what_cannot_be_shared_is_refused(size)
        # Pairs of processes, whose numbers in the pair are not those in the whole.
        pairs = [dist.new_group([i, size - 1 - i]) for i in range(size // 2)]
        for i, pair in enumerate(pairs):
            if rank in (i, size - 1 - i):
                _gradients_are_right(pair)
    finally:
        dist.destroy_process_group()


#: Where packed sequences end: of different lengths, and one that is empty.
ENDS = [0, 16, 16, 24, 48, 72]


def _parts_join():
    from flashcore_attn.distributed import gather, shard

    whole = torch.arange(48)
    assert torch.equal(gather(shard(whole, 0), 0), whole)
    ends, packed = torch.tensor(ENDS), torch.arange(72 * 3).view(3, 72)
    part = shard(packed, 1, None, ends)
    assert torch.equal(gather(part, 1, None, ends), packed)
    # A part of every sequence.
    sequences = torch.bucketize(part[0], ends, right=True)
    share = 72 // part.size(1)
    assert sequences.bincount(minlength=6)[1:].tolist() == [(end - start) // share for start, end in pairwise(ENDS)]


def _results_are_right():
    from flashcore_attn.distributed import gather, ring_attention, shard
    from torch_problem import check, draw

    size = dist.get_world_size()
    for dtype in ("float32", "bfloat16"):
        for causal in (False, True):
            q, k, v = draw(0, (2, 4, 48, 16), (2, 2, 48, 16), (2, 2, 48, 8), dtype=dtype)
            options = {"causal": causal, "softcap": 4.0}
            parts = [shard(x, 2) for x in (q, k, v)]
            o, lse = ring_attention(*parts, return_lse=True, **options)
            assert o.shape == (2, 4, 48 // size, 8) and o.dtype == q.dtype
            mask = "causal" if causal else "none"
            check(q, k, v, gather(o, 2), gather(lse, 2), mask=mask, softcap=4.0)
            # The other layout gives the same bits.
            swapped = [x.transpose(1, 2) for x in parts]
            assert torch.equal(ring_attention(*swapped, layout="bshd", **options).transpose(1, 2), o)

            ends = torch.tensor(ENDS)
            q, k, v = draw(1, (72, 4, 16), (72, 2, 16), (72, 2, 8), dtype=dtype)
            o, lse = ring_attention(
                *(shard(x, 0, None, ends) for x in (q, k, v)), cu_seqlens=ends, return_lse=True, **options
            )
            o, lse = gather(o, 0, None, ends), gather(lse, 1, None, ends)
            for start, end in pairwise(ENDS):
                part = (x[None, start:end].transpose(1, 2) for x in (q, k, v, o))
                check(*part, lse[None, :, start:end], mask=mask, softcap=4.0)


def _gradients_are_right(group):
    """Those of a ring are those of attention over the whole."""
    from flashcore_attn import attention, flash_attn_varlen_func
    from flashcore_attn.distributed import ring_attention, shard
    from torch_problem import draw

    ends = torch.tensor(ENDS)

    def packed(q, k, v, causal):
        return flash_attn_varlen_func(q, k, v, ends, ends, 24, 24, causal=causal, return_attn_probs=True)[:2]

    def dense(q, k, v, causal):
        return attention(q, k, v, causal=causal, return_lse=True)

    for whole, shapes, dim, options in (
        (dense, [(1, 4, 48, 16), *[(1, 2, 48, 16)] * 2, (1, 4, 48, 16), (1, 4, 48)], 2, {}),
        (packed, [(72, 4, 16), *[(72, 2, 16)] * 2, (72, 4, 16), (4, 72)], 0, {"cu_seqlens": ends}),
    ):
        cut = lambda x, at=dim, options=options: shard(x, at, group, **options).detach()
        lse_at = {2: 2, 0: 1}[dim]
        for causal in (False, True):
            *inputs, of_o, of_lse = draw(1, *shapes)
            # Elements of the gradient that no sum is like.
            of_lse = of_lse * 0.5
            parts = [cut(x).requires_grad_() for x in inputs]
            results = ring_attention(*parts, group, causal=causal, return_lse=True, **options)
            ours = torch.autograd.grad(results, parts, (cut(of_o), cut(of_lse, lse_at)))
            inputs = [x.requires_grad_() for x in inputs]
            expected = torch.autograd.grad(whole(*inputs, causal), inputs, (of_o, of_lse))
            for given, truth in zip(ours, expected):
                torch.testing.assert_close(given, cut(truth), atol=2e-6, rtol=1e-5)


def _second_derivatives_are_refused():
    from flashcore_attn import UnsupportedError
    from flashcore_attn.distributed import ring_attention
    from torch_problem import draw

    q, k, v = (x.requires_grad_() for x in draw(0, *[(1, 2, 8, 16)] * 3))
    grads = torch.autograd.grad(ring_attention(q, k, v).square().sum(), (q, k, v), create_graph=True)
    # dk and dv have been on other processes.
    for grad in grads:
        with pytest.raises(UnsupportedError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), q, retain_graph=True)


def _what_cannot_be_shared_is_refused(size):
    """In every process alike, before anything is sent."""
    from flashcore_attn import ContractError
    from flashcore_attn.distributed import ring_attention, shard

    ones = torch.ones(1, 2, 4, 16)
    packed, ends = torch.ones(2 * size + 1, 2, 16), torch.tensor([0, 2 * size + 1])
    for wrong, why in (
        (lambda: shard(torch.ones(2 * size + 1), 0), "Pad it"),
        (lambda: shard(packed, 0, None, ends), "Pad it"),
        (lambda: shard(packed[1:], 0, None, ends[:1]), "there are"),
        (lambda: ring_attention(*[ones[:, :, :1]] * 3, causal=True), "two pieces of the zig-zag"),
        (lambda: ring_attention(ones, ones[:, :, :2], ones[:, :, :2], causal=True), "holds as many of both"),
        (lambda: ring_attention(*[packed] * 3, cu_seqlens=ends), "there are|Pad it"),
        (lambda: ring_attention(packed[:2], packed[:1], packed[:1], cu_seqlens=ends), "as many of both"),
    ):
        with pytest.raises(ContractError, match=why):
            wrong()


def test_a_ring_of_one_process_is_attention():
    with tempfile.TemporaryDirectory() as folder:
        _process(0, 1, os.path.join(folder, "meeting"))


def test_a_ring_of_four_processes_computes_what_one_would(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        # Raises with the traceback of the first process that fails.
        multiprocessing.spawn(_process, (4, os.path.join(folder, "meeting")), nprocs=4)


def test_torchs_context_parallel_is_refused_by_whoever_sees_only_a_part():
    """Only torch's own function knows of the other parts."""
    from flashcore_attn import UnsupportedError, attention, flash_attn_func, flash_attn_varlen_func
    from flashcore_attn import scaled_dot_product_attention as sdpa
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch_problem import draw

    q, k, v = draw(0, *[(1, 2, 16, 16)] * 3)
    packed, ends = q[0], torch.tensor([0, 2])
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    calls = (
        lambda: sdpa(q, k, v),
        lambda: sdpa(q, k, v, mask),
        lambda: attention(q, k, v, causal=True),
        lambda: attention(q, k, v, out=torch.empty_like(q)),
        lambda: flash_attn_func(q, k, v),
        lambda: flash_attn_varlen_func(packed, packed, packed, ends, ends, 2, 2),
        lambda: sdpa(q.requires_grad_(), k, v),
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            with context_parallel(mesh, buffers=[k, v], buffer_seq_dims=[2, 2]):
                for call in calls:
                    with pytest.raises(UnsupportedError, match="context_parallel is active"):
                        call()
            for call in calls[:3]:
                call()
            with pytest.raises(NotImplementedError, match="sharding strategy"):
                sdpa(*(DTensor.from_local(x.detach(), mesh, [Shard(2)]) for x in (q, k, v)))
        finally:
            dist.destroy_process_group()


def test_a_function_that_the_user_has_put_in_torchs_place_is_not_refused(monkeypatch):
    import torch.nn.functional as F
    from flashcore_attn import scaled_dot_product_attention as sdpa
    from torch_problem import draw

    q, k, v = draw(0, *[(1, 2, 16, 16)] * 3)
    expected = sdpa(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    assert torch.equal(sdpa(q.requires_grad_(), k, v), expected)
