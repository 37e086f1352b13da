"""Hugging Face transformers models give the same results with FlashCore as with sdpa and eager."""

import flashcore_attn.transformers
import pytest
import torch
from flashcore_attn import ContractError, UnsupportedError
from flashcore_attn._fused_mask import FusedMask
from transformers import (
    BertConfig,
    BertModel,
    CompileConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GitConfig,
    GitModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    StaticCache,
)
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask

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
    assert len(calls) == 2, "one per layer"


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


#: The positions of packed sequences, (batch, length): of other lengths in each batch entry.
PACKED = [
    torch.tensor([[*range(4), *range(9), *range(1)], [*range(14)]]),
    torch.tensor([[*range(1), *range(5), *range(8)], [*range(7), *range(7)]]),
]


def packed_logits(model, ids, positions, implementation):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids, position_ids=positions, use_cache=False)[0]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences_compile_into_one_graph_for_all_their_lengths(kind):
    """The graph does not depend on where sequences begin: it runs for others."""
    torch.compiler.reset()
    model, ids = build(kind), torch.randint(0, 100, (2, 14), generator=torch.Generator().manual_seed(0))
    expected = [packed_logits(model, ids, positions, "eager") for positions in PACKED]
    model.set_attn_implementation("fcore")
    calls = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: calls.append(graph.code) or graph)
    with torch.no_grad():
        for positions, wanted in zip(PACKED, expected):
            found = compiled(ids, position_ids=positions, use_cache=False)[0]
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    assert len(calls) == 1 and "attention_varlen" in calls[0] and "attention_masked" not in calls[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences_may_be_given_by_their_ends(kind, compiled):
    """As DataCollatorWithFlattening gives them with ``return_flash_attn_kwargs``."""
    torch.compiler.reset()
    model, ids = build(kind), torch.randint(0, 100, (1, 14), generator=torch.Generator().manual_seed(0))
    positions, ends = PACKED[0][:1], torch.tensor([0, 4, 13, 14], dtype=torch.int32)
    expected = packed_logits(model, ids, positions, "eager")
    model.set_attn_implementation("fcore")
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9, "use_cache": False}
    with torch.no_grad():
        found = run(ids, position_ids=positions, **given)[0]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_ends_of_packed_sequences_do_not_go_with_padding(ids):
    model, ends = build("llama"), torch.tensor([0, LENGTH, 2 * LENGTH, 3 * LENGTH], dtype=torch.int32)
    model.set_attn_implementation("fcore")
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q with a mask for padding"):
        model(ids, attention_mask=PADDING["left"], cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_exported_models_keep_the_mask(ids):
    model, mask = build("llama"), PADDING["left"]
    expected = outputs(model, ids, mask, "eager")
    model.set_attn_implementation("fcore")
    options = {"attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), options, strict=False).module()
        found = exported(ids, **options)[0]
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=2e-6, rtol=1e-5)


def no_recompilation():
    return torch.compiler.set_stance("fail_on_recompile")


@pytest.mark.parametrize(("kind", "padding"), [("llama", "none"), ("mistral", "left")])
def test_generation_with_a_static_cache_compiles_into_one_graph_for_all_steps(kind, padding, ids):
    """One graph for the prompt and one for every later token, without a break."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = build(kind)
    options = {
        "attention_mask": torch.ones_like(ids) if padding == "none" else PADDING[padding], "max_new_tokens": 6,
        "do_sample": False, "pad_token_id": 0, "cache_implementation": "static", "disable_compile": True,
    }  # fmt: skip
    model.set_attn_implementation("eager")
    expected = model.generate(ids, **options)
    model.set_attn_implementation("fcore")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_generation_with_a_static_cache_runs_in_cuda_graphs(ids):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = build("llama").to("cuda", torch.bfloat16)
    model.set_attn_implementation("fcore")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(ids.cuda(), **options, disable_compile=True)
    graphs = CompileConfig(fullgraph=True, backend="cudagraphs", mode=None)
    assert torch.equal(model.generate(ids.cuda(), **options, compile_config=graphs), expected)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_a_static_cache_that_the_graph_reads_itself_needs_no_recompilation(ids):
    torch.compiler.reset()
    model = build("llama")
    expected = outputs(model, ids, None, "eager")
    model.set_attn_implementation("fcore")
    cache = StaticCache(config=model.config, max_cache_len=24)
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        found = [step(ids[:, 9:10], past_key_values=cache)[0]]
        with no_recompilation():
            found += [step(ids[:, i : i + 1], past_key_values=cache)[0] for i in range(10, LENGTH)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 9:], atol=2e-6, rtol=1e-5)


def mask_of(function=causal_mask_function, padding="left", q_length=LENGTH, **options):
    """Our mask and eager's."""
    given = {
        "batch_size": 3, "q_length": q_length, "kv_length": LENGTH, "q_offset": LENGTH - q_length,
        "mask_function": function, "attention_mask": None if padding == "none" else PADDING[padding].bool(), **options,
    }  # fmt: skip
    return flashcore_attn.transformers.attention_mask(**given), eager_mask(**given)


@pytest.mark.parametrize("q_length", [1, 4, LENGTH])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("function", [causal_mask_function, bidirectional_mask_function])
def test_whoever_looks_at_a_mask_sees_that_of_eager(function, padding, q_length):
    ours, theirs = mask_of(function, padding, q_length)
    assert isinstance(ours, FusedMask) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert torch.equal(ours + 0, theirs)
    assert torch.equal(torch.cat([ours, ours]), torch.cat([theirs, theirs]))
    assert torch.equal(ours[:, :, :, :5], theirs[:, :, :, :5])
    assert torch.equal(ours.to(torch.bool), theirs.to(torch.bool))
    assert ours.tolist() == theirs.tolist()


def test_a_mask_is_none_only_where_eager_has_none():
    for skip in (True, False):
        ours, theirs = mask_of(bidirectional_mask_function, "none", allow_is_bidirectional_skip=skip)
        assert (ours is None) == (theirs is None) == skip


def test_a_mask_that_nobody_looks_at_takes_no_memory():
    ours, _ = mask_of(q_length=LENGTH)
    moved = ours.contiguous().detach().to("cpu", torch.float64)
    assert isinstance(moved, FusedMask) and moved.dtype == torch.float64
    assert ours.untyped_storage().nbytes() == 4 and moved.untyped_storage().nbytes() == 8


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", ["the mask", "a view"])
def test_a_mask_that_a_model_changes_in_place_counts_as_changed(change, inference):
    q = torch.randn(3, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = mask_of(padding="none")
    with torch.inference_mode(inference):
        for mask in (ours, theirs):
            hidden = torch.finfo(torch.float32).min
            (mask if change == "the mask" else mask[:, 0])[..., :5] = 0.0
            (mask if change == "the mask" else mask[:, 0])[..., 5:] = hidden
        o, _ = flashcore_attn.transformers.attention_forward(torch.nn.Module(), q, q, q, ours)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=theirs).transpose(1, 2)
    torch.testing.assert_close(o, expected, atol=2e-6, rtol=1e-5)


def test_a_mask_for_other_keys_than_there_are_is_cut_as_eager_cuts_it():
    q, k = (torch.randn(3, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 15))
    ours, theirs = mask_of(q_length=4)
    o, _ = flashcore_attn.transformers.attention_forward(torch.nn.Module(), q, k, k, ours)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=theirs[..., :15]).transpose(1, 2)
    torch.testing.assert_close(o, expected, atol=2e-6, rtol=1e-5)


