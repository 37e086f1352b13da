"""Attention on numpy arrays, against attention in float64."""

import concurrent.futures
import multiprocessing

import flashcore_attn
import numpy as np
import pytest
import rule


def problem(generator, q, k=None, v=None, dtype="float32", **options) -> rule.Problem:
    """Standard normal tensors of these shapes, rounded to the type."""
    k = q if k is None else k
    v = k if v is None else v
    draw = lambda shape: rule.rounded(generator.standard_normal(shape).astype(np.float32), dtype)
    return rule.Problem(draw(q), draw(k), draw(v), dtype, **options)


def arrays(problem: rule.Problem):
    return [x.astype(problem.dtype) for x in (problem.q, problem.k, problem.v)]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {}),
        ({"mask": "causal"}, {"causal": True}),
        ({"mask": "causal-top-left"}, {"causal": True, "top_left": True}),
        ({"mask": "window", "left": 7, "right": 3}, {"window": (7, 3)}),
        ({"mask": "window", "left": 7, "right": 0}, {"window": (7, -1), "causal": True}),
        ({"mask": "window", "left": None, "right": 2}, {"window": (None, 2)}),
        ({"softcap": 5.0, "scale": 0.3}, {"softcap": 5.0, "scale": 0.3}),
        ({"key_lengths": [17, 0]}, {"key_lengths": [17, 0]}),
        ({"mask": "causal", "key_lengths": [9, 30]}, {"causal": True, "key_lengths": np.array([9, 30])}),
    ],
)
def test_every_option_obeys_the_rule(generator, dtype, options, asked):
    p = problem(generator, (2, 4, 23, 40), (2, 2, 30, 40), (2, 2, 30, 24), dtype, **options)
    o, lse = flashcore_attn.attention(*arrays(p), return_lse=True, **asked)
    assert o.dtype == dtype and lse.dtype == np.float32
    rule.check(p, o, lse)


@pytest.mark.parametrize("len_k", [1, 64, 300])
@pytest.mark.parametrize("len_q", [1, 65])
def test_lengths_may_differ(generator, len_q, len_k):
    p = problem(generator, (1, 2, len_q, 64), (1, 2, len_k, 64), mask="causal")
    rule.check(p, flashcore_attn.attention(*arrays(p), causal=True))


def test_both_layouts_give_the_same_bits(generator):
    q, k, v = arrays(problem(generator, (2, 4, 33, 16), (2, 2, 50, 16)))
    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    expected, lse = flashcore_attn.attention(q, k, v, causal=True, return_lse=True)
    for given in (swapped, [np.ascontiguousarray(x) for x in swapped]):
        o, other_lse = flashcore_attn.attention(*given, causal=True, layout="bshd", return_lse=True)
        assert o.shape == (2, 33, 4, 16)
        np.testing.assert_array_equal(o.transpose(0, 2, 1, 3), expected)
        np.testing.assert_array_equal(other_lse, lse)


def test_the_output_lies_in_memory_as_q_does(generator):
    q = generator.standard_normal((2, 33, 4, 16)).astype(np.float32)
    view = q.transpose(0, 2, 1, 3)
    o = flashcore_attn.attention(view, view, view)
    assert o.shape == view.shape and o.strides == view.strides


def test_views_are_read_where_they_lie(generator):
    packed = generator.standard_normal((2, 33, 3, 4, 16)).astype(np.float32)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    apart = [np.ascontiguousarray(x) for x in (q, k, v)]
    np.testing.assert_array_equal(flashcore_attn.attention(q, k, v), flashcore_attn.attention(*apart))


def test_repeated_keys_need_no_memory(generator):
    q, k, v = arrays(problem(generator, (3, 2, 9, 8), (1, 2, 11, 8)))
    shared = [np.broadcast_to(x, (3, 2, 11, 8)) for x in (k, v)]
    o = flashcore_attn.attention(q, *shared)
    np.testing.assert_array_equal(o, flashcore_attn.attention(q, *(np.repeat(x, 3, 0) for x in (k, v))))


def test_read_only_inputs_are_taken(generator):
    inputs = arrays(problem(generator, (1, 1, 4, 8)))
    for x in inputs:
        x.flags.writeable = False
    assert np.isfinite(flashcore_attn.attention(*inputs)).all()


def test_an_output_may_be_given(generator):
    q, k, v = arrays(problem(generator, (1, 2, 9, 8)))
    out = np.full_like(q, np.nan)
    result, lse = flashcore_attn.attention(q, k, v, out=out, return_lse=True)
    assert result is out
    np.testing.assert_array_equal(out, flashcore_attn.attention(q, k, v))
    assert lse.shape == (1, 2, 9)


@pytest.mark.parametrize(("q", "k"), [((0, 2, 4, 8),) * 2, ((1, 0, 4, 8),) * 2, ((1, 2, 0, 8), (1, 2, 4, 8))])
def test_nothing_to_compute_is_legal(q, k):
    given = [np.zeros(shape, np.float32) for shape in (q, k, k)]
    assert flashcore_attn.attention(*given).shape == q


def test_a_query_without_keys_gives_zeros():
    q, k = np.ones((1, 2, 3, 8), np.float32), np.ones((1, 2, 0, 8), np.float32)
    o, lse = flashcore_attn.attention(q, k, k, return_lse=True)
    assert (o == 0).all() and (lse == -np.inf).all()


def test_any_producer_of_dlpack_is_taken(generator):
    class Wrapped:
        """An array of a library that supports only DLPack, in its old form."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, stream=None):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    q, k, v = arrays(problem(generator, (1, 2, 9, 8)))
    out = np.empty_like(q)
    flashcore_attn.attention(Wrapped(q), Wrapped(k), Wrapped(v), out=Wrapped(out))
    np.testing.assert_array_equal(out, flashcore_attn.attention(q, k, v))


def test_calls_from_many_threads_give_the_same_bits(generator):
    inputs = arrays(problem(generator, (1, 4, 200, 64)))
    expected = flashcore_attn.attention(*inputs, causal=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda _: flashcore_attn.attention(*inputs, causal=True), range(64))
    assert all((result == expected).all() for result in results)


def _in_child(connection, inputs):
    connection.send(flashcore_attn.attention(*inputs))
    connection.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_computes_though_its_threads_are_gone(generator):
    # Large enough for several threads, which the parent has started before the fork.
    inputs = arrays(problem(generator, (1, 8, 512, 64)))
    expected = flashcore_attn.attention(*inputs)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        here, there = context.Pipe()
        child = context.Process(target=_in_child, args=(there, inputs))
        child.start()
        there.close()
        assert here.poll(60), "the child hangs"
        np.testing.assert_array_equal(here.recv(), expected)
        child.join(10)
        assert child.exitcode == 0
