"""Runs attention of torch, and of other libraries installed beside it, on a GPU for the flashcore workbench: one JSON
request per line, one JSON reply per line.

The timing protocol is that of the workbench's own worker: a CUDA graph of many calls, replayed between two events
after a replay that keeps the GPU busy; and for the call clock an event before and after every call.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import zlib

# Ctrl-C belongs to the workbench; this process ends when its input does.
signal.signal(signal.SIGINT, signal.SIG_IGN)
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # What libraries print must not mix with the replies.

QUEUED = 32

# The modules of the libraries beside torch. flex compiles, which takes long, so it must be asked for.
MODULES = {"fa3": "flash_attn_interface", "flash_attn": "flash_attn", "xformers": "xformers", "flex": "torch"}
UNASKED = ("fa3", "flash_attn", "xformers")

# These want (batch, length, heads, head_dim).
TURNED = ("fa3", "flash_attn")

# At most so many queries, on so many times as many keys, are a decode.
FEW_QUERIES, MANY_KEYS = 64, 8


def loaded():
    """The files of the shared libraries in this process, where the system tells."""
    try:
        with open("/proc/self/maps") as maps:
            return {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}
    except OSError:
        return set()


def version(name):
    """A module's version; where it has none, the SHA-256 of the libraries that came with it, or of its own file."""
    before = loaded()
    module = importlib.import_module(name)
    told = getattr(module, "__version__", None)
    if told:
        return str(told)
    folder = os.path.dirname(os.path.realpath(module.__file__)) + os.sep
    files = sorted(path for path in loaded() - before if os.path.realpath(path).startswith(folder))
    sums = hashlib.sha256()
    for path in files or [module.__file__]:
        with open(path, "rb") as file:
            sums.update(file.read())
    return "sha256:" + sums.hexdigest()


