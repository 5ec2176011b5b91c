"""Other engines on the same weights, as optional baselines. A peer that is not installed is left out, and the table says so.

pip install llama-cpp-python==0.3.36 --no-binary llama-cpp-python     # built here, for this processor
pip install "transformers>=5" torch==2.13.0
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

INSTALL = {
    "llama.cpp": "pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36",
    "transformers": "pip install 'transformers>=5' torch==2.13.0",
}


class Llama:
    """llama.cpp through llama-cpp-python's bindings; greedy decoding with the argmax taken in NumPy."""

    def __init__(self, gguf: Path, threads: int, n_ctx: int = 2048) -> None:
        import llama_cpp

        self.c = llama_cpp.llama_cpp
        self._model = llama_cpp.Llama(str(gguf), n_ctx=n_ctx, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.ctx = self._model.ctx
        self.vocab_size = self._model.n_vocab()

    def run(self, tokens: np.ndarray) -> None:
        """Appends tokens."""
        for first in range(0, len(tokens), 512):
            part = tokens[first : first + 512]
            array = (self.c.llama_token * len(part))(*part.tolist())
            assert self.c.llama_decode(self.ctx, self.c.llama_batch_get_one(array, len(part))) == 0
        self.c.llama_synchronize(self.ctx)

    def clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.ctx), True)

    def keep(self, n: int) -> None:
        """Drops positions from n on: what a warm prefix is here."""
        self.c.llama_memory_seq_rm(self.c.llama_get_memory(self.ctx), 0, n, -1)

    def best(self) -> int:
        logits = self.c.llama_get_logits_ith(self.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def prefill(self, tokens: np.ndarray) -> float:
        self.clear()
        begin = time.perf_counter()
        self.run(tokens)
        return time.perf_counter() - begin

    def decode(self, tokens: np.ndarray, n: int) -> float:
        """Seconds a token, greedy, after tokens."""
        self.prefill(tokens)
        self.run(np.array([self.best()], np.int32))
        begin = time.perf_counter()
        for _ in range(n):
            self.run(np.array([self.best()], np.int32))
        return (time.perf_counter() - begin) / n

    def warm_first_token(self, prefix: np.ndarray, rest: np.ndarray) -> float:
        """Seconds to the first token with the prefix in place."""
        self.prefill(prefix)
        begin = time.perf_counter()
        self.run(rest)
        self.best()
        return time.perf_counter() - begin


class Transformers:
    """Hugging Face transformers with its own cache."""

    def __init__(self, model_file: Any, dtype: str, threads: int) -> None:
        import sys

        import torch

        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from smollm2 import transformers_model

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers_model(model_file, dtype=getattr(torch, dtype))

    def prefill(self, tokens: np.ndarray) -> float:
        ids = self.torch.from_numpy(tokens.astype(np.int64))[None]
        begin = time.perf_counter()
        with self.torch.inference_mode():
            self.model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin

    def warm_first_token(self, prefix: np.ndarray, rest: np.ndarray) -> float:
        """Seconds to the first token after a deep copy of the prefix's cache."""
        import copy

        torch = self.torch
        with torch.inference_mode():
            held = self.model(torch.from_numpy(prefix.astype(np.int64))[None], use_cache=True, logits_to_keep=1).past_key_values
            begin = time.perf_counter()
            cache = copy.deepcopy(held)
            out = self.model(torch.from_numpy(rest.astype(np.int64))[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            out.logits[0, -1].argmax().item()
            return time.perf_counter() - begin


def write_ggufs(source: Path, folder: Path) -> dict[str, Path]:
    """BF16 and Q8_0 files of a quantised GGUF's dequantised weights, by llama.cpp's own quantiser."""
    import gguf
    import llama_cpp

    c = llama_cpp.llama_cpp
    paths = {name: folder / f"{source.stem}-{name}.gguf" for name in ("f32", "bf16", "q8_0")}
    if not paths["f32"].exists():
        reader = gguf.GGUFReader(str(source))
        writer = gguf.GGUFWriter(str(paths["f32"]), reader.fields["general.architecture"].contents())
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
                continue
            if field.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(key, field.contents())
            else:
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_file_type(0)
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, values.reshape([int(n) for n in reversed(tensor.shape)]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for name, kind in (("bf16", c.LLAMA_FTYPE_MOSTLY_BF16), ("q8_0", c.LLAMA_FTYPE_MOSTLY_Q8_0)):
        if not paths[name].exists():
            options = c.llama_model_quantize_default_params()
            options.ftype, options.nthread = kind, 2
            assert c.llama_model_quantize(str(paths["f32"]).encode(), str(paths[name]).encode(), options) == 0
    return paths


def available() -> dict[str, str]:
    """Peer -> why it is left out, for those that are."""
    missing = {}
    for peer, module in (("llama.cpp", "llama_cpp"), ("transformers", "transformers")):
        try:
            __import__(module)
        except ImportError:
            missing[peer] = f"not installed: {INSTALL[peer]}"
    return missing
