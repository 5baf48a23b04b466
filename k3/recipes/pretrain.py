"""Pretraining runs by name: five sizes of K3, and the arms that change one idea of any of them.

`recipe("nano")` is a run; `recipe("nano", ["sign-rule"])` is the same with the fixed-step balancing
rule. Everything else is `--set`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from k3 import UserError
from k3.data.loader import DataConfig
from k3.model.config import AttnResConfig
from k3.model.presets import full_width_expert, hybrid, k2_like, plain, preset
from k3.optim.muon import OptimConfig
from k3.optim.schedule import ScheduleConfig
from k3.train.config import RunConfig, Stage


def nano() -> RunConfig:
    """Every idea of K3 in 1.4M parameters: minutes on a laptop's CPU, context 256 -> 1k -> 4k."""
    return RunConfig(
        name="nano",
        model=preset("nano"),
        data=DataConfig(
            vocab_size=2048,
            tokens_per_micro_batch=2048,
            max_bytes=24_000_000,
            tokenizer_bytes=4_000_000,
        ),
        optim=OptimConfig(lr=1e-2, adamw_lr_scale=2.0, betas=(0.8, 0.95), grad_clip=0.3),
        stages=(Stage(256, 0.85), Stage(1024, 0.1), Stage(4096, 0.05)),
        steps=1000,
        micro_batches=1,
        eval_every=100,
        eval_tokens=16_384,
        sample_every=100,
    )


def micro() -> RunConfig:
    """About 10M active parameters: hours on a CPU, minutes on a GPU."""
    return RunConfig(
        name="micro",
        model=preset("micro"),
        data=DataConfig(vocab_size=8192, tokens_per_micro_batch=16384),
        optim=OptimConfig(lr=3e-3),
        stages=(Stage(1024, 0.7), Stage(4096, 0.2), Stage(16384, 0.1)),
        steps=4000,
        micro_batches=4,
        eval_every=250,
        sample_every=250,
    )


def mini() -> RunConfig:
    """The published mini-K3 shape with a vocabulary of 32,768: one large GPU."""
    return RunConfig(
        name="mini",
        model=preset("mini"),
        data=DataConfig(vocab_size=32768, tokens_per_micro_batch=32768, tokenizer_bytes=64_000_000),
        optim=OptimConfig(lr=1e-3),
        stages=(Stage(2048, 0.7), Stage(8192, 0.2), Stage(32768, 0.1)),
        steps=8000,
        micro_batches=4,
        remat="layer",
        eval_every=250,
        eval_tokens=262_144,
        sample_every=500,
    )


def mini_r1() -> RunConfig:
    """The public run it is measured against: K3's vocabulary, 131,072 tokens a step, AdamW, WSD."""
    return RunConfig(
        name="mini-r1",
        model=preset("mini-r1"),
        data=DataConfig(
            vocab_size=163840, tokens_per_micro_batch=32768, tokenizer_bytes=256_000_000
        ),
        optim=OptimConfig(lr=6e-4, kind="adamw"),
        schedule=ScheduleConfig(kind="wsd"),
        stages=(Stage(2048, 1.0),),
        steps=38_147,
        micro_batches=4,
        remat="layer",
        eval_every=500,
        eval_tokens=262_144,
        sample_every=1000,
    )


def small() -> RunConfig:
    """The largest member that trains well on one H200."""
    return RunConfig(
        name="small",
        model=preset("small"),
        data=DataConfig(vocab_size=32768, tokens_per_micro_batch=32768, tokenizer_bytes=64_000_000),
        optim=OptimConfig(lr=6e-4),
        stages=(Stage(4096, 0.7), Stage(16384, 0.2), Stage(32768, 0.1)),
        steps=20_000,
        micro_batches=16,
        remat="layer",
        eval_every=500,
        eval_tokens=262_144,
        sample_every=1000,
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "nano": nano,
    "micro": micro,
    "mini": mini,
    "mini-r1": mini_r1,
    "small": small,
}


def _model(**changes: Any) -> Callable[[RunConfig], RunConfig]:
    """An arm that replaces fields of the model (`moe__balance` reaches into the tree)."""
    return lambda run: replace(run, model=run.model.with_(**changes))


def _optim(**changes: Any) -> Callable[[RunConfig], RunConfig]:
    return lambda run: replace(run, optim=replace(run.optim, **changes))


def _ratio(ratio: int) -> Callable[[RunConfig], RunConfig]:
    """`ratio` KDA layers to one MLA layer."""

    def arm(run: RunConfig) -> RunConfig:
        return _model(attn_layers=hybrid(run.model.num_hidden_layers, ratio))(run)

    return arm


def _all(kind: str) -> Callable[[RunConfig], RunConfig]:
    def arm(run: RunConfig) -> RunConfig:
        return _model(attn_layers=(kind,) * run.model.num_hidden_layers)(run)

    return arm


def _all_mla(run: RunConfig) -> RunConfig:
    """Rotary, for without KDA no layer would know the order of the tokens."""
    return _model(mla__rope_theta=10_000.0)(_all("mla")(run))


def _full_width_moe(run: RunConfig) -> RunConfig:
    """Experts without a latent, narrower so that a token multiplies as many weights."""
    return _model(
        moe__latent_size=None,
        moe__latent_norm=False,
        moe__intermediate_size=full_width_expert(run.model),
    )(run)


ARMS: dict[str, Callable[[RunConfig], RunConfig]] = {
    "softplus-decay": _model(kda__lower_bound=None),
    "low-rank-gate": _model(kda__full_rank_gate=False),
    "no-mla-gate": _model(mla__output_gate=False),
    "plain-residual": _model(attnres=AttnResConfig(kind="none")),
    "full-attnres": _model(attnres__kind="full"),
    "block-attnres": _model(attnres__kind="block"),
    "uniform-queries": _model(attnres__query="uniform"),
    "random-queries": _model(attnres__query="random"),
    "full-width-moe": _full_width_moe,
    "no-latent-norm": _model(moe__latent_norm=False),
    "swiglu": _model(activation="swiglu"),
    "sign-rule": _model(moe__balance="sign"),
    "no-balance": _model(moe__balance="none"),
    "exact-quantile": _model(moe__balance="quantile_exact"),
    "all-mla": _all_mla,
    "1:1": _ratio(1),
    "7:1": _ratio(7),
    "all-kda": _all("kda"),
    "whole-muon": _optim(kind="whole"),
    "adamw": _optim(kind="adamw"),
    "k2-like": lambda run: replace(run, model=k2_like(run.model)),
    "plain": lambda run: replace(run, model=plain(run.model)),
}
"""What each idea is compared with. An arm changes the idea that it names and nothing else."""


def recipe(name: str, arms: Sequence[str] = ()) -> RunConfig:
    """The named run with arms applied in order. UserError on an unknown name, with the closest
    known one.
    """
    run = _known("recipe", name, RECIPES)()
    for arm in arms:
        run = replace(_known("arm", arm, ARMS)(run), name=f"{run.name}-{arm}")
    return run


def _known(what: str, name: str, table: dict[str, Any]) -> Any:
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(table)}"
    raise UserError(f"unknown {what} {name!r}; {hint}")
