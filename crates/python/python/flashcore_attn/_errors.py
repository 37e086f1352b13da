"""The errors of a call. Each is also an instance of the builtin class that a caller would expect."""


class FlashCoreError(Exception):
    """Every error of FlashCore."""


class ContractError(FlashCoreError, ValueError):
    """The call breaks the contract: the text names the tensor, what was given, what is possible and what to do."""


class UnsupportedError(FlashCoreError, NotImplementedError):
    """The call is valid, but this device or this function does not support it."""


class DeviceError(FlashCoreError, RuntimeError):
    """The device is missing, or failed."""


for _class in (FlashCoreError, ContractError, UnsupportedError, DeviceError):
    _class.__module__ = "flashcore_attn"
del _class
