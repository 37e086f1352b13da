"""Tiny models of many transformers architectures, with FlashCore compared with "eager".

``scripts/transformers-models`` runs all of them and writes the table of docs/transformers.md; a part of them is in
``test_transformers_models.py``. Weights are random, and those of q and k are enlarged, so that attention looks at few
keys and a wrong mask shows: every result is also compared with the result without the mask.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flashcore_attn.transformers
import torch
import transformers
from flashcore_attn import FlashCoreError
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask

LENGTH, BATCH, VOCABULARY, NEW_TOKENS = 17, 3, 99, 7
#: The largest allowed difference from eager, relative to the largest value. Both compute in float32.
TOLERANCE = 1e-5
#: The smallest change that leaving out the mask must cause, relative to the largest value.
NOTICEABLE = 1e-2

RIGHT, REFUSED, WRONG, NONE = "right", "refused", "WRONG", "—"


@dataclass
class Model:
    """An architecture: how it is built, and what is fed to it."""

    name: str
    config: Callable[[], Any]
    class_name: str
    kind: str = "decoder"
    note: str = ""


@dataclass
class Cell:
    """The result of one check of one model."""

    verdict: str
    detail: str = ""


# -- the models -------------------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = _TEXT | {"num_key_value_heads": 2}
_VISION = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip
_TWO_SIDED = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
_NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_WINDOW = 6


def _of(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


def _decoder(name: str, prefix: str, sizes: dict[str, Any], note: str = "", **options: Any) -> Model:
    return Model(name, _of(f"{prefix}Config", **sizes | options), f"{prefix}ForCausalLM", "decoder", note)


def _encoder(name: str, prefix: str, note: str = "", **options: Any) -> Model:
    return Model(name, _of(f"{prefix}Config", **_TEXT | _NO_DROPOUT | options), f"{prefix}Model", "encoder", note)


def _seq2seq(name: str, prefix: str, **options: Any) -> Model:
    class_name = f"{prefix}ForConditionalGeneration" if prefix != "Marian" else "MarianMTModel"
    return Model(name, _of(f"{prefix}Config", **_TWO_SIDED | options), class_name, "seq2seq")


def _of_openai(**others: Any) -> dict[str, Any]:
    """Sizes under GPT-2's names."""
    return {
        "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    } | others  # fmt: skip


def _vision_tower(**others: Any) -> dict[str, Any]:
    return _VISION | {"attention_dropout": 0.0} | others


def _with_images(prefix: str, text: str, vision: str, **options: Any) -> Callable[[], Any]:
    def config() -> Any:
        text_config = getattr(transformers, f"{text}Config")(
            **_GROUPED | {"head_dim": 16, "sliding_window": _WINDOW, "attention_dropout": 0.0}
        )
        vision_config = getattr(transformers, f"{vision}VisionConfig")(**_vision_tower())
        return getattr(transformers, f"{prefix}Config")(
            text_config=text_config, vision_config=vision_config, **options
        )  # fmt: skip

    return config


def _moe(**others: Any) -> dict[str, Any]:
    return _GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 32} | others


