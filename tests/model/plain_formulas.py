"""K3's equations once more, in float64, token by token and head by head, with none of our ops: what
tests compare the modules with.

Every formula takes `wrong`, the name of a plausible mistake, so that a test can show it would
notice. Weights come as a dictionary by the released names below the module.

Legend: T tokens, D hidden, H heads, K key and value width, C channels, W taps, n experts, l latent.
Source: Kimi K3 report §2, eq. 1-13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from k3.model.config import K3Config

Weights = dict[str, Tensor]


def weights_of(module: nn.Module) -> Weights:
    """All of a module's tensors in float64."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().double() for name, tensor in named}


def below(weights: Weights, prefix: str) -> Weights:
    """The weights of one part."""
    cut = prefix + "."
    return {n.removeprefix(cut): w for n, w in weights.items() if n.startswith(cut)}


def rows(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float, wrong: str = "") -> Tensor:
    total = sum(float(value) ** 2 for value in x_D)
    mean = total if wrong == "sum for mean" else total / len(x_D)
    root = math.sqrt(mean) + eps if wrong == "eps outside the root" else math.sqrt(mean + eps)
    return x_D / root * (1 + weight_D if wrong == "one plus weight" else weight_D)


def situ(g: Tensor, u: Tensor, beta: float, linear_beta: float, wrong: str = "") -> Tensor:
    capped = beta * (g / beta).tanh()
    gate = capped * sigmoid(capped if wrong == "sigmoid of the capped gate" else g)
    return gate * (u if wrong == "up not capped" else linear_beta * (u / linear_beta).tanh())


def glu(w: Weights, x_D: Tensor, config: K3Config, wrong: str = "") -> Tensor:
    g, u = w["gate_proj.weight"] @ x_D, w["up_proj.weight"] @ x_D
    if wrong == "gate and up exchanged":
        g, u = u, g
    return w["down_proj.weight"] @ situ(g, u, config.situ_beta, config.situ_linear_beta, wrong)


def short_conv(
    u_TC: Tensor, weight_C1W: Tensor, past_PC: Tensor | None = None, wrong: str = ""
) -> tuple[Tensor, Tensor]:
    """(y [T, C], the last W-1 inputs)."""
    taps = weight_C1W.shape[-1]
    if past_PC is None:
        past_PC = u_TC.new_zeros(taps - 1, u_TC.shape[1])
    line = torch.cat([past_PC, u_TC])
    out = []
    for t in range(len(u_TC)):
        c = torch.zeros_like(line[0])
        for j in range(taps):
            tap = taps - 1 - j if wrong == "taps reversed" else j
            c += weight_C1W[:, 0, tap] * line[t + j]
        out.append(c if wrong == "no SiLU" else c * sigmoid(c))
    kept = torch.cat([past_PC, rows(out)]) if wrong == "outputs kept" else line
    return rows(out), kept[len(kept) - taps + 1 :]


def decay(
    z_HK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float, wrong: str = ""
) -> Tensor:
    """Log-decay of one token."""
    out = []
    for z, A_log, bias in zip(z_HK, A_log_H, dt_bias_HK, strict=True):
        slope = A_log.exp()
        if wrong == "bias after the slope":
            out.append(lower_bound * sigmoid(slope * z + bias))
        elif wrong == "clamped softplus":
            out.append((-slope * (1 + (z + bias).exp()).log()).clamp(min=lower_bound))
        else:
            out.append(lower_bound * sigmoid(slope * (z + bias)))
    return rows(out)


def kda_step(
    S_KV: Tensor, q_K: Tensor, k_K: Tensor, v_V: Tensor, g_K: Tensor, beta: Tensor, wrong: str = ""
) -> tuple[Tensor, Tensor]:
    """(o [V], the next state) of one head; q and k as the recurrence takes them."""
    decayed = S_KV * (g_K.exp()[None, :] if wrong == "value axis decays" else g_K.exp()[:, None])
    predicted = (S_KV if wrong == "error of the state before decay" else decayed).T @ k_K
    written = decayed + beta * torch.outer(k_K, v_V - predicted)
    return (decayed if wrong == "read before the write" else written).T @ q_K, written


