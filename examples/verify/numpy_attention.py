"""Attention in NumPy as a subject of `flashcore verify --command`: reads q, k and v, writes o and lse.

    flashcore verify --command 'python examples/verify/numpy_attention.py {in} {out}' --filter lengths/
"""

import json
import struct
import sys

import numpy as np


def read(path):
    """The tensors of a safetensors file as f32 arrays, their dtype, and the metadata."""
    with open(path, "rb") as file:
        data = file.read()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    meta, tensors = header.pop("__metadata__", {}), {}
    for name, info in header.items():
        first, last = info["data_offsets"]
        raw = data[8 + size + first : 8 + size + last]
        if info["dtype"] == "BF16":
            bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            array = bits.view(np.float32)
        else:
            kind = {"F16": np.float16, "F32": np.float32, "I32": np.int32}[info["dtype"]]
            array = np.frombuffer(raw, kind)
            if kind != np.int32:
                array = array.astype(np.float32)
        tensors[name] = array.reshape(info["shape"])
    return tensors, header["q"]["dtype"], meta


def to_bytes(array, dtype):
    """The bytes of an f32 array in a dtype, rounded to nearest even."""
    array = np.ascontiguousarray(array, np.float32)
    if dtype != "BF16":
        return array.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write(path, tensors):
    """A safetensors file of (name, dtype, shape, bytes)."""
    header, offset = {}, 0
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(raw for *_, raw in tensors))


def seen(mask, len_q, len_k, keys):
    """Which of len_k keys each query sees, if only the first `keys` of them exist."""
    place, key = np.arange(len_q)[:, None], np.arange(len_k)[None, :]
    exists = np.broadcast_to(key < keys, (len_q, len_k))
    if mask == "full":
        return exists
    if mask == "causal-top-left":
        return exists & (key <= place)
    place = place + keys - len_q
    if mask == "causal":
        return exists & (key <= place)
    left, right = (np.inf if side == "inf" else int(side) for side in mask[len("window(") : -1].split(","))
    return exists & (key >= place - left) & (key <= place + right)


def main():
    source, target = sys.argv[1:]
    tensors, dtype, meta = read(source)
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) * float(meta["scale"])
    softcap = float(meta["softcap"])
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    lengths = tensors.get("key_lengths", [k.shape[2]] * k.shape[0])
    visible = np.stack([seen(meta["mask"], q.shape[2], k.shape[2], keys) for keys in lengths])[:, None]
    scores = np.where(visible, scores, -np.inf)
    # What no query sees may be anything, and 0 times NaN is NaN.
    v = np.where(visible.any(axis=2)[..., None], v, 0)
    most = scores.max(axis=-1, keepdims=True)
    most = np.where(np.isfinite(most), most, 0)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        o = np.where(total > 0, weights @ v / total, 0)
        lse = (most + np.log(total))[..., 0]
    write(
        target,
        [("o", dtype, list(o.shape), to_bytes(o, dtype)), ("lse", "F32", list(lse.shape), to_bytes(lse, "F32"))],
    )


main()
