"""The project's corpus of cases, run through Python: every shape, mask and arrangement in memory."""

import itertools
import pathlib
import re

import flashcore_attn
import numpy as np
import pytest
import rule

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML; 3.10 does not")

FOLDER = pathlib.Path(__file__).parents[3] / "cases"
#: numpy has no bfloat16; the tests with torch cover it.
DTYPES = {"f16": "float16", "f32": "float32"}
DEFAULTS = {
    "batch": 1, "heads": 2, "len": 64, "head_dim": 64, "dtype": ["f16", "f32"], "mask": "none", "softcap": 0.0,
    "scale": None, "lse": True, "arrangement": "bhsd", "seed": 1,
}  # fmt: skip

LEFT_OUT = ("cover", "wild", "cache", "packed", "paged", "append", "rows")


def cases():
    """Every quick case with standard normal inputs, as a name and its values.

    Of a covering design, as many cases as its longest list has values. The designs of sizes, and of NaN and infinite
    elements, are left to the workbench, and caches of 8-bit floats, which numpy has not, to the tests with torch. So
    are packed sequences and pages, and few queries, whose lists say whether there are key lengths."""
    for file in sorted(FOLDER.glob("*.toml")):
        for number, case in enumerate(tomllib.loads(file.read_text())["case"]):
            inputs = case.get("inputs", ["normal"])
            if case["tier"] != "quick" or "normal" not in inputs or file.stem in LEFT_OUT:
                continue
            values = {**DEFAULTS, **case}
            fixed = {key: values.pop(key) for key in ("name", "tier", "key_lengths") if key in values}
            values.pop("inputs", None)
            covers = values.pop("cover", None) is not None
            lists = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
            longest = max(len(value) for value in lists.values())
            each = [itertools.islice(itertools.cycle(value), longest) for value in lists.values()]
            for combination in zip(*each) if covers else itertools.product(*lists.values()):
                one = dict(zip(lists, combination))
                if one["dtype"] in DTYPES:
                    yield f"{file.stem}-{number}-{fixed['name']}", {**one, **fixed}


def by_name():
    grouped: dict[str, list] = {}
    for name, case in cases():
        grouped.setdefault(name, []).append(case)
    return grouped


def arranged(x: np.ndarray, arrangement: str) -> np.ndarray:
    """The same values (batch, heads, length, head_dim) in another memory layout."""
    order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}.get(arrangement)
    if order is not None:
        return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    if arrangement == "padded":
        wide = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 8), np.nan, x.dtype)
        wide[:, :, : x.shape[2], : x.shape[3]] = x
        return wide[:, :, : x.shape[2], : x.shape[3]]
    if arrangement == "packed":
        packed = np.full((x.shape[0], x.shape[2], 3, *x.shape[1::2]), np.nan, x.dtype)
        packed[:, :, 1] = x.transpose(0, 2, 1, 3)
        return packed[:, :, 1].transpose(0, 2, 1, 3)
    assert arrangement == "bhsd"
    return x


def run(case: dict) -> None:
    generator = np.random.default_rng(case["seed"])
    dtype = DTYPES[case["dtype"]]
    heads, head_dim = case["heads"], case["head_dim"]
    len_q, len_k = case.get("len_q", case["len"]), case.get("len_k", case["len"])
    heads_kv, head_dim_v = case.get("heads_kv", heads), case.get("head_dim_v", head_dim)
    shapes = [
        (case["batch"], heads, len_q, head_dim),
        (case["batch"], heads_kv, len_k, head_dim),
        (case["batch"], heads_kv, len_k, head_dim_v),
    ]
    q, k, v = (rule.rounded(generator.standard_normal(shape).astype(np.float32), dtype) for shape in shapes)
    options = {"softcap": case["softcap"], "scale": case["scale"], "key_lengths": case.get("key_lengths")}
    mask, left, right, asked = case["mask"], None, None, {}
    if found := re.fullmatch(r"window\((\w+),(\w+)\)", mask):
        left, right = (None if side == "inf" else int(side) for side in found.groups())
        mask, asked = "window", {"window": (left, right)}
    elif mask != "none":
        asked = {"causal": True, "top_left": mask == "causal-top-left"}
    problem = rule.Problem(q, k, v, dtype, mask, left, right, **options)
    given = [arranged(x.astype(dtype), case["arrangement"]) for x in (q, k, v)]
    result = flashcore_attn.attention(*given, return_lse=case["lse"], **options, **asked)
    rule.check(problem, *(result if case["lse"] else (result,)))


@pytest.mark.skipif(not FOLDER.exists(), reason="the corpus lies in the repository, not in the wheel")
@pytest.mark.parametrize("name", by_name() if FOLDER.exists() else [])
def test_the_corpus(name):
    for case in by_name()[name]:
        try:
            run(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
