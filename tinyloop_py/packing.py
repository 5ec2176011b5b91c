"""From a model file's tensors to what a backend computes with: packed matrices and float32 vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .config import ModelConfig
from .layout import layer_names, vector_shapes
from .memory import Arena

if TYPE_CHECKING:
    from .context import Context, PackedMatrix
    from .memory import Buffer
    from .model_file import ModelFile

PANEL_ROWS = 16


def pad16(n: int) -> int:
    """The next multiple of 16."""
    return -(-n // PANEL_ROWS) * PANEL_ROWS


class Weights:
    """Matrices by their packed name (`embed`, `core.0.qkv`, `core.0.gate_up`, ...) and vectors by their file name."""

    def __init__(self, matrices: dict[str, PackedMatrix], vectors: dict[str, Buffer]) -> None:
        self.matrices = matrices
        self.vectors = vectors

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(m.nbytes for m in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())


class _Loader:
    def __init__(self, context: Context, file: ModelFile) -> None:
        self.context, self.file, self.arena = context, file, Arena(context.alloc)
        self.matrices: dict[str, PackedMatrix] = {}
        self.vectors: dict[str, Buffer] = {}
        self.scratch: list[np.ndarray] = []

    def matrix(self, name: str, n_out: int, sources: list[tuple[str, int, int, int]]) -> None:
        """Packs file tensors into one matrix; a source is (tensor, block, stride, offset), see `Context.pack`."""
        tensors = [self.file.read(source[0], self._scratch(i, self.file.tensor(source[0]).data.nbytes)) for i, source in enumerate(sources)]
        rows = [(t.data, t.scales, t.shape[0], *source[1:]) for t, source in zip(tensors, sources, strict=True)]
        first = tensors[0]
        self.matrices[name] = self.context.pack(self.arena, first.dtype, n_out, first.shape[1], first.group_size or 0, rows, f"the weight {name}")

    def _scratch(self, place: int, nbytes: int) -> np.ndarray:
        """Memory for the source at a place in a matrix, used again for the next one: fresh pages would cost as much as reading."""
        if place == len(self.scratch) or self.scratch[place].size < nbytes:
            self.scratch[place : place + 1] = [np.empty(nbytes, np.uint8)]
        return self.scratch[place]

    def plain(self, name: str, tensor: str) -> None:
        n_out = self.file.tensor(tensor).shape[0]
        self.matrix(name, pad16(n_out), [(tensor, n_out, n_out, 0)])

    def vector(self, name: str, values: np.ndarray) -> None:
        self.vectors[name] = self.context.upload(np.ascontiguousarray(values, np.float32), f"the weight {name}")


def _load_qkv(loader: _Loader, config: ModelConfig, layer: str) -> None:
    """q, k and v as one matrix of heads, each padded to 16 rows; their biases likewise."""
    hd, pad = config.head_dim, pad16(config.head_dim)
    first_head = {"q": 0, "k": config.n_heads, "v": config.n_heads + config.n_kv_heads}
    n_out = (config.n_heads + 2 * config.n_kv_heads) * pad
    loader.matrix(f"{layer}.qkv", n_out, [(f"{layer}.attn.{p}.weight", hd, pad, first * pad) for p, first in first_head.items()])
    if set("qkv") & set(config.attn_bias):
        bias = np.zeros((n_out // pad, pad), np.float32)
        for p in "qkv":
            if p in config.attn_bias:
                values = loader.file.read(f"{layer}.attn.{p}.bias").to_float32().reshape(-1, hd)
                bias[first_head[p] : first_head[p] + len(values), :hd] = values
        loader.vector(f"{layer}.attn.qkv.bias", bias)


def _load_layer(loader: _Loader, config: ModelConfig, layer: str) -> None:
    _load_qkv(loader, config, layer)
    loader.plain(f"{layer}.o", f"{layer}.attn.o.weight")
    if "o" in config.attn_bias:
        bias = np.zeros(pad16(config.dim), np.float32)
        bias[: config.dim] = loader.file.read(f"{layer}.attn.o.bias").to_float32()
        loader.vector(f"{layer}.attn.o.bias", bias)
    n = pad16(config.ffn_dim)
    if config.mlp == "gated":
        halves = [(f"{layer}.mlp.{name}.weight", PANEL_ROWS, 2 * PANEL_ROWS, i * PANEL_ROWS) for i, name in enumerate(("gate", "up"))]
        loader.matrix(f"{layer}.gate_up", 2 * n, halves)
    else:
        loader.plain(f"{layer}.gate_up", f"{layer}.mlp.up.weight")
    loader.plain(f"{layer}.down", f"{layer}.mlp.down.weight")


def load_weights(context: Context, file: ModelFile, progress: Callable[[str], None] | None = None) -> Weights:
    """Packs every tensor of a file; `progress` is called with each name as its packing begins."""
    config = file.config
    loader = _Loader(context, file)

    def step(name: str, load: Callable[[], None]) -> None:
        if progress:
            progress(name)
        load()

    step("embed", lambda: loader.plain("embed", "embed.weight"))
    if config.inject == "concat_linear":
        step("inject", lambda: loader.plain("inject", "inject.weight"))
    for layer in layer_names(config):
        step(layer, lambda layer=layer: _load_layer(loader, config, layer))  # type: ignore[misc]
    if not config.tied_embeddings:
        step("head", lambda: loader.plain("head", "head.weight"))
    for name in vector_shapes(config):
        if not name.endswith(".bias"):
            loader.vector(name, file.read(name).to_float32())
    context.end_loading()
    file.check_unchanged()
    return Weights(loader.matrices, loader.vectors)
