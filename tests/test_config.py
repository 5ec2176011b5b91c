"""ModelConfig: every bad value gives one error that names the field, and JSON keeps every field."""

import dataclasses
import json

import pytest
from models import CONFIGS, LINEAR, LLAMA3, YARN, small

from tinyloop_py.config import CHOICES, DEFAULT_LOOPS, ModelConfig
from tinyloop_py.errors import FormatError

SIZES = {"vocab_size": 10, "dim": 8, "ffn_dim": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "n_core": 1}
POSITIVE_INTS = ("vocab_size", "dim", "ffn_dim", "n_heads", "n_kv_heads", "n_core", "default_loops", "trained_loops", "max_loops", "trained_seq_len")
COUNTS = ("n_prelude", "n_coda", "state_init_seed")
POSITIVE_FLOATS = ("norm_eps", "rope_theta", "embed_scale", "logit_scale")
FLOATS = ("state_init_std", "logit_softcap")
NOT_INTS = (-1, 1.0, "3", True, 2**31, [1], {})
NOT_FLOATS = (-1.0, float("inf"), float("nan"), 1e39, 10**400, "1", None, True, [])

BAD = [
    *((name, value) for name in POSITIVE_INTS for value in (0, *NOT_INTS)),
    *((name, value) for name in COUNTS for value in (None, *NOT_INTS)),
    *((name, None) for name in POSITIVE_INTS if name not in ("trained_loops", "max_loops", "trained_seq_len")),
    *((name, 4097) for name in ("n_prelude", "n_core", "n_coda")),
    *(("head_dim", value) for value in (0, 1, 7, 258, None, "4", 4.0)),
    *(("rotary_dim", value) for value in (-2, 3, 18, 2.0, "2", True)),
    *((name, value) for name in POSITIVE_FLOATS for value in (0, 0.0, *NOT_FLOATS)),
    *((name, value) for name in FLOATS for value in NOT_FLOATS),
    *((name, value) for name in CHOICES for value in ("", "other", None, 1, [])),
    *((name, value) for name in ("final_norm", "tied_embeddings") for value in (0, 1, None, "true")),
    *(("attn_bias", value) for value in ("x", "kq", "qq", None, 1, ["q"])),
    *(("nope_layers", value) for value in (0, None, "0", {0: 1}, (-1,), (2,), (0.0,), (True,), ("0",))),
    *(("layer_windows", value) for value in (0, None, "00", (1,), (1, 2, 3), (1, -1), (1, 2.0), (1, True), (1, 2**31))),
    *(("extra", value) for value in (None, [], "")),
    ("n_kv_heads", 3),
    ("n_kv_heads", 8),
    *(("rope_scaling", value) for value in (1, "linear", {}, [], {"type": "dynamic", "factor": 2.0}, {"factor": 2.0}, {"type": ["linear"]})),
]  # fmt: skip


def short(value: object) -> str:
    return repr(value)[:24]


def error_of(**changes):
    with pytest.raises(ValueError) as caught:
        small(**changes)
    assert type(caught.value) is ValueError
    return str(caught.value)


@pytest.mark.parametrize(("name", "value"), BAD, ids=short)
def test_a_bad_value_is_an_error_that_names_the_field(name, value):
    message = error_of(**{name: value})
    assert message.startswith(f"config field {name} is {value!r}, expected ")


def test_every_field_has_a_bad_value_above():
    assert {name for name, _ in BAD} == {f.name for f in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN], ids=lambda s: s["type"])
def test_rope_scaling_wants_exactly_its_keys_and_positive_numbers(scaling):
    small(rope_scaling=scaling)
    for key in set(scaling) - {"type"}:
        assert error_of(rope_scaling={k: v for k, v in scaling.items() if k != key}).startswith("config field rope_scaling is ")
        for value in (0, -1.0, None, "1", True, float("nan"), float("inf"), 10**400, []):
            assert error_of(rope_scaling={**scaling, key: value}).startswith(f"config field rope_scaling.{key} is {value!r}, ")
    assert "truncate" in error_of(rope_scaling={**scaling, "truncate": False})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),  # would divide by zero
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta"),
        ({"default_loops": 9}, "max_loops"),
        ({"inject": "none", "state_init": "zero"}, "state_init"),
        ({"inject": "none", "state_init": "normal"}, "state_init"),
    ],
)
def test_values_that_do_not_go_together(changes, field):
    assert error_of(**changes).startswith(f"config field {field} is ")


def test_defaults():
    c = ModelConfig(**SIZES)
    assert (c.default_loops, c.trained_loops, c.max_loops, c.rotary_dim) == (DEFAULT_LOOPS, DEFAULT_LOOPS, 4 * DEFAULT_LOOPS, 4)
    c = ModelConfig(**SIZES, default_loops=3, trained_loops=5, rotary_dim=0)
    assert (c.trained_loops, c.max_loops, c.rotary_dim) == (5, 20, 0)
    assert ModelConfig(**SIZES, default_loops=2**31 - 1).max_loops == 2**31 - 1
    with pytest.raises(TypeError, match="vocab_size"):
        ModelConfig(**{k: v for k, v in SIZES.items() if k != "vocab_size"})
    with pytest.raises(TypeError):
        ModelConfig(*SIZES.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.dim = 9


def test_derived_sizes():
    c = small(n_prelude=1, n_core=2, n_coda=3, n_heads=6, n_kv_heads=2, head_dim=16, layer_windows=(0, 1, 2, 3, 4, 5))
    assert (c.n_layers, c.q_dim, c.kv_dim) == (6, 96, 32)
    assert [c.window(i) for i in range(6)] == [0, 1, 2, 3, 4, 5]
    assert small().window(1) == 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_json_round_trip(config):
    config = dataclasses.replace(config, extra={"source": "測試", "n": [1, {"a": None}]})
    text = config.to_json()
    assert list(json.loads(text)) == [f.name for f in dataclasses.fields(ModelConfig)]
    again = ModelConfig.from_json(text)
    assert again == config
    assert again.to_json() == text


def test_json_lists_and_absent_optional_fields():
    text = json.dumps({**SIZES, "nope_layers": [0], "layer_windows": [4]})
    assert ModelConfig.from_json(text) == ModelConfig(**SIZES, nope_layers=(0,), layer_windows=(4,))


def test_unknown_and_missing_fields_are_named():
    fields = json.loads(small().to_json())
    with pytest.raises(FormatError, match=r"unknown field.*a_flag, loop_lora"):
        ModelConfig.from_json(json.dumps({**fields, "loop_lora": 4, "a_flag": None}))
    with pytest.raises(FormatError, match=r"lacks field.*vocab_size, n_core"):
        ModelConfig.from_json(json.dumps({k: v for k, v in fields.items() if k not in ("n_core", "vocab_size")}))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "3", '"x"', "[" * 100_000, "1" * 5000])
def test_not_a_json_object(text):
    with pytest.raises(FormatError, match=r"^config is "):
        ModelConfig.from_json(text)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, v in BAD if v == v and v not in ((), {0: 1})], ids=short)
def test_a_bad_value_in_json_is_a_format_error_that_names_the_field(name, value):
    fields = json.loads(small().to_json())
    with pytest.raises(FormatError, match=rf"^config field {name} is "):
        ModelConfig.from_json(json.dumps({**fields, name: value}))
