"""Forward and backward time of each op at the shapes of one nano step (4,096 packed tokens).

    python bench/nano_ops.py [--threads 1] [--repeat 30]

Prints the median and the 10th and 90th percentile in ms; where torch has a kernel of its own, it
stands beside ours, timed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from k3.ops.attnres import mix
from k3.ops.cross_entropy import linear_cross_entropy
from k3.ops.experts import experts
from k3.ops.mla import attention
from k3.ops.norm import gated_rms_norm, rms_norm
from k3.ops.orthogonal import orthogonalize
from k3.ops.quantile import histogram
from k3.ops.route import route
from k3.ops.situ import situ_glu, swiglu
from k3.ops.spans import Spans

TOKENS, WIDTH, VOCABULARY = 4096, 112, 2048
Arm = Callable[[], object]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def both(op: Callable[..., Tensor], *leaves: Tensor) -> Arm:
    """Forward and backward with a fixed random output gradient."""
    gradient = torch.randn_like(op(*leaves))
    return lambda: torch.autograd.grad(op(*leaves), leaves, gradient)


def norm_arms() -> dict[str, Arm]:
    x, weight, gate = leaf(TOKENS, WIDTH), leaf(WIDTH), leaf(TOKENS, 2, 32)
    return {
        "rms_norm": both(lambda x, w: rms_norm(x, w, 1e-5), x, weight),
        "rms_norm, torch": both(lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5), x, weight),
        "gated_rms_norm": both(
            lambda o, g, w: gated_rms_norm(o, g, w, 1e-5), leaf(TOKENS, 2, 32), gate, leaf(32)
        ),
    }


def glu_arms() -> dict[str, Arm]:
    g, u = leaf(TOKENS, 224), leaf(TOKENS, 224)
    return {
        "situ_glu, 224 wide": both(situ_glu, g, u),
        "swiglu, 224 wide": both(swiglu, g, u),
        "swiglu, torch": both(lambda g, u: F.silu(g) * u, g, u),
    }


def mix_arms() -> dict[str, Arm]:
    rows = [leaf(TOKENS, WIDTH) for _ in range(4)]
    query, gamma = leaf(WIDTH), leaf(WIDTH)

    def graph(query: Tensor, gamma: Tensor, *rows: Tensor) -> Tensor:
        v = torch.stack(rows)
        key = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (torch.softmax(key @ (gamma * query), 0).unsqueeze(-1) * v).sum(0)

    return {
        "attnres mix, 4 sources": both(lambda q, g, *v: mix(v, q, g, 1e-5), query, gamma, *rows),
        "attnres mix, autograd": both(graph, query, gamma, *rows),
    }


def attention_arms() -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for lengths in ([256] * 16, [1024] * 4, [4096], [37, 700, 411, 90, 1200, 256, 8, 1394]):
        spans, count = Spans.from_lengths(lengths), len(lengths)
        q, k, v = leaf(TOKENS, 2, 48), leaf(TOKENS, 2, 48), leaf(TOKENS, 2, 32)
        name = f"{count} x {lengths[0]}" if len(set(lengths)) == 1 else "8 odd documents"
        arms[f"attention, {name}"] = both(
            lambda q, k, v, s=spans: attention(q, k, v, s, scale=0.1)[0], q, k, v
        )
        if len(set(lengths)) > 1:
            continue

        def sdpa(q: Tensor, k: Tensor, v: Tensor, count: int = count) -> Tensor:
            q, k, v = (x.view(count, -1, 2, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            v = F.pad(v, (0, 16))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1)[..., :32]

        arms[f"attention, {name}, torch"] = both(sdpa, q, k, v)
    return arms


def routing_arms() -> dict[str, Arm]:
    scores, bias = torch.rand(TOKENS, 16).requires_grad_(), torch.zeros(16)
    chosen = route(scores, bias, 4)
    x, p = leaf(TOKENS, 64), chosen.weights_Tk.detach().requires_grad_()
    w1, w3, w2 = leaf(16, 32, 64), leaf(16, 32, 64), leaf(16, 64, 32)
    dense = leaf(96, 64)

    def run(x: Tensor, p: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        return experts(x, chosen.indices_Tk, p, w1, w3, w2, situ_glu)

    def one_dense(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.linear(x.repeat(4, 1), w), w.t())

    raw = scores.detach()
    return {
        "route, top 4 of 16": both(lambda s: route(s, bias, 4).weights_Tk, scores),
        "histogram, 16 experts": lambda: histogram(raw, chosen.cutoff_T, bias),
        "experts, 4 of 16": both(run, x, p, w1, w3, w2),
        "two dense products of more FLOPs": both(one_dense, x, dense),
    }


def head_arms() -> dict[str, Arm]:
    h, weight = leaf(TOKENS, WIDTH), leaf(VOCABULARY, WIDTH)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    stack = torch.randn(16, 32, 64)
    return {
        "linear_cross_entropy": both(lambda h, w: linear_cross_entropy(h, w, targets), h, weight),
        "linear + cross_entropy, torch": both(
            lambda h, w: F.cross_entropy(F.linear(h, w), targets, reduction="sum"), h, weight
        ),
        "orthogonalize, 16 x 32 x 64": lambda: orthogonalize(stack),
    }


def measure(arms: dict[str, Arm], repeat: int) -> dict[str, list[float]]:
    """Milliseconds of every arm, in turns, so that a busy moment hits all of them."""
    for arm in arms.values():
        for _ in range(3):
            arm()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeat):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads, {TOKENS} tokens, ms per call")
    for make in (norm_arms, glu_arms, mix_arms, attention_arms, routing_arms, head_arms):
        for name, times in measure(make(), options.repeat).items():
            deciles = statistics.quantiles(times, n=10)
            print(
                f"{name:36s} {statistics.median(times):8.2f}  {deciles[0]:8.2f} {deciles[-1]:8.2f}"
            )


if __name__ == "__main__":
    main()
