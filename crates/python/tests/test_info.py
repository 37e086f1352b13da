"""What the package reports about itself, and what importing it does not do."""

import ast
import inspect
import pathlib
import subprocess
import sys

import flashcore_attn
import numpy as np
import pytest

X = np.ones((1, 8, 512, 64), np.float16)


def test_info_names_the_version_and_the_cpu():
    info = flashcore_attn.info()
    assert info["version"] == flashcore_attn.__version__
    assert info["cpu"]["instructions"] in ("amx", "avx512bf16", "avx512", "avx2", "portable")
    assert info["cpu"]["threads"] >= 1
    cuda = info["cuda"]
    assert cuda["devices"] or cuda["reason"]


def test_can_use_names_the_device():
    usable, device = flashcore_attn.can_use(X, X, X, causal=True)
    assert usable and device.startswith("cpu (")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": -1.0}, "softcap is -1"),
        ({"layout": "x"}, "layout is 'x'"),
        ({"top_left": True}, "top_left is how causal is aligned"),
        ({"key_lengths": [513]}, "the key length of batch entry 0 is 513"),
    ],
)
def test_can_use_says_what_the_call_would_raise(change, reason):
    usable, text = flashcore_attn.can_use(X, X, X, **change)
    assert not usable and text.startswith(reason)
    with pytest.raises(ValueError) as raised:
        flashcore_attn.attention(X, X, X, **change)
    assert str(raised.value) == text


def test_explain_shows_the_engine():
    text = flashcore_attn.explain(X, X, X)
    assert "1x8x512x64 f16" in text and "cpu (" in text


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
def test_explain_plans_for_a_gpu_that_is_not_there(target):
    text = flashcore_attn.explain(X, X, X, causal=True, target=target)
    assert "1x8x512x64 f16 causal" in text and "grid" in text and f"for {target}" in text


def test_explain_says_what_tensor_cores_do_not_take():
    x = X.astype(np.float32)
    assert "f32 leaves the scalar kernel" in flashcore_attn.explain(x, x, x, target="sm_80")
    with pytest.raises(flashcore_attn.ContractError, match="target is 'sm_1', possible are sm_80"):
        flashcore_attn.explain(X, X, X, target="sm_1")


def test_importing_brings_neither_torch_nor_a_gpu():
    # Using a GPU would load the driver's library, which shows in the process's maps.
    code = """
import sys, numpy, flashcore_attn
x = numpy.ones((1, 1, 4, 8), numpy.float32)
flashcore_attn.attention(x, x, x)
assert "torch" not in sys.modules
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "libcuda" not in maps
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_needs_torch_says_so_without_it():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import flashcore_attn
try:
    flashcore_attn.scaled_dot_product_attention
except ImportError as error:
    assert "needs PyTorch, which is not installed: pip install torch" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_stubs_describe_the_native_module():
    stubs = pathlib.Path(flashcore_attn.__file__).parent / "_native.pyi"
    described = {}
    for node in ast.parse(stubs.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            described[node.name] = [argument.arg for argument in node.args.args]
    native = flashcore_attn._native
    there = {name: value for name, value in vars(native).items() if callable(value)}
    assert described == {name: list(inspect.signature(value).parameters) for name, value in there.items()}


def test_the_package_is_typed():
    assert (pathlib.Path(flashcore_attn.__file__).parent / "py.typed").exists()


def test_all_public_names_are_documented():
    import importlib.util

    for name in flashcore_attn.__all__:
        if name in flashcore_attn._WITH_TORCH and importlib.util.find_spec("torch") is None:
            continue
        assert getattr(flashcore_attn, name).__doc__, name
