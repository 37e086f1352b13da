"""Arrays that become 8-bit floats within the call, against attention of the arrays as they are."""

from __future__ import annotations

import flashcore_attn
import numpy as np
import pytest
from flashcore_attn import ContractError


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    q = random.standard_normal((2, 4, 30, 32)).astype(np.float16)
    k, v = (random.standard_normal((2, 2, 50, 32)).astype(np.float16) for _ in range(2))
    k[..., 3] += 8
    return q, k, v


@pytest.mark.parametrize("ways", [{}, {"smooth": True}, {"rotate": 7}, {"smooth": True, "rotate": 0}])
def test_the_result_is_near_that_of_the_arrays_as_they_are(ways: dict) -> None:
    q, k, v = arrays()
    exact, lse_exact = flashcore_attn.attention(q, k, v, causal=True, return_lse=True)
    o, lse = flashcore_attn.attention(q, k, v, causal=True, return_lse=True, precision="fp8", **ways)
    assert o.dtype == np.float16
    off = np.abs(o.astype(np.float32) - exact.astype(np.float32)).max()
    assert 0 < off < 0.2 * np.abs(exact).max()
    assert np.abs(lse - lse_exact).max() < 0.5


def test_smoothing_helps_where_a_channel_is_always_large() -> None:
    q, k, v = arrays()
    k[..., 5] += 60
    exact = flashcore_attn.attention(q, k, v).astype(np.float64)

    def off(**ways: object) -> float:
        o = flashcore_attn.attention(q, k, v, precision="fp8", **ways)
        return float(np.sqrt(((o.astype(np.float64) - exact) ** 2).mean()))

    assert off(smooth=True) < 0.7 * off()


def test_explain_says_which_kernels_quantise() -> None:
    q, k, v = arrays()
    said = flashcore_attn.explain(q, k, v, target="sm_90a", precision="fp8", smooth=True, rotate=7)
    assert "f16 quantise=smooth,rotate:7" in said
    assert said.count("kernel    quantize") == 3 and "kernel    sm90_fwd" in said
    assert "quantise" in flashcore_attn.explain(q, k, v, precision="fp8")
    fine, _ = flashcore_attn.can_use(q, k, v, precision="fp8")
    assert fine


def test_what_cannot_be_is_refused() -> None:
    q, k, v = arrays()
    for wrong in (
        {"precision": "int8"},
        {"smooth": True},
        {"rotate": 1},
        {"precision": "fp8", "rotate": -1},
        {"precision": "fp8", "smooth": True, "softcap": 3.0},
    ):
        with pytest.raises(ContractError):
            flashcore_attn.attention(q, k, v, **wrong)
    for wrong in ({"smooth": 1}, {"rotate": True}):
        with pytest.raises(TypeError):
            flashcore_attn.attention(q, k, v, precision="fp8", **wrong)
