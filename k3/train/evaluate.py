"""Held-out bits per byte, and samples: what is looked at, without a trace left in the training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from k3.data.batch import IGNORE
from k3.data.loader import Loader
from k3.model.generate import generate
from k3.model.transformer import K3
from k3.ops.cross_entropy import linear_cross_entropy
from k3.parallel.mesh import Mesh
from k3.text.control import EOS
from k3.train.config import RunConfig


@contextmanager
def looking(model: K3) -> Iterator[None]:
    """Evaluation mode, no gradients, and the mode from before afterwards."""
    was_training, _ = model.training, model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def evaluate(
    model: K3, loader: Loader, context: int, mesh: Mesh, max_tokens: int = 0
) -> dict[str, Any]:
    """Mean loss and bits per byte on the held-out documents, in spans of `context`; ranks share the
    work.

    `max_tokens` takes evenly spaced batches, about that many tokens in all (0 takes all): the
    first ones alone would be a few documents. The end of a document costs bits and has no bytes.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    batches = list(loader.validation(context))
    total = sum(batch.num_tokens for batch, _ in batches)
    stride = -(-total // max_tokens) if max_tokens else 1
    with looking(model):
        for batch, size in batches[::stride][mesh.rank :: mesh.world]:
            here = batch.to(mesh.device)
            h_TD = model.head_input(model(here.ids_T, here.spans).h_TD)
            loss = linear_cross_entropy(h_TD, model.lm_head.weight, here.targets_T)
            sums += torch.stack([loss.double(), *_counts(batch.targets_T, size, sums)])
    nats, tokens, size = mesh.sum_(sums).tolist()
    return {
        "eval_bpb": nats / math.log(2) / max(1.0, size),
        "eval_loss": nats / max(1.0, tokens),
        "eval_tokens": int(tokens),
        "eval_bytes": int(size),
    }


def _counts(targets_T: torch.Tensor, size: int, like: torch.Tensor) -> list[torch.Tensor]:
    return [like.new_tensor(float((targets_T != IGNORE).sum())), like.new_tensor(float(size))]


def samples(model: K3, loader: Loader, run: RunConfig, step: int) -> list[dict[str, Any]]:
    """Continuations of the run's prompts; the same seed at every step, so that they can be
    compared.
    """
    tokenizer = loader.tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in run.sample_prompts]
    if not prompts or not run.sample_tokens:
        return []
    with looking(model):
        continued = generate(
            model,
            prompts,
            max_new_tokens=run.sample_tokens,
            temperature=run.sample_temperature,
            seed=run.seed,
            stop_ids=[tokenizer.encode_control(EOS)],
        )
    return [
        {"step": step, "prompt": prompt, "text": tokenizer.decode(ids)}
        for prompt, ids in zip(run.sample_prompts, continued, strict=True)
    ]
