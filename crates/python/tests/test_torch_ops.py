"""Gradients, torch.compile and everything else that goes through torch's dispatcher."""

import flashcore_attn._ops
import pytest
import torch
import torch.nn.functional as F
from flashcore_attn import UnsupportedError, attention, flash_attn_func, flash_attn_varlen_func
from flashcore_attn import scaled_dot_product_attention as sdpa
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_problem import draw

ops = flashcore_attn._ops.ops


def leaves(*shapes, dtype="float32"):
    return [x.requires_grad_() for x in draw(0, *shapes, dtype=dtype)]


def operator_calls():
    q, k, v = leaves((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8))
    swapped = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    packed = leaves((10, 4, 16), (12, 2, 16), (12, 2, 16))
    ends_q, ends_k = torch.tensor([0, 3, 10]), torch.tensor([0, 5, 12])
    yield "attention", (q, k, v, None, None, "none", None, None, None, 0.0)
    yield "attention", (q, k, v, None, None, "causal", None, None, 0.3, 2.0)
    yield "attention", (*swapped, torch.tensor([1, 0]), torch.tensor([9, 5]), "window", 2, 3, None, 0.0)
    yield "attention_masked", (q, k, v, torch.ones(7, 9, dtype=torch.bool).tril(2), None, 0.0)
    yield "attention_masked", (q, k, v, torch.arange(9) < torch.tensor([4, 9]).view(2, 1, 1, 1), 0.3, 2.0)
    yield "attention_varlen", (*packed, ends_q, ends_k, None, None, "causal", None, None, None, 0.0)
    used = (torch.tensor([2, 5]), torch.tensor([3, 7]))
    yield "attention_varlen", (*packed, ends_q, ends_k, *used, "causal", None, None, None, 0.0)
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    yield "attention", (*double, None, None, "causal", None, None, None, 0.0)


@pytest.mark.parametrize("number", range(8))
def test_operators_pass_opcheck(number):
    name, args = list(operator_calls())[number]
    assert set(opcheck(getattr(ops, name).default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("number", range(8))
def test_operators_of_gradients_pass_opcheck(number):
    name, (q, k, v, *rest) = list(operator_calls())[number]
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = getattr(ops, name)(q, k, v, *rest)
    for grad_lse in (None, torch.ones_like(lse)):
        args = (torch.ones_like(o), grad_lse, q, k, v, o, lse, *rest)
        assert set(opcheck(getattr(ops, f"{name}_backward").default, args).values()) == {"SUCCESS"}


def plain(q, k, v, seen=None, scale=None, softcap=0.0):
    """Attention in torch's own operations, to differentiate."""
    group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.size(3) ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v, scores.logsumexp(-1)


CASES = [
    ({}, {}),
    ({"causal": True}, {"seen": torch.ones(7, 9, dtype=torch.bool).tril(2)}),
    ({"causal": True, "top_left": True}, {"seen": torch.ones(7, 9, dtype=torch.bool).tril()}),
    ({"window": (1, 2)}, {"seen": torch.ones(7, 9, dtype=torch.bool).tril(4).triu(1)}),
    ({"softcap": 2.0, "scale": 0.4}, {"softcap": 2.0, "scale": 0.4}),
    ({"key_lengths": [9, 4]}, {"seen": torch.arange(9) < torch.tensor([9, 4]).view(2, 1, 1, 1)}),
]


@pytest.mark.parametrize(("options", "meant"), CASES)
@pytest.mark.parametrize("block", [None, 1 << 24, 150])
def test_gradients_are_those_of_plain_attention(options, meant, block, monkeypatch):
    # With a block, torch computes them, as those of float32 on a GPU; with a small one it takes the queries in several
    # steps.
    if block is not None:
        monkeypatch.setattr("flashcore_attn._ops.is_native", lambda q, v: False)
        monkeypatch.setattr("flashcore_attn._blocks._BLOCK_ELEMENTS", block)
    q, k, v = leaves((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8))
    weights, lse_weights = draw(1, (2, 4, 7, 8), (2, 4, 7))
    o, lse = attention(q, k, v, return_lse=True, **options)
    ours = torch.autograd.grad((o * weights).sum() + (lse * lse_weights).sum(), (q, k, v))
    o, lse = plain(*(x.double() for x in (q, k, v)), **meant)
    truth = torch.autograd.grad((o * weights).sum() + (lse * lse_weights).sum(), (q, k, v))
    for ours, truth in zip(ours, truth):
        torch.testing.assert_close(ours, truth, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_half_precision_are_as_good_as_torchs(dtype):
    q, k, v = leaves(*[(1, 4, 96, 64)] * 3, dtype=dtype)
    (weights,) = draw(1, (1, 4, 96, 64))
    gradients = {}
    for name, function, inputs in (
        ("ours", sdpa, (q, k, v)),
        ("theirs", F.scaled_dot_product_attention, (q, k, v)),
        ("truth", F.scaled_dot_product_attention, [x.detach().double().requires_grad_() for x in (q, k, v)]),
    ):
        gradients[name] = torch.autograd.grad((function(*inputs, is_causal=True) * weights).sum(), inputs)
    for ours, theirs, truth in zip(*gradients.values()):
        assert ours.dtype == q.dtype
        off, theirs_off = ((x.double() - truth).square().mean().sqrt() for x in (ours, theirs))
        assert off <= 1.5 * theirs_off


@pytest.mark.filterwarnings("ignore:k is copied")
def test_gradients_do_not_depend_on_how_tensors_lie_in_memory(monkeypatch):
    monkeypatch.setattr("flashcore_attn._prepare._said", set())
    given = draw(0, (2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8), (2, 4, 7, 8))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    # The last dimension of these is not contiguous, and all rows of the last gradient are one.
    turned[1] = given[1].mT.contiguous().mT
    turned[3] = given[3][:, :, :1].expand(2, 4, 7, 8)
    given[3] = turned[3].contiguous()
    found = []
    for q, k, v, grad in (given, turned):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        found.append(torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found))


def test_a_query_that_sees_nothing_has_no_gradient_and_gives_none():
    q, k, v = leaves((1, 2, 5, 16), (1, 2, 3, 16), (1, 2, 3, 16))
    grads = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][:, :, :2] == 0).all()


