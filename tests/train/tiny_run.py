"""A run of seconds: a corpus of invented code, and a model with every idea of K3 in it."""

import json
from pathlib import Path

from k3.data.loader import DataConfig, SourceConfig
from k3.model.config import K3Config
from k3.model.presets import preset
from k3.train.config import RunConfig, Stage

TIMES = ("tokens_per_s", "memory_mb")
"""What differs between two runs of the same."""


def write_corpus(folder: Path) -> Path:
    """24 files of about 900 bytes that share their grammar and not their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(24):
        lines = [
            f"def function_{number}_{line}(x{line}):\n    return x{line} * {number} + {line}\n"
            for line in range(16)
        ]
        (folder / f"module_{number}.py").write_text("".join(lines))
    return folder


def tiny_model(**changes) -> K3Config:
    small = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 32,
        "attn_layers": ("kda", "mla", "kda", "mla"),
        "kda__head_dim": 16,
        "mla__q_lora_rank": 16,
        "moe__num_experts": 8,
        "moe__top_k": 2,
        "moe__latent_size": 32,
        "moe__bins": 100,
    }
    return preset("nano", **small | changes)


def tiny_run(corpus: Path, **changes) -> RunConfig:
    fields = {
        "name": "tiny",
        "model": tiny_model(),
        "data": DataConfig(
            sources=(SourceConfig(str(corpus), name="corpus"),),
            vocab_size=512,
            tokens_per_micro_batch=64,
            cache_dir=str(corpus.parent / "cache"),
            val_bytes=1000,
        ),
        "stages": (Stage(32, 0.5), Stage(64, 0.5)),
        "steps": 6,
        "micro_batches": 2,
        "device": "cpu",
        "threads": 1,
        "eval_every": 0,
        "sample_every": 0,
        "save_every_s": 0.0,
        "tensorboard": "off",
    }
    return RunConfig(**fields | changes)


def rows(out: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def learned(out: Path) -> list[dict]:
    """The metrics without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows(out)]
