"""scaled_dot_product_attention has torch's signature and semantics."""

import inspect
import itertools

import flashcore_attn
import pytest
import rule
import torch
import torch.nn.functional as F
from flashcore_attn import ContractError, UnsupportedError, scaled_dot_product_attention
from torch_problem import DEVICES, as_problem, check, draw

SHAPES = {
    "tiny": (1, 1, 32, 64),
    "small": (1, 2, 64, 64),
    "medium": (1, 4, 128, 64),
    "mission": (1, 8, 512, 64),
    "multi_batch": (4, 8, 256, 64),
}
SEEDS = [0, 42, 12345]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_classic_cases_obey_the_rule(name, seed, device):
    q, k, v = draw(seed, *[SHAPES[name]] * 3, dtype="float16", device=device)
    for causal in (False, True):
        o = scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert o.shape == q.shape and o.dtype == q.dtype and o.device == q.device
        check(q, k, v, o, mask="causal-top-left" if causal else "none")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SHAPES)
def test_in_sum_the_classic_cases_agree_with_torch(name, device):
    """Over all seeds, types and masks: no NaN or Inf, as near to torch as both are to the truth, and repeatable."""
    dtypes = ["float16", "bfloat16"] + (["float32"] if device == "cpu" else [])
    for seed, dtype, causal in itertools.product(SEEDS, dtypes, (False, True)):
        q, k, v = draw(seed, *[SHAPES[name]] * 3, dtype=dtype, device=device)
        ours = scaled_dot_product_attention(q, k, v, is_causal=causal)
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        truth = F.scaled_dot_product_attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), is_causal=causal)
        assert torch.isfinite(ours).all()
        off, theirs_off = ((x.double().cpu() - truth).square().mean().sqrt() for x in (ours, theirs))
        assert off <= 1.5 * theirs_off, (dtype, causal, off, theirs_off)
        assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=causal), ours)


def test_the_signature_is_torchs():
    ours = inspect.signature(scaled_dot_product_attention)
    assert list(ours.parameters) == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip
    documented = F.scaled_dot_product_attention.__doc__
    for name in ours.parameters:
        assert name in documented


def agree(*args, **options) -> None:
    """Our function and torch's agree within float32."""
    ours, theirs = scaled_dot_product_attention(*args, **options), F.scaled_dot_product_attention(*args, **options)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("len_q", "len_k"), [(5, 9), (9, 5), (1, 9), (7, 7)])
def test_is_causal_is_aligned_top_left(len_q, len_k):
    agree(*draw(0, (2, 3, len_q, 16), (2, 3, len_k, 16), (2, 3, len_k, 8)), is_causal=True)


@pytest.mark.parametrize(
    "shapes",
    [
        [(5, 16), (9, 16), (9, 8)],
        [(3, 5, 16), (3, 9, 16), (3, 9, 8)],
        [(2, 3, 4, 5, 16), (2, 3, 4, 9, 16), (2, 3, 4, 9, 8)],
        [(2, 3, 5, 16), (1, 3, 9, 16), (1, 3, 9, 8)],
        [(2, 3, 5, 16), (2, 1, 9, 16), (2, 1, 9, 8)],
        [(1, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 8)],
        [(2, 3, 5, 16), (3, 9, 16), (9, 8)],
    ],
)
def test_leading_dimensions_broadcast_as_in_torch(shapes):
    agree(*draw(0, *shapes))
    agree(*draw(0, *shapes), attn_mask=torch.ones(5, 9, dtype=torch.bool).tril(4))


def test_grouped_heads_need_enable_gqa():
    tensors = draw(0, (2, 6, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    agree(*tensors, enable_gqa=True)
    with pytest.raises(ContractError, match="give enable_gqa=True"):
        scaled_dot_product_attention(*tensors)


def test_a_scale_of_its_own():
    agree(*draw(0, *[(1, 2, 9, 16)] * 3), scale=0.7)


def masks(batch, len_q, len_k):
    """Masks as people make them, which can be fused."""
    yield torch.ones(len_q, len_k, dtype=torch.bool).tril()
    yield torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)
    yield torch.arange(len_k) < torch.tensor([len_k, 3]).view(batch, 1, 1, 1)
    yield torch.arange(len_k) >= torch.tensor([0, 4]).view(batch, 1, 1, 1)
    yield torch.full((len_q, len_k), -torch.inf).triu(len_k - len_q + 1)
    yield torch.zeros(1, 1, len_q, len_k)
    band = torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)
    yield band & ~torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q - 3)
    yield torch.ones(batch, 4, len_q, len_k, dtype=torch.bool)


