"""What is padded and what is copied before a call, decided from numbers alone, and that the result is the same."""

import warnings

import flashcore_attn
import pytest
import torch
from flashcore_attn import _prepare, attention, can_use, explain
from flashcore_attn._native import preparation
from flashcore_attn._sdpa import scaled_dot_product_attention as sdpa
from torch_problem import check, draw

APART = "the elements of its last dimension do not lie side by side"
STRIDES = "its strides are not multiples of 16 bytes"
ADDRESS = "its address is not a multiple of 16 bytes"


def contiguous(*sizes):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("head_dim", [1, 8, 59, 64, 111, 255, 256, 257, 512, 1024])
def test_only_odd_head_dims_of_the_fast_kernels_are_padded(gpu, size, head_dim):
    sizes = (2, 3, 40, head_dim)
    fast = gpu and size == 2 and head_dim <= 256
    expected = (-(-head_dim // 8) * 8, None) if fast and head_dim % 8 else None
    assert preparation(gpu, size, sizes, contiguous(*sizes), 1024) == expected


@pytest.mark.parametrize(
    ("sizes", "strides", "address", "reason"),
    [
        ((2, 3, 40, 64), (3 * 64 * 40, 1, 3 * 64, 3), 1024, APART),
        ((2, 3, 40, 64), contiguous(2, 3, 40, 64), 1026, ADDRESS),
        ((2, 3, 40, 64), (3 * 40 * 68, 40 * 68, 68, 1), 1024, STRIDES),
        ((2, 3, 40, 64), (3 * 40 * 64 + 4, 40 * 64, 64, 1), 1024, STRIDES),
        ((2, 3, 40, 64), (40 * 3 * 64, 64, 3 * 64, 1), 1024, None),
        ((2, 3, 40, 64), (0, 40 * 64, 64, 1), 1024, None),
        ((2, 0, 40, 64), (3, 3, 3, 3), 1026, None),
    ],
)
def test_what_the_fast_kernels_cannot_read_is_copied(sizes, strides, address, reason):
    assert preparation(True, 2, sizes, strides, address) == (None if reason is None else (None, reason))
    # The general kernel and the CPU read everything whose rows are contiguous.
    whole = (None, APART) if reason == APART else None
    assert preparation(True, 4, sizes, strides, 2 * address) == whole
    assert preparation(False, 2, sizes, strides, address) == whole


def test_a_head_dim_of_zero_becomes_one():
    assert preparation(False, 4, (1, 2, 3, 0), (0, 0, 0, 1), 0) == (1, None)
    assert preparation(True, 2, (1, 2, 3, 0), (0, 0, 0, 1), 0) == (8, None)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors on the CPU are prepared as on a GPU."""
    monkeypatch.setattr(_prepare, "_said", set())
    monkeypatch.setattr(
        _prepare,
        "_step",
        lambda x: preparation(True, x.element_size(), tuple(x.shape), x.stride(), x.data_ptr()),
    )


@pytest.mark.parametrize("dims", [(59, 59), (111, 111), (5, 8), (16, 3), (1, 1)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padding_changes_nothing(as_on_a_gpu, dims, dtype):
    q, k, v = draw(0, (2, 4, 9, dims[0]), (2, 2, 14, dims[0]), (2, 2, 14, dims[1]), dtype=dtype)
    for options in ({"scale": None}, {"scale": 0.3, "softcap": 2.0}):
        o, lse = torch.full((2, 4, 9, dims[1]), torch.nan, dtype=q.dtype), torch.empty(2, 4, 9)
        arguments = (options["scale"], options.get("softcap", 0.0))
        _prepare.run(q, k, v, o, lse, [14, 6], "causal", None, None, *arguments)
        check(q, k, v, o, lse, mask="causal", key_lengths=[14, 6], **options)


def oddly_laid():
    """The same tensor in another memory layout, and why it is copied."""
    (x,) = draw(0, (2, 3, 9, 16), dtype="float16")
    yield x.mT.contiguous().mT, APART
    yield torch.empty(2, 3, 9, 20, dtype=x.dtype)[..., :16].copy_(x), STRIDES
    yield torch.empty(x.numel() + 8, dtype=x.dtype)[1 : x.numel() + 1].view(x.shape).copy_(x), ADDRESS


@pytest.mark.parametrize("number", range(3))
def test_a_copy_changes_nothing_and_is_said_once(as_on_a_gpu, number):
    odd, reason = list(oddly_laid())[number]
    plain = odd.clone(memory_format=torch.contiguous_format)
    o, odd_o, lse = torch.empty_like(plain), torch.empty_like(odd), torch.empty(2, 3, 9)
    _prepare.run(plain, plain, plain, o, lse, None, "none", None, None, None, 0.0)
    with pytest.warns(UserWarning, match=f"q is copied, because {reason}"):
        _prepare.run(odd, odd, odd, odd_o, lse, None, "none", None, None, None, 0.0)
    assert torch.equal(o, odd_o)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _prepare.run(odd, odd, odd, odd_o, lse, None, "none", None, None, None, 0.0)


def test_through_the_functions_padded_tensors_have_gradients(as_on_a_gpu):
    q, k, v = (x.requires_grad_() for x in draw(0, *[(2, 3, 9, 5)] * 3, dtype="float16"))
    o = sdpa(q, k, v, is_causal=True)
    assert o.shape == q.shape and o.stride() == q.stride()
    check(q, k, v, o, mask="causal-top-left")
    o.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.filterwarnings("ignore:k is copied")
def test_can_use_and_explain_take_what_attention_takes():
    q, k, v = draw(0, (1, 2, 9, 16), (1, 2, 16, 9), (1, 2, 9, 16))
    for tensors in ((q, k.mT, v), [x.double() for x in (q, k.mT, v)], [x[..., :0] for x in (q, k.mT, v)]):
        attention(*tensors)
        assert can_use(*tensors)[0]
        assert explain(*tensors).startswith("problem")
    for bad in ((q, k, v), (q[0], q, v), (q, None, v), (q.int(), q, v)):
        with pytest.raises((flashcore_attn.ContractError, TypeError)):
            attention(*bad)
        assert not can_use(*bad)[0]