MODELS: list[Model] = [
    # Decoders.
    _decoder("Llama", "Llama", _GROUPED),
    _decoder("Mistral", "Mistral", _GROUPED, "window", sliding_window=_WINDOW),
    _decoder(
        "Gemma 2", "Gemma2", _GROUPED, "window, softcap", head_dim=16, sliding_window=_WINDOW,
        attn_logit_softcapping=5.0, query_pre_attn_scalar=16,
    ),
    Model("Gemma 3", _of("Gemma3TextConfig", **_GROUPED, head_dim=16, sliding_window=_WINDOW, query_pre_attn_scalar=16,
                         layer_types=["sliding_attention", "full_attention"]), "Gemma3ForCausalLM", note="window"),
    _decoder("Gemma", "Gemma", _GROUPED, head_dim=16),
    _decoder("Qwen 2", "Qwen2", _GROUPED),
    _decoder("Qwen 3", "Qwen3", _GROUPED, head_dim=16),
    _decoder("Qwen 2 MoE", "Qwen2Moe", _moe(num_experts=4, shared_expert_intermediate_size=32)),
    _decoder("Qwen 3 MoE", "Qwen3Moe", _moe(num_experts=4, head_dim=16)),
    _decoder("Mixtral", "Mixtral", _moe(num_local_experts=4), "window", sliding_window=_WINDOW),
    _decoder("Phi", "Phi", _TEXT, partial_rotary_factor=0.5, resid_pdrop=0.0, embd_pdrop=0.0),
    _decoder("Phi 3", "Phi3", _GROUPED, "window", sliding_window=_WINDOW, resid_pdrop=0.0, embd_pdrop=0.0),
    Model("GPT-2", _of("GPT2Config", **_of_openai()), "GPT2LMHeadModel"),
    _decoder("GPT-NeoX", "GPTNeoX", _TEXT, attention_dropout=0.0, hidden_dropout=0.0),
    _decoder("GPT BigCode", "GPTBigCode", _of_openai(), multi_query=True),
    _decoder("GPT-OSS", "GptOss", _moe(num_local_experts=4, head_dim=16), "sinks", sliding_window=_WINDOW),
    _decoder("OPT", "OPT", _TEXT, ffn_dim=64, word_embed_proj_dim=64, dropout=0.0),
    _decoder("OLMo", "Olmo", _GROUPED),
    _decoder("OLMo 2", "Olmo2", _GROUPED),
    _decoder("StarCoder 2", "Starcoder2", _GROUPED, "window", sliding_window=_WINDOW, residual_dropout=0.0),
    _decoder("StableLM", "StableLm", _GROUPED, hidden_dropout=0.0),
    _decoder("Cohere", "Cohere", _GROUPED),
    _decoder("Cohere 2", "Cohere2", _GROUPED, "window", head_dim=16, sliding_window=_WINDOW),
    _decoder("Granite", "Granite", _GROUPED),
    _decoder("Persimmon", "Persimmon", _TEXT, hidden_dropout=0.0),
    _decoder("Nemotron", "Nemotron", _GROUPED, head_dim=16),
    _decoder("GLM", "Glm", _GROUPED, head_dim=16, partial_rotary_factor=0.5),
    _decoder("SmolLM 3", "SmolLM3", _GROUPED),
    _decoder("BioGPT", "BioGpt", _TEXT | _NO_DROPOUT, activation_dropout=0.0, layerdrop=0.0),
    _decoder(
        "DeepSeek V3", "DeepseekV3", _TEXT | {"num_key_value_heads": 4}, "head dims of q and v differ",
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
    _decoder(
        "DeepSeek V3.2", "DeepseekV32", _TEXT | {"num_key_value_heads": 4}, "chosen keys", q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, n_group=2, topk_group=1, first_k_dense_replace=1,
        index_n_heads=2, index_head_dim=16, index_topk=4,
    ),
    Model(
        "Llama 4",
        _of(
            "Llama4TextConfig", **_GROUPED, head_dim=16, attention_chunk_size=8, num_local_experts=2,
            num_experts_per_tok=1, intermediate_size_mlp=64, attn_temperature_tuning=False,
        ),
        "Llama4ForCausalLM",
        note="chunks",
    ),
    _decoder(
        "Jamba", "Jamba", _GROUPED, "Mamba between", num_experts=2, mamba_d_state=8, mamba_dt_rank=8,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
    ),
    _decoder("Bloom", "Bloom", {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
             hidden_size=64, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    _decoder("CodeGen", "CodeGen", _of_openai(n_ctx=64, rotary_dim=8)),
    Model("XGLM", _of("XGLMConfig", vocab_size=VOCABULARY, d_model=64, ffn_dim=64, num_layers=2, attention_heads=4,
                      max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, pad_token_id=0, bos_token_id=1,
                      eos_token_id=None), "XGLMForCausalLM"),
    _decoder("Falcon", "Falcon", _TEXT, hidden_dropout=0.0, attention_dropout=0.0),
    _decoder("GPT-J", "GPTJ", _of_openai(rotary_dim=8)),
    Model("GPT-Neo", _of("GPTNeoConfig", vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4,
                         attention_types=[[["global", "local"], 1]], window_size=_WINDOW, max_position_embeddings=64,
                         intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=None), "GPTNeoForCausalLM"),
    Model("MPT", _of("MptConfig", vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, expansion_ratio=1,
                     max_seq_len=64, pad_token_id=0, bos_token_id=1, eos_token_id=None), "MptForCausalLM"),
    # Encoders.
    _encoder("BERT", "Bert"),
    _encoder("RoBERTa", "Roberta"),
    _encoder("ELECTRA", "Electra", embedding_size=64),
    _encoder("ALBERT", "Albert", embedding_size=64),
    _encoder("ESM", "Esm", position_embedding_type="rotary"),
    _encoder("ModernBERT", "ModernBert", "window to both sides", local_attention=_WINDOW, global_attn_every_n_layers=2,
             embedding_dropout=0.0, mlp_dropout=0.0, attention_dropout=0.0),
    Model("DistilBERT", _of("DistilBertConfig", vocab_size=VOCABULARY, dim=64, hidden_dim=64, n_layers=2, n_heads=4,
                            max_position_embeddings=64, dropout=0.0, attention_dropout=0.0),
          "DistilBertModel", "encoder"),
    _encoder("DeBERTa v2", "DebertaV2", "attends to positions by itself"),
    # Encoders with decoders.
    _seq2seq("BART", "Bart"),
    _seq2seq("mBART", "MBart"),
    _seq2seq("Pegasus", "Pegasus"),
    _seq2seq("Marian", "Marian"),
    _seq2seq("M2M-100", "M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    Model("T5", _of("T5Config", vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
                    dropout_rate=0.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1),
          "T5ForConditionalGeneration", "seq2seq", "bias on scores"),
    Model("Whisper", _of("WhisperConfig", **_TWO_SIDED | {"num_mel_bins": 8, "max_source_positions": 16,
                         "max_target_positions": 64, "suppress_tokens": None, "begin_suppress_tokens": None}),
          "WhisperForConditionalGeneration", "speech"),
    # Images.
    Model("ViT", _of("ViTConfig", **_vision_tower(), **_NO_DROPOUT), "ViTModel", "vision"),
    Model("DINOv2", _of("Dinov2Config", **_vision_tower(), **_NO_DROPOUT), "Dinov2Model", "vision"),
    Model("SigLIP", _of("SiglipVisionConfig", **_vision_tower()), "SiglipVisionModel", "vision"),
    Model("CLIP text", _of("CLIPTextConfig", **_TEXT | {"eos_token_id": 2}, attention_dropout=0.0), "CLIPTextModel",
          "causal encoder"),
    Model("LLaVA", _with_images("Llava", "Llama", "CLIP", image_token_index=9, image_seq_length=9,
                                vision_feature_select_strategy="default"),
          "LlavaForConditionalGeneration", "images"),
    Model("Gemma 3 with images", _with_images("Gemma3", "Gemma3Text", "Siglip", image_token_index=9,
                                              mm_tokens_per_image=9),
          "Gemma3ForConditionalGeneration", "images", "images see both sides"),
]  # fmt: skip

# -- implementations to compare with ----------------------------------------------------------------------------


def _plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention that uses the mask and no other option."""
    group = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (query.size(3) ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.size(2)]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, **options: Any) -> None:
    return None


def _no_window(*args: Any, **options: Any) -> Tensor | None:
    """Eager's mask without windows, chunks and the like."""
    function = bidirectional_mask_function if "allow_is_bidirectional_skip" in options else causal_mask_function
    mask: Tensor | None = eager_mask(*args, **options | {"mask_function": function})
    return mask


def register() -> None:
    """Registers FlashCore, and implementations that are wrong on purpose."""
    # In models of this size threads only wait for each other.
    torch.set_num_threads(1)
    flashcore_attn.transformers.register()
    for name, mask in (("unmasked", _no_mask), ("windowless", _no_window)):
        transformers.AttentionInterface.register(name, _plain_attention)
        transformers.AttentionMaskInterface.register(name, mask)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the calls that reach FlashCore."""
    calls = [0]
    module = flashcore_attn.transformers
    real = {name: getattr(module, name) for name in ("attend", "masked")}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            return function(*args, **options)

        return call

    for name, function in real.items():
        setattr(module, name, counting(function))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(module, name, function)


# -- inputs -----------------------------------------------------------------------------------------------------

PADDING = {
    "left": torch.tensor([[0] * 5 + [1] * 12, [1] * LENGTH, [0] * 3 + [1] * 14]),
    "right": torch.tensor([[1] * 12 + [0] * 5, [1] * LENGTH, [1] * 14 + [0] * 3]),
}


class Subject:
    """A model that was built with an implementation, and how it is fed."""

    def __init__(self, model: Model, implementation: str, weights: Subject | None = None) -> None:
        torch.manual_seed(0)
        self.kind = model.kind
        cls = getattr(transformers, model.class_name)
        self.model = cls._from_config(copy.deepcopy(model.config()), attn_implementation=implementation).eval()
        if weights is None:
            _enlarge(self.model)
        else:
            self.model.load_state_dict(weights.model.state_dict())

    def inputs(self, padding: str = "none", last: int | None = None) -> dict[str, Any]:
        """What the model is fed; ``last`` replaces the last token that it decodes."""
        draw = torch.Generator().manual_seed(1)
        given: dict[str, Any] = {}
        ids = torch.randint(10, VOCABULARY, (BATCH, LENGTH), generator=draw)
        decoded = torch.randint(10, VOCABULARY, (BATCH, 9), generator=draw)
        if self.kind == "vision":
            return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=draw)}
        if self.kind == "images":
            # Nine tokens represent an image, after one token of text and before more text.
            place = slice(6, 15)
            ids[:, place] = 9
            given["pixel_values"] = torch.randn(BATCH, 3, 12, 12, generator=draw)
            if "token_type_ids" in self._arguments():
                given["token_type_ids"] = (ids == 9).long()
        if self.kind == "speech":
            given["input_features"] = torch.randn(BATCH, 8, 32, generator=draw)
        else:
            given["input_ids"] = ids
        if self.kind in ("seq2seq", "speech"):
            given["decoder_input_ids"] = decoded
        if last is not None:
            given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"][:, -1] = last
        if padding != "none":
            given["attention_mask"] = PADDING[padding]
        return given

    def _arguments(self) -> set[str]:
        return set(self.model.forward.__code__.co_varnames) | {
            name
            for cls in type(self.model).__mro__
            for name in getattr(getattr(cls, "forward", None), "__annotations__", {})
        }

    def output(self, given: dict[str, Any]) -> Tensor:
        """Logits or states, of the tokens that are not padding."""
        found = self.model(**given)
        output: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
        padding = given.get("attention_mask")
        if padding is not None and "decoder_input_ids" not in given:
            output = output[padding.bool()]
        return output

    def generate(self, given: dict[str, Any], cache: str) -> Any:
        given = {name: x for name, x in given.items() if name != "decoder_input_ids"}
        return self.model.generate(
            **given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None,
            cache_implementation=cache, disable_compile=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


def _enlarge(model: Any) -> None:
    """Makes the weights of q and k large, so that each query looks at few keys."""
    words = {
        6: "q k qkv query key q_proj k_proj qkv_proj Wqkv c_attn query_key_value q_lin k_lin q_b_proj kv_b_proj q_attn",
        # Otherwise the residual stream would hide what attention adds.
        4: "v value v_proj v_lin o_proj out_proj out_lin c_proj dense Wo",
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for factor, parts in words.items():
                if weight.dim() == 2 and not set(name.split(".")).isdisjoint(parts.split()):
                    weight.mul_(factor)


# -- checks -----------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A result that differs from eager's."""


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or not torch.isfinite(ours).all():
        return float("inf")
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _same(ours: Tensor, theirs: Tensor, what: str) -> None:
    difference = _difference(ours, theirs)
    if not difference <= TOLERANCE:
        raise Wrong(f"{what} differ from those of eager by {difference:.1e} of the largest")


def _noticeable(without: Tensor, theirs: Tensor, what: str) -> None:
    """The check itself must be able to fail."""
    difference = _difference(without, theirs)
    if not difference >= NOTICEABLE:
        raise Wrong(f"the check proves nothing: {what} changes eager's results by {difference:.1e} of the largest")


def _compare(model: Model, ours: Subject, theirs: Subject, padding: str) -> None:
    given = theirs.inputs(padding)
    with torch.no_grad():
        expected = theirs.output(given)
        with counted() as calls:
            _same(ours.output(given), expected, "outputs")
        if not calls[0]:
            raise Wrong("FlashCore was never called")
        causal = model.kind not in ("vision", "encoder")
        if padding != "none" and ("decoder_input_ids" in given or not causal or padding == "left"):
            unpadded = {name: x for name, x in given.items() if name != "attention_mask"}
            found = theirs.output(unpadded)
            tokens = given["attention_mask"].bool()
            _noticeable(found if "decoder_input_ids" in given else found[tokens], expected, "no padding mask")
        elif causal:
            # Causal tokens never see padding after them, so only the mask itself is left out.
            _noticeable(Subject(model, "unmasked", theirs).output(given), expected, "no mask")
        if "window" in model.note:
            _noticeable(Subject(model, "windowless", theirs).output(given), expected, "no window")


def _generated(model: Model, ours: Subject, theirs: Subject, cache: str) -> None:
    given = theirs.inputs("left" if model.kind in ("decoder", "images") else "none")
    with torch.no_grad():
        expected = theirs.generate(given, cache)
        found = ours.generate(given, cache)
    for step, (logits, others) in enumerate(zip(found.logits, expected.logits, strict=True)):
        _same(logits, others, f"logits of step {step}")
        if not torch.equal(found.sequences[:, : step - NEW_TOKENS], expected.sequences[:, : step - NEW_TOKENS]):
            return


def prefill(model: Model, ours: Subject, theirs: Subject) -> None:
    """The whole sequence at once, without padding."""
    _compare(model, ours, theirs, "none")


def padding_left(model: Model, ours: Subject, theirs: Subject) -> None:
    """Sequences that are padded on the left."""
    _compare(model, ours, theirs, "left")


def padding_right(model: Model, ours: Subject, theirs: Subject) -> None:
    """Sequences that are padded on the right."""
    _compare(model, ours, theirs, "right")


def causality(model: Model, ours: Subject, theirs: Subject) -> None:
    """Outputs of earlier tokens do not change with the last token."""
    with torch.no_grad():
        one, other = (ours.output(ours.inputs(last=last)) for last in (20, 30))
    if not torch.equal(one[:, :-1], other[:, :-1]):
        difference = _difference(one[:, :-1], other[:, :-1])
        if difference > 1e-6:
            raise Wrong(f"outputs of earlier tokens change with the last token by {difference:.1e} of the largest")
    if torch.equal(one[:, -1], other[:, -1]):
        raise Wrong("the check proves nothing: the last token changes nothing")


def parts(model: Model, ours: Subject, theirs: Subject) -> None:
    """A prompt that is padded on the left, a few tokens at a time, with a growing cache and one of fixed size."""
    given = theirs.inputs("left")
    ids, mask = given["input_ids"], given["attention_mask"]
    for cache in (transformers.DynamicCache, transformers.StaticCache):
        outputs = []
        for subject in (theirs, ours):
            size: dict[str, Any] = {} if cache is transformers.DynamicCache else {"max_cache_len": LENGTH + 3}
            past = cache(config=subject.model.config, **size)
            with torch.no_grad():
                logits = [
                    subject.model(ids[:, first:end], attention_mask=mask[:, :end], past_key_values=past).logits
                    for first, end in itertools.pairwise((0, 5, 6, 11, 12, LENGTH))
                ]
            outputs.append(torch.cat(logits, 1)[mask.bool()])
        _same(outputs[1], outputs[0], f"outputs behind a {cache.__name__}")


def generate(model: Model, ours: Subject, theirs: Subject) -> None:
    """Greedy generation with a growing cache."""
    _generated(model, ours, theirs, "dynamic")


def static_cache(model: Model, ours: Subject, theirs: Subject) -> None:
    """Greedy generation with a cache of fixed size."""
    _generated(model, ours, theirs, "static")


def compiled(model: Model, ours: Subject, theirs: Subject) -> None:
    """Greedy generation with a cache of fixed size, by a forward pass that is compiled as one graph."""
    torch.compiler.reset()
    forward = ours.model.forward
    ours.model.forward = torch.compile(forward, fullgraph=True, backend="eager")
    try:
        _generated(model, ours, theirs, "static")
    finally:
        ours.model.forward = forward
        torch.compiler.reset()


def training(model: Model, ours: Subject, theirs: Subject) -> None:
    """The gradients of all weights; their error relative to float64 may be twice that of eager in float32."""
    exact = Subject(model, "eager", theirs)
    exact.model.double()
    # The fused matrix products of experts have no float64.
    exact.model.set_experts_implementation("eager")
    truth, plain, found = (_gradients(subject) for subject in (exact, theirs, ours))
    if plain.keys() != found.keys():
        raise Wrong(f"gradients are missing: {sorted(plain.keys() ^ found.keys())[:3]}")
    largest = max(gradient.abs().max() for gradient in truth.values())
    for name, gradient in truth.items():
        error, of_eager = ((x[name] - gradient).abs().max() for x in (found, plain))
        if not error <= 2 * of_eager + TOLERANCE * (gradient.abs().max() + 0.1 * largest):
            raise Wrong(f"the gradient of {name} is off by {error:.1e}, with eager by {of_eager:.1e}")


def _gradients(subject: Subject) -> dict[str, Tensor]:
    model = subject.model
    given = subject.inputs("none" if subject.kind in ("vision", "speech", "images") else "right")
    model.train()
    model.zero_grad()
    output = subject.output({name: x.to(model.dtype) if x.is_floating_point() else x for name, x in given.items()})
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    torch.autograd.backward((output * weights).sum())
    model.eval()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


Check = Callable[[Model, Subject, Subject], None]
CHECKS: dict[str, Check] = {
    "prefill": prefill,
    "padding left": padding_left,
    "padding right": padding_right,
    "causality": causality,
    "parts": parts,
    "generate": generate,
    "static cache": static_cache,
    "one graph": compiled,
    "training": training,
}
_OF_KIND = {
    "decoder": set(CHECKS),
    "encoder": {"prefill", "padding left", "padding right", "training"},
    "causal encoder": {"prefill", "padding right", "causality", "training"},
    "seq2seq": set(CHECKS) - {"parts"},
    "speech": {"prefill", "causality", "generate", "static cache", "one graph", "training"},
    "vision": {"prefill", "training"},
    "images": {"prefill", "padding left", "padding right", "causality", "generate", "static cache", "training"},
}


def run(model: Model, checks: list[str] | None = None) -> dict[str, Cell]:
    """Runs checks of a model. A check that eager cannot run either does not count."""
    theirs = Subject(model, "eager")
    ours: Subject | Exception
    try:
        ours = Subject(model, flashcore_attn.transformers.NAME, theirs)
    except Exception as error:
        ours = error
    cells = {}
    for name, check in CHECKS.items():
        if checks is not None and name not in checks:
            continue
        if name not in _OF_KIND[model.kind]:
            cells[name] = Cell(NONE)
        elif isinstance(ours, Exception):
            cells[name] = _failed(ours)
        else:
            try:
                check(model, ours, theirs)
                cells[name] = Cell(RIGHT)
            except Exception as error:
                try:
                    check(model, theirs, theirs)
                except Wrong:
                    pass
                except Exception as reason:
                    cells[name] = Cell(NONE, f"neither does eager: {_line(reason)}")
                    continue
                cells[name] = _failed(error)
    return cells


def _failed(error: Exception) -> Cell:
    if isinstance(error, FlashCoreError):
        return Cell(REFUSED, _line(error))
    # The compiler reports as text what was raised while it traced the model.
    told = re.search(r"raised exception UnsupportedError\(([\"'])(.*)\1\)", str(error))
    if told:
        return Cell(REFUSED, told[2])
    return Cell(WRONG, _line(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {_line(error)}")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
