"""Derivatives by torch.func and forward mode: right, or refused; never silently zero."""

import flashcore_attn._ops
import pytest
import torch
import torch.nn.functional as F
from flashcore_attn import UnsupportedError, attention, flash_attn_varlen_func, flash_attn_with_kvcache
from flashcore_attn import scaled_dot_product_attention as sdpa
from torch.autograd import forward_ad
from torch_problem import draw

ops = flashcore_attn._ops.ops
MASK = torch.ones(9, 9, dtype=torch.bool).tril()
ENDS = torch.tensor([0, 4, 9])
SHAPES = [(1, 2, 9, 16)] * 3

#: Every operator, as a function of q, k and v, (batch, heads, length, head_dim).
CALLS = {
    "sdpa": sdpa,
    "attention": lambda q, k, v: attention(q, k, v, causal=True, softcap=3.0),
    "lse": lambda q, k, v: attention(q, k, v, return_lse=True)[1],
    "lengths": lambda q, k, v: attention(q, k, v, key_lengths=[7]),
    "masked": lambda q, k, v: sdpa(q, k, v, MASK),
    "varlen": lambda q, k, v: flash_attn_varlen_func(
        *(x[0].transpose(0, 1) for x in (q, k, v)), ENDS, ENDS, 5, 5, causal=True
    ),
    "float64": lambda q, k, v: sdpa(*(x.double() for x in (q, k, v))).float(),
    "operator": lambda q, k, v: ops.attention(q, k, v, None, None, "none", None, None, None, 0.0)[0],
}


def tangent(call, x, others):
    """The derivative of forward mode in the first argument."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(call(dual, *others)).tangent


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_forward_mode_is_refused_not_zero(call):
    q, k, v = draw(0, *SHAPES)
    with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
        tangent(call, q, (k, v))
    with pytest.raises(UnsupportedError, match="no derivative in forward mode"):
        torch.func.jvp(lambda q: call(q, k, v), (q,), (q,))
    with pytest.raises(UnsupportedError):
        torch.func.hessian(lambda q: call(q, k, v).sum())(q)
    # Without a derivative, forward mode changes nothing.
    expected = call(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(call(q, k, v), expected)


def test_forward_mode_is_refused_where_an_output_is_given():
    q, k, v = draw(0, *SHAPES)
    with pytest.raises(UnsupportedError, match="no derivative in forward mode"):
        tangent(lambda q, k, v: attention(q, k, v, out=torch.empty_like(v)), q, (k, v))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_torch_func_has_the_gradients_of_autograd(call):
    leaves = [x.requires_grad_() for x in draw(0, *SHAPES)]
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    q, k, v = (x.detach() for x in leaves)
    functional = torch.func.grad(lambda *x: call(*x).square().sum(), argnums=(0, 1, 2))(q, k, v)
    o, pull = torch.func.vjp(call, q, k, v)
    for ours, pulled, truth in zip(functional, pull(2 * o), expected):
        torch.testing.assert_close(ours, truth)
        torch.testing.assert_close(pulled, truth)


@pytest.mark.parametrize("name", ["sdpa", "attention", "lse", "lengths", "float64"])
def test_vmap_over_a_gradient_is_a_loop_over_it(name):
    q, k, v = draw(0, *[(3, 1, 2, 9, 16)] * 3)
    gradient = torch.func.grad(lambda q, k, v: CALLS[name](q, k, v).square().sum(), argnums=(0, 1))
    ours = torch.vmap(gradient, in_dims=(0, 0, None))(q, k, v[0])
    looped = [gradient(*one, v[0]) for one in zip(q, k)]
    for i, ours in enumerate(ours):
        torch.testing.assert_close(ours, torch.stack([one[i] for one in looped]))


def test_a_jacobian_by_rows_is_torchs():
    q, k, v = (x.double() for x in draw(0, *[(1, 1, 3, 4)] * 3))
    ours, theirs = (torch.func.jacrev(lambda q, f=f: f(q, k, v))(q) for f in (sdpa, F.scaled_dot_product_attention))
    torch.testing.assert_close(ours, theirs)


def test_a_second_derivative_is_an_error_not_a_zero():
    q, k, v = draw(0, *SHAPES)
    inner = torch.func.grad(lambda q: sdpa(q, k, v).square().sum())
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.func.grad(lambda q: inner(q).sum())(q)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        inner(q.clone().requires_grad_()).sum().backward()


def test_torch_func_compiles():
    torch.compiler.reset()
    q, k, v = draw(0, *SHAPES)
    gradient = torch.func.grad(lambda q: sdpa(q, k, v, is_causal=True).square().sum())
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), gradient(q))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, 1), (None, 2, None)])
def test_vmap_gives_what_a_loop_gives(in_dims):
    shape = SHAPES[0]
    tensors = draw(0, *(shape if dim is None else (*shape[:dim], 3, *shape[dim:]) for dim in in_dims))
    rows = [[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims)] for i in range(3)]
    looped = torch.stack([sdpa(*row) for row in rows])
    torch.testing.assert_close(torch.vmap(sdpa, in_dims=in_dims)(*tensors), looped)


def test_vmap_over_nothing_and_over_lengths():
    assert torch.vmap(sdpa)(*draw(0, *[(0, 1, 2, 9, 16)] * 3)).shape == (0, 1, 2, 9, 16)
    q, k, v = draw(0, *[(3, 1, 2, 9, 16)] * 3)
    lengths = torch.tensor([[4], [9], [0]])
    call = lambda q, k, v, lengths: attention(q, k, v, causal=True, key_lengths=lengths)
    looped = torch.stack([call(*one) for one in zip(q, k, v, lengths)])
    assert torch.equal(torch.vmap(call)(q, k, v, lengths), looped)
    assert torch.equal(torch.vmap(call, (None, 0, 0, 0))(q[0], k, v, lengths)[0], looped[0])


@pytest.mark.parametrize("number", range(3))
def test_what_torch_func_cannot_look_into_is_refused(number):
    q, k, v = draw(0, *[(3, 2, 4, 2, 16)] * 3)
    call = [
        lambda q, k, v: attention(q, k, v, precision="fp8"),
        lambda q, k, v: attention(q, k, v, out=torch.empty_like(v)),
        lambda q, k, v: flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=1),
    ][number]
    with pytest.raises(UnsupportedError, match="go with"):
        torch.vmap(call)(q, k, v)
    if number == 0:
        with pytest.raises(UnsupportedError, match="no derivative in forward mode"):
            tangent(call, q[0], (k[0], v[0]))
        with pytest.raises(UnsupportedError, match="no derivative in forward mode"):
            torch.func.jvp(lambda q: call(q, k[0], v[0]), (q[0],), (q[0],))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["masked", "varlen"])
def test_vmap_over_other_operators_is_a_loop(name):
    q, k, v = draw(0, *[(3, 1, 2, 9, 16)] * 3)
    looped = torch.stack([CALLS[name](*one) for one in zip(q, k, v)])
    torch.testing.assert_close(torch.vmap(CALLS[name])(q, k, v), looped)


def test_gradients_pass_gradcheck_in_float64():
    q, k, v = (x.double().requires_grad_() for x in draw(0, (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2)))
    for options in ({}, {"causal": True, "softcap": 2.0}, {"key_lengths": [6, 2]}, {"window": (1, 1)}):
        call = lambda q, k, v, options=options: attention(q, k, v, return_lse=True, **options)
        assert torch.autograd.gradcheck(call, (q, k, v))
