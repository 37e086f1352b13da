"""The project's tolerance rule, in numpy: a result may be at most twice as wrong as plain attention of the same
precision, compared with attention in float64; by row, by maximum and by RMS. lse has a bound of its own.

The floors, for rows where plain attention is exact by luck, follow from what rounding can do to a row: see
crates/judge/src/rule.rs, whose formulas these are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to a type, as float32."""
    if dtype == "float32":
        return x.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isfinite(x), bits.astype(np.uint32).view(np.float32), x)


def visible(
    len_q: int, len_k: int, mask: str = "none", left: int | None = None, right: int | None = None
) -> np.ndarray:  # fmt: skip
    """Which keys a query sees, (queries, keys)."""
    row, key = np.arange(len_q)[:, None], np.arange(len_k)[None, :]
    place = row if mask == "causal-top-left" else row + len_k - len_q
    if mask in ("causal", "causal-top-left"):
        left, right = None, 0
    seen = np.ones((len_q, len_k), bool)
    if mask != "none":
        if left is not None:
            seen &= key >= place - left
        if right is not None:
            seen &= key <= place + right
    return seen


@dataclass
class Problem:
    """q, k, v as float32 arrays (batch, heads, length, head_dim) that hold values of `dtype`, and the options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dtype: str = "float32"
    mask: str = "none"
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    key_lengths: list[int] | None = None
    #: Which keys each query sees, (batch, heads or 1, queries, keys), instead of what the options say.
    seen: np.ndarray | None = None

    def parts(self):
        """Each head's q, k, v and what its queries see."""
        batch, heads, len_q, _ = self.q.shape
        group = heads // max(self.k.shape[1], 1)
        for b in range(batch):
            length = self.k.shape[2] if self.key_lengths is None else self.key_lengths[b]
            for h in range(heads):
                keys, values = self.k[b, h // group], self.v[b, h // group]
                if self.seen is not None:
                    seen = self.seen[b, h if self.seen.shape[1] > 1 else 0]
                else:
                    seen = visible(len_q, length, self.mask, self.left, self.right)
                    keys, values = keys[:length], values[:length]
                yield (b, h), self.q[b, h], keys, values, seen

    @property
    def factor(self) -> float:
        return self.q.shape[3] ** -0.5 if self.scale is None else self.scale


def attention(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Attention and lse in float64."""
    o = np.zeros((*problem.q.shape[:3], problem.v.shape[3]))
    lse = np.full(problem.q.shape[:3], -np.inf)
    for at, q, k, v, seen in problem.parts():
        rows = seen.any(-1)
        if not rows.any():
            continue
        scores = _scores(problem, q.astype(np.float64), k.astype(np.float64))
        scores = np.where(seen, scores, -np.inf)[rows]
        most = scores.max(-1, keepdims=True)
        weights = np.exp(scores - most)
        total = weights.sum(-1, keepdims=True)
        o[at][rows] = weights / total @ v.astype(np.float64)
        lse[at][rows] = (most + np.log(total))[:, 0]
    return o, lse


def _scores(problem: Problem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = q @ k.T * problem.factor
    return problem.softcap * np.tanh(scores / problem.softcap) if problem.softcap else scores


def plain(problem: Problem) -> np.ndarray:
    """Attention as an unfused framework computes it: float32 sums, everything between rounded to the type."""
    o = np.zeros((*problem.q.shape[:3], problem.v.shape[3]))
    keep = lambda x: rounded(x, problem.dtype)
    for at, q, k, v, seen in problem.parts():
        rows = seen.any(-1)
        if not rows.any():
            continue
        scores = keep(q @ k.T * np.float32(problem.factor))
        if problem.softcap:
            cap = np.float32(problem.softcap)
            scores = keep(cap * keep(np.tanh(keep(scores / cap))))
        scores = np.where(seen, scores, -np.inf)[rows]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o[at][rows] = keep(keep(weights / weights.sum(-1, keepdims=True)) @ v)
    return o


def _floors(problem: Problem, o: np.ndarray, lse: np.ndarray):
    """(luck, habit, lse) of each row."""
    luck, habit, of_lse = (np.zeros(lse.shape) for _ in range(3))
    epsilon, single = EPSILON[problem.dtype], EPSILON["float32"]
    head_dim = problem.q.shape[3]
    for at, q, k, v, seen in problem.parts():
        rows = seen.any(-1)
        if not rows.any():
            continue
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        with np.errstate(under="ignore"):
            p = np.exp(np.where(seen, _scores(problem, q, k), -np.inf)[rows] - lse[at][rows][:, None])
        size = np.abs(q)[rows] @ np.abs(k).T * problem.factor
        weighted = p * size
        magnitude = (p @ np.abs(v)).max(-1)
        # Σ p·a·|v − o|, one column at a time: all of it would be queries × keys × columns.
        sensitivity = np.zeros(rows.sum())
        for column in range(v.shape[1]):
            gap = np.abs(v[None, :, column] - o[at][rows][:, column, None])
            sensitivity = np.maximum(sensitivity, (weighted * gap).sum(-1))
        keys = seen[rows].sum(-1)
        luck[at][rows] = epsilon * magnitude + single * (head_dim**0.5 * sensitivity + keys**0.5 * magnitude)
        habit[at][rows] = single * (4 * magnitude + sensitivity) + SMALLEST[problem.dtype] + keys * 2.0**-149
        scores = weighted.sum(-1)
        of_lse[at][rows] = single * ((head_dim**0.5 + 4) * scores + 4 + keys**0.5 + np.abs(lse[at][rows]))
    return luck, habit, of_lse


def check(problem: Problem, o, lse=None) -> None:
    """Raises unless a result (batch, heads, length, head_dim_v) obeys the rule."""
    truth, true_lse = attention(problem)
    o = np.asarray(o, dtype=np.float64)
    assert o.shape == truth.shape, f"o has shape {o.shape}, expected is {truth.shape}"
    assert np.isfinite(o).all(), "o has NaN or Inf"
    if o.size == 0:
        return
    luck, habit, of_lse = _floors(problem, truth, true_lse)
    ours, theirs = np.abs(o - truth), np.abs(plain(problem) - truth)
    by_row = 2 * theirs.max(-1) + luck + habit
    worst = np.unravel_index((ours.max(-1) - by_row).argmax(), by_row.shape)
    assert (ours.max(-1) <= by_row).all(), f"row {worst} is off by {ours.max(-1)[worst]}, allowed is {by_row[worst]}"
    squares = (luck / max(luck.max(), 1e-300)) ** 2
    carriers = max(squares.sum() ** 2 / max((squares**2).sum(), 1e-300), 1.0)
    for name, over in (("maximum", np.max), ("RMS", lambda x: np.sqrt(np.mean(x**2)))):
        allowed = 2 * over(theirs) + over(luck) / carriers**0.5 + over(habit)
        assert over(ours) <= allowed, f"{name} of the error is {over(ours)}, allowed is {allowed}"
    if lse is not None:
        lse = np.asarray(lse, dtype=np.float64)
        assert lse.shape == true_lse.shape
        empty = np.isinf(true_lse)
        assert (lse[empty] == -np.inf).all(), "a query without keys has lse = -inf"
        errors = np.abs(np.where(empty, 0, lse) - np.where(empty, 0, true_lse))
        # Plain attention's lse is as exact as float32 sums are, which the floor covers.
        assert (errors <= 3 * of_lse).all(), f"lse is off by {errors.max()}"
