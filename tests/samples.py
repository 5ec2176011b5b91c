"""Small models and texts that several test modules use."""

import numpy as np

from tinyloop_py.config import ModelConfig
from tinyloop_py.layout import tensor_shapes

PLAIN = ModelConfig(vocab_size=40, dim=32, ffn_dim=48, n_heads=4, n_kv_heads=2, head_dim=8, n_core=2, default_loops=1, max_loops=1)
LOOPED = ModelConfig(
    vocab_size=33, dim=24, ffn_dim=40, n_heads=3, n_kv_heads=1, head_dim=8, n_prelude=1, n_core=2, n_coda=1, default_loops=4, block_norm="sandwich",
    loop_norm="every", inject="concat_linear", attn_bias="qkvo", qk_norm="head", tied_embeddings=False, exit="hazard_gate", nope_layers=(1,),
    layer_windows=(0, 16, 0, 8), rope_scaling={"type": "linear", "factor": 2.0}, extra={"license": "Apache-2.0"},
)  # fmt: skip
TEXTS = (
    "Hello, world! It's 2024 — she'll pay $3.50 for 12 apples.", "  two  spaces\tand\ttabs \n\n new lines\r\n ", "", " ", "\n", "a", "don't DON'T",
    "Traditional Chinese: 前綴快取一次只管一個共享前綴。日本語のテキスト、한국어 텍스트.", "العربية עברית हिन्दी ไทย Ελληνικά Русский",
    "emoji 🚀🦙 👩‍👩‍👧‍👦 🏳️‍🌈 ☕️ and a flag 🇹🇼", "e\u0301 composed é, ﬁ ligature, ½ ² ٣ Ⅷ", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "x = [i**2 for i in range(10)]  # code\n\tif x:\n\t\treturn x", "\u0000\u200b\ufeff\ufffd", "zzz" * 50,
)  # fmt: skip

HF_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}


def build(folder, family: str = "Llama", dtype=None, shard: str = "1GB", std: float = 0.5, **fields):
    """A random model of a family, saved to a folder; every weight is random, biases and norms too."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**HF_SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, std)
    model.to(dtype or torch.float32).save_pretrained(folder, max_shard_size=shard)
    return model
