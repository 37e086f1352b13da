"""The quick part of scripts/transformers-models: transformers models agree with eager, or are refused."""

import flashcore_attn.transformers
import pytest
import torch
import transformers_models as models

models.register()
MODELS = {model.name: model for model in models.MODELS}

OWN_ATTENTION = ["Bloom", "CodeGen", "XGLM", "Falcon", "GPT-J", "GPT-Neo", "MPT"]
RIGHT = {
    "Llama": ["prefill", "padding left", "padding right", "causality", "parts", "generate", "static cache", "training"],
    "Mistral": ["prefill", "padding left", "padding right", "parts", "static cache"],
    "Gemma 2": ["prefill", "padding left", "causality", "parts", "static cache"],
    "GPT-2": ["prefill", "padding left", "causality", "generate"],
    "DeepSeek V3": ["prefill", "padding left"],
    "BERT": ["prefill", "padding left", "padding right", "training"],
    "ModernBERT": ["prefill", "padding left"],
    "BART": ["prefill", "padding right", "causality", "generate"],
    "Whisper": ["prefill", "causality"],
    "CLIP text": ["prefill", "causality"],
    "LLaVA": ["prefill", "padding left"],
}
REFUSED = {
    "T5": "position_bias",
    "GPT-OSS": "s_aux",
    "DeepSeek V3.2": "indices",
    "Llama 4": "neither padding nor causal nor a window",
    "Gemma 3 with images": "neither padding nor causal nor a window",
    "ModernBERT": "neither padding nor causal nor a window",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_gives_what_it_gives_with_eager(name):
    wrong = {
        check: cell for check, cell in models.run(MODELS[name], RIGHT[name]).items() if cell.verdict != models.RIGHT
    }
    assert not wrong


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_fused_is_refused_by_name(name):
    cell = models.run(MODELS[name], ["padding right"])["padding right"]
    assert cell.verdict == models.REFUSED and REFUSED[name] in cell.detail


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_attends_by_itself_is_refused_when_it_is_built(name):
    cell = models.run(MODELS[name], ["prefill"])["prefill"]
    assert cell.verdict == models.REFUSED
    assert f"{MODELS[name].class_name} computes attention by itself" in cell.detail


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_attends_by_itself_gets_its_mask_even_past_the_refusal(name):
    theirs = models.Subject(MODELS[name], "eager")
    ours = models.Subject(MODELS[name], "eager", theirs)
    ours.model.config._attn_implementation = flashcore_attn.transformers.NAME
    models.causality(MODELS[name], ours, theirs)
    for padding in ("none", "left", "right"):
        given = theirs.inputs(padding)
        with torch.no_grad():
            assert torch.equal(ours.output(given), theirs.output(given))


@pytest.mark.parametrize(
    "check", ["prefill", "padding left", "padding right", "causality", "parts", "generate", "training"]
)
def test_the_checks_find_a_mask_that_was_left_out(check):
    model = MODELS["Llama"]
    theirs = models.Subject(model, "eager")
    with pytest.raises(models.Wrong, match="differ from those|change with the last token|gradient of"):
        models.CHECKS[check](model, models.Subject(model, "unmasked", theirs), theirs)
