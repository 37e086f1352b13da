"""FlashCore: exact attention, fused, for PyTorch and NumPy, on NVIDIA GPUs and CPUs.

    from flashcore_attn import scaled_dot_product_attention   # torch's signature
    from flashcore_attn import flash_attn_func                # flash-attn's
    from flashcore_attn import attention                      # our own: torch, numpy, DLPack

``info()`` says what there is to run on, ``can_use(...)`` whether a call is supported and why not, ``explain(...)`` how
it would run. Importing this touches no GPU and does not import torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from . import _native
from ._api import attention, can_use, explain, info
from ._errors import ContractError, DeviceError, FlashCoreError, UnsupportedError

if TYPE_CHECKING:
    from ._cache import flash_attn_with_kvcache
    from ._flash import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from ._implementation import register_flash_attention_impl
    from ._sdpa import scaled_dot_product_attention
    from ._torch import set_gradients

__version__: str = _native.__version__

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_native.after_fork)

#: The modules of the names that need torch; they are imported on first use.
_WITH_TORCH = {
    "flash_attn_func": "_flash",
    "flash_attn_kvpacked_func": "_flash",
    "flash_attn_qkvpacked_func": "_flash",
    "flash_attn_varlen_func": "_flash",
    "flash_attn_varlen_kvpacked_func": "_flash",
    "flash_attn_varlen_qkvpacked_func": "_flash",
    "flash_attn_with_kvcache": "_cache",
    "register_flash_attention_impl": "_implementation",
    "scaled_dot_product_attention": "_sdpa",
    "set_gradients": "_torch",
}


# Hidden from type checkers: they would accept any misspelled name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _WITH_TORCH.get(name)
        if module is None:
            raise AttributeError(f"module 'flashcore_attn' has no attribute '{name}'")
        try:
            value = getattr(importlib.import_module(f".{module}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"flashcore_attn.{name} needs PyTorch, which is not installed: pip install torch"
            ) from None
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_TORCH})


__all__ = [
    "ContractError",
    "DeviceError",
    "FlashCoreError",
    "UnsupportedError",
    "attention",
    "can_use",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "info",
    "register_flash_attention_impl",
    "scaled_dot_product_attention",
    "set_gradients",
]