def own_attention(x, mask):
    return (x @ x.transpose(2, 3) + mask[:, :, :, : x.size(2)]).softmax(-1) @ x


def test_attention_of_a_models_own_sees_the_mask_in_a_compiled_graph():
    x = torch.randn(3, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = mask_of()
    expected = own_attention(x, theirs)
    torch.compiler.reset()
    compiled = torch.compile(own_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ours), expected)
    made_inside = torch.compile(lambda x: own_attention(x, mask_of()[0]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(made_inside(x), expected)


def test_a_compiled_layer_takes_masks_of_other_lengths_without_recompilation():
    x = torch.randn(3, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()

    def layer(x, mask):
        return flashcore_attn.transformers.attention_forward(torch.nn.Module(), x, x, x, mask)[0]

    other = PADDING["left"].flip(0).bool()
    masks = [mask_of()[0], mask_of(attention_mask=other)[0]]
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, masks[0]), layer(x, masks[0]))
    with no_recompilation():
        torch.testing.assert_close(compiled(x, masks[1]), layer(x, masks[1]))


def test_a_tensor_that_attention_does_not_know_is_refused():
    q = torch.randn(1, 1, 4, 8)
    call = flashcore_attn.transformers.attention_forward
    with pytest.raises(UnsupportedError, match="gives relative_bias to attention"):
        call(torch.nn.Module(), q, q, q, None, relative_bias=torch.zeros(4, 4))
    call(torch.nn.Module(), q, q, q, None, position_ids=torch.arange(4), sliding_window=3)


def test_one_number_for_all_keys_is_a_mask(ids):
    """While RecurrentGemma decodes, transformers counts the keys of its first layer, which has none."""
    sizes = SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 2, "attention_window_size": 6}
    torch.manual_seed(0)
    model, tokens = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, eos_token_id=None)).eval(), {}
    for implementation in ("eager", "fcore"):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens["fcore"], tokens["eager"])


def test_a_model_that_picks_its_layers_by_name_is_refused_when_it_is_built():
    """Git has both: layers that use the interface, and others that it looks up by name."""
    with pytest.raises(UnsupportedError, match="GitModel computes attention by itself"):
        GitModel._from_config(GitConfig(num_hidden_layers=1), attn_implementation="fcore")


def test_dropout_in_training_is_refused(ids):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)).train()
    model.set_attn_implementation("fcore")
    with pytest.raises(UnsupportedError, match="dropout is 0.1"):
        model(ids)


def test_a_name_that_transformers_would_misread_is_refused():
    with pytest.raises(ContractError, match="looks for flash-attn"):
        flashcore_attn.transformers.register("flashcore")
