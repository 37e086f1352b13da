"""The rule that judges the other tests refuses what is wrong."""

import numpy as np
import pytest
import rule


def faults(p: rule.Problem):
    """Results that are wrong in ways that kernels usually are."""
    o, _ = rule.attention(p)
    half = p.k.shape[2] // 2
    drop = rule.Problem(p.q, p.k[:, :, :-8], p.v[:, :, :-8], p.dtype)
    yield "zeros", np.zeros_like(o)
    yield "uniform attention", np.broadcast_to(p.v.mean(2, keepdims=True), o.shape)
    yield "a dropped tile", rule.attention(drop)[0]
    yield "a scale that is off by 5 %", rule.attention(rule.Problem(p.q, p.k, p.v, p.dtype, scale=p.factor * 1.05))[0]
    yield "causal where it should not be", rule.attention(rule.Problem(p.q, p.k, p.v, p.dtype, "causal"))[0]
    yield "k and v swapped", rule.attention(rule.Problem(p.q, p.v, p.k, p.dtype))[0]
    yield "heads swapped", o[:, ::-1]
    twice = np.concatenate([p.k[:, :, :half]] * 2, 2), np.concatenate([p.v[:, :, :half]] * 2, 2)
    yield "a tile read twice", rule.attention(rule.Problem(p.q, *twice, p.dtype))[0]
    nan = o.copy()
    nan[0, 0, 3, 5] = np.nan
    yield "one NaN", nan
    stale = o.copy()
    stale[0, 1, 17] = 0
    yield "one row not written", stale


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_faults_are_refused_and_a_rounded_truth_is_not(generator, dtype):
    q, k, v = (rule.rounded(generator.standard_normal((1, 2, 64, 32)).astype(np.float32), dtype) for _ in range(3))
    problem = rule.Problem(q, k, v, dtype)
    o, lse = rule.attention(problem)
    rule.check(problem, rule.rounded(o.astype(np.float32), dtype), lse)
    for name, wrong in faults(problem):
        with pytest.raises(AssertionError):
            rule.check(problem, wrong)
            pytest.fail(f"{name} passed")
    with pytest.raises(AssertionError, match="lse"):
        rule.check(problem, o, lse + 1e-3)
