"""Malformed arguments: every failure is a documented error, whatever was wrong with the call."""

import itertools

import flashcore_attn
import numpy as np
import pytest
import torch
from flashcore_attn import ContractError, FlashCoreError
from torch_problem import draw

#: ContractError, UnsupportedError and DeviceError are FlashCoreErrors; an argument of the wrong kind is a TypeError.
DOCUMENTED = (FlashCoreError, TypeError)

BAD_TENSORS = {
    "None": None,
    "a number": 3,
    "a string": "q",
    "a list": [[1.0, 2.0]],
    "an object": object(),
    "a type": torch.Tensor,
    "no dimension": torch.tensor(1.0),
    "one dimension": torch.ones(4),
    "three dimensions": torch.ones(2, 4, 16),
    "six dimensions": torch.ones(1, 1, 1, 2, 4, 16),
    "integers": torch.ones(1, 4, 4, 16, dtype=torch.int64),
    "bools": torch.ones(1, 4, 4, 16, dtype=torch.bool),
    "complex": torch.ones(1, 4, 4, 16, dtype=torch.complex64),
    "float8": torch.ones(1, 4, 4, 16).to(torch.float8_e4m3fn),
    "another float": torch.ones(1, 4, 4, 16, dtype=torch.float16),
    "another batch": torch.ones(3, 4, 4, 16),
    "another head_dim": torch.ones(1, 4, 4, 24),
    "three heads": torch.ones(1, 3, 3, 16),
    "nothing": torch.ones(1, 0, 0, 16),
    "empty": torch.ones(0),
    "too wide": torch.ones(1, 4, 4, 1025),
    "meta": torch.ones(1, 4, 4, 16, device="meta"),
    "sparse": torch.ones(1, 4, 4, 16).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(4, 4, 16)]),
    "numpy": np.ones((1, 4, 4, 16), np.float32),
    "numpy strings": np.array(["a", "b"]),
    "wants a gradient": torch.ones(2, 4, 16, requires_grad=True),
}
BAD_OPTIONS = {
    "dropout_p": [0.5, None, "x", [0.0], float("nan")],
    "softmax_scale": ["x", [1.0], float("nan"), float("inf"), True, 10**400, {}, torch.ones(3)],
    "scale": ["x", [1.0], float("nan"), float("inf"), 10**400, {}, torch.ones(3)],
    "softcap": ["x", None, -1.0, float("nan"), float("inf"), True, 10**400, torch.ones(3)],
    "causal": ["yes", 2, None, [True]],
    "window_size": [3, None, (1,), (1, 2, 3), ("a", "b"), (-5, 0), (0.5, 1), (10**30, 0), "ab", {1, 2}],
    "window": [3, (1,), (1, 2, 3), ("a", "b"), (-5, 0), (0.5, 1), (10**30, 0), "ab", {1, 2}],
    "layout": ["sbhd", None, 3],
    "key_lengths": [
        3, "a", [1.5], [-1], [5], [1, 1], [None], ["a"], torch.tensor([1.5]), torch.tensor([[1]]), object(),
    ],
    "out": ["x", 3, torch.ones(1), torch.ones(1, 4, 4, 8), torch.ones(1, 4, 4, 16, dtype=torch.int64)],
    "attn_mask": [
        "x", 3, [[True]], torch.ones(3, 3), torch.ones(5, 4, 4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.int64),
        torch.tensor(True), torch.ones(7, 1, 4, 4, dtype=torch.bool), torch.ones(1, 1, 1, 1, 4, 4, dtype=torch.bool),
        torch.ones(4, 4, dtype=torch.bool, device="meta"), torch.ones(0, 4, dtype=torch.bool), torch.randn(4, 4),
    ],
    "alibi_slopes": [torch.ones(4), [1.0], "x"],
    "cache_seqlens": ["x", 1.5, [1, 2], -3, 10**12, torch.tensor([99]), torch.tensor([[1]]), torch.tensor([0.5]), True],
    "cache_leftpad": ["x", 3, [1, 2], torch.tensor([99]), torch.tensor([-1]), torch.tensor([0.5])],
    "k": [None, "x", torch.ones(1), torch.ones(1, 1, 3, 16), torch.ones(1, 99, 4, 16), torch.ones(1, 1, 4, 16).int()],
    "cu_seqlens_q": [None, [0, 4], 4, torch.tensor(4), torch.tensor([0.0, 4.0]), torch.tensor([0, 9]),
                     torch.tensor([4, 0]), torch.tensor([0, 2, 4]), torch.tensor([], dtype=torch.int32)],
    "seqused_k": ["x", [4], torch.tensor([9]), torch.tensor([-1]), torch.tensor([1, 1]), torch.tensor([0.5])],
    "q_descale": [torch.ones(1), 2.0],
    "attention_chunk": [4],
    "unheard_of": [1],
}  # fmt: skip
FOUR = {"q": (1, 4, 4, 16), "k": (1, 4, 4, 16), "v": (1, 4, 4, 16)}
PACKED = {"q": (4, 4, 16), "k": (4, 4, 16), "v": (4, 4, 16)}
ENDS = {
    "cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 4]), "max_seqlen_q": 4, "max_seqlen_k": 4,
}  # fmt: skip
#: Functions with the shapes of their tensors, what else they need, and the options to malform.
FUNCTIONS = {
    "attention": (FOUR, {}, ["causal", "window", "key_lengths", "scale", "softcap", "layout", "out"]),
    "can_use": (FOUR, {}, ["causal", "window", "key_lengths", "scale", "softcap", "layout"]),
    "explain": (FOUR, {}, ["causal", "window", "key_lengths", "scale", "softcap", "layout"]),
    "scaled_dot_product_attention": (
        {"query": FOUR["q"], "key": FOUR["k"], "value": FOUR["v"]},
        {},
        ["attn_mask", "dropout_p", "scale"],
    ),
    "flash_attn_func": (
        FOUR,
        {},
        [
            "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "q_descale",
            "attention_chunk",
        ],
    ),
    "flash_attn_qkvpacked_func": ({"qkv": (1, 4, 3, 4, 16)}, {}, ["window_size", "softmax_scale", "unheard_of"]),
    "flash_attn_kvpacked_func": ({"q": FOUR["q"], "kv": (1, 4, 2, 4, 16)}, {}, ["window_size", "causal"]),
    "flash_attn_varlen_func": (PACKED, ENDS, ["window_size", "softmax_scale", "softcap", "cu_seqlens_q", "seqused_k"]),
    "flash_attn_varlen_qkvpacked_func": (
        {"qkv": (4, 3, 4, 16)},
        {"cu_seqlens": torch.tensor([0, 4]), "max_seqlen": 4},
        ["window_size"],
    ),
    "flash_attn_varlen_kvpacked_func": ({"q": (4, 4, 16), "kv": (4, 2, 4, 16)}, ENDS, ["causal"]),
    "flash_attn_with_kvcache": (
        {"q": FOUR["q"], "k_cache": FOUR["k"], "v_cache": FOUR["v"]},
        {},
        ["cache_seqlens", "cache_leftpad", "k", "window_size", "softmax_scale", "softcap", "unheard_of"],
    ),
}  # fmt: skip


