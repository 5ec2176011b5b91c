"""The tensors of a `.tinyloop` file: names and shapes, all given by the config.

A matrix is stored as ``(n_out, n_in)``, row-major: ``y = W x``. Layers are ``prelude.{i}``, ``core.{i}``, ``coda.{i}``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .config import ModelConfig

SCALE_SUFFIX = ".scale"  # an int8 matrix W has its float32 scales in "W.scale": (n_out,) or (n_out, n_groups)


def layer_names(config: ModelConfig) -> list[str]:
    """The prefix of every physical layer, in layer order."""
    parts = (("prelude", config.n_prelude), ("core", config.n_core), ("coda", config.n_coda))
    return [f"{part}.{i}" for part, n in parts for i in range(n)]


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Name -> (n_out, n_in) of every matrix: the tensors that a file may hold as int8."""
    c = config
    shapes = {"embed.weight": (c.vocab_size, c.dim)}
    if c.inject == "concat_linear":
        shapes["inject.weight"] = (c.dim, 2 * c.dim)  # columns: x first, then e
    for layer in layer_names(c):
        shapes[f"{layer}.attn.q.weight"] = (c.q_dim, c.dim)
        shapes[f"{layer}.attn.k.weight"] = (c.kv_dim, c.dim)
        shapes[f"{layer}.attn.v.weight"] = (c.kv_dim, c.dim)
        shapes[f"{layer}.attn.o.weight"] = (c.dim, c.q_dim)
        if c.mlp == "gated":
            shapes[f"{layer}.mlp.gate.weight"] = (c.ffn_dim, c.dim)
        shapes[f"{layer}.mlp.up.weight"] = (c.ffn_dim, c.dim)
        shapes[f"{layer}.mlp.down.weight"] = (c.dim, c.ffn_dim)
    if not c.tied_embeddings:
        shapes["head.weight"] = (c.vocab_size, c.dim)
    return shapes


def vector_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every norm weight, bias and gate: always float tensors."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {}
    widths = {"q": c.q_dim, "k": c.kv_dim, "v": c.kv_dim, "o": c.dim}
    for layer in layer_names(c):
        for block in ("attn", "mlp"):
            if c.block_norm != "post":
                shapes[f"{layer}.{block}_norm.weight"] = (c.dim,)
            if c.block_norm != "pre":
                shapes[f"{layer}.{block}_post_norm.weight"] = (c.dim,)
        for p in c.attn_bias:
            shapes[f"{layer}.attn.{p}.bias"] = (widths[p],)
        if c.qk_norm != "none":
            shapes[f"{layer}.attn.q_norm.weight"] = (c.head_dim if c.qk_norm == "head" else c.q_dim,)
            shapes[f"{layer}.attn.k_norm.weight"] = (c.head_dim if c.qk_norm == "head" else c.kv_dim,)
    if c.loop_norm != "none":
        shapes["loop_norm.weight"] = (c.dim,)
    if c.final_norm:
        shapes["final_norm.weight"] = (c.dim,)
    if c.exit == "hazard_gate":
        shapes["exit_gate.weight"] = (1, c.dim)
        shapes["exit_gate.bias"] = (1,)
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a file must hold, int8 scales aside."""
    return {**matrix_shapes(config), **vector_shapes(config)}


def scale_shapes(name: str, shape: tuple[int, ...], group_size: int | None) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the scales of an int8 matrix; `group_size` counts columns, None is one scale a row."""
    n_out, n_in = shape
    return name + SCALE_SUFFIX, (n_out,) if group_size is None else (n_out, -(-n_in // group_size))


def iter_layers(config: ModelConfig) -> Iterator[tuple[int, str, str, int]]:
    """(layer, prefix, part, index in part) of every physical layer."""
    for layer, name in enumerate(layer_names(config)):
        part, index = name.split(".")
        yield layer, name, part, int(index)
