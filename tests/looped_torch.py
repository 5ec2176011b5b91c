"""Forward passes of looped models over a state dict with their own tensor names, in PyTorch: what a converted file must mean.

Written from the models' descriptions, apart from tinyloop's config: Ouro (https://arxiv.org/abs/2510.25741), Nanbeige4.2
(https://arxiv.org/abs/2607.22083), Huginn (https://arxiv.org/abs/2502.05171). No cache; logits of every position.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention, silu


def rms_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def angles(n, head_dim, theta):
    return torch.outer(torch.arange(n).double(), theta ** (-torch.arange(0, head_dim, 2).double() / head_dim))


def rope_half(x, theta):
    """(heads, n, head_dim): dims i and i + head_dim / 2 turn together."""
    a = angles(x.shape[1], x.shape[2], theta)
    first, second = x.chunk(2, -1)
    return torch.cat((first * a.cos() - second * a.sin(), second * a.cos() + first * a.sin()), -1)


def rope_pairs(x, theta):
    """(heads, n, head_dim): dims 2i and 2i + 1 turn together."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(1, dtype=torch.float64), angles(x.shape[1], x.shape[2], theta)
    )
    return torch.view_as_real(turned).flatten(-2)


def heads(x, n):
    return x.unflatten(-1, (n, -1)).transpose(0, 1)


def attend(q, k, v):
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def stack(state, config, x, loops, *, branch_norms, norm_every):
    """Ouro and Nanbeige: all layers, `loops` times, the model's norm behind each loop or behind the last."""
    n, n_kv, eps, theta = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"], config["rope_theta"]
    for loop in range(loops):
        for i in range(config["num_hidden_layers"]):
            w = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in state.items() if name.startswith(f"model.layers.{i}.")}
            h = rms_norm(x, w["input_layernorm.weight"], eps)
            q, k, v = (heads(h @ w[f"self_attn.{p}_proj.weight"].T, n if p == "q" else n_kv) for p in "qkv")
            h = attend(rope_half(q, theta), rope_half(k, theta), v) @ w["self_attn.o_proj.weight"].T
            x = x + (rms_norm(h, w["input_layernorm_2.weight"], eps) if branch_norms else h)
            h = rms_norm(x, w["post_attention_layernorm.weight"], eps)
            h = (silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
            x = x + (rms_norm(h, w["post_attention_layernorm_2.weight"], eps) if branch_norms else h)
        if norm_every or loop == loops - 1:
            x = rms_norm(x, state["model.norm.weight"], eps)
    return x


def ouro_logits(state, config, tokens, loops):
    x = stack(state, config, state["model.embed_tokens.weight"][tokens], loops, branch_norms=True, norm_every=True)
    return x @ state["lm_head.weight"].T


def nanbeige_logits(state, config, tokens, loops):
    norm_every = not config["skip_loop_final_norm"]
    x = stack(state, config, state["model.embed_tokens.weight"][tokens], loops, branch_norms=False, norm_every=norm_every)
    return x @ state["lm_head.weight"].T


def huginn_logits(state, config, tokens, loops, first_state):
    """`first_state` (n_tokens, n_embd) stands for the random one."""
    n, eps = config["n_heads"], config["norm_eps"]

    def block(x, part, i):
        w = {name.removeprefix(f"transformer.{part}.{i}."): t for name, t in state.items() if name.startswith(f"transformer.{part}.{i}.")}
        q, k, v = (heads(y, n) for y in (rms_norm(x, w["norm_1.weight"], eps) @ w["attn.Wqkv.weight"].T).chunk(3, -1))
        if "attn.qk_bias" in w:
            q, k = (y + bias.transpose(0, 1) for y, bias in zip((q, k), w["attn.qk_bias"], strict=True))
        y = attend(rope_pairs(q, config["rope_base"]), rope_pairs(k, config["rope_base"]), v) @ w["attn.proj.weight"].T
        x = rms_norm(x + y, w["norm_2.weight"], eps)
        gate, up = (rms_norm(x, w["norm_3.weight"], eps) @ w["mlp.fc.weight"].T).chunk(2, -1)
        return rms_norm(x + (silu(gate) * up) @ w["mlp.proj.weight"].T, w["norm_4.weight"], eps)

    e = state["transformer.wte.weight"][tokens] * config["init_values"]["embed_scale"]
    for i in range(config["n_layers_in_prelude"]):
        e = block(e, "prelude", i)
    x = first_state
    for _ in range(loops):
        x = torch.cat((x, e), -1) @ state["transformer.adapter.weight"].T
        for i in range(config["n_layers_in_recurrent_block"]):
            x = block(x, "core_block", i)
    x = rms_norm(x, state["transformer.ln_f.weight"], eps)
    for i in range(config["n_layers_in_coda"]):
        x = block(x, "coda", i)
    return rms_norm(x, state["transformer.ln_f.weight"], eps) @ state["transformer.wte.weight"].T
