"""A run's checks, and which changes a resumed run may not make."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import tiny_model, tiny_run

from k3 import UserError
from k3.train.config import Stage, refuse_changes, to_dict
from k3.train.curriculum import tokens_until

RUN = tiny_run(Path("corpus"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"eval_every": -1}, "eval_every must not be negative, got -1"),
        ({"dtype": "fp8"}, "dtype: one of ('auto', 'float32', 'bfloat16'), got 'fp8'"),
        ({"remat": "all"}, "got 'all'"),
        ({"stages": (Stage(32, 0.5),)}, "stages: shares must sum to 1, got 0.5"),
        ({"stages": ()}, "stages: shares must sum to 1, got 0"),
        ({"stages": (Stage(0, 1.0),)}, "context and share must be positive"),
        (
            {"model": tiny_model(max_position_embeddings=48)},
            "context 64 is above model.max_position_embeddings 48",
        ),
        (
            {"model": tiny_model(vocab_size=1024)},
            "model.vocab_size is 1024, data.vocab_size is 512: they must agree",
        ),
    ],
)
def test_a_bad_run_names_field_and_value(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        replace(RUN, **change)


def saved():
    """What a step folder holds of the configuration."""
    return json.loads(json.dumps(to_dict(RUN)))


def test_the_same_run_and_allowed_changes_pass():
    refuse_changes(saved(), RUN, "here")
    allowed = {"name": "x", "save_every_s": 1.0, "eval_every": 3, "sample_tokens": 1, "threads": 4}
    moved = replace(RUN.data, cache_dir="elsewhere", threads=9)
    refuse_changes(saved(), replace(RUN, **allowed, data=moved), "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 7}, "here: steps was 6, this run has 7"),
        ({"optim": replace(RUN.optim, lr=1.0)}, "here: optim.lr was 0.003, this run has 1.0"),
        ({"optim": replace(RUN.optim, qk_clip=None)}, "optim.qk_clip was 100.0, this run has N"),
        (
            {"model": tiny_model(activation="swiglu")},
            "model.activation was 'situ', this run has 'sw",
        ),
        (
            {"model": replace(tiny_model(), moe=None)},
            "model.moe.num_experts was 8, this run has None",
        ),
        ({"stages": (Stage(64, 1.0),)}, "here: stages was [{'context': 32"),
    ],
)
def test_any_other_change_names_field_and_both_values(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        refuse_changes(saved(), replace(RUN, **change), "here")


def test_a_micro_batch_holds_at_least_one_window_and_tokens_add_up():
    run = replace(RUN, stages=(Stage(32, 0.5), Stage(128, 0.5)), steps=4, micro_batches=2)
    run = replace(run, model=tiny_model(max_position_embeddings=128))
    assert [run.step_tokens(context) for context in (32, 64, 128)] == [128, 128, 256]
    assert [tokens_until(run, step) for step in range(5)] == [0, 128, 256, 512, 768]
