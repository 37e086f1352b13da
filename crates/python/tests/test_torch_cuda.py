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


def test_tensors_on_two_devices_are_refused():
    q, k, v = on_gpu(*MISSION)
    with pytest.raises(ContractError):
        sdpa(q, k.cpu(), v, scale=0.1, is_causal=True, enable_gqa=True)
    with pytest.raises(ContractError):
        attention(q, k, v.cpu())
    # The device still works.
    check(q, k, v, sdpa(q, k, v))


@pytest.mark.parametrize("head_dim", [1, 5, 59, 111, 250])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_head_dims_that_are_no_multiples_of_eight_run(dtype, head_dim):
    q, k, v = on_gpu((2, 4, 130, head_dim), (2, 2, 200, head_dim), (2, 2, 200, head_dim), dtype=dtype)
    for asked, meant in (
        ({}, {}),
        ({"causal": True, "softcap": 5.0}, {"mask": "causal", "softcap": 5.0}),
        ({"window": (40, 3), "scale": 0.2}, {"mask": "window", "left": 40, "right": 3, "scale": 0.2}),
        ({"causal": True, "key_lengths": [200, 77]}, {"mask": "causal", "key_lengths": [200, 77]}),
    ):
        o, lse = attention(q, k, v, return_lse=True, **asked)
        assert o.shape == q.shape
        check(q, k, v, o, lse, **meant)
    ends = torch.tensor([0, 30, 130], dtype=torch.int32, device="cuda")
    packed = [x[0, :2, :130].transpose(0, 1) for x in (q, k, v)]
    o = flash_attn_varlen_func(*packed, ends, ends, 100, 100)
    for part in (slice(0, 30), slice(30, 130)):
        check(*(x[None, part].transpose(1, 2) for x in (*packed, o)))
    assert flashcore_attn.can_use(q, k, v)[0]


def oddly_laid(x):
    """The same tensor in another memory layout."""
    yield x.mT.contiguous().mT
    yield torch.empty(*x.shape[:3], x.size(3) + 4, dtype=x.dtype, device=x.device)[..., : x.size(3)].copy_(x)
    yield torch.empty(x.numel() + 8, dtype=x.dtype, device=x.device)[1 : x.numel() + 1].view(x.shape).copy_(x)


@pytest.mark.filterwarnings("ignore:. is copied")
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 512), ("float32", 64)])
def test_tensors_may_lie_anyhow(dtype, head_dim):
    q, k, v = on_gpu(*[(2, 4, 100, head_dim)] * 3, dtype=dtype)
    for odd in zip(*(list(oddly_laid(x)) for x in (q, k, v))):
        for tensors in ((odd[0], k, v), (q, odd[1], v), (q, k, odd[2]), odd):
            check(q, k, v, sdpa(*tensors))


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 512), ("bfloat16", 264), ("float32", 64), ("float32", 59)])
def test_wide_heads_and_float32_run(dtype, head_dim):
    q, k, v = on_gpu((2, 4, 70, head_dim), (2, 2, 90, head_dim), (2, 2, 90, head_dim), dtype=dtype)
    for asked, meant in (
        ({}, {}),
        ({"causal": True, "softcap": 5.0}, {"mask": "causal", "softcap": 5.0}),
        ({"causal": True, "key_lengths": [90, 33]}, {"mask": "causal", "key_lengths": [90, 33]}),
    ):
        o, lse = attention(q, k, v, return_lse=True, **asked)
        check(q, k, v, o, lse, **meant)


@pytest.mark.parametrize("shape", [(70_000, 1, 3, 16), (1, 70_000, 3, 16)])
def test_more_batch_entries_and_heads_than_a_grid_has_rows(shape):
    q, k, v = on_gpu(*[shape] * 3)
    o = sdpa(q, k, v, is_causal=True)
    for x in (slice(0, 50), slice(69_950, None)):
        part = (x,) if shape[0] > 1 else (slice(None), x)
        check(*(t[part] for t in (q, k, v, o)), mask="causal-top-left")


