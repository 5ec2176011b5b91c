"""Conversion of looped checkpoints: what the converted file computes against the models' own forward passes (looped_torch.py)."""

import json
import math

import numpy as np
import pytest
import torch
from looped_checkpoints import HUGINN, OURO, STATES, checkpoint, huginn_shapes, huginn_state, random_state
from looped_torch import huginn_logits, nanbeige_logits, ouro_logits
from philox import truncated_normal
from reference import Reference
from safetensors.torch import save_file
from sparse_checkpoint import conversion_megabytes, write_sparse
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import tinyloop_py as tl
from tinyloop_py.cli import main
from tinyloop_py.convert import convert
from tinyloop_py.convert.hf_config import model_config
from tinyloop_py.convert.huginn import huginn_config, is_huginn
from tinyloop_py.errors import FormatError
from tinyloop_py.layout import matrix_shapes, tensor_shapes
from tinyloop_py.model_file import open_model_file


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


def test_fields_that_a_class_writes_of_itself_are_taken(tmp_path):
    """A config that was saved again, as after fine-tuning, holds every field of its class."""
    nanbeige = {
        "mlp_bias": False, "qk_layernorm": False, "emb_neighbor_num": None, "emb_split_num": None, "ngram_vocab_size_ratio": None,
        "ngram_mod_force_prime": False, "ngram_embedding_hidden_size": None, "ngram_fused_mode": "average", "emb_tp_num": None,
        "ngram_compressed_tokenizer": False, "skip_ngram_for_input": False, "insert_ngram_layer_idx": [], "ngram_insert_all_layers": False,
        "ngram_layer_downproject_size": None, "enable_double_loop_split": False, "loop_middle_layers": None, "loop_share_kv": False,
        "mhc_diff_for_loop": False, "mhc_double_stream_position_for_loop": None, "enable_hyper_connection": False, "enable_mhc": False,
        "enable_h_res_identity": False, "mhc_identity_nohresparam": False, "num_residual_streams": 4, "mhc_sinkhorn_iterations": 20,
        "mhc_init_gating_factor": 0.01, "enable_depth_attention": False, "depth_attention_stride": None, "depth_attention_recent_window": 0,
        "depth_attention_static_anchor_once": True, "initializer_range": 0.02, "pretraining_tp": 1, "attention_dropout": 0.0, "rope_scaling": None,
        "pad_token_id": 0, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
    }  # fmt: skip
    huginn = {"num_attention_heads": 3, "hidden_size": 72, "num_hidden_layers": 4, "activation_checkpoint_impl": "per-iteration",
              "tie_word_embeddings": True, "torch_dtype": "float32"}  # fmt: skip
    for family, fields in (("nanbeige", nanbeige), ("huginn", huginn)):
        assert model_config_of(STATES[family][0] | fields) == model_config_of(STATES[family][0])


def model_config_of(config):
    return (huginn_config if is_huginn(config) else model_config)(config)