class Server:
    def __init__(self, torch, ordinal):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.torch = torch
        torch.cuda.set_device(ordinal)
        self.sdpa_kernel = sdpa_kernel
        self.backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
        }
        # What 8-bit floats are made of: torch does not copy them everywhere.
        self.dtypes = {"f16": torch.float16, "bf16": torch.bfloat16, "f8": torch.uint8}
        self.pools = {}
        self.sets = []
        self.options = {}
        self.graphs = {}
        self.problem = {}
        self.sequences = self.table = None
        self.others = {}
        self.given = {}
        self.kept = {}
        # Gradients are computed in the stream of the call that they are of.
        self.side = torch.cuda.Stream()

    def hello(self, request):
        torch = self.torch
        return {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "device": torch.cuda.get_device_name(),
            "installed": [who for who in UNASKED if importlib.util.find_spec(MODULES[who])],
        }

    def version(self, request):
        return {"version": version(MODULES[request["who"]])}

    def pool(self, request):
        torch, sums, pool = self.torch, [], []
        for path in request["paths"]:
            with open(path, "rb") as file:
                data = bytearray(file.read())
            sums.append(zlib.crc32(data))
            pool.append(torch.frombuffer(data, dtype=self.dtypes[request["dtype"]]).cuda())
        self.pools[request["dtype"]] = pool
        return {"checksums": sums}

    def load(self, request):
        torch, problem = self.torch, request["problem"]
        self.graphs.clear()
        self.sets.clear()
        self.given.clear()
        self.kept.clear()
        torch.cuda.empty_cache()
        pools = self.pools[problem["dtype"]]

        self.places(problem)

        def cut(pool, shape):
            if self.sequences:
                # As they lie in memory: token after token.
                shape = [shape[0], shape[2], shape[1], shape[3]]
            count = shape[0] * shape[1] * shape[2] * shape[3]
            tensor = pool.repeat(-(-count // len(pool)))[:count].clone().reshape(shape)
            return tensor.view(torch.float8_e4m3fn) if problem["dtype"] == "f8" else tensor

        for _ in range(max(1, request["sets"])):
            tensors = [cut(pool, problem[name]) for pool, name in zip(pools, ("q", "k", "v"))]
            self.sets.append([tensors[0], *map(self.paged, tensors[1:])] if self.table is not None else tensors)
        self.problem = problem
        self.others.clear()
        self.options = {"is_causal": problem["causal"], "scale": problem["scale"]}
        if problem["q"][1] != problem["k"][1]:
            self.options["enable_gqa"] = True
        torch.cuda.synchronize()
        return {}

    def places(self, problem):
        """Where sequences of lengths of their own are."""
        torch, self.sequences = self.torch, problem.get("sequences")
        self.table = None
        if not self.sequences:
            return
        numbers = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        keys, queries = self.sequences["keys"], self.sequences.get("queries")
        # Tokens of q and of the cache, as if each sequence were packed.
        batch, room_q, room_k = len(keys), problem["q"][2], problem["k"][2]
        packed_q, packed_k = queries is not None, self.sequences["lie"] == "packed"
        starts = lambda lengths: numbers([sum(lengths[:n]) for n in range(batch + 1)])
        self.most = (max(queries) if packed_q else room_q, max(keys))
        self.starts = (
            starts(queries if packed_q else [room_q] * batch),
            starts(keys if packed_k else [room_k] * batch),
        )
        self.lengths = None if packed_k else numbers(keys)
        if isinstance(self.sequences["lie"], dict):
            page = self.sequences["lie"]["pages"]
            self.table = numbers(problem["table"]).reshape(batch, -1)
            # A few pages more than are used, as a pool has.
            self.pool_of = (page, int(self.table.max()) + 1)

    def paged(self, cache):
        """A pool of pages that holds what a cache does."""
        torch, (page, pages), (batch, room, heads, width) = self.torch, self.pool_of, cache.shape
        pool = torch.zeros(pages, page, heads, width, dtype=cache.dtype, device="cuda")
        for sequence, keys in enumerate(self.sequences["keys"]):
            count = -(-keys // page)
            part = torch.zeros(count * page, heads, width, dtype=cache.dtype, device="cuda")
            part[:keys] = cache[sequence, :keys]
            pool[self.table[sequence, :count].long()] = part.reshape(count, page, heads, width)
        return pool

    def attend(self, who, q, k, v):
        """Attention of sequences: tensors and output lie as in memory, (batch, length, heads, head_dim)."""
        aten, scale, causal = self.torch.ops.aten, self.problem["scale"], self.problem["causal"]
        (starts_q, starts_k), (most_q, most_k) = self.starts, self.most
        packed_q, packed_k = self.sequences.get("queries") is not None, self.lengths is None
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        if who in ("fa3", "flash_attn"):
            module, options = importlib.import_module(MODULES[who]), {"softmax_scale": scale, "causal": causal}
            if packed_k and packed_q:
                out = module.flash_attn_varlen_func(
                    flat(q), flat(k), flat(v), starts_q, starts_k, most_q, most_k, **options
                )
            elif packed_q:
                raise NotImplementedError(f"{who} is not asked about packed queries on a cache")
            else:
                if self.table is not None:
                    options["page_table" if who == "fa3" else "block_table"] = self.table
                out = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=self.lengths, **options)
            out = out[0] if isinstance(out, tuple) else out
            return out.reshape(q.shape)
        options = {"scale": scale}
        if self.lengths is not None:
            options["seqused_k"] = self.lengths
        if self.table is None:
            k, v = flat(k), flat(v)
        else:
            options["block_table"] = self.table
        places = (starts_q, starts_k, most_q, most_k)
        if who == "flash":
            out = aten._flash_attention_forward(flat(q), k, v, *places, 0.0, causal, False, **options)
        else:
            grad = q.requires_grad
            out = aten._cudnn_attention_forward(flat(q), k, v, None, *places, grad, 0.0, causal, False, **options)
        return out[0].reshape(q.shape)

    def backend(self, who):
        """The context that must be active during a backend's calls."""
        return self.sdpa_kernel([self.backends[who]]) if who in self.backends else contextlib.nullcontext()

    def forward_of(self, who, leaves):
        """The output of tensors whose gradients are asked for."""
        if self.sequences:
            return self.attend(who, *leaves)
        if who not in TURNED:
            return self.torch.nn.functional.scaled_dot_product_attention(*leaves, **self.options)
        options = {"causal": self.problem["causal"], "softmax_scale": self.problem["scale"]}
        out = importlib.import_module(MODULES[who]).flash_attn_func(*leaves, **options)
        return out[0] if isinstance(out, tuple) else out

    def differentiable(self, who, place):
        """Tensors that are differentiated by, the gradient of the output, and the output itself: it is computed once, and
        its gradients can be asked for again and again. None where every call computes it anew."""
        torch, problem = self.torch, self.problem
        turned = who in TURNED and not self.sequences
        order = (lambda x: x.transpose(1, 2).contiguous()) if turned else (lambda x: x.clone())
        torch.cuda.synchronize()
        with torch.inference_mode(False), torch.enable_grad(), torch.cuda.stream(self.side):
            leaves = [order(x).requires_grad_() for x in self.sets[place]]
            pool, shape = self.pools[problem["dtype"]][0], problem["q"][:3] + problem["v"][3:]
            if self.sequences:
                shape = [shape[0], shape[2], shape[1], shape[3]]
            count = shape[0] * shape[1] * shape[2] * shape[3]
            pool = pool.roll(-(problem["gradient_from"] % len(pool)))
            gradient = order(pool.repeat(-(-count // len(pool)))[:count].reshape(shape))
            out = None if problem.get("forward_too") else self.forward_of(who, leaves)
        torch.cuda.synchronize()
        return out, leaves, gradient

    def backward(self, who, place):
        """The gradient of q, for which those of k and v are computed too, and where that is asked the output before."""
        place %= len(self.sets)
        if (who, place) not in self.kept:
            self.kept[who, place] = self.differentiable(who, place)
        out, leaves, gradient = self.kept[who, place]
        keeps = out is not None
        with self.torch.inference_mode(False), self.torch.enable_grad():
            out = out if keeps else self.forward_of(who, leaves)
            found = self.torch.autograd.grad(out, leaves, gradient, retain_graph=keeps)[0]
            return found.transpose(1, 2) if who in TURNED or self.sequences else found

    def call(self, who, place):
        if "gradient_from" in self.problem:
            return self.backward(who, place)
        q, k, v = self.sets[place % len(self.sets)]
        if self.sequences:
            return self.attend(who, q, k, v).transpose(1, 2)
        if who in self.backends:
            return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.options)
        if who not in self.others:
            self.others[who] = getattr(self, "make_" + who)()
        return self.others[who](q, k, v)

    # The others want (batch, length, heads, head_dim), which is another view of the same memory; FlashAttention-3 is
    # given tensors that lie in memory as its users have them.

    def by_length(self, x):
        """A copy in the order (batch, length, heads, head_dim)."""
        if self.problem["dtype"] != "f8":
            return x.transpose(1, 2).contiguous()
        return x.view(self.torch.uint8).transpose(1, 2).contiguous().view(x.dtype)

    def make_fa3(self):
        module = importlib.import_module(MODULES["fa3"])
        options = {"causal": self.problem["causal"], "softmax_scale": self.problem["scale"]}
        eight_bits = self.problem["dtype"] == "f8"
        by_usual = self.problem["scale"] * self.problem["q"][3] ** 0.5
        if eight_bits and abs(by_usual - 1) > 1e-6:
            # There are builds that leave the scale of 8-bit floats as it usually is; a descale is heeded by all.
            sizes = (self.problem["q"][0], self.problem["k"][1])
            options["q_descale"] = self.torch.full(sizes, by_usual, device=self.sets[0][0].device)
            options["softmax_scale"] = None
        for tensors in self.sets:
            # The sets stay as long as the problem does, and so do their addresses.
            self.given[tensors[0].data_ptr()] = [self.by_length(x) for x in tensors]

        def by(function):
            def call(q, k, v):
                out = function(*self.given[q.data_ptr()], **options)
                return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

            return call

        # Few queries on many keys: its users call what splits the keys among blocks. A build may not have that.
        queries, keys = self.problem["q"][2], self.problem["k"][2]
        decode = getattr(module, "flash_attn_with_kvcache", None)
        if decode and not eight_bits and queries <= FEW_QUERIES and keys >= MANY_KEYS * queries:
            try:
                by(decode)(*self.sets[0])
                return by(decode)
            except (AssertionError, NotImplementedError):
                pass
        return by(module.flash_attn_func)

    def make_flash_attn(self):
        from flash_attn import flash_attn_func

        options = {"causal": self.problem["causal"], "softmax_scale": self.problem["scale"]}

        def call(q, k, v):
            out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            return out.transpose(1, 2)

        return call

    def make_xformers(self):
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        batch, heads, _, width = self.problem["q"]
        shared = self.problem["k"][1]
        options = {"scale": self.problem["scale"]}
        if self.problem["causal"]:
            options["attn_bias"] = LowerTriangularMask()

        def call(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if shared == heads:
                return memory_efficient_attention(q, k, v, **options).transpose(1, 2)
            # With heads that share keys there are five dimensions: (batch, length, groups, heads of a group, head_dim).
            group = heads // shared
            q = q.reshape(batch, -1, shared, group, width)
            k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
            out = memory_efficient_attention(q, k, v, **options)
            return out.flatten(2, 3).transpose(1, 2)

        return call

    def make_flex(self):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        options = {"scale": self.problem["scale"]}
        if self.problem["q"][1] != self.problem["k"][1]:
            options["enable_gqa"] = True
        if self.problem["causal"]:

            def earlier(batch, head, query, key):
                return query >= key

            lengths = self.problem["q"][2], self.problem["k"][2]
            options["block_mask"] = create_block_mask(earlier, None, None, *lengths, device="cuda")
        compiled = self.torch.compile(flex_attention)

        def call(q, k, v):
            return compiled(q, k, v, **options)

        return call

    def output(self, request):
        torch = self.torch
        with self.backend(request["who"]):
            out = self.call(request["who"], 0).contiguous()
        rows = torch.tensor(request["rows"], device="cuda", dtype=torch.long)
        chosen = out.reshape(-1, out.shape[-1])[rows].contiguous()
        data = chosen.flatten().view(torch.uint8).cpu().numpy().tobytes()
        with open(request["path"], "wb") as file:
            file.write(data)
        return {"bytes": len(data)}

    def record(self, who, calls):
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for place in range(3):
                self.call(who, place)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        options = {}
        if "gradient_from" in self.problem:
            # What is made on first use cannot be recorded.
            for place in range(len(self.sets)):
                self.call(who, place)
            torch.cuda.synchronize()
            options["stream"] = self.side
        with torch.cuda.graph(graph, **options):
            for place in range(calls):
                self.call(who, place)
        return graph

    def sample(self, request):
        torch, who = self.torch, request["who"]
        sets, replays = len(self.sets), max(1, request["replays"])
        calls = -(-max(1, request["calls"]) // sets) * sets
        if (who, calls) not in self.graphs:
            with self.backend(who):
                self.graphs[who, calls] = self.record(who, calls)
        graph = self.graphs[who, calls]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(max(1, request["warm"])):
            graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return {"us": start.elapsed_time(end) * 1e3 / (calls * replays), "calls": calls * replays}

    def calls(self, request):
        torch, who, calls = self.torch, request["who"], request["calls"]
        with self.backend(who):
            for place in range(min(calls, QUEUED)):
                self.call(who, place)
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call_us, host_us = [], []
            for place in range(calls):
                start.record()
                self.call(who, place)
                end.record()
                torch.cuda.synchronize()
                call_us.append(start.elapsed_time(end) * 1e3)
            for place in range(calls):
                before = time.perf_counter_ns()
                self.call(who, place)
                host_us.append((time.perf_counter_ns() - before) / 1e3)
                if place % QUEUED == QUEUED - 1:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
        return {"call_us": call_us, "host_us": host_us}

    def matmul(self, request):
        torch, size, calls = self.torch, 8192, 5
        a, b = (torch.randn(size, size, device="cuda", dtype=self.dtypes[request["dtype"]]) for _ in range(2))
        best = float("inf")
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a @ b
            start.record()
            for _ in range(calls):
                a @ b
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / calls)
        return {"tflops": 2 * size**3 / best / 1e9}


def main():
    import torch

    server = Server(torch, int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = getattr(server, request["op"])(request)
            except Exception as error:  # The workbench decides what a failure means.
                reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


try:
    main()
except Exception as error:
    replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    replies.flush()
