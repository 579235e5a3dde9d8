"""Which models are admitted. What is refused is refused by name, with what to do, on one line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

from flexray.actors.model import ModelRefused, check_config, check_model, model_config
from tests.actors.models import config
from tests.actors.test_gradients import one_after_another
from tests.worlds import run_world

ADMITTED = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None, "pad_token_id": None},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": 8},  # its classifier_dropout belongs to another head
    "gemma": {"head_dim": 8},
    "glm": {"head_dim": 8, "pad_token_id": None},
    "smollm3": {"pad_token_id": None},
    "starcoder2": {},
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    # Its routing bias is a buffer beside a parameter.
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "pad_token_id": None,
    },
}

REFUSED = {
    "mistral window": ("mistral", {"sliding_window": 16}, "sliding_window=16"),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        "sliding_window=16",
    ),
    "gemma2 caps": (
        "gemma2",
        {"layer_types": ["full_attention"] * 2, "sliding_window": None, "head_dim": 8},
        "logit_softcapping=",
    ),
    "gemma3 layers": ("gemma3_text", {}, "sliding"),
    "gpt-oss sinks": (
        "gpt_oss",
        {
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
            "num_local_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "s_aux",
    ),
    "attention dropout": ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "residual dropout": ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
    "layer dropout": ("biogpt", {"layerdrop": 0.1}, "drop"),
    "gpt2 defaults": ("gpt2", {}, "embd_pdrop|attn_pdrop|resid_pdrop"),
    "router jitter": ("mixtral", {"num_local_experts": 2, "router_jitter_noise": 0.1}, "random"),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type='dynamic'",
    ),
    "dynamic rope, old spelling": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type='dynamic'",
    ),
    "longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 512,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
            },
        },
        "rope_type='longrope'",
    ),
    "router loss": (
        "mixtral",
        {"num_local_experts": 2, "output_router_logits": True},
        "output_router_logits=True",
    ),
    "encoder-decoder": ("t5", {}, "is_encoder_decoder=True"),
    "bidirectional": ("llama", {"is_causal": False}, "is_causal=False"),
    "cohere scales logits": ("cohere", {}, "scaled or capped logits"),
    "granite scales logits": ("granite", {}, "scaled or capped logits"),
    "state space": ("mamba", {}, "0 of 2 layers attend"),
    "state space beside attention": ("falcon_h1", {}, "mixes tokens outside attention"),
    "latent attention": (
        "deepseek_v3",
        {"n_routed_experts": 4, "num_key_value_heads": 8, "first_k_dense_replace": 2},
        "another shape",
    ),
    "fixed attention": ("falcon", {}, "cannot be replaced"),
}


@pytest.mark.parametrize("kind", ADMITTED | EXPERTS)
def test_admitted(kind):
    check_model(config(kind, **(ADMITTED | EXPERTS)[kind]))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    kind, keys, word = REFUSED[case]
    with pytest.raises(ModelRefused, match=word) as refusal:
        check_model(config(kind, **keys))
    message = str(refusal.value)
    assert message.startswith("model ")
    assert "\n" not in message
    assert any(advice in message for advice in ("set it to", "use "))


def test_a_window_that_is_switched_off_is_no_window():
    check_config(config("qwen2", use_sliding_window=False, sliding_window=4096))


def test_a_setting_inside_a_text_config_is_seen():
    both = AutoConfig.for_model(
        "gemma3", text_config=config("gemma3_text", head_dim=8, attention_dropout=0.5).to_dict()
    )
    with pytest.raises(ModelRefused, match=r"attention_dropout=0\.5"):
        check_config(both)


def llama_that(monkeypatch, forward):
    """A Llama whose decoder layer does something more with what it returns."""
    plain = modeling_llama.LlamaDecoderLayer.forward

    def patched(self, hidden_states, *args, **keywords):
        return forward(plain(self, hidden_states, *args, **keywords), keywords)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", patched)
    return config("llama")


# What no setting tells, only the code.
CODE = {
    "dropout": (lambda x, _: F.dropout(x, 0.1, training=True), "draws random numbers"),
    "token shift": (lambda x, _: x + x.roll(1, dims=1), "mixes tokens"),
    "running mean": (lambda x, _: x.cumsum(1), "mixes tokens"),
    "convolution": (
        lambda x, _: F.conv1d(x.mT, torch.ones(64, 1, 3, device=x.device), padding=1, groups=64).mT,
        "mixes tokens|packed sequences",
    ),
    "own positions": (
        lambda x, _: x + torch.arange(x.shape[1], device=x.device)[None, :, None],
        "numbers tokens itself",
    ),
}


@pytest.mark.parametrize("what", CODE)
def test_what_only_the_code_tells_is_refused(monkeypatch, what):
    forward, word = CODE[what]
    with pytest.raises(ModelRefused, match=word):
        check_model(llama_that(monkeypatch, forward))


def test_a_model_that_ignores_position_ids_is_refused(monkeypatch):
    plain = modeling_llama.LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRotaryEmbedding,
        "forward",
        lambda self, x, position_ids: plain(self, x, torch.zeros_like(x[..., 0]).long()),
    )
    # zeros_like of the hidden states: the ids themselves are never read.
    with pytest.raises(ModelRefused, match="numbers tokens itself"):
        check_model(config("llama"))


def test_heads_that_are_not_the_configs_are_refused():
    # Legal degrees are computed from the configuration; GPT-NeoX knows no grouped queries.
    with pytest.raises(ModelRefused, match=r"\(8, 8\) and the config says \(8, 2\)"):
        check_model(config("gpt_neox", num_key_value_heads=2))


def test_model_config_from_keys():
    made = model_config({"model_type": "llama", "hidden_size": 64})
    assert (made.model_type, made.hidden_size) == ("llama", 64)


@pytest.mark.parametrize(
    "keys, word",
    [
        ({}, "model_type"),
        ({"model_type": "lama"}, "lama"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_a_bad_model_config_is_one_clear_line(keys, word):
    with pytest.raises(ModelRefused, match=word) as refusal:
        model_config(keys)
    assert "\n" not in str(refusal.value)


def test_model_config_from_a_folder(tmp_path):
    config("qwen2").save_pretrained(tmp_path)
    assert model_config(path=tmp_path).num_key_value_heads == 2
    with pytest.raises(ModelRefused, match="nowhere"):
        model_config(path=tmp_path / "nowhere")


TWO_RANKS = [[((0, 1), (0, 1, 2))], [((0,), (3,)), ((1,), (4, 5))]]
ROWS = (37, 5, 60, 18, 91, 7)


def errors_of(kinds, dtype):
    models = [(config(kind, **keys), {"dtype": dtype}) for kind, keys in kinds.items()]
    errors = run_world(2, one_after_another, models, TWO_RANKS, ROWS)[0]
    return dict(zip(kinds, errors, strict=True))


def test_every_admitted_model_has_the_gradients_of_one_process():
    kinds = {k: v for k, v in ADMITTED.items() if k not in ("llama", "qwen2", "qwen3")}
    errors = errors_of(kinds, "float64")
    # Gemma's norms sum their weight's gradient in float32 whatever the model's dtype.
    assert max(errors.pop("gemma")) < 2e-6
    assert max(max(e) for e in errors.values()) < 1e-12, errors


def test_mixtures_of_experts_have_the_gradients_of_one_process():
    errors = errors_of(EXPERTS, "float32")
    assert max(max(e) for e in errors.values()) < 2e-6, errors
