"""Each module against the plain formula of what it computes, and against plausible mistakes.

The kinds are those that other people's K3 fixtures have: RMSNorm, SiTU-GLU, the short convolution
with its window, KDA's decay, recurrence and layer, the router, Attention Residuals, MLA, LatentMoE,
and whole decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import plain_formulas as plain
import pytest
import torch
from awake import awake
from checker import assert_close
from torch import Tensor

from k3.model.attnres import Depth, DepthQuery
from k3.model.config import AttnResConfig, K3Config, KDAConfig, MLAConfig, MoEConfig
from k3.model.presets import hybrid
from k3.model.state import DenseState
from k3.model.transformer import K3
from k3.ops.conv import short_conv
from k3.ops.kda import kda, kda_decode
from k3.ops.kda_ref import decay
from k3.ops.spans import Spans

CONFIG = K3Config(
    vocab_size=320,
    hidden_size=40,
    intermediate_size=56,
    attn_layers=hybrid(5),
    kda=KDAConfig(num_heads=3, head_dim=8),
    mla=MLAConfig(
        num_heads=2,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=8,
    ),
    moe=MoEConfig(
        num_experts=8, top_k=2, num_shared_experts=2, intermediate_size=24, latent_size=20
    ),
    attnres=AttnResConfig(block_size=3),
    rms_norm_eps=1e-3,
)
KDA_LAYER, MLA_LAYER = 1, 3
"""In the middle of a block, and at the start of one."""
LIMIT = {torch.float64: 1e-11, torch.float32: 3e-6}
NOTICED = 1e-3
"""A mistake must be off by this much, so far above both limits."""
DTYPES = pytest.mark.parametrize("dtype", LIMIT, ids=str)


@cache
def model(dtype: torch.dtype) -> K3:
    """Nothing at its starting value; the decay reaches both ends of its range."""
    torch.manual_seed(0)
    made = awake(K3(CONFIG)).eval()
    with torch.no_grad():
        for name, facts in made.param_facts().items():
            p = made.get_parameter(name)
            if facts.role in ("norm", "query"):
                p.add_(0.3 * torch.randn_like(p))
            elif name.endswith("A_log"):
                p.copy_(torch.linspace(-1, 2.5, len(p)))
            elif name.endswith("dt_bias"):
                p.copy_(2 * torch.randn_like(p))
        for router in made.routers():
            router.e_score_correction_bias.uniform_(-0.3, 0.3)
    return made.to(dtype)


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Values that fp32 holds exactly, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def one_span(x_TD: Tensor) -> Spans:
    return Spans.from_lengths([len(x_TD)])


@torch.no_grad()
def check(actual: Tensor, formula: Callable[[str], Tensor], mistakes: Sequence[str]) -> None:
    """`formula` takes the name of a mistake; "" is the right one."""
    assert_close("module", actual, formula(""), rms=LIMIT[actual.dtype])
    for wrong in mistakes:
        expected = formula(wrong)
        error = (actual.double() - expected).square().mean() / expected.square().mean()
        assert float(error.sqrt()) > NOTICED, f"{wrong!r} would not be noticed"


@DTYPES
def test_rms_norm(dtype: torch.dtype) -> None:
    norm = model(dtype).layers[0].input_layernorm
    w_D, x_TD = norm.weight.detach().double(), draw(3, 40) * torch.tensor([[1e-2], [1], [50]])
    check(
        norm(x_TD.to(dtype)) / x_TD.abs().amax(-1, keepdim=True).to(dtype),
        lambda wrong: plain.rows(
            [plain.rms_norm(x, w_D, norm.eps, wrong) / x.abs().max() for x in x_TD]
        ),
        ("sum for mean", "eps outside the root", "one plus weight"),
    )


@DTYPES
def test_situ_glu(dtype: torch.dtype) -> None:
    glu, x_TD = model(dtype).layers[0].mlp, draw(4, 40) * torch.tensor([[0.1], [1], [8], [60]])
    w = plain.weights_of(glu)
    check(
        glu(x_TD.to(dtype)),
        lambda wrong: plain.rows([plain.glu(w, x, CONFIG, wrong) for x in x_TD]),
        ("sigmoid of the capped gate", "up not capped", "gate and up exchanged"),
    )


@DTYPES
def test_short_convolution_with_its_window(dtype: torch.dtype) -> None:
    w_C1W = plain.weights_of(model(dtype).layers[KDA_LAYER].self_attn)["q_conv1d.weight"]
    u_TC, later_TC = draw(5, 24), draw(1, 24, seed=2)
    weight_CW = w_C1W[:, 0].to(dtype)
    y_TC, window = short_conv(u_TC.to(dtype), weight_CW, Spans.from_lengths([5]))
    next_TC, last = short_conv(later_TC.to(dtype), weight_CW, Spans.from_lengths([1]), window)

    def outputs(wrong: str) -> Tensor:
        first, kept = plain.short_conv(u_TC, w_C1W, wrong=wrong)
        return torch.cat([first, plain.short_conv(later_TC, w_C1W, kept, wrong)[0]])

    mistakes = ("taps reversed", "no SiLU", "outputs kept")
    check(torch.cat([y_TC, next_TC]), outputs, mistakes)
    assert_close("window", last[0], torch.cat([u_TC[-2:], later_TC]), rms=0)


@DTYPES
def test_kda_decay(dtype: torch.dtype) -> None:
    z_THK, dt_bias_HK = 8 * draw(4, 3, 8), draw(3, 8, seed=2)
    A_log_H = torch.tensor([-1.0, 0.5, 2.5]).double()
    g_THK = decay(z_THK.to(dtype), A_log_H.to(dtype), dt_bias_HK.to(dtype), -5.0)
    check(
        g_THK,
        lambda wrong: plain.rows([plain.decay(z, A_log_H, dt_bias_HK, -5.0, wrong) for z in z_THK]),
        ("bias after the slope", "clamped softplus"),
    )
    assert float(g_THK.min()) < -4.999 and float(g_THK.max()) > -1e-3


@DTYPES
@pytest.mark.parametrize("tokens", (1, 8))
def test_kda_recurrence(tokens: int, dtype: torch.dtype) -> None:
    q, k, v, z = (draw(tokens, 3, 8, seed=seed) for seed in range(4))
    b_TH, dt_bias_HK = draw(tokens, 3, seed=4), draw(3, 8, seed=5)
    A_log_H, S_HKV = torch.tensor([-1.0, 0.5, 2.0]).double(), draw(3, 8, 8, seed=6)
    args = [x.to(dtype) for x in (q, k, v, z, b_TH, A_log_H, dt_bias_HK)]
    start, spans = S_HKV.to(dtype).unsqueeze(0), Spans.from_lengths([tokens])

    def formula(wrong: str) -> Tensor:
        o_THV, last = plain.kda(
            q, k, v, z, b_TH, A_log_H, dt_bias_HK, -5.0, S_HKV=S_HKV, wrong=wrong
        )
        return torch.cat([o_THV.flatten(), last.flatten()])

    mistakes = (
        "error of the state before decay",
        "value axis decays",
        "read before the write",
        "mean in the unit norm",
        "no query scale",
        "raw write strength",
        "bias after the slope",
    )
    o_THV, last = kda(*args, spans, initial_state_NHKV=start)
    check(torch.cat([o_THV.flatten(), last.flatten()]), formula, mistakes)
    pool = start.clone()
    o_THV = kda_decode(*args, spans, pool, torch.tensor([0], dtype=torch.int32))
    check(torch.cat([o_THV.flatten(), pool.flatten()]), formula, mistakes)


@DTYPES
@pytest.mark.parametrize("tokens", (1, 8))
def test_kda_layer(tokens: int, dtype: torch.dtype) -> None:
    layer = model(dtype).layers[KDA_LAYER].self_attn
    w, x_TD = plain.weights_of(layer), draw(tokens, 40)
    mistakes = ["gate before the norm", "SiLU gate", "value without SiLU", "taps reversed"]
    mistakes += ["read before the write"] if tokens > 1 else []

    def formula(wrong: str) -> Tensor:
        return plain.kda_layer(w, x_TD, CONFIG, wrong)[0]

    check(layer(x_TD.to(dtype), one_span(x_TD), None)[0], formula, mistakes)
    state, single = DenseState(CONFIG, 1, dtype=dtype), Spans.from_lengths([1])
    with torch.no_grad():
        y_TD = torch.cat([layer(x.to(dtype).unsqueeze(0), single, state)[0] for x in x_TD])
    check(y_TD, formula, mistakes)
    _, S_HKV, window = plain.kda_layer(w, x_TD, CONFIG)
    S_PHKV, window_PWC, _ = state.kda(KDA_LAYER)
    assert_close("state", S_PHKV[0], S_HKV, rms=LIMIT[dtype])
    assert_close("window", window_PWC[0], window, rms=LIMIT[dtype])


@DTYPES
def test_router(dtype: torch.dtype) -> None:
    router, x_TD = model(dtype).layers[MLA_LAYER].block_sparse_moe.gate, draw(6, 40)
    w = plain.weights_of(router)
    chosen, _ = router(x_TD.to(dtype), one_span(x_TD))
    weights_Tn = torch.zeros(6, 8, dtype=dtype).scatter(1, chosen.indices_Tk, chosen.weights_Tk)

    def formula(wrong: str) -> Tensor:
        expected = torch.zeros(6, 8).double()
        for row, x in zip(expected, x_TD, strict=True):
            indices, weights = plain.router(w, x, CONFIG, wrong)
            row[indices] = torch.tensor(weights, dtype=torch.float64)
        return expected

    mistakes = ("bias ignored", "weights of the biased scores", "sum over all experts", "softmax")
    check(weights_Tn, formula, mistakes)


@DTYPES
@pytest.mark.parametrize("count", (2, 9))
def test_attention_residuals(count: int, dtype: torch.dtype) -> None:
    sizes = torch.linspace(0.2, 3, count).double()
    sources = [size * draw(4, 40, seed=seed) for seed, size in enumerate(sizes)]
    query_D, gamma_D = 0.3 * draw(40, seed=20), 1 + 0.3 * draw(40, seed=21)
    query = DepthQuery(query_D.to(dtype), gamma_D.to(dtype), CONFIG.rms_norm_eps)
    *blocks, prefix = (x.to(dtype) for x in sources)

    def formula(wrong: str) -> Tensor:
        tokens = zip(*sources, strict=True)
        eps = CONFIG.rms_norm_eps
        return plain.rows([plain.mix(token, query_D, gamma_D, eps, wrong) for token in tokens])

    mistakes = ("scaled by the width", "raw keys", "normalised values")
    check(Depth(tuple(blocks), prefix).read(query, 0), formula, mistakes)
    if count > 2:
        *rest, last = blocks
        twice = Depth(tuple(rest), last).close([query], 0).add(prefix).read(query, 0)
        check(twice, formula, mistakes)


@DTYPES
def test_mla(dtype: torch.dtype) -> None:
    layer, x_TD = model(dtype).layers[MLA_LAYER].self_attn, 0.3 * draw(6, 40)
    w = plain.weights_of(layer)
    mistakes = (
        "the model's eps",
        "scale of the nope width",
        "normalised shared key",
        "not causal",
        "no gate",
    )

    def formula(wrong: str) -> Tensor:
        return plain.mla_layer(w, x_TD, CONFIG, wrong)

    check(layer(x_TD.to(dtype), one_span(x_TD), None)[0], formula, mistakes)
    state, y = DenseState(CONFIG, 1, dtype=dtype), []
    with torch.no_grad():
        for chunk in x_TD.to(dtype).split([3, 1, 2]):
            y.append(layer(chunk, one_span(chunk), state)[0])
            state.advance(one_span(chunk))
    check(torch.cat(y), formula, mistakes)


@DTYPES
def test_latent_moe(dtype: torch.dtype) -> None:
    moe, x_TD = model(dtype).layers[MLA_LAYER].block_sparse_moe, draw(4, 40)
    w = plain.weights_of(moe)
    check(
        moe(x_TD.to(dtype), one_span(x_TD))[0],
        lambda wrong: plain.rows([plain.latent_moe(w, x, CONFIG, wrong) for x in x_TD]),
        ("norm of each expert", "no norm", "no shared experts", "weights of the biased scores"),
    )


@DTYPES
@pytest.mark.parametrize("index", (KDA_LAYER, MLA_LAYER, 0), ids=("kda", "mla", "dense"))
def test_decoder_layer(index: int, dtype: torch.dtype) -> None:
    layer, w = model(dtype).layers[index], plain.weights_of(model(dtype).layers[index])
    blocks = [draw(4, 40, seed=seed) for seed in range(2 if index else 0)]
    prefix_TD = 2 * draw(4, 40, seed=9)
    depth = Depth(tuple(block.to(dtype) for block in blocks), prefix_TD.to(dtype))
    starts = index % 3 == 0
    depth = layer(depth.close() if starts else depth, one_span(prefix_TD), None, None).depth

    def formula(wrong: str) -> Tensor:
        return plain.decoder_layer(w, blocks, prefix_TD, CONFIG, index, wrong)[1]

    mistakes = ["mixture carried on", "feed-forward misses the sum"]
    mistakes += ["block never closed", "sum never restarted"] if starts and index else []
    check(depth.prefix, formula, mistakes)
    expected, _ = plain.decoder_layer(w, blocks, prefix_TD, CONFIG, index)
    assert len(depth.blocks) == len(expected) == len(blocks) + starts
    assert_close("blocks", torch.stack(depth.blocks), torch.stack(expected), rms=0)
