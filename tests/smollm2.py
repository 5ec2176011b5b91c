"""SmolLM2 in transformers, from the tensors of a converted file: the same weights to the last bit."""

from __future__ import annotations

import re
from typing import Any

from tinyloop_py.model_file import ModelFile

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"attn.{p}.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"mlp.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def transformers_model(file: ModelFile, **options: Any) -> Any:
    """A LlamaForCausalLM of a plain, tied model file, in float32 unless `dtype` says otherwise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = file.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_core, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    state = {}
    for weight in file:
        layer = re.fullmatch(r"core\.(\d+)\.(.*)", weight.name)
        name = f"model.layers.{layer[1]}.{NAMES[layer[2]]}" if layer else NAMES[weight.name]
        state[name] = torch.from_numpy(weight.to_float32().reshape(weight.shape).copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.to(options.get("dtype", torch.float32)).eval()