def test_a_mask_given_as_a_tensor_has_gradients_too():
    q, k, v = leaves((2, 4, 7, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    mask = torch.arange(9) >= torch.tensor([0, 4]).view(2, 1, 1, 1)
    ours = torch.autograd.grad(sdpa(q, k, v, mask).square().sum(), (q, k, v))
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask).square().sum(), (q, k, v))
    for ours, theirs in zip(ours, theirs):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_learned_mask_is_refused_when_its_gradient_is_asked_for():
    q, k, v = leaves(*[(1, 1, 4, 16)] * 3)
    mask = torch.zeros(4, 4, requires_grad=True)
    o = sdpa(q, k, v, mask)
    with pytest.raises(UnsupportedError, match="attn_mask has no gradient here"):
        o.sum().backward()


def test_gradients_can_be_made_an_error():
    q, k, v = leaves(*[(1, 1, 4, 16)] * 3)
    flashcore_attn.set_gradients("error")
    try:
        with pytest.raises(UnsupportedError, match="a gradient is asked for"):
            sdpa(q, k, v)
        with torch.no_grad():
            sdpa(q, k, v)
    finally:
        flashcore_attn.set_gradients("recompute")
    assert sdpa(q, k, v).requires_grad
    with pytest.raises(ValueError, match="possible are 'recompute' and 'error'"):
        flashcore_attn.set_gradients("fast")


