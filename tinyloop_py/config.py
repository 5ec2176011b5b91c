"""ModelConfig: what a looped language model is made of, validated field by field."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from .errors import FormatError
from .strict_json import load_object, shown

DEFAULT_LOOPS = 8  # the depth of a file that names none

CHOICES: dict[str, tuple[str, ...]] = {
    "block_norm": ("pre", "sandwich", "sum_sandwich", "post"),
    "loop_norm": ("none", "every", "last"),
    "inject": ("none", "concat_linear", "add"),
    "state_init": ("input", "zero", "normal"),
    "qk_norm": ("none", "head", "full"),
    "rope_style": ("half", "interleaved"),
    "mlp": ("gated", "plain"),
    "activation": ("silu", "gelu", "relu2"),
    "exit": ("none", "hazard_gate"),
}

# rope_scaling["type"] -> the other keys it must carry (HF's names; lengths in positions).
ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a (looped) decoder transformer.

    The forward pass of one token, with ``loops`` given by the call::

        e = E[token] * embed_scale;  e = prelude(e);  x = state_init(e)
        for r in range(loops):
            x = inject(x, e);  x = core(x);  x = loop_norm(x)    # "every"
        x = loop_norm(x)                                         # "last"
        x = coda(x);  x = final_norm(x);  logits = softcap(head(x) * logit_scale)

    A block is attention, then the MLP; with f either of them and n the norms (RMSNorm, weight * x / rms(x)):

    ============== ====================================
    block_norm     step
    ============== ====================================
    pre            x = x + f(n(x))
    sandwich       x = x + n'(f(n(x)))       (Ouro)
    sum_sandwich   x = n'(x + f(n(x)))       (Huginn)
    post           x = x + n'(f(x))          (OLMo 2)
    ============== ====================================

    Layers are counted over prelude, core, coda in that order (`n_layers` physical ones).

    Parameters
    ----------
    vocab_size, dim, ffn_dim, n_heads, n_kv_heads, head_dim : int
        Sizes; head_dim is even, 256 at most, and n_kv_heads divides n_heads.
    n_prelude, n_core, n_coda : int
        Layers before the loops, in them and after them.
    default_loops : int
        The depth of a call that names none.
    trained_loops : int, optional
        Deeper calls warn once; None: default_loops.
    max_loops : int, optional
        Deeper calls are refused; None: 4 * trained_loops.
    trained_seq_len : int, optional
        Positions seen in training, for information.
    block_norm, norm_eps, final_norm
        Where a block has its norms (the table above), the eps of all norms, whether there is a norm before the head.
    loop_norm : {"none", "every", "last"}
        A norm after every loop, after the last, or none.
    inject : {"none", "concat_linear", "add"}
        How a loop takes the embedding e in: x, inject.weight [x; e], or x + e.
    state_init : {"input", "zero", "normal"}
        What x starts as: e, zero, or noise by (state_init_seed, position, index), as tests/philox.py defines it, of
        state_init_std before the truncation at 3 sigma; embed_scale does not enter.
    attn_bias : str
        The projections that have a bias, out of "qkvo" in that order.
    qk_norm : {"none", "head", "full"}
        RMSNorm of q and k, per head (head_dim weights) or over the full row.
    rope_style, rope_theta, rotary_dim, rope_scaling
        RoPE in "half" or "interleaved" style, over the leading rotary_dim dimensions of a head (None: head_dim); scaling is
        None or {"type": "linear", "llama3" or "yarn", ...}, whose other keys `ROPE_SCALING` lists.
    nope_layers : tuple of int
        Layers without RoPE.
    layer_windows : tuple of int
        The attention window of each layer, 0 for full; () is full everywhere.
    mlp : {"gated", "plain"}
        down(act(gate(x)) * up(x)), or down(act(up(x))).
    activation : {"silu", "gelu", "relu2"}
        gelu is the tanh form.
    tied_embeddings, embed_scale, logit_scale
        Whether the head is the embedding; what embeddings and logits are multiplied by.
    logit_softcap : float
        cap * tanh(logits / cap); 0 is none.
    exit : {"none", "hazard_gate"}
        Whether the file holds an exit gate, which the runtime does not use.
    extra : dict
        Provenance: source, licence, training; never read by the runtime.
    """

    vocab_size: int
    dim: int
    ffn_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_core: int
    n_prelude: int = 0
    n_coda: int = 0
    default_loops: int = DEFAULT_LOOPS
    trained_loops: int | None = None
    max_loops: int | None = None
    trained_seq_len: int | None = None

    block_norm: str = "pre"
    norm_eps: float = 1e-5
    loop_norm: str = "none"
    final_norm: bool = True
    inject: str = "none"
    state_init: str = "input"
    state_init_std: float = 0.0
    state_init_seed: int = 0

    attn_bias: str = ""
    qk_norm: str = "none"
    rope_style: str = "half"
    rope_theta: float = 10000.0
    rotary_dim: int | None = None
    rope_scaling: dict[str, Any] | None = None
    nope_layers: tuple[int, ...] = ()
    layer_windows: tuple[int, ...] = ()

    mlp: str = "gated"
    activation: str = "silu"
    tied_embeddings: bool = True
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    exit: str = "none"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, source, factor in (("trained_loops", "default_loops", 1), ("max_loops", "trained_loops", 4), ("rotary_dim", "head_dim", 1)):
            if getattr(self, name) is None:
                _check_int(source, getattr(self, source))
                object.__setattr__(self, name, min(factor * getattr(self, source), _MAX_INT))
        for name in ("nope_layers", "layer_windows"):
            if not isinstance(getattr(self, name), list | tuple):
                _fail(name, getattr(self, name), "a list of integers")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_types(self)
        _check_values(self)

    @property
    def n_layers(self) -> int:
        """Physical layers: n_prelude + n_core + n_coda."""
        return self.n_prelude + self.n_core + self.n_coda

    @property
    def q_dim(self) -> int:
        """Width of q and of the attention output, n_heads * head_dim."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of k and of v, n_kv_heads * head_dim."""
        return self.n_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """The layer's own attention window in positions (itself included), 0 for none."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def to_json(self) -> str:
        """Every field as JSON, in field order."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """Read `to_json`'s text; FormatError names an unknown, missing or invalid field."""
        fields = load_object(text, "config")
        known = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - set(known)):
            raise FormatError(f"config has unknown field(s) {shown(', '.join(unknown))}; this tinyloop is too old for the file, or it is damaged")
        required = [n for n, f in known.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
        if missing := [name for name in required if name not in fields]:
            raise FormatError(f"config lacks field(s) {', '.join(missing)}")
        try:
            return cls(**fields)
        except (ValueError, TypeError) as error:
            raise FormatError(str(error)) from None


_INTS = {
    "vocab_size": 1, "dim": 1, "ffn_dim": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "n_core": 1, "n_prelude": 0,
    "n_coda": 0, "default_loops": 1, "trained_loops": 1, "max_loops": 1, "rotary_dim": 0, "state_init_seed": 0,
    "trained_seq_len": 1,
}  # fmt: skip
_MAX_INT = 2**31 - 1
_MAX = {"n_prelude": 4096, "n_core": 4096, "n_coda": 4096}  # a damaged file must not make us list 2**31 layers
_MAX_FLOAT = 3.4028234663852886e38  # float32's, the type the runtime keeps them in
_FLOATS = ("norm_eps", "state_init_std", "rope_theta", "embed_scale", "logit_scale", "logit_softcap")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fail(name: str, got: object, expected: str) -> None:
    raise ValueError(f"config field {name} is {shown(got, 500)}, expected {expected}")


def _check_int(name: str, value: object) -> None:
    low, high = _INTS[name], _MAX.get(name, _MAX_INT)
    if not _is_int(value) or not low <= value <= high:  # type: ignore[operator]
        _fail(name, value, f"an integer from {low} to {high}")


def _check_types(c: ModelConfig) -> None:
    for name in _INTS:
        if name != "trained_seq_len" or c.trained_seq_len is not None:
            _check_int(name, getattr(c, name))
    for name in _FLOATS:
        value = getattr(c, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_FLOAT:
            _fail(name, value, "a finite float32")
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            _fail(name, getattr(c, name), "one of " + ", ".join(choices))
    for name in ("final_norm", "tied_embeddings"):
        if not isinstance(getattr(c, name), bool):
            _fail(name, getattr(c, name), "true or false")
    if not isinstance(c.extra, dict):
        _fail("extra", c.extra, "an object")


def _check_values(c: ModelConfig) -> None:
    if c.n_heads % c.n_kv_heads:
        _fail("n_kv_heads", c.n_kv_heads, f"a divisor of n_heads = {c.n_heads}")
    if c.head_dim % 2 or c.head_dim > 256:
        _fail("head_dim", c.head_dim, "an even number up to 256")
    if c.rotary_dim % 2 or c.rotary_dim > c.head_dim:  # type: ignore[operator]
        _fail("rotary_dim", c.rotary_dim, f"an even number up to head_dim = {c.head_dim}")
    if not c.default_loops <= c.max_loops:  # type: ignore[operator]
        _fail("max_loops", c.max_loops, f"at least default_loops = {c.default_loops}")
    for name in ("norm_eps", "rope_theta", "logit_scale", "embed_scale"):
        if not getattr(c, name) > 0:
            _fail(name, getattr(c, name), "a positive number")
    for name in ("state_init_std", "logit_softcap"):
        if not getattr(c, name) >= 0:
            _fail(name, getattr(c, name), "zero or more")
    if c.inject == "none" and c.state_init != "input":
        _fail("state_init", c.state_init, "input, since inject is none: the loops would never see the tokens")
    if not isinstance(c.attn_bias, str) or c.attn_bias != "".join(p for p in "qkvo" if p in c.attn_bias):
        _fail("attn_bias", c.attn_bias, "letters out of 'qkvo', in that order")
    if not all(_is_int(i) and 0 <= i < c.n_layers for i in c.nope_layers):
        _fail("nope_layers", c.nope_layers, f"layer indices below {c.n_layers}")
    if c.layer_windows and (len(c.layer_windows) != c.n_layers or not all(_is_int(w) and 0 <= w <= _MAX_INT for w in c.layer_windows)):
        _fail("layer_windows", c.layer_windows, f"nothing or {c.n_layers} integers, 0 for full attention")
    _check_rope_scaling(c)


def _check_rope_scaling(c: ModelConfig) -> None:
    scaling = c.rope_scaling
    if scaling is None:
        return
    if not isinstance(scaling, dict) or scaling.get("type") not in tuple(ROPE_SCALING):
        _fail("rope_scaling", scaling, "null or an object whose type is one of " + ", ".join(ROPE_SCALING))
    keys = ROPE_SCALING[scaling["type"]]
    if set(scaling) != {"type", *keys}:
        _fail("rope_scaling", scaling, f"type {scaling['type']} with exactly {', '.join(keys)}")
    for key in keys:
        if isinstance(scaling[key], bool) or not isinstance(scaling[key], int | float) or not 0 < scaling[key] <= _MAX_FLOAT:
            _fail(f"rope_scaling.{key}", scaling[key], "a positive number")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if high in scaling and not scaling[low] < scaling[high]:
            _fail(f"rope_scaling.{high}", scaling[high], f"more than {low} = {scaling[low]}")
    if scaling["type"] == "yarn" and not c.rope_theta > 1:
        _fail("rope_theta", c.rope_theta, "more than 1 with yarn")
