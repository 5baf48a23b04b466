"""The loop: what it leaves behind, that looking changes nothing, that it learns, and how it
refuses.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_run import learned, rows, tiny_run

from k3 import UserError
from k3.model.router import Router
from k3.optim.muon import OptimConfig
from k3.train import pretrain as loop
from k3.train.pretrain import pretrain

PER_STEP = {
    "step", "tokens", "stage", "context", "loss", "mtp_loss", "lr", "grad_norm", "tokens_per_s",
    "memory_mb", "load_max_over_mean", "idle_share", "max_logit", "output_norm",
}  # fmt: skip


def steps_of(out):
    return [row for row in learned(out) if "loss" in row]


def test_a_run_folder_holds_rows_evaluations_samples_and_a_summary(corpus, tmp_path, report):
    run = tiny_run(corpus, eval_every=2, sample_every=3, sample_tokens=3)
    summary = pretrain(run, tmp_path)
    steps = [row for row in rows(tmp_path) if "loss" in row]
    looks = [row for row in rows(tmp_path) if "eval_bpb" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert all(set(row) == PER_STEP for row in steps)
    assert [row["context"] for row in steps] == [32, 32, 32, 64, 64, 64]
    assert steps[-1]["tokens"] == 6 * 2 * 64
    assert len(steps[0]["output_norm"]) == 5
    assert steps[0]["loss"] == pytest.approx(math.log(512), rel=0.15)
    assert [row["step"] for row in looks] == [2, 4, 6]
    assert {row["prompt"] for row in rows(tmp_path, "samples")} == set(run.sample_prompts)
    assert [row["step"] for row in rows(tmp_path, "samples")] == [3] * 3 + [6] * 3
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_bpb"] == looks[-1]["eval_bpb"]
    assert summary["params"] > summary["active_params"] > 0
    assert set(summary["baselines"]) == {"gzip -9", "xz -9"}
    kept = json.loads((tmp_path / "run.json").read_text())
    assert kept["optim"]["lr"] == run.optim.lr and kept["environment"]["ranks"] == 1
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_the_released_layout_holds_what_was_trained(corpus, straight):
    from k3.checkpoint.released import load_released
    from k3.checkpoint.steps import latest_step, load_step
    from k3.text.tokenizer import Tokenizer

    model = load_released(straight / "hf")
    trained = load_step(latest_step(straight / "steps")).tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name].to(tensor.dtype)), name
    assert Tokenizer.load(straight / "hf").vocab_size == 512


def test_looking_leaves_no_trace_in_what_is_learned(corpus, straight, tmp_path):
    pretrain(tiny_run(corpus, eval_every=2, sample_every=3, sample_tokens=2), tmp_path)
    plain, watched = (
        [row for row in learned(out) if "loss" in row] for out in (straight, tmp_path)
    )
    assert plain == watched


def test_recomputation_changes_no_bit(corpus, straight, tmp_path):
    pretrain(tiny_run(corpus, remat="layer"), tmp_path)
    assert learned(straight) == learned(tmp_path)


def test_it_learns(corpus, tmp_path):
    run = tiny_run(corpus, steps=30, save_every_s=1e9, optim=OptimConfig(lr=1e-2))
    summary = pretrain(run, tmp_path)
    steps = [row for row in rows(tmp_path) if "loss" in row]
    assert steps[-1]["loss"] < steps[0]["loss"] - 2.0
    assert summary["eval_bpb"] < 5.5
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step_00000030"]


def test_bfloat16_activations_follow_float32(corpus, straight, tmp_path):
    pretrain(tiny_run(corpus, dtype="bfloat16"), tmp_path)
    exact, rounded = (
        [r["loss"] for r in learned(out) if "loss" in r] for out in (straight, tmp_path)
    )
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=0.02)


def test_routers_move_their_bias_in_training_only(corpus, straight):
    from k3.checkpoint.steps import latest_step, load_step

    tensors = load_step(latest_step(straight / "steps")).tensors
    biases = {n: t for n, t in tensors.items() if n.endswith("e_score_correction_bias")}
    assert len(biases) == 4
    for name, bias in biases.items():
        assert bias.dtype == torch.float32 and bias.abs().max() > 0, name
        assert abs(float(bias.mean())) < 1e-6


def break_at(step, monkeypatch, spoil):
    """Calls `spoil(model)` at the first micro-batch of a step."""
    plain, calls = loop.losses, []

    def spoiled(model, batch):
        calls.append(None)
        if len(calls) == 2 * (step - 1) + 1:
            spoil(model)
        return plain(model, batch)

    monkeypatch.setattr(loop, "losses", spoiled)


@torch.no_grad()
def infinite_head(model):
    model.lm_head.weight[5] = float("inf")


@torch.no_grad()
def broken_router(model):
    next(m for m in model.modules() if isinstance(m, Router)).weight.fill_(float("nan"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(infinite_head, "step 4: loss is (nan|inf)"), (broken_router, "router scores of token 0")],
)
def test_a_loss_that_is_not_finite_stops_before_it_is_saved(
    corpus, tmp_path, monkeypatch, spoil, message
):
    break_at(4, monkeypatch, spoil)
    with pytest.raises(UserError, match=message) as caught:
        pretrain(tiny_run(corpus), tmp_path)
    assert f"{tmp_path} can go on after step 3" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert max(path.name for path in (tmp_path / "steps").iterdir()) == "step_00000003"
    monkeypatch.undo()
    pretrain(tiny_run(corpus), tmp_path)
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path) if "loss" in row)


def test_a_run_that_does_not_fit_is_one_line(corpus, tmp_path):
    run = tiny_run(corpus)
    with pytest.raises(UserError, match="no complete step folder to resume from"):
        pretrain(run, tmp_path, resume="must")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="can't be made"):
        pretrain(run, blocked / "run")
    with pytest.raises(UserError, match="no file or folder"):
        pretrain(tiny_run(tmp_path / "absent"), tmp_path / "run")
    with pytest.raises(UserError, match="device: auto, cpu or cuda, got 'tpu9'"):
        pretrain(replace(run, device="tpu9"), tmp_path / "run")
