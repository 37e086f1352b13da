"""The examples run."""

import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("sdpa_swap.py", "largest difference from torch"),
        ("transformers_generate.py", "the same tokens as sdpa: True"),
        ("cuda_graph.py", ""),
        ("ring_attention.py", "largest difference from attention in one process"),
    ],
)
def test_an_example_runs(example, says):
    ring = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if example.startswith("ring") else []
    )
    command = [sys.executable, *ring, str(FOLDER / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_the_code_of_the_readme_runs():
    text = (FOLDER.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