def unit(x_K: Tensor, wrong: str = "") -> Tensor:
    square = x_K.square()
    total = square.mean() if wrong == "mean in the unit norm" else square.sum()
    return x_K / (total + 1e-6).sqrt()


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float,
    S_HKV: Tensor | None = None,
    wrong: str = "",
) -> tuple[Tensor, Tensor]:
    """(o [T, H, V], last state [H, K, V]) from what the projections and convolutions give."""
    tokens, heads, width = q_THK.shape
    if S_HKV is None:
        S_HKV = q_THK.new_zeros(heads, width, v_THV.shape[-1])
    state, out = list(S_HKV), []
    for t in range(tokens):
        g_HK = decay(z_THK[t], A_log_H, dt_bias_HK, lower_bound, wrong)
        o_HV = []
        for h in range(heads):
            q = unit(q_THK[t, h], wrong) * (1.0 if wrong == "no query scale" else width**-0.5)
            beta = b_TH[t, h] if wrong == "raw write strength" else sigmoid(b_TH[t, h])
            k = unit(k_THK[t, h], wrong)
            o, state[h] = kda_step(state[h], q, k, v_THV[t, h], g_HK[h], beta, wrong)
            o_HV.append(o)
        out.append(rows(o_HV))
    return rows(out), rows(state)


def kda_layer(
    w: Weights, x_TD: Tensor, config: K3Config, wrong: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [T, D], state [H, K, V], last pre-convolution inputs [W-1, 3·H·K])."""
    c = config.kda
    assert c is not None and c.lower_bound is not None
    shape = (len(x_TD), c.num_heads, c.head_dim)
    streams, windows = [], []
    for name in ("q", "k", "v"):
        u_TC = rows([w[f"{name}_proj.weight"] @ x for x in x_TD])
        mistake = "no SiLU" if wrong == "value without SiLU" and name == "v" else wrong
        y_TC, window = short_conv(u_TC, w[f"{name}_conv1d.weight"], wrong=mistake)
        streams.append(y_TC.view(shape))
        windows.append(window)
    z_THK = rows([w["f_b_proj.weight"] @ (w["f_a_proj.weight"] @ x) for x in x_TD]).view(shape)
    b_TH = rows([w["b_proj.weight"] @ x for x in x_TD])
    dt_bias_HK = w["dt_bias"].view(shape[1:])
    o_THK, S_HKV = kda(*streams, z_THK, b_TH, w["A_log"], dt_bias_HK, c.lower_bound, wrong=wrong)
    out = []
    for x_D, o_HK in zip(x_TD, o_THK, strict=True):
        gate_HK = (w["g_proj.weight"] @ x_D).view(shape[1:])
        gate_HK = gate_HK * sigmoid(gate_HK) if wrong == "SiLU gate" else sigmoid(gate_HK)
        heads = []
        for o_K, gate_K in zip(o_HK, gate_HK, strict=True):
            if wrong == "gate before the norm":
                heads.append(rms_norm(o_K * gate_K, w["o_norm.weight"], config.rms_norm_eps))
            else:
                heads.append(rms_norm(o_K, w["o_norm.weight"], config.rms_norm_eps) * gate_K)
        out.append(w["o_proj.weight"] @ torch.cat(heads))
    return rows(out), S_HKV, torch.cat(windows, dim=1)


def mla_layer(w: Weights, x_TD: Tensor, config: K3Config, wrong: str = "") -> Tensor:
    c = config.mla
    assert c is not None
    eps = config.rms_norm_eps if wrong == "the model's eps" else c.latent_norm_eps
    scale = (c.qk_nope_head_dim if wrong == "scale of the nope width" else c.qk_head_dim) ** -0.5
    latents, shared, queries = [], [], []
    for x in x_TD:
        latent, key = (w["kv_a_proj_with_mqa.weight"] @ x).split(
            (c.kv_lora_rank, c.qk_rope_head_dim)
        )
        latents.append(rms_norm(latent, w["kv_a_layernorm.weight"], eps))
        shared.append(unit(key) if wrong == "normalised shared key" else key)
        q = rms_norm(w["q_a_proj.weight"] @ x, w["q_a_layernorm.weight"], eps)
        queries.append((w["q_b_proj.weight"] @ q).view(c.num_heads, c.qk_head_dim))
    up_HwR = w["kv_b_proj.weight"].view(c.num_heads, -1, c.kv_lora_rank)
    out = []
    for t, x in enumerate(x_TD):
        seen = range(len(x_TD) if wrong == "not causal" else t + 1)
        heads = []
        for h in range(c.num_heads):
            key_up, value_up = up_HwR[h].split((c.qk_nope_head_dim, c.v_head_dim))
            keys = [torch.cat([key_up @ latents[s], shared[s]]) for s in seen]
            score = rows([key @ queries[t][h] for key in keys]) * scale
            p = score.exp() / score.exp().sum()
            heads.append(sum((p[s] * (value_up @ latents[s]) for s in seen), torch.zeros(())))
        gate = sigmoid(w["g_proj.weight"] @ x)
        o = torch.cat(heads)
        out.append(w["o_proj.weight"] @ (o if wrong == "no gate" else o * gate))
    return rows(out)


def router(
    w: Weights, x_D: Tensor, config: K3Config, wrong: str = ""
) -> tuple[list[int], list[float]]:
    """(chosen experts, best first; their weights)."""
    c = config.moe
    assert c is not None
    logits_n = w["weight"] @ x_D
    scores = (logits_n.softmax(0) if wrong == "softmax" else sigmoid(logits_n)).tolist()
    bias = w["e_score_correction_bias"].tolist()
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    ranked = scores if wrong == "bias ignored" else biased
    chosen = sorted(range(len(scores)), key=lambda j: -ranked[j])[: c.top_k]
    taken = biased if wrong == "weights of the biased scores" else scores
    total = sum(scores) if wrong == "sum over all experts" else sum(taken[j] for j in chosen)
    return chosen, [taken[j] / (total + 1e-20) * c.routed_scaling_factor for j in chosen]


def latent_moe(w: Weights, x_D: Tensor, config: K3Config, wrong: str = "") -> Tensor:
    chosen, shares = router(below(w, "gate"), x_D, config, wrong)
    z_l = w["routed_expert_down_proj.weight"] @ x_D
    norm, eps = w["routed_expert_norm.weight"], config.rms_norm_eps
    u_l = torch.zeros_like(z_l)
    for j, share in zip(chosen, shares, strict=True):
        g, u = w["experts.w1"][j] @ z_l, w["experts.w3"][j] @ z_l
        y = w["experts.w2"][j] @ situ(g, u, config.situ_beta, config.situ_linear_beta, wrong)
        u_l += share * (rms_norm(y, norm, eps) if wrong == "norm of each expert" else y)
    if wrong not in ("norm of each expert", "no norm"):
        u_l = rms_norm(u_l, norm, eps)
    y_D = w["routed_expert_up_proj.weight"] @ u_l
    if wrong == "no shared experts":
        return y_D
    return y_D + glu(below(w, "shared_experts"), x_D, config, wrong)


def mix(
    sources: Sequence[Tensor], query_D: Tensor, gamma_D: Tensor, eps: float, wrong: str = ""
) -> Tensor:
    """One token's mixture over depth."""
    keys = [rms_norm(v, gamma_D, eps) for v in sources]
    score = rows([key @ query_D for key in keys])
    if wrong == "scaled by the width":
        score = score * len(query_D) ** -0.5
    if wrong == "raw keys":
        score = rows([v @ (query_D * gamma_D) for v in sources])
    values = keys if wrong == "normalised values" else sources
    p = score.exp() / score.exp().sum()
    return sum((share * v for share, v in zip(p, values, strict=True)), torch.zeros(()))


