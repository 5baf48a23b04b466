"""Sampling: a draw is its request's own, follows the distribution; filters keep what they say."""

import pytest
import torch
from checker import assert_close

from k3.ops.sample import sample, uniform_bits


def keys(count, seed=0):
    return {"seed_N": torch.full((count,), seed), "position_N": torch.arange(count)}


def draws(logits_V, count=20000, **options):
    ids, _ = sample(logits_V.expand(count, -1), **keys(count), **options)
    return torch.bincount(ids, minlength=logits_V.numel()) / count


def test_known_bits():
    """Pinned, so that a saved run samples the same tokens with a later version."""
    bits = uniform_bits(torch.tensor([0, 0, 1, -7, 2**63 - 1]), torch.tensor([0, 1, 0, 3, 10**12]))
    assert bits.tolist() == [1401122455, 1505841538, 790680964, 1604902655, 2112831063]
    assert bits.dtype == torch.int64


def splitmix(x):
    """The finaliser in Python's unbounded integers."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_bits_equal_unbounded_integer_arithmetic():
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    for seed, position in [(0, 0), (5, 9), (-3, 2**40), (2**62, 123456789)]:
        state = splitmix((seed + golden) & mask)
        expected = splitmix((state + position * golden + golden) & mask) >> 33
        assert uniform_bits(torch.tensor([seed]), torch.tensor([position])).tolist() == [expected]


def test_bits_are_uniform_and_uncorrelated():
    seed, position = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    u = uniform_bits(seed.flatten(), position.flatten()).double().view(300, 300) / 2**31
    assert abs(u.mean() - 0.5) < 0.004 and abs(u.var() - 1 / 12) < 0.002
    for other in (u.roll(1, 0), u.roll(1, 1), u.T):
        assert torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1].abs() < 0.02


def test_a_request_does_not_see_its_batch():
    logits = torch.randn(64, 100) * 3
    seed, position = torch.arange(64) * 7, torch.arange(64) + 1000
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    ids, logp = sample(logits, seed_N=seed, position_N=position, **options)
    order = torch.randperm(64)
    mixed, _ = sample(logits[order], seed_N=seed[order], position_N=position[order], **options)
    assert torch.equal(mixed, ids[order])
    for i in range(0, 64, 9):
        one = slice(i, i + 1)
        alone, p = sample(logits[one], seed_N=seed[one], position_N=position[one], **options)
        assert alone == ids[one] and (p - logp[one]).abs() < 1e-6
    other, _ = sample(logits, seed_N=seed + 1, position_N=position, **options)
    assert (other != ids).any()


def test_options_of_a_neighbour_do_not_change_a_draw():
    logits, n = torch.randn(50).expand(200, -1), 200
    plain, _ = sample(logits, **keys(n))
    top_p = torch.ones(n)
    top_p[::2] = 0.3
    temperature = torch.ones(n)
    temperature[::4] = 0
    mixed, _ = sample(logits, **keys(n), top_p=top_p, temperature=temperature)
    assert torch.equal(mixed[1::2], plain[1::2])
    assert (mixed[::4] == logits[0].argmax()).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature):
    logits = torch.randn(30)
    expected = torch.softmax(logits / temperature, 0)
    count = 20000
    seen = draws(logits, count, temperature=temperature)
    # chi-square with 29 degrees of freedom: 58.3 has probability 0.001
    assert float(((seen - expected).pow(2) / expected).sum() * count) < 58.3
    wrong = torch.softmax(logits / temperature * 1.15, 0)
    assert float(((seen - wrong).pow(2) / wrong).sum() * count) > 58.3


def test_greedy_takes_the_lower_id_of_a_tie():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    ids, logp = sample(logits, **keys(1), temperature=0)
    assert ids.tolist() == [1]
    assert_close("logp", logp, torch.log_softmax(logits, -1)[:, 1], rms=1e-6)


def test_a_tiny_temperature_is_greedy_and_finite():
    logits = torch.randn(100, 40) * 50
    ids, _ = sample(logits, **keys(100), temperature=1e-30)
    assert torch.equal(ids, logits.argmax(-1))


P = torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.5}, [1, 2]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"min_p": 0.4}, [1, 2, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ],
)
def test_filters_keep_what_they_say(options, kept):
    seen = draws(P.log(), **options)
    assert seen.nonzero().flatten().tolist() == kept
    expected = torch.zeros(5)
    expected[kept] = P[kept] / P[kept].sum()
    assert (seen - expected).abs().max() < 0.015


def test_log_probability_is_of_the_raw_logits():
    logits = torch.randn(20, 9)
    ids, logp = sample(logits, **keys(20), temperature=0.3, top_p=0.2, top_k=3)
    expected = torch.log_softmax(logits, -1).gather(1, ids.unsqueeze(1)).squeeze(1)
    assert_close("logp", logp, expected, rms=1e-6)


def test_forbidden_tokens_are_never_drawn():
    logits = torch.randn(10)
    logits[[0, 9]] = -torch.inf
    seen = draws(logits, temperature=5.0)
    assert (seen[[0, 9]] == 0).all() and (seen[1:9] > 0).all()


def test_narrow_logits_draw_as_their_fp32_values():
    logits = torch.randn(500, 64).bfloat16()
    narrow, _ = sample(logits, **keys(500))
    wide, _ = sample(logits.float(), **keys(500))
    assert torch.equal(narrow, wide)


def test_nothing_to_draw():
    ids, logp = sample(torch.zeros(0, 5), **keys(0))
    assert ids.shape == logp.shape == (0,)


def test_refusals():
    logits = torch.zeros(3, 4)
    logits[1] = -torch.inf
    with pytest.raises(ValueError, match="row 1 allow no token"):
        sample(logits, **keys(3))
    logits[1] = 0
    logits[2, 1] = torch.nan
    with pytest.raises(ValueError, match="row 2"):
        sample(logits, **keys(3))
    for options in ({"top_p": 1.5}, {"temperature": -1}, {"min_p": 2.0}, {"top_k": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            sample(torch.zeros(3, 4), **keys(3), **options)
    with pytest.raises(ValueError, match="seed"):
        sample(torch.zeros(3, 4), **keys(2))