@pytest.mark.parametrize("number", range(8))
def test_masks_that_say_padding_causal_or_a_window_are_fused(number):
    q, k, v = draw(0, (2, 4, 9, 16), (2, 4, 12, 16), (2, 4, 12, 16))
    mask = list(masks(2, 9, 12))[number]
    agree(q, k, v, attn_mask=mask)
    if mask.dtype == torch.bool:
        agree(q, k, v, attn_mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("sizes", list(itertools.product((0, 2), (0, 3), (0, 5), (0, 9))))
def test_a_mask_without_elements_hides_nothing(sizes, dtype):
    batch, heads, len_q, len_k = sizes
    q, k, v = draw(0, (batch, heads, len_q, 16), (batch, heads, len_k, 16), (batch, heads, len_k, 16))
    see_all = torch.ones if dtype == torch.bool else torch.zeros
    for shape in {sizes, (1, *sizes[1:]), (batch, 1, *sizes[2:]), sizes[1:], sizes[2:]}:
        agree(q, k, v, attn_mask=see_all(shape, dtype=dtype))


def test_a_mask_with_grouped_heads():
    agree(*draw(0, (2, 6, 5, 16), (2, 2, 9, 16), (2, 2, 9, 16)), attn_mask=list(masks(2, 5, 9))[3], enable_gqa=True)


def test_a_bias_is_refused():
    q, k, v = draw(0, *[(1, 2, 4, 16)] * 3)
    with pytest.raises(UnsupportedError, match="a bias is not fused"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.randn(4, 4))


def test_a_mask_and_is_causal_are_refused_together():
    q, k, v = draw(0, *[(1, 2, 4, 16)] * 3)
    with pytest.raises(ValueError, match="both given"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool), is_causal=True)


def test_dropout_is_refused():
    q, k, v = draw(0, *[(1, 2, 4, 16)] * 3)
    with pytest.raises(NotImplementedError, match="dropout_p is 0.1, possible is 0"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_views_run_without_a_copy_and_the_output_lies_as_the_query_does(device):
    packed = draw(0, (2, 40, 3, 4, 64), dtype="float16", device=device)[0]
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    o = scaled_dot_product_attention(q, k, v)
    check(q, k, v, o)
    assert o.transpose(1, 2).is_contiguous()


def test_a_last_dimension_that_is_not_contiguous_is_copied():
    q, k, v = draw(0, (1, 2, 9, 16), (1, 2, 16, 9), (1, 2, 9, 16))
    agree(q, k.transpose(2, 3), v)
    expected = flashcore_attn.attention(q, k.transpose(2, 3).contiguous(), v)
    assert torch.equal(flashcore_attn.attention(q, k.transpose(2, 3), v), expected)
    out = torch.empty(1, 2, 16, 9).transpose(2, 3)
    assert torch.equal(flashcore_attn.attention(q, k.transpose(2, 3), v, out=out), expected)


@pytest.mark.parametrize("head_dim_v", [16, 8])
def test_queries_may_share_memory_among_themselves(head_dim_v):
    """As windows over a signal do, which are views."""
    signal, k, v = draw(0, (2, 4, 24), (2, 4, 12, 16), (2, 4, 12, head_dim_v))
    q = signal.unfold(2, 16, 1)
    assert q.stride()[2:] == (1, 1)
    expected = flashcore_attn.attention(q.contiguous(), k, v)
    assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
    assert torch.equal(
        flashcore_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), expected
    )
    grads = []
    for x in (q, q.contiguous()):
        o = scaled_dot_product_attention(x.requires_grad_(), k, v)
        assert torch.equal(o, expected)
        grads += torch.autograd.grad(o.square().sum(), x)
    assert torch.equal(*grads)


def test_autocast_gives_the_type_that_torch_gives():
    q, k, v = draw(0, *[(1, 2, 9, 16)] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    check(q.bfloat16(), k.bfloat16(), v.bfloat16(), ours)


@pytest.mark.parametrize("head_dim", [1, 16])
def test_a_negation_that_torch_puts_off_is_not_forgotten(head_dim):
    q, k, v = draw(0, *[(1, 2, 9, head_dim)] * 3)
    negated = torch.complex(k, q).conj().imag
    assert negated.is_neg()
    expected = scaled_dot_product_attention(-q, k, v)
    torch.testing.assert_close(scaled_dot_product_attention(negated, k, v), expected)
    torch.testing.assert_close(flashcore_attn.attention(negated, k, v), expected)


def test_parameters_and_inference_tensors_are_taken():
    q, k, v = draw(0, *[(1, 2, 9, 16)] * 3)
    expected = scaled_dot_product_attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product_attention(torch.nn.Parameter(q), k.clone(), v), expected)


