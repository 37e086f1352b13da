"""Problems as torch tensors."""

from __future__ import annotations

import numpy as np
import rule
import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: The CPU, and the GPU where there is one.
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def draw(seed: int, *shapes: tuple[int, ...], dtype: str = "float32", device: str = "cpu") -> list[torch.Tensor]:
    """Standard normal tensors from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, DTYPES[dtype]) for shape in shapes]


def as_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> rule.Problem:
    """The same for the rule."""
    arrays = (x.detach().float().cpu().numpy() for x in (q, k, v))
    return rule.Problem(*arrays, str(q.dtype).removeprefix("torch."), **options)


def check(q, k, v, o, lse=None, **options) -> None:
    """Raises unless torch tensors (batch, heads, length, head_dim) obey the rule."""
    as_array = lambda x: None if x is None else np.asarray(x.detach().float().cpu())
    rule.check(as_problem(q, k, v, **options), as_array(o), as_array(lse))
