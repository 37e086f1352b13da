"""What only a GPU can show: streams, graphs, device lengths, torch's backward pass, compiled code."""

import flashcore_attn
import pytest
import torch
import torch.nn.functional as F
from flashcore_attn import (
    ContractError,
    UnsupportedError,
    attention,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    register_flash_attention_impl,
)
from flashcore_attn import scaled_dot_product_attention as sdpa
from torch.library import opcheck
from torch_problem import check, draw

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

MISSION = [(1, 8, 512, 64)] * 3


def on_gpu(*shapes, dtype="float16"):
    return draw(0, *shapes, dtype=dtype, device="cuda")


def test_info_names_the_gpu():
    assert flashcore_attn.info()["cuda"]["devices"]
    q, k, v = on_gpu(*MISSION)
    usable, device = flashcore_attn.can_use(q, k, v)
    assert usable and device.startswith("cuda:0 (")
    assert "grid" in flashcore_attn.explain(q, k, v)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_option_obeys_the_rule(dtype, head_dim):
    q, k, v = on_gpu((2, 4, 130, head_dim), (2, 2, 200, head_dim), (2, 2, 200, head_dim), dtype=dtype)
    for asked, meant in (
        ({}, {}),
        ({"causal": True}, {"mask": "causal"}),
        ({"causal": True, "top_left": True}, {"mask": "causal-top-left"}),
        ({"window": (40, 3)}, {"mask": "window", "left": 40, "right": 3}),
        ({"softcap": 5.0, "scale": 0.2}, {"softcap": 5.0, "scale": 0.2}),
        ({"causal": True, "key_lengths": [200, 77]}, {"mask": "causal", "key_lengths": [200, 77]}),
    ):
        o, lse = attention(q, k, v, return_lse=True, **asked)
        check(q, k, v, o, lse, **meant)


