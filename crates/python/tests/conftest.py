"""What every test may use. Tests that need torch or transformers are skipped where it is not installed."""

import importlib.util
import os

import pytest

#: Files whose tests need more than numpy, and which package.
NEEDS = {"test_torch": "torch", "test_transformers": "transformers"}
#: Whether a missing package is an error rather than a skip.
REQUIRED = os.environ.get("FLASHCORE_REQUIRE_TORCH", "") not in ("", "0")


def pytest_ignore_collect(collection_path, config):
    """Leaves out files that cannot be imported."""
    return True if missing(collection_path.name) and not REQUIRED else None


def missing(name: str) -> str | None:
    """The package that a test file needs and that is missing."""
    for prefix, package in NEEDS.items():
        if name.startswith(prefix):
            wanted = ("torch", package)
            return next((need for need in wanted if importlib.util.find_spec(need) is None), None)
    return None


def pytest_terminal_summary(terminalreporter):
    left_out = sorted({package for name in NEEDS for package in [missing(name)] if package})
    if left_out:
        terminalreporter.write_line(
            f"left out: the tests that need {' and '.join(left_out)}. scripts/python-tests --with-torch includes them"
        )


@pytest.fixture
def generator():
    import numpy

    return numpy.random.default_rng(0)
