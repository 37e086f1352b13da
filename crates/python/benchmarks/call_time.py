"""What one eager call costs from Python, compared with torch's function in the same run.

    python call_time.py [--json FILE] [--rounds N]

host: time until the call returns, in a series of calls without synchronisation.
call: time that a caller waits, from an event before the call to an event after it, one call at a time (on a GPU).

Both functions take turns, round by round, on the shapes below. Every result is compared with attention in float64
before it is timed, and a wrong one is not timed.
"""

import argparse
import json
import platform
import sys
import time

import flashcore_attn
import torch
import torch.nn.functional as F

SHAPES = {"tiny": (1, 1, 32, 64), "mission": (1, 8, 512, 64), "multi_batch": (4, 8, 256, 64), "long": (1, 8, 2048, 64)}
FUNCTIONS = {"flashcore": flashcore_attn.scaled_dot_product_attention, "torch": F.scaled_dot_product_attention}


def host_time(call, calls: int = 200) -> float:
    """Microseconds until a call returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def call_time(call, calls: int = 50) -> list[float]:
    """Microseconds that a caller waits, one call at a time."""
    times = []
    for _ in range(calls):
        if torch.cuda.is_available():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            times.append(before.elapsed_time(after) * 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return times


def error(call, q, k, v, causal: bool) -> float:
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    return (call().double() - truth).abs().max().item()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure(name: str, causal: bool, rounds: int, device: str) -> list[dict]:
    q, k, v = (torch.randn(SHAPES[name], device=device, dtype=torch.float16) for _ in range(3))
    calls = {who: lambda f=f: f(q, k, v, is_causal=causal) for who, f in FUNCTIONS.items()}
    errors = {who: error(call, q, k, v, causal) for who, call in calls.items()}
    if not errors["flashcore"] <= 2 * errors["torch"] + 1e-3:
        sys.exit(f"{name}: flashcore is off by {errors['flashcore']}, torch by {errors['torch']}; nothing is timed")
    host = {who: [] for who in calls}
    wait = {who: [] for who in calls}
    for call in calls.values():
        host_time(call)
    for number in range(rounds):
        order = list(calls) if number % 2 == 0 else list(reversed(calls))
        for who in order:
            host[who].append(host_time(calls[who]))
            wait[who] += call_time(calls[who])
    return [
        {
            "shape": name,
            "causal": causal,
            "function": who,
            "error": errors[who],
            "host_p50_us": percentile(host[who], 0.5),
            "call_p50_us": percentile(wait[who], 0.5),
            "call_p90_us": percentile(wait[who], 0.9),
            "samples": len(wait[who]),
        }
        for who in calls
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", help="also write the numbers to a file")
    arguments.add_argument("--rounds", type=int, default=10)
    options = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    print(f"{flashcore_attn.info()['cuda']['devices'] or device}, torch {torch.__version__}")
    print(f"{'shape':12} {'causal':6} {'function':10} {'host p50':>9} {'call p50':>9} {'call p90':>9}   µs")
    with torch.no_grad():
        for name in SHAPES:
            for causal in (False, True):
                for row in measure(name, causal, options.rounds, device):
                    rows.append(row)
                    print(
                        f"{name:12} {causal!s:6} {row['function']:10} {row['host_p50_us']:9.2f} "
                        f"{row['call_p50_us']:9.2f} {row['call_p90_us']:9.2f}",
                        flush=True,
                    )
    if options.json:
        where = {"torch": torch.__version__, "python": platform.python_version(), "info": flashcore_attn.info()}
        with open(options.json, "w") as file:
            json.dump({**where, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
