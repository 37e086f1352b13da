"""The task's files load as robust-kbench loads them, the reference is attention, and FlashCore agrees with it.

    python tasks/robust-kbench/test_attention.py

Needs torch, and no GPU. What needs flashcore-attn, a C++ compiler with ninja, or robust-kbench is skipped where that is
missing. Lengths are cut for the CPU, all else is as in the task.
"""

import importlib.util
import json
import pathlib
import shutil
import tempfile
import unittest

import torch

TASK = pathlib.Path(__file__).resolve().parent / "attention"
CONFIGS = ["config_forward.json", "config_forward_bf16.json"]
#: What the runner allows by default, and what the README tells to give it for bfloat16.
TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2}
#: The longest sequence on a CPU.
LONGEST = 70


def load_task():
    """The module, as the runner loads it."""
    spec = importlib.util.spec_from_file_location("func_forward", TASK / "func_forward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(name, kind):
    """Every (init, input) of a config file; what is shared goes to both, and last."""
    config = json.loads((TASK / name).read_text())
    for init in config[f"{kind}_init_configs"]:
        for given in config[f"{kind}_input_configs"]:
            for shared in config[f"{kind}_shared_configs"]:
                yield {**init, **shared}, {**given, **shared}


def cut(given):
    """The same with lengths for a CPU, their difference kept where it can be."""
    seq_len = min(given["seq_len"], LONGEST)
    longer = min(given["kv_len"] - given["seq_len"], LONGEST)
    return {**given, "seq_len": seq_len, "kv_len": seq_len + longer, "batch_size": min(given["batch_size"], 2)}


def plain(q, k, v, causal, softcap, scale):
    """Attention in double precision, by its definition."""
    group = q.size(1) // k.size(1)
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        last = torch.arange(q.size(2)).view(-1, 1) + k.size(2) - q.size(2)
        scores[..., torch.arange(k.size(2)) > last] = float("-inf")
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, dim=-1), values)


class Task(unittest.TestCase):
    def setUp(self):
        self.task = load_task()
        torch.manual_seed(42)

    def each(self):
        """Every setting's module, inputs, the reference's output and the dtype."""
        for name in CONFIGS:
            for init, given in settings(name, "multi"):
                with self.subTest(config=name, init=init, given=given):
                    model, inputs = self.task.Model(**init), self.task.get_inputs(**cut(given))
                    with torch.no_grad():
                        out = model(*inputs)
                    yield model, inputs, out, given["dtype"]

    def agrees(self, fn):
        """Whether a function passes as the runner judges it, twice on the same inputs."""
        seen = 0
        for model, inputs, expected, dtype in self.each():
            for _ in range(2):
                with torch.no_grad():
                    out = model(*inputs, fn=fn)
                self.assertEqual((out.shape, out.dtype), (expected.shape, expected.dtype))
                within = TOLERANCE[dtype]
                worst = (out.float() - expected.float()).abs().max()
                self.assertTrue(torch.allclose(expected, out, atol=within, rtol=within), f"off by {worst}")
            seen += 1
        self.assertEqual(seen, 72)

    def test_single_settings_are_the_mission_shape(self):
        for name in CONFIGS:
            ((init, given),) = settings(name, "single")
            q, k, v = self.task.get_inputs(**given)
            self.assertEqual(q.shape, (1, 8, 512, 64))
            self.assertEqual((k.shape, v.shape), (q.shape, q.shape))
            self.assertEqual(str(q.dtype), f"torch.{given['dtype']}")
            self.assertEqual(self.task.Model(**init).scale, 0.125)
            self.assertEqual(len(self.task.input_names), 3)

    def test_the_reference_is_attention(self):
        for model, inputs, out, dtype in self.each():
            expected = plain(*inputs, model.causal, model.softcap, model.scale)
            self.assertEqual(out.shape, inputs[0].shape)
            within = TOLERANCE[dtype]
            self.assertTrue(torch.allclose(expected, out.double(), atol=within, rtol=within))

    def test_a_wrong_kernel_is_refused(self):
        def uniform(q, k, v, causal, softcap, scale):
            return self.task.forward_fn(q * 0, k, v, causal, softcap, scale)

        model = self.task.Model(head_dim=64)
        inputs = self.task.get_inputs(seq_len=LONGEST, kv_len=LONGEST)
        self.assertFalse(torch.allclose(model(*inputs), model(*inputs, fn=uniform), atol=1e-3, rtol=1e-3))

    @unittest.skipUnless(importlib.util.find_spec("flashcore_attn"), "flashcore-attn is not installed")
    def test_flashcore_agrees_with_the_reference(self):
        from flashcore_attn import attention

        def forward(q, k, v, causal, softcap, scale):
            return attention(q, k, v, causal=causal, softcap=softcap, scale=scale)

        self.agrees(forward)

    @unittest.skipUnless(importlib.util.find_spec("flashcore_attn"), "flashcore-attn is not installed")
    @unittest.skipUnless(shutil.which("ninja") and shutil.which("c++"), "a C++ compiler and ninja are needed")
    def test_the_extension_agrees_with_the_reference(self):
        from torch.utils.cpp_extension import load

        with tempfile.TemporaryDirectory() as folder:
            # It holds no device code, so a C++ compiler takes it as it is.
            source = pathlib.Path(folder, "forward.cpp")
            shutil.copy(TASK / "forward.cu", source)
            self.agrees(load(name=TASK.name, sources=[str(source)], build_directory=folder).forward)

    @unittest.skipUnless(importlib.util.find_spec("robust_kbench"), "robust-kbench is not installed")
    def test_robust_kbench_loads_the_task(self):
        from robust_kbench.kernel_task import KernelTask

        task = KernelTask(str(TASK), multi_input_settings=True, multi_init_settings=True)
        self.assertEqual(len(task.get_configs_str()), 36)


if __name__ == "__main__":
    unittest.main(verbosity=2)
