"""Load balance by update: Quantile Balancing beside the sign rule at five step sizes.

    python bench/quantile_balance.py

A router of 896 experts, 16 per token, with fixed skewed popularity; every update sees 8,192 fresh
tokens. Draws docs/img/quantile_balance.svg and writes docs/records/quantile-balance. The first
point of every line is the router without a bias; each next one is routed with the bias of the step
before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import record
import torch
from torch import Tensor

from k3.ops.quantile import bias_exact, bias_from_histogram, bias_sign, histogram
from k3.ops.route import Route, route

EXPERTS, TOP_K, TOKENS = 896, 16, 8192
SIGN_STEPS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
TOY = (
    (0.81, 0.50, 0.07, 0.22),
    (0.46, 0.42, 0.33, 0.28),
    (0.78, 0.45, 0.13, 0.44),
    (0.93, 0.45, 0.31, 0.43),
    (0.54, 0.27, 0.14, 0.39),
    (0.72, 0.24, 0.10, 0.10),
    (0.63, 0.23, 0.52, 0.25),
    (0.60, 0.68, 0.19, 0.06),
)
Curves = dict[str, list[list[float]]]
"""Per arm and seed: max load / mean load - 1 before and after each update."""
Update = Callable[[Tensor, Route, Tensor, Tensor], Tensor]
"""(scores, their route, the bias that made it, loads) -> the next bias."""


def exact(scores: Tensor, chosen: Route, bias: Tensor, load: Tensor) -> Tensor:
    return bias_exact(scores, chosen.cutoff_T, chosen.indices_Tk.shape[1])


def binned(scores: Tensor, chosen: Route, bias: Tensor, load: Tensor) -> Tensor:
    counts = histogram(scores, chosen.cutoff_T, bias)
    return bias_from_histogram(counts, bias, chosen.indices_Tk.shape[1], scores.shape[0])


def sign(scores: Tensor, chosen: Route, bias: Tensor, load: Tensor, step: float) -> Tensor:
    return bias_sign(bias, load, step)


ARMS: dict[str, Update] = {"exact quantile": exact, "histogram, 1000 bins": binned} | {
    f"sign rule, step {step:g}": partial(sign, step=step) for step in SIGN_STEPS
}


def fresh(offset: Tensor, generator: torch.Generator) -> Tensor:
    return torch.sigmoid(torch.randn(TOKENS, EXPERTS, generator=generator) + offset)


def imbalance(update: Update, seed: int, updates: int) -> tuple[list[float], list[float]]:
    """(max load / mean load - 1, share of idle experts) before and after each update."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(EXPERTS, generator=generator)
    bias = torch.zeros(EXPERTS)
    excess, idle = [], []
    for _ in range(updates + 1):
        scores = fresh(offset, generator)
        chosen = route(scores, bias, TOP_K)
        load = torch.bincount(chosen.indices_Tk.flatten(), minlength=EXPERTS)
        excess.append(float(load.max() / load.double().mean() - 1))
        idle.append(float((load == 0).double().mean()))
        bias = update(scores, chosen, bias, load)
    return excess, idle


def toy_loads() -> list[int]:
    """Eight tokens, four experts, one each: the loads after one update from zero."""
    scores, zero = torch.tensor(TOY), torch.zeros(4)
    chosen = route(scores, zero, 1)
    load = torch.bincount(chosen.indices_Tk.flatten(), minlength=4)
    again = route(scores, exact(scores, chosen, zero, load), 1)
    return torch.bincount(again.indices_Tk.flatten(), minlength=4).tolist()


