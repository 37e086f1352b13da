"""What type checkers must know about the package; scripts/python-tests --with-torch runs mypy and pyright on it.

A line with an ignored error must be an error: a checker complains if it is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import flashcore_attn
import numpy as np
import numpy.typing as npt
import torch
from flashcore_attn import (
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from flashcore_attn import flashinfer as pages
from flashcore_attn.distributed import ring_attention
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import assert_type


def outputs(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, lse: bool) -> None:
    """What functions return, depending on their options."""
    assert_type(flash_attn_func(q, k, v).shape, torch.Size)
    assert_type(flash_attn_func(q, k, v, causal=True, num_splits=2), Tensor)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=True), tuple[Tensor, Tensor, None])
    assert_type(flash_attn_func(q, k, v, return_attn_probs=lse), Tensor | tuple[Tensor, Tensor, None])
    assert_type(flash_attn_qkvpacked_func(q), Tensor)
    assert_type(flash_attn_qkvpacked_func(q, return_attn_probs=True)[1], Tensor)
    assert_type(flash_attn_kvpacked_func(q, k), Tensor)
    assert_type(flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, seqused_k=ends), Tensor)
    assert_type(flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, return_attn_probs=True), tuple[Tensor, Tensor, None])
    assert_type(flash_attn_varlen_qkvpacked_func(q, ends, 4), Tensor)
    assert_type(flash_attn_varlen_kvpacked_func(q, k, ends, ends, 4, 4), Tensor)
    assert_type(flash_attn_with_kvcache(q, k, v, cache_seqlens=3), Tensor)
    assert_type(flash_attn_with_kvcache(q, k, v, return_softmax_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_with_kvcache(q, k, v, block_table=ends, cache_batch_idx=None, check_tables=True), Tensor)
    assert_type(flash_attn_varlen_func(q, k, v, ends, seqused_k=ends, block_table=ends, check_tables=True), Tensor)
    assert_type(pages.decode(q, (k, v), ends, ends, ends), Tensor)
    assert_type(pages.decode(q, k, ends, ends, kv_layout="HND", return_lse=True), tuple[Tensor, Tensor])
    assert_type(pages.prefill(q, k, ends, ends, ends, causal=True), Tensor)
    assert_type(scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
    assert_type(ring_attention(q, k, v), Tensor)
    assert_type(ring_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])


def arrays(q: Tensor, x: npt.NDArray[np.float32], lse: bool) -> None:
    """``attention`` returns the kind of array that it is given."""
    assert_type(attention(q, q, q), Tensor)
    assert_type(attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, return_lse=lse), Tensor | tuple[Tensor, Tensor])
    assert_type(attention(x, x, x, window=(3, None), key_lengths=[1]), npt.NDArray[np.float32])
    assert_type(flashcore_attn.can_use(x, x, x), tuple[bool, str])
    assert_type(flashcore_attn.explain(q, q, q), str)


def mistakes(q: Tensor) -> None:
    """Errors that a checker must see."""
    flashcore_attn.flash_attn_fun(q, q, q)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    flash_attn_func(q, q, q, window_size=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    flash_attn_func(q, q, q, num_split=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    flash_attn_func(q, q, q)[1].shape.foo  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    attention(q, q, q).foo  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