def test_float64_is_torchs():
    q, k, v = (x.double() for x in on_gpu(*[(2, 4, 40, 16)] * 3, dtype="float32"))
    ours, theirs = (f(q, k, v, is_causal=True) for f in (sdpa, F.scaled_dot_product_attention))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_torch_func_has_the_gradients_of_autograd():
    q, k, v = (x.requires_grad_() for x in on_gpu(*MISSION))
    (expected,) = torch.autograd.grad(sdpa(q, k, v).float().square().sum(), q)
    ours = torch.func.grad(lambda q: sdpa(q, k.detach(), v.detach()).float().square().sum())(q.detach())
    torch.testing.assert_close(ours, expected)
    with pytest.raises(UnsupportedError, match="forward mode"):
        torch.func.jvp(lambda q: sdpa(q, k, v), (q.detach(),), (q.detach(),))


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
        o, lse = torch.ops.flashcore.attention(*args)
        plain = [x.detach() for x in (o, q, k, v, o, lse)]
        args = (plain[0], None, *plain[1:], *args[3:])
        assert set(opcheck(torch.ops.flashcore.attention_backward.default, args).values()) == {"SUCCESS"}


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


def gradients(call, inputs, grad, grad_lse):
    o, lse = call(*inputs)
    return torch.autograd.grad((o, lse), inputs, (grad.to(o.dtype), grad_lse.to(lse.dtype)))


GRADIENT_OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "top_left": True},
    {"window": (40, 3)},
    {"softcap": 5.0, "scale": 0.2},
    {"causal": True, "key_lengths": [200, 77]},
]


@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (40, 72), (20, 12), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_every_option_are_right(dtype, dims):
    shapes = (2, 4, 130, dims[0]), (2, 2, 200, dims[0]), (2, 2, 200, dims[1]), (2, 4, 130, dims[1]), (2, 4, 130)
    *inputs, grad, grad_lse = on_gpu(*shapes, dtype=dtype)
    inputs = [x.requires_grad_() for x in inputs]
    double = [x.detach().double().requires_grad_() for x in inputs]
    for options in GRADIENT_OPTIONS:
        call = lambda q, k, v, options=options: attention(q, k, v, return_lse=True, **options)
        ours, truths = gradients(call, inputs, grad, grad_lse), gradients(call, double, grad, grad_lse)
        for given, truth in zip(ours, truths):
            off = (given.double() - truth).abs().max() / truth.abs().max()
            assert off < (5e-3 if dtype == "float16" else 2e-2), (options, off)


def test_gradients_are_the_same_bits_again_however_tensors_lie_in_memory():
    *inputs, grad = on_gpu((2, 4, 130, 64), (2, 2, 200, 64), (2, 2, 200, 64), (2, 4, 130, 64))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    same = grad[:, :, :1].expand_as(grad)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for given, of_o in ((inputs, same.contiguous()), (inputs, same), (turned, same)):
            leaves = [x.detach().requires_grad_() for x in given]
            found.append(torch.autograd.grad(attention(*leaves, causal=True), leaves, of_o))
            assert all(grad.stride() == leaf.stride() for grad, leaf in zip(found[-1], leaves))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(again, found[0]))
    # One element for all, as after a sum.
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    summed = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    written = torch.autograd.grad(attention(q, k, v), (q, k, v), torch.ones_like(q))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(summed, written))


def test_a_training_step_can_be_captured():
    q, k, v = (x.requires_grad_() for x in on_gpu(*MISSION))
    step = lambda: torch.autograd.grad(attention(q, k, v, causal=True).float().square().sum(), (q, k, v))
    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, expected))


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch has no registry")
def test_torchs_function_is_computed_and_differentiated_by_flashcore():
    q, k, v = (x.requires_grad_() for x in on_gpu(*MISSION))

    def found(function):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            o = function(q, k, v, is_causal=True)
            return o.detach(), *torch.autograd.grad(o.sum(), (q, k, v))

    theirs = found(F.scaled_dot_product_attention)
    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    try:
        ours = found(F.scaled_dot_product_attention)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert all(torch.equal(x, y) for x, y in zip(ours, found(sdpa)))
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
    """Memory of outputs that are dropped at once is reused by the next call in the same stream, in stream order."""
    q, k, v = on_gpu(*MISSION)
    expected = attention(q, k, v)
    for _ in range(200):
        attention(q, k, v)
        kept = attention(q, k, v)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("shape", [(32, 8, 32768, 128), (8, 1, 16384, 256), (16, 2, 8192, 64)])
