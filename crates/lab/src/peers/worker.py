"""Runs torch's attention for the flashcore workbench: one JSON request per line, one JSON reply per line."""

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


def load(torch, request):
    """Reads q, k and v from raw files and returns the call, with the checksums of what was read."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[request["dtype"]]
    tensors, sums = {}, {}
    for name, (path, shape) in request["tensors"].items():
        with open(path, "rb") as file:
            data = bytearray(file.read())
        sums[name] = zlib.crc32(data)
        tensors[name] = torch.frombuffer(data, dtype=dtype).reshape(shape)
    options = {"is_causal": request["causal"], "scale": request["scale"]}
    if tensors["q"].shape[1] != tensors["k"].shape[1]:
        options["enable_gqa"] = True
    q, k, v = tensors["q"], tensors["k"], tensors["v"]

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    if request["passes"] == "forward":
        return forward, sums
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        kept = forward() if request["passes"] == "backward" else None

    def call():
        """The gradient of q, for which those of k and v are computed too."""
        with torch.enable_grad():
            out = forward() if kept is None else kept
            return torch.autograd.grad(out, leaves, tensors["gradient"], retain_graph=kept is not None)[0]

    return call, sums


def main():
    import torch

    call = None
    # Not in inference mode, whose tensors have no gradients.
    with torch.no_grad():
        for line in sys.stdin:
            request = json.loads(line)
            op = request["op"]
            try:
                if op == "hello":
                    torch.set_num_threads(request["threads"])
                    reply = {"torch": torch.__version__, "threads": torch.get_num_threads()}
                elif op == "load":
                    call, sums = load(torch, request)
                    reply = {"checksums": sums}
                elif op == "output":
                    out = call().contiguous()
                    with open(request["path"], "wb") as file:
                        file.write(out.flatten().view(torch.uint8).numpy().tobytes())
                    reply = {"shape": list(out.shape)}
                elif op == "sample":
                    for _ in range(request["warm"]):
                        call()
                    start = time.perf_counter_ns()
                    for _ in range(request["calls"]):
                        call()
                    reply = {"ns": time.perf_counter_ns() - start}
                else:
                    reply = {"error": f"unknown request {op}"}
            except Exception as error:  # The workbench decides what a failure means.
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


try:
    main()
except ImportError as error:
    replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    replies.flush()
