"""Training transformers models gives the losses and gradients that it gives with torch's attention."""

import flashcore_attn.transformers
import pytest
import torch
from test_transformers import PADDING, SIZES, build
from transformers import DataCollatorWithFlattening, DefaultDataCollator, LlamaConfig, LlamaForCausalLM

flashcore_attn.transformers.register()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Sequences that are packed one behind the other, and the second batch entry is two of them.
LENGTHS = [[7, 1, 9], [12, 5]]


def tokens(*shape):
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))


def gradients(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def are_alike(model, atol=1e-5, rtol=1e-4, other="sdpa", **inputs):
    ours, theirs = (gradients(model, implementation, **inputs) for implementation in ("fcore", other))
    assert sum(x.abs().sum() for x in theirs[1:]) > 1
    for given, expected in zip(ours, theirs):
        torch.testing.assert_close(given, expected, atol=atol, rtol=rtol)


def labelled(padding):
    """Tokens with padding, whose outputs mean nothing: no loss is taken there, nor of what comes after it."""
    ids, mask = tokens(3, 17), PADDING[padding]
    of_padding = mask == 0
    of_padding[:, 1:] |= mask[:, :-1] == 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(of_padding, -100)}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_batches_have_the_gradients_of_sdpa(kind, padding):
    are_alike(build(kind).train(), **labelled(padding))


def test_a_softcap_and_a_window_have_the_gradients_of_eager():
    are_alike(build("gemma2").train(), other="eager", **labelled("left"))


def packed_inputs():
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    return {"input_ids": tokens(2, 17), "position_ids": positions, "labels": tokens(2, 17)}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences_have_the_gradients_of_sdpa(kind):
    are_alike(build(kind).train(), use_cache=False, **packed_inputs())


def test_packed_sequences_never_make_a_mask(monkeypatch):
    def refuse(self):
        raise AssertionError("the mask was made in full")

    monkeypatch.setattr(flashcore_attn._fused_mask.FusedMask, "full", refuse)
    gradients(build("llama").train(), "fcore", use_cache=False, **packed_inputs())


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_whoever_looks_at_the_mask_of_packed_sequences_sees_that_of_eager(kind):
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    model, made = build(kind), {}
    make = create_causal_mask if kind == "llama" else create_sliding_window_causal_mask
    for implementation in ("fcore", "eager"):
        model.set_attn_implementation(implementation)
        made[implementation] = make(
            config=model.config, inputs_embeds=torch.zeros(2, 17, 64), attention_mask=None, past_key_values=None,
            position_ids=packed_inputs()["position_ids"],
        )  # fmt: skip
    assert made["fcore"].seen.sequences.tolist() == [0, 7, 8, 17, 29, 34]
    assert torch.equal(made["fcore"] + 0, made["eager"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_same_gradients(reentrant):
    model = build("llama").train()
    expected = gradients(model, "fcore", use_cache=False, **labelled("left"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients(model, "fcore", use_cache=False, **labelled("left"))
    assert all(torch.equal(x, y) for x, y in zip(again, expected))


def test_autocast_trains_in_bfloat16(monkeypatch):
    dtypes, attend = [], flashcore_attn.transformers.attend

    def seen(*args, **options):
        o = attend(*args, **options)
        dtypes.append(o.dtype)
        return o

    monkeypatch.setattr(flashcore_attn.transformers, "attend", seen)
    with torch.autocast("cpu", torch.bfloat16):
        are_alike(build("llama").train(), atol=2e-2, rtol=2e-2, **labelled("right"))
    assert dtypes == [torch.bfloat16] * 2


RUNS = {
    "plain": ({}, DefaultDataCollator()),
    "bf16": ({"bf16": True, "gradient_checkpointing": True}, DefaultDataCollator()),
    "packed": ({}, DataCollatorWithFlattening(return_flash_attn_kwargs=True)),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_trainer_finds_the_losses_of_sdpa(run, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    options, collator = RUNS[run]
    # The same four sequences in every step, so that the loss falls.
    lengths = [11, 17, 5, 13] if run == "packed" else [16] * 4
    examples = [{"input_ids": ids[:n].tolist(), "labels": ids[:n].tolist()} for ids, n in zip(tokens(4, 17), lengths)]
    losses = {}
    for implementation in ("sdpa", "fcore"):
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation=implementation)
        model = LlamaForCausalLM(config)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE == "cpu", seed=0, **options,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collator)
        trainer.train()
        losses[implementation] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ours, theirs = losses["fcore"], losses["sdpa"]
    assert len(theirs) == 3 and theirs[-1] < theirs[0] - 0.1
    assert ours == pytest.approx(theirs, rel=2e-2 if run == "bf16" or DEVICE == "cuda" else 1e-4)