def test_a_second_derivative_is_an_error_not_a_zero():
    q, k, v = leaves(*[(1, 1, 4, 16)] * 3)
    (grad,) = torch.autograd.grad(sdpa(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        grad.sum().backward()


def test_a_tensor_without_gradient_needs_none():
    q, k, v = draw(0, *[(1, 1, 4, 16)] * 3)
    assert not sdpa(q, k, v).requires_grad
    o = sdpa(q, k.requires_grad_(), v)
    (grad,) = torch.autograd.grad(o.sum(), k)
    assert grad.shape == k.shape


def functions():
    mask = torch.ones(7, 9, dtype=torch.bool).tril(2)
    ends = torch.tensor([0, 3, 7])
    yield lambda q, k, v: sdpa(q * 2, k, v, is_causal=True, enable_gqa=True) + 1
    yield lambda q, k, v: sdpa(q * 2, k, v, mask, enable_gqa=True) + 1
    yield lambda q, k, v: attention(q * 2, k, v, causal=True, window=(3, 0), softcap=3.0) + 1
    yield lambda q, k, v: attention(q * 2, k, v, key_lengths=torch.tensor([9, 4]))
    yield lambda q, k, v: flash_attn_func(*(x.transpose(1, 2) for x in (q * 2, k, v)), causal=True) + 1
    yield lambda q, k, v: flash_attn_varlen_func(
        q[0].transpose(0, 1) * 2,
        k[0, :, :7].mT.permute(2, 0, 1).contiguous(),
        v[0, :, :7].transpose(0, 1),
        ends,
        ends,
        4,
        4,
    )


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("gradient", [False, True])
def test_compile_traces_through_without_a_graph_break(number, gradient):
    torch.compiler.reset()
    function = list(functions())[number]
    inputs = draw(0, (2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    if gradient:
        inputs = [x.requires_grad_() for x in inputs]
    # aot_eager traces as inductor does, without a C++ compiler.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, expected = compiled(*inputs), function(*inputs)
    assert torch.equal(ours, expected)
    if gradient:
        ours, expected = (torch.autograd.grad(x.square().sum(), inputs) for x in (ours, expected))
        for ours, expected in zip(ours, expected):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


def test_compile_takes_dynamic_shapes():
    torch.compiler.reset()
    compiled = torch.compile(lambda q: sdpa(q, q, q, is_causal=True), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 9, 33):
        (q,) = draw(length, (1, 2, length, 16))
        assert torch.equal(compiled(q), sdpa(q, q, q, is_causal=True))


def test_export_keeps_the_operator():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, is_causal=True)

    inputs = tuple(draw(0, *[(1, 2, 9, 16)] * 3))
    program = torch.export.export(Model(), inputs)
    assert any("flashcore.attention" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*inputs), sdpa(*inputs, is_causal=True))


def test_modes_and_subclasses_see_the_operator():
    q, k, v = draw(0, *[(1, 2, 9, 16)] * 3)
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        o = sdpa(q, k, v)
    assert "flashcore.attention.default" in seen
    assert torch.equal(o, sdpa(q, k, v))


def test_fake_tensors_have_the_shape_and_strides_of_real_ones():
    packed = draw(0, (2, 9, 3, 4, 16))[0]
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    v = v[..., :8]
    real = ops.attention(q, k, v, None, None, "none", None, None, None, 0.0)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake = ops.attention(*fakes, None, None, "none", None, None, None, 0.0)
    for real, fake in zip(real, fake):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_flops_are_counted():
    q, k, v = draw(0, (2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v)
    assert counter.get_total_flops() == 2 * 4 * 7 * 9 * (16 + 8) * 2


def training_step(q, k, v):
    return flash_attn_func(q, k, v, causal=True, softcap=3.0).square().mean()


def test_a_compiled_training_step_is_one_graph_forward_and_one_backward():
    torch.compiler.reset()
    graphs = {"forward": 0, "backward": 0}

    def counted(name):
        def compiler(graph, inputs):
            graphs[name] += 1
            assert any("flashcore.attention" in str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compiler

    inputs = leaves(*[(2, 9, 4, 16)] * 3)
    backend = aot_autograd(fw_compiler=counted("forward"), bw_compiler=counted("backward"))
    compiled = torch.compile(training_step, fullgraph=True, backend=backend)
    for _ in range(2):
        ours, expected = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, training_step))
        assert all(torch.equal(x, y) for x, y in zip(ours, expected))
    assert graphs == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call_has_the_same_gradients(reentrant):
    inputs = leaves(*[(2, 9, 4, 16)] * 3)
    again = checkpoint(training_step, *inputs, use_reentrant=reentrant)
    ours, expected = ([x.clone() for x in grads_of(loss, inputs)] for loss in (again, training_step(*inputs)))
    assert all(torch.equal(x, y) for x, y in zip(ours, expected))


def grads_of(loss, inputs):
    for x in inputs:
        x.grad = None
    loss.backward()
    return [x.grad for x in inputs]


def test_gradients_are_allowed_and_the_same_bits_where_torch_wants_determinism():
    inputs = leaves((2, 130, 4, 16), (2, 130, 2, 16), (2, 130, 2, 16), dtype="bfloat16")
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (torch.autograd.grad(training_step(*inputs), inputs) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for grads in others for x, y in zip(grads, first))
