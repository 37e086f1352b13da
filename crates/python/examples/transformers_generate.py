"""A tiny Llama with random weights generates text with FlashCore, sdpa and eager: the same tokens.

python transformers_generate.py
"""

import flashcore_attn.transformers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

flashcore_attn.transformers.register()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
)
# The GPU's kernels take float16 and bfloat16.
model = LlamaForCausalLM(config).eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)

# Two prompts of different lengths, padded on the left.
prompts = torch.randint(1, 1000, (2, 12), device=device)
attention_mask = torch.ones_like(prompts)
prompts[0, :5], attention_mask[0, :5] = 0, 0

tokens = {}
for implementation in ("eager", "sdpa", "fcore"):
    model.set_attn_implementation(implementation)
    tokens[implementation] = model.generate(
        prompts, attention_mask=attention_mask, max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    print(f"{implementation:6} {tokens[implementation][0, 12:].tolist()}")
same = torch.equal(tokens["fcore"], tokens["sdpa"])
print(f"the same tokens as sdpa: {same}")
# In bfloat16 two correct results may differ in the last bit, and the tokens of a random model with it.
assert same or device == "cuda"