def decoder_layer(
    w: Weights,
    blocks: list[Tensor],
    prefix_TD: Tensor,
    config: K3Config,
    layer: int,
    wrong: str = "",
) -> tuple[list[Tensor], Tensor]:
    """Finished blocks and running sum, each [T, D], before and after a layer."""
    eps = config.rms_norm_eps

    def read(name: str, sources: list[Tensor]) -> Tensor:
        query, gamma = w[f"{name}_proj.weight"][0], w[f"{name}_norm.weight"]
        tokens = zip(*sources, strict=True)
        return rows([mix(token, query, gamma, eps, wrong) for token in tokens])

    def normed(name: str, x_TD: Tensor) -> Tensor:
        return rows([rms_norm(x, w[f"{name}.weight"], eps) for x in x_TD])

    starts = layer % config.attnres.block_size == 0
    a_TD = read("self_attention_res", [*blocks, prefix_TD])
    mixed_TD = a_TD
    if starts and wrong != "block never closed":
        blocks = [*blocks, prefix_TD]
    a_TD, attn = normed("input_layernorm", a_TD), below(w, "self_attn")
    if config.attn_layers[layer] == "kda":
        a_TD = kda_layer(attn, a_TD, config, wrong)[0]
    else:
        a_TD = mla_layer(attn, a_TD, config, wrong)
    if wrong == "mixture carried on":
        prefix_TD = mixed_TD + a_TD
    elif starts and wrong != "sum never restarted":
        prefix_TD = a_TD
    else:
        prefix_TD = prefix_TD + a_TD
    sources = blocks if wrong == "feed-forward misses the sum" else [*blocks, prefix_TD]
    m_TD = normed("post_attention_layernorm", read("mlp_res", sources))
    if config.is_moe(layer):
        moe = below(w, "block_sparse_moe")
        y_TD = rows([latent_moe(moe, x, config, wrong) for x in m_TD])
    else:
        y_TD = rows([glu(below(w, "mlp"), x, config, wrong) for x in m_TD])
    return blocks, prefix_TD + y_TD