def test_attention_takes_torch_tensors_of_both_layouts():
    q, k, v = draw(0, (2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 8), dtype="bfloat16")
    options = {"causal": True, "softcap": 4.0, "key_lengths": torch.tensor([12, 7])}
    o, lse = flashcore_attn.attention(q, k, v, return_lse=True, **options)
    check(q, k, v, o, lse, mask="causal", softcap=4.0, key_lengths=[12, 7])
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    other, other_lse = flashcore_attn.attention(*swapped, return_lse=True, layout="bshd", **options)
    assert torch.equal(other.transpose(1, 2), o) and torch.equal(other_lse, lse)


def test_an_output_may_be_given():
    q, k, v = draw(0, *[(1, 2, 9, 16)] * 3)
    out = torch.full_like(q, torch.nan)
    result, lse = flashcore_attn.attention(q, k, v, out=out, return_lse=True)
    assert result is out and torch.equal(out, flashcore_attn.attention(q, k, v))
    check(q, k, v, out, lse)
    with pytest.raises(UnsupportedError, match="out= has no gradient"):
        flashcore_attn.attention(q.requires_grad_(), k, v, out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_output_that_cannot_be_written_is_refused(dtype):
    q, k, v = (x.to(dtype) for x in draw(0, *[(1, 2, 9, 16)] * 3))
    for out in (torch.ones_like(q)[..., :1].expand(q.shape), torch.ones_like(q)[:, :1].expand(q.shape)):
        with pytest.raises(ContractError, match="two places of o.* share memory"):
            flashcore_attn.attention(q, k, v, out=out)
    for out in (q, k, v):
        with pytest.raises(ContractError, match="shares memory with"):
            flashcore_attn.attention(q, k, v, out=out)
    with pytest.raises(UnsupportedError, match="out= has no gradient"):
        flashcore_attn.attention(q, k, v, out=torch.empty_like(q).requires_grad_())


def test_tensors_on_different_devices_are_refused():
    q, k, v = draw(0, *[(1, 2, 9, 16)] * 3)
    with pytest.raises(ContractError, match="key lies on meta, but query on cpu. Copy key there"):
        scaled_dot_product_attention(q, k.to("meta"), v)


def test_info_says_how_tensors_are_read():
    assert flashcore_attn.info()["torch"]["version"] == torch.__version__


def test_tensors_are_read_without_the_exchange_table_as_well(monkeypatch):
    """As with torch before 2.10: read through the tensor's attributes, with and without a gradient."""

    class Old:
        """A tensor that only shows its attributes."""

        def __init__(self, tensor):
            self.tensor = tensor

        def __getattr__(self, name):
            if name.startswith("__dlpack"):
                raise AttributeError(name)
            return getattr(self.tensor, name)

    q, k, v = draw(0, (2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 16), dtype="bfloat16")
    out = torch.empty_like(q)
    flashcore_attn._native.run(
        Old(q.requires_grad_()), Old(k), Old(v), Old(out), None, None, "none", None, None, None, 0.0, "bhsd"
    )
    with torch.no_grad():
        assert torch.equal(out, flashcore_attn.attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({}, {}),
        ({"causal": True, "softcap": 3.0}, {"mask": "causal", "softcap": 3.0}),
        ({"window": (3, 1), "scale": 0.3}, {"mask": "window", "left": 3, "right": 1, "scale": 0.3}),
        ({"key_lengths": [12, 0], "causal": True}, {"mask": "causal", "key_lengths": [12, 0]}),
    ],
)
def test_float64_is_computed_in_float64(options, meant):
    q, k, v = (x.double() + 1e-9 for x in draw(0, (2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 8)))
    o, lse = flashcore_attn.attention(q, k, v, return_lse=True, **options)
    assert o.dtype == lse.dtype == torch.float64
    truth, true_lse = rule.attention(rule.Problem(q.numpy(), k.numpy(), v.numpy(), **meant))
    torch.testing.assert_close(o.numpy(), truth, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(lse.numpy(), true_lse, atol=1e-13, rtol=1e-12)


def test_float64_breaks_the_same_contract():
    q, k, v = (x.double() for x in draw(0, *[(1, 2, 4, 16)] * 3))
    for bad in ({"softcap": -1.0}, {"scale": float("nan")}, {"key_lengths": [5]}):
        with pytest.raises(ContractError):
            flashcore_attn.attention(q, k, v, **bad)
    with pytest.raises(ContractError, match="v has length 3"):
        flashcore_attn.attention(q, k, v[:, :, :3])


@pytest.mark.parametrize("scale", [-0.7, -1e-3, 0.0, -0.0, 1])
def test_a_scale_of_zero_and_below_is_torchs(scale):
    agree(*draw(0, (2, 4, 5, 16), (2, 4, 9, 16), (2, 4, 9, 16)), scale=scale)
    agree(*draw(0, (2, 4, 5, 16), (2, 4, 9, 16), (2, 4, 9, 16)), scale=scale, attn_mask=list(masks(2, 5, 9))[3])


@pytest.mark.parametrize("dims", [(0, 8), (0, 0), (4, 0)])
def test_a_head_dim_of_zero_is_torchs(dims):
    shapes = (2, 4, 5, dims[0]), (2, 4, 9, dims[0]), (2, 4, 9, dims[1])
    agree(*draw(0, *shapes))
    agree(*draw(0, *shapes), is_causal=True)
    ours, theirs = (
        torch.autograd.grad(f(*leaves).sum(), leaves[2])[0]
        for f in (scaled_dot_product_attention, F.scaled_dot_product_attention)
        for leaves in [[x.requires_grad_() for x in draw(0, *shapes)]]
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "shapes",
    [
        [(6, 5, 16), (2, 9, 16), (2, 9, 8)],
        [(3, 2, 6, 5, 16), (3, 2, 2, 9, 16), (3, 2, 2, 9, 8)],
        [(3, 2, 6, 5, 16), (1, 2, 3, 9, 16), (3, 1, 3, 9, 8)],
        [(2, 6, 5, 16), (2, 2, 9, 16), (2, 3, 9, 8)],
        [(2, 6, 5, 16), (2, 9, 16), (1, 9, 8)],
        [(1, 6, 5, 16), (2, 2, 9, 16), (2, 2, 9, 8)],
    ],
)
def test_grouped_heads_in_any_number_of_dimensions(shapes):
    tensors = draw(0, *shapes)
    q, k, v = tensors
    # torch's function takes some of these only with the heads repeated first.
    repeated = [x.repeat_interleave(q.size(-3) // x.size(-3), -3) for x in (k, v)]
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(5, 9, dtype=torch.bool).tril(2)}):
        ours = scaled_dot_product_attention(*tensors, enable_gqa=True, **options)
        theirs = F.scaled_dot_product_attention(q, *repeated, **options)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_mask_of_low_numbers_hides_as_in_torch(low):
    q, k, v = draw(0, (2, 4, 9, 16), (2, 4, 12, 16), (2, 4, 12, 16))
    for mask in masks(2, 9, 12):
        if mask.dtype == torch.bool:
            added = torch.zeros(mask.shape).masked_fill(~mask, low)
            agree(q, k, v, attn_mask=added)
            exact = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            assert torch.equal(scaled_dot_product_attention(q, k, v, attn_mask=added), exact)


def test_a_low_number_that_scores_could_reach_is_refused():
    q, k, v = draw(0, *[(1, 2, 9, 16)] * 3)
    mask = torch.zeros(9, 9).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -1e4)
    agree(q, k, v, attn_mask=mask)
    for factor in (1e4, torch.nan, torch.inf):
        with pytest.raises(UnsupportedError, match="it adds -10000 to a score, but only"):
            scaled_dot_product_attention(q * factor, k, v, attn_mask=mask)
    # With -inf it does not matter.
    scaled_dot_product_attention(q * 1e4, k, v, attn_mask=mask.masked_fill(mask < 0, -torch.inf))


