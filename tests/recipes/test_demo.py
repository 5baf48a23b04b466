"""The demo's own logic, with a trainer that only writes what a training would leave."""

import json
import sys
from pathlib import Path

import pytest

from k3 import UserError
from k3.recipes import demo as module
from k3.recipes.demo import Plan, demo

TRAINER = """
import json, os, sys, time
from pathlib import Path
words = sys.argv[1:]
out = Path(words[words.index("--out") + 1])
steps = int(words[words.index("--steps") + 1])
plain = "--arm" in words
(out / "steps").mkdir(parents=True, exist_ok=True)
whole = [int(p.parent.name[5:]) for p in (out / "steps").glob("step_*/COMPLETE")]
start = max(whole, default=0)
path = out / "metrics.jsonl"
kept = [l for l in (path.read_text().splitlines() if path.exists() else []) if l.endswith("}")]
kept = [l for l in kept if json.loads(l)["step"] <= start]
path.write_text("".join(l + "\\n" for l in kept))
(out / "run.json").write_text("{}")
with open(path, "a") as file:
    for step in range(start + 1, steps + 1):
        loss = 5 / step + (DRIFT if start else 0)
        row = dict(step=step, tokens=step * 100, loss=loss, tokens_per_s=1000.0)
        file.write(json.dumps(row) + "\\n"); file.flush()
        if step % 4 == 0 and step < 16:
            folder = out / "steps" / f"step_{step:08}"
            folder.mkdir(); (folder / "COMPLETE").write_text("")
        if not plain and not start:
            time.sleep(0.05)
    file.write(json.dumps(dict(step=steps, eval_bpb=2.0)) + "\\n")
summary = dict(eval_bpb=2.2 if plain else 2.0, eval_bytes=1000, params=10, active_params=5,
               tokens=steps * 100, tokens_per_s=1000.0, idle_share=None if plain else 0.0,
               load_max_over_mean=None if plain else 1.2, baselines={"gzip -9": 2.1})
(out / "summary.json").write_text(json.dumps(summary))
sys.exit(CODE)
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def install(drift: float = 0.0, code: int = 0) -> None:
        path = tmp_path / "trainer.py"
        path.write_text(TRAINER.replace("DRIFT", repr(drift)).replace("CODE", repr(code)))
        monkeypatch.setattr(module, "K3", (sys.executable, str(path)))
        monkeypatch.setattr(module, "_measured", lambda say: {"nano": 0.5, "plain": 0.3})

    install()
    return install


def run(out: Path, steps: int | None = 60, fresh: bool = False) -> tuple[dict, str]:
    said: list[str] = []
    summary = demo(out, minutes=1.0, steps=steps, fresh=fresh, say=said.append)
    return summary, "\n".join(said)


def test_killed_resumed_compared_and_reported(tmp_path: Path, trainer):
    out = tmp_path / "demo"
    summary, text = run(out)
    found = summary["demo"]
    assert found["resume"]["steps_done_twice"] >= module.REPEATED
    assert found["resume"]["largest_loss_difference"] == 0.0
    assert found["bpb_over_plain"] == pytest.approx(2.0 / 2.2)
    assert "kill -9" in text and "equal to the last bit" in text
    assert text.index("nano (K3)") < text.index("gzip -9", text.index("nano (K3)"))
    for path in (f"{out}/report.html", f"{out}/hf", f"{out}/summary.json"):
        assert path in text
    assert "plain" in (out / "report.html").read_text()
    assert json.loads((out / "summary.json").read_text()) == summary


def test_a_resume_that_differs_is_said(tmp_path: Path, trainer):
    trainer(drift=0.125)
    summary, text = run(tmp_path / "demo")
    assert summary["demo"]["resume"]["largest_loss_difference"] == pytest.approx(0.125)
    assert "equal to the last bit" not in text and "at most 1.2e-01 apart" in text


def test_a_finished_demo_is_shown_and_not_made_again(tmp_path: Path, trainer):
    first, _ = run(tmp_path / "demo")
    trainer(code=1)
    again, text = run(tmp_path / "demo")
    assert again == first and "--fresh" in text
    with pytest.raises(SystemExit):
        run(tmp_path / "demo", fresh=True)


def test_an_unfinished_demo_goes_on_with_its_own_plan(tmp_path: Path, trainer):
    out = tmp_path / "demo"
    trainer(code=3)
    with pytest.raises(SystemExit) as stop:
        run(out)
    assert stop.value.code == 3
    trainer()
    summary, text = run(out, steps=999)
    assert "going on" in text and summary["tokens"] == 6000


def test_time_decides_the_steps(tmp_path: Path, trainer):
    summary, _ = run(tmp_path / "demo", steps=None)
    steps = int(60 * module.TRAINING_SHARE / 0.5) - module.LOOKING_STEPS
    assert summary["tokens"] == 100 * steps > 0
    assert module.steps_for(1.0, {"nano": 60.0, "plain": 60.0}) == 2 * module.LOOKS


def test_a_training_over_too_soon_is_said(tmp_path: Path, trainer):
    summary, text = run(tmp_path / "demo", steps=4)
    assert "before it could be killed" in text
    assert summary["demo"]["resume"] == {"steps_done_twice": 0, "largest_loss_difference": None}


def test_another_folder_is_left_alone(tmp_path: Path, trainer):
    (tmp_path / "thesis.txt").write_text("x")
    for fresh in (False, True):
        with pytest.raises(UserError, match="not a demo"):
            run(tmp_path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".txt"] == ["thesis.txt"]


def test_a_plain_run_that_fails_ends_the_demo(tmp_path: Path, trainer):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "demo.json").write_text('{"steps": 20, "minutes": 1.0}')
    path = Path(module.K3[1])
    path.write_text(path.read_text().replace("sys.exit(0)", "print('bad'); sys.exit(5 * plain)"))
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "demo")
    assert stop.value.code == 5
    assert "bad" in (tmp_path / "demo" / "plain.log").read_text()


def test_its_commands_are_commands(tmp_path: Path):
    from k3.recipes.overrides import override
    from k3.recipes.pretrain import recipe

    for arm, arms in (("nano", []), ("plain", ["plain"])):
        words = Plan(100, 5.0).command(arm, tmp_path)
        settings = [word for word in words if "=" in word]
        run = override(recipe("nano", arms), settings)
        assert run.eval_every == 16 and run.save_every_s == 15.0
        assert words[:2] == ["train", "nano"] and ("--arm" in words) == bool(arms)
