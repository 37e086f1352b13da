"""What gradients cost on a GPU, compared with torch's backends and FlashAttention-3 in the same run.

    python training.py [--json FILE] [--rounds N] [--head-dim D ...] [--length S ...] [--dtype bfloat16]

backward: the gradients of q, k and v, given the output and its gradient. both: the forward pass and these.

Every cell has 16k tokens of heads · head_dim = 2048. The functions take turns, round by round; a round times some calls
between two events, and the median of all rounds is shown. A rate counts 4 · pairs · head_dim operations forward and 2.5
times that backward, half of it under a causal mask. Before they are timed, the gradients of one head are compared with
float64; the error is shown relative to the largest element, and wrong ones are not timed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import flashcore_attn
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, WIDTH = 16384, 2048
#: The largest error of a gradient that is timed, relative to the gradient's largest element.
MOST = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: Milliseconds of a round.
ROUND = 20.0


def backend(which: SDPBackend) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def functions() -> dict[str, Callable[..., Tensor]]:
    found = {
        "flashcore": lambda q, k, v, causal: flashcore_attn.attention(q, k, v, causal=causal),
        "flash": backend(SDPBackend.FLASH_ATTENTION),
        "cudnn": backend(SDPBackend.CUDNN_ATTENTION),
    }
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return found

    def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return {**found, "fa3": fa3}


def truth(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The gradients of the first head in float64."""
    leaves = [x[:1, :1].detach().double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * q.size(3) ** -0.5
    if causal:
        hidden = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, grad[:1, :1].double())


def milliseconds(call: Callable[[], object], calls: int) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / calls


def measure(length: int, head_dim: int, causal: bool, dtype: torch.dtype, rounds: int) -> list[dict]:
    shape = (TOKENS // length, WIDTH // head_dim, length, head_dim)
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    right = truth(q, k, v, grad, causal)
    calls, errors, rows = {}, {}, []
    for who, function in functions().items():
        cell = {"function": who, "length": length, "head_dim": head_dim, "causal": causal, "dtype": str(dtype)}
        try:
            o = function(q, k, v, causal)
            found = torch.autograd.grad(o, leaves, grad, retain_graph=True)
        except Exception as error:
            rows.append({**cell, "failure": f"{type(error).__name__}: {error}"})
            continue
        off = [(x[:1, :1].double() - y).abs().max() / y.abs().max() for x, y in zip(found, right)]
        errors[who] = max(x.item() for x in off)
        if not errors[who] < MOST[dtype]:
            rows.append({**cell, "failure": f"a gradient is off by {errors[who]:.1e}"})
            continue
        both = lambda f=function: torch.autograd.grad(f(q, k, v, causal), leaves, grad)
        calls[who, "backward"] = lambda o=o: torch.autograd.grad(o, leaves, grad, retain_graph=True)
        calls[who, "both"] = both
    often = {key: max(1, int(ROUND / milliseconds(call, 3))) for key, call in calls.items()}
    times = {key: [] for key in calls}
    for number in range(rounds):
        for key in list(calls) if number % 2 == 0 else list(reversed(calls)):
            times[key].append(milliseconds(calls[key], often[key]))
    flops = 4 * shape[0] * shape[1] * length * length * head_dim / (2 if causal else 1)
    for (who, which), samples in times.items():
        ms = statistics.median(samples)
        rate = flops * (2.5 if which == "backward" else 3.5) / ms / 1e9
        cell = {"function": who, "pass": which, "length": length, "head_dim": head_dim, "causal": causal}
        rows.append({**cell, "dtype": str(dtype), "ms": ms, "tflops": rate, "error": errors[who], "samples": samples})
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", help="also write the numbers to a file")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    arguments.add_argument("--length", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    arguments.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"{'head_dim':>8} {'length':>6} {'causal':6} {'pass':8} {'function':10} {'ms':>8} {'TFLOP/s':>8} {'error':>8}"
    )
    rows = []
    for head_dim in options.head_dim:
        for causal in (False, True):
            for length in options.length:
                for row in measure(length, head_dim, causal, getattr(torch, options.dtype), options.rounds):
                    rows.append(row)
                    start = f"{head_dim:8} {length:6} {causal!s:6} {row.get('pass', '-'):8} {row['function']:10}"
                    if "failure" in row:
                        print(f"{start} {row['failure'][:60]}", flush=True)
                        continue
                    print(f"{start} {row['ms']:8.3f} {row['tflops']:8.1f} {row['error']:8.1e}", flush=True)
                torch.cuda.empty_cache()
    if options.json:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "info": flashcore_attn.info()}
        with open(options.json, "w") as file:
            json.dump({**where, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
