"""As much of torch as the workbench's worker uses, on lists of numbers: attention is right, and every call takes 2 ms of a
clock that stands still otherwise."""

import contextlib
import math
import struct

__version__ = "9.9.0"
float16, bfloat16, long, uint8 = "f16", "bf16", "long", "uint8"
inference_mode = contextlib.nullcontext


class Tensor:
    """Numbers in the order of their indices, whatever the order in memory, which `is_view` says is another one."""

    def __init__(self, data, shape, dtype, is_view=False):
        self.data, self.shape, self.dtype, self.is_view = data, list(shape), dtype, is_view

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, which):
        if isinstance(which, slice):
            data = self.data[which]
            return Tensor(data, [len(data)], self.dtype)
        width = self.shape[1]
        rows = [self.data[int(row) * width : (int(row) + 1) * width] for row in which.data]
        return Tensor([x for row in rows for x in row], [len(rows), width], self.dtype)

    def cuda(self):
        return self

    cpu = clone = flatten = numpy = cuda

    def repeat(self, times):
        return Tensor(self.data * times, [len(self) * times], self.dtype)

    def reshape(self, *shape):
        shape = list(shape[0]) if isinstance(shape[0], list) else list(shape)
        if shape[0] == -1:
            shape[0] = len(self.data) // math.prod(shape[1:])
        return Tensor(self.data, shape, self.dtype)

    def transpose(self, first, second):
        assert (first, second) == (1, 2)
        a, b, c, d = self.shape
        rows = [self.data[((i * b + j) * c + k) * d :][:d] for i in range(a) for k in range(c) for j in range(b)]
        return Tensor([x for row in rows for x in row], [a, c, b, d], self.dtype, True)

    def contiguous(self):
        return Tensor(self.data, self.shape, self.dtype)

    def data_ptr(self):
        return id(self)

    def view(self, dtype):
        return self

    def tobytes(self):
        if self.dtype == "f16":
            return struct.pack(f"<{len(self.data)}e", *self.data)
        bits = (struct.unpack("<I", struct.pack("<f", x))[0] for x in self.data)
        return struct.pack(f"<{len(self.data)}H", *((x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in bits))


def tensor(values, device=None, dtype=None):
    return Tensor(values, [len(values)], dtype)


def frombuffer(data, dtype):
    if dtype == "f16":
        values = list(struct.unpack(f"<{len(data) // 2}e", data))
    else:
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        values = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    return Tensor(values, [len(values)], dtype)


def attention(q, k, v, scale, offset):
    """Of tensors (batch, heads, length, head_dim); query i sees the keys up to i + offset, or all without one."""
    cuda.calls += 1
    (batch, heads, queries, width), (_, shared, keys, _) = q.shape, k.shape
    out = []
    for b in range(batch):
        for h in range(heads):
            start = (b * shared + h // (heads // shared)) * keys
            row = lambda x, n: x.data[n * width : (n + 1) * width]
            for i in range(queries):
                seen = keys if offset is None else i + 1 + offset
                mine = row(q, (b * heads + h) * queries + i)
                scores = [scale * sum(x * y for x, y in zip(mine, row(k, start + j))) for j in range(seen)]
                weights = [math.exp(score - max(scores)) for score in scores]
                total = [sum(w * row(v, start + j)[c] for j, w in enumerate(weights)) for c in range(width)]
                out += [x / sum(weights) for x in total]
    return Tensor(out, q.shape, q.dtype)


class Cuda:
    """Counts calls and milliseconds."""

    calls = 0
    ms = 0.0

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.ms = cuda.ms

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.ms - self.ms

    class CUDAGraph:
        def replay(self):
            cuda.ms += 2.0 * self.calls

    class Stream:
        def wait_stream(self, other):
            pass

    @contextlib.contextmanager
    def graph(self, graph):
        before = self.calls
        yield
        graph.calls = self.calls - before

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self):
        return self.Stream()

    def get_device_name(self):
        return "Fake GPU 0"

    def set_device(self, ordinal):
        pass

    def synchronize(self):
        pass

    empty_cache = synchronize


class Namespace:
    def __init__(self, **members):
        self.__dict__.update(members)


cuda = Cuda()
version = Namespace(cuda="13.0")
backends = Namespace(cudnn=Namespace(version=lambda: 91900))

from . import nn  # noqa: E402
