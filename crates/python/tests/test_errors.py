"""What breaks the contract is an exception that says what was given, what is possible and what to do."""

import flashcore_attn
import numpy as np
import pytest
from flashcore_attn import ContractError, DeviceError, FlashCoreError, UnsupportedError


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


X = ones(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: flashcore_attn.attention(X[0], X, X),
            "q has 3 dimensions, attention takes 4: (batch, heads, length, head_dim). Reshape it, or add the missing "
            "dimensions with size 1",
        ),
        (
            lambda: flashcore_attn.attention(X, X.astype(np.float16), X),
            "k is f16, but f32 is needed: q, k, v and o share one dtype with their gradients (o of f8 is f16 or bf16), "
            "lse and descales are f32, and starts, pages and positions are i32. Convert k to f32",
        ),
        (
            lambda: flashcore_attn.attention(X, X, ones(1, 2, 5, 8)),
            "v has length 5, but k asks for 4. Give both the same length",
        ),
        (
            lambda: flashcore_attn.attention(ones(1, 3, 4, 8), X, X),
            "q has 3 heads and k has 2: every kv head serves the same number of query heads, so q's heads must be a "
            "multiple of k's, and k needs at least one where q has any",
        ),
        (
            lambda: flashcore_attn.attention(X, X, ones(1, 2, 4, 16)[..., ::2]),
            "v has stride 2 in its last dimension, possible is 1: the elements of a head must lie side by side. Make "
            "v contiguous in head_dim",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, out=X),
            "o shares memory with q; attention reads its inputs while it writes. Give o memory of its own",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, softcap=-1.0),
            "softcap is -1, possible is a finite number above 0, or none (0 turns it off)",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, scale=float("nan")),
            "scale is NaN, possible is a finite number above 0 (the default is 1/√head_dim). For a negative scale, "
            "negate q",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, key_lengths=[4, 4]),
            "2 key lengths were given for a batch of 1. Give one per batch entry",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, key_lengths=[5]),
            "the key length of batch entry 0 is 5, but k has length 4. Give at most 4",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, key_lengths=[-1]),
            "the key length of batch entry 0 is -1, possible are integers from 0 on",
        ),
        (
            lambda: flashcore_attn.attention(X.astype(np.float64), X, X),
            "q is float64, possible are float16, bfloat16 and float32. Convert q to one of them",
        ),
        (
            lambda: flashcore_attn.attention(X, X.astype(np.int32), X),
            "k is int32, possible are float16, bfloat16 and float32. Convert k to one of them",
        ),
        (
            lambda: flashcore_attn.attention(X, X[:, :, ::-1], X),
            "k has stride -8; strides must not be negative. Copy k, for example with numpy.ascontiguousarray",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, layout="sbhd"),
            "layout is 'sbhd', possible are 'bhsd' (batch, heads, length, head_dim) and 'bshd' (batch, length, heads, "
            "head_dim)",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, top_left=True),
            "top_left is how causal is aligned. Give causal=True with it",
        ),
        (
            lambda: flashcore_attn.attention(X, X, X, window=(-2, 0)),
            "a side of the window is -2, possible are 0 and more, and -1 or None for no limit",
        ),
    ],
)
def test_a_broken_contract_is_a_value_error_with_the_text(call, text):
    with pytest.raises(ContractError) as raised:
        call()
    assert str(raised.value) == text
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("rank", [0, 1, 3, 5, 9])
def test_any_number_of_dimensions_but_four_is_refused(rank):
    with pytest.raises(ContractError, match=f"k has {rank} dimensions, attention takes 4"):
        flashcore_attn.attention(X, ones(*[1] * rank), X)


def test_a_read_only_output_is_refused():
    out = np.empty_like(X)
    out.flags.writeable = False
    with pytest.raises(ContractError, match="o is read-only"):
        flashcore_attn.attention(X, X, X, out=out)


def test_an_output_that_overlaps_itself_is_refused():
    out = np.lib.stride_tricks.as_strided(np.empty(8, np.float32), X.shape, (0, 0, 0, 4))
    with pytest.raises(ContractError, match="two places of o share memory"):
        flashcore_attn.attention(X, X, X, out=out)


@pytest.mark.parametrize("bad", [None, 3, [1.0], "q"])
def test_what_is_no_array_is_a_type_error(bad):
    with pytest.raises(TypeError, match="v is a .*, possible are torch tensors, numpy arrays"):
        flashcore_attn.attention(X, X, bad)


def test_an_array_of_an_unknown_library_needs_an_output():
    class Array:
        shape = X.shape
        __dlpack__, __dlpack_device__ = X.__dlpack__, X.__dlpack_device__

    with pytest.raises(UnsupportedError, match="Give out="):
        flashcore_attn.attention(Array(), Array(), Array())


def test_a_dlpack_of_a_strange_device_is_refused():
    class Array:
        """Claims to lie on a device of kind 8 (Metal) without a memory to show."""

        def __dlpack_device__(self):
            return 8, 0

        def __dlpack__(self, **options):
            raise BufferError("no memory here")

    with pytest.raises(ContractError, match="q does not share its memory: no memory here"):
        flashcore_attn.attention(Array(), X, X, out=np.empty_like(X))


def test_errors_are_of_one_family():
    for error, builtin in (
        (ContractError, ValueError),
        (UnsupportedError, NotImplementedError),
        (DeviceError, RuntimeError),
    ):
        assert issubclass(error, FlashCoreError) and issubclass(error, builtin)