def test_work_is_queued_in_the_current_stream():
    q, k, v = on_gpu(*[(4, 16, 2048, 128)] * 3)
    expected = attention(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The copy takes a while; a call in another stream would not wait for it.
        torch.cuda._sleep(50_000_000)
        late = q.clone()
        o = attention(late, k, v)
        after = o.clone()
    stream.synchronize()
    assert torch.equal(after, expected)


def test_many_streams_give_the_same_bits():
    q, k, v = on_gpu(*MISSION)
    expected = attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(8)], []
    for number in range(200):
        with torch.cuda.stream(streams[number % 8]):
            results.append(attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def captured(call):
    """A graph of a call that was made once before, and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("function", [sdpa, lambda q, k, v: flash_attn_func(q, k, v, causal=True)])
def test_a_captured_call_replays_on_new_data(function):
    q, k, v = on_gpu(*MISSION)
    graph, o = captured(lambda: function(q, k, v))
    for seed in range(3):
        q.copy_(draw(seed, MISSION[0], dtype="float16")[0])
        graph.replay()
        assert torch.equal(o, function(q, k, v))


def test_a_captured_cache_reads_its_lengths_anew():
    q, k_cache, v_cache = on_gpu((3, 1, 8, 64), (3, 256, 2, 64), (3, 256, 2, 64))
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32, device="cuda")
    graph, o = captured(lambda: flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True))
    for given in ([5, 256, 77], [1, 1, 1], [0, 9, 256]):
        lengths.copy_(torch.tensor(given))
        graph.replay()
        swapped = (x.transpose(1, 2) for x in (q, k_cache, v_cache, o))
        check(*swapped, mask="causal", key_lengths=given)


def test_lengths_beyond_the_keys_read_nothing_beyond_them():
    q, k, v = on_gpu((2, 4, 1, 64), (2, 4, 100, 64), (2, 4, 100, 64))
    lengths = torch.tensor([1_000_000, -5], device="cuda")
    o = attention(q, k, v, key_lengths=lengths)
    assert torch.equal(o, attention(q, k, v, key_lengths=[100, 0]))


def test_packed_sequences_run_on_a_gpu():
    ends = torch.tensor([0, 100, 100, 228], dtype=torch.int32, device="cuda")
    q, k, v = on_gpu(*[(228, 4, 64)] * 3)
    o = flash_attn_varlen_func(q, k, v, ends, ends, 128, 128, causal=True)
    for part in (slice(0, 100), slice(100, 228)):
        swapped = (x[None, part].transpose(1, 2) for x in (q, k, v, o))
        check(*swapped, mask="causal")


def test_what_the_kernels_do_not_take_is_refused():
    q, k, v = on_gpu(*MISSION, dtype="float32")
    with pytest.raises(UnsupportedError, match="does not do f32"):
        sdpa(q, k, v)
    half = [x.half() for x in (q, k, v)]
    with pytest.raises(ContractError, match="multiple of 16 bytes"):
        storage = torch.empty(half[0].numel() + 1, device="cuda", dtype=torch.float16)
        sdpa(storage[1:].view(half[0].shape), *half[1:])
    with pytest.raises((ContractError, RuntimeError)):
        sdpa(half[0], half[1].cpu(), half[2])
    # The device is none the worse for it.
    check(*half, sdpa(*half))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_is_right(backend):
    torch.compiler.reset()
    q, k, v = (x.requires_grad_() for x in on_gpu(*MISSION))
    function = lambda q, k, v: sdpa(q * 2, k, v, is_causal=True) + 1
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))
    ours, expected = (torch.autograd.grad(f(q, k, v).float().square().sum(), (q, k, v)) for f in (compiled, function))
    for ours, expected in zip(ours, expected):
        torch.testing.assert_close(ours, expected, atol=1e-2, rtol=1e-2)


def test_the_operator_passes_opcheck():
    q, k, v = (x.requires_grad_() for x in on_gpu(*[(1, 2, 64, 64)] * 3))
    for args in (
        (q, k, v, None, None, "causal", None, None, None, 0.0),
        (q, k, v, None, torch.tensor([50], device="cuda"), "none", None, None, None, 0.0),
    ):
        assert set(opcheck(torch.ops.flashcore.attention.default, args).values()) == {"SUCCESS"}


def test_gradients_are_as_good_as_torchs():
    q, k, v = (x.requires_grad_() for x in on_gpu(*MISSION))
    (weights,) = on_gpu(MISSION[0])
    gradients = {}
    for name, function, inputs in (
        ("ours", sdpa, (q, k, v)),
        ("theirs", F.scaled_dot_product_attention, (q, k, v)),
        ("truth", F.scaled_dot_product_attention, [x.detach().double().requires_grad_() for x in (q, k, v)]),
    ):
        gradients[name] = torch.autograd.grad((function(*inputs, is_causal=True) * weights).sum(), inputs)
    for ours, theirs, truth in zip(*gradients.values()):
        off, theirs_off = ((x.double() - truth).square().mean().sqrt() for x in (ours, theirs))
        assert off <= 1.5 * theirs_off


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch has no registry")
def test_torchs_function_is_computed_by_flashcore_and_differentiated_by_torch():
    q, k, v = (x.requires_grad_() for x in on_gpu(*MISSION))

    def flash():
        return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)

    with flash():
        theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))
    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    try:
        with flash():
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            ours = torch.autograd.grad(o.sum(), (q, k, v))
        with torch.no_grad():
            assert torch.equal(o, sdpa(q, k, v, is_causal=True))
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    for ours, theirs in zip(ours, theirs):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


def test_a_mask_on_the_gpu_is_recognised_but_not_under_capture():
    q, k, v = on_gpu(*MISSION)
    mask = torch.ones(512, 512, dtype=torch.bool, device="cuda").tril()
    assert torch.equal(sdpa(q, k, v, mask), sdpa(q, k, v, is_causal=True))
    with (
        pytest.raises(UnsupportedError, match="while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        sdpa(q, k, v, mask)


def test_memory_that_torch_gives_out_again_is_not_written_late():
    """Outputs that are dropped at once are taken by the next call in the same stream, which the stream orders."""
    q, k, v = on_gpu(*MISSION)
    expected = attention(q, k, v)
    for _ in range(200):
        attention(q, k, v)
        kept = attention(q, k, v)
    assert torch.equal(kept, expected)
