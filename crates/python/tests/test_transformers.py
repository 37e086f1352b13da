"""Models of Hugging Face transformers give the same with FlashCore as with sdpa and eager."""

import flashcore_attn.transformers
import pytest
import torch
from flashcore_attn import ContractError, UnsupportedError
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

flashcore_attn.transformers.register()

LENGTH = 17
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
PADDING = {
    "none": None,
    "left": torch.tensor([[0] * 5 + [1] * 12, [1] * LENGTH, [0] * 3 + [1] * 14]),
    "right": torch.tensor([[1] * 12 + [0] * 5, [1] * LENGTH, [1] * 14 + [0] * 3]),
}


def build(kind):
    torch.manual_seed(0)
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6)),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=16, sliding_window=6, attn_logit_softcapping=5.0)
        ),
        "bert": lambda: BertModel(BertConfig(**SIZES)),
    }
    return models[kind]().eval()


def outputs(model, ids, mask, implementation):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids, attention_mask=mask)[0]


@pytest.fixture
def ids():
    return torch.randint(0, 100, (3, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "bert"])
def test_logits_are_those_of_sdpa_and_eager(kind, padding, ids):
    model, mask = build(kind), PADDING[padding]
    tokens = torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    ours = outputs(model, ids, mask, "fcore")
    others = ["eager"] if kind == "gemma2" else ["eager", "sdpa"]
    for other in others:
        torch.testing.assert_close(ours[tokens], outputs(model, ids, mask, other)[tokens], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_gives_the_same_tokens(kind, cache, ids):
    model, tokens = build(kind), {}
    for implementation in ("sdpa", "fcore"):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(
            ids, attention_mask=PADDING["left"], max_new_tokens=12, do_sample=False, pad_token_id=0,
            cache_implementation=cache, disable_compile=True,
        )  # fmt: skip
    assert torch.equal(*tokens.values())


def test_the_attention_of_a_model_is_computed_by_flashcore(ids, monkeypatch):
    model, calls = build("llama"), []
    real = flashcore_attn.transformers.attend
    monkeypatch.setattr(flashcore_attn.transformers, "attend", lambda *args, **kw: calls.append(1) or real(*args, **kw))
    outputs(model, ids, None, "fcore")
    assert len(calls) == 2, "one a layer"


def test_training_has_gradients(ids):
    model, gradients = build("llama"), {}
    model.train()
    for implementation in ("eager", "fcore"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, attention_mask=PADDING["right"], labels=ids).loss.backward()
        gradients[implementation] = [p.grad.clone() for p in model.parameters()]
    for ours, theirs in zip(gradients["fcore"], gradients["eager"]):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_hole_in_the_padding_is_refused_not_ignored(ids):
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, 4] = 0
    with pytest.raises(UnsupportedError, match="do not lie side by side"):
        outputs(build("llama"), ids, mask, "fcore")


def test_a_mask_of_four_dimensions_is_recognised(ids):
    model = build("llama")
    mask = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.testing.assert_close(
        outputs(model, ids, mask, "fcore"), outputs(model, ids, mask, "sdpa"), atol=2e-6, rtol=1e-5
    )


def test_compiled_models_have_no_graph_break(ids):
    torch.compiler.reset()
    model = build("llama")
    expected = outputs(model, ids, None, "fcore")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False)[0], expected, atol=2e-6, rtol=1e-5)


def test_dropout_in_training_is_refused(ids):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)).train()
    model.set_attn_implementation("fcore")
    with pytest.raises(UnsupportedError, match="dropout is 0.1"):
        model(ids)


def test_a_name_that_transformers_would_misread_is_refused():
    with pytest.raises(ContractError, match="looks for flash-attn"):
        flashcore_attn.transformers.register("flashcore")
