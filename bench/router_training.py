"""A router of 256 experts, top 6, learning with its model: Quantile Balancing beside the sign rule.

    python bench/router_training.py [--tokens 4096] [--steps 20]

Two layers of micro's width (KDA then MLA, both with experts) train on the default corpus from
scratch, once with Quantile Balancing and once per step size of the sign rule, from the same weights
on the same tokens. Draws docs/img/router_training.svg and writes docs/records/router-training.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import record
import torch

from k3.data.batch import Batch
from k3.data.loader import Loader
from k3.model.config import K3Config
from k3.model.presets import micro
from k3.model.transformer import K3
from k3.optim.balance import Balancer, Load
from k3.optim.muon import OptimConfig, build_optimizer
from k3.recipes.pretrain import recipe
from k3.train.loss import losses

SIGN_STEPS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
CONTEXT = 256


def shape() -> K3Config:
    base = micro().with_(
        vocab_size=2048,
        attn_layers=("kda", "mla"),
        num_nextn_predict_layers=0,
        attnres__block_size=1,
        first_k_dense=0,
        moe__num_experts=256,
        moe__top_k=6,
        moe__intermediate_size=32,
    )
    return base


def train(config: K3Config, batches: list[Batch]) -> list[Load]:
    """One optimizer step per batch; the load of each step."""
    torch.manual_seed(0)
    assert config.moe is not None
    model = K3(config).train()
    optimizer = build_optimizer(
        model.named_parameters(), model.param_facts(), OptimConfig(lr=5e-3, adamw_lr_scale=2.0)
    )
    biases = [router.e_score_correction_bias for router in model.routers()]
    moe = config.moe
    balancer = Balancer(biases, moe.balance, moe.top_k, bins=moe.bins, sign_step=moe.sign_step)
    loads = []
    for batch in batches:
        part = losses(model, batch)
        (part.main / int((batch.targets_T >= 0).sum())).backward()
        balancer.add(*part.stats)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        load = balancer.step()
        assert load is not None
        loads.append(load)
    return loads


def draw(arms: dict[str, list[Load]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "router_training"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name, loads in arms.items():
        ours = not name.startswith("sign")
        style = {"linewidth": 2.4} if ours else {"linewidth": 1.2, "linestyle": "--"}
        steps = range(1, len(loads) + 1)
        left.plot(steps, [load.max_over_mean for load in loads], label=name, **style)
        right.plot(steps, [100 * load.idle_share for load in loads], **style)
    left.set(yscale="log", xlabel="step", ylabel="largest / mean load")
    right.set(xlabel="step", ylabel="idle experts, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(
        fontsize=8, frameon=False, ncols=6, loc="lower center", bbox_to_anchor=(0.5, -0.1)
    )
    figure.savefig(
        record.DOCS / "img" / "router_training.svg", metadata={"Date": None}, bbox_inches="tight"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    data = replace(recipe("nano").data, tokens_per_micro_batch=options.tokens)
    loader = Loader(data)
    batches = [loader.next(CONTEXT) for _ in range(options.steps)]
    arms = {"quantile": shape()}
    arms |= {
        f"sign {step:g}": shape().with_(moe__balance="sign", moe__sign_step=step)
        for step in SIGN_STEPS
    }
    log, loads = [f"256 experts, top 6, width 256, {options.tokens} tokens a step"], {}
    for name, config in arms.items():
        loads[name] = train(config, batches)
        for what, values in (
            ("max/mean", [f"{load.max_over_mean:.2f}" for load in loads[name]]),
            ("idle", [f"{load.idle_share:.3f}" for load in loads[name]]),
        ):
            log.append(f"{name} {what}: {' '.join(values)}")
            print(log[-1], flush=True)
    draw(loads)
    signs = [name for name in loads if name.startswith("sign")]
    best = min(signs, key=lambda name: loads[name][-1].max_over_mean)
    at, row, claim = min(5, options.steps) - 1, record.result, "qb-no-collapse"
    results = [
        row(
            "quantile: idle experts at step 5",
            [loads["quantile"][at].idle_share],
            "",
            "== 0",
            claim,
        ),
        row(
            "quantile: max/mean at the last step",
            [loads["quantile"][-1].max_over_mean],
            "",
            "<= 2",
            claim,
        ),
        row(f"{best} (best of five): idle experts at step 5", [loads[best][at].idle_share]),
        row(f"{best} (best of five): max/mean at the last step", [loads[best][-1].max_over_mean]),
    ]
    log += [f"{r['name']}: {r['value']} {r.get('target', '')}".rstrip() for r in results]
    print("\n".join(log[-4:]))
    record.write("router-training", "python bench/router_training.py", [0], results, log)


if __name__ == "__main__":
    main()
