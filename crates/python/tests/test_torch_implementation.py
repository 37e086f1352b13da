"""FlashCore behind torch's own scaled_dot_product_attention, once the user activates it."""

import pytest
import torch
import torch.nn.functional as F
from flashcore_attn import register_flash_attention_impl
from flashcore_attn import scaled_dot_product_attention as sdpa
from torch_problem import draw

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash attention implementations", allow_module_level=True)

# Long enough for torch's own flash kernel, whose bits differ from ours.
INPUTS = [(1, 8, 256, 64)] * 3


@pytest.fixture
def activated():
    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def test_registering_activates_nothing():
    q, k, v = draw(0, *INPUTS)
    before = F.scaled_dot_product_attention(q, k, v)
    register_flash_attention_impl()
    assert "FlashCore" in torch.nn.attention.list_flash_attention_impls()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)
    assert not torch.equal(sdpa(q, k, v), before), "the bits tell the two apart"


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_function_is_computed_by_flashcore(activated, causal):
    q, k, v = draw(0, *INPUTS)
    ours = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.equal(ours, sdpa(q, k, v, is_causal=causal))


def test_a_mask_that_is_fused_comes_to_flashcore(activated):
    q, k, v = draw(0, *INPUTS)
    mask = torch.ones(256, 256, dtype=torch.bool).tril()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask), sdpa(q, k, v, mask))


def test_what_flashcore_does_not_take_goes_to_torch():
    q, k, v = draw(0, *INPUTS)
    bias = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    calls = {
        "bias": lambda: F.scaled_dot_product_attention(q, k, v, bias),
        "float64": lambda: F.scaled_dot_product_attention(q.double(), k.double(), v.double()),
    }
    expected = {name: call() for name, call in calls.items()}
    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    try:
        for name, call in calls.items():
            assert torch.equal(call(), expected[name]), name
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_is_torchs(activated, dtype):
    q, k, v = (x.requires_grad_() for x in draw(0, *INPUTS, dtype=dtype))
    (weights,) = draw(1, INPUTS[0])
    ours = torch.autograd.grad((F.scaled_dot_product_attention(q, k, v, is_causal=True) * weights).sum(), (q, k, v))
    torch.nn.attention.restore_flash_attention_impl()
    theirs = torch.autograd.grad((F.scaled_dot_product_attention(q, k, v, is_causal=True) * weights).sum(), (q, k, v))
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    tolerance = {"float32": 1e-5, "bfloat16": 5e-2}[dtype]
    for ours, theirs in zip(ours, theirs):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_restoring_gives_torch_its_kernels_back(activated):
    q, k, v = draw(0, *INPUTS)
    active = F.scaled_dot_product_attention(q, k, v)
    torch.nn.attention.restore_flash_attention_impl()
    restored = F.scaled_dot_product_attention(q, k, v)
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    assert not torch.equal(active, restored)
