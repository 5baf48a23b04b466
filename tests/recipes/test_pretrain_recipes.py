"""Every recipe and arm: it builds, it changes what it names and nothing else, it trains."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3 import UserError
from k3.checkpoint.params import active_params
from k3.recipes.overrides import override
from k3.recipes.pretrain import ARMS, RECIPES, recipe
from k3.train.config import to_dict

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

CHANGED = {
    "softplus-decay": {"model.kda.lower_bound"},
    "low-rank-gate": {"model.kda.full_rank_gate"},
    "no-mla-gate": {"model.mla.output_gate"},
    "plain-residual": {"model.attnres.kind", "model.attnres.block_size"},
    "full-attnres": {"model.attnres.kind"},
    "block-attnres": set(),
    "uniform-queries": {"model.attnres.query"},
    "random-queries": {"model.attnres.query"},
    "full-width-moe": {"model.moe.latent_size", "model.moe.latent_norm"},
    "no-latent-norm": {"model.moe.latent_norm"},
    "swiglu": {"model.activation"},
    "sign-rule": {"model.moe.balance"},
    "no-balance": {"model.moe.balance"},
    "exact-quantile": {"model.moe.balance"},
    "all-mla": {"model.attn_layers", "model.mla.rope_theta"},
    "1:1": {"model.attn_layers"},
    "7:1": {"model.attn_layers"},
    "all-kda": {"model.attn_layers"},
    "whole-muon": {"optim.kind"},
    "adamw": {"optim.kind"},
}
"""Fields of `nano` that each arm sets; the two whole baselines are left out."""


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differing(a, b):
    old, new = dict(leaves(to_dict(a))), dict(leaves(to_dict(b)))
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} - {"name"}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_build_and_survive_json(name):
    run = recipe(name)
    assert run.name == name
    assert json.loads(json.dumps(to_dict(run)))["model"]["hidden_size"] == run.model.hidden_size


def test_every_arm_is_covered_here():
    assert set(ARMS) == set(CHANGED) | {"k2-like", "plain"}


@pytest.mark.parametrize("arm", CHANGED)
def test_an_arm_changes_what_it_names_and_nothing_else(arm):
    base, run = recipe("nano"), recipe("nano", [arm])
    assert run.name == f"nano-{arm}"
    assert differing(base, run) == CHANGED[arm]


@pytest.mark.parametrize("name", ["nano", "micro", "mini", "small"])
@pytest.mark.parametrize("arm", ARMS)
def test_arms_fit_every_size(name, arm):
    run = recipe(name, [arm])
    assert run.data == recipe(name).data and run.steps == recipe(name).steps


@pytest.mark.parametrize("name", ["nano", "micro", "mini", "small"])
@pytest.mark.parametrize(
    ("arm", "within"), [("full-width-moe", 0.03), ("plain", 0.03), ("k2-like", 0.1)]
)
def test_baselines_have_the_active_parameters_of_what_they_are_compared_with(name, arm, within):
    ours, theirs = recipe(name).model, recipe(name, [arm]).model
    assert active_params(theirs) == pytest.approx(active_params(ours), rel=within)


def test_arms_add_up_and_overrides_go_on_top():
    run = recipe("nano", ["sign-rule", "adamw"])
    assert (run.name, run.model.moe.balance) == ("nano-sign-rule-adamw", "sign")
    run = override(run, ["optim.lr=1e-3", "model.moe.top_k=2", "stages.0.context=128"])
    assert (run.optim.lr, run.model.moe.top_k, run.stages[0].context) == (1e-3, 2, 128)


def test_unknown_names_get_the_closest_known_one():
    with pytest.raises(UserError, match="unknown recipe 'nanno'; did you mean nano?"):
        recipe("nanno")
    with pytest.raises(UserError, match="unknown arm 'sign'; did you mean sign-rule?"):
        recipe("nano", ["sign"])
    with pytest.raises(UserError, match="unknown arm 'zzz'; known: softplus-decay, "):
        recipe("nano", ["zzz"])


def trained(base, arm, out, monkeypatch):
    """First and last loss of an arm of a run."""
    from tiny_run import rows

    from k3.train.pretrain import pretrain

    monkeypatch.setattr("k3.train.run_folder.write_page", lambda folders, page: page)
    pretrain(ARMS[arm](base), out)
    losses = [row["loss"] for row in rows(out) if "loss" in row]
    assert torch.tensor(losses).isfinite().all()
    return losses[0], losses[-1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tiny_run import tiny_run, write_corpus

    base = tiny_run(write_corpus(tmp_path_factory.mktemp("data") / "corpus"))
    return replace(base, steps=6, save_every_s=1e9, optim=replace(base.optim, lr=2e-2))


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_a_little(tiny, arm, tmp_path, monkeypatch):
    first, last = trained(tiny, arm, tmp_path, monkeypatch)
    assert last < first - 0.3


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains(arm, tmp_path, monkeypatch):
    """nano itself, 300 steps on the default corpus."""
    base = replace(recipe("nano"), steps=300, sample_every=0, save_every_s=1e9)
    first, last = trained(base, arm, tmp_path, monkeypatch)
    assert last < first - 2.5
