"""The reference against transformers with random weights, both in float64, so that any difference in meaning shows."""

import numpy as np
import pytest
from models import CONFIGS, YARN, random_model, random_tokens, small
from reference import Reference

from tinyloop_py.config import ModelConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N_TOKENS = 80  # more than original_max_position of the scalings, more than the windows
TOLERANCE = 1e-13  # of max|ref|; measured 5e-15


@pytest.fixture(autouse=True)
def only_float64(monkeypatch):
    """transformers computes norms, RoPE and softmax in float32 by name: make that name mean float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


_TOP = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
_NORMS = {
    "Olmo2": {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "Gemma2": {
        "attn_norm": "input_layernorm", "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    },
    "Glm4": {
        "attn_norm": "input_layernorm", "attn_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm", "mlp_post_norm": "post_mlp_layernorm",
    },
}  # fmt: skip
_LLAMA_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def state_dict(family: str, tensors: dict[str, np.ndarray]) -> dict:
    """Our tensors under the names that transformers' `family` gives them."""
    state = {}
    for name, w in tensors.items():
        if name in _TOP:
            theirs = _TOP[name]
        else:
            _, layer, *rest = name.split(".")
            match rest:
                case [norm, "weight"]:
                    theirs = f"{_NORMS.get(family, _LLAMA_NORMS)[norm]}.weight"
                case ["attn", ("q_norm" | "k_norm") as norm, "weight"]:
                    theirs = f"self_attn.{norm}.weight"
                case [block, matrix, kind]:
                    theirs = f"{'self_attn' if block == 'attn' else block}.{matrix}_proj.{kind}"
            theirs = f"model.layers.{layer}.{theirs}"
        state[theirs] = torch.tensor(w, dtype=torch.float64)
    if family == "Gemma2":  # stores weight - 1
        state.update({name: w - 1 for name, w in state.items() if "norm" in name})
    if family == "Glm4":  # gate and up in one matrix
        for name in [name for name in state if "gate_proj" in name]:
            both = [state.pop(name), state.pop(name.replace("gate", "up"))]
            state[name.replace("gate", "gate_up")] = torch.cat(both)
    return state


def transformers_logits(family: str, c: ModelConfig, tensors: dict[str, np.ndarray], tokens: np.ndarray, **extra) -> np.ndarray:
    """What transformers' `family` model gives for our config and tensors."""
    scaling = dict(c.rope_scaling or {"type": "default"})
    if "original_max_position" in scaling:
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
    config = getattr(transformers, family + "Config")(
        vocab_size=c.vocab_size,
        hidden_size=c.dim,
        intermediate_size=c.ffn_dim,
        num_hidden_layers=c.n_core,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps,
        rope_parameters={
            "rope_type": scaling.pop("type"),
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rotary_dim / c.head_dim,
            **scaling,
        },
        tie_word_embeddings=c.tied_embeddings,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **extra,
    )
    model = getattr(transformers, family + "ForCausalLM")(config).double().eval()
    missing, unexpected = model.load_state_dict(state_dict(family, tensors), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if c.tied_embeddings else set())
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.int64)[None]).logits[0].numpy()


GEMMA2 = small(
    block_norm="sandwich", activation="gelu", embed_scale=8.0, logit_softcap=5.0, n_kv_heads=2, n_core=3, layer_windows=(9, 0, 9), norm_eps=1e-6
)  # fmt: skip
GEMMA2_OPTIONS = {
    "query_pre_attn_scalar": 16, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
GLM4 = small(block_norm="sandwich", rope_style="interleaved", rotary_dim=8, attn_bias="qkv", n_kv_heads=2, tied_embeddings=False)
SMOLLM3_ROPE = {"no_rope_layers": [1, 1, 1, 0]}
CASES = {
    "Llama, MHA": ("Llama", CONFIGS["llama"], {}),
    "Llama, GQA": ("Llama", small(n_heads=8, n_kv_heads=2, head_dim=16), {}),
    "Mistral, GQA, heads that do not divide dim": ("Mistral", CONFIGS["smollm2"], {"sliding_window": None}),
    "Llama, biases": ("Llama", small(attn_bias="qkvo", n_kv_heads=2), {"attention_bias": True}),
    "Llama, gelu": ("Llama", small(activation="gelu"), {"hidden_act": "gelu_pytorch_tanh"}),
    "Llama, rope llama3": ("Llama", CONFIGS["llama3"], {}),
    "Mistral, rope linear": ("Mistral", CONFIGS["linear"], {"sliding_window": None}),
    "Llama, rope yarn": ("Llama", CONFIGS["yarn"], {}),
    "Llama, rope yarn, ramp cut at both ends": ("Llama", small(rope_scaling={**YARN, "beta_fast": 64.0, "beta_slow": 0.001}), {}),
    "Llama, rope yarn, no ramp": ("Llama", small(rope_scaling={**YARN, "beta_fast": 64.0, "beta_slow": 32.0}), {}),
    "Qwen2": ("Qwen2", CONFIGS["qwen2"], {}),
    "Qwen3": ("Qwen3", CONFIGS["qwen3"], {}),
    "Mistral, window": ("Mistral", CONFIGS["mistral"], {"sliding_window": 5}),
    "SmolLM3": ("SmolLM3", CONFIGS["smollm3"], SMOLLM3_ROPE),
    "OLMo 2": ("Olmo2", CONFIGS["olmo2"], {}),
    "Gemma 2: sandwich, every other window, softcap, embed_scale": ("Gemma2", GEMMA2, GEMMA2_OPTIONS),
    "GLM 4: sandwich, partial interleaved rope": ("Glm4", GLM4, {"attention_bias": True}),
    "Arcee: plain relu2": ("Arcee", small(mlp="plain", activation="relu2", n_kv_heads=2), {}),
    "Granite: embed_scale, logit_scale": (
        "Granite",
        small(embed_scale=6.0, logit_scale=0.25),
        {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "attention_multiplier": 0.25},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    family, config, extra = CASES[case]
    tensors, tokens = random_model(config), random_tokens(config, N_TOKENS)
    expected = transformers_logits(family, config, tensors, tokens, **extra)
    got = Reference(config, tensors).logits(tokens)
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("Llama, MHA", {"norm_eps": 1.1e-5}),
        ("Llama, rope yarn", {"rope_scaling": {**YARN, "attention_factor": 1.0}}),
        ("Llama, rope yarn", {"rope_scaling": None}),
        ("Llama, rope llama3", {"rope_scaling": None}),
        ("Mistral, rope linear", {"rope_scaling": None}),
        ("Mistral, window", {"layer_windows": (5, 5, 6)}),
        ("SmolLM3", {"nope_layers": ()}),
    ],
)
def test_a_small_difference_in_meaning_would_show(case, changes):
    """Negative control."""
    family, config, extra = CASES[case]
    tensors, tokens = random_model(config), random_tokens(config, N_TOKENS)
    expected = transformers_logits(family, config, tensors, tokens, **extra)
    changed = ModelConfig(**{**vars(config), **changes})
    got = Reference(changed, tensors).logits(tokens)
    assert np.abs(got - expected).max() > 100 * TOLERANCE * np.abs(expected).max()