def test_what_an_ouro_config_leaves_out_is_what_its_class_assumes():
    sparse = {key: value for key, value in OURO.items() if key not in ("num_key_value_heads", "sliding_window", "layer_types", "head_dim")}
    config = model_config(sparse | {"num_attention_heads": 32, "use_sliding_window": True, "max_window_layers": 1})
    assert (config.n_kv_heads, config.head_dim, config.layer_windows) == (32, 2, (0, 4096, 4096))


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
    "half heads": ("nanbeige", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is below 1, NanbeigeForCausalLM is supported with heads"),
    "half heads, nested": ("ouro", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is below 1"),
    "split": ("nanbeige", {"enable_double_loop_split": True}, "enable_double_loop_split is True, NanbeigeForCausalLM is supported with False only"),
    "middle": ("nanbeige", {"loop_middle_layers": 1}, "loop_middle_layers is 1, NanbeigeForCausalLM is supported with None only"),
    "no name": ("ouro", {"": [0.5]}, "field  is unknown for OuroForCausalLM"),
    "huge size": ("ouro", {"head_dim": 10**400}, r"head_dim is 10+\.\.\., expected an integer from 1"),
    "huge length": ("ouro", {"max_position_embeddings": 10**400, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1}},
                    "max_position_embeddings is 10+"),
    "ngrams": ("nanbeige", {"emb_neighbor_num": 2}, "emb_neighbor_num is 2, NanbeigeForCausalLM is supported with None only"),
    "ngram layers": ("nanbeige", {"insert_ngram_layer_idx": [1]}, "insert_ngram_layer_idx is .1., NanbeigeForCausalLM is supported with"),
    "streams": ("nanbeige", {"enable_hyper_connection": True, "num_residual_streams": 4}, "enable_hyper_connection is True"),
    "words": ("nanbeige", {"skip_loop_final_norm": "false"}, "skip_loop_final_norm is 'false', expected true or false"),
    "loss": ("nanbeige", {"loop_loss_weights": ["a"]}, "loop_loss_weights is .'a'., expected a list of numbers"),
    "channels": ("nanbeige", {"kv_channels": 64}, "kv_channels"),
    "losses": ("nanbeige", {"loop_loss_weights": 0.5}, "loop_loss_weights is 0.5, expected a list of numbers"),
    "retrofit block": ("huginn", {"block_class_name": "LlamaBlock"}, "block_class_name is 'LlamaBlock', RavenForCausalLM is supported with"),
    "injection": ("huginn", {"injection_type": "add"}, "injection_type is 'add'"),
    "noise": ("huginn", {"test_time_noise": 0.1}, "test_time_noise is 0.1"),
    "layers": ("huginn", {"n_layers": 8}, "n_layers is 8, RavenForCausalLM is supported with 4 here only"),
    "gqa": ("huginn", {"num_key_value_heads": 1}, "num_key_value_heads is 1, RavenForCausalLM is supported with 3 here only"),
    "size": ("huginn", {"n_embd": "72"}, "n_embd is '72', expected an integer"),
    "heads": ("huginn", {"n_heads": 5, "num_key_value_heads": 5, "head_dim": "absent"}, "n_embd 72 is no multiple of n_heads 5"),
    "scale": ("huginn", {"init_values": {"embed_scale": 0}}, "init_values.embed_scale is 0, expected a positive number"),
    "huge scale": ("huginn", {"init_values": {"embed_scale": 10**400}}, "init_values.embed_scale is 10+"),
    "scales": ("huginn", {"init_values": [1.0]}, "init_values is .1.0., expected an object"),
    "bias": ("huginn", {"qk_bias": "no"}, "qk_bias is 'no', expected true or false"),
    "layers by another name": ("huginn", {"num_hidden_layers": 8}, "num_hidden_layers is 8, RavenForCausalLM is supported with 4 here only"),
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
        ({f"{wqkv}[q]": torch.zeros(72, 72)}, r"tensor .*Wqkv.weight\[q\] has no place"), ({"x": torch.tensor(1.0)}, "tensor x has no place"),
        ({"transformer.ln_f.weight": torch.tensor(1.0)}, r"tensor transformer.ln_f.weight has shape \[\], the config asks for \[72\]"),
    )):  # fmt: skip
        state = {name: tensor for name, tensor in {**good, **change}.items() if tensor is not None}
        checkpoint(tmp_path / str(i), "huginn", state=state)
        with pytest.raises(FormatError, match=message):
            converted(tmp_path / str(i))


RETROFIT = {  # what the retrofitted-recurrence models change in Huginn's config; the block's name stays
    "tie_embeddings": False, "qk_bias": False, "norm_eps": 1e-5, "num_key_value_heads": 3, "rope_base": 500000.0, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "init_values": {"std": 0.07, "embed_scale": 1.0},
}  # fmt: skip


