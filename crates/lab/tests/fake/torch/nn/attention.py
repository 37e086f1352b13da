import contextlib


class SDPBackend:
    FLASH_ATTENTION, CUDNN_ATTENTION, EFFICIENT_ATTENTION, MATH = range(4)


def sdpa_kernel(backends):
    return contextlib.nullcontext()
