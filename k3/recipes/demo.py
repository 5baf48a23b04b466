"""Pretraining in minutes: nano and an ordinary transformer, on this machine's Python source.

Every training is a command line of its own, printed before it runs, so that anybody can run it
again. The first is killed on purpose and resumed; the steps that were done twice must agree.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3 import UserError
from k3.report.page import write_page
from k3.report.runs import Run, read_run
from k3.report.tables import render

if TYPE_CHECKING:
    from k3.data.loader import Loader
    from k3.parallel.mesh import Mesh
    from k3.train.config import RunConfig

Say = Callable[[str], None]

ARMS: dict[str, tuple[str, ...]] = {"nano": (), "plain": ("--arm", "plain")}
LOOKS = 6
"""Held-out evaluations and samples of a run."""
CORPUS = "data.max_bytes=12000000"
"""More than minutes of training read on a CPU, and half the time to prepare; what is held out is
the same as in every other nano run.
"""
LOOKING_STEPS = 40
"""What the evaluations and samples of a run cost, in training steps."""
TRAINING_SHARE = 0.9
"""Of the time given; the rest is for starting processes."""
REPEATED = 3
"""Steps that the killed run is let past its last step folder, to be done again after it."""
COMPRESSORS = {"gzip -9": "gzip -9, file by file", "xz -9": "xz -9e, all files as one"}
K3 = (sys.executable, "-m", "k3")
"""What starts a training; the tests put a quicker one in its place."""
NEXT = (
    'k3 generate {out}/hf --prompt "class "',
    "k3 train nano --data FOLDER          your own text",
    "k3 train nano --arm sign-rule        one idea changed; k3 report overlays runs",
    "k3 inspect params kimi-k3            the 2.8T shape",
)


def threads() -> int:
    """Of one arm: half the cores, at most 4."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class Plan:
    """What a demo folder was begun with: kept in it, so that a second call goes on alike."""

    steps: int
    minutes: float

    def command(self, arm: str, out: Path) -> list[str]:
        """The arguments of `k3` that train one arm."""
        every = max(1, self.steps // LOOKS)
        folder = out if arm == "nano" else out / arm
        settings = {
            "eval_every": every,
            "sample_every": every,
            # Both arms run at once, each on its half: nano's operations are too small to share.
            "threads": threads(),
            # Often enough that the run can be killed early on.
            "save_every_s": round(self.minutes * 3, 1),
            # Rounded to bfloat16, two engines part at the first near tie of a greedy continuation.
            "export_dtype": "float32",
        }
        flags = ["--set", CORPUS]
        flags += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        words = ["train", "nano", *ARMS[arm], "--steps", str(self.steps), *flags]
        return [*words, "--out", str(folder)]


def demo(
    out: Path, *, minutes: float, steps: int | None, fresh: bool, say: Say = print
) -> dict[str, Any]:
    """Runs the whole demonstration in `out` and returns its summary.

    `minutes` is for the training of both arms; `steps` fixes the length instead. Goes on where
    `out` holds an unfinished demo. UserError if `out` holds something else.
    """
    began = time.monotonic()
    if fresh and (out / "demo.json").exists():
        shutil.rmtree(out)
    if (out / "demo.json").exists() and "seconds" in _read(out / "summary.json").get("demo", {}):
        say(f"{out} holds a finished demo; --fresh makes it anew")
        return _show(out, say)
    plan = _plan(out, minutes, steps, say)
    with _beside(plan, out, say):
        agreed = _interrupted(plan, out, say)
    _conclude(out, agreed, time.monotonic() - began)
    return _show(out, say)


def _plan(out: Path, minutes: float, steps: int | None, say: Say) -> Plan:
    """The plan that `out` was begun with, or a new one, said and kept."""
    kept = _read(out / "demo.json")
    if kept:
        say(f"{out} holds an unfinished demo: going on")
        return Plan(kept["steps"], kept["minutes"])
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: holds something that is not a demo; give another --out")
    say(
        "This will, in about "
        + (f"{minutes + 2:.0f} minutes" if steps is None else "a while")
        + ":"
    )
    for line in (
        "take the Python source of the installed packages, hold some files out, train a tokenizer;",
        "train nano, the smallest K3, kill it on purpose, and resume it;",
        "beside it, train an ordinary transformer of equal active parameters on the same tokens;",
        f"compare both with gzip and xz, sample, and write {out}/report.html.",
    ):
        say(f"  - {line}")
    per_step = _measured(say)
    if steps is None:
        steps = steps_for(minutes, per_step)
    expected = (steps + LOOKING_STEPS) * max(per_step.values()) / 60
    say(f"{steps} steps each, both at once, with evaluations about {expected:.1f} minutes")
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json.dumps({"steps": steps, "minutes": minutes}) + "\n")
    return Plan(steps, minutes)


