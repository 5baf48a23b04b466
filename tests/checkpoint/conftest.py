"""Fixtures of the checkpoint room: one small model and its folder, saved once and copied."""

import shutil
from pathlib import Path

import pytest
from checkpoint_models import SMALL, made

from k3.checkpoint.released import save_released
from k3.model.transformer import K3


@pytest.fixture(scope="session")
def model() -> K3:
    return made(SMALL)


@pytest.fixture(scope="session")
def saved_once(model: K3, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "hf"
    return save_released(model, place, dtype="float32", shard_bytes=100_000)


@pytest.fixture
def folder(saved_once: Path, tmp_path: Path) -> Path:
    """float32, in several shards; the test's own copy."""
    return Path(shutil.copytree(saved_once, tmp_path / "hf"))
