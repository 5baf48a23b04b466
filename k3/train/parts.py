"""The moving parts of a run: made from its configuration, kept in a step folder, and put back
exactly.

A step folder holds everything that the next step depends on: weights and router biases, optimizer
state, the position in the data, and the random generators. The balancer's own counts are empty
between steps.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k3 import UserError
from k3.checkpoint.steps import latest_step, load_step, save_step
from k3.data.loader import Loader
from k3.model.transformer import K3
from k3.optim.balance import Balancer
from k3.optim.muon import Muon, build_optimizer
from k3.parallel.data_parallel import same_everywhere
from k3.parallel.mesh import Mesh
from k3.parallel.remat import apply_remat
from k3.train.config import RunConfig, refuse_changes, to_dict
from k3.train.progress import Display

STEPS = "steps"


class Parts(NamedTuple):
    model: K3
    optimizer: Muon
    balancer: Balancer
    loader: Loader


def build(run: RunConfig, mesh: Mesh, display: Display) -> Parts:
    """The parts at step 0. UserError where the ranks can't share the work or the data doesn't fit
    the model.
    """
    if run.micro_batches % mesh.world:
        raise UserError(
            f"micro_batches {run.micro_batches} can't be shared evenly by {mesh.world} ranks"
        )
    if run.threads:
        torch.set_num_threads(run.threads)
    loader = _loader(run, mesh, display)
    torch.manual_seed(run.seed)
    model = K3(run.model, device=mesh.device, dtype=torch.float32)
    model.compute_dtype = compute_dtype(run, mesh.device)
    apply_remat(model, run.remat)
    optimizer = build_optimizer(model.named_parameters(), model.param_facts(), run.optim)
    return Parts(model, optimizer, _balancer(run, model), loader)


def _loader(run: RunConfig, mesh: Mesh, display: Display) -> Loader:
    """The first rank fills the cache before the others open it."""
    if not mesh.is_main:
        mesh.barrier()
    loader = Loader(run.data, display.preparing)
    if mesh.is_main:
        mesh.barrier()
    if loader.tokenizer.vocab_size != run.model.vocab_size:
        raise UserError(
            f"the tokenizer has {loader.tokenizer.vocab_size} ids, "
            f"model.vocab_size is {run.model.vocab_size}"
        )
    return loader


def compute_dtype(run: RunConfig, device: torch.device) -> torch.dtype:
    """Dtype of the activations."""
    name = run.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _balancer(run: RunConfig, model: K3) -> Balancer:
    moe = run.model.moe
    if moe is None:
        return Balancer([], "none", 1)
    biases = [router.e_score_correction_bias for router in model.routers()]
    return Balancer(biases, moe.balance, moe.top_k, bins=moe.bins, sign_step=moe.sign_step)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def save(run: RunConfig, out: Path, step: int, parts: Parts, mesh: Mesh) -> None:
    """Keeps everything after step `step`, then forgets all but the last `run.keep` step folders."""
    if mesh.is_main:
        state = {"loader": parts.loader.state_dict(), "rng": _generators(), "world": mesh.world}
        save_step(
            out / STEPS,
            step,
            tensors={name: tensor.detach() for name, tensor in weights(parts.model).items()},
            optimizer=parts.optimizer.state_dict(),
            state=state,
            config=to_dict(run),
            keep=run.keep,
        )
    mesh.barrier()


def restore(run: RunConfig, out: Path, parts: Parts, mesh: Mesh) -> int:
    """Goes to the last complete step folder of `out`; its step, or 0 where there is none.

    UserError where the configuration, the data or a tensor is not the saved one.
    """
    done, folder = 0, latest_step(out / STEPS)
    if folder is not None:
        saved = load_step(folder)
        refuse_changes(saved.config, run, str(folder))
        _restore_weights(parts.model, saved.tensors, folder)
        parts.optimizer.load_state_dict(saved.optimizer)
        parts.loader.load_state_dict(saved.state["loader"])
        _restore_generators(saved.state["rng"])
        done = saved.step
    assert same_everywhere(weights(parts.model).values(), mesh), "ranks hold different weights"
    return done


@torch.no_grad()
def _restore_weights(model: nn.Module, saved: Any, folder: Path) -> None:
    own = weights(model)
    if missing := own.keys() - saved.keys():
        raise UserError(f"{folder}: tensor {min(missing)!r} is missing")
    if extra := saved.keys() - own.keys():
        raise UserError(f"{folder}: tensor {min(extra)!r} is not part of this model")
    for name, tensor in own.items():
        value = saved[name]
        if value.shape != tensor.shape:
            raise UserError(
                f"{folder}: {name!r} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}"
            )
        tensor.copy_(value)


def _generators() -> dict[str, Any]:
    """Python's and torch's random generators; the data and sampling have none, they count."""
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def _restore_generators(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