def test_low_numbers_alone_in_a_row_are_refused():
    q, k, v = draw(0, *[(1, 2, 4, 16)] * 3)
    with pytest.raises(UnsupportedError, match="query 0 sees no key"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.full((4, 4), -1e4))


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_meta_tensors_give_the_shape_and_strides_of_real_ones(enable_gqa):
    real = draw(0, (2, 9, 6, 16), (2, 12, 2 if enable_gqa else 6, 16), (2, 12, 2 if enable_gqa else 6, 8))
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(9, 12, dtype=torch.bool)}):
        options["enable_gqa"] = enable_gqa
        o = scaled_dot_product_attention(*(x.transpose(1, 2) for x in real), **options)
        if "attn_mask" in options:
            options["attn_mask"] = options["attn_mask"].to("meta")
        meta = scaled_dot_product_attention(*(x.to("meta").transpose(1, 2) for x in real), **options)
        assert meta.device.type == "meta"
        assert (meta.shape, meta.stride(), meta.dtype) == (o.shape, o.stride(), o.dtype)
    q, k, v = (x.to("meta") for x in real)
    o, lse, _ = flashcore_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert o.shape == (2, 9, 6, 8) and lse.shape == (2, 6, 9) and o.device == lse.device == q.device
    with pytest.raises(ContractError, match="v has length 3, but k asks for 12"):
        flashcore_attn.flash_attn_func(q, k, v[:, :3])


def test_problem_reads_back_what_was_drawn():
    q, k, v = draw(3, *[(1, 1, 2, 4)] * 3, dtype="bfloat16")
    assert as_problem(q, k, v).dtype == "bfloat16"
