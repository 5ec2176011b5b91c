"""The architectures that can be converted, as data: defaults, fields without effect, and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What sets one Hugging Face architecture apart from the others."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # what transformers assumes where config.json says nothing
    attn_bias: str = ""  # projections that always have a bias
    bias_by_config: bool = False  # "attention_bias": true gives q, k, v and o one
    qk_norm: str = "none"
    windows: str = "none"  # "all": sliding_window holds for every layer; "listed": for those in layer_types
    no_rope_layers: bool = False
    loops: str = ""  # of a looped model, whose whole stack runs again: the field that says how often
    loop_losses: str = ""  # the field with a weight for every loop but the last; where it has some, they count
    skips_loop_norm: str = ""  # the field that leaves the norm out behind every loop but the last
    block_norm: str = "pre"
    exit_gate: bool = False
    only: Mapping[str, Any] = field(default_factory=dict)  # as ONLY, of this family
    harmless: frozenset[str] = frozenset()  # further fields that don't touch the forward pass


HUGINN = "RavenForCausalLM"  # has fields and tensors of its own: huginn.py
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(bias_by_config=True),  # SmolLM2 too
    "MistralForCausalLM": Family({"num_key_value_heads": 8, "sliding_window": 4096}, windows="all"),
    "Qwen2ForCausalLM": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096}, attn_bias="qkv", windows="listed", harmless=frozenset({"attention_bias"})
    ),
    "Qwen3ForCausalLM": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}, bias_by_config=True, qk_norm="head", windows="listed"
    ),
    "SmolLM3ForCausalLM": Family(
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}, bias_by_config=True, windows="listed", no_rope_layers=True,
        harmless=frozenset({"max_window_layers"}),
    ),
    "OuroForCausalLM": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "total_ut_steps": 4}, windows="listed", loops="total_ut_steps", block_norm="sandwich",
        exit_gate=True,
        only={"early_exit_threshold": 1.0, "early_exit_step": None}, harmless=frozenset({"auto_map", "chunk_size"}),
    ),
    "NanbeigeForCausalLM": Family(
        {"num_loops": 1}, loops="num_loops", loop_losses="loop_loss_weights", skips_loop_norm="skip_loop_final_norm",
        only={
            **dict.fromkeys((
                "qk_layernorm", "enable_double_loop_split", "loop_share_kv", "enable_hyper_connection", "enable_mhc", "enable_h_res_identity",
                "enable_depth_attention", "ngram_insert_all_layers",
            ), False),
            "insert_ngram_layer_idx": [], "loop_middle_layers": None, "emb_neighbor_num": None,
        },
        harmless=frozenset({  # the latter say how what ONLY keeps off would work; the config's class writes them with its defaults
            "auto_map", "mhc_diff_for_loop", "mhc_identity_nohresparam", "num_residual_streams", "mhc_sinkhorn_iterations", "mhc_init_gating_factor",
            "depth_attention_recent_window", "depth_attention_static_anchor_once", "ngram_mod_force_prime", "ngram_fused_mode",
            "ngram_compressed_tokenizer", "skip_ngram_for_input",
        }),
    ),
}  # fmt: skip

SIZES = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "ffn_dim": "intermediate_size", "n_core": "num_hidden_layers", "n_heads": "num_attention_heads",
}  # fmt: skip
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}

# Fields that may only have this value: any other would change the forward pass.
ONLY: dict[str, Any] = {
    "mlp_bias": False, "attention_bias": False, "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {},
    "rope_interleaved": False, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip

# Fields that say nothing about the forward pass. Everything named neither here nor by a family is refused.
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path", "_commit_hash",
    "use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict",
    "return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder", "is_decoder",
    "cross_attention_hidden_size", "chunk_size_feed_forward", "task_specific_params", "problem_type", "finetuning_task", "id2label",
    "label2id", "num_labels", "tokenizer_class", "prefix", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "is_llama_config", "transformers.js_config", "unsloth_version", "unsloth_fixed",
})  # fmt: skip

GLOBAL_TENSORS = {
    "embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight",
    "final_norm.weight": "model.norm.weight", "loop_norm.weight": "model.norm.weight",  # the latter where the stack is looped
    "exit_gate.weight": "model.early_exit_gate.weight", "exit_gate.bias": "model.early_exit_gate.bias",
}  # fmt: skip
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn_post_norm.weight": "input_layernorm_2.weight", "mlp_post_norm.weight": "post_attention_layernorm_2.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight", "attn.k_norm.weight": "self_attn.k_norm.weight",
    **{f"attn.{p}.{kind}": f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")},
    **{f"mlp.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}  # fmt: skip

GGUF_GLOBAL_TENSORS = {"embed.weight": "token_embd.weight", "final_norm.weight": "output_norm.weight", "head.weight": "output.weight"}
GGUF_LAYER_TENSORS = {
    "attn_norm.weight": "attn_norm.weight", "mlp_norm.weight": "ffn_norm.weight",
    **{f"attn.{p}.{kind}": f"attn_{'output' if p == 'o' else p}.{kind}" for p in "qkvo" for kind in ("weight", "bias")},
    **{f"mlp.{p}.weight": f"ffn_{p}.weight" for p in ("gate", "up", "down")},
}  # fmt: skip


def renamer(whole: Mapping[str, str], layer_prefix: str, layer: Mapping[str, str]) -> Callable[[str], str]:
    """tinyloop's name -> the source's, for models whose layers are all core; `layer_prefix` is what precedes the layer's number."""

    def rename(name: str) -> str:
        if name in whole:
            return whole[name]
        _, index, rest = name.split(".", 2)
        return f"{layer_prefix}{index}.{layer[rest]}"

    return rename


HF_NAME = renamer(GLOBAL_TENSORS, "model.layers.", LAYER_TENSORS)
GGUF_NAME = renamer(GGUF_GLOBAL_TENSORS, "blk.", GGUF_LAYER_TENSORS)
