"""The balancer: one step per optimizer step, one exchange for all layers, integers whatever the
sharding.
"""

import pytest
import torch

from k3.ops.quantile import histogram
from k3.ops.route import route
from k3.optim.balance import Balancer, Load

L, N, K, BINS = 2, 16, 3, 400


def scores(tokens, seed=0):
    """Skewed router scores of L layers, [L, T, N]."""
    torch.manual_seed(seed)
    return torch.sigmoid(torch.randn(L, tokens, N) * 0.5 + torch.linspace(-2, 2, N))


def statistics(scores_LTn, biases):
    """What the model's forward returns for these scores."""
    loads, counts, margins = [], [], []
    for scores_Tn, bias_n in zip(scores_LTn, biases, strict=True):
        routed = route(scores_Tn, bias_n, K)
        loads.append(torch.bincount(routed.indices_Tk.flatten(), minlength=N))
        counts.append(histogram(scores_Tn, routed.cutoff_T, bias_n, bins=BINS))
        margins.append((scores_Tn, routed.cutoff_T))
    return {
        "expert_load": torch.stack(loads),
        "histogram": torch.stack(counts),
        "margins": margins,
    }


def balancer(kind="quantile", biases=None):
    biases = biases or [torch.zeros(N) for _ in range(L)]
    return Balancer(biases, kind, K, bins=BINS, sign_step=0.05)


def run(kind, steps, tokens=4096):
    """max over mean of each step, with fresh tokens every step."""
    balance = balancer(kind)
    ratios = []
    for step in range(steps):
        balance.add(statistics(scores(tokens, step), balance.biases))
        ratios.append(balance.step().max_over_mean)
    return ratios, balance


def test_the_bias_moves_at_the_step_and_balances_the_next():
    ratios, balance = run("quantile", 3)
    assert ratios[0] > 3.0
    assert ratios[1] < 1.8 and ratios[2] < 1.3
    assert all(abs(float(bias.mean())) < 1e-6 for bias in balance.biases)
    unmoved, _ = run("none", 3)
    assert min(unmoved) > 3.0


def test_exact_and_histogram_agree_within_a_bin_and_sign_is_slower():
    exact, exact_balance = run("quantile_exact", 3)
    _, histogram_balance = run("quantile", 3)
    for a, b in zip(exact_balance.biases, histogram_balance.biases, strict=True):
        assert (a - b).abs().max() < 3 * (2 + 4) / BINS
    sign, _ = run("sign", 3)
    assert exact[2] < 1.3 and sign[2] > 2.5


def test_any_sharding_gives_identical_integers_and_biases():
    whole = balancer()
    rows = scores(480)
    whole.add(statistics(rows, whole.biases))
    whole.step()
    for shards in (2, 3, 8):
        split = balancer()
        for part in reversed(rows.chunk(shards, dim=1)):
            split.add(statistics(part, split.biases))
        split.step()
        assert all(torch.equal(a, b) for a, b in zip(whole.biases, split.biases, strict=True)), (
            shards
        )


def test_ranks_exchange_once_and_agree_with_one_rank():
    rows = scores(300)
    one = balancer()
    one.add(statistics(rows, one.biases))
    load = one.step()
    ranks = [balancer(), balancer()]
    for rank, part in zip(ranks, rows.split([100, 200], dim=1), strict=True):
        rank.add(statistics(part, rank.biases))
    sent = []
    ranks[1].step(lambda flat: sent.append(flat.clone()))
    calls = []

    def all_reduce(flat):
        calls.append(flat.dtype)
        flat += sent[0]

    assert ranks[0].step(all_reduce) == load
    assert calls == [torch.int64]
    assert all(torch.equal(a, b) for a, b in zip(one.biases, ranks[0].biases, strict=True))


def test_exact_gathers_the_margins_of_all_ranks():
    rows = scores(200)
    one, half = balancer("quantile_exact"), balancer("quantile_exact")
    one.add(statistics(rows, one.biases))
    one.step()
    other = statistics(rows[:, 120:], half.biases)["margins"]
    queue = [tensor for pair in other for tensor in pair]
    half.add(statistics(rows[:, :120], half.biases))
    half.step(lambda flat: flat, lambda mine: torch.cat([mine, queue.pop(0)]))
    assert all(torch.equal(a, b) for a, b in zip(one.biases, half.biases, strict=True))


def test_backbone_and_mtp_statistics_line_up():
    rows = scores(256)
    joint, apart = balancer(), balancer()
    joint.add(statistics(rows, joint.biases))
    joint.step()
    apart.add(statistics(rows[:1], apart.biases[:1]), statistics(rows[1:], apart.biases[1:]))
    apart.step()
    assert all(torch.equal(a, b) for a, b in zip(joint.biases, apart.biases, strict=True))
    with pytest.raises(AssertionError):
        apart.add(statistics(rows[:1], apart.biases[:1]))


def test_statistics_without_tokens_leave_the_bias():
    balance = balancer(biases=[torch.linspace(-0.1, 0.1, N) for _ in range(L)])
    before = [bias.clone() for bias in balance.biases]
    balance.add(
        {
            "expert_load": torch.zeros(L, N, dtype=torch.int64),
            "histogram": torch.zeros(L, N, BINS, dtype=torch.int64),
        }
    )
    load = balance.step()
    assert all(torch.equal(a, b) for a, b in zip(before, balance.biases, strict=True))
    assert load.idle_share == 1.0


def test_load_reports_the_worst_layer():
    load = Load.of(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]]))
    assert (load.max_over_mean, load.idle_share) == (4.0, 3 / 8)


def test_a_model_without_experts_needs_no_balancer():
    balance = Balancer([], "quantile", 2)
    balance.add({})
    assert balance.step() is None
