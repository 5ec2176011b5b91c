"""Conversion of looped checkpoints: what the converted file computes against the models' own forward passes (looped_torch.py)."""

import json
import math

import numpy as np
import pytest
import torch
from looped_torch import huginn_logits, nanbeige_logits, ouro_logits
from philox import truncated_normal
from reference import Reference
from safetensors.torch import save_file

import tinyloop_py as tl
from tinyloop_py.cli import main
from tinyloop_py.convert import convert
from tinyloop_py.errors import FormatError
from tinyloop_py.layout import tensor_shapes
from tinyloop_py.model_file import open_model_file

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
    "bos_token_id": 2, "eos_token_id": 3,
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


def huginn_state(config) -> dict[str, torch.Tensor]:
    dim, ffn, n = config["n_embd"], config["intermediate_size"], config["n_heads"]
    shapes = {"transformer.wte.weight": (320, dim), "transformer.adapter.weight": (dim, 2 * dim), "transformer.ln_f.weight": (dim,)}
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
    state = random_state(shapes)
    return state | {"lm_head.weight": state["transformer.wte.weight"].clone(), "freqs_cis": torch.zeros(1, 256, 1, dim // n // 2, 2)}


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


def converted(folder, **kwargs):
    convert(folder, folder / "m.tinyloop", tokenizer=False, **kwargs)
    return open_model_file(folder / "m.tinyloop")


def own_logits(family, config, state, tokens, loops, file):
    state = {name: tensor.double() for name, tensor in state.items()}
    if family == "huginn":
        std = config["init_values"]["std"] * config["init_values"]["embed_scale"]
        first = np.stack([truncated_normal(file.config.state_init_seed, i, config["n_embd"], std) for i in range(len(tokens))])
        return huginn_logits(state, config, tokens, loops, torch.from_numpy(first)).numpy()
    return {"ouro": ouro_logits, "nanbeige": nanbeige_logits}[family](state, config, tokens, loops).numpy()


CASES = {
    "ouro": ("ouro", {}), "ouro gqa": ("ouro", {"num_key_value_heads": 2}),
    "nanbeige": ("nanbeige", {}), "nanbeige, norm behind the last loop alone": ("nanbeige", {"skip_loop_final_norm": True}),
    "huginn": ("huginn", {}), "huginn without biases": ("huginn", {"qk_bias": False}),
    "huginn, other layers": ("huginn", {"n_layers": 6, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 1, "n_layers_in_coda": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_converted_model_computes_what_the_checkpoint_means(tmp_path, case):
    family, changes = CASES[case]
    config, state = checkpoint(tmp_path, family, **changes)
    tokens = np.random.default_rng(0).integers(0, 320, 40)
    with converted(tmp_path) as file:
        assert set(file.names) == set(tensor_shapes(file.config))
        reference = Reference(file.config, {weight.name: weight.to_float32() for weight in file})
        for loops in (1, file.config.default_loops, 6):
            theirs = own_logits(family, config, state, tokens, loops, file)
            assert np.abs(reference.logits(tokens, loops) - theirs).max() <= 1e-5 * np.abs(theirs).max(), loops
        theirs = own_logits(family, config, state, tokens, 3, file)
    with tl.Model(tmp_path / "m.tinyloop", 64, kv_mode="fp32", device="cpu") as model:
        ours = model.logits(tokens.astype(np.int32), loops=3)
        assert np.abs(ours - theirs).max() <= 5e-3 * np.abs(theirs).max()  # in float32; what is wrong differs by its own size
        pool = tl.PrefixPool()
        model.register_prefix(pool, tokens[:30].astype(np.int32), loops=3)
        through_pool = model.generate_with_pool(pool, tokens.astype(np.int32), 8, loops=3, temperature=0.0)
        assert pool.stats().hits == 1 and through_pool == model.generate(tokens.astype(np.int32), 8, loops=3, temperature=0.0)


def test_configs(tmp_path):
    checkpoint(tmp_path / "ouro", "ouro")
    with converted(tmp_path / "ouro") as file:
        c = file.config
        assert (c.default_loops, c.trained_loops, c.max_loops, c.n_prelude, c.n_core, c.n_coda) == (4, 4, 16, 0, 3, 0)
        assert (c.block_norm, c.loop_norm, c.final_norm, c.exit, c.inject, c.state_init) == (
            "sandwich",
            "every",
            False,
            "hazard_gate",
            "none",
            "input",
        )
        assert (c.rope_theta, c.norm_eps, c.trained_seq_len, c.tied_embeddings, c.layer_windows) == (1e6, 1e-6, 256, False, ())
        assert c.extra == {"converted_from": "OuroForCausalLM"} and file.stop_ids == (0,)
    checkpoint(tmp_path / "nanbeige", "nanbeige", loop_loss_weights=[0.5, 0.5])
    with converted(tmp_path / "nanbeige", loops=1, max_loops=3) as file:
        c = file.config
        assert (c.default_loops, c.trained_loops, c.max_loops) == (1, 3, 3)  # a loss for each loop but the last
        assert (c.block_norm, c.loop_norm, c.final_norm, c.exit, c.head_dim, c.rope_theta) == ("pre", "every", False, "none", 32, 7e7)
    checkpoint(tmp_path / "huginn", "huginn")
    with converted(tmp_path / "huginn", dtype="int8", group_size=64) as file:
        c = file.config
        assert (c.default_loops, c.max_loops, c.n_prelude, c.n_core, c.n_coda, c.vocab_size) == (5, 20, 1, 2, 1, 320)
        assert (c.block_norm, c.loop_norm, c.final_norm, c.inject, c.state_init) == ("sum_sandwich", "last", True, "concat_linear", "normal")
        assert (c.attn_bias, c.rope_style, c.rope_theta, c.tied_embeddings) == ("qk", "interleaved", 50000, True)
        assert c.embed_scale == math.sqrt(72) and c.state_init_std == pytest.approx(math.sqrt(2 / 5)) and file.stop_ids == (5,)
        assert file.tensor("core.1.mlp.gate.weight").dtype == "int8"


def test_what_a_huginn_config_leaves_out_is_what_its_class_assumes(tmp_path):
    left_out = dict.fromkeys(("init_values", "padded_vocab_size", "n_layers", "num_key_value_heads", "norm_eps", "rope_base", "qk_bias"), "absent")
    _, state = checkpoint(tmp_path / "whole", "huginn")
    checkpoint(tmp_path / "sparse", "huginn", state=state, **left_out)
    with converted(tmp_path / "whole") as whole, converted(tmp_path / "sparse") as sparse:
        assert whole.config == sparse.config


REFUSED = {
    "early exit": ("ouro", {"early_exit_threshold": 0.7}, "early_exit_threshold is 0.7, OuroForCausalLM is supported with 1.0 only"),
    "exit step": ("ouro", {"early_exit_step": 2}, "early_exit_step is 2, OuroForCausalLM is supported with None only"),
    "no loops": ("ouro", {"total_ut_steps": 0}, "total_ut_steps is 0, expected an integer from 1"),
    "ouro with nanbeige's": ("ouro", {"skip_loop_final_norm": True}, "field skip_loop_final_norm is unknown for OuroForCausalLM"),
    "split": ("nanbeige", {"enable_double_loop_split": True}, "enable_double_loop_split is True, NanbeigeForCausalLM is supported with False only"),
    "middle": ("nanbeige", {"loop_middle_layers": [3]}, "loop_middle_layers is .3., NanbeigeForCausalLM is supported with"),
    "ngrams": ("nanbeige", {"emb_neighbor_num": 2}, "field emb_neighbor_num is unknown for NanbeigeForCausalLM"),
    "channels": ("nanbeige", {"kv_channels": 64}, "kv_channels"),
    "losses": ("nanbeige", {"loop_loss_weights": 0.5}, "loop_loss_weights is 0.5, expected a list"),
    "retrofit block": ("huginn", {"block_class_name": "LlamaBlock"}, "block_class_name is 'LlamaBlock', RavenForCausalLM is supported with"),
    "injection": ("huginn", {"injection_type": "add"}, "injection_type is 'add'"),
    "noise": ("huginn", {"test_time_noise": 0.1}, "test_time_noise is 0.1"),
    "layers": ("huginn", {"n_layers": 8}, "n_layers is 8, RavenForCausalLM is supported with 4 here only"),
    "gqa": ("huginn", {"num_key_value_heads": 1}, "num_key_value_heads is 1, RavenForCausalLM is supported with 3 here only"),
    "size": ("huginn", {"n_embd": "72"}, "n_embd is '72', expected an integer"),
    "heads": ("huginn", {"n_heads": 5, "num_key_value_heads": 5, "head_dim": "absent"}, "n_embd 72 is no multiple of n_heads 5"),
    "scale": ("huginn", {"init_values": {"embed_scale": 0}}, "init_values.embed_scale is 0, expected a positive number"),
    "field": ("huginn", {"qk_norm": True}, "field qk_norm is unknown for RavenForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path, case):
    family, changes, message = REFUSED[case]
    checkpoint(tmp_path, family, state={"x": torch.zeros(1)}, **changes)
    with pytest.raises(FormatError, match=message):
        converted(tmp_path)
    assert not list(tmp_path.glob("*.tinyloop"))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    _, good = checkpoint(tmp_path / "good", "huginn")
    wqkv, bias = "transformer.core_block.1.attn.Wqkv.weight", "transformer.coda.0.attn.qk_bias"
    for i, (change, message) in enumerate((
        ({wqkv: None}, "Wqkv.weight.* is missing"),
        ({wqkv: torch.zeros(72 * 2, 72)}, r"Wqkv.weight has shape .144, 72., the config asks for .216, 72."),
        ({bias: torch.zeros(2, 72)}, r"qk_bias has shape \[2, 72\]"), ({"transformer.coda.1.norm_1.weight": torch.zeros(72)}, "has no place"),
        ({"lm_head.weight": torch.ones(320, 72)}, "tensor lm_head.weight differs from transformer.wte.weight"),
    )):  # fmt: skip
        state = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
        checkpoint(tmp_path / str(i), "huginn", state=state)
        with pytest.raises(FormatError, match=message):
            converted(tmp_path / str(i))


def test_command_line(tmp_path, capsys):
    checkpoint(tmp_path, "ouro")
    assert main(["convert", str(tmp_path), str(tmp_path / "m.tinyloop"), "--no-tokenizer", "--dtype", "bf16"]) == 0
    assert "max_loops 16" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "m.tinyloop")]) == 0