def sharding(seed: int) -> tuple[float, float]:
    """(largest difference of 2- and 8-shard histograms from one, error of the estimate in bins)."""
    generator = torch.Generator().manual_seed(seed)
    scores = fresh(torch.randn(EXPERTS, generator=generator), generator)
    bias = torch.randn(EXPERTS, generator=generator) * 0.2
    bias -= bias.mean()
    chosen = route(scores, bias, TOP_K)
    whole = histogram(scores, chosen.cutoff_T, bias)
    order = torch.randperm(TOKENS, generator=generator)
    difference = 0
    for shards in (2, 8):
        parts = [histogram(scores[i], chosen.cutoff_T[i], bias) for i in order.chunk(shards)]
        difference = max(difference, int((torch.stack(parts).sum(0) - whole).abs().max()))
    width = float(bias.max() - bias.min() + 2) / whole.shape[1]
    estimate = bias_from_histogram(whole, bias, TOP_K, TOKENS)
    error = float((estimate - bias_exact(scores, chosen.cutoff_T, TOP_K)).abs().max())
    return float(difference), error / width


def draw(curves: Curves) -> None:
    """Median over the seeds, logarithmic: the sign rule is an order of magnitude away."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "quantile_balance"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, runs in curves.items():
        curve = [statistics.median(point) for point in zip(*runs, strict=True)]
        ours = not name.startswith("sign")
        style = {"linewidth": 2.4, "marker": "o"} if ours else {"linewidth": 1.2, "linestyle": "--"}
        axes.plot(range(len(curve)), curve, label=name, markersize=4, **style)
    axes.set(yscale="log", xlabel="update", ylabel="max load / mean load - 1")
    axes.set_title(f"{EXPERTS} experts, top {TOP_K}, {TOKENS} fresh tokens per update", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    path = record.DOCS / "img" / "quantile_balance.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")


def balance_rows(curves: Curves, updates: int) -> list[dict[str, Any]]:
    """The plot in numbers: before, after one update, after all; the sign rule at its best step."""
    exact_arm, binned_arm, *signs = curves
    claim = "qb-no-step-size"

    def at(name: str, update: int) -> list[float]:
        return [curve[update] for curve in curves[name]]

    def best(update: int) -> str:
        return min(signs, key=lambda name: statistics.median(at(name, update)))

    row = record.result
    first, last = best(1), best(updates)
    return [
        row("no bias: max/mean - 1", at(exact_arm, 0)),
        row("exact, one update", at(exact_arm, 1), target="<= 0.6", claim=claim),
        row("histogram, one update", at(binned_arm, 1), target="<= 0.6", claim=claim),
        row(f"{first} (best of five), one update", at(first, 1)),
        row(f"histogram, {updates} updates", at(binned_arm, updates)),
        row(f"{last} (best of five), {updates} updates", at(last, updates)),
    ]


def other_rows(seeds: list[int]) -> list[dict[str, Any]]:
    """The toy, and what sharding changes: nothing."""
    row, claim = record.result, "qb-histograms-add"
    differences, errors = zip(*(sharding(seed) for seed in seeds), strict=True)
    toy, name = toy_loads(), "toy of 8 tokens, 4 experts: largest load after one update"
    return [
        row(name, [max(toy)], "tokens", "== 2", "qb-no-step-size"),
        row("difference of counts over 1, 2, 8 shards", differences, "tokens", "== 0", claim),
        row("error of the histogram estimate", errors, "bins", "<= 1", claim),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    curves: Curves = {name: [] for name in ARMS}
    lines: list[str] = []
    for name, update in ARMS.items():
        for seed in options.seeds:
            excess, idle = imbalance(update, seed, options.updates)
            curves[name].append(excess)
            lines.append(
                f"{name}, seed {seed}: max/mean - 1 " + " ".join(f"{x:.3g}" for x in excess)
            )
            lines.append(f"{name}, seed {seed}: idle share " + " ".join(f"{x:.3f}" for x in idle))
            print(lines[-2], lines[-1], sep="\n", flush=True)
    draw(curves)
    results = balance_rows(curves, options.updates) + other_rows(options.seeds)
    for row in results:
        lines.append(
            f"{row['name']}: {row['value']} {row['unit']} {row.get('target', '')}".rstrip()
        )
        print(lines[-1])
    command = "python bench/quantile_balance.py"
    folder = record.write("quantile-balance", command, options.seeds, results, lines)
    print(f"written: {folder.relative_to(record.ROOT)}, docs/img/quantile_balance.svg")


if __name__ == "__main__":
    main()
