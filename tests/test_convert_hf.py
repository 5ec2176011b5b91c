"""Conversion of Hugging Face folders: tensors and config against models that transformers built."""

import errno
import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from reference import Reference
from safetensors.torch import load_file, save_file
from samples import TEXTS, build
from sparse_checkpoint import conversion_megabytes, write_sparse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from tinyloop_py.cli import main
from tinyloop_py.config import ModelConfig
from tinyloop_py.convert import convert
from tinyloop_py.convert.families import FAMILIES
from tinyloop_py.errors import FormatError
from tinyloop_py.layout import matrix_shapes, tensor_shapes
from tinyloop_py.model_file import open_model_file
from tinyloop_py.quantize import quantize_rows


def edit_config(folder, remove=(), **changes) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if key not in remove}))


def converted(folder, **kwargs):
    convert(folder, folder / "m.tinyloop", **{"tokenizer": False} | kwargs)
    return open_model_file(folder / "m.tinyloop")


def reference_tensors(model: torch.nn.Module, config: ModelConfig) -> dict[str, np.ndarray]:
    """The model's tensors under tinyloop's names, spelled out by hand."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    named = {"embed.weight": state["model.embed_tokens.weight"], "final_norm.weight": state["model.norm.weight"]}
    if not config.tied_embeddings:
        named["head.weight"] = state["lm_head.weight"]
    for i in range(config.n_core):
        theirs = f"model.layers.{i}."
        named[f"core.{i}.attn_norm.weight"] = state[theirs + "input_layernorm.weight"]
        named[f"core.{i}.mlp_norm.weight"] = state[theirs + "post_attention_layernorm.weight"]
        for p in "qkvo":
            named[f"core.{i}.attn.{p}.weight"] = state[theirs + f"self_attn.{p}_proj.weight"]
            if p in config.attn_bias:
                named[f"core.{i}.attn.{p}.bias"] = state[theirs + f"self_attn.{p}_proj.bias"]
        for p in ("gate", "up", "down"):
            named[f"core.{i}.mlp.{p}.weight"] = state[theirs + f"mlp.{p}_proj.weight"]
        if config.qk_norm == "head":
            named[f"core.{i}.attn.q_norm.weight"] = state[theirs + "self_attn.q_norm.weight"]
            named[f"core.{i}.attn.k_norm.weight"] = state[theirs + "self_attn.k_norm.weight"]
    return named


# -- families

FAMILY_CASES = {
    "llama": ("Llama", {}, {}),
    "llama mha, tied, gelu": ("Llama", {"num_key_value_heads": None, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
                              {"n_kv_heads": 4, "tied_embeddings": True, "activation": "gelu"}),
    "llama head_dim, bias": ("Llama", {"head_dim": 24, "attention_bias": True, "rms_norm_eps": 1e-5},
                             {"head_dim": 24, "attn_bias": "qkvo", "norm_eps": 1e-5, "rotary_dim": 24}),
    "mistral window": ("Mistral", {"sliding_window": 32}, {"layer_windows": (32,) * 4}),
    "mistral full": ("Mistral", {"sliding_window": None}, {"layer_windows": ()}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {"attn_bias": "qkv", "tied_embeddings": True, "layer_windows": ()}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
                     {"attn_bias": "qkv", "layer_windows": (0, 0, 0, 16)}),
    "qwen3": ("Qwen3", {"head_dim": 32}, {"head_dim": 32, "qk_norm": "head"}),
    "qwen3 listed windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 16, "attention_bias": True, "head_dim": 16,
                                       "layer_types": ["sliding_attention", "full_attention"] * 2},
                             {"attn_bias": "qkvo", "qk_norm": "head", "layer_windows": (16, 0, 16, 0)}),
    "smollm3": ("SmolLM3", {}, {"rope_theta": 2e6, "tied_embeddings": True, "nope_layers": (3,), "layer_windows": ()}),
    "smollm3 listed": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": False},
                       {"rope_theta": 2e6, "nope_layers": (1,), "layer_windows": (0, 8, 0, 0)}),
    "smollm3 interval": ("SmolLM3", {"no_rope_layer_interval": 2}, {"rope_theta": 2e6, "tied_embeddings": True, "nope_layers": (1, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_families(tmp_path, case):
    family, fields, expected = FAMILY_CASES[case]
    model = build(tmp_path, family, **fields)
    with converted(tmp_path) as file:
        plain = {
            "vocab_size": 320, "dim": 64, "ffn_dim": 96, "n_core": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "trained_seq_len": 256,
            "default_loops": 1, "max_loops": 1, "norm_eps": 1e-6, "tied_embeddings": False, "extra": {"converted_from": f"{family}ForCausalLM"},
        }  # fmt: skip
        assert file.config == ModelConfig(**{**plain, **expected})
        reference = reference_tensors(model, file.config)
        assert set(reference) == set(file.names) == set(tensor_shapes(file.config))
        for weight in file:
            assert weight.dtype == "f32" and np.array_equal(weight.to_float32(), reference[weight.name]), weight.name
        assert file.stop_ids == (1,)


@pytest.mark.parametrize("case", [*FAMILY_CASES, "llama yarn", "llama llama3", "llama linear"])
def test_a_converted_model_gives_the_logits_of_transformers(tmp_path, case):
    """The config means the same: windows, layers without rope, biases, norms, scaling, over more tokens than the windows hold."""
    family, fields, _ = FAMILY_CASES.get(case) or ("Llama", {"rope_parameters": {**ROPES[case.removeprefix("llama ")], "rope_theta": 5e5}}, {})
    model = build(tmp_path, family, std=0.2, **fields).double().eval()
    tokens = np.random.default_rng(0).integers(0, 320, 96)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    with converted(tmp_path) as file:
        ours = Reference(file.config, {weight.name: weight.to_float32() for weight in file}).logits(tokens)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_defaults_of_transformers_hold_where_config_json_is_silent(tmp_path):
    for family, keys, expected in (
        ("Mistral", ["sliding_window"], {"layer_windows": (4096,) * 4}),
        (
            "Llama",
            ["hidden_act", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "head_dim", "max_position_embeddings", "attention_bias"],
            {},
        ),
        ("SmolLM3", ["tie_word_embeddings", "rope_parameters", "no_rope_layers", "layer_types"], {"tied_embeddings": True, "rope_theta": 2e6}),
        ("Qwen2", ["layer_types", "use_sliding_window", "max_window_layers", "sliding_window"], {"layer_windows": ()}),
    ):
        folder = tmp_path / family
        build(folder, family)
        edit_config(folder, remove=keys)
        with converted(folder) as file:
            for name, value in expected.items():
                assert getattr(file.config, name) == value


@pytest.mark.parametrize(("options", "group_size"), [([], 64), (["--group-size", "0"], None), (["--group-size", "128"], 128)])
def test_int8_shares_a_scale_among_64_columns_unless_told_otherwise(tmp_path, options, group_size):
    build(tmp_path)
    assert main(["convert", str(tmp_path), str(tmp_path / "m.tinyloop"), "--no-tokenizer", "--dtype", "int8", *options]) == 0
    with open_model_file(tmp_path / "m.tinyloop") as file:
        assert file.group_size == group_size


@pytest.mark.parametrize(("source", "own"), [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32"), (torch.float64, "f32")])
@pytest.mark.parametrize(("dtype", "group_size"), [(None, None), ("f32", None), ("bf16", None), ("f16", None), ("int8", None), ("int8", 64)])
def test_types(tmp_path, source, own, dtype, group_size):
    model = build(tmp_path, dtype=source, num_hidden_layers=1)
    with converted(tmp_path, dtype=dtype, group_size=group_size) as file:
        file.verify()
        for name, x in reference_tensors(model, file.config).items():
            weight = file.tensor(name)
            if name not in matrix_shapes(file.config):
                assert weight.dtype == "f32" and np.array_equal(weight.to_float32(), x)
            elif dtype == "int8":
                q, scales = quantize_rows(x, group_size)
                assert np.array_equal(weight.data, q.reshape(-1)) and np.array_equal(weight.scales, scales)
            else:
                assert weight.dtype == (dtype or own)
                rounded = torch.from_numpy(x).to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[weight.dtype]).float().numpy()
                assert np.array_equal(weight.to_float32(), rounded)


def test_shards(tmp_path):
    model = build(tmp_path, shard="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    with converted(tmp_path) as file:
        for name, x in reference_tensors(model, file.config).items():
            assert np.array_equal(file.tensor(name).to_float32(), x)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / shard).rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=re.escape(shard)):
        converted(tmp_path)
    for value, message in (("../moved", "names the file '../moved'"), (3, "names the file 3"), ("config.json", "not a safetensors file")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**index["weight_map"], "lm_head.weight": value}}))
        (tmp_path / shard).exists() or (tmp_path / "moved").rename(tmp_path / shard)
        with pytest.raises(FormatError, match=message):
            converted(tmp_path)
    place = index["weight_map"]["lm_head.weight"]
    places = list(index["weight_map"].values())
    other = next(name for name, its in index["weight_map"].items() if its != place and places.count(its) > 1)
    for change, message in (
        ({other: place}, f"tensor '{other}' is in .*, .* puts it elsewhere"),
        ({"absent": place}, "tensor absent is missing in the files"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index["weight_map"] | change}))
        with pytest.raises(FormatError, match=message):
            converted(tmp_path)


def test_depth(tmp_path):
    build(tmp_path)
    for kwargs, expected in (({}, (1, 1, 1)), ({"max_loops": 4}, (1, 1, 4)), ({"loops": 3}, (3, 1, 3)), ({"loops": 2, "max_loops": 8}, (2, 1, 8))):
        with converted(tmp_path, **kwargs) as file:
            assert (file.config.default_loops, file.config.trained_loops, file.config.max_loops) == expected
    with pytest.raises(ValueError, match="max_loops is 2, expected at least default_loops = 3"):
        converted(tmp_path, loops=3, max_loops=2)


# -- rope, in both spellings, against the frequencies of transformers


def rope_of(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor of cos and sin, from a ModelConfig alone."""
    n = config.rotary_dim
    frequency = config.rope_theta ** (-np.arange(0, n, 2) / n)
    s = config.rope_scaling
    if s is None:
        return frequency, 1.0
    if s["type"] == "linear":
        return frequency / s["factor"], 1.0
    if s["type"] == "llama3":
        waves = s["original_max_position"] * frequency / (2 * np.pi)
        blend = np.clip((waves - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
        return frequency * ((1 - blend) / s["factor"] + blend), 1.0

    def turns_to_dim(turns):
        return n * np.log(s["original_max_position"] / (turns * 2 * np.pi)) / (2 * np.log(config.rope_theta))

    low, high = max(np.floor(turns_to_dim(s["beta_fast"])), 0), min(np.ceil(turns_to_dim(s["beta_slow"])), n - 1)
    ramp = np.clip((np.arange(n // 2) - low) / max(high - low, 0.001), 0, 1)
    return frequency / s["factor"] * ramp + frequency * (1 - ramp), s["attention_factor"]


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn betas": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": True},
    "yarn attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    "yarn mscale": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn no original": {"rope_type": "yarn", "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type", "original length on top", "by layer type"])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_in_every_spelling_gives_the_frequencies_of_transformers(tmp_path, rope, spelling):
    build(tmp_path, "Qwen2", num_hidden_layers=2)
    parameters = {**ROPES[rope], "rope_theta": 500000.0}
    removed = {"rope_parameters"}
    if spelling == "rope_parameters":
        edit_config(tmp_path, rope_parameters=parameters)
    elif spelling == "by layer type":
        edit_config(tmp_path, rope_parameters={"full_attention": parameters})
    else:
        theta = parameters.pop("rope_theta")
        if spelling == "rope_scaling with type":
            parameters["type"] = parameters.pop("rope_type")
        top = {}
        if spelling == "original length on top" and "original_max_position_embeddings" in parameters:
            top["original_max_position_embeddings"] = parameters["original_max_position_embeddings"]
            parameters["original_max_position_embeddings"] = 7
        edit_config(tmp_path, removed, rope_theta=theta, rope_scaling=None if rope == "default" else parameters, **top)
    with converted(tmp_path) as file:
        frequency, factor = rope_of(file.config)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    if spelling == "by layer type":
        theirs.rope_parameters = dict(theirs.rope_parameters["full_attention"])
    module = transformers.models.qwen2.modeling_qwen2.Qwen2RotaryEmbedding(theirs)
    assert np.allclose(frequency, module.inv_freq.numpy(), rtol=2e-6) and factor == pytest.approx(module.attention_scaling, rel=1e-12)


def test_partial_rotary_factor(tmp_path):
    build(tmp_path)
    edit_config(tmp_path, partial_rotary_factor=0.5)
    assert converted(tmp_path).config.rotary_dim == 8
    edit_config(
        tmp_path, remove=["partial_rotary_factor"], rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    )
    assert converted(tmp_path).config.rotary_dim == 4


# -- refusals, each by name


REFUSED = {
    "architecture": ("Llama", {"architectures": ["GemmaForCausalLM"]}, "architecture .'GemmaForCausalLM'. is not supported; those that are: Llama"),
    "no architecture": ("Llama", {"architectures": None}, "architecture None is not supported"),
    "two architectures": ("Llama", {"architectures": ["LlamaForCausalLM", "X"]}, "is not supported"),
    "unknown field": ("Llama", {"residual_multiplier": 0.5}, "field residual_multiplier is unknown for LlamaForCausalLM and might change"),
    "nanbeige field": ("Llama", {"enable_double_loop_split": False, "num_loops": 2}, r"field enable_double_loop_split \(and 1 more\) is unknown"),
    "custom code": ("Llama", {"auto_map": {"AutoModel": "x"}}, "field auto_map is unknown"),
    "quantised": ("Llama", {"quantization_config": {"bits": 4}}, "field quantization_config is unknown"),
    "mlp bias": ("Llama", {"mlp_bias": True}, "mlp_bias is True, LlamaForCausalLM is supported with False only"),
    "activation": ("Llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', supported are silu, swish, gelu_new"),
    "activation type": ("Llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "window of llama": ("Llama", {"sliding_window": 64}, "sliding_window is 64, LlamaForCausalLM is supported with None only"),
    "interleaved": ("Llama", {"rope_interleaved": True}, "rope_interleaved is True"),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters has type 'dynamic', supported are"),
    "longrope": ("Llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling has type 'longrope'"),
    "su": ("Llama", {"rope_scaling": {"type": ["su"]}}, "rope_scaling has type .'su'."),
    "two rope types": ("Llama", {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "rope_scaling has type 'linear'"),
    "rope key": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "shift": 1}}, "rope_scaling of type linear has the unknown key shift"),
    "rope factor": ("Llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing, expected a positive number"),
    "rope factor sign": ("Llama", {"rope_scaling": {"type": "linear", "factor": -1.0}}, "rope_scaling.factor is -1.0"),
    "rope list": ("Llama", {"rope_scaling": [1]}, "rope_scaling is .1., expected an object"),
    "rope by layer": ("Qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}}, "differs between"),
    "yarn truncate": ("Llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False, supported is true only"),
    "partial": ("Llama", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    "no size": ("Llama", {"hidden_size": None}, "hidden_size is missing, expected an integer from 1"),
    "size type": ("Llama", {"num_hidden_layers": "4"}, "num_hidden_layers is '4', expected an integer"),
    "kv heads": ("Llama", {"num_key_value_heads": 3}, "n_kv_heads is 3, expected a divisor of n_heads = 4"),
    "eps": ("Llama", {"rms_norm_eps": "1e-5"}, "norm_eps is '1e-5', expected a finite"),
    "head_dim": ("Llama", {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 64 is no multiple of"),
    "mistral bias": ("Mistral", {"attention_bias": True}, "attention_bias is True, MistralForCausalLM is supported with False only"),
    "mistral list": ("Mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 4}, "has full_attention beside a sliding_window"),
    "layer type": ("Qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types is .*, expected full_attention or sliding_attention"),
    "layer types": ("Qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types is .* for each of the 4 layers"),
    "no window": ("Qwen3", {"layer_types": ["sliding_attention"] * 4}, "but sliding_window is unset or use_sliding_window false"),
    "no_rope_layers": ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0., expected a 0 or 1 for each of the 4 layers"),
    "eos": ("Llama", {"eos_token_id": 320}, "eos_token_id is 320, expected token ids below 320"),
}  # fmt: skip


@pytest.fixture(scope="module")
def family_folders(tmp_path_factory):
    folders = {}
    for family in ("Llama", "Mistral", "Qwen3", "SmolLM3"):
        folders[family] = tmp_path_factory.mktemp(family)
        build(folders[family], family)
        (folders[family] / "generation_config.json").unlink()
    return folders


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(family_folders, tmp_path, case):
    family, changes, message = REFUSED[case]
    folder = tmp_path / "src"
    shutil.copytree(family_folders[family], folder)
    edit_config(folder, **changes)
    with pytest.raises(FormatError, match=message):
        converted(folder)
    assert not list(folder.glob("*.tinyloop")) and not list(folder.glob(".*"))


def test_every_field_that_transformers_writes_is_known(tmp_path):
    """Fields of the base class and of generation that older versions wrote into config.json are harmless; null is as good as absent."""
    build(tmp_path)
    base = {
        "return_dict": True,
        "torchscript": False,
        "pruned_heads": {},
        "is_encoder_decoder": False,
        "id2label": {"0": "a"},
        "top_k": 50,
        "prefix": None,
    }
    smollm2 = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {},
        "pretraining_tp": 2,
        "_name_or_path": "x",
        "what_ever": None,
    }
    edit_config(tmp_path, **base, **smollm2, torch_dtype="bfloat16")
    converted(tmp_path).close()


def test_missing_extra_misshapen_and_mistyped_tensors(tmp_path):
    build(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    q = "model.layers.1.self_attn.q_proj.weight"
    for change, message in (
        ({q: None}, rf"tensor {q} is missing"),
        ({"model.layers.0.self_attn.sinks": torch.zeros(4)}, r"tensor model\.layers\.0\.self_attn\.sinks has no place in the model"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place"),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(4)}, r"tensor model\.layers\.9\.mlp\.up_proj\.weight has no place"),
        ({q: torch.zeros(32, 64)}, rf"tensor {q} has shape \[32, 64\], the config asks for \[64, 64\]"),
        ({q: torch.zeros(64, 64).to(torch.float8_e4m3fn)}, rf"tensor '{q}' has type F8_E4M3, supported are F32, F64, BF16, F16"),
        ({q: torch.zeros(64, 64, dtype=torch.int8)}, rf"tensor '{q}' has type I8"),
        ({q: torch.full((64, 64), torch.nan)}, r"tensor core\.1\.attn\.q\.weight holds NaN"),
        ({q: good[q].bfloat16()}, r"tensors core\.1\.attn\.q\.weight \(bf16\) and core\.1\.attn\.k\.weight \(f32\) run as one product"),
    ):
        save_file({name: tensor for name, tensor in (good | change).items() if tensor is not None}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(FormatError, match=message):
            converted(tmp_path)
        assert not list(tmp_path.glob("*.tinyloop")) and not list(tmp_path.glob(".*"))
    save_file(good | {q: good[q].bfloat16()}, tmp_path / "model.safetensors")
    assert converted(tmp_path, dtype="bf16").tensor("core.1.attn.q.weight").dtype == "bf16"
    save_file(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, tmp_path / "model.safetensors")
    converted(tmp_path).close()
    blob = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(blob[:-1])
    with pytest.raises(FormatError, match=r"model\.safetensors: tensor .* \(truncated"):
        converted(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        converted(tmp_path)


def test_a_stored_copy_of_a_tied_head_is_dropped_and_another_head_refused(tmp_path):
    build(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert "head.weight" not in converted(tmp_path).names
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"tensor lm_head\.weight differs from model\.embed_tokens\.weight, though config\.json ties them"):
        converted(tmp_path)


# -- tokenizer, chat template, stop ids


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=318, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def with_tokenizer(folder, tokenizer: Tokenizer, settings=None, **files) -> None:
    build(folder, num_hidden_layers=1)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})}))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text if isinstance(text, str) else json.dumps(text))


def assert_same_tokens(ours: Tokenizer, folder) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, skip_special_tokens=False) == theirs.backend_tokenizer.decode(ids, skip_special_tokens=False)


def test_tokenizer_round_trip(tmp_path, byte_level):
    with_tokenizer(tmp_path, byte_level, {"eos_token": "<|im_end|>", "model_max_length": 256})
    ours = converted(tmp_path, tokenizer=True).load_tokenizer()
    assert_same_tokens(ours, tmp_path)
    for text in TEXTS:
        assert ours.encode(text).ids == byte_level.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "flags", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": True, "add_eos_token": True}]
)
@pytest.mark.parametrize("template", [True, False])
def test_the_post_processor_of_tokenizer_json_stands_whatever_the_settings_say(tmp_path, byte_level, flags, template):
    tokenizer = Tokenizer.from_str(byte_level.to_str())
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    with_tokenizer(
        tmp_path, tokenizer, {**flags, "bos_token": "<|endoftext|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}}
    )
    assert_same_tokens(converted(tmp_path, tokenizer=True).load_tokenizer(), tmp_path)


def test_tokens_that_only_tokenizer_config_adds(tmp_path, byte_level):
    n = byte_level.get_vocab_size()
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(i): {**entry, "content": token} for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])}
    settings = {"added_tokens_decoder": {**added, str(n): {**entry, "content": "<tool>"}, str(n + 1): {**entry, "content": "zzz", "special": False}}}
    with_tokenizer(tmp_path, byte_level, settings)
    ours = converted(tmp_path, tokenizer=True).load_tokenizer()
    assert ours.encode("a<tool>zzzz").tokens == ["a", "<tool>", "zzz", "z"]
    assert_same_tokens(ours, tmp_path)
    settings["added_tokens_decoder"][str(n + 7)] = {**entry, "content": "<late>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(FormatError, match=rf"token '<late>' has id {n + 7}, in tokenizer\.json it would have {n + 2}"):
        converted(tmp_path, tokenizer=True)


def test_a_token_that_only_the_settings_name_is_matched_whole(tmp_path, byte_level):
    text = json.loads(byte_level.to_str())
    text["added_tokens"] = text["added_tokens"][:2]  # <|im_end|> stays in the vocabulary only
    with_tokenizer(tmp_path, Tokenizer.from_str(json.dumps(text)), {"eos_token": "<|im_end|>"})
    ours = converted(tmp_path, tokenizer=True).load_tokenizer()
    assert ours.encode("a<|im_end|>").tokens == ["a", "<|im_end|>"]
    assert_same_tokens(ours, tmp_path)


IM_END = "{{ '<|im_start|>' }}{{ message }}{{ '<|im_end|>' }}"
TEMPLATES = {
    "none": ({}, {}, None),
    "settings": ({"chat_template": "S"}, {}, "S"),
    "list": ({"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}, {}, "D"),
    "json": ({"chat_template": "S"}, {"chat_template__json": {"chat_template": "J"}}, "J"),
    "jinja": ({"chat_template": "S"}, {"chat_template__jinja": "{{ é }}\n"}, "{{ é }}\n"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_chat_template(tmp_path, byte_level, case):
    settings, files, expected = TEMPLATES[case]
    with_tokenizer(tmp_path, byte_level, settings, **files)
    assert converted(tmp_path, tokenizer=True).chat_template == expected


@pytest.mark.parametrize(
    ("generation", "config", "template", "expected"),
    [
        (None, 0, "x", (0,)), ([2, 0], 0, "x", (2, 0)), (5, [6, 5], "x", (5, 6)), (None, None, "x", ()),
        (0, 0, IM_END, (0, 2)),  # Ouro's case: the config stops on <|endoftext|> only
        ([2], 2, IM_END, (2,)), (0, 0, "{{ '<|eot_id|>' }}", (0,)),  # not a token of this model
    ],
)  # fmt: skip
def test_stop_ids(tmp_path, byte_level, generation, config, template, expected):
    with_tokenizer(tmp_path, byte_level, {"chat_template": template}, generation_config__json={"eos_token_id": generation})
    edit_config(tmp_path, eos_token_id=config)
    assert converted(tmp_path, tokenizer=True).stop_ids == expected


def test_faults_of_the_text_side(tmp_path, byte_level):
    with_tokenizer(tmp_path, byte_level)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: added_tokens_decoder is"):
        converted(tmp_path, tokenizer=True)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json is not valid JSON"):
        converted(tmp_path, tokenizer=True)
    (tmp_path / "tokenizer_config.json").unlink()
    converted(tmp_path, tokenizer=True).close()
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(FormatError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        converted(tmp_path, tokenizer=True)
    large = Tokenizer(models.WordLevel({"a": 320}, unk_token="a"))
    large.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="token id 320, the model's vocab_size is 320"):
        converted(tmp_path, tokenizer=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; --no-tokenizer"):
        converted(tmp_path, tokenizer=True)
    assert converted(tmp_path, tokenizer=False).tokenizer_json is None


# -- places and memory


def test_places(tmp_path, monkeypatch):
    src = tmp_path / "src"
    build(src)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        convert(tmp_path / "absent", out / "m.tinyloop")
    with pytest.raises(FileNotFoundError, match=r"out has no config\.json, expected the folder of a Hugging Face model"):
        convert(out, out / "m.tinyloop")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(FormatError, match="neither a Hugging Face folder nor a GGUF file"):
        convert(tmp_path / "text", out / "m.tinyloop")
    with pytest.raises(FileNotFoundError, match="folder to write into does not exist"):
        convert(src, tmp_path / "no" / "m.tinyloop", tokenizer=False)
    with pytest.raises(IsADirectoryError):
        convert(src, out, tokenizer=False)
    with pytest.raises(FormatError, match=r"text exists and is no \.tinyloop file"):
        convert(src, tmp_path / "text", tokenizer=False)
    assert (tmp_path / "text").read_text() == "hello"

    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="not enough space"):
        convert(src, out / "m.tinyloop", tokenizer=False)
    monkeypatch.undo()
    assert list(out.iterdir()) == []
    for name in ("m.tinyloop", "other-suffix"):
        convert(src, out / name, tokenizer=False, dtype="f32")
        convert(src, out / name, tokenizer=False, dtype="bf16")
        assert open_model_file(out / name).tensor("embed.weight").dtype == "bf16"
    (out / "m.tinyloop").write_text("damaged")
    convert(src, out / "m.tinyloop", tokenizer=False)
    open_model_file(out / "m.tinyloop").close()


def test_progress_counts_the_bytes_of_the_source(tmp_path):
    build(tmp_path)
    calls = []
    convert(tmp_path, tmp_path / "m.tinyloop", tokenizer=False, progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert list(done) == sorted(done) and done[-1] == total and set(totals) == {total} and "core.3.mlp.down.weight" in names


def test_memory_is_that_of_a_few_rows(tmp_path):
    """A 580 MB source, 134 MB of it one tensor, converts in less than 100 MB beyond the interpreter's own memory."""
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 7, "num_attention_heads": 8}
    shapes = {"model.embed_tokens.weight": [32768, 1024], "lm_head.weight": [32768, 1024], "model.norm.weight": [1024]}
    for i in range(7):
        shapes |= {f"model.layers.{i}.self_attn.{p}_proj.weight": [1024, 1024] for p in "qkvo"}
        shapes |= {f"model.layers.{i}.mlp.{p}_proj.weight": [1024, 4096] if p == "down" else [4096, 1024] for p in ("gate", "up", "down")}
        shapes |= {f"model.layers.{i}.{p}_layernorm.weight": [1024] for p in ("input", "post_attention")}
    assert write_sparse(tmp_path, {"architectures": ["LlamaForCausalLM"], **sizes}, shapes) > 580e6
    assert conversion_megabytes(tmp_path) < 100


def test_the_table_of_families_names_what_the_docs_name():
    assert set(FAMILIES) == {f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Ouro", "Nanbeige")}
