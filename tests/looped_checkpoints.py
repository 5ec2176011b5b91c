"""Small random checkpoints of looped models in their own names: configs, tensors, folders."""

import json
import math

import torch
from safetensors.torch import save_file

OURO = {  # fields as the released configs have them, in miniature
    "architectures": ["OuroForCausalLM"], "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"}, "model_type": "ouro", "hidden_act": "silu",
    "attention_dropout": 0.0, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256, "rope_theta": 1000000.0, "rope_scaling": None, "rms_norm_eps": 1e-06,
    "total_ut_steps": 4, "early_exit_threshold": 1.0, "tie_word_embeddings": False, "layer_types": ["full_attention"] * 3, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 3, "bos_token_id": 0, "eos_token_id": 0, "use_cache": True, "torch_dtype": "bfloat16",
}  # fmt: skip
NANBEIGE = {
    "architectures": ["NanbeigeForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_nanbeige.NanbeigeForCausalLM"}, "model_type": "nanbeige",
    "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96, "kv_channels": 32, "head_dim": 32, "num_hidden_layers": 2, "num_loops": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256, "rope_theta": 70000000,
    "rms_norm_eps": 1e-05, "loop_loss_weights": [], "skip_loop_final_norm": False, "tie_word_embeddings": False, "attention_bias": False,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "rope_scaling": None, "attention_dropout": 0.0, "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
HUGINN = {
    "architectures": ["RavenForCausalLM"], "auto_map": {"AutoConfig": "raven_config_minimal.RavenConfig"}, "model_type": "huginn_raven",
    "architecture_class_name": "RecurrentGPT", "block_class_name": "SandwichBlock", "norm_class_name": "RMSNorm_llama", "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU", "injection_type": "linear", "state_init": "like-init", "bias": False, "qk_bias": True, "tie_embeddings": True,
    "n_embd": 72, "n_heads": 3, "num_key_value_heads": 3, "head_dim": 24, "intermediate_size": 100, "n_layers": 4, "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1, "mean_recurrence": 5, "mean_backprop_depth": 8, "effective_expected_depth": 12,
    "vocab_size": 320, "padded_vocab_size": 320, "padding_multiple": 64, "block_size": 256, "rope_base": 50000, "norm_eps": 1e-06,
    "init_strategy": "takase", "init_orthogonal": False, "init_values": {"std": math.sqrt(2 / 360), "out_proj": 0.001, "embedding": 0.07,
    "embed_scale": math.sqrt(72)}, "sampling_scheme": "poisson-lognormal-filling", "test_time_noise": 0, "test_time_noise_type": "fixed",
    "eos_token_id": 5,
}  # fmt: skip


def stack_state(config, branch_norms: bool) -> dict[str, torch.Tensor]:
    """Random tensors of a looped stack under its own names."""
    dim, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (320, dim), "model.norm.weight": (dim,), "lm_head.weight": (320, dim)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += [f"{norm}_2" for norm in norms] if branch_norms else []
    for i in range(config["num_hidden_layers"]):
        layer = {"self_attn.q_proj": (q, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, q)}
        layer |= {"mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim), "mlp.down_proj": (dim, ffn), **dict.fromkeys(norms, (dim,))}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return random_state(shapes)


def ouro_state(config) -> dict[str, torch.Tensor]:
    gate = random_state({"model.early_exit_gate.weight": (1, config["hidden_size"]), "model.early_exit_gate.bias": (1,)})
    return stack_state(config, True) | gate


def nanbeige_state(config) -> dict[str, torch.Tensor]:
    return stack_state(config, False)


def huginn_shapes(config) -> dict[str, tuple[int, ...]]:
    dim, ffn, n = config["n_embd"], config["intermediate_size"], config["n_heads"]
    shapes = {"transformer.wte.weight": (config["vocab_size"], dim), "transformer.adapter.weight": (dim, 2 * dim), "transformer.ln_f.weight": (dim,)}
    for part in ("prelude", "recurrent_block", "coda"):
        for i in range(config[f"n_layers_in_{part}"]):
            layer = {
                "attn.Wqkv.weight": (3 * dim, dim),
                "attn.proj.weight": (dim, dim),
                "mlp.fc.weight": (2 * ffn, dim),
                "mlp.proj.weight": (dim, ffn),
            }
            layer |= {f"norm_{k}.weight": (dim,) for k in range(1, 5)}
            layer |= {"attn.qk_bias": (2, 1, n, dim // n)} if config["qk_bias"] else {}
            shapes |= {f"transformer.{part.replace('recurrent', 'core')}.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def huginn_state(config) -> dict[str, torch.Tensor]:
    """With what the released checkpoint holds twice or could be computed."""
    state = random_state(huginn_shapes(config))
    return state | {"lm_head.weight": state["transformer.wte.weight"].clone(), "freqs_cis": torch.zeros(1, 256, 1, config["head_dim"] // 2, 2)}


def random_state(shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return {name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.5) + (len(shape) == 1) for name, shape in shapes.items()}


STATES = {"ouro": (OURO, ouro_state), "nanbeige": (NANBEIGE, nanbeige_state), "huginn": (HUGINN, huginn_state)}


def checkpoint(folder, family, state=None, **changes):
    """A folder with a random model of the family; its config and tensors."""
    config, make = STATES[family]
    config = {key: value for key, value in (config | changes).items() if value != "absent"}
    state = make(config) if state is None else state
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return config, state