def steps_for(minutes: float, per_step: dict[str, float]) -> int:
    """Steps of the slower arm that fit into `minutes` with its evaluations; at least 12."""
    affordable = minutes * 60 * TRAINING_SHARE / max(per_step.values())
    return max(2 * LOOKS, int(affordable) - LOOKING_STEPS)


def _measured(say: Say) -> dict[str, float]:
    """Seconds per step of each arm while both run, in processes that give their memory back."""
    with ProcessPoolExecutor(len(ARMS), mp_context=get_context("spawn")) as pool:
        pool.submit(prepare).result()
        timings = {arm: pool.submit(measure, arm) for arm in ARMS}
        seconds = {arm: timing.result() for arm, timing in timings.items()}
    say(", ".join(f"{arm} {value:.2f} s a step" for arm, value in seconds.items()))
    return seconds


def prepare() -> None:
    """Reads the corpus, trains the tokenizer, tokenises: all of it stays in the cache."""
    from k3.data.loader import Loader
    from k3.train.progress import Display

    Loader(_run("nano").data, Display(1).preparing)


def measure(arm: str) -> float:
    """Seconds per step of one arm over its context lengths."""
    from k3.data.loader import Loader
    from k3.parallel.mesh import open_mesh

    run = _run(arm)
    with open_mesh(run.device) as mesh:
        return _seconds_per_step(arm, run, Loader(run.data), mesh)


def _run(arm: str) -> RunConfig:
    from k3.recipes.overrides import override
    from k3.recipes.pretrain import recipe

    return override(recipe("nano", list(ARMS[arm][1:])), [CORPUS])


