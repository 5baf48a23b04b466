"""A pretraining run as one frozen tree: what is trained, on what, how, and how often it is looked
at.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from k3 import UserError
from k3.data.loader import DataConfig
from k3.model.config import K3Config
from k3.optim.muon import OptimConfig
from k3.optim.schedule import ScheduleConfig
from k3.parallel.remat import POLICIES


@dataclass(frozen=True)
class Stage:
    """A stretch of the run at one context length; the model has no positions, so nothing else
    changes.
    """

    context: int
    """Longest span in tokens."""
    share: float
    """Of the run's steps; the shares of all stages sum to one."""


@dataclass(frozen=True)
class RunConfig:
    name: str
    model: K3Config
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    stages: tuple[Stage, ...] = (Stage(256, 0.6), Stage(1024, 0.25), Stage(4096, 0.15))
    """The context curriculum."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    micro_batches: int = 1
    """Packs per optimizer step, over all ranks, of `data.tokens_per_micro_batch` tokens (or of one
    window where that is longer).
    """
    seed: int = 0
    """Of the initial weights."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """Of the activations: float32, bfloat16, or auto (bfloat16 on CUDA, else float32). Weights are
    float32.
    """
    remat: str = "none"
    """none, or layer: recompute each layer's inside in the backward pass."""
    threads: int = 0
    """CPU threads of one rank; 0 leaves torch's own choice."""
    eval_every: int = 100
    """Steps between held-out evaluations, 0 for the end only."""
    eval_tokens: int = 65_536
    """Held-out tokens of each evaluation but the last, which takes all; 0 for all."""
    sample_every: int = 100
    """Steps between samples, 0 for none."""
    sample_prompts: tuple[str, ...] = ("def ", "import ", "class ")
    sample_tokens: int = 64
    sample_temperature: float = 0.7
    save_every_s: float = 300.0
    """Seconds between step folders, 0 for one after every step."""
    save_at_stages: bool = False
    """A step folder also where the context changes."""
    keep: int = 2
    """How many step folders stay."""
    export_dtype: str = "bfloat16"
    """Of the weights in `hf/`: bfloat16, or float32."""
    tensorboard: str = "auto"
    """auto: where it is installed; on; off."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_stages()
        if self.model.vocab_size != self.data.vocab_size:
            raise UserError(
                f"model.vocab_size is {self.model.vocab_size}, "
                f"data.vocab_size is {self.data.vocab_size}: they must agree"
            )

    def _check_numbers(self) -> None:
        for name in ("steps", "micro_batches", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        counts = ("eval_every", "eval_tokens", "sample_every", "sample_tokens", "threads")
        for name in (*counts, "save_every_s", "sample_temperature", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}")

    def _check_names(self) -> None:
        for name, known in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("remat", POLICIES),
            ("export_dtype", ("bfloat16", "float32")),
            ("tensorboard", ("auto", "on", "off")),
        ):
            if getattr(self, name) not in known:
                raise UserError(f"{name}: one of {known}, got {getattr(self, name)!r}")

    def _check_stages(self) -> None:
        total = sum(stage.share for stage in self.stages)
        if not self.stages or abs(total - 1.0) > 1e-6:
            raise UserError(f"stages: shares must sum to 1, got {total:g}")
        for stage in self.stages:
            if stage.share < 0 or stage.context < 1:
                raise UserError(f"stages: context and share must be positive, got {stage}")
            if stage.context > self.model.max_position_embeddings:
                raise UserError(
                    f"stages: context {stage.context} is above "
                    f"model.max_position_embeddings {self.model.max_position_embeddings}"
                )

    def step_tokens(self, context: int) -> int:
        """Tokens of one optimizer step at a context length, over all ranks."""
        return self.micro_batches * self.data.micro_batch_tokens(context)


MAY_CHANGE = {
    "name", "device", "remat", "threads", "eval_every", "eval_tokens", "sample_every",
    "sample_prompts", "sample_tokens", "sample_temperature", "save_every_s", "save_at_stages",
    "keep", "export_dtype", "tensorboard", "data.cache_dir", "data.threads",
}  # fmt: skip
"""Fields that a resumed run may set anew: none of them changes what is learned."""


def to_dict(run: RunConfig) -> dict[str, Any]:
    """The run as plain JSON values."""
    tree: dict[str, Any] = _plain(asdict(run))
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def refuse_changes(saved: dict[str, Any], run: RunConfig, where: str) -> None:
    """UserError naming the first field, with both values, in which `run` may not differ from a
    saved run.
    """
    old, new = (dict(_leaves(tree)) for tree in (saved, to_dict(run)))
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in MAY_CHANGE and old.get(name) != new.get(name):
            raise UserError(
                f"{where}: {name} was {old.get(name)!r}, this run has {new.get(name)!r}"
            )


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values; lists stay whole."""
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((prefix + key, value))
    return leaves
