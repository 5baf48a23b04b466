"""Pretraining: one flat loop over optimizer steps. Read this file first.

    k3 train nano            one rank
    torchrun --nproc-per-node 4 -m k3 train mini      four ranks

A run folder holds `run.json` (what was asked for), `metrics.jsonl` (a row per step),
`samples.jsonl`, `steps/` (folders to go on from), and at the end `hf/` (released layout),
`report.html` and `summary.json`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from k3 import UserError
from k3.optim.qk_clip import qk_clip_
from k3.optim.schedule import lr_at
from k3.parallel.data_parallel import sum_gradients
from k3.parallel.mesh import open_mesh
from k3.train.config import RunConfig
from k3.train.curriculum import stage_at, stage_ends, tokens_until
from k3.train.evaluate import evaluate, samples
from k3.train.interrupt import Stop, signals
from k3.train.loss import StepSums, count_targets, losses, per_token
from k3.train.metrics import memory_mb
from k3.train.parts import build, save
from k3.train.run_folder import finish, open_run

GO_ON, SAVE = 0, 1
"""What a rank may want after a step; a number above is the signal to stop for."""


def pretrain(run: RunConfig, out: Path | str, resume: str = "auto") -> dict[str, Any]:
    """Trains `run` in folder `out` and returns its summary.

    resume: auto goes on where `out` has a step folder; must refuses without one; never refuses with
    one. SIGINT and SIGTERM save and exit with 130 and 143. UserError, one line, for what the user
    can mend.
    """
    with open_mesh(run.device) as mesh, open_run(run, Path(out), mesh, resume) as log:
        parts = build(run, mesh, log.display)
        model, optimizer, balancer, loader = parts
        done = log.begin(parts)
        facts = model.param_facts()
        params = [param for param in model.parameters() if param.requires_grad]
        saved_at = time.monotonic()

        with signals(log.display.say) as stop:
            for step in range(done + 1, run.steps + 1):
                # Data: this rank's share of the step.
                began = time.perf_counter()
                stage = stage_at(run.stages, run.steps, step)
                context = run.stages[stage].context
                share = range(run.micro_batches // mesh.world)
                batches = [loader.next(context, mesh.rank, mesh.world) for _ in share]
                counts = count_targets(batches, mesh)

                # Forward and backward over micro-batches.
                sums = StepSums()
                for batch in batches:
                    part = losses(model, batch.to(mesh.device))
                    per_token(part, counts, run.model.mtp_loss_weight).backward()
                    sums.add(part)
                    balancer.add(*part.stats)

                # All-reduce, clip, and refuse what is not finite before it reaches a weight.
                sum_gradients(params, mesh)
                sums.reduce(mesh)
                norm = torch.nn.utils.clip_grad_norm_(params, run.optim.grad_clip or torch.inf)
                row = sums.row(counts) | {"grad_norm": float(norm)}
                refuse_not_finite(row, step, log.what_is_safe())

                # Optimizer, balance, QK-clip.
                rate = lr_at(step - 1, run.steps, run.schedule)
                optimizer.set_lr(rate)
                optimizer.step()
                optimizer.zero_grad()
                load = balancer.step(mesh.sum_ if mesh.world > 1 else None, mesh.gather_rows)
                if run.optim.qk_clip and sums.max_logit_LH is not None:
                    qk_clip_(model.named_parameters(), facts, sums.max_logit_LH, run.optim.qk_clip)

                # Metrics.
                place = {"step": step, "tokens": tokens_until(run, step), "stage": stage}
                speed = run.step_tokens(context) / (time.perf_counter() - began)
                row |= {"context": context, "lr": run.optim.lr * rate, "tokens_per_s": speed}
                row |= {"memory_mb": memory_mb(mesh.device), **(load.row() if load else {})}
                log.step(place | row)

                # Look: held-out loss, samples.
                last = step == run.steps
                if last or _turn(step, run.eval_every):
                    limit = 0 if last else run.eval_tokens
                    log.evaluated(place | evaluate(model, loader, context, mesh, limit))
                if mesh.is_main and run.sample_every and (last or _turn(step, run.sample_every)):
                    log.samples(samples(model, loader, run, step))

                # Save, stop.
                wish = mesh.largest(_wish(run, step, time.monotonic() - saved_at, stop))
                if wish != GO_ON:
                    save(run, log.out, step, parts, mesh)
                    log.saved_step, saved_at = step, time.monotonic()
                if wish > SAVE and not last:
                    log.stopped(step)
                    raise SystemExit(128 + wish)
        return finish(run, parts, log)


def _turn(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _wish(run: RunConfig, step: int, since_save_s: float, stop: Stop) -> int:
    """What this rank wants after step `step`; the ranks follow the strongest wish among them."""
    if stop.signal is not None:
        return stop.signal
    stage_ended = run.save_at_stages and step in stage_ends(run.stages, run.steps)
    due = since_save_s >= run.save_every_s
    return SAVE if due or stage_ended or step == run.steps else GO_ON


def refuse_not_finite(row: dict[str, Any], step: int, safe: str) -> None:
    """UserError before a loss or gradient that is not finite can reach a weight."""
    for name in ("loss", "mtp_loss", "grad_norm"):
        value = row[name]
        if value is not None and not abs(value) < float("inf"):
            raise UserError(f"step {step}: {name} is {value}; try a lower optim.lr; {safe}")