def test_calls_that_need_a_workspace_keep_out_of_each_others(shape):
    """Long sequences are cut into parts whose results lie in a workspace: of the stream, or of the graph."""
    heads, shared, keys, width = shape
    sizes = (1, heads, 1, width), (1, shared, keys, width), (1, shared, keys, width)

    def call(tensors):
        return sdpa(*tensors, enable_gqa=True)

    sets = [draw(seed, *sizes, dtype="bfloat16", device="cuda") for seed in range(4)]
    assert "workspace" in flashcore_attn.explain(*sets[0])
    wanted = [call(tensors).clone() for tensors in sets]
    o = call(sets[0])
    group = heads // shared
    q, k, v = (x.float() for x in sets[0])
    exact = F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    assert (o.float() - exact).abs().max() < 2e-3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(sets[3])
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(50):
        found = []
        for stream, tensors in zip(streams, sets):
            with torch.cuda.stream(stream):
                found.append(call(tensors))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip([*found, captured], wanted))


@pytest.fixture
def nccl(tmp_path):
    """A group of one process whose tensors go through NCCL."""
    dist = pytest.importorskip("torch.distributed")
    if not (dist.is_available() and dist.is_nccl_available()):
        pytest.skip("this torch has no NCCL")
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=device
    )  # fmt: skip
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_ring_over_nccl_is_attention(nccl):
    from flashcore_attn.distributed import gather, ring_attention, shard

    ends = torch.tensor([0, 100, 100, 356], dtype=torch.int32, device="cuda")
    for whole, shapes, dim, options in (
        (lambda q, k, v: attention(q, k, v, causal=True), [(1, 8, 512, 64), *[(1, 2, 512, 64)] * 2], 2, {}),
        (
            lambda q, k, v: flash_attn_varlen_func(q, k, v, ends, ends, 256, 256, causal=True),
            [(356, 8, 64), *[(356, 2, 64)] * 2],
            0,
            {"cu_seqlens": ends},
        ),
    ):
        inputs = [x.requires_grad_() for x in on_gpu(*shapes, dtype="bfloat16")]
        expected = whole(*inputs)
        grads = torch.autograd.grad(expected.float().square().sum(), inputs)
        parts = [shard(x.detach(), dim, **options).requires_grad_() for x in inputs]
        o = ring_attention(*parts, causal=True, **options)
        torch.testing.assert_close(gather(o, dim, **options), expected, atol=1e-2, rtol=1e-2)
        for ours, truth in zip(torch.autograd.grad(o.float().square().sum(), parts), grads):
            torch.testing.assert_close(gather(ours, dim, **options), truth, atol=3e-2, rtol=3e-2)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch has no registry")
def test_torchs_context_parallel_runs_on_flashcore(nccl):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v = on_gpu(*MISSION, dtype="bfloat16")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = sdpa(*leaves, is_causal=True)
    expected = o.detach(), *torch.autograd.grad(o.sum(), leaves)
    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    try:
        mesh = init_device_mesh("cuda", (1,))
        flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
        with flash, context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            parts = [x.clone().requires_grad_() for x in (q, k, v)]
            with pytest.raises(UnsupportedError, match="context_parallel is active"):
                sdpa(*parts, is_causal=True)
            o = F.scaled_dot_product_attention(*parts, is_causal=True)
            ours = o.detach(), *torch.autograd.grad(o.sum(), parts)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    # One process has the whole sequence, and the ring adds nothing.
    for given, truth in zip(ours, expected):
        torch.testing.assert_close(given, truth, atol=1e-2, rtol=1e-2)


def test_one_training_step_of_a_transformer_follows_torchs():
    transformers = pytest.importorskip("transformers")
    import flashcore_attn.transformers

    flashcore_attn.transformers.register()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    ids = torch.randint(0, 256, (2, 512), device="cuda")
    padding = torch.ones_like(ids)
    padding[0, :100] = 0
    positions = torch.cat([torch.arange(n) for n in (200, 312)]).expand(2, 512).cuda()
    for options in ({}, {"attention_mask": padding}, {"position_ids": positions, "use_cache": False}):
        found = {}
        for implementation in ("sdpa", "fcore"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            loss = model(ids, labels=ids, **options).loss
            loss.backward()
            found[implementation] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).float()
        (ours, grad), (theirs, truth) = found["fcore"], found["sdpa"]
        assert ours == pytest.approx(theirs, rel=1e-2)
        assert (grad - truth).norm() < 3e-2 * truth.norm()
