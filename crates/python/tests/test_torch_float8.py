"""Tensors of float8_e4m3fn with descales, against attention in float64 of what they stand for."""

from __future__ import annotations

import flashcore_attn
import pytest
import torch
from flashcore_attn import ContractError, flash_attn_func

FLOAT8 = torch.float8_e4m3fn
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def stored(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(FLOAT8)


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: list[torch.Tensor], causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.size(1) // k.size(1)
    of_q, of_k, of_v = (x.double()[:, :, None, None] for x in descales)
    q = q.double() * of_q.repeat_interleave(group, 1)
    k, v = ((x.double() * by).repeat_interleave(group, 1) for x, by in ((k, of_k), (v, of_v)))
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.size(2) - q.size(2))
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_stored_numbers_are_multiplied_by_their_descales(causal: bool, layout: str) -> None:
    q, k, v = stored(2, 4, 30, 32, seed=1), stored(2, 2, 50, 32, seed=2), stored(2, 2, 50, 32, seed=3)
    descales = [torch.tensor([[3.0, 1 / 7], [0.5, 1.75]]).roll(turn, 1) for turn in range(3)]
    expected, lse_expected = truth(q, k, v, descales, causal)
    given = (
        (q, k, v)
        if layout == "bhsd"
        else tuple(x.view(torch.uint8).transpose(1, 2).contiguous().view(FLOAT8) for x in (q, k, v))
    )
    names = ("q_descale", "k_descale", "v_descale")
    o, lse = flashcore_attn.attention(
        *given, causal=causal, layout=layout, return_lse=True, **dict(zip(names, descales, strict=True))
    )
    assert o.dtype == torch.bfloat16
    o = o if layout == "bhsd" else o.transpose(1, 2)
    assert (o.double() - expected).abs().max() < 0.004 * expected.abs().max()
    assert (lse.double() - lse_expected).abs().max() < 1e-4


def test_a_descale_may_be_a_number_or_absent() -> None:
    q = stored(1, 2, 8, 16, seed=4)
    plain = flashcore_attn.attention(q, q, q)
    assert torch.equal(flashcore_attn.attention(q, q, q, q_descale=1.0, k_descale=torch.ones(())), plain)
    expanded = torch.tensor(2.0).expand(1, 2)
    assert torch.equal(flashcore_attn.attention(q, q, q, v_descale=expanded), 2 * plain)
    half = torch.empty(1, 2, 8, 16, dtype=torch.float16)
    assert flashcore_attn.attention(q, q, q, out=half) is half
    assert torch.allclose(half.float(), plain.float(), atol=0.01)


def test_flash_attn_takes_float8_as_flash_attn_3_does() -> None:
    q = stored(1, 8, 2, 16, seed=5)
    twos = torch.full((1, 2), 2.0)
    o = flash_attn_func(q, q, q, causal=True, v_descale=twos)
    expected = flashcore_attn.attention(q, q, q, causal=True, layout="bshd", v_descale=twos)
    assert torch.equal(o, expected)


def test_it_can_be_used_and_explained() -> None:
    q = stored(1, 2, 8, 16, seed=7)
    assert flashcore_attn.can_use(q, q, q)[0]
    assert "f8" in flashcore_attn.explain(q, q, q, target="sm_90a")


