"""The tensors that a config asks for."""

import numpy as np
import pytest
from models import CONFIGS, random_model, small

from tinyloop_py.layout import iter_layers, layer_names, matrix_shapes, scale_shapes, tensor_shapes, vector_shapes


def test_plain_llama_by_hand():
    c = small(n_core=1, n_heads=4, n_kv_heads=2, head_dim=8)
    assert tensor_shapes(c) == {
        "embed.weight": (97, 64),
        "core.0.attn.q.weight": (32, 64),
        "core.0.attn.k.weight": (16, 64),
        "core.0.attn.v.weight": (16, 64),
        "core.0.attn.o.weight": (64, 32),
        "core.0.mlp.gate.weight": (172, 64),
        "core.0.mlp.up.weight": (172, 64),
        "core.0.mlp.down.weight": (64, 172),
        "core.0.attn_norm.weight": (64,),
        "core.0.mlp_norm.weight": (64,),
        "final_norm.weight": (64,),
    }


@pytest.mark.parametrize(
    ("changes", "added", "removed"),
    [
        ({"tied_embeddings": False}, {"head.weight": (97, 64)}, set()),
        ({"final_norm": False}, {}, {"final_norm.weight"}),
        ({"mlp": "plain"}, {}, {"core.0.mlp.gate.weight"}),
        ({"inject": "concat_linear"}, {"inject.weight": (64, 128)}, set()),
        ({"inject": "add"}, {}, set()),
        ({"loop_norm": "every"}, {"loop_norm.weight": (64,)}, set()),
        ({"loop_norm": "last"}, {"loop_norm.weight": (64,)}, set()),
        ({"exit": "hazard_gate"}, {"exit_gate.weight": (1, 64), "exit_gate.bias": (1,)}, set()),
        ({"block_norm": "sandwich"}, {"core.0.attn_post_norm.weight": (64,), "core.0.mlp_post_norm.weight": (64,)}, set()),
        ({"block_norm": "sum_sandwich"}, {"core.0.attn_post_norm.weight": (64,), "core.0.mlp_post_norm.weight": (64,)}, set()),
        (
            {"block_norm": "post"},
            {"core.0.attn_post_norm.weight": (64,), "core.0.mlp_post_norm.weight": (64,)},
            {"core.0.attn_norm.weight", "core.0.mlp_norm.weight"},
        ),
        ({"qk_norm": "head"}, {"core.0.attn.q_norm.weight": (16,), "core.0.attn.k_norm.weight": (16,)}, set()),
        ({"qk_norm": "full"}, {"core.0.attn.q_norm.weight": (64,), "core.0.attn.k_norm.weight": (32,)}, set()),
        (
            {"attn_bias": "qkvo"},
            {f"core.0.attn.{p}.bias": (n,) for p, n in zip("qkvo", (64, 32, 32, 64), strict=True)},
            set(),
        ),
        ({"attn_bias": "k"}, {"core.0.attn.k.bias": (32,)}, set()),
    ],
    ids=str,
)
def test_what_a_field_adds_and_removes(changes, added, removed):
    base = tensor_shapes(small(n_core=1, n_kv_heads=2))
    got = tensor_shapes(small(n_core=1, n_kv_heads=2, **changes))
    assert got == {**{name: shape for name, shape in base.items() if name not in removed}, **added}


def test_layers_are_counted_over_prelude_core_and_coda():
    c = small(n_prelude=2, n_core=1, n_coda=2)
    assert layer_names(c) == ["prelude.0", "prelude.1", "core.0", "coda.0", "coda.1"]
    assert list(iter_layers(c))[2:4] == [(2, "core.0", "core", 0), (3, "coda.0", "coda", 0)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matrices_and_vectors_are_all_the_tensors(config):
    matrices, vectors = matrix_shapes(config), vector_shapes(config)
    assert not set(matrices) & set(vectors)
    assert {name: w.shape for name, w in random_model(config).items()} == tensor_shapes(config) == {**matrices, **vectors}
    assert all(len(shape) == 2 for shape in matrices.values())
    assert all(np.prod(shape) > 0 for shape in tensor_shapes(config).values())


@pytest.mark.parametrize(("group_size", "shape"), [(None, (8,)), (32, (8, 4)), (50, (8, 2)), (100, (8, 1)), (128, (8, 1))])
def test_scales(group_size, shape):
    assert scale_shapes("core.0.mlp.up.weight", (8, 100), group_size) == ("core.0.mlp.up.weight.scale", shape)