def test_retrofitted_models_share_huginns_class_and_are_refused(tmp_path):
    """By their config, and where that says nothing, by their tensors: Llama's blocks have two norms, OLMo-2's two and those of q and k."""
    config = HUGINN | RETROFIT
    shapes = {name: shape for name, shape in huginn_shapes(config).items() if "norm_3" not in name and "norm_4" not in name}
    llama = random_state(shapes | {"lm_head.weight": (320, 72)})
    norms = {f"transformer.core_block.0.attn.{p}_norm.weight": torch.ones(72) for p in "qk"}
    silent = dict.fromkeys(("max_position_embeddings", "rope_theta"), "absent")
    for state in (llama, llama | norms):
        checkpoint(tmp_path, "huginn", state=state, **RETROFIT)
        with pytest.raises(FormatError, match=r"field max_position_embeddings .* is unknown for RavenForCausalLM"):
            converted(tmp_path)
        checkpoint(tmp_path, "huginn", state=state, **RETROFIT | silent)
        with pytest.raises(FormatError, match=r"norm_3.weight \(and 7 more\) is missing"):
            converted(tmp_path)


def test_shards_and_types_of_the_source(tmp_path):
    config, state = checkpoint(tmp_path / "one", "huginn", state={k: v.bfloat16() for k, v in huginn_state(HUGINN).items()})
    (tmp_path / "two").mkdir()
    names = sorted(state)
    shards = {f"model-0000{i}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file_name, part in shards.items():
        save_file({name: state[name].double() for name in part}, tmp_path / "two" / file_name)
    index = {"weight_map": {name: file_name for file_name, part in shards.items() for name in part}}
    (tmp_path / "two" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    with converted(tmp_path / "one") as one, converted(tmp_path / "two") as two:
        assert {one.tensor(name).dtype for name in matrix_shapes(one.config)} == {"bf16"}
        assert {two.tensor(name).dtype for name in matrix_shapes(two.config)} == {"f32"}
        assert all(np.array_equal(weight.to_float32(), two.tensor(weight.name).to_float32()) for weight in one)


def test_the_memory_of_fused_tensors_is_that_of_a_few_rows_too(tmp_path):
    """A 720 MB source whose largest tensor, 134 MB, has two parts."""
    sizes = {"n_embd": 1024, "n_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 16384, "vocab_size": 8192, "n_layers": 3}
    config = HUGINN | sizes | {"n_layers_in_recurrent_block": 1, "padded_vocab_size": 8192, "init_values": None}
    shapes = huginn_shapes(config) | {"lm_head.weight": (8192, 1024), "freqs_cis": (1, 256, 1, 64, 2)}
    assert write_sparse(tmp_path, config, shapes) > 720e6
    assert conversion_megabytes(tmp_path) < 100


def test_progress_ends_at_its_total(tmp_path):
    for family in STATES:
        checkpoint(tmp_path, family)
        calls = []
        converted(tmp_path, progress=lambda *call: calls.append(call)).close()  # noqa: B023
        done, totals, _ = zip(*calls, strict=True)
        assert list(done) == sorted(done) and set(totals) == {done[-1]} and done[0] > 0


END_OF_TURN = {  # template, what config.json names, the ids that end an answer
    "ouro": ("<|im_start|>{{ messages[0].content }}<|im_end|>", 0, (0, 4)),
    "nanbeige": ("<|im_start|>{{ messages[0].content }}<|im_end|>", 4, (4,)),
    "huginn": ("{% generation %}{{ messages[0].content }}<|end_turn|>{% endgeneration %}{{ '<|end_text|>' }}", 6, (6, 5)),
}


@pytest.mark.parametrize("family", END_OF_TURN)
def test_an_answer_ends_where_the_template_ends_a_turn(tmp_path, family):
    template, named, expected = END_OF_TURN[family]
    checkpoint(tmp_path, family, eos_token_id=named)
    special = ["<|endoftext|>", "a", "b", "<|im_start|>", "<|im_end|>", "<|end_turn|>", "<|end_text|>"]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(special)}, unk_token="a"))
    tokenizer.add_special_tokens([token for token in special if len(token) > 1])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": special[named]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named, "bos_token_id": 3, "transformers_version": "4.47.1"}))
    convert(tmp_path, tmp_path / "m.tinyloop")
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert file.stop_ids == expected and file.chat_template == template


def test_command_line(tmp_path, capsys):
    checkpoint(tmp_path, "ouro")
    assert main(["convert", str(tmp_path), str(tmp_path / "m.tinyloop"), "--no-tokenizer", "--dtype", "bf16"]) == 0
    assert "max_loops 16" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "m.tinyloop")]) == 0