def calls(name):
    """Calls with one thing wrong, and with two."""
    tensors, needed, options = FUNCTIONS[name]
    good = {key: draw(0, shape)[0] for key, shape in tensors.items()}
    for place, (what, bad) in itertools.product(tensors, BAD_TENSORS.items()):
        yield f"{place} is {what}", {**good, **needed, place: bad}
    for what, bad in BAD_TENSORS.items():
        yield f"all are {what}", {**dict.fromkeys(good, bad), **needed}
    for option in options:
        for bad in BAD_OPTIONS[option]:
            with_new = {"v": torch.ones(1, 1, 4, 16), "cache_seqlens": torch.tensor([1])} if option == "k" else {}
            yield f"{option}={bad!r}", {**good, **needed, **with_new, option: bad}
            leaf = {**good, next(iter(good)): next(iter(good.values())).clone().requires_grad_()}
            yield f"{option}={bad!r} with a gradient", {**leaf, **needed, **with_new, option: bad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_is_wrong_the_failure_is_a_documented_one(name):
    function = getattr(flashcore_attn, name)
    refused = 0
    for what, arguments in calls(name):
        try:
            function(**arguments)
        except DOCUMENTED as error:
            assert str(error), what
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}, {what}: {type(error).__name__}: {error}") from error
    assert refused > 10 or name == "can_use"


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("attention", "key_lengths"),
        ("flash_attn_varlen_func", "cu_seqlens_q"),
        ("flash_attn_varlen_func", "cu_seqlens_k"),
        ("flash_attn_varlen_func", "seqused_q"),
        ("flash_attn_varlen_func", "seqused_k"),
        ("flash_attn_with_kvcache", "cache_seqlens"),
        ("flash_attn_with_kvcache", "cache_batch_idx"),
        ("flash_attn_with_kvcache", "cache_leftpad"),
        ("flash_attn_with_kvcache", "cu_seqlens_q"),
    ],
)
def test_integers_without_memory_beside_tensors_with_some_are_refused(name, option):
    shapes, needed, _ = FUNCTIONS[name]
    given = {key: draw(0, shape)[0] for key, shape in shapes.items()}
    count = 2 if option.startswith("cu_seqlens") else 1
    if option == "cu_seqlens_q":
        given["q"] = draw(0, PACKED["q"])[0]
    without = torch.ones(count, dtype=torch.int32, device="meta")
    for wants in (False, True):
        given = {key: x.requires_grad_(wants) for key, x in given.items()}
        with pytest.raises(ContractError, match=f"{option} lies on meta, but q on cpu. Copy {option} there"):
            getattr(flashcore_attn, name)(**{**given, **needed, option: without})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda f, x: f.flash_attn_func(x[0], x[0], x[0]),
            f"{FlashCoreError.__module__}.ContractError",
            "q has 3 dimensions, possible are 4: (batch, length, heads, head_dim). Reshape it, or add the missing "
            "dimensions with size 1",
        ),
        (
            lambda f, x: f.flash_attn_func(x, x, x, window_size=3),
            "builtins.TypeError",
            "the window is 3, possible is a pair (left, right), where -1 or None is no limit",
        ),
        (
            lambda f, x: f.flash_attn_func(None, x, x),
            "builtins.TypeError",
            "q is a NoneType, possible is a torch tensor",
        ),
        (
            lambda f, x: f.scaled_dot_product_attention(x, [1.0], x),
            "builtins.TypeError",
            "key is a list, possible is a torch tensor",
        ),
        (
            lambda f, x: f.flash_attn_func(x, x, x, None, True),
            "builtins.TypeError",
            "dropout_p is a NoneType, possible is a number",
        ),
        (
            lambda f, x: f.flash_attn_func(x, x, x, 0.0, True),
            "builtins.TypeError",
            "scale is a bool, possible is a number",
        ),
    ],
)  # fmt: skip
def test_the_text_says_what_was_given_and_what_is_possible(call, error, text):
    with pytest.raises(DOCUMENTED) as raised:
        call(flashcore_attn, torch.ones(1, 4, 4, 16))
    assert f"{type(raised.value).__module__}.{type(raised.value).__qualname__}" == error
    assert str(raised.value) == text
