"""Laws of the whole network: one function for training, prefill and decode; packing; depth;
routing; statistics.
"""

from __future__ import annotations

import pytest
import torch
from awake import awake
from checker import assert_close
from torch import Tensor

from k3.model.config import K3Config
from k3.model.generate import generate
from k3.model.presets import k2_like, nano, plain, preset
from k3.model.state import DenseState
from k3.model.transformer import K3
from k3.ops.spans import Spans

MODELS = {
    "nano": nano(),
    "deep": nano().with_(attn_layers=("kda", "mla") * 4, attnres__block_size=3),
    "full": nano().with_(attnres__kind="full"),
    "plain-residual": nano().with_(attnres__kind="none"),
    "softplus": nano().with_(kda__lower_bound=None, kda__full_rank_gate=False),
    "k2-like": k2_like(),
    "plain": plain(),
}


def build(config: K3Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> K3:
    """A model whose queries, biases and norms are not at their start, so that nothing cancels by
    luck.
    """
    torch.manual_seed(seed)
    model = awake(K3(config, dtype=dtype)).eval()
    with torch.no_grad():
        for name, facts in model.param_facts().items():
            if facts.role in ("query", "norm"):
                p = model.get_parameter(name)
                p += 0.1 * torch.randn_like(p)
        for router in model.routers():
            router.e_score_correction_bias.uniform_(-0.1, 0.1)
    return model


def ids(count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 1792, (count,), generator=torch.Generator().manual_seed(seed))


def whole(model: K3, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
    return model.logits(model(tokens, Spans.from_lengths(lengths or [len(tokens)])).h_TD)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_then_token_by_token_equals_one_pass(name: str) -> None:
    model, tokens = build(MODELS[name]), ids(23)
    with torch.no_grad():
        expected = whole(model, tokens)
        for cut in (1, 2, 4, 5, 17, 22):
            state = DenseState(model.config, 1, capacity=4)
            first = model(tokens[:cut], Spans.from_lengths([cut]), state).h_TD
            rest = [
                model(tokens[t : t + 1], Spans.from_lengths([1]), state).h_TD
                for t in range(cut, 23)
            ]
            assert_close(f"cut {cut}", model.logits(torch.cat([first, *rest])), expected, 2e-5)
            assert state.lengths == [23]


@pytest.mark.parametrize("name", ["nano", "softplus", "plain"])
def test_two_pieces_equal_one_pass_at_every_split(name: str) -> None:
    model, tokens = build(MODELS[name]), ids(35)
    with torch.no_grad():
        expected = whole(model, tokens)
        for cut in range(1, 35):
            state = DenseState(model.config, 1)
            pieces = [
                model(piece, Spans.from_lengths([len(piece)]), state).h_TD
                for piece in (tokens[:cut], tokens[cut:])
            ]
            assert_close(f"cut {cut}", model.logits(torch.cat(pieces)), expected, 2e-5)


def test_chunked_prefill_of_rows_of_unequal_length() -> None:
    model, a, b = build(nano()), ids(90, 1), ids(70, 2)
    with torch.no_grad():
        expected = [whole(model, a), whole(model, b)]
        state = DenseState(model.config, 2, capacity=8)
        parts: list[list[Tensor]] = [[], []]
        for rows in ([a[:65], b[:3]], [a[65:65], b[3:40]], [a[65:66], b[40:41]], [a[66:], b[41:]]):
            lengths = [len(row) for row in rows]
            h = model(torch.cat(rows), Spans.from_lengths(lengths), state).h_TD
            for row, part in enumerate(h.split(lengths)):
                parts[row].append(model.logits(part))
    for row in range(2):
        assert_close(f"row {row}", torch.cat(parts[row]), expected[row], 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_each_alone(name: str) -> None:
    model, lengths = build(MODELS[name]), [37, 51, 1, 40]
    tokens = ids(sum(lengths))
    with torch.no_grad():
        packed = whole(model, tokens, lengths)
        for alone, together in zip(tokens.split(lengths), packed.split(lengths), strict=True):
            assert_close("alone", whole(model, alone), together, 3e-6)


@pytest.mark.parametrize("name", MODELS)
def test_changing_one_document_leaves_the_others_bit_identical(name: str) -> None:
    """With the routes held, for another document's routes change the experts' batch sizes and with
    them the rounding of a product; freely routed it is close, not equal.
    """
    model, lengths = build(MODELS[name]), [37, 51, 40]
    tokens, spans = ids(sum(lengths)), Spans.from_lengths(lengths)
    for place, others in ((60, (*range(37), *range(88, 128))), (36, range(37, 128))):
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % 1792
        first = model(tokens, spans)
        again = model(changed, spans, routes=first.routes)
        same = (again.h_TD == first.h_TD).all(-1)
        assert same[list(others)].all() and not same[place]
        # Causality, to the bit.
        assert same[:place].all()
        free = model(changed, spans).h_TD
        assert_close("freely routed", free[list(others)], first.h_TD[list(others)], 3e-6)


def test_two_phase_equals_direct() -> None:
    for name in ("nano", "deep"):
        model, tokens = build(MODELS[name]), ids(40)
        direct = whole(model, tokens)
        with torch.no_grad():
            assert_close("two-phase", whole(model, tokens), direct, 3e-6)


def test_blocks_of_one_sublayer_are_full_attention_residuals() -> None:
    """Recomputes Full AttnRes from the sublayers' outputs alone."""
    model, tokens = build(MODELS["full"]), ids(11)
    spans = Spans.from_lengths([11])
    sources = [model.embed(tokens)]
    for layer in model._layers():
        for name, norm, branch in (
            (
                "self_attention_res",
                layer.input_layernorm,
                lambda x, m=layer: m.self_attn(x, spans, None)[0],
            ),
            (
                "mlp_res",
                layer.post_attention_layernorm,
                lambda x, m=layer: _feed_forward(m, x, spans),
            ),
        ):
            sources.append(branch(norm(_mix(sources, layer.query(name)))))
    expected = _mix(sources, model.query("output_attn_res"))
    assert_close("full", model(tokens, spans).h_TD, expected, 3e-6)


def _feed_forward(layer, x: Tensor, spans: Spans) -> Tensor:  # type: ignore[no-untyped-def]
    return layer.mlp(x) if hasattr(layer, "mlp") else layer.block_sparse_moe(x, spans)[0]


def _mix(sources: list[Tensor], query) -> Tensor:  # type: ignore[no-untyped-def]
    v = torch.stack(sources)
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + query.eps) * query.gamma_D
    return ((keys @ query.query_D).softmax(0)[..., None] * v).sum(0)


def test_zero_queries_average_the_sources() -> None:
    model = awake(K3(nano().with_(num_nextn_predict_layers=0)))
    tokens = ids(9)
    out = model(tokens, Spans.from_lengths([9]), taps=(0, 1, -1))
    average = torch.stack([model.embed(tokens), *out.taps]).mean(0)
    assert_close("average", out.h_TD, average, 1e-6)


def test_the_first_layer_has_one_source_and_its_query_no_gradient() -> None:
    model = build(nano()).train()
    whole(model, ids(8)).sum().backward()
    first, second = model._layers()[:2]
    assert first.self_attention_res_proj.weight.grad is None
    assert second.self_attention_res_proj.weight.grad is not None


def test_full_attention_has_no_positions_of_its_own() -> None:
    """With MLA alone, the order of the past does not matter to the last token."""
    model = build(nano().with_(attn_layers=("mla",) * 3))
    tokens = ids(12)
    shuffled = torch.cat([tokens[torch.randperm(11)], tokens[11:]])
    layer = model._layers()[0].self_attn
    x, y = model.embed(tokens), model.embed(shuffled)
    spans = Spans.from_lengths([12])
    assert_close("last", layer(x, spans, None)[0][-1], layer(y, spans, None)[0][-1], 1e-6)


def test_padding_never_enters_the_statistics() -> None:
    model = build(nano()).train()
    tokens = ids(30)
    clean = model(tokens, Spans.from_lengths([20, 10])).stats
    padded_ids = torch.cat([tokens, torch.full((14,), model.config.pad_token_id)])
    padded = model(padded_ids, Spans.from_lengths([20, 10], padding=14)).stats
    assert torch.equal(clean["expert_load"], padded["expert_load"])
    # A product over more rows may round a margin across the edge of its bin; it still counts.
    moved = (clean["histogram"] - padded["histogram"]).abs().sum()
    assert moved <= 8 and clean["histogram"].sum() == padded["histogram"].sum()
    assert_close("max_logit", padded["max_logit"], clean["max_logit"], 1e-6)
    assert clean["histogram"][0].sum() == 30 * model.config.moe.num_experts


def test_evaluation_counts_no_margins_and_moves_no_bias() -> None:
    model = build(nano())
    before = [router.e_score_correction_bias.clone() for router in model.routers()]
    stats = model(ids(10), Spans.from_lengths([10])).stats
    assert "histogram" not in stats and "expert_load" in stats
    model.train()(ids(10), Spans.from_lengths([10]))
    for router, bias in zip(model.routers(), before, strict=True):
        assert torch.equal(router.e_score_correction_bias, bias)


def test_forced_routes_are_taken_and_reported() -> None:
    model, tokens, spans = build(nano()), ids(10), Spans.from_lengths([10])
    free = model(tokens, spans)
    again = model(tokens, spans, routes=free.routes)
    assert torch.equal(again.routes, free.routes)
    assert_close("same routes", again.h_TD, free.h_TD, 1e-6)
    other = (free.routes + 1) % model.config.moe.num_experts
    forced = model(tokens, spans, routes=other)
    assert torch.equal(forced.routes, other) and not torch.allclose(forced.h_TD, free.h_TD)


def test_embeds_replace_the_table_and_taps_are_block_sums() -> None:
    model, tokens, spans = build(nano()), ids(10), Spans.from_lengths([10])
    out = model(tokens, spans, embeds=model.embed(tokens), taps=(0, 1, 2, -1))
    assert torch.equal(out.h_TD, model(tokens, spans).h_TD)
    assert len(out.taps) == 4 and torch.equal(out.taps[2], out.taps[3])


def test_fork_copies_and_slice_shares() -> None:
    model, tokens = build(nano()), ids(12)
    one = Spans.from_lengths([1])
    with torch.no_grad():
        state = DenseState(model.config, 2)
        model(tokens, Spans.from_lengths([5, 7]), state)
        twins = state.fork([1, 1, 0])
        assert twins.lengths == [7, 7, 5]
        alone = state.fork([1])
        expected = model(tokens[:1], one, alone).h_TD
        three = model(tokens[[0, 1, 2]], Spans.from_lengths([1, 1, 1]), twins).h_TD
        assert_close("fork", three[:1], expected, 1e-5)
        assert not torch.allclose(three[0], three[1])
        view = state.slice(1, 2)
        assert_close("slice", model(tokens[:1], one, view).h_TD, expected, 1e-5)
        with pytest.raises(ValueError, match="slice"):
            model(ids(200), Spans.from_lengths([200]), view)


def test_mtp_layer_reads_the_mixture_and_the_next_embedding() -> None:
    model, tokens, spans = build(nano()), ids(10), Spans.from_lengths([10])
    out = model(tokens, spans)
    following = torch.cat([tokens[1:], tokens[:1]])
    mtp = model.mtp_forward(0, out.h_TD, following, spans)
    assert mtp.h_TD.shape == out.h_TD.shape and mtp.stats["expert_load"].shape[0] == 1
    layer = model.mtp[0]
    pair = torch.cat([layer.enorm(model.embed(following)), layer.hnorm(out.h_TD)], dim=-1)
    x = layer.eh_proj(pair)
    x = x + layer.self_attn(layer.input_layernorm(x), spans, None)[0]
    x = x + layer.block_sparse_moe(layer.post_attention_layernorm(x), spans)[0]
    assert_close("mtp", mtp.h_TD, x, 1e-6)


def test_a_row_that_is_not_finite_is_refused() -> None:
    model = build(nano())
    embeds = model.embed(ids(4)).detach().clone()
    embeds[2] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        model(ids(4), Spans.from_lengths([4]), embeds=embeds)


def test_ids_must_fill_the_spans() -> None:
    with pytest.raises(ValueError, match="5"):
        build(nano())(ids(4), Spans.from_lengths([5]))


def test_narrowing_a_model_leaves_its_fp32_islands() -> None:
    model = build(nano())
    kept = {n: p.clone() for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias"))}
    model.to(torch.bfloat16)
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    for name, value in kept.items():
        assert torch.equal(model.get_parameter(name), value)
    for router in model.routers():
        assert router.e_score_correction_bias.dtype == torch.float32
    logits = whole(model, ids(6))
    assert logits.dtype == torch.float32 and torch.isfinite(logits).all()


def test_fp32_weights_compute_in_bf16_when_asked() -> None:
    model, tokens = build(nano()), ids(40)
    spans = Spans.from_lengths([40])
    exact = model(tokens, spans)
    expected = model.logits(exact.h_TD)
    model.compute_dtype = torch.bfloat16
    # Forced routes: a near tie that rounding turns would say nothing about the arithmetic.
    out = model(tokens, spans, routes=exact.routes)
    assert out.h_TD.dtype == torch.bfloat16
    assert_close("bf16", model.logits(out.h_TD), expected, 0.1, 0.3)
    model.logits(out.h_TD).sum().backward()
    assert model.embed_tokens.weight.grad.dtype == torch.float32


def test_facts_cover_every_parameter() -> None:
    for name in ("nano", "kimi-linear", "plain", "k2-like"):
        model = K3(preset(name), device="meta")
        for parameter, facts in model.param_facts().items():
            rows = model.get_parameter(parameter).shape[0]
            assert not facts.heads or facts.heads * sum(facts.head_rows) == rows, parameter
            assert not facts.clip or facts.heads * sum(r for r, _ in facts.clip) == rows, parameter


def test_generation_is_the_same_alone_and_in_a_batch() -> None:
    model = build(nano())
    prompts = [ids(5, 3).tolist(), ids(9, 4).tolist(), [7]]
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 12, "temperature": temperature, "top_p": 0.95}
        batch = generate(model, prompts, seed=5, **settings)
        for row, prompt in enumerate(prompts):
            assert generate(model, [prompt], seed=5 + row, **settings) == [batch[row]]


def test_generation_stops_at_the_stop_id_and_checks_its_prompt() -> None:
    model = build(nano())
    (free,) = generate(model, [[1, 2, 3]], max_new_tokens=8, temperature=0.0)
    (cut,) = generate(model, [[1, 2, 3]], max_new_tokens=8, temperature=0.0, stop_ids=[free[2]])
    assert cut == free[: free.index(free[2]) + 1]
    assert generate(model, [], max_new_tokens=3) == []
    assert generate(model, [[1]], max_new_tokens=0) == [[]]
    for prompt in ([], [2048], [-1]):
        with pytest.raises(ValueError, match="prompt 0"):
            generate(model, [prompt], max_new_tokens=1)