def test_what_cannot_be_is_refused() -> None:
    q = stored(1, 2, 8, 16, seed=6)
    wide = torch.zeros(1, 2, 8, 16)
    for problem, kind, options in [
        ((q, wide, wide), ContractError, {}),
        ((wide, wide, wide), ContractError, {"q_descale": 2.0}),
        ((q, q, q), ContractError, {"k_descale": torch.ones(1, 3)}),
        ((q, q, q), ContractError, {"k_descale": torch.ones(1, 2, dtype=torch.float64)}),
        ((q, q, q), ContractError, {"v_descale": 0.0}),
        ((q, q, q), ContractError, {"out": torch.empty(1, 2, 8, 16)}),
        ((q, q, q), ContractError, {"out": torch.empty(1, 2, 8, 16, dtype=torch.float16, device="meta")}),
        ((wide, wide, wide), ContractError, {"precision": "fp8", "out": torch.empty(wide.shape, device="meta")}),
        ((q, q, q), TypeError, {"v_descale": "2"}),
    ]:
        with pytest.raises(kind):
            flashcore_attn.attention(*problem, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_wider_tensors_become_float8_within_the_call(dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(2, 4, 30, 32, generator=generator).to(dtype)
    k, v = (torch.randn(2, 2, 50, 32, generator=generator).to(dtype) for _ in range(2))
    given = (q, k, v) if layout == "bhsd" else tuple(x.transpose(1, 2) for x in (q, k, v))
    exact = flashcore_attn.attention(*given, layout=layout).double()
    o, lse = flashcore_attn.attention(
        *given, layout=layout, precision="fp8", smooth=True, rotate=3, key_lengths=[50, 50], return_lse=True
    )
    assert o.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
    assert (o.double() - exact).abs().max() < 0.1 * exact.abs().max()
    assert lse.shape == (2, 4, 30)
    with pytest.raises(flashcore_attn.UnsupportedError):
        flashcore_attn.attention(q.requires_grad_(), k, v, precision="fp8")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", FLOAT8), *((device, torch.float16) for device in DEVICES)])
def test_blocks_of_keys_may_have_descales_of_their_own(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(8)).to(dtype)
    k, v = stored(2, 2, 50, 32, seed=2), stored(2, 2, 50, 32, seed=3)
    of_k, of_v = (torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(seed)) + 0.5 for seed in (4, 5))
    real_k, real_v = (x.float() * of.repeat_interleave(16, 2)[:, :, :50, None] for x, of in ((k, of_k), (v, of_v)))
    ones = [torch.ones(2, 2)] * 3
    expected, _ = truth(q, real_k, real_v, ones, causal=False)
    q, k, v, of_k, of_v = (x.to(device) for x in (q, k, v, of_k, of_v))
    o = flashcore_attn.attention(q, k, v, k_descale=of_k, v_descale=of_v, block=16)
    assert (o.cpu().double() - expected).abs().max() < 0.006 * expected.abs().max()
    one = flashcore_attn.attention(q, k, v, v_descale=0.5, block=16)
    assert torch.allclose(one.float(), flashcore_attn.attention(q, k, v, v_descale=0.5).float(), atol=1e-2)
    with pytest.raises(ContractError):
        flashcore_attn.attention(q, k, v, k_descale=of_k[:, :, :3], block=16)
    with pytest.raises(ContractError):
        flashcore_attn.attention(q, k, v, block=0)


def test_wider_tensors_become_float8_by_blocks_of_keys() -> None:
    q, k, v = (torch.randn(1, 2, 70, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    v[:, :, :16] *= 30
    exact = flashcore_attn.attention(q, k, v).double()
    o = flashcore_attn.attention(q, k, v, precision="fp8", block=16).double()
    assert 0 < (o - exact).abs().max() < 0.1 * exact.abs().max()
    with pytest.raises(ContractError):
        flashcore_attn.attention(q, k, v, block=16)


@pytest.mark.parametrize("device", DEVICES)
def test_lse_of_smoothed_keys_is_that_of_the_keys_as_they_were(device: str) -> None:
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(2, 2, 70, 64, generator=generator).bfloat16().to(device) for _ in range(3))
    k += 1.5
    _, exact = flashcore_attn.attention(q, k, v, return_lse=True)
    _, lse = flashcore_attn.attention(q, k, v, return_lse=True, precision="fp8", smooth=True, rotate=1)
    assert (lse - exact).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cache_of_float8_goes_with_wider_queries(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(8)).to(dtype)
    k, v = stored(2, 2, 50, 32, seed=2), stored(2, 2, 50, 32, seed=3)
    descales = [torch.ones(2, 2), torch.tensor([[3.0, 1 / 7], [0.5, 1.75]]), torch.full((2, 2), 0.3)]
    expected, lse_expected = truth(q, k, v, descales, causal=False)
    o, lse = flashcore_attn.attention(q, k, v, k_descale=descales[1], v_descale=0.3, return_lse=True)
    assert o.dtype == dtype
    assert (o.double() - expected).abs().max() < 0.005 * expected.abs().max()
    assert (lse.double() - lse_expected).abs().max() < 1e-4
    with pytest.raises(ContractError, match="q_descale"):
        flashcore_attn.attention(q, k, v, q_descale=2.0)
    with pytest.raises(ContractError, match="k and v share one dtype"):
        flashcore_attn.attention(q, k, q[:, :2])
    with pytest.raises(ContractError):
        flashcore_attn.attention(q.float(), k, v)