def _seconds_per_step(arm: str, run: RunConfig, loader: Loader, mesh: Mesh) -> float:
    import torch

    from k3.model.transformer import K3 as Network
    from k3.optim.muon import build_optimizer
    from k3.train.loss import losses

    torch.set_num_threads(threads())
    torch.manual_seed(run.seed)
    model = Network(run.model, device=mesh.device, dtype=torch.float32)
    optimizer = build_optimizer(model.named_parameters(), model.param_facts(), run.optim)
    total, first = 0.0, True
    # The shortest context twice: the first step of a process also pays for its warming up.
    for stage in (run.stages[0], *run.stages):
        began = time.perf_counter()
        batch = loader.next(stage.context).to(mesh.device)
        loss = losses(model, batch).main / max(1, int((batch.targets_T >= 0).sum()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            guess = math.log(run.model.vocab_size)
            print(f"{arm}: first loss {loss.item():.3f} (a blind guess has {guess:.3f})")
            first = False
        else:
            total += stage.share * (time.perf_counter() - began)
    return total * run.micro_batches


def _interrupted(plan: Plan, out: Path, say: Say) -> dict[str, Any]:
    """Trains nano with one kill -9 in between; how well the steps done twice agree."""
    if (out / "resume.json").exists() and (out / "summary.json").exists():
        return _read(out / "resume.json")
    command = plan.command("nano", out)
    if not (out / "killed.json").exists():
        killed = _train_and_kill(command, out, plan.steps // 4, say)
        (out / "killed.json").write_text(json.dumps(killed) + "\n")
    before = {int(step): loss for step, loss in _read(out / "killed.json").items()}
    _train(command, say)
    after = {row["step"]: row["loss"] for row in read_run(out).metrics}
    worst = max((abs(after[step] - loss) for step, loss in before.items()), default=None)
    agreed = {"steps_done_twice": len(before), "largest_loss_difference": worst}
    (out / "resume.json").write_text(json.dumps(agreed) + "\n")
    if before:
        verdict = "equal to the last bit" if worst == 0 else f"at most {worst:.1e} apart"
        say(f"resumed: the losses of the {len(before)} steps done twice are {verdict}")
    return agreed


def _train_and_kill(command: Sequence[str], out: Path, after: int, say: Say) -> dict[int, float]:
    """Kills a training that is past step `after` and REPEATED steps past a step folder.

    Returns the losses of the steps that no folder holds: they will be done again.
    """
    say("$ k3 " + shlex.join(command))
    child = subprocess.Popen([*K3, *command])
    lost: dict[int, float] = {}
    try:
        while child.poll() is None:
            lost = _unsaved(out)
            if len(lost) >= REPEATED and max(lost) > after:
                child.send_signal(signal.SIGKILL)
                child.wait()
                # A step may have been written between the look and the kill.
                lost = _unsaved(out)
                say(
                    f"killed on purpose (kill -9) at step {max(lost)}; the last whole step folder "
                    f"is that of step {min(lost) - 1}"
                )
                return lost
            time.sleep(0.2)
    except KeyboardInterrupt:
        child.wait()
        raise
    _check(child.returncode)
    say("the training was over before it could be killed")
    return {}


def _unsaved(out: Path) -> dict[int, float]:
    """Losses of the steps after the last whole step folder; empty while there is none."""
    whole = [int(path.parent.name[5:]) for path in (out / "steps").glob("step_*/COMPLETE")]
    if not whole:
        return {}
    return {step: loss for step, loss in _losses(out / "metrics.jsonl") if step > max(whole)}


def _losses(path: Path) -> Iterator[tuple[int, float]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            return  # torn by the kill
        if "loss" in row:
            yield row["step"], row["loss"]


def _train(command: Sequence[str], say: Say) -> None:
    say("$ k3 " + shlex.join(command))
    _wait(subprocess.Popen([*K3, *command]))


def _wait(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait()
    except KeyboardInterrupt:
        child.wait()  # it saves first
        raise
    _check(child.returncode)


@contextmanager
def _beside(plan: Plan, out: Path, say: Say) -> Iterator[None]:
    """Trains the plain transformer meanwhile, its lines in a log, and waits for it at the end."""
    if (out / "plain" / "summary.json").exists():
        yield
        return
    log = out / "plain.log"
    command = plan.command("plain", out)
    say(f"$ k3 {shlex.join(command)} > {log} 2>&1 &")
    with open(log, "ab") as file:
        child = subprocess.Popen([*K3, *command], stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
        if child.poll() is None:
            say("nano is done; waiting for the plain transformer")
        child.wait()
    except BaseException:
        # After Ctrl-C it is saving already; after any other end it is told to.
        child.terminate()
        child.wait()
        raise
    if child.returncode:
        say(log.read_text().strip().rpartition("\n")[2])
    _check(child.returncode)


def _check(code: int) -> None:
    """A training that failed has said why: the demo ends with its exit code."""
    if code:
        raise SystemExit(code)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _conclude(out: Path, agreed: dict[str, Any], seconds: float) -> None:
    """Adds the comparison to nano's summary and writes the page with both arms."""
    summary, plain = _read(out / "summary.json"), _read(out / "plain" / "summary.json")
    summary["demo"] = {
        "plain": {key: plain.get(key) for key in ("eval_bpb", "params", "active_params", "tokens")},
        "bpb_over_plain": summary["eval_bpb"] / plain["eval_bpb"],
        "tokens_per_s_over_plain": summary["tokens_per_s"] / plain["tokens_per_s"],
        "resume": agreed,
        "seconds": seconds,
    }
    beside = out / ".summary.json.new"
    beside.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(beside, out / "summary.json")
    write_page([out, out / "plain"], out / "report.html", names=("nano", "plain"))


def _show(out: Path, say: Say) -> dict[str, Any]:
    nano, plain = read_run(out), read_run(out / "plain")
    say("")
    say(render(_rows(nano, plain), head=("", "bits per byte", "parameters", "active", "tokens/s")))
    say("")
    summary = nano.summary
    agreed = summary["demo"]["resume"]
    say(f"held out: {summary['eval_bytes']:,} bytes; trained on {summary['tokens']:,} tokens")
    busiest = f"{summary['load_max_over_mean']:.2f} times the mean"
    say(f"experts: {summary['idle_share']:.1%} idle, the busiest has {busiest}")
    if twice := agreed["steps_done_twice"]:
        worst = f"{agreed['largest_loss_difference']:g}"
        say(f"kill -9 and resume: {twice} steps done twice, largest difference of a loss {worst}")
    say(f"\nreport      {out}/report.html\ncheckpoint  {out}/hf (released layout)")
    say(f"numbers     {out}/summary.json")
    say("\nnext:\n" + "\n".join("  " + line.format(out=out) for line in NEXT))
    return summary


def _rows(nano: Run, plain: Run) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [
        (name, f"{run.summary['eval_bpb']:.3f}", *(run.summary[key] for key in keys))
        for keys in (("params", "active_params", "tokens_per_s"),)
        for name, run in (("nano (K3)", nano), ("plain transformer", plain))
    ]
    others = nano.summary["baselines"].items()
    rows += [
        (COMPRESSORS.get(name, name), f"{bits:.3f}", None, None, None) for name, bits in others
    ]
    return sorted(rows, key=lambda row: float(row[1]))
