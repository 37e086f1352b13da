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


def gradients(function, mask=None, dtype="float32", **options):
    q, k, v = (x.requires_grad_() for x in draw(0, *INPUTS, dtype=dtype))
    (weights,) = draw(1, INPUTS[0])
    return torch.autograd.grad((function(q, k, v, mask, **options) * weights).sum(), (q, k, v))


CAUSAL = torch.ones(256, 256, dtype=torch.bool).tril()
PADDED = (torch.arange(256) >= 31).expand(1, 1, 256, 256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": CAUSAL}, {"mask": PADDED, "scale": 0.1}])
def test_gradients_of_torchs_function_are_flashcores(activated, dtype, options):
    ours, same = (gradients(f, dtype=dtype, **options) for f in (F.scaled_dot_product_attention, sdpa))
    assert all(torch.equal(x, y) for x, y in zip(ours, same))
    torch.nn.attention.restore_flash_attention_impl()
    theirs = gradients(F.scaled_dot_product_attention, dtype=dtype, **options)
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    assert not torch.equal(ours[0], theirs[0]), "the bits tell the two apart"
    tolerance = {"float32": 1e-5, "bfloat16": 5e-2}[dtype]
    for ours, theirs in zip(ours, theirs):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["bias", "float64"])
def test_gradients_that_flashcore_does_not_take_are_torchs(kind):
    bias = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) if kind == "bias" else None

    def found():
        q, k, v = (x.requires_grad_() for x in draw(0, *[(1, 2, 256, 16)] * 3))
        given = (x.double() for x in (q, k, v)) if kind == "float64" else (q, k, v)
        return torch.autograd.grad(F.scaled_dot_product_attention(*given, bias).square().sum(), (q, k, v))

    expected = found()
    register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    try:
        assert all(torch.equal(x, y) for x, y in zip(found(), expected))
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_restoring_gives_torch_its_kernels_back(activated):
    q, k, v = draw(0, *INPUTS)
    active = F.scaled_dot_product_attention(q, k, v)
    torch.nn.attention.restore_flash_attention_impl()
    restored = F.scaled_dot_product_attention(q, k, v)
    torch.nn.attention.activate_flash_attention_impl("FlashCore")
    assert not torch.equal(active, restored)
